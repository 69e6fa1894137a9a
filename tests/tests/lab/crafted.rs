//! Crafted packets through the packet path's programs, each with the packet that ought to come out,
//! byte by byte: both are put together from their headers, with checksums of their own.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane::kernel::rig::Table;
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    packet::{ErrorLimits, FlowKey, PacketConfig, Tick, timeout},
};
use dataplane_proof::{
    Output, Verdict,
    campaign::{Scene, plain_config},
    wire::{LINK, Packet, Part, Payload, flags, protocol},
    world::{self, EXTERNAL_PORT, NODE_PORT_ELSEWHERE, To},
};
use nix::time::{ClockId, clock_gettime};

scenarios! {
    Dataplane:
    every_kind_of_service_is_translated_there_and_back,
    headers_that_are_rare_are_passed_or_left_alone,
    headers_that_lie_are_left_alone,
    fragments_follow_their_first,
    icmp_errors_speak_of_what_their_receiver_knows,
    refusals_are_told_as_reject_tells_them,
    affinity_and_hairpins,
    a_syn_again_is_of_the_same_flow,
    who_dials_an_endpoint_itself_hears_from_it,
    whoever_only_listens_keeps_the_flow,
    no_answer_goes_to_a_service,
    what_is_pushed_out_is_counted,
    errors_are_limited,
    a_program_that_was_preempted_keeps_its_place,
}

/// What becomes of a packet.
#[derive(Debug)]
pub enum Then {
    /// Left as it was.
    Alone,
    Dropped,
    /// This, sent on or back.
    Sent(Vec<u8>),
    /// The first, sent on; or the second, which leaves the link-layer addresses to the kernel.
    Either(Vec<u8>, Vec<u8>),
    /// This, up the stack.
    Up(Vec<u8>),
}

/// The families and protocols that everything is tried with.
const ALL: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

/// The link-layer address of whoever sends.
const SENDER: [u8; 6] = [2, 8, 8, 8, 8, 8];

pub fn ip(v4: bool, text4: &str, text6: &str) -> IpAddr {
    let text = if v4 { text4 } else { text6 };
    text.parse().expect("an address of this file")
}

/// The addresses of service `n` (see the world's list): what is in front of it, and its port.
pub fn vip(v4: bool, kind: &str, n: u16) -> (IpAddr, u16) {
    match kind {
        "cluster" => (
            ip(v4, &format!("10.96.0.{n}"), &format!("fd00:96::{n}")),
            80,
        ),
        "balancer" => (ip(v4, &format!("203.0.113.{n}"), &format!("fd99::{n}")), 80),
        "external" => (ip(v4, &format!("203.0.114.{n}"), &format!("fd97::{n}")), 80),
        _ => (ip(v4, "192.168.77.1", "fd77::1"), 30000 + n),
    }
}

fn payload(tcp: bool, ports: [u16; 2], tcp_flags: u8, data: &[u8]) -> Payload {
    if tcp {
        Payload::Tcp {
            ports,
            flags: tcp_flags,
            options: vec![2, 4, 5, 0xb4],
            data: data.to_vec(),
        }
    } else {
        Payload::Udp {
            ports,
            summed: true,
            data: data.to_vec(),
        }
    }
}

type End = (IpAddr, u16);

pub fn packet(tcp: bool, from: End, to: End, tcp_flags: u8) -> Packet {
    let payload = payload(tcp, [from.1, to.1], tcp_flags, b"seven b");
    Packet {
        link: [[0; 6], SENDER],
        ..Packet::new(from.0, to.0, payload)
    }
}

/// The same between two others, one hop further.
fn passed(packet: &Packet, from: End, to: End) -> Packet {
    let mut packet = packet.clone();
    (packet.src, packet.dst) = (from.0, to.0);
    match &mut packet.payload {
        Payload::Tcp { ports, .. } | Payload::Udp { ports, .. } => *ports = [from.1, to.1],
        _ => {}
    }
    packet.hops -= 1;
    packet
}

