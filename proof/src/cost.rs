//! Measures how long the programs run for a packet. The kernel measures each test run (`BPF_PROG_TEST_RUN`) itself. So
//! the results show the cost of a new flow without the noise of sockets and queues.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kernel::{rig::SkbContext, tc::Direction};

use crate::{
    campaign::{Scene, plain_config},
    wire::{LINK, Packet, Payload, flags},
};

/// A kind of flow to measure: its clients and its service.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Name in the report.
    pub name: &'static str,
    /// The interface on which the clients' packets arrive.
    at: &'static str,
    /// The first three bytes of the clients' network.
    clients: [u8; 3],
    /// The address and port that the clients connect to.
    to: ([u8; 4], u16),
    /// The interface on which the endpoint's replies arrive.
    answers_at: &'static str,
    /// Maximum number of flows. For a masqueraded flow, each port of the node can serve one flow to an endpoint.
    at_most: u32,
}

/// One case for each path of a flow: masqueraded to a pod of the node, masqueraded to another node, and from pod to pod
/// without masquerading.
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

/// The cost of a packet, in nanoseconds: medians. For new flows also the mean, which includes work that is done only
/// now and then.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// The SYN of a new flow: median.
    pub new: f64,
    /// The SYN of a new flow: mean.
    pub new_mean: f64,
    /// The endpoint's reply to the SYN.
    pub answer: f64,
    /// The same SYN again, retransmitted.
    pub again: f64,
    /// A later packet of the flow.
    pub known: f64,
}

/// Source and destination of a packet.
type Ends = [(IpAddr, u16); 2];

/// Measures this many new flows, or the case's maximum. Each flow sends a SYN, a reply, the SYN again, and a later
/// packet.
///
/// # Errors
/// If the programs cannot run, or if they leave a packet alone.
pub fn measure(scene: &mut Scene, case: Case, flows: u32) -> Result<Costs> {
    let flows = flows.min(case.at_most);
    // Adds a route to the clients through the pod's interface.
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
        // Returns the time of the run, and source and destination of the packet after it.
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
            // Ports as clients choose them, spread over many hosts.
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
