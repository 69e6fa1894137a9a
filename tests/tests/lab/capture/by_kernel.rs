//! Istio's policies of Pods without a proxy, which the kernel enforces by address and port.

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use serde_json::{Value, json};

use super::{
    World,
    authorization::{AUTHORIZATION, ONE, Policed, TO, are_reset, deny_one, policy},
    explain::explain,
    probes::Kubelet,
};
use crate::{
    cluster::{UDP, eventually, fails, lived, reaches},
    metrics::Metrics,
};

scenarios! {
    Dataplane:
    policies_hold_without_a_proxy,
    a_policy_ends_live_connections_without_a_proxy,
    excluded_ports_are_not_judged,
}

const REFUSED: Option<&str> = Some("ECONNREFUSED");
const ALL: [&str; 3] = ["one", "two", "far"];

/// Port 80 of the pod, by both families.
fn web(of: &Policed, name: &str, is_open: bool) -> Result<()> {
    for to in ["10.244.1.8:80", "[fd00:10:244:1::8]:80"] {
        let reached = reaches(of.host(name), to, "http", &["app"]);
        ensure!(reached.is_ok() == is_open, "{name} to {to}: {reached:?}");
    }
    Ok(())
}

fn policies_hold_without_a_proxy() -> Result<()> {
    let of = Policed::in_mode("kernel", json!({}))?;
    of.all(&ALL, None)?;
    of.write(&[policy(AUTHORIZATION, deny_one())])?;
    eventually(|| of.all(&["one"], REFUSED))?;
    is_counted_and_told(&of)?;
    of.all(&["two", "far"], None)?;
    // An address of the pod that Kubernetes does not know.
    of.host("app").ip("addr add 10.99.0.8/32 dev eth0")?;
    let node = of.world().lab.node("node1");
    node.ip("route add 10.99.0.8/32 dev veth-app")?;
    let _there = of.host("app").serve(&["--tcp", "10.99.0.8:7"])?;
    fails(of.host("one"), "10.99.0.8:7", "connect", "ECONNREFUSED")?;
    for name in ["two", "app"] {
        reaches(of.host(name), "10.99.0.8:7", "connect", &["app"])?;
    }
    // Datagrams, its own connections, and those to itself.
    let datagrams = format!("10.244.1.8:{UDP}");
    reaches(of.host("one"), &datagrams, "udp", &["app"])?;
    reaches(of.host("app"), "10.244.2.5:7", "connect", &["far"])?;
    TO.iter()
        .try_for_each(|to| reaches(of.host("app"), to, "connect", &["app"]).map(drop))?;

    // The client, and the port.
    let from = json!([{ "source": { "ipBlocks": ONE } }]);
    let to = json!([{ "operation": { "ports": ["7"] } }]);
    let allow = json!({ "action": "ALLOW", "rules": [{ "from": from, "to": to }] });
    of.write(&[policy(AUTHORIZATION, allow)])?;
    eventually(|| of.all(&["one"], None))?;
    of.all(&["two", "far"], REFUSED)?;
    is_explained(
        of.world(),
        "default/two",
        Reason::PolicyDenied.word(),
        &json!(false),
    )?;
    web(&of, "one", false)?;
    Kubelet::start(of.world())?.probes()?;
    let to = json!([{ "operation": { "ports": ["80"] } }]);
    let deny = json!({ "action": "DENY", "rules": [{ "to": to }] });
    of.write(&[policy(AUTHORIZATION, deny)])?;
    eventually(|| of.all(&ALL, None))?;
    web(&of, "two", false)?;
    // No client without an identity has a principal.
    let from = json!([{ "source": { "notPrincipals": ["*"] } }]);
    let deny = json!({ "action": "DENY", "rules": [{ "from": from }] });
    of.write(&[policy(AUTHORIZATION, deny)])?;
    eventually(|| of.all(&ALL, REFUSED))?;

    let open = json!({ "80": { "mode": "PERMISSIVE" } });
    let strict = json!({ "mtls": { "mode": "STRICT" }, "portLevelMtls": open });
    of.write(&[policy("PeerAuthentication", strict)])?;
    eventually(|| web(&of, "two", true))?;
    of.all(&ALL, REFUSED)?;
    Kubelet::start(of.world())?.probes()?;
    ensure!(of.denied("PeerAuthentication", "false")? > 0.0, "it counts");
    of.write(&[])?;
    eventually(|| of.all(&ALL, None))
}

