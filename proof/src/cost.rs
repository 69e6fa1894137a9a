//! How long the programs take for a packet, by the kernel's own measurement of a run by hand: what
//! the making of a flow costs, without the noise of sockets and queues.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result, ensure};
use dataplane::kernel::{Direction, rig::SkbContext};

use crate::{
    campaign::{Scene, plain_config},
    wire::{Packet, Payload, flags},
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
}

/// One of each way that flows go: to a pod of the node and masqueraded, likewise to elsewhere, and
/// from pod to pod as they are.
pub const CASES: [Case; 3] = [
    Case {
        name: "nodeport-local",
        at: "eth0",
        clients: [192, 168, 77],
        to: ([192, 168, 77, 1], 30013),
    },
    Case {
        name: "nodeport-remote",
        at: "eth0",
        clients: [192, 168, 77],
        to: ([10, 96, 0, 4], 80),
    },
    Case {
        name: "clusterip-packet",
        at: "veth-near",
        clients: [10, 244, 1],
        to: ([10, 96, 0, 13], 80),
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
    /// The same SYN again.
    pub again: f64,
    /// A later packet.
    pub known: f64,
}

/// Has so many new flows come, each with its SYN, the SYN again, and a packet.
///
/// # Errors
/// If the programs cannot be run, or leave a packet alone.
pub fn measure(scene: &mut Scene, case: Case, flows: u32) -> Result<Costs> {
    scene.inside(|scene| {
        scene.forget()?;
        let Scene { rig, world, .. } = scene;
        world.configure(rig, plain_config())?;
        let (ifindex, mac) = world.interface(case.at);
        let context = SkbContext::new(ifindex, 0);
        let mut out = vec![0; 256];
        let mut run = |client: u8, port: u16, flags: u8| -> Result<u32> {
            let [a, b, c] = case.clients;
            let packet = Packet {
                link: [mac, [2, 8, 8, 8, 8, 8]],
                ..Packet::new(
                    IpAddr::from(Ipv4Addr::new(a, b, c, client)),
                    IpAddr::from(Ipv4Addr::from(case.to.0)),
                    Payload::Tcp {
                        ports: [port, case.to.1],
                        flags,
                        options: vec![2, 4, 5, 0xb4],
                        data: Vec::new(),
                    },
                )
            };
            let ran = rig
                .run(Direction::Ingress, &context, &packet.frame(), &mut out)
                .context("run the program")?;
            ensure!(ran.verdict == 7, "{}: verdict {}", case.name, ran.verdict);
            Ok(ran.ns)
        };
        let (mut new, mut again, mut known) = (Vec::new(), Vec::new(), Vec::new());
        for flow in 0..flows {
            // Ports as clients choose them, on many hosts.
            let client = 20 + u8::try_from(flow % 100)?;
            let port = 32768 + u16::try_from(flow / 100 % 28000)?;
            new.push(run(client, port, flags::SYN)?);
            again.push(run(client, port, flags::SYN)?);
            known.push(run(client, port, flags::ACK)?);
        }
        let sum: f64 = new.iter().copied().map(f64::from).sum();
        Ok(Costs {
            new_mean: sum / f64::from(flows),
            new: median(&mut new),
            again: median(&mut again),
            known: median(&mut known),
        })
    })
}

fn median(values: &mut [u32]) -> f64 {
    let middle = values.len() / 2;
    values.select_nth_unstable(middle);
    values.get(middle).copied().unwrap_or_default().into()
}
