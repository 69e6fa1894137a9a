//! kube-proxy's own configuration file (`KubeProxyConfiguration`, `v1alpha1`) in our terms, with a
//! word on everything in it that has none here.

use serde_json::Value;

use super::{Config, Kubernetes, Listen, LogFormat, LogLevel, Range, read::yaml};
use crate::settings::{NfConntrack, Timeout};

const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";

/// What a file of kube-proxy's came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// In our terms.
    pub config: Config,
    /// What a person should know, key by key, in the order of the keys.
    pub notes: Vec<NotImported>,
}

/// A key that was not carried over, or not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotImported {
    /// The key's path.
    pub key: String,
    /// Its value, in JSON.
    pub value: String,
    /// Why, and what to do.
    pub why: String,
}

/// Reads a `KubeProxyConfiguration`, or the ConfigMap that kubeadm keeps it in (`config.conf`).
/// Keys whose value says nothing (empty, null, 0, false) are passed over.
///
/// # Errors
///
/// If it is neither.
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
            "no configuration of kube-proxy; expected `apiVersion: {API_VERSION}` and `kind: \
             KubeProxyConfiguration`"
        ));
    }
    let mut leaves = Vec::new();
    flatten("", &value, &mut leaves);
    let mut import = Import {
        mode: value["mode"].as_str().unwrap_or_default(),
        config: Config::default(),
        notes: Vec::new(),
    };
    import.config.source.kubernetes = Some(Kubernetes::default());
    import.node_ports(&value["nodePortAddresses"]);
    import.pods(&value);
    import.conntrack(&value["conntrack"]);
    for (key, value) in &leaves {
        import.leaf(key, value);
    }
    Ok(Imported {
        config: import.config,
        notes: import.notes,
    })
}

