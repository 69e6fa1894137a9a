//! Decides whether two adjacent rules may change places without a different result for any packet. In doubt, they may
//! not.

use std::ops::RangeInclusive;

use ipnet::IpNet;

use crate::text::{
    Words,
    tree::{self, Key},
};

/// A field of a packet that does not change while the packet passes the rules. If two rules match different values of a
/// field, a packet matches at most one of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Source,
    Destination,
    In,
    Out,
    SourcePort,
    DestinationPort,
    User,
    Group,
}

/// The values of a field that a rule matches.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Values<'a> {
    Prefix(IpNet),
    Name(&'a str),
    Numbers(Vec<RangeInclusive<u32>>),
}

/// The understood parts of a rule of `iptables-save`.
#[derive(Debug, Default)]
struct Read<'a> {
    /// The protocol, and whether it is excluded.
    protocol: Option<(bool, &'a str)>,
    /// The matched fields: whether the values are excluded, and the values.
    fields: Vec<(Field, bool, Values<'a>)>,
    /// The target with its options, as they are written.
    effect: Vec<&'a str>,
    /// Whether the target ends the evaluation of the chain and changes nothing that other rules match.
    is_final: bool,
}

/// Matches whose result depends only on the packet and its connection.
const PURE: [&str; 8] = [
    "tcp",
    "udp",
    "multiport",
    "owner",
    "mark",
    "connmark",
    "conntrack",
    "comment",
];

/// Targets that end the evaluation of the chain and change nothing that rules match.
const FINAL: [&str; 5] = ["ACCEPT", "DROP", "RETURN", "REDIRECT", "REJECT"];

/// Returns true if two rules of one chain may change places. The rules are in the form of `iptables-save`, without the
/// chain's name.
pub fn commute(one: &str, other: &str) -> bool {
    let (Some(one), Some(other)) = (read(one), read(other)) else {
        return false;
    };
    // These targets rewrite addresses, and later rules see the new addresses.
    let rewrites = |rule: &Read<'_>| {
        let mut words = rule.effect.iter();
        words.any(|word| word.contains("SNPT") || word.contains("DNPT"))
    };
    if rewrites(&one) || rewrites(&other) {
        return false;
    }
    let same = one.is_final && other.is_final && one.effect == other.effect;
    same || are_disjoint(&one, &other)
}

fn are_disjoint(one: &Read<'_>, other: &Read<'_>) -> bool {
    let protocol = |(excluded, name)| (excluded, Values::Name(name));
    if let (Some(one), Some(other)) = (one.protocol.map(protocol), other.protocol.map(protocol))
        && are_apart((one.0, &one.1), (other.0, &other.1))
    {
        return true;
    }
    // Ports are comparable only if both rules match one protocol.
    let is_one_protocol =
        one.protocol.is_some_and(|(excluded, _)| !excluded) && one.protocol == other.protocol;
    one.fields.iter().any(|(field, excluded, values)| {
        let is_port = matches!(field, Field::SourcePort | Field::DestinationPort);
        let mut same = other.fields.iter().filter(|(of, _, _)| of == field);
        (!is_port || is_one_protocol)
            && same.any(|(_, other_excluded, other)| {
                are_apart((*excluded, values), (*other_excluded, other))
            })
    })
}

/// Returns true if no value matches both rules. Each rule matches either some values or all except some.
fn are_apart(one: (bool, &Values<'_>), other: (bool, &Values<'_>)) -> bool {
    match (one, other) {
        ((false, one), (false, other)) => one.is_apart_from(other),
        ((false, some), (true, excluded)) | ((true, excluded), (false, some)) => {
            some.is_in(excluded)
        }
        ((true, _), (true, _)) => false,
    }
}

impl Values<'_> {
    /// Returns true if no value is in both.
    fn is_apart_from(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Prefix(one), Self::Prefix(other)) => {
                // One table does not contain addresses of both families.
                one.addr().is_ipv4() == other.addr().is_ipv4()
                    && !one.contains(other)
                    && !other.contains(one)
            }
            (Self::Name(one), Self::Name(other)) => one != other,
            (Self::Numbers(one), Self::Numbers(other)) => {
                let meets = |a: &RangeInclusive<u32>, b: &RangeInclusive<u32>| {
                    a.start() <= b.end() && b.start() <= a.end()
                };
                !one.iter().any(|a| other.iter().any(|b| meets(a, b)))
            }
            _ => false,
        }
    }

    /// Returns true if `other` contains all values.
    fn is_in(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Prefix(one), Self::Prefix(other)) => other.contains(one),
            (Self::Name(one), Self::Name(other)) => one == other,
            (Self::Numbers(one), Self::Numbers(other)) => one.iter().all(|a| {
                let has = |b: &RangeInclusive<u32>| b.start() <= a.start() && a.end() <= b.end();
                other.iter().any(has)
            }),
            _ => false,
        }
    }
}

/// Reads a rule. Returns `None` if any part of the rule is not understood.
fn read(text: &str) -> Option<Read<'_>> {
    let words = Words::new(text).filter_map(Result::ok);
    let words = words.map(|word| word.raw);
    let mut read = Read {
        effect: words
            .skip_while(|word| !matches!(*word, "-j" | "--jump" | "-g" | "--goto"))
            .collect(),
        ..Read::default()
    };
    for part in tree::saved(text) {
        match (part.key, part.plain()) {
            _ if part.value.is_empty() => return None,
            (Key::Target, target) => {
                read.is_final = target.is_some_and(|target| FINAL.contains(&target));
                break;
            }
            (Key::Chain, _) => break,
            (Key::Module, Some(module)) if PURE.contains(&module) && !part.not => {}
            (Key::Protocol, Some(protocol)) => read.protocol = Some((part.not, protocol)),
            (Key::Comment | Key::Mark | Key::ConnMark | Key::State, _) => {}
            (key, value) => {
                let (field, values) = field(key, value?)?;
                read.fields.push((field, part.not, values));
            }
        }
        if part.more.is_some() {
            return None;
        }
    }
    Some(read)
}

