//! What rules of capture say, for people.

use std::collections::HashSet;

use crate::model::{Acceleration, CapturedBy, Egress, Mode, Rules, WithoutProxy};

/// A rule by which a workload's connections are captured or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// What it is about: `outbound-range`, `outbound-port`, `inbound-port`, `inbound-others`, `user`,
    /// `group`, `interface`, `captured-by`, `mode`, `egress`, `without-proxy`, `acceleration` or
    /// `dns`.
    pub about: &'static str,
    /// Which range, port, user, group or interface; empty for a setting.
    pub of: String,
    /// `captured` or `excluded`; of a setting, its value.
    pub says: &'static str,
    /// Who says so, such as `mesh.rules` or `Pod default/web`.
    pub by: String,
}

/// What is said of a workload. `layers`: who says what, the most specific first. Of two that say something of the same
/// thing, only the one that counts.
pub fn statements(layers: &[(String, Rules)]) -> Vec<Statement> {
    let mut all = Vec::new();
    let mut known = HashSet::new();
    for (by, rules) in layers {
        for (about, of, says) in said(rules) {
            // A pod's annotations may name every port.
            if !known.insert((about, of.clone())) {
                continue;
            }
            all.push(Statement {
                about,
                of,
                says,
                by: by.clone(),
            });
        }
    }
    all
}

/// What rules say: about what, of which, and what.
fn said(rules: &Rules) -> Vec<(&'static str, String, &'static str)> {
    const EXCLUDED: &str = "excluded";
    let word = |captured: bool| if captured { "captured" } else { EXCLUDED };
    let mut said = Vec::new();
    let ranges = rules.outbound_ranges.iter();
    said.extend(ranges.map(|(range, is)| ("outbound-range", range.to_string(), word(*is))));
    let ports = rules.outbound_ports.iter();
    said.extend(ports.map(|(port, is)| ("outbound-port", port.to_string(), word(*is))));
    let ports = rules.inbound_ports.iter();
    said.extend(ports.map(|(port, is)| ("inbound-port", port.to_string(), word(*is))));
    let users = rules.excluded_uids.iter();
    said.extend(users.map(|uid| ("user", uid.to_string(), EXCLUDED)));
    let groups = rules.excluded_gids.iter();
    said.extend(groups.map(|gid| ("group", gid.to_string(), EXCLUDED)));
    let interfaces = rules.excluded_interfaces.iter();
    said.extend(interfaces.map(|name| ("interface", name.to_string(), EXCLUDED)));
    let settings = [
        ("inbound-others", rules.inbound_others.map(word)),
        ("captured-by", rules.captured_by.map(CapturedBy::word)),
        ("mode", rules.mode.map(Mode::word)),
        ("egress", rules.egress.map(Egress::word)),
        ("without-proxy", rules.without_proxy.map(WithoutProxy::word)),
        ("acceleration", rules.acceleration.map(Acceleration::word)),
        ("dns", rules.dns.map(word)),
    ];
    let given = settings
        .into_iter()
        .filter_map(|(about, says)| Some((about, String::new(), says?)));
    said.extend(given);
    said
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::threads::computed;

    /// States rules about so many ports, which two layers name.
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
    fn every_port_there_is_costs_what_each_costs() {
        let few = state(2_000).max(Duration::from_millis(1));
        let all = state(65_535);
        // 33 times as many: 33 times as long, or 1000 times if each looks at all others.
        assert!(all < few * 200, "{all:?} for all, {few:?} for 2000");
    }
}
