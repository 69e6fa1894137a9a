//! Endpoints whose ports are nearly all taken, or all; and sockets of the node that take a flow's port.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    packet::{FlowKey, PacketConfig, Tick, Translation, seen},
};
use dataplane_proof::{Verdict, campaign::Scene, wire::flags};

use crate::crafted::{OUTSIDE, Then, check, ip, on, packet, refusal, vip};

scenarios! {
    Dataplane:
    an_endpoint_without_ports_is_not_drawn,
    a_socket_that_takes_a_flows_port_is_refused,
}

/// The endpoint of service 13, and one of six of service 1, and where it is.
const SMALL: [&str; 2] = ["10.244.1.12", "fd00:10:244:1::12"];
const AT: &str = "veth-small";

fn protocol(tcp: bool) -> Protocol {
    if tcp { Protocol::TCP } else { Protocol::UDP }
}

/// Flows to the endpoint, by all ports of the node's but those that `leaves_out` says.
fn fill(scene: &Scene, v4: bool, tcp: bool, leaves_out: impl Fn(u16) -> bool) -> Result<()> {
    let (ifindex, _) = scene.world.interface(AT);
    let node_addr = scene.world.interfaces[&ifindex].masquerade[usize::from(!v4)];
    let (to, port) = vip(v4, "node", 13);
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    let used = Tick::from_ns(u64::try_from(std::time::Duration::from(now).as_nanos())?);
    for node_port in (PacketConfig::FIRST_PORT..=u16::MAX).filter(|port| !leaves_out(*port)) {
        let client: IpAddr = ip(v4, "192.0.2.7", "fd02::7");
        let key = FlowKey::new(
            Addr::from(client),
            Port::new(node_port),
            Addr::from(to),
            Port::new(port),
            protocol(tcp),
        );
        let flow = Translation {
            endpoint: Addr::from(ip(v4, SMALL[0], SMALL[1])),
            endpoint_port: Port::new(80),
            node_port: Port::new(node_port),
            used,
            seen: seen::PACKET | seen::in_replies(seen::PACKET),
            node_addr,
        };
        ensure!(
            scene.rig.conntrack.add(&key, &flow),
            "port {node_port} was not taken"
        );
    }
    Ok(())
}

/// What becomes of the first packet of a client's: to which endpoint it goes, by which port, if it goes.
fn asks(
    scene: &Scene,
    (v4, tcp): (bool, bool),
    service: u16,
    from: u16,
) -> Result<Result<(Addr, u16), Vec<Reason>>> {
    let client = (ip(v4, OUTSIDE[0], OUTSIDE[1]), from);
    let to = vip(v4, "node", service);
    let first = packet(tcp, client, to, flags::SYN);
    let (output, reasons) = scene.throw("eth0", false, &first.frame())?;
    let key = FlowKey::new(
        Addr::from(client.0),
        Port::new(client.1),
        Addr::from(to.0),
        Port::new(to.1),
        protocol(tcp),
    );
    if let Some(flow) = scene.rig.conntrack.get(&key) {
        return Ok(Ok((flow.endpoint, flow.node_port.host())));
    }
    ensure!(output.verdict == Verdict::Drop, "{output:?}");
    Ok(Err(reasons))
}

/// With every port taken, another endpoint answers, or the flow is refused if there is none; with one port in fifty left,
/// it is found.
fn an_endpoint_without_ports_is_not_drawn() -> Result<()> {
    on(Scene::with_flows(1 << 17)?, |scene| {
        for way in [(true, true), (true, false), (false, false)] {
            let (v4, tcp) = way;
            let small = Addr::from(ip(v4, SMALL[0], SMALL[1]));
            scene.forget()?;
            fill(scene, v4, tcp, |_| false)?;
            let mut served = 0;
            for from in 20_000..20_060 {
                match asks(scene, way, 1, from)? {
                    Ok((endpoint, _)) => {
                        ensure!(endpoint != small, "{way:?}: it has no port left");
                        served += 1;
                    }
                    // The way to one of the others has no address to masquerade to.
                    Err(reasons) => ensure!(
                        reasons == [Reason::NoNodeAddress],
                        "{way:?}: refused: {reasons:?}"
                    ),
                }
            }
            ensure!(served > 20, "{way:?}: {served} of 60 were served");
            let refused = asks(scene, way, 13, 20_100)?;
            let told = refused.err().context("it was given a port")?;
            ensure!(told == [Reason::PortsExhausted], "{way:?}: {told:?}");

            scene.forget()?;
            let free = |port: u16| port.is_multiple_of(50);
            fill(scene, v4, tcp, free)?;
            for from in 21_001..21_041 {
                let (endpoint, port) = asks(scene, way, 13, from)?
                    .map_err(|reasons| anyhow::anyhow!("{way:?}: refused: {reasons:?}"))?;
                ensure!(endpoint == small && free(port), "{way:?}: port {port}");
            }
        }
        Ok(())
    })
}

/// What a socket of the node sends to an endpoint from a flow's port is refused, and the flow goes on. Once that is over the
/// port is the socket's.
fn a_socket_that_takes_a_flows_port_is_refused() -> Result<()> {
    on(Scene::new()?, |scene| {
        for way in [(true, true), (true, false), (false, true), (false, false)] {
            let (v4, tcp) = way;
            scene.forget()?;
            let (_, port) = asks(scene, way, 13, 20_000)?
                .map_err(|reasons| anyhow::anyhow!("{way:?}: refused: {reasons:?}"))?;
            let node = ip(v4, "10.244.1.1", "fd00:10:244:1::1");
            let endpoint = (ip(v4, SMALL[0], SMALL[1]), 80);
            for (from, taken) in [(port, true), (port + 1, false)] {
                let own = packet(tcp, (node, from), endpoint, flags::SYN);
                let then = if taken {
                    Then::Sent(refusal(scene, AT, &own))
                } else {
                    Then::Alone
                };
                let reasons: &[Reason] = if taken { &[Reason::PortTaken] } else { &[] };
                let what = format!("{way:?}: from {from}");
                check(scene, &what, (AT, true), &own.frame(), &then, reasons)?;
            }
            let answer = packet(tcp, endpoint, (node, port), flags::SYN | flags::ACK);
            let (output, _) = scene.throw(AT, false, &answer.frame())?;
            ensure!(output.verdict == Verdict::Redirect, "{way:?}: {output:?}");
            if tcp {
                let reset = packet(tcp, endpoint, (node, port), flags::RST | flags::ACK);
                scene.throw(AT, false, &reset.frame())?;
            } else {
                for (key, mut flow) in scene.rig.conntrack.entries() {
                    flow.used = Tick::from_number(flow.used.number().wrapping_sub(1000));
                    ensure!(scene.rig.conntrack.set(&key, &flow));
                }
            }
            let own = packet(tcp, (node, port), endpoint, flags::SYN).frame();
            let what = format!("{way:?}: once the flow is over");
            check(scene, &what, (AT, true), &own, &Then::Alone, &[])?;
            let left = scene.rig.conntrack.entries();
            ensure!(left.is_empty(), "{way:?}: {left:?}");
        }
        Ok(())
    })
}
