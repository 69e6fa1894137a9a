//! Gives flows of the packet path to the kernel's own conntrack, which then translates them as if a NAT rule had done it
//! (`ctnetlink_create_conntrack` in net/netfilter/nf_conntrack_netlink.c). So they live on without our programs.

use std::{io, net::IpAddr};

use dataplane_common::{Addr, Port, Protocol, packet::Tick};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::super::{
    conntrack::{Conntrack, Flow, State, now},
    netlink::{Netlink, attribute, nested},
};

/// `NFNL_SUBSYS_CTNETLINK`, `IPCTNL_MSG_CT_NEW`.
const NEW: u16 = 1 << 8;
/// `NLM_F_CREATE`, `NLM_F_EXCL`.
const CREATE: u16 = 0x400 | 0x200;
/// `IPS_CONFIRMED`.
const STATUS: u32 = 1 << 3;
/// `IPS_SEEN_REPLY`, `IPS_ASSURED`.
const ANSWERED: u32 = 1 << 1 | 1 << 2;
/// The minimum timeout of a flow in conntrack, in seconds. The next packet restarts the timeout.
const SECONDS: u32 = 10;

/// The result of a hand-over of flows to conntrack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandedOver {
    /// Flows that conntrack translates now.
    pub flows: usize,
    /// Flows that conntrack has had already, perhaps with another endpoint.
    pub known: usize,
    /// Flows that the kernel refused, for example because its table is full.
    pub refused: usize,
    /// Why it did not take the first of them.
    pub why: Option<String>,
}

/// Gives every flow that lives to the conntrack of the network namespace that this thread is in, and removes those that have ended.
///
/// # Errors
/// The kernel has no conntrack.
pub fn give(conntrack: &Conntrack) -> io::Result<HandedOver> {
    let mut given = HandedOver::default();
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    let mut all = conntrack.flows();
    let mut some = Vec::new();
    loop {
        let is_more = all.read(&mut some);
        for flow in some.drain(..) {
            if flow.is_ended() {
                conntrack.remove_if(&flow, Flow::is_ended);
                continue;
            }
            let now = now();
            let Some(seen) =
                seen(conntrack, &flow).filter(|_| !flow.is_over(now, &conntrack.timeouts()))
            else {
                continue;
            };
            match netlink.request(
                NEW,
                CREATE,
                &message(&flow, seen, kept(conntrack, &flow, now)),
                |_, _| {},
            ) {
                Ok(()) => given.flows += 1,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => given.known += 1,
                Err(error) => {
                    given.refused += 1;
                    let (client, vip) = (flow.client(), flow.vip());
                    given
                        .why
                        .get_or_insert_with(|| format!("from {client} to {vip}: {error}"));
                }
            }
        }
        if !is_more {
            return Ok(given);
        }
    }
}

/// Returns the source address and port that a flow's endpoint sees. `None` for flows that have ended or that the programs do not
/// translate.
fn seen(conntrack: &Conntrack, flow: &Flow) -> Option<(Addr, Port)> {
    if flow.is_ended() || flow.is_foreign() {
        return None;
    }
    let port = flow.to.seen_port(&flow.key);
    let addr = match flow.to.node_addr {
        0 => flow.key.src,
        node => conntrack.node_addr(node)?,
    };
    Some((addr, port))
}

/// Returns for how many seconds the kernel is to keep a flow.
fn kept(conntrack: &Conntrack, flow: &Flow, now: Tick) -> u32 {
    let keep = flow.keep(&conntrack.timeouts());
    keep.saturating_sub(flow.idle(now)).max(SECONDS)
}

