//! Explains step by step whether a connection goes to a workload's proxy. Uses the code of the kernel's programs, on
//! the present tables.

mod call;
mod judged;
mod rule;

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use admin::{api, client::Client as Agent};
use agent::addresses;
use anyhow::Context as _;
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    capture::{
        self, CaptureConfig, Enrolled, ListenerKey, Local, MESH_CGROUPS, MESH_DENIES, MESH_DNS,
        MESH_GUARD, MESH_NAMESPACES, RuleKey,
    },
    first,
    tables::FrontendKey,
};
use kernel::{capture::CaptureTables, tables::Tables};
use plan::Captured;
use serde::Serialize;
use terminal::netns;

use self::call::Call;
use self::judged::WITHOUT_POLICIES;
pub use self::rule::Rule;
use super::{Destination, Namespace};

/// The decision about a connection of a workload, outbound or inbound.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// `outbound` or `inbound`.
    pub direction: &'static str,
    /// The workload. `None` if its name is unknown because no agent runs.
    pub workload: Option<String>,
    /// `captured`, `direct`, `left-alone`, `refused`, or `unknown`: it depends on the client's address, which is not known.
    pub verdict: &'static str,
    /// The word of the [`Reason`]; `client-unknown` for the verdict `unknown`.
    pub reason: &'static str,
    /// The rule that decided. `None` if no rule decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<Rule>,
    /// Whether the proxy or the kernel allows the connection: by Istio's policies, by whether its waypoint can be used, or
    /// `false` if several Pods have the address and one of them speaks HBONE. `None`: none of these decides, or the agent or
    /// the client's address is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed: Option<bool>,
    /// The steps, for people.
    #[serde(skip)]
    pub steps: Vec<String>,
}

/// The client of a connection.
#[derive(Debug, Default)]
pub struct Client<'a> {
    /// The network namespace, if it is known.
    pub namespace: Option<&'a Namespace>,
    /// Whether the namespace is the node's own.
    pub own: bool,
    /// Its address, if it is known.
    pub address: Option<IpAddr>,
    /// The process's cgroups, the innermost first; empty if they are not known.
    pub cgroups: Vec<(u64, PathBuf)>,
    /// The process's user. `None` if rules do not apply to it.
    pub user: Option<u32>,
    /// The process's group. `None` if rules do not apply to it.
    pub group: Option<u32>,
}

/// A mesh with its present tables.
#[derive(Debug)]
pub struct Mesh {
    word: u64,
    config: CaptureConfig,
    held: Captured,
    listeners: BTreeSet<ListenerKey>,
    /// Cookie of the node's network namespace.
    host_netns: u64,
    /// The workloads that the agent reports. `None` if the agent does not answer.
    workloads: Option<Vec<api::MeshWorkload>>,
}

impl Mesh {
    /// Reads the tables. `None` if there is no mesh on this node.
    pub fn open(tables: &Tables, bpffs: &Path, agent: &Agent) -> anyhow::Result<Option<Self>> {
        let word = tables.mesh();
        if word == 0 {
            return Ok(None);
        }
        let open = CaptureTables::open(bpffs)?;
        Ok(Some(Self {
            word,
            config: open.config(),
            held: open.contents()?,
            listeners: open.listeners()?,
            host_netns: tables.host_netns(),
            workloads: agent.list("/mesh").ok(),
        }))
    }

    /// Returns the place of the workload with this name.
    pub fn find(&self, name: &str) -> anyhow::Result<Place> {
        let workloads = self.workloads.as_ref().with_context(|| {
            format!(
                "cannot find {name}: only a running agent knows the workloads' names, and no agent answers; give the \
                 workload's address instead, or netns:NAME"
            )
        })?;
        let mut workloads = workloads.iter();
        let workload = workloads
            .find(|w| w.full_name() == name)
            .with_context(|| format!("no workload {name} is captured on this node"))?;
        let is = |entry: &&Enrolled| entry.workload == workload.number;
        if let Some((cookie, _)) = self.held.namespaces.iter().find(|(_, e)| is(e)) {
            let found = netns::with_cookie(*cookie)?;
            return found
                .map(Place::Namespace)
                .with_context(|| format!("the network namespace of {name} is gone"));
        }
        if let Some((id, _)) = self.held.cgroups.iter().find(|(_, e)| is(e)) {
            return Ok(Place::Cgroup(*id));
        }
        let mut locals = self.held.locals.iter();
        let of_packets = |local: &Local| local.is_by_packets() && is(&&local.enrolled());
        if let Some((addr, _)) = locals.find(|(_, local)| of_packets(local)) {
            return Ok(Place::Packets(addr.ip()));
        }
        anyhow::bail!(
            "{name} has no network namespace of its own on this node, so its connections are not captured"
        )
    }

