//! Istio's rules in its own tables of nf_tables, in the words of iptables: Istio makes the same rules in both, so one reader is
//! enough. Pure: from the text of `nft list ruleset` to that of `iptables-save`.
//!
//! Each rule stays in its line. A rule of a table `inet` that names no address applies to both families. A statement that Istio does
//! not write is an error.

use std::{collections::BTreeSet, iter::Peekable};

use super::NODES;
use crate::iptables::nft::{self, Entry};

/// How the names of Istio's tables begin.
const PREFIXES: [&str; 2] = ["istio-proxy-", "istio-ambient-"];

/// The rules of both families.
#[derive(Debug, Default)]
pub struct Families {
    /// As `iptables-save` and `ip6tables-save` would print them, with the rules in the lines that they have in the listing.
    pub texts: [String; 2],
    /// Whether a rule names an address of the family. If none does, Istio does not capture this family.
    pub are_named: [bool; 2],
    /// The first rule, with its line.
    pub first: Option<(usize, String)>,
}

/// A line's number, what is wrong with it, and its text.
pub type Wrong = (usize, String, String);

/// Returns Istio's rules in a listing. `None`: it has no table of Istio's.
///
/// # Errors
/// A rule is not one of Istio's, or the listing cannot be read.
pub fn in_iptables_words(text: &str) -> Result<Option<Families>, Wrong> {
    let count = text.lines().count() + 2;
    let mut lines = [vec![String::new(); count], vec![String::new(); count]];
    let mut are_named = [false; 2];
    let mut table: Option<&str> = None;
    let mut first = None;
    let mut hooked = BTreeSet::new();
    let (mut is_there, mut last, mut begins) = (false, 0, false);
    for entry in nft::entries(text) {
        let entry = entry.map_err(|error| {
            let text = error.text.trim().to_owned();
            (error.line, error.what.to_owned(), text)
        })?;
        let (line, chain, rule) = match entry {
            Entry::Table { name, .. } => {
                let its = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
                commit(&mut lines, table, last);
                (table, last, begins) = (its, 0, true);
                hooked.clear();
                is_there |= its.is_some();
                continue;
            }
            Entry::Base { line, chain, text } => (line, chain, Err(text)),
            Entry::Rule { line, chain, text } => (line, chain, Ok(text)),
            Entry::Chain { .. } | Entry::Elements { .. } => continue,
        };
        let Some(table) = table else { continue };
        if begins {
            // The chain begins there.
            for of in &mut lines {
                of[line - 2] = format!("*{table}");
            }
            begins = false;
        }
        last = line;
        match rule {
            Err(base) => {
                let is_usual = matches!(chain, "prerouting" | "output" | "postrouting")
                    && base.contains(&format!(" hook {chain} "))
                    && !base.contains("policy drop");
                if !is_usual {
                    let what = format!("chain {chain} is not as Istio makes it");
                    return Err((line, what, base.to_owned()));
                }
                hooked.insert(chain);
            }
            Ok(rule) => {
                first.get_or_insert((line, rule));
                if chain == "postrouting" {
                    return Err((line, NODES.to_owned(), rule.to_owned()));
                }
                if !hooked.contains(chain) && !chain.starts_with("istio-") {
                    let what = format!("chain {chain} is not as Istio makes it");
                    return Err((line, what, rule.to_owned()));
                }
                let wrong = |what: String| {
                    let words: Vec<_> = rule.split_whitespace().collect();
                    (line, what, words.join(" "))
                };
                let (options, family) = options(rule).map_err(wrong)?;
                let chain = name(chain);
                for (v4, of) in [true, false].into_iter().zip(&mut lines) {
                    if family.is_none_or(|family| family == v4) {
                        of[line - 1] = format!("-A {chain} {options}");
                        are_named[usize::from(!v4)] |= family.is_some();
                    }
                }
            }
        }
    }
    commit(&mut lines, table, last);
    Ok(is_there.then(|| Families {
        texts: lines.map(|lines| lines.join("\n") + "\n"),
        are_named,
        first: first.map(|(line, rule)| (line, rule.to_owned())),
    }))
}

/// Ends a table behind its last rule: its chain's end is there. `last`: the rule's number, 0 if there is none.
fn commit(lines: &mut [Vec<String>; 2], table: Option<&str>, last: usize) {
    for of in lines {
        if table.is_some() && last != 0 {
            "COMMIT".clone_into(&mut of[last]);
        }
    }
}

/// A chain's name among iptables' chains: `istio-in-redirect` is `ISTIO_IN_REDIRECT`.
fn name(chain: &str) -> String {
    match chain {
        "istio-prerouting" => "ISTIO_PRERT".to_owned(),
        chain => chain.to_ascii_uppercase().replace('-', "_"),
    }
}

