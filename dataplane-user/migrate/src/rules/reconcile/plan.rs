//! Finds a mesh's rules that are missing, left over or in another order, and writes the input of `iptables-restore`
//! that corrects them. Rules of others stay as they are.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use takeover::owners;

use super::{
    super::{
        restore::{behind, insert, inserted},
        ruleset::{Rule, Table},
    },
    commute::commute,
    expected::MeshChains,
};

/// Maximum number of rules in a chain whose order is compared. If a chain has more rules in another order, the chain
/// counts as different.
const COMPARED: usize = 2000;

/// The differences of a table, and the change that removes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The table's name.
    pub table: String,
    /// The differences, one line each.
    pub differences: Vec<String>,
    /// Input for `iptables-restore --noflush`; empty if no change is needed.
    pub input: String,
    /// Number of chains that are written or removed.
    pub chains: usize,
    /// Number of rules that are removed from or added to chains of others.
    pub rules: usize,
    /// Whether the table has a rule or chain of the mesh.
    pub has_some: bool,
}

/// The way in which a change treats existing rules of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Removes the mesh's rules and adds the expected ones, in one transaction.
    Replace,
    /// Adds missing rules. Removes only rules in chains that the expected rules declare.
    OnTop,
}

/// The chains and rules of a mesh in a table.
#[derive(Default)]
struct Ours<'t, 'a> {
    chains: BTreeSet<&'a str>,
    /// The rules of the mesh's chains, in their order.
    own: BTreeMap<&'a str, Vec<&'t str>>,
    /// The mesh's rules in chains of others, in their order.
    elsewhere: BTreeMap<&'a str, Vec<&'t str>>,
    /// For each chain of others, the number of rules before the first rule of the mesh.
    behind: BTreeMap<&'a str, usize>,
}

