//! A table of nf_tables that lets no packet pass while a mesh's rules are changed: no connection leaves past the proxy, and
//! none arrives past it.
//!
//! The table's rules drop packets only while its set has an element, and the kernel itself removes an element when its time is
//! over. So a program that dies leaves nothing closed: a table whose set is empty lets everything pass. Packets of the
//! loopback interface always pass.
//!
//! Packets are dropped and not refused, so TCP sends again: a connection attempt is delayed, and none fails. A process that
//! sends a datagram gets `EPERM`, as from every rule at the output hook that drops (`nf_hook_slow` in `net/netfilter/core.c`).

use std::{io, time::Duration};

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::{
    netfilter::requests::{
        self, CREATE, INET, NOT_EQUAL, REGISTER, Request, SUBSYSTEM, compare, delete_table, drop,
        exists, expression, meta, new_chain, new_rule, new_table, number,
    },
    netlink::{Netlink, attribute, nested, string},
};

/// The table's name, in the family `inet`.
pub const TABLE: &str = "dataplane-guard";

/// The set whose elements close the table, of families of IP (`nf_proto`).
const SET: &str = "up";
/// The comment of the rules in `nft list table`.
const COMMENT: &str = "no packet passes while rules are changed: dataplane";

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const FAMILIES: [u8; 2] = [2, 10];
const NEW_SET: u16 = SUBSYSTEM << 8 | 9;
const NEW_ELEMENTS: u16 = SUBSYSTEM << 8 | 0x0c;
const DELETE_ELEMENTS: u16 = SUBSYSTEM << 8 | 0x0e;

/// Drops all packets in the network namespace that this thread is in, for at most this time. The same transaction
/// replaces an existing table of this name with any content: the root user of a pod may have made it.
///
/// # Errors
/// If the kernel refuses, or has no nf_tables.
pub fn up(time: Duration) -> io::Result<()> {
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    let mut all = Vec::new();
    if exists(&mut netlink, TABLE)? {
        all.push(delete_table(TABLE));
    }
    all.extend(table());
    all.push((NEW_ELEMENTS, CREATE, elements(time)));
    netlink.batch(SUBSYSTEM, &all)
}

/// Gives a guard that is up more time: from now on, `time`. No packet passes in between.
///
/// # Errors
/// If there is no table ([`io::ErrorKind::NotFound`]), or the kernel refuses.
pub fn renew(time: Duration) -> io::Result<()> {
    set(&mut Netlink::open(NETLINK_NETFILTER)?, time)
}

/// Removes the table. `false`: there is none.
///
/// # Errors
/// If the kernel refuses.
pub fn down() -> io::Result<bool> {
    if !is_there()? {
        return Ok(false);
    }
    Netlink::open(NETLINK_NETFILTER)?.batch(SUBSYSTEM, &[delete_table(TABLE)])?;
    Ok(true)
}

/// Whether the table exists, also if its time is over.
///
/// # Errors
/// If the kernel does not answer.
pub fn is_there() -> io::Result<bool> {
    requests::is_there(TABLE)
}

/// Replaces the set's elements, in one transaction. Kernels before 6.13 do not change the timeout of an existing
/// element.
fn set(netlink: &mut Netlink, time: Duration) -> io::Result<()> {
    // NFTA_SET_ELEM_LIST_TABLE, NFTA_SET_ELEM_LIST_SET: all elements go.
    let all = [&INET[..], &string(1, TABLE), &string(2, SET)].concat();
    netlink.batch(
        SUBSYSTEM,
        &[
            (DELETE_ELEMENTS, 0, all),
            (NEW_ELEMENTS, CREATE, elements(time)),
        ],
    )
}

/// The table with an empty set.
fn table() -> Vec<Request> {
    const PREROUTING: u32 = 0; // NF_INET_PRE_ROUTING
    const OUTPUT: u32 = 3; // NF_INET_LOCAL_OUT
    const INCOMING: u32 = 4; // NFT_META_IIF
    const OUTGOING: u32 = 5; // NFT_META_OIF
    // Before conntrack, the table `raw`, and chains of other owners.
    const FIRST: i32 = i32::MIN; // NF_IP_PRI_FIRST
    let chain = |name, hook| new_chain(TABLE, name, "filter", hook, FIRST);
    let rule = |chain, interface| {
        let expressions = [guarded(interface), drop()].concat();
        new_rule(TABLE, chain, &expressions, COMMENT)
    };
    vec![
        new_table(TABLE),
        (NEW_SET, CREATE, time_set()),
        chain("prerouting", PREROUTING),
        chain("output", OUTPUT),
        rule("prerouting", INCOMING),
        rule("output", OUTGOING),
    ]
}

/// `type nf_proto; flags timeout`
fn time_set() -> Vec<u8> {
    const TIMEOUT: u32 = 0x10; // NFT_SET_TIMEOUT
    const NF_PROTO: u32 = 2; // TYPE_NFPROTO, a number of nft's own
    [
        INET.to_vec(),
        string(1, TABLE),    // NFTA_SET_TABLE
        string(2, SET),      // NFTA_SET_NAME
        number(3, TIMEOUT),  // NFTA_SET_FLAGS
        number(4, NF_PROTO), // NFTA_SET_KEY_TYPE
        number(5, 1),        // NFTA_SET_KEY_LEN
        number(10, 1),       // NFTA_SET_ID
    ]
    .concat()
}

/// `{ ipv4 timeout TIME, ipv6 timeout TIME }`
fn elements(time: Duration) -> Vec<u8> {
    // The kernel takes a time of 0 for "for ever".
    let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    let element = |family: u8| {
        // NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_TIMEOUT
        let key = nested(1, &attribute(1, &[family]));
        let time = attribute(4, &milliseconds.to_be_bytes());
        nested(1, &[key, time].concat())
    };
    let all = FAMILIES.map(element).concat();
    // NFTA_SET_ELEM_LIST_TABLE, _SET, _ELEMENTS
    [
        INET.to_vec(),
        string(1, TABLE),
        string(2, SET),
        nested(3, &all),
    ]
    .concat()
}

/// `iif != "lo" meta nfproto @up`. `interface`: the incoming or the outgoing interface of the packet.
fn guarded(interface: u32) -> Vec<u8> {
    const LOOPBACK: u32 = 1; // LOOPBACK_IFINDEX
    const FAMILY: u32 = 15; // NFT_META_NFPROTO
    // NFTA_LOOKUP_SET, NFTA_LOOKUP_SREG
    let lookup = [string(1, SET), number(2, REGISTER)].concat();
    [
        meta(interface),
        compare(NOT_EQUAL, &LOOPBACK.to_ne_bytes()),
        meta(FAMILY),
        expression("lookup", &lookup),
    ]
    .concat()
}
