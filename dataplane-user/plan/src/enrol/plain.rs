//! Istio's policies of workloads without a proxy: the kernel decides by the client's address and the port. No such client has an
//! identity.

use std::{net::IpAddr, sync::Arc};

use model::{
    CapturedBy, Inbound, Istio, Place, Policy, Workload,
    authorization::{PlainClients, Policies},
};

/// The problem of a workload with too many rules.
pub(super) const TOO_MANY: &str = "Istio's policies of the Pod name more ranges of clients and ports than the kernel decides \
     about for one Pod, so ALL connections to it are refused, except probes; use fewer or larger ranges, or mode: proxy";
/// The problem of a workload whose namespace has no room for the decisions.
pub(super) const NO_ROOM: &str = "tables RULES and RANGES have no room in the budget of its namespace for what Istio's policies \
     of the Pod name, so ALL connections to it are refused, except probes; use fewer or larger ranges, or mode: proxy";

/// This many ranges have room in any case.
const FEW: usize = 4;

/// Returns whether the kernel enforces the policies of a workload that the agent's programs carry: it has no proxy, and its
/// inbound connections are captured at its sockets. It must not have a sidecar, which accepts connections with identities: the kernel
/// cannot tell them from others.
pub(super) fn is_judged_by_kernel(workload: &Workload, policy: &Policy) -> bool {
    !policy.mode.is_proxied(false)
        && policy.captured_by == CapturedBy::Sockets
        && policy.inbound != Inbound::None
        && workload.place == Place::Address
}

/// The policies and the addresses of a workload, and the decisions.
type Last = (Policies, Box<[IpAddr]>, Option<Arc<PlainClients>>);

/// Decides about the clients of workloads. Remembers the last workload: those with the same policies often come together.
#[derive(Default)]
pub(super) struct Judge(Option<Last>);

