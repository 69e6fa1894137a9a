//! Packets of all kinds, from a seed: by the grammar of headers, about flows that are known and
//! others, whole and in fragments, then mutated; and plain bytes.

use std::net::IpAddr;

use dataplane_common::{
    Addr, Protocol,
    packet::{FlowKey, Iface, PacketConfig},
    seen,
    tables::{AffinityKey, Endpoint},
    tcp::{AHEAD, FAR, NEAR, UNACKNOWLEDGED},
};
use ipnet::IpNet;
use plan::ipsec::Policy;
use rand::{Rng, RngExt as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};

use crate::{
    model::{Input, begin::is_nobody, sequences::Numbers, state::State},
    wire::{LINK, Packet, Part, Payload, flags, protocol},
    world::{EPHEMERAL, NEARLY_ALL, To, World, is_own},
};

/// Longer frames a test run does not take.
const LONGEST: usize = 3400;

/// What happens next.
#[derive(Clone, Debug)]
pub enum Op {
    /// A packet comes, or leaves.
    Packet(Input),
    /// A flow was last used so many ticks earlier.
    Age(FlowKey, u16),
    /// A flow is removed.
    Forget(FlowKey),
    /// The service no longer lists a flow's endpoint.
    Depart(FlowKey),
    /// The kernel's own conntrack has had a flow since before. Or, with this key, a port of the node's to an endpoint.
    Foreign(FlowKey, bool),
    /// There is a flow to an address and port that no service has any longer. Of it, this was seen.
    Orphan(FlowKey, Endpoint, u8),
    /// A client used its endpoint so many seconds earlier.
    AgeClient(AffinityKey, u64),
    /// The default routes come, or go.
    Route(bool),
}

/// What kind of packet it is, for the count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// From a client to a service, or nearly.
    Request,
    /// Of a flow that is known, from its client.
    Known,
    /// Of a flow that is known, from its endpoint.
    Answer,
    /// From the client of a flow that is known, from the same port, to its endpoint itself.
    Beside,
    /// An ICMP error.
    Error,
    /// Anything else that is a packet.
    Other,
    /// Bytes.
    Raw,
}

impl Kind {
    /// The word that a person reads.
    pub fn word(self) -> &'static str {
        match self {
            Self::Request => "to a service",
            Self::Known => "request of a known flow",
            Self::Answer => "answer of a known flow",
            Self::Beside => "beside a known flow",
            Self::Error => "ICMP error",
            Self::Other => "other protocols",
            Self::Raw => "raw bytes",
        }
    }
}

/// A packet of some kind, and whether it was mutated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sort {
    /// Of which kind.
    pub kind: Kind,
    /// Whether bytes were changed after it was put together.
    pub mutated: bool,
}

/// What the programs are told, from a seed.
pub fn config(seed: u64) -> PacketConfig {
    let mut rng = SmallRng::seed_from_u64(seed);
    let range = if rng.random_ratio(1, 8) {
        NEARLY_ALL
    } else {
        EPHEMERAL
    };
    let preemptible = if rng.random() {
        PacketConfig::PREEMPTIBLE
    } else {
        0
    };
    PacketConfig {
        flags: rng.random_range(0..16) | preemptible,
        ephemeral_first: *range.start(),
        ephemeral_last: *range.end(),
        ..PacketConfig::default()
    }
}

/// What the uplink asks of sources, from a seed.
pub fn reverse_path(seed: u64) -> u16 {
    let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32));
    *[0, Iface::STRICT, Iface::LOOSE]
        .choose(&mut rng)
        .unwrap_or(&0)
}

