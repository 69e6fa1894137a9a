//! What others on the node see of the packets of services: counters in FORWARD, and the kernel's own conntrack, see the
//! client and the endpoint, in both directions, and one flow of each connection.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab};

use super::{FAR, LOCAL, WEB, counters, numbered, services};
use crate::{
    differential::{
        case::{At, Numbered},
        world::{Settings, Worker, World},
    },
    features::on,
    iptables::load,
    sockets::{address, ask, bytes, tcp, transfer, udp},
};

scenarios! {
    Dataplane:
    rules_and_conntrack_see_one_flow_between_client_and_endpoint,
}

const SELF: Numbered = numbered("self", 4);

/// A client, a service, the kind of its address, and the endpoint. The last client is its own endpoint.
const WAYS: [(&str, Numbered, At, &str); 10] = [
    ("ext", WEB, At::NodePort, "e1"),
    ("ext", LOCAL, At::NodePort, "e1"),
    ("ext", FAR, At::NodePort, "e3"),
    ("ext", WEB, At::LoadBalancer, "e1"),
    ("ext", LOCAL, At::ExternalIp, "e1"),
    ("ext", FAR, At::ClusterIp, "e3"),
    ("far", WEB, At::NodePort, "e1"),
    ("vm", WEB, At::ClusterIp, "e1"),
    ("vm", FAR, At::ClusterIp, "e3"),
    ("vm", SELF, At::ClusterIp, "vm"),
];

/// Counts the packets between two addresses in FORWARD, and those from or to others.
fn watch(node: &Host, [client, endpoint]: [IpAddr; 2], others: &[IpAddr]) -> Result<()> {
    let family = if client.is_ipv4() { "ip" } else { "ip6" };
    let others: Vec<_> = others.iter().map(ToString::to_string).collect();
    let others = others.join(", ");
    let rules = format!(
        "add table inet seen\ndelete table inet seen\n\
         table inet seen {{ chain forward {{ type filter hook forward priority filter; policy accept;\n\
         {family} saddr {client} {family} daddr {endpoint} counter\n\
         {family} saddr {endpoint} {family} daddr {client} counter\n\
         {family} saddr {{ {others} }} counter\n\
         {family} daddr {{ {others} }} counter\n}}\n}}"
    );
    load(node, "nft -f -", &rules)
}

/// A flow of the kernel's conntrack: the source and the destination of requests, then those of replies.
pub struct Tracked {
    pub line: String,
    pub ends: Vec<IpAddr>,
}

/// Returns all flows (`ct_seq_show` in `net/netfilter/nf_conntrack_standalone.c`).
pub fn tracked(node: &Host) -> Result<Vec<Tracked>> {
    let text = on(node, |_| {
        fs::read_to_string("/proc/thread-self/net/nf_conntrack").context("/proc/net/nf_conntrack")
    })?;
    let flow = |line: &str| {
        let words = line.split_whitespace();
        let ends = words.filter_map(|word| {
            let end = word
                .strip_prefix("src=")
                .or_else(|| word.strip_prefix("dst="));
            end?.parse().ok()
        });
        Tracked {
            line: line.to_owned(),
            ends: ends.collect(),
        }
    };
    Ok(text.lines().map(flow).collect())
}

fn check(world: &World, client: &str, to: SocketAddr, endpoint: &str) -> Result<()> {
    let node = world.host("node1");
    let v4 = to.is_ipv4();
    let from = world.host(client);
    let ends = [address(from, v4), address(world.host(endpoint), v4)];
    // The service's address, and those that flows are masqueraded to.
    let gateway = world.host("e1");
    let gateway: IpAddr = if v4 {
        gateway.gateway4().into()
    } else {
        gateway.gateway6().into()
    };
    let mut others = vec![to.ip(), address(node, v4), gateway];
    others.sort_unstable();
    others.dedup();
    watch(node, ends, &others)?;

    let stream = tcp(from, to)?;
    let who = transfer(&stream, &bytes(10_000, 3))?;
    ensure!(who == endpoint, "{who} answered");
    let socket = udp(from, (address(from, v4), 0))?;
    let who = ask(&socket, to, &bytes(100, 4))?;
    ensure!(who == endpoint, "{who} answered by UDP");

    let counted = counters(node, "seen")?;
    let [requests, replies, others_sent, others_got] = counted[..] else {
        anyhow::bail!("{counted:?}");
    };
    ensure!(
        requests >= 4 && replies >= 4,
        "requests and replies that FORWARD saw: {counted:?}"
    );
    ensure!(
        others_sent == 0 && others_got == 0,
        "FORWARD saw translated addresses {others:?}: {counted:?}"
    );
    let all = tracked(node)?;
    let [client, endpoint] = ends;
    let own = |protocol: &str, wanted: &[&str]| {
        all.iter().any(|flow| {
            flow.ends == [client, endpoint, endpoint, client]
                && flow.line.contains(&format!(" {protocol} "))
                && wanted.iter().all(|word| flow.line.contains(word))
                && !flow.line.contains("[UNREPLIED]")
        })
    };
    let is_strange = |flow: &&Tracked| flow.ends.iter().any(|end| others.contains(end));
    let strange = all.iter().filter(is_strange).map(|flow| &flow.line);
    let strange: Vec<_> = strange.collect();
    ensure!(
        strange.is_empty(),
        "flows of translated addresses: {strange:#?}"
    );
    let lines = || all.iter().map(|flow| &*flow.line).collect::<Vec<_>>();
    ensure!(
        own("tcp", &["ESTABLISHED", "[ASSURED]"]),
        "no established connection: {:#?}",
        lines()
    );
    ensure!(own("udp", &[]), "no answered datagram: {:#?}", lines());
    Ok(())
}

fn rules_and_conntrack_see_one_flow_between_client_and_endpoint() -> Result<()> {
    let with_self = |lab: &Lab| {
        let own = SELF.service().endpoints(&[lab.pod("vm")]);
        [services(lab), vec![own]].concat()
    };
    let world = World::start(Worker::Strict, &Settings::base(), &with_self)?;
    for (client, service, at, endpoint) in WAYS {
        for v4 in [true, false] {
            let to = service.at(at, v4);
            let what = || format!("{client} to {at:?} {to}, to {endpoint}");
            check(&world, client, to, endpoint).with_context(what)?;
        }
    }
    Ok(())
}
