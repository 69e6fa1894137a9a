//! Gateway API's routes, as clients see them: a Service whose connections are split among others.

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TCP, ask, eventually, reaches},
    manifest::{Manifests, Service},
    outcome::run,
};

scenarios! {
    Dataplane:
    weights_hold_over_many_connects,
    a_backend_without_endpoints_has_its_part_refused_at_sockets_and_by_packets,
    clients_of_a_split_service_stay_with_their_endpoint,
}

const WEB: &str = "10.96.0.10:80";

fn route(backends: &Value) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1alpha2", "kind": "TCPRoute",
        "metadata": { "name": "split", "namespace": "default" },
        "spec": {
            "parentRefs": [{ "group": "", "kind": "Service", "name": "web" }],
            "rules": [{ "backendRefs": backends }],
        },
    })
}

fn ratio(part: u64, of: u64) -> Result<f64> {
    Ok(f64::from(u32::try_from(part)?) / f64::from(u32::try_from(of)?))
}

/// The part of all attempts that an endpoint answered.
fn part(report: &dataplane_tests::report::Report, name: &str) -> Result<f64> {
    let answers = report.endpoints.get(name).map_or(0, |of| of.answers);
    ratio(answers, report.attempts)
}

/// Two Services and a host of a ServiceEntry, by both families; and the output of `explain` and `plan`.
fn weights_hold_over_many_connects() -> Result<()> {
    let cluster = Cluster::start(|_| Vec::new())?;
    let lab = &cluster.lab;
    let [far, near, near2] = ["far", "near", "near2"].map(|name| lab.pod(name));
    let services = [
        Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .port("tcp", 80, TCP)
            .endpoints(&[near2]),
        Service::new("one", &["10.96.0.11", "fd00:96::11"])
            .port("tcp", 8080, TCP)
            .endpoints(&[far]),
        Service::new("two", &["10.96.0.12", "fd00:96::12"])
            .port("tcp", 8080, TCP)
            .endpoints(&[near2]),
    ];
    let endpoints = near
        .addresses()
        .map(|address| json!({ "address": address }));
    let entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "name": "ext", "namespace": "default" },
        "spec": {
            "hosts": ["ext.example.com"], "resolution": "STATIC", "endpoints": endpoints,
            "ports": [{ "number": 443, "name": "tcp", "protocol": "TCP", "targetPort": TCP }],
        },
    });
    let split = |weights: [u32; 3]| {
        let hostname = "networking.istio.io";
        route(&json!([
            { "name": "one", "port": 8080, "weight": weights[0] },
            { "name": "two", "port": 8080, "weight": weights[1] },
            {
                "group": hostname, "kind": "Hostname", "name": "ext.example.com", "port": 443,
                "weight": weights[2],
            },
        ]))
    };
    let client = cluster.client();
    cluster
        .manifests
        .write_with(&services, std::slice::from_ref(&entry))?;
    eventually(|| reaches(client, WEB, "connect --count 5", &["near2"]).map(drop))?;
    let first = [entry.clone(), split([60, 30, 10])];
    cluster.manifests.write_with(&services, &first)?;
    let all = ["far", "near", "near2"];
    eventually(|| reaches(client, WEB, "connect --count 200", &all).map(drop))?;
    let asked = std::env::var("DATAPLANE_CONNECTS").ok();
    let count: u32 = asked.map_or(Ok(10_000), |asked| asked.parse())?;
    let report = reaches(client, WEB, &format!("connect --count {count}"), &all)?;
    // At least four standard deviations, since none is longer than half the root of the count.
    let chance = 2.0 / f64::from(count).sqrt();
    for (name, wanted) in [("far", 0.6), ("near2", 0.3), ("near", 0.1)] {
        let part = part(&report, name)?;
        ensure!(
            (part - wanted).abs() < chance,
            "{name}: {part}, not {wanted}"
        );
    }
    reaches(client, "[fd00:96::10]:80", "connect --count 200", &all)?;
    // A backend's own address leads to it alone.
    reaches(client, "10.96.0.11:8080", "connect --count 20", &["far"])?;
    run(&cluster.agent, &format!("explain node {WEB}"))?.says(&[
        "TCPRoute default/split, spec.rules[0] splits the connections",
        "60.00%",
        "10.00%",
    ])?;

    let other = Manifests::new(&[])?;
    other.write_with(&services, &[entry.clone(), split([1, 1, 0])])?;
    let path = other.path();
    let path = path.to_str().context("a path")?;
    run(
        &cluster.agent,
        &format!("plan --node-name node2 --manifests {path}"),
    )?
    .says(&[
        "~ 10.96.0.10:80/tcp ClusterIP of default/web, split by TCPRoute default/split: ",
        "equal parts",
    ])?;
    // Without the route, the Service has its own endpoints again.
    cluster.manifests.write_with(&services, &[entry])?;
    eventually(|| reaches(client, WEB, "connect --count 20", &["near2"]).map(drop))
}

