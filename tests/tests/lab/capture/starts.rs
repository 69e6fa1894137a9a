//! Pods that start and end, as fast as the node can: each is captured before its first connection, and none leaves
//! anything behind.

use std::{
    env, fs,
    net::Ipv4Addr,
    os::unix::fs::symlink,
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    Agent, Host, Lab, Process,
    api::{Cluster as Objects, Resource, objects},
    emulated,
    report::StartReport,
};
use kernel::pods::ByPackets;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::many::{number, workloads};
use crate::{
    cluster::{at_once, eventually, verdicts},
    kubernetes::{Site, web},
};

scenarios! {
    Dataplane:
    many_pods_start_and_none_is_late,
    starts_wait_while_the_agent_is_away,
}

/// A service of Pods.
const TO: &str = "10.96.0.10:80";
/// Declared nowhere.
const DENIED: &str = "192.0.2.1:443";
/// How many pods may start at the same time, by their addresses.
const MOST: usize = 32;
/// How many pods start at the same time while agents come and go.
const WORKERS: usize = 2;
/// How many addresses the pods of one worker have in turn.
const ADDRESSES: usize = 7;

/// The node on which pods start.
struct Node {
    host: Host,
    cluster: Objects,
    socket: PathBuf,
    plugin: PathBuf,
    /// Only a part of a start, without the agent, to measure what the rest costs: `namespaces`, or `processes`, which are also
    /// the plug-in's.
    part: Option<String>,
    /// How many pods there were, so that none has the name or the UID of an earlier one.
    pods: AtomicUsize,
    /// How many of them have ended.
    ended: AtomicUsize,
    _directory: TempDir,
}

/// How many pods a worker started, and the longest ADD.
#[derive(Default)]
struct Starts {
    count: usize,
    longest: Duration,
}

/// A node whose agent reads the API, captures pods with the label, and refuses unknown destinations.
fn site(mode: &str) -> Result<(Site, Node)> {
    let rules = json!({ "mode": mode, "egress": "deny" });
    let mesh = json!({ "rules": rules, "proxy": { "accessLog": "off" } }).to_string();
    let objects = |lab: &Lab| {
        let pods = [("far", "node1"), ("near", "node2")];
        let pods = pods.map(|(name, node)| objects::pod(name, node, &lab.pod(name).addresses()));
        let namespace = objects::namespace("default", &json!({}));
        [web(lab), pods.to_vec(), vec![namespace]].concat()
    };
    let mut site = Site::prepare_with(objects, |agent| {
        agent
            .in_the_nodes_cgroup()
            .sockets_only()
            .args(["--mesh", &mesh])
    })?;
    site.agent.start()?;
    let directory = tempfile::tempdir()?;
    let plugin = directory.path().join("dataplane-cni");
    symlink(site.lab.programs().dataplane()?, &plugin)?;
    let node = Node {
        host: site.lab.node("node2").clone(),
        cluster: site.server.cluster().clone(),
        socket: site.agent.socket(),
        plugin,
        part: env::var("DATAPLANE_STARTS_PART").ok(),
        pods: AtomicUsize::new(0),
        ended: AtomicUsize::new(0),
        _directory: directory,
    };
    Ok((site, node))
}

impl Node {
    /// Starts and ends pods, one after the other, for as long as `more` returns true.
    fn start_pods(&self, worker: usize, more: impl Fn() -> bool) -> Result<Starts> {
        let gateway = self.host.gateway4().to_string();
        let mut runtime = self.host.probe("pods").arg("--socket").arg(&self.socket);
        if self.part.as_deref() != Some("namespaces") {
            runtime = runtime.arg("--plugin").arg(&self.plugin);
        }
        if self.part.is_some() {
            runtime = runtime.arg("--version");
        }
        let runtime = runtime.args(["--to", TO, "--denied", DENIED, "--gateway", &gateway]);
        let mut runtime = runtime.stdin_piped().stdout_piped().spawn()?;
        runtime.wait_for_line()?;
        let mut starts = Starts::default();
        while more() {
            let last = 20 + worker * ADDRESSES + starts.count % ADDRESSES;
            let address = Ipv4Addr::new(10, 244, 2, u8::try_from(last)?);
            let took = self.start_pod(address, &mut runtime)?;
            starts.count += 1;
            starts.longest = starts.longest.max(took);
        }
        runtime.wait()?;
        Ok(starts)
    }

