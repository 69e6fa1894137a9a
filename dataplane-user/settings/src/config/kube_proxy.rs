//! Import of kube-proxy's configuration file (`KubeProxyConfiguration`, `v1alpha1`), with a note on each key that has no
//! counterpart.

use serde_json::Value;

use super::read::yaml;
use crate::{Kubernetes, Listen, LogFormat, LogLevel, Pattern, Range, Settings};

const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";

/// An imported file of kube-proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The imported settings.
    pub config: Settings,
    /// Notes for the operator, in the order of the keys.
    pub notes: Vec<NotImported>,
}

/// A note on a key that was not imported, or was imported with a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotImported {
    /// The key's path.
    pub key: String,
    /// Its value, in JSON.
    pub value: String,
    /// The reason, and the remedy.
    pub why: String,
}

/// Reads a `KubeProxyConfiguration`, or the ConfigMap that kubeadm keeps it in (`config.conf`).
/// Skips keys with an empty value (`""`, `null`, `0`, `false`).
///
/// # Errors
///
/// If the text is neither of them.
pub fn import(text: &str) -> Result<Imported, String> {
    let parse = |text: &str| {
        yaml(text).map_err(|(position, text)| match position {
            Some(at) => format!("line {}, column {}: {text}", at.line, at.column),
            None => text,
        })
    };
    let mut value = parse(text)?;
    if value["kind"] == "ConfigMap" {
        let inner = value["data"]["config.conf"].as_str().ok_or(
            "a ConfigMap without the key `config.conf`; expected kubeadm's `kube-proxy` in \
             `kube-system`, or a KubeProxyConfiguration",
        )?;
        value = parse(inner).map_err(|wrong| format!("in `config.conf`: {wrong}"))?;
    }
    if value["apiVersion"] != API_VERSION || value["kind"] != "KubeProxyConfiguration" {
        return Err(format!(
            "not a configuration of kube-proxy; expected `apiVersion: {API_VERSION}` and `kind: \
             KubeProxyConfiguration`"
        ));
    }
    let mut leaves = Vec::new();
    flatten("", &value, &mut leaves);
    let mut import = Import {
        mode: value["mode"].as_str().unwrap_or_default(),
        config: Settings::default(),
        notes: Vec::new(),
    };
    import.config.source.kubernetes = Some(Kubernetes::default());
    import.node_ports(&value["nodePortAddresses"]);
    import.pods(&value);
    import.note(
        "conntrack",
        &value["conntrack"],
        "unless these keys are 0, kube-proxy sets sysctls of the kernel's own conntrack by them, or by its defaults for \
         absent keys. The agent leaves the sysctls alone: to keep the values at the next boot, write them to a file in \
         /etc/sysctl.d, see docs/configuration.md#sysctls-of-the-kernels-conntrack",
    );
    for (key, value) in &leaves {
        import.leaf(key, value);
    }
    Ok(Imported {
        config: import.config,
        notes: import.notes,
    })
}

/// Collects the leaves with a value, with their paths. A list is a leaf, and so is a map of names.
fn flatten(at: &str, value: &Value, leaves: &mut Vec<(String, Value)>) {
    let silent = match value {
        Value::Null => true,
        Value::Bool(is) => !is,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => matches!(&**text, "" | "0" | "0s"),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => {
            for (key, value) in fields {
                let path = if at.is_empty() {
                    key.clone()
                } else {
                    format!("{at}.{key}")
                };
                flatten(&path, value, leaves);
            }
            true
        }
    };
    if !silent {
        leaves.push((at.to_owned(), value.clone()));
    }
}

struct Import<'a> {
    mode: &'a str,
    config: Settings,
    notes: Vec<NotImported>,
}

