//! Istio's AuthorizationPolicies: their rules at layer 4, as Istio's control plane sends them to its ztunnel.
//!
//! The control plane leaves out values that it cannot read. Here, a rule with such a value is closed: a rule that denies
//! matches every connection, and a rule that allows matches none.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use model::authorization::{Account, Action, Match, Rule, Values, Word};
use serde_json::{Map, Value};

use super::Findings;

/// A field's path, and the fault of its value.
type Wrong = (String, String);

/// The lists of a rule, the object in each of their items, and the fields of this object: fields of layer 4, and fields that
/// only waypoints enforce. `remoteIpBlocks` counts as layer 7, as for Istio. Its ztunnel does not know trust domains.
const LISTS: [(&str, &str, &[&str], &[&str]); 2] = [
    (
        "to",
        "operation",
        &["ports", "notPorts"],
        &[
            "hosts",
            "notHosts",
            "methods",
            "notMethods",
            "paths",
            "notPaths",
        ],
    ),
    (
        "from",
        "source",
        &[
            "principals",
            "notPrincipals",
            "namespaces",
            "notNamespaces",
            "serviceAccounts",
            "notServiceAccounts",
            "ipBlocks",
            "notIpBlocks",
        ],
        &[
            "requestPrincipals",
            "notRequestPrincipals",
            "remoteIpBlocks",
            "notRemoteIpBlocks",
            "trustDomains",
            "notTrustDomains",
        ],
    ),
];

/// Attributes of conditions that only waypoints enforce, or the beginnings of their names.
const LAYER_7: [&str; 6] = [
    "request.",
    "remote.ip",
    "connection.sni",
    "experimental.",
    "source.serviceAccount",
    "source.trustDomain",
];

/// Reads the rules of a policy of a namespace, in their order. Reports fields that have no effect, or another effect than in
/// Istio.
pub(super) fn rules(
    action: Action,
    given: &[Value],
    namespace: &str,
    findings: &mut Findings,
) -> Box<[Rule]> {
    let mut rules = Vec::new();
    for (at, given) in given.iter().enumerate() {
        let path = format!("spec.rules[{at}]");
        let mut layer_7 = BTreeSet::new();
        let read = match rule(given, &path, namespace, &mut layer_7) {
            Ok(read) => read,
            Err((path, wrong)) => {
                let so = match action {
                    Action::Allow => "allows nothing",
                    Action::Deny => "denies every connection to the Pods that the policy selects",
                };
                findings.note(path, format!("{wrong}; the rule {so}"));
                rules.push(match action {
                    Action::Allow => Rule::never(),
                    Action::Deny => Rule::default(),
                });
                continue;
            }
        };
        if !layer_7.is_empty() {
            let mut clauses = read.0.iter();
            let can_match = clauses.all(|clause| !clause.iter().all(Match::is_empty));
            let so = match action {
                Action::Allow => "allows nothing",
                Action::Deny if can_match => "denies without regard to them",
                Action::Deny => "denies nothing",
            };
            let names: Vec<String> = layer_7.into_iter().collect();
            let names = names.join(", ");
            let text = format!(
                "only a waypoint enforces {names}, so the rule {so} (ZtunnelAccepted=True, UnsupportedValue)"
            );
            findings.note(path, text);
            if action == Action::Allow {
                rules.push(Rule::never());
                continue;
            }
        }
        rules.push(read);
    }
    rules.into()
}

fn rule(
    given: &Value,
    path: &str,
    namespace: &str,
    layer_7: &mut BTreeSet<String>,
) -> Result<Rule, Wrong> {
    let rule = Fields::of(given, path.to_owned(), &["from", "to", "when"])?;
    let mut clauses: Vec<Box<[Match]>> = Vec::new();
    for (list, object, layer_4, others) in LISTS {
        let mut matches = Vec::new();
        for (item, path) in rule.list(list)? {
            let item = Fields::of(item, path, &[object])?;
            let given = item.0.get(object).unwrap_or(&Value::Null);
            let known = [layer_4, others].concat();
            let fields = Fields::of(given, item.path(object), &known)?;
            let mut has_others = false;
            for name in others {
                if !fields.texts(name)?.is_empty() {
                    layer_7.insert((*name).to_owned());
                    has_others = true;
                }
            }
            let found = if object == "source" {
                source(&fields, namespace)?
            } else {
                let ports = fields.values(["ports", "notPorts"], port)?;
                Match {
                    ports,
                    ..Match::default()
                }
            };
            if found.is_empty() && !has_others {
                return Err((fields.1, "has no field; expected one".to_owned()));
            }
            matches.push(found);
        }
        if !matches.is_empty() {
            clauses.push(matches.into());
        }
    }
    for (item, path) in rule.list("when")? {
        clauses.push([condition(item, path, layer_7)?].into());
    }
    Ok(Rule(clauses.into()))
}

