//! Keys, and the flags that they stand for.

use std::path::Path;

use serde_json::Value;

use super::{Config, Hook, LogFormat, LogLevel, OnExit, Stale};
use crate::settings::NfConntrack;

/// What a configuration says for one flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// The flag's long name.
    pub flag: &'static str,
    /// As given on the command line; empty for a flag without a value.
    pub values: Vec<String>,
}

impl Config {
    /// What it says, as flags of `dataplane run`.
    pub fn arguments(&self) -> Vec<Argument> {
        let mut given = Vec::new();
        let mut add = |flag, values: Vec<String>| given.push(Argument { flag, values });
        let mut one = |flag, value: Option<String>| {
            if let Some(value) = value {
                add(flag, vec![value]);
            }
        };
        let path = |path: &Option<std::path::PathBuf>| path.as_deref().map(text);
        let Self {
            source,
            node,
            on_exit,
            replace,
            stay,
            destroy_stale,
            log,
            listen,
            packets,
            mesh,
            kernel,
            limits,
        } = self;
        one("node-name", node.name.clone());
        one("zone", node.zone.clone());
        one(
            "on-exit",
            on_exit.map(|it| {
                match it {
                    OnExit::Keep => "keep",
                    OnExit::Detach => "detach",
                }
                .to_owned()
            }),
        );
        one(
            "log-format",
            log.format.map(|it| {
                match it {
                    LogFormat::Text => "text",
                    LogFormat::Json => "json",
                }
                .to_owned()
            }),
        );
        one("socket", path(&listen.socket));
        one("metrics-addr", listen.metrics.map(Into::into));
        one("health-addr", listen.health.map(Into::into));
        one("healthz-addr", listen.healthz.map(Into::into));
        one("proxy-mode-addr", listen.proxy_mode.map(Into::into));
        one("admin-addr", listen.admin.map(Into::into));
        one(
            "packet-path",
            packets
                .enabled
                .map(|on| if on { "on" } else { "off" }.to_owned()),
        );
        one("tc-order", packets.order.clone());
        one(
            "tc-hook",
            packets.hook.map(|it| {
                match it {
                    Hook::Auto => "auto",
                    Hook::Tcx => "tcx",
                    Hook::Clsact => "clsact",
                }
                .to_owned()
            }),
        );
        one(
            "conntrack-flows",
            packets.conntrack_flows.map(|n| n.to_string()),
        );
        // Nothing in it fails to be written.
        let written = |mesh| serde_json::to_string(mesh).unwrap_or_default();
        one("mesh", mesh.as_ref().map(written));
        one("bpffs", path(&kernel.bpffs));
        one("cgroup", path(&kernel.cgroup));
        let NfConntrack {
            max_per_core,
            min,
            tcp_established_timeout,
            tcp_close_wait_timeout,
            tcp_be_liberal,
            udp_timeout,
            udp_stream_timeout,
        } = &kernel.conntrack;
        for (flag, number) in [
            ("nf-conntrack-max-per-core", max_per_core),
            ("nf-conntrack-min", min),
        ] {
            one(flag, number.map(|n| n.to_string()));
        }
        for (flag, timeout) in [
            (
                "nf-conntrack-tcp-timeout-established",
                tcp_established_timeout,
            ),
            (
                "nf-conntrack-tcp-timeout-close-wait",
                tcp_close_wait_timeout,
            ),
            ("nf-conntrack-udp-timeout", udp_timeout),
            ("nf-conntrack-udp-timeout-stream", udp_stream_timeout),
        ] {
            one(flag, timeout.map(Into::into));
        }
        one(
            "nf-conntrack-tcp-be-liberal",
            tcp_be_liberal.map(|is| is.to_string()),
        );
        one("max-frontends", limits.frontends.map(|n| n.to_string()));
        one("max-endpoints", limits.endpoints.map(|n| n.to_string()));
        one(
            "max-affinity-clients",
            limits.affinity_clients.map(|n| n.to_string()),
        );
        if let Some(kubernetes) = &source.kubernetes {
            one("kubeconfig", path(&kubernetes.kubeconfig));
            one("api-server", kubernetes.api_server.clone());
        }
        let mut many = |flag, values: Vec<String>| {
            if !values.is_empty() {
                add(flag, values);
            }
        };
        many(
            "manifests",
            source.manifests.iter().map(|p| text(p)).collect(),
        );
        many(
            "nodeport-addresses",
            node.node_port_addresses
                .iter()
                .map(|&range| range.into())
                .collect(),
        );
        many(
            "destroy-stale",
            destroy_stale
                .iter()
                .map(|protocol| match protocol {
                    Stale::Udp => "udp".to_owned(),
                    Stale::Tcp => "tcp".to_owned(),
                    Stale::None => "none".to_owned(),
                })
                .collect(),
        );
        many("uplink", packets.uplinks.clone());
        many("pod-interface", packets.pod_interfaces.clone());
        many(
            "pod-cidr",
            packets
                .pod_cidrs
                .iter()
                .map(|&range| range.into())
                .collect(),
        );
        for (flag, given) in [
            ("pods-by-interface", packets.pods_by_interface),
            ("masquerade-all", packets.masquerade_all),
            ("replace", *replace),
            ("stay", *stay),
        ] {
            if given {
                add(flag, Vec::new());
            }
        }
        if source.kubernetes.is_some() {
            add("kubernetes", Vec::new());
        }
        // The flag is counted.
        match log.level {
            None | Some(LogLevel::Info) => {}
            Some(LogLevel::Debug) => add("verbose", Vec::new()),
            Some(LogLevel::Trace) => {
                add("verbose", Vec::new());
                add("verbose", Vec::new());
            }
        }
        given
    }
}

/// A path from YAML is UTF-8.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The JSON schema of a configuration file.
pub fn schema() -> Value {
    // References to definitions help who generates code; for a reader, and for the checks here,
    // everything is in its place.
    let settings = schemars::generate::SchemaSettings::draft2020_12()
        .with(|settings| settings.inline_subschemas = true);
    settings
        .into_generator()
        .into_root_schema_for::<Config>()
        .to_value()
}

/// The keys that an object of a schema may have.
pub(super) fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    // An optional object may also be null.
    schema["properties"].as_object().or_else(|| {
        let alternatives = schema["anyOf"].as_array()?;
        alternatives.iter().find_map(properties)
    })
}

/// Every key, as its path.
pub(super) fn paths(schema: &Value) -> Vec<String> {
    let mut all = Vec::new();
    for (key, inner) in properties(schema).into_iter().flatten() {
        all.push(key.clone());
        all.extend(
            paths(inner)
                .into_iter()
                .map(|below| format!("{key}.{below}")),
        );
    }
    all
}
