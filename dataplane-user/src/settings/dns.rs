//! DNS on the node.

use std::{net::IpAddr, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_default;

/// The agent's DNS server: whose queries it answers, and what it knows of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Dns {
    /// Whose queries the agent answers, in place of their resolvers: `none`, or `mesh` for captured
    /// workloads. Default: none.
    #[serde(skip_serializing_if = "is_default")]
    pub capture: Option<DnsCapture>,
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
    /// File with the node's own resolvers and search list (the kubelet's resolvConf). Default:
    /// /etc/resolv.conf.
    #[serde(skip_serializing_if = "is_default")]
    pub resolv_conf: Option<PathBuf>,
}

/// Whose queries the agent answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DnsCapture {
    /// Nobody's.
    #[default]
    None,
    /// Those of captured workloads.
    Mesh,
}

impl Dns {
    /// The port at which the agent listens.
    pub fn port(&self) -> u16 {
        self.port.unwrap_or(15053)
    }

    /// Whether the agent answers queries.
    pub fn is_on(&self) -> bool {
        self.capture.unwrap_or_default() == DnsCapture::Mesh
    }

    /// What is well written and cannot be: key and what is wrong with it.
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
