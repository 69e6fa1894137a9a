//! A table of nf_tables that marks what machines and containers inside a workload send on connections of their own. The routing
//! rules of their interfaces ask for the mark: answers on a connection that was forwarded to a machine go on as they do without
//! these rules. Only conntrack can tell the two apart.

use std::{collections::BTreeSet, io};

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::kernel::{
    netlink::Netlink,
    nft_requests::{
        self, ACCEPT, EQUAL, SUBSYSTEM, bitwise, compare, conntrack, decide, delete_table, exists,
        expression, meta, new_chain, new_rule, new_table, number,
    },
};

/// The table's name, in the family `inet`.
pub const TABLE: &str = "dataplane-machines";

const CHAIN: &str = "prerouting";
/// What `nft list table` shows beside the rules.
const COMMENT: &str = "captured by virtualInterfaces: dataplane";
/// `IFNAMSIZ`.
const NAME_SIZE: usize = 16;

/// In the network namespace that this thread is in: has packets by TCP marked with these bits that come in by these interfaces,
/// but for answers, and no others. A table of this name that is there already gives way in the same step.
///
/// # Errors
/// If the kernel refuses, or has no nf_tables or conntrack.
pub fn mark(interfaces: &BTreeSet<&str>, bits: u32) -> io::Result<()> {
    const PREROUTING: u32 = 0; // NF_INET_PRE_ROUTING
    // Behind conntrack and `mangle`, before `nat` (`enum nf_ip_hook_priorities`).
    const PRIORITY: i32 = -140;
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    let mut all = Vec::new();
    if exists(&mut netlink, TABLE)? {
        all.push(delete_table(TABLE));
    }
    all.push(new_table(TABLE));
    all.push(new_chain(TABLE, CHAIN, "filter", PREROUTING, PRIORITY));
    all.push(new_rule(TABLE, CHAIN, &answers_pass(), COMMENT));
    let marked = interfaces.iter().map(|name| marked(name, bits));
    all.extend(marked.map(|rule| new_rule(TABLE, CHAIN, &rule, COMMENT)));
    netlink.batch(SUBSYSTEM, &all)
}

/// Removes the table. `false`: there is none.
///
/// # Errors
/// If the kernel refuses.
pub fn remove() -> io::Result<bool> {
    if !is_there()? {
        return Ok(false);
    }
    Netlink::open(NETLINK_NETFILTER)?.batch(SUBSYSTEM, &[delete_table(TABLE)])?;
    Ok(true)
}

/// Whether the table is there.
///
/// # Errors
/// If the kernel does not answer.
pub fn is_there() -> io::Result<bool> {
    nft_requests::is_there_with_conntrack(TABLE)
}

/// `ct direction reply accept`
fn answers_pass() -> Vec<u8> {
    const DIRECTION: u32 = 1; // NFT_CT_DIRECTION
    const REPLY: u8 = 1; // IP_CT_DIR_REPLY
    [
        conntrack(DIRECTION),
        compare(EQUAL, &[REPLY]),
        decide(ACCEPT),
    ]
    .concat()
}

/// `iifname INTERFACE meta l4proto tcp meta mark set meta mark or BITS`
fn marked(interface: &str, bits: u32) -> Vec<u8> {
    const MARK: u32 = 3; // NFT_META_MARK
    const INCOMING: u32 = 6; // NFT_META_IIFNAME
    const PROTOCOL: u32 = 16; // NFT_META_L4PROTO
    const TCP: u8 = 6;
    let mut name = [0; NAME_SIZE];
    name[..interface.len()].copy_from_slice(interface.as_bytes());
    // NFTA_META_KEY, NFTA_META_SREG
    let set = [number(2, MARK), number(3, nft_requests::REGISTER)].concat();
    [
        meta(INCOMING),
        compare(EQUAL, &name),
        meta(PROTOCOL),
        compare(EQUAL, &[TCP]),
        meta(MARK),
        bitwise(!bits, bits),
        expression("meta", &set),
    ]
    .concat()
}
