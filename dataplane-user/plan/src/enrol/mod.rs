//! Enrolment: the workloads that are captured, their rules, and their entries in the tables. The caller finds the
//! places of the workloads.

mod bounds;
mod budgets;
mod istio;
mod kept;
mod known;
mod member;
mod members;
mod named;
mod plain;
mod statements;
mod waypoints;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
};

pub use budgets::fit_addresses;
use dataplane_common::capture::{
    CAPTURED, EXCLUDED, Enrolled, Local, REFUSED_BY, RuleKey, TUNNELS,
};
pub use istio::{consequence, limited, may_be_refused, missing_root, unread};
pub use kept::{Retained, Unknown};
pub use known::{Unlisted, known};
pub use member::{Auto, Member};
pub use members::{MeshStatements, members, members_again};
use model::{HBONE, Workload, WorkloadName, authorization::PolicyName};
pub use plain::Judge;
pub use statements::{Statement, statements};
pub use waypoints::unusable_waypoints;

use super::{Captured, Policies, Resolvers};

// The kernel programs and the model have no crate in common.
const _: () = assert!(TUNNELS.host() == HBONE);

/// A workload that is to be captured, and the result.
#[derive(Clone, Debug)]
pub struct Enrolment {
    /// The workload.
    pub workload: Arc<Workload>,
    /// Its number in the tables ([`Enrolled::workload`]).
    pub number: u32,
    /// Its rules, for people.
    pub rules: Vec<Statement>,
    /// The reason why it is not captured as its rules ask.
    pub problem: Option<Problem>,
    /// Whether the kernel enforces Istio's policies for its inbound connections.
    pub by_kernel: bool,
    /// See [`Member::closed`].
    pub closed: Option<&'static str>,
}

/// The reason why a workload is not captured as its rules ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The event, and the remedy.
    pub text: String,
    /// Whether the cause is the node: the agent, the kernel or the operator's configuration. Otherwise the cause is the
    /// workload or its author, and the node is healthy.
    pub of_node: bool,
}

impl Problem {
    /// A problem caused by the workload or its author.
    pub fn of_workload(text: impl fmt::Display) -> Self {
        Self {
            text: text.to_string(),
            of_node: false,
        }
    }

    /// A problem caused by the agent, the kernel or the operator's configuration.
    pub fn of_node(text: impl fmt::Display) -> Self {
        Self {
            text: text.to_string(),
            of_node: true,
        }
    }
}

/// A network namespace with a workload in it.
#[derive(Clone, Copy, Debug)]
pub struct Home<'a> {
    /// Its cookie (`SO_NETNS_COOKIE`), by which programs know it.
    pub cookie: u64,
    /// Indices of the interfaces that the workload's policy names.
    pub interfaces: &'a BTreeMap<String, u32>,
}

/// Assigns numbers to workloads and their policies, and writes their entries.
#[derive(Debug)]
pub struct Enroller {
    /// Whether the proxy is not the agent's.
    foreign: bool,
    /// Whether the agent's proxy accepts tunnels to workloads.
    tunnels: bool,
    policies: Policies,
    /// Numbers of workloads in the tables.
    numbers: HashMap<WorkloadName, u32>,
    last: u32,
    /// Highest number that an earlier agent assigned. Only that agent knew the workloads of its numbers.
    earlier: u32,
}

impl Enroller {
    /// Continues after an earlier agent, whose tables hold `held`. `foreign`: whether the proxy is not the agent's; `tunnels`:
    /// whether the agent's proxy accepts tunnels to workloads.
    pub fn after(held: &Captured, foreign: bool, tunnels: bool) -> Self {
        let enrolled = || held.namespaces.values().chain(held.cgroups.values());
        let rules = held
            .rules
            .keys()
            .filter(|key| key.kind != RuleKey::INTERFACE);
        let locals = || held.locals.values();
        let policies = enrolled().map(|e| e.policy).chain(rules.map(|key| key.of));
        let policies = policies.chain(locals().map(|local| local.policy));
        let policies = policies.chain(enrolled().map(|e| e.resolvers));
        let policies = policies.chain(locals().map(|local| local.resolvers));
        let policies = policies.chain(held.ranges.keys().map(|key| key.policy));
        let refusers = held.ranges.values().map(|said| *said >> REFUSED_BY);
        let workloads = enrolled().map(|e| e.workload);
        let workloads = workloads.chain(locals().map(|local| local.workload));
        let last = workloads.max().unwrap_or_default();
        Self {
            foreign,
            tunnels: tunnels && !foreign,
            policies: Policies::after(policies.max().unwrap_or_default())
                .with_refusers_after(refusers.max().unwrap_or_default()),
            numbers: HashMap::new(),
            last,
            earlier: last,
        }
    }

    /// Returns the highest number that an earlier agent assigned. Only that agent knew the workloads of its numbers.
    pub fn earlier(&self) -> u32 {
        self.earlier
    }

