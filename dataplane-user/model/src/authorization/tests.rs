//! Decisions beside those of a naive evaluator. Istio's documented decisions are in the tests of the room `source`.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
};

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::Identity;

/// A property of a connection and the values that a match has for it, as sentences: `is` or `not`, property, value.
type Sentence = (bool, &'static str, String);

thread_local! {
    /// The values of the matches that this thread has evaluated, and one for each match.
    pub(super) static COMPARED: Cell<usize> = const { Cell::new(0) };
}

const NAMES: [&str; 4] = ["a", "b", "ab", "ba"];

fn words() -> impl Strategy<Value = String> {
    let name = || prop::sample::select(&NAMES[..]);
    prop_oneof![
        name().prop_map(str::to_owned),
        name().prop_map(|name| format!("{name}*")),
        name().prop_map(|name| format!("*{name}")),
        Just("*".to_owned()),
        (name(), name()).prop_map(|(ns, sa)| format!("d/ns/{ns}/sa/{sa}")),
        name().prop_map(|name| format!("d/ns/{name}*")),
    ]
}

fn sentence() -> impl Strategy<Value = Sentence> {
    let range = || prop::sample::select(vec!["10.0.0.0/8", "10.0.0.1/32", "fd00::/8", "0.0.0.0/0"]);
    let name = || prop::sample::select(&NAMES[..]);
    let about = prop_oneof![
        words().prop_map(|of| ("namespace", of)),
        words().prop_map(|of| ("principal", of)),
        (name(), name()).prop_map(|(ns, sa)| ("account", format!("{ns}/{sa}"))),
        range().prop_map(|of| ("source", of.to_owned())),
        range().prop_map(|of| ("destination", of.to_owned())),
        (0..4_u16).prop_map(|port| ("port", port.to_string())),
    ];
    (any::<bool>(), about).prop_map(|(is, (property, value))| (is, property, value))
}

type Text = (bool, bool, Vec<Vec<Vec<Vec<Sentence>>>>);

fn policy() -> impl Strategy<Value = Text> {
    let rules = vec(vec(vec(vec(sentence(), 0..4), 0..3), 0..3), 0..3);
    (any::<bool>(), prop::bool::weighted(0.2), rules)
}

fn parsed(sentences: &[Sentence]) -> Match {
    fn values<T>(sentences: &[Sentence], property: &str, read: impl Fn(&str) -> T) -> Values<T> {
        let all = |wanted: bool| {
            let of = sentences.iter();
            let of = of.filter(|(is, name, _)| (*is, *name) == (wanted, property));
            of.map(|(_, _, value)| read(value)).collect()
        };
        Values {
            any: all(true),
            none: all(false),
        }
    }
    let account = |text: &str| {
        let (namespace, name) = text.split_once('/').unwrap();
        Account {
            namespace: namespace.into(),
            name: name.into(),
        }
    };
    Match {
        namespaces: values(sentences, "namespace", |text| text.into()),
        accounts: values(sentences, "account", account),
        principals: values(sentences, "principal", |text| text.into()),
        sources: values(sentences, "source", |text| text.parse().unwrap()),
        destinations: values(sentences, "destination", |text| text.parse().unwrap()),
        ports: values(sentences, "port", |text| text.parse().unwrap()),
    }
}

fn policies(texts: &[Text]) -> Policies {
    let texts = texts.iter().enumerate();
    let all = texts.map(|(at, (denies, dry_run, rules))| {
        let name = PolicyName {
            namespace: "shop".into(),
            object: format!("AuthorizationPolicy {at}").into(),
        };
        let clause = |clause: &Vec<Vec<Sentence>>| clause.iter().map(|of| parsed(of)).collect();
        let rules = rules
            .iter()
            .map(|rule| Rule(rule.iter().map(clause).collect()));
        let action = if *denies { Action::Deny } else { Action::Allow };
        let (dry_run, rules) = (*dry_run, rules.collect());
        (
            name,
            Some(Arc::new(Authorization {
                action,
                dry_run,
                rules,
            })),
        )
    });
    Policies {
        authorizations: all.collect(),
        ..Policies::default()
    }
}

/// The properties of a connection, as texts. Without an identity, the first three are missing.
struct Facts(Vec<(&'static str, String)>);

impl Facts {
    /// Whether a sentence without its `is` or `not` is true of the connection.
    fn has(&self, property: &str, value: &str) -> bool {
        let Some((_, fact)) = self.0.iter().find(|(name, _)| *name == property) else {
            return false;
        };
        match property {
            "source" | "destination" => {
                let (base, bits) = value.split_once('/').unwrap();
                let octets = |text: &str| match text.parse::<IpAddr>().unwrap() {
                    IpAddr::V4(ip) => ip.octets().to_vec(),
                    IpAddr::V6(ip) => ip.octets().to_vec(),
                };
                let bytes = bits.parse::<usize>().unwrap() / 8;
                let (base, fact) = (octets(base), octets(fact));
                base.len() == fact.len() && base[..bytes] == fact[..bytes]
            }
            "port" | "account" => fact == value,
            // A pattern with one star: by its parts.
            _ => match value.find('*') {
                None => fact == value,
                Some(at) => {
                    let (start, end) = (&value[..at], &value[at + 1..]);
                    fact.len() >= start.len().max(1)
                        && &fact[..start.len()] == start
                        && fact.len() >= end.len()
                        && &fact[fact.len() - end.len()..] == end
                }
            },
        }
    }

    /// Whether all sentences hold: none with `not` is true, and of each property with `is`, one is true.
    fn hold(&self, sentences: &[Sentence]) -> bool {
        let mut wanted = std::collections::BTreeMap::new();
        for (is, property, value) in sentences {
            let has = self.has(property, value);
            if *is {
                *wanted.entry(property).or_insert(false) |= has;
            } else if has {
                return false;
            }
        }
        !sentences.is_empty() && wanted.values().all(|is| *is)
    }

    /// Rules as a sum of products: every choice of one match for each clause.
    fn matches(&self, rule: &[Vec<Vec<Sentence>>]) -> bool {
        let mut choices: Vec<Vec<&[Sentence]>> = vec![Vec::new()];
        for clause in rule.iter().filter(|clause| !clause.is_empty()) {
            let longer = choices.iter().flat_map(|choice| {
                clause.iter().map(|of| {
                    let mut choice = choice.clone();
                    choice.push(of);
                    choice
                })
            });
            choices = longer.collect();
        }
        choices
            .iter()
            .any(|choice| choice.iter().all(|of| self.hold(of)))
    }
}

/// Counts instead of looking for the first: the numbers of policies with DENY that match, with ALLOW, and with ALLOW that match.
fn naive(texts: &[Text], facts: &Facts) -> bool {
    let (mut denying, mut allowing, mut allowed) = (0, 0, 0);
    for (denies, dry_run, rules) in texts {
        let fits = rules.iter().filter(|rule| facts.matches(rule)).count() > 0;
        match (dry_run, denies) {
            (true, _) => {}
            (_, true) => denying += usize::from(fits),
            (_, false) => {
                allowing += 1;
                allowed += usize::from(fits);
            }
        }
    }
    denying == 0 && (allowing == 0 || allowed > 0)
}

fn peer() -> impl Strategy<Value = Option<Identity>> {
    let name = || prop::sample::select(&NAMES[..]);
    let identity = ("[de]", name(), name());
    let identity = identity.prop_map(|(domain, ns, sa)| Identity::new(&domain, ns, sa).unwrap());
    prop::option::weighted(0.7, identity)
}

fn address() -> impl Strategy<Value = IpAddr> {
    const ALL: [&str; 5] = ["10.0.0.1", "10.1.0.0", "11.0.0.1", "fd00::1", "::1"];
    prop::sample::select(&ALL[..]).prop_map(|text| text.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn decisions_are_those_of_a_naive_evaluator(
        texts in vec(policy(), 0..4),
        peer in peer(),
        (source, destination, port) in (address(), address(), 0..5_u16),
    ) {
        let mut facts = vec![
            ("source", source.to_string()),
            ("destination", destination.to_string()),
            ("port", port.to_string()),
        ];
        if let Some(peer) = &peer {
            let (ns, sa) = (peer.namespace(), peer.account());
            facts.push(("namespace", ns.to_owned()));
            facts.push(("account", format!("{ns}/{sa}")));
            facts.push(("principal", format!("{}/ns/{ns}/sa/{sa}", peer.trust_domain())));
        }
        let policies = policies(&texts);
        let destination = SocketAddr::new(destination, port);
        let connection = Connection::new(peer.as_ref(), source, destination);
        let decision = policies.decide(&connection);
        prop_assert_eq!(decision.is_allowed(), naive(&texts, &Facts(facts)), "{:?}", decision);
        if !policies.needs_identity() {
            let without = Connection::new(None, source, destination);
            prop_assert_eq!(policies.decide(&without).reason, decision.reason);
        }
        let mut held = policies.clone();
        held.authorizations.retain(|(_, of)| of.as_ref().is_some_and(|of| !of.dry_run));
        prop_assert_eq!(held.decide(&connection).reason, decision.reason);
        // A policy that has not arrived refuses everything, even if another policy allows it.
        let name = PolicyName { namespace: "shop".into(), object: "AuthorizationPolicy x".into() };
        held.authorizations.push((name.clone(), None));
        prop_assert_eq!(held.decide(&connection).reason, Reason::Missing(&name));
    }
}

#[test]
fn an_explanation_goes_rule_by_rule() {
    let sentences = |all: &[(bool, &'static str, &str)]| {
        let all = all
            .iter()
            .map(|(is, property, value)| (*is, *property, (*value).to_owned()));
        all.collect::<Vec<Sentence>>()
    };
    let from = sentences(&[(true, "namespace", "a*"), (false, "principal", "*")]);
    let source = sentences(&[(true, "source", "10.0.0.0/8")]);
    let port = sentences(&[(true, "port", "80"), (true, "port", "81")]);
    let texts = [
        (
            false,
            false,
            vec![vec![vec![from, source]], vec![vec![port]]],
        ),
        (true, true, vec![vec![]]),
        (true, false, vec![vec![vec![vec![]]]]),
    ];
    let policies = policies(&texts);
    let connection = Connection::new(None, [11, 0, 0, 1].into(), ([10, 9, 0, 1], 80).into());
    let lines = [
        "AuthorizationPolicy shop/1: DENY (dry run)",
        "  rule 1 matches: every connection",
        "AuthorizationPolicy shop/2: DENY",
        "  rule 1 does not match: (no connection: no field counts at layer 4)",
        "AuthorizationPolicy shop/0: ALLOW",
        "  rule 1 does not match: (namespace a*, not principal *) or (source 10.0.0.0/8)",
        "  rule 2 matches: (port 80|81)",
        "dry run: denied by AuthorizationPolicy shop/1, rule 1",
        "allowed by AuthorizationPolicy shop/0, rule 2",
    ];
    assert_eq!(policies.explain(&connection), lines);
    assert!(policies.needs_identity());
    let unread = Policies {
        unread: true,
        ..Policies::default()
    };
    assert_eq!(unread.decide(&connection).reason, Reason::Unread);
    assert!(!unread.needs_identity());
}
