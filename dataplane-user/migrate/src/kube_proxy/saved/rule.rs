//! A rule of `iptables-save` by its options, as far as kube-proxy writes them.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use ipnet::IpNet;

use super::super::facts;
use crate::text::{Word, Words};

/// Which options a rule has, one bit each.
pub mod has {
    /// `-s`
    pub const SOURCE: u32 = 1;
    /// `! -s`
    pub const NOT_SOURCE: u32 = 1 << 1;
    /// `-d`
    pub const DESTINATION: u32 = 1 << 2;
    /// `! -d`
    pub const NOT_DESTINATION: u32 = 1 << 3;
    /// `-i`
    pub const INTERFACE: u32 = 1 << 4;
    /// `! -i`
    pub const NOT_INTERFACE: u32 = 1 << 5;
    /// `-p`
    pub const PROTOCOL: u32 = 1 << 6;
    /// `--dport`
    pub const PORT: u32 = 1 << 7;
    /// `--comment`
    pub const COMMENT: u32 = 1 << 8;
    /// `-m recent --set`
    pub const REMEMBERS: u32 = 1 << 10;
    /// `-m recent --rcheck --seconds --reap`
    pub const REMEMBERED: u32 = CHECKED | SECONDS | REAPED;
    /// `--dst-type LOCAL`
    pub const TO_LOCAL: u32 = 1 << 12;
    /// `--src-type LOCAL`
    pub const FROM_LOCAL: u32 = 1 << 13;
    /// `--ctstate`
    pub const STATE: u32 = 1 << 14;
    /// `--mark`
    pub const MARK: u32 = 1 << 15;
    /// `! --mark`
    pub const NOT_MARK: u32 = 1 << 16;
    /// `--nfacct-name`
    pub const COUNTED: u32 = 1 << 17;
    /// `-j`
    pub const JUMP: u32 = 1 << 18;
    /// `--random-fully`
    pub const RANDOMLY: u32 = 1 << 19;
    /// `-m statistic --mode random --probability`
    pub const PROBABILITY: u32 = RANDOM | SHARE;

    pub(super) const SHARE: u32 = 1 << 9;
    pub(super) const CHECKED: u32 = 1 << 11;
    pub(super) const SECONDS: u32 = 1 << 20;
    pub(super) const REAPED: u32 = 1 << 21;
    pub(super) const RANDOM: u32 = 1 << 22;
}

/// A rule.
#[derive(Debug, Default)]
pub struct Rule<'a> {
    /// The options that it has: [`has`].
    pub has: u32,
    pub source: Option<IpNet>,
    pub destination: Option<IpNet>,
    pub interface: &'a str,
    pub protocol: &'a str,
    pub port: u16,
    pub comment: Cow<'a, str>,
    pub probability: f64,
    /// The name of the list of clients.
    pub list: &'a str,
    pub seconds: u64,
    pub state: &'a str,
    /// Value and mask of the match.
    pub mark: (u32, u32),
    pub target: &'a str,
    /// Destination of target DNAT.
    pub to: Option<SocketAddr>,
    /// Value and mask of target MARK.
    pub set: Option<(u32, u32)>,
}

impl<'a> Rule<'a> {
    /// Reads the options of a rule.
    ///
    /// # Errors
    ///
    /// The rule has an option that kube-proxy does not write, or one twice.
    pub fn read(text: &'a str) -> Result<Self, String> {
        let mut rule = Self::default();
        let mut words = Words::new(text).filter_map(Result::ok);
        while let Some(word) = words.next() {
            let negated = word.raw == "!";
            let word = if negated { words.next() } else { Some(word) };
            let option = word.map_or("", |word| word.raw);
            rule.option(option, negated, &mut words)?;
        }
        Ok(rule)
    }

    /// Whether the rule has these options and no others.
    pub fn is(&self, options: u32) -> bool {
        self.has == options
    }

    fn set(&mut self, option: u32, name: &str) -> Result<(), String> {
        if self.has & option != 0 {
            return Err(format!("option {name} is there twice"));
        }
        self.has |= option;
        Ok(())
    }

