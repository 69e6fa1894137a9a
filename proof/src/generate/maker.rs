//! Makes packets.

use std::net::IpAddr;

use dataplane_common::{
    Addr, Protocol,
    packet::FlowKey,
    tcp::{AHEAD, FAR, NEAR, UNACKNOWLEDGED},
};
use rand::{RngExt as _, rngs::SmallRng, seq::IndexedRandom as _};

use super::{Kind, LONGEST, Sort, any, port_number};
use crate::{
    model::{Input, sequences::Numbers, state::State},
    wire::{LINK, Packet, Part, Payload, flags, protocol},
    world::{To, World},
};

pub(super) struct Maker<'a> {
    pub(super) rng: SmallRng,
    pub(super) world: &'a World,
    pub(super) state: &'a State,
    /// The flow that the next packet belongs to, and whether the packet is a reply.
    pub(super) about: Option<(FlowKey, bool)>,
}

/// Source address and port, destination address and port, protocol.
type Ends = (Addr, u16, Addr, u16, Protocol);

impl Maker<'_> {
    pub(super) fn packet(&mut self) -> (Input, Sort) {
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
        // A packet from a raw socket of the node.
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
        // The kernel refuses a frame without any byte behind the link-layer header.
        frame.resize(frame.len().max(LINK + 1), 0);
        let input = Input {
            leaves,
            ifindex,
            segmented: self.rng.random_ratio(1, 20),
            frame,
        };
        (input, Sort { kind, mutated })
    }

    /// Chooses the interface of a packet: in most cases the interface of the route to its source.
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
                    // Or from a socket of the node with the flow's port.
                    if seen != client && self.rng.random() {
                        return (seen, port, endpoint, to, protocol);
                    }
                    return (client, from, endpoint, to, protocol);
                }
                // An ICMP error quotes a translated packet: to the endpoint, or to the client.
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

    /// Chooses TCP's sequence and acknowledgement numbers: near the connection's own, near the limits of the accepted
    /// ranges, or random.
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

    /// Builds a TCP or UDP packet.
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
        // Both addresses must be of one family. A mutated client address may have changed its family.
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

    /// Adds optional parts of an IP packet at random.
    fn decorate(&mut self, packet: &mut Packet) {
        let rng = &mut self.rng;
        packet.hops = *[64, 64, 64, 255, 128, 2, 1, 0].choose(rng).unwrap_or(&64);
        packet.class = *[0, 0, 0, 0x10, 0xb8, 0xff].choose(rng).unwrap_or(&0);
        packet.whole = rng.random();
        packet.identification = rng.random_range(0..4);
        if packet.src.is_ipv4() {
            if rng.random_ratio(1, 8) {
                packet.options = vec![1; 4 * rng.random_range(1..11)];
                // Some options have a meaning: end of options, source routes, record route. Their length byte may be
                // wrong.
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

    /// Builds an ICMP error about a packet, from the packet's destination or from a router on the path.
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
        // Some errors do not go to the sender of the quoted packet.
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
        // Correct lengths, so that the programs also parse the rest.
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

    /// Mutates bytes, as faults and attackers do.
    fn mutate(&mut self, frame: &mut Vec<u8>) {
        for _ in 0..self.rng.random_range(1..4) {
            let v4 = frame.get(12..14) == Some(&[8, 0]);
            match self.rng.random_range(0..9) {
                // Truncates the frame.
                0 => frame.truncate(self.rng.random_range(15..=frame.len().max(15))),
                // A wrong length: of the IPv4 header, or of the packet.
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
                // A random byte in the IP header, or in the header behind it.
                3 | 4 => {
                    let end = frame.len().min(if v4 { 60 } else { 110 });
                    let at = self.rng.random_range(12..end.max(13));
                    if let Some(byte) = frame.get_mut(at) {
                        *byte = self.rng.random();
                    }
                }
                // A random bit anywhere.
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
