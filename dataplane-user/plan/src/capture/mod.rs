//! Writes policies of capture as entries of the capture tables.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    net::{Ipv4Addr, Ipv6Addr},
};

use dataplane_common::capture::{
    CAPTURED, EXCLUDED, Enrolled, JUDGED, REFUSED, REFUSED_BY, RuleKey, TrafficKey,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use model::{
    Egress, Inbound, Policy, WithoutProxy,
    authorization::{Clients, PolicyName, Verdict},
};

use super::captured::{Captured, range_key};

/// Address ranges, and whether a workload's queries to them are captured. The longest prefix decides.
pub type Resolvers = BTreeMap<IpNet, bool>;

/// Numbers of policies and of sets of resolvers. Equal policies share a number. A number is never reused.
#[derive(Debug, Default)]
pub struct Policies {
    numbers: HashMap<Policy, u32>,
    resolvers: HashMap<Resolvers, u32>,
    clients: HashMap<Clients, u32>,
    last: u32,
    /// Istio's policies that refuse clients.
    refusers: HashMap<PolicyName, u32>,
    last_refuser: u32,
}

impl Policies {
    /// Starts numbering after `last`, the highest number that an earlier agent used.
    pub fn after(last: u32) -> Self {
        Self {
            last,
            ..Self::default()
        }
    }

    /// Starts numbering Istio's policies after `last`, the highest number that an earlier agent used.
    #[must_use]
    pub fn with_refusers_after(self, last: u32) -> Self {
        Self {
            last_refuser: last,
            ..self
        }
    }

    /// Returns Istio's policies that refuse clients, with their numbers.
    pub fn refusers(&self) -> impl Iterator<Item = (u32, &PolicyName)> {
        self.refusers.iter().map(|(name, number)| (*number, name))
    }

    /// Adds a policy to the tables if it is not there. Returns its number and flags.
    ///
    /// `foreign`: see [`model::Mode::is_proxied`].
    pub fn add(&mut self, policy: &Policy, foreign: bool, tables: &mut Captured) -> (u32, u32) {
        let number = if let Some(number) = self.numbers.get(policy) {
            *number
        } else {
            self.last += 1;
            self.numbers.insert(policy.clone(), self.last);
            self.last
        };
        let verdict = |captured: bool, is_judged: bool| match (captured, is_judged) {
            (true, _) => CAPTURED,
            (false, true) => JUDGED,
            (false, false) => EXCLUDED,
        };
        let mut rule = |kind, id, said| {
            let of = number;
            tables.rules.insert(RuleKey { of, kind, id }, said);
        };
        for uid in &policy.included_uids {
            rule(RuleKey::USER, *uid, CAPTURED);
        }
        for gid in &policy.included_gids {
            rule(RuleKey::GROUP, *gid, CAPTURED);
        }
        for uid in &policy.excluded_uids {
            rule(RuleKey::USER, *uid, EXCLUDED);
        }
        for gid in &policy.excluded_gids {
            rule(RuleKey::GROUP, *gid, EXCLUDED);
        }
        if policy.only_queries {
            // The resolvers' ranges already take the policy's ports and ranges into account.
            return (number, flags(policy, foreign));
        }
        for (port, captured) in &policy.outbound_ports {
            let is_judged = policy.judged_ports.contains(port);
            let said = verdict(*captured, is_judged);
            rule(RuleKey::OUTBOUND_PORT, u32::from(*port), said);
        }
        for (port, said) in inbound(policy) {
            rule(RuleKey::INBOUND_PORT, u32::from(port), said);
        }
        if let Some(clients) = &policy.plain_clients {
            let ports = clients.ports.iter();
            let ports = ports.map(|(port, of)| (u32::from(*port), of));
            for (id, of) in ports.chain([(RuleKey::ALL_PORTS, &clients.others)]) {
                let key = RuleKey {
                    of: number,
                    kind: RuleKey::SOURCES,
                    id,
                };
                let set = self.add_clients(of, tables);
                tables.rules.insert(key, set);
            }
        }
        // The table holds IPv4 as v4-mapped IPv6. Ranges of IPv6 such as ::/0 must not match those addresses.
        if policy.outbound_ranges.keys().any(|r| r.addr().is_ipv6()) {
            let all = IpNet::V4(Ipv4Net::default());
            tables.ranges.insert(range_key(number, &all), CAPTURED);
        }
        let captures_loopback = captures_loopback(policy);
        if captures_loopback {
            // Wider ranges do not decide about the proxies' address.
            tables
                .ranges
                .insert(range_key(number, &LOOPBACK.into()), EXCLUDED);
        }
        for (range, captured) in &policy.outbound_ranges {
            let key = range_key(number, range);
            let is_judged = policy.judged_ranges.contains(range);
            tables.ranges.insert(key, verdict(*captured, is_judged));
        }
        if captures_loopback {
            for never in [
                IpNet::from(PROXYS),
                Ipv6Net::from(Ipv6Addr::LOCALHOST).into(),
            ] {
                tables.ranges.insert(range_key(number, &never), EXCLUDED);
            }
        }
        (number, flags(policy, foreign))
    }

    /// Adds resolvers to the tables if they are not there. Returns their number, or 0 if the list has no captured
    /// resolver.
    pub fn add_resolvers(&mut self, resolvers: &Resolvers, tables: &mut Captured) -> u32 {
        if !resolvers.values().any(|is_captured| *is_captured) {
            return 0;
        }
        let number = self.resolvers.get(resolvers).copied();
        let number = number.unwrap_or_else(|| {
            self.last += 1;
            self.resolvers.insert(resolvers.clone(), self.last);
            self.last
        });
        let ranges = resolvers.iter().map(|(range, is_captured)| {
            let said = if *is_captured { CAPTURED } else { EXCLUDED };
            (range_key(number, range), said)
        });
        tables.ranges.extend(ranges);
        number
    }

    /// Adds a set of clients to the tables if it is not there. Returns its number.
    fn add_clients(&mut self, clients: &Clients, tables: &mut Captured) -> u32 {
        let number = self.clients.get(clients).copied();
        let number = number.unwrap_or_else(|| {
            self.last += 1;
            self.clients.insert(clients.clone(), self.last);
            self.last
        });
        for (range, verdict) in clients {
            let said = match verdict {
                Verdict::Allowed => CAPTURED,
                Verdict::Denied(name) => REFUSED | self.refuser(name) << REFUSED_BY,
                Verdict::NotAllowed => REFUSED | TrafficKey::NOT_ALLOWED << REFUSED_BY,
                Verdict::Closed => REFUSED,
            };
            tables.ranges.insert(range_key(number, range), said);
        }
        number
    }

    /// Returns the number of a policy of Istio's; 0 if there are no more numbers.
    fn refuser(&mut self, name: &PolicyName) -> u32 {
        if let Some(number) = self.refusers.get(name) {
            return *number;
        }
        let next = self.last_refuser.max(TrafficKey::NOT_ALLOWED) + 1;
        if next >= TrafficKey::REFUSERS {
            return 0;
        }
        self.last_refuser = next;
        self.refusers.insert(name.clone(), next);
        next
    }

    /// Forgets policies, resolvers and sets of clients that are no longer in use, and Istio's policies that no longer refuse.
    pub fn keep(&mut self, used: impl Fn(u32) -> bool, refuses: impl Fn(u32) -> bool) {
        self.numbers.retain(|_, number| used(*number));
        self.resolvers.retain(|_, number| used(*number));
        self.clients.retain(|_, number| used(*number));
        self.refusers.retain(|_, number| refuses(*number));
    }
}

/// Returns the rules for local ports. A port that is not captured is not refused either.
fn inbound(policy: &Policy) -> BTreeMap<u16, u32> {
    let said = |is_captured, is_refused| match (is_captured, is_refused) {
        (false, _) => EXCLUDED,
        (true, false) => CAPTURED,
        (true, true) => REFUSED,
    };
    let refused = policy.refused.as_deref().cloned().unwrap_or_default();
    let mut rules = BTreeMap::new();
    if policy.inbound == Inbound::All {
        let own = refused.ports.iter();
        rules.extend(own.map(|(port, is_refused)| (*port, said(true, *is_refused))));
    }
    for (port, is_captured) in &policy.inbound_ports {
        let is_refused = refused.ports.get(port).copied().unwrap_or(refused.others);
        rules.insert(*port, said(*is_captured, is_refused));
    }
    if policy.inbound == Inbound::None {
        rules.clear();
    }
    rules
}

/// The loopback network of IPv4.
const LOOPBACK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
/// The address at which proxies listen, and at which the application listens for its proxy. It is never captured.
const PROXYS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::LOCALHOST, 32);