fn source(fields: &Fields<'_>, namespace: &str) -> Result<Match, Wrong> {
    let account = |text: &str| {
        let (of, name) = text.split_once('/').unwrap_or((namespace, text));
        let is_name = |part: &str| !part.is_empty() && !part.contains(['*', '/']);
        if !is_name(of) || !is_name(name) {
            return Err(format!(
                "{text:?} is not a service account; expected ACCOUNT or NAMESPACE/ACCOUNT"
            ));
        }
        Ok(Account {
            namespace: of.into(),
            name: name.into(),
        })
    };
    let word = |text: &str| Ok(Word::from(text));
    Ok(Match {
        namespaces: fields.values(["namespaces", "notNamespaces"], word)?,
        accounts: fields.values(["serviceAccounts", "notServiceAccounts"], account)?,
        principals: fields.values(["principals", "notPrincipals"], word)?,
        sources: fields.values(["ipBlocks", "notIpBlocks"], range)?,
        ..Match::default()
    })
}

fn condition(given: &Value, path: String, layer_7: &mut BTreeSet<String>) -> Result<Match, Wrong> {
    const VALUES: [&str; 2] = ["values", "notValues"];
    let fields = Fields::of(given, path, &["key", "values", "notValues"])?;
    let key = fields.0.get("key").and_then(Value::as_str);
    let key = key.unwrap_or_default();
    if fields.texts(VALUES[0])?.is_empty() && fields.texts(VALUES[1])?.is_empty() {
        return Err((
            fields.1,
            "has no values; expected values or notValues".to_owned(),
        ));
    }
    let word = |text: &str| Ok(Word::from(text));
    let mut found = Match::default();
    match key {
        "source.ip" => found.sources = fields.values(VALUES, range)?,
        "source.namespace" => found.namespaces = fields.values(VALUES, word)?,
        "source.principal" => found.principals = fields.values(VALUES, word)?,
        "destination.ip" => found.destinations = fields.values(VALUES, range)?,
        "destination.port" => found.ports = fields.values(VALUES, port)?,
        _ if LAYER_7.iter().any(|of| key.starts_with(of)) => _ = layer_7.insert(key.to_owned()),
        _ => {
            let text = format!("{key:?} is not an attribute of Istio's conditions");
            return Err((fields.path("key"), text));
        }
    }
    Ok(found)
}

/// Reads a port. Unlike Rust, Istio takes no sign.
pub(super) fn port(text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|_| !text.starts_with('+'));
    port.ok_or_else(|| format!("{text:?} is not a port; expected a number from 0 to 65535"))
}

/// Reads an address or a range. Unlike Kubernetes and the crate `ipnet`, Istio takes no leading zeros.
fn range(text: &str) -> Result<IpNet, String> {
    let (address, length) = match text.split_once('/') {
        Some((address, length)) => (address, Some(length)),
        None => (text, None),
    };
    let read = || {
        let address: IpAddr = address.parse().ok()?;
        let Some(length) = length else {
            return Some(IpNet::from(address));
        };
        let is_plain = length == "0" || !length.starts_with(['0', '+']);
        let length = length.parse().ok().filter(|_| is_plain)?;
        IpNet::new(address, length).ok()
    };
    let is_mapped = |range: &IpNet| range.addr() != range.addr().to_canonical();
    read().filter(|range| !is_mapped(range)).ok_or_else(|| {
        format!("{text:?} is not an address or range; expected one like 10.0.0.0/8 or fd00::1")
    })
}

/// The fields of an object in a policy, and its path.
struct Fields<'a>(&'a Map<String, Value>, String);

