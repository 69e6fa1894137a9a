//! The contents of the capture tables, and lookups in them.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::{
    Addr,
    capture::{self, Enrolled, Local, RangeKey, RuleKey},
    tables::FrontendKey,
};
use ipnet::IpNet;

/// Contents of the capture tables, present or wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Workloads with a network namespace of their own, by its cookie.
    pub namespaces: BTreeMap<u64, Enrolled>,
    /// Workloads in the node's namespace, by their cgroup's id.
    pub cgroups: BTreeMap<u64, Enrolled>,
    /// Workloads' own addresses.
    pub locals: BTreeMap<Addr, Local>,
    /// Rules for ports, users, groups and interfaces.
    pub rules: BTreeMap<RuleKey, u32>,
    /// Destination ranges.
    pub ranges: BTreeMap<RangeKey, u32>,
    /// Endpoints at Pods' addresses; resolvers; and addresses of workloads without a port, for labels.
    pub known: BTreeMap<FrontendKey, u32>,
}

impl Captured {
    /// Adds the entries of `held` for workloads that could not be inspected, with all rules that these entries refer
    /// to. `keep` selects them by the number of the workload ([`Enrolled::workload`]) and the cookie of its network
    /// namespace (0 if it has no namespace of its own). An entry that is already here wins over an entry of `held`.
    pub fn keep(&mut self, held: &Self, keep: impl Fn(u32, u64) -> bool) {
        let mut kept = BTreeSet::new();
        let mut policies = BTreeSet::new();
        for (cookie, entry) in &held.namespaces {
            if keep(entry.workload, *cookie) && !self.namespaces.contains_key(cookie) {
                self.namespaces.insert(*cookie, *entry);
                kept.insert(entry.workload);
                policies.insert(entry.policy);
                if entry.resolvers != 0 {
                    policies.insert(entry.resolvers);
                }
            }
        }
        for (id, entry) in &held.cgroups {
            if keep(entry.workload, 0) && !self.cgroups.contains_key(id) {
                self.cgroups.insert(*id, *entry);
                kept.insert(entry.workload);
                policies.insert(entry.policy);
            }
        }
        for (addr, local) in &held.locals {
            if keep(local.workload, local.netns) && !self.locals.contains_key(addr) {
                // The DNS server does not know a workload that was not inspected, so the workload's own resolvers must
                // answer it.
                let kept_local = Local {
                    resolvers: 0,
                    ..*local
                };
                self.locals.insert(*addr, kept_local);
                kept.insert(local.workload);
                policies.insert(local.policy);
            }
        }
        for (key, said) in &held.rules {
            let of = match key.kind {
                RuleKey::INTERFACE => &kept,
                _ => &policies,
            };
            if of.contains(&key.of) {
                self.rules.entry(*key).or_insert(*said);
            }
        }
        policies.extend(self.sets_of_clients());
        for (key, said) in &held.ranges {
            if policies.contains(&key.policy) {
                self.ranges.entry(*key).or_insert(*said);
            }
        }
    }

    /// Returns the numbers of the sets of clients to which the rules refer.
    pub fn sets_of_clients(&self) -> impl Iterator<Item = u32> {
        let rules = self.rules.iter();
        let rules = rules.filter(|(key, _)| key.kind == RuleKey::SOURCES);
        rules.map(|(_, set)| *set)
    }

    /// Returns the range of a policy that decides about an address, which is the range with the longest prefix, and its
    /// value.
    pub fn longest_range(&self, policy: u32, addr: Addr) -> Option<(IpNet, u32)> {
        let number = |addr: Addr| u128::from_be_bytes(addr.octets());
        let contains = |key: &RangeKey| {
            let others = 160_u32.checked_sub(key.bits);
            let differs = number(key.addr) ^ number(addr);
            others.is_some_and(|others| differs.checked_shr(others).unwrap_or(0) == 0)
        };
        let ranges = self.ranges.iter();
        let matching = ranges.filter(|(key, _)| key.policy == policy && contains(key));
        let (key, said) = matching.max_by_key(|(key, _)| key.bits)?;
        Some((range(key)?, *said))
    }
}

/// Looks the tables up as the programs do.
impl capture::Rules for Captured {
    fn rule(&self, key: &RuleKey) -> u32 {
        self.rules.get(key).copied().unwrap_or_default()
    }

    fn range(&self, policy: u32, addr: Addr) -> u32 {
        self.longest_range(policy, addr).map_or(0, |(_, said)| said)
    }
}

/// Returns a range of a policy as a key.
pub fn range_key(policy: u32, range: &IpNet) -> RangeKey {
    let before = if range.addr().is_ipv4() { 96 } else { 0 };
    RangeKey {
        bits: 32 + before + u32::from(range.prefix_len()),
        policy,
        addr: range.network().into(),
    }
}

/// The inverse of [`range_key`]; `None` for any other key.
fn range(key: &RangeKey) -> Option<IpNet> {
    let addr = key.addr.ip();
    let before = if addr.is_ipv4() { 96 } else { 0 };
    let bits = key.bits.checked_sub(32 + before)?;
    IpNet::new(addr, u8::try_from(bits).ok()?).ok()
}