    /// Starts and ends a pod. Returns how long ADD took.
    fn start_pod(&self, address: Ipv4Addr, runtime: &mut Process) -> Result<Duration> {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        let name = format!("p{number}");
        let uid = format!("8e3b0c9a-6b0f-4f61-9d1c-{number:012x}");
        let mut pod = objects::pod(&name, "node2", &[address.into()]);
        pod["metadata"]["uid"] = uid.as_str().into();
        pod["metadata"]["labels"] = json!({ "istio.io/dataplane-mode": "ambient" });
        let mut pending = pod.clone();
        pending["status"] = json!({ "phase": "Pending" });
        if self.part.is_none() {
            self.cluster.apply(pending);
        }
        let of_node = self.host.netns().strip_suffix(self.host.name());
        let netns = format!("{}{name}", of_node.context("the lab's prefix")?);
        runtime.send_line(&format!("{name} {netns} {address} {uid}"))?;
        let report: StartReport = serde_json::from_str(&runtime.wait_for_line()?)?;
        if self.part.is_none() {
            let is_served = ["far", "near"].contains(&&*report.first);
            let is_denied = report.denied.iter().all(|error| error == "ECONNREFUSED");
            ensure!(is_served && is_denied, "{name}: {report:?}");
            // kubelet writes the addresses after the containers have started.
            self.cluster.apply(pod);
        }
        runtime.send_line("")?;
        runtime.wait_for_line()?;
        self.cluster.delete(Resource::Pods, "default", &name);
        self.ended.fetch_add(1, Ordering::Relaxed);
        Ok(Duration::from_nanos(report.add_ns))
    }

    /// Starts and ends so many pods, by several workers: as many as for `of` pods.
    fn start_many(&self, count: usize, of: usize) -> Result<()> {
        let left = AtomicUsize::new(count);
        let more = || {
            let one_less = |left: usize| left.checked_sub(1);
            let order = Ordering::Relaxed;
            left.fetch_update(order, order, one_less).is_ok()
        };
        let start = Instant::now();
        let workers = (of / 25).clamp(4, MOST);
        let works = (0..workers).map(|worker| move || self.start_pods(worker, more));
        let starts = at_once(works)?;
        print(&starts, start.elapsed());
        Ok(())
    }
}

fn print(starts: &[Starts], took: Duration) {
    let count: usize = starts.iter().map(|of| of.count).sum();
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    println!(
        "{count} pods started and ended in {took:.1?} by {} workers: {:.0} per second, the longest ADD took {:.1?}",
        starts.len(),
        f64::from(count) / took.as_secs_f64(),
        starts.iter().map(|of| of.longest).max().unwrap_or_default(),
    );
}

/// The verdicts on the pods' connections so far: on the first of each pod, and on those that have to be refused.
fn counts(agent: &Agent, first: Reason) -> Result<[u64; 2]> {
    Ok([
        verdicts(agent, first)?,
        verdicts(agent, Reason::EgressDenied)?,
    ])
}

/// Checks that the kernel decided about every connection of `pods` pods by the pods' own rules.
fn all_counted(agent: &Agent, first: Reason, pods: usize) -> Result<()> {
    let (pods, counted) = (u64::try_from(pods)?, counts(agent, first)?);
    ensure!(
        counted == [pods, 2 * pods],
        "{counted:?} of {pods} pods\n{}",
        agent.log()
    );
    Ok(())
}

/// Checks that no pod is left: in the agent, in the kernel's table, in the file for the next agent.
fn nothing_is_left(agent: &Agent) -> Result<()> {
    eventually(|| {
        let names = workloads(agent)?;
        ensure!(names.iter().all(|name| !name.starts_with('p')), "{names:?}");
        let captured = ByPackets::open(agent.bpffs(), false)?.captured()?;
        ensure!(captured.is_empty(), "{captured:?} are captured");
        let kept = fs::read(agent.socket().with_file_name("pods.json"))?;
        let kept: Value = serde_json::from_slice(&kept)?;
        ensure!(kept == json!([]), "{kept:#}");
        Ok(())
    })
}

/// The agent's memory in KiB, its open files except those of programs and tables, and those of programs and tables.
fn held(agent: &Agent) -> Result<(u64, usize, usize)> {
    let files = fs::read_dir(format!("/proc/{}/fd", agent.id()))?;
    // A file may be closed meanwhile.
    let files: Vec<_> = files
        .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
        .collect();
    let of_bpf = files
        .iter()
        .filter(|file| file.to_string_lossy().starts_with("anon_inode:bpf"));
    let of_bpf = of_bpf.count();
    Ok((agent.memory("VmRSS")?, files.len() - of_bpf, of_bpf))
}

