//! Endpoints whose ports are nearly all taken, or all; and sockets of the node that take a flow's port.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use dataplane_common::{
    Addr, Port, Protocol, Reason, decide,
    packet::{FlowKey, PacketConfig, Tick, Translation, need},
    seen,
    tables::Endpoint,
};
use dataplane_proof::{
    Verdict,
    campaign::{Scene, plain_config},
    wire::flags,
    world::MANY,
};
use plan::Write;

use crate::crafted::{OUTSIDE, Then, check, ip, on, packet, refusal, vip};

scenarios! {
    Dataplane:
    an_endpoint_without_ports_is_not_drawn,
    one_of_many_endpoints_with_ports_is_found,
    an_endpoint_without_ports_loses_a_flow_if_no_other_can_be_reached,
    a_client_keeps_no_endpoint_that_refused_it,
    a_socket_that_takes_a_flows_port_is_refused,
    half_open_connections_and_greedy_clients_give_ports_up,
}

/// The endpoint of service 13, and one of six of service 1, and its interface.
const SMALL: [&str; 2] = ["10.244.1.12", "fd00:10:244:1::12"];
const AT: &str = "veth-small";

fn protocol(tcp: bool) -> Protocol {
    if tcp { Protocol::TCP } else { Protocol::UDP }
}

/// The owners of the flows that have the ports.
#[derive(Clone, Copy, Debug)]
enum Whose {
    /// Of as many clients as there are ports, and assured.
    Many,
    /// Of one client, and assured.
    One,
    /// Of many clients, none of which has acknowledged anything.
    HalfOpen,
}

impl Whose {
    /// The client of the flow that has a port.
    fn client(self, v4: bool, endpoint: &str, port: u16) -> Addr {
        // From each endpoint's numbers, so that no two flows have one key.
        let numbers: Vec<u8> = endpoint.split('.').filter_map(|n| n.parse().ok()).collect();
        let endpoint = numbers[2] * 100 + numbers[3];
        let [high, low] = match self {
            Self::One => [0, 1],
            Self::Many | Self::HalfOpen => port.to_be_bytes(),
        };
        Addr::from(ip(
            v4,
            &format!("10.{endpoint}.{high}.{low}"),
            &format!("fd00:{endpoint}::{high:x}{low:02x}"),
        ))
    }
}

/// Makes flows to the endpoint of service 13, with all ports of the node's except those that `leaves_out` selects.
fn fill(scene: &Scene, v4: bool, tcp: bool, leaves_out: impl Fn(u16) -> bool) -> Result<()> {
    let left = fill_up(scene, (v4, tcp), (SMALL, 80), Whose::Many, leaves_out)?;
    ensure!(left == 0, "{left} ports were not taken");
    Ok(())
}

/// As [`fill`], to any endpoint. Returns how many ports were not taken, because flows to others have their slots.
fn fill_up(
    scene: &Scene,
    (v4, tcp): (bool, bool),
    ([addr4, addr6], endpoint_port): ([&str; 2], u16),
    whose: Whose,
    leaves_out: impl Fn(u16) -> bool,
) -> Result<u32> {
    let mut left = 0;
    let (ifindex, _) = scene.world.interface(AT);
    let node_addr = scene.world.interfaces[&ifindex].masquerade[usize::from(!v4)];
    // From each endpoint's port, so that no two flows have one key.
    let (to, port) = (vip(v4, "node", 13).0, endpoint_port);
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    let used = Tick::from_ns(u64::try_from(std::time::Duration::from(now).as_nanos())?);
    let assured = match whose {
        Whose::HalfOpen => 0,
        Whose::Many | Whose::One => seen::ASSURED,
    };
    let seen = seen::PACKET | seen::in_replies(seen::PACKET) | assured;
    let is_given = |port: &u16| {
        let config = &scene.world.config;
        !config.avoids(*port, protocol(tcp), need::ALL) && !leaves_out(*port)
    };
    for node_port in (PacketConfig::FIRST_PORT..=u16::MAX).filter(is_given) {
        let key = FlowKey::new(
            whose.client(v4, addr4, node_port),
            Port::new(node_port),
            Addr::from(to),
            Port::new(port),
            protocol(tcp),
        );
        let flow = Translation {
            endpoint: Addr::from(ip(v4, addr4, addr6)),
            endpoint_port: Port::new(endpoint_port),
            node_port: Port::new(node_port),
            used,
            seen,
            node_addr,
        };
        left += u32::from(!scene.rig.conntrack.add(&key, &flow));
    }
    Ok(left)
}

/// A flow of the client's to a node port.
fn key((v4, tcp): (bool, bool), service: u16, from: u16) -> FlowKey {
    let (to, port) = vip(v4, "node", service);
    FlowKey::new(
        Addr::from(ip(v4, OUTSIDE[0], OUTSIDE[1])),
        Port::new(from),
        Addr::from(to),
        Port::new(port),
        protocol(tcp),
    )
}

