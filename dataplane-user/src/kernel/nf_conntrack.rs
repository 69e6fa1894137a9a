//! What the kernel's own conntrack translates: asked for by netlink, never changed
//! (`include/uapi/linux/netfilter/nfnetlink_conntrack.h`), but for a flow of our own, and those that it is [`give`]n.

mod give;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
};

use dataplane_common::{Addr, Port, Protocol, packet::FlowKey};
use netlink_sys::protocols::NETLINK_NETFILTER;
use zerocopy::FromBytes;

use super::netlink::{Netlink, attributes};
pub use give::{Given, forget_ended, give};

/// `NFNL_SUBSYS_CTNETLINK`, `IPCTNL_MSG_CT_GET`.
const GET: u16 = 1 << 8 | 1;
/// `struct nfgenmsg`.
const ANY_FAMILY: [u8; 4] = [0; 4];

/// A flow whose destination the kernel translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    /// What the client's packets carry.
    pub key: FlowKey,
    /// Where they go.
    pub endpoint: (Addr, Port),
}

/// A flow that the kernel lists.
#[derive(Clone, Copy, Debug)]
struct Listed {
    original: FlowKey,
    /// Where answers come from.
    from: (Addr, Port),
    /// `IPS_…` (`include/uapi/linux/netfilter/nf_conntrack_common.h`).
    status: u32,
}

/// A datagram of our own, by which is seen whether the kernel translates at all: the last NAT rule
/// takes the hooks with it, while flows from before stay listed until they age (`nf_nat_unregister_fn`,
/// `nf_ct_netns_put`). A flow that begins while they are there is marked, even where no rule is for
/// it. Where loopback is exempt (`NOTRACK`) it is not, and flows begin anew that need not.
struct Probe {
    key: FlowKey,
    /// Nobody else has its ports while it is looked for.
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
    const NAT: u32 = 1 << 4 | 1 << 5; // IPS_SRC_NAT, IPS_DST_NAT
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
    const NAT_DONE: u32 = 1 << 7 | 1 << 8; // IPS_SRC_NAT_DONE, IPS_DST_NAT_DONE
    if !is_loaded() {
        return Ok(Vec::new());
    }
    let family = |key: &FlowKey| usize::from(!key.dst.is_v4());
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let probes = loopback.map(Probe::send);
    // Without loopback nothing can be said of a family: its flows count as translated.
    let mut translates = probes.each_ref().map(Result::is_err);
    let mut flows = Vec::new();
    Netlink::open(NETLINK_NETFILTER)?.dump(GET, &ANY_FAMILY, |answer| {
        let Some(flow) = answer.get(4..).and_then(parse) else {
            return;
        };
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

/// A flow, if it is UDP.
fn parse(answer: &[u8]) -> Option<Listed> {
    const ORIGINAL: u16 = 1; // CTA_TUPLE_ORIG
    const REPLY: u16 = 2; // CTA_TUPLE_REPLY
    let tuple = |kind| tuple(inside(answer, kind)?);
    let original = tuple(ORIGINAL)?;
    let reply = tuple(REPLY)?;
    (original.protocol == Protocol::UDP).then_some(Listed {
        original,
        from: (reply.src, reply.src_port),
        status: status(answer)?,
    })
}

/// A flow's `IPS_…` bits.
fn status(answer: &[u8]) -> Option<u32> {
    const STATUS: u16 = 3; // CTA_STATUS, in network order
    let status = <[u8; 4]>::read_from_bytes(inside(answer, STATUS)?).ok()?;
    Some(u32::from_be_bytes(status))
}

/// The packets of one direction.
fn tuple(bytes: &[u8]) -> Option<FlowKey> {
    const IP: u16 = 1; // CTA_TUPLE_IP
    const PROTOCOL: u16 = 2; // CTA_TUPLE_PROTO
    let ip = inside(bytes, IP)?;
    // CTA_IP_V4_SRC and so on: source and destination of each family.
    let addr = |v4, v6| {
        let v4 = inside(ip, v4).and_then(|b| <[u8; 4]>::read_from_bytes(b).ok());
        let v6 = || inside(ip, v6).and_then(|b| <[u8; 16]>::read_from_bytes(b).ok());
        v4.map(Addr::from_v4).or_else(|| v6().map(Addr::from_v6))
    };
    let (src, dst) = (addr(1, 3)?, addr(2, 4)?);
    let protocol = inside(bytes, PROTOCOL)?;
    let number = *inside(protocol, 1)?.first()?; // CTA_PROTO_NUM
    // CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT: in network order.
    let port = |kind| {
        let bytes = <[u8; 2]>::read_from_bytes(inside(protocol, kind)?).ok()?;
        Some(Port::from_be(u16::from_ne_bytes(bytes)))
    };
    let protocol = Protocol::from_number(number);
    Some(FlowKey::new(src, port(2)?, dst, port(3)?, protocol))
}

fn inside(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|(found, _)| *found == kind)
        .map(|(_, content)| content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::netlink::attribute;

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
        assert!(parse(&message(6)).is_none(), "TCP");
        assert!(parse(&message(17)[..40]).is_none(), "cut off");
    }
}
