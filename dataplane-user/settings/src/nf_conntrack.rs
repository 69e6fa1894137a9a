//! Sysctls of the kernel's own conntrack.

use std::{fmt, str::FromStr};

use clap::Args;
use jiff::SignedDuration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Sysctls of the kernel's own conntrack (net.netfilter.nf_conntrack_…), for traffic that does not
/// belong to a service. The agent leaves alone every sysctl without a value here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[command(next_help_heading = "Sysctls of the kernel's own conntrack [default: left alone]")]
pub struct NfConntrack {
    /// Raise nf_conntrack_max to N times the node's cores, and nf_conntrack_buckets to a quarter of
    /// that
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    #[arg(
        id = "nf-conntrack-max-per-core",
        long,
        value_name = "N",
        env = "DATAPLANE_NF_CONNTRACK_MAX_PER_CORE",
        hide_env_values = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_per_core: Option<u32>,
    /// Raise nf_conntrack_max to at least N, whatever the number of cores
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    #[arg(
        id = "nf-conntrack-min",
        long,
        value_name = "N",
        env = "DATAPLANE_NF_CONNTRACK_MIN",
        hide_env_values = true,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub min: Option<u32>,
    /// Set nf_conntrack_tcp_timeout_established: how long an established TCP connection may be idle
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        id = "nf-conntrack-tcp-timeout-established",
        long,
        value_name = "TIME",
        env = "DATAPLANE_NF_CONNTRACK_TCP_TIMEOUT_ESTABLISHED",
        hide_env_values = true
    )]
    pub tcp_established_timeout: Option<Timeout>,
    /// Set nf_conntrack_tcp_timeout_close_wait: how long a TCP connection may be idle after one side
    /// has closed it
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        id = "nf-conntrack-tcp-timeout-close-wait",
        long,
        value_name = "TIME",
        env = "DATAPLANE_NF_CONNTRACK_TCP_TIMEOUT_CLOSE_WAIT",
        hide_env_values = true
    )]
    pub tcp_close_wait_timeout: Option<Timeout>,
    /// Set nf_conntrack_tcp_be_liberal: whether TCP packets outside the window pass
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        id = "nf-conntrack-tcp-be-liberal",
        long,
        value_name = "true|false",
        env = "DATAPLANE_NF_CONNTRACK_TCP_BE_LIBERAL",
        hide_env_values = true,
        hide_possible_values = true
    )]
    pub tcp_be_liberal: Option<bool>,
    /// Set nf_conntrack_udp_timeout: how long a UDP flow without an answer may be idle
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        id = "nf-conntrack-udp-timeout",
        long,
        value_name = "TIME",
        env = "DATAPLANE_NF_CONNTRACK_UDP_TIMEOUT",
        hide_env_values = true
    )]
    pub udp_timeout: Option<Timeout>,
    /// Set nf_conntrack_udp_timeout_stream: how long a UDP flow with answers may be idle
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arg(
        id = "nf-conntrack-udp-timeout-stream",
        long,
        value_name = "TIME",
        env = "DATAPLANE_NF_CONNTRACK_UDP_TIMEOUT_STREAM",
        hide_env_values = true
    )]
    pub udp_stream_timeout: Option<Timeout>,
}

impl NfConntrack {
    /// The least value for nf_conntrack_max on a node with so many cores; `None`: it is left alone.
    pub fn max(&self, cores: u32) -> Option<u32> {
        // The kernel has a signed number there.
        let most = i32::MAX.unsigned_abs();
        let scaled = self
            .max_per_core
            .map(|per_core| per_core.saturating_mul(cores));
        let max = scaled.into_iter().chain(self.min).max()?;
        Some(max.min(most))
    }
}

/// A timeout in whole seconds, at least one. Written as `90s`, `5m`, `24h` or `1h30m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timeout(#[schemars(with = "String")] u32);

impl Timeout {
    /// A timeout of so many seconds; `None` for 0.
    pub fn of_seconds(seconds: u32) -> Option<Self> {
        (seconds > 0).then_some(Self(seconds))
    }

    /// Its seconds.
    pub fn seconds(self) -> u32 {
        self.0
    }
}

impl FromStr for Timeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not a timeout; expected whole seconds with a unit such as 90s, 5m or 24h"
            )
        };
        let duration: SignedDuration = text.parse().map_err(|_| wrong())?;
        let seconds = u32::try_from(duration.as_secs()).map_err(|_| wrong())?;
        if duration.subsec_nanos() != 0 {
            return Err(wrong());
        }
        Self::of_seconds(seconds).ok_or_else(wrong)
    }
}

impl TryFrom<String> for Timeout {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            seconds if seconds % 3600 == 0 => write!(f, "{}h", seconds / 3600),
            seconds if seconds % 60 == 0 => write!(f, "{}m", seconds / 60),
            seconds => write!(f, "{seconds}s"),
        }
    }
}

impl From<Timeout> for String {
    fn from(timeout: Timeout) -> Self {
        timeout.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_whole_seconds() {
        for (text, seconds, shown) in [
            ("1h", 3600, "1h"),
            // As Go writes it.
            ("24h0m0s", 86_400, "24h"),
            ("1h30m", 5400, "90m"),
            ("1.5h", 5400, "90m"),
            ("90s", 90, "90s"),
            ("2m", 120, "2m"),
        ] {
            let timeout: Timeout = text.parse().unwrap();
            assert_eq!(timeout.seconds(), seconds, "{text}");
            assert_eq!(timeout.to_string(), shown, "{text}");
            assert_eq!(shown.parse(), Ok(timeout));
        }
        for wrong in ["", "60", "0s", "-5s", "500ms", "1.5s", "soon", "2000000h"] {
            let said = wrong.parse::<Timeout>();
            assert!(said.is_err_and(|said| said.contains("expected")), "{wrong}");
        }
    }

    #[test]
    fn the_maximum_is_by_cores_and_at_least_what_was_said() {
        let max = |max_per_core, min, cores| {
            let settings = NfConntrack {
                max_per_core,
                min,
                ..NfConntrack::default()
            };
            settings.max(cores)
        };
        assert_eq!(max(None, None, 4), None);
        assert_eq!(max(Some(32_768), None, 2), Some(65_536));
        assert_eq!(max(Some(32_768), Some(131_072), 2), Some(131_072));
        assert_eq!(max(Some(32_768), Some(131_072), 8), Some(262_144));
        assert_eq!(max(None, Some(131_072), 8), Some(131_072));
        assert_eq!(max(Some(u32::MAX), None, 8), Some(2_147_483_647));
    }
}