/// Compares all tables of one program: the tables that exist `now` with the `wanted` ones. `known` are rules of the
/// mesh, even if they are not wanted for this program. `in_front` returns how many rules of a chain belong before the
/// rules of others.
pub fn changes(
    now: &[Table<'_>],
    wanted: &[Table<'_>],
    known: &[Table<'_>],
    whose: &MeshChains,
    how: How,
    in_front: &dyn Fn(&str, &str) -> usize,
) -> Vec<Change> {
    let names = wanted.iter().chain(now).map(|table| table.name.as_str());
    let mut done = BTreeSet::new();
    let names = names.filter(|name| done.insert(*name));
    let of = |tables, name| find(tables, name);
    let mut all = Vec::new();
    for name in names {
        let known = of(known, name);
        let wanted = ours(of(wanted, name), of(wanted, name), whose);
        let now = ours(of(now, name), known, whose);
        let differences = differences(&now, &wanted);
        let mut change = Change {
            table: name.to_owned(),
            has_some: !now.chains.is_empty() || !now.elsewhere.is_empty(),
            ..Change::default()
        };
        let nothing_to_add =
            how == How::OnTop && wanted.chains.is_empty() && wanted.elsewhere.is_empty();
        if !differences.is_empty() && !nothing_to_add {
            let first = |chain: &str| in_front(name, chain);
            let all = additions(&now, &wanted, how, &first);
            change.write(&now, &wanted, how, &all);
        }
        change.differences = differences;
        all.push(change);
    }
    all
}

/// Returns the change that restores the mesh's rules of a table as they were `before`. Rules of others stay as they are
/// now.
pub fn back(
    before: Option<&Table<'_>>,
    now: Option<&Table<'_>>,
    known: Option<&Table<'_>>,
    whose: &MeshChains,
) -> Option<Change> {
    let name = &before.or(now)?.name;
    let (there, was) = (ours(now, known, whose), ours(before, known, whose));
    let differences = differences(&there, &was);
    if differences.is_empty() {
        return None;
    }
    let of = |table: Option<&Table<'_>>, chain: &str| -> Vec<String> {
        let rules = table.into_iter().flat_map(|table| &table.rules);
        let rules = rules.filter(|rule| rule.chain == chain);
        rules.map(|rule| rule.text.to_string()).collect()
    };
    let mut additions = Vec::new();
    for (chain, returning) in &was.elsewhere {
        if !is_touched(&there, &was, chain) {
            continue;
        }
        let mut others = of(now, chain);
        for rule in there.elsewhere.get(chain).into_iter().flatten() {
            let at = others.iter().position(|other| other == rule);
            at.map(|at| others.remove(at));
        }
        additions.extend(inserted(chain, &of(before, chain), returning, others));
    }
    let mut change = Change {
        table: name.clone(),
        has_some: true,
        ..Change::default()
    };
    change.write(&there, &was, How::Replace, &additions);
    change.differences = differences;
    Some(change)
}

fn find<'t, 'a>(tables: &'t [Table<'a>], name: &str) -> Option<&'t Table<'a>> {
    tables.iter().find(|table| table.name == name)
}

/// Finds the chains and rules of a mesh in a table. In chains of others, a rule belongs to the mesh if it jumps to one
/// of the mesh's chains or is a known rule. In table `mangle`, if the mesh has chains there, a rule that matches or
/// sets one of the mesh's marks also belongs to the mesh.
fn ours<'t, 'a>(
    table: Option<&'t Table<'a>>,
    known: Option<&Table<'_>>,
    whose: &MeshChains,
) -> Ours<'t, 'a> {
    let mut ours = Ours::default();
    let Some(table) = table else { return ours };
    let chains = table.chains.iter();
    let owned = chains.filter(|(name, chain)| chain.hook.is_none() && whose.owns(name));
    ours.chains = owned.map(|(name, _)| *name).collect();
    let has_mark = |rule: &Rule<'_>| {
        let mut owners = rule.marks.iter().filter_map(|mark| owners::of_mark(*mark));
        table.name == "mangle"
            && rule.jumps.is_empty()
            && !rule.text.contains("! --mark")
            && owners.any(|owner| whose.owners.contains(&owner))
    };
    let known = known.into_iter().flat_map(|table| &table.rules);
    let known: BTreeSet<&str> = known.map(|rule| &*rule.text).collect();
    let mut others: BTreeMap<&str, usize> = BTreeMap::new();
    for rule in &table.rules {
        if ours.chains.contains(rule.chain) {
            ours.own.entry(rule.chain).or_default().push(&rule.text);
        } else if rule.jumps.iter().any(|to| whose.owns(to))
            || known.contains(&*rule.text)
            || (!ours.chains.is_empty() && has_mark(rule))
        {
            let before = others.get(rule.chain).copied().unwrap_or_default();
            ours.behind.entry(rule.chain).or_insert(before);
            ours.elsewhere
                .entry(rule.chain)
                .or_default()
                .push(&rule.text);
        } else {
            *others.entry(rule.chain).or_default() += 1;
        }
    }
    ours
}

fn differences(now: &Ours<'_, '_>, wanted: &Ours<'_, '_>) -> Vec<String> {
    let mut all = Vec::new();
    let none = Vec::new();
    for chain in &wanted.chains {
        if now.chains.contains(chain) {
            let [now, wanted] = [now, wanted].map(|ours| ours.own.get(chain).unwrap_or(&none));
            all.extend(compare(chain, now, wanted));
        } else {
            all.push(format!("missing: chain {chain}"));
        }
    }
    let left = now.chains.difference(&wanted.chains);
    all.extend(left.map(|chain| format!("left over: chain {chain}")));
    let mut chains: BTreeSet<&str> = now.elsewhere.keys().copied().collect();
    chains.extend(wanted.elsewhere.keys().copied());
    for chain in chains {
        let [now, wanted] = [now, wanted].map(|ours| ours.elsewhere.get(chain).unwrap_or(&none));
        all.extend(compare(chain, now, wanted));
    }
    all
}

