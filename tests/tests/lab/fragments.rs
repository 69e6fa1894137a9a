//! Datagrams that are too long for the way: in fragments to the endpoint and back.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_peers::Mode;
use dataplane_proof::wire::{Packet, Part, Payload};
use dataplane_tests::Lab;

use crate::{
    cluster::{Cluster, UDP},
    differential::{
        case::Numbered,
        world::{Settings, Worker, World},
    },
    manifest::Service,
    sockets::{address, answered, ask, bytes, inject, link, udp},
};

scenarios! {
    Dataplane:
    long_datagrams_arrive_in_fragments,
    fragments_follow_their_first_in_any_order,
}

/// Through node ports to an endpoint here, to one elsewhere, and to one here that sees the client; and from a pod,
/// through a cluster IP. With kube-proxy's rules and with the dataplane.
fn long_datagrams_arrive_in_fragments() -> Result<()> {
    let numbered = |name, number| Numbered { name, number };
    let services = |lab: &Lab| {
        vec![
            numbered("here", 1).service().endpoints(&[lab.pod("e1")]),
            numbered("elsewhere", 2)
                .service()
                .endpoints(&[lab.pod("e3")]),
            numbered("local", 3)
                .service()
                .endpoints(&[lab.pod("e2"), lab.pod("e3")])
                .set("externalTrafficPolicy", "Local"),
        ]
    };
    let workers = [
        Worker::KubeProxy(Mode::IptablesNft),
        Worker::Dataplane,
        Worker::Stack,
        Worker::Strict,
    ];
    for worker in workers {
        let world = World::start(worker, &Settings::base(), &services)?;
        for v4 in [true, false] {
            let cluster_ip = |n: u8| -> Result<IpAddr> {
                let text = if v4 {
                    format!("10.96.0.{n}")
                } else {
                    format!("fd00:10:96::{n}")
                };
                Ok(text.parse()?)
            };
            for (number, endpoint) in [(1, "e1"), (2, "e3"), (3, "e2")] {
                let node = address(world.lab.node("node1"), v4);
                let ways: [(_, SocketAddr); 2] = [
                    ("ext", (node, 30_000 + u16::from(number)).into()),
                    ("vm", (cluster_ip(number)?, 80).into()),
                ];
                for (client, to) in ways {
                    if client == "vm" && number == 3 {
                        continue;
                    }
                    let host = world.host(client);
                    for length in [10, 1473, 4000, 20_000, 60_000] {
                        let socket = udp(host, (address(host, v4), 0))?;
                        for salt in 0..3 {
                            let who = ask(&socket, to, &bytes(length, salt))
                                .with_context(|| format!("{worker:?}: {client} to {to}"))?;
                            ensure!(who == endpoint, "{worker:?}: {to} is {who}, not {endpoint}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// In the orders of a real network. A fragment that comes before its first does not show whether it belongs to a
/// service, unless its address is a cluster IP: then it is dropped, and counted.
fn fragments_follow_their_first_in_any_order() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        vec![
            Service::new("dns", &["10.96.0.10", "fd00:96::10"])
                .node_port("udp", 53, UDP, 30053)
                .endpoints(&[lab.pod("near")]),
        ]
    })?;
    let (ext, node) = (cluster.lab.external("ext"), cluster.lab.node("node2"));
    let links = [link(node, "eth0")?, link(ext, "eth0")?];
    for v4 in [true, false] {
        let cluster_ip: IpAddr = if v4 {
            "10.96.0.10".parse()?
        } else {
            "fd00:96::10".parse()?
        };
        let from = address(ext, v4);
        let socket = udp(ext, (from, 0))?;
        let port = socket.local_addr()?.port();
        let data = bytes(4000, 1);
        let mut identification = 1000;
        let mut fragments = |to: SocketAddr, order: &[usize]| -> Vec<Vec<u8>> {
            identification += 1;
            let payload = Payload::Udp {
                ports: [port, to.port()],
                summed: true,
                data: data.clone(),
            };
            let mut packet = Packet {
                link: links,
                identification,
                ..Packet::new(from, to.ip(), payload)
            };
            let mut frame = |at: &usize| {
                packet.part = Some(Part {
                    from: at * 1400,
                    to: (at + 1) * 1400,
                    more: *at < 2,
                });
                packet.frame()
            };
            order.iter().map(&mut frame).collect()
        };
        let node_port: SocketAddr = (address(node, v4), 30053).into();
        let vip: SocketAddr = (cluster_ip, 53).into();
        for to in [node_port, vip] {
            for order in [[0, 1, 2], [0, 2, 1]] {
                inject(ext, "eth0", &fragments(to, &order))?;
                let who = answered(&socket, to, &data)
                    .with_context(|| format!("{to}, fragments {order:?}"))?;
                ensure!(who == "near", "{who}");
            }
        }
        // The first comes later, or not at all.
        for order in [&[1, 2][..], &[2, 1, 0], &[1, 0, 2]] {
            let dropped = order.iter().take_while(|at| **at != 0).count();
            let frames = fragments(vip, order);
            cluster.for_reason(Reason::UnknownFragment, u64::try_from(dropped)?, || {
                inject(ext, "eth0", &frames)?;
                // A later fragment has been seen after them.
                inject(ext, "eth0", &fragments(vip, &[0, 1, 2]))?;
                answered(&socket, vip, &data).map(drop)
            })?;
        }
    }
    Ok(())
}
