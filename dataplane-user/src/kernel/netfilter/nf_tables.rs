//! Chains and rules of nf_tables, by netlink (`include/uapi/linux/netfilter/nf_tables.h`).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use nix::sys::socket::SockProtocol;

use super::{Base, Chain, FORWARD, Rule, Verdict};
use crate::kernel::diag::{Netlink, attribute, attributes};

/// `NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN`, `..._GETRULE`.
const GET_CHAIN: u16 = 10 << 8 | 4;
const GET_RULE: u16 = 10 << 8 | 7;

/// `struct nfgenmsg`: a family, a version, and a number.
const HEADER: usize = 4;

const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NFTA_LOOKUP_DREG: u16 = 3;
const NFTA_TARGET_NAME: u16 = 1;

/// `NF_DROP` and `NF_ACCEPT`; and nf_tables' own verdicts, which are negative.
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const JUMP: u32 = (-3_i32).cast_unsigned();
const GOTO: u32 = (-4_i32).cast_unsigned();
/// `NFT_REG_VERDICT`.
const VERDICT: u32 = 0;

/// A table: its family's number and its name.
type TableName = (u8, String);

/// Every chain of the tables that have one at the forward hook.
pub fn chains() -> io::Result<Vec<Chain>> {
    let mut netlink = match Netlink::open(SockProtocol::NetlinkNetFilter) {
        Ok(netlink) => netlink,
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut all: Vec<(TableName, Chain)> = Vec::new();
    let listed = netlink.dump(GET_CHAIN, &[0; HEADER], |message| {
        all.extend(chain(message));
    });
    match listed {
        // A kernel without nf_tables.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
            return Ok(Vec::new());
        }
        listed => listed?,
    }
    let with_base = all.iter().filter(|(_, chain)| chain.base.is_some());
    let tables: BTreeSet<TableName> = with_base.map(|(table, _)| table.clone()).collect();
    all.retain(|(table, _)| tables.contains(table));
    for table in tables {
        let mut rules: BTreeMap<String, Vec<Rule>> = BTreeMap::new();
        let name = [table.1.as_bytes(), &[0]].concat();
        let request = [vec![table.0, 0, 0, 0], attribute(NFTA_RULE_TABLE, &name)].concat();
        netlink.dump(GET_RULE, &request, |message| {
            if let Some((chain, rule)) = rule(message) {
                rules.entry(chain).or_default().push(rule);
            }
        })?;
        for (_, chain) in all.iter_mut().filter(|(of, _)| *of == table) {
            chain.rules = rules.remove(&chain.name).unwrap_or_default();
        }
    }
    Ok(all.into_iter().map(|(_, chain)| chain).collect())
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
    let hook = find(NFTA_CHAIN_HOOK).and_then(|hook| number(content(hook, NFTA_HOOK_HOOKNUM)?));
    let drops = find(NFTA_CHAIN_POLICY).and_then(number) == Some(DROP);
    let chain = Chain {
        table: format!("nft {word} {table}"),
        name: text(find(NFTA_CHAIN_NAME)?),
        base: (hook == Some(FORWARD)).then_some(Base { drops }),
        rules: Vec::new(),
    };
    Some(((family, table), chain))
}

/// A rule, and the chain that it is in.
fn rule(message: &[u8]) -> Option<(String, Rule)> {
    let rest = message.get(HEADER..)?;
    let chain = text(content(rest, NFTA_RULE_CHAIN)?);
    let expressions = content(rest, NFTA_RULE_EXPRESSIONS).unwrap_or_default();
    let does = attributes(expressions).filter_map(|(_, expression)| {
        let name = content(expression, NFTA_EXPR_NAME)?;
        let data = content(expression, NFTA_EXPR_DATA).unwrap_or_default();
        verdict(&text(name), data)
    });
    let does = does.collect();
    Some((chain, Rule { does }))
}

