//! Sets and maps, and their elements.

use std::{fmt::Write as _, net::Ipv4Addr};

use super::{
    comment,
    messages::{content, number, text},
    types::{self, Kind},
    verdict,
};

const NAME: u16 = 2;
const FLAGS: u16 = 3;
const KEY_TYPE: u16 = 4;
const KEY_LENGTH: u16 = 5;
const DATA_TYPE: u16 = 6;
const DESCRIPTION: u16 = 9;
const TIMEOUT: u16 = 11;
const USERDATA: u16 = 13;
/// `NFT_DATA_VERDICT`.
const OF_VERDICTS: u32 = 0xffff_ff00;

const ANONYMOUS: u32 = 1;
const INTERVAL: u32 = 4;
const MAP: u32 = 8;
const TIMEOUTS: u32 = 0x10;
const DYNAMIC: u32 = 0x20;
const OBJECTS: u32 = 0x40;

const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const ELEMENT_FLAGS: u16 = 3;
const ELEMENT_TIMEOUT: u16 = 4;
const ELEMENT_USERDATA: u16 = 6;
const ELEMENT_EXPRESSIONS: [u16; 2] = [7, 11];
const ELEMENT_OBJECT: u16 = 9;
const ELEMENT_KEY_END: u16 = 10;
const INTERVAL_END: u32 = 1;
const CATCH_ALL: u32 = 2;

/// `NFTA_DATA_VALUE`.
const VALUE: u16 = 1;
/// `NFTNL_UDATA_SET_KEYBYTEORDER` and `_COMMENT` of libnftnl.
const BYTE_ORDER: u8 = 0;
/// Likewise, of what keys lead to.
const DATA_BYTE_ORDER: u8 = 1;
const SET_COMMENT: u8 = 7;
/// `BYTEORDER_BIG_ENDIAN` of nft.
const BIG_ENDIAN: u32 = 2;

/// A set or a map.
#[derive(Debug, Default)]
pub struct Set {
    pub name: String,
    flags: u32,
    keys: Vec<Kind>,
    key_length: usize,
    data: Vec<Kind>,
    /// How many elements it may have; 0: any number.
    size: u32,
    timeout: u64,
    comment: Option<String>,
    big_endian: bool,
    /// Likewise, of what keys lead to.
    big_endian_data: bool,
    elements: Vec<Element>,
}

#[derive(Debug)]
struct Element {
    key: Vec<u8>,
    /// Of a range of concatenated keys.
    last: Option<Vec<u8>>,
    is_end: bool,
    catch_all: bool,
    /// What follows the key.
    rest: String,
}

impl Set {
    /// Reads a set's message, without elements.
    pub fn of(attributes: &[u8]) -> Option<Self> {
        let word = |kind| {
            content(attributes, kind)
                .and_then(number)
                .unwrap_or_default()
        };
        let data = word(DATA_TYPE);
        let userdata = content(attributes, USERDATA).unwrap_or_default();
        let is_big_endian = |of| {
            let order = super::user(userdata, of).and_then(|order| order.first_chunk());
            order.is_some_and(|order| u32::from_ne_bytes(*order) == BIG_ENDIAN)
        };
        let timeout = content(attributes, TIMEOUT).and_then(|t| t.first_chunk());
        Some(Self {
            name: text(content(attributes, NAME)?),
            flags: word(FLAGS),
            keys: types::parts(word(KEY_TYPE)),
            key_length: word(KEY_LENGTH) as usize,
            data: if data == OF_VERDICTS {
                vec![types::VERDICT]
            } else {
                types::parts(data)
            },
            // `NFTA_SET_DESC_SIZE`
            size: content(content(attributes, DESCRIPTION).unwrap_or_default(), 1)
                .and_then(number)
                .unwrap_or_default(),
            timeout: timeout.map_or(0, |ms| u64::from_be_bytes(*ms)),
            comment: comment(userdata, SET_COMMENT),
            big_endian: is_big_endian(BYTE_ORDER),
            big_endian_data: is_big_endian(DATA_BYTE_ORDER),
            elements: Vec::new(),
        })
    }

    /// Whether it belongs to one rule.
    pub fn is_anonymous(&self) -> bool {
        self.flags & ANONYMOUS != 0
    }

    /// Whether rules add elements that go after a time: these say what passed, and not what is to be done.
    pub fn remembers(&self) -> bool {
        self.flags & (DYNAMIC | TIMEOUTS) == DYNAMIC | TIMEOUTS
    }

    /// The types of the parts of its keys, with their lengths, in bytes.
    pub fn keys(&self) -> Vec<(Kind, usize)> {
        match self.keys[..] {
            [kind] => vec![(kind, self.key_length)],
            _ => of_parts(&self.keys),
        }
    }

    /// The types of the parts of what keys lead to.
    pub fn data(&self) -> &[Kind] {
        &self.data
    }

