//! The rules that a mesh's wrapper writes: the defaults of Istio and of Open Service Mesh, and rules from a file.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use takeover::owners::{self, ISTIO_AMBIENT, ISTIO_SIDECAR, KUMA, LINKERD, OSM, Owner};

use super::super::binaries::Family;
use crate::text::{BUILT_IN, Entry, Rule, tree::Key};

/// The rules that `istio-iptables` writes for a sidecar with default settings. They redirect outbound connections to
/// 15001 and inbound ones to 15006, except for the sidecar's own ports and its user. `LOOP` and `SELF` stand for
/// addresses of a family.
const ISTIO: &str = "*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_REDIRECT - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A ISTIO_INBOUND -p tcp --dport 15090 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -o lo -s SELF -j RETURN
-A ISTIO_OUTPUT -o lo ! -d LOOP -p tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -o lo ! -d LOOP -p tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d LOOP -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
COMMIT
";

/// The rules that the init container of Open Service Mesh 0.9 writes, for IPv4 only.
const OPEN_SERVICE_MESH: &str = "*nat
:PROXY_INBOUND - [0:0]
:PROXY_IN_REDIRECT - [0:0]
:PROXY_OUTPUT - [0:0]
:PROXY_REDIRECT - [0:0]
-A PROXY_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15003
-A PREROUTING -p tcp -j PROXY_INBOUND
-A PROXY_INBOUND -p tcp --dport 15010 -j RETURN
-A PROXY_INBOUND -p tcp --dport 15901 -j RETURN
-A PROXY_INBOUND -p tcp --dport 15902 -j RETURN
-A PROXY_INBOUND -p tcp --dport 15903 -j RETURN
-A PROXY_INBOUND -p tcp -j PROXY_IN_REDIRECT
-A PROXY_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A PROXY_REDIRECT -p tcp --dport 15000 -j ACCEPT
-A OUTPUT -p tcp -j PROXY_OUTPUT
-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -d 127.0.0.1/32 -j RETURN
-A PROXY_OUTPUT -j PROXY_REDIRECT
COMMIT
";

/// The owners whose rules may be expected. The owners in one group belong to one mesh.
const MESHES: [&[&Owner]; 4] = [&[ISTIO_SIDECAR, ISTIO_AMBIENT], &[OSM], &[LINKERD], &[KUMA]];

/// The chains that belong to the mesh, by name and by owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeshChains {
    /// The chains that the expected rules declare.
    pub chains: BTreeSet<String>,
    /// The owners of these chains.
    pub owners: Vec<&'static Owner>,
}

impl MeshChains {
    /// Returns true if the mesh owns a chain. The chain must not be built in.
    pub fn owns(&self, chain: &str) -> bool {
        let owner = || owners::of_chain(chain);
        self.chains.contains(chain) || owner().is_some_and(|owner| self.owners.contains(&owner))
    }
}

/// The expected rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The tables.
    pub tables: Vec<ExpectedTable>,
    /// The chains of the mesh.
    pub whose: MeshChains,
}

/// A table of expected rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedTable {
    /// The family.
    pub family: Family,
    /// The name.
    pub name: String,
    /// The original text, from `*NAME` to `COMMIT`.
    pub text: String,
    /// The number of the table's first line, from 1.
    pub line: usize,
    /// For each built-in chain, the number of rules inserted at its front (`-I`).
    pub in_front: BTreeMap<String, usize>,
}

impl ExpectedTable {
    /// Returns the sets of addresses that the rules match or change.
    pub fn sets(&self) -> BTreeSet<String> {
        let rules = crate::text::entries(&self.text).filter_map(|entry| match entry {
            Ok(Entry::Rule(rule)) => Some(rule),
            _ => None,
        });
        let of_sets = ["--match-set", "--add-set", "--del-set", "--map-set"];
        let parts = rules.flat_map(|rule| rule.parts());
        let parts = parts.filter(|part| of_sets.contains(&part.name) && !part.value.is_empty());
        parts.map(|part| part.value.into_owned()).collect()
    }
}

/// A table with the signs of its family. A table without signs takes its family from the tables around it.
struct Block {
    heading: Option<Family>,
    by_addresses: Option<Family>,
    table: ExpectedTable,
}