impl Import<'_> {
    fn note(&mut self, key: &str, value: &Value, why: impl Into<String>) {
        self.notes.push(NotImported {
            key: key.to_owned(),
            value: value.to_string(),
            why: why.into(),
        });
    }

    /// Imports the addresses that answer node ports. The default in modes other than nftables is all addresses, and the
    /// imported file states it.
    fn node_ports(&mut self, value: &Value) {
        const KEY: &str = "nodePortAddresses";
        let all = ["0.0.0.0/0", "::/0"].map(|net| Range(net.parse().expect("written here")));
        let given = value.as_array().map(Vec::as_slice).unwrap_or_default();
        if given.is_empty() {
            if self.mode != "nftables" {
                self.config.node.node_port_addresses = all.into();
                self.note(
                    KEY,
                    value,
                    "in this mode kube-proxy answers node ports on all addresses by default, and the imported file \
                     says so; remove node.nodePortAddresses to answer on the node's primary addresses only",
                );
            }
            return;
        }
        let mut ranges = Vec::new();
        let mut primary = false;
        for item in given {
            match item.as_str() {
                Some("all") => ranges.extend(all),
                Some("primary") => primary = true,
                Some("localhost") => {}
                other => match Range::try_from(other.unwrap_or_default().to_owned()) {
                    Ok(range) => ranges.push(range),
                    Err(wrong) => self.note(KEY, item, wrong),
                },
            }
        }
        if primary && !ranges.is_empty() {
            self.note(
                KEY,
                value,
                "`primary` cannot be combined with ranges here: add the range of the nodes' \
                 primary addresses",
            );
        }
        self.config.node.node_port_addresses = ranges;
    }

    /// Imports the settings by which kube-proxy recognizes the cluster's own pods.
    fn pods(&mut self, all: &Value) {
        let text = |key: &str| all[key].as_str().unwrap_or_default();
        let detect = |key: &str| all["detectLocal"][key].as_str().unwrap_or_default();
        match text("detectLocalMode") {
            "" | "ClusterCIDR" => {
                let ranges = text("clusterCIDR").split(',').filter(|net| !net.is_empty());
                for range in ranges {
                    match Range::try_from(range.trim().to_owned()) {
                        Ok(range) => self.config.packets.pod_cidrs.push(range),
                        Err(wrong) => self.note("clusterCIDR", &all["clusterCIDR"], wrong),
                    }
                }
            }
            "NodeCIDR" => self.note(
                "detectLocalMode",
                &all["detectLocalMode"],
                "the range differs from node to node, but all nodes have one file: set packets.podCidrs to the \
                 cluster's range, or use packets.podsByInterface",
            ),
            "BridgeInterface" => {
                self.config.packets.pods_by_interface = true;
                self.note(
                    "detectLocal.bridgeInterface",
                    &all["detectLocal"]["bridgeInterface"],
                    "the agent recognizes pods' interfaces by itself; if it misses some of the bridge's ports, name \
                     them in packets.podInterfaces",
                );
            }
            "InterfaceNamePrefix" => {
                self.config.packets.pods_by_interface = true;
                let prefix = detect("interfaceNamePrefix");
                match format!("{prefix}*").parse::<Pattern>() {
                    Ok(pattern) => self.config.packets.pod_interfaces = vec![pattern],
                    Err(wrong) => self.note(
                        "detectLocal.interfaceNamePrefix",
                        &all["detectLocal"],
                        wrong,
                    ),
                }
            }
            _ => self.note(
                "detectLocalMode",
                &all["detectLocalMode"],
                "unknown mode; set packets.podCidrs or packets.podsByInterface",
            ),
        }
    }

    fn leaf(&mut self, key: &str, value: &Value) {
        let text = value.as_str().unwrap_or_default();
        match key {
            "apiVersion" | "kind" | "nodePortAddresses" | "clusterCIDR" | "detectLocalMode" => {}
            _ if key.starts_with("detectLocal.") || key.starts_with("conntrack.") => {}
            "iptables.masqueradeAll" | "nftables.masqueradeAll" => {
                let (room, _) = key.split_once('.').unwrap_or_default();
                self.config.packets.masquerade_all |= self.in_use(room);
            }
            "hostnameOverride" => self.config.node.name = Some(text.to_owned()),
            "healthzBindAddress" => {
                self.config.listen.healthz = self.listen(key, value);
            }
            "metricsBindAddress" => {
                self.config.listen.metrics = self.listen(key, value);
                self.note(
                    key,
                    value,
                    "the address is imported; the metrics have other names, see docs/metrics.md",
                );
            }
            "clientConnection.kubeconfig" => {
                let kubernetes = self.config.source.kubernetes.get_or_insert_default();
                kubernetes.kubeconfig = Some(text.into());
                self.note(
                    key,
                    value,
                    "imported; the file must exist in the agent's pod, too. kubeadm's is in kube-proxy's ConfigMap: \
                     use the service account and source.kubernetes.apiServer instead",
                );
            }
            "logging.format" => {
                self.config.log.format = (text == "json").then_some(LogFormat::Json);
            }
            "logging.verbosity" => {
                self.config.log.level = match value.as_u64() {
                    Some(0..=3) => None,
                    Some(4..=6) => Some(LogLevel::Debug),
                    _ => Some(LogLevel::Trace),
                };
            }
            _ => {
                if let Some(why) = self.why_not(key, value) {
                    self.note(key, value, why);
                }
            }
        }
    }

    fn listen(&mut self, key: &str, value: &Value) -> Option<Listen> {
        let text = value.as_str().unwrap_or_default();
        // Without a port, kube-proxy's default port.
        let port = if key == "healthzBindAddress" {
            10256
        } else {
            10249
        };
        let parsed = text.parse().or_else(|_| match text.parse() {
            Ok(ip) => Ok(Listen(Some(std::net::SocketAddr::new(ip, port)))),
            Err(_) => Err(()),
        });
        if parsed.is_err() {
            self.note(
                key,
                value,
                "not an address; expected ADDRESS:PORT or ADDRESS",
            );
        }
        parsed.ok()
    }

    /// Returns the reason why a key has no counterpart. `None` if the key needs no note.
    fn why_not(&self, key: &str, value: &Value) -> Option<&'static str> {
        let (room, rest) = key.split_once('.').unwrap_or((key, ""));
        Some(match (room, rest) {
            ("mode", _) if value == "kernelspace" => "the agent runs on Linux only",
            // The agent serves the services of every mode.
            ("mode", _) => return None,
            // Settings of the modes that are not in use.
            ("iptables" | "nftables" | "ipvs", _) if !self.in_use(room) => return None,
            (_, "syncPeriod" | "minSyncPeriod") => {
                "there is no interval: the agent writes each change at once, and only the change"
            }
            (_, "masqueradeBit") => "the agent masquerades without a packet mark",
            ("iptables", "localhostNodePorts") if value == &Value::Bool(true) => return None,
            ("iptables", "snatNodeInternalIP") => "the routing table chooses source addresses",
            ("ipvs", "scheduler") if value == "rr" => {
                "the programs choose endpoints at random, as kube-proxy's other modes do"
            }
            ("ipvs", "scheduler") => {
                "the programs choose endpoints at random, as kube-proxy's other modes do; weights \
                 and connection counts have no effect"
            }
            ("ipvs", "strictARP") => {
                "the agent adds no address to an interface, so the node does not answer ARP for one"
            }
            ("ipvs", "excludeCIDRs") => "the agent leaves IPVS services alone",
            ("ipvs", _) => "the agent does not use IPVS",
            ("bindAddress", _) => "the agent reads the node's addresses from its interfaces",
            ("bindAddressHardFail", _) => {
                "the agent exits if a port is in use; for kube-proxy's own ports it tries again \
                 instead"
            }
            ("clientConnection", "contentType" | "acceptContentTypes") => {
                "the agent reads the API in JSON"
            }
            ("clientConnection", _) => {
                "the agent has a few watches, which need no limit on requests"
            }
            ("configSyncPeriod", _) => "the agent watches the API and lists nothing at intervals",
            ("enableProfiling", _) => "there is no profiling over HTTP",
            ("featureGates", _) => "there are no feature gates",
            ("logging", _) => "the log is not buffered",
            ("oomScoreAdj", _) => {
                "set by the DaemonSet's priority class and requests; outside of Kubernetes, set \
                 OOMScoreAdjust= in the unit file"
            }
            ("portRange", _) => "kube-proxy ignores this key, too",
            ("showHiddenMetricsForVersion", _) => "the agent hides no metric",
            ("winkernel" | "windowsRunAsService", _) => "the agent runs on Linux only",
            _ => "not a key of KubeProxyConfiguration v1alpha1, as of Kubernetes 1.36",
        })
    }

    /// Returns whether kube-proxy ran in the mode that these keys belong to.
    fn in_use(&self, room: &str) -> bool {
        match self.mode {
            "" => room == "iptables",
            mode => mode == room,
        }
    }
}