    /// Whether the parts of its keys are where their types say. A concatenation may have parts of any length whose type is
    /// no more than a number.
    pub fn is_known(&self) -> bool {
        let [_, _, ..] = self.keys[..] else {
            return true;
        };
        let length = |kind: &Kind| types::length(*kind).filter(|_| *kind != types::INTEGER);
        let lengths: Option<Vec<usize>> = self.keys.iter().map(length).collect();
        let words = |lengths: Vec<usize>| lengths.iter().map(|l| l.next_multiple_of(4)).sum();
        lengths.map(words) == Some(self.key_length)
    }

    /// Reads an element.
    pub fn add(&mut self, element: &[u8]) {
        let flags = content(element, ELEMENT_FLAGS)
            .and_then(number)
            .unwrap_or(0);
        let key = |kind| Some(content(content(element, kind)?, VALUE)?.to_vec());
        let mut rest = String::new();
        let timeout = content(element, ELEMENT_TIMEOUT).and_then(|t| t.first_chunk());
        if let Some(timeout) = timeout {
            let _ = write!(rest, " timeout {}", time(u64::from_be_bytes(*timeout)));
        }
        let userdata = content(element, ELEMENT_USERDATA).unwrap_or_default();
        if let Some(comment) = comment(userdata, 0) {
            let _ = write!(rest, " comment \"{comment}\"");
        }
        // Limits and quotas, which decide something, and counters.
        if ELEMENT_EXPRESSIONS
            .iter()
            .any(|kind| content(element, *kind).is_some())
        {
            rest.push_str(" [expression]");
        }
        if content(element, ELEMENT_OBJECT).is_some() {
            rest.push_str(" : [object]");
        }
        if let Some(data) = content(element, ELEMENT_DATA) {
            let shown = || {
                let bytes = content(data, VALUE).unwrap_or_default();
                Self::parts_text(&self.data, bytes, self.big_endian_data)
            };
            let data = verdict(data).unwrap_or_else(shown);
            let _ = write!(rest, " : {data}");
        }
        self.elements.push(Element {
            key: key(ELEMENT_KEY).unwrap_or_default(),
            last: key(ELEMENT_KEY_END),
            is_end: flags & INTERVAL_END != 0,
            catch_all: flags & CATCH_ALL != 0,
            rest,
        });
    }

    /// To be called when all elements are there.
    pub fn sort(&mut self) {
        let reversed = self.is_little_endian();
        self.elements.sort_by_cached_key(|element| {
            let mut key = element.key.clone();
            if reversed {
                key.reverse();
            }
            // An interval that ends where another begins.
            (element.catch_all, key, !element.is_end)
        });
    }

    /// Whether a key is a number in this machine's order.
    fn is_little_endian(&self) -> bool {
        let host = matches!(self.keys[..], [kind] if types::is_host_order(kind));
        host && !self.big_endian && self.flags & INTERVAL == 0 && cfg!(target_endian = "little")
    }

    /// Its elements, with `between` between them.
    pub fn elements(&self, between: &str) -> String {
        let mut text = String::new();
        let mut push = |element: &str, rest: &str| {
            if !text.is_empty() {
                text.push_str(between);
            }
            text.push_str(element);
            text.push_str(rest);
        };
        let mut elements = self.elements.iter().peekable();
        while let Some(element) = elements.next() {
            if element.catch_all {
                push("*", &element.rest);
            } else if let Some(last) = &element.last {
                push(&self.ranges_text(&element.key, last), &element.rest);
            } else if self.flags & INTERVAL == 0 || self.keys.len() != 1 {
                push(
                    &Self::parts_text(&self.keys, &element.key, self.big_endian),
                    &element.rest,
                );
            } else if !element.is_end {
                let end = elements.next_if(|next| next.is_end);
                let next = elements.peek().copied();
                let end = end.or_else(|| next.filter(|next| !next.catch_all));
                let (kind, first) = (self.keys.first().copied(), types::number(&element.key));
                let most = u128::MAX
                    .checked_shr(128 - 8 * width(&element.key))
                    .unwrap_or(0);
                let last = end.map_or(most, |end| types::number(&end.key).saturating_sub(1));
                let key = range(kind.unwrap_or(0), first, last, element.key.len());
                push(&key, &element.rest);
            }
        }
        text
    }

    /// Values of several types, of which each but the last fills whole words.
    fn parts_text(kinds: &[Kind], bytes: &[u8], big_endian: bool) -> String {
        if let [kind] = kinds {
            return if *kind == types::INTEGER && big_endian {
                types::number(bytes).to_string()
            } else {
                types::show(*kind, bytes)
            };
        }
        let (mut rest, mut all) = (bytes, Vec::new());
        for (kind, length) in of_parts(kinds) {
            let (part, after) = cut(rest, length);
            all.push(types::show(kind, part));
            rest = after;
        }
        let known = |kind: &Kind| *kind != types::INTEGER && types::length(*kind).is_some();
        if all.is_empty() || !kinds.iter().all(known) {
            return types::hex(bytes);
        }
        all.join(" . ")
    }

