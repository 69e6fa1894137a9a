//! Istio's policies of captured workloads, and decisions about connections: `GET /policies`.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{
    Identity, Place, Snapshot, Workload, WorkloadName,
    authorization::{Connection, Policies, PolicyName},
};
use serde::Deserialize;

use super::{api, state::State};

/// The parameters of a request: a workload, and a connection to it.
#[derive(Debug, Default, Deserialize)]
pub struct Asked {
    workload: Option<String>,
    from: Option<IpAddr>,
    peer: Option<String>,
    port: Option<u16>,
}

/// A connection: the client's identity and address, and the port.
struct Client {
    peer: Option<Identity>,
    from: IpAddr,
    port: u16,
}

impl Asked {
    fn client(&self) -> Result<Option<Client>, String> {
        let peer = self.peer.as_deref().map(str::parse::<Identity>);
        let peer = peer
            .transpose()
            .map_err(|error| format!("peer: {error}\n"))?;
        match (self.from, self.port, peer) {
            (Some(from), Some(port), peer) => Ok(Some(Client { peer, from, port })),
            (None, None, None) => Ok(None),
            _ => Err("from and port are required together, and peer only with both\n".to_owned()),
        }
    }
}

impl State {
    /// Answers `GET /policies`.
    ///
    /// # Errors
    /// If the request has a part of a connection only, or an invalid identity, or no workload has the requested name.
    pub fn policies(&self, asked: &Asked) -> Result<api::Page<api::WorkloadPolicies>, String> {
        let client = asked.client()?;
        let snapshot = self.served().snapshot;
        let workloads = self.mesh().items.into_iter();
        let wanted = asked.workload.as_deref();
        let workloads = workloads.filter(|of| wanted.is_none_or(|wanted| wanted == of.full_name()));
        let items = workloads.map(|of| {
            let name = WorkloadName::new(&of.namespace, &of.name);
            let by_proxy = || self.proxy.get().is_some_and(|of| of.takes_inbound(&name));
            let by = if of.by_kernel {
                Some("kernel")
            } else {
                by_proxy().then_some("proxy")
            };
            let told = told(&snapshot, &name, by, client.as_ref());
            closed(told, of.closed)
        });
        let items: Vec<_> = items.collect();
        match wanted.filter(|_| items.is_empty()) {
            Some(name) => Err(format!("no workload {name} is captured on this node\n")),
            None => Ok(api::Page { items, next: None }),
        }
    }
}

fn told(
    snapshot: &Snapshot,
    name: &WorkloadName,
    by: Option<&str>,
    client: Option<&Client>,
) -> api::WorkloadPolicies {
    let known = snapshot.workloads.get(name).cloned();
    let workload = known.unwrap_or_else(|| Arc::new(Workload::new(name.clone(), Place::Address)));
    let policies = snapshot
        .istio
        .policies_of(name.namespace(), &workload.labels);
    let decision = client.map(|client| {
        let mut own = workload.addresses.iter();
        let own = own.find(|addr| addr.is_ipv4() == client.from.is_ipv4());
        let to = own.copied().unwrap_or_else(|| unspecified(client.from));
        let to = SocketAddr::new(to, client.port);
        let connection = Connection::new(client.peer.as_ref(), client.from, to);
        api::Decision {
            allowed: policies.decide(&connection).is_allowed(),
            steps: policies.explain(&connection),
        }
    });
    api::WorkloadPolicies {
        workload: name.to_string(),
        enforced_by: by.map(str::to_owned),
        unread: policies.unread,
        closed: None,
        policies: list(snapshot, &policies),
        decision,
    }
}

/// Adds why all connections to a workload are refused, if they are.
fn closed(told: api::WorkloadPolicies, why: Option<String>) -> api::WorkloadPolicies {
    let decision = told.decision.map(|mut decision| {
        decision.allowed &= why.is_none();
        decision
            .steps
            .extend(why.as_ref().map(|why| format!("denied: {why}")));
        decision
    });
    api::WorkloadPolicies {
        closed: why,
        decision,
        ..told
    }
}

/// Returns an address for a workload whose addresses are not known. No policy names it.
fn unspecified(family: IpAddr) -> IpAddr {
    match family {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
    }
}

fn list(snapshot: &Snapshot, policies: &Policies) -> Vec<api::Policy> {
    let policy = |name: &PolicyName, action: &str, dry_run: bool, rules: Vec<String>| api::Policy {
        name: name.to_string(),
        action: action.to_owned(),
        dry_run,
        rules,
        warnings: warnings(snapshot, name),
    };
    let custom = policies.custom.iter();
    let custom = custom.map(|name| policy(name, "CUSTOM", false, Vec::new()));
    let authorizations = policies.authorizations.iter().map(|(name, of)| {
        if let Some(of) = of {
            let rules = of.rules.iter().map(ToString::to_string).collect();
            policy(name, of.action.word(), of.dry_run, rules)
        } else {
            let text = "is not known yet, so it refuses every connection".to_owned();
            policy(name, "DENY", false, vec![text])
        }
    });
    let plaintext = policies.plaintext.all().map(|(name, of)| {
        let mode = |is_strict| if is_strict { "STRICT" } else { "PERMISSIVE" };
        let all = of.strict.map(|is| mode(is).to_owned());
        let ports = of.ports.iter();
        let ports = ports.map(|(port, is)| format!("port {port}: {}", mode(*is)));
        policy(name, "mTLS", false, all.into_iter().chain(ports).collect())
    });
    custom.chain(authorizations).chain(plaintext).collect()
}

