//! Manifests as kubectl prints them, end to end: files in, snapshot out.

use std::{fmt::Write, path::PathBuf};

use dataplane_source::manifests;
use model::{Node, ServiceName, Snapshot};

fn at_root(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn node1() -> Node {
    Node {
        name: "node1".into(),
        addresses: Vec::new(),
        ..Node::default()
    }
}

fn load(paths: &[&str]) -> Snapshot {
    let paths: Vec<_> = paths.iter().map(|path| at_root(path)).collect();
    manifests::load(&paths, &node1())
        .unwrap_or_else(|errors| panic!("{errors}"))
        .snapshot
}

/// Returns `name: address:port…` per port, with `*` after endpoints on this node.
fn summary(snapshot: &Snapshot) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, service) in &snapshot.services {
        for port in &service.ports {
            let ips: Vec<_> = service
                .cluster_ips
                .iter()
                .map(ToString::to_string)
                .collect();
            let mut line = format!(
                "{name} {} {}/{}:",
                ips.join(","),
                port.port,
                port.protocol.word()
            );
            for e in &port.endpoints {
                let state = match (e.ready, e.serving, e.terminating) {
                    (true, true, false) => "",
                    (false, true, true) => "(terminating)",
                    other => panic!("{other:?}"),
                };
                let here = if e.local { "*" } else { "" };
                write!(line, " {}:{}{here}{state}", e.addr, e.port).unwrap();
            }
            lines.push(line);
        }
    }
    lines
}

#[test]
fn examples() {
    let snapshot = load(&["examples"]);
    assert_eq!(
        summary(&snapshot),
        [
            "default/httpbin 10.96.130.105 8000/tcp: 10.244.1.5:80* 10.244.1.6:80* 10.244.1.7:80* \
             10.244.2.7:80 10.244.2.9:80 10.244.2.10:80",
            "default/shop 10.96.44.7,fd00:10:96::2c07 80/tcp: 10.244.1.11:8080* 10.244.2.11:8080 \
             fd00:10:244:1::11:8080* fd00:10:244:2::11:8080",
            "kube-system/kube-dns 10.96.0.10 53/udp: 10.244.1.2:53* 10.244.2.2:53",
            "kube-system/kube-dns 10.96.0.10 53/tcp: 10.244.1.2:53* 10.244.2.2:53",
            "kube-system/kube-dns 10.96.0.10 9153/tcp: 10.244.1.2:9153* 10.244.2.2:9153",
            // A route of the example splits this service, which is up to the plan.
            "shop/shop-api 10.96.7.10 9000/tcp:",
            "shop/shop-api-v1 10.96.7.11 9000/tcp: 10.244.1.21:9000*",
            "shop/shop-api-v2 10.96.7.12 9000/tcp: 10.244.1.22:9000*",
        ]
    );
    let shop = &snapshot.services[&ServiceName::new("default", "shop")];
    assert_eq!(shop.affinity, Some(std::time::Duration::from_mins(10)));
    assert_eq!(shop.ports[0].node_port, Some(30080));
    assert_eq!(shop.created, Some(1_770_129_612));
    assert!(snapshot.problems.is_empty());
}

#[test]
fn what_kube_proxy_was_given() {
    let data = "tests/data/kube-proxy-1.36";
    let snapshot = load(&[
        &format!("{data}/services.yaml"),
        &format!("{data}/endpointslices.json"),
    ]);
    let three = "10.244.0.101:8080* 10.244.0.102:8080 10.244.0.103:8080*(terminating)";
    assert_eq!(
        summary(&snapshot),
        [
            format!("bench/affinity 10.96.1.5 80/tcp: {three}"),
            format!("bench/clusterip 10.96.1.1 80/tcp: {three}"),
            format!("bench/extip 10.96.1.8 80/tcp: {three}"),
            format!("bench/itp-local 10.96.1.7 80/tcp: {three}"),
            format!("bench/lb-local 10.96.1.4 80/tcp: {three}"),
            "bench/lb-local-remote 10.96.1.9 80/tcp: 10.244.0.102:8080".into(),
            format!("bench/lb-ranges 10.96.1.3 80/tcp: {three}"),
            format!("bench/nodeport 10.96.1.2 80/tcp: {three}"),
            "bench/noeps 10.96.1.6 80/tcp:".into(),
            "bench/udp 10.96.1.10 53/udp: 10.244.0.101:8053* 10.244.0.102:8053".into(),
        ]
    );
}
