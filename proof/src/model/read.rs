//! Parses a frame by the RFCs, strictly, as a node must that can receive hostile packets.

use dataplane_common::{Addr, Port, Protocol, packet::FlowKey};

use crate::wire::{LINK, flags, protocol};

/// The result of parsing a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// A packet that the programs never translate.
    Other,
    /// An IP packet that is truncated or contradicts itself.
    Malformed,
    /// ICMP of the packet's family.
    Icmp(Headers),
    /// TCP or UDP, or a fragment of a TCP or UDP packet.
    Flow(Headers),
}

/// Whether a packet is a fragment of a datagram, and which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// The packet is a whole datagram.
    Whole,
    /// The first fragment, which has the ports.
    First,
    /// A later fragment.
    Later,
}

/// The parsed headers of a packet, and their offsets in the frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headers {
    pub v4: bool,
    /// Offset of the IP header; then the offset of the header behind it and its extensions.
    pub l3: usize,
    pub l4: usize,
    /// Offset of the packet's end, by the length in its IP header.
    pub end: usize,
    pub src: Addr,
    pub dst: Addr,
    /// Source and destination port, 0 if unknown. [`Port`] takes care of the byte order.
    pub ports: [Port; 2],
    pub protocol: u8,
    pub fragment: Fragment,
    pub identification: [u8; 4],
    pub hops: u8,
    /// Whether a router may fragment the packet: IPv4 without "don't fragment".
    pub may_be_fragmented: bool,
    /// TCP's flags, if the packet contains them.
    pub flags: Option<u8>,
    /// The sequence number behind the segment's data, and the acknowledgement number.
    pub numbers: Option<[u32; 2]>,
}

impl Headers {
    /// Returns the packet's key in conntrack.
    pub fn key(&self) -> FlowKey {
        let protocol = Protocol::from_number(self.protocol);
        FlowKey::new(self.src, self.ports[0], self.dst, self.ports[1], protocol)
    }

    pub fn is_tcp(&self) -> bool {
        self.protocol == protocol::TCP
    }

    /// Whether the packet asks to open a connection (a SYN without an ACK).
    pub fn is_syn(&self) -> bool {
        let wanted = flags::SYN | flags::ACK;
        self.is_tcp() && self.flags.is_some_and(|flags| flags & wanted == flags::SYN)
    }

    /// Whether the packet accepts a connection (a SYN with an ACK).
    pub fn is_syn_ack(&self) -> bool {
        let wanted = flags::SYN | flags::ACK;
        self.is_tcp() && self.flags.is_some_and(|flags| flags & wanted == wanted)
    }

    /// The packet's length, by its IP header.
    pub fn length(&self) -> usize {
        self.end - self.l3
    }

    /// Length of the longest packet on the wire: of a segment with `segments_of` bytes of data if the packet is still
    /// to be segmented, else of the packet itself.
    pub fn longest(&self, bytes: &[u8], segments_of: Option<usize>) -> usize {
        let transport = match self.protocol {
            protocol::TCP => usize::from(bytes.get(self.l4 + 12).unwrap_or(&0) >> 4) * 4,
            _ => 8,
        };
        segments_of.map_or(self.length(), |size| self.l4 - self.l3 + transport + size)
    }

    /// Whether an ICMP error can answer the packet. A later fragment cannot be answered, and neither can a packet with
    /// IP options or with more than one short IPv6 extension header. (UDP over IPv6 usually has a fragment header.)
    pub fn is_plain(&self) -> bool {
        let usual = match (self.v4, self.fragment) {
            (_, Fragment::Later) => return false,
            (true, _) => &[20][..],
            // 40, or 48 with one short extension header.
            (false, _) => &[40, 48],
        };
        usual.contains(&(self.l4 - self.l3))
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Parses a frame. `segmented`: the frame is still to be segmented, so it may be longer than its header can express.
pub fn frame(bytes: &[u8], segmented: bool) -> Read {
    let limit = Limit::Frame {
        end: bytes.len(),
        segmented,
    };
    let read = match word(bytes, 12) {
        Some(0x0800) => v4(bytes, LINK, limit),
        Some(0x86dd) => v6(bytes, LINK, limit),
        _ => Some(Read::Other),
    };
    read.unwrap_or(Read::Malformed)
}

/// The latest offset at which a packet may end.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// The end of the frame, which contains the whole packet. `segmented`: whether it is still to be segmented.
    Frame { end: usize, segmented: bool },
    /// No limit, because an ICMP error quotes only the beginning of a packet.
    None,
}

impl Limit {
    /// Returns the end of a packet whose IP header has length 0 (BIG TCP), if the frame may contain such a packet.
    pub fn end_of_big(self) -> Option<usize> {
        match self {
            Self::Frame {
                end,
                segmented: true,
            } => Some(end),
            _ => None,
        }
    }

