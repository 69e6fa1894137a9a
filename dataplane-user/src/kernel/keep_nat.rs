//! A table of nf_tables that keeps the kernel's own translation going while other people's rules are
//! removed.
//!
//! The kernel translates the packets of existing connections only while some base chain of type
//! `nat` exists, and tracks connections only while some rule asks for it (`nf_nat_unregister_fn`,
//! `nf_ct_netns_put`). Without a chain, connections that were translated end. A new connection whose
//! reply tuple belongs to a translated one is dropped (`insert_failed` in conntrack's statistics),
//! where the chain would have the kernel choose another source port.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    netlink::{Netlink, attribute},
    nf_conntrack,
};

/// The table's name, in the family `inet`.
pub const TABLE: &str = "dataplane-keep-nat";

const CHAIN: &str = "postrouting";
/// What `nft list table` shows beside the rule.
const COMMENT: &str = "keeps conntrack and NAT on: dataplane keep-nat";

/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u16 = 10;
/// `struct nfgenmsg`: `NFPROTO_INET`, version 0.
const INET: [u8; 4] = [1, 0, 0, 0];

/// Adds the table to the network namespace that this thread is in. `false`: it is there already.
///
/// # Errors
/// If the kernel refuses, or has no nf_tables.
pub fn add() -> io::Result<bool> {
    const NEW_TABLE: u16 = SUBSYSTEM << 8;
    const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
    const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
    const CREATE: u16 = 0x400; // NLM_F_CREATE
    const APPEND: u16 = 0x800; // NLM_F_APPEND
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    if exists(&mut netlink)? {
        return Ok(false);
    }
    netlink.batch(
        SUBSYSTEM,
        &[
            (NEW_TABLE, CREATE, [&INET[..], &string(1, TABLE)].concat()),
            (NEW_CHAIN, CREATE, [&INET[..], &chain()].concat()),
            (NEW_RULE, CREATE | APPEND, [&INET[..], &rule()].concat()),
        ],
    )?;
    Ok(true)
}

/// Removes the table. `false`: there is none.
///
/// # Errors
/// If the kernel refuses.
pub fn remove() -> io::Result<bool> {
    const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
    if !is_there()? {
        return Ok(false);
    }
    let table = [&INET[..], &string(1, TABLE)].concat();
    Netlink::open(NETLINK_NETFILTER)?.batch(SUBSYSTEM, &[(DELETE_TABLE, 0, table)])?;
    Ok(true)
}

/// Whether the table is there.
///
/// # Errors
/// If the kernel does not answer.
pub fn is_there() -> io::Result<bool> {
    // The table's rule has conntrack loaded. To ask would load nf_tables, which some machines have
    // left out on purpose.
    if !nf_conntrack::is_loaded() {
        return Ok(false);
    }
    exists(&mut Netlink::open(NETLINK_NETFILTER)?)
}

fn exists(netlink: &mut Netlink) -> io::Result<bool> {
    const GET_TABLE: u16 = SUBSYSTEM << 8 | 1;
    let table = [&INET[..], &string(1, TABLE)].concat();
    match netlink.ask(GET_TABLE, &table) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// `type nat hook postrouting priority srcnat; policy accept`
fn chain() -> Vec<u8> {
    const POSTROUTING: u32 = 4; // NF_INET_POST_ROUTING
    const SRCNAT: u32 = 100; // NF_IP_PRI_NAT_SRC
    const ACCEPT: u32 = 1; // NF_ACCEPT
    // NFTA_HOOK_HOOKNUM, NFTA_HOOK_PRIORITY
    let hook = [number(1, POSTROUTING), number(2, SRCNAT)].concat();
    [
        string(1, TABLE),  // NFTA_CHAIN_TABLE
        string(3, CHAIN),  // NFTA_CHAIN_NAME
        nested(4, &hook),  // NFTA_CHAIN_HOOK
        number(5, ACCEPT), // NFTA_CHAIN_POLICY
        string(7, "nat"),  // NFTA_CHAIN_TYPE
    ]
    .concat()
}

/// `ct state new counter`: any question to conntrack has the kernel track connections.
fn rule() -> Vec<u8> {
    const REGISTER: u32 = 1; // NFT_REG_1
    const STATE: u32 = 0; // NFT_CT_STATE
    const NOT_EQUAL: u32 = 1; // NFT_CMP_NEQ
    /// `NF_CT_STATE_BIT(IP_CT_NEW)`, which nf_tables compares as the machine's number.
    const NEW: u32 = 1 << 3;
    let value = |kind, value: u32| nested(kind, &attribute(1, &value.to_ne_bytes()));
    // NFTA_CT_DREG, NFTA_CT_KEY
    let load = [number(1, REGISTER), number(2, STATE)].concat();
    // NFTA_BITWISE_SREG, _DREG, _LEN, _MASK, _XOR
    let mask = [
        number(1, REGISTER),
        number(2, REGISTER),
        number(3, 4),
        value(4, NEW),
        value(5, 0),
    ];
    // NFTA_CMP_SREG, _OP, _DATA
    let compare = [number(1, REGISTER), number(2, NOT_EQUAL), value(3, 0)];
    let expressions = [
        expression("ct", &load),
        expression("bitwise", &mask.concat()),
        expression("cmp", &compare.concat()),
        expression("counter", &[]),
    ];
    // As nft keeps a comment: type, length, text.
    let length = u8::try_from(COMMENT.len() + 1).expect("the comment is short");
    let comment = [&[0, length][..], COMMENT.as_bytes(), &[0]].concat();
    [
        string(1, TABLE),                 // NFTA_RULE_TABLE
        string(2, CHAIN),                 // NFTA_RULE_CHAIN
        nested(4, &expressions.concat()), // NFTA_RULE_EXPRESSIONS
        attribute(7, &comment),           // NFTA_RULE_USERDATA
    ]
    .concat()
}

fn expression(name: &str, content: &[u8]) -> Vec<u8> {
    // NFTA_LIST_ELEM of NFTA_EXPR_NAME, NFTA_EXPR_DATA
    nested(1, &[string(1, name), nested(2, content)].concat())
}

fn nested(kind: u16, content: &[u8]) -> Vec<u8> {
    const NESTED: u16 = 0x8000; // NLA_F_NESTED
    attribute(NESTED | kind, content)
}

fn string(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

/// Numbers of nf_tables' own attributes are in network order.
fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}
