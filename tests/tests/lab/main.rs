//! The scenarios: real clients and servers in labs.
//!
//! A scenario is a function that builds its lab, and returns an error when an observation differs from the expected
//! one. Scenarios run in parallel and do not touch each other; those that measure run alone. A machine that cannot run
//! them skips them and prints the reason; with `DATAPLANE_REQUIRE_PRIVILEGES=1`, as in CI, that is a failure.
//! `DATAPLANE_SCENARIOS='kernel life::x'` leaves out all others: only the module `kernel` runs, and the scenario `x` of
//! `life`.

#![expect(
    clippy::too_many_lines,
    reason = "a table of cases, or the steps of one scenario in their order"
)]

/// Declares the scenarios of a module: `scenarios! { Dataplane: a, b }` names their requirement and
/// their functions.
macro_rules! scenarios {
    ($needs:ident: $($function:ident),* $(,)?) => {
        /// The scenarios of this module.
        pub const SCENARIOS: &[crate::Scenario] = &[$(crate::Scenario {
            name: concat!(module_path!(), "::", stringify!($function)),
            needs: dataplane_tests::Requirement::$needs,
            run: $function,
        }),*];
    };
}

mod announced;
mod asked;
mod bypass;
mod capture;
mod cells;
mod churn;
mod cleanup;
mod cluster;
mod commands;
mod configured;
mod crafted;
mod daemonset;
mod deaths;
mod dns;
mod dns_capture;
mod dns_clients;
mod dns_coredns;
mod dns_hosts;
mod dns_limits;
mod dns_upstreams;
mod dns_world;
mod egress;
mod endpoint_names;
mod entries;
mod errors;
mod exhausted;
mod explain;
mod features;
mod flows;
mod forward_rules;
mod fragments;
mod frames;
mod fuzz;
mod gateway;
mod gone_vips;
mod growth;
mod host_ports;
mod imported;
mod imported_mesh;
mod interfaces;
mod ipsec;
mod iptables;
mod kernel;
mod kubernetes;
mod leaving;
mod life;
mod links;
mod load_balancers;
mod machine;
mod manifest;
mod many_clients;
mod many_flows;
mod metrics;
mod monitor;
mod moving;
mod neighbours;
mod netfilter;
mod outcome;
mod own_rules;
mod ports;
mod proxy;
mod proxy_flood;
mod readers;
mod ready;
mod reasons;
mod reconcile;
mod reload;
mod resets;
mod routes;
mod same_flow;
mod services;
mod situations;
mod smoke;
mod sockets;
mod sources;
mod stack;
mod stale;
mod status;
mod supervisor;
mod takeover;
mod topology;
mod two_vips;
mod unknown;
mod upgrade;
mod uplinks;
mod verifier;
mod ways;
mod wrong_cgroup;

mod differential;
mod kube_proxy;
mod nodeport;
mod peers;
mod policies;
mod socket_tcp;
mod socket_udp;

use std::{
    process::ExitCode,
    sync::{Mutex, MutexGuard, PoisonError, RwLock},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use dataplane_tests::{Programs, Requirement, missing, whole_machine};
use libtest_mimic::{Arguments, Failed, Trial};

/// Scenarios whose load is more than an emulated machine can bear.
const HEAVY: [&str; 4] = [
    "lab::churn::",
    "lab::growth::",
    "lab::kubernetes::a_restless_cluster",
    "lab::stack::changes::",
];

/// Locked for writing by scenarios that measure, so that no other scenario runs beside them. An emulated processor
/// stands still while another processor's code is changed, as by every program that is loaded there, and counts that as
/// time which it worked.
static ALONE: RwLock<()> = RwLock::new(());

/// How long each scenario took, in the order of their ends.
static TOOK: Mutex<Vec<(&str, Duration)>> = Mutex::new(Vec::new());

/// The scenarios that run, and since when.
static RUNNING: Mutex<Vec<(&str, Instant)>> = Mutex::new(Vec::new());

/// The interval at which the harness prints the names of scenarios that have run for so long. A program that waits for
/// a guest's output can then tell a long scenario from a guest that hangs, and knows which scenario hangs.
const LONG: Duration = Duration::from_mins(1);

/// A scenario and its requirement.
#[derive(Clone, Copy)]
pub struct Scenario {
    name: &'static str,
    needs: Requirement,
    run: fn() -> Result<()>,
}

impl Scenario {
    /// `smoke` of `lab::smoke::x`.
    fn module(&self) -> &'static str {
        self.name.split("::").nth(1).unwrap_or_default()
    }

    /// Whether it is in a module, `capture` or `capture::deny`, or is `capture::deny::x`.
    fn is(&self, wanted: &str) -> bool {
        let name = self.name.strip_prefix("lab::").unwrap_or(self.name);
        let rest = name.strip_prefix(wanted);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    }
}