impl Expected {
    /// Returns the rules of Istio's sidecar.
    pub fn istio() -> Self {
        let of = |family, own: &str, loopback: &str| {
            format!(
                "# {family}\n{}",
                ISTIO.replace("SELF", own).replace("LOOP", loopback)
            )
        };
        let v4 = of("iptables", "127.0.0.6/32", "127.0.0.1/32");
        let v6 = of("ip6tables", "::6/128", "::1/128");
        Self::of_text(&(v4 + &v6)).expect("a test reads them")
    }

    /// Returns the rules of Open Service Mesh.
    pub fn osm() -> Self {
        Self::of_text(OPEN_SERVICE_MESH).expect("a test reads them")
    }

    /// Reads expected rules from the output of `iptables-save` or the input of `iptables-restore`.
    ///
    /// A comment `# iptables` or `# ip6tables`, or the first line of `iptables-save`, starts the tables of a family.
    /// Without such a comment, the addresses in a table or in the tables beside it give the family. A second table of
    /// one name starts the other family.
    ///
    /// # Errors
    /// If a line is not understood, the family of a table is unknown, or the chains do not belong to a mesh.
    pub fn of_text(text: &str) -> Result<Self, String> {
        if let Some(error) = crate::text::entries(text).find_map(Result::err) {
            return Err(error.to_string());
        }
        let blocks = blocks(text)?;
        if blocks.is_empty() {
            return Err("no table of rules (*nat … COMMIT) is there".to_owned());
        }
        let tables = with_families(blocks)?;
        let mut whose = MeshChains::default();
        for table in &tables {
            for (line, chain) in declared(table) {
                let family = MESHES.iter().find(|mesh| {
                    owners::of_chain(chain).is_some_and(|owner| mesh.contains(&owner))
                });
                match (owners::of_chain(chain), family) {
                    (_, Some(mesh)) => {
                        let new = mesh.iter().filter(|owner| !whose.owners.contains(owner));
                        let new: Vec<_> = new.copied().collect();
                        whose.owners.extend(new);
                    }
                    (Some(owner), None) => {
                        return Err(format!(
                            "line {line}: chain {chain} belongs to {}, which is no mesh",
                            owner.name
                        ));
                    }
                    (None, None) => {}
                }
                whose.chains.insert(chain.to_owned());
            }
        }
        if whose.chains.is_empty() {
            return Err(
                "no chain is declared (:NAME - [0:0], or -N NAME): by its chains a mesh's rules are told from those of others"
                    .to_owned(),
            );
        }
        Ok(Self { tables, whose })
    }

    /// Returns the families that have expected rules.
    pub fn families(&self) -> impl Iterator<Item = Family> {
        Family::BOTH
            .into_iter()
            .filter(|family| self.tables.iter().any(|table| table.family == *family))
    }

    /// Returns the number of expected rules at the front of a built-in chain.
    pub fn in_front(&self, family: Family, table: &str, chain: &str) -> usize {
        let table = (self.tables.iter()).find(|t| t.family == family && t.name == table);
        table
            .and_then(|table| table.in_front.get(chain))
            .copied()
            .unwrap_or_default()
    }
}

/// Returns the chains that a table declares, each with its line.
fn declared(table: &ExpectedTable) -> impl Iterator<Item = (usize, &str)> {
    let entries = crate::text::entries(&table.text).filter_map(Result::ok);
    entries.filter_map(|entry| match entry {
        Entry::Chain {
            line,
            name,
            policy: None,
            ..
        } if !BUILT_IN.contains(&name) => Some((table.line + line - 1, name)),
        _ => None,
    })
}

