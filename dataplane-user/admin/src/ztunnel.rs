//! The objects that the agent serves in the form of ztunnel's configuration dump, which `istioctl ztunnel-config` reads.

use std::{collections::HashMap, fmt::Display, net::IpAddr, sync::Arc};

use identity::Listed;
use model::{
    Cluster, Effect, Istio, Label, Service, ServiceType, Snapshot, Waypoint, Workload,
    authorization::{Action, Match, Values, Word},
};
use serde_json::{Map, Value, json};

/// Returns the dump of a snapshot and of certificates, without connections.
pub fn dump(snapshot: &Snapshot, certificates: &[Listed]) -> Value {
    let workloads = || snapshot.workloads.values();
    let named = workloads().flat_map(|of| of.addresses.iter().map(move |addr| (*addr, of)));
    let owners: HashMap<IpAddr, &Arc<Workload>> = named.collect();
    let services = snapshot.services.values();
    let services =
        services.filter(|of| !matches!(of.kind, ServiceType::HostPort | ServiceType::ExternalName));
    let namespaces = snapshot.istio.namespaces.iter();
    let policies = namespaces.flat_map(|(namespace, of)| {
        let policies = of.policies.iter();
        policies.filter_map(move |(object, of)| {
            let labels = of.selector.as_deref();
            policy(
                &snapshot.istio,
                (&**namespace, &**object),
                labels,
                &of.effect,
            )
        })
    });
    json!({
        "workloads": workloads().map(|of| workload(snapshot, of)).collect::<Vec<_>>(),
        "services": services.map(|of| service(snapshot, of, &owners)).collect::<Vec<_>>(),
        "policies": policies.collect::<Vec<_>>(),
        "certificates": certificates.iter().map(certificate).collect::<Vec<_>>(),
    })
}

fn uid(cluster: &Cluster, workload: &Workload) -> String {
    format!("{}//Pod/{}", cluster.name, workload.name)
}

fn workload(snapshot: &Snapshot, of: &Workload) -> Value {
    let Snapshot {
        cluster,
        node,
        istio,
        ..
    } = snapshot;
    let is_here = of.is_here();
    let telemetry = &of.telemetry;
    let mut found = json!({
        "uid": uid(cluster, of),
        "workloadIps": of.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "protocol": if of.speaks_hbone { "HBONE" } else { "TCP" },
        "name": of.name.name(),
        "namespace": of.name.namespace(),
        "serviceAccount": &*of.account,
        "workloadName": &*telemetry.workload,
        "workloadType": "pod",
        "canonicalName": &*telemetry.canonical_service,
        "canonicalRevision": &*telemetry.canonical_revision,
        "clusterId": &*cluster.name,
        "node": &*of.node,
        "network": &*of.network,
        "status": "Healthy",
    });
    if is_here {
        found["locality"] = json!({ "region": &*node.region, "zone": &*node.zone });
        let policies = istio.policies_of(of.name.namespace(), &of.labels);
        let names = policies.authorizations.iter().map(|(name, _)| {
            let object = name.object.split_once(' ').map_or("", |(_, name)| name);
            format!("{}/{object}", name.namespace)
        });
        found["authorizationPolicies"] = names.collect::<Vec<_>>().into();
    }
    if let Some(waypoint) = istio.waypoint_of_workload(of) {
        found["waypoint"] = destination(cluster, waypoint);
    }
    found
}

/// Returns a waypoint, by the name of its Gateway's service.
fn destination(cluster: &Cluster, waypoint: Waypoint<'_>) -> Value {
    let name = waypoint.name;
    let destination = format!("{}/{}", name.namespace(), cluster.host(name));
    json!({ "destination": destination })
}