/// What leaves by `out` for a packet that arrived at `at`: with the link-layer addresses of the way
/// if the neighbour's is known; if not, the kernel writes them later, and those that it had stay.
fn sent(scene: &Scene, at: &str, out: &str, packet: &Packet) -> Then {
    let mut packet = packet.clone();
    let (at, mac) = scene.world.interface(at);
    let (src, dst) = (Addr::from(packet.src), Addr::from(packet.dst));
    packet.link = [mac, SENDER];
    let unaddressed = packet.frame();
    let To::Onward(world::Way {
        neighbour: Some(to),
        ifindex,
        ..
    }) = scene.world.way(src, dst, at).0
    else {
        return Then::Sent(unaddressed);
    };
    packet.link = [to, scene.world.interface(out).1];
    if scene.world.interfaces[&ifindex].pod {
        Then::Sent(packet.frame())
    } else {
        Then::Either(packet.frame(), unaddressed)
    }
}

/// What is sent back, by the interface `at`, for a plain packet that is refused.
pub fn refusal(scene: &Scene, at: &str, packet: &Packet) -> Vec<u8> {
    let v4 = packet.src.is_ipv4();
    let mut data = packet.ip();
    let transport = if matches!(packet.payload, Payload::Tcp { .. }) {
        20
    } else {
        8
    };
    data.truncate(transport + if v4 { 20 } else { 40 });
    let (kind, rest) = (if v4 { [3, 3] } else { [1, 4] }, [0; 4]);
    let told = Packet {
        link: [packet.link[1], scene.world.interface(at).1],
        identification: 0,
        whole: true,
        ..Packet::new(packet.dst, packet.src, Payload::Icmp { kind, rest, data })
    };
    told.frame()
}

/// Has a frame arrive (or leave), and wants this to become of it, for these reasons.
pub fn check(
    scene: &Scene,
    what: &str,
    (at, leaves): (&str, bool),
    frame: &[u8],
    then: &Then,
    reasons: &[Reason],
) -> Result<()> {
    let mut input = frame.to_vec();
    input[..6].copy_from_slice(&scene.world.interface(at).1);
    let (output, counted) = scene.throw(at, leaves, &input)?;
    let wanted = match then {
        Then::Alone => Some((Verdict::Next, &input)),
        Then::Dropped => None,
        Then::Either(_, frame) if output.frame.as_ref() == Some(frame) => {
            Some((Verdict::Redirect, frame))
        }
        Then::Sent(frame) | Then::Either(frame, _) => Some((Verdict::Redirect, frame)),
        Then::Up(frame) => Some((Verdict::Next, frame)),
    };
    let Output { verdict, frame, .. } = &output;
    let same = match wanted {
        None => *verdict == Verdict::Drop,
        Some((wanted, bytes)) => *verdict == wanted && frame.as_ref() == Some(bytes),
    };
    ensure!(
        same,
        "{what}:\n{input:02x?}\nbecame {output:02x?}\nnot {then:02x?}\n{counted:?}"
    );
    ensure!(
        counted == reasons,
        "{what}: counted {counted:?}, not {reasons:?}"
    );
    Ok(())
}

fn scene(work: impl FnOnce(&Scene) -> Result<()> + Send) -> Result<()> {
    on(Scene::new()?, work)
}

/// Does something on a scene where the programs are told what they usually are.
pub fn on(mut scene: Scene, work: impl FnOnce(&Scene) -> Result<()> + Send) -> Result<()> {
    scene.inside(|scene| {
        scene.world.configure(&mut scene.rig, plain_config())?;
        work(scene)
    })
}

