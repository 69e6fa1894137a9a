//! Reads a rule of `iptables-save` with the options that kube-proxy writes.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use ipnet::IpNet;

use crate::text::tree::{self, Key, Part};

/// The options of a rule, one bit each.
pub mod has {
    /// `-s`
    pub const SOURCE: u32 = 1;
    /// `-d`
    pub const DESTINATION: u32 = 1 << 1;
    /// `-i`
    pub const INTERFACE: u32 = 1 << 2;
    /// `--mark`
    pub const MARK: u32 = 1 << 3;
    /// `-p`
    pub const PROTOCOL: u32 = 1 << 4;
    /// `--dport`
    pub const PORT: u32 = 1 << 5;
    /// `--comment`
    pub const COMMENT: u32 = 1 << 6;
    /// `-m recent --set`
    pub const REMEMBERS: u32 = 1 << 7;
    /// `-m recent --rcheck --seconds --reap`
    pub const REMEMBERED: u32 = CHECKED | SECONDS | REAPED;
    /// `--dst-type LOCAL`
    pub const TO_LOCAL: u32 = 1 << 8;
    /// `--src-type LOCAL`
    pub const FROM_LOCAL: u32 = 1 << 9;
    /// `--ctstate`
    pub const STATE: u32 = 1 << 10;
    /// `--nfacct-name`
    pub const COUNTED: u32 = 1 << 11;
    /// `-j`
    pub const JUMP: u32 = 1 << 12;
    /// `--random-fully`
    pub const RANDOMLY: u32 = 1 << 13;
    /// `-m statistic --mode random --probability`
    pub const PROBABILITY: u32 = RANDOM | SHARE;

    pub(super) const SHARE: u32 = 1 << 14;
    pub(super) const CHECKED: u32 = 1 << 15;
    pub(super) const SECONDS: u32 = 1 << 16;
    pub(super) const REAPED: u32 = 1 << 17;
    pub(super) const RANDOM: u32 = 1 << 18;

    /// Returns the bit for an option whose value is excluded (`!`).
    pub const fn not(option: u32) -> u32 {
        option << 24
    }
}

/// A rule.
#[derive(Debug, Default)]
pub struct Rule<'a> {
    /// The options of the rule: [`has`].
    pub has: u32,
    pub source: Option<IpNet>,
    pub destination: Option<IpNet>,
    pub interface: &'a str,
    pub protocol: &'a str,
    pub port: u16,
    pub comment: Cow<'a, str>,
    pub probability: f64,
    /// The name of the list of clients (`-m recent`).
    pub list: &'a str,
    pub seconds: u64,
    pub state: &'a str,
    /// Value and mask of the match `mark`.
    pub mark: (u32, u32),
    pub target: &'a str,
    /// The destination of target DNAT.
    pub to: Option<SocketAddr>,
    /// Value and mask of target MARK.
    pub set: Option<(u32, u32)>,
}

impl<'a> Rule<'a> {
    /// Reads the options of a rule.
    ///
    /// # Errors
    ///
    /// If the rule has an option that kube-proxy does not write, or has an option twice.
    pub fn read(text: &'a str) -> Result<Self, String> {
        let mut rule = Self::default();
        tree::saved(text).try_for_each(|part| rule.part(part))?;
        Ok(rule)
    }

    /// Returns true if the rule has exactly these options.
    pub fn is(&self, options: u32) -> bool {
        self.has == options
    }