/// Returns whether a policy captures a range of the loopback network.
pub fn captures_loopback(policy: &Policy) -> bool {
    let mut ranges = policy.outbound_ranges.iter();
    ranges.any(|(range, is_captured)| match range {
        IpNet::V4(range) => *is_captured && LOOPBACK.contains(range) && *range != PROXYS,
        IpNet::V6(_) => false,
    })
}

fn flags(policy: &Policy, foreign: bool) -> u32 {
    let proxied = policy.mode.is_proxied(foreign);
    let only = !policy.included_uids.is_empty() || !policy.included_gids.is_empty();
    let users = only || !policy.excluded_uids.is_empty() || !policy.excluded_gids.is_empty();
    let of_users = [(Enrolled::HAS_USERS, users), (Enrolled::ONLY_USERS, only)];
    if policy.only_queries {
        return flags_of(of_users);
    }
    let inbound = policy.inbound != Inbound::None;
    let ports = self::inbound(policy);
    let refused = policy.refused.as_deref();
    let refuses_others = inbound && refused.is_some_and(|refused| refused.others);
    // A workload without a proxy has no program that relays or judges its machines' connections, so the BPF programs
    // refuse these connections.
    let is_virtual = proxied || policy.egress == Egress::Deny;
    let of_connections = [
        (Enrolled::CAPTURED, true),
        (Enrolled::PROXY, proxied),
        (Enrolled::INBOUND, proxied && inbound),
        (
            Enrolled::VIRTUAL,
            is_virtual && !policy.virtual_interfaces.is_empty(),
        ),
        (Enrolled::EGRESS_DENY, policy.egress == Egress::Deny),
        (
            Enrolled::FAIL_OPEN,
            policy.without_proxy == WithoutProxy::Pass,
        ),
        (Enrolled::INBOUND_OTHERS, policy.inbound == Inbound::All),
        (Enrolled::HAS_RANGES, !policy.outbound_ranges.is_empty()),
        (Enrolled::LOOPBACK, captures_loopback(policy)),
        (
            Enrolled::HAS_OUTBOUND_PORTS,
            !policy.outbound_ports.is_empty(),
        ),
        (Enrolled::HAS_INBOUND_PORTS, !ports.is_empty()),
        (Enrolled::REFUSES_SERVICES, refused.is_some()),
        (
            Enrolled::REFUSES_INBOUND,
            refuses_others || ports.values().any(|said| *said == REFUSED),
        ),
        (Enrolled::REFUSES_OTHER_PORTS, refuses_others),
        (Enrolled::JUDGES_INBOUND, policy.plain_clients.is_some()),
    ];
    flags_of(of_users.into_iter().chain(of_connections))
}

fn flags_of(flags: impl IntoIterator<Item = (u32, bool)>) -> u32 {
    let set = flags.into_iter().filter(|(_, set)| *set);
    set.fold(0, |flags, (flag, _)| flags | flag)
}
