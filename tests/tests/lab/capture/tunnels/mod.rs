//! Encrypted connections: two nodes, an agent on each, and nothing on the wire but port 15008.

mod auto;
mod gate;
mod looking;
mod same_node;
mod sandwich;
mod waypoints;

use std::{net::IpAddr, path::Path};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Host, Lab, Process};
use serde_json::{Value, json};
use tempfile::TempDir;

use self::{
    auto::{
        auto_leads_plaintext_to_the_proxy_if_a_policy_selects_the_pod,
        auto_tunnels_only_what_speaks_hbone, no_flip_of_a_slice_sends_plaintext,
    },
    looking::{istioctl_reads_the_dump, monitor_shows_what_the_proxy_refuses},
    same_node::{
        pods_of_a_node_need_no_annotation, two_workloads_of_a_node_need_no_tunnel_with_attest,
    },
    sandwich::a_captured_waypoint_learns_the_client_by_a_proxy_header,
    waypoints::{
        a_waypoint_that_cannot_be_used_is_passed_only_by_the_operators_word,
        an_entry_accepts_further_identities_of_its_endpoints,
        connections_to_a_service_go_to_its_waypoint,
    },
};
use super::pod_of;
use crate::{
    cluster::{ask, eventually, lived, reaches, serve},
    manifest::{Manifests, Service},
    sockets::{arrived, tap},
};

scenarios! {
    Dataplane:
    connections_between_nodes_are_encrypted,
    another_root_is_refused,
    without_the_other_agent_it_is_refused,
    tunnels_survive_another_agent,
    status_names_pods_that_nothing_announces,
    auto_tunnels_only_what_speaks_hbone,
    auto_leads_plaintext_to_the_proxy_if_a_policy_selects_the_pod,
    connections_to_a_service_go_to_its_waypoint,
    a_waypoint_that_cannot_be_used_is_passed_only_by_the_operators_word,
    an_entry_accepts_further_identities_of_its_endpoints,
    a_captured_waypoint_learns_the_client_by_a_proxy_header,
    no_flip_of_a_slice_sends_plaintext,
    two_workloads_of_a_node_need_no_tunnel_with_attest,
    pods_of_a_node_need_no_annotation,
    monitor_shows_what_the_proxy_refuses,
    istioctl_reads_the_dump,
}

/// Plaintext that each request of `probe http` has.
const PLAINTEXT: &[u8] = b"HTTP/1.1";
const HBONE: u16 = 15008;

/// A client `app` on node1; `far` on node2, which speaks HBONE, and `plain`, which does not.
struct World {
    mesh: Value,
    agents: Vec<Agent>,
    manifests: Manifests,
    _servers: Vec<Process>,
    state: TempDir,
    lab: Lab,
}

fn object(of: &Host, node: &str, is_captured: bool) -> Value {
    let (mode, annotations) = if is_captured {
        let speaks_hbone = json!({ "ambient.istio.io/redirection": "enabled" });
        ("ambient", speaks_hbone)
    } else {
        ("none", json!({}))
    };
    let mut object = pod_of(of, mode, annotations);
    object["spec"]["nodeName"] = node.into();
    object["spec"]["serviceAccountName"] = of.name().into();
    object
}

impl World {
    /// Runs an agent on each node, in the mode `proxy`. `authorities`: the directories of their authorities, which are made.
    fn new(authorities: [&str; 2]) -> Result<Self> {
        Self::with(authorities, &json!({ "mode": "proxy" }))
    }

    /// As [`World::new`], with these rules for all workloads.
    fn with(authorities: [&str; 2], rules: &Value) -> Result<Self> {
        Self::with_mesh(authorities, json!({ "rules": rules }))
    }