/// A rule's options for iptables, and whether it is for IPv4 or IPv6 only.
fn options(rule: &str) -> Result<(String, Option<bool>), String> {
    let mut found = Options::default();
    // As `nft -a` prints it.
    let rule = rule.split(" # handle ").next().unwrap_or_default();
    let mut words = nft::words(rule).peekable();
    while let Some(word) = words.next() {
        found.statement(word, &mut words)?;
    }
    if found.target.is_empty() {
        return Err("the rule decides nothing".to_owned());
    }
    let Options {
        mut parts,
        family,
        protocol,
        target,
    } = found;
    if let Some(protocol) = protocol {
        parts.insert(0, format!("-p {protocol}"));
    }
    parts.push(format!("-j {target}"));
    Ok((parts.join(" "), family))
}

#[derive(Default)]
struct Options {
    parts: Vec<String>,
    family: Option<bool>,
    protocol: Option<String>,
    target: String,
}

impl Options {
    fn statement<'a>(
        &mut self,
        word: &'a str,
        words: &mut Peekable<impl Iterator<Item = &'a str>>,
    ) -> Result<(), String> {
        let unknown = |word: &str| format!("{word:?} is not understood");
        let mut after = |word: &str| {
            words
                .next()
                .ok_or_else(|| format!("nothing follows {word}"))
        };
        match word {
            "meta" => {
                // The word says enough, also without it.
                let word = after(word)?;
                match word {
                    "l4proto" => {
                        let protocol = value(words)?;
                        self.protocol(&positive(protocol)?)?;
                    }
                    "mark" | "skuid" | "skgid" | "iifname" | "oifname" => {
                        self.statement(word, words)?;
                    }
                    _ => return Err(unknown(word)),
                }
            }
            "iifname" | "oifname" => {
                let (not, name) = value(words)?;
                let option = if word == "iifname" { "-i" } else { "-o" };
                let name = name.trim_matches('"').replace('*', "+");
                if name.contains([',', '"']) {
                    return Err("it is for several interfaces".to_owned());
                }
                self.parts.push(format!("{not}{option} {name}"));
            }
            "ip" | "ip6" => {
                self.only(word == "ip")?;
                let option = match after(word)? {
                    "saddr" => "-s",
                    "daddr" => "-d",
                    other => return Err(unknown(other)),
                };
                let (not, net) = value(words)?;
                self.parts.push(format!("{not}{option} {net}"));
            }
            "tcp" | "udp" => {
                self.protocol(word)?;
                let option = match after(word)? {
                    "dport" => "--dport",
                    "sport" => "--sport",
                    other => return Err(unknown(other)),
                };
                let (not, ports) = value(words)?;
                self.parts.push(if ports.contains(',') {
                    format!("-m multiport {not}{option}s {ports}")
                } else {
                    format!("-m {word} {not}{option} {ports}")
                });
            }
            "skuid" | "skgid" => {
                let (not, id) = value(words)?;
                let option = if word == "skuid" { "uid" } else { "gid" };
                let part = format!("-m owner {not}--{option}-owner {id}");
                self.parts.push(part);
            }
            "mark" => self.mark("mark", words)?,
            "ct" => match after(word)? {
                "mark" => self.mark("connmark", words)?,
                "state" => {
                    let states = ["established", "related", "new", "invalid", "untracked"];
                    let mut found: Vec<String> = Vec::new();
                    while let Some(state) = words.next_if(|word| states.contains(word)) {
                        found.push(state.to_ascii_uppercase());
                    }
                    // As iptables prints them.
                    found.sort_unstable_by_key(|state| state != "RELATED");
                    self.parts
                        .push(format!("-m conntrack --ctstate {}", found.join(",")));
                }
                "zone" => {
                    let zone = value(words)?.1;
                    let zone = zone.strip_prefix("set ").ok_or("a zone is not set")?;
                    self.target(format!("CT --zone {zone}"))?;
                }
                other => return Err(unknown(other)),
            },
            "counter" => {
                while words
                    .next_if(|word| matches!(*word, "packets" | "bytes"))
                    .is_some()
                {
                    words.next();
                }
            }
            "comment" => _ = words.next(),
            "return" | "drop" => self.target(word.to_ascii_uppercase())?,
            // Behind TPROXY, the packet is done.
            "accept" if self.target.starts_with("TPROXY") => {}
            "accept" => self.target("ACCEPT".to_owned())?,
            "jump" | "goto" => {
                let chain = name(after(word)?);
                self.target(chain)?;
            }
            "redirect" => {
                let port = port(words)?;
                self.target(format!("REDIRECT --to-ports {port}"))?;
            }
            "tproxy" => {
                if let Some(family) = words.next_if(|word| matches!(*word, "ip" | "ip6")) {
                    self.only(family == "ip")?;
                }
                let port = port(words)?;
                self.target(format!("TPROXY --on-port {port}"))?;
            }
            _ => return Err(unknown(word)),
        }
        Ok(())
    }

    /// A mark that is asked for or set: of the packet, or of its connection.
    fn mark<'a>(
        &mut self,
        module: &str,
        words: &mut Peekable<impl Iterator<Item = &'a str>>,
    ) -> Result<(), String> {
        if words.next_if_eq(&"set").is_some() {
            let mut of = Vec::new();
            while let Some(word) = words.next_if(|word| {
                matches!(
                    *word,
                    "meta" | "ct" | "mark" | "&" | "|" | "^" | "and" | "or" | "xor"
                ) || word.starts_with(|c: char| c.is_ascii_digit())
            }) {
                of.push(word);
            }
            // TPROXY sets a mark, too.
            if self.target.starts_with("TPROXY") {
                return Ok(());
            }
            let target = match (module, &of[..]) {
                ("mark", ["ct", "mark"]) => "CONNMARK --restore-mark".to_owned(),
                ("connmark", ["mark"] | ["meta", "mark"]) => "CONNMARK --save-mark".to_owned(),
                ("mark", [mark]) => format!("MARK --set-mark {mark}"),
                ("connmark", [mark]) => format!("CONNMARK --set-mark {mark}"),
                (
                    "connmark",
                    [
                        "ct",
                        "mark",
                        "&" | "and",
                        keeps,
                        "|" | "^" | "or" | "xor",
                        mark,
                    ],
                ) => {
                    let bits = keeps.strip_prefix("0x");
                    let bits = bits.and_then(|bits| u32::from_str_radix(bits, 16).ok());
                    let bits = !bits.ok_or_else(|| format!("{keeps:?} is no mask"))?;
                    // Of bits that are cleared, "or" and "xor" are the same.
                    format!("CONNMARK --set-xmark {mark}/{bits:#x}")
                }
                _ => return Err(format!("a mark is set to {:?}", of.join(" "))),
            };
            return self.target(target);
        }
        let bits = match words.next_if(|word| matches!(*word, "&" | "and")) {
            Some(_) => format!("/{}", words.next().ok_or("a mask is missing")?),
            None => String::new(),
        };
        let (not, mark) = value(words)?;
        self.parts
            .push(format!("-m {module} {not}--mark {mark}{bits}"));
        Ok(())
    }

    fn protocol(&mut self, protocol: &str) -> Result<(), String> {
        if !matches!(protocol, "tcp" | "udp") {
            return Err(format!("protocol {protocol:?} is not understood"));
        }
        let known = self.protocol.get_or_insert_with(|| protocol.to_owned());
        if known != protocol {
            return Err("the rule is for two protocols".to_owned());
        }
        Ok(())
    }

    fn only(&mut self, v4: bool) -> Result<(), String> {
        if *self.family.get_or_insert(v4) != v4 {
            return Err("the rule is for both families at once".to_owned());
        }
        Ok(())
    }

    fn target(&mut self, target: String) -> Result<(), String> {
        if !self.target.is_empty() {
            return Err("the rule does two things".to_owned());
        }
        self.target = target;
        Ok(())
    }
}

