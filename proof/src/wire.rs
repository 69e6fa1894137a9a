//! Builds packets as bytes, with correct checksums.
//!
//! The code follows the RFCs, in plain arithmetic over slices. It shares no code with the kernel programs.

use std::net::IpAddr;

/// Length of the Ethernet header.
pub const LINK: usize = 14;

/// Protocol numbers (IANA).
pub mod protocol {
    #![allow(missing_docs, reason = "names of a registry")]
    pub const HOP_BY_HOP: u8 = 0;
    pub const ICMP: u8 = 1;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const ROUTING: u8 = 43;
    pub const FRAGMENT: u8 = 44;
    pub const ICMP6: u8 = 58;
    pub const DESTINATION: u8 = 60;
}

/// TCP's flags.
pub mod flags {
    #![allow(missing_docs, reason = "names of RFC 9293")]
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const PSH: u8 = 8;
    pub const ACK: u8 = 16;
}

/// The ones' complement sum of some bytes (RFC 1071), not yet complemented.
pub fn sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or_default();
        u32::from(pair[0]) << 8 | u32::from(low)
    });
    u32::from(fold(words.sum()))
}

/// Folds a sum to 16 bits.
pub fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or_default()
}

/// Returns an address's bytes, 4 or 16.
pub fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The sum of the pseudo header (RFC 768, RFC 9293, RFC 8200 section 8.1).
pub fn pseudo(src: &[u8], dst: &[u8], protocol: u8, length: usize) -> u32 {
    let length = u32::try_from(length).unwrap_or_default();
    sum(src) + sum(dst) + u32::from(protocol) + (length >> 16) + (length & 0xffff)
}

fn put(bytes: &mut [u8], at: usize, word: u16) {
    bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

/// The payload of an IP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A TCP segment.
    Tcp {
        /// Source and destination.
        ports: [u16; 2],
        /// Bits of [`flags`].
        flags: u8,
        /// Options, a multiple of four bytes.
        options: Vec<u8>,
        /// The data behind the header.
        data: Vec<u8>,
    },
    /// A UDP datagram.
    Udp {
        /// Source and destination.
        ports: [u16; 2],
        /// Whether there is a checksum; without one the field is 0.
        summed: bool,
        /// The data behind the header.
        data: Vec<u8>,
    },
    /// ICMP or ICMPv6, depending on the packet's family.
    Icmp {
        /// Type and code.
        kind: [u8; 2],
        /// The second 32-bit word.
        rest: [u8; 4],
        /// The data behind the second word: in errors, the quoted packet.
        data: Vec<u8>,
    },
    /// Any protocol: its number and its bytes.
    Raw(u8, Vec<u8>),
}

/// The part of the payload that a fragment carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset of the first byte: a multiple of eight.
    pub from: usize,
    /// Offset behind the last byte. A larger offset than the payload's length means its end.
    pub to: usize,
    /// Whether another fragment follows.
    pub more: bool,
}

/// An Ethernet frame with an IP packet in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Link-layer addresses, destination first.
    pub link: [[u8; 6]; 2],
    /// Source address.
    pub src: IpAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
    /// IPv4 time to live, or IPv6 hop limit.
    pub hops: u8,
    /// IPv4 type of service, or IPv6 traffic class.
    pub class: u8,
    /// Identification. IPv4 uses only the low 16 bits.
    pub identification: u32,
    /// IPv4's "don't fragment".
    pub whole: bool,
    /// IPv4's options: a multiple of four bytes, at most 40.
    pub options: Vec<u8>,
    /// IPv6 extension headers before the fragment header: protocol number, and all bytes behind the first one, which
    /// holds the number of the next header.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// The whole payload.
    pub payload: Payload,
    /// The part of the payload in this packet; `None`: the whole payload, without a fragment header.
    pub part: Option<Part>,
    /// TCP's sequence and acknowledgement numbers.
    pub numbers: [u32; 2],
}

impl Packet {
    /// Returns a packet without unusual fields.
    pub fn new(src: IpAddr, dst: IpAddr, payload: Payload) -> Self {
        Self {
            link: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            src,
            dst,
            hops: 64,
            class: 0,
            identification: 0x1234,
            whole: false,
            options: Vec::new(),
            extensions: Vec::new(),
            payload,
            part: None,
            numbers: [1, 2],
        }
    }

    /// The payload's protocol number.
    pub fn protocol(&self) -> u8 {
        match self.payload {
            Payload::Tcp { .. } => protocol::TCP,
            Payload::Udp { .. } => protocol::UDP,
            Payload::Icmp { .. } if self.src.is_ipv4() => protocol::ICMP,
            Payload::Icmp { .. } => protocol::ICMP6,
            Payload::Raw(number, _) => number,
        }
    }