/// Returns the parts of a policy that the agent cannot read or does not evaluate.
fn warnings(snapshot: &Snapshot, name: &PolicyName) -> Vec<String> {
    let name = name.to_string();
    let of_policy = |place: &str| {
        // In manifests, the file comes first.
        let file = place.strip_suffix(&name);
        file.is_some_and(|file| file.is_empty() || file.ends_with(": "))
    };
    let problems = snapshot.problems.iter();
    let problems = problems.filter(|of| of_policy(&of.place));
    problems.map(|of| of.text.clone()).collect()
}

#[cfg(test)]
mod tests {
    use model::{
        Effect, Gravity, IstioNamespace, IstioPolicy, Problem,
        authorization::{Action, Authorization, Match, PeerAuthentication, Rule, Values},
    };

    use super::*;

    #[test]
    fn policies_are_listed_with_their_warnings_and_the_decision() {
        let name = WorkloadName::new("shop", "web");
        let rule = Match {
            ports: Values {
                any: [80].into(),
                none: Box::default(),
            },
            ..Match::default()
        };
        let allow = Effect::Authorization(Arc::new(Authorization {
            action: Action::Allow,
            dry_run: false,
            rules: [Rule([[rule].into()].into())].into(),
        }));
        let strict = Effect::Plaintext(Arc::new(PeerAuthentication {
            created: None,
            strict: None,
            ports: [(81, true)].into(),
        }));
        let mut of = IstioNamespace::default();
        let label = (Box::from("app"), Box::from("web"));
        for (object, effect) in [
            ("AuthorizationPolicy web", allow),
            ("PeerAuthentication web", strict),
        ] {
            let selector = Some([label.clone()].into());
            of.policies
                .insert(object.into(), Arc::new(IstioPolicy { selector, effect }));
        }
        let mut snapshot = Snapshot::default();
        snapshot
            .istio
            .namespaces
            .insert("shop".into(), Arc::new(of));
        let mut pod = Workload::new(name.clone(), Place::Address);
        pod.labels = [label].into();
        snapshot.workloads.insert(name.clone(), Arc::new(pod));
        let problem = |place: &str| Problem {
            gravity: Gravity::Warning,
            place: place.to_owned(),
            text: format!("of {place}"),
        };
        let places = [
            "a.yaml: AuthorizationPolicy shop/web",
            "AuthorizationPolicy shop/web2",
        ];
        snapshot.problems = places.map(problem).into();
        let asked = |port| Client {
            peer: None,
            from: "10.0.0.9".parse().unwrap(),
            port,
        };
        let told = |port| told(&snapshot, &name, Some("kernel"), Some(&asked(port)));
        let found = told(80);
        let shown = found.policies.iter().map(|of| {
            let (rules, warnings) = (of.rules.join("; "), of.warnings.join("; "));
            format!("{} {}: {rules} | {warnings}", of.name, of.action)
        });
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                "AuthorizationPolicy shop/web ALLOW: (port 80) | of a.yaml: AuthorizationPolicy shop/web",
                "PeerAuthentication shop/web mTLS: port 81: STRICT | "
            ]
        );
        assert!(found.decision.as_ref().unwrap().allowed);
        let refused = closed(found, Some("too many".to_owned()));
        assert_eq!(refused.closed.as_deref(), Some("too many"));
        let refused = refused.decision.unwrap();
        assert!(!refused.allowed);
        assert_eq!(refused.steps.last().unwrap(), "denied: too many");
        let denied = told(81).decision.unwrap();
        assert!(!denied.allowed);
        let last = denied.steps.last().unwrap();
        assert!(last.contains("mode STRICT"), "{last}");
    }

    #[test]
    fn a_connection_has_an_address_and_a_port() {
        let from = Some("10.0.0.9".parse().unwrap());
        for (from, port, peer, is_right) in [
            (None, None, None, true),
            (from, Some(80), None, true),
            (from, Some(80), Some("spiffe://d/ns/a/sa/b"), true),
            (from, Some(80), Some("spiffe://d/a"), false),
            (from, None, None, false),
            (None, Some(80), None, false),
        ] {
            let asked = Asked {
                workload: None,
                from,
                peer: peer.map(str::to_owned),
                port,
            };
            assert_eq!(asked.client().is_ok(), is_right, "{asked:?}");
        }
    }
}
