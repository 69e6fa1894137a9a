//! From ten services to tens of thousands, through the agent, while clients connect and metrics are scraped.

use std::{
    collections::hash_map::RandomState,
    ffi::OsStr,
    fmt::Write as _,
    fs,
    hash::BuildHasher as _,
    net::Ipv4Addr,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_common::{Addr, Port, Protocol, decide::Tables as _, tables::FrontendKey};
use dataplane_tests::{Agent, Lab, report::LoadReport};
use kernel::tables::Tables;
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, reaches, serve},
    metrics::Metrics,
    outcome::{run, run_args},
};

scenarios! {
    Dataplane:
    many_services_arrive_under_load,
    an_agent_killed_while_it_writes_is_taken_over,
}

const FEW: u32 = 10;
/// The most services in a file: well below the limit of 32 MiB.
const PER_FILE: u32 = 20_000;
/// The most services that an agent is writing when it is killed.
const UNTIL_KILLED: u32 = 10_000;
/// How often it is killed at most.
const KILLS: u32 = 6;

/// Returns how many services arrive, by default or from `DATAPLANE_SERVICES`.
fn many() -> Result<u32> {
    let asked = std::env::var("DATAPLANE_SERVICES").ok();
    let many = asked.map_or(Ok(8_000), |asked| asked.parse());
    let many = many.context("DATAPLANE_SERVICES: a number")?;
    ensure!(many >= 1000, "DATAPLANE_SERVICES: at least 1000");
    Ok(many)
}

fn vip(service: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 1, 0)) + service)
}

/// Writes services with three endpoints each to a file, so that it is seen whole or not at all.
fn write(lab: &Lab, directory: &Path, name: &str, services: std::ops::Range<u32>) -> Result<()> {
    let mut endpoints = Vec::new();
    for pod in ["far", "near", "near2"].map(|name| lab.pod(name)) {
        endpoints.push(format!(
            r#"{{"addresses":["{}"],"nodeName":"{}","conditions":{{"ready":true}}}}"#,
            pod.ipv4(),
            pod.node().context("a pod")?
        ));
    }
    let endpoints = endpoints.join(",");
    let mut text = r#"{"apiVersion":"v1","kind":"List","items":["#.to_owned();
    for service in services.clone() {
        let comma = if service == services.start { "" } else { "," };
        let vip = vip(service);
        write!(
            text,
            r#"{comma}{{"apiVersion":"v1","kind":"Service","metadata":{{"name":"s{service}"}},"spec":{{"clusterIP":"{vip}","ports":[{{"name":"a","port":80}}]}}}},{{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{{"name":"s{service}","labels":{{"kubernetes.io/service-name":"s{service}"}}}},"addressType":"IPv4","ports":[{{"name":"a","port":{TCP}}}],"endpoints":[{endpoints}]}}"#,
        )?;
    }
    text.push_str("]}");
    let draft = directory.join(".draft");
    fs::write(&draft, text)?;
    fs::rename(draft, directory.join(name))?;
    Ok(())
}

fn status(agent: &Agent) -> Result<Value> {
    run(agent, "status -o json")?.exits(0)?.json()
}

/// Returns the memory of the tables that grow: conntrack's tables have the configured size.
fn table_bytes(status: &Value) -> u64 {
    let fixed = ["CONNTRACK", "ANSWERS", "FRAGMENTS"];
    let tables = status["tables"].as_array().into_iter().flatten();
    let grow = tables.filter(|table| fixed.iter().all(|name| table["name"] != *name));
    grow.filter_map(|table| table["bytes"].as_u64()).sum()
}

