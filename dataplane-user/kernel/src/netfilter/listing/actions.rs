//! The expressions that do something with a packet, besides a verdict.

use std::fmt::Write as _;

use super::{
    expressions::{Form, IP, IP6, Reader},
    messages::{content, number, text},
    sets, types,
};

impl Reader<'_> {
    /// `None`: not understood.
    pub(super) fn action(&mut self, name: &str, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        match name {
            "dynset" => {
                let operation = ["add", "update", "delete"].get(word(3)? as usize)?;
                let name = content(data, 1).map(text)?;
                // With data, expressions or flags it does more.
                if [5, 7, 10].iter().any(|kind| content(data, *kind).is_some())
                    || word(9).unwrap_or(0) & 1 != 0
                {
                    return None;
                }
                let key = self.key(word(4)?, self.sets.get(&name)?)?;
                let time = content(data, 6).and_then(|time| time.first_chunk());
                let time = time.map_or(0, |ms| u64::from_be_bytes(*ms));
                let time = (time > 0).then(|| format!(" timeout {}", sets::time(time)));
                let time = time.unwrap_or_default();
                self.say(format!("{operation} @{name} {{ {key}{time} }}"))
            }
            "nat" => self.nat(data),
            "masq" => {
                let to = self.ports("masquerade", word(2), word(3))?;
                self.say(format!("{to}{}", nat_flags(word(1))?))
            }
            "redir" => {
                let to = self.ports("redirect", word(1), word(2))?;
                self.say(format!("{to}{}", nat_flags(word(3))?))
            }
            "tproxy" => {
                let mut to = match u8::try_from(word(1)?).ok()? {
                    0 => "tproxy to ".to_owned(),
                    _ if self.family != 1 => "tproxy to ".to_owned(),
                    IP => "tproxy ip to ".to_owned(),
                    IP6 => "tproxy ip6 to ".to_owned(),
                    _ => return None,
                };
                if let Some(register) = word(2) {
                    let kind = if word(1)? == u32::from(IP6) {
                        types::IPV6
                    } else {
                        types::IPV4
                    };
                    let addr = self.text(register, kind)?;
                    let _ = match kind {
                        types::IPV6 => write!(to, "[{addr}]"),
                        _ => write!(to, "{addr}"),
                    };
                }
                if let Some(register) = word(3) {
                    let _ = write!(to, ":{}", self.text(register, types::PORT)?);
                }
                self.say(to)
            }
            "reject" => {
                let code = content(data, 2).and_then(|code| code.first().copied());
                self.say(self.refusal(word(1)?, code)?)
            }
            "counter" => {
                let count = |kind| content(data, kind).and_then(|n| n.first_chunk());
                let [bytes, packets] =
                    [1, 2].map(|kind| count(kind).map_or(0, |n| u64::from_be_bytes(*n)));
                self.say(format!("counter packets {packets} bytes {bytes}"))
            }
            "notrack" => self.say("notrack"),
            "limit" => self.limit(data),
            "quota" => {
                let bytes = u64::from_be_bytes(*content(data, 1)?.first_chunk()?);
                let over = if word(2).unwrap_or(0) & 1 == 0 {
                    ""
                } else {
                    "over "
                };
                self.say(format!("quota {over}{bytes} bytes"))
            }
            "connlimit" => {
                let over = if word(2).unwrap_or(0) & 1 == 0 {
                    ""
                } else {
                    "over "
                };
                self.say(format!("ct count {over}{}", word(1)?))
            }
            "queue" => {
                // Several queues, flags, or a number from a register decide where packets go.
                let more =
                    |kind| content(data, kind).is_some_and(|n| n.iter().any(|byte| *byte != 0));
                let queues = content(data, 2).and_then(|n| n.first_chunk());
                if queues.is_some_and(|n| u16::from_be_bytes(*n) > 1) || more(3) || more(4) {
                    return None;
                }
                let number = content(data, 1).and_then(|number| number.first_chunk());
                let number = number.map(|number| format!(" to {}", u16::from_be_bytes(*number)));
                self.say(format!("queue{}", number.unwrap_or_default()))
            }
            "synproxy" => self.say("synproxy"),
            "flow_offload" => {
                let table = content(data, 1).map(text)?;
                self.say(format!("flow add @{}", types::plain(&table)))
            }
            "objref" => {
                // `NFT_OBJECT_COUNTER`, the only one that decides nothing.
                let name = content(data, 2).map(text).filter(|_| word(1) == Some(1))?;
                self.say(format!("counter name \"{}\"", types::plain(&name)))
            }
            "log" => {
                let prefix = content(data, 2).map(text);
                let prefix = prefix.map(|prefix| format!(" prefix \"{}\"", types::plain(&prefix)));
                // A group, a length and others make it longer; it decides nothing.
                self.say(format!("log{}", prefix.unwrap_or_default()))
            }
            _ => None,
        }
    }

    fn limit(&mut self, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        let long = |kind| Some(u64::from_be_bytes(*content(data, kind)?.first_chunk()?));
        let unit = match long(2)? {
            1 => "second",
            60 => "minute",
            3600 => "hour",
            86_400 => "day",
            604_800 => "week",
            _ => return None,
        };
        let (rate, burst) = (long(1)?, word(3).unwrap_or(0));
        let (per, kind) = match word(4).unwrap_or(0) {
            0 => ("", "packets"),
            1 => (" bytes", "bytes"),
            _ => return None,
        };
        let over = if word(5).unwrap_or(0) & 1 == 0 {
            ""
        } else {
            "over "
        };
        self.say(format!(
            "limit rate {over}{rate}{per}/{unit} burst {burst} {kind}"
        ))
    }

    fn nat(&mut self, data: &[u8]) -> Option<()> {
        let word = |kind| content(data, kind).and_then(number);
        let what = ["snat", "dnat"].get(word(1)? as usize)?;
        let family = u8::try_from(word(2)?).ok()?;
        let (kind, name) = match family {
            IP => (types::IPV4, "ip"),
            IP6 => (types::IPV6, "ip6"),
            _ => return None,
        };
        let flags = nat_flags(word(7).map(|flags| flags & !0x3))?;
        // Ranges of addresses are not said, nor networks that are translated into each other.
        let is_more =
            |least: u16, most: u16| word(most).is_some_and(|most| Some(most) != word(least));
        if is_more(3, 4) || word(7).unwrap_or(0) & 0x40 != 0 {
            return None;
        }
        let mapped = word(3).and_then(|register| self.get(register));
        let mapped = mapped.and_then(|value| match value.form {
            Form::Mapped(parts) => Some((value.text, parts)),
            _ => None,
        });
        if let Some((text, parts @ 2..)) = mapped {
            return (parts == 2).then(|| self.say(format!("{what} {name} to {text}{flags}")))?;
        }
        let of = if self.family == 1 {
            format!(" {name}")
        } else {
            String::new()
        };
        let addr = match word(3) {
            None => None,
            Some(register) => Some(self.text(register, kind)?),
        };
        let port = match word(5) {
            None => None,
            Some(register) => Some(self.port_range(register, word(6))?),
        };
        let to = match (addr, port) {
            (Some(addr), Some(port)) if kind == types::IPV6 => format!("[{addr}]:{port}"),
            (addr, Some(port)) => format!("{}:{port}", addr.unwrap_or_default()),
            (Some(addr), None) => addr,
            (None, None) => return None,
        };
        self.say(format!("{what}{of} to {to}{flags}"))
    }

    fn port_range(&self, first: u32, last: Option<u32>) -> Option<String> {
        let port = self.text(first, types::PORT)?;
        Some(match last.filter(|last| *last != first) {
            None => port,
            Some(last) => format!("{port}-{}", self.text(last, types::PORT)?),
        })
    }

    fn ports(&self, what: &str, first: Option<u32>, last: Option<u32>) -> Option<String> {
        Some(match first {
            None => what.to_owned(),
            Some(first) => format!("{what} to :{}", self.port_range(first, last)?),
        })
    }

    fn refusal(&self, kind: u32, code: Option<u8>) -> Option<String> {
        // `icmp_codes`, `icmpv6_codes` and `NFT_REJECT_ICMPX_…` as nft calls them.
        const ICMP: [(u8, &str); 7] = [
            (0, "net-unreachable"),
            (1, "host-unreachable"),
            (2, "prot-unreachable"),
            (3, "port-unreachable"),
            (9, "net-prohibited"),
            (10, "host-prohibited"),
            (13, "admin-prohibited"),
        ];
        const ICMPV6: [(u8, &str); 6] = [
            (0, "no-route"),
            (1, "admin-prohibited"),
            (3, "addr-unreachable"),
            (4, "port-unreachable"),
            (5, "policy-fail"),
            (6, "reject-route"),
        ];
        const ICMPX: [(u8, &str); 4] = [
            (0, "no-route"),
            (1, "port-unreachable"),
            (2, "host-unreachable"),
            (3, "admin-prohibited"),
        ];
        let (word, names): (_, &[(u8, &str)]) = match (kind, self.family) {
            (1, _) => return Some("reject with tcp reset".to_owned()),
            (0, IP) => ("icmp", &ICMP),
            (0, IP6) => ("icmpv6", &ICMPV6),
            (0, _) if self.is_family(IP) => ("icmp", &ICMP),
            (0, _) if self.is_family(IP6) => ("icmpv6", &ICMPV6),
            (2, _) => ("icmpx", &ICMPX),
            _ => return None,
        };
        let (_, name) = names.iter().find(|(of, _)| Some(*of) == code)?;
        let is_default = *name == "port-unreachable" && (kind == 2 || self.family != 1);
        Some(if is_default {
            "reject".to_owned()
        } else {
            format!("reject with {word} {name}")
        })
    }
}

/// `NF_NAT_RANGE_…` that nft has a word for.
fn nat_flags(flags: Option<u32>) -> Option<String> {
    let names = [(4, "random"), (8, "persistent"), (16, "fully-random")];
    // That ports are given is said by the ports.
    let mut rest = flags.unwrap_or(0) & !2;
    let mut all = Vec::new();
    for (bit, name) in names {
        if rest & bit != 0 {
            rest &= !bit;
            all.push(name);
        }
    }
    let text = all.join(",");
    (rest == 0).then(|| {
        if text.is_empty() {
            text
        } else {
            format!(" {text}")
        }
    })
}
