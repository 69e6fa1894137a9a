//! The two ends of conversations: sockets that send and receive whole packets, on hosts whose own stack is silent.

use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use dataplane_proof::wire::{self, Packet, Part, Payload};
use dataplane_tests::Host;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    ENDPOINT, TCP, UDP,
    flows::inside,
    talk::{About, Complaint, Conversation, Sent},
};

/// Packets with this mark are ours.
const MARK: u32 = 0x77;
/// The client's port of the first conversation.
const FIRST_PORT: u16 = 20_000;
/// After so long without a packet, no more come.
const SILENCE: Duration = Duration::from_millis(60);

/// IPv6's header, and the number of its packets on a link.
const V6: usize = 40;
const ETHERTYPE_V6: u16 = 0x86dd;

/// An address and port.
type At = (IpAddr, u16);

/// A packet that arrived.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    pub at_client: bool,
    /// Whom it came from; of the endpoint, the port is left out.
    from: At,
    protocol: u8,
    /// TCP's flags, or ICMP's type and code.
    flags: u16,
    numbers: [u32; 2],
    bytes: usize,
    /// Whether its checksum is right.
    whole: bool,
    /// Of an ICMP error: the ends of the packet that it is about, as far as the reader knows them.
    about: Option<[Option<At>; 2]>,
}

struct End {
    out: Socket,
    ins: Vec<Socket>,
    addr: IpAddr,
}

impl End {
    fn new(host: &Host, v6: bool) -> Result<Self> {
        let rules = format!(
            "add table inet quiet; add chain inet quiet out {{ type filter hook output priority 0; }}; \
             add rule inet quiet out icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept; \
             add rule inet quiet out meta mark != {MARK} meta l4proto {{ tcp, udp, icmp, icmpv6 }} drop"
        );
        host.command("nft").arg(rules).run()?;
        inside(host, || {
            let open = |domain, kind, protocol: i32| -> Result<Socket> {
                let socket = Socket::new(domain, kind, Some(Protocol::from(protocol)))?;
                socket.set_nonblocking(true)?;
                socket.set_recv_buffer_size(8 << 20)?;
                Ok(socket)
            };
            let domain = if v6 { Domain::IPV6 } else { Domain::IPV4 };
            // IPPROTO_RAW: packets that are sent have their own header.
            let out = open(domain, Type::RAW, 255)?;
            out.set_mark(MARK)?;
            // A raw socket of IPv6 does not return the header of received packets.
            let ins = if v6 {
                let link = i32::from(ETHERTYPE_V6.to_be());
                vec![open(Domain::PACKET, Type::DGRAM, link)?]
            } else {
                let each = [6, 17, 1].map(|protocol| open(domain, Type::RAW, protocol));
                each.into_iter().collect::<Result<_>>()?
            };
            let addr = if v6 {
                host.ipv6().into()
            } else {
                host.ipv4().into()
            };
            Ok(Self { out, ins, addr })
        })
    }

    fn send(&self, packet: &Packet) -> Result<()> {
        let mut bytes = packet.ip();
        if packet.dst.is_ipv6() {
            // The flow label has the packet's number.
            let number = u16::try_from(packet.identification)?.to_be_bytes();
            bytes[2..4].copy_from_slice(&number);
        }
        let to = SocketAddr::new(packet.dst, 0);
        self.out
            .send_to(&bytes, &to.into())
            .context("cannot send")?;
        Ok(())
    }
}

/// Both ends, and the node between them.
pub struct Site<'a> {
    client: End,
    endpoint: End,
    node: IpAddr,
    talks: &'a [Conversation],
    /// Where the endpoint has seen each conversation's client.
    seen_as: Vec<Option<At>>,
    /// The last packet that each side of each conversation has received, the client first.
    last: Vec<[Vec<u8>; 2]>,
}

