//! Requests of load balancers outside of the cluster to a node, as they send them.

use std::net::TcpStream;

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TCP, eventually, reaches},
    features::on,
    manifest::{Condition, Service},
};

scenarios! {
    Dataplane:
    healthz_and_livez_answer_as_kube_proxys_do,
    a_service_is_asked_about_at_its_own_port,
    each_family_has_its_own_answer,
    a_port_that_another_process_has_is_waited_for,
    tools_learn_the_proxys_mode,
    a_client_that_says_nothing_keeps_no_load_balancer_waiting,
}

/// An answer: status, headers in lower case, body.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: Vec<String>,
    body: String,
}

impl Answer {
    fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("{self:?}"))
    }

    fn has(&self, header: &str) -> Result<()> {
        let found = self.headers.iter().any(|line| line == header);
        ensure!(found, "no {header:?} in {self:?}");
        Ok(())
    }
}

fn get(from: &Host, url: &str) -> Result<Answer> {
    let answer = from
        .command("curl")
        .args(["-sS", "-i", "--max-time", "20", url])
        .run()?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1));
    Ok(Answer {
        status: status.context("no status")?.parse()?,
        headers: lines.map(str::to_lowercase).collect(),
        body: body.to_owned(),
    })
}

/// A client takes all connections of the ports that load balancers, the kubelet and Prometheus ask, and more, and sends
/// nothing: the agent answers others, and answers the client itself at its next connection.
fn a_client_that_says_nothing_keeps_no_load_balancer_waiting() -> Result<()> {
    const MORE_THAN_THE_ROOM: usize = 300;
    let metrics = ["--metrics-addr", "0.0.0.0:15020"];
    let services = |lab: &Lab| vec![web(lab, Condition::Ready, 30_999)];
    let cluster = Cluster::start_with(services, &metrics)?;
    let (ext, addr) = (
        cluster.lab.external("ext"),
        cluster.lab.node("node2").ipv4(),
    );
    let ask = |from: &Host, port: u16, path: &str| -> Result<()> {
        let url = format!("http://{addr}:{port}/{path}");
        let curl = from.command("curl").args(["-sS", "--max-time", "2", &url]);
        let output = curl.output()?;
        ensure!(
            output.status.success(),
            "{}: {url}: {output:?}",
            from.name()
        );
        Ok(())
    };
    for (port, path) in [
        (30_999, ""),
        (10_256, "healthz"),
        (15_020, "metrics"),
        (15_021, "healthz/ready"),
    ] {
        let silent: Vec<TcpStream> = on(ext, |_| {
            let connect = |_| Ok(TcpStream::connect((addr, port))?);
            (0..MORE_THAN_THE_ROOM).map(connect).collect()
        })?;
        for _ in 0..10 {
            ask(cluster.lab.node("node1"), port, path)?;
        }
        ask(ext, port, path)?;
        drop(silent);
    }
    Ok(())
}

fn web(lab: &Lab, pod: Condition, port: u16) -> Service {
    Service::new("web", &["10.96.0.10"])
        .load_balancer("192.0.2.80")
        .node_port("tcp", 80, TCP, 30_080)
        .node_port("tcp2", 81, TCP, 30_081)
        .set("externalTrafficPolicy", "Local")
        .set("healthCheckNodePort", port)
        .endpoint(lab.pod("near"), pod)
        .endpoint(lab.pod("far"), Condition::Ready)
}

fn node(spec: &Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node2" }, "spec": spec })
}

fn healthz_and_livez_answer_as_kube_proxys_do() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab, Condition::Ready, 30_999)])?;
    let (ext, addr) = (
        cluster.lab.external("ext"),
        cluster.lab.node("node2").ipv4(),
    );
    let ask = |path: &str| get(ext, &format!("http://{addr}:10256/{path}"));
    let healthz = ask("healthz")?;
    ensure!(healthz.status == 200, "{healthz:?}");
    healthz.has("content-type: application/json")?;
    healthz.has("x-content-type-options: nosniff")?;
    let body = healthz.json()?;
    ensure!(
        body["healthy"] == true
            && body["nodeEligible"] == true
            && body["lastUpdated"] == body["currentTime"]
            && body["status"]["IPv4"]["healthy"] == true,
        "{body:#}"
    );
    let livez = ask("livez")?;
    ensure!(livez.status == 200, "{livez:?}");
    ensure!(livez.json()?["nodeEligible"].is_null(), "{livez:?}");
    ensure!(ask("")?.status == 404);

    // The cluster autoscaler has chosen this node: no new traffic, and no restart.
    let services = [web(&cluster.lab, Condition::Ready, 30_999)];
    let taint =
        json!({ "taints": [{ "key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule" }] });
    cluster.manifests.write_with(&services, &[node(&taint)])?;
    eventually(|| {
        let healthz = ask("healthz")?;
        ensure!(healthz.status == 503, "{healthz:?}");
        let body = healthz.json()?;
        ensure!(
            body["nodeEligible"] == false && body["healthy"] == true,
            "{body:#}"
        );
        Ok(())
    })?;
    ensure!(ask("livez")?.status == 200);
    // And `status` says why, from the same fact.
    let status = cluster.status()?;
    let findings = status["findings"].to_string();
    ensure!(
        findings.contains("ToBeDeletedByClusterAutoscaler") && status["healthy"] == true,
        "{status:#}"
    );
    // The service's own health check still succeeds.
    ensure!(get(ext, &format!("http://{addr}:30999/"))?.status == 200);
    cluster
        .manifests
        .write_with(&services, &[node(&json!({}))])?;
    eventually(|| {
        ensure!(ask("healthz")?.status == 200);
        Ok(())
    })
}