/// Leaves that say something, with their paths. A list is a leaf, and so is a map of names.
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
    config: Config,
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

    /// Where node ports are answered. What is not written means all addresses in the modes other
    /// than nftables, and that is carried over too.
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
                    "without it this mode answers node ports on all addresses, so that is written \
                     out; leave it out to answer on the node's primary ones only",
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

    /// By what kube-proxy knows the cluster's own pods.
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
                "it differs by node, and a file is for all: give the cluster's range as \
                 packets.podCidrs, or packets.podsByInterface",
            ),
            "BridgeInterface" => {
                self.config.packets.pods_by_interface = true;
                self.note(
                    "detectLocal.bridgeInterface",
                    &all["detectLocal"]["bridgeInterface"],
                    "the bridge's ports are pods' interfaces, which are found out; \
                     packets.podInterfaces names them where they are not",
                );
            }
            "InterfaceNamePrefix" => {
                self.config.packets.pods_by_interface = true;
                let prefix = detect("interfaceNamePrefix");
                self.config.packets.pod_interfaces = vec![format!("{prefix}*")];
            }
            _ => self.note("detectLocalMode", &all["detectLocalMode"], "not known"),
        }
    }

    /// The kernel's own conntrack. kube-proxy has defaults of its own, which nodes have that it served.
    fn conntrack(&mut self, block: &Value) {
        const KEY: &str = "conntrack";
        let number = |key: &str, default: u32| match &block[key] {
            Value::Null => Some(default),
            given => given.as_u64().and_then(|n| u32::try_from(n).ok()),
        };
        let max_per_core = number("maxPerCore", 32_768).filter(|n| *n > 0);
        let min = number("min", 131_072).filter(|n| *n > 0 && max_per_core.is_some());
        let mut timeout = |key: &str, default: &str| {
            let given = match &block[key] {
                Value::Null => default,
                given => given.as_str().unwrap_or_default(),
            };
            if matches!(given, "" | "0" | "0s") {
                return None;
            }
            let parsed: Result<Timeout, String> = given.parse();
            parsed
                .map_err(|wrong| self.note(&format!("{KEY}.{key}"), &block[key], wrong))
                .ok()
        };
        let settings = NfConntrack {
            max_per_core,
            min,
            tcp_established_timeout: timeout("tcpEstablishedTimeout", "24h"),
            tcp_close_wait_timeout: timeout("tcpCloseWaitTimeout", "1h"),
            tcp_be_liberal: (block["tcpBeLiberal"] == true).then_some(true),
            udp_timeout: timeout("udpTimeout", ""),
            udp_stream_timeout: timeout("udpStreamTimeout", ""),
        };
        if settings != NfConntrack::default() {
            self.note(
                KEY,
                block,
                "carried over to kernel.conntrack, with kube-proxy's own defaults where it says nothing, because \
                 nodes have these that it served; leave kernel.conntrack out to leave the sysctls alone. The \
                 DaemonSet of the kustomize base needs the component `conntrack` for it",
            );
        }
        self.config.kernel.conntrack = settings;
    }

    fn leaf(&mut self, key: &str, value: &Value) {
        let text = value.as_str().unwrap_or_default();
        match key {
            "apiVersion" | "kind" | "nodePortAddresses" | "clusterCIDR" | "detectLocalMode" => {}
            _ if key.starts_with("detectLocal.") => {}
            "conntrack.maxPerCore"
            | "conntrack.min"
            | "conntrack.tcpEstablishedTimeout"
            | "conntrack.tcpCloseWaitTimeout"
            | "conntrack.tcpBeLiberal"
            | "conntrack.udpTimeout"
            | "conntrack.udpStreamTimeout" => {}
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
                    "the address is carried over; the metrics' names are others, see \
                     docs/metrics.md",
                );
            }
            "clientConnection.kubeconfig" => {
                let kubernetes = self.config.source.kubernetes.get_or_insert_default();
                kubernetes.kubeconfig = Some(text.into());
                self.note(
                    key,
                    value,
                    "carried over; it must be there in the agent's pod, too (kubeadm's is in \
                     kube-proxy's ConfigMap: use the service account and apiServer instead)",
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
        // A bare address means kube-proxy's own port.
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
            self.note(key, value, "no address");
        }
        parsed.ok()
    }

    /// Why a key has no counterpart; `None` if there is nothing to say.
    fn why_not(&self, key: &str, value: &Value) -> Option<&'static str> {
        let (room, rest) = key.split_once('.').unwrap_or((key, ""));
        Some(match (room, rest) {
            ("mode", _) if value == "kernelspace" => "Windows is not served",
            // What it does, the agent does, whichever it was.
            ("mode", _) => return None,
            // Of the modes that are not in use.
            ("iptables" | "nftables" | "ipvs", _) if !self.in_use(room) => return None,
            (_, "syncPeriod" | "minSyncPeriod") => {
                "no interval to set: only what changed is written, as soon as it did"
            }
            (_, "masqueradeBit") => "no packet mark is used",
            ("iptables", "localhostNodePorts") if value == &Value::Bool(true) => return None,
            ("iptables", "snatNodeInternalIP") => {
                "source addresses are chosen by the routing table"
            }
            ("ipvs", "scheduler") if value == "rr" => {
                "endpoints are drawn at random, as in kube-proxy's other modes"
            }
            ("ipvs", "scheduler") => {
                "endpoints are drawn at random, as in kube-proxy's other modes; weights and \
                 connection counts do not matter"
            }
            ("ipvs", "strictARP") => {
                "no address is put on an interface, so none is answered by ARP"
            }
            ("ipvs", "excludeCIDRs") => "IPVS services are not touched",
            ("ipvs", _) => "IPVS is not used",
            ("bindAddress", _) => {
                "where the node's addresses matter, they are read from its interfaces"
            }
            ("bindAddressHardFail", _) => {
                "a port that cannot be had ends the start, except for the ports that kube-proxy \
                 has, which are tried again"
            }
            ("clientConnection", "contentType" | "acceptContentTypes") => {
                "the API is spoken to in JSON"
            }
            ("clientConnection", _) => "three watches need no limit on requests",
            ("configSyncPeriod", _) => "the API is watched, not listed at intervals",
            ("enableProfiling", _) => "there is no profiling over HTTP",
            ("featureGates", _) => "there are no feature gates",
            ("logging", _) => "the log is not buffered",
            ("oomScoreAdj", _) => {
                "the DaemonSet's priority class and requests decide it; outside of Kubernetes, the \
                 unit file"
            }
            ("portRange", _) => "kube-proxy does not use it any more, either",
            ("showHiddenMetricsForVersion", _) => "no metric is hidden",
            ("winkernel" | "windowsRunAsService", _) => "Windows is not served",
            _ => "not a key of KubeProxyConfiguration v1alpha1, as of Kubernetes 1.36",
        })
    }

    /// Whether kube-proxy ran in the mode that these keys are for.
    fn in_use(&self, room: &str) -> bool {
        match self.mode {
            "" => room == "iptables",
            mode => mode == room,
        }
    }
}
