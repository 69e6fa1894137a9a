//! CNI's protocol (specification 1.1): what the runtime says in the environment and on standard input, and errors.

use std::{collections::HashMap, net::IpAddr, path::PathBuf};

use admin::cni::{Key, VERSIONS};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

/// Codes of errors (CNI's specification, section 5; from 100: the plug-in's own).
pub mod code {
    pub const VERSION: u32 = 1;
    pub const ENVIRONMENT: u32 = 4;
    pub const IO: u32 = 5;
    pub const DECODE: u32 = 6;
    pub const CONFIGURATION: u32 = 7;
    pub const TRY_AGAIN: u32 = 11;
    pub const NOT_PERMITTED: u32 = 100;
}

/// Why the plug-in failed, for the runtime and for people: kubelet shows `msg` and `details`.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub code: u32,
    pub msg: String,
    pub details: String,
}

impl Failure {
    pub fn new(code: u32, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: details.into(),
        }
    }
}

/// The plug-in's entry in the network configuration, with the keys that the runtime adds.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    /// Default: 0.1.0.
    cni_version: Option<String>,
    #[serde(default = "default_socket")]
    socket: PathBuf,
    #[serde(default)]
    exclude_namespaces: Vec<String>,
    /// Pods of all other namespaces are never captured.
    only_namespaces: Option<Vec<String>>,
    #[serde(default = "default_wait")]
    wait_seconds: u64,
    prev_result: Option<Box<RawValue>>,
    #[serde(rename = "cni.dev/valid-attachments")]
    valid: Option<Vec<Valid>>,
}

fn default_socket() -> PathBuf {
    settings::Listeners::default().socket().to_owned()
}

/// Less than a runtime grants a sandbox.
fn default_wait() -> u64 {
    30
}

#[derive(Debug, Deserialize)]
struct Valid {
    #[serde(rename = "containerID")]
    container: String,
    ifname: String,
}

/// A result of the plug-ins before ours (section 6, since version 0.3.0).
#[derive(Debug, Default, Deserialize)]
struct Outcome {
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    ips: Vec<Ip>,
}

#[derive(Debug, Deserialize)]
struct Interface {
    #[serde(default)]
    sandbox: String,
}

#[derive(Debug, Deserialize)]
struct Ip {
    /// With the length of its network.
    address: String,
    interface: Option<usize>,
}

/// A call of the plug-in.
#[derive(Debug)]
pub struct Call {
    /// The version that the runtime speaks.
    pub version: String,
    /// The agent's socket.
    pub socket: PathBuf,
    /// How long a pod may wait for the agent, in seconds.
    pub wait_seconds: u64,
    pub command: Command,
}

/// A command of the runtime. `None` instead of a pod: the pod is never captured.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// The result of the plug-ins before ours, to be printed.
    Add(Option<Pod>, String),
    Check(Option<Pod>),
    Del(Key),
    Gc(Vec<Key>),
    Status,
    Version,
}

/// A pod, as the runtime describes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Pod {
    pub key: Key,
    pub namespace: String,
    pub name: String,
    pub uid: Option<String>,
    /// The file of its network namespace.
    pub netns: PathBuf,
    pub addresses: Vec<IpAddr>,
}

/// Reads a call. `variables`: the environment; `input`: standard input.
pub fn read(variables: &HashMap<String, String>, input: &str) -> Result<Call, Failure> {
    let variables = Variables(variables);
    let called = variables.needed("CNI_COMMAND")?;
    let entry: Entry = serde_json::from_str(input).map_err(|error| {
        let text = "cannot read the network configuration on standard input";
        Failure::new(code::DECODE, text, error.to_string())
    })?;
    let version = entry.cni_version.clone();
    let version = version.unwrap_or_else(|| "0.1.0".to_owned());
    if called != "VERSION" && !VERSIONS.contains(&&*version) {
        return Err(Failure::new(
            code::VERSION,
            format!("cniVersion {version} is not supported"),
            format!("expected one of {}", VERSIONS.join(", ")),
        ));
    }
    let command = match &*called {
        "ADD" => Command::Add(variables.pod(&entry)?, entry.result()?.to_owned()),
        "CHECK" => Command::Check(variables.pod(&entry)?),
        "DEL" => Command::Del(variables.key()?),
        "GC" => Command::Gc(entry.valid()?),
        "STATUS" => Command::Status,
        "VERSION" => Command::Version,
        other => {
            return Err(Failure::new(
                code::ENVIRONMENT,
                format!("CNI_COMMAND {other:?} is not known"),
                "expected ADD, CHECK, DEL, GC, STATUS or VERSION",
            ));
        }
    };
    Ok(Call {
        version,
        socket: entry.socket,
        wait_seconds: entry.wait_seconds,
        command,
    })
}

/// The environment.
struct Variables<'a>(&'a HashMap<String, String>);

