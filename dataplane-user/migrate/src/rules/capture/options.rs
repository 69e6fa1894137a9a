//! A rule by its options.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::text::{Rule, Word};

/// A mark and the bits of it that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    mark: u32,
    bits: u32,
}

impl Mark {
    pub const fn new(mark: u32, bits: u32) -> Self {
        Self { mark, bits }
    }

    fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        let (mark, bits) = text.split_once('/').unwrap_or((text, "0xffffffff"));
        Some(Self::new(number(mark)?, number(bits)?))
    }
}

/// A rule by its options. Options of its target that no decision depends on, such as a mark to set, are left out.
#[derive(Debug, Default)]
pub struct Options {
    /// The options that it has, sorted, without its target and its matches: `!uid o`.
    pub shape: String,
    pub source: Option<IpNet>,
    pub destination: Option<IpNet>,
    pub interface: String,
    pub protocol: String,
    pub ports: Vec<u16>,
    /// The users or groups that the rule is for, or is not for.
    pub ids: Vec<u32>,
    /// The users that it is not for.
    pub not_uids: Vec<u32>,
    /// The groups that it is not for.
    pub not_gids: Vec<u32>,
    /// The mark of the packet or of its connection.
    pub mark: Option<Mark>,
    /// The states of conntrack.
    pub state: String,
    pub target: String,
    pub to_port: Option<u16>,
}

/// The matches that are understood.
const MODULES: [&str; 8] = [
    "tcp",
    "udp",
    "owner",
    "multiport",
    "comment",
    "mark",
    "connmark",
    "conntrack",
];

/// Reads the options of a rule.
///
/// # Errors
///
/// An option or a match is not one that a sidecar's rules have.
pub fn options(rule: &Rule<'_>) -> Result<Options, String> {
    let mut found = Options::default();
    let mut shape = Vec::new();
    let mut module = String::new();
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
            "--to-ports" | "--to-port" | "--on-port" if !option.negated => {
                found.to_port = Some(port(&value)?);
                continue;
            }
            "-m" | "--match" => {
                if !MODULES.contains(&&*value) {
                    return Err(format!("match {value:?} is not understood"));
                }
                module = value.into_owned();
                continue;
            }
            "--comment" => continue,
            // Of targets that set marks.
            "--set-mark" | "--set-xmark" | "--save-mark" | "--restore-mark" | "--nfmask"
            | "--ctmask" | "--tproxy-mark" | "--on-ip"
                if !option.negated =>
            {
                continue;
            }
            "--mark" => {
                let mark = Mark::parse(&value);
                found.mark = Some(mark.ok_or_else(|| format!("{value:?} is no mark"))?);
                if module == "connmark" {
                    "connmark"
                } else {
                    "mark"
                }
            }
            "--ctstate" => {
                found.state = value.into_owned();
                "state"
            }
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
                let id = id.map_err(|_| format!("{value:?} is no number of a user or group"))?;
                let (word, not) = if name == "--uid-owner" {
                    ("uid", &mut found.not_uids)
                } else {
                    ("gid", &mut found.not_gids)
                };
                if option.negated {
                    not.push(id);
                }
                found.ids.push(id);
                word
            }
            _ => return Err(format!("option {name:?} is not understood")),
        };
        shape.push(format!("{}{word}", if option.negated { "!" } else { "" }));
    }
    shape.sort_unstable();
    found.shape = shape.join(" ");
    Ok(found)
}