    /// As [`World::new`], with these settings of the mesh.
    fn with_mesh(authorities: [&str; 2], mesh: Value) -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .node("node2")
            .pod("node1", "app", "10.244.1.8")
            .pod("node2", "far", "10.244.2.5")
            .pod("node2", "plain", "10.244.2.6")
            .build()?;
        let servers = ["far", "plain"].map(|name| serve(lab.pod(name)));
        let servers = servers.into_iter().collect::<Result<_>>()?;
        let manifests = Manifests::new(&[])?;
        let mut world = Self {
            mesh,
            agents: Vec::new(),
            manifests,
            _servers: servers,
            state: tempfile::tempdir()?,
            lab,
        };
        world.write(true, &[])?;
        for (node, authority) in ["node1", "node2"].into_iter().zip(authorities) {
            let agent = world.agent(node, authority)?;
            world.agents.push(agent);
        }
        Ok(world)
    }

    /// Writes the services `web` of `far` and `bare` of `plain`, the Pods and other objects. `announced`: whether `far` has the
    /// annotation.
    fn write(&self, announced: bool, others: &[Value]) -> Result<()> {
        let pod = |name: &str| self.lab.pod(name);
        let mut far = object(pod("far"), "node2", true);
        if !announced {
            far["metadata"]["annotations"] = json!({});
        }
        let app = object(pod("app"), "node1", true);
        let pods = [app, far, object(pod("plain"), "node2", false)];
        let service = |name, ip, endpoint| {
            let service = Service::new(name, &[ip]).port("http", 80, 80);
            let service = service.port("tcp", 7, 7);
            service.endpoints(&[pod(endpoint)])
        };
        let web = service("web", "10.96.0.10", "far");
        let bare = service("bare", "10.96.0.11", "plain");
        let objects = [&pods, others].concat();
        Ok(self.manifests.write_with(&[web, bare], &objects)?)
    }

    fn agent(&self, node: &str, authority: &str) -> Result<Agent> {
        let directory = self.state.path().join(authority);
        let mut mesh = self.mesh.clone();
        mesh["identity"] = json!({ "source": { "ca": { "directory": directory } } });
        let builder = self.lab.agent(node).in_the_nodes_cgroup().sockets_only();
        let builder = builder.manifests(self.manifests.path());
        let mut agent = builder.args(["--mesh", &mesh.to_string()]).prepare()?;
        if !directory.exists() {
            let init = [Path::new("ca"), Path::new("init"), directory.as_path()];
            agent.dataplane(init).run()?;
        }
        agent.start()?;
        Ok(agent)
    }

    fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    /// As [`only_tunnels`], between `app` and `far`.
    fn only_tunnels(&self, taps: &[std::os::fd::OwnedFd]) -> Result<usize> {
        let ends = [self.app(), self.lab.pod("far")].map(|host| host.addresses()[0]);
        only_tunnels(taps, &ends)
    }

    fn taps(&self) -> Result<Vec<std::os::fd::OwnedFd>> {
        let nodes = ["node1", "node2"].map(|node| tap(self.lab.node(node)));
        nodes.into_iter().collect()
    }

    /// Wants a request to fail, and nothing of it in plaintext on the wire.
    fn is_refused(&self) -> Result<()> {
        let taps = self.taps()?;
        for to in ["10.244.2.5:80", "10.96.0.10:80"] {
            let report = ask(self.app(), to, "http")?;
            ensure!(report.answered == 0, "{to}: {report:?}");
            self.only_tunnels(&taps)?;
        }
        Ok(())
    }
}

/// Wants frames of nodes to show no plaintext, and nothing between these addresses but tunnels. Returns the number of packets
/// of tunnels, over IPv4.
pub fn only_tunnels(taps: &[std::os::fd::OwnedFd], ends: &[IpAddr]) -> Result<usize> {
    let mut tunnelled = 0;
    for frame in taps.iter().flat_map(arrived) {
        ensure!(!has(&frame, PLAINTEXT), "plaintext on the wire: {frame:?}");
        let Some((from, to, ports)) = tcp(&frame) else {
            continue;
        };
        if ends.contains(&from) && ends.contains(&to) {
            ensure!(ports.contains(&HBONE), "{from} to {to}: {ports:?}");
            tunnelled += 1;
        }
    }
    Ok(tunnelled)
}

fn has(frame: &[u8], pattern: &[u8]) -> bool {
    frame.windows(pattern.len()).any(|part| part == pattern)
}

/// The addresses and ports of a frame with TCP over IPv4.
fn tcp(frame: &[u8]) -> Option<(IpAddr, IpAddr, [u16; 2])> {
    const ETHERNET: usize = 14;
    let packet = frame.get(ETHERNET..)?;
    if frame.get(12..14)? != [8, 0] || *packet.get(9)? != 6 {
        return None;
    }
    let address = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
        Some(bytes.into())
    };
    let header = usize::from(packet.first()? & 0xf) * 4;
    let port = |at: usize| -> Option<u16> {
        let bytes = packet.get(header + at..header + at + 2)?;
        Some(u16::from_be_bytes(bytes.try_into().ok()?))
    };
    Some((address(12)?, address(16)?, [port(0)?, port(2)?]))
}