    /// Returns the cookie of the network namespace of the workload with this address, if it is captured by its sockets.
    pub fn namespace_with(&self, addr: IpAddr) -> Option<u64> {
        let local = self.held.locals.get(&addr.into())?;
        (local.netns != 0 && !local.is_by_packets()).then_some(local.netns)
    }

    /// Explains a client's connection. `None` if capture does not apply to it.
    pub fn outbound(
        &self,
        tables: &Tables,
        client: &Client<'_>,
        to: Destination,
    ) -> Option<Outcome> {
        let is_tcp = to.protocol == Protocol::TCP;
        let at_sockets = is_tcp || self.word & MESH_DENIES != 0 || self.word >> MESH_DNS != 0;
        let (enrolled, how) = match self.whose(client) {
            Owner::Workload(enrolled, how) => (enrolled, how),
            _ if !at_sockets => return None,
            Owner::Guarded => {
                let mut told = self.told("outbound", 0, Reason::Guarded);
                self.close(&mut told, Reason::Guarded, false);
                return Some(told);
            }
            Owner::Nobody => return None,
        };
        let is_by_packets = enrolled.flags & Enrolled::PACKETS != 0;
        if !enrolled.is_judged() || !at_sockets && !is_by_packets {
            return None;
        }
        let is_captured = enrolled.flags & Enrolled::CAPTURED != 0;
        let call = Call {
            mesh: self,
            tables,
            client,
            enrolled: &enrolled,
            to: (to.addr.into(), Port::new(to.port)),
            protocol: to.protocol,
        };
        // No process has these numbers.
        let (user, group) = (
            client.user.unwrap_or(u32::MAX),
            client.group.unwrap_or(u32::MAX),
        );
        let ids = (user, group);
        let excludes_user = capture::excludes_user(&call, &enrolled, ids);
        let (mut reason, is_judged) = if is_tcp && !is_captured {
            (Reason::NotService, false)
        } else if is_tcp {
            capture::decide_outbound(&call, &self.config, &enrolled, call.to, excludes_user)
        } else if call.is_by_packets() {
            (Reason::NotService, false)
        } else {
            capture::decide_datagram(&call, &enrolled, call.to, excludes_user)
        };
        let (denied, all) = if is_judged { call.denied() } else { (0, 0) };
        if denied > 0 && denied == all {
            reason = Reason::EgressDenied;
        }
        if reason != Reason::EgressDenied
            && capture::is_query(&call, &enrolled, call.to, excludes_user)
        {
            // By either protocol: the server has both sockets or none.
            if tables.queries_are_bypassed().is_none()
                && (call.is_by_packets() || call.listens_at(capture::dns_server(self.word)))
            {
                reason = Reason::CapturedDns;
            } else if !is_tcp {
                reason = Reason::DnsBypassed;
            }
        }
        if reason == Reason::NotService && denied == 0 {
            return None;
        }
        let (addr, _) = call.to;
        let of_node =
            addr.is_link_local() || addr.is_loopback() || capture::Circumstances::is_own(&call);
        if reason == Reason::Captured && call.is_by_packets() && of_node {
            reason = Reason::ToNode;
        }
        let mut told = self.told("outbound", enrolled.workload, reason);
        told.steps.push(format!("{how} is {}", whose(&told)));
        if enrolled.flags & Enrolled::HAS_USERS != 0 && client.user.is_none() {
            told.steps.push(
                "rules name users or groups, and the process's user is unknown (give --user, or \
                 pid:NUMBER): explained for a user that no rule names"
                    .to_owned(),
            );
        }
        if denied > 0 {
            told.steps.push(format!(
                "egress is denied to {denied} of {all} endpoints: a rule that excludes the service from capture \
                 exempts only endpoints that it excludes, too"
            ));
        }
        if !told.add_hbone(&call, reason) {
            told.rule = self.outbound_rule(reason, &enrolled, call.to, ids);
        }
        self.close(&mut told, reason, call.is_by_packets());
        Some(told)
    }

