//! Reads the words of a rule of `nft list`.

use std::borrow::Cow;

use super::{super::nft, Key, Part, mark, number};

/// A rule of nft, split into parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed<'a> {
    /// The parts, each with nft's word as its name.
    pub parts: Vec<Part<'a>>,
    /// The only family that the rule applies to: true for IPv4, false for IPv6, `None` for both.
    pub v4: Option<bool>,
    /// The first fault: a word that cannot become a part.
    pub fault: Option<String>,
    protocol: &'a str,
    target: &'a str,
}

/// Reads the parts of a rule of nft. An unknown word is a fault, and reading continues with the next word.
pub fn listed(rule: &str) -> Listed<'_> {
    let mut words: Vec<&str> = nft::words(rule).collect();
    // `nft -a` appends the rule's handle.
    if let [.., "#", "handle", _] = words[..] {
        words.truncate(words.len() - 3);
    }
    let mut found = Listed::default();
    let (mut before, mut rest) = ("", &words[..]);
    while let [word, behind @ ..] = rest {
        rest = found.statement(before, word, behind);
        before = word;
    }
    if found.target.is_empty() {
        found.fault(|| "the rule decides nothing".to_owned());
    }
    found
}

/// Words that need a further word, each with the words that may follow.
const FOLLOW: &[(&str, &[&str])] = &[
    (
        "meta",
        &["l4proto", "mark", "skuid", "skgid", "iifname", "oifname"],
    ),
    ("ct", &["mark", "state", "zone"]),
    ("ip", &["saddr", "daddr"]),
    ("ip6", &["saddr", "daddr"]),
    ("tcp", &["sport", "dport"]),
    ("udp", &["sport", "dport"]),
];

/// Words that may only follow a word for which [`FOLLOW`] allows them.
const BEHIND: &[&str] = &[
    "saddr", "daddr", "sport", "dport", "state", "zone", "l4proto",
];

/// The words of a rule after a statement.
type RemainingWords<'w, 'a> = &'w [&'a str];

impl<'a> Listed<'a> {
    fn fault(&mut self, what: impl FnOnce() -> String) {
        self.fault.get_or_insert_with(what);
    }

    fn unknown(&mut self, word: &str) {
        self.fault(|| format!("{word:?} is not understood"));
    }

    fn add(&mut self, key: Key, not: bool, name: &'a str, value: impl Into<Cow<'a, str>>) {
        self.parts.push(Part {
            key,
            not,
            name,
            value: value.into(),
            more: None,
        });
    }

