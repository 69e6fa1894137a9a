//! The parts of requests to nf_tables (`include/uapi/linux/netfilter/nf_tables.h`): messages about tables of the family
//! `inet`, rules, expressions, and attributes.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::{
    netlink::{Netlink, attribute, is_without_netfilter, nested, string},
    nf_conntrack,
};

/// `NFNL_SUBSYS_NFTABLES`.
pub const SUBSYSTEM: u16 = 10;
/// `struct nfgenmsg`: `NFPROTO_INET`, version 0.
pub const INET: [u8; 4] = [1, 0, 0, 0];
/// `NLM_F_CREATE`.
pub const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`.
pub const APPEND: u16 = 0x800;
/// `NF_ACCEPT`.
const ACCEPT: u32 = 1;
/// `NFT_MSG_NEWRULE`.
pub const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
/// `NFT_REG_1`.
pub const REGISTER: u32 = 1;
/// `NFT_CMP_EQ`.
pub const EQUAL: u32 = 0;
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

/// Adds a chain to which rules go.
pub fn new_inner_chain(table: &str, name: &str) -> Request {
    // NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME
    let chain = [INET.to_vec(), string(1, table), string(3, name)];
    (SUBSYSTEM << 8 | 3, CREATE, chain.concat())
}

/// Adds a rule behind those that the chain has.
pub fn new_rule(table: &str, chain: &str, expressions: &[u8], comment: &str) -> Request {
    // The format of nft's comments: type, length, text.
    let length = u8::try_from(comment.len() + 1).expect("our comments are short");
    let comment = [&[0, length][..], comment.as_bytes(), &[0]].concat();
    let rule = [
        INET.to_vec(),
        string(1, table),       // NFTA_RULE_TABLE
        string(2, chain),       // NFTA_RULE_CHAIN
        nested(4, expressions), // NFTA_RULE_EXPRESSIONS
        attribute(7, &comment), // NFTA_RULE_USERDATA
    ];
    (NEW_RULE, CREATE | APPEND, rule.concat())
}

/// The number of a table's rules.
pub fn rules(netlink: &mut Netlink, table: &str) -> io::Result<usize> {
    const GET_RULE: u16 = SUBSYSTEM << 8 | 7;
    let mut count = 0;
    // NFTA_RULE_TABLE is in the place of NFTA_TABLE_NAME.
    netlink.dump(GET_RULE, &about(table), |_| count += 1)?;
    Ok(count)
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

/// Whether there is a table, in the network namespace that this thread is in. A kernel without nf_tables has none.
pub fn is_there(table: &str) -> io::Result<bool> {
    let asked =
        Netlink::open(NETLINK_NETFILTER).and_then(|mut netlink| exists(&mut netlink, table));
    match asked {
        Err(error) if is_without_netfilter(&error) => Ok(false),
        asked => asked,
    }
}

/// Whether there is a table whose rules ask conntrack, and so have it loaded. Without conntrack, this function does not
/// ask the kernel: the question would load nf_tables, which some machines have left out on purpose.
pub fn is_there_with_conntrack(table: &str) -> io::Result<bool> {
    Ok(nf_conntrack::is_loaded() && is_there(table)?)
}

/// Removes a table whose rules ask conntrack. `false`: there is none.
pub fn remove_with_conntrack(table: &str) -> io::Result<bool> {
    if !is_there_with_conntrack(table)? {
        return Ok(false);
    }
    Netlink::open(NETLINK_NETFILTER)?.batch(SUBSYSTEM, &[delete_table(table)])?;
    Ok(true)
}

fn about(table: &str) -> Vec<u8> {
    [&INET[..], &string(1, table)].concat()
}

pub fn expression(name: &str, content: &[u8]) -> Vec<u8> {
    // NFTA_LIST_ELEM of NFTA_EXPR_NAME, NFTA_EXPR_DATA
    nested(1, &[string(1, name), nested(2, content)].concat())
}

/// Loads something of a packet's circumstances (`enum nft_meta_keys`).
pub fn meta(key: u32) -> Vec<u8> {
    // NFTA_META_DREG, NFTA_META_KEY
    expression("meta", &[number(1, REGISTER), number(2, key)].concat())
}

/// Loads something that conntrack says of a packet (`enum nft_ct_keys`).
pub fn conntrack(key: u32) -> Vec<u8> {
    // NFTA_CT_DREG, NFTA_CT_KEY
    expression("ct", &[number(1, REGISTER), number(2, key)].concat())
}

/// Writes the loaded value to a packet's circumstances.
pub fn set_meta(key: u32) -> Vec<u8> {
    // NFTA_META_KEY, NFTA_META_SREG
    expression("meta", &[number(2, key), number(3, REGISTER)].concat())
}

/// Writes the loaded value to conntrack's entry.
pub fn set_conntrack(key: u32) -> Vec<u8> {
    // NFTA_CT_KEY, NFTA_CT_SREG
    expression("ct", &[number(2, key), number(4, REGISTER)].concat())
}

/// Goes on with the rule if the loaded value is ([`EQUAL`]), or is not ([`NOT_EQUAL`]), this.
pub fn compare(how: u32, value: &[u8]) -> Vec<u8> {
    // NFTA_CMP_SREG, _OP, _DATA
    let value = nested(3, &attribute(1, value));
    let compare = [number(1, REGISTER), number(2, how), value].concat();
    expression("cmp", &compare)
}

/// Keeps the loaded bits in `mask`, and then inverts the bits in `flip`. 32-bit numbers are in the machine's byte
/// order.
pub fn bitwise(mask: &[u8], flip: &[u8]) -> Vec<u8> {
    let value = |kind, value: &[u8]| nested(kind, &attribute(1, value));
    let length = u32::try_from(mask.len()).expect("a few bytes");
    // NFTA_BITWISE_SREG, _DREG, _LEN, _MASK, _XOR
    let parts = [
        number(1, REGISTER),
        number(2, REGISTER),
        number(3, length),
        value(4, mask),
        value(5, flip),
    ];
    expression("bitwise", &parts.concat())
}

/// Loads a byte of the transport's header.
pub fn transport_byte(place: u32) -> Vec<u8> {
    const TRANSPORT: u32 = 2; // NFT_PAYLOAD_TRANSPORT_HEADER
    // NFTA_PAYLOAD_DREG, _BASE, _OFFSET, _LEN
    let parts = [
        number(1, REGISTER),
        number(2, TRANSPORT),
        number(3, place),
        number(4, 1),
    ];
    expression("payload", &parts.concat())
}

/// Loads 1 if an IPv6 packet has a header of this kind, and 0 if it has none. A rule does not go on with another packet.
pub fn has_header(kind: u8) -> Vec<u8> {
    const PRESENT: u32 = 1; // NFT_EXTHDR_F_PRESENT
    // NFTA_EXTHDR_DREG, _TYPE, _OFFSET, _LEN, _FLAGS
    let parts = [
        number(1, REGISTER),
        attribute(2, &[kind]),
        number(3, 0),
        number(4, 1),
        number(5, PRESENT),
    ];
    expression("exthdr", &parts.concat())
}

/// Drops the packet.
pub fn drop() -> Vec<u8> {
    const DROP: u32 = 0; // NF_DROP
    decide(&number(1, DROP))
}

/// Accepts the packet in this table.
pub fn accept() -> Vec<u8> {
    decide(&number(1, ACCEPT))
}

/// Goes on in another chain, and does not come back.
pub fn go_to(chain: &str) -> Vec<u8> {
    const GOTO: i32 = -4; // NFT_GOTO
    decide(&[number(1, GOTO.cast_unsigned()), string(2, chain)].concat())
}

/// A verdict: NFTA_VERDICT_CODE, and NFTA_VERDICT_CHAIN where the code is about one.
fn decide(verdict: &[u8]) -> Vec<u8> {
    const VERDICT: u32 = 0; // NFT_REG_VERDICT
    // NFTA_DATA_VERDICT
    let verdict = nested(2, verdict);
    // NFTA_IMMEDIATE_DREG, NFTA_IMMEDIATE_DATA
    let data = [number(1, VERDICT), nested(2, &verdict)].concat();
    expression("immediate", &data)
}

/// Numbers of nf_tables' own attributes are in network order.
pub fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}
