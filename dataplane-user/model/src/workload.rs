//! Workloads: whose connections are captured, and where they are.

use std::{collections::BTreeMap, fmt, net::IpAddr, path::PathBuf, sync::Arc};

use smallvec::SmallVec;

use super::{Identity, Label, Layers, Policy, Protocol, Resolution, UseWaypoint, WorkloadName};

/// Ports that a mesh's proxies have: no rule of a configuration can name them.
pub const RESERVED: [u16; 12] = [
    15000, 15001, 15003, 15006, 15008, 15010, 15020, 15021, 15053, 15901, 15902, 15903,
];

/// Whether a port is one that a mesh's proxies have.
pub fn is_reserved(port: u16) -> bool {
    RESERVED.contains(&port)
}

/// The most virtual interfaces that the rules of a workload may name.
pub const VIRTUAL_INTERFACES: usize = 16;

/// Whether an interface may be a virtual one: `lo` has the workload's own connections. Longer names, and such characters, the
/// kernel does not take (`dev_valid_name`, `net/core/dev.c`).
pub fn is_virtual_interface(name: &str) -> bool {
    let is_wrong = |c: char| c == '/' || c == ':' || c.is_whitespace();
    (1..16).contains(&name.len()) && !name.contains(is_wrong) && !matches!(name, "lo" | "." | "..")
}

/// A client and server of connections: a pod, or processes of a plain Linux node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its name.
    pub name: WorkloadName,
    /// Its addresses, at most one of each family; none if it shares the node's.
    pub addresses: SmallVec<[IpAddr; 2]>,
    /// The ports that its containers declare, by which others may connect to it without a service.
    pub ports: Box<[(Protocol, u16)]>,
    /// How the processes are found on this node.
    pub place: Place,
    /// The ID that distinguishes it from others of its name, before and after it; `None` if the source has none.
    pub uid: Option<Uid>,
    /// The node that it is on; empty if it is not known.
    pub node: Arc<str>,
    /// The network whose addresses it has (label `topology.istio.io/network`); empty: the cluster's own.
    pub network: Arc<str>,
    /// The service account whose identity the workload has. Empty: the workload has no identity.
    pub account: Arc<str>,
    /// Whether it accepts HBONE connections, as far as the agent knows.
    pub speaks_hbone: bool,
    /// Whether its labels or annotations say so, which clients on all nodes read.
    pub announces_hbone: bool,
    /// The waypoint that its labels name; `None`: the one that its namespace names.
    pub waypoint: Option<UseWaypoint>,
    /// Its names in metrics and logs.
    pub telemetry: Telemetry,
    /// Its labels, sorted, by which policies select it; none on another node.
    pub labels: Box<[Label]>,
    /// How the workload looks up names; `None`: by [`Resolution::default`].
    pub resolution: Option<Box<Resolution>>,
    /// Whether it is to be served by packets only, or at its sockets, if it says so.
    pub by_packets: Option<bool>,
    /// The rules that it and its namespace ask for.
    pub rules: Arc<Layers>,
    /// By which rules its connections are captured; `None`: they are not.
    pub capture: Option<Arc<Policy>>,
}

impl Workload {
    /// Whether it is on this node.
    pub fn is_here(&self) -> bool {
        self.place != Place::Elsewhere
    }

    /// A workload of which nothing is known but its name and place.
    pub fn new(name: WorkloadName, place: Place) -> Self {
        let nothing: Arc<str> = "".into();
        Self {
            addresses: SmallVec::new(),
            ports: Box::default(),
            place,
            uid: None,
            node: Arc::clone(&nothing),
            network: Arc::clone(&nothing),
            account: nothing,
            speaks_hbone: false,
            announces_hbone: false,
            waypoint: None,
            telemetry: Telemetry::new(name.name(), None),
            labels: Box::default(),
            resolution: None,
            by_packets: None,
            rules: Arc::default(),
            capture: None,
            name,
        }
    }

    /// Returns the workload's identity in a trust domain. `None`: it has no service account.
    pub fn identity(&self, trust_domain: &str) -> Option<Identity> {
        Identity::new(trust_domain, self.name.namespace(), &self.account).ok()
    }

