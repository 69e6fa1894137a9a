//! The translation of packets to services.

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Addr, Port, Protocol, Reason, packet::FlowKey};
use dataplane_proof::{
    Verdict,
    wire::flags,
    world::{EXTERNAL_PORT, NODE_PORT_ELSEWHERE},
};

use super::{
    ALL, GATEWAY, OUTSIDE, SMALL, check, ip, packet, scene, vip,
    way::{WAYS, way},
};

scenarios! {
    Dataplane:
    every_kind_of_service_is_translated_there_and_back,
    affinity_and_hairpins,
    no_answer_goes_to_a_service,
}

fn every_kind_of_service_is_translated_there_and_back() -> Result<()> {
    scene(|scene| {
        for way in WAYS {
            for (v4, tcp) in ALL {
                scene.forget()?;
                way.begin(scene, v4, tcp)?;
                way.answer(scene, v4, tcp, flags::SYN | flags::ACK)?;
                // Later packets belong to the same flow.
                let (client, vip, seen, endpoint) = way.ends(v4);
                for bits in [flags::ACK, flags::ACK | flags::PSH, flags::ACK | flags::FIN] {
                    let request = packet(tcp, client, vip, bits);
                    let then = way.toward_endpoint(scene, &request, seen, endpoint);
                    let what = format!("more of {} {}", way.kind, way.service);
                    check(scene, &what, (way.at, false), &request.frame(), &then, &[])?;
                    way.answer(scene, v4, tcp, bits)?;
                }
            }
        }
        Ok(())
    })
}

fn affinity_and_hairpins() -> Result<()> {
    scene(|scene| {
        for (v4, tcp) in ALL {
            // A pod that is its own endpoint sees the node.
            scene.forget()?;
            let itself = way(
                (13, "cluster"),
                ("veth-small", SMALL),
                ("veth-small", SMALL, 80),
                Some(GATEWAY),
            );
            itself.begin(scene, v4, tcp)?;
            itself.answer(scene, v4, tcp, flags::ACK | flags::SYN)?;
            // A client keeps its endpoint for all of its ports; many clients have different ones.
            scene.forget()?;
            let protocol = if tcp { Protocol::TCP } else { Protocol::UDP };
            let vip = vip(v4, "cluster", 7);
            let mut seen = Vec::new();
            for number in 1..=40_u16 {
                let client = ip(
                    v4,
                    &format!("10.244.1.{}", number + 20),
                    &format!("fd00:10:244:1::a:{number}"),
                );
                let mut endpoints = Vec::new();
                for port in 20_000..20_004 {
                    let asked = packet(tcp, (client, port), vip, flags::SYN);
                    let (output, reasons) = scene.throw("eth0", false, &asked.frame())?;
                    let first = port == 20_000;
                    let reason = if first {
                        Reason::Translated
                    } else {
                        Reason::Kept
                    };
                    ensure!(
                        output.verdict == Verdict::Redirect && reasons == [reason],
                        "{output:?}, {reasons:?}"
                    );
                    let key = FlowKey::new(
                        Addr::from(client),
                        Port::new(port),
                        Addr::from(vip.0),
                        Port::new(vip.1),
                        protocol,
                    );
                    let flow = scene.rig.conntrack.get(&key);
                    let flow = flow.context("the flow was entered")?;
                    endpoints.push(flow.endpoint);
                }
                ensure!(
                    endpoints.iter().all(|e| *e == endpoints[0]),
                    "{endpoints:?}"
                );
                seen.push(endpoints[0]);
            }
            ensure!(
                seen.iter().any(|e| *e != seen[0]),
                "40 clients chose alike: {}",
                seen[0]
            );
        }
        Ok(())
    })
}

/// If an endpoint's socket sends to a service's port, the packet goes to this service before any program sees it. So no
/// client gets such a port, even if it is its own: not a node port, in the default range or in use here, and not one of
/// the node's own address. (TCP's answers are no calls.)
fn no_answer_goes_to_a_service() -> Result<()> {
    scene(|scene| {
        for (v4, tcp) in ALL {
            let usual = vip(v4, "node", 13);
            let pods_side = ip(v4, "10.244.1.1", "fd00:10:244:1::1");
            for (addr, served) in [
                usual,
                (usual.0, NODE_PORT_ELSEWHERE),
                (pods_side, EXTERNAL_PORT),
            ] {
                scene.forget()?;
                let client = (ip(v4, OUTSIDE[0], OUTSIDE[1]), served);
                let first = packet(tcp, client, (addr, served), flags::SYN);
                scene.throw("eth0", false, &first.frame())?;
                let flows = scene.rig.conntrack.entries();
                let mut flows = flows.iter().filter(|(_, to)| to.node_addr != 0);
                let (_, to) = flows.next().context("it was not masqueraded")?;
                let port = to.node_port.host();
                ensure!(
                    (port == served) == tcp,
                    "v4: {v4}, tcp: {tcp}: port {port} of {served}"
                );
            }
        }
        Ok(())
    })
}
