//! Keeps the sysctls of the kernel's own conntrack as the operator wants them.
//!
//! kube-proxy sets them once, at its start. They are read again with each look at the node's network here:
//! the module may be loaded later, or anew, and then has its own values.

use std::io;

use kernel::{nf_conntrack, sysctl};
use settings::NfConntrack;
use tracing::{info, warn};

/// Connections for each bucket of the kernel's hash table, as with kube-proxy.
const FOR_EACH_BUCKET: u32 = 4;

/// The sysctls to keep.
#[derive(Debug)]
pub struct Sysctls(Vec<Sysctl>);

#[derive(Debug, PartialEq, Eq)]
struct Sysctl {
    /// Its name below `net.netfilter`.
    name: &'static str,
    wanted: u32,
    /// Whether a larger value is right, too.
    at_least: bool,
    /// Whether it had the wanted value before.
    was_right: bool,
}

/// What a look at a sysctl came to.
enum Seen {
    Right,
    /// It had another value, and has the wanted one now.
    Set(String),
}

impl Sysctls {
    /// Those that `settings` speak of, on a node with so many cores.
    pub fn new(settings: &NfConntrack, cores: u32) -> Self {
        let max = settings.max(cores);
        let timeout = |timeout: Option<settings::Timeout>| timeout.map(settings::Timeout::seconds);
        let all = [
            ("nf_conntrack_max", max, true),
            (
                "nf_conntrack_buckets",
                max.map(|max| max / FOR_EACH_BUCKET),
                true,
            ),
            (
                "nf_conntrack_tcp_timeout_established",
                timeout(settings.tcp_established_timeout),
                false,
            ),
            (
                "nf_conntrack_tcp_timeout_close_wait",
                timeout(settings.tcp_close_wait_timeout),
                false,
            ),
            (
                "nf_conntrack_tcp_be_liberal",
                settings.tcp_be_liberal.map(Into::into),
                false,
            ),
            (
                "nf_conntrack_udp_timeout",
                timeout(settings.udp_timeout),
                false,
            ),
            (
                "nf_conntrack_udp_timeout_stream",
                timeout(settings.udp_stream_timeout),
                false,
            ),
        ];
        let wanted = all.into_iter().filter_map(|(name, wanted, at_least)| {
            Some(Sysctl {
                name,
                wanted: wanted?,
                at_least,
                was_right: false,
            })
        });
        Self(wanted.collect())
    }

    /// Sets those that have other values. Answers why what cannot be set, each reason once.
    pub fn keep(&mut self) -> Vec<String> {
        let mut refused: Vec<(String, Vec<String>)> = Vec::new();
        for sysctl in &mut self.0 {
            let name = format!("net.netfilter.{}", sysctl.name);
            match sysctl.keep() {
                Ok(Seen::Right) => sysctl.was_right = true,
                Ok(Seen::Set(before)) => {
                    if sysctl.was_right {
                        warn!(
                            "another program set {name} to {before}; the agent set it back to {}, as \
                             configured",
                            sysctl.wanted
                        );
                    } else {
                        info!(sysctl = name, before, now = sysctl.wanted, "set a sysctl");
                    }
                    sysctl.was_right = true;
                }
                Err(error) => {
                    let why = sysctl.why(&error);
                    match refused.iter_mut().find(|(known, _)| *known == why) {
                        Some((_, names)) => names.push(name),
                        None => refused.push((why, vec![name])),
                    }
                }
            }
        }
        let text =
            |(why, names): (String, Vec<String>)| format!("cannot set {}: {why}", names.join(", "));
        refused.into_iter().map(text).collect()
    }
}

impl Sysctl {
    fn keep(&self) -> io::Result<Seen> {
        let file = format!("netfilter/{}", self.name);
        let before = sysctl::get(&file)?;
        if self.is_right(&before) {
            return Ok(Seen::Right);
        }
        sysctl::set(&file, &self.wanted.to_string())?;
        Ok(Seen::Set(before))
    }

    fn is_right(&self, value: &str) -> bool {
        value.parse().is_ok_and(|value: u32| {
            if self.at_least {
                value >= self.wanted
            } else {
                value == self.wanted
            }
        })
    }

    fn why(&self, error: &io::Error) -> String {
        const OTHERWISE: &str = "leave kernel.conntrack out of the configuration";
        match error.kind() {
            io::ErrorKind::NotFound if !nf_conntrack::is_loaded() => format!(
                "the kernel's module nf_conntrack is not loaded; load it (`modprobe nf_conntrack`), and the agent \
                 follows within 30 s, or {OTHERWISE}"
            ),
            // In other network namespaces, the kernel lets nobody write to these.
            io::ErrorKind::PermissionDenied if self.at_least => format!(
                "{error}; nf_conntrack_max and nf_conntrack_buckets are the whole machine's and can be set in its first \
                 network namespace only: run the agent there (hostNetwork: true), or leave maxPerCore and min out of \
                 kernel.conntrack"
            ),
            _ => sysctl::reason(error, "conntrack", "kernel.conntrack", OTHERWISE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_asked_for_is_left_alone() {
        assert!(
            Sysctls::new(&NfConntrack::default(), 4).0.is_empty(),
            "by default"
        );
        let settings = NfConntrack {
            min: Some(4001),
            tcp_be_liberal: Some(false),
            udp_timeout: "30s".parse().ok(),
            ..NfConntrack::default()
        };
        let all = Sysctls::new(&settings, 4).0;
        let all: Vec<_> = all.iter().map(|s| (s.name, s.wanted)).collect();
        assert_eq!(
            all,
            [
                ("nf_conntrack_max", 4001),
                ("nf_conntrack_buckets", 1000),
                ("nf_conntrack_tcp_be_liberal", 0),
                ("nf_conntrack_udp_timeout", 30)
            ]
        );
    }

    #[test]
    fn a_larger_maximum_is_right_and_a_longer_timeout_is_not() {
        let is_right = |at_least, value| {
            let sysctl = Sysctl {
                name: "nf_conntrack_max",
                wanted: 100,
                at_least,
                was_right: false,
            };
            sysctl.is_right(value)
        };
        assert!(is_right(true, "101") && is_right(true, "100") && !is_right(true, "99"));
        assert!(!is_right(false, "101") && is_right(false, "100"));
        assert!(!is_right(true, "") && !is_right(true, "-1"));
    }
}