/// Compares the mesh's rules of one chain. Another order of two rules is no difference if they may change places.
fn compare(chain: &str, now: &[&str], wanted: &[&str]) -> Vec<String> {
    if now == wanted {
        return Vec::new();
    }
    // The place of each rule among the wanted ones. Equal rules take their places in order.
    let mut free: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (place, rule) in wanted.iter().enumerate().rev() {
        free.entry(rule).or_default().push(place);
    }
    let (mut places, mut all) = (Vec::new(), Vec::new());
    for rule in now {
        match free.get_mut(rule).and_then(Vec::pop) {
            Some(place) => places.push(place),
            None => all.push(format!("left over: {rule}")),
        }
    }
    let mut missing: Vec<usize> = free.into_values().flatten().collect();
    missing.sort_unstable();
    all.extend(
        missing
            .into_iter()
            .map(|place| format!("missing: {}", wanted[place])),
    );
    if !all.is_empty() {
        return all;
    }
    if places.len() > COMPARED {
        return vec![format!("another order: chain {chain}")];
    }
    let rest = |place: usize| behind(chain, wanted[place]);
    for (at, place) in places.iter().enumerate() {
        for later in &places[at + 1..] {
            if later < place && !commute(rest(*later), rest(*place)) {
                all.push(format!(
                    "another order: {} is before {}",
                    wanted[*place], wanted[*later]
                ));
                return all;
            }
        }
    }
    all
}

/// Returns true if the mesh's rules in a chain of others must be replaced. Correct rules keep their places between the
/// rules of others.
fn is_touched(now: &Ours<'_, '_>, wanted: &Ours<'_, '_>, chain: &str) -> bool {
    let [now, wanted] = [now, wanted].map(|ours| ours.elsewhere.get(chain));
    let none = Vec::new();
    !compare(chain, now.unwrap_or(&none), wanted.unwrap_or(&none)).is_empty()
}

/// Returns the commands that add rules to chains of others. The first rules go to the front of a chain. The others go
/// to the place of the mesh's former rules, or to the end.
fn additions(
    now: &Ours<'_, '_>,
    wanted: &Ours<'_, '_>,
    how: How,
    in_front: &dyn Fn(&str) -> usize,
) -> Vec<String> {
    let mut all = Vec::new();
    for (chain, rules) in &wanted.elsewhere {
        if !is_touched(now, wanted, chain) {
            continue;
        }
        let there = now.elsewhere.get(chain).filter(|_| how == How::OnTop);
        let is_missing = |rule: &&&str| there.is_none_or(|there| !there.contains(rule));
        let (first, last) = rules.split_at(in_front(chain).min(rules.len()));
        let first = first.iter().filter(is_missing);
        let first: Vec<String> = (1..)
            .zip(first)
            .map(|(place, rule)| insert(chain, place, rule))
            .collect();
        let behind = now.behind.get(chain).filter(|_| how == How::Replace);
        let behind = behind.map(|others| first.len() + others + 1);
        all.extend(first);
        let last = last.iter().filter(is_missing).enumerate();
        all.extend(last.map(|(index, rule)| match behind {
            Some(place) => insert(chain, place + index, rule),
            None => (*rule).to_owned(),
        }));
    }
    all
}

