//! The flows that the kernel's own conntrack translates: read by netlink, never changed
//! (`include/uapi/linux/netfilter/nfnetlink_conntrack.h`), except for a flow of our own, and flows that the agent hands
//! over ([`give()`]).

mod give;

use std::{
    collections::HashSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
};

use dataplane_common::{Addr, Port, Protocol, packet::FlowKey};
pub use give::{HandedOver, give};
use netlink_sys::protocols::NETLINK_NETFILTER;
use zerocopy::FromBytes;

use super::netlink::{Netlink, attribute, content, nested};

/// `NFNL_SUBSYS_CTNETLINK`, `IPCTNL_MSG_CT_GET`.
const GET: u16 = 1 << 8 | 1;
/// `struct nfgenmsg`.
const ANY_FAMILY: [u8; 4] = [0; 4];
/// `IPS_SRC_NAT`.
const SRC_NAT: u32 = 1 << 4;
/// `IPS_SRC_NAT_DONE`, `IPS_DST_NAT_DONE`.
const NAT_DONE: u32 = 1 << 7 | 1 << 8;
const LOOPBACK: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// A flow whose destination the kernel translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    /// The addresses and ports of the client's packets.
    pub key: FlowKey,
    /// The endpoint that the packets go to.
    pub endpoint: (Addr, Port),
}

/// A flow that the kernel lists.
#[derive(Clone, Copy, Debug)]
struct Listed {
    original: FlowKey,
    /// The source of answers; then their destination.
    from: (Addr, Port),
    to: (Addr, Port),
    /// `IPS_…` (`include/uapi/linux/netfilter/nf_conntrack_common.h`).
    status: u32,
}

impl Listed {
    /// The source that the endpoint of a flow sees, if the source is translated.
    fn seen(&self) -> Option<FlowKey> {
        let (from, to, protocol) = (self.from, self.to, self.original.protocol);
        let is_ours = protocol == Protocol::TCP || protocol == Protocol::UDP;
        (is_ours && self.status & SRC_NAT != 0)
            .then(|| FlowKey::new(to.0, to.1, from.0, from.1, protocol))
    }
}

/// A datagram of our own that shows whether the kernel translates at all. The kernel removes its NAT hooks with the
/// last NAT rule, but existing flows stay listed until they time out (`nf_nat_unregister_fn`, `nf_ct_netns_put`). While
/// the hooks exist, conntrack marks every new flow, also without a matching rule. If loopback is exempt (`NOTRACK`),
/// the datagram is not marked, and flows may begin anew without need.
struct Probe {
    key: FlowKey,
    /// No other socket gets its ports during the lookup.
    _sockets: [UdpSocket; 2],
}

impl Probe {
    /// From this thread's network namespace to itself, by its loopback interface.
    fn send(loopback: IpAddr) -> io::Result<Self> {
        let sockets = [
            UdpSocket::bind((loopback, 0))?,
            UdpSocket::bind((loopback, 0))?,
        ];
        let [from, to] = [sockets[0].local_addr()?, sockets[1].local_addr()?];
        sockets[0].send_to(&[], to)?;
        let end = |at: SocketAddr| (Addr::from(at.ip()), Port::new(at.port()));
        let ((src, src_port), (dst, dst_port)) = (end(from), end(to));
        Ok(Self {
            key: FlowKey::new(src, src_port, dst, dst_port, Protocol::UDP),
            _sockets: sockets,
        })
    }
}

/// Whether the kernel translates any flow, in each family: sends a datagram and reads its conntrack entry.
fn translates(netlink: &mut Netlink) -> io::Result<[bool; 2]> {
    let mut translates = [false; 2];
    for (translates, loopback) in translates.iter_mut().zip(LOOPBACK) {
        let Ok(probe) = Probe::send(loopback) else {
            // Without loopback the answer is unknown.
            *translates = true;
            continue;
        };
        let key = &probe.key;
        let family = if key.src.is_v4() {
            libc::AF_INET
        } else {
            libc::AF_INET6
        };
        let mut request = vec![u8::try_from(family).unwrap_or_default(), 0, 0, 0];
        let (from, to) = ((key.src, key.src_port), (key.dst, key.dst_port));
        request.extend(nested(1, &give::tuple(from, to, key.protocol))); // CTA_TUPLE_ORIG
        let asked = netlink.get(GET, &request, |answer| {
            let status = answer.get(4..).and_then(status);
            *translates = status.is_some_and(|status| status & NAT_DONE == NAT_DONE);
        });
        match asked {
            // Conntrack does not track the datagram.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            asked => asked?,
        }
    }
    Ok(translates)
}

