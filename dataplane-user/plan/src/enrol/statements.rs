//! Lists rules of capture for people.

use std::collections::{HashMap, hash_map::Entry};

use model::{CapturedBy, Egress, Mode, Rules, WithoutProxy};

/// A rule that captures or excludes connections of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// The subject: `outbound-range`, `outbound-port`, `inbound-port`, `inbound`, `inbound-others`,
    /// `user`, `group`, `interface`, `virtual-interface`, `captured-by`, `mode`, `egress`, `without-proxy` or `dns`.
    pub about: &'static str,
    /// The range, port, user, group or interface; empty for a setting.
    pub of: String,
    /// `captured` or `excluded`, or the value of a setting.
    pub says: &'static str,
    /// The origin of the rule, such as `mesh.rules` or `Pod default/web`.
    pub by: String,
}

/// Returns the rules of a workload. `layers`: the rules by origin, the most specific first. Of several rules about one
/// subject, only the effective rule is listed.
pub fn statements(layers: &[(String, Rules)]) -> Vec<Statement> {
    let mut all: Vec<Statement> = Vec::new();
    let mut known = HashMap::new();
    for (by, rules) in layers {
        for (about, of, says) in said(rules) {
            // `known` is a map, because a pod's annotations may name every port.
            let statement = Statement {
                about,
                of,
                says,
                by: by.clone(),
            };
            match known.entry((about, statement.of.clone())) {
                Entry::Vacant(entry) => {
                    entry.insert(all.len());
                    all.push(statement);
                }
                // A user or group is excluded if any layer says so.
                Entry::Occupied(entry) => {
                    let earlier = &mut all[*entry.get()];
                    if matches!(about, "user" | "group") && earlier.says != says && says == EXCLUDED
                    {
                        *earlier = statement;
                    }
                }
            }
        }
    }
    all
}

const EXCLUDED: &str = "excluded";

