//! DNS on the node.

use std::{
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// The agent's DNS server: the clients whose queries it answers, and its data about the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Dns {
    /// Whose queries the agent answers, in place of their resolvers: `none`, `mesh` for captured
    /// workloads, or `all` for all pods of the node that have a network namespace of their own. Default:
    /// none.
    #[serde(skip_serializing_if = "is_default")]
    pub capture: Option<DnsCapture>,
    /// To which addresses queries are captured: to the pod's `resolvers`, or to `any` at port 53. The
    /// agent asks the pod's resolvers in both cases. Default: resolvers.
    #[serde(skip_serializing_if = "is_default")]
    pub destinations: Option<DnsDestinations>,
    /// The port at which the agent listens, at loopback in the workload's network namespace. Default:
    /// 15053.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1))]
    pub port: Option<u16>,
    /// Domain of the cluster (the kubelet's clusterDomain). Default: cluster.local.
    #[serde(skip_serializing_if = "is_default")]
    pub cluster_domain: Option<String>,
    /// Addresses of the cluster's DNS (the kubelet's clusterDNS), which pods have as resolvers.
    /// Default: the cluster IPs of the Service kube-system/kube-dns.
    #[serde(skip_serializing_if = "is_default")]
    pub cluster_dns: Vec<IpAddr>,
    /// File with the node's own resolvers and search list (the kubelet's resolvConf). The agent asks
    /// these resolvers for the names of ServiceEntries' endpoints, too. Default: /etc/resolv.conf.
    #[serde(skip_serializing_if = "is_default")]
    pub resolv_conf: Option<PathBuf>,
    /// Seconds for which clients may keep answers from the names of services. Default: 5.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(max = 3600))]
    pub ttl_seconds: Option<u32>,
    /// Seconds for which clients may keep answers from the hosts of ServiceEntries. Default: 30.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(max = 3600))]
    pub service_entry_ttl_seconds: Option<u32>,
    /// Bytes of resolvers' answers that the cache has room for. Default: 33554432 (32 MiB).
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1_048_576, max = 4_294_967_296_u64))]
    pub cache_bytes: Option<u64>,
    /// Seconds for which a resolver's answer is valid at most, whatever its TTL is. Default: 3600 (an hour).
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 1, max = 86_400))]
    pub max_ttl_seconds: Option<u32>,
    /// Seconds for which clients get a resolver's answer after its TTL, while resolvers do not answer; 0:
    /// they get no such answer. Default: 86400 (a day).
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(max = 604_800))]
    pub stale_seconds: Option<u32>,
}

const TTL: RangeInclusive<u64> = 0..=3600;
const MAX_TTL: RangeInclusive<u64> = 1..=86_400;
const CACHE: RangeInclusive<u64> = 1 << 20..=1 << 32;
const STALE: RangeInclusive<u64> = 0..=604_800;

/// The workloads whose queries the agent answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DnsCapture {
    /// No workload.
    #[default]
    None,
    /// Captured workloads.
    Mesh,
    /// All pods of the node that have a network namespace of their own.
    All,
}

/// To which addresses queries are captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DnsDestinations {
    /// The resolvers in the pod's `resolv.conf`.
    #[default]
    Resolvers,
    /// Any address besides loopback and the pod's own, at port 53.
    Any,
}

impl Dns {
    /// The port at which the agent listens.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(15053)
    }

    /// Whether the agent answers queries.
    pub fn is_on(&self) -> bool {
        self.capture.unwrap_or_default() != DnsCapture::None
    }

    /// Whether the agent answers the queries of pods that are not captured, too.
    pub fn is_for_all(&self) -> bool {
        self.capture == Some(DnsCapture::All)
    }

    /// Whether queries to any address are captured.
    pub fn is_for_any_destination(&self) -> bool {
        self.destinations == Some(DnsDestinations::Any)
    }

    /// The cluster's domain.
    pub fn domain(&self) -> &str {
        self.cluster_domain.as_deref().unwrap_or("cluster.local")
    }

    /// Returns the path of the file with the node's resolvers.
    pub fn resolv_conf(&self) -> &Path {
        let default = Path::new("/etc/resolv.conf");
        self.resolv_conf.as_deref().unwrap_or(default)
    }

    /// The TTL of the names of services, in seconds.
    pub fn ttl(&self) -> u32 {
        self.ttl_seconds.unwrap_or(5)
    }

    /// The TTL of the hosts of ServiceEntries, in seconds.
    pub fn service_entry_ttl(&self) -> u32 {
        self.service_entry_ttl_seconds.unwrap_or(30)
    }

    /// Returns the capacity of the cache in bytes.
    pub fn cache_bytes(&self) -> usize {
        let bytes = self.cache_bytes.unwrap_or(32 << 20);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Returns the maximum age of a resolver's answer, in seconds.
    pub fn max_ttl(&self) -> u32 {
        self.max_ttl_seconds.unwrap_or(3600)
    }

    /// Returns the time after its TTL for which clients get an answer while resolvers do not answer.
    pub fn stale(&self) -> Duration {
        Duration::from_secs(self.stale_seconds.unwrap_or(86_400).into())
    }

    /// Returns keys with their faults: values that the types allow and that cannot work.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        if let Some(domain) = &self.cluster_domain
            && !is_domain(domain)
        {
            let text = format!("{domain:?} is not a domain; expected one such as cluster.local");
            faults.push(("dns.clusterDomain".to_owned(), text));
        }
        if self.port == Some(0) {
            let text = "0; expected a port from 1 to 65535".to_owned();
            faults.push(("dns.port".to_owned(), text));
        }
        for (key, value, range) in [
            ("dns.ttlSeconds", self.ttl_seconds.map(u64::from), TTL),
            (
                "dns.serviceEntryTtlSeconds",
                self.service_entry_ttl_seconds.map(u64::from),
                TTL,
            ),
            (
                "dns.maxTtlSeconds",
                self.max_ttl_seconds.map(u64::from),
                MAX_TTL,
            ),
            ("dns.cacheBytes", self.cache_bytes, CACHE),
            ("dns.staleSeconds", self.stale_seconds.map(u64::from), STALE),
        ] {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let (least, most) = (range.start(), range.end());
                let text = format!("{value}; expected a number from {least} to {most}");
                faults.push((key.to_owned(), text));
            }
        }
        faults
    }
}

fn is_domain(text: &str) -> bool {
    let labels = text.strip_suffix('.').unwrap_or(text).split('.');
    let is_label = |label: &str| {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        (1..64).contains(&label.len()) && label.bytes().all(is_letter)
    };
    text.len() < 200 && labels.into_iter().all(is_label)
}
