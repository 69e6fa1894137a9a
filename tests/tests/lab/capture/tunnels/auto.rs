//! `mode: auto`: which connections go to the proxy, and that none goes in plaintext to a Pod that speaks HBONE.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dataplane_common::{Protocol, Reason};
use dataplane_tests::{
    patience,
    report::{LoadReport, Report},
};
use kernel::trial::Flips;
use serde_json::{Value, json};

use super::{PLAINTEXT, World, has, object, tcp};
use crate::{
    cluster::{ask, counted, eventually, lived, reaches, refused, verdicts},
    sockets::{arrived, tap},
};

/// What leads to `far`, and what leads to `plain`, which does not speak HBONE.
pub(super) const TO_FAR: [&str; 2] = ["10.244.2.5:80", "10.96.0.10:80"];
const TO_PLAIN: [&str; 2] = ["10.244.2.6:80", "10.96.0.11:80"];

impl World {
    /// Wants `explain` to say this of a connection of `app` in the mode `auto`, once the agent has the present manifests.
    pub(super) fn says(&self, to: &str, reason: Reason, why: &str) -> Result<()> {
        eventually(|| {
            let explain = |more: &[&str]| {
                let arguments = [&["explain", "default/app", to], more].concat();
                self.agents[0].dataplane(arguments)
            };
            let text = explain(&[]).run()?;
            ensure!(text.contains(why), "{to}: no {why:?}: {text}");
            let told: Value = explain(&["-o", "json"]).json()?;
            let found = &told["capture"][0];
            ensure!(found["reason"] == reason.word(), "{to}: {told:#}");
            let is_by_mode = found["rule"]["about"] == "mode" && found["rule"]["says"] == "auto";
            ensure!(is_by_mode == (reason == Reason::Direct), "{to}: {told:#}");
            Ok(())
        })
    }

    /// Wants a connection of `app` to be counted for this reason.
    fn counts(&self, to: &str, reason: Reason, endpoint: &str) -> Result<()> {
        let work = || reaches(self.app(), to, "http", &[endpoint]);
        let (_, count) = counted(&self.agents[0], reason, work)?;
        ensure!(count > 0, "{to}: not counted as {}", reason.word());
        Ok(())
    }
}

/// With `withoutProxy: pass`, too, nothing reaches `far` in plaintext while it speaks HBONE.
pub fn auto_tunnels_only_what_speaks_hbone() -> Result<()> {
    let rules = json!({ "mode": "auto", "withoutProxy": "pass" });
    let mut world = World::with(["ca", "ca"], &rules)?;
    for (to, why) in TO_PLAIN.into_iter().zip([
        "no Pod at this address is known to speak HBONE",
        "no endpoint of the service speaks HBONE",
    ]) {
        world.says(to, Reason::Direct, why)?;
        world.counts(to, Reason::Direct, "plain")?;
    }
    let tunnelled = |world: &World| -> Result<()> {
        for (to, why) in TO_FAR.into_iter().zip([
            "the Pod at this address speaks HBONE",
            "an endpoint of the service speaks HBONE",
        ]) {
            world.says(to, Reason::Captured, why)?;
            // The proxy has the change a little later than the tables.
            eventually(|| {
                let taps = world.taps()?;
                world.counts(to, Reason::Captured, "far")?;
                ensure!(world.only_tunnels(&taps)? > 0, "{to}: no tunnel");
                Ok(())
            })?;
        }
        Ok(())
    };
    tunnelled(&world)?;
    let mut twin = object(world.lab.pod("far"), "node2", false);
    twin["metadata"]["name"] = "twin".into();
    world.write(true, &[twin])?;
    world.says(
        TO_FAR[0],
        Reason::Captured,
        "several Pods have this address",
    )?;
    eventually(|| {
        let report = ask(world.app(), TO_FAR[0], "http")?;
        ensure!(report.answered == 0, "{report:?}");
        Ok(())
    })?;
    world.write(false, &[])?;
    for to in TO_FAR {
        world.says(to, Reason::Direct, "HBONE")?;
        let taps = world.taps()?;
        world.counts(to, Reason::Direct, "far")?;
        let seen = taps.iter().flat_map(arrived);
        let plain = seen.filter(|frame| has(frame, PLAINTEXT)).count();
        ensure!(plain > 0, "{to}: not direct");
    }
    world.write(true, &[])?;
    tunnelled(&world)?;
    let status = world.agents[0].status()?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    let rows = || status.lines().filter(|line| line.contains("default/app"));
    ensure!(rows().any(|row| row.contains(" auto ")), "{status}");
    world.agents[0].kill();
    let taps = world.taps()?;
    for to in TO_FAR {
        refused(world.app(), to, "http")?;
    }
    world.only_tunnels(&taps)?;
    for to in TO_PLAIN {
        reaches(world.app(), to, "http", &["plain"])?;
    }
    Ok(())
}

