//! An nf_tables table that marks the TCP packets that a machine inside a workload sends on its own connections. The routing
//! rules of the machine's interface match the mark. Answers on connections that the pod forwarded to the machine get no mark, so
//! the pod routes them as before.
//!
//! Only conntrack can tell an answer, and conntrack trusts the addresses of a packet. A machine can send a packet with another
//! host's source address, and conntrack then takes the machine's own connection for the answer. Conntrack also takes a packet of a
//! forgotten connection for the first packet of a new one. With `closed`, a packet is therefore an answer only if the SYN of its
//! connection came by another interface and was forwarded. The table records this in conntrack's mark.
//!
//! A rule that matches the absence of the mark would fail closed without the table. IPv4, however, looks up the reverse
//! path for each packet that goes to the machine: a packet by the machine's interface, usually without a mark
//! (`fib_validate_source`, `net/ipv4/fib_frontend.c`). Such a rule would make this path local, and the kernel would
//! drop the packet.

use std::{collections::BTreeMap, io};

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::{
    netfilter::requests::{
        self, EQUAL, NOT_EQUAL, Request, SUBSYSTEM, accept, bitwise, compare, conntrack,
        delete_table, drop, exists, go_to, has_header, meta, new_chain, new_inner_chain, new_rule,
        new_table, rules, set_conntrack, set_meta, transport_byte,
    },
    netlink::Netlink,
};

/// The table's name, in the family `inet`.
pub const TABLE: &str = "dataplane-machines";

/// The chains at the hooks prerouting and forward.
const FIRST: &str = "prerouting";
const FORWARD: &str = "forward";
/// The chain of the interfaces' packets.
const MACHINES: &str = "machines";
/// The comment of the rules in `nft list table`.
const COMMENT: &str = "captured by virtualInterfaces: dataplane";
/// `IFNAMSIZ`.
const NAME_SIZE: usize = 16;

/// `NFT_META_MARK`, `NFT_META_IIF`, `NFT_META_IIFNAME`, `NFT_META_L4PROTO`.
const MARK: u32 = 3;
const INDEX: u32 = 4;
const NAME: u32 = 6;
const PROTOCOL: u32 = 16;
/// `NFT_CT_STATE`, `NFT_CT_DIRECTION`, `NFT_CT_MARK`, `NFT_CT_PROTOCOL`.
const STATE: u32 = 0;
const DIRECTION: u32 = 1;
const CONNECTIONS_MARK: u32 = 3;
const OF_PROTOCOL: u32 = 10;
/// `NF_CT_STATE_BIT(IP_CT_RELATED)`.
const RELATED: u32 = 1 << 2;
/// `IP_CT_DIR_ORIGINAL`, `IP_CT_DIR_REPLY`.
const ORIGINAL: u8 = 0;
const REPLY: u8 = 1;
const TCP: u8 = 6;
/// The offset of the flags in TCP's header, and four flags.
const FLAGS: u32 = 13;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// The content of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// The interfaces by name, with the index in the programs' tables. `None`: the tables have no interface of this name, so the
    /// kernel drops connections that begin there.
    pub interfaces: BTreeMap<String, Option<u32>>,
    /// The bit of the mark that the routing rules match.
    pub bit: u32,
    /// Whether the machine's connections must not bypass the proxy, even if the machine forges packets. If false, every
    /// packet that conntrack calls a reply is an answer.
    pub closed: bool,
}