fn a_service_is_asked_about_at_its_own_port() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab, Condition::Ready, 30_999)])?;
    let (ext, addr) = (
        cluster.lab.external("ext"),
        cluster.lab.node("node2").ipv4(),
    );
    let ask = |port: u16| get(ext, &format!("http://{addr}:{port}/"));
    let answer = ask(30_999)?;
    ensure!(answer.status == 200, "{answer:?}");
    answer.has("content-type: application/json")?;
    answer.has("x-content-type-options: nosniff")?;
    answer.has("x-load-balancing-endpoint-weight: 1")?;
    // To the byte what kube-proxy 1.36 writes.
    let body = "{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\
                \t\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": true\n}";
    ensure!(answer.body == body, "{answer:?}");

    // A node with only terminating endpoints serves those that still come, and asks for no new connections.
    let terminating = web(&cluster.lab, Condition::ServingTerminating, 30_999);
    cluster.manifests.write(&[terminating])?;
    eventually(|| {
        let answer = ask(30_999)?;
        ensure!(answer.status == 503, "{answer:?}");
        answer.has("x-load-balancing-endpoint-weight: 0")?;
        ensure!(answer.json()?["localEndpoints"] == 0, "{answer:?}");
        Ok(())
    })?;

    // The port changes, and then goes, as the service no longer has a health check.
    cluster
        .manifests
        .write(&[web(&cluster.lab, Condition::Ready, 30_998)])?;
    eventually(|| {
        ensure!(ask(30_998)?.status == 200);
        ensure!(ask(30_999).is_err(), "the old port is still open");
        Ok(())
    })?;
    let cluster_wide =
        web(&cluster.lab, Condition::Ready, 30_998).set("externalTrafficPolicy", "Cluster");
    cluster.manifests.write(&[cluster_wide])?;
    eventually(|| {
        ensure!(ask(30_998).is_err(), "the port is still open");
        Ok(())
    })?;
    reaches(
        cluster.client(),
        "10.96.0.10:80",
        "connect --count 20",
        &["far", "near"],
    )
    .map(drop)
}

/// A service may have endpoints of one family here, and none of the other.
fn each_family_has_its_own_answer() -> Result<()> {
    let cluster = Cluster::start(|lab| {
        let v4 = web(lab, Condition::Ready, 30_999);
        let v6 = Service::new("six", &["fd00:96::10"])
            .load_balancer("fd00:1b::80")
            .node_port("tcp", 80, TCP, 30_082)
            .set("externalTrafficPolicy", "Local")
            .set("healthCheckNodePort", 30_997)
            .endpoints(&[lab.pod("near"), lab.pod("near2")]);
        vec![v4, v6]
    })?;
    let (ext, node) = (cluster.lab.external("ext"), cluster.lab.node("node2"));
    let v6 = node
        .addresses()
        .into_iter()
        .find(std::net::IpAddr::is_ipv6)
        .context("an IPv6 address")?;
    let answer = get(ext, &format!("http://[{v6}]:30997/"))?;
    ensure!(answer.status == 200, "{answer:?}");
    ensure!(answer.json()?["localEndpoints"] == 2, "{answer:?}");
    ensure!(get(ext, &format!("http://{}:30997/", node.ipv4())).is_err());
    ensure!(get(ext, &format!("http://[{v6}]:30999/")).is_err());
    // As with kube-proxy, `0.0.0.0` is both families.
    ensure!(get(ext, &format!("http://[{v6}]:10256/healthz"))?.status == 200);
    Ok(())
}

/// Tools ask kube-proxy for its mode on the node; it answers nowhere else.
fn tools_learn_the_proxys_mode() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab, Condition::Ready, 30_999)])?;
    let node = cluster.lab.node("node2");
    eventually(|| {
        let answer = get(node, "http://127.0.0.1:10249/proxyMode")?;
        ensure!(
            answer.status == 200 && answer.body == "nftables",
            "{answer:?}"
        );
        Ok(())
    })?;
    let elsewhere = format!("http://{}:10249/proxyMode", node.ipv4());
    ensure!(get(cluster.lab.external("ext"), &elsewhere).is_err());
    let metrics = get(node, "http://127.0.0.1:15020/proxyMode")?;
    ensure!(metrics.body == "nftables", "{metrics:?}");
    Ok(())
}

/// kube-proxy still runs while it is being replaced: its ports are not worth a refusal to start.
fn a_port_that_another_process_has_is_waited_for() -> Result<()> {
    let lab = Cluster::lab()?;
    let other = lab
        .node("node2")
        .serve(&["--tcp", "0.0.0.0:10256", "--tcp", "0.0.0.0:30999"])?;
    let cluster = Cluster::start_in(
        lab,
        &["far", "near"],
        |lab| vec![web(lab, Condition::Ready, 30_999)],
        &[],
    )?;
    eventually(|| {
        let status = cluster.status()?;
        let findings = status["findings"].to_string();
        ensure!(status["healthy"] == true, "{status:#}");
        for text in [
            "/healthz and /livez: cannot listen on 0.0.0.0:10256: Address already in use",
            "the health check of Service default/web: cannot listen on",
        ] {
            ensure!(findings.contains(text), "{status:#}");
        }
        Ok(())
    })?;
    reaches(
        cluster.client(),
        "10.96.0.10:80",
        "connect --count 20",
        &["far", "near"],
    )?;
    drop(other);
    let (ext, addr) = (
        cluster.lab.external("ext"),
        cluster.lab.node("node2").ipv4(),
    );
    eventually(|| {
        ensure!(get(ext, &format!("http://{addr}:10256/healthz"))?.status == 200);
        ensure!(get(ext, &format!("http://{addr}:30999/"))?.status == 200);
        let status = cluster.status()?;
        ensure!(status["findings"] == json!([]), "{status:#}");
        Ok(())
    })
}
