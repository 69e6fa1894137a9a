//! Messages as bytes: the reader of queries, and a writer of answers from bytes that are composed already.
//!
//! The common query is read and answered here, without a value for each record. [`compose`](super::compose) makes all
//! other answers.

mod stored;
#[cfg(test)]
mod tests;

use hickory_proto::op::ResponseCode;
pub use stored::{Shape, Stored};

use super::name::LowerName;

/// Length of a message's header.
pub const HEADER: usize = 12;
/// Length of the OPT record that answers have: without options.
const OPT_LENGTH: usize = 11;
/// The UDP payload size that our answers and our queries to resolvers announce: no network fragments it.
pub const PAYLOAD: u16 = 1232;
/// The maximum length of an answer by UDP, even if the client announces more.
const PAYLOAD_MAX: u16 = 4096;
/// The maximum length of an answer by UDP for a client that announces none.
const PAYLOAD_MIN: u16 = 512;
/// The opcode by which a server hears that a zone has changed.
const NOTIFY: u8 = 4;
/// The opcode that changes a zone.
const UPDATE: u8 = 5;
/// The root, type OPT.
const OPT: [u8; 3] = [0, 0, 41];
/// The first bit of an OPT record's flags: the client wants DNSSEC's records.
const DO: u8 = 0x80;

/// Types, as far as they matter here.
pub mod types {
    /// An IPv4 address.
    pub const A: u16 = 1;
    /// A zone's server.
    pub const NS: u16 = 2;
    /// An alias for another name.
    pub const CNAME: u16 = 5;
    /// The start of a zone.
    pub const SOA: u16 = 6;
    /// A name for an address.
    pub const PTR: u16 = 12;
    /// Text.
    pub const TXT: u16 = 16;
    /// An IPv6 address.
    pub const AAAA: u16 = 28;
    /// The location of a service: a host and a port.
    pub const SRV: u16 = 33;
    /// A pseudo-record with the abilities of the sender.
    pub const OPT: u16 = 41;
    /// A zone's changes.
    pub const IXFR: u16 = 251;
    /// A whole zone.
    pub const AXFR: u16 = 252;
    /// Every type.
    pub const ANY: u16 = 255;
}

/// The Internet's class.
pub const IN: u16 = 1;

/// The transport of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A datagram: short answers.
    Udp,
    /// A connection.
    Tcp,
}

/// A query that has one question of the Internet's class.
#[derive(Clone, Debug)]
pub struct Query<'a> {
    bytes: &'a [u8],
    /// Its name.
    pub name: LowerName,
    /// Its type.
    pub of_type: u16,
    /// Offset of the end of the question.
    end: usize,
    edns: Option<Edns>,
}

/// The content of a client's OPT record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edns {
    payload: u16,
    /// Whether it wants DNSSEC's records.
    dnssec: bool,
}

