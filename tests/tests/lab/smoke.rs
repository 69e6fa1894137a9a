//! The lab itself, without a dataplane in it.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
};

use crate::cluster::serve;
use anyhow::{Context as _, Result, anyhow, ensure};
use dataplane_tests::{CreatorState, Host, Lab, LabId, cgroup2_mount, report::Report, sweep};

scenarios! {
    Lab:
    pods_reach_pods_directly,
    nothing_leads_out,
    errors_are_reported_by_name,
    programs_end_with_their_handle,
    a_lab_leaves_nothing_behind,
    a_dead_creators_lab_is_swept,
}

/// Two nodes, a client and two endpoints, one on the client's node and one on the other.
fn lab() -> Result<Lab> {
    Ok(Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "far", "10.244.1.5")
        .pod("node2", "near", "10.244.2.10")
        .pod("node2", "sleep", "10.244.2.8")
        .external("ext")
        .build()?)
}

/// Asks, and checks who answered whom.
fn ask(from: &Host, arguments: &[&str], to: &Host, address: IpAddr, port: u16) -> Result<Report> {
    let target = SocketAddr::new(address, port);
    let (subcommand, rest) = arguments.split_first().context("a subcommand")?;
    let report: Report = from
        .probe(subcommand)
        .args(["--to", &target.to_string(), "--count", "3"])
        .args(rest)
        .json()?;
    let what = || format!("{arguments:?} from {} to {target}: {report:?}", from.name());
    ensure!(
        report.answered == 3 && report.errors.is_empty(),
        "not all answered: {}",
        what()
    );
    let endpoint = report.endpoints.get(to.name()).with_context(what)?;
    let own = if address.is_ipv4() {
        IpAddr::from(from.ipv4())
    } else {
        from.ipv6().into()
    };
    ensure!(
        endpoint.sources.keys().eq([&own]),
        "the endpoint saw another client: {}",
        what()
    );
    Ok(report)
}