impl Variables<'_> {
    fn needed(&self, name: &str) -> Result<String, Failure> {
        let value = self.0.get(name).filter(|value| !value.is_empty());
        value.cloned().ok_or_else(|| {
            Failure::new(
                code::ENVIRONMENT,
                format!("the environment variable {name} is missing"),
                "container runtimes call this program as a CNI plug-in; see docs/cli/cni.md",
            )
        })
    }

    fn key(&self) -> Result<Key, Failure> {
        Ok(Key {
            container: self.needed("CNI_CONTAINERID")?,
            interface: self.needed("CNI_IFNAME")?,
        })
    }

    /// Returns the pod that the call is about; `None` if it is never captured.
    fn pod(&self, entry: &Entry) -> Result<Option<Pod>, Failure> {
        let (key, netns) = (self.key()?, PathBuf::from(self.needed("CNI_NETNS")?));
        let addresses = addresses(entry.result()?)?;
        let args = self.0.get("CNI_ARGS").map_or("", String::as_str);
        let args = args.split(';').filter_map(|pair| pair.split_once('='));
        let args: HashMap<&str, &str> = args.filter(|(_, value)| !value.is_empty()).collect();
        let arg = |name| args.get(name).map(|value| (*value).to_owned());
        // Containers that are no pods have no rules.
        let named = arg("K8S_POD_NAMESPACE").zip(arg("K8S_POD_NAME"));
        let named = named.filter(|(namespace, _)| entry.may_capture(namespace));
        Ok(named.map(|(namespace, name)| Pod {
            key,
            namespace,
            name,
            uid: arg("K8S_POD_UID"),
            netns,
            addresses,
        }))
    }
}

impl Entry {
    /// Whether pods of a namespace may be captured. The runtime does not give a Pod's labels, by which it may be, so only the
    /// configuration can rule it out.
    fn may_capture(&self, namespace: &str) -> bool {
        let has = |names: &[String]| names.iter().any(|name| name == namespace);
        !has(&self.exclude_namespaces) && self.only_namespaces.as_deref().is_none_or(has)
    }

    /// Returns the result of the plug-ins before ours.
    fn result(&self) -> Result<&str, Failure> {
        self.prev_result.as_deref().map(RawValue::get).ok_or_else(|| {
            Failure::new(
                code::CONFIGURATION,
                "there is no prevResult",
                "the plug-in only adds to others: put it behind the plug-in that makes the pod's interface",
            )
        })
    }

    /// Returns the attachments that exist. A list that is missing is not an empty one.
    fn valid(&self) -> Result<Vec<Key>, Failure> {
        let valid = self.valid.as_ref().ok_or_else(|| {
            let text = "there is no list cni.dev/valid-attachments";
            Failure::new(code::CONFIGURATION, text, "without it, no pod is forgotten")
        })?;
        let keys = valid.iter().map(|valid| Key {
            container: valid.container.clone(),
            interface: valid.ifname.clone(),
        });
        Ok(keys.collect())
    }
}

/// Returns a pod's addresses, the first of each family: those without an interface, and those at interfaces in the pod.
fn addresses(result: &str) -> Result<Vec<IpAddr>, Failure> {
    let outcome: Outcome = serde_json::from_str(result)
        .map_err(|error| Failure::new(code::DECODE, "cannot read prevResult", error.to_string()))?;
    let mut found: Vec<IpAddr> = Vec::new();
    for ip in &outcome.ips {
        let interface = ip.interface.and_then(|index| outcome.interfaces.get(index));
        let is_the_nodes = interface.is_some_and(|interface| interface.sandbox.is_empty());
        let network: IpNet = ip.address.parse().map_err(|_| {
            let text = format!("{:?} is not an address with a length", ip.address);
            Failure::new(code::DECODE, "cannot read prevResult", text)
        })?;
        let addr = network.addr();
        if !is_the_nodes && found.iter().all(|known| known.is_ipv4() != addr.is_ipv4()) {
            found.push(addr);
        }
    }
    Ok(found)
}

/// Returns the error as the runtime reads it. `version`: what the runtime speaks, if it is known.
pub fn error(failure: &Failure, version: Option<&str>) -> Value {
    let mut text = serde_json::json!(failure);
    text["cniVersion"] = version.unwrap_or(VERSIONS[3]).into();
    text
}

