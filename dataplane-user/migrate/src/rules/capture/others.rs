//! Finds rules of others that may translate connections before the mesh's rules see them. The mesh would not capture
//! such connections. The rules are not interpreted: each is an error.

use super::{Row, family::Wrong, native};
use crate::text::nft;

/// The priority of a mesh's chains that translate, both in iptables and in nf_tables (`NF_IP_PRI_NAT_DST`).
const PRIORITY: i32 = -100;

/// Returns the first rule of a table `nat` that may keep connections from the mesh's rules. The table is one of
/// iptables without rules of the mesh; these are in the other variant of iptables or in nf_tables.
pub fn in_iptables(rows: &[Row<'_>]) -> Option<Wrong> {
    let mut rows = rows.iter();
    let row = rows.find(|row| matches!(&*row.chain, "PREROUTING" | "OUTPUT"))?;
    Some(may_keep(row.line, row.text.clone()))
}

/// Returns true if the mesh captures connections of the family of iptables' rules. `captured` says so for IPv4 and for
/// IPv6. The name of a program gives the family; the name of a file does not, and then any captured family counts.
pub fn is_captured(origin: &str, captured: [bool; 2]) -> bool {
    if origin.starts_with("ip6tables") {
        captured[1]
    } else if origin.starts_with("iptables") {
        captured[0]
    } else {
        captured != [false; 2]
    }
}

/// Fails if a table of nf_tables that is not Istio's has a rule that may keep connections from the mesh's rules. Such a
/// rule is in a chain of type `nat`, at a hook that the mesh uses, with a priority not after the mesh's. `captured`:
/// whether the mesh captures IPv4, and IPv6.
pub fn in_nftables(text: &str, captured: [bool; 2]) -> Result<(), Wrong> {
    let (mut is_others, mut translating) = (false, None);
    for entry in nft::entries(text) {
        match entry {
            Ok(nft::Entry::Table { family, name }) => {
                let is_captured = match family {
                    "ip" => captured[0],
                    "ip6" => captured[1],
                    _ => captured != [false; 2],
                };
                (is_others, translating) = (is_captured && !native::is_istios(name), None);
            }
            Ok(nft::Entry::Base { line, chain, text }) => {
                let hooks = ["type nat hook prerouting ", "type nat hook output "];
                let is_before = hooks.iter().any(|hook| text.starts_with(hook))
                    && priority(text).is_none_or(|priority| priority <= PRIORITY);
                if is_others && is_before && text.contains("policy drop") {
                    return Err(may_keep(line, text.to_owned()));
                }
                translating = is_before.then_some(chain);
            }
            Ok(nft::Entry::Rule { line, chain, text })
                if is_others && translating == Some(chain) =>
            {
                return Err(may_keep(line, text.to_owned()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the priority of a chain: a number, or one of nft's names (`std_prio_lookup`, `src/rule.c`) plus or minus a
/// number.
fn priority(base: &str) -> Option<i32> {
    let (_, rest) = base.split_once(" priority ")?;
    let mut words = rest.split(';').next()?.split_whitespace();
    let name = match words.next()? {
        "raw" => -300,
        "mangle" => -150,
        "dstnat" => -100,
        "filter" => 0,
        "security" => 50,
        "srcnat" => 100,
        number => number.parse().ok()?,
    };
    let Some(sign) = words.next() else {
        return Some(name);
    };
    let more: i32 = words.next()?.parse().ok()?;
    match sign {
        "+" => Some(name + more),
        "-" => Some(name - more),
        _ => None,
    }
}

fn may_keep(line: usize, rule: String) -> Wrong {
    let what = "the rule may keep connections from the mesh's rules";
    (line, what.to_owned(), rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_may_translate_first_is_named() {
        let both = [true; 2];
        let text = "table inet other {\n\tchain out {\n\t\ttype nat hook output priority -110; policy accept;\n\
                    \t\tip daddr 192.0.2.1 counter dnat ip to 192.0.2.2\n\t}\n}\n";
        let (line, _, rule) = in_nftables(text, both).unwrap_err();
        assert_eq!(
            (line, &*rule),
            (4, "ip daddr 192.0.2.1 counter dnat ip to 192.0.2.2")
        );
        for (from, to) in [
            ("hook output", "hook postrouting"),
            ("type nat", "type filter"),
            ("table inet other", "table inet istio-proxy-nat"),
            ("priority -110", "priority -99"),
            ("priority -110", "priority dstnat + 1"),
        ] {
            in_nftables(&text.replace(from, to), both).unwrap();
        }
        for to in ["dstnat", "-100", "dstnat - 1", "mangle + 9", "unknown"] {
            let text = text.replace("priority -110", &format!("priority {to}"));
            in_nftables(&text, both).unwrap_err();
        }
        let empty = "table inet keeps {\n\tchain out {\n\t\ttype nat hook output priority -110; policy accept;\n\t}\n}\n";
        in_nftables(empty, both).unwrap();
        in_nftables(&empty.replace("policy accept", "policy drop"), both).unwrap_err();
        for (family, index) in [("ip", 0), ("ip6", 1)] {
            let text = text.replace("table inet", &format!("table {family}"));
            let only = |v4: bool| in_nftables(&text, [v4, !v4]);
            assert_eq!(only(true).is_err(), index == 0);
            assert_eq!(only(false).is_err(), index == 1);
        }
        assert!(!is_captured("ip6tables-nft", [true, false]));
        assert!(!is_captured("iptables-legacy", [false, true]));
        assert!(is_captured("iptables-legacy", [true, false]));
        assert!(is_captured("saved.txt", [true, false]));
    }
}