/// What an expression does with a packet.
fn verdict(name: &str, data: &[u8]) -> Option<Verdict> {
    match name {
        "immediate" => {
            let verdict = content(content(data, NFTA_IMMEDIATE_DATA)?, NFTA_DATA_VERDICT)?;
            let code = number(content(verdict, NFTA_VERDICT_CODE)?)?;
            match code {
                JUMP | GOTO => content(verdict, NFTA_VERDICT_CHAIN)
                    .map(text)
                    .map(Verdict::Jump),
                // `NF_DROP` has the error in its higher half; `NF_QUEUE` and others are somebody's to decide.
                ACCEPT => None,
                code if code >> 31 != 0 => None,
                _ => Some(Verdict::Refuse),
            }
        }
        "reject" | "queue" | "synproxy" => Some(Verdict::Refuse),
        "lookup" => {
            let to_verdict = number(content(data, NFTA_LOOKUP_DREG)?) == Some(VERDICT);
            to_verdict.then_some(Verdict::Map)
        }
        // What iptables-nft has of iptables' own.
        "target" => {
            let target = text(content(data, NFTA_TARGET_NAME)?);
            let refuses = matches!(&*target, "REJECT" | "DROP" | "NFQUEUE" | "QUEUE" | "TARPIT");
            refuses.then_some(Verdict::Refuse)
        }
        _ => None,
    }
}

fn content(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|(k, _)| *k == kind)
        .map(|(_, content)| content)
}

/// In network order, as nf_tables has them all.
fn number(content: &[u8]) -> Option<u32> {
    content
        .first_chunk()
        .map(|bytes| u32::from_be_bytes(*bytes))
}

fn text(content: &[u8]) -> String {
    let end = content.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&content[..end.unwrap_or(content.len())]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn immediate(code: u32, chain: &str) -> Vec<u8> {
        let mut verdict = attribute(NFTA_VERDICT_CODE, &code.to_be_bytes());
        if !chain.is_empty() {
            verdict.extend(attribute(
                NFTA_VERDICT_CHAIN,
                &[chain.as_bytes(), &[0]].concat(),
            ));
        }
        attribute(NFTA_IMMEDIATE_DATA, &attribute(NFTA_DATA_VERDICT, &verdict))
    }

    #[test]
    fn verdicts() {
        let of = |code| verdict("immediate", &immediate(code, ""));
        assert_eq!(of(DROP), Some(Verdict::Refuse));
        assert_eq!(of(1 << 16), Some(Verdict::Refuse), "a drop with an error");
        assert_eq!(of(ACCEPT), None);
        assert_eq!(of((-5_i32).cast_unsigned()), None, "return");
        let jump = verdict("immediate", &immediate(JUMP, "other"));
        assert_eq!(jump, Some(Verdict::Jump("other".to_owned())));
        let target = |name: &str| verdict("target", &attribute(NFTA_TARGET_NAME, name.as_bytes()));
        assert_eq!(target("REJECT\0\0"), Some(Verdict::Refuse));
        assert_eq!(target("MARK\0"), None);
        let lookup = |register: u32| {
            verdict(
                "lookup",
                &attribute(NFTA_LOOKUP_DREG, &register.to_be_bytes()),
            )
        };
        assert_eq!((lookup(0), lookup(1)), (Some(Verdict::Map), None));
        assert_eq!(verdict("immediate", &[]), None);
    }

    #[test]
    fn chains_at_other_hooks_are_no_base() {
        let of = |family: u8, hook: u32| {
            let name = |kind, name: &str| attribute(kind, &[name.as_bytes(), &[0]].concat());
            let hook = attribute(NFTA_HOOK_HOOKNUM, &hook.to_be_bytes());
            let policy = attribute(NFTA_CHAIN_POLICY, &DROP.to_be_bytes());
            let all = [
                vec![family, 0, 0, 0],
                name(NFTA_CHAIN_TABLE, "filter"),
                name(NFTA_CHAIN_NAME, "FORWARD"),
                attribute(NFTA_CHAIN_HOOK, &hook),
                policy,
            ];
            chain(&all.concat()).map(|(_, chain)| chain)
        };
        let forward = of(2, FORWARD).unwrap();
        assert_eq!(
            (&*forward.table, &*forward.name),
            ("nft ip filter", "FORWARD")
        );
        assert_eq!(forward.base, Some(Base { drops: true }));
        assert_eq!(of(10, 1).unwrap().base, None);
        assert_eq!(of(7, FORWARD), None, "a bridge's");
    }
}
