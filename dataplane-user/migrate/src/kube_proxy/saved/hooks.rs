//! Reads the rules that jump to kube-proxy's chains, and the rules that do not depend on services.

use super::{
    super::{draft::Draft, rows::Line},
    rule::{Rule, has},
    tables::Table,
};
use crate::text::BUILT_IN;

/// kube-proxy's chains to which built-in chains jump.
const ENTRIES: &[&str] = &[
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-POSTROUTING",
];

/// Returns true if a built-in chain jumps to kube-proxy's services.
pub fn leads_to_services(nat: &Table<'_>) -> bool {
    let mut hooks = ["PREROUTING", "OUTPUT"].into_iter();
    hooks.any(|hook| {
        let mut rules = nat.rules(hook).map(|line| Rule::read(line.text));
        rules.any(|rule| rule.is_ok_and(|rule| rule.target == "KUBE-SERVICES"))
    })
}

/// Lists rules that jump to kube-proxy's chains in another form than kube-proxy writes.
pub fn read(table: &Table<'_>, draft: &mut Draft) {
    for hook in BUILT_IN {
        for Line { at, text } in table.rules(hook) {
            match Rule::read(text) {
                Ok(rule) if !ENTRIES.contains(&rule.target) => {}
                Ok(rule) if rule.is(has::COMMENT | has::JUMP) => {}
                Ok(rule)
                    if rule.is(has::COMMENT | has::STATE | has::JUMP) && rule.state == "NEW" => {}
                Ok(_) => {
                    draft
                        .leftovers
                        .add(at, text, "only some packets come to kube-proxy's chain");
                }
                // A rule of another program that jumps to a chain with a similar name.
                Err(_) if !ENTRIES.iter().any(|chain| text.ends_with(chain)) => {}
                Err(why) => draft.leftovers.add(at, text, why),
            }
        }
    }
    for Line { at, text } in table.rules("KUBE-FORWARD") {
        match Rule::read(text) {
            Ok(rule) if forwards(&rule) => {}
            Ok(_) => draft
                .leftovers
                .add(at, text, "kube-proxy writes no such rule"),
            Err(why) => draft.leftovers.add(at, text, why),
        }
    }
}

/// Returns true if kube-proxy writes such a rule in chain `KUBE-FORWARD`.
fn forwards(rule: &Rule<'_>) -> bool {
    match (rule.target, rule.state) {
        ("DROP", "INVALID") => {
            rule.is(has::STATE | has::JUMP) || rule.is(has::STATE | has::COUNTED | has::JUMP)
        }
        ("ACCEPT", "RELATED,ESTABLISHED") => rule.is(has::STATE | has::COMMENT | has::JUMP),
        ("ACCEPT", _) => {
            rule.is(has::MARK | has::COMMENT | has::JUMP) && rule.mark.0 == rule.mark.1
        }
        _ => false,
    }
}
