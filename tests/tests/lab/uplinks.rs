//! A node with several uplinks, and an uplink with addresses in several networks: by which of them answers leave, and
//! which address endpoints see. With kube-proxy's rules as with ours.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::{Host, Lab};

use crate::{
    differential::{
        case::{At, Numbered},
        world::{Settings, Worker, World},
    },
    sockets::{ask, bytes, tcp, transfer, udp},
};

scenarios! {
    Dataplane:
    answers_leave_by_the_uplink_that_their_flow_came_by,
    flows_are_masqueraded_to_the_address_of_their_way,
}

const WORKERS: [Worker; 3] = [
    Worker::KubeProxy(Mode::IptablesNft),
    Worker::Dataplane,
    Worker::Stack,
];
const NEAR: Numbered = Numbered {
    name: "near",
    number: 1,
};

/// A second uplink of node1, `eth1`, to `ext2`, by which all packets of the pod e1 leave; and the connection marks with
/// which a network plug-in (AWS') sends answers out where the flow came in.
fn second_uplink(world: &World) -> Result<()> {
    let (node, ext2) = (world.host("node1"), world.host("ext2"));
    node.ip(&format!(
        "link add eth1 type veth peer name eth1 netns {}",
        ext2.netns()
    ))?;
    for (host, number) in [(node, 1), (ext2, 2)] {
        host.ip(&format!("addr add 192.168.88.{number}/24 dev eth1"))?;
        host.ip(&format!("addr add fd88::{number}/64 dev eth1 nodad"))?;
        host.ip("link set eth1 up")?;
    }
    // As AWS' plug-in sets it for the first uplink: the rule for the pod names the other way back to a client.
    node.sysctl("ipv4/conf/all/rp_filter", "2")?;
    for (family, pod, via) in [
        ("-4", "10.244.1.101", "192.168.88.2"),
        ("-6", "fd00:10:244:1::101", "fd88::2"),
    ] {
        node.ip(&format!(
            "{family} route add default via {via} dev eth1 table 200"
        ))?;
        node.ip(&format!(
            "{family} rule add pref 1024 fwmark 0x80/0x80 lookup main"
        ))?;
        node.ip(&format!(
            "{family} rule add pref 1536 from {pod} lookup 200"
        ))?;
    }
    let rules = "table inet plugin { chain pre { type filter hook prerouting priority mangle;
         iifname eth0 fib daddr type local ct mark set ct mark or 0x80
         iifname veth-e1 meta mark set ct mark
         }
         }";
    let script = format!("nft -f - <<'end'\n{rules}\nend");
    node.command("sh").args(["-c", &script]).run()?;
    Ok(())
}

fn answers_leave_by_the_uplink_that_their_flow_came_by() -> Result<()> {
    let services = |lab: &Lab| {
        let local = Numbered {
            name: "local",
            number: 2,
        };
        vec![
            NEAR.service().endpoints(&[lab.pod("e1")]),
            local
                .service()
                .endpoints(&[lab.pod("e1")])
                .set("externalTrafficPolicy", "Local"),
        ]
    };
    // The second uplink's default route would make its address the one for node ports.
    let mut settings = Settings::base();
    settings.arguments.extend([
        "--nodeport-addresses",
        "192.168.77.0/24,fd77::/64,192.168.88.0/24,fd88::/64",
    ]);
    for worker in WORKERS {
        let lab = crate::differential::world::lab()?;
        let manifests = crate::manifest::Manifests::new(&services(&lab))?;
        let servers = vec![crate::cluster::serve(lab.pod("e1"))?];
        let world = World::start_in(lab, worker, &settings, &manifests.path(), servers)?;
        second_uplink(&world)?;
        // Neither client forwards packets to the other.
        for (client, node, own) in [
            ("ext", "192.168.77.1", "192.168.77.201"),
            ("ext", "fd77::1", "fd77::201"),
            ("ext2", "192.168.88.1", "192.168.88.2"),
            ("ext2", "fd88::1", "fd88::2"),
        ] {
            let (client, own): (_, IpAddr) = (world.host(client), own.parse()?);
            for number in [1, 2] {
                let to = SocketAddr::new(node.parse()?, 30_000 + number);
                let what = || format!("{worker:?}: {to}");
                let try_it = || -> Result<()> {
                    let stream = tcp(client, to)?;
                    let who = transfer(&stream, &bytes(50_000, 5))?;
                    ensure!(who == "e1", "{who} answered");
                    let socket = udp(client, (own, 0))?;
                    let who = ask(&socket, to, &bytes(100, 6))?;
                    ensure!(who == "e1", "{who} answered");
                    Ok(())
                };
                // The agent hears of the uplink a moment later.
                crate::cluster::eventually(try_it).with_context(what)?;
            }
        }
    }
    Ok(())
}

/// Returns the client address that an endpoint sees. The endpoint names it in its answer.
fn source_of(client: &Host, to: SocketAddr) -> Result<IpAddr> {
    let report = crate::cluster::reaches(client, &to.to_string(), "udp --count 1", &["e3"])?;
    let endpoint = report.endpoints.values().next().context("an endpoint")?;
    let source = endpoint.sources.keys().next().context("a source")?;
    Ok(*source)
}

fn flows_are_masqueraded_to_the_address_of_their_way() -> Result<()> {
    let services = |lab: &Lab| vec![NEAR.service().endpoints(&[lab.pod("e3")])];
    let mut seen = Vec::new();
    for worker in WORKERS {
        let lab = crate::differential::world::lab()?;
        for (host, number) in [(lab.node("node1"), 1), (lab.node("node2"), 2)] {
            host.ip(&format!("addr add 192.168.88.{number}/24 dev eth0"))?;
            host.ip(&format!("addr add 2001:db8:88::{number}/64 dev eth0 nodad"))?;
            host.ip(&format!("addr add fd00:10:88::{number}/64 dev eth0 nodad"))?;
        }
        let node = lab.node("node1");
        node.ip("route replace 10.244.2.0/24 via 192.168.88.2 dev eth0")?;
        node.ip("-6 route replace fd00:10:244:2::/64 via fd00:10:88::2 dev eth0")?;
        let manifests = crate::manifest::Manifests::new(&services(&lab))?;
        let servers = vec![crate::cluster::serve(lab.pod("e3"))?];
        let world = World::start_in(lab, worker, &Settings::base(), &manifests.path(), servers)?;
        let ext = world.host("ext");
        let mut sources = Vec::new();
        for v4 in [true, false] {
            let to = NEAR.at(At::LoadBalancer, v4);
            sources.push(source_of(ext, to).with_context(|| format!("{worker:?}: {to}"))?);
        }
        seen.push(sources);
    }
    for ours in &seen[1..] {
        ensure!(seen[0] == *ours, "{ours:?}, not {:?}", seen[0]);
    }
    ensure!(
        seen[0][0] == IpAddr::from([192, 168, 88, 1]),
        "{:?}",
        seen[0]
    );
    Ok(())
}
