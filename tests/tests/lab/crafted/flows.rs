//! Flows that begin again, elsewhere, idle, or without room.

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    packet::{FlowKey, Iface, PacketConfig, Tick, Translation},
    seen,
    states::{State, Timeouts},
};
use dataplane_proof::{
    Verdict,
    campaign::{Scene, plain_config},
    wire::{Packet, Part, flags},
};
use kernel::rig::Table;
use nix::time::{ClockId, clock_gettime};

use super::{
    ALL, End, FAR, GATEWAY, NEAR, NODE, OUTSIDE, SMALL, Then, check, ip, packet, passed, scene,
    sent, vip,
};

scenarios! {
    Dataplane:
    a_syn_again_is_of_the_same_flow,
    a_syn_to_no_service_leaves_no_ended_flow,
    nobody_speaks_as_somebody_else,
    pods_in_a_switch_speak_as_the_routes_let_them,
    what_is_forged_says_nothing_of_a_flow,
    who_dials_an_endpoint_itself_hears_from_it,
    whoever_only_listens_keeps_the_flow,
    what_is_pushed_out_is_counted,
    a_program_that_was_preempted_keeps_its_place,
}

/// A client that repeats a SYN reaches the same endpoint.
fn a_syn_again_is_of_the_same_flow() -> Result<()> {
    scene(|scene| {
        for v4 in [true, false] {
            for number in 0..100_u16 {
                scene.forget()?;
                let client = (ip(v4, NEAR[0], NEAR[1]), 20_000 + number);
                let vip = vip(v4, "cluster", 7 - 5 * (number % 2));
                let syn = packet(true, client, vip, flags::SYN);
                let key = FlowKey::new(
                    Addr::from(client.0),
                    Port::new(client.1),
                    Addr::from(vip.0),
                    Port::new(vip.1),
                    Protocol::TCP,
                );
                let flow = || -> Result<_> {
                    let to = scene.rig.conntrack.get(&key).context("no flow")?;
                    Ok((to.endpoint, to.endpoint_port, to.node_addr))
                };
                scene.throw("veth-near", false, &syn.frame())?;
                let first = flow()?;
                for hops in [64, 255, 64] {
                    let again = Packet {
                        hops,
                        ..syn.clone()
                    };
                    let (output, counted) = scene.throw("veth-near", false, &again.frame())?;
                    ensure!(
                        counted.is_empty() && flow()? == first,
                        "{first:?} became {:?}, {counted:?}, {output:?}; {:?}",
                        flow()?,
                        scene.rig.conntrack.entries()
                    );
                }
            }
        }
        Ok(())
    })
}

