//! Istio's own control plane as the judge: what istiod tells a ztunnel about policies, and a ztunnel's decisions by it.
//!
//! `istiod.jsonl` has a namespace in each line: its policies, and istiod's answers, which are its authorizations and the names
//! of authorizations that each workload has. A workload is written as its labels. A line of the root namespace begins a round:
//! its policies hold in the namespaces of the lines after it. `cargo xtask cluster istiod` asks istiod for the answers again.
//! `differs` has the reason for each workload with intended differences, which are in docs/mesh.md.

use std::{collections::BTreeMap, net::IpAddr};

use data_encoding::BASE64;
use dataplane_source::objects::IstioObjects;
use ipnet::IpNet;
use model::{
    Identity, Istio, Label,
    authorization::{Connection, Policies, Verdict},
};
use serde::Deserialize;
use serde_json::Value;

use super::{labels, store};

const ROOT: &str = "istio-system";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    namespace: String,
    #[serde(default)]
    differs: BTreeMap<String, String>,
    objects: Vec<Value>,
    workloads: BTreeMap<String, Vec<String>>,
    authorizations: Vec<Authorization>,
}

/// istiod's message (`istio.security.Authorization`).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Authorization {
    name: String,
    namespace: String,
    scope: String,
    action: String,
    dry_run: bool,
    groups: Vec<Group>,
}

