//! Istio's policies, which the agent's proxy enforces for the inbound connections that it carries.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, Process, api::Resource, patience, report::Report};
use serde_json::{Value, json};

use super::{World, explain::explain, istio::Site, list, pod, pod_of, probes::Kubelet};
use crate::{
    cluster::{eventually, fails, lived, reaches},
    metrics::Metrics,
    outcome::{Outcome, run_args},
};

scenarios! {
    Dataplane:
    policies_decide_by_address_and_port,
    a_policy_that_is_only_tried_lets_pass_and_says_so,
    a_policy_ends_the_live_connections_that_it_forbids,
    what_cannot_be_read_allows_nothing,
    until_the_policies_are_read_connections_wait,
}

/// The pod `app`, by both families.
pub(super) const TO: [&str; 2] = ["10.244.1.8:7", "[fd00:10:244:1::8]:7"];
/// Addresses of `one`.
pub(super) const ONE: [&str; 2] = ["10.244.1.5/32", "fd00:10:244:1::5/128"];
pub(super) const AUTHORIZATION: &str = "AuthorizationPolicy";
const DENIED: &str = "dataplane_policy_denied_total";

/// The captured pod `app`, and a file with policies that select it.
pub(super) struct Policed {
    world: World,
    policies: PathBuf,
}

impl Policed {
    /// In the mode `proxy`.
    fn new() -> Result<Self> {
        let of = Self::in_mode("proxy", json!({}))?;
        eventually(|| {
            let all = || of.all(&["one", "two", "far"], None);
            let ((), counted) = of.world.counted(Reason::CapturedInbound, all)?;
            ensure!(counted == 6, "{counted} of 6 were captured");
            Ok(())
        })?;
        Ok(of)
    }

