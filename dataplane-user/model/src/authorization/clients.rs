//! The decisions about clients without an identity, by their addresses: for programs that do not evaluate rules.
//!
//! Such a client is known by its address and by the port that it connects to. The rules name ranges of clients and ports. All
//! addresses whose longest named range is the same, and all ports that no rule names, get the same decision. So one decision of
//! [`Policies::reason`] for each range and port is enough.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Connection, Match, Policies, PolicyName, Reason};

/// The most decisions for a workload.
const DECISIONS: usize = 4096;
/// The most comparisons for a workload: decisions, each with all values of its rules. They take some milliseconds.
const COMPARISONS: usize = 1 << 21;
/// Addresses of IPv4 in the form of IPv6, which no client has.
const MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);

/// A decision about a client without an identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// The client may connect.
    Allowed,
    /// This policy refuses the client.
    Denied(PolicyName),
    /// The workload has policies with ALLOW, and none of them matches.
    NotAllowed,
    /// The policies cannot be read, or there are too many decisions.
    Closed,
}

/// Ranges of clients. The longest range that has a client's address decides. The ranges have all addresses of the families
/// that the workload has.
pub type Clients = BTreeMap<IpNet, Verdict>;

/// The decisions about clients without an identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlainClients {
    /// Ports that do not have the decisions of all others.
    pub ports: BTreeMap<u16, Clients>,
    /// All other ports.
    pub others: Clients,
    /// Whether they follow from policies of the root namespace alone. The caller of [`Policies::plain_clients`] knows this.
    pub of_root: bool,
}

impl PlainClients {
    /// Returns decisions that refuse every client.
    pub fn closed() -> Self {
        Self {
            ports: BTreeMap::new(),
            others: all().map(|range| (range, Verdict::Closed)).collect(),
            of_root: false,
        }
    }

    /// Returns whether they allow every client.
    pub fn allow_all(&self) -> bool {
        let mut clients = self.ports.values().chain([&self.others]);
        clients.all(|of| of.values().all(|verdict| *verdict == Verdict::Allowed))
    }

    /// Returns the number of ports with decisions of their own, and of ranges.
    pub fn size(&self) -> [usize; 2] {
        let ranges = self.ports.values().map(BTreeMap::len).sum::<usize>();
        [self.ports.len(), ranges + self.others.len()]
    }
}

impl From<Reason<'_>> for Verdict {
    fn from(reason: Reason<'_>) -> Self {
        match (reason.by().0, reason) {
            (_, reason) if reason.is_allowed() => Self::Allowed,
            (Some(name), _) => Self::Denied(name.clone()),
            (None, Reason::NotAllowed) => Self::NotAllowed,
            (None, _) => Self::Closed,
        }
    }
}

impl Policies {
    /// Returns the decisions about clients without an identity that connect to one of the workload's addresses. If the rules name
    /// addresses of the workload, and it has several of a family, a client is allowed that may connect to all of these. `None`:
    /// there are too many decisions.
    pub fn plain_clients(&self, own: &[IpAddr]) -> Option<PlainClients> {
        if self.unread {
            return Some(PlainClients::closed());
        }
        let matches: Vec<&Match> = self.matches().collect();
        let of_ports = self.plaintext.ports().into_iter();
        let of_ports = of_ports.flat_map(|(_, ports)| ports.keys());
        let ports = matches.iter().flat_map(|of| of.ports.all());
        let ports: BTreeSet<u16> = ports.chain(of_ports).copied().collect();
        // No connection has port 0, which stands for all other ports in the tables.
        let ports: BTreeSet<u16> = ports.into_iter().filter(|port| *port != 0).collect();
        let ranges = matches.iter().flat_map(|of| of.sources.all());
        let ranges = ranges.map(IpNet::trunc).chain(all()).chain([MAPPED.into()]);
        let ranges: BTreeSet<IpNet> = ranges.collect();
        let ranges: Vec<IpNet> = ranges.into_iter().collect();
        let each = if self.names_destinations() {
            usize::MAX
        } else {
            1
        };
        let by_family = |v4| {
            let family = own.iter().filter(move |addr| addr.is_ipv4() == v4);
            family.take(each)
        };
        let own: Vec<IpAddr> = by_family(true).chain(by_family(false)).copied().collect();
        let decisions = (ports.len() + 1) * ranges.len() * own.len();
        let values = matches.iter().map(|of| of.count()).sum::<usize>();
        // Each decision also passes the matches that fit no such client, and the policies whose rules do not count.
        let all = self.authorizations.iter();
        let idle = all.filter(|(_, of)| {
            of.as_ref()
                .is_none_or(|of| of.dry_run || of.rules.is_empty())
        });
        let values = values + self.live().count() + idle.count();
        if decisions > DECISIONS || decisions * values > COMPARISONS {
            return None;
        }
        let decided = |port| {
            decide(&ranges, &own, |client, own| {
                let connection = Connection::new(None, client, SocketAddr::new(own, port));
                self.reason(&connection).into()
            })
        };
        let unnamed = (1..=u16::MAX).find(|port| !ports.contains(port));
        let others = unnamed.map(decided).unwrap_or_default();
        let ports = ports.into_iter().map(|port| (port, decided(port)));
        Some(PlainClients {
            ports: ports.filter(|(_, clients)| *clients != others).collect(),
            others,
            of_root: false,
        })
    }