/// The scenarios of all modules.
const ALL: &[&[Scenario]] = &[
    // Alone: later, all threads would wait for the longest scenario that has begun.
    verifier::SCENARIOS,
    smoke::SCENARIOS,
    capture::SCENARIOS,
    cells::SCENARIOS,
    capture::AUTHORIZATION,
    capture::BY_KERNEL,
    capture::BOOT,
    capture::CLEANUP,
    capture::CLIENTS,
    capture::CNI,
    capture::DENY,
    capture::ESCAPES,
    capture::EVASIONS,
    capture::EXPLAIN,
    capture::HELD,
    capture::IDENTITY,
    capture::INTERFACES,
    capture::ISTIO,
    capture::MACHINES,
    capture::MANY,
    capture::MEMBERS,
    capture::METRICS,
    capture::ONCE,
    capture::ORIGINS,
    capture::PACKETS,
    capture::PROBES,
    capture::PROXIES,
    capture::RESTART,
    capture::STARTS,
    capture::TAKEOVER,
    capture::TROUBLE,
    capture::TUNNELS,
    capture::ZTUNNEL,
    netfilter::SCENARIOS,
    kernel::SCENARIOS,
    kernel::PROGRAMS,
    kernel::TABLES,
    kubernetes::SCENARIOS,
    announced::SCENARIOS,
    features::SCENARIOS,
    neighbours::SCENARIOS,
    services::SCENARIOS,
    life::SCENARIOS,
    links::SCENARIOS,
    cleanup::SCENARIOS,
    machine::SCENARIOS,
    churn::SCENARIOS,
    commands::SCENARIOS,
    exhausted::SCENARIOS,
    explain::SCENARIOS,
    status::SCENARIOS,
    growth::SCENARIOS,
    interfaces::SCENARIOS,
    load_balancers::SCENARIOS,
    daemonset::SCENARIOS,
    deaths::SCENARIOS,
    dns::SCENARIOS,
    dns_capture::SCENARIOS,
    dns_clients::SCENARIOS,
    dns_hosts::SCENARIOS,
    dns_limits::SCENARIOS,
    dns_coredns::SCENARIOS,
    dns_upstreams::SCENARIOS,
    egress::SCENARIOS,
    endpoint_names::SCENARIOS,
    moving::SCENARIOS,
    supervisor::SCENARIOS,
    leaving::SCENARIOS,
    topology::SCENARIOS,
    upgrade::SCENARIOS,
    configured::SCENARIOS,
    metrics::SCENARIOS,
    monitor::SCENARIOS,
    reload::SCENARIOS,
    resets::SCENARIOS,
    proxy::SCENARIOS,
    proxy_flood::SCENARIOS,
    readers::SCENARIOS,
    ready::SCENARIOS,
    reasons::SCENARIOS,
    reconcile::SCENARIOS,
    // The meaning of a service, line by line.
    socket_tcp::SCENARIOS,
    socket_udp::SCENARIOS,
    stale::SCENARIOS,
    two_vips::SCENARIOS,
    flows::SCENARIOS,
    fuzz::SCENARIOS,
    gone_vips::SCENARIOS,
    many_clients::SCENARIOS,
    ports::SCENARIOS,
    crafted::SERVICES,
    crafted::HEADERS,
    crafted::FLOWS,
    crafted::ERRORS,
    fragments::SCENARIOS,
    entries::SCENARIOS,
    gateway::SCENARIOS,
    errors::SCENARIOS,
    uplinks::SCENARIOS,
    unknown::SCENARIOS,
    asked::SCENARIOS,
    bypass::SCENARIOS,
    frames::SCENARIOS,
    policies::SCENARIOS,
    nodeport::SCENARIOS,
    host_ports::SCENARIOS,
    imported::SCENARIOS,
    imported_mesh::SCENARIOS,
    takeover::SCENARIOS,
    routes::SCENARIOS,
    ways::SCENARIOS,
    wrong_cgroup::SCENARIOS,
    same_flow::SCENARIOS,
    situations::SCENARIOS,
    sources::SCENARIOS,
    ipsec::SCENARIOS,
    forward_rules::SCENARIOS,
    stack::CHANGES,
    stack::POLICIES,
    stack::FIREWALLS,
    stack::FORGED,
    stack::IPSEC,
    stack::SEEN,
    iptables::SCENARIOS,
    own_rules::SCENARIOS,
    peers::SCENARIOS,
    kube_proxy::SCENARIOS,
    many_flows::SCENARIOS,
    differential::CONVERSATIONS,
    differential::RECORDED,
    differential::POLICIES,
    differential::SHARING,
];

