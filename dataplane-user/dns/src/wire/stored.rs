//! Answers of resolvers in the cache's format: their bytes, and the offsets of their times to live.

use hickory_proto::op::ResponseCode;

use super::{HEADER, IN, Record, counts, end_of_name, question, read_u32, skip_name, types, word};
use crate::name::LowerName;

/// A checked answer, stored to answer other queries with: one question, no OPT record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The message, and then where its times to live are: two bytes for each.
    packed: Box<[u8]>,
    shape: Shape,
}

/// Properties of an answer that are not in its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many bytes of the packed ones are the message's.
    message: usize,
    /// How many packed bytes there are.
    pub packed: usize,
    /// Whether we are who knows.
    pub(super) authoritative: bool,
    /// The upper bits of its code.
    pub(super) upper: u8,
    /// How long caches may retain it, in seconds.
    pub ttl: u32,
}

/// Why bytes are not an answer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAnAnswer {
    /// It is malformed.
    #[error("the answer is malformed")]
    Malformed,
    /// It answers something else.
    #[error("the answer is to another question")]
    AnotherQuestion,
}

impl Stored {
    /// Takes an answer to a question of the Internet's class apart. `authoritative`: it is our own.
    ///
    /// # Errors
    ///
    /// It is malformed, or no answer to that question.
    pub fn read(
        bytes: &[u8],
        name: &LowerName,
        of_type: u16,
        authoritative: bool,
    ) -> Result<Self, NotAnAnswer> {
        use NotAnAnswer::{AnotherQuestion, Malformed};
        let counts = counts(bytes).ok_or(Malformed)?;
        if bytes[2] & 0xf8 != 0x80 {
            return Err(AnotherQuestion);
        }
        // A server that refuses a query need not repeat the question: FORMERR, SERVFAIL, NOTIMP, REFUSED.
        if counts[0] == 0 && matches!(bytes[3] & 0x0f, 1 | 2 | 4 | 5) {
            return Ok(Self::without_records(bytes, name, of_type));
        }
        if counts[0] != 1 {
            return Err(AnotherQuestion);
        }
        let (asked, end) = LowerName::read(bytes, HEADER).map_err(|_| Malformed)?;
        if asked != *name || word(bytes, end) != Some(of_type) || word(bytes, end + 2) != Some(IN) {
            return Err(AnotherQuestion);
        }
        let mut at = end + 4;
        let mut ttls = Vec::new();
        let mut shortest = u32::MAX;
        // The OPT record, and how many records precede it in its section.
        let mut opt: Option<(Record, u16)> = None;
        let mut negative = None;
        for (section, count) in counts[1..].iter().enumerate() {
            for number in 0..*count {
                let Some(record) = Record::read(bytes, at) else {
                    // A datagram may be cut anywhere. Its records are of no use: the question is repeated by TCP.
                    return if bytes[2] & 0x02 != 0 {
                        Ok(Self::without_records(bytes, name, of_type))
                    } else {
                        Err(Malformed)
                    };
                };
                at = record.end;
                if record.of_type == types::OPT {
                    if section != 2 || opt.is_some() {
                        return Err(Malformed);
                    }
                    opt = Some((record, number));
                }
                // Additional records after the OPT record are left out: their pointers would lead elsewhere without it.
                if opt.is_some() {
                    continue;
                }
                // The upper bit set counts as zero (RFC 2181).
                let ttl = read_u32(bytes, record.ttl);
                let ttl = if ttl > i32::MAX as u32 { 0 } else { ttl };
                shortest = shortest.min(ttl);
                ttls.push(u16::try_from(record.ttl).map_err(|_| Malformed)?);
                if record.of_type == types::SOA && section == 1 && record.end >= 4 {
                    negative = Some(ttl.min(read_u32(bytes, record.end - 4)));
                }
            }
        }
        let mut bytes = bytes[..at].to_vec();
        // We chose the letter case of the query, so the answer gets the plain name instead.
        bytes[HEADER..end].copy_from_slice(name.bytes());
        for at in &ttls {
            let at = usize::from(*at);
            if read_u32(&bytes, at) > i32::MAX as u32 {
                bytes[at..at + 4].fill(0);
            }
        }
        let mut upper = 0;
        if let Some((opt, before)) = opt {
            upper = bytes[opt.ttl];
            bytes.truncate(opt.start);
            bytes[10..HEADER].copy_from_slice(&before.to_be_bytes());
        }
        let is_negative = bytes[3] & 0x0f == 3 || counts[1] == 0;
        let ttl = match (bytes[3] & 0x0f, upper) {
            // No cache retains a negative answer without SOA.
            (0 | 3, 0) if is_negative => negative.map_or(0, |ttl| ttl.min(shortest)),
            // An alias that leads to nothing has a SOA record, too.
            (0, 0) => negative.map_or(shortest, |ttl| ttl.min(shortest)),
            _ => 0,
        };
        let message = bytes.len();
        bytes.extend(ttls.into_iter().flat_map(u16::to_ne_bytes));
        let shape = Shape {
            message,
            packed: bytes.len(),
            authoritative,
            upper,
            ttl,
        };
        Ok(Self::new(bytes.into(), shape))
    }

