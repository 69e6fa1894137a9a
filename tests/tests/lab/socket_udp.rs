//! One UDP socket and its VIPs: several at once, more than are remembered, connected again.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Reason, tables::UDP_FLOWS};
use dataplane_tests::{
    Lab,
    report::{Attempt, Report},
};

use kernel::sockets::Sweeper;

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    one_socket_talks_to_several_vips,
    the_oldest_of_too_many_vips_is_forgotten,
    a_socket_connected_again_tells_the_truth,
    a_socket_leaves_an_endpoint_that_left,
    places_of_unconnected_sockets_are_freed,
    two_threads_send_a_sockets_first_datagrams,
}

/// One socket, all these addresses in turn: `count` datagrams.
fn in_turn(cluster: &Cluster, to: &[SocketAddr], how: &[&str], count: usize) -> Result<Report> {
    let mut probe = cluster
        .client()
        .probe("udp")
        .args(["--one-socket", "--each"]);
    for address in to {
        probe = probe.args(["--to", &address.to_string()]);
    }
    let report: Report = probe
        .args(["--count", &count.to_string()])
        .args(how)
        .json()?;
    ensure!(
        report.answered == count as u64 && report.each.len() == count,
        "not all were answered: {report:?}"
    );
    Ok(report)
}

/// Wants every answer to come from the address that was asked.
fn answers_come_from<'a>(
    asked: impl IntoIterator<Item = &'a SocketAddr>,
    each: &[Attempt],
) -> Result<()> {
    for (number, (attempt, to)) in each.iter().zip(asked).enumerate() {
        ensure!(
            attempt.from == Some(*to),
            "datagram {number} to {to}: {attempt:?}"
        );
    }
    Ok(())
}

/// A service of UDP alone, at `10.96.0.N` and `fd00:96::N`.
fn numbered(number: usize, lab: &Lab, endpoints: &[&str]) -> Service {
    let vips = [vip(number, true), vip(number, false)].map(|vip| vip.ip().to_string());
    Service::new(&format!("udp-{number}"), &[&vips[0], &vips[1]])
        .port("udp", 53, UDP)
        .endpoints(
            &endpoints
                .iter()
                .map(|name| lab.pod(name))
                .collect::<Vec<_>>(),
        )
}

fn vip(number: usize, v4: bool) -> SocketAddr {
    let text = if v4 {
        format!("10.96.0.{number}:53")
    } else {
        format!("[fd00:96::{number}]:53")
    };
    text.parse().expect("an address")
}

/// Services 21 and 22 have one endpoint in common, 23 has others. Replies come from the VIP that was asked, also where
/// the endpoint alone does not tell.
fn one_socket_talks_to_several_vips() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| {
        vec![
            numbered(21, lab, &["near"]),
            numbered(22, lab, &["near"]),
            numbered(23, lab, &["far", "near2"]),
        ]
    })?;
    let plain: SocketAddr = "10.244.1.5:53".parse()?;
    for (v4, how) in [
        (true, &["--unconnected"][..]),
        (true, &["--unconnected", "--v4-mapped"]),
        (false, &["--unconnected"]),
        // Connected to one after the other: getpeername follows.
        (true, &["--reconnect"]),
        (true, &["--reconnect", "--v4-mapped"]),
        (false, &["--reconnect"]),
    ] {
        let to = [21, 22, 23].map(|number| vip(number, v4));
        let report = in_turn(&cluster, &to, how, 30)?;
        answers_come_from(to.iter().cycle(), &report.each).with_context(|| format!("{how:?}"))?;
        for (attempt, to) in report.each.iter().zip(to.iter().cycle()) {
            let connected = how.contains(&"--reconnect");
            ensure!(
                attempt.peer == connected.then_some(*to),
                "{how:?}: {attempt:?}"
            );
            let near = attempt.endpoint.as_deref() == Some("near");
            ensure!(
                near == (to.ip() != vip(23, v4).ip()),
                "{to} was answered by {attempt:?}"
            );
        }
    }
    // One VIP several times, then also the other VIP of its endpoint.
    for v4 in [true, false] {
        let to = [21, 21, 22, 22, 21].map(|number| vip(number, v4));
        let report = in_turn(&cluster, &to, &["--unconnected"], 20)?;
        answers_come_from(to.iter().cycle(), &report.each)?;
    }
    // Between VIPs, an address that is no VIP.
    let to = [vip(21, true), plain, vip(22, true)];
    let report = in_turn(&cluster, &to, &["--unconnected"], 30)?;
    answers_come_from(to.iter().cycle(), &report.each)
}