/// Returns the version of a configuration that cannot be read as a whole; `None` if it has none.
pub fn version(input: &str) -> Option<String> {
    let config: Value = serde_json::from_str(input).ok()?;
    Some(config.get("cniVersion")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn call(more: &[(&str, &str)], input: &Value) -> Result<Call, Failure> {
        let usual = [
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/cni-1"),
            ("CNI_IFNAME", "eth0"),
            (
                "CNI_ARGS",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID=u1",
            ),
        ];
        let variables = usual.iter().chain(more);
        let variables = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        read(&variables.collect(), &input.to_string())
    }

    fn entry() -> Value {
        json!({
            "cniVersion": "1.1.0",
            "name": "net",
            "type": "dataplane-cni",
            "excludeNamespaces": ["kube-system"],
            "prevResult": {
                "cniVersion": "1.1.0",
                "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": "/run/netns/cni-1"}],
                "ips": [
                    {"address": "10.0.0.1/24", "interface": 0},
                    {"address": "10.0.0.5/24", "gateway": "10.0.0.1", "interface": 1},
                    {"address": "10.0.0.6/24", "interface": 1},
                    {"address": "fd00::5/64"},
                ],
            },
        })
    }

    #[test]
    fn a_pod_has_the_addresses_in_its_network_namespace() {
        let add = [("CNI_COMMAND", "ADD")];
        let call = call(&add, &entry()).unwrap();
        assert_eq!(call.wait_seconds, 30);
        let Command::Add(Some(pod), result) = call.command else {
            panic!("{call:?}")
        };
        assert_eq!((&*pod.namespace, &*pod.name), ("shop", "web"));
        assert_eq!(pod.uid.as_deref(), Some("u1"));
        let addresses: Vec<_> = pod.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["10.0.0.5", "fd00::5"]);
        let result: Value = serde_json::from_str(&result).unwrap();
        assert_eq!(result, entry()["prevResult"], "as it was");
    }

    #[test]
    fn pods_of_excluded_namespaces_and_containers_that_are_no_pods_are_none_of_ours() {
        for args in ["K8S_POD_NAMESPACE=kube-system;K8S_POD_NAME=dns", "", "A=b"] {
            for command in ["ADD", "CHECK"] {
                let more = [("CNI_COMMAND", command), ("CNI_ARGS", args)];
                let command = call(&more, &entry()).unwrap().command;
                let is_none = matches!(command, Command::Add(None, _) | Command::Check(None));
                assert!(is_none, "{args}: {command:?}");
            }
        }
    }

    #[test]
    fn pods_outside_of_the_only_namespaces_are_none_of_ours() {
        let add = [("CNI_COMMAND", "ADD")];
        for (only, is_ours) in [
            (json!(["a"]), false),
            (json!([]), false),
            (json!(["a", "shop"]), true),
        ] {
            let mut input = entry();
            input["onlyNamespaces"] = only.clone();
            let command = call(&add, &input).unwrap().command;
            assert_eq!(
                matches!(command, Command::Add(Some(_), _)),
                is_ours,
                "{only}"
            );
        }
    }

    #[test]
    fn every_command_of_every_version_is_read() {
        for version in VERSIONS {
            let mut input = entry();
            input["cniVersion"] = version.into();
            input["cni.dev/valid-attachments"] = json!([{"containerID": "c2", "ifname": "eth1"}]);
            let read = |command| call(&[("CNI_COMMAND", command)], &input).unwrap().command;
            let key = |container: &str, interface: &str| Key {
                container: container.to_owned(),
                interface: interface.to_owned(),
            };
            assert!(matches!(read("ADD"), Command::Add(Some(_), _)));
            assert!(matches!(read("CHECK"), Command::Check(Some(_))));
            assert_eq!(read("DEL"), Command::Del(key("c1", "eth0")));
            assert_eq!(read("GC"), Command::Gc(vec![key("c2", "eth1")]));
            assert_eq!(read("STATUS"), Command::Status);
            assert_eq!(read("VERSION"), Command::Version);
        }
    }

    #[test]
    fn a_call_that_is_wrong_is_named() {
        let without = |key: &str| {
            let mut input = entry();
            input.as_object_mut().unwrap().remove(key);
            input
        };
        let with = |key: &str, value: Value| {
            let mut input = entry();
            input[key] = value;
            input
        };
        for (more, input, wanted) in [
            (("CNI_COMMAND", ""), entry(), code::ENVIRONMENT),
            (("CNI_COMMAND", "MOVE"), entry(), code::ENVIRONMENT),
            (("CNI_COMMAND", "GC"), entry(), code::CONFIGURATION),
            (
                ("CNI_COMMAND", "ADD"),
                without("prevResult"),
                code::CONFIGURATION,
            ),
            (("CNI_COMMAND", "ADD"), without("cniVersion"), code::VERSION),
            (
                ("CNI_COMMAND", "DEL"),
                with("cniVersion", "2.0.0".into()),
                code::VERSION,
            ),
            (
                ("CNI_COMMAND", "ADD"),
                with("excludeNamespaces", "x".into()),
                code::DECODE,
            ),
            (
                ("CNI_COMMAND", "ADD"),
                with("prevResult", json!({"ips": [{"address": "x"}]})),
                code::DECODE,
            ),
        ] {
            let said = call(&[more], &input).unwrap_err();
            assert_eq!(said.code, wanted, "{more:?} {input}: {said:?}");
        }
        // Whatever the version is, it is answered.
        let version = call(&[("CNI_COMMAND", "VERSION")], &without("cniVersion"));
        assert_eq!(version.unwrap().command, Command::Version);
    }
}
