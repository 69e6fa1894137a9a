//! Frames of a virtual machine that a receiver may read in another way than the programs do.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_proof::wire::{Packet, Part, Payload, flags};
use serde_json::json;

use super::packets;
use crate::{
    cluster::eventually,
    sockets::{arrived, inject, link, tap},
};

scenarios! {
    Dataplane:
    no_unusual_frame_escapes,
}

/// Frames of the virtual machine, and how often the agent's programs count them by a reason.
struct Evasion {
    what: &'static str,
    frames: Vec<Vec<u8>>,
    reason: Reason,
}

/// A frame with VLAN tags in front of its packet.
fn tagged(mut frame: Vec<u8>, tags: &[u8]) -> Vec<u8> {
    frame.splice(12..12, tags.iter().copied());
    frame
}

/// A SYN to an undeclared port, in all forms. `other`: the address of another pod.
fn evasions(links: [[u8; 6]; 2], src: IpAddr, other: IpAddr, dst: IpAddr) -> Vec<Evasion> {
    let payload = Payload::Tcp {
        ports: [20_000, 7],
        flags: flags::SYN,
        options: Vec::new(),
        data: vec![0x5a; 44],
    };
    let syn = Packet {
        link: links,
        ..Packet::new(src, dst, payload)
    };
    let parts = |id: u32, cut: usize| {
        [(0, cut, true), (cut, usize::MAX, false)].map(|(from, to, more)| {
            let part = Some(Part { from, to, more });
            let packet = Packet {
                identification: id,
                part,
                ..syn.clone()
            };
            packet.frame()
        })
    };
    let from = |src| Packet { src, ..syn.clone() }.frame();
    let evasion = |what, frames, reason| Evasion {
        what,
        frames,
        reason,
    };
    let nobody = if src.is_ipv4() {
        IpAddr::from([10, 244, 1, 99])
    } else {
        IpAddr::from([0xfd00, 0x10, 0x244, 1, 0, 0, 0, 0x99])
    };
    vec![
        evasion(
            "a priority tag",
            vec![tagged(syn.frame(), &[0x81, 0, 0x60, 0])],
            Reason::EgressDenied,
        ),
        evasion(
            "a priority tag of a service VLAN",
            vec![tagged(syn.frame(), &[0x88, 0xa8, 0, 0])],
            Reason::EgressDenied,
        ),
        evasion(
            "two priority tags",
            vec![tagged(syn.frame(), &[0x81, 0, 0, 0, 0x81, 0, 0, 0])],
            Reason::Malformed,
        ),
        evasion("fragments", parts(1, 24).into(), Reason::CapturedFragment),
        evasion(
            "a first fragment without all of TCP's header",
            parts(2, 8).into(),
            Reason::Malformed,
        ),
        evasion(
            "a later fragment before the first",
            parts(3, 24).into_iter().rev().collect(),
            Reason::CapturedFragment,
        ),
        evasion(
            "another pod's address",
            vec![from(other)],
            Reason::SourceForged,
        ),
        evasion("nobody's address", vec![from(nobody)], Reason::SourceForged),
    ]
}

/// Whether a frame carries TCP to an address.
fn is_tcp_to(frame: &[u8], dst: IpAddr) -> bool {
    match dst {
        IpAddr::V4(dst) => {
            frame.get(12..14) == Some(&[8, 0])
                && frame.get(23) == Some(&6)
                && frame.get(30..34) == Some(&dst.octets())
        }
        IpAddr::V6(dst) => {
            // Also behind a fragment header.
            let next = [frame.get(20).copied(), frame.get(54).copied()];
            frame.get(12..14) == Some(&[0x86, 0xdd])
                && (next[0] == Some(6) || next == [Some(44), Some(6)])
                && frame.get(38..54) == Some(&dst.octets())
        }
    }
}

/// Without an agent each of them reaches the other pod; with `egress: deny` none does.
fn no_unusual_frame_escapes() -> Result<()> {
    let mut world = packets::world()?;
    let node = world.lab.node("node1").clone();
    // The kernel must check no sources, so that the test sees the programs' effect.
    for which in ["all", "veth-app"] {
        node.sysctl(&format!("ipv4/conf/{which}/rp_filter"), "0")?;
    }
    let app = world.app().clone();
    let links = [link(&node, "veth-app")?, link(&app, "eth0")?];
    let all = [
        ["10.244.1.8", "10.244.1.6", "10.244.1.5"],
        ["fd00:10:244:1::8", "fd00:10:244:1::6", "fd00:10:244:1::5"],
    ];
    let mut evasions_of_both = Vec::new();
    for addresses in all {
        let [src, other, dst] = addresses.map(str::parse::<IpAddr>);
        let (src, dst) = (src?, dst?);
        evasions_of_both.extend(
            evasions(links, src, other?, dst)
                .into_iter()
                .map(|e| (e, src, dst)),
        );
    }
    let receiver = world.lab.pod("one").clone();
    let receiver_tap = tap(&receiver)?;
    // Sends a frame that is left alone, and waits for it: by then, earlier frames have arrived or never will.
    let settled = |src: IpAddr, dst: IpAddr, port: u16| -> Result<Vec<Vec<u8>>> {
        let payload = Payload::Udp {
            ports: [port, 9],
            summed: true,
            data: Vec::new(),
        };
        let packet = Packet {
            link: links,
            ..Packet::new(src, dst, payload)
        };
        inject(&app, "eth0", &[packet.frame()])?;
        let mut frames = Vec::new();
        let at = if src.is_ipv4() { 34 } else { 54 };
        eventually(|| {
            frames.extend(arrived(&receiver_tap));
            let mark = port.to_be_bytes();
            let is_there = |f: &Vec<u8>| f.get(at..at + 2) == Some(&mark[..]) && !is_tcp_to(f, dst);
            ensure!(frames.iter().any(is_there), "the datagram does not arrive");
            Ok(())
        })?;
        Ok(frames)
    };
    for (evasion, src, dst) in &evasions_of_both {
        inject(&app, "eth0", &evasion.frames)?;
        let frames = settled(*src, *dst, 30_000)?;
        ensure!(
            frames.iter().any(|frame| is_tcp_to(frame, *dst)),
            "{src}: {} does not get there without an agent either",
            evasion.what
        );
    }
    for mode in ["kernel", "proxy"] {
        packets::capture(&mut world, json!({ "egress": "deny", "mode": mode }), &[])?;
        for (evasion, src, dst) in &evasions_of_both {
            let what = format!("{mode}, {src}: {}", evasion.what);
            let (frames, counted) = world.counted(evasion.reason, || {
                inject(&app, "eth0", &evasion.frames)?;
                settled(*src, *dst, 30_001).with_context(|| what.clone())
            })?;
            let escaped = frames.iter().find(|frame| is_tcp_to(frame, *dst));
            ensure!(escaped.is_none(), "{what} escapes: {escaped:02x?}");
            ensure!(
                counted >= 1,
                "{what} is not counted as {:?}",
                evasion.reason
            );
        }
    }
    Ok(())
}