/// As the taps see it: plaintext to a pod that does not speak HBONE, and tunnels to the other one.
fn connections_between_nodes_are_encrypted() -> Result<()> {
    let world = World::new(["ca", "ca"])?;
    let taps = world.taps()?;
    reaches(world.app(), "10.244.2.6:80", "http", &["plain"])?;
    let seen = taps.iter().flat_map(arrived);
    let seen = seen.filter(|frame| has(frame, PLAINTEXT)).count();
    ensure!(seen > 0, "the taps do not see plaintext");
    for to in ["10.244.2.5:80", "10.96.0.10:80"] {
        let report = reaches(world.app(), to, "http --count 5", &["far"])?;
        let sources: Vec<_> = report.endpoints["far"].sources.keys().collect();
        let own = world.app().addresses();
        ensure!(
            sources.iter().all(|source| own.contains(source)),
            "{to}: the application saw {sources:?}"
        );
        ensure!(
            world.only_tunnels(&taps)? > 0,
            "{to}: no tunnel on the wire"
        );
    }
    for (agent, name, peer) in [
        (&world.agents[0], "app", "far"),
        (&world.agents[1], "far", "app"),
    ] {
        let certs: Value = agent.dataplane(["certs", "-o", "json"]).json()?;
        let all = certs["certificates"].as_array().context("a list")?;
        let identity = format!("spiffe://cluster.local/ns/default/sa/{name}");
        ensure!(
            all.len() == 1 && all[0]["identity"] == identity && all[0]["overdue"] == false,
            "{certs}"
        );
        let status = agent.dataplane(["status", "-o", "json"]).output()?;
        let status: Value = serde_json::from_slice(&status.stdout)?;
        let tunnels = &status["agent"]["tunnels"];
        let direction = if name == "app" { "outbound" } else { "inbound" };
        ensure!(
            tunnels[0]["workload"] == format!("default/{name}")
                && tunnels[0][direction].as_u64() > Some(0)
                && tunnels[0]["peers"]
                    == json!([format!("spiffe://cluster.local/ns/default/sa/{peer}")]),
            "{tunnels}"
        );
        let line = format!(" peer=spiffe://cluster.local/ns/default/sa/{peer} ");
        eventually(|| {
            let log = agent.log();
            ensure!(log.contains(&line), "the log lacks {line}: {log}");
            Ok(())
        })?;
    }
    Ok(())
}

fn another_root_is_refused() -> Result<()> {
    let world = World::new(["ca", "other"])?;
    world.is_refused()?;
    let log = world.agents[0].log();
    ensure!(log.contains("flags=TLS_FAILURE"), "{log}");
    // Pods that do not speak HBONE are reached as before.
    reaches(world.app(), "10.244.2.6:80", "http", &["plain"])?;
    Ok(())
}

fn without_the_other_agent_it_is_refused() -> Result<()> {
    let mut world = World::new(["ca", "ca"])?;
    reaches(world.app(), "10.244.2.5:80", "http", &["far"])?;
    world.agents[1].kill();
    world.is_refused()?;
    let log = world.agents[0].log();
    ensure!(log.contains("flags=CONNECT"), "{log}");
    Ok(())
}

/// Streams of before go on, and new ones reach the successor.
fn tunnels_survive_another_agent() -> Result<()> {
    let mut world = World::new(["ca", "ca"])?;
    let app = world.app().clone();
    for of in [1, 0] {
        let held = app.hold("10.244.2.5:7")?;
        let before = world.agents[of].replace()?;
        let taps = world.taps()?;
        reaches(&app, "10.244.2.5:80", "http --count 5", &["far"])?;
        ensure!(world.only_tunnels(&taps)? > 0, "no tunnel on the wire");
        lived(held)?;
        before.wait().context("an agent that was replaced")?;
    }
    Ok(())
}

/// The manifests lack the annotation, and nothing else writes it.
fn status_names_pods_that_nothing_announces() -> Result<()> {
    let world = World::new(["ca", "ca"])?;
    let warned = |wanted: bool| {
        eventually(|| {
            let status = world.agents[0].status()?;
            let status = String::from_utf8_lossy(&status.stdout).into_owned();
            let words: Vec<&str> = status.split_whitespace().collect();
            let named = "are in plaintext, such as to default/app,";
            let is_named = words.join(" ").contains(named);
            ensure!(is_named == wanted, "{status}");
            Ok(())
        })
    };
    reaches(world.app(), "10.244.2.5:80", "http", &["far"])?;
    warned(false)?;
    let mut pod = object(world.app(), "node1", true);
    pod["metadata"]["annotations"] = json!({});
    world.manifests.write_with(&[], &[pod])?;
    warned(true)
}