    /// Explains a connection to an address of a workload. `None` if it is not such an address, or if inbound
    /// connections of the workload are not captured.
    pub fn inbound(&self, client: &Client<'_>, to: Destination) -> Option<Outcome> {
        let local = self.held.locals.get(&to.addr.into())?;
        let from_itself = client.namespace.is_some_and(|n| n.cookie == local.netns);
        // The port belongs to the workload's own proxy, to which its rules may redirect.
        let of_sidecar = self.config.flags & CaptureConfig::FOREIGN != 0
            && self.config.inbound == Port::new(to.port);
        if of_sidecar && !from_itself {
            return None;
        }
        let has = |flags| local.flags & flags != 0;
        let is_judged = has(Enrolled::JUDGES_INBOUND);
        let is_decided = (is_judged || has(Enrolled::PROXY | Enrolled::REFUSES_INBOUND))
            && !local.is_by_packets();
        if to.protocol != Protocol::TCP || !is_decided || from_itself {
            return None;
        }
        let interface = interface_of(local.netns, to);
        let number = interface.as_ref().map_or(0, |(_, number)| *number);
        let own = [self.config.inbound, self.config.outbound].contains(&Port::new(to.port));
        let tunnel = capture::tunnel(local, to.port.into());
        let by_rules = || capture::inbound(&self.held, local, to.port.into(), number);
        let mut reason = tunnel.unwrap_or_else(by_rules);
        if tunnel.is_some() {
            // No rule decides.
        } else if has(Enrolled::INBOUND | Enrolled::TUNNELS) && own {
            reason = Reason::Recursive;
        } else if !has(Enrolled::INBOUND) && reason != Reason::Unsupported {
            if !is_judged && !has(Enrolled::PROXY) {
                return None;
            }
            reason = self.without_proxy(reason, local, client.address, to.port);
        }
        let (netns, is_v4) = (local.netns, to.addr.is_ipv4());
        let (key, without) = if tunnel.is_some() {
            (ListenerKey::of_tunnels(netns, is_v4), Reason::ProxyDown)
        } else {
            let without = capture::without_proxy(local.flags);
            (ListenerKey::of_namespace(netns, is_v4), without)
        };
        if reason == Reason::CapturedInbound && !self.listeners.contains(&key) {
            reason = without;
        }
        let mut told = self.told("inbound", local.workload, reason);
        told.steps
            .push(format!("{} is an address of {}", to.addr, whose(&told)));
        if let Some((name, _)) = &interface
            && local.flags & Enrolled::HAS_INTERFACES != 0
        {
            told.steps.push(format!(
                "explained for a connection that arrives at {name}, which has the address"
            ));
        }
        if tunnel.is_some() {
            told.steps.push(format!(
                "port {} of the workload is its proxy's, for tunnels (HBONE): no rule about inbound connections applies",
                to.port
            ));
        } else {
            let interface = interface.map(|(name, _)| name);
            if reason == Reason::Direct && !is_judged {
                told.steps.push(WITHOUT_POLICIES.to_owned());
            }
            told.rule = self.inbound_rule(reason, local, to.port, interface.as_deref());
        }
        if reason == Reason::Direct && is_judged && client.address.is_none() {
            told.is_for_unknown_client();
        } else {
            self.close(&mut told, reason, false);
        }
        Some(told)
    }

    /// Returns the workload of a client.
    fn whose(&self, client: &Client<'_>) -> Owner {
        if let Some(address) = client.address
            && let Some(local) = self.held.locals.get(&address.into())
            && local.is_by_packets()
        {
            let how = format!("the client {address}, recognized by its packets,");
            return Owner::Workload(local.enrolled(), how);
        }
        let namespace = client.namespace;
        if self.word & MESH_NAMESPACES != 0
            && let Some(namespace) = namespace
            && let Some(enrolled) = self.held.namespaces.get(&namespace.cookie)
        {
            return Owner::Workload(*enrolled, "this network namespace".to_owned());
        }
        if client.own && self.word & MESH_CGROUPS != 0 {
            let mut cgroups = client.cgroups.iter();
            let found = cgroups.find_map(|(id, path)| {
                let enrolled = self.held.cgroups.get(id)?;
                let how = format!("cgroup {}", path.display());
                Some(Owner::Workload(*enrolled, how))
            });
            return found.unwrap_or(Owner::Nobody);
        }
        if self.word & MESH_GUARD != 0 && !client.own && namespace.is_some() {
            return Owner::Guarded;
        }
        Owner::Nobody
    }

    fn told(&self, direction: &'static str, workload: u32, reason: Reason) -> Outcome {
        Outcome {
            direction,
            workload: self.workload(workload).map(api::MeshWorkload::full_name),
            verdict: match reason {
                Reason::Captured | Reason::CapturedInbound | Reason::CapturedDns => "captured",
                Reason::Direct => "direct",
                reason if reason.is_refusal() => "refused",
                _ => "left-alone",
            },
            reason: reason.word(),
            rule: None,
            allowed: None,
            steps: Vec::new(),
        }
    }

