//! A rule by its options.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::iptables::{Rule, Word};

/// A rule of table `nat` by its options.
#[derive(Debug, Default)]
pub struct Options {
    /// The options that it has, sorted, without its target and its matches: `!uid o`.
    pub shape: String,
    pub source: Option<IpNet>,
    pub destination: Option<IpNet>,
    pub interface: String,
    pub protocol: String,
    pub ports: Vec<u16>,
    pub ids: Vec<u32>,
    pub target: String,
    pub to_port: Option<u16>,
}

/// Reads the options of a rule.
///
/// # Errors
///
/// An option or a match is not one that a sidecar's rules have.
pub fn options(rule: &Rule<'_>) -> Result<Options, String> {
    let mut found = Options::default();
    let mut shape = Vec::new();
    for option in rule.options() {
        let name = option.name.unwrap_or_default();
        let value = option.values.first().map(Word::text).unwrap_or_default();
        let net = || -> Result<Option<IpNet>, String> {
            let net = value.parse::<IpNet>();
            let net = net.or_else(|_| value.parse::<IpAddr>().map(IpNet::from));
            net.map(Some).map_err(|_| format!("{value:?} is no range"))
        };
        let port = |text: &str| text.parse().map_err(|_| format!("{text:?} is no port"));
        let word = match name {
            "-j" | "--jump" if !option.negated => {
                found.target = value.into_owned();
                continue;
            }
            "--to-ports" | "--to-port" if !option.negated => {
                found.to_port = Some(port(&value)?);
                continue;
            }
            "-m" | "--match" => {
                if !matches!(&*value, "tcp" | "udp" | "owner" | "multiport" | "comment") {
                    return Err(format!("match {value:?} is not understood"));
                }
                continue;
            }
            "--comment" => continue,
            "-s" | "--source" => {
                found.source = net()?;
                "s"
            }
            "-d" | "--destination" => {
                found.destination = net()?;
                "d"
            }
            "-i" | "--in-interface" => {
                found.interface = value.into_owned();
                "i"
            }
            "-o" | "--out-interface" => {
                found.interface = value.into_owned();
                "o"
            }
            "-p" | "--protocol" if !option.negated => {
                found.protocol = value.into_owned();
                "p"
            }
            "--dport" | "--dports" | "--destination-port" | "--destination-ports" => {
                let ports: Result<Vec<u16>, String> = value.split(',').map(port).collect();
                found.ports = ports?;
                "port"
            }
            "--uid-owner" | "--gid-owner" => {
                let id = value.parse();
                found
                    .ids
                    .push(id.map_err(|_| format!("{value:?} is no number of a user or group"))?);
                if name == "--uid-owner" { "uid" } else { "gid" }
            }
            _ => return Err(format!("option {name:?} is not understood")),
        };
        shape.push(format!("{}{word}", if option.negated { "!" } else { "" }));
    }
    shape.sort_unstable();
    found.shape = shape.join(" ");
    Ok(found)
}