/// The meaning of bytes from a client.
#[derive(Clone, Debug)]
pub enum Parsed<'a> {
    /// A query to answer.
    Query(Query<'a>),
    /// Something that only resolvers may know: another opcode, another class, a signed query.
    Foreign,
    /// A query that is refused with this code, for any name.
    Refused(Query<'a>, ResponseCode),
    /// A malformed query, or one that changes a server, which is refused with this code.
    Wrong(ResponseCode),
    /// A message that gets no answer: it is an answer itself, or shorter than a header.
    Nothing,
}

/// Bits of a query that are part of its question: answers differ by them.
pub mod bits {
    /// Recursion is wanted.
    pub const RD: u8 = 1;
    /// The client wants to know whether the answer is authentic.
    pub const AD: u8 = 2;
    /// The answer need not be checked.
    pub const CD: u8 = 4;
    /// DNSSEC's records are wanted.
    pub const DO: u8 = 8;
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

impl<'a> Parsed<'a> {
    /// Parses a client's message.
    pub fn read(bytes: &'a [u8]) -> Self {
        let (Some(counts), Some(&flags)) = (counts(bytes), bytes.get(2)) else {
            return Self::Nothing;
        };
        // Two servers that answered answers would never end.
        if flags & 0x80 != 0 {
            return Self::Nothing;
        }
        match flags >> 3 {
            0 => {}
            // A server may take these from the node, which would send them, and not from the client.
            NOTIFY | UPDATE => return Self::Wrong(ResponseCode::Refused),
            _ => return Self::Foreign,
        }
        let wrong = Self::Wrong(ResponseCode::FormErr);
        if counts[0] != 1 {
            return wrong;
        }
        let Ok((name, end)) = LowerName::read(bytes, HEADER) else {
            return wrong;
        };
        let (Some(of_type), Some(class)) = (word(bytes, end), word(bytes, end + 2)) else {
            return wrong;
        };
        // A resolver may give the node, which would ask, a zone that it does not give the client.
        let is_transfer = matches!(of_type, types::AXFR | types::IXFR);
        let mut edns = None;
        let mut known_version = true;
        let mut at = end + 4;
        let of_sections = [counts[1], counts[2], counts[3]];
        for (section, count) in of_sections.into_iter().enumerate() {
            for _ in 0..count {
                let Some(record) = Record::read(bytes, at) else {
                    return wrong;
                };
                at = record.end;
                match record.of_type {
                    types::OPT => {}
                    // The SOA record of the client's copy of the zone.
                    _ if is_transfer => continue,
                    _ => return Self::Foreign,
                }
                let is_root = bytes[record.start] == 0;
                if section != 2 || edns.is_some() || !is_root {
                    return wrong;
                }
                // Version, after the upper bits of the code.
                known_version = bytes[record.ttl + 1] == 0;
                edns = Some(Edns {
                    payload: record.class,
                    dnssec: bytes[record.ttl + 2] & DO != 0,
                });
            }
        }
        let query = Query {
            bytes,
            name,
            of_type,
            end: end + 4,
            edns,
        };
        match of_type {
            _ if !known_version => Self::Refused(query, ResponseCode::BADVERS),
            _ if is_transfer => Self::Refused(query, ResponseCode::Refused),
            _ if class != IN => Self::Foreign,
            types::OPT => wrong,
            _ => Self::Query(query),
        }
    }
}

/// The numbers of questions and records in a header.
fn counts(bytes: &[u8]) -> Option<[u16; 4]> {
    Some([
        word(bytes, 4)?,
        word(bytes, 6)?,
        word(bytes, 8)?,
        word(bytes, 10)?,
    ])
}

/// The offsets of a record's parts.
#[derive(Clone, Copy, Debug)]
struct Record {
    start: usize,
    of_type: u16,
    class: u16,
    /// Offset of the time to live.
    ttl: usize,
    end: usize,
}

impl Record {
    fn read(bytes: &[u8], start: usize) -> Option<Self> {
        let at = skip_name(bytes, start)?;
        let length = word(bytes, at + 8)?;
        let end = at + 10 + usize::from(length);
        (end <= bytes.len()).then_some(Self {
            start,
            of_type: word(bytes, at)?,
            class: word(bytes, at + 2)?,
            ttl: at + 4,
            end,
        })
    }
}

/// Returns the offset behind the name at `at`, without following its pointer.
fn skip_name(bytes: &[u8], at: usize) -> Option<usize> {
    end_of_name(bytes, at).map(|(end, _)| end)
}

/// Returns the offset behind the name at `at`, and the offset of its pointer.
fn end_of_name(bytes: &[u8], mut at: usize) -> Option<(usize, Option<usize>)> {
    loop {
        let length = *bytes.get(at)?;
        match length {
            0 => return Some((at + 1, None)),
            0xc0.. => return (at + 2 <= bytes.len()).then_some((at + 2, Some(at))),
            64.. => return None,
            _ => at += 1 + usize::from(length),
        }
    }
}

impl Query<'_> {
    /// Its [`bits`].
    pub fn bits(&self) -> u8 {
        let (first, second) = (self.bytes[2], self.bytes[3]);
        let mut found = 0;
        for (is, bit) in [
            (first & 1 != 0, bits::RD),
            (second & 0x20 != 0, bits::AD),
            (second & 0x10 != 0, bits::CD),
            (self.edns.is_some_and(|edns| edns.dnssec), bits::DO),
        ] {
            found |= if is { bit } else { 0 };
        }
        found
    }

    /// Whether it has EDNS0.
    pub fn has_edns(&self) -> bool {
        self.edns.is_some()
    }

    /// How long an answer may be.
    fn limit(&self, transport: Transport) -> usize {
        let payload = match (transport, self.edns) {
            (Transport::Tcp, _) => u16::MAX,
            (Transport::Udp, Some(edns)) => edns.payload.clamp(PAYLOAD_MIN, PAYLOAD_MAX),
            (Transport::Udp, None) => PAYLOAD_MIN,
        };
        usize::from(payload)
    }

    /// Begins an answer: the header without counts, and the question as the client wrote it.
    fn begin(&self, out: &mut Vec<u8>, authoritative: bool, code: u8) {
        out.clear();
        let authoritative = if authoritative { 0x04 } else { 0 };
        out.extend_from_slice(&self.bytes[..2]);
        out.push(0x80 | authoritative | self.bytes[2] & 1);
        // Recursion is available; CD is copied from the query.
        out.push(0x80 | self.bytes[3] & 0x10 | code & 0x0f);
        out.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        out.extend_from_slice(&self.bytes[HEADER..self.end]);
    }

    /// Ends an answer: the OPT record, if the client has one.
    fn end(&self, out: &mut Vec<u8>, code: u16) {
        let Some(edns) = self.edns else { return };
        out.extend_from_slice(&OPT);
        out.extend_from_slice(&PAYLOAD.to_be_bytes());
        // The code's upper bits, the version, and the flags.
        let upper = u8::try_from(code >> 4).unwrap_or_default();
        let flags = if edns.dnssec { DO } else { 0 };
        out.extend_from_slice(&[upper, 0, flags, 0, 0, 0]);
        add(out, 10, 1);
    }

    /// Writes an answer with addresses of one family, all for the client's own name.
    pub fn with_addresses<'i>(
        &self,
        transport: Transport,
        ttl: u32,
        addresses: impl Iterator<Item = &'i [u8]>,
        out: &mut Vec<u8>,
    ) {
        self.begin(out, true, 0);
        let opt = self.edns.map_or(0, |_| OPT_LENGTH);
        let room = self.limit(transport) - opt;
        let mut count = 0_u16;
        for address in addresses {
            // A pointer to the question, type and class.
            let length = u8::try_from(address.len()).unwrap_or_default();
            if out.len() + 12 + address.len() > room || count == u16::MAX {
                out[2] |= 0x02;
                break;
            }
            out.extend_from_slice(&[0xc0, 12]);
            out.extend_from_slice(&of_family(address).to_be_bytes());
            out.extend_from_slice(&IN.to_be_bytes());
            out.extend_from_slice(&ttl.to_be_bytes());
            out.extend_from_slice(&[0, length]);
            out.extend_from_slice(address);
            count += 1;
        }
        out[6..8].copy_from_slice(&count.to_be_bytes());
        self.end(out, 0);
    }

    /// Writes an answer with only a code.
    pub fn with_code(&self, code: ResponseCode, out: &mut Vec<u8>) {
        let code = u16::from(code);
        let low = u8::try_from(code & 0x0f).unwrap_or_default();
        self.begin(out, false, low);
        self.end(out, code);
    }

    /// Writes a stored answer to the same question. `age`: the seconds since it was stored. The client's own spelling
    /// of the name replaces the stored one.
    pub fn with_stored(&self, transport: Transport, stored: &Stored, age: u32, out: &mut Vec<u8>) {
        if stored.shape().upper != 0 && self.edns.is_none() {
            // The code does not fit into the header.
            return self.with_code(ResponseCode::ServFail, out);
        }
        let bytes = stored.bytes();
        let opt = self.edns.map_or(0, |_| OPT_LENGTH);
        let low = bytes[3] & 0x0f;
        self.begin(out, stored.shape().authoritative, low);
        // Only for a client that asks for it, and one that takes DNSSEC's records.
        if self.bits() & (bits::AD | bits::DO) != 0 {
            out[3] |= bytes[3] & 0x20;
        }
        let room = self.limit(transport) - opt;
        let (end, counts) = if bytes.len() > room {
            stored.within(room)
        } else {
            (bytes.len(), stored.counts())
        };
        let is_whole = counts[..2] == stored.counts()[..2];
        // Additional records are no reason to ask again (RFC 2181).
        out[2] |= if is_whole { bytes[2] & 0x02 } else { 0x02 };
        for (place, count) in out[6..HEADER].chunks_exact_mut(2).zip(counts) {
            place.copy_from_slice(&count.to_be_bytes());
        }
        let start = out.len();
        out.extend_from_slice(bytes.get(start..end).unwrap_or_default());
        stored.age(out, age);
        self.end(out, u16::from(low) | u16::from(stored.shape().upper) << 4);
    }
}

