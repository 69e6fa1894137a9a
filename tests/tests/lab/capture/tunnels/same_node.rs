//! Two workloads of one node: through a tunnel, or with attested identities.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Host, Lab, Process, report::Report};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{object, only_tunnels};
use crate::{
    cluster::{ask, eventually, lived, reaches, serve, sources_are},
    manifest::{Manifests, Service},
    metrics::Metrics,
    sockets::tap,
};

/// What leads to `near`: its addresses, and a service.
const TO: [&str; 3] = ["10.244.1.9:80", "[fd00:10:244:1::9]:80", "10.96.0.10:80"];

/// Clients `app` and `other`, and the server `near`, all on node1.
struct World {
    agent: Agent,
    manifests: Manifests,
    /// Whether the Pods have the annotation.
    announced: bool,
    _server: Process,
    _state: TempDir,
    lab: Lab,
}

impl World {
    fn new(same_node: &str, mode: &str, announced: bool) -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", "app", "10.244.1.8")
            .pod("node1", "near", "10.244.1.9")
            .pod("node1", "other", "10.244.1.10")
            .build()?;
        let server = serve(lab.pod("near"))?;
        let manifests = Manifests::new(&[])?;
        let state = tempfile::tempdir()?;
        let directory = state.path().join("ca");
        let mesh = json!({
            "identity": { "source": { "ca": { "directory": directory } } },
            "sameNode": same_node,
            "rules": { "mode": mode },
        });
        let builder = lab.agent("node1").in_the_nodes_cgroup().sockets_only();
        let builder = builder.manifests(manifests.path());
        let agent = builder.args(["--mesh", &mesh.to_string()]).prepare()?;
        let mut world = Self {
            agent,
            manifests,
            announced,
            _server: server,
            _state: state,
            lab,
        };
        world.allow("app")?;
        let init = [Path::new("ca"), Path::new("init"), &directory];
        world.agent.dataplane(init).run()?;
        world.agent.start()?;
        Ok(world)
    }

    /// Writes the objects. Only this client may connect to `near`, and not in plaintext.
    fn allow(&self, client: &str) -> Result<()> {
        self.write(client, true)
    }

    /// As [`World::allow`]. `captured`: whether `near` is.
    fn write(&self, client: &str, captured: bool) -> Result<()> {
        let mut pods = ["app", "near", "other"]
            .map(|name| object(self.lab.pod(name), "node1", captured || name != "near"));
        for pod in pods.iter_mut().filter(|_| !self.announced) {
            pod["metadata"]["annotations"] = json!({});
        }
        let policy = |kind: &str, spec: Value| {
            json!({
                "apiVersion": "security.istio.io/v1", "kind": kind,
                "metadata": { "name": "limit", "namespace": "default" }, "spec": spec,
            })
        };
        let principal = format!("cluster.local/ns/default/sa/{client}");
        let from = json!([{ "source": { "principals": [principal] } }]);
        let policies = [
            policy(
                "AuthorizationPolicy",
                json!({ "rules": [{ "from": from }] }),
            ),
            policy(
                "PeerAuthentication",
                json!({ "mtls": { "mode": "STRICT" } }),
            ),
        ];
        let service = Service::new("web", &["10.96.0.10"]).port("http", 80, 80);
        let service = service.endpoints(&[self.lab.pod("near")]);
        let objects = [&pods[..], &policies[..]].concat();
        Ok(self.manifests.write_with(&[service], &objects)?)
    }

    /// Wants the frames that the node has seen between these Pods. Returns whether they were those of tunnels.
    fn is_tunnelled(&self, taps: &[std::os::fd::OwnedFd]) -> Result<bool> {
        let ends = ["app", "near"].map(|name| self.lab.pod(name).addresses()[0]);
        Ok(only_tunnels(taps, &ends)? > 0)
    }

    fn opened(&self, security: &str) -> Result<f64> {
        let metrics = Metrics::scrape(self.lab.node("node1"))?;
        let principal = |account| format!("spiffe://cluster.local/ns/default/sa/{account}");
        let (app, near) = (principal("app"), principal("near"));
        let labels = |reporter| {
            [
                ("reporter", reporter),
                ("connection_security_policy", security),
                ("source_principal", &*app),
                ("destination_principal", &*near),
            ]
        };
        let sides = ["source", "destination"]
            .map(|reporter| metrics.sum("istio_tcp_connections_opened_total", &labels(reporter)));
        ensure!((sides[0] - sides[1]).abs() < 0.5, "{security}: {sides:?}");
        Ok(sides[0])
    }
}