/// Returns the treatment of a client's first packet: the endpoint and the port, or the reasons of a refusal.
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
    if let Some(flow) = scene.rig.conntrack.get(&key((v4, tcp), service, from)) {
        return Ok(Ok((flow.endpoint, flow.node_port.host())));
    }
    ensure!(output.verdict == Verdict::Drop, "{output:?}");
    Ok(Err(reasons))
}

/// If every port is taken, another endpoint answers, or the flow is refused if there is none; if one port in fifty is
/// left, it is found.
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
            if tcp {
                let told = refused.err().context("it was given a port")?;
                ensure!(told == [Reason::PortsExhausted], "{way:?}: {told:?}");
            } else {
                // Of UDP flows, the one that was idle longest gives up its port.
                refused.map_err(|reasons| anyhow!("{way:?}: refused: {reasons:?}"))?;
            }

            scene.forget()?;
            forget_exhausted();
            let free = |port: u16| port.is_multiple_of(50);
            fill(scene, v4, tcp, free)?;
            for from in 21_001..21_041 {
                let (endpoint, port) = asks(scene, way, 13, from)?
                    .map_err(|reasons| anyhow!("{way:?}: refused: {reasons:?}"))?;
                ensure!(endpoint == small && free(port), "{way:?}: port {port}");
            }
        }
        Ok(())
    })
}

/// Waits until the programs have forgotten which endpoints had no port (`EXHAUSTED`): twice 0.27 s. Until then, they
/// search such an endpoint's ports at one place only, and evict a flow.
fn forget_exhausted() {
    std::thread::sleep(std::time::Duration::from_millis(600));
}

/// If every port of nine in twelve endpoints is taken, each new flow goes to one of the other three endpoints, also if
/// the program draws one of the nine first.
fn one_of_many_endpoints_with_ports_is_found() -> Result<()> {
    const TAKEN: usize = 9;
    on(Scene::with_flows(1 << 20)?, |scene| {
        let way = (true, true);
        // These endpoints are side by side in the pool, so the program tries one full endpoint after the other.
        for addr in &MANY[..TAKEN] {
            fill_up(scene, way, (*addr, 8080), Whose::Many, |_| false)?;
        }
        let mut served = BTreeSet::new();
        for from in 20_000..20_200 {
            let (endpoint, _) =
                asks(scene, way, 16, from)?.map_err(|reasons| anyhow!("{from}: {reasons:?}"))?;
            served.insert(endpoint);
        }
        let others = MANY[TAKEN..].iter();
        let wanted: BTreeSet<Addr> = others
            .map(|[v4, v6]| Addr::from(ip(true, v4, v6)))
            .collect();
        ensure!(served == wanted, "{served:?} served");
        Ok(())
    })
}

/// If the only endpoint that can be reached has no free port, one of its flows is evicted, although another endpoint was
/// tried last. If a third endpoint has a free port, no flow is evicted.
///
/// The packets are the node's own: no endpoint on the node itself can be reached.
fn an_endpoint_without_ports_loses_a_flow_if_no_other_can_be_reached() -> Result<()> {
    let endpoint =
        |[v4, v6]: [&str; 2], port| Endpoint::new(Addr::from(ip(true, v4, v6)), Port::new(port));
    let full = endpoint(SMALL, 80);
    let here = endpoint(["192.168.77.1", "fd77::1"], 9090);
    let free = endpoint(["10.244.1.10", "fd00:10:244:1::10"], 8080);
    Scene::with_flows(1 << 17)?.inside(|scene| {
        scene.world.configure(&mut scene.rig, plain_config())?;
        for other in [here, free] {
            // The places of service 1's endpoints: they are the first in the table.
            let mut endpoints = vec![here; scene.world.pools[&1].endpoints.len()];
            endpoints[0] = full;
            endpoints[1] = other;
            endpoints.sort_by(decide::order);
            scene
                .rig
                .apply(&[Write::Endpoints { base: 0, endpoints }])?;
            scene.forget()?;
            fill(scene, true, false, |_| false)?;
            let of_full = || {
                let flows = scene.rig.conntrack.entries().into_iter();
                flows.filter(|(_, flow)| flow.endpoint == full.addr).count()
            };
            let before = of_full();
            let wanted = if other == free { free } else { full };
            for from in 20_000..20_040 {
                let node = (ip(true, "192.168.77.1", "fd77::1"), from);
                let vip = vip(true, "cluster", 1);
                let first = packet(false, node, vip, 0);
                let (_, reasons) = scene.throw("eth0", true, &first.frame())?;
                let key = FlowKey::new(
                    Addr::from(node.0),
                    Port::new(from),
                    Addr::from(vip.0),
                    Port::new(vip.1),
                    Protocol::UDP,
                );
                let flow = scene.rig.conntrack.get(&key);
                let flow = flow.with_context(|| format!("{from} was refused: {reasons:?}"))?;
                ensure!(flow.endpoint == wanted.addr, "{from}: {:?}", flow.endpoint);
            }
            let after = of_full();
            ensure!(
                other == here || after == before,
                "{before} flows, then {after}"
            );
        }
        Ok(())
    })
}

