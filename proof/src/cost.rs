//! How long the programs take for a packet, by the kernel's own measurement of a run by hand: what
//! the making of a flow costs, without the noise of sockets and queues.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kernel::{Direction, rig::SkbContext};

use crate::{
    campaign::{Scene, plain_config},
    wire::{LINK, Packet, Payload, flags},
};

/// Whose flows, to what.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The interface that its packets arrive at.
    at: &'static str,
    /// The network of its clients, three bytes.
    clients: [u8; 3],
    /// What they connect to.
    to: ([u8; 4], u16),
    /// The interface that the answers arrive at.
    answers_at: &'static str,
    /// How many flows there can be: an endpoint sees each of the node's ports once.
    at_most: u32,
}

/// One of each way that flows go: to a pod of the node and masqueraded, likewise to elsewhere, and
/// from pod to pod as they are.
pub const CASES: [Case; 3] = [
    Case {
        name: "nodeport-local",
        at: "eth0",
        clients: [192, 168, 77],
        to: ([192, 168, 77, 1], 30013),
        answers_at: "veth-small",
        at_most: 10_000,
    },
    Case {
        name: "nodeport-remote",
        at: "eth0",
        clients: [192, 168, 77],
        to: ([10, 96, 0, 4], 80),
        answers_at: "eth0",
        at_most: 10_000,
    },
    Case {
        name: "clusterip-packet",
        at: "veth-near",
        clients: [10, 244, 1],
        to: ([10, 96, 0, 13], 80),
        answers_at: "veth-small",
        at_most: 2_000_000,
    },
];

/// What a packet costs, in nanoseconds: medians, and the mean of new flows, which what is done now
/// and then counts in.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// The SYN of a flow that nobody knew.
    pub new: f64,
    /// The mean of that.
    pub new_mean: f64,
    /// The endpoint's answer to it.
    pub answer: f64,
    /// The same SYN again.
    pub again: f64,
    /// A later packet.
    pub known: f64,
}

/// Who sends to whom.
type Ends = [(IpAddr, u16); 2];

/// Has so many new flows come, or as many as there can be, each with its SYN, an answer, the SYN again, and a later packet.
///
/// # Errors
/// If the programs cannot be run, or leave a packet alone.
pub fn measure(scene: &mut Scene, case: Case, flows: u32) -> Result<Costs> {
    let flows = flows.min(case.at_most);
    // Clients of a pod's network come from where its routes lead.
    if case.at != "eth0" {
        let [a, b, c] = case.clients;
        let node = scene.lab.node("node1");
        node.ip(&format!("route replace {a}.{b}.{c}.0/25 dev {}", case.at))?;
    }
    scene.inside(|scene| {
        scene.forget()?;
        let Scene { rig, world, .. } = scene;
        world.configure(rig, plain_config())?;
        let mut out = vec![0; 256];
        // Answers the time, and between whom the packet then is.
        let mut run = |at: &str, [from, to]: Ends, flags: u8| -> Result<(u32, Ends)> {
            let (ifindex, mac) = world.interface(at);
            let payload = Payload::Tcp {
                ports: [from.1, to.1],
                flags,
                options: vec![2, 4, 5, 0xb4],
                data: Vec::new(),
            };
            let packet = Packet {
                link: [mac, [2, 8, 8, 8, 8, 8]],
                ..Packet::new(from.0, to.0, payload)
            };
            let context = SkbContext::new(ifindex, 0);
            let ran = rig
                .run(Direction::Ingress, &context, &packet.frame(), &mut out)
                .context("run the program")?;
            ensure!(ran.verdict == 7, "{}: verdict {}", case.name, ran.verdict);
            let end = |addr: usize, port: usize| -> Result<(IpAddr, u16)> {
                let addr: [u8; 4] = out[LINK + addr..][..4].try_into()?;
                let port = u16::from_be_bytes(out[LINK + port..][..2].try_into()?);
                Ok((IpAddr::from(addr), port))
            };
            Ok((ran.ns, [end(12, 20)?, end(16, 22)?]))
        };
        let mut times: [Vec<u32>; 4] = Default::default();
        for flow in 0..flows {
            // Ports as clients choose them, on many hosts.
            let [a, b, c] = case.clients;
            let client = [a, b, c, 20 + u8::try_from(flow % 80)?];
            let port = 32768 + u16::try_from(flow / 80)?;
            let ends = [
                (IpAddr::from(client), port),
                (IpAddr::from(case.to.0), case.to.1),
            ];
            let (new, [seen, endpoint]) = run(case.at, ends, flags::SYN)?;
            let syn_ack = flags::SYN | flags::ACK;
            let (answer, _) = run(case.answers_at, [endpoint, seen], syn_ack)?;
            let (again, _) = run(case.at, ends, flags::SYN)?;
            let (known, _) = run(case.at, ends, flags::ACK)?;
            for (times, ns) in times.iter_mut().zip([new, answer, again, known]) {
                times.push(ns);
            }
        }
        let sum: f64 = times[0].iter().copied().map(f64::from).sum();
        let [new, answer, again, known] = times.each_mut().map(|times| median(times));
        Ok(Costs {
            new,
            new_mean: sum / f64::from(flows),
            answer,
            again,
            known,
        })
    })
}

fn median(values: &mut [u32]) -> f64 {
    let middle = values.len() / 2;
    values.select_nth_unstable(middle);
    values.get(middle).copied().unwrap_or_default().into()
}
