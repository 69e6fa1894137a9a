//! Clients' results with the dataplane, compared with their results with the real kube-proxy for the same objects
//! (recorded in `tests/data/kube-proxy-1.36`, once for each of two of its modes).
//!
//! Every difference is in a table below, and in `docs/differences.md` with its reason. Only connections that begin at a
//! socket on the node are compared: `ext` is another machine.

use std::{collections::BTreeMap, fmt, fs};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab, Process};

use tempfile::TempDir;

use crate::cluster::ask;

scenarios! {
    Dataplane:
    what_clients_see_is_what_kube_proxy_shows_them,
}

pub const SERVICES: &str = include_str!("../../data/kube-proxy-1.36/services.yaml");
const SLICES: &str = include_str!("../../data/kube-proxy-1.36/endpointslices.json");
const IPTABLES: &str = include_str!("../../data/kube-proxy-1.36/probe-iptables.txt");
const NFTABLES: &str = include_str!("../../data/kube-proxy-1.36/probe-nftables.txt");

/// A client's result.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    /// These endpoints answered; whether all of them saw the client's own address.
    Answered {
        endpoints: Vec<String>,
        own_address: bool,
    },
    Refused,
    TimedOut,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered {
                endpoints,
                own_address: true,
            } => f.write_str(&endpoints.join("+")),
            Self::Answered { endpoints, .. } => write!(f, "{} masqueraded", endpoints.join("+")),
            Self::Refused => f.write_str("refused"),
            Self::TimedOut => f.write_str("timeout"),
        }
    }
}

/// A line of a recording.
struct Row<'a> {
    name: &'a str,
    to: &'a str,
    seen: Seen,
}

/// The rows that begin at a socket of node1: its own, those of its pod, and those of an endpoint
/// on it (`hairpin`).
fn rows(recording: &str) -> Result<Vec<Row<'_>>> {
    let lines = recording.lines().filter_map(|line| {
        let (name, rest) = line.split_once(" -> ")?;
        let (to, outcome) = rest.split_once(" : ")?;
        let client = name.split('_').next()?;
        ["pod", "node", "hairpin"]
            .contains(&client)
            .then_some((name, client, to, outcome))
    });
    lines
        .map(|(name, client, to, outcome)| {
            let seen = seen_by(client, outcome).with_context(|| format!("{name}: {outcome:?}"))?;
            Ok(Row { name, to, seen })
        })
        .collect()
}

/// `15×b1 peer=10.244.0.10 15×b2 peer=10.244.0.10`, `1×ERR Connection refused`.
fn seen_by(client: &str, outcome: &str) -> Option<Seen> {
    if outcome.contains("ERR Connection refused") {
        return Some(Seen::Refused);
    }
    if outcome.contains("ERR Operation now in progress") {
        return Some(Seen::TimedOut);
    }
    let own = match client {
        "pod" => "10.244.0.10",
        // A process of the node connects from the node's address that faces the endpoint.
        "node" => "10.244.0.1",
        _ => "10.244.0.101",
    };
    let mut endpoints = Vec::new();
    let mut own_address = true;
    let mut words = outcome.split_whitespace();
    while let (Some(endpoint), Some(peer)) = (words.next(), words.next()) {
        endpoints.push(endpoint.split_once('×')?.1.to_owned());
        own_address &= peer.strip_prefix("peer=")? == own;
    }
    (!endpoints.is_empty()).then_some(Seen::Answered {
        endpoints,
        own_address,
    })
}

/// The recording's network, with the lab's addresses: node1's pods are in 10.244.1.0/24 here, and
/// node2's not in the same network. The recording's objects have no status: `services` are
/// [`SERVICES`], perhaps with other addresses.
pub fn manifests(services: &str) -> Result<TempDir> {
    let mut services = services.to_owned();
    for (name, ip) in [
        ("lb-ranges", "203.0.113.10"),
        ("lb-local", "203.0.113.11"),
        ("lb-local-remote", "203.0.113.12"),
    ] {
        let metadata = format!("metadata: {{name: {name}, namespace: bench}}\n");
        ensure!(
            services.contains(&metadata),
            "{name} is not in the recording"
        );
        let status = format!("status: {{loadBalancer: {{ingress: [{{ip: {ip}}}]}}}}\n");
        services = services.replace(&metadata, &format!("{metadata}{status}"));
    }
    let slices = SLICES
        .replace("10.244.0.102", "10.244.2.102")
        .replace("10.244.0.", "10.244.1.");
    let directory = tempfile::tempdir()?;
    fs::write(directory.path().join("services.yaml"), services)?;
    fs::write(directory.path().join("endpointslices.json"), slices)?;
    Ok(directory)
}