fn service(snapshot: &Snapshot, of: &Service, owners: &HashMap<IpAddr, &Arc<Workload>>) -> Value {
    let cluster = &snapshot.cluster;
    let hostname = match of.kind {
        // The name of an entry is not its host.
        ServiceType::Entry => of.name.name().to_owned(),
        _ => cluster.host(&of.name),
    };
    let vips = of.cluster_ips.iter().map(|ip| format!("/{ip}"));
    let families = match [true, false].map(|v4| of.cluster_ips.iter().any(|ip| ip.is_ipv4() == v4))
    {
        [true, true] => "Dual",
        [false, true] => "IPv6",
        _ => "IPv4",
    };
    let (mut ports, mut endpoints) = (Map::new(), Map::new());
    for port in &of.ports {
        let number = port.port.to_string();
        let target = port.endpoints.first().map_or(0, |of| of.port);
        ports.insert(number.clone(), target.into());
        for endpoint in &port.endpoints {
            let owner = owners.get(&endpoint.addr);
            let uid = owner.map_or_else(|| endpoint.addr.to_string(), |of| uid(cluster, of));
            let known = endpoints.entry(uid.clone());
            let known = known
                .or_insert_with(|| json!({ "workloadUid": uid, "service": hostname, "port": {} }));
            known["port"][&number] = endpoint.port.into();
        }
    }
    let mut found = json!({
        "name": of.name.name(),
        "namespace": of.name.namespace(),
        "hostname": hostname,
        "vips": vips.collect::<Vec<_>>(),
        "ports": ports,
        "endpoints": endpoints,
        "ipFamilies": families,
    });
    if let Some(waypoint) = snapshot.istio.waypoint_of_service(of) {
        found["waypoint"] = destination(cluster, waypoint);
    }
    found
}

/// Returns an AuthorizationPolicy. `labels`: those of its selector. `None`: another kind of policy, or one without an effect that
/// ztunnel has, too.
fn policy(
    istio: &Istio,
    (namespace, object): (&str, &str),
    labels: Option<&[Label]>,
    effect: &Effect,
) -> Option<Value> {
    let Effect::Authorization(of) = effect else {
        return None;
    };
    let rules = of.rules.iter().map(|rule| {
        let clauses = rule
            .0
            .iter()
            .map(|clause| clause.iter().map(matching).collect());
        clauses.collect::<Vec<Vec<Value>>>()
    });
    Some(json!({
        "name": object.split_once(' ').map_or(object, |(_, name)| name),
        "namespace": namespace,
        "scope": match labels {
            Some([]) if *namespace == *istio.root => "Global",
            Some([]) => "Namespace",
            _ => "WorkloadSelector",
        },
        "action": match of.action {
            Action::Allow => "Allow",
            Action::Deny => "Deny",
        },
        "dryRun": of.dry_run,
        "rules": rules.collect::<Vec<_>>(),
    }))
}

fn matching(of: &Match) -> Value {
    let mut found = Map::new();
    let word = |of: &Word| match of {
        Word::Exact(text) => json!({ "Exact": text }),
        Word::Prefix(text) => json!({ "Prefix": text }),
        Word::Suffix(text) => json!({ "Suffix": text }),
        Word::Present => json!({ "Presence": {} }),
    };
    let text = |of: &dyn Display| Value::from(of.to_string());
    put(&mut found, "namespaces", &of.namespaces, word);
    put(&mut found, "principals", &of.principals, word);
    put(&mut found, "sourceIps", &of.sources, |of| text(of));
    put(&mut found, "destinationIps", &of.destinations, |of| {
        text(of)
    });
    put(&mut found, "destinationPorts", &of.ports, |of| (*of).into());
    put(
        &mut found,
        "serviceAccounts",
        &of.accounts,
        |of| json!({ "namespace": of.namespace, "serviceAccount": of.name }),
    );
    found.into()
}

/// Puts the values of a property, and the values that it may not have, such as `notNamespaces`.
fn put<T>(found: &mut Map<String, Value>, key: &str, of: &Values<T>, shown: impl Fn(&T) -> Value) {
    let (first, rest) = key.split_at(1);
    let not = format!("not{}{rest}", first.to_uppercase());
    for (key, values) in [(key, &of.any), (not.as_str(), &of.none)] {
        if !values.is_empty() {
            let values: Vec<Value> = values.iter().map(&shown).collect();
            found.insert(key.to_owned(), values.into());
        }
    }
}