/// Two refusals of the policy that denies `one`.
fn is_counted_and_told(of: &Policed) -> Result<()> {
    let world = of.world();
    let failed = || -> Result<f64> {
        let metrics = Metrics::scrape(world.lab.node("node1"))?;
        let labels = [("reporter", "destination"), ("response_flags", "DENY")];
        Ok(metrics.sum("istio_tcp_connections_failed_total", &labels))
    };
    let before = (of.denied(AUTHORIZATION, "false")?, failed()?);
    let arguments = ["monitor", "--hook", "lookup", "-o", "json", "--count", "2"];
    let monitor = world.agent()?.dataplane(arguments);
    let mut monitor = monitor.stdout_piped().spawn()?;
    eventually(|| {
        of.all(&["one"], REFUSED)?;
        ensure!(monitor.try_wait()?.is_some(), "nothing is shown yet");
        Ok(())
    })?;
    for line in monitor.wait()?.lines() {
        let line: Value = serde_json::from_str(line)?;
        let reason = Reason::PolicyDenied.word();
        ensure!(
            line["reason"] == reason && line["hook"] == "lookup",
            "{line}"
        );
        let source = line["source"].as_str().unwrap_or_default();
        ensure!(
            source.contains("::5]:") || source.contains(".1.5:"),
            "{line}"
        );
    }
    let now = (of.denied(AUTHORIZATION, "false")?, failed()?);
    let counted = (now.0 - before.0, now.1 - before.1);
    ensure!(
        counted.0 > 1.5 && (counted.0 - counted.1).abs() < 0.5,
        "{counted:?}"
    );
    let ((), refused) = world.counted(Reason::PolicyDenied, || of.all(&["one"], REFUSED))?;
    ensure!(refused == 2, "{refused} of 2");
    let again = of.denied(AUTHORIZATION, "false")? - now.0;
    ensure!((again - 2.0).abs() < 0.5, "{again} of 2");
    let log = world.agent()?.log();
    let first =
        "a connection to default/app is denied in the kernel: by AuthorizationPolicy default/limit";
    ensure!(log.contains(first), "{log}");
    let unknown = format!("netns:{}", of.host("one").netns());
    for (client, reason, allowed) in [
        ("10.244.1.5", Reason::PolicyDenied.word(), json!(false)),
        ("10.244.1.6", Reason::Direct.word(), json!(true)),
        ("default/two", Reason::Direct.word(), json!(true)),
        (unknown.as_str(), "client-unknown", Value::Null),
    ] {
        is_explained(world, client, reason, &allowed)?;
    }
    let asked = [
        "policies",
        "--workload=default/app",
        "--from=10.244.1.5",
        "--port=7",
    ];
    of.run(&asked)?.says(&[
        "enforced by the kernel",
        "denied by AuthorizationPolicy default/limit, rule 1",
    ])?;
    let status = of.run(&["status"])?.stdout;
    ensure!(
        !status.contains("nothing on this node enforces"),
        "{status}"
    );
    Ok(())
}

/// The decision about a connection to the pod.
fn is_explained(world: &World, client: &str, reason: &str, allowed: &Value) -> Result<()> {
    let told = explain(world, client, TO[0], &[])?;
    let mut decisions = told["capture"].as_array().into_iter().flatten();
    let inbound = decisions.find(|of| of["direction"] == "inbound");
    let inbound = inbound.with_context(|| format!("{told:#}"))?;
    ensure!(
        inbound["reason"] == reason && inbound["allowed"] == *allowed,
        "{client}: {told:#}"
    );
    Ok(())
}

/// Those of other clients go on.
fn a_policy_ends_live_connections_without_a_proxy() -> Result<()> {
    let of = Policed::in_mode("kernel", json!({}))?;
    let hold = |name: &str, to: &str| of.host(name).hold(to);
    let forbidden = [hold("one", TO[0])?, hold("one", TO[1])?];
    let others = [hold("two", TO[0])?, hold("far", TO[1])?];
    of.write(&[policy(AUTHORIZATION, deny_one())])?;
    eventually(|| of.all(&["one"], REFUSED))?;
    are_reset(forbidden)?;
    others.into_iter().try_for_each(lived)
}

/// Connections to an excluded port are neither refused nor ended. A reset of another connection is the sign that the agent has judged all.
fn excluded_ports_are_not_judged() -> Result<()> {
    let excluded = json!({ "traffic.sidecar.istio.io/excludeInboundPorts": "7" });
    let of = Policed::in_mode("kernel", excluded)?;
    let there = "10.244.1.8:8";
    let _server = of.host("app").serve(&["--tcp", there])?;
    let [held, forbidden] = [of.host("one").hold(TO[0])?, of.host("one").hold(there)?];
    let deny = json!({ "action": "DENY", "rules": [{}] });
    of.write(&[policy(AUTHORIZATION, deny)])?;
    eventually(|| web(&of, "one", false))?;
    of.all(&ALL, None)?;
    are_reset([forbidden])?;
    lived(held)
}