/// A server of both of the recording's ports.
pub fn endpoint(lab: &Lab, name: &str) -> Result<Process> {
    let pod = lab.pod(name);
    let (tcp, udp) = (
        format!("{}:8080", pod.ipv4()),
        format!("{}:8053", pod.ipv4()),
    );
    Ok(pod.serve(&["--tcp", &tcp, "--udp", &udp])?)
}

/// Connects often enough to see every endpoint.
fn see(client: &Host, to: &str) -> Result<Seen> {
    let report = ask(client, to, "connect --count 1 --timeout-ms 400")?;
    if report.answered == 0 {
        let (error, _) = report.errors.first_key_value().context("an error")?;
        return Ok(match error.as_str() {
            "ECONNREFUSED" => Seen::Refused,
            // A host without a route gets an error at once where others time out.
            "TIMEOUT" | "ENETUNREACH" => Seen::TimedOut,
            other => anyhow::bail!("{} to {to}: {other}", client.name()),
        });
    }
    let report = ask(client, to, "connect --count 60")?;
    ensure!(report.answered == report.attempts, "{to}: {report:?}");
    let mut own = client.addresses().to_vec();
    if client.node().is_none() {
        own.push(client.ipv4().into());
        own.push("10.244.1.1".parse()?);
    }
    let mut sources = report.endpoints.values().flat_map(|e| e.sources.keys());
    Ok(Seen::Answered {
        own_address: sources.all(|source| own.contains(source)),
        endpoints: report.endpoints.into_keys().collect(),
    })
}

fn what_clients_see_is_what_kube_proxy_shows_them() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "pod", "10.244.1.10")
        .pod("node1", "b1", "10.244.1.101")
        .pod("node2", "b2", "10.244.2.102")
        .pod("node1", "b3", "10.244.1.103")
        .build()?;
    let servers = ["b1", "b2", "b3"].map(|name| endpoint(&lab, name));
    let _servers = servers.into_iter().collect::<Result<Vec<_>>>()?;
    let manifests = manifests(SERVICES)?;
    let _agent = lab
        .agent("node1")
        .manifests(manifests.path())
        .args(["--nodeport-addresses", "192.168.77.0/24"])
        .start()?;

    let mut differences = BTreeMap::new();
    let mut compared = 0;
    for (mode, recording) in [("iptables", IPTABLES), ("nftables", NFTABLES)] {
        for row in rows(recording)? {
            let client = match row.name.split('_').next() {
                Some("node") => lab.node("node1"),
                Some("hairpin") => lab.pod("b1"),
                _ => lab.pod("pod"),
            };
            let mut here = see(client, row.to)?;
            let mut there = row.seen;
            if row.name == "pod_affinity" {
                // The test compares that one endpoint answers, and not which one: that is drawn.
                for seen in [&mut here, &mut there] {
                    if let Seen::Answered { endpoints, .. } = seen
                        && endpoints.len() == 1
                    {
                        *endpoints = vec!["one".into()];
                    }
                }
            }
            compared += 1;
            if here != there {
                let row = format!("{} {}", row.name, row.to);
                differences.insert((mode, row), format!("{there} -> {here}"));
            }
        }
    }
    println!("{compared} rows compared, {} differ", differences.len());
    let found: Vec<_> = differences
        .iter()
        .map(|((mode, row), what)| format!("{mode}: {row}: {what}"))
        .collect();
    ensure!(found == DIFFERENCES, "{found:#?}");
    Ok(())
}

/// Mode and row, the result with kube-proxy's rules, and the result with the dataplane.
const DIFFERENCES: &[&str] = &[
    "iptables: hairpin_b1 10.96.1.1:80: b1+b2 masqueraded -> b1+b2",
    "iptables: pod 192.168.77.1:30080: b1+b2 masqueraded -> b1+b2",
    "iptables: pod_clusterip_wrong_port 10.96.1.1:81: timeout -> refused",
    "iptables: pod_extip 203.0.113.50:80: b1+b2 masqueraded -> b1+b2",
    "nftables: hairpin_b1 10.96.1.1:80: b1+b2 masqueraded -> b1+b2",
    "nftables: node_localhost 127.0.0.1:30080: refused -> b1+b2",
    "nftables: pod 192.168.77.1:30080: b1+b2 masqueraded -> b1+b2",
    "nftables: pod_extip 203.0.113.50:80: b1+b2 masqueraded -> b1+b2",
];
