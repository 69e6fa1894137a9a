//! A table of nf_tables that keeps the kernel's own translation alive while the NAT rules of other programs are
//! removed.
//!
//! The kernel translates the packets of existing connections only while a base chain of type `nat` exists, and tracks
//! connections only while a rule needs it (`nf_nat_unregister_fn`, `nf_ct_netns_put`). Without such a chain, translated
//! connections break. A new connection whose reply tuple belongs to a translated connection is dropped (`insert_failed`
//! in conntrack's statistics). With the chain, the kernel chooses another source port instead.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::{
    netfilter::requests::{
        self, NOT_EQUAL, SUBSYSTEM, bitwise, compare, conntrack, exists, expression, new_chain,
        new_rule, new_table,
    },
    netlink::Netlink,
};

/// The table's name, in the family `inet`.
pub const TABLE: &str = "dataplane-keep-nat";

const CHAIN: &str = "postrouting";
/// The comment that `nft list table` shows beside the rule.
const COMMENT: &str = "keeps conntrack and NAT on: dataplane keep-nat";

/// Adds the table to the network namespace that this thread is in. Returns `false` if it already exists.
///
/// # Errors
/// If the kernel refuses, or has no nf_tables.
pub fn add() -> io::Result<bool> {
    const POSTROUTING: u32 = 4; // NF_INET_POST_ROUTING
    const SRCNAT: i32 = 100; // NF_IP_PRI_NAT_SRC
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    if exists(&mut netlink, TABLE)? {
        return Ok(false);
    }
    let chain = new_chain(TABLE, CHAIN, "nat", POSTROUTING, SRCNAT);
    let rule = new_rule(TABLE, CHAIN, &asks_conntrack(), COMMENT);
    netlink.batch(SUBSYSTEM, &[new_table(TABLE), chain, rule])?;
    Ok(true)
}

/// Removes the table. `false`: there is none.
///
/// # Errors
/// If the kernel refuses.
pub fn remove() -> io::Result<bool> {
    requests::remove_with_conntrack(TABLE)
}

/// Whether the table exists.
///
/// # Errors
/// If the kernel does not answer.
pub fn is_there() -> io::Result<bool> {
    requests::is_there_with_conntrack(TABLE)
}

/// `ct state new counter`: any question to conntrack has the kernel track connections.
fn asks_conntrack() -> Vec<u8> {
    const STATE: u32 = 0; // NFT_CT_STATE
    /// `NF_CT_STATE_BIT(IP_CT_NEW)`, which nf_tables compares as the machine's number.
    const NEW: u32 = 1 << 3;
    let expressions = [
        conntrack(STATE),
        bitwise(&NEW.to_ne_bytes(), &[0; 4]),
        compare(NOT_EQUAL, &0u32.to_ne_bytes()),
        expression("counter", &[]),
    ];
    expressions.concat()
}