/// Whether the kernel has conntrack loaded. To ask conntrack itself would load it, which some machines
/// have left out on purpose.
pub fn is_loaded() -> bool {
    Path::new("/proc/sys/net/netfilter/nf_conntrack_count").exists()
}

/// The number of connections that the kernel's own conntrack translates, of every protocol, in the
/// network namespace that this thread is in. Connections count until conntrack forgets them: TCP ones
/// two minutes after their end.
///
/// # Errors
/// If the kernel does not answer.
pub fn translated() -> io::Result<usize> {
    const NAT: u32 = SRC_NAT | 1 << 5; // IPS_DST_NAT
    if !is_loaded() {
        return Ok(0);
    }
    let mut count = 0;
    Netlink::open(NETLINK_NETFILTER)?.dump(GET, &ANY_FAMILY, |answer| {
        let status = answer.get(4..).and_then(status);
        count += usize::from(status.is_some_and(|status| status & NAT != 0));
    })?;
    Ok(count)
}

/// The UDP flows whose destination the kernel's own conntrack translates, in the network namespace
/// that this thread is in; none if it has no conntrack, and none that it only lists still.
///
/// # Errors
/// If the kernel does not answer.
pub fn translated_udp() -> io::Result<Vec<Translated>> {
    if !is_loaded() {
        return Ok(Vec::new());
    }
    let probes = LOOPBACK.map(Probe::send);
    // Without loopback it is unknown whether the kernel translates a family: its flows count as translated.
    let mut translates = probes.each_ref().map(Result::is_err);
    let mut flows = Vec::new();
    Netlink::open(NETLINK_NETFILTER)?.dump(GET, &ANY_FAMILY, |answer| {
        let Some(flow) = answer.get(4..).and_then(parse) else {
            return;
        };
        if flow.original.protocol != Protocol::UDP {
            return;
        }
        let (key, endpoint) = (flow.original, flow.from);
        let number = family(&key);
        if endpoint != (key.dst, key.dst_port) {
            flows.push(Translated { key, endpoint });
        } else if probes[number].as_ref().is_ok_and(|own| own.key == key) {
            translates[number] = flow.status & NAT_DONE == NAT_DONE;
        }
    })?;
    flows.retain(|flow| translates[family(&flow.key)]);
    Ok(flows)
}

/// Returns connections and UDP flows whose source the kernel's own conntrack translates, as endpoints see them, in the
/// network namespace that this thread is in: from the node's address and port to the endpoint. At most `most` of those
/// that are `wanted`; and whether there are more. Empty if the namespace has no conntrack; flows that conntrack lists
/// but no longer translates are left out.
///
/// # Errors
/// If the kernel does not answer.
pub fn masqueraded(
    most: usize,
    mut wanted: impl FnMut(&FlowKey) -> bool,
) -> io::Result<(HashSet<FlowKey>, bool)> {
    if !is_loaded() {
        return Ok(Default::default());
    }
    let mut request = ANY_FAMILY.to_vec();
    // CTA_STATUS, CTA_STATUS_MASK: the kernel lists no others.
    for kind in [3, 26] {
        request.extend(attribute(kind, &SRC_NAT.to_be_bytes()));
    }
    let (mut found, mut are_more) = (HashSet::new(), false);
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    netlink.dump(GET, &request, |answer| {
        let flow = answer.get(4..).and_then(parse);
        if let Some(seen) = flow.and_then(|flow| flow.seen()).filter(&mut wanted) {
            if found.len() < most {
                found.insert(seen);
            } else {
                are_more = true;
            }
        }
    })?;
    if !found.is_empty() {
        let translates = translates(&mut netlink)?;
        found.retain(|key| translates[family(key)]);
    }
    Ok((found, are_more))
}

/// Returns the index in [`LOOPBACK`] of a flow's family.
fn family(key: &FlowKey) -> usize {
    usize::from(!key.dst.is_v4())
}

/// A flow.
fn parse(answer: &[u8]) -> Option<Listed> {
    const ORIGINAL: u16 = 1; // CTA_TUPLE_ORIG
    const REPLY: u16 = 2; // CTA_TUPLE_REPLY
    let tuple = |kind| tuple(content(answer, kind)?);
    let original = tuple(ORIGINAL)?;
    let reply = tuple(REPLY)?;
    Some(Listed {
        original,
        from: (reply.src, reply.src_port),
        to: (reply.dst, reply.dst_port),
        status: status(answer)?,
    })
}