    fn option(
        &mut self,
        name: &str,
        negated: bool,
        words: &mut impl Iterator<Item = Word<'a>>,
    ) -> Result<(), String> {
        let unknown = || Err(format!("kube-proxy writes no option {name:?} here"));
        let mut value = || words.next().map_or("", |word| word.raw);
        match (name, negated) {
            ("-s" | "--source", _) => {
                let net = value();
                self.source = Some(network(net)?);
                self.set(
                    if negated {
                        has::NOT_SOURCE
                    } else {
                        has::SOURCE
                    },
                    name,
                )?;
            }
            ("-d" | "--destination", _) => {
                let net = value();
                self.destination = Some(network(net)?);
                let option = if negated {
                    has::NOT_DESTINATION
                } else {
                    has::DESTINATION
                };
                self.set(option, name)?;
            }
            ("-i" | "--in-interface", _) => {
                self.interface = value();
                let option = if negated {
                    has::NOT_INTERFACE
                } else {
                    has::INTERFACE
                };
                self.set(option, name)?;
            }
            ("--mark", _) => {
                self.mark = mark(value())?;
                self.set(if negated { has::NOT_MARK } else { has::MARK }, name)?;
            }
            ("--ctstate", _) => {
                self.state = value();
                // Only the guard of node ports on loopback has it, in a chain that is not read.
                if negated {
                    return unknown();
                }
                self.set(has::STATE, name)?;
            }
            (_, true) => return Err(format!("kube-proxy writes no `! {name}` here")),
            ("-p" | "--protocol", _) => {
                self.protocol = value();
                self.set(has::PROTOCOL, name)?;
            }
            ("--dport" | "--destination-port", _) => {
                let port = value();
                self.port = number(port)?;
                self.set(has::PORT, name)?;
            }
            ("--comment", _) => {
                let comment = words.next();
                self.comment = comment.map_or(Cow::Borrowed(""), |word| quoted(word.raw));
                self.set(has::COMMENT, name)?;
            }
            ("--mode", _) => {
                if value() != "random" {
                    return unknown();
                }
                self.set(has::RANDOM, name)?;
            }
            ("--probability", _) => {
                let text = value();
                let probability = text.parse();
                self.probability =
                    probability.map_err(|_| format!("{text:?} is no probability"))?;
                self.set(has::SHARE, name)?;
            }
            ("--set", _) => self.set(has::REMEMBERS, name)?,
            ("--rcheck", _) => self.set(has::CHECKED, name)?,
            ("--seconds", _) => {
                self.seconds = number(value())?;
                self.set(has::SECONDS, name)?;
            }
            ("--reap", _) => self.set(has::REAPED, name)?,
            ("--name", _) => self.list = value(),
            ("--mask", _) => match value().parse() {
                Ok(IpAddr::V4(Ipv4Addr::BROADCAST)) => {}
                Ok(IpAddr::V6(mask)) if mask.to_bits() == u128::MAX => {}
                _ => return Err("kube-proxy remembers whole addresses".to_owned()),
            },
            ("--reject-with", _) => {
                if !matches!(value(), "icmp-port-unreachable" | "icmp6-port-unreachable") {
                    return unknown();
                }
            }
            ("--rsource", _) => {}
            ("--random-fully", _) => self.set(has::RANDOMLY, name)?,
            ("--dst-type" | "--src-type", _) => {
                if value() != "LOCAL" {
                    return unknown();
                }
                let option = if name == "--dst-type" {
                    has::TO_LOCAL
                } else {
                    has::FROM_LOCAL
                };
                self.set(option, name)?;
            }
            ("--nfacct-name", _) => {
                value();
                self.set(has::COUNTED, name)?;
            }
            ("-j" | "--jump", _) => {
                self.target = value();
                self.set(has::JUMP, name)?;
            }
            ("--to-destination", _) => {
                let text = value();
                let to = text.parse();
                self.to = Some(to.map_err(|_| format!("{text:?} is no address with a port"))?);
            }
            ("--set-xmark", _) => self.set = Some(mark(value())?),
            ("--or-mark", _) => {
                let bit = mark(value())?.0;
                self.set = Some((bit, bit));
            }
            ("--xor-mark", _) => self.set = Some((mark(value())?.0, 0)),
            // The options of these matches follow.
            ("-m" | "--match", _) => match value() {
                "tcp" | "udp" | "sctp" | "comment" | "conntrack" | "addrtype" | "statistic"
                | "recent" | "mark" | "nfacct" => {}
                other => return Err(format!("kube-proxy writes no match {other:?}")),
            },
            _ => return unknown(),
        }
        Ok(())
    }
}

fn network(text: &str) -> Result<IpNet, String> {
    facts::net(text).ok_or_else(|| format!("{text:?} is no network"))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is no number that fits"))
}

/// `0x4000/0x4000`, with a full mask if there is none.
fn mark(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    let (value, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
    let found = number(value).zip(number(mask));
    found.ok_or_else(|| format!("{text:?} is no mark"))
}

/// A word without quotes and backslashes; borrowed if it has no backslashes.
fn quoted(raw: &str) -> Cow<'_, str> {
    let inside = raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"'));
    match inside {
        Some(inside) if !inside.contains(['"', '\\']) => Cow::Borrowed(inside),
        _ => Cow::Owned(Word { raw }.text().into_owned()),
    }
}