    /// Adds the steps with the rule and the reason.
    fn close(&self, told: &mut Outcome, reason: Reason, by_packets: bool) {
        if let Some(Rule {
            about,
            of,
            says,
            by,
        }) = &told.rule
        {
            let what = [about, of.as_str()].join(" ");
            let by = by.as_deref().map_or_else(
                || "origin unknown without a running agent".to_owned(),
                |by| format!("says {by}"),
            );
            told.steps
                .push(format!("rule: {} {says}, {by}", what.trim()));
        } else if matches!(reason, Reason::Captured | Reason::CapturedInbound) {
            told.steps
                .push("no rule excludes the connection".to_owned());
        }
        let port = self.config.outbound;
        told.steps.push(match reason {
            Reason::Captured | Reason::ProxyDown | Reason::ProxyBypassed if by_packets => format!(
                "{} listens for the workload on the node: {}",
                if reason == Reason::Captured {
                    "its proxy"
                } else {
                    "no proxy"
                },
                reason.text()
            ),
            Reason::Captured => format!(
                "a process listens at loopback's port {} in its network namespace: {}",
                port.host(),
                reason.text()
            ),
            Reason::ProxyDown | Reason::ProxyBypassed if told.direction == "outbound" => format!(
                "no process listens at loopback's port {} in its network namespace: {}",
                port.host(),
                reason.text()
            ),
            reason => reason.text().to_owned(),
        });
    }
}

impl capture::Rules for Mesh {
    fn rule(&self, key: &RuleKey) -> u32 {
        self.held.rule(key)
    }

    fn range(&self, policy: u32, addr: Addr) -> u32 {
        self.held.range(policy, addr)
    }
}

impl first::Workloads for Mesh {
    fn mesh(&self) -> u64 {
        self.word
    }

    fn local(&self, addr: Addr) -> Option<Local> {
        self.held.locals.get(&addr).copied()
    }

    fn has(&self, to: &FrontendKey) -> bool {
        self.held.known.contains_key(to)
    }
}

/// The owner of a connection.
enum Owner {
    /// A workload, and the evidence for it.
    Workload(Enrolled, String),
    /// The namespace is still guarded, because the agent has not inspected it yet. The connection is refused.
    Guarded,
    Nobody,
}

/// The place of a workload.
#[derive(Debug)]
pub enum Place {
    /// A network namespace of its own.
    Namespace(Namespace),
    /// The node's network namespace, in the cgroup with this id.
    Cgroup(u64),
    /// The place of its sockets is unknown here. Its packets have this address.
    Packets(IpAddr),
}

fn whose(told: &Outcome) -> String {
    told.workload.as_deref().map_or_else(
        || "a workload (name unknown without a running agent)".to_owned(),
        |name| format!("workload {name}"),
    )
}

/// Returns the interface of a namespace that has an address: its name and index.
fn interface_of(cookie: u64, to: Destination) -> Option<(String, u32)> {
    let look = move || {
        let all = addresses::of_interfaces()?;
        let found = all.into_iter().find(|address| address.addr == to.addr);
        let name = found.map(|address| address.interface).unwrap_or_default();
        let number = nix::net::if_::if_nametoindex(name.as_str())?;
        Ok((name, number))
    };
    netns::with_cookie(cookie).ok()??.inside(look).ok()
}

/// Returns a process's cgroups, the innermost first, with the numbers by which programs know them.
pub fn cgroups_of(pid: u32) -> anyhow::Result<Vec<(u64, PathBuf)>> {
    let file = format!("/proc/{pid}/cgroup");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let path = PathBuf::from(path.unwrap_or_default());
    let root = kernel::Paths::find(PathBuf::new(), None)?.cgroup;
    let all = path.ancestors().filter_map(|path| {
        let id = fs::metadata(root.join(path)).ok()?.ino();
        Some((id, Path::new("/").join(path)))
    });
    Ok(all.collect())
}

/// Returns a process's real user and group, which are those that programs see.
pub fn ids_of(pid: u32) -> anyhow::Result<(u32, u32)> {
    let file = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    let first = |what: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(what))?;
        line.split_whitespace().next()?.parse().ok()
    };
    first("Uid:")
        .zip(first("Gid:"))
        .with_context(|| format!("{file} does not tell the process's user"))
}
