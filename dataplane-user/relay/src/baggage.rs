//! The header `baggage` of tunnels, in which each side describes its workload for the metrics and logs of the other side.

use model::{Snapshot, Workload};

/// The maximum length of the header. A longer header is ignored.
const HEADER: usize = 4096;
/// The maximum length of a value: names of Kubernetes are not longer.
const VALUE: usize = 253;

/// The description of a workload by its side of a tunnel. Nothing verifies it, so only metrics and logs show it, and only for what
/// the agent does not know itself. The namespace is not here: the certificate has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Baggage {
    /// The Deployment or another object that made the workload.
    pub workload: Box<str>,
    /// Its canonical service.
    pub service: Box<str>,
    /// The revision of its canonical service.
    pub revision: Box<str>,
    /// The name of its cluster in the mesh.
    pub cluster: Box<str>,
    /// Its region.
    pub region: Box<str>,
    /// Its zone.
    pub zone: Box<str>,
}

impl Baggage {
    /// Returns the header of a workload of this node, as Istio's proxies send it. For these, `k8s.pod.name`, `k8s.deployment.name`
    /// and others are the same field, and the last one counts: so there is only one of them.
    pub fn text(workload: &Workload, snapshot: &Snapshot) -> String {
        let telemetry = &workload.telemetry;
        let mut text = String::new();
        for (key, value) in [
            ("k8s.cluster.name", &*snapshot.cluster.name),
            ("k8s.namespace.name", workload.name.namespace()),
            ("k8s.deployment.name", &*telemetry.workload),
            ("service.name", &*telemetry.canonical_service),
            ("service.version", &*telemetry.canonical_revision),
            ("cloud.region", &*snapshot.node.region),
            ("cloud.availability_zone", &*snapshot.node.zone),
        ] {
            if !value.is_empty() {
                let comma = if text.is_empty() { "" } else { "," };
                text.extend([comma, key, "=", value]);
            }
        }
        text
    }

    /// Reads a header. Values that are no names of Kubernetes or Istio are ignored. `None`: nothing is left.
    pub fn read(header: &str) -> Option<Self> {
        if header.len() > HEADER {
            return None;
        }
        let is_name = |value: &&str| {
            let is_of_names = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            (1..=VALUE).contains(&value.len()) && value.bytes().all(is_of_names)
        };
        let mut found = Self::default();
        for member in header.split(',') {
            let Some((key, value)) = member.split_once('=') else {
                continue;
            };
            let Some(value) = Some(value.trim()).filter(is_name) else {
                continue;
            };
            let field = match key.trim() {
                "k8s.deployment.name" | "k8s.cronjob.name" | "k8s.job.name" | "k8s.pod.name" => {
                    &mut found.workload
                }
                "service.name" => &mut found.service,
                "service.version" => &mut found.revision,
                "k8s.cluster.name" => &mut found.cluster,
                "cloud.region" => &mut found.region,
                "cloud.availability_zone" => &mut found.zone,
                _ => continue,
            };
            *field = value.into();
        }
        (found != Self::default()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{Node, Place, WorkloadName};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_workload_is_described_as_istios_proxies_do() {
        let name = WorkloadName::new("shop", "web-7d4b9c6f5-x2x4z");
        let mut workload = Workload::new(name, Place::Address);
        workload.telemetry = model::Telemetry::new("web", None);
        let mut snapshot = Snapshot::default();
        let all = "k8s.cluster.name=Kubernetes,k8s.namespace.name=shop,k8s.deployment.name=web,service.name=web,service.version=latest";
        assert_eq!(Baggage::text(&workload, &snapshot), all);
        snapshot.node = Arc::new(Node {
            region: "r".into(),
            zone: "r-1".into(),
            ..Node::default()
        });
        let text = Baggage::text(&workload, &snapshot);
        assert_eq!(
            text,
            format!("{all},cloud.region=r,cloud.availability_zone=r-1")
        );
        let read = Baggage::read(&text).unwrap();
        let fields = [
            read.cluster,
            read.workload,
            read.service,
            read.revision,
            read.region,
            read.zone,
        ];
        let wanted = ["Kubernetes", "web", "web", "latest", "r", "r-1"];
        assert_eq!(fields.each_ref().map(|field| &**field), wanted);
    }

    proptest! {
        #[test]
        fn only_names_are_read(
            header in "((k8s\\.pod\\.name|service\\.(name|version)|cloud\\.region|x)[=,;]?\\PC{0,9}[,=]?){0,6}",
        ) {
            if let Some(read) = Baggage::read(&header) {
                let fields = [&read.workload, &read.service, &read.revision, &read.cluster, &read.region, &read.zone];
                for value in fields {
                    let is_name = value.bytes().all(|byte| byte.is_ascii_graphic() && !b",;=\"%/".contains(&byte));
                    prop_assert!(is_name && header.contains(&**value), "{value}");
                }
            }
        }
    }

    #[test]
    fn other_values_are_ignored() {
        let long = format!("service.name={}", "a".repeat(VALUE + 1));
        let huge = format!("service.name=web,{}", "a".repeat(HEADER));
        for (header, wanted) in [
            ("service.name=web", Some("web")),
            (" service.name = web ,x", Some("web")),
            ("service.name=web,service.name=api", Some("api")),
            ("service.name=web,service.name=", Some("web")),
            ("service.name=web;a=b", None),
            ("service.name=w\"b", None),
            ("service.name=w%20b", None),
            ("service.name==web", None),
            ("service.name", None),
            ("k8s.namespace.name=shop", None),
            ("", None),
            (&long, None),
            (&huge, None),
        ] {
            let read = Baggage::read(header);
            assert_eq!(read.map(|of| of.service).as_deref(), wanted, "{header}");
        }
    }
}