    /// Returns whether the decisions depend on the address of the workload.
    pub fn names_destinations(&self) -> bool {
        self.matches().any(|of| !of.destinations.is_empty())
    }

    /// Returns all matches of the rules that count, and that may fit a client without an identity.
    fn matches(&self) -> impl Iterator<Item = &Match> {
        self.live().filter(|of| !of.requires_identity())
    }

    /// Returns all matches of the rules that count.
    fn live(&self) -> impl Iterator<Item = &Match> {
        let known = self.authorizations.iter();
        let known = known.filter_map(|(_, of)| of.as_deref());
        let rules = known.filter(|of| !of.dry_run).flat_map(|of| &of.rules);
        rules.flat_map(|rule| rule.0.iter().flatten())
    }
}

/// The ranges of all addresses.
fn all() -> impl Iterator<Item = IpNet> {
    [Ipv4Net::default().into(), Ipv6Net::default().into()].into_iter()
}

/// Decides about each range by an address that is in no range inside it. `ranges`: sorted, so that a range comes before those
/// inside it. Leaves out the ranges that have the decision of the range around them.
fn decide(ranges: &[IpNet], own: &[IpAddr], decide: impl Fn(IpAddr, IpAddr) -> Verdict) -> Clients {
    let mut found = Clients::new();
    let mut around: Vec<(IpNet, Verdict)> = Vec::new();
    for (at, range) in ranges.iter().enumerate() {
        let v4 = range.addr().is_ipv4();
        let own = own.iter().filter(|addr| addr.is_ipv4() == v4);
        let is_mapped = matches!(range, IpNet::V6(range) if MAPPED.contains(range));
        let client = client_in(range, &ranges[at + 1..]).filter(|_| !is_mapped);
        let Some(client) = client else {
            continue;
        };
        let mut verdicts = own.map(|own| decide(client, *own));
        let Some(first) = verdicts.next() else {
            continue;
        };
        let verdict = if first == Verdict::Allowed {
            verdicts.find(|of| *of != Verdict::Allowed).unwrap_or(first)
        } else {
            first
        };
        while around.last().is_some_and(|(of, _)| !of.contains(range)) {
            around.pop();
        }
        if around.last().is_none_or(|(_, of)| *of != verdict) {
            found.insert(*range, verdict.clone());
        }
        around.push((*range, verdict));
    }
    found
}

/// Returns an address in a range that is in none of the ranges after it. `None`: they have all of its addresses.
fn client_in(range: &IpNet, after: &[IpNet]) -> Option<IpAddr> {
    let mut free = range.network();
    for inner in after.iter().take_while(|of| range.contains(*of)) {
        if free < inner.network() {
            break;
        }
        // An inner range may be in another one, that ends later.
        if inner.broadcast() >= free {
            free = next(inner.broadcast())?;
        }
    }
    range.contains(&free).then_some(free)
}