fn a_backend_without_endpoints_has_its_part_refused_at_sockets_and_by_packets() -> Result<()> {
    const COUNT: u32 = 2_000;
    let cluster = Cluster::start(|_| Vec::new())?;
    let lab = &cluster.lab;
    let services = [
        Service::new("web", &["10.96.0.10"])
            .node_port("tcp", 80, TCP, 30_080)
            .endpoints(&[lab.pod("near2")]),
        Service::new("one", &["10.96.0.11"])
            .port("tcp", 8080, TCP)
            .endpoints(&[lab.pod("near")]),
    ];
    let split = route(&json!([
        { "name": "one", "port": 8080, "weight": 3 }, { "name": "none", "port": 8080 },
    ]));
    // By name it comes after the other one.
    let mut late = split.clone();
    late["metadata"]["name"] = "z-late".into();
    let mut http = route(&json!([{ "name": "web", "port": 80 }]));
    http["kind"] = "HTTPRoute".into();
    http["spec"]["parentRefs"][0]["name"] = "one".into();
    http["spec"]["rules"][0]["matches"] = json!([{ "path": { "value": "/x" } }]);
    cluster
        .manifests
        .write_with(&services, &[late, split, http])?;
    let client = cluster.client();
    eventually(|| {
        let report = ask(client, WEB, "connect --count 50")?;
        ensure!(report.endpoints.keys().eq(["near"]), "{report:?}");
        Ok(())
    })?;
    let node = format!("{}:30080", lab.node("node2").ipv4());
    // With packets, a refusal is an ICMP error, of which a client gets only so many a second.
    for (from, to, count) in [(client, WEB, COUNT), (lab.external("ext"), &*node, 16)] {
        let before = cluster.verdicts(Reason::NoEndpoints)?;
        let report = ask(
            from,
            to,
            &format!("connect --count {count} --timeout-ms 5000"),
        )?;
        let counted = cluster.verdicts(Reason::NoEndpoints)? - before;
        let refused = u64::from(count) - report.answered;
        ensure!(report.endpoints.keys().eq(["near"]), "{report:?}");
        ensure!(
            report.errors.keys().all(|error| error == "ECONNREFUSED"),
            "{report:?}"
        );
        ensure!(
            counted >= refused,
            "{counted} counted, {refused} refused: {report:?}"
        );
        // Six times the deviation that chance has with the most of them.
        let part = ratio(refused, count.into())?;
        ensure!(
            count < COUNT || (part - 0.25).abs() < 0.06,
            "{part} of the connections to {to}"
        );
        ensure!(counted > 0, "{report:?}");
    }
    run(&cluster.agent, "status")?.says(&[
        "TCPRoute default/split",
        "ResolvedRefs=False (BackendNotFound)",
        "there is no Service default/none; 25 % of the connections are refused",
        "TCPRoute default/z-late: Accepted=False (Conflicted): port 80 of Service default/web: TCPRoute default/split \
         comes before it",
        "HTTPRoute default/split: Accepted=False (UnsupportedValue): spec.rules[0].matches[0]: needs a proxy",
    ])?;
    // A route that is not followed changes nothing.
    reaches(client, "10.96.0.11:8080", "connect --count 20", &["near"])?;
    let told = run(&cluster.agent, &format!("explain node {WEB}"))?;
    told.says(&["refused", "25.00%"])?;
    // The same for a packet, whose routes to the other endpoints are known.
    let packet = format!("explain --iface veth-sleep 10.244.2.8:4000 {WEB}");
    run(&cluster.agent, &packet)?
        .says(&["refused", "25.00%", "translated (translated)"])
        .map(drop)
}

/// Of as many clients as there are, some are at each endpoint, and none at two.
fn clients_of_a_split_service_stay_with_their_endpoint() -> Result<()> {
    let cluster = Cluster::start(|_| Vec::new())?;
    let lab = &cluster.lab;
    let services = [
        Service::new("web", &["10.96.0.10"])
            .affinity(600)
            .node_port("tcp", 80, TCP, 30_080)
            .endpoints(&[lab.pod("far")]),
        Service::new("one", &["10.96.0.11"])
            .port("tcp", 8080, TCP)
            .endpoints(&[lab.pod("near")]),
        Service::new("two", &["10.96.0.12"])
            .port("tcp", 8080, TCP)
            .endpoints(&[lab.pod("near2")]),
    ];
    let split = route(&json!([{ "name": "one", "port": 8080 }, { "name": "two", "port": 8080 }]));
    cluster.manifests.write_with(&services, &[split])?;
    let node = format!("{}:30080", lab.node("node2").ipv4());
    for (from, to) in [(cluster.client(), WEB), (lab.external("ext"), &*node)] {
        let first = |count: u32| ask(from, to, &format!("connect --count {count}"));
        eventually(|| {
            let report = first(1)?;
            let endpoints = report.endpoints.keys();
            ensure!(
                endpoints.eq(["near"]) || report.endpoints.keys().eq(["near2"]),
                "{report:?}"
            );
            Ok(())
        })?;
        let report = first(50)?;
        ensure!(
            report.answered == 50 && report.endpoints.len() == 1,
            "{to}: {report:?}"
        );
    }
    Ok(())
}
