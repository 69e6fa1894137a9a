//! Many flows through one node while the endpoints come and go: nothing that is established breaks.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dataplane_tests::{
    Lab, Process,
    report::{KeepReport, LoadReport},
};

use crate::{
    cluster::{TCP, serve},
    manifest::{Config, Manifests, Service},
};

scenarios! {
    Dataplane:
    flows_survive_endpoints_that_come_and_go,
}

/// How many: enough for a first look on any machine, unless more are asked for.
fn count() -> usize {
    let asked = std::env::var("DATAPLANE_FLOWS").ok();
    asked.and_then(|count| count.parse().ok()).unwrap_or(3_000)
}

/// All of a client's connections, by way of masqueraded node ports and a load balancer's address that
/// keeps it, through node1 to three pods there and one on node2.
fn flows_survive_endpoints_that_come_and_go() -> Result<()> {
    const TURNS: usize = 40;
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "e1", "10.244.1.101")
        .pod("node1", "e2", "10.244.1.102")
        .pod("node2", "e3", "10.244.2.103")
        .pod("node1", "e4", "10.244.1.104")
        .external("ext")
        .external("other")
        .build()?;
    let node1 = lab.node("node1");
    for client in ["ext", "other"] {
        let to = format!("route add 203.0.113.0/24 via {}", node1.ipv4());
        lab.external(client).ip(&to)?;
    }
    let _servers = ["e1", "e2", "e3", "e4"]
        .map(|name| serve(lab.pod(name)))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let services = |endpoints: &[&str]| {
        let endpoints: Vec<_> = endpoints.iter().map(|name| lab.pod(name)).collect();
        vec![
            Service::new("cluster", &["10.96.0.1"])
                .node_port("tcp", 80, TCP, 30001)
                .node_port("again", 81, TCP, 30002)
                .endpoints(&endpoints),
            Service::new("local", &["10.96.0.2"])
                .node_port("tcp", 80, TCP, 30003)
                .load_balancer("203.0.113.2")
                .set("externalTrafficPolicy", "Local")
                .endpoints(&endpoints),
        ]
    };
    let manifests = Manifests::new(&services(&["e1", "e2", "e3", "e4"]))?;
    let flows = (count() * 3).max(65_536);
    let config = Config::new(&format!("packets: {{conntrackFlows: {flows}}}"))?;
    let agent = lab.agent("node1").manifests(manifests.path());
    let _agent = agent.args(config.arguments()).start()?;

    let begin = Instant::now();
    let mut holders = vec![];
    // A process may have 20 000 files where the limit cannot be raised.
    let processes = count().div_ceil(2 * 15_000);
    let share = (count() / (2 * processes)).to_string();
    for client in ["ext", "other"].repeat(processes) {
        let keep = lab.external(client).probe("keep");
        let keep = keep.args(["--count", &share, "--timeout-ms", "20000"]);
        let keep = ["192.168.77.1:30001", "192.168.77.1:30002", "203.0.113.2:80"]
            .iter()
            .fold(keep, |keep, to| keep.args(["--to", to]));
        holders.push(keep.stdin_piped().stdout_piped().spawn()?);
    }
    let mut alive = 0;
    for holder in &mut holders {
        let report = heard(holder)?;
        ensure!(
            report.errors.is_empty(),
            "while connecting: {:?}",
            report.errors
        );
        alive += report.alive;
    }
    println!(
        "{alive} connections in {:.1} s",
        begin.elapsed().as_secs_f64()
    );

    // New ones all the while.
    let load = lab
        .external("ext")
        .load(&["--to", "192.168.77.1:30001", "--pause-us", "500"])?;
    let sets: [&[&str]; 4] = [
        &["e1", "e3"],
        &["e2"],
        &["e1", "e2", "e3", "e4"],
        &["e2", "e3"],
    ];
    let mut rounds = vec![];
    for (turn, endpoints) in (0..TURNS).zip(sets.into_iter().cycle()) {
        manifests.write(&services(endpoints))?;
        std::thread::sleep(Duration::from_millis(25));
        if turn % (TURNS / 4) == 0 {
            rounds.push(ask(&mut holders)?);
        }
    }
    rounds.push(ask(&mut holders)?);
    let load: LoadReport = load.wait_json()?;
    for (round, (answered, seconds)) in rounds.iter().enumerate() {
        println!("round {round}: {answered} of {alive} answered, in {seconds:.2} s");
    }
    println!("besides, {} new ones, {:?}", load.answered, load.errors);
    ensure!(
        rounds.iter().all(|(answered, _)| *answered == alive),
        "some broke"
    );
    ensure!(
        load.errors.is_empty() && load.answered > 0,
        "{:?}",
        load.errors
    );
    Ok(())
}

/// Every connection's sign of life: how many gave one, and how long it took.
fn ask(holders: &mut [Process]) -> Result<(u64, f64)> {
    let begin = Instant::now();
    for holder in &mut *holders {
        holder.send_line("?")?;
    }
    let mut alive = 0;
    for holder in holders {
        let report = heard(holder)?;
        if !report.errors.is_empty() {
            println!("{:?}", report.errors);
        }
        alive += report.alive;
    }
    Ok((alive, begin.elapsed().as_secs_f64()))
}

fn heard(holder: &mut Process) -> Result<KeepReport> {
    Ok(serde_json::from_str(&holder.wait_for_line()?)?)
}
