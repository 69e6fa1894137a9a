//! Who is captured, and what is said of them.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    admin::{self, api},
    config,
    model::{Layers, Place, Policy, Rules, Snapshot, Workload, WorkloadName},
};

/// A workload, and how it is captured.
#[derive(Debug)]
pub struct Member {
    pub workload: Arc<Workload>,
    pub policy: Policy,
    /// What that comes from.
    pub rules: Vec<api::MeshRule>,
}

/// Everybody on this node who is to be captured, with all rules that there are for them.
pub fn members(config: &config::Mesh, snapshot: &Snapshot) -> Vec<Member> {
    let mut workloads: BTreeMap<&WorkloadName, Arc<Workload>> = snapshot
        .workloads
        .iter()
        .map(|(name, workload)| (name, Arc::clone(workload)))
        .collect();
    let named: Vec<(WorkloadName, &config::MeshWorkload)> = config
        .workloads
        .iter()
        .filter_map(|given| {
            let (namespace, name) = given.name.split_once('/')?;
            Some((WorkloadName::new(namespace, name), given))
        })
        .collect();
    for (name, given) in &named {
        workloads
            .entry(name)
            .or_insert_with(|| Arc::new(described(name, given)));
    }
    let all = config.rules.rules();
    let proxy = Rules {
        excluded_uids: config.proxy.uid.into_iter().collect(),
        ..Rules::default()
    };
    workloads
        .into_iter()
        .filter(|(_, workload)| workload.place != Place::Elsewhere)
        .filter_map(|(name, workload)| {
            // Who says what, the most specific first.
            let mut layers = Vec::new();
            if let Some((_, given)) = named.iter().find(|(known, _)| known == name) {
                let mut rules = given.rules.rules();
                // To be named is to be captured.
                rules.captured = rules.captured.or(Some(true));
                layers.push((format!("mesh.workloads ({name})"), rules));
            }
            let Layers { own, namespace } = &*workload.rules;
            layers.push((format!("Pod {name}"), own.clone()));
            layers.push((format!("Namespace {}", name.namespace()), namespace.clone()));
            let mut namespaces = config.namespaces.iter();
            if let Some(given) = namespaces.find(|n| n.name == name.namespace()) {
                let by = format!("mesh.namespaces ({})", given.name);
                layers.push((by, given.rules.rules()));
            }
            layers.push(("mesh.rules".to_owned(), all.clone()));
            layers.push(("mesh.proxy.uid".to_owned(), proxy.clone()));
            let general = layers.iter().rev();
            let rules = general.fold(Rules::default(), |general, (_, rules)| rules.over(&general));
            Some(Member {
                policy: rules.policy()?,
                rules: admin::mesh_rules(&layers),
                workload,
            })
        })
        .collect()
}

/// The node itself, whose own processes have the network namespace in common.
pub fn of_node(snapshot: &Snapshot) -> Member {
    let name = &*snapshot.node.name;
    Member {
        workload: Arc::new(Workload {
            addresses: snapshot.node.addresses.iter().copied().collect(),
            ..Workload::new(WorkloadName::new("", name), Place::Address)
        }),
        policy: Policy::default(),
        rules: Vec::new(),
    }
}

/// A workload that only the configuration knows.
fn described(name: &WorkloadName, given: &config::MeshWorkload) -> Workload {
    let place = match &given.cgroup {
        Some(path) => Place::Cgroup(path.clone()),
        None => Place::Address,
    };
    Workload {
        addresses: given.addresses.iter().copied().collect(),
        ..Workload::new(name.clone(), place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_layer_is_named() {
        let config: config::Mesh = "\
rules: {excludeOutboundPorts: [22, 23], egress: deny}
proxy: {uid: 1500}
namespaces:
- {name: shop, rules: {excludeOutboundIPRanges: [10.0.0.0/8], egress: allow}}
workloads:
- {name: shop/web, addresses: [192.0.2.1], rules: {includeOutboundPorts: [23]}}
"
        .parse()
        .unwrap();
        let members = members(&config, &Snapshot::default());
        let said = |about: &str, of: &str| {
            let mut rules = members[0].rules.iter();
            let rule = rules.find(|rule| rule.about == about && rule.of == of);
            rule.map(|rule| format!("{} by {}", rule.says, rule.by))
        };
        let is = |about, of, text: &str| assert_eq!(said(about, of).as_deref(), Some(text));
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
        assert_eq!(said("mode", ""), None);
        // And that is what holds.
        let policy = &members[0].policy;
        assert!(policy.outbound_ports[&23]);
        assert!(policy.excluded_uids.contains(&1500));
    }
}
