//! The practice node: a lab with one service, the dataplane loaded in it, and real requests.
//!
//! It does not change the machine itself. The programs are attached to a cgroup that contains only
//! the lab's processes, and the network namespaces have no route out.

mod captured;
mod names;
mod report;
mod state;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

use anyhow::{Context as _, Result, bail};
use dataplane_tests::{
    Lab, Process, Programs, Requirement, missing,
    report::{Attempt, Report},
};
use nix::sys::signal::{SigSet, Signal};

pub use self::state::State;
use crate::{style, workspace};

/// The service's address: the VIP of `default/httpbin` in examples/httpbin.yaml.
pub const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 130, 105)), 8000);
/// The node in which the dataplane is loaded. It is the client's node.
const NODE: &str = "node2";
const CLIENT: &str = "sleep";
const CLIENT_ADDRESS: &str = "10.244.2.8";
/// The service's endpoints: node, pod, address. They listen on port 80.
const ENDPOINTS: [(&str, &str, &str); 6] = [
    ("node1", "httpbin-1", "10.244.1.5"),
    ("node1", "httpbin-2", "10.244.1.6"),
    ("node1", "httpbin-3", "10.244.1.7"),
    ("node2", "httpbin-4", "10.244.2.10"),
    ("node2", "httpbin-5", "10.244.2.7"),
    ("node2", "httpbin-6", "10.244.2.9"),
];
const ENDPOINT_PORT: u16 = 80;

/// Rounds of requests, first through the service, then directly. A disturbance of the machine then
/// affects both.
const ROUNDS: usize = 10;
/// Requests of a round on each of the two paths. It is a multiple of the number of endpoints, so
/// that all endpoints get an equal share of the direct requests.
const PER_ROUND: usize = 60;

/// Options of a practice node.
#[derive(Debug)]
pub struct Options {
    /// End after the requests, instead of staying until Ctrl-C.
    pub once: bool,
    /// Print one JSON document instead of tables.
    pub json: bool,
    /// The directory with the built `dataplane` and `probe`.
    pub programs: Programs,
}

/// Checks whether this machine can run a practice node.
///
/// # Errors
/// Returns the reason why it cannot, for the user.
pub fn check() -> Result<()> {
    if let Some(lack) = missing(Requirement::Dataplane) {
        bail!(
            "a practice node cannot run here: this machine {lack}\n\
             (`cargo xtask run -- doctor` shows everything that the dataplane needs)"
        );
    }
    Ok(())
}