impl<'a> Fields<'a> {
    /// Returns the fields. An unknown field may limit the other fields, so it is an error.
    fn of(given: &'a Value, path: String, known: &[&str]) -> Result<Self, Wrong> {
        let Some(fields) = given.as_object() else {
            return Err((path, "is missing or is not an object".to_owned()));
        };
        match fields.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err((format!("{path}.{key}"), "is not known".to_owned())),
            None => Ok(Self(fields, path)),
        }
    }

    fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.1)
    }

    /// Returns the items of a list, with their paths. For Istio, a list without items is a list that is missing.
    fn list(&self, name: &str) -> Result<Vec<(&'a Value, String)>, Wrong> {
        let items = match self.0.get(name) {
            None | Some(Value::Null) => &[][..],
            Some(Value::Array(items)) => items,
            Some(_) => return Err((self.path(name), "is not a list".to_owned())),
        };
        let items = items.iter().enumerate();
        let items = items.map(|(at, item)| (item, format!("{}[{at}]", self.path(name))));
        Ok(items.collect())
    }

    /// Returns the texts of a list, with their paths.
    fn texts(&self, name: &str) -> Result<Vec<(&'a str, String)>, Wrong> {
        let items = self.list(name)?.into_iter();
        let texts = items.map(|(item, path)| match item.as_str() {
            Some(text) if !text.is_empty() => Ok((text, path)),
            Some(_) => Err((path, "is empty".to_owned())),
            None => Err((path, "is not text; write it in quotes".to_owned())),
        });
        texts.collect()
    }

    /// Returns the values of a property, and of the property with `not`.
    fn values<T>(
        &self,
        [any, none]: [&str; 2],
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Values<T>, Wrong> {
        let all = |name| {
            let texts = self.texts(name)?.into_iter();
            let all = texts.map(|(text, path)| read(text).map_err(|wrong| (path, wrong)));
            all.collect::<Result<Box<[T]>, Wrong>>()
        };
        Ok(Values {
            any: all(any)?,
            none: all(none)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each line has a rule, the field that is reported, and `7` if the rule can be read and has fields of layer 7.
    #[test]
    fn a_rule_that_cannot_be_read_is_closed() {
        let cases = r#"
            null => spec.rules[0]
            [] => spec.rules[0]
            {"form": []} => spec.rules[0].form
            {"from": {}} => spec.rules[0].from
            {"from": [{}]} => spec.rules[0].from[0].source
            {"from": [null]} => spec.rules[0].from[0]
            {"from": [{"source": {}}]} => spec.rules[0].from[0].source
            {"from": [{"source": {"ipBlock": ["10.0.0.1"]}}]} => spec.rules[0].from[0].source.ipBlock
            {"from": [{"source": {"ipBlocks": "10.0.0.1"}}]} => spec.rules[0].from[0].source.ipBlocks
            {"from": [{"source": {"ipBlocks": ["10.0.0.1", "10.0.0.0/33"]}}]} => spec.rules[0].from[0].source.ipBlocks[1]
            {"from": [{"source": {"notIpBlocks": ["010.0.0.1"]}}]} => spec.rules[0].from[0].source.notIpBlocks[0]
            {"from": [{"source": {"ipBlocks": ["010.0.0.0/8"]}}]} => spec.rules[0].from[0].source.ipBlocks[0]
            {"from": [{"source": {"ipBlocks": ["10.0.0.0/08"]}}]} => spec.rules[0].from[0].source.ipBlocks[0]
            {"from": [{"source": {"ipBlocks": ["10.0.0.0/+8"]}}]} => spec.rules[0].from[0].source.ipBlocks[0]
            {"from": [{"source": {"ipBlocks": ["::ffff:10.0.0.1"]}}]} => spec.rules[0].from[0].source.ipBlocks[0]
            {"from": [{"source": {"principals": [""]}}]} => spec.rules[0].from[0].source.principals[0]
            {"from": [{"source": {"namespaces": [5]}}]} => spec.rules[0].from[0].source.namespaces[0]
            {"from": [{"source": {"serviceAccounts": ["a/b/c"]}}]} => spec.rules[0].from[0].source.serviceAccounts[0]
            {"from": [{"source": {"serviceAccounts": ["shop/*"]}}]} => spec.rules[0].from[0].source.serviceAccounts[0]
            {"to": [{"operation": {"ports": ["80", "65536"]}}]} => spec.rules[0].to[0].operation.ports[1]
            {"to": [{"operation": {"ports": ["+80"]}}]} => spec.rules[0].to[0].operation.ports[0]
            {"to": [{"operation": {"ports": [80]}}]} => spec.rules[0].to[0].operation.ports[0]
            {"to": [{"operation": {"notPorts": ["http"]}}]} => spec.rules[0].to[0].operation.notPorts[0]
            {"when": [{"key": "source.ip"}]} => spec.rules[0].when[0]
            {"when": [{"key": "source.ips", "values": ["10.0.0.1"]}]} => spec.rules[0].when[0].key
            {"when": [{"values": ["10.0.0.1"]}]} => spec.rules[0].when[0].key
            {"when": [{"key": "destination.port", "notValues": ["x"]}]} => spec.rules[0].when[0].notValues[0]
            {"to": [{"operation": {"methods": ["GET"]}}]} => spec.rules[0] 7
            {"from": [{"source": {"trustDomains": ["other"], "namespaces": ["shop"]}}]} => spec.rules[0] 7
            {"when": [{"key": "request.headers[x]", "values": ["y"]}]} => spec.rules[0] 7"#;
        for case in cases.lines().skip(1) {
            let (rule, field) = case.split_once(" => ").unwrap();
            let rule: Value = serde_json::from_str(rule).unwrap();
            let (field, is_layer_7) = match field.strip_suffix(" 7") {
                Some(field) => (field, true),
                None => (field, false),
            };
            for (action, closed) in [
                (Action::Allow, Rule::never()),
                (Action::Deny, Rule::default()),
            ] {
                let mut findings = Findings::default();
                let read = rules(action, std::slice::from_ref(&rule), "shop", &mut findings);
                let [(path, _)] = &findings.notes[..] else {
                    panic!("{case}: {findings:?}");
                };
                assert_eq!(path, field, "{case}");
                let is_closed = *read == [closed];
                assert_eq!(is_closed, !is_layer_7 || action == Action::Allow, "{case}");
            }
        }
    }
}
