//! The two ends of conversations: sockets that send and receive whole packets, on hosts whose own stack is silent.

use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use dataplane_proof::wire::{Packet, Payload};
use dataplane_tests::Host;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    ENDPOINT, TCP, UDP,
    flows::inside,
    talk::{Conversation, Sent},
};

/// Packets with this mark are ours.
const MARK: u32 = 0x77;
/// The client's port of the first conversation.
const FIRST_PORT: u16 = 20_000;
/// After so long without a packet, no more come.
const SILENCE: Duration = Duration::from_millis(60);

/// What arrived.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    at_client: bool,
    /// Whom it came from; of the endpoint, the port is left out.
    from: (Ipv4Addr, u16),
    protocol: u8,
    /// TCP's flags, or ICMP's type and code.
    flags: u16,
    numbers: [u32; 2],
    bytes: usize,
    /// Whether its checksum is right.
    whole: bool,
}

struct End {
    out: Socket,
    ins: [Socket; 3],
    addr: Ipv4Addr,
}

impl End {
    fn new(host: &Host) -> Result<Self> {
        let rules = format!(
            "add table ip quiet; add chain ip quiet out {{ type filter hook output priority 0; }}; \
             add rule ip quiet out meta mark != {MARK} ip protocol {{ tcp, udp, icmp }} drop"
        );
        host.command("nft").arg(rules).run()?;
        inside(host, || {
            let raw = |protocol: i32| -> Result<Socket> {
                let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)))?;
                socket.set_nonblocking(true)?;
                socket.set_recv_buffer_size(8 << 20)?;
                Ok(socket)
            };
            // IPPROTO_RAW: what is sent has its own header.
            let out = raw(255)?;
            out.set_mark(MARK)?;
            Ok(Self {
                out,
                ins: [raw(6)?, raw(17)?, raw(1)?],
                addr: host.ipv4(),
            })
        })
    }
}

/// Both ends, and what is between them.
pub struct Site<'a> {
    client: End,
    endpoint: End,
    node: Ipv4Addr,
    talks: &'a [Conversation],
    /// Where the endpoint has seen each conversation's client.
    seen_as: Vec<Option<(Ipv4Addr, u16)>>,
}

impl<'a> Site<'a> {
    pub fn new(
        client: &Host,
        endpoint: &Host,
        node: &Host,
        talks: &'a [Conversation],
    ) -> Result<Self> {
        Ok(Self {
            client: End::new(client)?,
            endpoint: End::new(endpoint)?,
            node: node.ipv4(),
            talks,
            seen_as: vec![None; talks.len()],
        })
    }

    /// The client's port of a conversation.
    pub fn port(number: usize) -> u16 {
        FIRST_PORT + u16::try_from(number).unwrap_or_default()
    }

    /// Sends a packet, if its sender knows whom to send it to.
    pub fn send(&self, number: usize, sent: &Sent) -> Result<()> {
        let udp = self.talks[number].udp;
        let vip = (self.node, if udp { UDP } else { TCP });
        let (end, from, to) = if sent.by_client {
            (&self.client, (self.client.addr, Self::port(number)), vip)
        } else {
            let Some(to) = self.seen_as[number] else {
                return Ok(());
            };
            (&self.endpoint, (self.endpoint.addr, ENDPOINT), to)
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
        let packet = Packet {
            // By this the other end knows which conversation it is.
            identification: u32::try_from(number + 1)?,
            numbers: sent.numbers,
            ..Packet::new(from.0.into(), to.0.into(), payload)
        };
        let to = SocketAddr::new(IpAddr::V4(to.0), 0);
        end.out
            .send_to(&packet.ip(), &to.into())
            .context("cannot send")?;
        Ok(())
    }

    /// Receives what has come, of each conversation.
    pub fn receive(&mut self) -> Result<Vec<Vec<Seen>>> {
        let mut all = vec![Vec::new(); self.talks.len()];
        let mut last = Instant::now();
        let mut buffer = [0; 2048];
        while last.elapsed() < SILENCE {
            let mut came = false;
            for at_client in [true, false] {
                let end = if at_client {
                    &self.client
                } else {
                    &self.endpoint
                };
                for socket in &end.ins {
                    loop {
                        let mut reader = socket;
                        let length = match reader.read(&mut buffer) {
                            Ok(length) => length,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                            Err(error) => return Err(error.into()),
                        };
                        came = true;
                        let found = read(&buffer[..length], at_client);
                        let Some((number, from, seen)) = found.filter(|(n, ..)| *n < all.len())
                        else {
                            continue;
                        };
                        if !at_client {
                            self.seen_as[number] = Some(from);
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

/// Reads a packet: of which conversation it is, whom it comes from, and what it says.
fn read(packet: &[u8], at_client: bool) -> Option<(usize, (Ipv4Addr, u16), Seen)> {
    let word = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
    let long = |at: usize| Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?));
    let addr = |at: usize| long(at).map(Ipv4Addr::from_bits);
    let header = usize::from(packet.first()? & 15) * 4;
    let (protocol, from) = (*packet.get(9)?, (addr(12)?, word(header)?));
    // The client's port tells, also of what the node sends; at the endpoint, that may be another one.
    let number = if at_client && protocol != 1 {
        usize::from(word(header + 2)?.checked_sub(FIRST_PORT)?)
    } else if protocol == 1 {
        usize::from(word(header + 8 + 4)?).checked_sub(1)?
    } else {
        usize::from(word(4)?).checked_sub(1)?
    };
    let (flags, numbers, data) = match protocol {
        6 => {
            let offset = usize::from(packet.get(header + 12)? >> 4) * 4;
            let flags = u16::from(*packet.get(header + 13)?);
            (
                flags,
                [long(header + 4)?, long(header + 8)?],
                header + offset,
            )
        }
        17 => (0, [0; 2], header + 8),
        _ => (word(header)?, [0; 2], packet.len()),
    };
    let total: u32 = dataplane_proof::wire::sum(&packet[header..]);
    let pseudo = match protocol {
        1 => 0,
        _ => dataplane_proof::wire::pseudo(
            &packet[12..16],
            &packet[16..20],
            protocol,
            packet.len() - header,
        ),
    };
    let seen = Seen {
        at_client,
        from: (
            from.0,
            if at_client && protocol != 1 {
                from.1
            } else {
                0
            },
        ),
        protocol,
        flags,
        numbers,
        bytes: packet.len().checked_sub(data)?,
        whole: dataplane_proof::wire::fold(total + pseudo) == 0xffff,
    };
    Some((number, from, seen))
}