/// A flow of a client through a service with one endpoint, and how that sees it.
struct Way {
    service: u16,
    kind: &'static str,
    /// The client's interface and address.
    at: &'static str,
    client: [&'static str; 2],
    /// The endpoint's interface (`""`: the host itself), address and port.
    out: &'static str,
    endpoint: ([&'static str; 2], u16),
    /// Which of the node's addresses the endpoint sees, if it does.
    masqueraded: Option<[&'static str; 2]>,
}

pub const OUTSIDE: [&str; 2] = ["192.168.77.201", "fd77::201"];
pub const NEAR: [&str; 2] = ["10.244.1.10", "fd00:10:244:1::10"];
const SMALL: [&str; 2] = ["10.244.1.12", "fd00:10:244:1::12"];
const FAR: [&str; 2] = ["10.244.2.10", "fd00:10:244:2::10"];
const NODE: [&str; 2] = ["192.168.77.1", "fd77::1"];
const GATEWAY: [&str; 2] = ["10.244.1.1", "fd00:10:244:1::1"];

const fn way(
    (service, kind): (u16, &'static str),
    (at, client): (&'static str, [&'static str; 2]),
    (out, endpoint, port): (&'static str, [&'static str; 2], u16),
    masqueraded: Option<[&'static str; 2]>,
) -> Way {
    Way {
        service,
        kind,
        at,
        client,
        out,
        endpoint: (endpoint, port),
        masqueraded,
    }
}

const WAYS: &[Way] = &[
    // A local endpoint that anybody may use, from outside: masqueraded.
    way(
        (13, "node"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    way(
        (13, "balancer"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    way(
        (13, "external"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    way(
        (13, "cluster"),
        ("eth0", OUTSIDE),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    // From a pod, to the cluster IP: not masqueraded; to the others it is.
    way(
        (13, "cluster"),
        ("veth-near", NEAR),
        ("veth-small", SMALL, 80),
        None,
    ),
    way(
        (13, "node"),
        ("veth-near", NEAR),
        ("veth-small", SMALL, 80),
        Some(GATEWAY),
    ),
    // Local policy: from outside the endpoint here, who sees the client; from a pod another one.
    way((4, "node"), ("veth-near", NEAR), ("eth0", FAR, 8080), None),
    way(
        (4, "balancer"),
        ("veth-near", NEAR),
        ("eth0", FAR, 8080),
        None,
    ),
    way(
        (4, "external"),
        ("veth-near", NEAR),
        ("eth0", FAR, 8080),
        None,
    ),
    way(
        (4, "cluster"),
        ("veth-near", NEAR),
        ("eth0", FAR, 8080),
        None,
    ),
    way(
        (4, "cluster"),
        ("eth0", OUTSIDE),
        ("eth0", FAR, 8080),
        Some(NODE),
    ),
    way(
        (2, "node"),
        ("eth0", OUTSIDE),
        ("veth-near", NEAR, 8080),
        None,
    ),
    way(
        (2, "external"),
        ("eth0", OUTSIDE),
        ("veth-near", NEAR, 8080),
        None,
    ),
    // On the host itself: never masqueraded, and up the stack.
    way((8, "node"), ("eth0", OUTSIDE), ("", NODE, 9090), None),
    way((8, "cluster"), ("veth-near", NEAR), ("", NODE, 9090), None),
    way((8, "balancer"), ("eth0", OUTSIDE), ("", NODE, 9090), None),
];

impl Way {
    fn ends(&self, v4: bool) -> (End, End, End, End) {
        let client = (ip(v4, self.client[0], self.client[1]), 20_000);
        let ([a, b], port) = self.endpoint;
        let seen = self.masqueraded.map_or(client.0, |[a, b]| ip(v4, a, b));
        // The client's own port: it is free, and none of the host's.
        let seen = (seen, client.1);
        (
            client,
            vip(v4, self.kind, self.service),
            seen,
            (ip(v4, a, b), port),
        )
    }

    /// Begins the flow.
    fn begin(&self, scene: &Scene, v4: bool, tcp: bool) -> Result<()> {
        let (client, vip, seen, endpoint) = self.ends(v4);
        let what = format!(
            "{} {} from {:?} to {:?}",
            self.kind, self.service, client, endpoint
        );
        let request = packet(tcp, client, vip, flags::SYN);
        let reason = if self.masqueraded.is_some() {
            Reason::Masqueraded
        } else {
            Reason::Translated
        };
        let then = self.toward_endpoint(scene, &request, seen, endpoint);
        check(
            scene,
            &what,
            (self.at, false),
            &request.frame(),
            &then,
            &[reason],
        )
    }

    fn toward_endpoint(&self, scene: &Scene, request: &Packet, seen: End, endpoint: End) -> Then {
        let mut there = passed(request, seen, endpoint);
        if self.out.is_empty() {
            there.hops += 1;
            there.link = [scene.world.interface(self.at).1, SENDER];
            Then::Up(there.frame())
        } else {
            sent(scene, self.at, self.out, &there)
        }
    }

    /// An answer of the endpoint: at its interface, or, of the host's own, at the client's.
    fn answer(&self, scene: &Scene, v4: bool, tcp: bool, tcp_flags: u8) -> Result<()> {
        let (client, vip, seen, endpoint) = self.ends(v4);
        let what = format!(
            "the answer of {:?} of {} {}",
            endpoint, self.kind, self.service
        );
        let answer = packet(tcp, endpoint, seen, tcp_flags);
        let mut back = passed(&answer, vip, client);
        if self.out.is_empty() {
            back.hops += 1;
            back.link = [scene.world.interface(self.at).1, SENDER];
            let then = Then::Up(back.frame());
            return check(scene, &what, (self.at, true), &answer.frame(), &then, &[]);
        }
        let then = sent(scene, self.out, self.at, &back);
        check(scene, &what, (self.out, false), &answer.frame(), &then, &[])
    }
}

fn every_kind_of_service_is_translated_there_and_back() -> Result<()> {
    scene(|scene| {
        for way in WAYS {
            for (v4, tcp) in ALL {
                scene.forget()?;
                way.begin(scene, v4, tcp)?;
                way.answer(scene, v4, tcp, flags::SYN | flags::ACK)?;
                // Whatever comes then is of the same flow.
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

/// The way whose flows the odd packets below are of: masqueraded, to a pod.
const PLAIN: &Way = &WAYS[0];

/// Wants a packet of a new flow to `PLAIN` to be translated as any other.
fn is_passed(scene: &Scene, what: &str, request: &Packet) -> Result<()> {
    let v4 = request.src.is_ipv4();
    scene.forget()?;
    let (_, _, seen, endpoint) = PLAIN.ends(v4);
    let then = PLAIN.toward_endpoint(scene, request, seen, endpoint);
    let at = (PLAIN.at, false);
    check(
        scene,
        what,
        at,
        &request.frame(),
        &then,
        &[Reason::Masqueraded],
    )
}

fn request(v4: bool, tcp: bool) -> Packet {
    let (client, vip, ..) = PLAIN.ends(v4);
    packet(tcp, client, vip, flags::SYN)
}

fn headers_that_are_rare_are_passed_or_left_alone() -> Result<()> {
    use protocol::{DESTINATION, HOP_BY_HOP, ROUTING};
    let extension = |number: u8, words: u8| {
        let mut body = vec![words];
        body.resize(7 + 8 * usize::from(words), 1);
        (number, body)
    };
    scene(|scene| {
        for tcp in [true, false] {
            for words in 1..=10 {
                let mut with_options = request(true, tcp);
                with_options.options = vec![1; 4 * words];
                is_passed(scene, &format!("{words} words of options"), &with_options)?;
            }
            let chains: [&[u8]; 6] = [
                &[HOP_BY_HOP],
                &[ROUTING],
                &[DESTINATION],
                &[HOP_BY_HOP, DESTINATION, ROUTING],
                &[HOP_BY_HOP, DESTINATION, ROUTING, DESTINATION, DESTINATION],
                &[DESTINATION; 6],
            ];
            for chain in chains {
                for words in [0, 3] {
                    let mut extended = request(false, tcp);
                    let all = chain.iter().map(|number| extension(*number, words));
                    extended.extensions = all.collect();
                    is_passed(scene, &format!("{chain:?}"), &extended)?;
                }
            }
            // More than anybody has use for.
            let mut many = request(false, tcp);
            many.extensions = vec![extension(DESTINATION, 0); 7];
            let frame = many.frame();
            check(scene, "seven", ("eth0", false), &frame, &Then::Alone, &[])?;
            // A fragment header of what is no fragment (RFC 6946).
            let mut atomic = request(false, tcp);
            atomic.part = Some(Part {
                from: 0,
                to: usize::MAX,
                more: false,
            });
            is_passed(scene, "an atomic fragment", &atomic)?;
        }
        for v4 in [true, false] {
            for class in [0x10, 0xb8, 0xff] {
                let classed = Packet {
                    class,
                    ..request(v4, true)
                };
                is_passed(scene, "a class", &classed)?;
            }
            let mut unsummed = request(v4, false);
            if let Payload::Udp { summed, .. } = &mut unsummed.payload {
                *summed = false;
            }
            is_passed(scene, "UDP without a checksum", &unsummed)?;
            // Data by which the checksum becomes each value near zero.
            for low in 0..=u16::MAX {
                if low % 251 != 0 && low > 2 && low < 0xfffd {
                    continue;
                }
                let mut summed = request(v4, false);
                if let Payload::Udp { data, .. } = &mut summed.payload {
                    *data = low.to_be_bytes().to_vec();
                }
                is_passed(scene, "every checksum", &summed)?;
            }
            for other in [protocol::ICMP, 132, 47, 50, 51] {
                scene.forget()?;
                let mut packet = request(v4, true);
                packet.payload = Payload::Raw(other, vec![8; 40]);
                let what = format!("protocol {other}");
                check(
                    scene,
                    &what,
                    ("eth0", false),
                    &packet.frame(),
                    &Then::Alone,
                    &[],
                )?;
            }
            // A tag within the packet: it is some VLAN's.
            let mut tagged = request(v4, true).frame();
            tagged.splice(12..12, [0x81, 0, 0, 42]);
            check(scene, "tagged", ("eth0", false), &tagged, &Then::Alone, &[])?;
        }
        Ok(())
    })
}

fn headers_that_lie_are_left_alone() -> Result<()> {
    scene(|scene| {
        let malformed = |what: &str, frame: &[u8]| {
            let then = (&Then::Alone, &[Reason::Malformed][..]);
            check(scene, what, ("eth0", false), frame, then.0, then.1)
        };
        for (v4, tcp) in ALL {
            scene.forget()?;
            let whole = request(v4, tcp).frame();
            let header = if v4 { 20 } else { 40 };
            // Cut short at every byte that a test run takes.
            for length in LINK + header..whole.len() {
                malformed(&format!("cut to {length} bytes"), &whole[..length])?;
            }
            // Cut short honestly: what is left of the transport header does not do.
            let least = if tcp { 20 } else { 8 };
            let at = if v4 { 16 } else { 18 };
            for left in 0..least {
                let mut frame = whole[..LINK + header + left].to_vec();
                let length = if v4 { header + left } else { left };
                frame[at..at + 2].copy_from_slice(&u16::try_from(length)?.to_be_bytes());
                malformed(&format!("{left} bytes of transport"), &frame)?;
            }
            // Lengths of the packet and of its header that cannot be.
            let longest = whole.len() - LINK - if v4 { 0 } else { 40 };
            let lies: Vec<usize> = if v4 {
                (0..28).chain([longest + 1, 0x4000, 0xffff]).collect()
            } else {
                (0..8).chain([longest + 1, 0x4000, 0xffff]).collect()
            };
            for length in lies {
                let mut frame = whole.clone();
                frame[at..at + 2].copy_from_slice(&u16::try_from(length)?.to_be_bytes());
                malformed(&format!("a length of {length}"), &frame)?;
            }
            if v4 {
                for words in (0..5).chain([13, 14, 15]) {
                    let mut frame = whole.clone();
                    frame[LINK] = 0x40 | words;
                    malformed(&format!("a header of {words} words"), &frame)?;
                }
            } else {
                // Extension headers that end behind the packet.
                for first in [
                    protocol::HOP_BY_HOP,
                    protocol::ROUTING,
                    protocol::DESTINATION,
                ] {
                    let mut frame = whole.clone();
                    frame[LINK + 6] = first;
                    frame[LINK + 41] = 200;
                    malformed("an extension header that is too long", &frame)?;
                }
            }
            for version in [0, 5, 15] {
                let mut frame = whole.clone();
                frame[LINK] = version << 4 | frame[LINK] & 15;
                malformed("another version", &frame)?;
            }
            // Lengths that only the endpoint believes or not: passed as they are.
            let (_, _, seen, endpoint) = PLAIN.ends(v4);
            let lie = |frame: &[u8]| {
                let mut frame = frame.to_vec();
                let l4 = LINK + header;
                if tcp {
                    frame[l4 + 12] = 0xf0;
                } else {
                    frame[l4 + 4..l4 + 6].copy_from_slice(&[0xff, 0xff]);
                }
                frame
            };
            let then = PLAIN.toward_endpoint(scene, &request(v4, tcp), seen, endpoint);
            let Then::Sent(frame) = then else {
                anyhow::bail!("{then:?}");
            };
            let then = Then::Sent(lie(&frame));
            let reasons = [Reason::Masqueraded];
            check(
                scene,
                "a lie inside",
                ("eth0", false),
                &lie(&whole),
                &then,
                &reasons,
            )?;
            // Behind the packet's end may be padding.
            scene.forget()?;
            let pad = |frame: &[u8]| [frame, &[0xee; 9]].concat();
            let then = Then::Sent(pad(&frame));
            check(
                scene,
                "padding",
                ("eth0", false),
                &pad(&whole),
                &then,
                &reasons,
            )?;
        }
        Ok(())
    })
}

fn part(from: usize, to: usize, more: bool) -> Part {
    Part { from, to, more }
}

fn fragments_follow_their_first() -> Result<()> {
    scene(|scene| {
        for (v4, tcp) in ALL {
            scene.forget()?;
            let mut whole = request(v4, tcp);
            whole.identification = 0x7777;
            match &mut whole.payload {
                Payload::Tcp { data, .. } | Payload::Udp { data, .. } => *data = vec![9; 3000],
                _ => {}
            }
            let (client, vip, seen, endpoint) = PLAIN.ends(v4);
            let parts = [
                part(0, 1200, true),
                part(1200, 2400, true),
                part(2400, 9999, false),
            ];
            for (at, part) in parts.into_iter().enumerate() {
                whole.part = Some(part);
                let then = PLAIN.toward_endpoint(scene, &whole, seen, endpoint);
                let reasons: &[Reason] = if at == 0 { &[Reason::Masqueraded] } else { &[] };
                let what = format!("fragment {at}");
                check(
                    scene,
                    &what,
                    ("eth0", false),
                    &whole.frame(),
                    &then,
                    reasons,
                )?;
            }
            // And back, in whatever order once the first was there.
            let mut back = packet(tcp, endpoint, seen, flags::ACK);
            back.payload = payload(tcp, [endpoint.1, seen.1], flags::ACK, &[3; 3000]);
            for at in [0, 2, 1] {
                back.part = Some(parts[at]);
                let then = sent(scene, PLAIN.out, PLAIN.at, &passed(&back, vip, client));
                check(scene, "back", (PLAIN.out, false), &back.frame(), &then, &[])?;
            }
            // Another datagram's, whose first nobody saw: at an address that others use too it may be
            // theirs; a cluster IP is nobody's else.
            whole.identification = 0x7778;
            whole.part = Some(parts[1]);
            check(
                scene,
                "unknown",
                ("eth0", false),
                &whole.frame(),
                &Then::Alone,
                &[],
            )?;
            (whole.dst, _) = crate::crafted::vip(v4, "cluster", 13);
            let frame = whole.frame();
            let (then, reasons): (_, &[Reason]) = if tcp {
                // Of no connection that is known: the stack's, as whole packets of none are.
                (Then::Alone, &[])
            } else {
                (Then::Dropped, &[Reason::UnknownFragment])
            };
            check(
                scene,
                "of a cluster IP",
                ("eth0", false),
                &frame,
                &then,
                reasons,
            )?;
        }
        Ok(())
    })
}

/// The beginning of a packet, as an ICMP error quotes it. The transport checksum stays that of
/// another: nobody corrects it in a quotation.
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
                    for from in [router, endpoint.0] {
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
                // What is no error, and errors about what nobody knows, are the stack's.
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
                // A hop too far: whoever asked is told, from the address that it asked.
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
            // What is said of a packet that cannot be answered: nothing.
            let mut odd = packet(tcp, client, vip(v4, "cluster", 6), flags::SYN);
            odd.options = if v4 { vec![1; 8] } else { Vec::new() };
            odd.extensions = vec![(protocol::DESTINATION, vec![0; 7])];
            check("odd", &odd, Then::Dropped, &[Reason::NoEndpoints])?;
            // Addresses that nobody has.
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
            // A client keeps its endpoint, whatever its port; of many, not all have the same.
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
                    let (output, reasons) = scene.throw("veth-near", false, &asked.frame())?;
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

/// Who repeats a SYN reaches the same endpoint.
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
                scene.throw("veth-near2", false, &syn.frame())?;
                let first = flow()?;
                for hops in [64, 255, 64] {
                    let again = Packet {
                        hops,
                        ..syn.clone()
                    };
                    let (output, counted) = scene.throw("veth-near2", false, &again.frame())?;
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

/// From the port of a connection by way of a VIP, its client dials the endpoint itself. While the first one lives, the
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
            // While the other lives, the endpoint sees another port: the answers to both are told apart by it.
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
            let seconds = timeout::TCP_ESTABLISHED + 10;
            let old = u64::from(now()?.number().wrapping_sub(u16::try_from(seconds / 4)?));
            ages(&scene.rig.conntrack, Some(Tick::from_ns(old << 32)))?;
            passes("after another that nobody ended")?;
            // What is removed is nobody's, in both directions.
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

/// How many seconds ago each flow was used; and makes it another time, if one is given.
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

/// By UDP a client may listen for minutes without a word, and an endpoint may be told things for minutes
/// and not answer: the flow is one as long as either of them speaks.
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
                    // Neither has spoken for almost as long as an answered flow is kept.
                    let ticks = timeout::UDP_ANSWERED / 4 - 3;
                    let old = u64::from(now()?.number().wrapping_sub(u16::try_from(ticks)?));
                    ages(table, Some(Tick::from_ns(old << 32)))?;
                    scene.throw(at, false, frame)?;
                    let ages = ages(table, None)?;
                    ensure!(
                        ages.len() == 1 && ages[0] < timeout::UDP_ANSWERED / 4,
                        "{client:?} to {vip:?}: {what} leaves flows as old as {ages:?} s"
                    );
                }
            }
        }
        Ok(())
    })
}

/// What an endpoint's socket sends to a service's port goes to that service before anything sees its packet:
/// so no client is given such a port, be it its own: neither one that node ports have, usually or here, nor one
/// of the node's own address. (TCP's answers are no calls.)
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

/// A flow that is not over and goes, as another wants its room, is counted.
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

/// Errors to one address and to all are limited as the agent says; errors that tell an MTU never are.
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
        // All clients together: what others have used is gone.
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
        // One comes back each second.
        ensure!((3..10).contains(&all), "all clients: {all}");
        configure(scene, ErrorLimits::default())?;
        let counts = told(scene, (ip(true, OUTSIDE[0], ""), 2000), nobody, 64, 20)?;
        ensure!(counts == (20, 0), "without limits: {counts:?}");
        Ok(())
    })
}

/// Where programs may be preempted, each takes a place of its own and gives it back; if none is left, the packet
/// is dropped, and nobody's place is used twice.
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
        // Elsewhere nobody asks.
        scene.world.configure(&mut scene.rig, plain_config())?;
        scene.forget()?;
        let (output, _) = scene.throw("eth0", false, &frame)?;
        ensure!(output.verdict == Verdict::Redirect, "{:?}", output.verdict);
        Ok(())
    })
}