/// HTTP, TCP and UDP between pods of one node and of two, in both families, from the node and from
/// outside.
fn pods_reach_pods_directly() -> Result<()> {
    let lab = lab()?;
    let sleep = lab.pod("sleep");
    for endpoint in [lab.pod("near"), lab.pod("far")] {
        let _server = serve(endpoint)?;
        for address in endpoint.addresses() {
            ask(sleep, &["http"], endpoint, address, 80)?;
            let report = ask(sleep, &["connect"], endpoint, address, 7)?;
            ensure!(report.peers == [SocketAddr::new(address, 7)], "{report:?}");
            let report = ask(sleep, &["udp"], endpoint, address, 53)?;
            ensure!(report.peers == [SocketAddr::new(address, 53)], "{report:?}");
            let report = ask(sleep, &["udp", "--unconnected"], endpoint, address, 53)?;
            ensure!(report.peers.is_empty(), "{report:?}");
            ensure!(report.from == [SocketAddr::new(address, 53)], "{report:?}");
            if address.is_ipv4() {
                let report = ask(sleep, &["connect", "--v4-mapped"], endpoint, address, 7)?;
                ensure!(report.peers == [SocketAddr::new(address, 7)], "{report:?}");
                ask(
                    sleep,
                    &["udp", "--v4-mapped", "--unconnected"],
                    endpoint,
                    address,
                    53,
                )?;
            }
        }
    }
    let (ext, near) = (lab.external("ext"), lab.pod("near"));
    ext.ip(&format!(
        "route add 10.244.2.0/24 via {}",
        lab.node("node2").ipv4()
    ))?;
    let _server = serve(near)?;
    ask(ext, &["http"], near, near.ipv4().into(), 80)?;
    let output = sleep
        .command("curl")
        .args(["-sS", "http://10.244.2.10/"])
        .run()?;
    ensure!(output.contains(r#""endpoint":"near""#), "curl saw {output}");
    Ok(())
}

/// The routes and a packet show it: an address outside of the lab cannot be reached.
fn nothing_leads_out() -> Result<()> {
    let lab = lab()?;
    lab.check_isolation()?;
    // 192.0.2.1 is for documentation: no host has it.
    for host in [lab.node("node1"), lab.external("ext"), lab.pod("sleep")] {
        let report: Report = host
            .probe("connect")
            .args(["--to", "192.0.2.1:80", "--timeout-ms", "300"])
            .json()?;
        ensure!(report.answered == 0, "{} reached 192.0.2.1", host.name());
        // A pod learns it from its node by ICMP, which connect(2) takes for a passing trouble
        // unless it comes late.
        let errors: &[&str] = if host.node().is_some() {
            &["TIMEOUT", "ENETUNREACH"]
        } else {
            &["ENETUNREACH"]
        };
        ensure!(
            report.errors.keys().all(|error| errors.contains(&&**error)),
            "{}: {report:?}",
            host.name()
        );
    }
    // The check itself sees a way out.
    lab.node("node1").ip("route add 192.0.2.0/24 dev eth0")?;
    ensure!(lab.check_isolation().is_err(), "a route out was not seen");
    Ok(())
}

fn errors_are_reported_by_name() -> Result<()> {
    let lab = lab()?;
    let (sleep, near) = (lab.pod("sleep"), lab.pod("near"));
    for subcommand in ["connect", "http", "udp"] {
        for address in near.addresses() {
            let target = SocketAddr::new(address, 9).to_string();
            let report: Report = sleep
                .probe(subcommand)
                .args(["--to", &target, "--count", "2"])
                .json()?;
            let refused = report.errors.get("ECONNREFUSED");
            ensure!(
                refused == Some(&2) && report.answered == 0,
                "{subcommand}: {report:?}"
            );
        }
    }
    Ok(())
}

fn programs_end_with_their_handle() -> Result<()> {
    let lab = lab()?;
    let near = lab.pod("near");
    let server = serve(near)?;
    ensure!(
        near.processes() == [server.id()],
        "the server is not in its pod's cgroup"
    );
    drop(server);
    ensure!(
        near.processes().is_empty(),
        "the server outlived its handle"
    );
    Ok(())
}

/// Traces of a lab on the machine.
fn traces(id: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut look = |directory: &Path| {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains(id) {
                found.push(entry.path().display().to_string());
            }
        }
    };
    look(Path::new("/run/netns"));
    look(Path::new("/run/dataplane-lab"));
    if let Ok(mount) = cgroup2_mount() {
        look(&mount.join("dataplane-lab"));
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    found.extend(
        mounts
            .lines()
            .filter(|line| line.contains(id))
            .map(str::to_owned),
    );
    found
}

/// Whether a process runs. One that ended and was not waited for does not.
fn runs(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn a_lab_leaves_nothing_behind() -> Result<()> {
    let links = || -> Result<Vec<_>> {
        let entries = fs::read_dir("/sys/class/net")?;
        Ok(entries
            .map(|entry| entry.map(|e| e.file_name()))
            .collect::<Result<_, _>>()?)
    };
    let before = links()?;
    let lab = lab()?;
    let id = lab.id().to_string();
    lab.bpffs()?;
    let server = serve(lab.pod("near"))?;
    // A program that left its handle, as a daemon does.
    let script = "sleep 1000 >/dev/null 2>&1 & echo $!";
    let daemon = lab.pod("sleep").command("sh").args(["-c", script]).run()?;
    let pids = [daemon.trim().to_owned(), server.id().to_string()];
    ensure!(pids.iter().all(|pid| runs(pid)), "the programs do not run");
    ensure!(
        !traces(&id).is_empty(),
        "the lab is not where it was looked for"
    );
    ensure!(
        links()? == before,
        "the lab made links on the machine itself"
    );
    std::mem::forget(server);
    drop(lab);
    ensure!(traces(&id).is_empty(), "left behind: {:?}", traces(&id));
    ensure!(!pids.iter().any(|pid| runs(pid)), "processes are left");
    ensure!(links()? == before, "links are left");
    Ok(())
}

/// The variable by which this program is to [`abandon`] a lab.
pub const ABANDON: &str = "DATAPLANE_TEST_ABANDON";

/// Builds a lab, says which, and waits to be killed.
pub fn abandon() -> Result<()> {
    let lab = lab()?;
    lab.bpffs()?;
    let _server = serve(lab.pod("near"))?;
    println!("{}", lab.id());
    loop {
        std::thread::park();
    }
}

fn a_dead_creators_lab_is_swept() -> Result<()> {
    let mut creator = Command::new(std::env::current_exe()?)
        .env(ABANDON, "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(creator.stdout.take().context("stdout is piped")?).read_line(&mut line)?;
    let id: LabId = line
        .trim()
        .parse()
        .map_err(|()| anyhow!("not a lab's id: {line:?}"))?;
    let own = lab()?;
    ensure!(
        id.creator_state() == CreatorState::Alive,
        "{id}'s creator is taken for dead"
    );
    ensure!(
        !sweep().contains(&id),
        "the lab of a living creator was swept"
    );
    ensure!(
        !traces(&id.to_string()).is_empty(),
        "the lab of a living creator is gone"
    );
    creator.kill()?;
    creator.wait()?;
    ensure!(
        id.creator_state() == CreatorState::Dead,
        "{id}'s creator is taken for alive"
    );
    // Another test's lab may sweep it first: only the result counts.
    sweep();
    ensure!(
        traces(&id.to_string()).is_empty(),
        "left: {:?}",
        traces(&id.to_string())
    );
    own.check_isolation()
        .context("the sweep touched a living lab")
}
