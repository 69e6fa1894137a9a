//! ICMP errors about flows, and ICMP errors that the programs send.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use dataplane_common::{
    Reason,
    packet::{ErrorLimits, PacketConfig},
};
use dataplane_proof::{
    Verdict,
    campaign::{Scene, plain_config},
    wire::{Packet, Payload, flags, protocol},
};

use super::{
    ALL, End, FAR, OUTSIDE, SENDER, Then, check, ip, packet, payload, scene, sent, vip, way::WAYS,
};

scenarios! {
    Dataplane:
    icmp_errors_speak_of_what_their_receiver_knows,
    refusals_are_told_as_reject_tells_them,
    errors_are_limited,
}

/// The beginning of a packet, as an ICMP error quotes it. The transport checksum stays that of another packet: no
/// router corrects it in a quotation.
fn quotation(packet: &Packet, summed_as: &Packet, length: usize) -> Vec<u8> {
    let header = if packet.src.is_ipv4() { 20 } else { 40 };
    let (mut bytes, other) = (packet.ip(), summed_as.ip());
    let at = header
        + if matches!(packet.payload, Payload::Udp { .. }) {
            6
        } else {
            16
        };
    bytes[at..at + 2].copy_from_slice(&other[at..at + 2]);
    bytes.truncate(header + length);
    bytes
}

fn icmp_errors_speak_of_what_their_receiver_knows() -> Result<()> {
    let v4_kinds: &[[u8; 2]] = &[[3, 0], [3, 1], [3, 3], [3, 4], [11, 0], [11, 1], [12, 0]];
    let v6_kinds: &[[u8; 2]] = &[[1, 0], [1, 3], [1, 4], [2, 0], [3, 0], [3, 1], [4, 1]];
    let error = |kind: [u8; 2], from: IpAddr, to: IpAddr, data: Vec<u8>| {
        let payload = Payload::Icmp {
            kind,
            rest: [0, 0, 5, 0x14],
            data,
        };
        Packet {
            link: [[0; 6], SENDER],
            ..Packet::new(from, to, payload)
        }
    };
    scene(|scene| {
        for way in WAYS {
            for (v4, tcp) in ALL {
                scene.forget()?;
                way.begin(scene, v4, tcp)?;
                let (client, vip, seen, endpoint) = way.ends(v4);
                let router = ip(v4, "10.244.9.9", "fd00:10:244:9::9");
                let kinds = if v4 { v4_kinds } else { v6_kinds };
                let (length, reasons) = (if tcp { 20 } else { 8 }, [Reason::ErrorTranslated]);
                for kind in kinds {
                    // About a request that went on to the endpoint.
                    let there = packet(tcp, seen, endpoint, flags::ACK);
                    let asked = packet(tcp, client, vip, flags::ACK);
                    let what = format!("ICMP {kind:?} about {} {}", way.kind, way.service);
                    // Only the pod is behind a pod's interface.
                    let behind = if way.out.starts_with("veth") {
                        endpoint.0
                    } else {
                        router
                    };
                    for from in [behind, endpoint.0] {
                        let quoted = quotation(&there, &there, length);
                        let arrives = error(*kind, from, seen.0, quoted);
                        let quoted = quotation(&asked, &there, length);
                        let mut leaves = error(*kind, vip.0, client.0, quoted);
                        if way.out.is_empty() {
                            // The host's own, on its way to the client.
                            let at = (way.at, true);
                            leaves.link = [scene.world.interface(way.at).1, SENDER];
                            let then = Then::Up(leaves.frame());
                            check(scene, &what, at, &arrives.frame(), &then, &reasons)?;
                        } else {
                            leaves.hops -= 1;
                            let then = sent(scene, way.out, way.at, &leaves);
                            let at = (way.out, false);
                            check(scene, &what, at, &arrives.frame(), &then, &reasons)?;
                        }
                    }
                    // About an answer that went back to the client.
                    let back = packet(tcp, vip, client, flags::ACK);
                    let said = packet(tcp, endpoint, seen, flags::ACK);
                    let quoted = quotation(&back, &back, length);
                    let arrives = error(*kind, client.0, vip.0, quoted);
                    let quoted = quotation(&said, &back, length);
                    let mut leaves = error(*kind, seen.0, endpoint.0, quoted);
                    leaves.hops -= 1;
                    let then = if way.out.is_empty() {
                        leaves.hops += 1;
                        leaves.link = [scene.world.interface(way.at).1, SENDER];
                        Then::Up(leaves.frame())
                    } else {
                        sent(scene, way.at, way.out, &leaves)
                    };
                    let at = (way.at, false);
                    check(scene, &what, at, &arrives.frame(), &then, &reasons)?;
                }
                // Other messages, and errors about unknown packets, are left to the stack.
                let there = packet(tcp, seen, endpoint, flags::ACK);
                let quoted = quotation(&there, &there, length);
                for kind in [[8, 0], [0, 0], [128, 0], [136, 0], [5, 0]] {
                    let frame = error(kind, router, seen.0, quoted.clone()).frame();
                    check(
                        scene,
                        "no error",
                        (way.at, false),
                        &frame,
                        &Then::Alone,
                        &[],
                    )?;
                }
                let stranger = packet(tcp, (seen.0, 999), endpoint, flags::ACK);
                let quoted = quotation(&stranger, &stranger, length);
                let frame = error(kinds[0], router, seen.0, quoted).frame();
                check(
                    scene,
                    "a stranger's",
                    (way.at, false),
                    &frame,
                    &Then::Alone,
                    &[],
                )?;
                // To another host than the sender of the quoted packet.
                let quoted = quotation(&there, &there, length);
                let other = ip(v4, "10.244.9.10", "fd00:10:244:9::10");
                let frame = error(kinds[0], endpoint.0, other, quoted).frame();
                let at = if way.out.is_empty() {
                    (way.at, true)
                } else {
                    (way.out, false)
                };
                check(scene, "to somebody else", at, &frame, &Then::Alone, &[])?;
                // Less than the ports is quoted.
                for short in 0..4 {
                    let quoted = quotation(&there, &there, short);
                    let frame = error(kinds[0], router, seen.0, quoted).frame();
                    check(
                        scene,
                        "too short",
                        (way.at, false),
                        &frame,
                        &Then::Alone,
                        &[],
                    )?;
                }
            }
        }
        Ok(())
    })
}

