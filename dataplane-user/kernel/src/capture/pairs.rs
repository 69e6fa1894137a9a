//! Finds out where the node's own routes lead: to which end of which pair of interfaces, and in which network namespace
//! the other end is. A process inside that namespace cannot change any of this.

use std::{collections::BTreeMap, io, net::IpAddr};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkInfo, LinkMessage},
};

use super::namespace::{Namespace, number};
use crate::{interfaces::way_by, rtnetlink::Netlink};

/// The pairs whose one end is in the network namespace in which they were read.
pub struct Pairs {
    netlink: Netlink,
    /// The id of the network namespace of the other end, by the index of the interface on this side.
    ends: BTreeMap<u32, i32>,
}

impl Pairs {
    /// Reads those of this thread's network namespace.
    ///
    /// # Errors
    /// If the query to the kernel fails.
    pub fn read() -> io::Result<Self> {
        let mut netlink = Netlink::open()?;
        let links = netlink.list(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        let ends = links.iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewLink(link) => Some((link.header.index, other_end(link)?)),
            _ => None,
        });
        Ok(Self {
            ends: ends.collect(),
            netlink,
        })
    }

    /// The number of the network namespace that has the other end of the pair to which the route for an address leads;
    /// none if it leads to something else.
    ///
    /// # Errors
    /// If the query to the kernel fails.
    pub fn behind(&mut self, addr: IpAddr) -> io::Result<Option<i32>> {
        let way = way_by(&mut self.netlink, addr)?;
        Ok(way.and_then(|index| self.ends.get(&index).copied()))
    }

    /// Whether in `now`, read later, the same interfaces lead to a number. If not, the number may be that of another network
    /// namespace now.
    pub fn leads_as(&self, now: &Self, number: i32) -> bool {
        same(&self.ends, &now.ends, number)
    }

    /// The number of a network namespace, as in [`Pairs::behind`]; none if it has none.
    ///
    /// # Errors
    /// If the query to the kernel fails.
    pub fn number(&mut self, namespace: &Namespace) -> io::Result<Option<i32>> {
        number(&mut self.netlink, namespace)
    }
}

/// Whether the same interfaces lead to a number.
fn same(before: &BTreeMap<u32, i32>, now: &BTreeMap<u32, i32>, number: i32) -> bool {
    let leading = |ends: &BTreeMap<u32, i32>| -> Vec<u32> {
        let ends = ends.iter().filter(|(_, end)| **end == number);
        ends.map(|(index, _)| *index).collect()
    };
    leading(before) == leading(now)
}

/// Returns the number of the network namespace that has the other end of a pair; `None` if the interface is no end of a
/// pair, or both are here. (An interface on top of a second one has such a number, too.)
fn other_end(link: &LinkMessage) -> Option<i32> {
    let (mut is_pair, mut number) = (false, None);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::LinkNetNsId(id) => number = Some(*id),
            LinkAttribute::LinkInfo(infos) => {
                is_pair |= infos.iter().any(|info| {
                    matches!(info, LinkInfo::Kind(kind)
                        if matches!(kind.to_string().as_str(), "veth" | "netkit"))
                });
            }
            _ => {}
        }
    }
    number.filter(|id| is_pair && *id >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_another_interface_leads_to_may_be_anothers() {
        let before = BTreeMap::from([(7, 5), (8, 6)]);
        // Interface 7 went with its network namespace, and a new pair's other end got number 5.
        assert!(!same(&before, &BTreeMap::from([(8, 6), (9, 5)]), 5));
        assert!(same(&before, &BTreeMap::from([(8, 6), (9, 5)]), 6));
        assert!(!same(&before, &BTreeMap::from([(8, 6)]), 5));
    }
}
