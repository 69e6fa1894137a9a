//! The workloads whose connections are captured.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use dataplane_common::{
    Addr,
    capture::{CaptureConfig, Enrolled, ListenerKey},
};
use kernel::{capture::CaptureTables, namespaces};
use plan::Captured;
use serde::{Deserialize, Serialize};

use crate::api::MeshWorkload;

/// A workload whose connections are captured, as the kernel's tables have it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workload {
    /// Namespace and name; `None` if only an agent that does not answer knows them.
    pub name: Option<String>,
    /// How it is recognised: `netns` and the cookie, `cgroup` and the id, or `packets` and its addresses.
    pub place: String,
    /// `proxy` or `kernel`, or `auto` if only connections to destinations that speak HBONE go to the proxy. Otherwise, `auto`
    /// becomes one of the others.
    pub mode: String,
    /// Unknown destinations: `allow` or `deny`.
    pub egress: String,
    /// The treatment of connections that need the proxy while it does not listen: `refuse` or `pass`; `pass-plain` if connections
    /// to destinations that speak HBONE are refused.
    pub without_proxy: String,
    /// What happens to connections while the proxy does not listen, for people.
    #[serde(skip)]
    pub consequence: String,
    /// Whether the proxy listens, now: `ready`, `down`, `no-outbound` or `no-inbound` (it listens for
    /// the other direction only); `-` if it needs none.
    pub proxy: String,
    /// Why it is not captured as it should be.
    pub problem: Option<String>,
}

/// Returns the workloads whose connections are captured, and whether their proxies listen.
pub fn workloads(
    paths: &kernel::Paths,
    named: &[MeshWorkload],
) -> Result<Vec<Workload>, kernel::Error> {
    if !kernel::tables::Tables::exist(&paths.bpffs)?
        || kernel::tables::Tables::open(&paths.bpffs)?.mesh() == 0
    {
        return Ok(Vec::new());
    }
    let tables = CaptureTables::open(&paths.bpffs)?;
    let (config, held) = (tables.config(), tables.contents()?);
    let listening = tables.listeners()?;
    let outbound = outbound_listeners(config, &held);
    let row = |entry: &Enrolled, place: String, listens: [bool; 2]| {
        let known = named.iter().find(|w| w.number == entry.workload);
        let flag = |flag: u32, set: &str, unset: &str| {
            if entry.flags & flag != 0 { set } else { unset }.to_owned()
        };
        Workload {
            name: known.map(MeshWorkload::full_name),
            place,
            mode: match entry.flags & (Enrolled::PROXY | Enrolled::ONLY_HBONE) {
                0 => "kernel",
                Enrolled::PROXY => "proxy",
                _ => "auto",
            }
            .to_owned(),
            egress: flag(Enrolled::EGRESS_DENY, "deny", "allow"),
            without_proxy: match entry.flags & (Enrolled::FAIL_OPEN | Enrolled::ENCRYPTS) {
                Enrolled::FAIL_OPEN => "pass",
                flags if flags & Enrolled::FAIL_OPEN != 0 => "pass-plain",
                _ => "refuse",
            }
            .to_owned(),
            consequence: consequence(entry.flags).to_owned(),
            proxy: match (entry.flags & Enrolled::PROXY != 0, listens) {
                (false, _) => "-",
                (true, [true, true]) => "ready",
                (true, [false, true]) => "no-outbound",
                (true, [true, false]) => "no-inbound",
                (true, [false, false]) => "down",
            }
            .to_owned(),
            problem: known.and_then(|w| w.problem.clone()),
        }
    };
    let captured = |entry: &&Enrolled| entry.flags & Enrolled::CAPTURED != 0;
    let namespaces = held.namespaces.iter().filter(|(_, e)| captured(e));
    let in_namespaces = namespaces.map(|(cookie, entry)| {
        let takes = |flag, key: fn(u64, bool) -> ListenerKey| {
            let mut keys = [true, false].map(|v4| key(*cookie, v4)).into_iter();
            entry.flags & flag == 0 || keys.any(|key| listening.contains(&key))
        };
        let takes = takes(Enrolled::INBOUND, ListenerKey::of_namespace)
            && takes(Enrolled::TUNNELS, ListenerKey::of_tunnels);
        let listens = [outbound.contains(cookie), takes];
        row(entry, format!("netns {cookie}"), listens)
    });
    // For these workloads only outbound connections are captured, in the node's own namespace.
    let own = kernel::tables::Tables::open(&paths.bpffs)?.host_netns();
    let in_cgroups = held.cgroups.iter().map(|(id, entry)| {
        let listens = outbound.contains(&own);
        row(entry, format!("cgroup {id}"), [listens, listens])
    });
    // Workloads that are captured by their packets.
    let mut addresses: BTreeMap<u32, (Enrolled, Vec<&Addr>)> = BTreeMap::new();
    for (addr, local) in held.locals.iter().filter(|(_, l)| l.is_by_packets()) {
        let entry = local.enrolled();
        let found = addresses.entry(entry.workload);
        found.or_insert((entry, Vec::new())).1.push(addr);
    }
    let guests = addresses.values().filter(|(entry, _)| captured(&entry));
    let by_packets = guests.map(|(entry, addresses)| {
        let keys = [true, false].map(|v4| ListenerKey::of_packets(entry.workload, v4));
        let listens = keys.iter().any(|key| listening.contains(key));
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        let place = format!("packets {}", addresses.join(","));
        row(entry, place, [listens, listens])
    });
    let all = in_namespaces.chain(in_cgroups).chain(by_packets);
    let mut all: Vec<Workload> = all.collect();
    all.sort_by(|a, b| (&a.name, &a.place).cmp(&(&b.name, &b.place)));
    Ok(all)
}

/// Returns what happens to the connections of a workload with these flags while its proxy does not listen.
const fn consequence(flags: u32) -> &'static str {
    if flags & Enrolled::ONLY_HBONE != 0 {
        "connections to destinations that speak HBONE are refused, withoutProxy decides about the inbound connections that \
         policies have to judge, and all others go on"
    } else if flags & Enrolled::ENCRYPTS != 0 {
        "withoutProxy decides about the workload's connections; connections to destinations that speak HBONE are refused in any \
         case"
    } else {
        "withoutProxy decides about the workload's connections"
    }
}

/// Returns the namespaces, by their cookies, in which a socket listens for captured connections.
fn outbound_listeners(config: CaptureConfig, held: &Captured) -> BTreeSet<u64> {
    let wanted = |entry: &Enrolled| entry.flags & Enrolled::PROXY != 0;
    if !held
        .namespaces
        .values()
        .chain(held.cgroups.values())
        .any(wanted)
    {
        return BTreeSet::new();
    }
    let port = config.outbound.host();
    let look = |_: &Path| {
        let sockets = kernel::listening::listening(port)?;
        let takes = |v4| sockets.iter().any(|socket| socket.takes_loopback(v4));
        let cookie = namespaces::netns_cookie().map_err(io::Error::other)?;
        Ok((takes(true) || takes(false)).then_some(cookie))
    };
    namespaces::visit(look)
        .found
        .into_iter()
        .flatten()
        .collect()
}
