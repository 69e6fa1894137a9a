//! Restores the rules of an owner. Pure functions compute the missing rules and the input for `iptables-restore`. The
//! rules of others stay as they are now, even if they changed after the take-over.

use std::{collections::BTreeMap, io};

use takeover::owners::Owner;

use super::{
    cleanup::{Going, going, input, tables},
    ruleset::{Table, Text},
};

/// The changes that restore the owners' rules in the tables of one text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restoration {
    /// Input for `iptables-restore --noflush`; empty if nothing is missing.
    pub input: String,
    /// Number of rules restored in chains of others.
    pub jumps: usize,
    /// Number of chains that are created again or filled again.
    pub chains: usize,
    /// Rules that cannot be restored, each with the reason.
    pub lost: Vec<String>,
}

/// Plans the changes that restore the rules that `owners` had in `saved` to the rules of `now`. Both texts are from
/// `iptables-save` of one program.
///
/// A rule in a chain of others is inserted right after the nearest earlier rule of `saved` that the chain still has.
///
/// # Errors
/// If a line is not understood.
pub fn plan(saved: &Text<'_>, now: &Text<'_>, owners: &[&Owner]) -> io::Result<Restoration> {
    let (saved, now) = (tables(saved)?, tables(now)?);
    let mut restoration = Restoration::default();
    for table in &saved {
        let went = going(table, &saved, owners);
        let now = now.iter().find(|now| now.name == table.name);
        of_table(&went, now, &mut restoration);
    }
    Ok(restoration)
}

fn of_table(went: &Going<'_, '_>, now: Option<&Table<'_>>, restoration: &mut Restoration) {
    let table = went.table;
    let before = by_chain(table);
    let there = now.map(by_chain).unwrap_or_default();
    let is_there = |chain: &str| now.is_some_and(|now| now.chains.contains_key(chain));
    let of = |all: &BTreeMap<&str, Vec<String>>, chain: &str| all.get(chain).cloned();
    let chains: Vec<&str> = (went.chains.iter().copied())
        .filter(|chain| !is_there(chain) || of(&before, chain) != of(&there, chain))
        .collect();
    let mut inserts = Vec::new();
    let mut open: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for rule in &went.rules {
        open.entry(rule.chain).or_default().push(&rule.text);
    }
    for (chain, returning) in open {
        let is_built_in = (table.chains.get(chain)).is_some_and(|chain| chain.hook.is_some());
        if is_built_in || is_there(chain) {
            let before = before.get(chain).map_or(&[][..], Vec::as_slice);
            let there = of(&there, chain).unwrap_or_default();
            inserts.extend(inserted(chain, before, &returning, there));
        } else {
            let lost = returning.iter().map(|rule| {
                let title = table.title();
                format!("{title}: chain {chain} of others is gone: {rule}")
            });
            restoration.lost.extend(lost);
        }
    }
    if chains.is_empty() && inserts.is_empty() {
        return;
    }
    restoration.jumps += inserts.len();
    restoration.chains += chains.len();
    let filled = chains.iter().filter_map(|chain| before.get(chain));
    let added = filled.flatten().chain(&inserts).map(String::as_str);
    let added: Vec<&str> = added.collect();
    restoration.input += &input(&table.name, &chains, &[], &[], &added);
}

/// Returns the rules of each chain.
fn by_chain<'a>(table: &Table<'a>) -> BTreeMap<&'a str, Vec<String>> {
    let mut all: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for rule in &table.rules {
        all.entry(rule.chain)
            .or_default()
            .push(rule.text.to_string());
    }
    all
}

/// Returns the commands that insert the missing rules into a chain of others. `before` has all rules of the saved
/// chain, `there` the chain's present rules. A rule that is present stays in its place.
pub(super) fn inserted(
    chain: &str,
    before: &[String],
    returning: &[&str],
    mut there: Vec<String>,
) -> Vec<String> {
    // Returns a rule's present place. Of equal rules, it takes the one with the same number among its equals.
    let find = |there: &[String], index: usize| {
        let same = |rule: &&String| **rule == before[index];
        let nth = before[..index].iter().filter(same).count();
        let mut all = there.iter().enumerate().filter(|(_, rule)| same(rule));
        all.nth(nth).map(|(at, _)| at)
    };
    let mut words = Vec::new();
    // The owner's rules stay in their order, even if others moved theirs: each is inserted behind the previous one.
    let mut least = 0;
    for (index, rule) in before.iter().enumerate() {
        if !returning.contains(&rule.as_str()) {
            continue;
        }
        if let Some(at) = find(&there, index) {
            least = least.max(at + 1);
            continue;
        }
        let behind = (0..index).rev().find_map(|index| find(&there, index));
        let at = behind.map_or(0, |at| at + 1).max(least);
        least = at + 1;
        words.push(insert(chain, at + 1, rule));
        there.insert(at, rule.clone());
    }
    words
}

/// Returns the command that inserts a rule at a place in its chain, counted from 1.
pub(super) fn insert(chain: &str, place: usize, rule: &str) -> String {
    format!("-I {chain} {place}{}", behind(chain, rule))
}