/// Lists rules as subject, object and value.
fn said(rules: &Rules) -> Vec<(&'static str, String, &'static str)> {
    let word = |captured: bool| if captured { "captured" } else { EXCLUDED };
    let mut said = Vec::new();
    let ranges = rules.outbound_ranges.iter();
    said.extend(ranges.map(|(range, is)| ("outbound-range", range.to_string(), word(*is))));
    let ports = rules.outbound_ports.iter();
    said.extend(ports.map(|(port, is)| ("outbound-port", port.to_string(), word(*is))));
    let ports = rules.inbound_ports.iter();
    said.extend(ports.map(|(port, is)| ("inbound-port", port.to_string(), word(*is))));
    for (users, groups, says) in [
        (&rules.excluded_uids, &rules.excluded_gids, EXCLUDED),
        (&rules.included_uids, &rules.included_gids, word(true)),
    ] {
        said.extend(users.iter().map(|uid| ("user", uid.to_string(), says)));
        said.extend(groups.iter().map(|gid| ("group", gid.to_string(), says)));
    }
    let interfaces = rules.excluded_interfaces.iter();
    said.extend(interfaces.map(|name| ("interface", name.to_string(), EXCLUDED)));
    let interfaces = rules.virtual_interfaces.iter();
    said.extend(interfaces.map(|name| ("virtual-interface", name.to_string(), word(true))));
    let settings = [
        ("inbound", rules.inbound.map(word)),
        ("inbound-others", rules.inbound_others.map(word)),
        ("captured-by", rules.captured_by.map(CapturedBy::word)),
        ("mode", rules.mode.map(Mode::word)),
        ("egress", rules.egress.map(Egress::word)),
        ("without-proxy", rules.without_proxy.map(WithoutProxy::word)),
        ("dns", rules.dns.map(word)),
    ];
    let given = settings
        .into_iter()
        .filter_map(|(about, says)| Some((about, String::new(), says?)));
    said.extend(given);
    said
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use threads::computed;

    use super::*;

    /// Rules that say something about every subject.
    pub fn everything() -> Rules {
        Rules {
            captured: Some(true),
            captured_by: Some(CapturedBy::Packets),
            allow_packets: Some(true),
            mode: Some(Mode::Kernel),
            egress: Some(Egress::Deny),
            without_proxy: Some(WithoutProxy::Pass),
            dns: Some(false),
            inbound: Some(true),
            outbound_ranges: [("10.0.0.0/8".parse().unwrap(), false)].into(),
            outbound_ports: [(80, true)].into(),
            inbound_ports: [(443, false)].into(),
            inbound_others: Some(false),
            included_uids: [1].into(),
            included_gids: [2].into(),
            excluded_uids: [3].into(),
            excluded_gids: [4].into(),
            excluded_interfaces: ["eth1".into()].into(),
            virtual_interfaces: ["virt0".into()].into(),
        }
    }

    #[test]
    fn each_rule_is_listed_once_by_the_most_specific_layer() {
        // The general layer has the same subjects, of which users may be excluded, and a port of its own.
        let general = Rules {
            outbound_ports: [(80, false), (81, true)].into(),
            included_uids: [1].into(),
            excluded_uids: [3].into(),
            mode: Some(Mode::Proxy),
            ..Rules::default()
        };
        let layers = [("Pod shop/web", everything()), ("mesh.rules", general)];
        let all = statements(&layers.map(|(by, rules)| (by.to_owned(), rules)));
        let lines = all
            .iter()
            .map(|of| format!("{} {} {} {}", of.about, of.of, of.says, of.by));
        let pod = "Pod shop/web";
        let wanted = [
            ("outbound-range", "10.0.0.0/8", "excluded", pod),
            ("outbound-port", "80", "captured", pod),
            ("inbound-port", "443", "excluded", pod),
            ("user", "3", "excluded", pod),
            ("group", "4", "excluded", pod),
            ("user", "1", "captured", pod),
            ("group", "2", "captured", pod),
            ("interface", "eth1", "excluded", pod),
            ("virtual-interface", "virt0", "captured", pod),
            ("inbound", "", "captured", pod),
            ("inbound-others", "", "excluded", pod),
            ("captured-by", "", "packets", pod),
            ("mode", "", "kernel", pod),
            ("egress", "", "deny", pod),
            ("without-proxy", "", "pass", pod),
            ("dns", "", "excluded", pod),
            ("outbound-port", "81", "captured", "mesh.rules"),
        ];
        let wanted = wanted.map(|(about, of, says, by)| format!("{about} {of} {says} {by}"));
        assert_eq!(lines.collect::<Vec<_>>(), wanted);
    }

    /// Lists rules about `count` ports, which two layers name, and returns the time it took.
    fn state(count: u16) -> Duration {
        let rules = Rules {
            outbound_ports: (1..=count).map(|port| (port, false)).collect(),
            ..Rules::default()
        };
        let layers = ["Pod shop/web", "Namespace shop"].map(|by| (by.to_owned(), rules.clone()));
        let start = computed();
        let all = statements(&layers);
        let duration = computed().saturating_sub(start);
        assert_eq!(all.len(), usize::from(count));
        assert!(all.iter().all(|statement| statement.by == "Pod shop/web"));
        duration
    }

    #[test]
    fn a_group_is_excluded_by_any_layer() {
        let included = Rules {
            included_gids: [7].into(),
            ..Rules::default()
        };
        let excluded = Rules {
            excluded_gids: [7].into(),
            ..Rules::default()
        };
        let (of_pod, of_all) = ("Pod shop/web".to_owned(), "mesh.rules".to_owned());
        for layers in [
            [
                (of_pod.clone(), included.clone()),
                (of_all.clone(), excluded.clone()),
            ],
            [(of_all, excluded), (of_pod, included)],
        ] {
            let all = statements(&layers);
            assert!(
                all.len() == 1 && all[0].says == EXCLUDED && all[0].by == "mesh.rules",
                "{all:?}"
            );
        }
    }

    #[test]
    fn every_port_there_is_costs_what_each_costs() {
        let few = state(2_000).max(Duration::from_millis(1));
        let all = state(65_535);
        // 33 times as many rules take 33 times as long, or 1000 times if each is compared with all others.
        assert!(all < few * 200, "{all:?} for all, {few:?} for 2000");
    }
}