/// A service with session affinity: an endpoint that has no port for a client is not remembered for it, and the
/// endpoint that has one is.
fn a_client_keeps_no_endpoint_that_refused_it() -> Result<()> {
    on(Scene::with_flows(1 << 18)?, |scene| {
        let way = (true, true);
        let far = (["10.244.2.10", "fd00:10:244:2::10"], 8080);
        for endpoint in [
            (["10.244.1.10", "fd00:10:244:1::10"], 8080),
            (["10.244.1.11", "fd00:10:244:1::11"], 8081),
            far,
        ] {
            fill_up(scene, way, endpoint, Whose::Many, |_| false)?;
        }
        let refused = asks(scene, way, 7, 20_000)?;
        let told = refused.err().context("it was given a port")?;
        ensure!(told == [Reason::PortsExhausted], "{told:?}");
        let kept = scene.rig.affinity().entries()?;
        ensure!(kept.is_empty(), "{kept:?} is remembered");

        let far = Endpoint::new(Addr::from(ip(true, far.0[0], far.0[1])), Port::new(far.1));
        let conntrack = &scene.rig.conntrack;
        let flows = conntrack.entries().into_iter();
        for (key, _) in flows.filter(|(_, flow)| flow.endpoint == far.addr) {
            ensure!(conntrack.remove(&key), "{key:?} was there");
        }
        forget_exhausted();
        for from in 20_001..20_040 {
            let (endpoint, _) =
                asks(scene, way, 7, from)?.map_err(|reasons| anyhow!("{from}: {reasons:?}"))?;
            ensure!(endpoint == far.addr, "{endpoint:?} has no port left");
            let kept = scene.rig.affinity().entries()?;
            let [(_, entry)] = &kept[..] else {
                bail!("{kept:?} is remembered");
            };
            ensure!(entry.endpoint == far, "{entry:?} is remembered");
        }
        Ok(())
    })
}

/// A flood of connections that no client has acknowledged, and one client that has all ports of an endpoint, block no
/// other client, by TCP and by UDP. They do not block the node itself from its endpoint either.
fn half_open_connections_and_greedy_clients_give_ports_up() -> Result<()> {
    on(Scene::with_flows(1 << 17)?, |scene| {
        for way in [(true, true), (true, false), (false, true)] {
            let (v4, tcp) = way;
            for whose in [Whose::HalfOpen, Whose::One] {
                scene.forget()?;
                let taken = fill_up(scene, way, (SMALL, 80), whose, |_| false)?;
                ensure!(taken == 0, "{taken} ports were not taken");
                for from in 20_000..20_200 {
                    asks(scene, way, 13, from)?
                        .map_err(|reasons| anyhow!("{way:?}, {whose:?}: refused: {reasons:?}"))?;
                }
            }
            scene.forget()?;
            fill_up(scene, way, (SMALL, 80), Whose::HalfOpen, |_| false)?;
            let node = ip(v4, "10.244.1.1", "fd00:10:244:1::1");
            let endpoint = (ip(v4, SMALL[0], SMALL[1]), 80);
            for from in 40_000..40_050 {
                let own = packet(tcp, (node, from), endpoint, flags::SYN).frame();
                let what = format!("{way:?}: the node itself from {from}");
                check(scene, &what, (AT, true), &own, &Then::Alone, &[])?;
            }
        }
        Ok(())
    })
}

/// Packets of a socket of the node to an endpoint from a flow's port are refused, and the flow goes on. When the flow
/// is over the port belongs to the socket.
fn a_socket_that_takes_a_flows_port_is_refused() -> Result<()> {
    on(Scene::new()?, |scene| {
        for way in [(true, true), (true, false), (false, true), (false, false)] {
            let (v4, tcp) = way;
            scene.forget()?;
            let (_, port) = asks(scene, way, 13, 20_000)?
                .map_err(|reasons| anyhow!("{way:?}: refused: {reasons:?}"))?;
            let assure = || {
                for (key, mut flow) in scene.rig.conntrack.entries() {
                    flow.seen |= seen::in_replies(seen::PACKET) | seen::ASSURED;
                    ensure!(scene.rig.conntrack.set(&key, &flow));
                }
                Ok(())
            };
            assure()?;
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