/// Returns the address after an address.
fn next(addr: IpAddr) -> Option<IpAddr> {
    Some(match addr {
        IpAddr::V4(addr) => Ipv4Addr::from_bits(addr.to_bits().checked_add(1)?).into(),
        IpAddr::V6(addr) => Ipv6Addr::from_bits(addr.to_bits().checked_add(1)?).into(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{
        super::{Action, Authorization, Rule, Values, tests::COMPARED},
        *,
    };

    /// Returns policies whose rules name a range and a port: `+`: ALLOW, `-`: DENY.
    fn policies(text: &str) -> Policies {
        let mut found = Policies::default();
        for (number, policy) in text.split_whitespace().enumerate() {
            let (action, rest) = policy.split_at(1);
            let (range, port) = rest.split_once('@').unwrap_or((rest, ""));
            let one = Match {
                sources: Values {
                    any: [range.parse().unwrap()].into(),
                    none: Box::default(),
                },
                ports: Values {
                    any: port.parse().into_iter().collect(),
                    none: Box::default(),
                },
                ..Match::default()
            };
            let name = PolicyName {
                namespace: "shop".into(),
                object: format!("AuthorizationPolicy p{number}").into(),
            };
            let policy = Authorization {
                action: if action == "+" {
                    Action::Allow
                } else {
                    Action::Deny
                },
                dry_run: false,
                rules: [Rule([[one].into()].into())].into(),
            };
            found.authorizations.push((name, Some(Arc::new(policy))));
        }
        found
    }

    fn told(clients: &Clients) -> String {
        let all = clients.iter().map(|(range, verdict)| match verdict {
            Verdict::Allowed => format!("{range} +"),
            Verdict::Denied(name) => format!("{range} -{}", name.object.split_once(' ').unwrap().1),
            Verdict::NotAllowed => format!("{range} ?"),
            Verdict::Closed => format!("{range} !"),
        });
        all.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn ranges_with_the_decision_around_them_are_left_out() {
        let both: [IpAddr; 2] = ["10.9.0.1", "fd00::9"].map(|addr| addr.parse().unwrap());
        for (text, wanted) in [
            ("", "0.0.0.0/0 +, ::/0 +"),
            ("-10.0.0.0/8", "0.0.0.0/0 +, 10.0.0.0/8 -p0, ::/0 +"),
            (
                "-10.0.0.0/8 -10.1.0.0/16",
                "0.0.0.0/0 +, 10.0.0.0/8 -p0, ::/0 +",
            ),
            (
                "+10.0.0.0/8 -10.1.0.0/16",
                "0.0.0.0/0 ?, 10.0.0.0/8 +, 10.1.0.0/16 -p1, ::/0 ?",
            ),
            // The halves have all addresses of the whole.
            (
                "-0.0.0.0/1 -128.0.0.0/1",
                "0.0.0.0/1 -p0, 128.0.0.0/1 -p1, ::/0 +",
            ),
            (
                "-255.255.255.255/32",
                "0.0.0.0/0 +, 255.255.255.255/32 -p0, ::/0 +",
            ),
            // No client has such an address.
            ("-::ffff:10.0.0.0/104", "0.0.0.0/0 +, ::/0 +"),
            ("+::/0", "0.0.0.0/0 ?, ::/0 +"),
        ] {
            let found = policies(text).plain_clients(&both).unwrap();
            assert!(found.ports.is_empty(), "{text}");
            assert_eq!(told(&found.others), wanted, "{text}");
            assert_eq!(found.allow_all(), !wanted.contains(['-', '?']), "{text}");
        }
        let found = policies("-::/0@80 -10.0.0.0/8")
            .plain_clients(&both[..1])
            .unwrap();
        assert!(
            found.ports.is_empty() && found.others.len() == 2,
            "one family"
        );
    }

    /// Dry runs, and rules that fit no client without an identity, have very many ranges.
    #[test]
    fn values_that_decide_nothing_cost_nothing_and_close_nothing() {
        let own = ["10.9.0.1".parse().unwrap()];
        let texts = (0..60).map(|of| format!("-10.{of}.0.0/16@{} ", 1000 + of));
        let mut found = policies(&texts.collect::<String>());
        let wanted = found.plain_clients(&own).unwrap();
        let ranges =
            (0..20_000).map(|of| IpNet::from(Ipv4Net::new_assert(Ipv4Addr::from_bits(of), 32)));
        let sources = Values {
            any: ranges.collect(),
            none: Box::default(),
        };
        let principals = Values {
            any: ["*".into()].into(),
            none: Box::default(),
        };
        for (number, dry_run) in [false, true].into_iter().enumerate() {
            let of = Match {
                sources: sources.clone(),
                principals: if dry_run {
                    Values::default()
                } else {
                    principals.clone()
                },
                ..Match::default()
            };
            let policy = Authorization {
                action: Action::Deny,
                dry_run,
                rules: [Rule([[of].into()].into())].into(),
            };
            let name = PolicyName {
                namespace: "shop".into(),
                object: format!("AuthorizationPolicy long{number}").into(),
            };
            found
                .authorizations
                .insert(0, (name, Some(Arc::new(policy))));
        }
        COMPARED.set(0);
        assert_eq!(found.plain_clients(&own), Some(wanted));
        let compared = COMPARED.get();
        assert!(compared <= COMPARISONS, "{compared}");
    }

    #[test]
    fn ports_have_decisions_of_their_own() {
        let own = ["10.9.0.1".parse().unwrap()];
        let found = policies("-10.0.0.0/8@80 -0.0.0.0/0@81 -0.0.0.0/0@0")
            .plain_clients(&own)
            .unwrap();
        let ports = found.ports.iter();
        let ports: Vec<String> = ports
            .map(|(port, of)| format!("{port}: {}", told(of)))
            .collect();
        assert_eq!(
            ports,
            ["80: 0.0.0.0/0 +, 10.0.0.0/8 -p0", "81: 0.0.0.0/0 -p1"]
        );
        assert_eq!(told(&found.others), "0.0.0.0/0 +");
        assert_eq!(found.size(), [2, 4]);
    }

    #[test]
    fn policies_that_are_not_read_allow_nobody_and_too_many_have_no_decisions() {
        let own = ["10.9.0.1".parse().unwrap()];
        let unread = Policies {
            unread: true,
            ..Policies::default()
        };
        let found = unread.plain_clients(&own).unwrap();
        assert_eq!(told(&found.others), "0.0.0.0/0 !, ::/0 !");
        let many = |count: u32| {
            let ranges = (0..count).map(|of| format!("-{}/32 ", Ipv4Addr::from_bits(of << 8)));
            policies(&ranges.collect::<String>()).plain_clients(&own)
        };
        assert_eq!(many(900).unwrap().others.len(), 901);
        assert_eq!(many(2000), None);
    }
}
