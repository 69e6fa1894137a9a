//! Reads a pod's settings for looking up names.

use std::net::IpAddr;

use model::{DnsPolicy, Resolution};

use super::{Findings, wire::PodSpec};

/// Returns the settings of a pod's `dnsPolicy` and `dnsConfig`. `None` if they equal the defaults. An invalid field is
/// reported and ignored by itself.
pub fn resolution(spec: &PodSpec, findings: &mut Findings) -> Option<Box<Resolution>> {
    let hosts = spec.host_network == Some(true);
    let policy = match spec.dns_policy.as_deref() {
        Some("Default") => DnsPolicy::Node,
        Some("None") => DnsPolicy::Own,
        None | Some("" | "ClusterFirst") if hosts => DnsPolicy::Node,
        None | Some("" | "ClusterFirst" | "ClusterFirstWithHostNet") => DnsPolicy::Cluster,
        Some(other) => {
            findings.note(
                "spec.dnsPolicy",
                format!(
                    "unknown policy {other:?}; expected ClusterFirst, ClusterFirstWithHostNet, Default or None"
                ),
            );
            DnsPolicy::Cluster
        }
    };
    let mut resolution = Resolution {
        policy,
        ..Resolution::default()
    };
    if let Some(config) = &spec.dns_config {
        let servers = config.nameservers.iter().flatten();
        let servers = servers.filter_map(|text| {
            let server = text.parse::<IpAddr>();
            let wrong = || format!("{text:?} is not an address; expected one like 10.96.0.10");
            let found = server.map_err(|_| findings.note("spec.dnsConfig.nameservers", wrong()));
            found.ok()
        });
        resolution.nameservers = servers.collect();
        let searches = config.searches.iter().flatten();
        let searches = searches.map(|name| name.trim_matches('.').to_ascii_lowercase());
        let searches = searches.filter(|name| !name.is_empty());
        resolution.searches = searches.map(String::into_boxed_str).collect();
        let mut options = config.options.iter().flatten();
        let ndots = options.find(|option| option.name.as_deref() == Some("ndots"));
        // The C library's maximum is 15.
        let ndots = ndots.and_then(|option| option.value.as_deref()?.parse::<u8>().ok());
        resolution.ndots = ndots.map(|ndots| ndots.min(15));
    }
    (resolution != Resolution::default()).then(|| Box::new(resolution))
}