/// A socket remembers so many VIPs. Another VIP replaces the least recently added one, which is counted; when the
/// client uses that VIP again, the socket remembers it again, perhaps with another endpoint.
fn the_oldest_of_too_many_vips_is_forgotten() -> Result<()> {
    let numbers = 100..100 + UDP_FLOWS + 4;
    let cluster = Cluster::of_sockets(|lab| {
        numbers
            .clone()
            .map(|number| numbered(number, lab, &["far", "near", "near2"]))
            .collect()
    })?;
    for v4 in [true, false] {
        let all: Vec<_> = numbers.clone().map(|number| vip(number, v4)).collect();
        let fits = &all[..UDP_FLOWS];
        let rounds = 3;
        let report = cluster.for_reason(Reason::FlowForgotten, 0, || {
            in_turn(&cluster, fits, &["--unconnected"], rounds * fits.len())
        })?;
        answers_come_from(fits.iter().cycle(), &report.each)?;
        let (first, later) = report.each.split_at(fits.len());
        for (number, attempt) in later.iter().enumerate() {
            ensure!(
                attempt.endpoint == first[number % fits.len()].endpoint,
                "{} moved from one endpoint to another: {report:?}",
                fits[number % fits.len()]
            );
        }
        // In turn, each VIP is replaced just before it is used again.
        let count = rounds * all.len();
        let forgotten = (count - UDP_FLOWS) as u64;
        let report = cluster.for_reason(Reason::FlowForgotten, forgotten, || {
            in_turn(&cluster, &all, &["--unconnected"], count)
        })?;
        answers_come_from(all.iter().cycle(), &report.each)?;
    }
    Ok(())
}

/// A socket that was connected to a VIP and then to that VIP's endpoint itself has the endpoint as
/// its peer, and gets replies from it.
fn a_socket_connected_again_tells_the_truth() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| {
        vec![
            numbered(21, lab, &["near"]),
            Service::new("tcp", &["10.96.0.30"])
                .port("tcp", 80, TCP)
                .endpoints(&[lab.pod("near")]),
        ]
    })?;
    let near = cluster.lab.pod("near").addresses();
    for (v4, mapped) in [(true, None), (true, Some("--v4-mapped")), (false, None)] {
        let mut how = vec!["--reconnect"];
        how.extend(mapped);
        let plain = SocketAddr::new(near[usize::from(!v4)], UDP);
        let to = [vip(21, v4), plain];
        let report = in_turn(&cluster, &to, &how, 10)?;
        answers_come_from(to.iter().cycle(), &report.each)?;
        for (attempt, to) in report.each.iter().zip(to.iter().cycle()) {
            ensure!(attempt.peer == Some(*to), "{how:?}, {to}: {attempt:?}");
        }
        // A VIP that the socket used without being connected does not answer for the endpoint.
        let mut how = vec!["--unconnected", "--connect-after", "2"];
        how.extend(mapped);
        let to = [vip(21, v4), vip(21, v4), plain];
        let report = in_turn(&cluster, &to, &how, 3)?;
        answers_come_from(&to, &report.each)?;
        let peers: Vec<_> = report.each.iter().map(|attempt| attempt.peer).collect();
        ensure!(peers == [None, None, Some(plain)], "{how:?}: {report:?}");
    }
    Ok(())
}

/// The counterpart of a stale conntrack entry with kube-proxy: a resolver's socket that goes on sending to an endpoint
/// that is gone. Here the next datagram goes to one that is there.
fn a_socket_leaves_an_endpoint_that_left() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| vec![numbered(21, lab, &["near"])])?;
    let mut sockets = Vec::new();
    for v4 in [true, false] {
        let to = vip(21, v4).to_string();
        let how = ["--one-socket", "--unconnected", "--until-stdin-closes"];
        let probe = cluster.client().probe("udp").args(["--each", "--to", &to]);
        let mut socket = probe.args(how).stdin_piped().stdout_piped().spawn()?;
        socket.wait_for_line()?;
        sockets.push((to, socket));
    }
    for (to, _) in &sockets {
        reaches(cluster.client(), to, "udp --count 50", &["near"])?;
    }
    let moved = [numbered(21, &cluster.lab, &["far"])];
    cluster.manifests.write(&moved)?;
    for (to, _) in &sockets {
        eventually(|| reaches(cluster.client(), to, "udp", &["far"]).map(drop))?;
        reaches(cluster.client(), to, "udp --count 50", &["far"])?;
    }
    for (to, socket) in sockets {
        let report: Report = socket.wait_json()?;
        let answers: Vec<_> = report.each.iter().map(|a| a.endpoint.as_deref()).collect();
        let left = answers.partition_point(|endpoint| *endpoint == Some("near"));
        ensure!(
            left > 0 && left < answers.len(),
            "{to}: did not move: {:?}",
            report.endpoints
        );
        ensure!(
            answers[left..].iter().all(|e| *e == Some("far")) && report.errors.is_empty(),
            "{to}: not near, then far: {answers:?}"
        );
        answers_come_from(std::iter::repeat(&to.parse()?), &report.each)?;
    }
    Ok(())
}