/// A SYN on a flow whose service has gone: if the connection is live, the SYN goes to the endpoint. Otherwise it
/// belongs to another connection, which is left alone from the first packet on. So is a connection that begins at the
/// endpoint's own port.
fn a_syn_to_no_service_leaves_no_ended_flow() -> Result<()> {
    const BOTH: u8 = 1 | seen::in_replies(1);
    scene(|scene| {
        for v4 in [true, false] {
            let client = (ip(v4, OUTSIDE[0], OUTSIDE[1]), 20_000);
            let gone = (vip(v4, "external", 13).0, 81);
            let [small, host] = [
                (ip(v4, SMALL[0], SMALL[1]), 80),
                (ip(v4, NODE[0], NODE[1]), 9090),
            ];
            let addr = |(addr, port): End| (Addr::from(addr), Port::new(port));
            let ((src, src_port), (dst, dst_port)) = (addr(client), addr(gone));
            let key = FlowKey::new(src, src_port, dst, dst_port, Protocol::TCP);
            let begin = |endpoint: End, seen: u8| -> Result<()> {
                scene.forget()?;
                let to = Translation {
                    endpoint: endpoint.0.into(),
                    endpoint_port: Port::new(endpoint.1),
                    node_port: Port::ANY,
                    used: now()?,
                    seen,
                    node_addr: 0,
                };
                ensure!(scene.rig.conntrack.add(&key, &to), "not added");
                Ok(())
            };
            let is_there = || scene.rig.conntrack.get(&key).is_some();
            let [syn, ack] =
                [flags::SYN, flags::ACK].map(|flags| packet(true, client, gone, flags));
            let uplink = ("eth0", false);
            let onward =
                |packet: &Packet| sent(scene, "eth0", "veth-small", &passed(packet, client, small));
            for (what, seen) in [
                ("closed", BOTH * (seen::PACKET | seen::FIN)),
                ("reset by the client", BOTH | seen::RST),
                ("reset by the endpoint", BOTH | seen::RST | seen::ASSURED),
                ("never answered", seen::PACKET),
            ] {
                begin(small, seen)?;
                check(scene, what, uplink, &syn.frame(), &Then::Alone, &[])?;
                ensure!(!is_there(), "{what}: the flow is there");
                check(scene, what, uplink, &ack.frame(), &Then::Alone, &[])?;
                // The SYN of another host does not count.
                begin(small, seen)?;
                check(
                    scene,
                    what,
                    ("veth-near", false),
                    &syn.frame(),
                    &Then::Alone,
                    &[],
                )?;
                ensure!(is_there(), "{what}: a forged SYN removed the flow");
            }
            for seen in [BOTH, BOTH | seen::FIN] {
                begin(small, seen)?;
                for packet in [&syn, &ack] {
                    check(
                        scene,
                        "it lives",
                        uplink,
                        &packet.frame(),
                        &onward(packet),
                        &[],
                    )?;
                }
                ensure!(is_there(), "a flow that lives is gone");
            }

            // From the endpoint's own port: a pod's, and the host's.
            for (endpoint, at) in [(small, ("veth-small", false)), (host, ("eth0", true))] {
                let [syn, ack] =
                    [flags::SYN, flags::ACK].map(|flags| packet(true, endpoint, client, flags));
                begin(endpoint, BOTH)?;
                check(scene, "it lives", at, &syn.frame(), &Then::Alone, &[])?;
                ensure!(is_there(), "a flow that lives is gone");
                begin(endpoint, BOTH * (seen::PACKET | seen::FIN))?;
                for packet in [syn, ack] {
                    check(
                        scene,
                        "from the endpoint",
                        at,
                        &packet.frame(),
                        &Then::Alone,
                        &[],
                    )?;
                }
                ensure!(!is_there(), "the endpoint's flow is there");
            }
        }
        Ok(())
    })
}

/// A host whose address the routes do not reach by this interface begins no flow, answers none, and changes none: not a
/// pod as another pod, as a host outside, as the node or as a service; and no host outside as the node or as a service.
/// The uplink's `rp_filter` decides about all other packets.
fn nobody_speaks_as_somebody_else() -> Result<()> {
    let mut scene = Scene::new()?;
    for reverse_path in [0, Iface::STRICT, Iface::LOOSE] {
        scene = forged(scene, reverse_path)?;
    }
    Ok(())
}

fn forged(mut scene: Scene, reverse_path: u16) -> Result<Scene> {
    scene.world.reverse_path = reverse_path;
    let config = plain_config();
    scene.inside(|scene| {
        scene.world.configure(&mut scene.rig, config)?;
        scene.rig.forget_ways()?;
        for (v4, tcp) in ALL {
            let vip = vip(v4, "cluster", 13);
            let asks_for_pod = v4 && reverse_path == Iface::STRICT;
            for (at, src, begins) in [
                ("veth-near", ip(v4, NEAR[0], NEAR[1]), true),
                (
                    "veth-near",
                    ip(v4, "10.244.1.11", "fd00:10:244:1::11"),
                    false,
                ),
                (
                    "veth-near",
                    ip(v4, "10.244.1.99", "fd00:10:244:1::99"),
                    false,
                ),
                ("veth-near", ip(v4, "192.168.77.1", "fd77::1"), false),
                ("veth-near", ip(v4, "10.96.0.7", "fd00:96::7"), false),
                ("veth-near", ip(v4, OUTSIDE[0], OUTSIDE[1]), false),
                ("eth0", ip(v4, OUTSIDE[0], OUTSIDE[1]), true),
                ("eth0", ip(v4, "192.168.77.1", "fd77::1"), false),
                ("eth0", ip(v4, "10.96.0.7", "fd00:96::7"), false),
                ("eth0", ip(v4, NEAR[0], NEAR[1]), !asks_for_pod),
                (
                    "eth0",
                    ip(v4, "10.9.0.1", "fd09::1"),
                    !v4 || reverse_path == 0,
                ),
            ] {
                scene.forget()?;
                let first = packet(tcp, (src, 20_000), vip, flags::SYN);
                let (output, reasons) = scene.throw(at, false, &first.frame())?;
                let what = format!("{src} at {at}, {reverse_path}: {output:?}, {reasons:?}");
                let refused = reasons == [Reason::SourceForged] && output.verdict == Verdict::Drop;
                ensure!(refused != begins, "{what}");
                let flows = scene.rig.conntrack.entries().len();
                ensure!(flows == usize::from(begins), "{flows} flows: {what}");
            }
            // A pod that sends with an endpoint's addresses and ports answers nothing.
            scene.forget()?;
            let client = (ip(v4, NEAR[0], NEAR[1]), 20_000);
            scene.throw(
                "veth-near",
                false,
                &packet(tcp, client, vip, flags::SYN).frame(),
            )?;
            let endpoint = (ip(v4, "10.244.1.12", "fd00:10:244:1::12"), 80);
            let answer = packet(tcp, endpoint, client, flags::SYN | flags::ACK).frame();
            let (output, reasons) = scene.throw("veth-near2", false, &answer)?;
            let refused = reasons == [Reason::SourceForged] && output.verdict == Verdict::Drop;
            ensure!(refused, "{output:?}, {reasons:?}");
            let (output, reasons) = scene.throw("veth-small", false, &answer)?;
            ensure!(
                output.verdict == Verdict::Redirect,
                "{output:?}, {reasons:?}"
            );
        }
        Ok(())
    })?;
    Ok(scene)
}