    fn ranges_text(&self, first: &[u8], last: &[u8]) -> String {
        let known = |kind: &Kind| *kind != types::INTEGER && types::length(*kind).is_some();
        if !self.keys.iter().all(known) {
            return format!("{}-{}", types::hex(first), types::hex(last));
        }
        let ([mut first, mut last], mut all) = ([first, last], Vec::new());
        for (kind, length) in self.keys() {
            let ((a, rest_a), (b, rest_b)) = (cut(first, length), cut(last, length));
            all.push(range(kind, types::number(a), types::number(b), length));
            (first, last) = (rest_a, rest_b);
        }
        all.join(" . ")
    }

    /// Writes it as `nft list table` does.
    pub fn write(&self, to: &mut String) {
        let word = if self.flags & (MAP | OBJECTS) == 0 {
            "set"
        } else {
            "map"
        };
        let types = |kinds: &[Kind]| {
            let names = kinds
                .iter()
                .map(|kind| types::name(*kind).unwrap_or("unknown"));
            names.collect::<Vec<_>>().join(" . ")
        };
        let _ = write!(
            to,
            "\t{word} {} {{\n\t\ttype {}",
            self.name,
            types(&self.keys)
        );
        if word == "map" {
            let _ = write!(to, " : {}", types(&self.data));
        }
        to.push('\n');
        if self.size > 0 {
            let _ = writeln!(to, "\t\tsize {}", self.size);
        }
        let flags = [
            (2, "constant"),
            (DYNAMIC, "dynamic"),
            (INTERVAL, "interval"),
            (TIMEOUTS, "timeout"),
        ];
        // That elements go after a time is said by the time.
        let implied = if self.timeout > 0 && self.flags & DYNAMIC == 0 {
            TIMEOUTS
        } else {
            0
        };
        let flags = (flags.iter()).filter(|(bit, _)| self.flags & !implied & bit != 0);
        let flags: Vec<&str> = flags.map(|(_, name)| *name).collect();
        if !flags.is_empty() {
            let _ = writeln!(to, "\t\tflags {}", flags.join(","));
        }
        if self.timeout > 0 {
            let _ = writeln!(to, "\t\ttimeout {}", time(self.timeout));
        }
        if let Some(comment) = &self.comment {
            let _ = writeln!(to, "\t\tcomment \"{comment}\"");
        }
        let elements = self.elements(",\n\t\t\t     ");
        if !elements.is_empty() {
            let _ = writeln!(to, "\t\telements = {{ {elements} }}");
        }
        to.push_str("\t}\n\n");
    }
}

fn of_parts(kinds: &[Kind]) -> Vec<(Kind, usize)> {
    let with_length = |kind: &Kind| (*kind, types::length(*kind).unwrap_or(4));
    kinds.iter().map(with_length).collect()
}

/// A part of a concatenation, without what fills its last word, and the parts after it.
fn cut(bytes: &[u8], length: usize) -> (&[u8], &[u8]) {
    let part = bytes.get(..length).unwrap_or(bytes);
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    (part, rest)
}

/// Bytes of a number.
fn width(key: &[u8]) -> u32 {
    u32::try_from(key.len().min(16)).unwrap_or(16)
}

/// A range of numbers in network order, as a network if it is one.
fn range(kind: Kind, first: u128, last: u128, length: usize) -> String {
    let bytes = |number: u128| number.to_be_bytes()[16 - length.min(16)..].to_vec();
    let show = |number| {
        let mut bytes = bytes(number);
        // In a range, all numbers are in network order.
        if types::is_host_order(kind) && cfg!(target_endian = "little") {
            bytes.reverse();
        }
        types::show(kind, &bytes)
    };
    let size = last.wrapping_sub(first).wrapping_add(1);
    let is_address = matches!(kind, types::IPV4 | types::IPV6);
    if first == last {
        show(first)
    } else if is_address && (size == 0 || size.is_power_of_two() && first.is_multiple_of(size)) {
        let bits = if size == 0 {
            128
        } else {
            size.trailing_zeros()
        };
        let all = if kind == types::IPV4 {
            Ipv4Addr::BITS
        } else {
            128
        };
        format!("{}/{}", show(first), all.saturating_sub(bits))
    } else if kind == types::IFNAME {
        // All names with a beginning.
        let (first, last) = (bytes(first), bytes(last));
        let end = first.iter().position(|byte| *byte == 0);
        let end = end.unwrap_or(first.len());
        let is_beginning = first.iter().skip(end).all(|byte| *byte == 0)
            && last.iter().skip(end).all(|byte| *byte == 0xff)
            && first.iter().zip(&last).take(end).all(|(a, b)| a == b);
        if is_beginning {
            return types::show(kind, first.get(..end).unwrap_or(&first));
        }
        format!("{}-{}", types::hex(&first), types::hex(&last))
    } else {
        format!("{}-{}", show(first), show(last))
    }
}

/// A time of so many milliseconds.
pub fn time(ms: u64) -> String {
    let mut text = String::new();
    let mut rest = ms;
    for (unit, name) in [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "m"),
        (1000, "s"),
        (1, "ms"),
    ] {
        if rest >= unit {
            let _ = write!(text, "{}{name}", rest / unit);
            rest %= unit;
        }
    }
    text
}
