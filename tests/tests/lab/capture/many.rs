//! Many pods, at one time and one after the other.

#![expect(
    clippy::cast_precision_loss,
    reason = "counts of pods, files and connections are small; metrics are floating-point numbers"
)]

use std::{
    env, fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Lab, report::KeepReport};
use serde_json::{Value, json};

use super::{World, pod};
use crate::{
    cluster::{eventually, reaches, serve},
    manifest::Manifests,
    metrics::Metrics,
    outcome::run,
};

scenarios! {
    Dataplane:
    pods_and_connections_share_the_open_files_that_there_are,
    pods_that_come_and_go_leave_counts_and_no_memory,
}

/// How many: `default`, unless a variable of the environment asks for more.
pub fn number(variable: &str, default: usize) -> Result<usize> {
    match env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable}={text}")),
        Err(_) => Ok(default),
    }
}

/// A pod as Kubernetes has it, of a Deployment.
fn replica(name: &str, deployment: &str, address: &str) -> Value {
    let mut object = pod("ambient", json!({}));
    object["metadata"]["name"] = name.into();
    object["metadata"]["labels"]["app"] = deployment.into();
    object["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "batch/v1", "kind": "Job", "name": deployment, "uid": "1", "controller": true,
    }]);
    object["status"]["podIPs"] = json!([{ "ip": address }]);
    object
}

/// There are many pods. The agent may open fewer files than the pods and all connections need, and one pod opens more
/// connections than these files allow. The agent still answers, serves the other pods, and captures a new pod.
/// `DATAPLANE_MANY_PODS=250` for more pods.
fn pods_and_connections_share_the_open_files_that_there_are() -> Result<()> {
    const CONNECTIONS: usize = 60;
    let count = number("DATAPLANE_MANY_PODS", 20)?;
    let name = |n: usize| format!("pod{n}");
    let address = |n: usize| format!("10.244.1.{}", n + 1);
    let mut builder = Lab::builder().node("node1");
    for n in 1..=count {
        builder = builder.pod("node1", &name(n), &address(n));
    }
    let lab = builder.pod("node1", "server", "10.244.1.254").build()?;
    let _server = serve(lab.pod("server"))?;
    let manifests = Manifests::new(&[])?;
    let state = tempfile::tempdir()?;
    let pods = state.path().join("pods.yaml");
    let write = |count: usize| -> Result<()> {
        let all = (1..=count).map(|n| replica(&name(n), "web", &address(n)));
        let all: Vec<Value> = all.collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": all });
        let new = pods.with_extension("new");
        fs::write(&new, list.to_string())?;
        Ok(fs::rename(new, &pods)?)
    };
    write(count - 1)?;
    // The files that the agent reserves, and the most that a pod uses.
    let files = 256 + 16 * count + 2 * CONNECTIONS;
    let mesh = json!({ "rules": { "mode": "proxy" }, "proxy": { "accessLog": "off" } });
    let mut agent = lab
        .agent("node1")
        .in_the_nodes_cgroup()
        .open_files(256, files)
        .manifests(manifests.path())
        .manifests(&pods)
        .args(["--mesh", &mesh.to_string()])
        .prepare()?;
    agent.launch()?;
    // As many pods as are ready in time as a rule, and then some.
    for _ in 0..count / 30 {
        if agent.wait_until_ready().is_ok() {
            break;
        }
    }
    agent.wait_until_ready()?;
    let first = lab.pod("pod1");
    reaches(first, "10.244.1.254:7", "connect", &["server"])?;
    let flood = first.probe("keep").args(["--slow", "--count", "600"]);
    let flood = flood.args(["--to", "10.244.1.254:7"]);
    let mut flood = flood.stdin_piped().stdout_piped().spawn()?;
    let report: KeepReport = serde_json::from_str(&flood.wait_for_line()?)?;
    ensure!(report.alive == 600, "{report:?}");
    let scrape = || Metrics::scrape(lab.node("node1"));
    let is_full = |pods: usize| {
        let most = CONNECTIONS + 8 * (count - pods);
        eventually(|| {
            let now = scrape()?;
            let connections = now.sum("dataplane_proxy_connections", &[]);
            let max = now.sum("dataplane_proxy_connections_max", &[]);
            ensure!((max - most as f64).abs() < 0.5, "{max} of {most}");
            // All except the part that is left for other pods.
            let share = (CONNECTIONS * 4 / 5) as f64;
            ensure!(connections >= share && connections < max, "{connections}");
            let deferred = now.sum("dataplane_proxy_deferred_total", &[("pod", "pod1")]);
            ensure!(deferred > 0.0, "nobody counts what waits");
            let limit = now.sum("dataplane_open_files_max", &[]);
            ensure!((limit - files as f64).abs() < 0.5, "{limit} of {files}");
            let open = now.sum("dataplane_open_files", &[]);
            ensure!(open > 0.0 && open < limit, "{open} of {limit}");
            Ok(())
        })
    };
    is_full(count - 1)?;
    // Other pods are served meanwhile, and `status` shows the operator which pod has so many.
    for _ in 0..20 {
        reaches(lab.pod("pod2"), "10.244.1.254:7", "connect", &["server"])?;
    }
    run(&agent, "status")?
        .exits(0)?
        .says(&["default/pod1 has ", "which is its share"])?;
    // Another pod.
    write(count)?;
    let last = name(count);
    eventually(|| {
        run(&agent, "status")?.exits(0)?.says(&[&last]).map(drop)?;
        let now = scrape()?;
        let problems = now.sum("dataplane_mesh_workload_problem", &[]);
        ensure!(problems < 0.5, "{problems}: {}", agent.log());
        let workloads = now.sum("dataplane_proxy_workloads", &[]);
        ensure!((workloads - count as f64).abs() < 0.5, "{workloads}");
        Ok(())
    })?;
    is_full(count)?;
    drop(flood);
    eventually(|| reaches(lab.pod(&last), "10.244.1.254:7", "connect", &["server"]).map(drop))?;
    let log = agent.log();
    ensure!(!log.contains("Too many open files"), "{log}");
    Ok(())
}