    /// Reads a statement that starts with `word`. `before` is the word in front of it.
    fn statement<'w>(
        &mut self,
        before: &str,
        word: &'a str,
        rest: RemainingWords<'w, 'a>,
    ) -> RemainingWords<'w, 'a> {
        let follows = |lead: &str| FOLLOW.iter().find(|(of, _)| *of == lead);
        match (follows(word), rest.first()) {
            (Some((_, follow)), Some(next)) if !follow.contains(next) => self.unknown(next),
            (Some(_), None) => self.fault(|| format!("nothing follows {word}")),
            _ => {}
        }
        let leads = |(_, follow): &(&str, &[&str])| follow.contains(&word);
        if BEHIND.contains(&word) && !follows(before).is_some_and(leads) {
            self.unknown(word);
        }
        match word {
            "meta" | "ct" => rest,
            "counter" => {
                let mut rest = rest;
                while let ["packets" | "bytes", _, behind @ ..] = rest {
                    rest = behind;
                }
                rest
            }
            // The addresses of the connection or of an inner packet: the packet itself may have different ones.
            "original" | "reply" | "vxlan" | "geneve" | "gre" | "gretap" => {
                self.unknown(word);
                match rest {
                    ["ip" | "ip6", "saddr" | "daddr", rest @ ..] => {
                        self.value(Key::Other, word, rest)
                    }
                    _ => rest,
                }
            }
            "ip" | "ip6" => {
                self.only(word == "ip");
                rest
            }
            "tcp" | "udp" => {
                self.protocol(word, word);
                rest
            }
            "saddr" => self.value(Key::Source, word, rest),
            "daddr" => self.value(Key::Destination, word, rest),
            "sport" => self.value(Key::SourcePort, word, rest),
            "dport" => self.value(Key::Port, word, rest),
            "skuid" => self.value(Key::Uid, word, rest),
            "skgid" => self.value(Key::Gid, word, rest),
            "l4proto" => self.value(Key::Protocol, word, rest),
            "iifname" => self.value(Key::In, word, rest),
            "oifname" => self.value(Key::Out, word, rest),
            "iif" | "oif" => {
                self.unknown(word);
                self.value(if word == "iif" { Key::In } else { Key::Out }, word, rest)
            }
            "comment" => self.value(Key::Comment, word, rest),
            "mark" if before == "ct" => self.mark(Key::ConnMark, rest),
            "mark" => self.mark(Key::Mark, rest),
            "state" => {
                let states = ["established", "related", "new", "invalid", "untracked"];
                let (found, rest) = split(rest, |state| states.contains(&state));
                let mut found: Vec<_> = found.iter().map(|of| of.to_ascii_uppercase()).collect();
                // In the order in which iptables prints them.
                found.sort_unstable_by_key(|state| state != "RELATED");
                self.add(Key::State, false, word, found.join(","));
                rest
            }
            "zone" => {
                self.target(word, "CT");
                if let ["set", _, rest @ ..] = rest {
                    return rest;
                }
                self.fault(|| "a zone is not set".to_owned());
                rest
            }
            // A match for connections that conntrack has translated.
            "status" => {
                self.unknown(word);
                let joins = ["!=", "==", "&", "|", "and", "dnat", "snat"];
                split(rest, |word| joins.contains(&word)).1
            }
            "return" | "drop" | "accept" | "reject" | "queue" | "synproxy" | "dnat" | "notrack"
            | "redirect" | "tproxy" => self.verdict(word, rest),
            "jump" | "goto" => {
                let Some((chain, rest)) = rest.split_first() else {
                    self.fault(|| format!("nothing follows {word}"));
                    return rest;
                };
                self.decides(chain);
                self.add(Key::Chain, false, word, *chain);
                rest
            }
            _ => {
                self.unknown(word);
                if let Some(set) = word.strip_prefix('@') {
                    self.add(Key::Set, false, word, set);
                }
                self.take_port(word);
                rest
            }
        }
    }

    /// Reads a value: `!= 53` excludes `53`, and `{ 53, 15008 }` becomes `53,15008`. Does not consume a word that is no
    /// value.
    fn value<'w>(
        &mut self,
        key: Key,
        name: &'a str,
        rest: RemainingWords<'w, 'a>,
    ) -> RemainingWords<'w, 'a> {
        let (not, rest) = match rest {
            ["!=", rest @ ..] => (true, rest),
            ["==", rest @ ..] => (false, rest),
            _ => (false, rest),
        };
        let (values, rest) = match rest {
            ["{", rest @ ..] => {
                let (values, rest) = split(rest, |word| word != "}");
                (values, rest.get(1..).unwrap_or_default())
            }
            [word, ..] if word.starts_with(['@', '<', '>', '.']) || *word == "vmap" => {
                self.unknown(word);
                self.add(key, not, name, *word);
                return rest;
            }
            _ => rest.split_at(rest.len().min(1)),
        };
        match (key, values) {
            (_, []) => self.fault(|| "a value is missing".to_owned()),
            (Key::Protocol, _) if not => {
                self.fault(|| format!("\"!= {}\" is not understood", values.join(",")));
            }
            (Key::Protocol, _) => self.protocol(name, &values.join(",")),
            (Key::In | Key::Out | Key::Comment, _) => {
                if values.len() > 1 {
                    self.fault(|| "it is for several interfaces".to_owned());
                }
                for value in values {
                    self.add(key, not, name, value.trim_matches('"'));
                }
            }
            (_, [value]) => self.add(key, not, name, *value),
            _ => self.add(key, not, name, values.join(",")),
        }
        rest
    }

    /// Reads a match or change of the packet's or the connection's mark.
    fn mark<'w>(&mut self, key: Key, rest: RemainingWords<'w, 'a>) -> RemainingWords<'w, 'a> {
        let (mut sets, mut counts) = (false, false);
        let joins = ["set", "and", "or", "xor", "&", "|", "^", "==", "!="];
        let (words, rest) = split(rest, |word| {
            let is_number = number(word).is_some();
            // After a comparison, the next statement starts.
            let is_mark = matches!(word, "meta" | "ct" | "mark") && (sets || !counts);
            sets |= word == "set";
            counts |= is_number;
            joins.contains(&word) || is_number || is_mark
        });
        let said: Vec<&str> = (words.iter().copied())
            .map(|word| match word {
                "and" => "&",
                // If the mask clears the bits first, "or" and "xor" have equal results.
                "or" | "xor" | "^" => "|",
                word => word,
            })
            .collect();
        for bits in words.iter().filter(|word| number(word).is_some()) {
            self.add(Key::Bits, false, "mark", *bits);
        }
        let is_bit = |mask| number(mask).is_some_and(u32::is_power_of_two);
        let asked = match said[..] {
            ["==", value] | [value] => Some((false, value.to_owned())),
            ["!=", value] => Some((true, value.to_owned())),
            // The bit is set.
            ["&", mask, "!=", none] if number(none) == Some(0) && is_bit(mask) => {
                Some((false, format!("{mask}/{mask}")))
            }
            ["&", mask, "!=", value] => Some((true, format!("{value}/{mask}"))),
            ["&", mask, "==", value] | ["&", mask, value] => {
                Some((false, format!("{value}/{mask}")))
            }
            _ => None,
        };
        if let Some((not, value)) = asked.filter(|(_, value)| mark(value).is_some()) {
            self.add(key, not, "mark", value);
            return rest;
        }
        match (key, &said[..]) {
            // TPROXY also sets a mark.
            (_, ["set", ..]) if self.target == "TPROXY" => {}
            (_, ["set", value]) if number(value).is_some() => {
                self.target("mark", if key == Key::Mark { "MARK" } else { "CONNMARK" });
            }
            (Key::Mark, ["set", "ct", "mark"])
            | (
                Key::ConnMark,
                ["set", "mark"] | ["set", "meta", "mark"] | ["set", "ct", "mark", "&", _, "|", _],
            ) => self.target("mark", "CONNMARK"),
            (_, ["set", ..]) => {
                self.fault(|| format!("a mark is set to {:?}", words[1..].join(" ")));
            }
            _ => self.unknown(rest.first().copied().unwrap_or("mark")),
        }
        rest
    }

    fn protocol(&mut self, name: &'a str, protocol: &str) {
        let known = ["tcp", "udp"].into_iter().find(|known| *known == protocol);
        match (known, self.protocol) {
            (None, _) => self.fault(|| format!("protocol {protocol:?} is not understood")),
            (Some(protocol), "") => {
                self.add(Key::Protocol, false, name, protocol);
                self.protocol = protocol;
            }
            (_, before) if before != protocol => {
                self.fault(|| "the rule is for two protocols".to_owned());
            }
            _ => {}
        }
    }

    fn only(&mut self, v4: bool) {
        if *self.v4.get_or_insert(v4) != v4 {
            self.fault(|| "the rule is for both families at once".to_owned());
        }
    }

    fn decides(&mut self, target: &'a str) {
        if !std::mem::replace(&mut self.target, target).is_empty() {
            self.fault(|| "the rule does two things".to_owned());
        }
    }

    fn target(&mut self, name: &'a str, target: &'a str) {
        self.decides(target);
        self.add(Key::Target, false, name, target);
    }

    /// Reads a verdict, or a statement such as `redirect` that acts as one.
    fn verdict<'w>(
        &mut self,
        word: &'a str,
        mut rest: RemainingWords<'w, 'a>,
    ) -> RemainingWords<'w, 'a> {
        // The packet is already handled by TPROXY.
        if word == "accept" && self.target == "TPROXY" {
            return rest;
        }
        let (target, is_known) = match word {
            "return" => ("RETURN", true),
            "drop" => ("DROP", true),
            "accept" => ("ACCEPT", true),
            "redirect" => ("REDIRECT", true),
            "tproxy" => ("TPROXY", true),
            "queue" => ("QUEUE", false),
            "synproxy" => ("SYNPROXY", false),
            "dnat" => ("DNAT", false),
            "notrack" => ("NOTRACK", false),
            _ => ("REJECT", false),
        };
        self.target(word, target);
        if !is_known {
            self.unknown(word);
        }
        if matches!(word, "redirect" | "tproxy") {
            if let (["ip" | "ip6", behind @ ..], "tproxy") = (rest, word) {
                self.only(rest[0] == "ip");
                rest = behind;
            }
            match rest {
                ["to", port, behind @ ..] if self.take_port(port) => return behind,
                _ => self.fault(|| "it names no port".to_owned()),
            }
        }
        rest
    }

    /// Reads a port such as `:15001`.
    fn take_port(&mut self, word: &'a str) -> bool {
        let port = word.strip_prefix(':');
        let port = port.filter(|port| port.parse::<u16>().is_ok());
        port.map(|port| self.add(Key::ToPort, false, "to", port))
            .is_some()
    }
}