    /// Has `share` put an equal text of its own in place of each text that many workloads have.
    pub fn share_texts(&mut self, mut share: impl FnMut(&mut Arc<str>)) {
        let Telemetry {
            workload,
            canonical_service,
            canonical_revision,
            app,
            version,
        } = &mut self.telemetry;
        for text in [
            &mut self.node,
            &mut self.network,
            &mut self.account,
            workload,
            canonical_service,
            canonical_revision,
            app,
            version,
        ] {
            share(text);
        }
    }
}

/// A pod's UID (`metadata.uid`): a UUID, as every object of the API has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid([u8; 16]);

impl Uid {
    /// From its usual form, such as `8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60`; none if the text is something else.
    pub fn parse(text: &str) -> Option<Self> {
        let groups = text.split('-').map(str::len);
        if !groups.eq([8, 4, 4, 4, 12]) {
            return None;
        }
        let mut digits = text.bytes().filter(|byte| *byte != b'-');
        let mut digit = || u8::try_from(char::from(digits.next()?).to_digit(16)?).ok();
        let mut bytes = [0; 16];
        for byte in &mut bytes {
            *byte = digit()? << 4 | digit()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let dash = if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a workload's processes are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the network namespace on this node that has one of its addresses.
    Address,
    /// In this directory of the cgroup v2 hierarchy, relative to the cgroup that the agent serves, and
    /// below it; they are in the node's network namespace.
    Cgroup(PathBuf),
    /// On another node: this node does not capture its connections.
    Elsewhere,
    /// On this node, and never captured, even if rules ask for it.
    Exempt(Exempt),
}

/// Why a workload is never captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exempt {
    /// It has a mesh's proxy beside it already.
    Sidecar,
    /// It has the node's network namespace.
    HostNetwork,
    /// The configuration excludes its namespace.
    Namespace,
}

impl Exempt {
    /// For people.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Sidecar => {
                "is not captured: its annotation sidecar.istio.io/status says that it has a proxy of its own"
            }
            Self::HostNetwork => {
                "is not captured: it has the node's network namespace (hostNetwork: true); name its cgroup in mesh.workloads to capture its processes"
            }
            Self::Namespace => {
                "is not captured: its namespace is in mesh.excludeNamespaces; to capture it, set this list without the namespace"
            }
        }
    }
}

/// A workload's names in metrics and access logs: Istio's names, and its rules to find them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Telemetry {
    /// The Deployment, `StatefulSet`, … that made it (`source_workload`, `destination_workload`);
    /// without one, its own name.
    pub workload: Arc<str>,
    /// Label `service.istio.io/canonical-name`, else `app.kubernetes.io/name`, else `app`, else
    /// [`Telemetry::workload`].
    pub canonical_service: Arc<str>,
    /// Label `service.istio.io/canonical-revision`, else `app.kubernetes.io/version`, else
    /// `version`, else `latest`.
    pub canonical_revision: Arc<str>,
    /// Label `app`; empty if it has none.
    pub app: Arc<str>,
    /// Label `version`; empty if it has none.
    pub version: Arc<str>,
}

impl Telemetry {
    /// From a pod's labels and the name of what made it.
    pub fn new(workload: &str, labels: Option<&BTreeMap<String, String>>) -> Self {
        let first = |keys: &[&str]| {
            keys.iter()
                .find_map(|key| labels?.get(*key))
                .filter(|value| !value.is_empty())
                .map(String::as_str)
        };
        Self {
            workload: workload.into(),
            canonical_service: first(&[
                "service.istio.io/canonical-name",
                "app.kubernetes.io/name",
                "app",
            ])
            .unwrap_or(workload)
            .into(),
            canonical_revision: first(&[
                "service.istio.io/canonical-revision",
                "app.kubernetes.io/version",
                "version",
            ])
            .unwrap_or("latest")
            .into(),
            app: first(&["app"]).unwrap_or_default().into(),
            version: first(&["version"]).unwrap_or_default().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_uuid_is_a_uid() {
        for text in [
            "",
            "8e3b0c9a6b0f4f619d1c2f5d3c8a7b60",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b6",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b600",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b6-",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b6g",
            "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7bé",
        ] {
            assert_eq!(Uid::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_uid_is_displayed_as_it_was_written(text in "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}") {
            prop_assert_eq!(Uid::parse(&text).map(|uid| uid.to_string()), Some(text));
        }
    }
}