fn field(key: Key, value: &str) -> Option<(Field, Values<'_>)> {
    Some(match key {
        Key::Source => (Field::Source, Values::Prefix(value.parse().ok()?)),
        Key::Destination => (Field::Destination, Values::Prefix(value.parse().ok()?)),
        // A name that ends in `+` is a prefix of interface names.
        Key::In if !value.ends_with('+') => (Field::In, Values::Name(value)),
        Key::Out if !value.ends_with('+') => (Field::Out, Values::Name(value)),
        Key::SourcePort => (Field::SourcePort, numbers(value, ':')?),
        Key::Port => (Field::DestinationPort, numbers(value, ':')?),
        Key::Uid => (Field::User, numbers(value, '-')?),
        Key::Gid => (Field::Group, numbers(value, '-')?),
        _ => return None,
    })
}

/// Reads numbers and ranges, such as `53,15000:15010`.
fn numbers(value: &str, to: char) -> Option<Values<'static>> {
    let ranges = value.split(',').map(|range| {
        let (first, last) = range.split_once(to).unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.collect::<Option<Vec<_>>>().map(Values::Numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_change_places_only_if_no_packet_notices() {
        for (wanted, one, other) in [
            // Both rules have the same effect.
            (
                true,
                "-s 10.0.0.0/8 -j RETURN",
                "-m owner --uid-owner 1337 -j RETURN",
            ),
            (
                true,
                "-p tcp -j REDIRECT --to-ports 1",
                "-p tcp -m tcp --dport 2 -j REDIRECT --to-ports 1",
            ),
            (
                false,
                "-p tcp -j REDIRECT --to-ports 1",
                "-p tcp -m tcp --dport 2 -j REDIRECT --to-ports 2",
            ),
            (false, "-j RETURN", "-p tcp -j ACCEPT"),
            // Chain X may set the mark that the other rule matches.
            (false, "-p tcp -j X", "-p tcp -m mark --mark 0x1 -j X"),
            (
                false,
                "-p tcp -j MARK --set-xmark 0x1/0xffffffff",
                "-m mark --mark 0x1 -j MARK --set-xmark 0x1/0xffffffff",
            ),
            // No packet matches both rules.
            (
                true,
                "-p tcp -m tcp --dport 80 -j X",
                "-p tcp -m tcp --dport 81 -j Y",
            ),
            (
                false,
                "-p tcp -m tcp --dport 80 -j X",
                "-p tcp -m tcp --dport 80:81 -j Y",
            ),
            (
                true,
                "-p tcp -m multiport --dports 80,90:95 -j X",
                "-p tcp -m tcp --dport 81 -j Y",
            ),
            (
                true,
                "-p tcp -m tcp ! --dport 53 -j X",
                "-p tcp -m multiport --dports 53 -j Y",
            ),
            (
                false,
                "-p tcp -m tcp ! --dport 53 -j X",
                "-p tcp -m multiport --dports 53,54 -j Y",
            ),
            (
                false,
                "-p tcp -m tcp ! --dport 53 -j X",
                "-p tcp -m tcp ! --dport 54 -j Y",
            ),
            (true, "-p tcp -j X", "-p udp -j Y"),
            (true, "-p tcp -j X", "! -p tcp -j Y"),
            (false, "-p tcp -j X", "! -p udp -j Y"),
            (false, "-p tcp -j X", "-j Y"),
            (true, "-d 10.0.0.0/8 -j X", "-d 11.0.0.0/8 -j Y"),
            (false, "-d 10.0.0.0/8 -j X", "-d 10.1.0.0/16 -j Y"),
            (false, "-d 0.0.0.0/0 -j X", "-d 10.1.0.0/16 -j Y"),
            (true, "! -d 10.0.0.0/8 -j X", "-d 10.1.0.0/16 -j Y"),
            (false, "! -d 10.1.0.0/16 -j X", "-d 10.0.0.0/8 -j Y"),
            (true, "-d ::1/128 -j X", "-d ::2/128 -j Y"),
            (false, "-s ::1/128 -j X", "-d ::2/128 -j Y"),
            (true, "-i eth0 -j X", "-i eth1 -j Y"),
            (false, "-i eth+ -j X", "-i eth1 -j Y"),
            (
                true,
                "-o lo -m owner ! --uid-owner 1337 -j X",
                "-o lo -m owner --uid-owner 1337 -j Y",
            ),
            (
                false,
                "-m owner ! --uid-owner 1337 -j X",
                "-m owner --gid-owner 1337 -j Y",
            ),
            // A part is not understood, or the match has a state of its own.
            (false, "-m limit --limit 1/sec -j RETURN", "-j RETURN"),
            (false, "-m later --x 1 -p tcp -j X", "-p udp -j Y"),
            (
                false,
                "-p tcp -m tcp --tcp-flags SYN,ACK SYN -j X",
                "-p udp -j Y",
            ),
        ] {
            assert_eq!(commute(one, other), wanted, "{one} and {other}");
            assert_eq!(commute(other, one), wanted, "{other} and {one}");
        }
    }
}