fn main() -> ExitCode {
    if std::env::var_os(smoke::ABANDON).is_some() {
        if let Err(error) = smoke::abandon() {
            eprintln!("{error:#}");
        }
        return ExitCode::FAILURE;
    }
    let mut arguments = Arguments::from_args();
    let emulated = dataplane_tests::emulated();
    // Scenarios wait more than they compute: alone, three seconds for one of a processor's. With three for each processor, all take
    // ten minutes on two processors, and one or two of those under load may starve: these are repeated alone. An emulated machine
    // computes.
    if !emulated && arguments.test_threads.is_none() {
        arguments.test_threads = thread::available_parallelism()
            .ok()
            .map(|processors| 3 * processors.get());
    }
    let required = std::env::var_os("DATAPLANE_REQUIRE_PRIVILEGES").is_some_and(|v| v == "1");
    let lab = missing(Requirement::Lab);
    let dataplane = missing(Requirement::Dataplane).or_else(|| {
        let built = Programs::beside_this_one()
            .and_then(|programs| programs.dataplane().and_then(|_| programs.migrate()));
        built.err().map(|error| error.to_string())
    });
    let machine = missing(Requirement::Machine);
    let only = std::env::var("DATAPLANE_SCENARIOS").ok();
    let mut words = only.iter().flat_map(|only| only.split_whitespace());
    if let Some(word) = words.find(|word| !ALL.concat().iter().any(|of| of.is(word))) {
        eprintln!("DATAPLANE_SCENARIOS: no module and no scenario is {word}");
        return ExitCode::FAILURE;
    }
    let scenarios = ALL.concat().into_iter().filter(|scenario| {
        only.as_deref()
            .is_none_or(|only| only.split_whitespace().any(|word| scenario.is(word)))
    });
    let trials = scenarios.map(|scenario| {
        if emulated && HEAVY.iter().any(|heavy| scenario.name.starts_with(heavy)) {
            let reason = "this machine is emulated, and too slow for that much load";
            return trial(scenario, Some(reason.into()), false, &arguments);
        }
        let missing = match scenario.needs {
            Requirement::Lab => lab.clone(),
            // The missing thing is no privilege, so this is never a failure: no host runs it, and the guest, whose
            // results are counted too, always does.
            Requirement::Machine if !whole_machine() => {
                return trial(scenario, machine.clone(), false, &arguments);
            }
            Requirement::Dataplane | Requirement::Machine => dataplane.clone(),
        };
        trial(scenario, missing, required, &arguments)
    });
    if !arguments.list {
        thread::spawn(name_long_scenarios);
    }
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    if !arguments.list {
        print_slowest();
    }
    conclusion.exit_code()
}

fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names the scenarios that run for long, for as long as this program runs.
fn name_long_scenarios() {
    loop {
        thread::sleep(LONG);
        for (name, since) in lock(&RUNNING).iter() {
            if since.elapsed() >= LONG {
                println!("running for {:.0} s: {name}", since.elapsed().as_secs_f64());
            }
        }
    }
}

/// Prints which scenarios took longest, so that a reader sees what makes a run long.
fn print_slowest() {
    /// Shorter runs need no explanation.
    const FEW: usize = 20;
    const SHOWN: usize = 20;

    let mut took = lock(&TOOK).clone();
    if took.len() < FEW {
        return;
    }
    let all: Duration = took.iter().map(|(_, time)| time).sum();
    took.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    println!(
        "\n{} scenarios took {:.0} s in all. The slowest:",
        took.len(),
        all.as_secs_f64()
    );
    for (name, time) in took.iter().take(SHOWN) {
        println!("{:6.1} s  {name}", time.as_secs_f64());
    }
}

fn trial(
    scenario: Scenario,
    missing: Option<String>,
    required: bool,
    arguments: &Arguments,
) -> Trial {
    let Scenario { name, run, .. } = scenario;
    let measures = scenario.module() == "verifier" || scenario.name.ends_with("within_a_second");
    // `lab::smoke::x`: the first word is this program.
    let name = name.split_once("::").map_or(name, |(_, rest)| rest);
    match missing {
        None => Trial::test(name, move || {
            let timed = || {
                let started = Instant::now();
                lock(&RUNNING).push((name, started));
                let done = run();
                lock(&RUNNING).retain(|(running, _)| *running != name);
                lock(&TOOK).push((name, started.elapsed()));
                done
            };
            let done = if measures {
                let _alone = ALONE.write().unwrap_or_else(PoisonError::into_inner);
                timed()
            } else {
                let _among_others = ALONE.read().unwrap_or_else(PoisonError::into_inner);
                timed()
            };
            done.map_err(|error| format!("{error:#}").into())
        }),
        Some(reason) if required => Trial::test(name, move || {
            Err(Failed::from(format!(
                "this machine cannot run it: {reason}"
            )))
        }),
        Some(reason) => {
            let filtered = arguments.filter.as_ref();
            if !arguments.list && filtered.is_none_or(|filter| name.contains(filter)) {
                println!("skipped {name}: {reason}");
            }
            Trial::test(name, || Ok(())).with_ignored_flag(true)
        }
    }
}
