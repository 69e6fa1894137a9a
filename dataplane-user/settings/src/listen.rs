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
    /// Serve Prometheus metrics, at /metrics [default: 127.0.0.1:15020]
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "metrics-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_METRICS_ADDR"
    )]
    pub metrics: Option<Listen>,
    /// Who may read the metrics: `none` or `kubernetes`. Default: kubernetes if the metrics are not on loopback and
    /// the source is the Kubernetes API; otherwise none.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub metrics_auth: Option<MetricsAuth>,
    /// Serve readiness, at /healthz/ready, and liveness, at /healthz/live. Default: 0.0.0.0:15021.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub health: Option<Listen>,
    /// Serve /healthz and /livez for load balancers, like kube-proxy. Default: 0.0.0.0:10256.
    ///
    /// If another process (kube-proxy) has the port, `dataplane status` reports it, and the agent tries
    /// again. The agent answers a service's `healthCheckNodePort` at the addresses of node ports.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub healthz: Option<Listen>,
    /// Serve /proxyMode for tools that ask for kube-proxy's mode; the answer is `nftables`. Default:
    /// 127.0.0.1:10249.
    ///
    /// If another process (kube-proxy) has the port, `dataplane status` warns, and the agent tries again.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(skip)]
    pub proxy_mode: Option<Listen>,
    /// Serve the pages of the Unix socket by TCP: /status, /services, /pools [default: off]
    ///
    /// Every process that reaches the address can read the pages.
    #[serde(skip_serializing_if = "is_default")]
    #[arg(
        id = "admin-addr",
        long,
        value_name = "ADDR",
        env = "DATAPLANE_ADMIN_ADDR"
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
        at(self.metrics, Ipv4Addr::LOCALHOST, 15020)
    }

    /// Returns who may read the metrics. `from_api`: whether the source is the Kubernetes API.
    pub fn metrics_auth(&self, from_api: bool) -> MetricsAuth {
        let outside = self.metrics().is_some_and(|at| !at.ip().is_loopback());
        self.metrics_auth.unwrap_or(if outside && from_api {
            MetricsAuth::Kubernetes
        } else {
            MetricsAuth::None
        })
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

    /// Returns the TCP address for the pages of the Unix socket; `None`, the default: do not listen.
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin.and_then(|listen| listen.0)
    }
}

impl Listeners {
    /// The TCP ports that the agent listens at, on the node.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        let addresses = [
            self.metrics(),
            self.health(),
            self.healthz(),
            self.proxy_mode(),
            self.admin(),
        ];
        addresses.into_iter().flatten().map(|at| at.port())
    }
}

/// Returns the configured address, or the default.
fn at(said: Option<Listen>, ip: Ipv4Addr, port: u16) -> Option<SocketAddr> {
    said.map_or_else(
        || Some(SocketAddr::new(IpAddr::V4(ip), port)),
        |listen| listen.0,
    )
}

/// The clients that may read the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MetricsAuth {
    /// Every client, by HTTP.
    #[default]
    None,
    /// Clients with a bearer token whose user may get /metrics in the cluster, by HTTPS. The agent
    /// asks the API server (TokenReview, SubjectAccessReview), and refuses clients while it does not answer.
    Kubernetes,
}

/// A TCP address to listen on, or `off`. An IPv4 address may be in brackets like an IPv6 address, so that
/// `[$(NODE_IP)]:15020` in a pod is right for both families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Listen(#[schemars(with = "String")] pub Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        let in_brackets = || {
            let (ip, port) = text.strip_prefix('[')?.split_once("]:")?;
            let ip: Ipv4Addr = ip.parse().ok()?;
            Some(SocketAddr::new(ip.into(), port.parse().ok()?))
        };
        let addr = text.parse().ok().or_else(in_brackets);
        addr.map(|addr| Self(Some(addr))).ok_or_else(|| {
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
        assert_eq!(listeners.metrics(), "127.0.0.1:15020".parse().ok());
    }

    #[test]
    fn a_pod_writes_both_families_in_brackets() {
        for (text, wanted) in [
            ("[192.0.2.1]:15020", "192.0.2.1:15020"),
            ("[2001:db8::1]:15020", "[2001:db8::1]:15020"),
        ] {
            assert_eq!(text.parse(), Ok(Listen(wanted.parse().ok())), "{text}");
        }
        for wrong in ["[]:15020", "[192.0.2.1]", "[192.0.2.1]:", "[web]:80"] {
            assert!(wrong.parse::<Listen>().is_err(), "{wrong}");
        }
    }

    /// By default the admin server has no TCP address, and the metrics are on loopback. Metrics on other addresses need a
    /// token if the source is the Kubernetes API, unless the operator opens them.
    #[test]
    fn what_is_not_asked_for_is_not_for_everybody() {
        let listeners = Listeners::default();
        assert_eq!(listeners.admin(), None);
        assert!(listeners.metrics().is_some_and(|at| at.ip().is_loopback()));
        let at = |text: &str| Listeners {
            metrics: text.parse().ok(),
            ..Listeners::default()
        };
        for (text, from_api, wanted) in [
            ("127.0.0.1:15020", true, MetricsAuth::None),
            ("[::1]:15020", true, MetricsAuth::None),
            ("0.0.0.0:15020", true, MetricsAuth::Kubernetes),
            ("[2001:db8::1]:15020", true, MetricsAuth::Kubernetes),
            ("192.0.2.1:15020", false, MetricsAuth::None),
        ] {
            assert_eq!(at(text).metrics_auth(from_api), wanted, "{text}");
        }
        let open = Listeners {
            metrics_auth: Some(MetricsAuth::None),
            ..at("0.0.0.0:15020")
        };
        assert_eq!(open.metrics_auth(true), MetricsAuth::None);
    }
}