fn blocks(text: &str) -> Result<Vec<Block>, String> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut heading, mut open) = (None, None::<ExpectedTable>);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_ascii();
        if let Some(comment) = line.strip_prefix('#') {
            heading = family_of_heading(comment).or(heading);
            continue;
        }
        if let Some(name) = line.strip_prefix('*') {
            open = Some(ExpectedTable {
                family: Family::V4,
                name: name.trim_ascii().to_owned(),
                text: String::new(),
                line: index + 1,
                in_front: BTreeMap::new(),
            });
        }
        if let Some(table) = &mut open {
            table.text += line;
            table.text.push('\n');
        }
        if line == "COMMIT"
            && let Some(mut table) = open.take()
        {
            let mut by_addresses = None;
            for entry in crate::text::entries(&table.text).filter_map(Result::ok) {
                let Entry::Rule(rule) = entry else { continue };
                if rule.before.is_some() && BUILT_IN.contains(&rule.chain) {
                    *table.in_front.entry(rule.chain.to_owned()).or_default() += 1;
                }
                let families = [by_addresses, family(&rule), heading];
                let mut families = families.into_iter().flatten();
                let first = families.next();
                if families.any(|family| Some(family) != first) {
                    return Err(format!(
                        "line {}: the table has addresses of IPv4 and of IPv6, or of another family than the comment above it says",
                        table.line + rule.line - 1
                    ));
                }
                by_addresses = by_addresses.or(family(&rule));
            }
            blocks.push(Block {
                heading,
                by_addresses,
                table,
            });
        }
    }
    Ok(blocks)
}

/// Returns the family that a comment gives for the tables after it: `# ip6tables`, or the first line of
/// `ip6tables-save` (`# Generated by ip6tables-nft-save v1.8.9 …`). Other comments give no family, even if they mention
/// a program.
fn family_of_heading(comment: &str) -> Option<Family> {
    let mut words = comment.split_ascii_whitespace();
    let program = match (words.next()?, words.next(), words.next()) {
        (program, None, _) => program,
        ("Generated", Some("by"), Some(program)) => program.strip_suffix("-save")?,
        _ => return None,
    };
    let variants = ["", "-legacy", "-nft"];
    let is = |name: &str| {
        variants
            .iter()
            .any(|v| program.strip_prefix(name) == Some(*v))
    };
    match (is("iptables"), is("ip6tables")) {
        (true, _) => Some(Family::V4),
        (_, true) => Some(Family::V6),
        _ => None,
    }
}

/// Returns the family of a rule's addresses.
fn family(rule: &Rule<'_>) -> Option<Family> {
    let mut parts = rule.parts().filter(|part| part.key != Key::Comment);
    parts.find_map(|part| {
        let addr = part.value.split('/').next()?;
        Some(match addr.parse().ok()? {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        })
    })
}