fn certificate(of: &Listed) -> Value {
    let (state, chain) = if let Some(serial) = &of.serial {
        let leaf = json!({
            "serialNumber": decimal(serial),
            "validFrom": of.from,
            "expirationTime": of.to,
        });
        ("Available".to_owned(), vec![leaf])
    } else {
        let cause = of.failed.as_ref().map_or("", |failed| &failed.cause);
        (format!("Unavailable: {cause}"), Vec::new())
    };
    json!({ "identity": of.identity, "state": state, "certChain": chain })
}

/// Converts hexadecimal digits, of any number, to decimal ones.
fn decimal(hexadecimal: &str) -> String {
    let mut digits = vec![0];
    for digit in hexadecimal.chars().filter_map(|of| of.to_digit(16)) {
        let mut carry = digit;
        for of in &mut digits {
            let value = *of * 16 + carry;
            (*of, carry) = (value % 10, value / 10);
        }
        while carry > 0 {
            digits.push(carry % 10);
            carry /= 10;
        }
    }
    let digits = digits.iter().rev();
    digits.filter_map(|of| char::from_digit(*of, 10)).collect()
}

#[cfg(test)]
mod tests {
    use model::{
        IstioNamespace, IstioPolicy, Place, WorkloadName,
        authorization::{Authorization, Rule},
    };

    use super::*;

    #[test]
    fn serial_numbers_are_decimal() {
        for (given, wanted) in [
            ("0", "0"),
            ("ff", "255"),
            ("00:10", "16"),
            ("ffffffffffffffffffff", "1208925819614629174706175"),
        ] {
            assert_eq!(decimal(given), wanted, "{given}");
        }
    }

    #[test]
    fn a_dump_has_the_fields_of_ztunnels() {
        let of = Match {
            principals: Values {
                any: ["cluster.local/ns/*".into()].into(),
                none: ["*".into()].into(),
            },
            ports: Values {
                none: [80].into(),
                ..Values::default()
            },
            ..Match::default()
        };
        let policy = IstioPolicy {
            selector: Some(Box::default()),
            effect: Effect::Authorization(Arc::new(Authorization {
                action: Action::Deny,
                dry_run: false,
                rules: [Rule([[of].into()].into())].into(),
            })),
        };
        let namespace = IstioNamespace {
            policies: [(Arc::from("AuthorizationPolicy limit"), Arc::new(policy))]
                .into_iter()
                .collect(),
            ..IstioNamespace::default()
        };
        let name = WorkloadName::new("shop", "web-1");
        let workload = Workload {
            addresses: ["10.0.0.1".parse().unwrap()].into_iter().collect(),
            account: "web".into(),
            speaks_hbone: true,
            ..Workload::new(name.clone(), Place::Address)
        };
        let mut snapshot = Snapshot::default();
        snapshot.workloads.insert(name, Arc::new(workload));
        let namespaces = &mut snapshot.istio.namespaces;
        namespaces.insert("shop".into(), Arc::new(namespace));
        let dump = dump(&snapshot, &[]);
        let workload = &dump["workloads"][0];
        for (field, wanted) in [
            ("uid", json!("Kubernetes//Pod/shop/web-1")),
            ("workloadIps", json!(["10.0.0.1"])),
            ("protocol", json!("HBONE")),
            ("serviceAccount", json!("web")),
            ("authorizationPolicies", json!(["shop/limit"])),
        ] {
            assert_eq!(workload[field], wanted, "{field}");
        }
        let wanted = json!([{
            "name": "limit",
            "namespace": "shop",
            "scope": "Namespace",
            "action": "Deny",
            "dryRun": false,
            "rules": [[[{
                "principals": [{ "Prefix": "cluster.local/ns/" }],
                "notPrincipals": [{ "Presence": {} }],
                "notDestinationPorts": [80],
            }]]],
        }]);
        assert_eq!(dump["policies"], wanted);
    }
}