    /// The answer with these packed bytes.
    pub fn new(packed: Box<[u8]>, shape: Shape) -> Self {
        Self { packed, shape }
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        &self.packed[..self.shape.message]
    }

    /// Its bytes in one piece, as the cache keeps them.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// Properties that are not in the bytes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The offsets of the times to live.
    fn ttls(&self) -> impl Iterator<Item = usize> {
        let (ttls, _) = self.packed[self.shape.message..].as_chunks();
        ttls.iter().map(|at| usize::from(u16::from_ne_bytes(*at)))
    }

    /// An answer with this code of the header, and nothing else.
    pub fn bare(name: &LowerName, of_type: u16, code: u8) -> Self {
        Self::without_records(&[0, 0, 0x80, code & 0x0f], name, of_type)
    }

    /// An answer with the flags and the code of `bytes`, and nothing else.
    fn without_records(bytes: &[u8], name: &LowerName, of_type: u16) -> Self {
        let mut whole = question(0, name, of_type, 0, false);
        whole[..4].copy_from_slice(&bytes[..4]);
        let shape = Shape {
            message: whole.len(),
            packed: whole.len(),
            authoritative: false,
            upper: 0,
            ttl: 0,
        };
        Self::new(whole.into(), shape)
    }

    /// The numbers of records in its sections.
    pub fn counts(&self) -> [u16; 3] {
        counts(self.bytes()).map_or([0; 3], |[_, counts @ ..]| counts)
    }

    /// Returns the records that fit into `room` bytes: the end of the last record, and the number in each section.
    /// Additional records with one name and type are either all included, or all left out (RFC 2181).
    pub(super) fn within(&self, room: usize) -> (usize, [u16; 3]) {
        let mut end = skip_name(self.bytes(), HEADER).map_or(0, |at| at + 4);
        let mut found = [0; 3];
        // The name and type of the last additional records, where the first of them begins, and how many there are.
        let mut last: Option<(&[u8], usize, u16)> = None;
        for (section, count) in self.counts().into_iter().enumerate() {
            for _ in 0..count {
                let Some(record) = Record::read(self.bytes(), end) else {
                    return (end, found);
                };
                let owner = &self.bytes()[record.start..record.ttl - 2];
                let (_, first, before) = last
                    .filter(|(known, ..)| section == 2 && found[2] > 0 && *known == owner)
                    .unwrap_or((owner, record.start, 0));
                if record.end > room {
                    found[section] -= before;
                    return (first, found);
                }
                last = Some((owner, first, before + 1));
                end = record.end;
                found[section] += 1;
            }
        }
        (end, found)
    }

    /// Shortens the times to live of its records, or the first of them, by some seconds.
    pub(super) fn age(&self, bytes: &mut [u8], age: u32) {
        for at in self.ttls() {
            let left = read_u32(bytes, at).saturating_sub(age);
            let Some(place) = bytes.get_mut(at..at + 4) else {
                return;
            };
            place.copy_from_slice(&left.to_be_bytes());
        }
    }

    /// The message after some seconds.
    pub fn aged(&self, age: u32) -> Vec<u8> {
        let mut bytes = self.bytes().to_vec();
        self.age(&mut bytes, age);
        bytes
    }

    /// Its code.
    pub fn code(&self) -> ResponseCode {
        ResponseCode::from(self.shape.upper, self.bytes()[3] & 0x0f)
    }

