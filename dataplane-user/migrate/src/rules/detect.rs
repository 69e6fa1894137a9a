//! Chooses the variant of iptables that a network namespace needs. The rules in the kernel and the programs present
//! decide, never the name `iptables` alone. Pure.

use std::path::PathBuf;

use kernel::netfilter::{Kind, Table};
use serde::Serialize;

use super::binaries::{Binaries, Family, Role, Variant, name};

/// The command that installs iptables' programs.
pub const GET_IPTABLES: &str = "apt-get install iptables";
/// The command that installs `nft`.
pub const GET_NFT: &str = "apt-get install nftables";

/// The programs to use for a family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// The family.
    pub family: Family,
    /// The variant; `None` if there is no program.
    pub variant: Option<Variant>,
    /// The program that changes rules.
    pub command: Option<PathBuf>,
    /// The program that prints rules.
    pub save: Option<PathBuf>,
    /// The program that loads rules.
    pub restore: Option<PathBuf>,
    /// The reason for the choice.
    pub reason: String,
    /// Faults and missing programs.
    pub problems: Vec<String>,
}

/// Chooses the variant and programs for a family.
pub fn decide(family: Family, binaries: &Binaries, tables: &[Table]) -> Decision {
    let of = |kind| holding(tables, kind, family);
    let (legacy, nft) = (of(Kind::Legacy), of(Kind::Compat));
    let has = |variant| {
        Role::ALL
            .iter()
            .any(|role| binaries.program(family, variant, *role).is_some())
    };
    let mut problems = Vec::new();
    let (variant, reason) = if !nft.is_empty() {
        if !legacy.is_empty() {
            problems.push(format!(
                "rules are in both variants: the legacy tables hold {legacy}, which programs of variant nft neither show nor \
                 remove"
            ));
        }
        (
            Some(Variant::Nft),
            format!("nf_tables' compatibility tables hold {nft}"),
        )
    } else if !legacy.is_empty() && has(Variant::Legacy) {
        let reason =
            format!("the legacy tables hold {legacy}, nf_tables' compatibility tables no rule");
        (Some(Variant::Legacy), reason)
    } else {
        if !legacy.is_empty() {
            problems.push(format!(
                "the legacy tables hold {legacy}, and no program of variant legacy is here: {GET_IPTABLES}"
            ));
        }
        by_default(family, binaries, &has)
    };
    let of_role = |role| variant.and_then(|variant| binaries.program(family, variant, role));
    for role in Role::ALL {
        if let Some(variant) = variant
            && of_role(role).is_none()
        {
            let name = name(family, Some(variant), role);
            problems.push(format!("no program is {name}: {GET_IPTABLES}"));
        }
    }
    if variant.is_none() {
        let name = family.program();
        problems.push(format!(
            "there is no program of {name} at all: {GET_IPTABLES}"
        ));
    }
    for binary in binaries
        .iptables
        .iter()
        .filter(|binary| binary.family == family)
    {
        if let (Some(named), Some(variant)) = (binary.named, binary.variant)
            && named != variant
        {
            problems.push(format!(
                "{} is of variant {}, against its name",
                binary.name,
                variant.word()
            ));
        }
    }
    let path = |role| of_role(role).map(|binary| binary.path.clone());
    Decision {
        family,
        variant,
        command: path(Role::Command),
        save: path(Role::Save),
        restore: path(Role::Restore),
        reason,
        problems,
    }
}

/// Chooses the variant if the kernel has no rules: the variant of the program without a variant in its name, else a
/// variant that is present.
fn by_default(
    family: Family,
    binaries: &Binaries,
    has: &dyn Fn(Variant) -> bool,
) -> (Option<Variant>, String) {
    let unmarked = binaries
        .iptables
        .iter()
        .find(|binary| (binary.family, binary.named, binary.role) == (family, None, Role::Command));
    let no_rules = "neither variant has rules that a program here can read";
    if let Some(binary) = unmarked
        && let Some(variant) = binary.variant
    {
        let reason = format!(
            "{no_rules}; the system's default, {}, is of variant {} ({})",
            binary.path.display(),
            variant.word(),
            binary.really.display()
        );
        return (Some(variant), reason);
    }
    let default = match unmarked {
        None => format!("there is no {}", family.program()),
        Some(binary) => format!("{} does not say what it is", binary.path.display()),
    };
    match [Variant::Nft, Variant::Legacy]
        .into_iter()
        .find(|variant| has(*variant))
    {
        Some(variant) => {
            let reason = format!(
                "{no_rules}, and {default}; of variant {} there are programs",
                variant.word()
            );
            (Some(variant), reason)
        }
        None => (None, format!("{no_rules}, and {default}")),
    }
}

/// Lists the tables that have rules, for messages.
fn holding(tables: &[Table], kind: Kind, family: Family) -> String {
    let of = tables
        .iter()
        .filter(|table| (table.kind, table.family) == (kind, family.of_tables()));
    let named: Vec<String> = of
        .filter(|table| table.holds_rules())
        .map(summary)
        .collect();
    named.join(", ")
}