/// `!= 53` is `! ` and `53`; `{ 53, 15008 }` is `53,15008`; `set 1` is as it is.
fn value<'a>(
    words: &mut Peekable<impl Iterator<Item = &'a str>>,
) -> Result<(&'static str, String), String> {
    let mut next = || words.next().ok_or("a value is missing");
    let mut word = next()?;
    let not = match word {
        "!=" => "! ",
        _ => "",
    };
    if matches!(word, "!=" | "==") {
        word = next()?;
    }
    let found = match word {
        "{" => {
            let mut all = Vec::new();
            loop {
                match next()? {
                    "}" => break all.join(","),
                    word => all.push(word),
                }
            }
        }
        "set" => format!("set {}", next()?),
        word if word.starts_with(['@', '<', '>']) => {
            return Err(format!("{word:?} is not understood"));
        }
        word => word.to_owned(),
    };
    Ok((not, found))
}

/// What is asked for, and not what is not.
fn positive((not, value): (&str, String)) -> Result<String, String> {
    if not.is_empty() {
        Ok(value)
    } else {
        Err(format!("\"!= {value}\" is not understood"))
    }
}

/// `to :15001`
fn port<'a>(words: &mut Peekable<impl Iterator<Item = &'a str>>) -> Result<u16, String> {
    let mut found = words.next_if_eq(&"to").and_then(|_| words.next());
    let port = found
        .take()
        .and_then(|to| to.strip_prefix(':')?.parse().ok());
    port.ok_or_else(|| "it names no port".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_said_in_the_words_of_iptables() {
        for (rule, wanted, family) in [
            (
                "meta l4proto tcp tcp dport 15008 counter packets 0 bytes 7 return",
                "-p tcp -m tcp --dport 15008 -j RETURN",
                None,
            ),
            (
                "oifname \"lo\" meta l4proto tcp ip daddr != 127.0.0.1 tcp dport != { 53, 15008 } meta skuid 3 counter packets 0 \
                 bytes 0 jump istio-in-redirect",
                "-p tcp -o lo ! -d 127.0.0.1 -m multiport ! --dports 53,15008 -m owner --uid-owner 3 -j ISTIO_IN_REDIRECT",
                Some(true),
            ),
            (
                "skgid != 201 skgid != 202 return # handle 7",
                "-m owner ! --gid-owner 201 -m owner ! --gid-owner 202 -j RETURN",
                None,
            ),
            (
                "iifname \"eth*\" ip6 daddr fd00::/8 jump istio-redirect",
                "-i eth+ -d fd00::/8 -j ISTIO_REDIRECT",
                Some(false),
            ),
            (
                "meta l4proto tcp ip6 daddr != ::1 tproxy ip6 to :15006 meta mark set 0x539 counter accept",
                "-p tcp ! -d ::1 -j TPROXY --on-port 15006",
                Some(false),
            ),
            (
                "meta l4proto tcp ct state established,related tcp dport 80 jump istio-divert",
                "-p tcp -m conntrack --ctstate RELATED,ESTABLISHED -m tcp --dport 80 -j ISTIO_DIVERT",
                None,
            ),
            (
                "meta mark & 0x00000fff == 0x00000539 ct mark set ct mark & 0xfffff000 | 0x00000111",
                "-m mark --mark 0x00000539/0x00000fff -j CONNMARK --set-xmark 0x00000111/0xfff",
                None,
            ),
            (
                "ct mark and 0xfff == 0x111 meta mark set ct mark",
                "-m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark",
                None,
            ),
            (
                "udp sport 15053 meta skuid 3 counter ct zone set 2",
                "-p udp -m udp --sport 15053 -m owner --uid-owner 3 -j CT --zone 2",
                None,
            ),
        ] {
            let wanted = (wanted.to_owned(), family);
            assert_eq!(options(rule), Ok(wanted), "{rule}");
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
            assert!(options(rule).is_err(), "{rule}: {:?}", options(rule));
        }
    }

    #[test]
    fn rules_keep_their_lines() {
        let text = "table ip other {\n\tchain x {\n\t\tfoo\n\t}\n}\ntable inet istio-proxy-nat {\n\tchain output {\n\
                    \t\ttype nat hook output priority dstnat; policy accept;\n\t\tcounter jump istio-output\n\t}\n\n\
                    \tchain istio-output {\n\t\tip daddr 127.0.0.1 return\n\t}\n}\ntable inet istio-proxy-raw {\n\
                    \tchain istio-output-dns {\n\t\tudp dport 53 ct zone set 1\n\t}\n}\n";
        let found = in_iptables_words(text).unwrap().unwrap();
        let at = |of: usize, number: usize| found.texts[of].lines().nth(number - 1).unwrap();
        assert_eq!(at(0, 7), "*nat");
        assert_eq!(at(1, 9), "-A OUTPUT -j ISTIO_OUTPUT");
        assert_eq!(at(0, 13), "-A ISTIO_OUTPUT -d 127.0.0.1 -j RETURN");
        assert_eq!((at(1, 13), at(0, 14)), ("", "COMMIT"));
        assert_eq!((at(0, 17), at(0, 19)), ("*raw", "COMMIT"));
        assert_eq!(found.are_named, [true, false]);
        assert!(
            in_iptables_words("table ip other {\n}\n")
                .unwrap()
                .is_none()
        );
        for (from, to, wrong) in [
            ("hook output", "hook input", 8),
            ("policy accept", "policy drop", 8),
            (
                "type nat hook output priority dstnat; policy accept;",
                "counter jump istio-output",
                8,
            ),
            ("chain istio-output-dns", "chain other", 18),
        ] {
            let (line, ..) = in_iptables_words(&text.replace(from, to)).unwrap_err();
            assert_eq!(line, wrong, "{to}");
        }
        let (line, _, rule) =
            in_iptables_words(&text.replace("counter jump", "foo  jump")).unwrap_err();
        assert_eq!((line, &*rule), (9, "foo jump istio-output"));
    }
}