/// The check of a pod's interface that the node's routes do not lead to: one in a segment with the uplink, one of a
/// switch in which the node has no address, and one whose pod routes for others. None of them can send as the node or
/// as a service, and neither of the first two as a pod elsewhere.
fn pods_in_a_switch_speak_as_the_routes_let_them() -> Result<()> {
    let mut scene = Scene::new()?;
    for (asked, segments) in [
        (Iface::STRICT, [0, 0]),
        (Iface::STRICT, [7, 8]),
        (Iface::STRICT, [7, 7]),
        (Iface::LOOSE, [7, 8]),
        (0, [0, 0]),
    ] {
        scene = in_a_switch(scene, asked, segments)?;
    }
    Ok(())
}

fn in_a_switch(mut scene: Scene, asked: u16, segments: [u32; 2]) -> Result<Scene> {
    for interface in scene.world.interfaces.values_mut() {
        let at = ["veth-near", "eth0"]
            .iter()
            .position(|n| *n == interface.name);
        if let Some(at) = at {
            interface.segment = segments[at];
        }
        if at == Some(0) {
            interface.asked = asked;
        }
    }
    let config = plain_config();
    scene.inside(|scene| {
        scene.world.configure(&mut scene.rig, config)?;
        scene.rig.forget_ways()?;
        let as_uplink = asked != Iface::STRICT || segments == [7, 7];
        for (v4, tcp) in ALL {
            let service = vip(v4, "cluster", 13);
            let outside = ip(v4, OUTSIDE[0], OUTSIDE[1]);
            let other_pod = ip(v4, "10.244.1.11", "fd00:10:244:1::11");
            for (src, begins) in [
                (ip(v4, NEAR[0], NEAR[1]), true),
                (outside, as_uplink),
                (other_pod, asked == 0),
                (ip(v4, "192.168.77.1", "fd77::1"), false),
                (ip(v4, "10.96.0.7", "fd00:96::7"), false),
                (ip(v4, "10.9.0.1", "fd09::1"), asked == 0),
            ] {
                scene.forget()?;
                let first = packet(tcp, (src, 20_000), service, flags::SYN);
                let (output, reasons) = scene.throw("veth-near", false, &first.frame())?;
                let what = format!("{src}, {asked}, {segments:?}: {output:?}, {reasons:?}");
                let refused = reasons == [Reason::SourceForged] && output.verdict == Verdict::Drop;
                ensure!(refused != begins, "{what}");
            }
            // It answers in the place of an endpoint outside, or of another pod.
            let far = (ip(v4, FAR[0], FAR[1]), 8080);
            let small = (ip(v4, SMALL[0], SMALL[1]), 80);
            for (endpoint, service, passes) in [
                (far, vip(v4, "cluster", 4), as_uplink),
                (small, service, asked == 0),
            ] {
                scene.forget()?;
                let client = (other_pod, 20_000);
                let first = packet(tcp, client, service, flags::SYN);
                scene.throw("veth-near2", false, &first.frame())?;
                let answer = packet(tcp, endpoint, client, flags::SYN | flags::ACK);
                let (output, reasons) = scene.throw("veth-near", false, &answer.frame())?;
                let forged = reasons == [Reason::SourceForged];
                let what = format!("{endpoint:?}, {asked}, {segments:?}: {output:?}, {reasons:?}");
                ensure!(forged != passes, "{what}");
            }
        }
        Ok(())
    })?;
    Ok(scene)
}

