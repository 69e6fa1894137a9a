//! Istio's policies of workloads without a proxy: the kernel decides by the client's address and the port. No such client has an
//! identity.

use std::{
    collections::HashMap,
    mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use model::{
    CapturedBy, Inbound, Istio, Place, Policy, Workload,
    authorization::{PlainClients, Policies, PolicyName},
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

/// The names of a workload's policies, and its addresses as far as the decisions depend on them.
type Key = (Vec<PolicyName>, Vec<IpAddr>);
type Decided = HashMap<Key, (Policies, Option<Arc<PlainClients>>)>;

/// Decides about the clients of workloads. Remembers the decisions that the present and the last call of
/// [`members_again`](super::members_again) have used.
#[derive(Debug, Default)]
pub struct Judge {
    now: Decided,
    before: Decided,
}

impl Judge {
    /// Forgets the decisions that no workload has used since the last call.
    pub(super) fn turn(&mut self) {
        self.before = mem::take(&mut self.now);
    }

    /// Returns the decisions of policies about the clients of a workload with these addresses.
    fn decide(
        &mut self,
        policies: Policies,
        root: &str,
        own: &[IpAddr],
    ) -> Option<Arc<PlainClients>> {
        let authorizations = policies.authorizations.iter().map(|(name, _)| name);
        let names = authorizations.chain(policies.plaintext.all().map(|(name, _)| name));
        let names: Vec<_> = names.chain(&policies.custom).cloned().collect();
        let of_root = names.iter().all(|name| *name.namespace == *root);
        let own_key = if policies.names_destinations() {
            own.to_vec()
        } else {
            let families = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
            let has = |family: &IpAddr| own.iter().any(|addr| addr.is_ipv4() == family.is_ipv4());
            families.into_iter().filter(has).collect()
        };
        let key = (names, own_key);
        let known = self.now.remove(&key).or_else(|| self.before.remove(&key));
        let known = known.filter(|(of, _)| *of == policies);
        let known = known.unwrap_or_else(|| {
            let clients = policies.plain_clients(own);
            let clients = clients.map(|clients| Arc::new(PlainClients { of_root, ..clients }));
            (policies, clients)
        });
        let clients = known.1.clone();
        self.now.insert(key, known);
        clients
    }

    /// Adds the decisions about the clients of a workload that [`is_judged_by_kernel`] to its policy. Returns a problem if no client may
    /// connect, because the decisions do not fit. `over_budget`: the tables have no room for them.
    pub(super) fn judge(
        &mut self,
        istio: &Istio,
        workload: &Workload,
        policy: &mut Policy,
        over_budget: bool,
    ) -> Option<&'static str> {
        let policies = istio.policies_of(workload.name.namespace(), &workload.labels);
        let clients = self.decide(policies, &istio.root, &workload.addresses);
        let problem = match &clients {
            None => Some(TOO_MANY),
            Some(clients) => (over_budget && clients.size()[1] > FEW).then_some(NO_ROOM),
        };
        let clients = clients.filter(|_| problem.is_none());
        let clients = clients.unwrap_or_else(|| Arc::new(PlainClients::closed()));
        policy.plain_clients = (!clients.allow_all()).then_some(clients);
        problem
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use dataplane_common::capture::{self, CAPTURED, Local, REFUSED_BY, TrafficKey};
    use ipnet::IpNet;
    use model::{
        Effect, IstioNamespace, IstioPolicy, WorkloadName,
        authorization::{
            Action, Authorization, Clients, Connection, Match, PeerAuthentication, PolicyName,
            Rank, Reason, Rule, Values, Verdict,
        },
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

    /// Two Pods whose policies differ, at each settle.
    #[test]
    fn decisions_are_made_once_as_long_as_workloads_use_them() {
        let denies = |name: &str, port| {
            let of = Match {
                ports: Values {
                    any: [port].into(),
                    none: Box::default(),
                },
                ..Match::default()
            };
            let policy = Authorization {
                action: Action::Deny,
                dry_run: false,
                rules: [Rule([[of].into()].into())].into(),
            };
            let name = PolicyName {
                namespace: "shop".into(),
                object: name.into(),
            };
            Policies {
                authorizations: vec![(name, Some(Arc::new(policy)))],
                ..Policies::default()
            }
        };
        let own = OWN.map(|addr| addr.parse::<IpAddr>().unwrap());
        let mut judge = Judge::default();
        let mut decide =
            |of: &Policies, own: &[IpAddr]| judge.decide(of.clone(), "shop", own).unwrap();
        let pods = [denies("a", 80), denies("b", 80)];
        let first = pods.each_ref().map(|of| decide(of, &own));
        let again = pods.each_ref().map(|of| decide(of, &[own[1], own[0]]));
        assert!(
            first
                .iter()
                .zip(&again)
                .all(|(one, other)| Arc::ptr_eq(one, other))
        );
        assert!(
            !Arc::ptr_eq(&first[0], &decide(&pods[0], &own[..1])),
            "one family"
        );
        let changed = decide(&denies("a", 81), &own);
        assert!(changed.ports.contains_key(&81) && !changed.ports.contains_key(&80));
        judge.turn();
        let kept = judge.decide(pods[1].clone(), "shop", &own).unwrap();
        assert!(kept.of_root);
        let of_another = Judge::default().decide(pods[1].clone(), "root", &own);
        assert!(!of_another.unwrap().of_root);
        assert!(Arc::ptr_eq(&first[1], &kept));
        judge.turn();
        assert_eq!((judge.now.len(), judge.before.len()), (0, 1));
    }

    /// The number of ranges that a policy denies, whether the tables have no room, and the problem.
    #[test]
    fn decisions_that_do_not_fit_refuse_everybody() {
        for (ranges, over_budget, wanted) in [
            (3, true, None),
            (4, true, Some(NO_ROOM)),
            (10, false, None),
            (10, true, Some(NO_ROOM)),
            (3000, false, Some(TOO_MANY)),
        ] {
            let range = |of: u32| IpNet::from(IpAddr::from(Ipv4Addr::from_bits(of << 8)));
            let of = Match {
                sources: Values {
                    any: (0..ranges).map(range).collect(),
                    none: Box::default(),
                },
                ..Match::default()
            };
            let effect = Effect::Authorization(Arc::new(Authorization {
                action: Action::Deny,
                dry_run: false,
                rules: [Rule([[of].into()].into())].into(),
            }));
            let mut namespace = IstioNamespace::default();
            let selector = Some([].into());
            let policy = Arc::new(IstioPolicy { selector, effect });
            let name = "AuthorizationPolicy p".into();
            namespace.policies.insert(name, policy);
            let mut istio = Istio::default();
            istio.namespaces.insert("shop".into(), Arc::new(namespace));
            let mut pod = Workload::new(WorkloadName::new("shop", "web"), Place::Address);
            pod.addresses.push(OWN[0].parse().unwrap());
            let mut policy = Policy::default();
            let found = Judge::default().judge(&istio, &pod, &mut policy, over_budget);
            assert_eq!(found, wanted, "{ranges}");
            let closed = Some(Arc::new(PlainClients::closed()));
            assert_eq!(policy.plain_clients == closed, wanted.is_some());
        }
    }

    /// The tables and a workload's entry with these decisions.
    fn written(clients: PlainClients) -> (Captured, Local) {
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
        (tables, local)
    }

    /// In the order in which the kernel's tables lose the entries of an old policy.
    #[test]
    fn a_policy_that_goes_refuses_until_the_end() {
        let all = |verdict: &Verdict| -> Clients {
            let ranges = ["0.0.0.0/0", "::/0"].map(|of| of.parse::<IpNet>().unwrap());
            ranges.map(|of| (of, verdict.clone())).into()
        };
        let clients = PlainClients {
            ports: [(80, all(&Verdict::NotAllowed))].into(),
            others: all(&Verdict::Allowed),
            of_root: false,
        };
        let (mut tables, local) = written(clients);
        let client: IpAddr = "10.0.0.1".parse().unwrap();
        let judged = |tables: &Captured, port| capture::judged(tables, &local, client.into(), port);
        assert_eq!(judged(&tables, 81), CAPTURED);
        while tables.rules.pop_first().is_some() || tables.ranges.pop_first().is_some() {
            assert_ne!(judged(&tables, 80), CAPTURED);
        }
    }

    #[test]
    fn a_rule_that_is_missing_allows_nobody() {
        let (mut tables, local) = written(PlainClients::closed());
        let client: IpAddr = "10.0.0.1".parse().unwrap();
        let judged = |tables: &Captured| capture::judged(tables, &local, client.into(), 80);
        assert_ne!(judged(&tables), CAPTURED);
        tables.ranges.clear();
        assert_ne!(judged(&tables), CAPTURED);
        tables.rules.clear();
        assert_ne!(judged(&tables), CAPTURED);
    }
}
