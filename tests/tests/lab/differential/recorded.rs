//! The results of real clients with the real kube-proxy (`tests/data/kube-proxy-1.36`) are equal to those with the
//! rules that the other scenarios use for kube-proxy's.

use std::{collections::BTreeSet, fmt, path::Path};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::Lab;

use crate::kube_proxy::{SERVICES, endpoint, manifests};

use super::{
    case::{Case, Seen},
    world::{Settings, Tries, Worker, World, unlimited_icmp},
};

scenarios! {
    Lab:
    the_iptables_rules_do_what_kube_proxys_did,
    the_nftables_rules_do_what_kube_proxys_did,
}

const IPTABLES: &str = include_str!("../../../data/kube-proxy-1.36/probe-iptables.txt");
const NFTABLES: &str = include_str!("../../../data/kube-proxy-1.36/probe-nftables.txt");

/// The recording's clients, and the hosts here that stand for them.
const CLIENTS: [(&str, &str); 6] = [
    ("pod", "pod"),
    ("node", "node1"),
    ("ext", "ext"),
    ("ext.2", "ext"),
    ("hairpin", "b1"),
    ("ping", "pod"),
];

/// A client's result: the endpoints, and whether they saw the client's own address; or the failure.
#[derive(Debug, PartialEq, Eq)]
enum Shown {
    Answered(BTreeSet<(String, bool)>),
    Failed(String),
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(how) => f.write_str(how),
            Self::Answered(endpoints) => {
                for (endpoint, own) in endpoints {
                    let whom = if *own { "itself" } else { "the node" };
                    write!(f, "{endpoint} saw {whom} ")?;
                }
                Ok(())
            }
        }
    }
}

/// With fewer tries than that, the recording may not have seen every endpoint.
const ENOUGH: u32 = 8;

/// A line of a recording.
struct Row<'a> {
    name: &'a str,
    tries: u32,
    case: Case,
    shown: Shown,
}

fn rows(recording: &str) -> Result<Vec<Row<'_>>> {
    let lines = recording.lines().filter_map(|line| {
        let (name, rest) = line.split_once(" -> ")?;
        let (to, outcome) = rest.split_once(" : ")?;
        Some((name, to, outcome))
    });
    lines
        .map(|(name, to, outcome)| {
            let word = name.split('_').next().unwrap_or_default();
            let client = CLIENTS.iter().find(|(there, _)| *there == word);
            let (_, client) = client.with_context(|| format!("who is {name}?"))?;
            let shown = shown(client, outcome).with_context(|| format!("{name}: {outcome:?}"))?;
            let [tcp, _] = Case::other(client, name, to);
            let tries = (outcome.split_whitespace())
                .filter_map(|word| word.split_once('×')?.0.parse::<u32>().ok())
                .sum();
            Ok(Row {
                name,
                tries,
                case: tcp,
                shown,
            })
        })
        .collect()
}

/// `15×b1 peer=10.244.0.10 15×b2 peer=10.244.0.10`, `1×ERR Connection refused`.
fn shown(client: &str, outcome: &str) -> Option<Shown> {
    if outcome.contains("ERR Connection refused") {
        return Some(Shown::Failed("refused".into()));
    }
    if outcome.contains("ERR Operation now in progress") {
        return Some(Shown::Failed("timeout".into()));
    }
    let own = match client {
        "pod" => "10.244.0.10",
        "ext" => "192.168.77.2",
        "b1" => "10.244.0.101",
        // The node's name for itself is the address that faces the endpoint.
        _ => "10.244.0.1",
    };
    let mut words = outcome.split_whitespace();
    let mut endpoints = BTreeSet::new();
    while let (Some(endpoint), Some(peer)) = (words.next(), words.next()) {
        let (_, endpoint) = endpoint.split_once('×')?;
        let own = peer.strip_prefix("peer=")? == own;
        endpoints.insert((endpoint.to_owned(), own));
    }
    (!endpoints.is_empty()).then_some(Shown::Answered(endpoints))
}

fn world(worker: Worker, manifests: &Path) -> Result<World> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .vm("node1", "pod", "10.244.1.10")
        .pod("node1", "b1", "10.244.1.101")
        .pod("node2", "b2", "10.244.2.102")
        .pod("node1", "b3", "10.244.1.103")
        .external("ext")
        .external("world")
        .build()?;
    let node1 = lab.node("node1");
    unlimited_icmp(node1)?;
    // Where everything that is not translated ends, without an answer.
    node1.ip(&format!(
        "route add default via {}",
        lab.external("world").ipv4()
    ))?;
    for net in ["10.96.0.0/12", "203.0.113.0/24"] {
        let to = format!("route add {net} via {}", node1.ipv4());
        lab.external("ext").ip(&to)?;
    }
    let servers = ["b1", "b2", "b3"].map(|name| endpoint(&lab, name));
    let servers = servers.into_iter().collect::<Result<Vec<_>>>()?;
    World::start_in(lab, worker, &Settings::base(), manifests, servers)
}

fn compare(mode: Mode, recording: &str) -> Result<()> {
    // The outside host has another address here.
    let services = SERVICES.replace("192.168.77.2/32", "192.168.77.201/32");
    let manifests = manifests(&services)?;
    let rows = rows(recording)?;
    let world = world(Worker::KubeProxy(mode), manifests.path())?;
    let cases: Vec<Case> = rows.iter().map(|row| row.case.clone()).collect();
    let mut wrong = vec![];
    for (row, seen) in rows.into_iter().zip(world.see(
        &cases,
        Tries {
            count: 30,
            ..Tries::MANY
        },
    )?) {
        let own = match &*row.case.client {
            "node1" => ["10.244.1.1", "192.168.77.1"],
            "pod" => ["10.244.1.10"; 2],
            "b1" => ["10.244.1.101"; 2],
            _ => ["192.168.77.201"; 2],
        };
        let mut there = row.shown;
        let mut here = answered_or_failed(&seen, &own);
        if row.name.contains("_affinity") {
            // The endpoint is drawn: the comparison is only that there is one.
            for shown in [&mut there, &mut here] {
                if let Shown::Answered(endpoints) = shown
                    && let [(_, own)] = *endpoints.iter().collect::<Vec<_>>()
                {
                    let own = *own;
                    *endpoints = [("one".to_owned(), own)].into();
                }
            }
        }
        if let (Shown::Answered(few), Shown::Answered(all)) = (&mut there, &here)
            && row.tries < ENOUGH
            && few.is_subset(all)
        {
            few.clone_from(all);
        }
        if here != there {
            wrong.push(format!("{}: {there} -> {here} ({seen})", row.case));
        }
    }
    println!("{} rows compared", cases.len());
    ensure!(wrong.is_empty(), "real -> here:\n{}", wrong.join("\n"));
    Ok(())
}

fn answered_or_failed(seen: &Seen, own: &[&str]) -> Shown {
    if !seen.answered() || !seen.failures.is_empty() {
        return Shown::Failed(seen.failures.iter().cloned().collect::<Vec<_>>().join(" "));
    }
    let endpoints = seen.answers.iter().map(|(endpoint, sources)| {
        let own = sources.iter().all(|ip| own.contains(&&*ip.to_string()));
        (endpoint.clone(), own)
    });
    Shown::Answered(endpoints.collect())
}

fn the_iptables_rules_do_what_kube_proxys_did() -> Result<()> {
    compare(Mode::IptablesNft, IPTABLES)
}

fn the_nftables_rules_do_what_kube_proxys_did() -> Result<()> {
    compare(Mode::Nftables, NFTABLES)
}
