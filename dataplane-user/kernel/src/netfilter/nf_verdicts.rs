//! Verdicts of the rules of nf_tables, and of their maps.

use super::{
    Rule, Verdict,
    nf_message::{HEADER, number, text},
};
use crate::netlink::{attributes, content};

pub const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NFTA_LOOKUP_SET: u16 = 1;
const NFTA_LOOKUP_DREG: u16 = 3;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_SET_ELEM_DATA: u16 = 2;
const NFTA_TARGET_NAME: u16 = 1;

/// `NF_DROP` and `NF_ACCEPT`; and nf_tables' own verdicts, which are negative.
pub const DROP: u32 = 0;
const ACCEPT: u32 = 1;
const JUMP: u32 = (-3_i32).cast_unsigned();
const GOTO: u32 = (-4_i32).cast_unsigned();
/// `NFT_REG_VERDICT`.
const VERDICT: u32 = 0;

/// Reads the verdicts of a map's elements.
pub fn elements(message: &[u8]) -> Vec<Verdict> {
    let rest = message.get(HEADER..).unwrap_or_default();
    let list = content(rest, NFTA_SET_ELEM_LIST_ELEMENTS).unwrap_or_default();
    let does = |element| decided(content(element, NFTA_SET_ELEM_DATA)?);
    attributes(list)
        .filter_map(|(_, element)| does(element))
        .collect()
}

/// Reads a rule. Returns its chain, its verdicts, and the maps that decide for it.
pub fn rule(message: &[u8]) -> Option<(String, Rule, Vec<String>)> {
    let rest = message.get(HEADER..)?;
    let chain = text(content(rest, NFTA_RULE_CHAIN)?);
    let expressions = content(rest, NFTA_RULE_EXPRESSIONS).unwrap_or_default();
    let (mut does, mut maps) = (Vec::new(), Vec::new());
    let (mut counts, mut decides) = (false, false);
    for (_, expression) in attributes(expressions) {
        let name = content(expression, NFTA_EXPR_NAME).map(text);
        let data = content(expression, NFTA_EXPR_DATA).unwrap_or_default();
        does.extend(name.as_ref().and_then(|name| verdict(name, data)));
        counts |= matches!(name.as_deref(), Some("counter" | "quota"));
        decides |= name.as_deref() == Some("immediate");
        maps.extend(name.and_then(|name| map(&name, data)));
    }
    if counts && !decides && does.is_empty() && maps.is_empty() {
        does.push(Verdict::Count);
    }
    Some((chain, Rule { does }, maps))
}

/// The map of verdicts that an expression asks.
fn map(name: &str, data: &[u8]) -> Option<String> {
    let to_verdict = number(content(data, NFTA_LOOKUP_DREG)?) == Some(VERDICT);
    (name == "lookup" && to_verdict).then(|| content(data, NFTA_LOOKUP_SET).map(text))?
}

/// Parses a verdict. Returns `None` if the packet continues.
fn decided(data: &[u8]) -> Option<Verdict> {
    let verdict = content(data, NFTA_DATA_VERDICT)?;
    let code = number(content(verdict, NFTA_VERDICT_CODE)?)?;
    match code {
        JUMP | GOTO => content(verdict, NFTA_VERDICT_CHAIN)
            .map(text)
            .map(Verdict::Jump),
        // `NF_DROP` has an error number in its upper half. `NF_QUEUE` and others leave the decision to another program.
        ACCEPT => None,
        code if code >> 31 != 0 => None,
        _ => Some(Verdict::Refuse),
    }
}

/// The expressions that only look at a packet, or count it.
const LOOKS: [&str; 19] = [
    "bitwise",
    "byteorder",
    "cmp",
    "connlimit",
    "counter",
    "fib",
    "hash",
    "inner",
    "last",
    "limit",
    "lookup",
    "match",
    "numgen",
    "osf",
    "quota",
    "range",
    "rt",
    "socket",
    "xfrm",
];
/// `NFTA_META_DREG`, `NFTA_CT_DREG`, `NFTA_PAYLOAD_DREG` and `NFTA_EXTHDR_DREG`.
const DREG: u16 = 1;

/// Parses the verdict of an expression. Returns `None` if it has none, or if the packet continues.
fn verdict(name: &str, data: &[u8]) -> Option<Verdict> {
    match name {
        "immediate" => decided(content(data, NFTA_IMMEDIATE_DATA)?),
        "reject" | "queue" | "synproxy" => Some(Verdict::Refuse),
        // A target of iptables, which iptables-nft has written.
        "target" => {
            let target = text(content(data, NFTA_TARGET_NAME)?);
            let refuses = matches!(&*target, "REJECT" | "DROP" | "NFQUEUE" | "QUEUE" | "TARPIT");
            Some(if refuses {
                Verdict::Refuse
            } else {
                Verdict::Act
            })
        }
        // They read into a register, or they set something of the packet.
        "meta" | "ct" | "payload" | "exthdr" => {
            content(data, DREG).is_none().then_some(Verdict::Act)
        }
        _ => (!LOOKS.contains(&name)).then_some(Verdict::Act),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{attribute, string};

    fn immediate(code: u32, chain: &str) -> Vec<u8> {
        let mut verdict = attribute(NFTA_VERDICT_CODE, &code.to_be_bytes());
        if !chain.is_empty() {
            verdict.extend(string(NFTA_VERDICT_CHAIN, chain));
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
        assert_eq!(target("MARK\0"), Some(Verdict::Act));
        let sets = attribute(3, &1_u32.to_be_bytes());
        let reads = attribute(DREG, &1_u32.to_be_bytes());
        for name in ["meta", "ct", "payload", "exthdr"] {
            assert_eq!(verdict(name, &sets), Some(Verdict::Act), "{name}");
            assert_eq!(verdict(name, &reads), None, "{name}");
        }
        assert_eq!(verdict("notrack", &[]), Some(Verdict::Act));
        assert_eq!(verdict("counter", &[]), None);
        let lookup = |register: u32| {
            let data = [
                attribute(NFTA_LOOKUP_SET, b"__map0\0"),
                attribute(NFTA_LOOKUP_DREG, &register.to_be_bytes()),
            ];
            map("lookup", &data.concat())
        };
        assert_eq!((lookup(0), lookup(1)), (Some("__map0".to_owned()), None));
        let element = |code| {
            let data = content(&immediate(code, ""), NFTA_IMMEDIATE_DATA)
                .unwrap()
                .to_vec();
            attribute(1, &attribute(NFTA_SET_ELEM_DATA, &data))
        };
        let list = [element(ACCEPT), element(DROP)].concat();
        let message = [
            vec![2, 0, 0, 0],
            attribute(NFTA_SET_ELEM_LIST_ELEMENTS, &list),
        ]
        .concat();
        assert_eq!(elements(&message), [Verdict::Refuse]);
        assert_eq!(verdict("immediate", &[]), None);
    }
}