/// The type of an address record.
fn of_family(address: &[u8]) -> u16 {
    if address.len() == 4 {
        types::A
    } else {
        types::AAAA
    }
}

/// Writes a refusal of a message that cannot be answered in another way. Writes nothing if the message cannot be
/// answered at all.
pub fn refusal(bytes: &[u8], code: ResponseCode, out: &mut Vec<u8>) {
    out.clear();
    let Some(head) = bytes.get(..4) else { return };
    let low = u8::try_from(u16::from(code) & 0x0f).unwrap_or_default();
    out.extend_from_slice(&head[..2]);
    // Opcode and RD are copied from the query.
    out.push(0x80 | head[2] & 0x79);
    out.push(0x80 | low);
    out.extend_from_slice(&[0; 8]);
}

/// Adds to a count of the header.
fn add(out: &mut [u8], at: usize, more: u16) {
    let count = u16::from_be_bytes([out[at], out[at + 1]]).saturating_add(more);
    out[at..at + 2].copy_from_slice(&count.to_be_bytes());
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u32::from_be_bytes)
}

/// Writes a query for resolvers.
pub fn question(id: u16, name: &LowerName, of_type: u16, with: u8, edns: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + name.bytes().len() + 4 + OPT_LENGTH);
    out.extend_from_slice(&id.to_be_bytes());
    out.push(u8::from(with & bits::RD != 0));
    let mut flags = 0;
    for (bit, flag) in [(bits::AD, 0x20), (bits::CD, 0x10)] {
        flags |= if with & bit != 0 { flag } else { 0 };
    }
    out.push(flags);
    out.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, u8::from(edns)]);
    out.extend_from_slice(name.bytes());
    out.extend_from_slice(&of_type.to_be_bytes());
    out.extend_from_slice(&IN.to_be_bytes());
    if edns {
        out.extend_from_slice(&OPT);
        out.extend_from_slice(&PAYLOAD.to_be_bytes());
        let flags = if with & bits::DO != 0 { DO } else { 0 };
        out.extend_from_slice(&[0, 0, flags, 0, 0, 0]);
    }
    out
}
