//! Finds a mesh's rules that are missing, left over or in another order, and writes the input of `iptables-restore`
//! that corrects them. Rules of others stay as they are.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use takeover::owners;

use super::{
    super::{
        cleanup::input,
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
        let (mut removed, mut stale) = (Vec::<&str>::new(), Vec::<&str>::new());
        if how == How::Replace {
            let touched = now.elsewhere.iter();
            let touched = touched.filter(|(chain, _)| is_touched(now, wanted, chain));
            removed.extend(touched.flat_map(|(_, rules)| rules));
            stale.extend(now.chains.difference(&wanted.chains));
        }
        self.chains = wanted.chains.len() + stale.len();
        self.rules = removed.len() + additions.len();
        let declared = wanted.chains.iter().chain(&stale).copied();
        let added = wanted.own.values().flatten().copied();
        let added = added.chain(additions.iter().map(String::as_str));
        self.input = input(
            &self.table,
            &declared.collect::<Vec<_>>(),
            &removed,
            &stale,
            &added.collect::<Vec<_>>(),
        );
    }
}
