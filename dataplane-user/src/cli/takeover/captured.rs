//! Whom the dataplane captures in the network namespace that this thread is in, and how that differs from what a sidecar's
//! rules capture.

use std::collections::BTreeMap;

use anyhow::Context as _;
use dataplane_common::capture::{CAPTURED, Enrolled, RangeKey};
use serde::Serialize;

use super::place::Place;
use crate::{
    admin::api::{MeshRule, MeshWorkload},
    cli::iptables::import_mesh,
    kernel::{self, CaptureTables, Tables},
    plan::enrol::{Statement, statements},
    settings::Mesh,
    takeover::capture::Capture,
};

/// What rules of a sidecar cannot say.
const SETTINGS: &[&str] = &[
    "captured-by",
    "mode",
    "egress",
    "without-proxy",
    "acceleration",
    "dns",
];

/// A workload that the dataplane captures.
#[derive(Debug)]
pub struct Captured {
    /// Its namespace and name.
    pub name: String,
    entry: Enrolled,
    /// The queries that are captured, as [`Difference::dataplane`].
    queries: Option<&'static str>,
    rules: Vec<MeshRule>,
}

/// Something that is captured by the rules or by the dataplane, and not by the other.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What it is about, as [`MeshRule::about`], or `outbound` as a whole.
    pub about: String,
    /// Which range, port, user or group; empty for all.
    pub of: String,
    /// What the rules say: `captured` or `excluded`; of DNS, `resolvers` or `all`; none: nothing.
    pub rules: Option<String>,
    /// What the dataplane does, likewise.
    pub dataplane: Option<String>,
}

/// Queries to every address are captured.
const ALL: &str = "all";
/// Queries to the pod's own resolvers are captured.
const RESOLVERS: &str = "resolvers";

/// The entry of this network namespace in the kernel's tables, and which queries are captured.
fn entry(place: &Place) -> anyhow::Result<Option<(Enrolled, Option<&'static str>)>> {
    let tables = Tables::open(&place.bpffs)?;
    if tables.mesh() == 0 {
        return Ok(None);
    }
    let held = CaptureTables::open(&place.bpffs)?.contents()?;
    let found = held.namespaces.get(&kernel::netns_cookie()?).copied();
    let Some(entry) = found.filter(|entry| entry.flags & Enrolled::CAPTURED != 0) else {
        return Ok(None);
    };
    // A range of all addresses has no bits but those of the policy's number, or of IPv4's prefix.
    let is_all = |(range, says): (&RangeKey, &u32)| {
        range.policy == entry.resolvers && range.bits <= 32 + 96 && *says == CAPTURED
    };
    let queries = match entry.resolvers {
        0 => None,
        _ if held.ranges.iter().any(is_all) => Some(ALL),
        _ => Some(RESOLVERS),
    };
    Ok(Some((entry, queries)))
}

/// The name of the workload that is captured here, as far as an agent tells it.
///
/// # Errors
/// The tables cannot be read.
pub fn enrolled(place: &Place) -> anyhow::Result<Option<String>> {
    let Some((entry, _)) = entry(place)? else {
        return Ok(None);
    };
    let workloads: Vec<MeshWorkload> = place.agent.list("/mesh").unwrap_or_default();
    let mut found = workloads.iter().filter(|of| of.number == entry.workload);
    let name = found.next().map(MeshWorkload::full_name);
    Ok(Some(name.unwrap_or_else(|| "a workload".to_owned())))
}

/// The workload that is captured here.
///
/// # Errors
/// There is none, it is not captured as it should be, or no agent serves.
pub fn find(place: &Place) -> anyhow::Result<Captured> {
    place.serving()?;
    let (entry, queries) = entry(place)?.context(
        "the dataplane captures no workload of this network namespace: `dataplane iptables import-mesh` prints `mesh.rules` for \
         the agent's configuration, in which the workload has to be captured",
    )?;
    let workloads: Vec<MeshWorkload> = place.agent.list("/mesh")?;
    let found = workloads.into_iter().find(|of| of.number == entry.workload);
    let found = found.context("the agent does not know the workload of this network namespace")?;
    let name = found.full_name();
    if let Some(problem) = found.problem {
        anyhow::bail!("{name} is not captured as it should be: {problem}");
    }
    Ok(Captured {
        name,
        entry,
        queries,
        rules: found.rules,
    })
}

impl Captured {
    /// What the rules capture and the dataplane does not, or the other way round.
    pub fn differences(&self, of_rules: &Capture) -> Vec<Difference> {
        let settings = import_mesh::settings(of_rules);
        let mesh = settings.mesh.unwrap_or_default();
        let mut all: BTreeMap<(String, String), [Option<String>; 2]> = BTreeMap::new();
        let mut add = |at: usize, about: &str, of: &str, says: &str| {
            // That they are is the default.
            let is_default = about == "inbound" && says == "captured";
            if !SETTINGS.contains(&about) && !is_default {
                let both = all.entry((about.to_owned(), of.to_owned())).or_default();
                both[at] = Some(says.to_owned());
            }
        };
        for said in said(&mesh) {
            add(0, said.about, &said.of, said.says);
        }
        for rule in &self.rules {
            add(1, &rule.about, &rule.of, &rule.says);
        }
        let word = |says: &str| Some(says.to_owned());
        let captured = |is: bool| word("captured").filter(|_| is);
        let dns = of_rules
            .dns
            .map(|dns| if dns.any { ALL } else { RESOLVERS });
        let outbound = [
            captured(of_rules.outbound != 0),
            captured(self.entry.flags & Enrolled::PROXY != 0),
        ];
        let whole = |about: &str| (about.to_owned(), String::new());
        all.insert(whole("outbound"), outbound);
        all.insert(
            whole("dns"),
            [dns.and_then(word), self.queries.and_then(word)],
        );
        let differing = all.into_iter().filter(|(_, [rules, ours])| rules != ours);
        differing
            .map(|((about, of), [rules, dataplane])| Difference {
                about,
                of,
                rules,
                dataplane,
            })
            .collect()
    }
}

fn said(mesh: &Mesh) -> Vec<Statement> {
    statements(&[(String::new(), mesh.rules.rules())])
}
