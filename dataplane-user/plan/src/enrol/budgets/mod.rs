//! Divides the capture tables among workloads and namespaces.
//!
//! The tables have a fixed size. As long as all entries fit, all are written. Otherwise each namespace gets its
//! [share](super::super::shares), and the agent leaves out single objects that exceed the share: a workload's own
//! rules, so that all of its connections are captured, or some of its addresses. An entry that is left out never opens
//! a destination. [`known`](super::known) divides the destinations of services.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use dataplane_common::capture;
use model::{Policy, Rules, authorization::Clients};

use super::{
    super::{
        Captured, captures_loopback,
        shares::{self, Shares},
    },
    Member,
};

/// Half of a table. The other half is for changes, during which the table holds old and new rules. One sixteenth is
/// reserved for the configuration's own rules.
pub(super) const fn part(table: u32) -> u64 {
    (table - table / 16) as u64 / 2
}

/// Space in `RULES` and in `RANGES`.
pub(super) const ROOM: [u64; 2] = [part(capture::RULES); 2];

/// The name of the budget of the sets of clients that follow from Istio's policies of the root namespace alone. No namespace has
/// this name.
const OF_ROOT: &str = "*";

/// Returns the number of entries of `RULES` and of `RANGES` that a policy needs, without the sets of clients that are counted
/// already.
fn cost(policy: &Policy, counted: &BTreeSet<&Clients>) -> [u64; 2] {
    let clients = policy.plain_clients.as_ref();
    let rules = policy.outbound_ports.len()
        + policy.inbound_ports.len()
        + (policy.refused.as_ref()).map_or(0, |refused| refused.ports.len())
        + policy.included_uids.len()
        + policy.included_gids.len()
        + policy.excluded_uids.len()
        + policy.excluded_gids.len()
        + policy.excluded_interfaces.len()
        + clients.map_or(0, |clients| clients.ports.len() + 1);
    let new: BTreeSet<&Clients> = sets(policy).filter(|set| !counted.contains(set)).collect();
    let clients: usize = new.into_iter().map(BTreeMap::len).sum();
    let ranges = policy.outbound_ranges.len() + clients;
    // A policy with ranges also needs an entry for all of IPv4, and entries that except parts of loopback.
    let more =
        u64::from(!policy.outbound_ranges.is_empty()) + 3 * u64::from(captures_loopback(policy));
    [rules as u64, ranges as u64 + more]
}

/// Returns the sets of clients of a policy. The tables hold equal sets once.
fn sets(policy: &Policy) -> impl Iterator<Item = &Clients> {
    let clients = policy.plain_clients.iter();
    clients.flat_map(|clients| clients.ports.values().chain([&clients.others]))
}

/// Whether the sets of clients of a policy follow from Istio's policies of the root namespace alone.
fn is_of_root(policy: &Policy) -> bool {
    (policy.plain_clients.as_ref()).is_some_and(|clients| clients.of_root)
}

/// Returns the indices of the members whose rules exceed their namespace's budget: in each namespace first the members
/// with the most rules, then the last by name. Equal policies of a namespace count once, and so do equal sets of clients. The sets
/// of the root namespace's policies have a budget of their own.
pub(super) fn over_budget(members: &[Member], room: [u64; 2]) -> BTreeSet<usize> {
    let none = BTreeSet::new();
    let costs = members.iter().map(|member| cost(&member.policy, &none));
    let all = costs.fold([0; 2], |all, cost| [all[0] + cost[0], all[1] + cost[1]]);
    if all.iter().zip(room).all(|(all, room)| *all <= room) {
        return BTreeSet::new();
    }
    let mut shares = Shares::of(room);
    let mut policies: BTreeMap<&str, BTreeMap<&Policy, Vec<usize>>> = BTreeMap::new();
    for (index, member) in members.iter().enumerate() {
        let of = policies
            .entry(member.workload.name.namespace())
            .or_default();
        of.entry(&member.policy).or_default().push(index);
    }
    let of_root = members.iter().map(|member| &member.policy);
    let of_root = of_root.filter(|policy| is_of_root(policy)).flat_map(sets);
    let of_root: BTreeSet<&Clients> = of_root.collect();
    for set in &of_root {
        shares.change(OF_ROOT, &[0; 2], &[0, set.len() as u64]);
    }
    for (namespace, policies) in &policies {
        let mut counted = of_root.clone();
        for policy in policies.keys() {
            shares.change(namespace, &[0; 2], &cost(policy, &counted));
            counted.extend(sets(policy));
        }
    }
    shares.divide();
    let mut by_size: Vec<&Clients> = of_root.iter().copied().collect();
    by_size.sort_by_key(|set| set.len());
    let mut left = shares.budget();
    by_size.retain(|set| !shares::take(&[0, set.len() as u64], &mut left));
    let left_out: BTreeSet<&Clients> = by_size.into_iter().collect();
    let has_left_out =
        |policy| is_of_root(policy) && sets(policy).any(|set| left_out.contains(set));
    let mut over: BTreeSet<usize> = (0..members.len())
        .filter(|index| has_left_out(&members[*index].policy))
        .collect();
    for (namespace, policies) in policies {
        if !shares.is_over(namespace) {
            continue;
        }
        let mut policies: Vec<_> = policies.into_iter().collect();
        policies.sort_by_key(|(policy, who)| {
            (Reverse(shares.smallness(&cost(policy, &of_root))), who[0])
        });
        let mut counted = of_root.clone();
        let mut left = shares.budget();
        for (policy, who) in policies {
            if shares::take(&cost(policy, &counted), &mut left) {
                counted.extend(sets(policy));
            } else {
                over.extend(who);
            }
        }
    }
    over
}

/// Returns rules without the lists that do not fit: only whether, by which means and in which mode connections are
/// captured. Virtual interfaces stay, because they are few, and fewer connections would be captured without them.
pub(super) fn without_lists(rules: &Rules) -> Rules {
    Rules {
        captured: rules.captured,
        captured_by: rules.captured_by,
        allow_packets: rules.allow_packets,
        mode: rules.mode,
        egress: rules.egress,
        without_proxy: rules.without_proxy,
        dns: rules.dns,
        virtual_interfaces: rules.virtual_interfaces.clone(),
        ..Rules::default()
    }
}

/// Removes addresses of workloads with the most addresses until the rest fits. Returns the number of removed addresses
/// by the workload's number.
pub fn fit_addresses(wanted: &mut Captured) -> BTreeMap<u32, usize> {
    let room = part(capture::WORKLOADS * 4);
    let mut left_out = BTreeMap::new();
    if wanted.locals.len() as u64 <= room {
        return left_out;
    }
    let mut shares = Shares::of([room]);
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    for local in wanted.locals.values() {
        *counts.entry(local.workload).or_default() += 1;
    }
    for (workload, count) in &counts {
        shares.change(&workload.to_string(), &[0], &[*count]);
    }
    shares.divide();
    let [budget] = shares.budget();
    let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
    wanted.locals.retain(|_, local| {
        let taken = taken.entry(local.workload).or_default();
        *taken += 1;
        // Addresses without a workload are the node's.
        let fits = local.workload == 0 || *taken <= budget;
        if !fits {
            *left_out.entry(local.workload).or_default() += 1;
        }
        fits
    });
    left_out
}

#[cfg(test)]
pub(super) mod tests;
