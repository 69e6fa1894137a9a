//! The parts of requests to nf_tables (`include/uapi/linux/netfilter/nf_tables.h`): messages about tables of the family
//! `inet`, rules, expressions, and attributes.

use std::io;

use super::netlink::{Netlink, attribute};

/// `NFNL_SUBSYS_NFTABLES`.
pub const SUBSYSTEM: u16 = 10;
/// `struct nfgenmsg`: `NFPROTO_INET`, version 0.
pub const INET: [u8; 4] = [1, 0, 0, 0];
/// `NLM_F_CREATE`.
pub const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`.
pub const APPEND: u16 = 0x800;
/// `NFT_REG_1`.
pub const REGISTER: u32 = 1;
/// `NFT_CMP_NEQ`.
pub const NOT_EQUAL: u32 = 1;

/// A request of a batch: its kind, its flags and its content.
pub type Request = (u16, u16, Vec<u8>);

/// Adds a table.
pub fn new_table(table: &str) -> Request {
    (SUBSYSTEM << 8, CREATE, about(table))
}

/// Removes a table with everything in it.
pub fn delete_table(table: &str) -> Request {
    (SUBSYSTEM << 8 | 2, 0, about(table))
}

/// Adds a chain at a hook, with the policy accept.
pub fn new_chain(table: &str, name: &str, kind: &str, hook: u32, priority: i32) -> Request {
    const ACCEPT: u32 = 1; // NF_ACCEPT
    // NFTA_HOOK_HOOKNUM, NFTA_HOOK_PRIORITY
    let hook = [number(1, hook), number(2, priority.cast_unsigned())].concat();
    let chain = [
        INET.to_vec(),
        string(1, table),  // NFTA_CHAIN_TABLE
        string(3, name),   // NFTA_CHAIN_NAME
        nested(4, &hook),  // NFTA_CHAIN_HOOK
        number(5, ACCEPT), // NFTA_CHAIN_POLICY
        string(7, kind),   // NFTA_CHAIN_TYPE
    ];
    (SUBSYSTEM << 8 | 3, CREATE, chain.concat())
}

/// Adds a rule behind those that the chain has.
pub fn new_rule(table: &str, chain: &str, expressions: &[u8], comment: &str) -> Request {
    // As nft keeps a comment: type, length, text.
    let length = u8::try_from(comment.len() + 1).expect("our comments are short");
    let comment = [&[0, length][..], comment.as_bytes(), &[0]].concat();
    let rule = [
        INET.to_vec(),
        string(1, table),       // NFTA_RULE_TABLE
        string(2, chain),       // NFTA_RULE_CHAIN
        nested(4, expressions), // NFTA_RULE_EXPRESSIONS
        attribute(7, &comment), // NFTA_RULE_USERDATA
    ];
    (SUBSYSTEM << 8 | 6, CREATE | APPEND, rule.concat())
}

/// Whether there is a table.
pub fn exists(netlink: &mut Netlink, table: &str) -> io::Result<bool> {
    const GET_TABLE: u16 = SUBSYSTEM << 8 | 1;
    match netlink.ask(GET_TABLE, &about(table)) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn about(table: &str) -> Vec<u8> {
    [&INET[..], &string(1, table)].concat()
}

pub fn expression(name: &str, content: &[u8]) -> Vec<u8> {
    // NFTA_LIST_ELEM of NFTA_EXPR_NAME, NFTA_EXPR_DATA
    nested(1, &[string(1, name), nested(2, content)].concat())
}

pub fn nested(kind: u16, content: &[u8]) -> Vec<u8> {
    const NESTED: u16 = 0x8000; // NLA_F_NESTED
    attribute(NESTED | kind, content)
}

pub fn string(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

/// Numbers of nf_tables' own attributes are in network order.
pub fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}
