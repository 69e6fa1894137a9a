//! Connections to destinations that the agent does not know yet. The kernel's programs do not judge connections by a
//! virtual interface, so the agent's proxy does.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::report::Report;
use serde_json::{Value, json};

use super::{
    World,
    interfaces::{asks, machine, rules, world},
};
use crate::{
    cluster::{eventually, fails},
    manifest::Service,
    metrics::Metrics,
};

scenarios! {
    Dataplane:
    a_connection_waits_until_its_destination_is_known,
    an_unknown_destination_is_refused_in_the_end,
}

/// An endpoint of no service yet.
const TO: &str = "10.244.1.6:7";

/// Captures the machine's connections, denies unknown destinations, and leaves the Pod of `TO` out. Returns the contents
/// of the file with all Pods.
fn deny(world: &mut World, time: &str) -> Result<String> {
    let mut rules = rules();
    rules["egress"] = json!("deny");
    world.capture(json!({ "holdTimeout": time }), rules)?;
    asks(world, "10.244.2.5:7", "far", true)?;
    let path = world.state.path().join("others.yaml");
    let all = fs::read_to_string(&path)?;
    let mut list: Value = serde_json::from_str(&all)?;
    let pods = list["items"].as_array_mut().context("a list")?;
    pods.retain(|pod| pod["metadata"]["name"] != "two");
    fs::write(&path, list.to_string())?;
    Ok(all)
}

/// How many connections have waited.
fn waited(world: &World) -> Result<f64> {
    let metrics = Metrics::scrape(world.lab.node("node1"))?;
    Ok(metrics.sum("dataplane_proxy_unknown_total", &[]))
}

fn a_connection_waits_until_its_destination_is_known() -> Result<()> {
    let mut world = world()?;
    let pods = deny(&mut world, "30s")?;
    // Until the agent has read the file, the Pod is known, and its port is denied.
    let mut client = None;
    eventually(|| {
        let probe = machine(&world).probe("connect");
        let probe = probe.args(["--to", TO, "--timeout-ms", "30000"]);
        client = Some(probe.stdout_piped().spawn()?);
        std::thread::sleep(Duration::from_millis(200));
        ensure!(waited(&world)? > 0.0, "no connection waits");
        Ok(())
    })?;
    // A rule denies this connection, so it does not wait: the Pod does not declare the port.
    let begin = Instant::now();
    fails(machine(&world), "10.244.1.5:7", "connect", "ECONNRESET")?;
    ensure!(begin.elapsed() < Duration::from_secs(20), "it waited");
    let lab = &world.lab;
    let web = Service::new("web", &["10.96.0.10", "fd00:96::10"]).port("tcp", 80, 7);
    let two = Service::new("two", &["10.96.0.11"]).port("tcp", 80, 7);
    world.manifests.write(&[
        web.endpoints(&[lab.pod("far")]),
        two.endpoints(&[lab.pod("two")]),
    ])?;
    fs::write(world.state.path().join("others.yaml"), pods)?;
    let report: Report = client.context("a client")?.wait_json()?;
    ensure!(
        report.answered == 1 && report.endpoints.keys().eq(["two"]),
        "{report:?}"
    );
    Ok(())
}

fn an_unknown_destination_is_refused_in_the_end() -> Result<()> {
    let mut world = world()?;
    deny(&mut world, "1s")?;
    let stranger = "192.0.2.1:80";
    let begin = Instant::now();
    let probe = "connect --timeout-ms 15000";
    fails(machine(&world), stranger, probe, "ECONNRESET")?;
    let took = begin.elapsed();
    ensure!(took >= Duration::from_secs(1), "refused after {took:?}");
    ensure!(waited(&world)? > 0.0, "it did not wait");
    Ok(())
}