impl Judge {
    /// Adds the decisions about the clients of a workload that [`is_judged_by_kernel`] to its policy. Returns a problem if no client may
    /// connect, because the decisions do not fit. `over_budget`: the tables have no room for them.
    pub fn judge(
        &mut self,
        istio: &Istio,
        workload: &Workload,
        policy: &mut Policy,
        over_budget: bool,
    ) -> Option<String> {
        let policies = istio.policies_of(workload.name.namespace(), &workload.labels);
        let own = &*workload.addresses;
        let is_same = |(last, of, _): &&Last| {
            let families = |own: &[IpAddr]| own.iter().map(IpAddr::is_ipv4).collect::<Vec<_>>();
            let are_alike = if last.names_destinations() {
                **of == *own
            } else {
                families(of) == families(own)
            };
            are_alike && *last == policies
        };
        let clients = if let Some((_, _, clients)) = self.0.as_ref().filter(is_same) {
            clients.clone()
        } else {
            let clients = policies.plain_clients(own).map(Arc::new);
            self.0 = Some((policies, own.into(), clients.clone()));
            clients
        };
        let problem = match &clients {
            None => Some(TOO_MANY),
            Some(clients) => (over_budget && clients.size()[1] > FEW).then_some(NO_ROOM),
        };
        let clients = clients.filter(|_| problem.is_none());
        let clients = clients.unwrap_or_else(|| Arc::new(PlainClients::closed()));
        policy.plain_clients = (!clients.allow_all()).then_some(clients);
        problem.map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use dataplane_common::capture::{self, CAPTURED, Local, REFUSED_BY, TrafficKey};
    use ipnet::IpNet;
    use model::authorization::{
        Action, Authorization, Connection, Match, PeerAuthentication, PolicyName, Rank, Reason,
        Rule, Values,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::{Captured, capture::Policies as Numbers};

    const RANGES: [&str; 9] = [
        "0.0.0.0/0",
        "10.0.0.0/8",
        "10.1.0.0/16",
        "10.1.2.3/32",
        "128.0.0.0/1",
        "::/0",
        "fd00::/8",
        "fd00::1/128",
        "::ffff:10.0.0.0/104",
    ];
    const CLIENTS: [&str; 8] = [
        "0.0.0.0",
        "10.0.0.1",
        "10.1.0.1",
        "10.1.2.3",
        "255.255.255.255",
        "fd00::1",
        "fd00::2",
        "2001:db8::1",
    ];
    const OWN: [&str; 2] = ["10.1.2.9", "fd00::9"];

    fn values<T: Clone + std::fmt::Debug + 'static>(
        all: Vec<T>,
    ) -> impl Strategy<Value = Values<T>> {
        let some = move || prop::collection::vec(prop::sample::select(all.clone()), 0..3);
        let (any, none) = (some(), prop_oneof![3 => Just(Vec::new()), 1 => some()]);
        (any, none).prop_map(|(any, none)| Values {
            any: any.into(),
            none: none.into(),
        })
    }

    fn rule() -> impl Strategy<Value = Rule> {
        let ranges = || -> Vec<IpNet> { RANGES.iter().map(|of| of.parse().unwrap()).collect() };
        let words = vec!["*".into(), "cluster.local/ns/shop/*".into()];
        let ports = values(vec![80, 81, 443]);
        let of = (
            values(ranges()),
            values(ranges()),
            ports,
            values(words),
            any::<[bool; 2]>(),
        );
        let of = of.prop_map(
            |(sources, destinations, ports, principals, [names_own, names_peer])| Match {
                sources,
                destinations: if names_own {
                    destinations
                } else {
                    Values::default()
                },
                ports,
                principals: if names_peer {
                    principals
                } else {
                    Values::default()
                },
                ..Match::default()
            },
        );
        let clause = prop::collection::vec(of, 0..3);
        let clauses = prop::collection::vec(clause, 0..3);
        clauses.prop_map(|all| Rule(all.into_iter().map(Into::into).collect()))
    }

    fn policies() -> impl Strategy<Value = Policies> {
        let one = (
            any::<bool>(),
            prop::bool::weighted(0.1),
            prop::collection::vec(rule(), 0..3),
        );
        let modes = (
            any::<Option<bool>>(),
            prop::collection::btree_map(80..83u16, any::<bool>(), 0..2),
        );
        (prop::collection::vec(one, 0..4), modes).prop_map(|(all, (strict, ports))| {
            let name = |object: String| PolicyName {
                namespace: "shop".into(),
                object: object.into(),
            };
            let mut found = Policies::default();
            for (number, (denies, dry_run, rules)) in all.into_iter().enumerate() {
                let action = if denies { Action::Deny } else { Action::Allow };
                let rules = rules.into();
                let policy = Authorization {
                    action,
                    dry_run,
                    rules,
                };
                let name = name(format!("AuthorizationPolicy p{number}"));
                found.authorizations.push((name, Some(Arc::new(policy))));
            }
            let policy = PeerAuthentication {
                created: None,
                strict,
                ports,
            };
            found.plaintext.add(
                Rank::Selector,
                name("PeerAuthentication m".to_owned()),
                &Arc::new(policy),
            );
            found
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        /// The tables decide as the evaluator does, and name the same policy.
        #[test]
        fn the_kernels_decisions_are_those_of_the_evaluator(policies in policies()) {
            let own = OWN.map(|addr| addr.parse::<IpAddr>().unwrap());
            let clients = policies.plain_clients(&own).expect("few decisions");
            let policy = Policy {
                inbound: Inbound::All,
                plain_clients: Some(Arc::new(clients)),
                ..Policy::default()
            };
            let mut tables = Captured::default();
            let mut numbers = Numbers::after(7);
            let (policy, flags) = numbers.add(&policy, false, &mut tables);
            let local = Local { policy, flags, ..Local::default() };
            for client in CLIENTS.map(|addr| addr.parse::<IpAddr>().unwrap()) {
                let own = own.into_iter().find(|own| own.is_ipv4() == client.is_ipv4()).unwrap();
                for port in [80, 81, 82, 443, 9999] {
                    let connection = Connection::new(None, client, SocketAddr::new(own, port));
                    let wanted = policies.decide(&connection).reason;
                    let said = capture::judged(&tables, &local, client.into(), port.into());
                    prop_assert_eq!(said == CAPTURED, wanted.is_allowed(), "{} :{}", client, port);
                    let mut refusers = numbers.refusers();
                    let by = refusers.find(|(number, _)| *number == said >> REFUSED_BY);
                    if !wanted.is_allowed() {
                        prop_assert_eq!(by.map(|(_, name)| name), wanted.by().0);
                        let is_other = wanted == Reason::NotAllowed;
                        prop_assert_eq!(said >> REFUSED_BY == TrafficKey::NOT_ALLOWED, is_other);
                    }
                }
            }
        }
    }

    #[test]
    fn a_rule_that_is_missing_allows_nobody() {
        let clients = PlainClients::closed();
        let policy = Policy {
            plain_clients: Some(Arc::new(clients)),
            ..Policy::default()
        };
        let mut tables = Captured::default();
        let (policy, flags) = Numbers::after(7).add(&policy, false, &mut tables);
        let local = Local {
            policy,
            flags,
            ..Local::default()
        };
        let client: IpAddr = "10.0.0.1".parse().unwrap();
        let judged = |tables: &Captured| capture::judged(tables, &local, client.into(), 80);
        assert_ne!(judged(&tables), CAPTURED);
        tables.ranges.clear();
        assert_ne!(judged(&tables), CAPTURED);
        tables.rules.clear();
        assert_ne!(judged(&tables), CAPTURED);
    }
}