fn refusals_are_told_as_reject_tells_them() -> Result<()> {
    scene(|scene| {
        for (v4, tcp) in ALL {
            let client = (ip(v4, OUTSIDE[0], OUTSIDE[1]), 20_000);
            // The error that a packet to an address is answered with, from that address.
            let answered = |asked: &Packet, kind: [u8; 2], mtu: u16| {
                let header = if v4 { 20 } else { 40 };
                let mut data = asked.ip();
                data.truncate(header + if tcp { 20 } else { 8 });
                let [high, low] = mtu.to_be_bytes();
                let rest = [0, 0, high, low];
                let payload = Payload::Icmp { kind, rest, data };
                let packet = Packet {
                    link: [SENDER, scene.world.interface("eth0").1],
                    identification: 0,
                    whole: true,
                    ..Packet::new(asked.dst, asked.src, payload)
                };
                Then::Sent(packet.frame())
            };
            let unreachable = if v4 { [3, 3] } else { [1, 4] };
            let exceeded = if v4 { [11, 0] } else { [3, 0] };
            let too_big = if v4 { [3, 4] } else { [2, 0] };
            let check = |what: &str, asked: &Packet, then: Then, reasons: &[Reason]| {
                scene.forget()?;
                check(scene, what, ("eth0", false), &asked.frame(), &then, reasons)
            };
            for kind in ["cluster", "node", "balancer", "external"] {
                let ask = |n| packet(tcp, client, vip(v4, kind, n), flags::SYN);
                let nobody = ask(6);
                let then = answered(&nobody, unreachable, 0);
                check("no endpoints", &nobody, then, &[Reason::NoEndpoints])?;
                check("no way", &ask(9), Then::Dropped, &[Reason::NoRoute])?;
                let none_here = ask(if kind == "cluster" { 12 } else { 4 });
                check(
                    "none here",
                    &none_here,
                    Then::Dropped,
                    &[Reason::NoLocalEndpoint],
                )?;
                // A hop too far: the client gets an error, from the address that it asked.
                let mut last = ask(13);
                last.hops = 1;
                let then = answered(&last, exceeded, 0);
                let reasons = [Reason::Masqueraded, Reason::TimeExceeded];
                check("the last hop", &last, then, &reasons)?;
                let mut long = ask(13);
                long.payload =
                    payload(tcp, [client.1, vip(v4, kind, 13).1], flags::SYN, &[0; 1400]);
                let then = answered(&long, too_big, 1400);
                check("too long", &long, then, &[Reason::TooBig])?;
            }
            let (address, _) = vip(v4, "cluster", 13);
            let wrong = packet(tcp, client, (address, 81), flags::SYN);
            let then = answered(&wrong, unreachable, 0);
            check("no such port", &wrong, then, &[Reason::PortNotServed])?;
            for kind in ["node", "balancer", "external"] {
                let (address, _) = vip(v4, kind, 13);
                let others = packet(tcp, client, (address, 81), flags::SYN);
                check("others' port", &others, Then::Alone, &[])?;
            }
            // Source ranges.
            let denied = packet(tcp, client, vip(v4, "balancer", 2), flags::SYN);
            check("denied", &denied, Then::Dropped, &[Reason::SourceDenied])?;
            // A packet that cannot be answered is dropped silently.
            let mut odd = packet(tcp, client, vip(v4, "cluster", 6), flags::SYN);
            odd.options = if v4 { vec![1; 8] } else { Vec::new() };
            odd.extensions = vec![(protocol::DESTINATION, [&[1][..], &[0; 14]].concat())];
            check("odd", &odd, Then::Dropped, &[Reason::NoEndpoints])?;
            if !v4 {
                odd.extensions = vec![(protocol::DESTINATION, vec![0; 7])];
                let then = Then::Sent(super::refusal(scene, "eth0", &odd));
                check("a short extension", &odd, then, &[Reason::NoEndpoints])?;
            }
            // Addresses that no host has.
            for text in [
                ["127.0.0.1", "::1"],
                ["0.0.0.0", "::"],
                ["224.0.0.1", "ff02::1"],
            ] {
                let nobody = (ip(v4, text[0], text[1]), 20_000);
                for n in [6, 13] {
                    let from = packet(tcp, nobody, vip(v4, "cluster", n), flags::SYN);
                    check("from nobody", &from, Then::Alone, &[])?;
                }
            }
            // In the middle of a connection that is not known.
            if tcp {
                for bits in [
                    flags::ACK,
                    flags::RST,
                    flags::FIN | flags::ACK,
                    flags::SYN | flags::ACK,
                ] {
                    let middle = packet(tcp, client, vip(v4, "cluster", 13), bits);
                    check("in the middle", &middle, Then::Alone, &[])?;
                }
            }
        }
        Ok(())
    })
}