/// `far` accepts plaintext of `plain` directly, until a policy demands an identity.
pub fn auto_leads_plaintext_to_the_proxy_if_a_policy_selects_the_pod() -> Result<()> {
    let world = World::with(["ca", "ca"], &json!({ "mode": "auto" }))?;
    let (agent, plain) = (&world.agents[1], world.lab.pod("plain"));
    let to = TO_FAR[0];
    let inbound = |reason: Reason| {
        eventually(|| {
            let explain = agent.dataplane(["explain", "10.244.2.6", to, "-o", "json"]);
            let told: Value = explain.json()?;
            let found = &told["capture"][0];
            ensure!(found["reason"] == reason.word(), "{told:#}");
            Ok(())
        })
    };
    inbound(Reason::Direct)?;
    let work = || reaches(plain, to, "http", &["far"]);
    let (_, captured) = counted(agent, Reason::CapturedInbound, work)?;
    ensure!(captured == 0, "plaintext went to the proxy");
    reaches(world.app(), to, "http", &["far"])?;
    let by_tunnel = world.app().hold("10.244.2.5:7")?;
    let mut forbidden = plain.hold("10.244.2.5:7")?;
    let strict = json!({
        "apiVersion": "security.istio.io/v1",
        "kind": "PeerAuthentication",
        "metadata": { "name": "strict", "namespace": "default" },
        "spec": { "mtls": { "mode": "STRICT" } },
    });
    world.write(true, &[strict])?;
    inbound(Reason::CapturedInbound)?;
    let work = || ask(plain, to, "http");
    let (report, captured) = counted(agent, Reason::CapturedInbound, work)?;
    ensure!(
        captured > 0 && report.answered == 0,
        "plaintext in spite of STRICT: {report:?}, {captured}"
    );
    // The connection that went directly ends with the policy, and others do not.
    eventually(|| {
        let log = agent.log();
        let ended = "direct connections that its policies forbid";
        ensure!(log.contains(ended), "{log}");
        Ok(())
    })?;
    forbidden.close_stdin();
    let report: Report = forbidden.wait_json()?;
    ensure!(report.errors.contains_key("ECONNRESET"), "{report:?}");
    lived(by_tunnel)?;
    reaches(world.app(), to, "http", &["far"])?;
    world.write(true, &[])?;
    inbound(Reason::Direct)?;
    reaches(plain, to, "http", &["far"])?;
    Ok(())
}

/// The endpoint of a service changes between `plain` and `far` while `app` connects to it all the time. The test writes the words
/// of the pools itself, as in `once::flip`.
pub fn no_flip_of_a_slice_sends_plaintext() -> Result<()> {
    for egress in ["allow", "deny"] {
        let rules = json!({ "mode": "auto", "withoutProxy": "pass", "egress": egress });
        let world = World::with(["ca", "ca"], &rules)?;
        let (app, far, agent) = (world.app(), world.lab.pod("far"), &world.agents[0]);
        let pair = ["10.96.0.11:7", "10.96.0.10:7"];
        world.says(pair[0], Reason::Direct, "no endpoint of the service")?;
        world.says(pair[1], Reason::Captured, "an endpoint of the service")?;
        reaches(app, pair[0], "connect", &["plain"])?;
        let reasons = [Reason::Direct, Reason::Captured, Reason::PlaintextRefused];
        let before = reasons.map(|reason| verdicts(agent, reason));
        let tap = tap(far)?;
        let client = app.probe("storm").args(["--by", "tcp", "--to", pair[0]]);
        let mut client = client.stdin_piped().stdout_piped().spawn()?;
        client.wait_for_line()?;
        let sockets = [pair[0].parse()?, pair[1].parse()?];
        let mut flips = Flips::open(agent.bpffs(), &[(sockets, Protocol::TCP)])?;
        let until = Instant::now() + patience(Duration::from_secs(3));
        // There and back, so that each service has its own endpoint in the end.
        while Instant::now() < until {
            flips.flip()?;
            flips.flip()?;
        }
        client.close_stdin();
        let report: LoadReport = client.wait_json()?;
        let mut counts = Vec::new();
        for (reason, before) in reasons.into_iter().zip(before) {
            counts.push(verdicts(agent, reason)? - before?);
        }
        println!("egress {egress}: {counts:?} of {reasons:?}, {report:?}");
        // The proxy takes the service's endpoint from the manifests.
        let endpoints = report.endpoints.keys();
        ensure!(endpoints.eq(["plain"]), "escaped: {report:?}");
        let from_app =
            |frame: &Vec<u8>| tcp(frame).is_some_and(|(from, ..)| app.addresses().contains(&from));
        let escaped = arrived(&tap).iter().filter(|frame| from_app(frame)).count();
        ensure!(escaped == 0, "{escaped} packets escaped to far");
        ensure!(
            counts[0] > 0 && counts[1] > 0,
            "no flip was seen: {counts:?}"
        );
    }
    Ok(())
}
