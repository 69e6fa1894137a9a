//! The destination of a connection: an address, or a name that the client looks up first.

use std::{fmt, net::IpAddr, str::FromStr};

use admin::{api::DnsLookup, client::Client};
use anyhow::{Context as _, bail};
use dataplane_common::Protocol;
use dns::{LowerName, Step};

use super::{Destination, Namespace, explanation::Explanation};
use crate::with_protocol;

/// A destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Address(Destination),
    Name {
        name: String,
        port: u16,
        protocol: Protocol,
    },
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (socket, protocol) = with_protocol(text)?;
        // A destination without letters is an address, also if its port is missing.
        let is_address =
            |text: &str| text.starts_with('[') || !text.contains(|c: char| c.is_ascii_alphabetic());
        let (name, port) = match socket.rsplit_once(':') {
            Some((name, port)) if !is_address(name) && !name.contains(':') => (name, port),
            _ => return text.parse().map(Self::Address),
        };
        let port = port.parse::<u16>().ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| {
            format!("`{socket}` has no port from 1 to 65535; expected NAME:PORT such as httpbin.default:8000")
        })?;
        let is_of_host = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if LowerName::parse(name).is_err() || !name.chars().all(is_of_host) {
            return Err(format!(
                "`{}` is not a name in DNS; expected NAME:PORT such as httpbin.default:8000",
                name.escape_debug()
            ));
        }
        Ok(Self::Name {
            name: name.to_owned(),
            port,
            protocol,
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(to) => to.fmt(f),
            Self::Name {
                name,
                port,
                protocol,
            } => write!(f, "{name}:{port}/{protocol}"),
        }
    }
}

/// The addresses of a name, and how the client finds them.
pub struct Found {
    /// The queries, as sentences.
    pub steps: Vec<String>,
    pub lookup: DnsLookup,
    /// The first address, which the client most likely uses. `None` if there is no address, or if the agent would ask
    /// resolvers.
    pub address: Option<IpAddr>,
}

impl Found {
    /// Explains a connection to a name that has no address, as far as the agent knows.
    pub fn without_address(self, source: String, destination: String) -> Explanation {
        let Self {
            mut steps, lookup, ..
        } = self;
        let asks = lookup.ipv4.iter().chain(&lookup.ipv6);
        let (reason, last) = if asks.into_iter().any(|step| step.ask.is_some()) {
            (
                "resolvers",
                "the agent does not know the resolvers' answer, and this command does not ask resolvers: give the address",
            )
        } else {
            (
                "not-found",
                "the client finds no address, and does not connect",
            )
        };
        steps.push(last.to_owned());
        Explanation {
            verdict: "no-address",
            reason,
            steps,
            lookup: Some(lookup),
            ..Explanation::of(source, destination)
        }
    }
}

/// Asks the agent for the addresses that a client finds for a name.
pub fn find(
    client: &Client,
    source: &impl fmt::Display,
    namespace: Option<&Namespace>,
    name: &str,
) -> anyhow::Result<Found> {
    let Some(namespace) = namespace else {
        bail!(
            "no network namespace on this node has the address {source}, so the agent answers no DNS query of it; give an \
             address in place of the name {name}"
        );
    };
    let path = format!("/dns/lookup?netns={}&name={name}", namespace.cookie);
    let lookup: DnsLookup = client.get(&path).with_context(|| {
        format!(
            "cannot tell what {source} finds for the name {name}; if the agent does not answer its DNS queries, give an \
             address in place of the name"
        )
    })?;
    let mut steps = Vec::new();
    let asks = |steps: &[Step]| steps.iter().any(|step| step.ask.is_some());
    let has = |steps: &[Step]| addresses(steps).next().is_some();
    // Both queries take one way, unless only one family exists. While it is unknown whether there is an IPv4 address,
    // the client may not use an IPv6 address.
    let only_v6 = has(&lookup.ipv6) && !has(&lookup.ipv4) && !asks(&lookup.ipv4);
    let told = if only_v6 { &lookup.ipv6 } else { &lookup.ipv4 };
    for step in told {
        steps.push(sentence(step));
    }
    let mut all: Vec<IpAddr> = Vec::new();
    if !asks(&lookup.ipv4) {
        let found = addresses(&lookup.ipv4).chain(addresses(&lookup.ipv6));
        all.extend(found);
    }
    if let [first, more @ ..] = &all[..]
        && !more.is_empty()
    {
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        steps.push(format!(
            "{name} has further addresses: {}; this explains a connection to {first}",
            more.join(", ")
        ));
    }
    Ok(Found {
        steps,
        lookup,
        address: all.first().copied(),
    })
}

fn addresses(steps: &[Step]) -> impl Iterator<Item = IpAddr> + '_ {
    steps.iter().flat_map(|step| step.addresses.iter().copied())
}

/// Returns a step as a sentence.
fn sentence(step: &Step) -> String {
    let Step { name, rule, .. } = step;
    let object = step
        .object
        .as_ref()
        .map(|object| format!(", from {object}"));
    let by = format!("rule {rule}{}", object.unwrap_or_default());
    if let Some(ask) = &step.ask {
        let resolvers: Vec<String> = ask.resolvers.iter().map(ToString::to_string).collect();
        let names = ask.names.join(", ");
        return if resolvers.is_empty() {
            format!(
                "the agent refuses to look up {name} ({by}): the client has no resolver for {names}"
            )
        } else {
            format!("the agent asks {} for {names} ({by})", resolvers.join(", "))
        };
    }
    let addresses: Vec<String> = step.addresses.iter().map(ToString::to_string).collect();
    let cached = if step.cached { ", from the cache" } else { "" };
    let what = match (step.is_missing(), &addresses[..]) {
        (true, _) => "it does not exist".to_owned(),
        (false, []) => "it exists, and has no address".to_owned(),
        (false, addresses) => addresses.join(", "),
    };
    format!("the agent answers the query for {name} ({by}{cached}): {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses() {
        let name = |name: &str, port, protocol| Target::Name {
            name: name.to_owned(),
            port,
            protocol,
        };
        for (text, target) in [
            (
                "httpbin.default:8000",
                name("httpbin.default", 8000, Protocol::TCP),
            ),
            ("dns:53/udp", name("dns", 53, Protocol::UDP)),
            (
                "www.example.com.:443/tcp",
                name("www.example.com.", 443, Protocol::TCP),
            ),
        ] {
            assert_eq!(text.parse(), Ok(target));
        }
        for text in ["10.96.0.1:80", "[fd00::1]:80/udp"] {
            assert!(matches!(text.parse(), Ok(Target::Address(_))), "{text}");
        }
        for (text, says) in [
            ("web", "not an address and port"),
            ("web:0", "has no port"),
            ("web:http", "has no port"),
            ("a..b:80", "not a name in DNS"),
            ("web&netns=7:80", "not a name in DNS"),
            ("web x:80", "not a name in DNS"),
            ("web:80/sctp", "not a protocol"),
            ("10.96.0.1", "not an address and port"),
            ("fd00::1:80", "not an address and port"),
        ] {
            let error = text.parse::<Target>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
