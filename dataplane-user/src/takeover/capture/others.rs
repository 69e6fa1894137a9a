//! Rules of others that may translate connections before a mesh's rules see them, so that the mesh does not capture them. Which
//! they are is not read: each is an error.

use super::{family::Wrong, native};
use crate::iptables::{self, Entry, nft};

/// Fails if iptables' table `nat` has a rule that may keep connections from Istio's own tables in nf_tables.
pub fn in_iptables(text: &str) -> Result<(), Wrong> {
    let mut table = "";
    for entry in iptables::entries(text) {
        match entry {
            Ok(Entry::Table(name)) => table = name,
            Ok(Entry::Rule(rule))
                if table == "nat" && matches!(rule.chain, "PREROUTING" | "OUTPUT") =>
            {
                return Err(may_keep(rule.line, rule.to_string()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Fails if a table of nf_tables that is not Istio's has a rule that may keep connections from the mesh's rules: one of a chain of type
/// `nat`, at the hooks that the mesh uses, too.
pub fn in_nftables(text: &str) -> Result<(), Wrong> {
    let (mut is_others, mut translating) = (false, None);
    for entry in nft::entries(text) {
        match entry {
            Ok(nft::Entry::Table { name, .. }) => {
                (is_others, translating) = (!native::is_istios(name), None);
            }
            Ok(nft::Entry::Base { chain, text, .. }) => {
                let hooks = ["type nat hook prerouting ", "type nat hook output "];
                let is_before = hooks.iter().any(|hook| text.starts_with(hook));
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

fn may_keep(line: usize, rule: String) -> Wrong {
    let what = "the rule may keep connections from the mesh's rules";
    (line, what.to_owned(), rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_may_translate_first_is_named() {
        let text = "table inet other {\n\tchain out {\n\t\ttype nat hook output priority -110; policy accept;\n\
                    \t\tip daddr 192.0.2.1 counter dnat ip to 192.0.2.2\n\t}\n}\n";
        let (line, _, rule) = in_nftables(text).unwrap_err();
        assert_eq!(
            (line, &*rule),
            (4, "ip daddr 192.0.2.1 counter dnat ip to 192.0.2.2")
        );
        for (from, to) in [
            ("hook output", "hook postrouting"),
            ("type nat", "type filter"),
            ("table inet other", "table inet istio-proxy-nat"),
        ] {
            in_nftables(&text.replace(from, to)).unwrap();
        }
        in_nftables("table inet keeps {\n\tchain out {\n\t\ttype nat hook output priority 9; policy accept;\n\t}\n}\n").unwrap();
        let text = "*nat\n-A POSTROUTING -j X\n-A OUTPUT -d 192.0.2.1 -j ACCEPT\nCOMMIT\n";
        assert_eq!(in_iptables(text).unwrap_err().0, 3);
        in_iptables(&text.replace("*nat", "*filter")).unwrap();
    }
}
