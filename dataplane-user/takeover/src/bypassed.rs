//! Finds rules at netfilter's hooks for forwarded packets that do more than accept packets. Packets that the fast path
//! forwards bypass these hooks, so the rules do not apply to them.

use std::collections::{BTreeMap, BTreeSet};

use kernel::netfilter::{Base, Chain, OUTPUT, Verdict};

use super::owners::{self, KUBE_PROXY, KUBELET, OURS, Owner};

/// Maximum number of chains that a message names for each owner.
const NAMED: usize = 3;

/// The rules of one owner behind one base chain that do something.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    /// The table and the base chain, which is registered at a hook.
    base: String,
    /// The owner, if the names of the table and chains identify it.
    owner: Option<&'static Owner>,
    /// Whether the base chain's policy is drop.
    drops: bool,
    /// The chains that contain these rules, sorted.
    chains: Vec<String>,
}

impl Found {
    /// Names the base chain and the owner.
    fn name(&self) -> String {
        let owner = self.owner.map_or("owner unknown", |owner| owner.name);
        format!("{} ({owner})", self.base)
    }

    /// Describes refusing rules and their consequence in one sentence.
    fn text(&self) -> String {
        let mut what = Vec::new();
        if self.drops {
            what.push("drops what no rule accepts".to_owned());
        }
        if !self.chains.is_empty() {
            let named = self.chains.iter().take(NAMED).map(String::as_str);
            let named = named.collect::<Vec<_>>().join(", ");
            let more = match self.chains.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            what.push(format!("has rules that refuse packets ({named}{more})"));
        }
        format!(
            "{} {}: flows to services that the packet path sends on do not pass it",
            self.name(),
            what.join(" and ")
        )
    }
}

/// Describes all rules that refuse packets, in one sentence. Returns `None` if there are none.
pub fn named(chains: &[Chain]) -> Option<String> {
    let found = refusing(chains);
    let texts: Vec<String> = found.iter().map(Found::text).collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// Names the base chains, with their owners, behind which packets meet anything but rules that accept them.
pub fn busy(chains: &[Chain]) -> Vec<String> {
    let found = find(chains, is_bypassed, |does| {
        matches!(does, Verdict::Refuse | Verdict::Act)
    });
    found.iter().map(Found::name).collect()
}

/// Whether packets of no service have to pass the chains all the same: rules only count them, or are kube-proxy's that drop what
/// conntrack does not know, or refuse packets that the node sends, which may be ICMP errors about packets that conntrack does not know.
pub fn bar_bypass(chains: &[Chain]) -> bool {
    let counting = find(chains, is_bypassed, |does| matches!(does, Verdict::Count));
    let is_output = |base: &Base| base.hook == OUTPUT;
    let at_output = find(chains, is_output, |does| matches!(does, Verdict::Refuse));
    // kubelet's rules are about packets to loopback only.
    let at_output = at_output.iter().any(|found| found.owner != Some(KUBELET));
    let refuses = |chain: &Chain| {
        let does = || chain.rules.iter().flat_map(|rule| &rule.does);
        owners::of_chain(&chain.name) == Some(KUBE_PROXY)
            && does().any(|does| *does == Verdict::Refuse)
    };
    !counting.is_empty() || at_output || chains.iter().any(refuses)
}

/// Whether the packet path bypasses the chain.
fn is_bypassed(base: &Base) -> bool {
    base.hook != OUTPUT
}

/// Returns the text of [`named`] followed by [`REMEDY`].
pub fn warning(chains: &[Chain]) -> Option<String> {
    named(chains).map(|named| format!("{named}; {REMEDY}"))
}

/// Advice for operators who rely on such rules.
pub const REMEDY: &str = "with packets.path auto or stack (--packet-path) such flows pass these hooks; connections of the \
     node's pods pass these hooks either way, with the endpoint's address in place of the VIP: a rule that refuses packets \
     to an endpoint before kube-proxy would translate them (Docker's in raw PREROUTING) refuses these connections";

/// Finds the owners whose rules refuse packets.
fn refusing(chains: &[Chain]) -> Vec<Found> {
    find(chains, is_bypassed, |does| matches!(does, Verdict::Refuse))
}

/// Finds the owners whose rules behind such base chains have such a verdict, or whose base chain drops packets, once for each base
/// chain. Skips kube-proxy and the dataplane itself.
fn find(chains: &[Chain], at: fn(&Base) -> bool, counts: fn(&Verdict) -> bool) -> Vec<Found> {
    let mut tables: BTreeMap<&str, BTreeMap<&str, &Chain>> = BTreeMap::new();
    for chain in chains {
        tables
            .entry(&chain.table)
            .or_default()
            .insert(&chain.name, chain);
    }
    let mut found = Vec::new();
    for (table, chains) in &tables {
        for base in chains
            .values()
            .filter(|chain| chain.base.is_some_and(|base| at(&base)))
        {
            let mut owners: BTreeMap<Option<&Owner>, Found> = BTreeMap::new();
            let mut entry = |owner: Option<&'static Owner>, add: &dyn Fn(&mut Found)| {
                let new = || Found {
                    base: format!("{table} {}", base.name),
                    owner,
                    drops: false,
                    chains: Vec::new(),
                };
                add(owners.entry(owner).or_insert_with(new));
            };
            let reached = reached(base, chains);
            for chain in &reached {
                if chain.rules.iter().flat_map(|rule| &rule.does).any(counts) {
                    let owner = owner(table, &chain.name);
                    entry(owner, &|found| found.chains.push(chain.name.clone()));
                }
            }
            if base.base.is_some_and(|base| base.drops) {
                // iptables does not record which program set the policy. The code attributes it to an owner with chains
                // behind this base chain, other than kube-proxy.
                let mut owners = reached.iter().filter_map(|chain| owner(table, &chain.name));
                let set_by = owners.find(|owner| *owner != KUBE_PROXY);
                entry(set_by, &|found| found.drops = true);
            }
            found.extend(
                owners
                    .into_values()
                    .filter(|found| ![Some(KUBE_PROXY), Some(OURS)].contains(&found.owner)),
            );
        }
    }
    found
}

