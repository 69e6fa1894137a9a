//! Where the agent listens.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
};

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// Where the agent listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[command(next_help_heading = "Endpoints (ADDRESS:PORT, or `off`)")]
pub struct Listeners {
    /// The agent's Unix socket, which commands such as `dataplane status` ask. Default:
    /// /run/dataplane/agent.sock.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub socket: Option<PathBuf>,
    /// Serve Prometheus metrics, at /metrics [default: 0.0.0.0:15020]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "metrics-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_METRICS_ADDR",
        hide_env_values = true
    )]
    pub metrics: Option<Listen>,
    /// Serve readiness, at /healthz/ready, and liveness, at /healthz/live [default: 0.0.0.0:15021]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "health-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_HEALTH_ADDR",
        hide_env_values = true
    )]
    pub health: Option<Listen>,
    /// Serve /healthz and /livez for load balancers, like kube-proxy [default: 0.0.0.0:10256]
    ///
    /// If another process (kube-proxy) has the port, `dataplane status` reports it, and the agent tries
    /// again. The agent answers a service's `healthCheckNodePort` at the addresses of node ports.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "healthz-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_HEALTHZ_ADDR",
        hide_env_values = true
    )]
    pub healthz: Option<Listen>,
    /// Serve /proxyMode for tools that ask for kube-proxy's mode; the answer is `nftables` [default:
    /// 127.0.0.1:10249]
    ///
    /// If another process (kube-proxy) has the port, `dataplane status` warns, and the agent tries again.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "proxy-mode-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_PROXY_MODE_ADDR",
        hide_env_values = true
    )]
    pub proxy_mode: Option<Listen>,
    /// Serve the pages of the Unix socket by TCP: /status, /services, /pools [default: 127.0.0.1:15000]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "admin-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_ADMIN_ADDR",
        hide_env_values = true
    )]
    pub admin: Option<Listen>,
}

impl Listeners {
    /// Returns the path of the Unix socket.
    pub fn socket(&self) -> &Path {
        let socket = self.socket.as_deref();
        socket.unwrap_or_else(|| Path::new("/run/dataplane/agent.sock"))
    }

    /// Returns the address for metrics; `None`: do not listen.
    pub fn metrics(&self) -> Option<SocketAddr> {
        at(self.metrics, Ipv4Addr::UNSPECIFIED, 15020)
    }

    /// Returns the address for liveness and readiness.
    pub fn health(&self) -> Option<SocketAddr> {
        at(self.health, Ipv4Addr::UNSPECIFIED, 15021)
    }

    /// Returns the address for kube-proxy's `/healthz` and `/livez`.
    pub fn healthz(&self) -> Option<SocketAddr> {
        at(self.healthz, Ipv4Addr::UNSPECIFIED, 10256)
    }

    /// Returns the address for kube-proxy's `/proxyMode`.
    pub fn proxy_mode(&self) -> Option<SocketAddr> {
        at(self.proxy_mode, Ipv4Addr::LOCALHOST, 10249)
    }

    /// Returns the TCP address for the pages of the Unix socket.
    pub fn admin(&self) -> Option<SocketAddr> {
        at(self.admin, Ipv4Addr::LOCALHOST, 15000)
    }
}

/// Returns the configured address, or the default.
fn at(said: Option<Listen>, ip: Ipv4Addr, port: u16) -> Option<SocketAddr> {
    said.map_or_else(
        || Some(SocketAddr::new(IpAddr::V4(ip), port)),
        |listen| listen.0,
    )
}

/// A TCP address to listen on, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Listen(#[schemars(with = "String")] pub Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        text.parse().map(|addr| Self(Some(addr))).map_err(|_| {
            format!("`{text}` is not an address and port; expected ADDRESS:PORT such as 127.0.0.1:15000 or [::1]:15000, or `off`")
        })
    }
}

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Listen> for String {
    fn from(listen: Listen) -> Self {
        listen
            .0
            .map_or_else(|| "off".to_owned(), |addr| addr.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_can_be_off() {
        assert_eq!("off".parse(), Ok(Listen(None)));
        assert_eq!(
            "0.0.0.0:15020".parse(),
            Ok(Listen(Some(SocketAddr::from(([0, 0, 0, 0], 15020)))))
        );
        assert!(
            "15020"
                .parse::<Listen>()
                .unwrap_err()
                .contains("ADDRESS:PORT")
        );
        let listeners = Listeners {
            admin: Some(Listen(None)),
            ..Listeners::default()
        };
        assert_eq!(listeners.admin(), None);
        assert_eq!(listeners.metrics(), "0.0.0.0:15020".parse().ok());
    }
}
