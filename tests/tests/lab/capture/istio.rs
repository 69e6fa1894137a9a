//! Istio's objects that limit connections, and that nothing here enforces: `status` names them, and
//! `mesh.unsupported: deny` refuses the connections.

use std::{fs, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    Host,
    api::{ApiServer, Cluster as Objects, Options, Resource, objects},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{World, explain::explain, packets, probes::Kubelet};
use crate::{
    cluster::{UDP, eventually, reaches, refused},
    outcome::run_args,
};

scenarios! {
    Dataplane:
    services_with_a_waypoint_are_named_and_refused,
    services_with_a_waypoint_are_refused_to_machines,
    connections_to_pods_that_policies_select_are_refused,
}

/// An API server on the other node, whose objects the agent reads.
pub(super) struct Site {
    pub world: World,
    pub server: ApiServer,
    directory: TempDir,
    captured_by: &'static str,
}

impl Site {
    pub fn new() -> Result<Self> {
        Self::of(World::new()?, "sockets")
    }

    fn of(world: World, captured_by: &'static str) -> Result<Self> {
        let cluster = Objects::default();
        cluster.install_istio(Some("v1"));
        let node = world.lab.node("node1").ipv4();
        cluster.apply(objects::node("node1", "zone-a", &[node.into()]));
        let mut app = objects::pod("app", "node1", &world.app().addresses());
        app["metadata"]["labels"]["istio.io/dataplane-mode"] = "ambient".into();
        cluster.apply(app);
        let outside = world.lab.node("node2").clone();
        let address = SocketAddr::from((outside.ipv4(), 6443));
        let options = Options {
            certified: Some(vec![outside.ipv4().to_string()]),
            ..Options::default()
        };
        let server = ApiServer::bind(cluster, options, Box::new(move || outside.listen(address)))?;
        let directory = tempfile::tempdir()?;
        Ok(Self {
            world,
            server,
            directory,
            captured_by,
        })
    }

    /// Starts the agent anew, in the place of the one before.
    pub fn agent(&mut self, mode: &str, unsupported: &str) -> Result<()> {
        self.world.agent = None;
        let kubeconfig = self.server.kubeconfig(self.directory.path())?;
        let file = self.directory.path().join("dataplane.yaml");
        let config = json!({
            "source": { "kubernetes": { "kubeconfig": kubeconfig } },
            "mesh": {
                "rules": { "mode": mode, "capturedBy": self.captured_by },
                "unsupported": unsupported,
            },
        });
        fs::write(&file, config.to_string())?;
        let agent = self.world.lab.agent("node1").in_the_nodes_cgroup();
        let agent = agent.args(["--config".as_ref(), file.as_os_str()]);
        self.world.agent = Some(agent.start()?);
        Ok(())
    }

    /// Writes a Service that leads to `far`, with this label.
    fn service(&self, name: &str, vip: &str, waypoint: &str) -> Result<()> {
        let far = self.world.lab.pod("far").addresses()[0];
        let mut service = objects::service(name, vip.parse()?);
        service["metadata"]["labels"]["istio.io/use-waypoint"] = waypoint.into();
        let endpoints = [objects::endpoint(far, "node2")];
        let slice = objects::slice(name, &format!("{name}-1"), 7, &endpoints);
        self.server.cluster().apply_all([service, slice]);
        Ok(())
    }

    pub fn names(&self, what: &str) -> Result<()> {
        let text = run_args(self.world.agent()?, ["status"])?.stdout;
        let words: Vec<&str> = text.split_whitespace().collect();
        ensure!(words.join(" ").contains(what), "{what}: {text}");
        Ok(())
    }
}

/// Of captured workloads only, and TCP only.
fn services_with_a_waypoint_are_named_and_refused() -> Result<()> {
    let mut site = Site::new()?;
    let (app, one) = (site.world.app().clone(), site.world.lab.pod("one").clone());
    let (gated, free) = ("10.96.0.30:80", "10.96.0.31:80");
    site.service("free", "10.96.0.31", "none")?;
    for mode in ["kernel", "proxy"] {
        site.service("gated", "10.96.0.30", "gate")?;
        site.agent(mode, "warn")?;
        eventually(|| reaches(&app, gated, "connect", &["far"]).map(drop))?;
        eventually(|| site.names("of namespace default limit connections"))?;
        site.names("Service gated")?;
        site.agent(mode, "deny")?;
        eventually(|| refused(&app, gated, "connect"))?;
        let world = &site.world;
        let ((), counted) =
            world.counted(Reason::Unsupported, || refused(&app, gated, "connect"))?;
        ensure!(counted == 1, "{mode}: {counted}");
        let told = explain(world, "default/app", gated, &[])?;
        ensure!(told["reason"] == Reason::Unsupported.word(), "{told:#}");
        // Other clients, other Services, and the endpoint without its Service.
        for (from, to) in [(&one, gated), (&app, free), (&app, "10.244.2.5:7")] {
            reaches(from, to, "connect", &["far"]).with_context(|| format!("{mode} {to}"))?;
        }
        site.names("Service gated")?;
        site.service("gated", "10.96.0.30", "none")?;
        eventually(|| reaches(&app, gated, "connect", &["far"]).map(drop))?;
    }
    Ok(())
}

/// The node sees a virtual machine's packets. No program sees the connections to it, which `status` says.
fn services_with_a_waypoint_are_refused_to_machines() -> Result<()> {
    let mut site = Site::of(packets::world()?, "packets")?;
    let (app, one) = (site.world.app().clone(), site.world.lab.pod("one").clone());
    let (gated, free) = ("10.96.0.30:80", "10.96.0.31:80");
    site.service("gated", "10.96.0.30", "gate")?;
    site.service("free", "10.96.0.31", "none")?;
    let spec = json!({ "mtls": { "mode": "STRICT" } });
    let strict = json!({
        "kind": "PeerAuthentication", "metadata": { "name": "limit" }, "spec": spec,
    });
    site.server.cluster().apply(strict);
    for mode in ["kernel", "proxy"] {
        site.agent(mode, "deny")?;
        eventually(|| refused(&app, gated, "connect"))?;
        let world = &site.world;
        let ((), counted) =
            world.counted(Reason::Unsupported, || refused(&app, gated, "connect"))?;
        // A refusal may be counted twice, as other refusals by packets.
        ensure!(counted >= 1, "{mode}: {counted}");
        let told = explain(world, "default/app", gated, &[])?;
        ensure!(told["reason"] == Reason::Unsupported.word(), "{told:#}");
        for (from, to, by) in [
            (&one, gated, "far"),
            (&app, free, "far"),
            (&app, "10.244.2.5:7", "far"),
            (&one, "10.244.1.8:7", "app"),
        ] {
            reaches(from, to, "connect", &[by]).with_context(|| format!("{mode} {to}"))?;
        }
        let said = "deny does not refuse them, because the Pod is captured by its packets";
        eventually(|| site.names(said))?;
    }
    Ok(())
}

/// A PeerAuthentication with an exempt port, an AuthorizationPolicy, and policies that cannot be read.
fn connections_to_pods_that_policies_select_are_refused() -> Result<()> {
    let mut site = Site::new()?;
    Kubelet::start(&site.world)?;
    let app = site.world.app().clone();
    let clients = ["one", "far"].map(|name| site.world.lab.pod(name).clone());
    let to = ["10.244.1.8:7", "[fd00:10:244:1::8]:7"];
    let all = |check: fn(&Host, &str) -> Result<()>| {
        let mut all = clients.iter().flat_map(|from| to.map(|to| (from, to)));
        all.try_for_each(|(from, to)| check(from, to))
    };
    let is_open = || all(|from, to| reaches(from, to, "connect", &["app"]).map(drop));
    let is_refused = || all(|from, to| refused(from, to, "connect"));
    let policy = |kind: &str, mut spec: Value| {
        spec["selector"] = json!({ "matchLabels": { "app": "app" } });
        json!({ "kind": kind, "metadata": { "name": "limit" }, "spec": spec })
    };
    let ports = json!({ "80": { "mode": "PERMISSIVE" } });
    let strict = json!({ "mtls": { "mode": "STRICT" }, "portLevelMtls": ports });
    let denies = json!({ "action": "DENY", "rules": [{}] });
    // The kernel enforces the policies, and refuses what nothing evaluates.
    let mode = "kernel";
    site.agent(mode, "deny")?;
    eventually(is_open)?;
    let custom = json!({ "action": "CUSTOM", "provider": { "name": "x" }, "rules": [{}] });
    for (kind, spec, resource, has_open_port, reason) in [
        (
            "PeerAuthentication",
            &strict,
            Resource::PeerAuthentications,
            true,
            Reason::PolicyDenied,
        ),
        (
            "AuthorizationPolicy",
            &denies,
            Resource::AuthorizationPolicies,
            false,
            Reason::PolicyDenied,
        ),
        (
            "AuthorizationPolicy",
            &custom,
            Resource::AuthorizationPolicies,
            false,
            Reason::Unsupported,
        ),
    ] {
        let what = || format!("{mode} {kind}");
        site.server.cluster().apply(policy(kind, spec.clone()));
        eventually(is_refused).with_context(what)?;
        let ((), counted) = site.world.counted(reason, is_refused)?;
        ensure!(counted == 4, "{}: {counted}", what());
        if reason == Reason::Unsupported {
            site.names(&format!("{kind} limit"))?;
        }
        Kubelet::start(&site.world)?.probes().with_context(what)?;
        let told = explain(&site.world, "10.244.1.5", to[0], &[])?;
        let said = &told["capture"][0]["reason"];
        ensure!(*said == reason.word(), "{told:#}");
        let http = reaches(&clients[0], "10.244.1.8:80", "http", &["app"]);
        ensure!(http.is_ok() == has_open_port, "{}: {http:?}", what());
        // Datagrams, its own connections, and those to itself.
        let datagrams = format!("10.244.1.8:{UDP}");
        reaches(&clients[0], &datagrams, "udp", &["app"]).with_context(what)?;
        reaches(&app, "10.244.2.5:7", "connect", &["far"]).with_context(what)?;
        reaches(&app, "10.244.1.8:7", "connect", &["app"]).with_context(what)?;
        site.server.cluster().delete(resource, "default", "limit");
        eventually(is_open).with_context(what)?;
    }
    // An agent that cannot read the policies serves, and refuses the connections that the policies may limit.
    let unread = Some((Resource::AuthorizationPolicies, 403));
    site.server.faults().withhold(unread);
    site.agent(mode, "warn")?;
    eventually(is_refused)?;
    site.names("Istio's policies cannot be read")?;
    reaches(&app, "10.244.2.5:7", "connect", &["far"])?;
    site.server.faults().withhold(None);
    eventually(is_open)
}