/// Errors to one address and to all are limited as the agent configures it; errors with an MTU never are.
fn errors_are_limited() -> Result<()> {
    let limits = ErrorLimits {
        kinds: ErrorLimits::UNREACHABLE_V4 | ErrorLimits::UNREACHABLE_V6 | ErrorLimits::EXCEEDED_V6,
        // A day: none comes back while this runs, and the first are there however short the machine has run.
        v4_ms: 86_400_000,
        v6_ms: 86_400_000,
        per_second: 1,
        burst: 50,
        ..ErrorLimits::default()
    };
    Scene::new()?.inside(|scene| {
        let configure = |scene: &mut Scene, errors| {
            let config = PacketConfig {
                errors,
                ..plain_config()
            };
            scene.world.configure(&mut scene.rig, config)
        };
        // How many of so many packets are answered by an error, and how many are counted as not answered.
        let told =
            |scene: &Scene, from: End, to: End, hops: u8, packets: u32| -> Result<(u32, u32)> {
                let mut counts = (0, 0);
                for _ in 0..packets {
                    let mut packet = packet(false, from, to, 0);
                    packet.hops = hops;
                    let (output, reasons) = scene.throw("eth0", false, &packet.frame())?;
                    counts.0 += u32::from(output.verdict == Verdict::Redirect);
                    counts.1 += u32::from(reasons.contains(&Reason::ErrorLimited));
                    ensure!(
                        (output.verdict == Verdict::Drop)
                            == reasons.contains(&Reason::ErrorLimited),
                        "{:?} for {reasons:?}",
                        output.verdict
                    );
                }
                Ok(counts)
            };
        configure(scene, limits)?;
        for v4 in [true, false] {
            let client = (ip(v4, OUTSIDE[0], OUTSIDE[1]), 2000);
            let other = (ip(v4, FAR[0], FAR[1]), 2000);
            let nobody = vip(v4, "cluster", 6);
            let counts = told(scene, client, nobody, 64, 10)?;
            ensure!(counts == (6, 4), "one client: {counts:?}");
            let counts = told(scene, other, nobody, 64, 5)?;
            ensure!(counts == (5, 0), "another client: {counts:?}");
            let counts = told(scene, client, vip(v4, "cluster", 13), 1, 10)?;
            let wanted = if v4 { (10, 0) } else { (0, 10) };
            ensure!(counts == wanted, "time exceeded, IPv4 {v4}: {counts:?}");
            let mut large = packet(false, client, vip(v4, "cluster", 13), 0);
            large.whole = true;
            large.payload = payload(false, [2001, 80], 0, &[7; 1400]);
            for _ in 0..10 {
                let (output, reasons) = scene.throw("eth0", false, &large.frame())?;
                ensure!(
                    output.verdict == Verdict::Redirect && reasons == [Reason::TooBig],
                    "an MTU: {:?}, {reasons:?}",
                    output.verdict
                );
            }
        }
        // The limit for all clients together: an error to one client leaves fewer errors for the others.
        let few = ErrorLimits {
            burst: 3,
            v4_ms: 0,
            ..limits
        };
        configure(scene, few)?;
        let nobody = vip(true, "cluster", 6);
        let clients = (1..=10).map(|n| (IpAddr::from([203, 0, 113, 100 + n]), 2000));
        let mut all = 0;
        for client in clients {
            all += told(scene, client, nobody, 64, 1)?.0;
        }
        // One token comes back each second.
        ensure!((3..10).contains(&all), "all clients: {all}");
        configure(scene, ErrorLimits::default())?;
        let counts = told(scene, (ip(true, OUTSIDE[0], ""), 2000), nobody, 64, 20)?;
        ensure!(counts == (20, 0), "without limits: {counts:?}");
        Ok(())
    })
}
