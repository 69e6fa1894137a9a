//! Links, addresses and routes of one network namespace, over netlink: a process of `ip` costs more than all that it does here.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd as _},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

const NEW: u16 = NLM_F_CREATE | NLM_F_EXCL;
/// A single address.
const HOST: u8 = 32;

/// The links of a network namespace.
pub struct Links(Socket);

impl Links {
    /// Those of the network namespace that this thread is in.
    pub fn here() -> io::Result<Self> {
        Socket::new(NETLINK_ROUTE).map(Self)
    }

    /// Adds a pair of interfaces: this end, which is up, and the other end in a network namespace.
    pub fn add_pair(&self, name: &str, other: &str, netns: impl AsFd) -> io::Result<()> {
        let mut there = LinkMessage::default();
        there.attributes = vec![
            LinkAttribute::IfName(other.to_owned()),
            LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
        ];
        let mut here = up(0);
        here.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(there))),
            ]),
        ];
        self.ask(RouteNetlinkMessage::NewLink(here), NEW)
    }

    /// Makes an interface, by its number, usable.
    pub fn set_up(&self, index: u32) -> io::Result<()> {
        self.ask(RouteNetlinkMessage::SetLink(up(index)), 0)
    }

    /// Removes an interface, by its number, and its other end.
    pub fn remove(&self, index: u32) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        self.ask(RouteNetlinkMessage::DelLink(link), 0)
    }

    /// Gives an interface an address.
    pub fn add_address(&self, index: u32, address: Ipv4Addr) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = HOST;
        message.header.index = index;
        message.attributes = vec![
            AddressAttribute::Local(address.into()),
            AddressAttribute::Address(address.into()),
        ];
        self.ask(RouteNetlinkMessage::NewAddress(message), NEW)
    }

    /// Adds a route to an address that an interface leads to.
    pub fn add_route(&self, index: u32, to: Ipv4Addr, source: Option<Ipv4Addr>) -> io::Result<()> {
        let mut route = route(RouteScope::Link);
        route.header.destination_prefix_length = HOST;
        route.attributes = vec![
            RouteAttribute::Destination(to.into()),
            RouteAttribute::Oif(index),
        ];
        let source = source.map(|source| RouteAttribute::PrefSource(source.into()));
        route.attributes.extend(source);
        self.ask(RouteNetlinkMessage::NewRoute(route), NEW)
    }

    /// Adds the route to everywhere else.
    pub fn add_default_route(&self, gateway: Ipv4Addr, source: Ipv4Addr) -> io::Result<()> {
        let mut route = route(RouteScope::Universe);
        route.attributes = vec![
            RouteAttribute::Gateway(gateway.into()),
            RouteAttribute::PrefSource(source.into()),
        ];
        self.ask(RouteNetlinkMessage::NewRoute(route), NEW)
    }

    fn ask(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.0.send(&bytes, 0)?;
        let (answer, _) = self.0.recv_from_full()?;
        let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer);
        match answer.map_err(io::Error::other)?.payload {
            NetlinkPayload::Error(error) if error.code.is_none() => Ok(()),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            other => Err(io::Error::other(format!(
                "the kernel answers with {other:?}"
            ))),
        }
    }
}

fn up(index: u32) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.flags = LinkFlags::Up;
    link.header.change_mask = LinkFlags::Up;
    link
}

fn route(scope: RouteScope) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = AddressFamily::Inet;
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Boot;
    route.header.scope = scope;
    route.header.kind = RouteType::Unicast;
    route
}
