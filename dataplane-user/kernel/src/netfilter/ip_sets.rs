//! Sets of addresses that rules of iptables ask (`include/uapi/linux/netfilter/ipset/ip_set.h`).

use std::{collections::BTreeSet, io};

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::netlink::{Netlink, attribute, nested, string};

/// `NFNL_SUBSYS_IPSET` and `IPSET_CMD_CREATE`.
const CREATE: u16 = 6 << 8 | 2;
/// `IPSET_PROTOCOL`.
const PROTOCOL: u8 = 6;

/// Makes empty sets of addresses of a family (`hash:ip`) in the network namespace that this thread is in.
///
/// # Errors
/// The kernel has no sets, or refuses a name.
pub fn make_ip_sets(names: &BTreeSet<String>, v4: bool) -> io::Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let family: u8 = if v4 { 2 } else { 10 };
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    for name in names {
        let set = [
            // `struct nfgenmsg`
            vec![family, 0, 0, 0],
            attribute(1, &[PROTOCOL]), // IPSET_ATTR_PROTOCOL
            string(2, name),           // IPSET_ATTR_SETNAME
            string(3, "hash:ip"),      // IPSET_ATTR_TYPENAME
            attribute(4, &[0]),        // IPSET_ATTR_REVISION
            attribute(5, &[family]),   // IPSET_ATTR_FAMILY
            nested(7, &[]),            // IPSET_ATTR_DATA
        ];
        netlink.ask(CREATE, &set.concat())?;
    }
    Ok(())
}