impl Default for Authorization {
    fn default() -> Self {
        Self {
            name: String::new(),
            namespace: String::new(),
            // The values 0, which the message leaves out.
            scope: "GLOBAL".into(),
            action: "ALLOW".into(),
            dry_run: false,
            groups: Vec::new(),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Group {
    rules: Vec<Clause>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Clause {
    matches: Vec<Match>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Match {
    namespaces: Vec<Text>,
    not_namespaces: Vec<Text>,
    service_accounts: Vec<Account>,
    not_service_accounts: Vec<Account>,
    principals: Vec<Text>,
    not_principals: Vec<Text>,
    source_ips: Vec<Range>,
    not_source_ips: Vec<Range>,
    destination_ips: Vec<Range>,
    not_destination_ips: Vec<Range>,
    destination_ports: Vec<u16>,
    not_destination_ports: Vec<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Text {
    Exact(String),
    Prefix(String),
    Suffix(String),
    Presence {},
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Account {
    namespace: String,
    service_account: String,
}

#[derive(Deserialize)]
#[serde(try_from = "Bytes")]
struct Range(IpNet);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bytes {
    address: String,
    #[serde(default)]
    length: u8,
}

impl TryFrom<Bytes> for Range {
    type Error = String;

    fn try_from(of: Bytes) -> Result<Self, String> {
        let bytes = BASE64.decode(of.address.as_bytes());
        let bytes = bytes.map_err(|error| error.to_string())?;
        let four = <[u8; 4]>::try_from(&*bytes).map(IpAddr::from);
        let address = four.or_else(|_| <[u8; 16]>::try_from(&*bytes).map(IpAddr::from));
        let address = address.map_err(|error| error.to_string())?;
        let range = IpNet::new(address, of.length);
        range.map(Self).map_err(|error| error.to_string())
    }
}

/// A connection, as texts: the client's trust domain, namespace and account.
#[derive(Debug)]
struct Facts {
    peer: Option<[String; 3]>,
    source: IpAddr,
    destination: IpAddr,
    port: u16,
}

impl Facts {
    fn grid(namespace: &str) -> Vec<Self> {
        let own = format!("cluster.local {namespace} web");
        let mut peers = vec![None];
        let known = [
            "shop web",
            "shop db",
            "shop guest",
            "shop myweb",
            "bank teller",
            "bank web",
            "prod-a x",
            "a-prod x",
            "shop2 web",
            "istio-system web",
        ];
        let known = known.map(|of| format!("cluster.local {of}"));
        let others = ["other shop web", "cluster.remote shop web", "b c d"];
        let all = others.map(str::to_owned).into_iter().chain(known);
        peers.extend(all.chain([own]).map(Some));
        let sources = [
            "10.0.0.1",
            "10.1.2.3",
            "10.5.0.1",
            "11.0.0.1",
            "192.168.0.1",
            "fd00::1",
        ];
        let mut found = Vec::new();
        for peer in &peers {
            for source in sources {
                for destination in ["10.9.0.1", "10.9.0.2", "fd00::1"] {
                    for port in [22, 80, 81, 82, 443, 3306, 8080, 9090] {
                        let peer = peer.as_deref();
                        let peer =
                            peer.map(|of| of.split(' ').map(str::to_owned).collect::<Vec<_>>());
                        found.push(Self {
                            peer: peer.map(|of| of.try_into().expect("three words")),
                            source: source.parse().unwrap(),
                            destination: destination.parse().unwrap(),
                            port,
                        });
                    }
                }
            }
        }
        found
    }

    /// Decides as the kernel does about a client without an identity: by ranges of clients.
    fn is_allowed_by_kernel(&self, policies: &Policies) -> bool {
        let clients = policies.plain_clients(&[self.destination]);
        let clients = clients.expect("few ranges");
        let of_port = clients.ports.get(&self.port).unwrap_or(&clients.others);
        let found = of_port
            .iter()
            .filter(|(range, _)| range.contains(&self.source));
        let longest = found.max_by_key(|(range, _)| range.prefix_len());
        longest.is_some_and(|(_, verdict)| *verdict == Verdict::Allowed)
    }

    fn is_allowed(&self, policies: &Policies) -> bool {
        let peer = self.peer.as_ref();
        let peer = peer.map(|[domain, ns, name]| Identity::new(domain, ns, name).unwrap());
        let destination = (self.destination, self.port).into();
        let connection = Connection::new(peer.as_ref(), self.source, destination);
        policies.decide(&connection).is_allowed()
    }

    /// Decides as a ztunnel does.
    fn is_allowed_by(&self, authorizations: &[&Authorization]) -> bool {
        let held = || authorizations.iter().filter(|of| !of.dry_run);
        let of = |action: &'static str| held().filter(move |of| of.action == action);
        !of("DENY").any(|of| self.matches(of))
            && (of("ALLOW").count() == 0 || of("ALLOW").any(|of| self.matches(of)))
    }

    fn matches(&self, authorization: &Authorization) -> bool {
        let mut rules = authorization.groups.iter();
        rules.any(|rule| rule.rules.iter().all(|clause| self.fits(&clause.matches)))
    }

    fn fits(&self, clause: &[Match]) -> bool {
        // Without an identity, the texts are empty.
        let [domain, namespace, account] = self.peer.clone().unwrap_or_default();
        let principal = match &self.peer {
            Some(_) => format!("{domain}/ns/{namespace}/sa/{account}"),
            None => String::new(),
        };
        let is_of = |of: &Account| {
            self.peer.is_some() && of.namespace == namespace && of.service_account == account
        };
        let is = |of: &Text, text: &str| match of {
            Text::Exact(of) => text == of,
            Text::Prefix(of) => text.starts_with(of.as_str()),
            Text::Suffix(of) => text.ends_with(of.as_str()),
            Text::Presence {} => !text.is_empty(),
        };
        let found = clause.iter().any(|of| {
            let properties = [
                one(&of.namespaces, &of.not_namespaces, |of| is(of, &namespace)),
                one(&of.principals, &of.not_principals, |of| is(of, &principal)),
                one(&of.service_accounts, &of.not_service_accounts, is_of),
                one(&of.source_ips, &of.not_source_ips, |of| {
                    of.0.contains(&self.source)
                }),
                one(&of.destination_ips, &of.not_destination_ips, |of| {
                    of.0.contains(&self.destination)
                }),
                one(&of.destination_ports, &of.not_destination_ports, |of| {
                    *of == self.port
                }),
            ];
            // A match without properties matches nothing.
            properties.iter().any(Option::is_some) && !properties.contains(&Some(false))
        });
        found || clause.is_empty()
    }
}

/// Returns whether a property has one of the values, and none of the others. `None`: a match that does not limit it.
fn one<T>(values: &[T], others: &[T], is: impl Fn(&T) -> bool) -> Option<bool> {
    if values.is_empty() && others.is_empty() {
        return None;
    }
    Some((values.is_empty() || values.iter().any(&is)) && !others.iter().any(is))
}

/// Returns the authorizations that a ztunnel applies to a workload. It ignores names without an authorization.
fn of_workload<'a>(
    round: &[&'a Case],
    namespace: &str,
    names: &[String],
) -> Vec<&'a Authorization> {
    let all = round.iter().flat_map(|of| &of.authorizations);
    let counts = |of: &&Authorization| match of.scope.as_str() {
        "GLOBAL" => true,
        "NAMESPACE" => of.namespace == namespace,
        _ => names.contains(&format!("{}/{}", of.namespace, of.name)),
    };
    all.filter(counts).collect()
}

/// Compares the decisions about connections to a workload. Returns the first difference.
fn difference(
    round: &[&Case],
    case: &Case,
    (workload, names): (&String, &[String]),
    istio: &Istio,
    grid: &[Facts],
) -> Option<String> {
    let own = labels(workload).into_iter();
    let own: Vec<Label> = own.map(|(key, value)| (key.into(), value.into())).collect();
    let ours = istio.policies_of(&case.namespace, &own);
    let theirs = of_workload(round, &case.namespace, names);
    let differs = |of: &&Facts| of.is_allowed(&ours) != of.is_allowed_by(&theirs);
    let mut found = grid.iter().filter(differs);
    // The families of a connection are the same.
    let mut plain = grid
        .iter()
        .filter(|of| of.peer.is_none() && of.source.is_ipv4() == of.destination.is_ipv4());
    let wrong = plain.find(|of| of.is_allowed_by_kernel(&ours) != of.is_allowed(&ours));
    assert!(
        wrong.is_none(),
        "{} [{workload}]: {wrong:?}",
        case.namespace
    );
    let first = found.next()?;
    let word = |is_allowed| if is_allowed { "allows" } else { "refuses" };
    let objects = round[0].objects.iter().chain(&case.objects);
    let objects: Vec<String> = objects.map(Value::to_string).collect();
    Some(format!(
        "{} [{workload}]: {first:?}: istiod {}, we {}; {} more connections; istiod's names {names:?}\n    {}",
        case.namespace,
        word(first.is_allowed_by(&theirs)),
        word(first.is_allowed(&ours)),
        found.count(),
        objects.join("\n    ")
    ))
}

#[test]
fn decisions_are_those_of_istiod_and_its_ztunnel() {
    let lines = include_str!("istiod.jsonl").lines();
    let cases: Vec<Case> = lines
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let (mut wrong, mut objects, mut connections, mut different) = (Vec::new(), 0, 0, 0);
    let cases: Vec<&Case> = cases.iter().collect();
    for round in cases.chunk_by(|_, next| next.namespace != ROOT) {
        assert_eq!(round[0].namespace, ROOT);
        let mut stored = IstioObjects::new(true);
        for case in round {
            for object in &case.objects {
                let mut object = object.clone();
                object["metadata"]["namespace"] = case.namespace.as_str().into();
                store(object, &mut stored);
                objects += 1;
            }
        }
        let istio = Istio {
            namespaces: stored.namespaces(),
            root: ROOT.into(),
            ..Istio::default()
        };
        for case in round {
            let grid = Facts::grid(&case.namespace);
            for (workload, names) in &case.workloads {
                let found = difference(round, case, (workload, names), &istio, &grid);
                connections += grid.len();
                different += usize::from(found.is_some());
                match (found, case.differs.get(workload)) {
                    (Some(found), None) => wrong.push(found),
                    (None, Some(why)) => {
                        let of = &case.namespace;
                        wrong.push(format!("{of} [{workload}]: no difference any more: {why}"));
                    }
                    _ => {}
                }
            }
        }
    }
    println!(
        "{objects} policies, {connections} connections, {different} workloads with differences"
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(objects >= 80, "{objects}");
}