/// Returns the rule's options: the text after `-A` and the chain.
pub(super) fn behind<'r>(chain: &str, rule: &'r str) -> &'r str {
    let rest = rule.strip_prefix("-A ").unwrap_or(rule);
    rest.strip_prefix(chain).unwrap_or(rest)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::*;
    use takeover::owners::{ISTIO_AMBIENT, ISTIO_SIDECAR, KUBE_PROXY, OSM};

    use super::{
        super::{
            cleanup,
            ruleset::Form,
            simulated::{data, load},
        },
        *,
    };

    fn text(rules: &str) -> Text<'_> {
        Text {
            origin: "iptables-nft",
            form: Form::Saved,
            text: rules,
        }
    }

    /// Removes the owners' rules and restores them. Returns the resulting rules and the plan of the restoration.
    fn there_and_back(before: &str, owners: &[&Owner]) -> (String, Restoration) {
        let removal = cleanup::plan(&text(before), owners).unwrap();
        let without = load(before, &removal.input);
        let back = plan(&text(before), &text(&without), owners).unwrap();
        assert_eq!(back.jumps, removal.jumps);
        (load(&without, &back.input), back)
    }

    #[test]
    fn rules_come_back_as_they_were() {
        for (name, owners) in [
            ("kube-proxy-1.36/iptables-save.txt", &[KUBE_PROXY][..]),
            ("rules/ipvs.save", &[KUBE_PROXY]),
            ("rules/sidecar.save", &[ISTIO_SIDECAR, ISTIO_AMBIENT]),
            ("rules/sidecar-tproxy.save", &[ISTIO_SIDECAR]),
            ("rules/ambient-host.save", &[ISTIO_AMBIENT]),
            ("rules/meshes.save", &[OSM]),
            ("rules/node.save", &[KUBE_PROXY]),
        ] {
            let before = load("", &data(name));
            let (after, _) = there_and_back(&before, owners);
            assert_eq!(after, before, "{name}");
            let again = plan(&text(&before), &text(&after), owners).unwrap();
            assert_eq!(again, Restoration::default(), "{name}");
        }
    }

    #[test]
    fn a_chain_of_others_that_is_gone_is_told() {
        let before = "*nat\n:KUBE-SERVICES - [0:0]\n:MINE - [0:0]\n-A MINE -j KUBE-SERVICES\n\
                      -A KUBE-SERVICES -j RETURN\nCOMMIT\n";
        let back = plan(&text(before), &text("*nat\nCOMMIT\n"), &[KUBE_PROXY]).unwrap();
        assert_eq!(back.lost.len(), 1, "{back:?}");
        assert!(back.lost[0].contains("chain MINE of others is gone: -A MINE"));
        assert!(!back.input.contains("MINE"), "{back:?}");
    }

    proptest! {
        /// After others reordered, added or removed their rules, a restoration returns all rules of the owner in their
        /// order, and leaves the rules of others as they were just before.
        #[test]
        fn rules_come_back_between_those_of_others(
            rules in prop::collection::vec((0..2_usize, 0..4_u8), 1..12),
            removed in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
            added in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8), 0..4),
        ) {
            const CHAINS: [&str; 2] = ["PREROUTING", "OUTPUT"];
            let foreign = |rule: &String| !rule.contains("KUBE-");
            let mut before = String::from("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n");
            before += "-A KUBE-A -j KUBE-B\n-A KUBE-B -j RETURN\n";
            for (chain, kind) in rules {
                let rest = match kind {
                    0 => "-j KUBE-A".to_owned(),
                    1 => "-m comment --comment two -j KUBE-B".to_owned(),
                    other => format!("-p tcp -m tcp --dport {other} -j ACCEPT"),
                };
                writeln!(before, "-A {} {rest}", CHAINS[chain]).unwrap();
            }
            before += "COMMIT\n";
            let before = load("", &before);
            prop_assert_eq!(&there_and_back(&before, &[KUBE_PROXY]).0, &before);

            let removal = cleanup::plan(&text(&before), &[KUBE_PROXY]).unwrap();
            let mut now: Vec<String> = load(&before, &removal.input).lines().map(str::to_owned).collect();
            for index in removed {
                let of_others: Vec<usize> = (0..now.len()).filter(|at| now[*at].starts_with("-A")).collect();
                if !of_others.is_empty() {
                    now.remove(of_others[index.index(of_others.len())]);
                }
            }
            for (index, port) in added {
                let first = now.iter().position(|line| line.starts_with("-A")).unwrap_or(now.len() - 1);
                let at = first + index.index(now.len() - first);
                now.insert(at, format!("-A OUTPUT -p udp -m udp --dport {port} -j ACCEPT"));
            }
            let now = now.join("\n") + "\n";
            let back = plan(&text(&before), &text(&now), &[KUBE_PROXY]).unwrap();
            let after = load(&now, &back.input);
            for chain in CHAINS {
                let of = |all: &str, ours: bool| -> Vec<String> {
                    let lines = all.lines().map(str::to_owned);
                    lines.filter(|line| line.starts_with(&format!("-A {chain}")) && foreign(line) != ours).collect()
                };
                prop_assert_eq!(of(&after, true), of(&before, true));
                prop_assert_eq!(of(&after, false), of(&now, false));
            }
        }
    }
}