    /// Returns the workloads with numbers.
    pub fn numbers(&self) -> impl Iterator<Item = (&WorkloadName, u32)> {
        self.numbers.iter().map(|(name, number)| (name, *number))
    }

    /// Returns the number of a workload, and assigns one if it has none.
    pub fn number(&mut self, name: &WorkloadName) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.last += 1;
        self.numbers.insert(name.clone(), self.last);
        self.last
    }

    /// Returns the entry of a workload, and adds its policy to `wanted`.
    pub fn enrol(&mut self, member: &Member, wanted: &mut Captured) -> Enrolled {
        let (policy, mut flags) = self.policies.add(&member.policy, self.foreign, wanted);
        // Only a workload that accepts tunnels itself has a rule for their port.
        let accepts_itself = member.policy.inbound_ports.contains_key(&TUNNELS.host());
        if self.tunnels && flags & Enrolled::INBOUND != 0 && !accepts_itself {
            flags |= Enrolled::TUNNELS;
        }
        if self.tunnels && flags & Enrolled::PROXY != 0 && !member.workload.account.is_empty() {
            // The proxy sends its connections to waypoints, or refuses them.
            flags = flags & !Enrolled::REFUSES_SERVICES | Enrolled::ENCRYPTS;
            if let Some(auto) = member.auto {
                flags |= Enrolled::ONLY_HBONE;
                if !auto.plain_to_proxy {
                    flags &= !Enrolled::INBOUND;
                }
            }
        }
        Enrolled {
            policy,
            flags,
            workload: self.number(&member.workload.name),
            resolvers: 0,
        }
    }

    /// Returns the entry of a workload with a network namespace of its own, and adds the entries of that namespace to
    /// `wanted`.
    pub fn enrol_namespace(
        &mut self,
        member: &Member,
        namespace: Home<'_>,
        wanted: &mut Captured,
    ) -> Enrolled {
        let mut entry = self.enrol(member, wanted);
        let policy = &member.policy;
        let is_virtual = entry.flags & Enrolled::VIRTUAL != 0;
        let excluded = policy
            .excluded_interfaces
            .iter()
            .map(|name| (name, EXCLUDED));
        let of_machines = policy.virtual_interfaces.iter().filter(|_| is_virtual);
        for (name, said) in excluded.chain(of_machines.map(|name| (name, CAPTURED))) {
            let Some(index) = namespace.interfaces.get(&**name) else {
                continue;
            };
            entry.flags |= Enrolled::HAS_INTERFACES;
            let key = RuleKey {
                of: entry.workload,
                kind: RuleKey::INTERFACE,
                id: *index,
            };
            *wanted.rules.entry(key).or_default() |= said;
        }
        wanted.namespaces.insert(namespace.cookie, entry);
        if member.policy.only_queries {
            return entry;
        }
        for addr in &member.workload.addresses {
            let local = Local {
                netns: namespace.cookie,
                policy: entry.policy,
                flags: entry.flags,
                workload: entry.workload,
                resolvers: 0,
            };
            wanted.locals.insert((*addr).into(), local);
        }
        entry
    }

    /// Captures the queries that a workload in a network namespace sends to these resolvers.
    pub fn capture_queries(&mut self, cookie: u64, to: &Resolvers, wanted: &mut Captured) {
        let resolvers = self.resolvers(to, wanted);
        if let Some(entry) = wanted.namespaces.get_mut(&cookie) {
            entry.resolvers = resolvers;
        }
    }

    /// Returns the number of resolvers ([`Enrolled::resolvers`]), and adds them to `wanted`.
    pub fn resolvers(&mut self, to: &Resolvers, wanted: &mut Captured) -> u32 {
        self.policies.add_resolvers(to, wanted)
    }

    /// Forgets the numbers of all workloads that are not in `wanted`. Entries that still have such a number belong to
    /// connections that continue.
    pub fn keep_numbers(&mut self, wanted: &BTreeSet<u32>) {
        self.numbers.retain(|_, number| wanted.contains(number));
    }

    /// Returns Istio's policies that refuse clients in the kernel, with their numbers.
    pub fn refusers(&self) -> impl Iterator<Item = (u32, &PolicyName)> {
        self.policies.refusers()
    }

    /// Forgets the policies that no entry refers to.
    pub fn keep_policies(&mut self, wanted: &Captured) {
        let used: BTreeSet<u32> = wanted
            .namespaces
            .values()
            .chain(wanted.cgroups.values())
            .flat_map(|entry| [entry.policy, entry.resolvers])
            .chain(
                wanted
                    .locals
                    .values()
                    .flat_map(|local| [local.policy, local.resolvers]),
            )
            .chain(wanted.sets_of_clients())
            .collect();
        let refusers = wanted.ranges.values().map(|said| *said >> REFUSED_BY);
        let refusers: BTreeSet<u32> = refusers.collect();
        self.policies.keep(
            |number| used.contains(&number),
            |refuser| refusers.contains(&refuser),
        );
    }
}

#[cfg(test)]
mod tests;