/// Splits the words before the first one for which `goes_on` is false.
fn split<'w, 'a>(
    words: RemainingWords<'w, 'a>,
    mut goes_on: impl FnMut(&'a str) -> bool,
) -> (RemainingWords<'w, 'a>, RemainingWords<'w, 'a>) {
    let end = words.iter().position(|word| !goes_on(word));
    words.split_at(end.unwrap_or(words.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints the names and values of parts.
    fn printed(parts: &[Part<'_>]) -> String {
        let parts = parts.iter().filter(|part| part.key != Key::Bits);
        let words = parts.map(|part| {
            let not = if part.not { "! " } else { "" };
            format!("{not}{} {}", part.name, part.value)
        });
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn rules_of_nft_are_read_by_their_parts() {
        for (rule, wanted, family) in [
            (
                "meta l4proto tcp tcp dport 15008 counter packets 0 bytes 7 return",
                "l4proto tcp dport 15008 return RETURN",
                None,
            ),
            (
                "oifname \"lo\" meta l4proto tcp ip daddr != 127.0.0.1 tcp dport != { 53, 15008 } meta skuid 3 counter packets 0 \
                 bytes 0 jump istio-in-redirect",
                "oifname lo l4proto tcp ! daddr 127.0.0.1 ! dport 53,15008 skuid 3 jump istio-in-redirect",
                Some(true),
            ),
            (
                "skgid != 201 skgid != 202 return # handle 7",
                "! skgid 201 ! skgid 202 return RETURN",
                None,
            ),
            (
                "iifname \"eth*\" ip6 daddr fd00::/8 jump istio-redirect",
                "iifname eth* daddr fd00::/8 jump istio-redirect",
                Some(false),
            ),
            (
                "meta l4proto tcp ip6 daddr != ::1 tproxy ip6 to :15006 meta mark set 0x539 counter accept",
                "l4proto tcp ! daddr ::1 tproxy TPROXY to 15006",
                Some(false),
            ),
            (
                "meta l4proto tcp ct state established,related tcp dport 80 jump istio-divert",
                "l4proto tcp state RELATED,ESTABLISHED dport 80 jump istio-divert",
                None,
            ),
            (
                "meta mark & 0x00000fff == 0x00000539 ct mark set ct mark & 0xfffff000 | 0x00000111",
                "mark 0x00000539/0x00000fff mark CONNMARK",
                None,
            ),
            (
                "ct mark and 0xfff == 0x111 meta mark set ct mark",
                "mark 0x111/0xfff mark CONNMARK",
                None,
            ),
            (
                "udp sport 15053 meta skuid 3 counter ct zone set 2",
                "udp udp sport 15053 skuid 3 zone CT",
                None,
            ),
        ] {
            let found = listed(rule);
            assert_eq!(
                (&*printed(&found.parts), found.v4),
                (wanted, family),
                "{rule}"
            );
            assert_eq!(found.fault, None, "{rule}");
        }
    }

    #[test]
    fn what_istio_does_not_write_is_an_error() {
        for rule in [
            "counter",
            "tcp flags syn return",
            "meta l4proto != tcp return",
            "meta l4proto sctp return",
            "tcp dport 1 udp dport 1 return",
            "ip daddr 127.0.0.1 ip6 daddr ::1 return",
            "ip daddr @some return",
            "redirect to 127.0.0.1:1",
            "redirect",
            "tcp dport > 5 return",
            "meta mark set meta mark ^ 1",
            "return return",
            "snat to 169.254.7.127",
            "iifname { \"eth1\", \"eth2\" } return",
        ] {
            assert!(listed(rule).fault.is_some(), "{rule}: {:?}", listed(rule));
        }
    }
}
