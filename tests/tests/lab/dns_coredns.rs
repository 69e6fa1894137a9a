//! The names of services beside CoreDNS: both servers read one API server and answer the same queries.
//! `cargo xtask judges coredns` builds CoreDNS.

use std::{
    collections::BTreeSet,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{
    Lab,
    api::{ApiServer, Cluster as Objects, Options, objects},
};
use serde_json::{Value, json};

use crate::{
    cluster::eventually,
    dns_upstreams::{AA, Answer, Query, Transport, exchange},
    proxy::inside,
};

scenarios! {
    Lab:
    names_are_those_of_coredns,
}

/// Objects of every kind that has names.
const CLUSTER: &str = include_str!("../../../dataplane-user/dns/tests/dns/cluster.yaml");
const NAMESPACES: [&str; 4] = ["default", "shop", "kube-system", "empty"];

const TYPES: [(&str, u16); 9] = [
    ("A", 1),
    ("NS", 2),
    ("CNAME", 5),
    ("SOA", 6),
    ("PTR", 12),
    ("MX", 15),
    ("TXT", 16),
    ("AAAA", 28),
    ("SRV", SRV),
];
const SOA: u16 = 6;
const SRV: u16 = 33;

fn coredns() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/judges/coredns/coredns");
    let given = std::env::var_os("COREDNS_BIN").map_or(built, PathBuf::from);
    given.is_file().then_some(given)
}

/// The objects of the manifest, as an API server has them.
fn objects() -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for text in CLUSTER.split("\n---\n") {
        let mut object: Value = serde_saphyr::from_str(text)?;
        match object["kind"].as_str() {
            // Pods have no names, and the API server defaults fields that CoreDNS reads.
            Some("Pod") => continue,
            Some("Service") => {
                let spec = &mut object["spec"];
                if spec["clusterIPs"].is_null() && !spec["clusterIP"].is_null() {
                    spec["clusterIPs"] = json!([spec["clusterIP"]]);
                }
                spec["clusterIP"] = spec["clusterIPs"][0].clone();
            }
            _ => {}
        }
        for key in ["/spec/ports", "/ports"] {
            let ports = object.pointer_mut(key).and_then(Value::as_array_mut);
            for port in ports.into_iter().flatten() {
                let protocol = port["protocol"].as_str().unwrap_or("TCP").to_owned();
                port["protocol"] = protocol.into();
                port["name"] = port["name"].as_str().unwrap_or_default().into();
            }
        }
        all.push(object);
    }
    for namespace in NAMESPACES {
        all.push(objects::namespace(namespace, &json!({})));
    }
    Ok(all)
}

/// Names that there are, names below and beside them, and names of addresses.
fn names() -> BTreeSet<String> {
    let services = [
        "kubernetes.default",
        "plain.default",
        "headless.default",
        "waiting.default",
        "published.default",
        "tolerated.default",
        "inner.default",
        "web.shop",
        "real.shop",
        "dual.shop",
        "theirs.shop",
        "their-peers.shop",
        "kube-dns.kube-system",
        "none.shop",
        "none.nowhere",
    ];
    let labels = [
        "",
        "my-pet.",
        "my-pet-2.",
        "web-0.",
        "real-0.",
        "real-1.",
        "db-0.",
        "early.",
        "by-hand.",
        "peer-0.",
        "10-3-0-103.",
        "10-3-0-142.",
        "2001-db8--103.",
        "none.",
        "a.b.c.",
        "_http._tcp.",
        "_https._tcp.",
        "_db._tcp.",
        "_dns._udp.",
        "_diameter._sctp.",
        "_none._tcp.",
    ];
    let mut all = BTreeSet::new();
    for service in services {
        for label in labels {
            all.insert(format!("{label}{service}.svc.cluster.local"));
        }
    }
    let others = [
        "cluster.local",
        "svc.cluster.local",
        "pod.cluster.local",
        "shop.svc.cluster.local",
        "empty.svc.cluster.local",
        "nowhere.svc.cluster.local",
        "shop.pod.cluster.local",
        "nowhere.pod.cluster.local",
        "10-244-1-8.shop.pod.cluster.local",
        "10-244-1-8.nowhere.pod.cluster.local",
        "fd00--8.shop.pod.cluster.local",
        "x.shop.pod.cluster.local",
        "dns-version.cluster.local",
    ];
    all.extend(others.map(str::to_owned));
    for last in [
        1, 7, 10, 20, 30, 100, 103, 104, 120, 121, 141, 142, 150, 160,
    ] {
        all.insert(format!("{last}.0.3.10.in-addr.arpa"));
    }
    all.insert("60.2.0.192.in-addr.arpa".to_owned());
    for last in ["0.0.1", "3.0.1", "0.5.1"] {
        let zeros = "0.".repeat(21);
        all.insert(format!("{last}.{zeros}8.b.d.0.1.0.0.2.ip6.arpa"));
    }
    all
}

