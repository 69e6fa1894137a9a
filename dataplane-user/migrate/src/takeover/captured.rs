//! Determines the workload that the dataplane captures in the network namespace of this thread, and how its capture
//! differs from the capture by a sidecar's rules.

use std::collections::{BTreeMap, BTreeSet};

use admin::api::{MeshRule, MeshWorkload};
use anyhow::{Context as _, bail, ensure};
use dataplane_common::{
    Addr,
    capture::{CAPTURED, Enrolled, RangeKey},
};
use kernel::{capture::CaptureTables, tables::Tables};
use model::is_reserved;
use plan::enrol::statements;
use serde::Serialize;

use super::place::Place;
use crate::commands::import_mesh;
use crate::rules::capture::Capture;

/// Settings that a sidecar's rules do not have.
const SETTINGS: &[&str] = &["captured-by", "mode", "egress", "dns"];

/// The metrics port of Istio's sidecar.
const METRICS: u16 = 15090;

/// The dataplane or the rules capture queries to every address.
const ALL: &str = "all";
/// The dataplane or the rules capture only queries to the pod's own resolvers.
const RESOLVERS: &str = "resolvers";

/// A workload that the dataplane captures.
#[derive(Debug)]
pub struct Captured {
    /// The workload's namespace and name.
    pub name: String,
    held: Held,
    rules: Vec<MeshRule>,
}

/// The entries of this network namespace in the kernel's tables.
#[derive(Debug)]
struct Held {
    entry: Enrolled,
    /// The proxy's ports for outbound and for inbound connections.
    ports: [u16; 2],
    /// The addresses at which inbound connections are captured.
    inbound: BTreeSet<Addr>,
    /// The captured DNS queries: [`ALL`] or [`RESOLVERS`].
    queries: Option<&'static str>,
}

/// A subject that only the rules or only the dataplane captures.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The subject: one of [`MeshRule::about`], `outbound` for all outbound connections, or `inbound-address`.
    pub about: String,
    /// The range, port, user, group or address; empty if the difference concerns all.
    pub of: String,
    /// The rules' setting: `captured` or `excluded`; for DNS, `resolvers` or `all`; `None` if the rules have none.
    pub rules: Option<String>,
    /// The dataplane's setting, in the same words.
    pub dataplane: Option<String>,
}

/// Reads the entries of this network namespace. Returns `None` if the dataplane captures no workload here.
fn held(place: &Place) -> anyhow::Result<Option<Held>> {
    if !Tables::exist(&place.bpffs)? || Tables::open(&place.bpffs)?.mesh() == 0 {
        return Ok(None);
    }
    let tables = CaptureTables::open(&place.bpffs)?;
    let (all, config) = (tables.contents()?, tables.config());
    let here = kernel::namespaces::netns_cookie()?;
    let entry = all.namespaces.get(&here).copied();
    let Some(entry) = entry.filter(|entry| entry.flags & Enrolled::CAPTURED != 0) else {
        return Ok(None);
    };
    // A range of all addresses fixes only the 32 bits of the policy's number and, for IPv4, the 96 bits of the prefix.
    let is_all = |(range, says): (&RangeKey, &u32)| {
        range.policy == entry.resolvers && range.bits <= 32 + 96 && *says == CAPTURED
    };
    let queries = match entry.resolvers {
        0 => None,
        _ if all.ranges.iter().any(is_all) => Some(ALL),
        _ => Some(RESOLVERS),
    };
    let locals = all.locals.iter();
    let inbound =
        locals.filter(|(_, local)| local.netns == here && local.flags & Enrolled::INBOUND != 0);
    Ok(Some(Held {
        entry,
        ports: [config.outbound.host(), config.inbound.host()],
        inbound: inbound.map(|(addr, _)| *addr).collect(),
        queries,
    }))
}

/// Returns the name of the workload that is captured here, if an agent reports it; otherwise a general term.
///
/// # Errors
/// If the tables cannot be read.
pub fn enrolled(place: &Place) -> anyhow::Result<Option<String>> {
    let Some(held) = held(place)? else {
        return Ok(None);
    };
    let workloads: Vec<MeshWorkload> = place.agent.list("/mesh").unwrap_or_default();
    let mut found = workloads.iter();
    let found = found.find(|of| of.number == held.entry.workload);
    let name = found.map(MeshWorkload::full_name);
    Ok(Some(name.unwrap_or_else(|| "a workload".to_owned())))
}

