//! Packets with forged addresses do not join a flow that goes through the stack, and do not end it.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_proof::wire::{Packet, Payload};
use serde_json::Value;

use super::{FAR, services};
use crate::{
    differential::{
        case::At,
        world::{Settings, Worker, World},
    },
    sockets::{address, ask, bytes, inject, link, udp},
};

scenarios! {
    Dataplane:
    forged_packets_join_no_flow,
}

/// The endpoint of the client's flow, and the node's address and port that the endpoint sees.
fn flow_of(world: &World, client: SocketAddr) -> Result<[SocketAddr; 2]> {
    let agent = world.agent().context("an agent")?;
    let list: Value = agent
        .dataplane(["conntrack", "list", "-o", "json"])
        .json()?;
    let flows = list.as_array().context("an array")?;
    let flow = flows
        .iter()
        .find(|flow| flow["client"] == client.to_string())
        .with_context(|| format!("no flow of {client}: {list}"))?;
    let end = |name: &str| -> Result<SocketAddr> {
        let end = flow[name].as_str().with_context(|| format!("{flow}"))?;
        Ok(end.parse()?)
    };
    Ok([end("endpoint")?, end("masqueraded_as")?])
}

fn datagram(from: SocketAddr, to: SocketAddr) -> Packet {
    let payload = Payload::Udp {
        ports: [from.port(), to.port()],
        summed: true,
        data: b"forged".to_vec(),
    };
    Packet::new(from.ip(), to.ip(), payload)
}

/// "Port unreachable" about a packet, for its sender.
fn error(from: IpAddr, about: &Packet) -> Packet {
    let payload = Payload::Icmp {
        kind: if from.is_ipv4() { [3, 3] } else { [1, 4] },
        rest: [0; 4],
        data: about.ip(),
    };
    Packet::new(from, about.src, payload)
}

fn forged_packets_join_no_flow() -> Result<()> {
    let world = World::start(Worker::Stack, &Settings::base(), &services)?;
    let (node, ext, vm) = (world.host("node1"), world.host("ext"), world.host("vm"));
    // So only our programs look at sources.
    for interface in ["all", "eth0", "veth-vm"] {
        node.sysctl(&format!("ipv4/conf/{interface}/rp_filter"), "0")?;
    }
    for v4 in [true, false] {
        let to = FAR.at(At::NodePort, v4);
        let socket = udp(ext, (address(ext, v4), 0))?;
        let client = socket.local_addr()?;
        ask(&socket, to, &bytes(100, 1))?;
        let [endpoint, seen] = flow_of(&world, client)?;
        // In the stack, requests come from the client at the node's port.
        let in_stack = SocketAddr::new(client.ip(), seen.port());
        let by_vm = [link(node, "veth-vm")?, link(vm, "eth0")?];
        let by_ext = [link(node, "eth0")?, link(ext, "eth0")?];
        let outsider = address(ext, v4);
        for (what, host, link, packet) in [
            (
                "a request by a pod",
                vm,
                by_vm,
                datagram(in_stack, endpoint),
            ),
            (
                "an answer by a pod",
                vm,
                by_vm,
                datagram(endpoint, in_stack),
            ),
            (
                "the node's packet by a pod",
                vm,
                by_vm,
                datagram(seen, endpoint),
            ),
            (
                "the node's packet from outside",
                ext,
                by_ext,
                datagram(seen, endpoint),
            ),
            (
                "an error from outside",
                ext,
                by_ext,
                error(outsider, &datagram(endpoint, seen)),
            ),
        ] {
            let frame = Packet {
                link,
                whole: true,
                ..packet
            }
            .frame();
            inject(host, "eth0", &[frame])?;
            socket.set_read_timeout(Some(Duration::from_millis(300)))?;
            let got = socket.recv_from(&mut [0; 2000]);
            let is_silent = got
                .as_ref()
                .is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            ensure!(is_silent, "{what} of {client}: the client got {got:?}");
            socket.set_read_timeout(Some(Duration::from_secs(5)))?;
            let what = || format!("after {what} of {client}");
            ask(&socket, to, &bytes(100, 2)).with_context(what)?;
        }
    }
    Ok(())
}