/// A request for an entry.
fn message(flow: &Flow, seen: (Addr, Port), seconds: u32) -> Vec<u8> {
    let key = &flow.key;
    let (client, vip) = ((key.src, key.src_port), (key.dst, key.dst_port));
    let endpoint = (flow.to.endpoint, flow.to.endpoint_port);
    let is_tcp = key.protocol == Protocol::TCP;
    let family = if key.src.is_v4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // struct nfgenmsg: version 0, no resource.
    let mut all = vec![u8::try_from(family).unwrap_or_default(), 0, 0, 0];
    all.extend(nested(1, &tuple(client, vip, key.protocol))); // CTA_TUPLE_ORIG
    // The translation makes the reply's tuple of the original's opposite (`nf_nat_setup_info`).
    all.extend(nested(2, &tuple(vip, client, key.protocol))); // CTA_TUPLE_REPLY
    let is_answered = !matches!(flow.state(), State::SynSent | State::Unanswered);
    let status = if is_answered {
        STATUS | ANSWERED
    } else {
        STATUS
    };
    all.extend(attribute(3, &status.to_be_bytes())); // CTA_STATUS
    all.extend(attribute(7, &seconds.to_be_bytes())); // CTA_TIMEOUT
    if is_tcp {
        all.extend(nested(4, &nested(1, &tcp(flow.state())))); // CTA_PROTOINFO, CTA_PROTOINFO_TCP
    }
    if endpoint != vip {
        all.extend(nested(13, &target(endpoint))); // CTA_NAT_DST
    }
    if seen != client {
        all.extend(nested(6, &target(seen))); // CTA_NAT_SRC
    }
    all
}

/// Accepts any window, because conntrack has not seen the sequence numbers so far.
fn tcp(state: State) -> Vec<u8> {
    const LIBERAL: [u8; 2] = [8, 8]; // IP_CT_TCP_FLAG_BE_LIBERAL, as value and as mask
    // enum tcp_conntrack (include/uapi/linux/netfilter/nf_conntrack_tcp.h)
    let state = match state {
        State::SynSent => 1,
        State::SynReceived => 2,
        State::FinWait => 4,
        State::CloseWait => 5,
        _ => 3,
    };
    // CTA_PROTOINFO_TCP_STATE, _FLAGS_ORIGINAL, _FLAGS_REPLY
    [
        attribute(1, &[state]),
        attribute(4, &LIBERAL),
        attribute(5, &LIBERAL),
    ]
    .concat()
}

pub(super) fn tuple(from: (Addr, Port), to: (Addr, Port), protocol: Protocol) -> Vec<u8> {
    let ip = match (from.0.ip(), to.0.ip()) {
        // CTA_IP_V4_SRC, CTA_IP_V4_DST
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            [attribute(1, &from.octets()), attribute(2, &to.octets())]
        }
        // CTA_IP_V6_SRC, CTA_IP_V6_DST
        (from, to) => [attribute(3, &v6(from)), attribute(4, &v6(to))],
    };
    let ports = [
        attribute(1, &[protocol.number()]),
        attribute(2, &from.1.host().to_be_bytes()),
        attribute(3, &to.1.host().to_be_bytes()),
    ];
    // CTA_TUPLE_IP, CTA_TUPLE_PROTO
    [nested(1, &ip.concat()), nested(2, &ports.concat())].concat()
}

/// One address and one port (`enum ctattr_nat`).
fn target((addr, port): (Addr, Port)) -> Vec<u8> {
    let ip = match addr.ip() {
        // CTA_NAT_V4_MINIP, CTA_NAT_V4_MAXIP
        IpAddr::V4(ip) => [attribute(1, &ip.octets()), attribute(2, &ip.octets())],
        // CTA_NAT_V6_MINIP, CTA_NAT_V6_MAXIP
        ip @ IpAddr::V6(_) => [attribute(4, &v6(ip)), attribute(5, &v6(ip))],
    };
    let port = port.host().to_be_bytes();
    // CTA_PROTONAT_PORT_MIN, CTA_PROTONAT_PORT_MAX
    let ports = [attribute(1, &port), attribute(2, &port)];
    // CTA_NAT_PROTO
    [ip.concat(), nested(3, &ports.concat())].concat()
}

fn v6(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