    /// Returns the bytes of the whole payload, with its checksum.
    pub fn payload(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let checksum = match &self.payload {
            Payload::Tcp {
                ports,
                flags,
                options,
                data,
            } => {
                for port in ports {
                    bytes.extend(port.to_be_bytes());
                }
                for number in self.numbers {
                    bytes.extend(number.to_be_bytes());
                }
                let words = u8::try_from(5 + options.len() / 4).unwrap_or(5);
                bytes.extend([words << 4, *flags, 0x20, 0, 0, 0, 0, 0]);
                bytes.extend(options);
                bytes.extend(data);
                Some(16)
            }
            Payload::Udp {
                ports,
                summed,
                data,
            } => {
                for port in ports {
                    bytes.extend(port.to_be_bytes());
                }
                let length = u16::try_from(8 + data.len()).unwrap_or_default();
                bytes.extend(length.to_be_bytes());
                bytes.extend([0, 0]);
                bytes.extend(data);
                summed.then_some(6)
            }
            Payload::Icmp { kind, rest, data } => {
                bytes.extend(kind);
                bytes.extend([0, 0]);
                bytes.extend(rest);
                bytes.extend(data);
                Some(2)
            }
            Payload::Raw(_, data) => {
                bytes.extend(data);
                None
            }
        };
        if let Some(at) = checksum {
            let mut total = sum(&bytes);
            if self.protocol() != protocol::ICMP {
                let (src, dst) = (octets(self.src), octets(self.dst));
                total += pseudo(&src, &dst, self.protocol(), bytes.len());
            }
            let checksum = !fold(total);
            let zero_means_none = matches!(self.payload, Payload::Udp { .. });
            let checksum = if checksum == 0 && zero_means_none {
                0xffff
            } else {
                checksum
            };
            put(&mut bytes, at, checksum);
        }
        bytes
    }

    /// Returns the packet without its link-layer header.
    pub fn ip(&self) -> Vec<u8> {
        let payload = self.payload();
        let carried = match self.part {
            None => &payload[..],
            Some(part) => &payload[part.from.min(payload.len())..part.to.min(payload.len())],
        };
        let part = self.part.unwrap_or(Part {
            from: 0,
            to: 0,
            more: false,
        });
        let offset = u16::try_from(part.from / 8).unwrap_or_default();
        let mut bytes = Vec::new();
        if self.src.is_ipv4() {
            let header = 20 + self.options.len();
            let words = u8::try_from(header / 4).unwrap_or_default();
            let length = u16::try_from(header + carried.len()).unwrap_or_default();
            bytes.extend([0x40 | words, self.class]);
            bytes.extend(length.to_be_bytes());
            let [_, _, id0, id1] = self.identification.to_be_bytes();
            bytes.extend([id0, id1]);
            let fragment = offset | u16::from(part.more) << 13 | u16::from(self.whole) << 14;
            bytes.extend(fragment.to_be_bytes());
            bytes.extend([self.hops, self.protocol(), 0, 0]);
            bytes.extend(octets(self.src));
            bytes.extend(octets(self.dst));
            bytes.extend(&self.options);
            let checksum = !fold(sum(&bytes));
            put(&mut bytes, 10, checksum);
        } else {
            let mut chain: Vec<(u8, Vec<u8>)> = self.extensions.clone();
            if self.part.is_some() {
                let mut body = vec![0];
                body.extend((offset << 3 | u16::from(part.more)).to_be_bytes());
                body.extend(self.identification.to_be_bytes());
                chain.push((protocol::FRAGMENT, body));
            }
            let first = chain.first().map_or(self.protocol(), |(number, _)| *number);
            let extensions: usize = chain.iter().map(|(_, body)| body.len() + 1).sum();
            let length = u16::try_from(extensions + carried.len()).unwrap_or_default();
            bytes.extend([0x60 | self.class >> 4, self.class << 4, 0, 0]);
            bytes.extend(length.to_be_bytes());
            bytes.extend([first, self.hops]);
            bytes.extend(octets(self.src));
            bytes.extend(octets(self.dst));
            for (at, (_, body)) in chain.iter().enumerate() {
                let next = chain.get(at + 1).map_or(self.protocol(), |(n, _)| *n);
                bytes.push(next);
                bytes.extend(body);
            }
        }
        bytes.extend(carried);
        bytes
    }

    /// Returns the packet with its link-layer header.
    pub fn frame(&self) -> Vec<u8> {
        let mut frame = self.link.concat();
        frame.extend(if self.src.is_ipv4() {
            [0x08, 0x00]
        } else {
            [0x86, 0xdd]
        });
        frame.extend(self.ip());
        frame
    }
}
