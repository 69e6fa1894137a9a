//! The expressions of a rule, which load values into registers and compare them there, become the statements that nft
//! wrote them for (`include/uapi/linux/netfilter/nf_tables.h`).

use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    keys::{ct, meta},
    messages::{content, number, text},
    sets::Set,
    types::{self, Kind},
    verdict,
};
use crate::netlink::attributes;

/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`, `NFTA_DATA_VALUE`.
const NAME: u16 = 1;
const DATA: u16 = 2;
const VALUE: u16 = 1;

/// Operators of comparisons (`enum nft_cmp_ops`), as nft writes them.
const OPERATORS: [&str; 6] = ["", "!= ", "< ", "<= ", "> ", ">= "];
const EQUAL: usize = 0;
const AT_MOST: usize = 3;

/// Protocols of tables (`NFPROTO_…`).
pub(super) const IP: u8 = 2;
pub(super) const IP6: u8 = 10;

/// Transports whose headers begin with the source's and the destination's port: TCP, UDP, DCCP, SCTP, UDP-Lite.
const WITH_PORTS: [u8; 5] = [6, 17, 33, 132, 136];

/// Words of four bytes in the registers.
const WORDS: u32 = 16;

/// What a register holds.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) text: String,
    kind: Kind,
    pub(super) form: Form,
    /// How many words of the registers it has.
    words: usize,
}

#[derive(Clone, Debug)]
pub(super) enum Form {
    /// All of what the text says.
    Whole,
    /// A constant.
    Constant(Vec<u8>),
    /// The bits that a mask has.
    Masked(Vec<u8>),
    /// The first bytes of an address.
    Beginning,
    /// What a map leads to, of so many types.
    Mapped(usize),
}

/// Reads the expressions of one rule.
pub struct Reader<'s> {
    /// `NFPROTO_…` of the table.
    pub(super) family: u8,
    pub(super) sets: &'s BTreeMap<String, Set>,
    registers: [Option<Value>; WORDS as usize],
    statements: Vec<String>,
    /// The transport that a statement before asked for, the word for it, and the number of this statement.
    transport: Option<(u8, String, usize)>,
    /// The family that a statement asked for in a table of both (`NFPROTO_…`), and the number of this statement.
    network: Option<(u8, usize)>,
    /// The statements before this one stay: what stands behind them does something with what they let through.
    settled: usize,
}

impl<'s> Reader<'s> {
    /// For a rule of a table of a family, with the table's sets.
    pub fn new(family: u8, sets: &'s BTreeMap<String, Set>) -> Self {
        Self {
            family,
            sets,
            registers: Default::default(),
            statements: Vec::new(),
            transport: None,
            network: None,
            settled: 0,
        }
    }

    /// The rule in the words of nft; or what could be said of it, and which expression could not.
    pub fn read(mut self, expressions: &[u8]) -> Result<String, String> {
        for (_, expression) in attributes(expressions) {
            let name = content(expression, NAME).map(text).unwrap_or_default();
            let data = content(expression, DATA).unwrap_or_default();
            if self.expression(&name, data).is_none() {
                let said = self.finish();
                let name = types::plain(&name);
                return Err(format!("{said} [{name}]").trim_start().to_owned());
            }
        }
        Ok(self.finish())
    }

    fn finish(self) -> String {
        let said = self.statements.into_iter().filter(|said| !said.is_empty());
        said.collect::<Vec<_>>().join(" ")
    }

    #[expect(
        clippy::unnecessary_wraps,
        reason = "each expression that is understood ends with it"
    )]
    pub(super) fn say(&mut self, text: impl Into<String>) -> Option<()> {
        self.statements.push(text.into());
        Some(())
    }

    /// `None`: not understood.
    fn expression(&mut self, name: &str, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        match name {
            "meta" => match word(3) {
                None => {
                    let (text, kind) = meta(word(2)?)?;
                    self.load(word(1)?, text, kind)
                }
                Some(from) => {
                    let (text, kind) = meta(word(2)?)?;
                    self.assign(text, kind, from)
                }
            },
            "ct" => match word(4) {
                None => {
                    let (text, kind) = ct(word(2)?, content(data, 3))?;
                    self.load(word(1)?, &text, kind)
                }
                Some(from) => {
                    let (text, kind) = ct(word(2)?, content(data, 3))?;
                    self.assign(&text, kind, from)
                }
            },
            "payload" => self.payload(data),
            "fib" => {
                let (result, kind) = match word(2)? {
                    1 => ("oif", types::IFINDEX),
                    2 => ("oifname", types::IFNAME),
                    3 => ("type", types::FIB_TYPE),
                    _ => return None,
                };
                let flags = word(3)?;
                let names = [
                    (1, "saddr"),
                    (2, "daddr"),
                    (4, "mark"),
                    (8, "iif"),
                    (16, "oif"),
                ];
                // `NFTA_FIB_F_PRESENT`
                let kind = match flags >> 5 {
                    0 => kind,
                    1 => types::ROUTE,
                    _ => return None,
                };
                let names = names.iter().filter(|(bit, _)| flags & bit != 0);
                let names: Vec<&str> = names.map(|(_, name)| *name).collect();
                let text = format!("fib {} {result}", names.join(" . "));
                self.load(word(1)?, &text, kind)
            }
            "numgen" => {
                let mode = match word(3)? {
                    0 => "inc",
                    1 => "random",
                    _ => return None,
                };
                let mut text = format!("numgen {mode} mod {}", word(2)?);
                if let Some(offset) = word(4).filter(|offset| *offset > 0) {
                    let _ = write!(text, " offset {offset}");
                }
                self.load(word(1)?, &text, types::INTEGER)
            }
            "exthdr" => {
                // Without a register it writes to the packet.
                let (to, kind) = (word(1)?, content(data, 2)?.first()?);
                let mut text = match word(6).unwrap_or(0) {
                    // `NFT_EXTHDR_OP_TCPOPT`
                    1 => format!("tcp option @{kind}"),
                    0 => format!("exthdr @{kind}"),
                    _ => return None,
                };
                // `NFT_EXTHDR_F_PRESENT`
                match word(5).unwrap_or(0) {
                    0 => {
                        let (offset, length) = (word(3)?, word(4)?);
                        let [from, bits] = [offset, length].map(|n| u64::from(n) * 8);
                        let _ = write!(text, ",{from},{bits}");
                        let length = usize::try_from(length).ok()?;
                        self.set(to, text, types::BYTES, Form::Whole, length)
                    }
                    1 => self.load(to, &text, types::ROUTE),
                    _ => None,
                }
            }
            "immediate" => {
                let (to, data) = (word(1)?, content(data, 2)?);
                if to == 0 {
                    return self.say(verdict(data)?);
                }
                let bytes = content(data, VALUE)?.to_vec();
                let length = bytes.len();
                self.set(to, String::new(), 0, Form::Constant(bytes), length)
            }
            "bitwise" => self.bitwise(data),
            "cmp" => {
                let bytes = content(content(data, 3)?, VALUE)?;
                self.compare(word(1)?, usize::try_from(word(2)?).ok()?, bytes)
            }
            "range" => {
                let value = self.get(word(1)?)?;
                let not = ["", "!= "].get(word(2)? as usize)?;
                let ends = [3, 4].map(|end| Some(content(content(data, end)?, VALUE)?.to_vec()));
                let [Some(first), Some(last)] = ends else {
                    return None;
                };
                if !matches!(value.form, Form::Whole) {
                    return None;
                }
                let [first, last] = [first, last].map(|end| types::show(value.kind, &end));
                self.say(format!("{} {not}{first}-{last}", value.text))
            }
            "lookup" => self.lookup(data),
            _ => {
                self.settled = self.statements.len();
                self.action(name, data)
            }
        }
    }

    /// The number of a register's first word: `NFT_REG_1`… have four words each, `NFT_REG32_00`… one.
    fn word(register: u32) -> Option<usize> {
        let word = match register {
            1..=4 => (register - 1) * 4,
            8..=23 => register - 8,
            _ => return None,
        };
        Some(word as usize)
    }

    /// Puts a value of so many bytes into a register.
    fn set(
        &mut self,
        register: u32,
        text: String,
        kind: Kind,
        form: Form,
        bytes: usize,
    ) -> Option<()> {
        let word = Self::word(register)?;
        let end = word + bytes.div_ceil(4).max(1);
        // Of a longer value that was there before, the rest is no value any more.
        let end = end.min(self.registers.len());
        self.registers.get_mut(word..end)?.fill(None);
        for before in word.saturating_sub(3)..word {
            let is_long = |value: &mut Value| before + value.words > word;
            self.registers[before].take_if(is_long);
        }
        let place = self.registers.get_mut(word)?;
        let words = end - word;
        *place = Some(Value {
            text,
            kind,
            form,
            words,
        });
        Some(())
    }

    fn load(&mut self, register: u32, text: &str, kind: Kind) -> Option<()> {
        // Numbers without a known length have a word.
        let bytes = types::length(kind).unwrap_or(4);
        self.set(register, text.to_owned(), kind, Form::Whole, bytes)
    }

    pub(super) fn get(&self, register: u32) -> Option<Value> {
        self.registers.get(Self::word(register)?)?.clone()
    }

    /// What a register has, to be put somewhere.
    pub(super) fn text(&self, register: u32, kind: Kind) -> Option<String> {
        let value = self.get(register)?;
        match value.form {
            Form::Constant(bytes) => Some(types::show(kind, &bytes)),
            Form::Whole | Form::Mapped(_) => Some(value.text),
            Form::Masked(mask) => Some(format!("{} & {}", value.text, types::show(kind, &mask))),
            Form::Beginning => None,
        }
    }

    fn assign(&mut self, to: &str, kind: Kind, from: u32) -> Option<()> {
        let value = self.text(from, kind)?;
        self.settled = self.statements.len();
        self.say(format!("{to} set {value}"))
    }

    fn payload(&mut self, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        // It writes to the packet.
        if word(5).is_some() {
            return None;
        }
        let (to, base, offset, length) = (word(1)?, word(2)?, word(3)?, word(4)?);
        let form = |is_whole| {
            if is_whole {
                Form::Whole
            } else {
                Form::Beginning
            }
        };
        match (base, offset, length) {
            // Transport. With others than these, the bytes are no ports.
            (2, 0 | 2, 2) if self.has_ports() => {
                let transport = match self.transport.clone() {
                    Some((_, word, at)) => {
                        self.imply(at);
                        word
                    }
                    None => "th".to_owned(),
                };
                let field = if offset == 0 { "sport" } else { "dport" };
                self.load(to, &format!("{transport} {field}"), types::PORT)
            }
            // Network: IPv4's source and destination begin at 12 and 16, and IPv6's at 8 and 24.
            (1, 12 | 16, 1..=4) if self.is_family(IP) => {
                let field = if offset == 12 { "ip saddr" } else { "ip daddr" };
                self.drop_family();
                self.set(to, field.to_owned(), types::IPV4, form(length == 4), 4)
            }
            (1, 8 | 24, 1..=16) if self.is_family(IP6) => {
                let field = if offset == 8 {
                    "ip6 saddr"
                } else {
                    "ip6 daddr"
                };
                self.drop_family();
                self.set(to, field.to_owned(), types::IPV6, form(length == 16), 16)
            }
            (1, 9, 1) if self.is_family(IP) => self.load(to, "ip protocol", types::PROTOCOL),
            (1, 6, 1) if self.is_family(IP6) => self.load(to, "ip6 nexthdr", types::PROTOCOL),
            // Any other field by its place, in bits.
            (0..=2, ..) => {
                let base = ["ll", "nh", "th"].get(base as usize)?;
                let text = format!(
                    "@{base},{},{}",
                    u64::from(offset) * 8,
                    u64::from(length) * 8
                );
                let length = usize::try_from(length).ok()?;
                self.set(to, text, types::BYTES, Form::Whole, length)
            }
            _ => None,
        }
    }

    /// Whether the transport may have ports.
    fn has_ports(&self) -> bool {
        let transport = self.transport.as_ref();
        transport.is_none_or(|(number, ..)| WITH_PORTS.contains(number))
    }

    /// Whether the packet is known to be of a family.
    pub(super) fn is_family(&self, family: u8) -> bool {
        let is_asked = self.network.is_some_and(|(asked, _)| asked == family);
        self.family == family || self.family == 1 && is_asked
    }

    /// Lets the statement that asked for the family go without saying.
    fn drop_family(&mut self) {
        if let Some((_, at)) = self.network {
            self.imply(at);
        }
    }

    /// Lets a statement go without saying.
    fn imply(&mut self, at: usize) {
        if let Some(said) = self.statements.get_mut(at).filter(|_| at >= self.settled) {
            said.clear();
        }
    }

    fn bitwise(&mut self, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        // Shifts, and operations on two registers.
        if word(6).unwrap_or(0) != 0 {
            return None;
        }
        let bytes = |kind| content(content(data, kind)?, VALUE);
        let (mask, xor) = (bytes(4)?, bytes(5)?);
        let (value, to) = (self.get(word(1)?)?, word(2)?);
        let pairs = || mask.iter().zip(xor);
        if !matches!(value.form, Form::Whole) {
            return None;
        }
        let show = |bytes: &[u8]| types::show(value.kind, bytes);
        let text = &value.text;
        if xor.iter().all(|byte| *byte == 0) {
            self.set(
                to,
                text.clone(),
                value.kind,
                Form::Masked(mask.to_vec()),
                mask.len(),
            )
        } else if mask.iter().all(|byte| *byte == 0xff) {
            let text = format!("{text} ^ {}", show(xor));
            self.load(to, &text, value.kind)
        } else if pairs().all(|(mask, xor)| *mask == !*xor) {
            let text = format!("{text} | {}", show(xor));
            self.load(to, &text, value.kind)
        } else {
            let text = format!("{text} & {} ^ {}", show(mask), show(xor));
            self.load(to, &text, value.kind)
        }
    }

    fn compare(&mut self, register: u32, operator: usize, bytes: &[u8]) -> Option<()> {
        let value = self.get(register)?;
        let (text, kind) = (&value.text, value.kind);
        let op = OPERATORS.get(operator)?;
        let statement = match &value.form {
            Form::Beginning => {
                let mut whole = bytes.to_vec();
                whole.resize(types::length(kind)?, 0);
                format!(
                    "{text} {op}{}/{}",
                    types::show(kind, &whole),
                    bytes.len() * 8
                )
            }
            Form::Masked(mask) => {
                let is_zero = bytes.iter().all(|byte| *byte == 0);
                match types::prefix(mask) {
                    _ if matches!(kind, types::CT_STATE | types::CT_STATUS) && is_zero => {
                        let names = types::show(kind, mask);
                        match operator {
                            1 => format!("{text} {names}"),
                            EQUAL => format!("{text} ! {names}"),
                            _ => return None,
                        }
                    }
                    Some(bits) if matches!(kind, types::IPV4 | types::IPV6) => {
                        format!("{text} {op}{}/{bits}", types::show(kind, bytes))
                    }
                    _ => {
                        let op = if operator == EQUAL { "== " } else { op };
                        let [mask, bytes] = [mask, bytes].map(|bytes| types::show(kind, bytes));
                        format!("{text} & {mask} {op}{bytes}")
                    }
                }
            }
            Form::Whole => format!("{text} {op}{}", types::show(kind, bytes)),
            Form::Constant(_) | Form::Mapped(_) => return None,
        };
        // A range is two comparisons.
        if operator == AT_MOST
            && let Some(said) = self.statements.last_mut()
            && let Some(first) = said.strip_prefix(&format!("{text} >= "))
            && matches!(value.form, Form::Whole)
        {
            *said = format!("{text} {first}-{}", types::show(kind, bytes));
            return Some(());
        }
        let at = self.statements.len();
        if operator == EQUAL {
            match &**text {
                // `ip6 nexthdr` need not be the transport.
                "meta l4proto" | "ip protocol" => {
                    let number = bytes.first().copied();
                    self.transport = number.map(|number| (number, types::show(kind, bytes), at));
                }
                "meta nfproto" => self.network = bytes.first().map(|family| (*family, at)),
                _ => {}
            }
        }
        self.say(statement)
    }

    /// The key of a set that registers make.
    pub(super) fn key(&self, register: u32, set: &Set) -> Option<String> {
        if !set.is_known() {
            return None;
        }
        let (mut word, mut parts) = (Self::word(register)?, Vec::new());
        for (kind, length) in set.keys() {
            let value = self.registers.get(word)?.as_ref()?;
            parts.push(match &value.form {
                Form::Whole => value.text.clone(),
                Form::Masked(mask) => format!("{} & {}", value.text, types::show(kind, mask)),
                _ => return None,
            });
            word += length.div_ceil(4);
        }
        (!parts.is_empty()).then(|| parts.join(" . "))
    }

    fn lookup(&mut self, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        let name = content(data, 1).map(text)?;
        let set = self.sets.get(&name)?;
        let key = self.key(word(2)?, set)?;
        let of = if set.is_anonymous() {
            format!("{{ {} }}", set.elements(", "))
        } else {
            format!("@{name}")
        };
        let not = if word(5).unwrap_or(0) & 1 == 0 {
            ""
        } else {
            "!= "
        };
        match word(3) {
            None => self.say(format!("{key} {not}{of}")),
            Some(0) => {
                // The jumps are for those only that the statements before let through.
                self.settled = self.statements.len();
                self.say(format!("{key} vmap {of}"))
            }
            Some(to) => {
                let (kind, parts) = (*set.data().first()?, set.data().len());
                let length = set
                    .data()
                    .iter()
                    .map(|kind| types::length(*kind).unwrap_or(4));
                let length = length.map(|length| length.next_multiple_of(4)).sum();
                self.set(
                    to,
                    format!("{key} map {of}"),
                    kind,
                    Form::Mapped(parts),
                    length,
                )
            }
        }
    }
}