    pub fn allows(self, last: usize) -> bool {
        match self {
            Self::Frame { end, .. } => last <= end,
            Self::None => true,
        }
    }
}

/// Parses the IPv4 packet at `l3`. Returns `None` if its headers are incomplete or invalid.
pub fn v4(bytes: &[u8], l3: usize, limit: Limit) -> Option<Read> {
    let header = bytes.get(l3..l3 + 20)?;
    let header_length = usize::from(header[0] & 15) * 4;
    let big = limit.end_of_big().filter(|_| header[2..4] == [0, 0]);
    let end = big.unwrap_or(l3 + usize::from(word(header, 2)?));
    let l4 = l3 + header_length;
    if header[0] >> 4 != 4 || header_length < 20 || end < l4 || !limit.allows(end) {
        return None;
    }
    if big.is_some() && header[9] != protocol::TCP {
        return None;
    }
    let fragment = word(header, 6)?;
    let headers = Headers {
        v4: true,
        l3,
        l4,
        end,
        src: Addr::from_v4(header[12..16].try_into().ok()?),
        dst: Addr::from_v4(header[16..20].try_into().ok()?),
        ports: [Port::ANY; 2],
        protocol: header[9],
        fragment: match (fragment & 0x1fff, fragment & 0x2000) {
            (0, 0) => Fragment::Whole,
            (0, _) => Fragment::First,
            _ => Fragment::Later,
        },
        identification: [header[4], header[5], 0, 0],
        hops: header[8],
        may_be_fragmented: fragment & 0x4000 == 0,
        flags: None,
        numbers: None,
    };
    transport(bytes, headers, protocol::ICMP)
}

/// Parses the IPv6 packet at `l3`. Returns `None` if its headers are incomplete or invalid.
pub fn v6(bytes: &[u8], l3: usize, limit: Limit) -> Option<Read> {
    let header = bytes.get(l3..l3 + 40)?;
    let payload = usize::from(word(header, 4)?);
    let big = limit.end_of_big().filter(|_| payload == 0);
    let end = big.unwrap_or(l3 + 40 + payload);
    // A payload length of 0 means no payload, or a jumbogram, which no link here carries.
    if header[0] >> 4 != 6 || (payload == 0 && big.is_none()) || !limit.allows(end) {
        return None;
    }
    let address = |at: usize| Some(Addr::from_v6(header[at..at + 16].try_into().ok()?));
    let mut headers = Headers {
        v4: false,
        l3,
        l4: l3 + 40,
        end,
        src: address(8)?,
        dst: address(24)?,
        ports: [Port::ANY; 2],
        protocol: header[6],
        fragment: Fragment::Whole,
        identification: [0; 4],
        hops: header[7],
        may_be_fragmented: false,
        flags: None,
        numbers: None,
    };
    // An IPv4-mapped address never appears on the wire. In our tables it would stand for an IPv4 address.
    if headers.src.is_v4() || headers.dst.is_v4() {
        return Some(Read::Other);
    }
    for _ in 0..6 {
        let at = headers.l4;
        let next = headers.protocol;
        match next {
            protocol::FRAGMENT => {
                let extension = bytes.get(at..at + 8)?;
                let offset = word(extension, 2)?;
                headers.protocol = extension[0];
                headers.identification = extension[4..8].try_into().ok()?;
                headers.l4 = at + 8;
                if offset & 0xfff8 != 0 {
                    headers.fragment = Fragment::Later;
                    break;
                }
                if offset & 1 != 0 {
                    headers.fragment = Fragment::First;
                }
            }
            protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION => {
                let extension = bytes.get(at..at + 2)?;
                headers.protocol = extension[0];
                headers.l4 = at + (usize::from(extension[1]) + 1) * 8;
            }
            _ => break,
        }
    }
    if headers.l4 > end || (big.is_some() && headers.protocol != protocol::TCP) {
        return None;
    }
    transport(bytes, headers, protocol::ICMP6)
}

fn numbers(bytes: &[u8], headers: &Headers) -> Option<[u32; 2]> {
    let number = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let (sequence, ack) = (number(headers.l4 + 4)?, number(headers.l4 + 8)?);
    let header = u32::from(bytes.get(headers.l4 + 12)? >> 4) * 4;
    let carried = u32::try_from(headers.end - headers.l4).ok()?;
    // A TCP header length that exceeds the packet moves the end backwards.
    let end = sequence.wrapping_add(carried).wrapping_sub(header);
    Some([end, ack])
}

fn transport(bytes: &[u8], mut headers: Headers, icmp: u8) -> Option<Read> {
    if headers.protocol != protocol::TCP && headers.protocol != protocol::UDP {
        let whole = headers.fragment == Fragment::Whole;
        return Some(if headers.protocol == icmp && whole {
            Read::Icmp(headers)
        } else {
            Read::Other
        });
    }
    if headers.fragment == Fragment::Later {
        return Some(Read::Flow(headers));
    }
    if headers.end < headers.l4 + 8 {
        return None;
    }
    let port = |at| Some(Port::new(word(bytes, at)?));
    headers.ports = [port(headers.l4)?, port(headers.l4 + 2)?];
    if headers.is_tcp() && headers.end >= headers.l4 + 20 {
        headers.flags = bytes.get(headers.l4 + 13).copied();
        headers.numbers = numbers(bytes, &headers);
    }
    Some(Read::Flow(headers))
}