/// The IPsec policies that there are, from a seed: mostly none. Between networks that packets come from and go to,
/// before and after they are translated.
pub fn policies(seed: u64) -> Vec<Policy> {
    const NETWORKS: [&str; 14] = [
        "0.0.0.0/0",
        "::/0",
        "10.244.0.0/16",
        "10.244.1.10/32",
        "10.244.2.0/24",
        "fd00:10:244::/48",
        "fd00:10:244:1::10/128",
        "192.168.77.0/24",
        "192.168.77.1/32",
        "fd77::/64",
        "10.96.0.0/29",
        "fd00:96::/125",
        "203.0.112.0/22",
        "198.51.100.0/24",
    ];
    let mut rng = SmallRng::seed_from_u64(!seed);
    if rng.random_ratio(3, 4) {
        return Vec::new();
    }
    let network = |rng: &mut SmallRng| -> IpNet {
        NETWORKS[rng.random_range(0..NETWORKS.len())]
            .parse()
            .expect("a network")
    };
    let several = rng.random_range(1..6);
    let all = (0..several).map(|_| {
        let src = network(&mut rng);
        let dst = loop {
            let dst = network(&mut rng);
            if src.addr().is_ipv4() == dst.addr().is_ipv4() {
                break dst;
            }
        };
        Policy {
            kind: (rng.random_range(0..3), 0),
            priority: rng.random_range(0..4),
            src,
            dst,
            narrow: false,
            protects: rng.random_ratio(2, 3),
        }
    });
    all.collect()
}

/// What happens next, from a seed and what is known by now.
pub fn op(seed: u64, world: &World, state: &State) -> (Op, Option<Sort>) {
    let mut rng = SmallRng::seed_from_u64(seed);
    // Rarely: it takes some milliseconds.
    if rng.random_ratio(1, 512) {
        return (Op::Route(rng.random_ratio(2, 3)), None);
    }
    if rng.random_ratio(1, 24)
        && let Some(op) = event(&mut rng, world, state)
    {
        return (op, None);
    }
    let mut maker = Maker {
        rng,
        world,
        state,
        about: None,
    };
    let (input, sort) = maker.packet();
    (Op::Packet(input), Some(sort))
}

/// Any entry, the same for the same state.
fn any<'a, T>(rng: &mut impl Rng, all: impl Iterator<Item = T> + 'a, count: usize) -> Option<T> {
    if count == 0 {
        return None;
    }
    let at = rng.random_range(0..count);
    let mut all = all;
    all.nth(at)
}

fn event(rng: &mut SmallRng, world: &World, state: &State) -> Option<Op> {
    let flows = state.flows.table();
    let flow = any(rng, flows.iter(), flows.len()).map(|(key, _)| *key);
    Some(match rng.random_range(0..10) {
        // 4.3 s each: some of every timeout of UDP.
        0..5 => Op::Age(flow?, rng.random_range(1..40)),
        5 => Op::Forget(flow?),
        6 => {
            let (client, (vip, port)) = (*world.clients.choose(rng)?, *world.vips.choose(rng)?);
            let protocol = *[Protocol::TCP, Protocol::UDP].choose(rng)?;
            let (from, to) = (port_number(rng), dataplane_common::Port::new(port));
            let from = dataplane_common::Port::new(from);
            if rng.random() {
                return Some(Op::Foreign(
                    FlowKey::new(client, from, vip, to, protocol),
                    false,
                ));
            }
            let endpoint = *world.endpoints(client.is_v4()).choose(rng)?;
            let nodes = (1..16).map(|index| world.node_addr(index));
            let nodes =
                nodes.filter(|node| !node.is_unspecified() && node.is_v4() == client.is_v4());
            let node = *nodes.collect::<Vec<_>>().choose(rng)?;
            let key = FlowKey::new(node, from, endpoint.addr, endpoint.port, protocol);
            Op::Foreign(key, true)
        }
        7 => Op::Depart(flow?),
        8 => {
            let (client, (vip, port)) = (*world.clients.choose(rng)?, *world.vips.choose(rng)?);
            let from = dataplane_common::Port::new(port_number(rng));
            // Of a cluster IP, the address as such is served.
            let to = dataplane_common::Port::new(port + 1000);
            let endpoint = *world.endpoints(client.is_v4()).choose(rng)?;
            let some = [seen::PACKET, seen::FIN, seen::RST];
            let mut seen = seen::PACKET;
            for direction in [0, 4] {
                for flag in some {
                    seen |= (u8::from(rng.random_ratio(1, 3)) * flag) << direction;
                }
            }
            // Of the node's own flows, the programs know by which interface they go.
            if vip.is_v4() != client.is_v4() || is_nobody(client) || is_own(client) {
                return None;
            }
            Op::Orphan(
                FlowKey::new(client, from, vip, to, Protocol::TCP),
                endpoint,
                seen,
            )
        }
        _ => {
            let (key, _) = any(rng, state.affinity.iter(), state.affinity.len())?;
            Op::AgeClient(*key, rng.random_range(30..120))
        }
    })
}

