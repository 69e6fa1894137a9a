//! Chains and rules of nf_tables, by netlink (`include/uapi/linux/netfilter/nf_tables.h`).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    BYPASSED, Base, Chain, HOOKS, Kind, Listed, Rule, Table,
    nf_message::{HEADER, number, text},
    nf_verdicts::{DROP, NFTA_RULE_CHAIN, elements, rule},
};
use crate::netlink::{Netlink, content, is_without_netfilter, string};

/// `NFNL_SUBSYS_NFTABLES << 8`, with which a message's type begins.
pub(super) const TABLES: u16 = 0x0a00;
/// `NFT_MSG_GETTABLE`, `NFT_MSG_GETCHAIN`, `NFT_MSG_GETRULE`, `NFT_MSG_GETSET`.
const GET_TABLE: u16 = TABLES | 1;
pub(super) const GET_CHAIN: u16 = TABLES | 4;
const GET_RULE: u16 = TABLES | 7;
const GET_SET: u16 = TABLES | 0x0a;
/// `NFT_MSG_GETSETELEM`.
const GET_ELEMENTS: u16 = TABLES | 0x0d;

const NFTA_TABLE_NAME: u16 = 1;
const NFTA_SET_TABLE: u16 = 1;
const NFTA_SET_NAME: u16 = 2;
const NFTA_SET_FLAGS: u16 = 3;
/// `NFT_SET_ANONYMOUS`.
const ANONYMOUS: u32 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_USE: u16 = 6;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
/// A table: its family's number and its name.
pub(super) type TableName = (u8, String);

/// The table of kube-proxy. The dataplane does the work of its rules.
const KUBE_PROXY: &str = "kube-proxy";

/// How often rules are read that change while they are.
const TRIES: usize = 8;

/// The tables of IP packets that `iptables-nft` knows (`xtables_builtin_table` in `iptables/nft.c`).
const OF_IPTABLES: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];

/// Removes a table with everything in it. `false`: it is not there.
pub fn delete_table(family: &str, name: &str) -> io::Result<bool> {
    const DELETE_TABLE: u16 = TABLES | 2;
    let Some(number) = number_of(family) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let table = about(
        &(number, name.to_owned()),
        &[(NFTA_TABLE_NAME, &name.to_owned())],
    );
    let deleted = Netlink::open(NETLINK_NETFILTER)?.batch(TABLES >> 8, &[(DELETE_TABLE, 0, table)]);
    match deleted {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        deleted => deleted.map(|()| true),
    }
}

/// Every chain of the tables that have one at one of [`BYPASSED`], except those of type `nat`.
pub fn chains() -> io::Result<Vec<Chain>> {
    as_a_whole(read)
}

/// Every table.
pub fn tables() -> io::Result<Vec<Table>> {
    as_a_whole(list)
}

/// The number of a family.
fn number_of(family: &str) -> Option<u8> {
    (1..=10).find(|number| self::family(*number) == family)
}

/// Reads the tables, and reads again if they changed during the dump. Returns nothing if the kernel has no nf_tables.
fn as_a_whole<T>(read: impl Fn(&mut Netlink) -> io::Result<Option<Vec<T>>>) -> io::Result<Vec<T>> {
    for last in (0..TRIES).map(|tried| tried + 1 == TRIES) {
        let mut netlink = match Netlink::open(NETLINK_NETFILTER) {
            Ok(netlink) => netlink,
            Err(error) if is_without_netfilter(&error) => break,
            Err(error) => return Err(error),
        };
        match read(&mut netlink) {
            // A table, chain or map disappeared, or rules changed, so the dump is incomplete.
            Err(error) if !last && error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if !last && error.raw_os_error() == Some(libc::ENOENT) => {}
            read => return Ok(read?.unwrap_or_default()),
        }
    }
    Ok(Vec::new())
}

/// A dump; `None` if the kernel has no nf_tables.
fn dump(netlink: &mut Netlink, kind: u16, each: impl FnMut(&[u8])) -> io::Result<Option<()>> {
    match netlink.dump(kind, &[0; HEADER], each) {
        Err(error) if is_without_netfilter(&error) => Ok(None),
        dumped => dumped.map(Some),
    }
}