/// Returns the chains that packets can reach from a base chain, in the order of their names, including the base chain.
fn reached<'a>(base: &'a Chain, chains: &BTreeMap<&str, &'a Chain>) -> Vec<&'a Chain> {
    let mut names = BTreeSet::from([&*base.name]);
    let mut open = vec![base];
    while let Some(chain) = open.pop() {
        for does in chain.rules.iter().flat_map(|rule| &rule.does) {
            let next: Vec<&&Chain> = match does {
                Verdict::Refuse | Verdict::Act | Verdict::Count => Vec::new(),
                Verdict::Jump(to) => chains.get(&**to).into_iter().collect(),
            };
            for chain in next {
                if names.insert(&chain.name) {
                    open.push(chain);
                }
            }
        }
    }
    names
        .iter()
        .filter_map(|name| chains.get(*name).copied())
        .collect()
}

fn owner(table: &str, chain: &str) -> Option<&'static Owner> {
    let of_table = table
        .strip_prefix("nft ")
        .and_then(|table| table.split_once(' '))
        .and_then(|(_, name)| owners::of_table(name));
    of_table.or_else(|| owners::of_chain(chain))
}

#[cfg(test)]
mod tests {
    use kernel::netfilter::Rule;

    use super::*;

    fn chain(table: &str, name: &str, drops: Option<bool>, does: &[Verdict]) -> Chain {
        Chain {
            table: table.to_owned(),
            name: name.to_owned(),
            base: drops.map(|drops| Base {
                hook: "forward",
                drops,
            }),
            rules: does
                .iter()
                .map(|does| Rule {
                    does: vec![does.clone()],
                })
                .collect(),
        }
    }

    fn jump(to: &str) -> Verdict {
        Verdict::Jump(to.to_owned())
    }

    fn of(chains: &[Chain]) -> Vec<(Option<&'static str>, bool, String)> {
        let all = refusing(chains).into_iter();
        all.map(|found| {
            (
                found.owner.map(|owner| owner.name),
                found.drops,
                found.chains.join(" "),
            )
        })
        .collect()
    }

    const FILTER: &str = "iptables-legacy filter";

    #[test]
    fn owners_are_told_apart() {
        let chains = [
            chain(
                FILTER,
                "FORWARD",
                Some(true),
                &[
                    jump("KUBE-FORWARD"),
                    jump("cali-FORWARD"),
                    jump("DOCKER-USER"),
                ],
            ),
            chain(FILTER, "KUBE-FORWARD", None, &[Verdict::Refuse]),
            chain(
                FILTER,
                "cali-FORWARD",
                None,
                &[jump("cali-tw-1"), jump("cali-FORWARD")],
            ),
            chain(FILTER, "cali-tw-1", None, &[Verdict::Refuse]),
            chain(FILTER, "DOCKER-USER", None, &[]),
            chain(FILTER, "f2b-ssh", None, &[Verdict::Refuse]),
        ];
        let found = of(&chains);
        // No rule jumps to fail2ban's chain, and kube-proxy's chains are skipped.
        assert_eq!(
            found,
            [
                (Some("Calico"), false, "cali-tw-1".to_owned()),
                (Some("Docker"), true, String::new()),
            ]
        );
    }

