//! The statements of one rule of nf_tables, as options of iptables.

use std::iter::Peekable;

use crate::text::nft;

/// A chain's name among iptables' chains: `istio-in-redirect` is `ISTIO_IN_REDIRECT`.
pub(super) fn name(chain: &str) -> String {
    match chain {
        "istio-prerouting" => "ISTIO_PRERT".to_owned(),
        chain => chain.to_ascii_uppercase().replace('-', "_"),
    }
}

/// A rule's options for iptables, and whether it is for IPv4 or IPv6 only.
pub(super) fn options(rule: &str) -> Result<(String, Option<bool>), String> {
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

/// Returns the value of a comparison for equality.
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
}