/// A client's port: few, so that flows meet.
fn port_number(rng: &mut SmallRng) -> u16 {
    match rng.random_range(0..9) {
        0 => rng.random(),
        1 => rng.random_range(0..1024),
        2 => rng.random_range(40_000..40_008),
        _ => rng.random_range(2000..2016),
    }
}

struct Maker<'a> {
    rng: SmallRng,
    world: &'a World,
    state: &'a State,
    /// The flow that the next packet is about, and whether it is of its replies.
    about: Option<(FlowKey, bool)>,
}

/// Both ends of a packet.
type Ends = (Addr, u16, Addr, u16, Protocol);

impl Maker<'_> {
    fn packet(&mut self) -> (Input, Sort) {
        let kind = match self.rng.random_range(0..100) {
            0..34 => Kind::Request,
            34..56 => Kind::Known,
            56..73 => Kind::Answer,
            73..76 => Kind::Beside,
            76..88 => Kind::Error,
            88..92 => Kind::Other,
            _ => Kind::Raw,
        };
        let known = matches!(kind, Kind::Known | Kind::Answer | Kind::Beside);
        let flows = self.state.flows.table();
        let kind = if known && flows.len() == 0 {
            Kind::Request
        } else {
            kind
        };
        let leaves = match kind {
            Kind::Answer | Kind::Beside => self.rng.random_ratio(1, 3),
            _ => self.rng.random_ratio(1, 12),
        };
        let mut shape = (kind != Kind::Raw).then(|| self.shape(kind));
        // A raw socket of the node.
        if let Some(packet) = &mut shape
            && leaves
            && kind == Kind::Request
            && self.rng.random_ratio(3, 4)
        {
            packet.src = if packet.dst.is_ipv4() {
                [192, 168, 77, 1].into()
            } else {
                [0xfd77, 0, 0, 0, 0, 0, 0, 1].into()
            };
        }
        let ifindex = self.interface(shape.as_ref().map(|packet| packet.src), leaves);
        let mac = self.world.interfaces[&ifindex].mac;
        let to = match self.rng.random_range(0..40) {
            0 => [0xff; 6],
            1 => [0x33, 0x33, 0, 0, 0, 1],
            2 | 3 => [2, 9, 9, 9, 9, 9],
            _ => mac,
        };
        let mut frame = match shape {
            None => self.raw(),
            Some(mut packet) => {
                packet.link = [to, [2, 8, 8, 8, 8, 8]];
                packet.frame()
            }
        };
        frame[..6].copy_from_slice(&to);
        let mutated = kind != Kind::Raw && self.rng.random_ratio(1, 4);
        if mutated {
            self.mutate(&mut frame);
        }
        if self.rng.random_ratio(1, 10) {
            let more = self.rng.random_range(1..40);
            frame.resize(frame.len() + more, 0xa5);
        }
        frame.truncate(LONGEST);
        // The kernel takes no frame without anything after the link-layer header.
        frame.resize(frame.len().max(LINK + 1), 0);
        let input = Input {
            leaves,
            ifindex,
            segmented: self.rng.random_ratio(1, 20),
            frame,
        };
        (input, Sort { kind, mutated })
    }

    /// At which interface a packet is: mostly at that to which the routes to its source lead.
    fn interface(&mut self, src: Option<IpAddr>, leaves: bool) -> u32 {
        let ifindices: Vec<u32> = self.world.interfaces.keys().copied().collect();
        let any = *ifindices.choose(&mut self.rng).unwrap_or(&1);
        if leaves && self.rng.random() {
            return self.world.interface("eth0").0;
        }
        let Some(src) = src.filter(|_| !leaves && self.rng.random_ratio(7, 8)) else {
            return any;
        };
        match self.world.way(Addr::UNSPECIFIED, Addr::from(src), any).0 {
            To::Onward(way) => way.ifindex,
            _ => self.world.interface("eth0").0,
        }
    }

    fn ends(&mut self, kind: Kind) -> Ends {
        let protocol = if self.rng.random() {
            Protocol::TCP
        } else {
            Protocol::UDP
        };
        self.about = None;
        let flows = self.state.flows.table();
        let flow = any(&mut self.rng, flows.iter(), flows.len());
        if let Some((key, value)) = flow {
            let request = (
                key.src,
                key.src_port.host(),
                key.dst,
                key.dst_port.host(),
                key.protocol,
            );
            let (client, port) = if value.node_addr == 0 {
                (key.src, value.seen_port(key).host())
            } else {
                (
                    self.world.node_addr(value.node_addr),
                    value.node_port.host(),
                )
            };
            let answer = (
                value.endpoint,
                value.endpoint_port.host(),
                client,
                port,
                key.protocol,
            );
            self.about = Some((*key, kind == Kind::Answer));
            match kind {
                Kind::Known => return request,
                Kind::Answer => return answer,
                Kind::Beside => {
                    let (client, own, ..) = request;
                    let (endpoint, to, seen, port, protocol) = answer;
                    let from = if seen == client { port } else { own };
                    // Or from a socket of the node's that has the flow's port.
                    if seen != client && self.rng.random() {
                        return (seen, port, endpoint, to, protocol);
                    }
                    return (client, from, endpoint, to, protocol);
                }
                // Errors are about what was sent on: to the endpoint, or to the client.
                Kind::Error if self.rng.random_ratio(3, 4) => {
                    let (about, back) = if self.rng.random() {
                        (answer, true)
                    } else {
                        (request, false)
                    };
                    let (a, b, c, d, protocol) = about;
                    return if back || self.rng.random_ratio(7, 8) {
                        (c, d, a, b, protocol)
                    } else {
                        about
                    };
                }
                _ => {}
            }
        }
        let v4: bool = self.rng.random();
        let clients = self.world.clients.iter().filter(|addr| addr.is_v4() == v4);
        let clients: Vec<&Addr> = clients.collect();
        let vips = self
            .world
            .vips
            .iter()
            .filter(|(addr, _)| addr.is_v4() == v4);
        let vips: Vec<&(Addr, u16)> = vips.collect();
        let (Some(client), Some((vip, port))) =
            (clients.choose(&mut self.rng), vips.choose(&mut self.rng))
        else {
            unreachable!("the world has clients and services of both families");
        };
        let mut to = (*vip, *port);
        match self.rng.random_range(0..16) {
            0 => to.1 = self.rng.random(),
            1 => to.1 = 99,
            2 => to.0 = **clients.choose(&mut self.rng).unwrap_or(client),
            _ => {}
        }
        let mut client = **client;
        if self.rng.random_ratio(1, 40) {
            let mut octets = client.octets();
            let from = if v4 { 12 } else { 0 };
            octets[self.rng.random_range(from..16)] = self.rng.random();
            client = Addr::from_v6(octets);
        }
        (client, port_number(&mut self.rng), to.0, to.1, protocol)
    }

    /// TCP's sequence and acknowledgement numbers: the connection's own, or at the limits of what counts, or others.
    fn numbers(&mut self) -> [u32; 2] {
        let known = self.about.map(|(key, replies)| {
            let Numbers { positions, syn, .. } = self.state.flows.numbers(&key);
            let [own, other] = [replies, !replies].map(|side| positions[usize::from(side)]);
            (own, if self.rng.random() { other } else { syn })
        });
        let (own, other) = known.unwrap_or_default();
        [own, other].map(|number| {
            let around = number.unwrap_or_else(|| self.rng.random());
            let limit = *[0, 0, 0, 0, NEAR, FAR, AHEAD, UNACKNOWLEDGED, 1 << 31]
                .choose(&mut self.rng)
                .unwrap_or(&0);
            let by = self.rng.random_range(0..3_u32).wrapping_sub(1);
            if self.rng.random() {
                around.wrapping_add(limit).wrapping_add(by)
            } else {
                around.wrapping_sub(limit).wrapping_add(by)
            }
        })
    }

    /// A packet of TCP or UDP between two ends.
    fn between(&mut self, (src, from, dst, to, protocol): Ends) -> Packet {
        let length = match self.rng.random_range(0..40) {
            0 => self.rng.random_range(1300..1500),
            1 => self.rng.random_range(1500..3000),
            2..6 => 0,
            _ => self.rng.random_range(0..48),
        };
        let mut data = vec![0; length];
        self.rng.fill(&mut data[..]);
        let payload = if protocol == Protocol::TCP {
            let flags = match self.rng.random_range(0..16) {
                0..7 => flags::SYN,
                7..12 => flags::ACK,
                12 => flags::ACK | flags::FIN,
                13 => flags::RST,
                14 => flags::SYN | flags::ACK,
                _ => self.rng.random(),
            };
            let options = vec![1; 4 * self.rng.random_range(0..4)];
            Payload::Tcp {
                ports: [from, to],
                flags,
                options,
                data,
            }
        } else {
            Payload::Udp {
                ports: [from, to],
                summed: self.rng.random_ratio(7, 8),
                data,
            }
        };
        // One family's addresses both ways, whatever a mutation made of them.
        let (src, dst) = (src.ip(), dst.ip());
        let numbers = self.numbers();
        let packet = match (src, dst) {
            (IpAddr::V4(_), IpAddr::V4(_)) | (IpAddr::V6(_), IpAddr::V6(_)) => {
                Packet::new(src, dst, payload)
            }
            (_, dst) => Packet::new(dst, dst, payload),
        };
        Packet { numbers, ..packet }
    }

    fn shape(&mut self, kind: Kind) -> Packet {
        let ends = self.ends(kind);
        let mut packet = self.between(ends);
        self.decorate(&mut packet);
        match kind {
            Kind::Error => self.error(&packet),
            Kind::Other => {
                packet.payload = if self.rng.random() {
                    Payload::Icmp {
                        kind: [self.rng.random(), 0],
                        rest: self.rng.random(),
                        data: vec![7; self.rng.random_range(0..64)],
                    }
                } else {
                    Payload::Raw(self.rng.random(), vec![7; self.rng.random_range(0..64)])
                };
                packet
            }
            _ => packet,
        }
    }

    /// What is optional in an IP packet.
    fn decorate(&mut self, packet: &mut Packet) {
        let rng = &mut self.rng;
        packet.hops = *[64, 64, 64, 255, 128, 2, 1, 0].choose(rng).unwrap_or(&64);
        packet.class = *[0, 0, 0, 0x10, 0xb8, 0xff].choose(rng).unwrap_or(&0);
        packet.whole = rng.random();
        packet.identification = rng.random_range(0..4);
        if packet.src.is_ipv4() {
            if rng.random_ratio(1, 8) {
                packet.options = vec![1; 4 * rng.random_range(1..11)];
                // Some with a meaning: the end, routes, records of them; and those with a length that may be wrong.
                if rng.random_ratio(1, 3) {
                    let at = rng.random_range(0..packet.options.len());
                    let kind = *[0, 7, 68, 131, 137, 148].choose(rng).unwrap_or(&0);
                    packet.options[at] = kind;
                    if let Some(length) = packet.options.get_mut(at + 1) {
                        *length = rng.random_range(0..12);
                    }
                }
            }
        } else if rng.random_ratio(1, 4) {
            for _ in 0..rng.random_range(1..5) {
                let number = [
                    protocol::HOP_BY_HOP,
                    protocol::ROUTING,
                    protocol::DESTINATION,
                ];
                let number = *number.choose(rng).unwrap_or(&protocol::DESTINATION);
                let words: u8 = rng.random_range(0..3);
                let mut body = vec![words];
                body.resize(7 + 8 * usize::from(words), 0);
                packet.extensions.push((number, body));
            }
        }
        if rng.random_ratio(1, 7) {
            let from = 8 * rng.random_range(0..4_usize).saturating_sub(1);
            packet.part = Some(Part {
                from,
                to: from + 8 * rng.random_range(1..200),
                more: rng.random(),
            });
        }
    }

    /// An ICMP error about a packet: from where it was going, or from somewhere on the way.
    fn error(&mut self, about: &Packet) -> Packet {
        let v4 = about.src.is_ipv4();
        let kinds: &[u8] = if v4 {
            &[3, 3, 3, 11, 12, 4, 5, 8]
        } else {
            &[1, 2, 3, 4, 2, 128, 136]
        };
        let kind = *kinds.choose(&mut self.rng).unwrap_or(&3);
        let quoted = about.ip();
        let most = match self.rng.random_range(0..4) {
            0 => quoted.len(),
            1 => 28,
            2 => self.rng.random_range(0..=quoted.len()),
            _ => 576 - 28,
        };
        let from = if self.rng.random() {
            about.dst
        } else {
            let same = |addr: &&Addr| addr.is_v4() == v4;
            let others: Vec<&Addr> = self.world.clients.iter().filter(same).collect();
            others
                .choose(&mut self.rng)
                .map_or(about.dst, |addr| addr.ip())
        };
        let payload = Payload::Icmp {
            kind: [kind, self.rng.random_range(0..16)],
            rest: [0, 0, 5, 120],
            data: quoted[..most.min(quoted.len())].to_vec(),
        };
        let mut to = about.src;
        // Some errors do not go to the sender of what they quote.
        if self.rng.random_ratio(1, 8) {
            let same = |addr: &&Addr| addr.is_v4() == v4;
            let others: Vec<&Addr> = self.world.clients.iter().filter(same).collect();
            to = others.choose(&mut self.rng).map_or(to, |addr| addr.ip());
        }
        let mut packet = Packet::new(from, to, payload);
        if self.rng.random_ratio(1, 4) {
            self.decorate(&mut packet);
        }
        packet
    }

    fn raw(&mut self) -> Vec<u8> {
        let length = self.rng.random_range(15..160);
        let mut bytes = vec![0; length];
        self.rng.fill(&mut bytes[..]);
        let v4: bool = self.rng.random();
        let kind = if v4 { [8, 0] } else { [0x86, 0xdd] };
        if self.rng.random_ratio(7, 8) {
            bytes[12..14].copy_from_slice(&kind);
            bytes[14] = if v4 { 0x45 } else { 0x60 };
        }
        // Lengths that hold, so that the rest is looked at.
        if self.rng.random() && length > 60 {
            let (at, length) = if v4 {
                (16, length - 14)
            } else {
                (18, length - 54)
            };
            let length = u16::try_from(length).unwrap_or_default();
            bytes[at..at + 2].copy_from_slice(&length.to_be_bytes());
            let number = *[protocol::TCP, protocol::UDP, 1, 58, 44, 0, 60]
                .choose(&mut self.rng)
                .unwrap_or(&6);
            bytes[if v4 { 23 } else { 20 }] = number;
        }
        bytes
    }

    /// Changes bytes as faults and attackers do.
    fn mutate(&mut self, frame: &mut Vec<u8>) {
        for _ in 0..self.rng.random_range(1..4) {
            let v4 = frame.get(12..14) == Some(&[8, 0]);
            match self.rng.random_range(0..9) {
                // Cut short.
                0 => frame.truncate(self.rng.random_range(15..=frame.len().max(15))),
                // A length that lies: IPv4's header's, the packet's.
                1 if v4 && frame.len() > 14 => frame[14] = 0x40 | self.rng.random_range(0..16),
                1 | 2 => {
                    let at = if v4 { 16 } else { 18 };
                    if frame.len() > at + 2 {
                        let length: u16 = match self.rng.random_range(0..4) {
                            0 => self.rng.random(),
                            _ => self.rng.random_range(0..120),
                        };
                        frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
                    }
                }
                // A field of the IP header, or of what follows.
                3 | 4 => {
                    let end = frame.len().min(if v4 { 60 } else { 110 });
                    let at = self.rng.random_range(12..end.max(13));
                    if let Some(byte) = frame.get_mut(at) {
                        *byte = self.rng.random();
                    }
                }
                // A bit anywhere.
                5 | 6 => {
                    let at = self.rng.random_range(6..frame.len().max(7));
                    if let Some(byte) = frame.get_mut(at) {
                        *byte ^= 1 << self.rng.random_range(0..8);
                    }
                }
                // An inline VLAN tag.
                _ => {
                    if frame.len() > 14 {
                        frame.splice(12..12, [0x81, 0, 0, 42]);
                    }
                }
            }
        }
    }
}