/// A forged source ends no connection, even with the right numbers, and gives no fragments other ports.
fn what_is_forged_says_nothing_of_a_flow() -> Result<()> {
    scene(|scene| {
        for v4 in [true, false] {
            scene.forget()?;
            let client = (ip(v4, NEAR[0], NEAR[1]), 20_000);
            let endpoint = (ip(v4, SMALL[0], SMALL[1]), 80);
            let vip = vip(v4, "cluster", 13);
            let there = |bits, numbers| Packet {
                numbers,
                ..packet(true, client, vip, bits)
            };
            let back = |bits, numbers| Packet {
                numbers,
                ..packet(true, endpoint, client, bits)
            };
            let (syn, ack) = (flags::SYN, flags::ACK);
            for (at, packet) in [
                ("veth-near", there(syn, [1000, 0])),
                ("veth-small", back(syn | ack, [5000, 1001])),
                ("veth-near", there(ack, [1001, 5001])),
            ] {
                scene.throw(at, false, &packet.frame())?;
            }
            let flow = || {
                scene
                    .rig
                    .conntrack
                    .entries()
                    .first()
                    .map(|(_, flow)| flow.seen)
            };
            let before = flow().context("no flow")?;
            for forged in [
                there(flags::RST, [1001, 0]),
                there(flags::FIN | ack, [1001, 5001]),
                back(flags::RST, [5001, 0]),
                back(flags::FIN | ack, [5001, 1001]),
                back(syn | ack, [90_000, 1001]),
            ] {
                let (output, reasons) = scene.throw("veth-near2", false, &forged.frame())?;
                let refused = output.verdict == Verdict::Drop && reasons == [Reason::SourceForged];
                ensure!(refused, "{forged:?}: {output:?}, {reasons:?}");
                let after = flow().context("it is gone")?;
                ensure!(after == before, "{forged:?}: {after:#x}, not {before:#x}");
            }
            let first = Packet {
                identification: 7,
                part: Some(Part {
                    from: 0,
                    to: 8,
                    more: true,
                }),
                ..packet(false, client, vip, 0)
            };
            for (at, src, remembered) in [
                ("veth-near2", client.0, 0),
                ("eth0", ip(v4, "192.168.77.1", "fd77::1"), 0),
                ("veth-near", client.0, 1),
            ] {
                let first = Packet {
                    src,
                    ..first.clone()
                };
                scene.throw(at, false, &first.frame())?;
                let count = scene.rig.fragments.entries()?.len();
                ensure!(count == remembered, "{src} at {at}: {count} are remembered");
            }
        }
        Ok(())
    })
}

