//! Clients of a captured workload, from elsewhere: their results are those without capture.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    Host,
    report::{KeepReport, Report},
};
use serde_json::json;

use super::{World, mesh};
use crate::{
    cluster::{eventually, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    one_client_holds_as_many_connections_as_it_has_ports,
    a_closed_port_of_a_captured_pod_is_refused_at_once,
    what_a_stranger_holds_is_the_strangers_own,
    the_proxy_knows_new_endpoints_when_the_tables_do,
}

/// With any range of the client's ports: the proxy's own, all, those of Windows and macOS. The proxy's connections to
/// the application have the client's address, and some of its ports.
fn one_client_holds_as_many_connections_as_it_has_ports() -> Result<()> {
    let mut world = World::new()?;
    let (client, app) = (world.lab.pod("one").clone(), world.app().clone());
    let proxy = json!({ "accessLog": "off", "maxConnections": 8000 });
    world.capture(proxy, json!({ "mode": "proxy" }))?;
    for (ports, count) in [
        ("61000 62999", 1900),
        ("1024 65535", 3000),
        ("49152 65535", 3000),
    ] {
        client.sysctl("ipv4/ip_local_port_range", ports)?;
        for ip in app.addresses() {
            let to = SocketAddr::new(ip, 7).to_string();
            let count = if dataplane_tests::emulated() {
                count / 10
            } else {
                count
            };
            let (kept, counted) =
                world.counted(Reason::CapturedInbound, || keeps(&client, &to, count))?;
            ensure!(
                kept == count,
                "{ports}: {kept} of {count} connections to {to} lived"
            );
            ensure!(
                counted >= count,
                "{ports}: {counted} of {count} were captured"
            );
        }
    }
    // The application sees the client's address, and one of its ports, which no other connection uses any more.
    let report = reaches(&client, "10.244.1.8:7", "connect --count 50", &["app"])?;
    let sources: Vec<_> = report.endpoints["app"].sources.keys().collect();
    ensure!(sources == [&client.ipv4()], "it saw {sources:?}");
    Ok(())
}

/// How many of so many connections live, when all are there.
fn keeps(client: &Host, to: &str, count: u64) -> Result<u64> {
    let count = count.to_string();
    let keep = client
        .probe("keep")
        .args(["--to", to, "--timeout-ms", "10000", "--count", &count]);
    let mut keep = keep.stdin_piped().stdout_piped().spawn()?;
    let made: KeepReport = serde_json::from_str(&keep.wait_for_line()?)?;
    keep.send_line("")?;
    let kept: KeepReport = serde_json::from_str(&keep.wait_for_line()?)?;
    keep.close_stdin();
    keep.wait()?;
    ensure!(
        made.errors.is_empty() && kept.errors.is_empty(),
        "{to}: {made:?}, {kept:?}"
    );
    Ok(kept.alive)
}

/// A client that opens as many connections as it can leaves room for the pod's own connections and for other clients.
fn what_a_stranger_holds_is_the_strangers_own() -> Result<()> {
    let mut world = World::new()?;
    let config = mesh(json!({ "maxConnections": 100 }), json!({ "mode": "proxy" }));
    let pods = world.pods()?;
    world.agent_with(&config, &[pods])?;
    let (app, stranger) = (world.app().clone(), world.lab.pod("one").clone());
    for (ip, web) in app
        .addresses()
        .into_iter()
        .zip(["10.96.0.10:80", "[fd00:96::10]:80"])
    {
        let to = SocketAddr::new(ip, 7).to_string();
        let keep =
            stranger
                .probe("keep")
                .args(["--to", &to, "--timeout-ms", "500", "--count", "110"]);
        let mut keep = keep.stdin_piped().stdout_piped().spawn()?;
        let held: KeepReport = serde_json::from_str(&keep.wait_for_line()?)?;
        ensure!((40..100).contains(&held.alive), "it holds {held:?}");
        reaches(&app, web, "connect --count 5", &["far"])?;
        for other in ["two", "far"] {
            reaches(world.lab.pod(other), &to, "connect --count 5", &["app"])?;
        }
        keep.close_stdin();
        keep.wait()?;
    }
    Ok(())
}

/// The proxy gives an attempt five seconds.
fn a_closed_port_of_a_captured_pod_is_refused_at_once() -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    for (from, ip) in ["one", "far"]
        .iter()
        .flat_map(|from| world.app().addresses().map(|ip| (*from, ip)))
    {
        let to = SocketAddr::new(ip, 9).to_string();
        let probe = world.lab.pod(from).probe("connect");
        let report: Report = probe.args(["--to", &to, "--count", "3"]).json()?;
        ensure!(
            report.errors.keys().eq(["ECONNRESET"]),
            "from {from}, {to}: {report:?}"
        );
    }
    Ok(())
}

/// Also while other services change all the time: the thread that attaches rests after each change.
fn the_proxy_knows_new_endpoints_when_the_tables_do() -> Result<()> {
    let mut world = World::new()?;
    let (app, one, two) = (
        world.app().clone(),
        world.lab.pod("one").clone(),
        world.lab.pod("two").clone(),
    );
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let far = world.lab.pod("far").clone();
    for round in 0..10 {
        let endpoint = if round % 2 == 0 { &one } else { &two };
        let web = Service::new("web", &["10.96.0.10"])
            .port("tcp", 80, 7)
            .endpoints(&[endpoint]);
        let other = format!("10.96.1.{}", round + 1);
        let other = Service::new("other", &[&other])
            .port("tcp", 80, 7)
            .endpoints(&[&far]);
        world.manifests.write(&[web, other])?;
        // A pod that is not captured goes by the tables.
        eventually(|| reaches(&two, "10.96.0.10:80", "connect", &[endpoint.name()]).map(drop))?;
        reaches(
            &app,
            "10.96.0.10:80",
            "connect --count 3",
            &[endpoint.name()],
        )?;
    }
    Ok(())
}