/// Writes the table in the calling thread's network namespace. `is_new`: the content differs from what this agent wrote last.
/// If not, a table with the right number of rules stays as it is.
///
/// # Errors
/// If the kernel refuses, or has no nf_tables or conntrack.
pub fn write(marks: &Marks, is_new: bool) -> io::Result<()> {
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    let wanted = table(marks);
    let is_there = exists(&mut netlink, TABLE)?;
    let ours = wanted
        .iter()
        .filter(|(kind, ..)| *kind == requests::NEW_RULE)
        .count();
    // The kernel cannot list the table whole if a process changes a table meanwhile. Then the agent writes it again.
    if is_there && !is_new && rules(&mut netlink, TABLE).is_ok_and(|there| there == ours) {
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
    requests::remove_with_conntrack(TABLE)
}

/// Whether the table exists.
///
/// # Errors
/// If the kernel does not answer.
pub fn is_there() -> io::Result<bool> {
    requests::is_there_with_conntrack(TABLE)
}

fn table(marks: &Marks) -> Vec<Request> {
    const PREROUTING: u32 = 0; // NF_INET_PRE_ROUTING
    const ROUTED: u32 = 2; // NF_INET_FORWARD
    // Behind conntrack and `mangle`, before `nat` (`enum nf_ip_hook_priorities`).
    const PRIORITY: i32 = -140;
    const FRAGMENT: u8 = 44; // IPPROTO_FRAGMENT
    let Marks {
        interfaces,
        bit,
        closed,
    } = marks;
    let mut all = vec![
        new_table(TABLE),
        new_chain(TABLE, FIRST, "filter", PREROUTING, PRIORITY),
        new_inner_chain(TABLE, MACHINES),
    ];
    let mut rule = |chain, parts: &[Vec<u8>]| {
        all.push(new_rule(TABLE, chain, &parts.concat(), COMMENT));
    };
    let is_tcp = |how| [meta(PROTOCOL), compare(how, &[TCP])].concat();
    let direction = |which: u8| [conntrack(DIRECTION), compare(EQUAL, &[which])].concat();
    let by = |name: &str| [meta(NAME), compare(EQUAL, &padded(name))].concat();
    let (bits, others) = (bit.to_ne_bytes(), (!bit).to_ne_bytes());
    let marks = || [meta(MARK), bitwise(&others, &bits), set_meta(MARK)].concat();
    for name in interfaces.keys() {
        // Conntrack reassembles fragments. A fragment header that remains is nested in an outer one and hides the
        // protocol.
        let is_fragment = [has_header(FRAGMENT), compare(EQUAL, &[1])].concat();
        rule(FIRST, &[by(name), is_fragment, drop()]);
        // ICMP errors about the proxy's packets to the machine, such as a smaller MTU on the path, are for the proxy.
        let is_about_its_connection = [
            is_tcp(NOT_EQUAL),
            conntrack(STATE),
            bitwise(&RELATED.to_ne_bytes(), &[0; 4]),
            compare(NOT_EQUAL, &[0; 4]),
            conntrack(OF_PROTOCOL),
            compare(EQUAL, &[TCP]),
            direction(ORIGINAL),
        ];
        rule(
            FIRST,
            &[by(name), is_about_its_connection.concat(), marks()],
        );
        // If the protocol is unknown, this rule does not match, and the packet goes to the next one.
        rule(FIRST, &[by(name), is_tcp(NOT_EQUAL), accept()]);
        rule(FIRST, &[by(name), go_to(MACHINES)]);
    }
    let is_known = if *closed {
        [
            conntrack(CONNECTIONS_MARK),
            bitwise(&bits, &[0; 4]),
            compare(NOT_EQUAL, &[0; 4]),
        ]
        .concat()
    } else {
        Vec::new()
    };
    rule(MACHINES, &[direction(REPLY), is_known, accept()]);
    for (name, index) in interfaces {
        // An interface with this name and another index is not in the programs' tables yet.
        let is_other =
            index.map(|index| [meta(INDEX), compare(NOT_EQUAL, &index.to_ne_bytes())].concat());
        rule(MACHINES, &[by(name), is_other.unwrap_or_default(), drop()]);
    }
    rule(MACHINES, &[marks()]);
    if *closed {
        let chain = new_chain(TABLE, FORWARD, "filter", ROUTED, PRIORITY);
        all.push(chain);
        let mut rule = |parts: &[Vec<u8>]| {
            all.push(new_rule(TABLE, FORWARD, &parts.concat(), COMMENT));
        };
        for name in interfaces.keys() {
            rule(&[by(name), accept()]);
        }
        let begins = [
            is_tcp(EQUAL),
            transport_byte(FLAGS),
            bitwise(&[FIN | SYN | RST | ACK], &[0]),
            compare(EQUAL, &[SYN]),
            direction(ORIGINAL),
        ];
        let keep = [
            conntrack(CONNECTIONS_MARK),
            bitwise(&others, &bits),
            set_conntrack(CONNECTIONS_MARK),
        ];
        rule(&[begins.concat(), keep.concat()]);
    }
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

#[cfg(test)]
mod tests {
    use std::{
        io::ErrorKind,
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::{Duration, Instant},
    };

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    /// Runs in a separate network namespace in which another thread changes tables all the time. Incomplete lists from
    /// the kernel are not errors.
    #[test]
    fn changes_of_others_do_not_keep_it_from_being_written() {
        let in_a_namespace = || {
            match unshare(CloneFlags::CLONE_NEWNET) {
                Err(error) if std::env::var_os("DATAPLANE_REQUIRE_PRIVILEGES").is_none() => {
                    println!("skipped, for want of privileges: {error}");
                    return;
                }
                done => done.unwrap(),
            }
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut netlink = Netlink::open(NETLINK_NETFILTER).unwrap();
                    let batch = [new_table("others"), delete_table("others")];
                    while !done.load(Ordering::Relaxed) {
                        netlink.batch(SUBSYSTEM, &batch).unwrap();
                    }
                });
                let result = std::panic::catch_unwind(|| {
                    let marks = Marks {
                        interfaces: BTreeMap::from([("vm0".to_owned(), Some(7))]),
                        bit: 1,
                        closed: true,
                    };
                    write(&marks, true).unwrap();
                    let mut netlink = Netlink::open(NETLINK_NETFILTER).unwrap();
                    let ours = table(&marks);
                    let ours = ours.iter().filter(|(kind, ..)| *kind == requests::NEW_RULE);
                    let ours = ours.count();
                    let (start, mut interrupted) = (Instant::now(), 0);
                    while interrupted < 5 && start.elapsed() < Duration::from_mins(1) {
                        write(&marks, false).unwrap();
                        match rules(&mut netlink, TABLE) {
                            Ok(there) => assert_eq!(there, ours),
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::Interrupted);
                                interrupted += 1;
                            }
                        }
                    }
                    assert!(interrupted > 0, "no list was interrupted");
                });
                done.store(true, Ordering::Relaxed);
                result.unwrap();
            });
        };
        thread::spawn(in_a_namespace).join().unwrap();
    }
}