/// Describes a table: `nat (54 rules)`.
pub fn summary(table: &Table) -> String {
    let rules = match table.rules() {
        1 => "1 rule".to_owned(),
        rules => format!("{rules} rules"),
    };
    let drops = table.chains.iter().filter(|chain| chain.drops);
    let drops: Vec<&str> = drops.map(|chain| &*chain.name).collect();
    let drops = if drops.is_empty() {
        String::new()
    } else {
        format!(", {} drops", drops.join(", "))
    };
    format!("{} ({rules}{drops})", table.name)
}

#[cfg(test)]
mod tests {
    use kernel::netfilter::Listed;

    use super::{super::binaries::Binary, *};

    fn table(kind: Kind, family: &'static str, rules: usize) -> Table {
        Table {
            kind,
            family,
            name: "nat".to_owned(),
            chains: vec![Listed {
                name: "OUTPUT".to_owned(),
                hook: Some("output"),
                drops: false,
                rules,
            }],
            sets: Vec::new(),
        }
    }

    /// Reads a description of programs such as `iptables=nft iptables-legacy-save=legacy`.
    fn binaries(text: &str) -> Binaries {
        let all = text.split_whitespace().map(|word| {
            let (name, variant) = word.split_once('=').unwrap();
            let family = if name.starts_with("ip6") {
                Family::V6
            } else {
                Family::V4
            };
            let named = [Variant::Legacy, Variant::Nft]
                .into_iter()
                .find(|v| name.contains(v.word()));
            let role = Role::ALL
                .into_iter()
                .rev()
                .find(|role| name.ends_with(role.ending()))
                .unwrap();
            Binary {
                name: name.to_owned(),
                family,
                named,
                role,
                path: format!("/sbin/{name}").into(),
                really: "/sbin/multi".into(),
                variant: [Variant::Legacy, Variant::Nft]
                    .into_iter()
                    .find(|v| v.word() == variant),
                version: None,
                note: None,
            }
        });
        Binaries {
            iptables: all.collect(),
            ..Binaries::default()
        }
    }

    const BOTH: &str = "iptables=legacy iptables-save=legacy iptables-restore=legacy iptables-nft=nft iptables-nft-save=nft \
        iptables-nft-restore=nft iptables-legacy=legacy iptables-legacy-save=legacy iptables-legacy-restore=legacy";

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn rules_decide_before_names() {
        let (legacy, nft) = (table(Kind::Legacy, "ip", 3), table(Kind::Compat, "ip", 1));
        let native = table(Kind::Native, "ip", 9);
        let other_family = table(Kind::Compat, "ip6", 9);
        let empty = table(Kind::Compat, "ip", 0);
        for (what, tables, programs, variant, save, problems, reason) in [
            (
                "nft has rules",
                vec![nft.clone()],
                BOTH,
                Some(Variant::Nft),
                Some("iptables-nft-save"),
                0,
                "nat (1 rule)",
            ),
            (
                "both have",
                vec![legacy.clone(), nft.clone()],
                BOTH,
                Some(Variant::Nft),
                Some("iptables-nft-save"),
                1,
                "hold",
            ),
            (
                "legacy has",
                vec![legacy.clone(), empty.clone(), native.clone(), other_family],
                BOTH,
                Some(Variant::Legacy),
                Some("iptables-legacy-save"),
                0,
                "nat (3 rules)",
            ),
            (
                "nobody has",
                vec![empty, native],
                BOTH,
                Some(Variant::Legacy),
                Some("iptables-legacy-save"),
                0,
                "default",
            ),
            (
                "legacy has, without a program",
                vec![legacy.clone()],
                "iptables=nft iptables-save=nft iptables-restore=nft",
                Some(Variant::Nft),
                Some("iptables-save"),
                1,
                "default",
            ),
            (
                "nft has, without a program",
                vec![nft.clone()],
                "",
                Some(Variant::Nft),
                None,
                3,
                "hold",
            ),
            (
                "the unmarked name does not say",
                vec![],
                "iptables=? iptables-legacy=legacy iptables-legacy-save=legacy iptables-legacy-restore=legacy",
                Some(Variant::Legacy),
                Some("iptables-legacy-save"),
                0,
                "does not say",
            ),
            (
                "a name lies",
                vec![nft],
                "iptables-nft=legacy iptables=nft iptables-save=nft iptables-restore=nft",
                Some(Variant::Nft),
                Some("iptables-save"),
                1,
                "hold",
            ),
            (
                "nothing at all",
                vec![],
                "ip6tables=nft",
                None,
                None,
                1,
                "there is no iptables",
            ),
            (
                "only legacy rules and no program",
                vec![legacy],
                "",
                None,
                None,
                2,
                "there is no iptables",
            ),
        ] {
            let found = decide(Family::V4, &binaries(programs), &tables);
            assert_eq!(found.variant, variant, "{what}: {found:?}");
            let wanted = save.map(|name| PathBuf::from(format!("/sbin/{name}")));
            assert_eq!(found.save, wanted, "{what}: {found:?}");
            assert_eq!(found.problems.len(), problems, "{what}: {found:?}");
            assert!(found.reason.contains(reason), "{what}: {found:?}");
        }
    }
}