/// A flow's `IPS_…` bits.
fn status(answer: &[u8]) -> Option<u32> {
    const STATUS: u16 = 3; // CTA_STATUS, in network order
    let status = <[u8; 4]>::read_from_bytes(content(answer, STATUS)?).ok()?;
    Some(u32::from_be_bytes(status))
}

/// The packets of one direction.
fn tuple(bytes: &[u8]) -> Option<FlowKey> {
    const IP: u16 = 1; // CTA_TUPLE_IP
    const PROTOCOL: u16 = 2; // CTA_TUPLE_PROTO
    let ip = content(bytes, IP)?;
    // CTA_IP_V4_SRC and so on: source and destination of each family.
    let addr = |v4, v6| {
        let v4 = content(ip, v4).and_then(|b| <[u8; 4]>::read_from_bytes(b).ok());
        let v6 = || content(ip, v6).and_then(|b| <[u8; 16]>::read_from_bytes(b).ok());
        v4.map(Addr::from_v4).or_else(|| v6().map(Addr::from_v6))
    };
    let (src, dst) = (addr(1, 3)?, addr(2, 4)?);
    let protocol = content(bytes, PROTOCOL)?;
    let number = *content(protocol, 1)?.first()?; // CTA_PROTO_NUM
    // CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT: in network order.
    let port = |kind| {
        let bytes = <[u8; 2]>::read_from_bytes(content(protocol, kind)?).ok()?;
        Some(Port::from_be(u16::from_ne_bytes(bytes)))
    };
    let protocol = Protocol::from_number(number);
    Some(FlowKey::new(src, port(2)?, dst, port(3)?, protocol))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(src: [u8; 4], src_port: u16, dst: [u8; 4], dst_port: u16, number: u8) -> Vec<u8> {
        let ip = [attribute(1, &src), attribute(2, &dst)].concat();
        let protocol = [
            attribute(1, &[number]),
            attribute(2, &src_port.to_be_bytes()),
            attribute(3, &dst_port.to_be_bytes()),
        ]
        .concat();
        [attribute(1, &ip), attribute(2, &protocol)].concat()
    }

    const CLIENT: [u8; 4] = [192, 0, 2, 7];
    const VIP: [u8; 4] = [10, 96, 0, 10];
    const ENDPOINT: [u8; 4] = [10, 244, 1, 5];

    #[test]
    fn a_flow_is_read_from_both_its_directions() {
        let message = |number| {
            [
                attribute(1, &tuple(CLIENT, 4000, VIP, 53, number)),
                attribute(2, &tuple(ENDPOINT, 5353, CLIENT, 4000, number)),
                attribute(3, &0x1b8_u32.to_be_bytes()),
            ]
            .concat()
        };
        let flow = parse(&message(17)).unwrap();
        assert_eq!(flow.from, (Addr::from_v4(ENDPOINT), Port::new(5353)));
        assert_eq!(
            flow.original,
            FlowKey::new(
                Addr::from_v4(CLIENT),
                Port::new(4000),
                Addr::from_v4(VIP),
                Port::new(53),
                Protocol::UDP
            )
        );
        assert_eq!(flow.status, 0x1b8);
        assert_eq!(parse(&message(6)).unwrap().original.protocol, Protocol::TCP);
        assert!(parse(&message(17)[..40]).is_none(), "cut off");
    }

    #[test]
    fn the_endpoint_of_a_masqueraded_flow_sees_the_node() {
        const NODE: [u8; 4] = [192, 168, 77, 2];
        let seen = |number, status: u32| {
            let message = [
                attribute(1, &tuple(CLIENT, 4000, VIP, 80, number)),
                attribute(2, &tuple(ENDPOINT, 8080, NODE, 5000, number)),
                attribute(3, &status.to_be_bytes()),
            ]
            .concat();
            parse(&message).unwrap().seen()
        };
        for number in [6, 17] {
            let key = FlowKey::new(
                Addr::from_v4(NODE),
                Port::new(5000),
                Addr::from_v4(ENDPOINT),
                Port::new(8080),
                Protocol::from_number(number),
            );
            assert_eq!(seen(number, 0x1be), Some(key));
        }
        assert_eq!(seen(6, 0x1ae), None, "the destination only");
        assert_eq!(seen(1, 0x1be), None, "ICMP");
    }
}