/// `DATAPLANE_STARTS=10000` for the long run.
fn many_pods_start_and_none_is_late() -> Result<()> {
    /// How much an agent may grow after the first quarter, in KiB.
    const FLAT: u64 = 8 << 10;
    /// Connections to the API server and of this scenario come and go.
    const FEW: usize = 8;
    /// The programs of 32 pods that have ended, for others, and of as many for which lookups may still run them; each with its table.
    const SPARE: usize = 2 * 2 * 32;
    let count = number("DATAPLANE_STARTS", if emulated() { 16 } else { 100 })?;
    let (mut site, node) = site("proxy")?;
    if node.part.is_some() {
        site.agent.stop()?;
        return node.start_many(count, count);
    }
    let agent = &site.agent;
    let (.., at_first) = held(agent)?;
    node.start_many(count.div_ceil(4), count)?;
    nothing_is_left(agent)?;
    let early = held(agent)?;
    node.start_many(count - count.div_ceil(4), count)?;
    nothing_is_left(agent)?;
    all_counted(agent, Reason::Captured, count)?;
    let is_flat = || {
        let late = held(agent)?;
        let is_flat =
            late.0 < early.0 + FLAT && late.1 <= early.1 + FEW && late.2 <= at_first + SPARE + FEW;
        ensure!(
            is_flat,
            "KiB, files, programs and tables: {early:?}, then {late:?}"
        );
        println!(
            "KiB, files, programs and tables: {early:?} after a quarter of {count} pods, {late:?} after all"
        );
        Ok(())
    };
    // On a busy machine, a pod's link may go before the proxy has ended the pod's connection. The proxy keeps that connection's files for
    // 30 s, as long as this waits.
    eventually(is_flat).or_else(|_| eventually(is_flat))
}

/// The agent ends and is started, is killed and is started, and is replaced by another agent. The kernel decides about these pods'
/// connections, because without an agent's proxy, connections to a proxy are refused.
fn starts_wait_while_the_agent_is_away() -> Result<()> {
    let (mut site, node) = site("kernel")?;
    let start = Instant::now();
    let (ends, agent, node) = (&AtomicBool::new(false), &mut site.agent, &node);
    let more = || !ends.load(Ordering::Relaxed);
    let (restarted, starts) = thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| scope.spawn(move || node.start_pods(worker, more)))
            .collect();
        let restarted = restart(agent, node);
        ends.store(true, Ordering::Relaxed);
        let starts = workers
            .into_iter()
            .map(|worker| worker.join().ok().context("a thread panicked")?)
            .collect::<Result<Vec<Starts>>>();
        (restarted, starts)
    });
    if let Err(error) = restarted {
        // If a pod did not start, no other follows it.
        let pods = starts
            .err()
            .map_or_else(String::new, |pod| format!("{pod:#}"));
        return Err(error.context(format!("{pods}\n{}", site.agent.log())));
    }
    let starts = starts?;
    print(&starts, start.elapsed());
    nothing_is_left(&site.agent)?;
    let pods = starts.iter().map(|of| of.count).sum();
    all_counted(&site.agent, Reason::Direct, pods)
}

/// Has the agent go and come back in three ways. Pods start and end before and after each: a busy machine takes its time for
/// these, so their number counts and no time.
fn restart(agent: &mut Agent, node: &Node) -> Result<()> {
    let away = || thread::sleep(Duration::from_millis(500));
    let pods_start = || {
        let ended = || node.ended.load(Ordering::Relaxed);
        let before = ended();
        // Each worker's first pod may have begun before.
        eventually(|| {
            let now = ended() - before;
            ensure!(now >= 2 * WORKERS, "only {now} pods have started and ended");
            Ok(())
        })
    };
    pods_start()?;
    agent.stop()?;
    away();
    agent.start()?;
    pods_start()?;
    agent.kill();
    away();
    agent.start()?;
    pods_start()?;
    // Another pod's.
    agent.move_to_cgroup("agent-next")?;
    let before = agent.replace()?;
    pods_start()?;
    before.wait().context("the agent that was replaced")?;
    Ok(())
}