/// The application sees the client's address, the policies decide by the client's identity, and a changed policy ends the live
/// connection. With `attest`, nothing is on the wire.
pub fn two_workloads_of_a_node_need_no_tunnel_with_attest() -> Result<()> {
    for (same_node, mode) in [("tunnel", "proxy"), ("attest", "proxy"), ("attest", "auto")] {
        let is_attested = same_node == "attest";
        let world = World::new(same_node, mode, true)?;
        let [app, other] = ["app", "other"].map(|name| world.lab.pod(name));
        eventually(|| reaches(app, TO[0], "http", &["near"]).map(drop))?;
        let taps = [tap(world.lab.node("node1"))?];
        for to in TO {
            let report = reaches(app, to, "http --count 5", &["near"])?;
            sources_are(&report, &app.addresses())?;
            let report = ask(other, to, "http")?;
            ensure!(report.answered == 0, "{to}: {report:?}");
        }
        let is_tunnelled = world.is_tunnelled(&taps)?;
        ensure!(is_tunnelled != is_attested, "{same_node}: {is_tunnelled}");
        let told = world
            .agent
            .dataplane(["explain", "default/app", TO[2]])
            .run()?;
        let said = "10.244.1.9:80 is on this node: mesh.sameNode is attest";
        ensure!(told.contains(said) == is_attested, "{told}");
        let (opened, none) = if is_attested {
            ("attested", "mutual_tls")
        } else {
            ("mutual_tls", "attested")
        };
        let counts = [world.opened(opened)?, world.opened(none)?];
        ensure!(
            counts[0] >= 16.0 && counts[1] == 0.0,
            "{same_node}: {counts:?}"
        );
        let log = world.agent.log();
        ensure!(log.contains(" security=attested ") == is_attested, "{log}");
        // After the metrics, which go over the node's loopback interface in plaintext.
        let taps = [tap(world.lab.node("node1"))?];
        let held = app.hold("10.244.1.9:7")?;
        reaches(app, TO[0], "http --count 5", &["near"])?;
        lived(held)?;
        let mut forbidden = app.hold("10.244.1.9:7")?;
        world.allow("other")?;
        eventually(|| reaches(other, TO[0], "http", &["near"]).map(drop))?;
        let report = ask(app, TO[0], "http")?;
        ensure!(report.answered == 0, "{report:?}");
        let is_tunnelled = world.is_tunnelled(&taps)?;
        ensure!(is_tunnelled != is_attested, "{same_node}: {is_tunnelled}");
        eventually(|| {
            let metrics = Metrics::scrape(world.lab.node("node1"))?;
            let open = metrics.sum("dataplane_proxy_connections", &[]);
            ensure!(open < 0.5, "{same_node}: {open} are open");
            Ok(())
        })?;
        forbidden.close_stdin();
        let report: Report = forbidden.wait_json()?;
        ensure!(report.errors.contains_key("ECONNRESET"), "{report:?}");
    }
    Ok(())
}

/// Runs `work` while a client sends one request after the other.
fn while_asking(app: &Host, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // It may fail while no agent runs.
                let _ = ask(app, TO[2], "http --timeout-ms 500");
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    })
}

/// `near` has no annotation, and accepts no plaintext. No connection is in plaintext while one agent follows another, or while none
/// runs.
pub fn pods_of_a_node_need_no_annotation() -> Result<()> {
    for mode in ["proxy", "auto"] {
        let mut world = World::new("tunnel", mode, false)?;
        let app = world.lab.pod("app").clone();
        let reached = || -> Result<()> {
            for to in TO {
                reaches(&app, to, "http", &["near"]).with_context(|| to.to_owned())?;
            }
            Ok(())
        };
        eventually(reached)?;
        let taps = [tap(world.lab.node("node1"))?];
        reached()?;
        ensure!(world.is_tunnelled(&taps)?, "{mode}: no tunnel");
        while_asking(&app, || {
            let before = world.agent.replace()?;
            reached().context("after a replacement")?;
            before.wait().context("an agent that was replaced")?;
            world.agent.kill();
            let report = ask(&app, TO[0], "http")?;
            ensure!(report.answered == 0, "{mode}: {report:?}");
            world.agent.start()?;
            eventually(reached).context("after a start")
        })?;
        ensure!(world.is_tunnelled(&taps)?, "{mode}: no tunnel");
        eventually(|| {
            let status = world.agent.status()?;
            let status = String::from_utf8_lossy(&status.stdout).into_owned();
            let words: Vec<&str> = status.split_whitespace().collect();
            let warning = "connections of other nodes to captured Pods without the annotation";
            ensure!(words.join(" ").contains(warning), "{status}");
            Ok(())
        })?;
        world.write("app", false)?;
        eventually(|| {
            let taps = [tap(world.lab.node("node1"))?];
            reached()?;
            ensure!(world.is_tunnelled(&taps).is_err(), "{mode}: no plaintext");
            Ok(())
        })?;
    }
    Ok(())
}