/// The tables with their chains, and how many rules there are.
fn list(netlink: &mut Netlink) -> io::Result<Option<Vec<Table>>> {
    let mut tables: BTreeMap<TableName, Table> = BTreeMap::new();
    let listed = dump(netlink, GET_TABLE, |message| {
        if let Some((key, _)) = key(message, NFTA_TABLE_NAME) {
            let table = Table {
                kind: Kind::Native,
                family: family(key.0),
                name: key.1.clone(),
                chains: Vec::new(),
                sets: Vec::new(),
            };
            tables.insert(key, table);
        }
    })?;
    if listed.is_none() {
        return Ok(None);
    }
    let mut places: Vec<(TableName, usize)> = Vec::new();
    let mut unusual: BTreeSet<TableName> = BTreeSet::new();
    netlink.dump(GET_CHAIN, &[0; HEADER], |message| {
        if let Some((key, rest)) = key(message, NFTA_CHAIN_TABLE)
            && let Some(table) = tables.get_mut(&key)
            && let Some(name) = content(rest, NFTA_CHAIN_NAME).map(text)
        {
            let hook = hook(key.0, rest);
            if hook.is_some_and(|hook| !is_at_iptables_place(&table.name, hook, rest)) {
                unusual.insert(key.clone());
            }
            table.chains.push(Listed {
                name,
                hook,
                drops: drops(rest),
                rules: 0,
            });
            places.push((key, table.chains.len() - 1));
        }
    })?;
    netlink.dump(GET_SET, &[0; HEADER], |message| {
        if let Some((key, rest)) = key(message, NFTA_SET_TABLE)
            && let Some(table) = tables.get_mut(&key)
            && let Some(name) = content(rest, NFTA_SET_NAME).map(text)
            && content(rest, NFTA_SET_FLAGS)
                .and_then(number)
                .unwrap_or_default()
                & ANONYMOUS
                == 0
        {
            table.sets.push(name);
        }
    })?;
    // The kernel walks a list from its beginning for each datagram, so that one list of all rules takes time by the square.
    // The number that it keeps of a chain's rules is no help: it counts those that a transaction under way will remove as gone.
    for (key, place) in places {
        if let Some(chain) = tables
            .get_mut(&key)
            .and_then(|table| table.chains.get_mut(place))
        {
            let names = [(NFTA_RULE_TABLE, &key.1), (NFTA_RULE_CHAIN, &chain.name)];
            let mut rules = 0;
            netlink.dump(GET_RULE, &about(&key, &names), |_| rules += 1)?;
            chain.rules = rules;
        }
    }
    for (key, table) in &mut tables {
        if is_of_iptables(table) && !unusual.contains(key) {
            table.kind = Kind::Compat;
        }
    }
    Ok(Some(tables.into_values().collect()))
}

/// Whether a chain of the type `nat` at the output hook has a rule.
pub fn has_nat_at_output() -> io::Result<bool> {
    let found: Vec<TableName> = as_a_whole(|netlink| {
        let mut found = Vec::new();
        dump(netlink, GET_CHAIN, |message| {
            if let Some((key, rest)) = key(message, NFTA_CHAIN_TABLE)
                && hook(key.0, rest) == Some("output")
                && content(rest, NFTA_CHAIN_TYPE).map(text).as_deref() == Some("nat")
                // A chain at a hook is used by its rules alone.
                && content(rest, NFTA_CHAIN_USE).and_then(number) != Some(0)
            {
                found.push(key);
            }
        })?;
        Ok(Some(found))
    })?;
    Ok(!found.is_empty())
}

