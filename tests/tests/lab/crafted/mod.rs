//! Crafted packets through the packet path's programs, each with the packet that ought to come out,
//! byte by byte: both are put together from their headers, with checksums of their own.

mod errors;
mod flows;
mod headers;
mod services;
mod way;

pub use errors::SCENARIOS as ERRORS;
pub use flows::SCENARIOS as FLOWS;
pub use headers::SCENARIOS as HEADERS;
pub use services::SCENARIOS as SERVICES;

use std::net::IpAddr;

use anyhow::{Result, ensure};
use dataplane_common::{Addr, Reason};
use dataplane_proof::{
    Output, Verdict,
    campaign::{Scene, plain_config},
    wire::{Packet, Payload},
    world::{self, To},
};

/// The expected treatment of a packet.
#[derive(Debug)]
pub enum Then {
    /// The packet is left alone.
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

/// The link-layer address of the sender.
const SENDER: [u8; 6] = [2, 8, 8, 8, 8, 8];

pub fn ip(v4: bool, text4: &str, text6: &str) -> IpAddr {
    let text = if v4 { text4 } else { text6 };
    text.parse().expect("an address of this file")
}

/// Returns the addresses of service `n` (see the world's list): its VIP and port, by kind.
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

/// Returns the packet between two other ends, one hop further.
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

/// Returns the packet that leaves by `out` for a packet that arrived at `at`: with the link-layer addresses of the way
/// if the neighbour's is known; if not, the kernel writes them later, and the earlier ones stay.
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

/// The answer to a refused packet, at the interface `at`.
pub fn refusal(scene: &Scene, at: &str, packet: &Packet) -> Vec<u8> {
    let v4 = packet.src.is_ipv4();
    let mut data = packet.ip();
    let transport = if matches!(packet.payload, Payload::Tcp { .. }) {
        20
    } else {
        8
    };
    let extensions: usize = packet
        .extensions
        .iter()
        .map(|(_, body)| body.len() + 1)
        .sum();
    data.truncate(transport + if v4 { 20 } else { 40 + extensions });
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

/// Does something on a scene with the programs' usual configuration.
pub fn on(mut scene: Scene, work: impl FnOnce(&Scene) -> Result<()> + Send) -> Result<()> {
    scene.inside(|scene| {
        scene.world.configure(&mut scene.rig, plain_config())?;
        work(scene)
    })
}

pub const OUTSIDE: [&str; 2] = ["192.168.77.201", "fd77::201"];
pub const NEAR: [&str; 2] = ["10.244.1.10", "fd00:10:244:1::10"];
const SMALL: [&str; 2] = ["10.244.1.12", "fd00:10:244:1::12"];
const FAR: [&str; 2] = ["10.244.2.10", "fd00:10:244:2::10"];
const NODE: [&str; 2] = ["192.168.77.1", "fd77::1"];
const GATEWAY: [&str; 2] = ["10.244.1.1", "fd00:10:244:1::1"];
