//! Splits a rule into its parts: matches and targets. Reads the options of `iptables-save` ([`saved`]) and the words of
//! `nft` ([`listed`]) into equal parts, in their order. An unknown part has the key [`Key::Other`] and its own name.

mod listed;
mod saved;

use std::{borrow::Cow, net::IpAddr};

use ipnet::IpNet;

pub use listed::listed;
pub use saved::saved;

/// The subject of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Source,
    Destination,
    In,
    Out,
    Protocol,
    SourcePort,
    Port,
    Uid,
    Gid,
    /// The packet's mark, with its mask if the rule has one: `0x111/0xfff`.
    Mark,
    /// The connection's mark.
    ConnMark,
    /// Conntrack states, in iptables' notation.
    State,
    Comment,
    /// The name of a set of addresses.
    Set,
    /// A match of iptables; its options follow.
    Module,
    /// A target, in iptables' notation. In rules of iptables, it may also be a chain.
    Target,
    /// A chain.
    Chain,
    /// A port of this host that packets are redirected to.
    ToPort,
    /// A mark that the rule sets.
    SetMark,
    /// A number beside a mark, in nft's notation.
    Bits,
    /// An option that has no key here.
    Other,
}

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// The subject.
    pub key: Key,
    /// Whether the rule excludes the value.
    pub not: bool,
    /// The option's name in iptables' notation; empty if the values have no option.
    pub name: &'a str,
    /// The value, without quotes; empty if the option has none. Commas separate the values of a set.
    pub value: Cow<'a, str>,
    /// The first word after the value.
    pub more: Option<&'a str>,
}

impl<'a> Part<'a> {
    /// Returns the value if it needed no unquoting.
    pub fn plain(&self) -> Option<&'a str> {
        match self.value {
            Cow::Borrowed(value) => Some(value),
            Cow::Owned(_) => None,
        }
    }
}

/// Reads a mark and its mask: `0x4000/0x4000`, `1337`. Without a mask, all bits count.
pub fn mark(text: &str) -> Option<(u32, u32)> {
    let (value, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
    Some((number(value)?, number(mask)?))
}

/// Reads a number: `0x539`, `1337`.
pub fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Reads a network or an address.
pub fn net(text: &str) -> Option<IpNet> {
    let net = text.parse();
    net.or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rule has equal parts in the notations of both programs.
    #[test]
    fn both_notations_say_the_same() {
        for (iptables, nft) in [
            (
                "-p tcp -m tcp --dport 15008 -j RETURN",
                "meta l4proto tcp tcp dport 15008 counter packets 0 bytes 7 return",
            ),
            (
                "! -d 127.0.0.1 -o lo -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 1337 -j ACCEPT",
                "oifname \"lo\" meta l4proto tcp ip daddr != 127.0.0.1 tcp dport != { 53, 15008 } meta skuid 1337 accept",
            ),
            (
                "-m conntrack --ctstate RELATED,ESTABLISHED -m owner ! --gid-owner 3 -j DROP",
                "ct state established,related meta skgid != 3 drop",
            ),
            (
                "-s fd00::/8 -p udp -m udp --sport 53 -j CT",
                "ip6 saddr fd00::/8 udp sport 53 ct zone set 1",
            ),
            (
                "-m mark ! --mark 0x539/0xfff -m connmark --mark 0x1 -j REJECT",
                "meta mark & 0xfff != 0x539 ct mark 0x1 reject",
            ),
            (
                "-i eth0 -m comment --comment \"a b\" -p tcp -j REDIRECT --to-ports 15006",
                "iifname \"eth0\" meta l4proto tcp redirect to :15006 comment \"a b\"",
            ),
            ("-g chain", "goto chain"),
        ] {
            let parts = |all: Vec<Part<'_>>| {
                let parts = all.into_iter();
                let parts = parts.filter(|part| !matches!(part.key, Key::Module | Key::Bits));
                let mut parts: Vec<String> = parts
                    .map(|part| format!("{:?} {} {}", part.key, part.not, part.value))
                    .collect();
                parts.sort();
                parts
            };
            let (saved, listed) = (saved(iptables).collect(), listed(nft).parts);
            assert_eq!(parts(saved), parts(listed), "{iptables} and {nft}");
        }
    }
}