/// Waits for so many services to be served. While the agent is busy with them, `status` may report that it is late.
fn wait_for(agent: &Agent, services: u32, patience: Duration) -> Result<Value> {
    let begin = Instant::now();
    loop {
        let outcome = run(agent, "status -o json")?;
        let status = outcome.json()?;
        if status["agent"]["services"] == services {
            return outcome.exits(0)?.json();
        }
        if begin.elapsed() > patience {
            bail!(
                "not {services} services after {patience:.0?}: {status:#}\n{}",
                agent.log()
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Measures how long this machine takes for the services in a directory, with everything else that it does: to read
/// them, and to plan and print the changes.
fn plan(agent: &Agent, directory: &Path) -> Result<Duration> {
    let plan = ["plan", "--node-name", "node2", "--manifests"].map(OsStr::new);
    let begin = Instant::now();
    run_args(agent, plan.into_iter().chain([directory.as_os_str()]))?.exits(2)?;
    Ok(begin.elapsed())
}

fn figures(services: u32, agent: &Agent, status: &Value) -> Result<()> {
    let sync = &status["agent"]["last_sync"];
    let ms = |field: &str| sync[field].as_u64().unwrap_or_default() / 1000;
    println!(
        "{services} services: {} writes planned in {} ms and written in {} ms; tables {} KiB, \
         agent {} KiB resident",
        sync["writes"],
        ms("plan_us"),
        ms("write_us"),
        table_bytes(status) / 1024,
        agent.memory("VmRSS")?,
    );
    Ok(())
}

fn many_services_arrive_under_load() -> Result<()> {
    let lab = Cluster::lab()?;
    let mut servers = Vec::new();
    for pod in ["far", "near", "near2"] {
        servers.push(serve(lab.pod(pod))?);
    }
    let many = many()?;
    let (directory, prepared) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write(&lab, directory.path(), "few.json", 0..FEW)?;
    let agent = lab.agent("node2").manifests(directory.path()).start()?;
    let few = status(&agent)?;
    // The tables grow again for each file.
    let per_file = (many / 4).min(PER_FILE);
    let mut files = Vec::new();
    for first in (0..many).step_by(per_file as usize) {
        let (name, end) = (format!("from-{first}.json"), many.min(first + per_file));
        write(&lab, prepared.path(), &name, first.max(FEW)..end)?;
        files.push((name, end));
    }
    let baseline = plan(&agent, prepared.path())?;
    figures(FEW, &agent, &few)?;
    ensure!(
        table_bytes(&few) < 1 << 20,
        "a node with {FEW} services pins {} bytes",
        table_bytes(&few)
    );

    let (client, node) = (lab.pod("sleep"), lab.node("node2"));
    let to = format!("{}:80", vip(3));
    let load = client.load(&["--to", &to, "--threads", "2", "--pause-us", "500"])?;
    let done = AtomicBool::new(false);
    let (grown, scrapes) = std::thread::scope(|scope| {
        let scraper = scope.spawn(|| scrape_until(&done, || Metrics::scrape(node)));
        let grow = || {
            let begin = Instant::now();
            let mut status = Value::Null;
            for (file, services) in &files {
                fs::rename(prepared.path().join(file), directory.path().join(file))?;
                status = wait_for(&agent, *services, baseline * 30)?;
            }
            Ok::<_, anyhow::Error>((status, begin.elapsed()))
        };
        let grown = grow();
        done.store(true, Ordering::Relaxed);
        (grown, scraper.join().expect("the scraper does not panic"))
    });
    let ((status, took), scrapes) = (grown?, scrapes?);
    let report: LoadReport = load.wait_json()?;
    figures(many, &agent, &status)?;
    println!("planned alone in {baseline:.1?}, served after {took:.1?}");
    println!(
        "{} connections meanwhile, {} failed; {scrapes} scrapes",
        report.answered,
        report.errors.values().sum::<u64>()
    );
    ensure!(report.errors.is_empty(), "{:?}", report.failures);
    ensure!(
        report.answered > 1000,
        "too few to mean anything: {report:?}"
    );
    // Each connection was counted once, in a table before its growth or after.
    let counted = Metrics::scrape(node)?.connections("s3");
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let answered = report.answered as f64;
    ensure!(
        (counted - answered).abs() < 0.5,
        "{counted} connections counted, {answered} made"
    );
    for service in [0, FEW, many / 2, many - 1] {
        let to = format!("{}:80", vip(service));
        reaches(client, &to, "connect --count 40", &["far", "near", "near2"])?;
    }
    Ok(())
}

/// Waits until a VIP is in the tables, or is not there any more, and hardly longer.
fn until_served(agent: &Agent, vip: Ipv4Addr, wanted: bool) -> Result<()> {
    let key = FrontendKey::new(Addr::from_v4(vip.octets()), Port::new(80), Protocol::TCP);
    let begin = Instant::now();
    loop {
        // Opened each time, because a grown table replaces the earlier one.
        let tables = Tables::open(agent.bpffs())?;
        if tables.frontend(&key).is_none() != wanted {
            return Ok(());
        }
        if begin.elapsed() > Duration::from_mins(5) {
            bail!("{vip} after 5 min: {}", agent.log());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The agent is killed again and again in the middle of filling and emptying its tables: the next agent continues from
/// that state.
fn an_agent_killed_while_it_writes_is_taken_over() -> Result<()> {
    let lab = Cluster::lab()?;
    let mut servers = Vec::new();
    for pod in ["far", "near", "near2"] {
        servers.push(serve(lab.pod(pod))?);
    }
    let directory = tempfile::tempdir()?;
    write(&lab, directory.path(), "few.json", 0..FEW)?;
    let mut agent = lab.agent("node2").manifests(directory.path()).start()?;
    let client = lab.pod("sleep");
    let to = format!("{}:80", vip(3));
    let load = client.load(&["--to", &to, "--threads", "2", "--pause-us", "500"])?;
    let all = many()?;
    let services = (all / 2).min(UNTIL_KILLED);
    let mut killed = Vec::new();
    for round in 0..(all / 2_000).clamp(2, KILLS) {
        let many = round % 2 == 0;
        if many {
            write(&lab, directory.path(), "many.json", FEW..services)?;
        } else {
            fs::remove_file(directory.path().join("many.json"))?;
        }
        if round > 0 {
            agent.launch()?;
        }
        // The standard library's hasher is seeded by the system's randomness.
        let some = u32::try_from(RandomState::new().hash_one(round) % u64::from(services - FEW))?;
        until_served(&agent, vip(FEW + some), many)?;
        agent.kill();
        let tables = run(&agent, "status -o json")?.exits(1)?.json()?;
        let mut tables = tables["tables"].as_array().into_iter().flatten();
        let frontends = tables.find(|table| table["name"] == "FRONTENDS");
        let used = frontends.context("FRONTENDS")?["used"].as_u64();
        killed.push(used.context("a number")?);
        reaches(client, &to, "connect --count 40", &["far", "near", "near2"])?;
    }
    write(&lab, directory.path(), "many.json", FEW..services)?;
    agent.launch()?;
    println!("entries in FRONTENDS when it was killed: {killed:?}");
    agent.wait_until_ready()?;
    wait_for(&agent, services, Duration::from_mins(5))?;
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty(),
        "{killed:?}: {:?}",
        report.failures
    );
    for service in [0, FEW, services / 2, services - 1] {
        let to = format!("{}:80", vip(service));
        reaches(client, &to, "connect --count 40", &["far", "near", "near2"])?;
    }
    let directory = directory.path().as_os_str();
    let plan = ["plan", "--node-name", "node2", "--manifests"].map(OsStr::new);
    run_args(&agent, plan.into_iter().chain([directory]))?
        .exits(0)
        .map(drop)
}

/// Scrapes all the time, and wants no counter to go back.
fn scrape_until(done: &AtomicBool, scrape: impl Fn() -> Result<Metrics>) -> Result<u32> {
    let (mut scrapes, mut last) = (0, 0.0);
    while !done.load(Ordering::Relaxed) {
        let now = scrape()?.connections("s3");
        ensure!(now >= last, "connections went from {last} to {now}");
        (scrapes, last) = (scrapes + 1, now);
    }
    Ok(scrapes)
}
