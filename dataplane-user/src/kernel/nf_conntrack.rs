//! What the kernel's own conntrack translates: asked for by netlink, never changed
//! (`include/uapi/linux/netfilter/nfnetlink_conntrack.h`).

use std::{io, path::Path};

use dataplane_common::{Addr, Port, Protocol, packet::FlowKey};
use nix::sys::socket::SockProtocol;
use zerocopy::FromBytes;

use super::diag::{Netlink, attributes};

/// A flow whose destination the kernel translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    /// What the client's packets carry.
    pub key: FlowKey,
    /// Where they go.
    pub endpoint: (Addr, Port),
}

/// The UDP flows whose destination the kernel's own conntrack translates, in the network namespace
/// that this thread is in; none if it has no conntrack.
///
/// # Errors
/// If the kernel does not answer.
pub fn translated_udp() -> io::Result<Vec<Translated>> {
    const GET: u16 = 1 << 8 | 1; // NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET
    const ANY_FAMILY: [u8; 4] = [0; 4]; // struct nfgenmsg
    let mut flows = Vec::new();
    // To ask would load the module, which some machines have left out on purpose.
    if !Path::new("/proc/sys/net/netfilter/nf_conntrack_count").exists() {
        return Ok(flows);
    }
    Netlink::open(SockProtocol::NetlinkNetFilter)?.dump(GET, &ANY_FAMILY, |answer| {
        flows.extend(answer.get(4..).and_then(parse));
    })?;
    Ok(flows)
}

/// A flow, if it is UDP and its destination is translated.
fn parse(answer: &[u8]) -> Option<Translated> {
    const ORIGINAL: u16 = 1; // CTA_TUPLE_ORIG
    const REPLY: u16 = 2; // CTA_TUPLE_REPLY
    let tuple = |kind| tuple(inside(answer, kind)?);
    let original = tuple(ORIGINAL)?;
    let reply = tuple(REPLY)?;
    let endpoint = (reply.src, reply.src_port);
    let translated = endpoint != (original.dst, original.dst_port);
    (translated && original.protocol == Protocol::UDP).then_some(Translated {
        key: original,
        endpoint,
    })
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
    use crate::kernel::diag::attribute;

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
    fn a_translated_destination_is_told_from_the_reply() {
        let message = |number, from| {
            [
                attribute(1, &tuple(CLIENT, 4000, VIP, 53, number)),
                attribute(2, &tuple(from, 5353, CLIENT, 4000, number)),
            ]
            .concat()
        };
        let flow = parse(&message(17, ENDPOINT)).unwrap();
        assert_eq!(flow.endpoint, (Addr::from_v4(ENDPOINT), Port::new(5353)));
        assert_eq!(
            flow.key,
            FlowKey::new(
                Addr::from_v4(CLIENT),
                Port::new(4000),
                Addr::from_v4(VIP),
                Port::new(53),
                Protocol::UDP
            )
        );
        assert_eq!(parse(&message(6, ENDPOINT)), None, "TCP");
        let plain = [
            attribute(1, &tuple(CLIENT, 4000, VIP, 53, 17)),
            attribute(2, &tuple(VIP, 53, CLIENT, 4000, 17)),
        ]
        .concat();
        assert_eq!(parse(&plain), None, "not translated");
        assert_eq!(parse(&message(17, ENDPOINT)[..40]), None, "cut off");
    }
}
