//! The path through the stack: rules of others on the node see the packets of services, and decide about them.
//!
//! The differential scenarios run with this path, too ([`Worker::Stack`] and [`Worker::Strict`]): they compare the
//! endpoint that answers, the address that it sees, and the failures with kube-proxy's. The scenarios here add rules.

mod changes;
mod firewalls;
mod forged;
mod ipsec;
mod policies;
mod seen;

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::{Agent, Host, Lab};
use serde_json::Value;

pub use self::{
    changes::SCENARIOS as CHANGES,
    firewalls::SCENARIOS as FIREWALLS,
    forged::SCENARIOS as FORGED,
    ipsec::SCENARIOS as IPSEC,
    policies::SCENARIOS as POLICIES,
    seen::{SCENARIOS as SEEN, Tracked, tracked},
};
use crate::{
    cluster::eventually,
    differential::{
        case::{At, Case, Numbered, Seen},
        world::{Settings, Tries, Worker, World},
    },
    manifest::Service,
};

/// The rules of a network plug-in: packets of pods that leave the cluster are masqueraded. With these rules, the kernel's
/// conntrack is always on.
pub const PLUGIN: &str = "table inet plugin { chain post { type nat hook postrouting priority srcnat; policy accept;\n\
    ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade\n\
    ip6 saddr fd00:10:244::/48 ip6 daddr != fd00:10:244::/48 masquerade\n}\n}";

const fn numbered(name: &'static str, number: u8) -> Numbered {
    Numbered { name, number }
}

/// The services of node1: the endpoint is the pod e1 of this node, or the pod e3 of node2.
const WEB: Numbered = numbered("web", 1);
const LOCAL: Numbered = numbered("local", 2);
const FAR: Numbered = numbered("far", 3);

fn services(lab: &Lab) -> Vec<Service> {
    let (e1, e3) = (lab.pod("e1"), lab.pod("e3"));
    vec![
        WEB.service().endpoints(&[e1]),
        LOCAL
            .service()
            .set("externalTrafficPolicy", "Local")
            .endpoints(&[e1]),
        FAR.service().endpoints(&[e3]),
    ]
}

/// The ways to an endpoint: a client, a service, and the kind of its address. The packets of all but the last client,
/// whose sockets node1's programs see, are translated on the way.
const WAYS: [(&str, Numbered, At); 8] = [
    ("ext", WEB, At::NodePort),
    ("ext", LOCAL, At::NodePort),
    ("ext", WEB, At::ClusterIp),
    ("ext", FAR, At::NodePort),
    ("far", WEB, At::NodePort),
    ("vm", WEB, At::ClusterIp),
    ("vm", FAR, At::ClusterIp),
    ("pod", WEB, At::ClusterIp),
];

/// Labs that are equal but for the worker.
fn worlds(workers: &[Worker]) -> Result<Vec<World>> {
    let start = |worker: &Worker| World::start(*worker, &Settings::base(), &services);
    workers.iter().map(start).collect()
}

/// Which results have to be equal in all worlds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Equal {
    /// The endpoints, the addresses that they see, and the failures.
    All,
    /// The endpoints.
    Endpoints,
}

impl Equal {
    fn is(self, a: &Seen, b: &Seen) -> bool {
        match self {
            Self::All => a == b,
            Self::Endpoints => a.answers.keys().eq(b.answers.keys()),
        }
    }
}

/// Has clients try [all ways](WAYS) in all worlds, by TCP and UDP and in both families. The results must be those of the
/// first world, where kube-proxy serves. `wanted` has a letter for each way: `y` if it is answered.
fn agree(worlds: &[World], equal: Equal, wanted: &str) -> Result<()> {
    /// The third attempt shows whether a SYN is refused or dropped.
    const QUICK: Tries = Tries {
        count: 3,
        ..Tries::FEW
    };
    const PATIENT: Tries = Tries {
        count: 3,
        timeouts: 3,
        ..Tries::PATIENT
    };
    let ways = WAYS.iter().zip(wanted.bytes());
    let cases: Vec<(Case, bool)> = ways
        .flat_map(|((client, service, at), letter)| {
            let cases = Case::all(&[*client], &[*service], &[*at]);
            cases.into_iter().map(move |case| (case, letter == b'y'))
        })
        .collect();
    let flows: Vec<Case> = cases.iter().map(|(case, _)| case.clone()).collect();
    let mut wrong: Vec<String> = Vec::new();
    for tries in [QUICK, PATIENT] {
        let seen = worlds.iter().map(|world| world.see(&flows, tries));
        let seen = seen.collect::<Result<Vec<_>>>()?;
        wrong.clear();
        for (number, (case, wanted)) in cases.iter().enumerate() {
            let results: Vec<&Seen> = seen.iter().map(|of| &of[number]).collect();
            let same = results.iter().all(|of| equal.is(of, results[0]));
            if !same || results[0].answered() != *wanted {
                let results: Vec<_> = results.iter().map(ToString::to_string).collect();
                wrong.push(format!("{case}: {}", results.join(" -> ")));
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
    }
    bail!("kube-proxy -> here:\n{}", wrong.join("\n"))
}

/// Waits until packets take a path.
pub fn takes(agent: &Agent, path: &str) -> Result<()> {
    eventually(|| {
        let output = agent.dataplane(["status", "-o", "json"]).output()?;
        let status: Value = serde_json::from_slice(&output.stdout)?;
        let now = &status["packet_path"];
        ensure!(*now == path, "the path of packets is {now}, not {path}");
        Ok(())
    })
}

/// The packets that the rules of a table have counted, in the order of the rules.
fn counters(node: &Host, table: &str) -> Result<Vec<u64>> {
    let list = node.command("nft").args(["-j", "list", "table", "inet"]);
    let list: Value = list.arg(table).json()?;
    let rules = list["nftables"].as_array().context("no rules")?;
    let expressions = rules
        .iter()
        .filter_map(|item| item["rule"]["expr"].as_array());
    let packets = expressions.flatten();
    Ok(packets
        .filter_map(|one| one["counter"]["packets"].as_u64())
        .collect())
}