impl Change {
    fn write(&mut self, now: &Ours<'_, '_>, wanted: &Ours<'_, '_>, how: How, additions: &[String]) {
        let (mut removed, mut stale) = (Vec::<&str>::new(), Vec::new());
        if how == How::Replace {
            let touched = now.elsewhere.iter();
            let touched = touched.filter(|(chain, _)| is_touched(now, wanted, chain));
            removed.extend(touched.flat_map(|(_, rules)| rules));
            stale.extend(now.chains.difference(&wanted.chains));
        }
        self.chains = wanted.chains.len() + stale.len();
        self.rules = removed.len() + additions.len();
        let mut write = |line: std::fmt::Arguments<'_>| {
            // Writing to a String cannot fail.
            let _ = writeln!(self.input, "{line}");
        };
        write(format_args!("*{}", self.table));
        // With --noflush, a chain's declaration empties the chain or creates it.
        for chain in wanted.chains.iter().chain(stale.iter().copied()) {
            write(format_args!(":{chain} - [0:0]"));
        }
        for rule in &removed {
            let text = rule.strip_prefix("-A").unwrap_or(rule);
            write(format_args!("-D{text}"));
        }
        for chain in &stale {
            write(format_args!("-X {chain}"));
        }
        for rule in wanted.own.values().flatten() {
            write(format_args!("{rule}"));
        }
        for rule in additions {
            write(format_args!("{rule}"));
        }
        write(format_args!("COMMIT"));
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            super::{
                cleanup::tables,
                ruleset::{Form, Text},
                simulated::load,
            },
            expected::Expected,
        },
        *,
    };

    /// Some rules of Open Service Mesh, as `iptables-save` prints them.
    const WANTED: &str = "*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:PROXY_INBOUND - [0:0]\n:PROXY_OUTPUT - [0:0]\n\
        -A PREROUTING -p tcp -j PROXY_INBOUND\n-A OUTPUT -i eth9 -j RETURN\n-A OUTPUT -p tcp -j PROXY_OUTPUT\n\
        -A PROXY_INBOUND -p tcp -m tcp --dport 15010 -j RETURN\n-A PROXY_INBOUND -p tcp -m tcp --dport 15901 -j RETURN\n\
        -A PROXY_INBOUND -p tcp -j REDIRECT --to-ports 15003\n\
        -A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN\n-A PROXY_OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n";

    fn text(rules: &str) -> Text<'_> {
        Text {
            origin: "iptables-nft",
            form: Form::Saved,
            text: rules,
        }
    }

    fn of(now: &str, how: How, front: usize) -> Vec<Change> {
        let (now, wanted) = (text(now), text(WANTED));
        let (now, wanted) = (tables(&now).unwrap(), tables(&wanted).unwrap());
        let whose = Expected::osm().whose;
        changes(&now, &wanted, &wanted, &whose, how, &|_, _| front)
    }

    /// Returns the differences from the wanted rules, and the rules after the replacement.
    fn replaced(now: &str) -> (Vec<String>, String) {
        let changes = of(now, How::Replace, 0);
        let differences = changes.iter().flat_map(|change| change.differences.clone());
        let input: String = changes.iter().map(|change| change.input.as_str()).collect();
        (differences.collect(), load(now, &input))
    }

    #[test]
    fn the_same_is_left_alone() {
        let swapped = WANTED
            .replace("15010", "0")
            .replace("15901", "15010")
            .replace("dport 0 ", "dport 15901 ");
        let between = WANTED
            .replace("-A OUTPUT -i", "-A OUTPUT -p udp -j ACCEPT\n-A OUTPUT -i")
            .replace("-A OUTPUT -p tcp", "-A OUTPUT -j mine\n-A OUTPUT -p tcp")
            .replace(":PROXY_INBOUND", ":mine - [0:0]\n:PROXY_INBOUND");
        let other = format!("*filter\n:mine - [0:0]\n-A INPUT -j mine\nCOMMIT\n{WANTED}");
        for now in [WANTED.to_owned(), swapped, between, other] {
            for change in of(&now, How::Replace, 0) {
                assert!(
                    change.differences.is_empty() && change.input.is_empty(),
                    "{now}: {change:?}"
                );
                assert_eq!(change.has_some, change.table == "nat");
            }
        }
    }

    #[test]
    fn every_difference_is_found_and_goes() {
        let jump = "-A OUTPUT -p tcp -j PROXY_OUTPUT\n";
        let owner = "-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN\n";
        for (now, wanted) in [
            (String::new(), "missing: chain PROXY_INBOUND"),
            (WANTED.replace(jump, ""), "missing: -A OUTPUT -p tcp -j PROXY_OUTPUT"),
            (WANTED.replace(jump, &jump.repeat(2)), "left over: -A OUTPUT -p tcp -j PROXY_OUTPUT"),
            (WANTED.replace(owner, ""), "missing: -A PROXY_OUTPUT -m owner"),
            (WANTED.replace("1500 ", "1501 "), "left over: -A PROXY_OUTPUT -m owner --uid-owner 1501"),
            (
                WANTED.replace(owner, "").replace("COMMIT", &format!("{owner}COMMIT")),
                "another order: -A PROXY_OUTPUT -p tcp -j REDIRECT --to-ports 15001 is before -A PROXY_OUTPUT -m owner",
            ),
            (
                WANTED.replace("-A OUTPUT -i eth9 -j RETURN\n", "").replace("COMMIT", "-A OUTPUT -i eth9 -j RETURN\nCOMMIT"),
                "another order: -A OUTPUT -p tcp -j PROXY_OUTPUT is before -A OUTPUT -i eth9",
            ),
            (WANTED.replace("COMMIT", ":PROXY_OLD - [0:0]\nCOMMIT"), "left over: chain PROXY_OLD"),
            (
                WANTED.replace("COMMIT", ":mine - [0:0]\n-A mine -p udp -g PROXY_OLD\n:PROXY_OLD - [0:0]\n-A mine -j ACCEPT\nCOMMIT"),
                "left over: -A mine -p udp -g PROXY_OLD",
            ),
            (
                WANTED.replace("*nat", "*mangle\n:PROXY_OUTPUT - [0:0]\n-A OUTPUT -j PROXY_OUTPUT\n-A OUTPUT -j ACCEPT\nCOMMIT\n*nat"),
                "left over: chain PROXY_OUTPUT",
            ),
            ("*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p sctp -j DROP\nCOMMIT\n".to_owned(), "missing: chain PROXY_OUTPUT"),
        ] {
            let (differences, after) = replaced(&now);
            assert!(differences.iter().any(|line| line.starts_with(wanted)), "{now}: {differences:#?}");
            let (again, _) = replaced(&after);
            assert!(again.is_empty(), "{now}\n{after}: {again:?}");
            // The rules of others stay.
            let foreign = |text: &str| -> Vec<String> {
                let others = ["mine -j ACCEPT", "sctp", "OUTPUT -j ACCEPT", ":mine"];
                let lines = text.lines().filter(|line| others.iter().any(|other| line.contains(other)));
                lines.map(str::to_owned).collect()
            };
            assert_eq!(foreign(&after), foreign(&now), "{now}");
        }
    }

    #[test]
    fn rules_keep_their_places_between_those_of_others() {
        let foreign = "-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT\n";
        let jump = "-A OUTPUT -p tcp -j PROXY_OUTPUT\n";
        let fine = WANTED.replace(jump, &format!("{jump}{foreign}"));
        // A difference in another chain, and one in this chain.
        for drifted in [
            fine.replace("15010", "15011"),
            fine.replace("-A OUTPUT -i eth9 -j RETURN\n", ""),
        ] {
            let (differences, after) = replaced(&drifted);
            assert!(!differences.is_empty());
            let output: Vec<&str> = after
                .lines()
                .filter(|line| line.starts_with("-A OUTPUT"))
                .collect();
            assert_eq!(
                output,
                [
                    "-A OUTPUT -i eth9 -j RETURN",
                    "-A OUTPUT -p tcp -j PROXY_OUTPUT",
                    "-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT",
                ]
            );
        }
    }

    #[test]
    fn a_difference_elsewhere_moves_no_rule() {
        let foreign = "-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT\n";
        let jump = "-A OUTPUT -p tcp -j PROXY_OUTPUT\n";
        let fine = WANTED.replace(jump, &format!("{foreign}{jump}"));
        let (differences, after) = replaced(&fine.replace("15010", "15011"));
        assert!(!differences.is_empty());
        assert_eq!(after, load("", &fine));
    }

    #[test]
    fn a_table_without_chains_of_the_mesh_is_written_on_top() {
        let wanted = "*raw\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p udp -m udp --dport 53 -j CT --zone 1\nCOMMIT\n";
        let wanted = text(wanted);
        let wanted = tables(&wanted).unwrap();
        let whose = Expected::osm().whose;
        let changes = changes(&[], &wanted, &wanted, &whose, How::OnTop, &|_, _| 0);
        assert!(changes[0].input.contains("--dport 53"), "{changes:?}");
    }

    #[test]
    fn rules_of_others_with_the_meshs_mark_are_theirs() {
        let foreign = "-A OUTPUT -p sctp -m mark ! --mark 0x539 -j ACCEPT\n";
        let now = WANTED.replace("COMMIT", &format!("{foreign}COMMIT"));
        let (differences, _) = replaced(&now);
        assert_eq!(differences, Vec::<String>::new());
    }

    #[test]
    fn nothing_is_removed_on_top() {
        let drifted = WANTED
            .replace("1500 ", "1499 ")
            .replace("-A OUTPUT -i eth9 -j RETURN\n", "")
            .replace("COMMIT", ":PROXY_OLD - [0:0]\nCOMMIT");
        let changes = of(&drifted, How::OnTop, 0);
        let input = &changes[0].input;
        assert!(
            !input.contains("-D ") && !input.contains("-X ") && !input.contains("PROXY_OLD"),
            "{input}"
        );
        let after = load(&drifted, input);
        assert_eq!(after.matches("-A OUTPUT -p tcp -j PROXY_OUTPUT").count(), 1);
        assert!(
            after.contains("1500")
                && !after.contains("1499")
                && after.contains("eth9")
                && after.contains("PROXY_OLD"),
            "{after}"
        );
    }

    #[test]
    fn rules_for_the_front_come_before_those_of_others() {
        let now = "*nat\n:OUTPUT ACCEPT [0:0]\n:PREROUTING ACCEPT [0:0]\n-A OUTPUT -p sctp -j DROP\nCOMMIT\n";
        let changes = of(now, How::Replace, 1);
        let after = load(now, &changes[0].input);
        let output: Vec<&str> = after
            .lines()
            .filter(|line| line.starts_with("-A OUTPUT"))
            .collect();
        assert_eq!(
            output,
            [
                "-A OUTPUT -i eth9 -j RETURN",
                "-A OUTPUT -p sctp -j DROP",
                "-A OUTPUT -p tcp -j PROXY_OUTPUT",
            ]
        );
    }

    #[test]
    fn what_was_there_comes_back_to_its_place() {
        let before = WANTED
            .replace("1500 ", "1501 ")
            .replace(
                "-A OUTPUT -p tcp",
                "-A OUTPUT -p sctp -j DROP\n-A OUTPUT -p tcp",
            )
            .replace(
                "COMMIT",
                "-A OUTPUT -p udp -j ACCEPT\n:PROXY_OLD - [0:0]\n-A PROXY_OLD -j RETURN\nCOMMIT",
            );
        let before = load("", &before);
        let (_, after) = replaced(&before);
        assert_ne!(after, before);
        let texts = [text(&before), text(&after), text(WANTED)];
        let [was, now, wanted] = texts.each_ref().map(|text| tables(text).unwrap());
        let whose = Expected::osm().whose;
        let back_to = |now| back(find(&was, "nat"), now, find(&wanted, "nat"), &whose);
        let change = back_to(find(&now, "nat")).unwrap();
        assert_eq!(load(&after, &change.input), before);
        assert_eq!(back_to(find(&was, "nat")), None);
    }
}