/// Returns the workload that is captured here.
///
/// # Errors
/// If no workload is captured here, it is not captured correctly, its proxy does not listen, or no agent serves.
pub fn find(place: &Place) -> anyhow::Result<Captured> {
    place.serving()?;
    let held = held(place)?.context(
        "the dataplane captures no workload of this network namespace: `dataplane-migrate import-mesh` prints `mesh.rules` for \
         the agent's configuration, in which the workload has to be named under `mesh.workloads`; `dataplane status` says why a \
         workload is not captured",
    )?;
    let workloads: Vec<MeshWorkload> = place.agent.list("/mesh")?;
    let mut found = workloads.into_iter();
    let found = found.find(|of| of.number == held.entry.workload);
    let found = found.context("the agent does not know the workload of this network namespace")?;
    let name = found.full_name();
    if let Some(problem) = found.problem {
        bail!("{name} is not captured as it should be: {problem}");
    }
    let [outbound, inbound] = held.ports;
    for (port, is_needed) in [
        (outbound, held.entry.flags & Enrolled::PROXY != 0),
        (inbound, !held.inbound.is_empty()),
    ] {
        ensure!(
            !is_needed || !kernel::listening::listening(port)?.is_empty(),
            "the dataplane leads connections of {name} to port {port}, and nobody listens there in this network namespace"
        );
    }
    Ok(Captured {
        name,
        held,
        rules: found.rules,
    })
}

impl Captured {
    /// Returns the connections that only the rules or only the dataplane captures.
    ///
    /// # Errors
    /// If the addresses of this network namespace cannot be read.
    pub fn differences(&self, of_rules: &Capture) -> anyhow::Result<Vec<Difference>> {
        let mesh = import_mesh::settings(of_rules).mesh.unwrap_or_default();
        let mut all: BTreeMap<(String, String), [Option<String>; 2]> = BTreeMap::new();
        let mut add = |at: usize, about: &str, of: &str, says: &str| {
            // Inbound connections are captured by default.
            let is_default = about == "inbound" && says == "captured";
            // Ports of the sidecar itself are not compared, because a configuration cannot name all of them.
            let is_own = about == "inbound-port" && is_sidecars(of);
            if !SETTINGS.contains(&about) && !is_default && !is_own {
                let both = all.entry((about.to_owned(), of.to_owned())).or_default();
                both[at] = Some(says.to_owned());
            }
        };
        for said in statements(&[(String::new(), mesh.rules.rules())]) {
            add(0, said.about, &said.of, said.says);
        }
        for rule in &self.rules {
            add(1, &rule.about, &rule.of, &rule.says);
        }
        let captures = |is: bool| is.then_some("captured");
        let mut whole = |about: &str, of: String, rules: Option<&str>, ours: Option<&str>| {
            let both = [rules, ours].map(|says| says.map(str::to_owned));
            all.insert((about.to_owned(), of), both);
        };
        let flag = |flag: u32| self.held.entry.flags & flag != 0;
        whole(
            "outbound",
            String::new(),
            captures(of_rules.outbound != 0),
            captures(flag(Enrolled::PROXY) && !flag(Enrolled::ONLY_HBONE)),
        );
        // The rules redirect connections to the proxy even if the proxy does not listen.
        let without = if flag(Enrolled::FAIL_OPEN) {
            "pass"
        } else {
            "refuse"
        };
        whole(
            "without-proxy",
            String::new(),
            Some("refuse"),
            Some(without),
        );
        let dns = of_rules
            .dns
            .map(|dns| if dns.any { ALL } else { RESOLVERS });
        whole("dns", String::new(), dns, self.held.queries);
        if of_rules.takes_inbound {
            // Connections to an interface's addresses arrive at this interface.
            let mut left_alone = BTreeSet::new();
            if !of_rules.exclude_interfaces.is_empty() {
                let interfaces = kernel::interfaces::interfaces()?.into_iter();
                let excluded =
                    interfaces.filter(|of| of_rules.exclude_interfaces.contains(&of.name));
                let addresses = excluded.flat_map(|of| of.addresses);
                left_alone.extend(addresses.map(|net| net.addr()));
            }
            let all = kernel::capture::addresses()?.into_iter();
            for addr in all.filter(|addr| !left_alone.contains(addr)) {
                let family = if addr.is_ipv4() { "IPv4" } else { "IPv6" };
                if of_rules.missing != Some(family) {
                    let ours = captures(self.held.inbound.contains(&addr.into()));
                    whole("inbound-address", addr.to_string(), Some("captured"), ours);
                }
            }
        }
        let differing = all.into_iter().filter(|(_, [rules, ours])| rules != ours);
        Ok(differing
            .map(|((about, of), [rules, dataplane])| Difference {
                about,
                of,
                rules,
                dataplane,
            })
            .collect())
    }
}

/// Returns true if a port is one of the sidecar's own.
fn is_sidecars(port: &str) -> bool {
    port.parse()
        .is_ok_and(|port| is_reserved(port) || port == METRICS)
}
