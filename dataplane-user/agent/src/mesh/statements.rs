//! The configuration's rules of capture, in the plan's form.

use model::{Place, RESERVED, Rules, Workload, WorkloadName};
use plan::enrol::MeshStatements;

/// The port of the metrics of Istio's sidecar, which rules of a configuration can name.
const METRICS: u16 = 15090;

/// Returns the rules in the configuration.
pub fn said(config: &settings::Mesh) -> MeshStatements {
    let workloads = config.workloads.iter().filter_map(|given| {
        let (namespace, name) = given.name.split_once('/')?;
        let name = WorkloadName::new(namespace, name);
        let by = format!("mesh.workloads ({name})");
        Some((by, given.rules.rules(), described(name, given)))
    });
    // Of two entries with one name, the first counts.
    let namespaces = config.namespaces.iter().rev().map(|given| {
        let by = format!("mesh.namespaces ({})", given.name);
        (given.name.clone(), (by, given.rules.rules()))
    });
    let enforced = config.namespaces.iter().rev().map(|given| {
        let by = format!("mesh.namespaces ({}).enforced", given.name);
        (given.name.clone(), (by, given.enforced.rules()))
    });
    // Connections to a sidecar's own ports are meant for the sidecar: health, metrics.
    let own_ports = RESERVED.into_iter().chain([METRICS]);
    let proxy = Rules {
        excluded_uids: config.proxy.uid.into_iter().collect(),
        inbound_ports: (own_ports.filter(|_| config.proxy.uid.is_some()))
            .map(|port| (port, false))
            .collect(),
        ..Rules::default()
    };
    MeshStatements {
        workloads: workloads.collect(),
        namespaces: namespaces.collect(),
        enforced_in: enforced.collect(),
        excluded_namespaces: config.excluded_namespaces().into_iter().collect(),
        enforced: ("mesh.enforced".to_owned(), config.enforced.rules()),
        all: vec![
            ("mesh.rules".to_owned(), config.rules.rules()),
            ("mesh.proxy.uid".to_owned(), proxy),
        ],
        sidecars: config.proxy.uid.is_some(),
        ..MeshStatements::default()
    }
}

/// A workload that only the configuration knows.
fn described(name: WorkloadName, given: &settings::MeshWorkload) -> Workload {
    let place = match &given.cgroup {
        Some(path) => Place::Cgroup(path.clone()),
        None => Place::Address,
    };
    Workload {
        addresses: given.addresses.iter().copied().collect(),
        ..Workload::new(name, place)
    }
}

#[cfg(test)]
mod tests {
    use model::Snapshot;
    use plan::enrol::members;

    use super::*;

    #[test]
    fn the_most_specific_layer_is_named() {
        let text = "\
rules: {excludeOutboundPorts: [22, 23], egress: deny}
proxy: {uid: 1500}
namespaces:
- {name: shop, rules: {excludeOutboundIPRanges: [10.0.0.0/8], egress: allow}}
workloads:
- {name: shop/web, addresses: [192.0.2.1], rules: {includeOutboundPorts: [23]}}
";
        let config: settings::Mesh = serde_saphyr::from_str(text).unwrap();
        let members = members(&said(&config), &Snapshot::default());
        let told = |about: &str, of: &str| {
            let mut rules = members[0].rules.iter();
            let rule = rules.find(|rule| rule.about == about && rule.of == of);
            rule.map(|rule| format!("{} by {}", rule.says, rule.by))
        };
        let is = |about, of, text: &str| assert_eq!(told(about, of).as_deref(), Some(text));
        is("outbound-port", "22", "excluded by mesh.rules");
        is(
            "outbound-port",
            "23",
            "captured by mesh.workloads (shop/web)",
        );
        is(
            "outbound-range",
            "10.0.0.0/8",
            "excluded by mesh.namespaces (shop)",
        );
        is("egress", "", "allow by mesh.namespaces (shop)");
        is("user", "1500", "excluded by mesh.proxy.uid");
        is("inbound-port", "15021", "excluded by mesh.proxy.uid");
        assert_eq!(told("mode", ""), None);
        // And this rule is in force.
        let policy = &members[0].policy;
        assert!(policy.outbound_ports[&23]);
        assert!(policy.excluded_uids.contains(&1500));
    }
}