/// Whether a chain has the type and priority that iptables uses at this hook, in its table of this name. If not,
/// `iptables-nft-save` prints an error ("incompatible base-chains") instead of the table.
fn is_at_iptables_place(table: &str, hook: &str, chain: &[u8]) -> bool {
    let usual: (&str, i32) = match (table, hook) {
        ("nat", "prerouting" | "output") => ("nat", -100),
        ("nat", _) => ("nat", 100),
        ("mangle", "output") => ("route", -150),
        ("mangle", _) => ("filter", -150),
        ("raw", _) => ("filter", -300),
        ("security", _) => ("filter", 50),
        _ => ("filter", 0),
    };
    let kind = content(chain, NFTA_CHAIN_TYPE).map(text);
    let place = content(chain, NFTA_CHAIN_HOOK).and_then(|hook| content(hook, NFTA_HOOK_PRIORITY));
    kind.as_deref() == Some(usual.0)
        && place.and_then(number).map(u32::cast_signed) == Some(usual.1)
}

/// Whether a table may be one of `iptables-nft`: it has the name of one, and its chains at hooks have the names of those.
fn is_of_iptables(table: &Table) -> bool {
    let built_in = |chain: &Listed| match chain.hook {
        Some(hook) => chain.name == hook.to_ascii_uppercase(),
        None => true,
    };
    matches!(table.family, "ip" | "ip6")
        && OF_IPTABLES.contains(&&*table.name)
        && table.chains.iter().all(built_in)
}

/// The table that a message is about, by the attribute that names it; and the message's attributes.
fn key(message: &[u8], attribute: u16) -> Option<(TableName, &[u8])> {
    let rest = message.get(HEADER..)?;
    let name = text(content(rest, attribute)?);
    Some(((*message.first()?, name), rest))
}

/// The word for a family's number (`NFPROTO_…`).
pub(super) fn family(number: u8) -> &'static str {
    match number {
        1 => "inet",
        2 => "ip",
        3 => "arp",
        5 => "netdev",
        7 => "bridge",
        10 => "ip6",
        _ => "unknown",
    }
}

/// The hook of a chain. Families without IP number theirs otherwise.
pub(super) fn hook(family: u8, chain: &[u8]) -> Option<&'static str> {
    let number = number(content(
        content(chain, NFTA_CHAIN_HOOK)?,
        NFTA_HOOK_HOOKNUM,
    )?)?;
    let hooks: &[&str] = match family {
        // `NF_ARP_IN`…, `NF_NETDEV_INGRESS`…
        3 => &["input", "output", "forward"],
        5 => &["ingress", "egress"],
        _ => &HOOKS,
    };
    Some(hooks.get(number as usize).copied().unwrap_or("ingress"))
}

/// Whether a chain drops a packet if no rule decides about it.
fn drops(chain: &[u8]) -> bool {
    content(chain, NFTA_CHAIN_POLICY).and_then(number) == Some(DROP)
}

fn read(netlink: &mut Netlink) -> io::Result<Option<Vec<Chain>>> {
    let mut all: Vec<(TableName, Chain)> = Vec::new();
    let listed = dump(netlink, GET_CHAIN, |message| all.extend(chain(message)))?;
    if listed.is_none() {
        return Ok(None);
    }
    let with_base = all.iter().filter(|(_, chain)| chain.base.is_some());
    let mut tables: BTreeSet<TableName> = with_base.map(|(table, _)| table.clone()).collect();
    tables.retain(|(_, name)| name != KUBE_PROXY);
    all.retain(|(table, _)| tables.contains(table));
    for table in tables {
        let mut rules: BTreeMap<String, Vec<Rule>> = BTreeMap::new();
        let mut maps: Vec<(String, String)> = Vec::new();
        let request = about(&table, &[(NFTA_RULE_TABLE, &table.1)]);
        netlink.dump(GET_RULE, &request, |message| {
            if let Some((chain, rule, of)) = rule(message) {
                maps.extend(of.into_iter().map(|map| (chain.clone(), map)));
                rules.entry(chain).or_default().push(rule);
            }
        })?;
        // A verdict in a map counts like a rule of the chain that looks it up.
        for (chain, map) in maps {
            let names = [
                (NFTA_SET_ELEM_LIST_TABLE, &table.1),
                (NFTA_SET_ELEM_LIST_SET, &map),
            ];
            let mut does = Vec::new();
            netlink.dump(GET_ELEMENTS, &about(&table, &names), |message| {
                does.extend(elements(message));
            })?;
            rules.entry(chain).or_default().push(Rule { does });
        }
        for (_, chain) in all.iter_mut().filter(|(of, _)| *of == table) {
            chain.rules = rules.remove(&chain.name).unwrap_or_default();
        }
    }
    Ok(Some(all.into_iter().map(|(_, chain)| chain).collect()))
}

