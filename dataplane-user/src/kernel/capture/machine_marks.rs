//! A table of nf_tables that marks what a machine inside a workload sends on connections of its own. The routing rules of its
//! interfaces ask for the mark: answers on connections that were forwarded to the machine go on as they do without these rules.
//!
//! Only conntrack can tell an answer, and it believes a packet's addresses: a machine that sends a packet in the name of somebody
//! else can make its own connection look like the answer to that packet. So conntrack keeps a mark, too, of every connection of
//! which a packet came by such an interface in the direction of a question. The answers to those are marked like questions.
//!
//! Rules that ask for the absence of a mark would be closed without the table. But IPv4 looks up the way back of each packet that
//! is forwarded to the machine, without a mark and as if it came by the machine's interface (`fib_validate_source`,
//! `net/ipv4/fib_frontend.c`). Such a rule makes that way a local one, so the kernel drops the packet.

use std::{collections::BTreeMap, io};

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::kernel::{
    netlink::Netlink,
    nft_requests::{
        self, EQUAL, NOT_EQUAL, Request, SUBSYSTEM, accept, bitwise, compare, conntrack,
        delete_table, drop, exists, go_to, meta, new_chain, new_inner_chain, new_rule, new_table,
        rules, set_conntrack, set_meta,
    },
};

/// The table's name, in the family `inet`.
pub const TABLE: &str = "dataplane-machines";

/// The chain at the hook.
const FIRST: &str = "prerouting";
/// The chain of the interfaces' packets.
const MACHINES: &str = "machines";
/// What `nft list table` shows beside the rules.
const COMMENT: &str = "captured by virtualInterfaces: dataplane";
/// `IFNAMSIZ`.
const NAME_SIZE: usize = 16;

/// `NFT_META_MARK`, `NFT_META_IIF`, `NFT_META_IIFNAME`, `NFT_META_L4PROTO`.
const MARK: u32 = 3;
const INDEX: u32 = 4;
const NAME: u32 = 6;
const PROTOCOL: u32 = 16;
/// `NFT_CT_DIRECTION`, `NFT_CT_MARK`.
const DIRECTION: u32 = 1;
const CONNECTIONS_MARK: u32 = 3;
/// `IP_CT_DIR_ORIGINAL`, `IP_CT_DIR_REPLY`.
const ORIGINAL: u8 = 0;
const REPLY: u8 = 1;
const TCP: u8 = 6;

/// Interfaces by name, with the number by which the programs know each. `None`: they know none by this name, so TCP from it is
/// dropped.
pub type Interfaces = BTreeMap<String, Option<u32>>;

/// In the network namespace that this thread is in: makes the table for these interfaces, with this bit. `is_new`: it had
/// others until now. A table that is there and as large as it should be stays otherwise.
///
/// # Errors
/// If the kernel refuses, or has no nf_tables or conntrack.
pub fn write(interfaces: &Interfaces, bit: u32, is_new: bool) -> io::Result<()> {
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    let wanted = table(interfaces, bit);
    let is_there = exists(&mut netlink, TABLE)?;
    let ours = wanted
        .iter()
        .filter(|(kind, ..)| *kind == nft_requests::NEW_RULE);
    if is_there && !is_new && rules(&mut netlink, TABLE)? == ours.count() {
        return Ok(());
    }
    // In one step.
    let before = is_there.then(|| delete_table(TABLE));
    let all: Vec<Request> = before.into_iter().chain(wanted).collect();
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

fn table(interfaces: &Interfaces, bit: u32) -> Vec<Request> {
    const PREROUTING: u32 = 0; // NF_INET_PRE_ROUTING
    // Behind conntrack and `mangle`, before `nat` (`enum nf_ip_hook_priorities`).
    const PRIORITY: i32 = -140;
    let mut all = vec![
        new_table(TABLE),
        new_chain(TABLE, FIRST, "filter", PREROUTING, PRIORITY),
        new_inner_chain(TABLE, MACHINES),
    ];
    let mut rule = |chain, parts: &[Vec<u8>]| {
        all.push(new_rule(TABLE, chain, &parts.concat(), COMMENT));
    };
    // Behind whatever number of extension headers: a routing rule looks no further than behind fifteen.
    let is_tcp = [meta(PROTOCOL), compare(EQUAL, &[TCP])].concat();
    for (name, index) in interfaces {
        let by_name = [meta(NAME), compare(EQUAL, &padded(name))].concat();
        // Another interface with the name: the programs would take what comes by it for the workload's own.
        let is_other =
            index.map(|index| [meta(INDEX), compare(NOT_EQUAL, &index.to_ne_bytes())].concat());
        let is_other = is_other.unwrap_or_default();
        rule(FIRST, &[by_name.clone(), is_other, is_tcp.clone(), drop()]);
        rule(FIRST, &[by_name, is_tcp.clone(), go_to(MACHINES)]);
    }
    let direction = |which: u8| [conntrack(DIRECTION), compare(EQUAL, &[which])].concat();
    let with_bit = bitwise(!bit, bit);
    let is_the_machines = [
        conntrack(CONNECTIONS_MARK),
        with_bit.clone(),
        set_conntrack(CONNECTIONS_MARK),
    ];
    rule(MACHINES, &[direction(ORIGINAL), is_the_machines.concat()]);
    let is_another = [
        conntrack(CONNECTIONS_MARK),
        bitwise(bit, 0),
        compare(EQUAL, &0u32.to_ne_bytes()),
    ];
    rule(MACHINES, &[direction(REPLY), is_another.concat(), accept()]);
    rule(MACHINES, &[meta(MARK), with_bit, set_meta(MARK)]);
    all
}

/// A name of an interface, as nf_tables compares it.
fn padded(name: &str) -> [u8; NAME_SIZE] {
    let mut padded = [0; NAME_SIZE];
    // The kernel has no longer names, and none of this length.
    let length = name.len().min(NAME_SIZE - 1);
    padded[..length].copy_from_slice(&name.as_bytes()[..length]);
    padded
}