    fn part(&mut self, part: Part<'a>) -> Result<(), String> {
        let (name, plain, value) = (part.name, part.plain(), &*part.value);
        let unknown = |word: &str| Err(format!("kube-proxy writes no option {word:?} here"));
        let text = plain.unwrap_or_default();
        let mut more = part.more;
        let bit = match (part.key, name) {
            (Key::Source, _) => put(&mut self.source, Some(network(value)?), has::SOURCE),
            (Key::Destination, _) => put(
                &mut self.destination,
                Some(network(value)?),
                has::DESTINATION,
            ),
            (Key::In, _) => put(&mut self.interface, text, has::INTERFACE),
            (Key::Mark, _) => put(&mut self.mark, mark(value)?, has::MARK),
            // kube-proxy excludes states only in the rule that protects node ports on loopback. This chain is not read.
            (Key::State, _) if part.not => return unknown(name),
            (Key::State, _) => put(&mut self.state, text, has::STATE),
            _ if part.not => return Err(format!("kube-proxy writes no `! {name}` here")),
            (Key::Protocol, _) => put(&mut self.protocol, text, has::PROTOCOL),
            (Key::Port, "--dport" | "--destination-port") => {
                put(&mut self.port, number(value)?, has::PORT)
            }
            (Key::Comment, _) => put(&mut self.comment, part.value, has::COMMENT),
            (Key::Target, _) => put(&mut self.target, text, has::JUMP),
            (_, "--mode") if value == "random" => has::RANDOM,
            (_, "--probability") => {
                let share = value.parse();
                let share = share.map_err(|_| format!("{value:?} is no probability"))?;
                put(&mut self.probability, share, has::SHARE)
            }
            (_, "--seconds") => put(&mut self.seconds, number(value)?, has::SECONDS),
            (_, "--name") => put(&mut self.list, text, 0),
            (_, "--mask") => match value.parse() {
                Ok(IpAddr::V4(Ipv4Addr::BROADCAST)) => 0,
                Ok(IpAddr::V6(mask)) if mask.to_bits() == u128::MAX => 0,
                _ => return Err("kube-proxy remembers whole addresses".to_owned()),
            },
            (_, "--reject-with")
                if matches!(value, "icmp-port-unreachable" | "icmp6-port-unreachable") =>
            {
                0
            }
            (_, "--dst-type") if value == "LOCAL" => has::TO_LOCAL,
            (_, "--src-type") if value == "LOCAL" => has::FROM_LOCAL,
            (_, "--nfacct-name") => has::COUNTED,
            (_, "--to-destination") => {
                let to = value.parse();
                let to = to.map_err(|_| format!("{value:?} is no address with a port"))?;
                put(&mut self.to, Some(to), 0)
            }
            (_, "--set-xmark") => put(&mut self.set, Some(mark(value)?), 0),
            (_, "--or-mark") => put(&mut self.set, Some((mark(value)?.0, mark(value)?.0)), 0),
            (_, "--xor-mark") => put(&mut self.set, Some((mark(value)?.0, 0)), 0),
            // The options of these matches follow.
            (Key::Module, _) if MODULES.contains(&value) => 0,
            (Key::Module, _) => return Err(format!("kube-proxy writes no match {value:?}")),
            (_, "--set" | "--rcheck" | "--reap" | "--rsource" | "--random-fully") => {
                more = Some(text).filter(|text| !text.is_empty());
                match name {
                    "--set" => has::REMEMBERS,
                    "--rcheck" => has::CHECKED,
                    "--reap" => has::REAPED,
                    "--random-fully" => has::RANDOMLY,
                    _ => 0,
                }
            }
            (_, "") => return unknown(value),
            _ => return unknown(name),
        };
        if let Some(more) = more {
            return unknown(more);
        }
        let bit = if part.not { has::not(bit) } else { bit };
        if self.has & bit != 0 {
            return Err(format!("option {name} is there twice"));
        }
        self.has |= bit;
        Ok(())
    }
}

/// The matches that kube-proxy writes.
const MODULES: &[&str] = &[
    "tcp",
    "udp",
    "sctp",
    "comment",
    "conntrack",
    "addrtype",
    "statistic",
    "recent",
    "mark",
    "nfacct",
];

fn put<T>(place: &mut T, value: T, bit: u32) -> u32 {
    *place = value;
    bit
}

fn network(text: &str) -> Result<IpNet, String> {
    tree::net(text).ok_or_else(|| format!("{text:?} is no network"))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is no number that fits"))
}

fn mark(text: &str) -> Result<(u32, u32), String> {
    tree::mark(text).ok_or_else(|| format!("{text:?} is no mark"))
}