/// Why the answers to a query may differ; none: they may not.
fn difference(name: &str, of_type: &str) -> Option<&'static str> {
    let first = name.split('.').next().unwrap_or_default();
    let is_port = name.starts_with('_');
    match of_type {
        // Our answers to them are the specification's: an SRV record is all that such a name has.
        "A" | "AAAA" if is_port => Some("CoreDNS gives addresses at the name of a port"),
        "CNAME" | "MX" | "TXT" | "SOA" | "NS" | "PTR" if is_port => {
            Some("CoreDNS gives NXDOMAIN or NODATA by the type")
        }
        "NS" if name == "cluster.local" => Some("CoreDNS runs in no pod here"),
        "SOA" if name != "cluster.local" => {
            Some("CoreDNS gives NODATA whether the name exists or not")
        }
        "SRV" if name.ends_with(".pod.cluster.local") => Some("CoreDNS gives port 0"),
        _ if name
            .rsplit_once('.')
            .is_some_and(|(_, last)| last == "arpa")
            && of_type != "PTR" =>
        {
            Some("CoreDNS asks resolvers for other types")
        }
        "TXT" => Some("CoreDNS gives NXDOMAIN for TXT at names that exist"),
        _ if first == "dns-version" => Some("CoreDNS gives NXDOMAIN for other types"),
        _ if name.starts_with("inner.") && of_type != "A" && of_type != "AAAA" => {
            Some("CoreDNS does not follow the alias for other types")
        }
        _ => None,
    }
}

/// Returns the parts of an answer that must be equal: not TTLs, weights, serial numbers and EDNS0. Of a forwarded
/// answer, not whether it is authoritative.
fn compared(mut answer: Answer, is_ours: bool) -> Answer {
    for section in &mut answer.sections {
        let records = std::mem::take(section).into_iter();
        *section = records
            .map(|(owner, of_type, class, mut data)| {
                match of_type {
                    SRV => data[2..4].fill(0),
                    SOA => data.clear(),
                    _ => {}
                }
                (owner, of_type, class, data)
            })
            .collect();
    }
    answer.edns = None;
    answer.flags &= if is_ours { AA } else { 0 };
    answer
}

fn names_are_those_of_coredns() -> Result<()> {
    let Some(program) = coredns() else {
        println!(
            "skipped dns_coredns::names_are_those_of_coredns: without CoreDNS (cargo xtask judges coredns)"
        );
        return Ok(());
    };
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "app", "10.244.1.8")
        .pod("node1", "api", "10.244.1.9")
        .pod("node1", "dns", "10.244.1.10")
        .pod("node1", "coredns", "10.244.1.11")
        .build()?;
    let cluster = Objects::default();
    cluster.apply(objects::node(
        "node1",
        "zone-a",
        &[lab.node("node1").ipv4().into()],
    ));
    cluster.apply_all(objects()?);
    let host = lab.pod("api").clone();
    let address = SocketAddr::from((host.ipv4(), 6443));
    let options = Options {
        certified: Some(vec![host.ipv4().to_string()]),
        ..Options::default()
    };
    let server = ApiServer::bind(cluster, options, Box::new(move || host.listen(address)))?;
    let directory = tempfile::tempdir()?;
    let kubeconfig = server.kubeconfig(directory.path())?;
    let corefile = directory.path().join("Corefile");
    let text = format!(
        ".:53 {{\n errors\n kubernetes cluster.local in-addr.arpa ip6.arpa {{\n  kubeconfig {}\n  pods insecure\n \
         fallthrough in-addr.arpa ip6.arpa\n }}\n}}\n",
        kubeconfig.display()
    );
    fs::write(&corefile, text)?;
    let _coredns = lab
        .pod("coredns")
        .command(program)
        // The API server of the lab knows lists and watches only.
        .env("KUBE_FEATURE_WatchListClient", "false")
        .arg("-conf")
        .arg(&corefile)
        .spawn()?;
    let theirs = SocketAddr::new(lab.pod("coredns").ipv4().into(), 53);
    let ours = SocketAddr::new(lab.pod("dns").ipv4().into(), 53);
    let serve = lab.pod("dns").command(lab.programs().dataplane()?);
    let _ours = serve
        .args(["dns", "serve", "--node-name", "node1", "--kubeconfig"])
        .arg(&kubeconfig)
        .args(["--listen", &ours.to_string()])
        .args(["--resolver", &theirs.to_string()])
        .spawn()?;
    let found = inside(lab.pod("app"), move || {
        let ask = |server, name: &str, of_type| -> Result<Answer> {
            let query = Query::new(name, of_type);
            let answer = exchange(server, Transport::Tcp, &query.bytes())?;
            Answer::read(&answer.with_context(|| format!("{server}: no answer for {name}"))?)
        };
        eventually(|| {
            for server in [theirs, ours] {
                for name in [
                    "kubernetes.default.svc.cluster.local",
                    "my-pet.headless.default.svc.cluster.local",
                ] {
                    let answer = ask(server, name, 1)?;
                    ensure!(!answer.sections[0].is_empty(), "{server}: {answer}");
                }
            }
            Ok(())
        })?;
        let (mut found, mut count) = (Vec::new(), 0);
        for name in names() {
            for (word, of_type) in TYPES {
                if difference(&name, word).is_some() {
                    continue;
                }
                count += 1;
                let (theirs, ours) = (ask(theirs, &name, of_type)?, ask(ours, &name, of_type)?);
                let is_ours = ours.flags & AA != 0;
                let (mut theirs, mut ours) = (compared(theirs, is_ours), compared(ours, is_ours));
                // More addresses of targets help, and no client may rely on them.
                for answer in [&mut theirs, &mut ours] {
                    if word != "SRV" {
                        answer.sections[2].clear();
                    }
                }
                if theirs != ours {
                    found.push(format!(
                        "{name} {word}\n  CoreDNS {theirs}\n  ours    {ours}"
                    ));
                }
            }
        }
        println!("{count} answers compared with CoreDNS'");
        anyhow::Ok(found)
    })?;
    ensure!(found.is_empty(), "\n{}", found.join("\n"));
    Ok(())
}