/// A question about a table, with names.
fn about(table: &TableName, names: &[(u16, &String)]) -> Vec<u8> {
    let names = names.iter().flat_map(|(kind, name)| string(*kind, name));
    [table.0, 0, 0, 0].into_iter().chain(names).collect()
}

/// A chain of a family that is forwarded, without its rules.
fn chain(message: &[u8]) -> Option<(TableName, Chain)> {
    let family = *message.first()?;
    // `NFPROTO_INET`, `_IPV4`, `_IPV6`.
    let word = match family {
        1 => "inet",
        2 => "ip",
        10 => "ip6",
        _ => return None,
    };
    let rest = message.get(HEADER..)?;
    let find = |kind| content(rest, kind);
    let table = text(find(NFTA_CHAIN_TABLE)?);
    let is_nat = find(NFTA_CHAIN_TYPE).map(text).as_deref() == Some("nat");
    let hook = hook(family, rest).filter(|hook| BYPASSED.contains(hook) && !is_nat);
    let drops = drops(rest);
    let chain = Chain {
        table: format!("nft {word} {table}"),
        name: text(find(NFTA_CHAIN_NAME)?),
        base: hook.map(|hook| Base { hook, drops }),
        rules: Vec::new(),
    };
    Some(((family, table), chain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute;

    #[test]
    fn chains_at_other_hooks_are_no_base() {
        const FORWARD: u32 = 2;
        let of = |family: u8, hook: u32, kind: &str| {
            let hook = attribute(NFTA_HOOK_HOOKNUM, &hook.to_be_bytes());
            let policy = attribute(NFTA_CHAIN_POLICY, &DROP.to_be_bytes());
            let all = [
                vec![family, 0, 0, 0],
                string(NFTA_CHAIN_TABLE, "filter"),
                string(NFTA_CHAIN_NAME, "FORWARD"),
                attribute(NFTA_CHAIN_HOOK, &hook),
                string(NFTA_CHAIN_TYPE, kind),
                policy,
            ];
            chain(&all.concat()).map(|(_, chain)| chain)
        };
        let forward = of(2, FORWARD, "filter").unwrap();
        assert_eq!(
            (&*forward.table, &*forward.name),
            ("nft ip filter", "FORWARD")
        );
        let base = |hook| Some(Base { hook, drops: true });
        assert_eq!(forward.base, base("forward"));
        assert_eq!(of(1, 0, "filter").unwrap().base, base("prerouting"));
        assert_eq!(of(2, 0, "nat").unwrap().base, None);
        assert_eq!(of(10, 1, "filter").unwrap().base, None);
        assert_eq!(of(10, 3, "filter").unwrap().base, base("output"));
        assert_eq!(of(7, FORWARD, "filter"), None, "a bridge's");
    }

    #[test]
    fn tables_of_iptables_are_told_by_their_chains() {
        let table = |family, name: &str, chains: &[(&str, Option<&'static str>)]| Table {
            kind: Kind::Native,
            family,
            name: name.to_owned(),
            chains: chains
                .iter()
                .map(|(name, hook)| Listed {
                    name: (*name).to_owned(),
                    hook: *hook,
                    drops: false,
                    rules: 0,
                })
                .collect(),
            sets: Vec::new(),
        };
        let built_in = ("PREROUTING", Some("prerouting"));
        for (wanted, family, name, chains) in [
            (true, "ip", "nat", &[built_in, ("KUBE-SERVICES", None)][..]),
            (true, "ip6", "raw", &[]),
            (false, "ip", "nat", &[built_in, ("output", Some("output"))]),
            (false, "ip", "nat", &[("PREROUTING", Some("input"))]),
            (false, "inet", "filter", &[]),
            (false, "ip", "kube-proxy", &[built_in]),
        ] {
            let table = table(family, name, chains);
            assert_eq!(is_of_iptables(&table), wanted, "{table:?}");
        }
    }
}