/// The names of the agent's workloads, from the agent alone: `dataplane status` also reads all of the kernel's state.
pub fn workloads(agent: &Agent) -> Result<Vec<String>> {
    let mut socket = UnixStream::connect(agent.socket())?;
    socket.write_all(b"GET /mesh HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    let page: Value = serde_json::from_str(body).with_context(|| answer.clone())?;
    let items = page["items"].as_array().into_iter().flatten();
    let names = items.filter_map(|workload| workload["name"].as_str());
    Ok(names.map(str::to_owned).collect())
}

/// Pods of one Deployment and of Jobs, each there for a moment. `DATAPLANE_CHURN_ROUNDS=1440`: a day of a
/// pod a minute.
fn pods_that_come_and_go_leave_counts_and_no_memory() -> Result<()> {
    /// How much an agent may grow after the first quarter, in KiB.
    const FLAT: u64 = 8 << 10;
    let rounds = number("DATAPLANE_CHURN_ROUNDS", 40)?;
    for mode in ["proxy", "kernel"] {
        let mut world = World::new()?;
        let pods = world.state.path().join("pods.yaml");
        let write = |round: usize| -> Result<()> {
            let items = [
                replica(&format!("web-{round}"), "web", "10.244.1.8"),
                replica(
                    &format!("job-{round}"),
                    &format!("job-{round}"),
                    "10.244.1.5",
                ),
            ];
            let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
            let new = pods.with_extension("new");
            fs::write(&new, list.to_string())?;
            Ok(fs::rename(new, &pods)?)
        };
        write(0)?;
        let config = json!({ "rules": { "mode": mode }, "proxy": { "accessLog": "off" } });
        world.agent_with(&config, std::slice::from_ref(&pods))?;
        let memory = |world: &World| -> Result<u64> { Ok(world.agent()?.memory("VmRSS")?) };
        let mut early = 0;
        for round in 1..=rounds {
            write(round)?;
            let wanted = format!("web-{round}");
            eventually(|| {
                let names = workloads(world.agent()?)?;
                ensure!(names.contains(&wanted), "no {wanted} in {names:?}");
                Ok(())
            })?;
            reaches(world.app(), "10.244.1.5:7", "connect --count 3", &["one"])?;
            reaches(world.lab.pod("one"), "10.244.1.8:7", "connect", &["app"])?;
            if round == rounds.div_ceil(4) {
                early = memory(&world)?;
            }
        }
        // Ten seconds after its start, an agent needs 20 MiB for a moment.
        eventually(|| {
            let late = memory(&world)?;
            ensure!(late < early + FLAT, "{mode}: {early} KiB, then {late} KiB");
            println!(
                "{mode}: {early} KiB after a quarter of {rounds} rounds, {late} KiB after all"
            );
            Ok(())
        })?;
        // The counts of all pods are still there, in as many series as there are names.
        eventually(|| {
            let metrics = Metrics::scrape(world.lab.node("node1"))?;
            let labels = [("reporter", "source"), ("source_workload", "web")];
            let closed = metrics.sum("istio_tcp_connections_closed_total", &labels);
            let wanted = 3.0 * rounds as f64;
            ensure!(
                (closed - wanted).abs() < 0.5,
                "{mode}: {closed} of {wanted}"
            );
            let labels = [("reporter", "destination"), ("destination_workload", "web")];
            let closed = metrics.sum("istio_tcp_connections_closed_total", &labels);
            ensure!(
                (closed - rounds as f64).abs() < 0.5,
                "{mode}: {closed} of {rounds}"
            );
            Ok(())
        })?;
    }
    Ok(())
}