    /// Whether it says that it does not fit.
    pub fn is_truncated(&self) -> bool {
        self.bytes()[2] & 0x02 != 0
    }

    /// Appends its records to another message, in which the name of its question is at `name`. The records' times to
    /// live are shorter by `age` seconds. Data of unknown types stays as it is.
    ///
    /// None: it is malformed, or a pointer would be too long.
    pub fn append_to(&self, out: &mut Vec<u8>, name: usize, age: u32) -> Option<()> {
        /// The longest pointer.
        const FAR: usize = 0x3fff;
        let bytes = &*self.aged(age);
        let name_end = skip_name(bytes, HEADER)?;
        let start = name_end + 4;
        let new = out.len();
        out.extend_from_slice(bytes.get(start..)?);
        // The pointers that were moved, in ascending order.
        let mut moved = Vec::new();
        // Updates the name's pointer to the new offset of its target; returns the offset behind the name.
        let mut move_pointer = |at: usize, out: &mut Vec<u8>| {
            let (end, pointer) = end_of_name(bytes, at)?;
            if let Some(at) = pointer {
                let to = usize::from(word(bytes, at)?) & FAR;
                let (_, further) = end_of_name(bytes, to)?;
                // A name in data of an unknown type has a pointer that stays as it is.
                if further.is_some_and(|further| moved.binary_search(&further).is_err()) {
                    return None;
                }
                moved.push(at);
                let to = if (HEADER..name_end).contains(&to) {
                    to - HEADER + name
                } else {
                    to.checked_sub(start)? + new
                };
                let to = u16::try_from(to)
                    .ok()
                    .filter(|to| usize::from(*to) <= FAR)?;
                let at = at - start + new;
                out[at..at + 2].copy_from_slice(&(to | 0xc000).to_be_bytes());
            }
            Some(end)
        };
        let count: usize = self.counts().into_iter().map(usize::from).sum();
        let mut at = start;
        for _ in 0..count {
            let record = Record::read(bytes, at)?;
            move_pointer(record.start, out)?;
            let data = record.ttl + 6;
            let (before, names) = names_in(record.of_type, &bytes[data..record.end])?;
            let mut place = data + before;
            for _ in 0..names {
                place = move_pointer(place, out)?;
            }
            at = record.end;
            if names > 0 && place > at {
                return None;
            }
        }
        Some(())
    }

    /// Returns this answer with other times to live.
    #[must_use]
    pub fn with_ttl(&self, ttl: u32) -> Self {
        self.with_ttls(|_| ttl)
    }

    /// Returns this answer with times to live of at most `ttl` seconds.
    #[must_use]
    pub fn at_most(&self, ttl: u32) -> Self {
        let mut other = self.with_ttls(|of| of.min(ttl));
        other.shape.ttl = other.shape.ttl.min(ttl);
        other
    }

    fn with_ttls(&self, change: impl Fn(u32) -> u32) -> Self {
        let mut other = self.clone();
        for at in self.ttls() {
            let ttl = change(read_u32(&other.packed, at));
            if let Some(place) = other.packed.get_mut(at..at + 4) {
                place.copy_from_slice(&ttl.to_be_bytes());
            }
        }
        other
    }
}

/// The names in the data of a record, which may have pointers: the bytes before them, and how many there are (RFC 3597).
/// None: the data is malformed.
fn names_in(of_type: u16, data: &[u8]) -> Option<(usize, usize)> {
    Some(match of_type {
        // NS, MD, MF, CNAME, MB, MG, MR, PTR, NXT, DNAME
        2..=5 | 7..=9 | types::PTR | 30 | 39 => (0, 1),
        // SOA, MINFO, RP
        types::SOA | 14 | 17 => (0, 2),
        // MX, AFSDB, RT, KX
        15 | 18 | 21 | 36 => (2, 1),
        // SIG
        24 => (18, 1),
        // PX
        26 => (2, 2),
        types::SRV => (6, 1),
        // NAPTR: after two numbers and three texts.
        35 => {
            let mut at = 4;
            for _ in 0..3 {
                at += 1 + usize::from(*data.get(at)?);
            }
            (at, 1)
        }
        _ => (0, 0),
    })
}
