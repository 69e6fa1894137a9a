//! Splits a rule into its options.

use ipnet::IpNet;

use super::Row;
use crate::text::tree::{self, Key, Part};

/// The options of a rule. Omits options of its target that no decision depends on, such as a mark to set.
#[derive(Debug, Default)]
pub struct Options {
    /// The rule's options as sorted words, without the target and the names of matches: `!uid o`.
    pub shape: String,
    pub source: Option<IpNet>,
    pub destination: Option<IpNet>,
    pub interface: String,
    pub protocol: String,
    pub ports: Vec<u16>,
    /// All users or groups that the rule names, matched or excluded.
    pub ids: Vec<u32>,
    /// The users that the rule excludes.
    pub not_uids: Vec<u32>,
    /// The groups that the rule excludes.
    pub not_gids: Vec<u32>,
    /// The mark of the packet or of its connection that the rule matches, with its mask.
    pub mark: Option<(u32, u32)>,
    /// The conntrack states that the rule matches.
    pub state: String,
    pub target: String,
    pub to_port: Option<u16>,
}

/// The supported matches.
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

/// Options of targets that set marks.
const OF_MARKS: [&str; 8] = [
    "--set-mark",
    "--set-xmark",
    "--save-mark",
    "--restore-mark",
    "--nfmask",
    "--ctmask",
    "--tproxy-mark",
    "--on-ip",
];

/// Reads the options of a rule.
///
/// # Errors
///
/// If a sidecar's rules do not have such an option or match.
pub fn options(row: &Row<'_>) -> Result<Options, String> {
    let mut found = Options::default();
    let mut shape = Vec::new();
    for part in &row.parts {
        let Part {
            not, name, value, ..
        } = part;
        let net = || {
            let net = tree::net(value).map(Some);
            net.ok_or_else(|| format!("{value:?} is no range"))
        };
        let port = |text: &str| text.parse().map_err(|_| format!("{text:?} is no port"));
        let word = match part.key {
            Key::Target if !not => {
                found.target = value.to_string();
                continue;
            }
            Key::ToPort if !not => {
                found.to_port = Some(port(value)?);
                continue;
            }
            Key::Module => {
                if !MODULES.contains(&&**value) {
                    return Err(format!("match {value:?} is not understood"));
                }
                continue;
            }
            Key::Comment | Key::Bits => continue,
            _ if !not && OF_MARKS.contains(name) => continue,
            Key::Mark | Key::ConnMark => {
                let mark = tree::mark(value);
                found.mark = Some(mark.ok_or_else(|| format!("{value:?} is no mark"))?);
                if part.key == Key::Mark {
                    "mark"
                } else {
                    "connmark"
                }
            }
            Key::State => {
                found.state = value.to_string();
                "state"
            }
            Key::Source => {
                found.source = net()?;
                "s"
            }
            Key::Destination => {
                found.destination = net()?;
                "d"
            }
            Key::In => {
                found.interface = value.to_string();
                "i"
            }
            Key::Out => {
                found.interface = value.to_string();
                "o"
            }
            Key::Protocol if !not => {
                found.protocol = value.to_string();
                "p"
            }
            Key::Port => {
                let ports: Result<Vec<u16>, String> = value.split(',').map(port).collect();
                found.ports = ports?;
                "port"
            }
            Key::Uid | Key::Gid => {
                let id = value.parse();
                let id = id.map_err(|_| format!("{value:?} is no number of a user or group"))?;
                let (word, others) = if part.key == Key::Uid {
                    ("uid", &mut found.not_uids)
                } else {
                    ("gid", &mut found.not_gids)
                };
                if *not {
                    others.push(id);
                }
                found.ids.push(id);
                word
            }
            _ => return Err(format!("option {name:?} is not understood")),
        };
        shape.push(format!("{}{word}", if *not { "!" } else { "" }));
    }
    shape.sort_unstable();
    found.shape = shape.join(" ");
    Ok(found)
}
