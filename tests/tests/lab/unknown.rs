//! Packets in the middle of an unknown TCP connection, to a service's address that is not the node's: as after a
//! failover of the address. Their sender gets a reset at once. With kube-proxy's rules the endpoint sends it, by way of
//! the translation.

use std::{
    net::SocketAddr,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_common::Reason;
use dataplane_peers::Mode;
use dataplane_proof::wire::{Packet, Payload, flags, octets};
use dataplane_tests::{Host, Lab};

use crate::{
    cluster::{Cluster, TCP, eventually, lived, reaches, serve, verdicts},
    differential::{
        case::{At, Numbered},
        world::{Settings, Worker, World},
    },
    manifest::Service,
    sockets::{address, arrived, enough, inject, link, tap},
};

scenarios! {
    Dataplane:
    unknown_connections_end_at_once,
    connections_older_than_a_service_go_on,
}

const WORKERS: [Worker; 3] = [
    Worker::KubeProxy(Mode::IptablesNft),
    Worker::Dataplane,
    Worker::Stack,
];
const ONE: Numbered = Numbered {
    name: "one",
    number: 1,
};

/// A segment from the middle of a connection.
fn segment(from: SocketAddr, to: SocketAddr, link: [[u8; 6]; 2], bits: u8) -> Packet {
    let payload = Payload::Tcp {
        ports: [from.port(), to.port()],
        flags: bits,
        options: Vec::new(),
        data: b"whoever is there".to_vec(),
    };
    Packet {
        link,
        ..Packet::new(from.ip(), to.ip(), payload)
    }
}

/// The TCP flags of a frame from one address to another, with its sequence number.
fn carried(frame: &[u8], from: SocketAddr, to: SocketAddr) -> Option<(u8, u32)> {
    let (addresses, l4) = if from.is_ipv4() { (26, 34) } else { (22, 54) };
    let length = octets(from.ip()).len();
    let at = |offset: usize, length: usize| frame.get(offset..offset + length);
    let port = |offset: usize| at(offset, 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    let is_it = at(addresses, length)? == octets(from.ip())
        && at(addresses + length, length)? == octets(to.ip())
        && port(l4)? == from.port()
        && port(l4 + 2)? == to.port();
    let sequence = at(l4 + 4, 4)?.try_into().ok()?;
    is_it.then_some((*frame.get(l4 + 13)?, u32::from_be_bytes(sequence)))
}

/// Waits for a reset.
fn reset(tap: &std::os::fd::OwnedFd, from: SocketAddr, to: SocketAddr) -> Result<u32> {
    let limit = Instant::now() + enough();
    loop {
        for frame in arrived(tap) {
            if let Some((bits, sequence)) = carried(&frame, from, to) {
                ensure!(bits & flags::RST != 0, "not a reset: {bits:#x}");
                return Ok(sequence);
            }
        }
        if Instant::now() > limit {
            bail!("nobody says that the connection is gone");
        }
        sleep(Duration::from_millis(5));
    }
}

fn unknown_connections_end_at_once() -> Result<()> {
    let services = |lab: &Lab| vec![ONE.service().endpoints(&[lab.pod("e1")])];
    let mut seen = Vec::new();
    for worker in WORKERS {
        let world = World::start(worker, &Settings::base(), &services)?;
        let node = world.host("node1");
        let beyond = tap(world.host("world"))?;
        let mut told = Vec::new();
        // No socket of the pod has the connection either: as a virtual machine's after it was moved here.
        for (client, interface, towards) in [
            ("ext", "eth0", link(node, "eth0")?),
            ("vm", "eth0", link(node, "veth-vm")?),
            ("pod", "eth0", link(node, "veth-pod")?),
        ] {
            let host: &Host = world.host(client);
            let own = tap(host)?;
            let mut port = 40_000;
            for (v4, at) in [true, false]
                .into_iter()
                .flat_map(|v4| At::ALL.map(|at| (v4, at)))
            {
                let bits = flags::ACK | flags::PSH;
                port += 1;
                let from = SocketAddr::new(address(host, v4), port);
                let to = ONE.at(at, v4);
                let what = || format!("{worker:?}: {client} to {at:?} {to}, {bits:#x}");
                let links = [towards, link(host, interface)?];
                let frame = segment(from, to, links, bits).frame();
                inject(host, interface, &[frame]).with_context(what)?;
                told.push(reset(&own, to, from).with_context(what)?);
                for frame in arrived(&beyond) {
                    ensure!(
                        carried(&frame, from, to).is_none(),
                        "it was sent on: {}",
                        what()
                    );
                }
            }
        }
        if let Some(agent) = &world.agent {
            ensure!(
                verdicts(agent, Reason::UnknownFlow)? > 0,
                "nothing was counted"
            );
        }
        seen.push(told);
    }
    for ours in &seen[1..] {
        ensure!(seen[0] == *ours, "{:?}\nis not {ours:?}", seen[0]);
    }
    Ok(())
}

/// A pod's connection to an address and port goes on when a service claims both, as with kube-proxy, whose rules see only
/// the first packet of a connection.
fn connections_older_than_a_service_go_on() -> Result<()> {
    let cluster = Cluster::start(|_| vec![])?;
    let (client, ext) = (cluster.client(), cluster.lab.external("ext"));
    let node = cluster.lab.node("node2");
    ext.ip(&format!("route add 10.244.2.0/24 via {}", node.ipv4()))?;
    ext.ip(&format!(
        "-6 route add fd00:10:244:2::/64 via {}",
        node.ipv6()
    ))?;
    let _server = serve(ext)?;
    for address in ext.addresses() {
        let to = SocketAddr::new(address, TCP).to_string();
        let held = client.hold(&to)?;
        let claims = Service::new("claims", &["10.96.0.10", "fd00:10:96::10"])
            .port("tcp", TCP, TCP)
            .set("externalIPs", vec![address.to_string()])
            .endpoints(&[cluster.lab.pod("near")]);
        cluster.manifests.write(&[claims])?;
        eventually(|| reaches(client, &to, "connect", &["near"]).map(drop))?;
        lived(held)?;
    }
    Ok(())
}
