//! Limits of the DNS server: how long and how much its cache keeps, and how many files it opens.

use std::{fs, net::UdpSocket, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::{
    cluster::{TCP, reaches},
    dns_world::{ADMIN, CACHE, OUTSIDE, SERVICE, TTL, World},
    metrics::Metrics,
    proxy::inside,
    readers::memory,
};

scenarios! {
    Dataplane:
    answers_are_kept_as_the_configuration_says,
    the_cache_is_shown_and_forgets,
    names_in_the_cache_take_the_memory_that_is_counted,
    queries_and_connections_leave_open_files_to_each_other,
}

fn answers_are_kept_as_the_configuration_says() -> Result<()> {
    let mut world = World::start(&json!({}), |text| text)?;
    let told = world.told(&format!("@10.96.0.53 {SERVICE}"))?;
    let wanted = format!("{SERVICE} {TTL} IN A 10.96.0.10");
    let mut lines = told.lines();
    ensure!(
        lines.any(|line| line.split_whitespace().eq(wanted.split(' '))),
        "{told}"
    );
    let room = Metrics::scrape(world.lab.node("node1"))?.sum("dataplane_dns_cache_max_bytes", &[]);
    ensure!((room - f64::from(CACHE)).abs() < 0.5, "{room} bytes");
    // The cache has a stale answer, and clients do not get it. The record's TTL is 2 s.
    world.dig("10.96.0.53", "www.example.com. A", "192.0.2.80")?;
    world.unbound.kill();
    thread::sleep(Duration::from_secs(3));
    let told = world.told("+time=6 @10.96.0.53 www.example.com. A")?;
    ensure!(told.contains("status: SERVFAIL"), "{told}");
    Ok(())
}

fn the_cache_is_shown_and_forgets() -> Result<()> {
    let world = World::start(&json!({}), |text| text)?;
    let cache = |more: &[&str]| -> Result<Value> {
        let command = world.agent.dataplane(["dns", "cache", "-o", "json"]);
        Ok(command.args(more).json()?)
    };
    let asked = || -> Result<f64> {
        let now = Metrics::scrape(world.lab.node("node1"))?;
        Ok(now.sum("istio_dns_upstream_requests_total", &[]))
    };
    let ask = |name: &str| world.told(&format!("@10.96.0.53 {name}"));
    for name in [OUTSIDE, "missing.example."] {
        ask(name)?;
    }
    let shown = cache(&[])?;
    let shop = &shown["namespaces"][0];
    ensure!(
        shown["entries"] == 2
            && shown["max_bytes"] == CACHE
            && shop["namespace"] == "shop"
            && shop["entries"] == 2
            && shop["bytes"] == shown["bytes"],
        "{shown}"
    );
    let text = world.agent.dataplane(["dns", "cache"]).run()?;
    ensure!(
        text.contains("2 answers, ") && text.contains("shop"),
        "{text}"
    );
    // One name, in any case; then all.
    let once = asked()?;
    ensure!(cache(&["--flush", "DB.corp.example"])?["flushed"] == 1);
    ask("missing.example.")?;
    ensure!((asked()? - once).abs() < 0.5, "asked again");
    ask(OUTSIDE)?;
    ensure!(asked()? > once, "not asked again");
    let node = world.lab.node("node1");
    let over_tcp = |method: &str, path: &str| {
        let curl = node
            .command("curl")
            .args(["-s", "-o", "/dev/null", "-X", method]);
        let url = format!("http://{ADMIN}{path}");
        curl.args(["-w", "%{http_code}", &url]).run()
    };
    ensure!(over_tcp("GET", "/dns/cache")?.trim() == "200", "not shown");
    ensure!(
        over_tcp("POST", "/dns/cache/flush")?.trim() == "404",
        "by TCP"
    );
    ensure!(cache(&["--flush"])?["flushed"] == 2);
    ensure!(cache(&[])?["entries"] == 0);
    Ok(())
}

/// `unbound` has an answer for all names below this one.
const MANY: &str =
    " local-zone: many.example. redirect\n local-data: 'many.example. 60 IN A 192.0.2.1'\n";

/// The allocator puts allocations of the cache between those of waiting queries, and does not fill the holes that these
/// leave. With an allocation for each answer, the memory grew by more than twice the cache's bytes.
fn names_in_the_cache_take_the_memory_that_is_counted() -> Result<()> {
    let world = World::start_with(&json!({ "rules": {} }), |text| text, MANY, None)?;
    let fill = |name: &str, count: &str, rate: &str| -> Result<()> {
        let probe = world.app().probe("dns").args(["--to", "10.96.0.53:53"]);
        let probe = probe.args(["--name", name, "--count", count, "--rate", rate]);
        // On a busy machine, some are refused.
        probe.run()?;
        Ok(())
    };
    let bytes = || -> Result<u64> {
        let cache = world.agent.dataplane(["dns", "cache", "-o", "json"]);
        cache.json::<Value>()?["bytes"].as_u64().context("bytes")
    };
    // As many queries wait as may.
    fill("a{}.many.example.", "500", "20000")?;
    // On a busy machine, more queries may wait than before, which take memory once.
    let mut seen = Vec::new();
    for round in ["b", "c"] {
        let before = (memory(&world.agent)?, bytes()?);
        fill(&format!("{round}{{}}.many.example."), "5000", "2500")?;
        let taken = memory(&world.agent)?.saturating_sub(before.0) * 1024;
        let counted = bytes()?.saturating_sub(before.1);
        println!("{taken} bytes for {counted} bytes in the cache");
        ensure!(counted > 2000 * 200, "{counted} bytes");
        if taken < 2 * counted {
            return Ok(());
        }
        seen.push((taken, counted));
    }
    bail!("bytes taken and counted: {seen:?}")
}

/// The agent's limit of open files, beyond which `accept()` and `socket()` fail.
const FILES: usize = 440;
/// The number of connections that the proxy could have without a DNS server.
const CONNECTIONS: usize = 76;

/// `unbound` asks a server for these names, and never hears from it.
const SLOW: &str = " do-not-query-localhost: no\n local-zone: slow.example. transparent\n\
                    forward-zone:\n name: slow.example.\n forward-addr: 127.0.0.1@5399\n";
/// A pod of another namespace than `app`.
const OTHER: &str = "\
---
apiVersion: v1
kind: Pod
metadata: {name: other, namespace: other}
spec: {nodeName: node1}
status: {podIP: 10.244.1.12}
";

/// A pod asks as much as it may for names that have no answer, and has as many connections as it may have, to the DNS
/// server and by the proxy. Connections and queries of another namespace's pod still get files.
fn queries_and_connections_leave_open_files_to_each_other() -> Result<()> {
    let proxy = json!({ "maxConnections": CONNECTIONS, "accessLog": "off" });
    let mesh = json!({ "rules": { "mode": "proxy" }, "proxy": proxy });
    let world = World::start_with(&mesh, |text| text + OTHER, SLOW, Some(FILES))?;
    let (app, other) = (world.app(), world.lab.pod("other"));
    let upstream = world.lab.pod("upstream");
    let _silent = inside(upstream, || UdpSocket::bind("127.0.0.1:5399"))?;
    let to = format!("{}:{TCP}", upstream.ipv4());
    let _server = upstream.serve(&["--tcp", &to])?;
    let flood = world.look_up("n{}.slow.example.", &["--rate", "300"])?;
    // Without a bound, these queries would have all open files after two seconds.
    thread::sleep(Duration::from_secs(2));
    let keep = app.probe("keep").args(["--slow", "--count", "200", "--to"]);
    let mut keep = keep.arg(&to).stdin_piped().stdout_piped().spawn()?;
    keep.wait_for_line()?;
    let ask = app.probe("keep").args(["--slow", "--count", "200"]);
    let ask = ask.args(["--to", "10.96.0.53:53"]);
    let mut ask = ask.stdin_piped().stdout_piped().spawn()?;
    ask.wait_for_line()?;
    // The proxy accepts as many connections as it may.
    thread::sleep(Duration::from_secs(1));
    let open = fs::read_dir(format!("/proc/{}/fd", world.agent.id()))?.count();
    println!("{open} open files of {FILES}");
    for number in 0..20 {
        let dig = other.command("dig").args(["@10.96.0.53", OUTSIDE]);
        let told = dig.args(["+short", "+tries=1", "+time=4", "+tcp"]).run()?;
        ensure!(told.trim() == "192.0.2.90", "query {number}: {told}");
        reaches(other, &to, "connect", &["upstream"])
            .with_context(|| format!("connection {number}"))?;
        thread::sleep(Duration::from_millis(50));
    }
    let log = world.agent.log();
    ensure!(!log.contains("EMFILE"), "{log}");
    drop((flood, keep, ask));
    // The agent has started although the proxy takes fewer connections than the configuration asks for: `status` warns.
    let status = world.agent.dataplane(["status"]).output()?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        status.contains("open files are short") && status.contains("its DNS server"),
        "{status}"
    );
    Ok(())
}