/// From the port of a connection through a VIP, its client dials the endpoint itself. While the first one lives, the
/// endpoint sees another port of the client's; when it is over, the client's own, at once.
fn who_dials_an_endpoint_itself_hears_from_it() -> Result<()> {
    scene(|scene| {
        for v4 in [true, false] {
            let client = (ip(v4, NEAR[0], NEAR[1]), 20_000);
            let endpoint = (ip(v4, SMALL[0], SMALL[1]), 80);
            let vip = vip(v4, "cluster", 13);
            let at = ("veth-near", false);
            let direct = packet(true, client, endpoint, flags::SYN);
            let answer = packet(true, endpoint, client, flags::SYN | flags::ACK);
            let passes = |what: &str| -> Result<()> {
                check(scene, what, at, &direct.frame(), &Then::Alone, &[])?;
                let left = scene.rig.conntrack.entries();
                ensure!(left.is_empty(), "{what}: {left:?} is left");
                let from = ("veth-small", false);
                check(scene, what, from, &answer.frame(), &Then::Alone, &[])
            };
            let begin = || -> Result<()> {
                scene.forget()?;
                let syn = packet(true, client, vip, flags::SYN);
                scene.throw("veth-near", false, &syn.frame())?;
                scene.throw("veth-small", false, &answer.frame())?;
                Ok(())
            };
            let end = |by_client: bool, with: u8| -> Result<()> {
                let ended = if by_client {
                    packet(true, client, vip, with | flags::ACK)
                } else {
                    packet(true, endpoint, client, with | flags::ACK)
                };
                let at = if by_client { "veth-near" } else { "veth-small" };
                scene.throw(at, false, &ended.frame())?;
                Ok(())
            };
            // While the other lives, the endpoint sees another port, which distinguishes the answers to both.
            let lives = |what: &str| -> Result<()> {
                let (output, counted) = scene.throw(at.0, false, &direct.frame())?;
                let of = |key: &FlowKey| key.dst == Addr::from(endpoint.0);
                let entries = scene.rig.conntrack.entries();
                let own = entries.iter().find(|(key, _)| of(key));
                let (key, flow) = own.with_context(|| format!("{what}: {output:?}"))?;
                let seen = (client.0, flow.node_port.host());
                ensure!(counted == [Reason::Translated], "{what}: {counted:?}");
                ensure!(seen.1 >= 1024 && seen.1 != client.1, "{what}: {flow:?}");
                let goes = |what: &str, from: &str, given: &Packet, to: &str, ends: [End; 2]| {
                    let then = sent(scene, from, to, &passed(given, ends[0], ends[1]));
                    check(scene, what, (from, false), &given.frame(), &then, &[])
                };
                let (near, small) = ("veth-near", "veth-small");
                let both = [seen, endpoint];
                goes("its SYN again", near, &direct, small, both)?;
                let ack = packet(true, client, endpoint, flags::ACK);
                goes("what follows", near, &ack, small, both)?;
                let own_answer = packet(true, endpoint, seen, flags::SYN | flags::ACK);
                goes("its answer", small, &own_answer, near, [endpoint, client])?;
                let other = packet(true, endpoint, client, flags::ACK);
                goes("the other's", small, &other, near, [vip, client])?;
                ensure!(scene.rig.conntrack.remove(key), "{key:?} was there");
                Ok(())
            };
            scene.forget()?;
            passes("alone")?;
            begin()?;
            lives("beside another")?;
            end(true, flags::FIN)?;
            lives("beside half of another")?;
            end(false, flags::FIN)?;
            passes("after another's FINs")?;
            for by_client in [true, false] {
                begin()?;
                end(by_client, flags::RST)?;
                passes("after another's RST")?;
            }
            begin()?;
            let seconds = Timeouts::DEFAULT.of(State::Established) + 10;
            let old = u64::from(now()?.number().wrapping_sub(u16::try_from(seconds / 4)?));
            ages(&scene.rig.conntrack, Some(Tick::from_ns(old << 32)))?;
            passes("after another that nobody ended")?;
            // After its removal, packets of both directions are unknown.
            begin()?;
            for (key, _) in scene.rig.conntrack.entries() {
                ensure!(scene.rig.conntrack.remove(&key), "{key:?} was there");
            }
            let from = ("veth-small", false);
            let what = "of another that was removed";
            check(scene, what, from, &answer.frame(), &Then::Alone, &[])?;
            let request = packet(true, client, vip, flags::ACK).frame();
            check(scene, what, at, &request, &Then::Alone, &[])?;
            passes("after another that was removed")?;
        }
        Ok(())
    })
}

/// The clock of conntrack, now.
fn now() -> Result<Tick> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    let seconds = u64::try_from(now.tv_sec())?;
    Ok(Tick::from_ns(seconds * 1_000_000_000))
}

/// Returns how many seconds ago each flow was used, and sets another time if there is one.
fn ages(table: &Table, to: Option<Tick>) -> Result<Vec<u32>> {
    let mut ages = Vec::new();
    for (key, mut flow) in table.entries() {
        ages.push(flow.used.age_seconds(now()?));
        if let Some(to) = to {
            flow.used = to;
            ensure!(table.set(&key, &flow), "{key:?} is there no more");
        }
    }
    Ok(ages)
}