/// Opens the table of places; `None`, with a line that says so, if this process does not see all sockets.
fn places(cluster: &Cluster, scenario: &str) -> Result<Option<Sweeper>> {
    let sweeper = Sweeper::open(cluster.agent.bpffs(), cluster.agent.cgroup())?;
    if sweeper.is_none() {
        println!("skipped socket_udp::{scenario}: this is not the machine's PID namespace");
    }
    Ok(sweeper)
}

/// An unconnected socket has a place while it is open, which no search for closed sockets frees; also if it then talks to
/// several VIPs, or is connected to an address without a service, at a port that no endpoint has.
fn places_of_unconnected_sockets_are_freed() -> Result<()> {
    let cluster = Cluster::of_sockets(|lab| {
        vec![
            numbered(21, lab, &["near"]),
            numbered(22, lab, &["near"]),
            numbered(23, lab, &["far", "near2"]),
        ]
    })?;
    let Some(mut sweeper) = places(&cluster, "places_of_unconnected_sockets_are_freed")? else {
        return Ok(());
    };
    let near = cluster.lab.pod("near").addresses();
    for (v4, mapped) in [(true, None), (true, Some("--v4-mapped")), (false, None)] {
        let to = [21, 22, 23].map(|number| vip(number, v4).to_string());
        let udp = |to: &[&str]| {
            let probe = cluster.client().probe("udp").args(["--unconnected"]);
            let probe = to.iter().fold(probe, |probe, to| probe.args(["--to", to]));
            probe.args(mapped)
        };
        let how = ["--one-socket", "--each", "--until-stdin-closes"];
        let held = udp(&[&to[0]]).args(how).stdin_piped().stdout_piped();
        let mut held = held.spawn()?;
        held.wait_for_line()?;
        let one_is_taken = || {
            let taken = sweeper.taken();
            ensure!(taken == 1, "{v4} {mapped:?}: {taken} places are taken");
            Ok(())
        };
        eventually(one_is_taken)?;
        // Many sockets, one after the other.
        let report: Report = udp(&[&to[0], &to[2]]).args(["--count", "100"]).json()?;
        ensure!(report.answered == 100, "{report:?}");
        // Several VIPs, by one socket.
        let probe = udp(&[&to[0], &to[1], &to[2]]).args(["--one-socket", "--count", "6"]);
        let report: Report = probe.json()?;
        ensure!(report.answered == 6, "{report:?}");
        // Connected at last: nothing answers there.
        let nowhere = SocketAddr::new(near[usize::from(!v4)], 9).to_string();
        let probe = udp(&[&to[0], &nowhere]).args(["--one-socket", "--connect-after", "1"]);
        let report: Report = probe.args(["--count", "2"]).json()?;
        ensure!(report.answered == 1, "{report:?}");
        one_is_taken()?;
        // The live socket keeps its place, and its answers come from the VIP.
        let freed = sweeper.sweep()? + sweeper.sweep()?;
        ensure!(freed == 0 && sweeper.taken() == 1, "{freed} were freed");
        held.close_stdin();
        let report: Report = held.wait_json()?;
        ensure!(report.errors.is_empty(), "{report:?}");
        answers_come_from(std::iter::repeat(&vip(21, v4)), &report.each)?;
        ensure!(sweeper.taken() == 0, "{} are left", sweeper.taken());
    }
    Ok(())
}

/// Sending takes no lock: each thread may choose an endpoint, and take a place.
fn two_threads_send_a_sockets_first_datagrams() -> Result<()> {
    let endpoints = ["near", "near2", "far"];
    let cluster = Cluster::of_sockets(|lab| {
        vec![numbered(21, lab, &endpoints), numbered(22, lab, &endpoints)]
    })?;
    let places = places(&cluster, "two_threads_send_a_sockets_first_datagrams")?;
    for v4 in [true, false] {
        let to = [21, 22].map(|number| vip(number, v4));
        let twice = |to: SocketAddr, count: &str| {
            let probe = cluster.client().probe("udp").args(["--unconnected"]);
            let probe = probe.args(["--twice", "--each", "--to", &to.to_string()]);
            probe.args(["--count", count])
        };
        let report: Report = twice(to[0], "500").json()?;
        ensure!(report.answered == 500, "{report:?}");
        answers_come_from(std::iter::repeat(&to[0]), &report.each)?;
        for _ in 0..20 {
            let report = in_turn(&cluster, &to, &["--unconnected", "--twice"], 10)?;
            answers_come_from(to.iter().cycle(), &report.each)?;
        }
        if let Some(sweeper) = &places {
            ensure!(sweeper.taken() == 0, "{} are left", sweeper.taken());
        }
    }
    Ok(())
}