impl<'a> Site<'a> {
    pub fn new(
        client: &Host,
        endpoint: &Host,
        node: &Host,
        talks: &'a [Conversation],
        v6: bool,
    ) -> Result<Self> {
        Ok(Self {
            client: End::new(client, v6)?,
            endpoint: End::new(endpoint, v6)?,
            node: if v6 {
                node.ipv6().into()
            } else {
                node.ipv4().into()
            },
            talks,
            seen_as: vec![None; talks.len()],
            last: vec![<[Vec<u8>; 2]>::default(); talks.len()],
        })
    }

    /// The client's port of a conversation.
    pub fn port(number: usize) -> u16 {
        FIRST_PORT + u16::try_from(number).unwrap_or_default()
    }

    fn end(&self, client: bool) -> &End {
        if client { &self.client } else { &self.endpoint }
    }

    /// Sends a packet, if its sender knows whom to send it to.
    pub fn send(&self, number: usize, sent: &Sent) -> Result<()> {
        let udp = self.talks[number].udp;
        let (from, to) = if sent.by_client {
            let port = if udp { UDP } else { TCP };
            let from = (self.client.addr, Self::port(number));
            (from, (self.node, port))
        } else {
            let Some(to) = self.seen_as[number] else {
                return Ok(());
            };
            ((self.endpoint.addr, ENDPOINT), to)
        };
        let (ports, data) = ([from.1, to.1], vec![7; sent.bytes]);
        let payload = if udp {
            Payload::Udp {
                ports,
                summed: true,
                data,
            }
        } else {
            Payload::Tcp {
                ports,
                flags: sent.flags,
                options: Vec::new(),
                data,
            }
        };
        let mut packet = Packet {
            // The other end recognises the conversation by this number.
            identification: u32::try_from(number + 1)?,
            numbers: sent.numbers,
            ..Packet::new(from.0, to.0, payload)
        };
        let end = self.end(sent.by_client);
        // A packet socket would see the fragments, which the kernel's node makes anew.
        if sent.in_parts && from.0.is_ipv4() {
            for (from, to, more) in [(0, 16, true), (16, usize::MAX, false)] {
                packet.part = Some(Part { from, to, more });
                end.send(&packet)?;
            }
            return Ok(());
        }
        end.send(&packet)
    }

    /// Sends an ICMP error, if there is a packet for it.
    pub fn complain(&self, number: usize, complaint: Complaint) -> Result<()> {
        let end = self.end(complaint.by_client);
        let quoted = &self.last[number][usize::from(!complaint.by_client)];
        let v6 = end.addr.is_ipv6();
        let Some(to) = address(quoted, v6, false) else {
            return Ok(());
        };
        let (kind, rest) = match (complaint.about, v6) {
            (About::Port, false) => ([3, 3], [0; 4]),
            (About::Port, true) => ([1, 4], [0; 4]),
            (About::Hops, false) => ([11, 0], [0; 4]),
            (About::Hops, true) => ([3, 0], [0; 4]),
            (About::Size, false) => ([3, 4], [0, 0, 5, 120]),
            (About::Size, true) => ([2, 0], [0, 0, 5, 120]),
        };
        let data = quoted[..quoted.len().min(120)].to_vec();
        end.send(&Packet {
            identification: u32::try_from(number + 1)?,
            ..Packet::new(end.addr, to, Payload::Icmp { kind, rest, data })
        })
    }

    /// Receives the packets that have arrived, and returns them for each conversation.
    pub fn receive(&mut self) -> Result<Vec<Vec<Seen>>> {
        let mut all = vec![Vec::new(); self.talks.len()];
        let mut last = Instant::now();
        let mut buffer = [0; 2048];
        while last.elapsed() < SILENCE {
            let mut came = false;
            for at_client in [true, false] {
                for nth in 0..self.end(at_client).ins.len() {
                    loop {
                        let end = self.end(at_client);
                        let v6 = end.addr.is_ipv6();
                        let mut reader = &end.ins[nth];
                        let length = match reader.read(&mut buffer) {
                            Ok(length) => length,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                            Err(error) => return Err(error.into()),
                        };
                        let packet = &buffer[..length];
                        let found = read(packet, v6, at_client);
                        let Some((number, from, seen)) = found.filter(|(n, ..)| *n < all.len())
                        else {
                            continue;
                        };
                        came = true;
                        if seen.about.is_none() {
                            self.last[number][usize::from(!at_client)] = packet.to_vec();
                            if !at_client {
                                self.seen_as[number] = Some(from);
                            }
                        }
                        all[number].push(seen);
                    }
                }
            }
            if came {
                last = Instant::now();
            }
            thread::sleep(Duration::from_millis(2));
        }
        for seen in &mut all {
            seen.sort();
        }
        Ok(all)
    }
}

