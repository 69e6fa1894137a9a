//! Answers to datagrams that this host, or a pod behind a rule of the kernel's, sent from a port that a service has,
//! too: they belong to the socket that asked. With kube-proxy's rules the kernel's conntrack knows this; here the
//! programs do.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::{Host, Lab};

use crate::{
    cluster::eventually,
    differential::{
        case::Numbered,
        world::{Settings, Worker, World},
    },
    sockets::{address, ask, udp},
};

scenarios! {
    Dataplane:
    answers_belong_to_who_asked,
    a_connected_socket_is_answered_however_late,
}

const WORKERS: [Worker; 3] = [
    Worker::KubeProxy(Mode::IptablesNft),
    Worker::Dataplane,
    Worker::Stack,
];
/// The port at which the other side answers.
const ANSWERS: u16 = 9000;
/// A port of a Service whose external IP is the node's own address.
const EXTERNAL: u16 = 20_100;

fn services(lab: &Lab) -> Vec<crate::manifest::Service> {
    let endpoints = [lab.pod("e1")];
    let node = lab.node("node1");
    let own: Vec<String> = node.addresses().iter().map(ToString::to_string).collect();
    let numbered = Numbered {
        name: "one",
        number: 1,
    };
    vec![
        numbered.service().endpoints(&endpoints),
        crate::manifest::Service::new("tenant", &["10.96.0.2", "fd00:10:96::2"])
            .port("udp", EXTERNAL, crate::cluster::UDP)
            .set("externalIPs", own)
            .endpoints(&endpoints),
    ]
}

/// Has the kernel translate sources: of the pod `vm` to the node's address, of `pod` to a load balancer's.
fn masquerade(node: &Host) -> Result<()> {
    let rules = "table ip others { chain post { type nat hook postrouting priority 90;
         ip saddr 10.244.1.10 oifname eth0 masquerade
         ip saddr 10.244.1.11 oifname eth0 snat to 203.0.113.1
         }
         }
         table ip6 others { chain post { type nat hook postrouting priority 90;
         ip6 saddr fd00:10:244:1::10 oifname eth0 masquerade
         ip6 saddr fd00:10:244:1::11 oifname eth0 snat to 2001:db8:113::1
         }
         }";
    let script = format!("nft -f - <<'end'\n{rules}\nend");
    node.command("sh").args(["-c", &script]).run()?;
    Ok(())
}

/// Sends a question from a socket to a peer that receives it from `seen` and answers; the answer must come to the
/// socket.
fn answered(socket: &UdpSocket, other: &UdpSocket, seen: SocketAddr) -> Result<()> {
    let mut bytes = [0; 64];
    for question in ["first", "second"] {
        socket.send_to(question.as_bytes(), other.local_addr()?)?;
        let (length, from) = other.recv_from(&mut bytes).context("no question")?;
        ensure!(
            &bytes[..length] == question.as_bytes() && from == seen,
            "{from} asked, not {seen}"
        );
        other.send_to(b"answer", from)?;
        let (length, from) = socket.recv_from(&mut bytes).context("no answer")?;
        ensure!(
            &bytes[..length] == b"answer" && from == other.local_addr()?,
            "{from} said {:?}",
            &bytes[..length]
        );
    }
    Ok(())
}

/// Binds a socket to a port that another socket had a moment ago. A child of this process may still have the other.
fn bind(host: &Host, at: SocketAddr) -> Result<UdpSocket> {
    let mut bound = None;
    eventually(|| {
        bound = Some(udp(host, at)?);
        Ok(())
    })?;
    bound.context("no socket")
}

fn answers_belong_to_who_asked() -> Result<()> {
    for worker in WORKERS {
        let world = World::start(worker, &Settings::base(), &services)?;
        let (node, ext, e1) = (world.host("node1"), world.host("ext"), world.host("e1"));
        masquerade(node)?;
        for v4 in [true, false] {
            let at = |host: &Host, port: u16| SocketAddr::new(address(host, v4), port);
            let balancer: IpAddr = if v4 { "203.0.113.1" } else { "2001:db8:113::1" }.parse()?;
            // Each question goes to another port, so that no two flows look alike to the kernel.
            let outside = |n: u16| udp(ext, at(ext, ANSWERS + n));
            let others = [
                outside(0)?,
                udp(e1, at(e1, ANSWERS))?,
                outside(1)?,
                outside(2)?,
                outside(3)?,
            ];
            for (what, from, bound, other, seen) in [
                (
                    "a node port, asking outside",
                    node,
                    at(node, 30_001),
                    &others[0],
                    at(node, 30_001),
                ),
                (
                    "a node port, asking an endpoint",
                    node,
                    at(node, 30_001),
                    &others[1],
                    at(node, 30_001),
                ),
                (
                    "an external IP",
                    node,
                    at(node, EXTERNAL),
                    &others[2],
                    at(node, EXTERNAL),
                ),
                (
                    "a pod behind a masquerade rule",
                    world.host("vm"),
                    at(world.host("vm"), 30_001),
                    &others[3],
                    at(node, 30_001),
                ),
                (
                    "a pod that is seen as a load balancer",
                    world.host("pod"),
                    at(world.host("pod"), 80),
                    &others[4],
                    SocketAddr::new(balancer, 80),
                ),
            ] {
                let what = || {
                    format!(
                        "{worker:?}: {what}, to {}",
                        if v4 { "IPv4" } else { "IPv6" }
                    )
                };
                let socket = bind(from, bound).with_context(what)?;
                // A host that was not asked reaches the service.
                let client = udp(ext, at(ext, 0))?;
                let who = ask(&client, seen, b"anybody?").with_context(what)?;
                ensure!(who == "e1", "{who} answered: {}", what());
                answered(&socket, other, seen).with_context(what)?;
                let client = udp(ext, at(ext, 0))?;
                let who = ask(&client, seen, b"anybody?").with_context(what)?;
                ensure!(who == "e1", "{who} answered afterwards: {}", what());
            }
        }
    }
    Ok(())
}

/// A socket that is connected may hear nothing for longer than any table remembers.
fn a_connected_socket_is_answered_however_late() -> Result<()> {
    let world = World::start(Worker::Dataplane, &Settings::base(), &services)?;
    let (node, ext) = (world.host("node1"), world.host("ext"));
    for v4 in [true, false] {
        let at = |host: &Host, port: u16| SocketAddr::new(address(host, v4), port);
        let outside = udp(ext, at(ext, ANSWERS))?;
        let socket = udp(node, at(node, 30_001))?;
        socket.connect(at(ext, ANSWERS))?;
        // It has asked nothing that a program could have seen.
        outside.send_to(b"late", at(node, 30_001))?;
        let mut bytes = [0; 64];
        let length = socket.recv(&mut bytes).context("nothing was heard")?;
        ensure!(&bytes[..length] == b"late");
        let client = udp(ext, at(ext, 0))?;
        let who = ask(&client, at(node, 30_001), b"anybody?")?;
        ensure!(who == "e1", "{who} answered");
    }
    Ok(())
}