/// For UDP a client may listen for minutes without sending, and an endpoint may receive for minutes without answering:
/// the flow lives as long as either of them sends.
fn whoever_only_listens_keeps_the_flow() -> Result<()> {
    scene(|scene| {
        for v4 in [true, false] {
            for (at, client, vip) in [
                // Masqueraded, and not.
                ("eth0", ip(v4, OUTSIDE[0], OUTSIDE[1]), vip(v4, "node", 13)),
                (
                    "veth-near",
                    ip(v4, NEAR[0], NEAR[1]),
                    vip(v4, "cluster", 13),
                ),
            ] {
                scene.forget()?;
                let client = (client, 20_000);
                let asked = packet(false, client, vip, 0).frame();
                scene.throw(at, false, &asked)?;
                let table = &scene.rig.conntrack;
                // Where the endpoint sees it come from.
                let flows = table.entries();
                let (_, flow) = flows.first().context("no flow")?;
                let from = if flow.node_addr == 0 {
                    client
                } else {
                    (ip(v4, GATEWAY[0], GATEWAY[1]), flow.node_port.host())
                };
                let endpoint = (ip(v4, SMALL[0], SMALL[1]), 80);
                let answer = packet(false, endpoint, from, 0).frame();
                for (what, at, frame) in [
                    ("an answer", "veth-small", &answer),
                    ("a request", at, &asked),
                ] {
                    // Neither has sent for almost the whole timeout of an answered flow.
                    let ticks = Timeouts::DEFAULT.of(State::Answered) / 4 - 3;
                    let old = u64::from(now()?.number().wrapping_sub(u16::try_from(ticks)?));
                    ages(table, Some(Tick::from_ns(old << 32)))?;
                    scene.throw(at, false, frame)?;
                    let ages = ages(table, None)?;
                    ensure!(
                        ages.len() == 1 && ages[0] < Timeouts::DEFAULT.of(State::Answered) / 4,
                        "{client:?} to {vip:?}: {what} leaves flows as old as {ages:?} s"
                    );
                }
            }
        }
        Ok(())
    })
}

/// A live flow that is evicted is counted.
fn what_is_pushed_out_is_counted() -> Result<()> {
    const FLOWS: usize = 200;
    let mut scene = Scene::with_flows(32)?;
    scene.inside(|scene| {
        let client = ip(true, NEAR[0], NEAR[1]);
        let vip = vip(true, "cluster", 13);
        let mut pushed_out = 0;
        for port in (20_000..).take(FLOWS) {
            let asked = packet(true, (client, port), vip, flags::SYN);
            let (output, reasons) = scene.throw("veth-near", false, &asked.frame())?;
            ensure!(
                output.verdict == Verdict::Redirect && reasons.contains(&Reason::Translated),
                "{port}: {output:?}, {reasons:?}"
            );
            pushed_out += usize::from(reasons.contains(&Reason::FlowPushedOut));
        }
        let left = scene.rig.conntrack.entries().len();
        ensure!(
            left > 32 && pushed_out == FLOWS - left,
            "{left} are left, {pushed_out} were pushed out"
        );
        Ok(())
    })
}

/// If programs may be preempted, each takes a place of its own and gives it back. If none is left, the packet is
/// dropped, and no place is used twice.
fn a_program_that_was_preempted_keeps_its_place() -> Result<()> {
    const PLACES: u32 = 4;
    Scene::new()?.inside(|scene| {
        let preemptible = PacketConfig {
            flags: plain_config().flags | PacketConfig::PREEMPTIBLE,
            ..plain_config()
        };
        scene.world.configure(&mut scene.rig, preemptible)?;
        let client = (ip(true, OUTSIDE[0], OUTSIDE[1]), 2000);
        let frame = packet(false, client, vip(true, "node", 13), 0).frame();
        for taken in 0..=PLACES {
            scene.forget()?;
            scene.rig.take_scratch(taken)?;
            let before = scene.rig.scratch_taken()?;
            let (output, reasons) = scene.throw("eth0", false, &frame)?;
            let wanted = if taken == PLACES {
                (Verdict::Drop, vec![Reason::Preempted])
            } else {
                (Verdict::Redirect, vec![Reason::Masqueraded])
            };
            ensure!(
                (output.verdict, &reasons) == (wanted.0, &wanted.1),
                "{taken} taken: {:?}, {reasons:?}",
                output.verdict
            );
            let after = scene.rig.scratch_taken()?;
            ensure!(after == before, "{after} are taken, not {before}");
            let (left, _) = scene.throw("eth0", true, &frame)?;
            ensure!(
                (left.verdict == Verdict::Drop) == (taken == PLACES),
                "{taken} taken, leaving: {:?}",
                left.verdict
            );
        }
        // Without preemption the programs do not look.
        scene.world.configure(&mut scene.rig, plain_config())?;
        scene.forget()?;
        let (output, _) = scene.throw("eth0", false, &frame)?;
        ensure!(output.verdict == Verdict::Redirect, "{:?}", output.verdict);
        Ok(())
    })
}