fn word(packet: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?))
}

fn long(packet: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?))
}

/// A packet's source, or its destination.
fn address(packet: &[u8], v6: bool, destination: bool) -> Option<IpAddr> {
    if v6 {
        let at = if destination { 24 } else { 8 };
        let octets: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
        Some(Ipv6Addr::from(octets).into())
    } else {
        let at = if destination { 16 } else { 12 };
        Some(Ipv4Addr::from_bits(long(packet, at)?).into())
    }
}

/// Returns the length of a packet's IP header and the number of the protocol that it carries.
fn header(packet: &[u8], v6: bool) -> Option<(usize, u8)> {
    if v6 {
        Some((V6, *packet.get(6)?))
    } else {
        Some((usize::from(packet.first()? & 15) * 4, *packet.get(9)?))
    }
}

/// The conversation that a packet's sender has written in it.
fn number(packet: &[u8], v6: bool) -> Option<usize> {
    usize::from(word(packet, if v6 { 2 } else { 4 })?).checked_sub(1)
}

/// Parses a packet: returns its conversation, its sender, and its contents.
fn read(packet: &[u8], v6: bool, at_client: bool) -> Option<(usize, At, Seen)> {
    let (header, protocol) = header(packet, v6)?;
    let is_icmp = protocol == wire::protocol::ICMP || protocol == wire::protocol::ICMP6;
    let source = address(packet, v6, false)?;
    let mut from = (source, 0);
    let (mut flags, mut numbers, mut data, mut about) = (0, [0; 2], header + 8, None);
    let of;
    if is_icmp {
        let kind = word(packet, header)?;
        if v6 && kind >> 8 >= 128 {
            return None;
        }
        let quoted = packet.get(header + 8..)?;
        of = number(quoted, v6)?;
        let (inner, _) = self::header(quoted, v6)?;
        let ends = [(false, inner), (true, inner + 2)];
        let ends = ends.map(|(destination, at)| {
            let port = word(quoted, at)?;
            // The port that the endpoint sees of the client is anything.
            let masked = !at_client && destination == (port != ENDPOINT);
            Some((address(quoted, v6, destination)?, port)).filter(|_| !masked)
        });
        (flags, about, data) = (kind, Some(ends), packet.len());
    } else {
        let ports = [word(packet, header)?, word(packet, header + 2)?];
        from.1 = ports[0];
        // The client's port shows the conversation, also for packets of the node; at the endpoint, the port may differ.
        of = if at_client {
            usize::from(ports[1].checked_sub(FIRST_PORT)?)
        } else {
            number(packet, v6)?
        };
        if protocol == wire::protocol::TCP {
            flags = u16::from(*packet.get(header + 13)?);
            numbers = [long(packet, header + 4)?, long(packet, header + 8)?];
            data = header + usize::from(packet.get(header + 12)? >> 4) * 4;
        }
    }
    let ends = if v6 { 8..V6 } else { 12..20 };
    let payload = packet.get(header..)?;
    let pseudo = if protocol == wire::protocol::ICMP {
        0
    } else {
        wire::pseudo(packet.get(ends)?, &[], protocol, payload.len())
    };
    let seen = Seen {
        at_client,
        from: (from.0, if at_client { from.1 } else { 0 }),
        protocol,
        flags,
        numbers,
        bytes: packet.len().checked_sub(data)?,
        whole: wire::fold(wire::sum(payload) + pseudo) == 0xffff,
        about,
    };
    Some((of, from, seen))
}