/// Builds the practice node, sends requests, reports, and stays until Ctrl-C.
///
/// # Errors
/// Fails if it cannot be built or used. All parts are removed in any case.
pub fn run(options: &Options) -> Result<ExitCode> {
    check()?;
    let end = Ending::watch()?;
    note(
        "building the practice node: 2 nodes, 9 pods, a server outside of the cluster, no route out",
    );
    let lab = build(options.programs.clone())?;
    let mut servers = ENDPOINTS
        .iter()
        .map(|(_, name, _)| {
            let pod = lab.pod(name);
            let at = SocketAddr::new(pod.ipv4().into(), ENDPOINT_PORT).to_string();
            pod.serve(&["--http", &at])
        })
        .collect::<Result<Vec<Process>, _>>()
        .context("cannot start the endpoints")?;
    servers.push(names::serve(&lab)?);
    servers.push(captured::serve(&lab)?);
    let files = names::Files::write(&lab)?;
    end.check()?;

    note("loading the dataplane in node2");
    let agent = lab
        .agent(NODE)
        .in_the_nodes_cgroup()
        .manifests(manifests()?);
    let agent = files.for_agent(agent).args(["--on-exit", "detach"]);
    let mut agent = agent.start()?;
    State::of(&lab, &agent, (names::POD, &files.resolv_conf)).write(&lab)?;
    end.check()?;

    let count = ROUNDS * PER_ROUND;
    note(&format!(
        "sending {count} requests from {CLIENT} to {SERVICE}, and as many directly"
    ));
    let seen = measure(&lab, &end)?;
    let report = report::Practice::of(&seen, &endpoints(&lab));
    let lookups = names::look_up(&lab, &files.resolv_conf)?;
    let relayed = captured::connect(&lab, &agent)?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        for lookup in lookups.iter().filter(|lookup| !lookup.is_answered()) {
            note(&lookup.to_string());
        }
        for connection in relayed.iter().filter(|connection| !connection.is_right()) {
            note(&connection.to_string());
        }
    } else {
        report.print(agent.node().name());
        names::print(&lookups);
        captured::print(&relayed);
    }
    if !options.once {
        let id = lab.id();
        anstream::eprintln!(
            "\n{}The practice node stays until you press Ctrl-C.{} In another terminal:\n{}",
            style::BOLD,
            style::RESET,
            hints(),
        );
        end.wait();
        note(&format!("removing the practice node {id}"));
    }
    let all_answered = report.all_answered()
        && lookups.iter().all(names::Lookup::is_answered)
        && relayed.iter().all(captured::Relayed::is_right);
    // Stop the agent first, in order, then the servers, then the lab.
    agent.stop()?;
    drop(agent);
    drop(servers);
    drop(lab);
    Ok(if all_answered {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn build(programs: Programs) -> Result<Lab> {
    let mut builder = Lab::builder()
        .programs(programs)
        .node("node1")
        .node("node2")
        .pod(NODE, CLIENT, CLIENT_ADDRESS)
        .pod(NODE, names::POD, names::ADDRESS)
        .pod(NODE, captured::POD, captured::ADDRESS)
        .external(names::OUTSIDE);
    for (node, name, address) in ENDPOINTS {
        builder = builder.pod(node, name, address);
    }
    Ok(builder.build()?)
}

fn manifests() -> Result<std::path::PathBuf> {
    let path = workspace::root().join("examples/httpbin.yaml");
    if !Path::new(&path).is_file() {
        bail!(
            "{} is missing: `git checkout examples` brings it back",
            path.display()
        );
    }
    Ok(path)
}

/// Returns the endpoints' names and addresses.
fn endpoints(lab: &Lab) -> Vec<(String, Ipv4Addr)> {
    let address = |name| (str::to_owned(name), lab.pod(name).ipv4());
    ENDPOINTS.iter().map(|(_, name, _)| address(name)).collect()
}

/// The client's results on the two paths.
pub struct Seen {
    /// Through the service.
    vip: Vec<Attempt>,
    /// To each endpoint's own address in turn.
    direct: Vec<Attempt>,
}

fn measure(lab: &Lab, end: &Ending) -> Result<Seen> {
    let client = lab.pod(CLIENT);
    let ask = |targets: &[String], count: usize| -> Result<Vec<Attempt>> {
        let mut probe = client.probe("http").args([
            "--each",
            "--timeout-ms",
            "1000",
            "--count",
            &count.to_string(),
        ]);
        for target in targets {
            probe = probe.args(["--to", target]);
        }
        let report: Report = probe.json()?;
        Ok(report.each)
    };
    let vip = [SERVICE.to_string()];
    let direct: Vec<String> = endpoints(lab)
        .iter()
        .map(|(_, address)| format!("{address}:{ENDPOINT_PORT}"))
        .collect();
    let mut seen = Seen {
        vip: Vec::new(),
        direct: Vec::new(),
    };
    // If the first request fails, the others would fail too, after a minute of time limits.
    let first = ask(&vip, 1)?;
    if first.iter().any(|attempt| attempt.error.is_some()) {
        seen.vip = first;
        return Ok(seen);
    }
    for _ in 0..ROUNDS {
        end.check()?;
        seen.vip.extend(ask(&vip, PER_ROUND)?);
        seen.direct.extend(ask(&direct, PER_ROUND)?);
    }
    Ok(seen)
}

fn hints() -> String {
    format!(
        "    cargo xtask lab exec {CLIENT} -- curl http://{SERVICE}/\n    \
             cargo xtask lab status\n\
         {}    \
             cargo xtask lab services\n    \
             cargo xtask lab explain {CLIENT_ADDRESS} {SERVICE}\n    \
             cargo xtask lab monitor",
        names::hints()
    )
}

/// Returns the default connection of `lab explain`.
pub fn usual_connection() -> [String; 2] {
    [CLIENT_ADDRESS.to_owned(), SERVICE.to_string()]
}

/// Prints one line of progress on standard error.
fn note(text: &str) {
    crate::progress::note(text);
}

/// Watches for Ctrl-C, SIGTERM and the end of the terminal. The program checks for them between two
/// steps, so that everything that is built is removed in order.
struct Ending {
    asked: Arc<AtomicBool>,
    signals: mpsc::Receiver<Signal>,
}

impl Ending {
    /// Blocks these signals, so that they do not kill the process. Call this before any other
    /// thread is started: threads inherit blocked signals.
    fn watch() -> Result<Self> {
        let set = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        set.thread_block().context("cannot hold back Ctrl-C")?;
        let asked = Arc::new(AtomicBool::new(false));
        let (sender, signals) = mpsc::channel();
        let flag = Arc::clone(&asked);
        std::thread::spawn(move || {
            while let Ok(signal) = set.wait() {
                flag.store(true, Ordering::Relaxed);
                if sender.send(signal).is_err() {
                    break;
                }
            }
        });
        Ok(Self { asked, signals })
    }

    /// Fails if one of these signals has arrived.
    fn check(&self) -> Result<()> {
        if self.asked.load(Ordering::Relaxed) {
            bail!("stopped before it was done; the practice node is removed again");
        }
        Ok(())
    }

    /// Waits until one of these signals arrives.
    fn wait(&self) {
        // An error means that the watching thread is gone. It is then better to end than to stay
        // forever.
        let _ = self.signals.recv();
    }
}