    /// `annotations`: those of the pod. In the mode `kernel`, `two` is captured, too.
    pub fn in_mode(mode: &str, annotations: Value) -> Result<Self> {
        let mut world = World::new()?;
        Kubelet::start(&world)?;
        let pods = world.state.path().join("pods.yaml");
        let mut all = vec![pod("ambient", annotations)];
        if mode == "kernel" {
            all.push(pod_of(world.lab.pod("two"), "ambient", json!({})));
        }
        fs::write(&pods, list(&all).to_string())?;
        let policies = world.state.path().join("policies.yaml");
        fs::write(&policies, list(&[]).to_string())?;
        let config = json!({ "rules": { "mode": mode } });
        world.agent_with(&config, &[pods, policies.clone()])?;
        Ok(Self { world, policies })
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    /// Replaces the policies.
    pub fn write(&self, policies: &[Value]) -> Result<()> {
        Ok(fs::write(&self.policies, list(policies).to_string())?)
    }

    pub fn host(&self, name: &str) -> &Host {
        self.world.lab.pod(name)
    }

    /// By both families, these clients reach port 7, or see this error.
    pub fn all(&self, clients: &[&str], error: Option<&str>) -> Result<()> {
        for (name, to) in clients.iter().flat_map(|name| TO.map(|to| (name, to))) {
            let from = self.host(name);
            match error {
                None => drop(reaches(from, to, "connect", &["app"])?),
                Some(error) => fails(from, to, "connect", error)?,
            }
        }
        Ok(())
    }

    /// The refusals of the policy `limit`.
    pub fn denied(&self, kind: &str, dry_run: &str) -> Result<f64> {
        let policy = format!("{kind} limit");
        let labels = [
            ("namespace", "default"),
            ("policy", &*policy),
            ("dry_run", dry_run),
        ];
        let metrics = Metrics::scrape(self.world.lab.node("node1"))?;
        Ok(metrics.sum(DENIED, &labels))
    }

    pub fn run(&self, arguments: &[&str]) -> Result<Outcome> {
        run_args(self.world.agent()?, arguments)
    }
}

/// A policy named `limit` that selects `app`.
pub(super) fn policy(kind: &str, mut spec: Value) -> Value {
    spec["selector"] = json!({ "matchLabels": { "app": "app" } });
    json!({
        "apiVersion": "security.istio.io/v1",
        "kind": kind,
        "metadata": { "name": "limit", "namespace": "default" },
        "spec": spec,
    })
}

pub(super) fn deny_one() -> Value {
    let from = json!([{ "source": { "ipBlocks": ONE } }]);
    json!({ "action": "DENY", "rules": [{ "from": from }] })
}

fn policies_decide_by_address_and_port() -> Result<()> {
    let of = Policed::new()?;
    let web = |open: bool| {
        let reached = reaches(of.host("two"), "10.244.1.8:80", "http", &["app"]);
        ensure!(reached.is_ok() == open, "port 80: {reached:?}");
        Ok(())
    };
    of.write(&[policy(AUTHORIZATION, deny_one())])?;
    eventually(|| of.all(&["one"], Some("ECONNRESET")))?;
    let before = of.denied(AUTHORIZATION, "false")?;
    of.all(&["one"], Some("ECONNRESET"))?;
    of.all(&["two", "far"], None)?;
    let counted = of.denied(AUTHORIZATION, "false")? - before;
    ensure!((counted - 2.0).abs() < 0.5, "{counted} of 2");
    let told = explain(&of.world, "10.244.1.5", TO[0], &[])?;
    let inbound = &told["capture"][0];
    ensure!(
        inbound["reason"] == Reason::CapturedInbound.word(),
        "{told:#}"
    );
    ensure!(inbound["allowed"] == json!(false), "{told:#}");
    let of_two = explain(&of.world, "10.244.1.6", TO[0], &[])?;
    ensure!(of_two["capture"][0]["allowed"] == json!(true), "{of_two:#}");
    of.run(&[
        "policies",
        "--workload=default/app",
        "--from=fd00:10:244:1::5",
        "--port=7",
    ])?
    .says(&["denied by AuthorizationPolicy default/limit, rule 1"])?;
    let log = of.world.agent()?.log();
    ensure!(
        log.contains("flags=DENY policy=\"AuthorizationPolicy default/limit\""),
        "{log}"
    );
    let status = of.run(&["status"])?.stdout;
    ensure!(
        !status.contains("nothing on this node enforces"),
        "{status}"
    );

    let to = json!([{ "operation": { "ports": ["7"] } }]);
    let allow = json!({ "action": "ALLOW", "rules": [{ "to": to }] });
    of.write(&[policy(AUTHORIZATION, allow)])?;
    eventually(|| of.all(&["one", "two", "far"], None))?;
    eventually(|| web(false))?;

    let open = json!({ "80": { "mode": "PERMISSIVE" } });
    let strict = json!({ "mtls": { "mode": "STRICT" }, "portLevelMtls": open });
    of.write(&[policy("PeerAuthentication", strict)])?;
    eventually(|| of.all(&["one", "two", "far"], Some("ECONNRESET")))?;
    web(true)?;
    Kubelet::start(&of.world)?.probes()?;
    ensure!(of.denied("PeerAuthentication", "false")? > 0.0, "it counts");
    of.write(&[])?;
    eventually(|| of.all(&["one", "two", "far"], None))
}

fn a_policy_that_is_only_tried_lets_pass_and_says_so() -> Result<()> {
    let of = Policed::new()?;
    let mut tried = policy(AUTHORIZATION, deny_one());
    tried["metadata"]["annotations"] = json!({ "istio.io/dry-run": "true" });
    of.write(&[tried])?;
    eventually(|| {
        of.all(&["one"], None)?;
        ensure!(of.denied(AUTHORIZATION, "true")? > 0.0, "it does not count");
        Ok(())
    })?;
    ensure!(of.denied(AUTHORIZATION, "false")?.abs() < 0.5, "it counts");
    of.run(&[
        "policies",
        "--workload=default/app",
        "--from=10.244.1.5",
        "--port=7",
    ])?
    .says(&[
        "AuthorizationPolicy default/limit: DENY (dry run)",
        "dry run: denied by AuthorizationPolicy default/limit, rule 1",
        "allowed: no policy refuses the connection",
    ])?;
    Ok(())
}

/// Those of another client go on.
fn a_policy_ends_the_live_connections_that_it_forbids() -> Result<()> {
    let of = Policed::new()?;
    let hold = |name: &str, to: &str| of.host(name).hold(to);
    let forbidden = [hold("one", TO[0])?, hold("one", TO[1])?];
    let others = [hold("two", TO[0])?, hold("far", TO[1])?];
    let open = || -> Result<f64> {
        let metrics = Metrics::scrape(of.world.lab.node("node1"))?;
        Ok(metrics.sum("dataplane_proxy_connections", &[]))
    };
    // Until the connections from before have ended.
    eventually(|| {
        let now = open()?;
        ensure!((now - 4.0).abs() < 0.5, "{now} are open");
        Ok(())
    })?;
    of.write(&[policy(AUTHORIZATION, deny_one())])?;
    eventually(|| of.all(&["one"], Some("ECONNRESET")))?;
    let start = Instant::now();
    loop {
        let now = open()?;
        if (now - 2.0).abs() < 0.5 {
            break;
        }
        ensure!(
            start.elapsed() < Duration::from_secs(1),
            "{now} connections are open a second after the policy holds"
        );
    }
    are_reset(forbidden)?;
    others.into_iter().try_for_each(lived)
}

/// Checks that these connections of [`Host::hold`] are reset within a second.
pub fn are_reset(connections: impl IntoIterator<Item = Process>) -> Result<()> {
    let start = Instant::now();
    for mut connection in connections {
        while connection.try_wait()?.is_none() {
            let passed = start.elapsed();
            ensure!(passed < patience(Duration::from_secs(1)), "it goes on");
        }
        let report: Report = connection.wait_json()?;
        let count = report.errors.get("ECONNRESET").copied().unwrap_or_default();
        ensure!(count == 1, "it should be reset: {report:?}");
    }
    Ok(())
}

fn what_cannot_be_read_allows_nothing() -> Result<()> {
    let of = Policed::new()?;
    for spec in [
        json!({ "action": "LATER", "rules": [{}] }),
        json!({ "action": "DENY", "rules": [{ "from": [{ "source": { "ipBlocks": ["x"] } }] }] }),
        json!({ "action": "ALLOW", "rules": [{ "from": [{ "source": { "ipBlocks": ["x"] } }] }] }),
    ] {
        of.write(&[policy(AUTHORIZATION, spec.clone())])?;
        let refused = || of.all(&["one", "far"], Some("ECONNRESET"));
        eventually(refused).with_context(|| spec.to_string())?;
        let told = of.run(&["policies", "-o", "json"])?.json()?;
        let warnings = &told[0]["policies"][0]["warnings"];
        let is_named = warnings.as_array().is_some_and(|all| !all.is_empty());
        ensure!(is_named, "{spec}: {told:#}");
        of.write(&[])?;
        eventually(|| of.all(&["one", "far"], None))?;
    }
    Ok(())
}

/// An agent that may not read the policies serves everything else.
fn until_the_policies_are_read_connections_wait() -> Result<()> {
    let mut site = Site::new()?;
    let unread = Some((Resource::AuthorizationPolicies, 403));
    site.server.faults().withhold(unread);
    site.agent("proxy", "warn")?;
    let (app, one) = (site.world.app().clone(), site.world.lab.pod("one").clone());
    let patient = "connect --timeout-ms 20000";
    eventually(|| fails(&one, TO[0], patient, "ECONNRESET"))?;
    fails(&one, TO[1], patient, "ECONNRESET")?;
    reaches(&app, "10.244.2.5:7", "connect", &["far"])?;
    eventually(|| {
        site.names("Istio's policies cannot be read, so the proxy and the kernel refuse")
    })?;
    site.server.faults().withhold(None);
    eventually(|| reaches(&one, TO[1], "connect", &["app"]).map(drop))?;
    reaches(&one, TO[0], "connect", &["app"]).map(drop)
}
