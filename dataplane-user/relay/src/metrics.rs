//! Connections as metrics, by Istio's names.

use std::{collections::BTreeMap, fmt};

use model::Snapshot;
use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

use super::{
    counters::Totals,
    labels::{Labels, Shown},
};

/// The totals of all connections, by their labels.
pub type Connections = BTreeMap<Labels, Totals>;

type Reading = fn(&Totals) -> u64;

const FAMILIES: [(&str, &str, Reading); 5] = [
    (
        "istio_tcp_connections_opened",
        "Connections that reached their destination",
        |totals| totals.opened,
    ),
    (
        "istio_tcp_connections_closed",
        "Connections that ended, of those that reached their destination",
        |totals| totals.closed,
    ),
    (
        "istio_tcp_connections_failed",
        "Connections that were refused or that no endpoint took; response_flags says why",
        |totals| totals.failed,
    ),
    (
        "istio_tcp_received_bytes",
        "Bytes from clients, as requests",
        |totals| totals.received,
    ),
    (
        "istio_tcp_sent_bytes",
        "Bytes to clients, as responses",
        |totals| totals.sent,
    ),
];

/// Writes the totals of connections, with the names of the cluster and of the node's place in the snapshot.
///
/// # Errors
/// The encoder's.
pub fn encode_connections(
    all: &Connections,
    snapshot: &Snapshot,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    for (name, help, read) in FAMILIES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        let seen = all.iter().filter(|(_, t)| **t != Totals::default());
        for (labels, totals) in seen {
            let value = read(totals);
            // Connections that fail are shown as 0 opened, and not as 0 of the others.
            if value == 0 && name != "istio_tcp_connections_opened" {
                continue;
            }
            let labels = Shown { labels, snapshot };
            let metric = family.encode_family(&labels)?;
            ConstCounter::new(value).encode(metric)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{Identity, Node, Place, ServiceName, Workload, WorkloadName};
    use prometheus_client::{collector::Collector, encoding::text, registry::Registry};

    use super::*;
    use crate::{Baggage, CountersKey, Direction, Flag, Party, Principals};

    #[derive(Debug)]
    struct All(Connections, Snapshot);

    impl Collector for All {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            encode_connections(&self.0, &self.1, &mut encoder)
        }
    }

    fn shown(labels: Labels) -> String {
        let one = Totals {
            opened: 1,
            ..Totals::default()
        };
        let mut registry = Registry::default();
        let node = Node {
            region: "east".into(),
            zone: "east-1".into(),
            ..Node::default()
        };
        let snapshot = Snapshot {
            node: Arc::new(node),
            ..Snapshot::default()
        };
        registry.register_collector(Box::new(All([(labels, one)].into(), snapshot)));
        let mut shown = String::new();
        text::encode(&mut shown, &registry).unwrap();
        shown
    }

    #[test]
    fn principals_are_of_the_source_and_of_the_destination() {
        let identity = |account| Identity::new("cluster.local", "shop", account).unwrap();
        let workload = Workload::new(WorkloadName::new("shop", "web"), Place::Address);
        let labels = |direction, principals| Labels {
            workload: Party::of(&Arc::new(workload.clone())),
            key: CountersKey {
                direction,
                principals,
                service: None,
                peer: Party::nobody(),
                flag: Flag::None,
            },
        };
        let [own, peer] = [identity("own"), identity("peer")];
        let both = Some(Principals {
            own,
            peer: Some(peer),
            is_attested: false,
            baggage: None,
        });
        let attested = both.clone().map(|of| Principals {
            is_attested: true,
            ..of
        });
        let [own, peer] =
            ["own", "peer"].map(|of| format!("spiffe://cluster.local/ns/shop/sa/{of}"));
        let unknown = "unknown".to_owned();
        let (outbound, inbound) = (Direction::Outbound, Direction::Inbound);
        for (labels, source, destination, policy) in [
            (labels(outbound, both.clone()), &own, &peer, "mutual_tls"),
            (labels(inbound, both.clone()), &peer, &own, "mutual_tls"),
            (labels(inbound, both).rest(), &unknown, &own, "mutual_tls"),
            (labels(outbound, attested.clone()), &own, &peer, "attested"),
            (labels(inbound, attested).rest(), &unknown, &own, "attested"),
            (labels(outbound, None), &unknown, &unknown, "unknown"),
        ] {
            let shown = shown(labels);
            for wanted in [
                format!("source_principal=\"{source}\""),
                format!("destination_principal=\"{destination}\""),
                format!("connection_security_policy=\"{policy}\""),
            ] {
                assert!(shown.contains(&wanted), "{wanted}: {shown}");
            }
        }
    }

    /// The peer's baggage fills the labels that the agent does not know, except the namespace.
    #[test]
    fn the_place_of_a_peer_is_the_nodes_or_that_in_its_baggage() {
        let workload = |name, place| {
            let name = WorkloadName::new("shop", name);
            Party::of(&Arc::new(Workload::new(name, place)))
        };
        let baggage = "k8s.cluster.name=other,k8s.namespace.name=root,k8s.deployment.name=api,service.name=a,service.version=v1,\
                    cloud.region=west,cloud.availability_zone=west-1";
        let principals = |baggage: Option<&str>| {
            let identity = |account| Identity::new("cluster.local", "far", account).unwrap();
            Some(Principals {
                own: identity("own"),
                peer: Some(identity("peer")),
                is_attested: false,
                baggage: baggage.and_then(Baggage::read).map(Arc::new),
            })
        };
        let elsewhere = workload("db", Place::Elsewhere);
        for (peer, baggage, wanted) in [
            (
                workload("db", Place::Address),
                Some(baggage),
                ["db", "db", "shop", "Kubernetes", "east", "east-1"],
            ),
            (
                elsewhere.clone(),
                Some(baggage),
                ["db", "db", "shop", "Kubernetes", "west", "west-1"],
            ),
            (
                elsewhere,
                None,
                ["db", "db", "shop", "Kubernetes", "unknown", "unknown"],
            ),
            (
                Party::nobody(),
                Some(baggage),
                ["api", "a", "far", "other", "west", "west-1"],
            ),
            (Party::nobody(), None, ["unknown"; 6]),
        ] {
            let shown = shown(Labels {
                workload: workload("web", Place::Address),
                key: CountersKey {
                    direction: Direction::Inbound,
                    principals: principals(baggage),
                    service: Some(ServiceName::new("shop", "web")),
                    peer,
                    flag: Flag::None,
                },
            });
            let names = [
                "workload",
                "canonical_service",
                "workload_namespace",
                "cluster",
                "region",
                "zone",
            ];
            let source = names.into_iter().zip(wanted);
            for label in source.map(|(name, value)| format!("source_{name}=\"{value}\"")) {
                assert!(shown.contains(&label), "{label}: {shown}");
            }
            for label in [
                "destination_cluster=\"Kubernetes\"",
                "destination_region=\"east\"",
                "destination_zone=\"east-1\"",
                "destination_service=\"web.shop.svc.cluster.local\"",
            ] {
                assert!(shown.contains(label), "{label}: {shown}");
            }
        }
    }
}