/// Gives each table its family. Tables in one group share the family that any of them has.
fn with_families(blocks: Vec<Block>) -> Result<Vec<ExpectedTable>, String> {
    let mut groups: Vec<(Option<Family>, Vec<ExpectedTable>)> = Vec::new();
    for block in blocks {
        let said = block.heading.or(block.by_addresses);
        match groups.last_mut() {
            Some((family, group))
                if (said.is_none() || family.is_none() || said == *family)
                    && group.iter().all(|table| table.name != block.table.name) =>
            {
                *family = family.or(said);
                group.push(block.table);
            }
            _ => groups.push((said, vec![block.table])),
        }
    }
    let mut tables: Vec<ExpectedTable> = Vec::new();
    let mut last = None;
    for (family, group) in groups {
        let family = family.unwrap_or(match last {
            Some(Family::V4) => Family::V6,
            Some(Family::V6) | None => Family::V4,
        });
        last = Some(family);
        for table in group {
            if tables
                .iter()
                .any(|known| known.family == family && known.name == table.name)
            {
                return Err(format!(
                    "line {}: table {} of {} is there twice",
                    table.line,
                    table.name,
                    family.word()
                ));
            }
            tables.push(ExpectedTable { family, ..table });
        }
    }
    Ok(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Describes each table by family, name and line: `IPv4 nat 1`.
    fn tables(text: &str) -> Result<Vec<String>, String> {
        let expected = Expected::of_text(text)?;
        let tables = expected.tables.iter();
        Ok(tables
            .map(|table| format!("{} {} {}", table.family.word(), table.name, table.line))
            .collect())
    }

    #[test]
    fn what_wrappers_write_is_read() {
        let istio = Expected::istio();
        assert_eq!(istio.families().count(), 2);
        assert_eq!(istio.whose.owners, [ISTIO_SIDECAR, ISTIO_AMBIENT]);
        assert!(istio.whose.owns("ISTIO_OLD") && !istio.whose.owns("PROXY_OUTPUT"));
        assert!(
            !istio
                .tables
                .iter()
                .any(|table| table.text.contains("LOOP") || table.text.contains("SELF"))
        );
        let osm = Expected::osm();
        assert_eq!(osm.families().collect::<Vec<_>>(), [Family::V4]);
        assert_eq!((osm.whose.owners, osm.whose.chains.len()), (vec![OSM], 4));
    }

    #[test]
    fn a_file_tells_its_families() {
        let table = |name: &str, rule: &str| format!("*{name}\n-N MINE\n{rule}\nCOMMIT\n");
        let none = |name| table(name, "-A MINE -p tcp -j RETURN");
        let v4 = |name| table(name, "-A MINE -d 10.0.0.1 -j RETURN");
        let v6 = |name| table(name, "-A MINE -d fd00::/8 -j RETURN");
        for (text, wanted) in [
            (none("nat"), &["IPv4 nat 1"][..]),
            (v6("nat"), &["IPv6 nat 1"]),
            (none("nat") + &none("nat"), &["IPv4 nat 1", "IPv6 nat 5"]),
            (none("raw") + &v6("nat"), &["IPv6 raw 1", "IPv6 nat 5"]),
            (
                none("mangle") + &v4("nat") + &none("mangle") + &v6("nat") + &none("raw"),
                &[
                    "IPv4 mangle 1",
                    "IPv4 nat 5",
                    "IPv6 mangle 9",
                    "IPv6 nat 13",
                    "IPv6 raw 17",
                ],
            ),
            (
                format!(
                    "# Generated by ip6tables-save v1\n{}# Completed\n",
                    none("nat")
                ),
                &["IPv6 nat 2"],
            ),
            (
                format!(
                    "# Generated by iptables-nft-save v1.8.9 (nf_tables) on Fri\n# not for ip6tables\n# ip6tables is next\n{}\
                     # Generated by ip6tables-legacy-save v1\n{}",
                    none("nat"),
                    none("nat")
                ),
                &["IPv4 nat 4", "IPv6 nat 9"],
            ),
            (
                format!("# ip6tables\n{}# iptables\n{}", none("nat"), none("nat")),
                &["IPv6 nat 2", "IPv4 nat 7"],
            ),
        ] {
            assert_eq!(tables(&text).unwrap(), wanted, "{text}");
        }
    }

    #[test]
    fn what_is_no_meshs_is_refused_with_its_line() {
        for (text, why) in [
            ("", "no table"),
            ("*nat\n-N MINE\nrubbish\nCOMMIT\n", "line 3:"),
            (
                "*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n",
                "no chain is declared",
            ),
            (
                "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n",
                "no chain is declared",
            ),
            (
                "\n*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n",
                "line 3: chain KUBE-SERVICES belongs to kube-proxy",
            ),
            (
                "*nat\n-N X\n-A X -d 10.0.0.1 -j RETURN\n-A X -d ::1 -j RETURN\nCOMMIT\n",
                "line 4: the table has addresses",
            ),
            (
                "# ip6tables\n*nat\n-N X\n-A X -d 10.0.0.1 -j RETURN\nCOMMIT\n",
                "line 4: the table has addresses",
            ),
            (
                "# iptables\n*nat\n-N X\nCOMMIT\n*nat\nCOMMIT\n# iptables",
                "line 5: table nat of IPv4 is there twice",
            ),
            (
                "*nat\n-N X\nCOMMIT\n*nat\n-N X\nCOMMIT\n*nat\n-N X\nCOMMIT\n",
                "line 7: table nat of IPv4 is there twice",
            ),
        ] {
            let error = Expected::of_text(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn rules_for_the_front_are_counted() {
        let text = "*nat\n-N X\n-I OUTPUT 1 -j X\n-A OUTPUT -j X\n-I OUTPUT -p tcp -j X\n-I X 1 -j RETURN\nCOMMIT\n";
        let expected = Expected::of_text(text).unwrap();
        assert_eq!(expected.in_front(Family::V4, "nat", "OUTPUT"), 2);
        assert_eq!(expected.in_front(Family::V4, "nat", "X"), 0);
        assert_eq!(expected.in_front(Family::V6, "nat", "OUTPUT"), 0);
    }
}