    #[test]
    fn what_only_accepts_is_nothing() {
        let accepts = chain(
            FILTER,
            "FORWARD",
            Some(false),
            &[jump("FLANNEL-FWD"), jump("gone")],
        );
        assert_eq!(of(&[accepts, chain(FILTER, "FLANNEL-FWD", None, &[])]), []);
        let output = chain(FILTER, "OUTPUT", None, &[Verdict::Refuse]);
        assert_eq!(of(&[output]), []);
    }

    #[test]
    fn rules_that_act_are_busy() {
        const MANGLE: &str = "nft ip mangle";
        let chains = [
            chain(MANGLE, "FORWARD", Some(false), &[jump("LIBVIRT_FWD")]),
            chain(MANGLE, "LIBVIRT_FWD", None, &[Verdict::Act]),
            chain(
                FILTER,
                "FORWARD",
                Some(false),
                &[jump("KUBE-FORWARD"), jump("FLANNEL-FWD")],
            ),
            chain(
                FILTER,
                "KUBE-FORWARD",
                None,
                &[Verdict::Refuse, Verdict::Act],
            ),
            chain(FILTER, "FLANNEL-FWD", None, &[]),
        ];
        assert_eq!(busy(&chains), ["nft ip mangle FORWARD (libvirt)"]);
        assert_eq!(of(&chains), [], "nothing refuses");
        let dropping = [chain(
            FILTER,
            "FORWARD",
            Some(true),
            &[jump("KUBE-FORWARD")],
        )];
        assert_eq!(
            busy(&dropping),
            ["iptables-legacy filter FORWARD (owner unknown)"]
        );
    }

    #[test]
    fn rules_for_the_nodes_own_packets_bar_the_bypass_alone() {
        let output = |drops, does: &[Verdict]| {
            let mut chain = chain(FILTER, "OUTPUT", Some(drops), does);
            chain.base = chain.base.map(|base| Base {
                hook: OUTPUT,
                ..base
            });
            chain
        };
        let refuses = |name| chain(FILTER, name, None, &[Verdict::Refuse]);
        for (bars, chains) in [
            (false, vec![output(false, &[])]),
            (false, vec![output(false, &[Verdict::Act])]),
            (true, vec![output(true, &[])]),
            (true, vec![output(false, &[Verdict::Refuse])]),
            (true, vec![output(false, &[jump("mine")]), refuses("mine")]),
            (
                false,
                vec![
                    output(false, &[jump("KUBE-FIREWALL")]),
                    refuses("KUBE-FIREWALL"),
                ],
            ),
        ] {
            assert_eq!(bar_bypass(&chains), bars, "{chains:?}");
            assert_eq!((busy(&chains), of(&chains)), (vec![], vec![]));
        }
    }

    #[test]
    fn what_it_means_is_one_sentence() {
        let table = "nft inet mine";
        let chains = [
            chain(table, "fwd", Some(false), &[jump("deny")]),
            chain(table, "deny", None, &[Verdict::Refuse]),
            chain("nft inet other", "deny2", None, &[Verdict::Refuse]),
            chain(
                "nft ip kube-proxy",
                "filter-forward",
                Some(false),
                &[jump("reject-chain")],
            ),
            chain(
                "nft ip kube-proxy",
                "reject-chain",
                None,
                &[Verdict::Refuse],
            ),
        ];
        assert_eq!(of(&chains), [(None, false, "deny".to_owned())]);
        let text = refusing(&chains)[0].text();
        assert!(
            text.starts_with(
                "nft inet mine fwd (owner unknown) has rules that refuse packets (deny):"
            ),
            "{text}"
        );
    }

    #[test]
    fn a_tables_owner_comes_before_a_chains() {
        assert_eq!(
            owner("nft inet firewalld", "KUBE-X").map(|owner| owner.name),
            Some("firewalld")
        );
        assert_eq!(owner(FILTER, "KUBE-X"), Some(KUBE_PROXY));
        assert_eq!(owner(FILTER, "FORWARD"), None);
    }
}
