//! The output of `explain` and `status` for a mesh, and the treatment of connections.

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::Host;
use serde_json::{Value, json};

use super::{World, foreign, relay::Relay};
use crate::{
    cluster::{ask, eventually, reaches},
    outcome::run_args,
};

scenarios! {
    Dataplane:
    explain_says_which_rule_decides,
    only_some_users_are_captured_and_nothing_that_comes_in,
    explain_says_what_becomes_of_connections_without_a_proxy,
    explain_and_status_work_without_the_agent,
    status_shows_who_is_captured,
}

pub fn explain(world: &World, source: &str, to: &str, more: &[&str]) -> Result<Value> {
    let arguments = [&["explain", source, to, "-o", "json"], more].concat();
    run_args(world.agent()?, arguments)?.exits(0)?.json()
}

/// One connection with the expected output.
struct Case<'a> {
    from: &'a Host,
    to: &'a str,
    /// The client's user and group.
    ids: Option<u32>,
    verdict: &'a str,
    reason: Reason,
    /// The rule: its subject, value and source.
    rule: Option<[&'a str; 3]>,
}

impl<'a> Case<'a> {
    fn new(from: &'a Host, to: &'a str, verdict: &'a str, reason: Reason) -> Self {
        Self {
            from,
            to,
            ids: None,
            verdict,
            reason,
            rule: None,
        }
    }

    fn by(mut self, about: &'a str, of: &'a str, by: &'a str) -> Self {
        self.rule = Some([about, of, by]);
        self
    }

    fn of_user(mut self, id: u32) -> Self {
        self.ids = Some(id);
        self
    }

    /// Checks that `explain` returns this, and a connection is counted and treated accordingly.
    fn check(&self, world: &World) -> Result<()> {
        let ids = self.ids.map(|id| id.to_string());
        let more = ids
            .iter()
            .flat_map(|id| ["--user", id, "--group", id])
            .collect::<Vec<_>>();
        let source = format!("netns:{}", self.from.netns());
        let told = explain(world, &source, self.to, &more)?;
        let what = || format!("{} to {}: {told:#}", self.from.name(), self.to);
        let last = told["capture"].as_array().and_then(|all| all.last());
        let last = last.with_context(what)?;
        ensure!(
            last["verdict"] == self.verdict && last["reason"] == self.reason.word(),
            "not {} ({}): {}",
            self.verdict,
            self.reason.word(),
            what()
        );
        ensure!(last["workload"] == "default/app", "whose? {}", what());
        let rule = &last["rule"];
        match self.rule {
            Some([about, of, by]) => ensure!(
                rule["about"] == about && rule["of"] == of && rule["by"] == by,
                "not {about} {of} by {by}: {}",
                what()
            ),
            None => ensure!(rule.is_null(), "{}", what()),
        }
        let (seen, counted) = world.counted(self.reason, || {
            let mut probe = self.from.probe("connect").args(["--to", self.to]);
            if let Some(id) = self.ids {
                probe = probe.user(id);
            }
            let report: dataplane_tests::report::Report = probe.json()?;
            Ok(report)
        })?;
        // A busy machine sends its SYN again before it was answered.
        ensure!(
            (1..=3).contains(&counted),
            "counted {counted} times: {}",
            what()
        );
        let refused = seen.errors.contains_key("ECONNREFUSED");
        ensure!(
            refused == (self.verdict == "refused") || self.to.starts_with("127.0.0.1"),
            "{seen:?}, but {}",
            what()
        );
        Ok(())
    }
}

fn explain_says_which_rule_decides() -> Result<()> {
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let config = json!({
        "rules": { "mode": "proxy", "excludeOutboundPorts": [80], "excludeUIDs": [1234] },
        "namespaces": [{
            "name": "default",
            "rules": {
                "excludeOutboundIPRanges": ["10.244.1.6/32", "fd00:10:244:2::/64"],
                "excludeInboundPorts": [80],
            },
        }],
        "workloads": [{
            "name": "default/app",
            "addresses": ["10.244.1.8", "fd00:10:244:1::8"],
            "rules": { "excludeGIDs": [4321], "excludeOutboundIPRanges": ["10.244.2.0/24"] },
        }],
    });
    world.agent_with(&config, &[])?;
    let (all, namespace) = ("mesh.rules", "mesh.namespaces (default)");
    let own = "mesh.workloads (default/app)";
    let port = |to, verdict| {
        Case::new(&app, to, verdict, Reason::ExcludedPort).by("outbound-port", "80", all)
    };
    let range = |to, range, by| {
        Case::new(&app, to, "left-alone", Reason::ExcludedRange).by("outbound-range", range, by)
    };
    let user = || Case::new(&app, "10.244.1.5:7", "left-alone", Reason::ExcludedUser);
    let inbound = |to, verdict, reason| Case::new(&one, to, verdict, reason);
    for case in [
        Case::new(&app, "10.244.1.5:7", "captured", Reason::Captured),
        Case::new(&app, "[fd00:10:244:1::5]:7", "captured", Reason::Captured),
        port("10.244.1.5:80", "left-alone"),
        port("10.96.0.10:80", "left-alone"),
        range("10.244.1.6:7", "10.244.1.6/32", namespace),
        range("[fd00:10:244:2::5]:7", "fd00:10:244:2::/64", namespace),
        range("10.244.2.5:7", "10.244.2.0/24", own),
        user().of_user(1234).by("user", "1234", all),
        user().of_user(4321).by("group", "4321", own),
        Case::new(&app, "127.0.0.1:7", "left-alone", Reason::ExcludedLoopback),
        Case::new(&app, "127.0.0.1:15001", "refused", Reason::Recursive),
        Case::new(&app, "10.244.1.8:15006", "refused", Reason::Recursive),
        inbound("10.244.1.8:7", "captured", Reason::CapturedInbound),
        inbound("[fd00:10:244:1::8]:7", "captured", Reason::CapturedInbound),
        inbound("10.244.1.8:15001", "refused", Reason::Recursive),
        inbound("10.244.1.8:80", "left-alone", Reason::ExcludedPort).by(
            "inbound-port",
            "80",
            namespace,
        ),
    ] {
        case.check(&world)?;
    }
    // A service that is not captured is a service still.
    let told = explain(&world, "default/app", "10.96.0.10:80", &[])?;
    ensure!(
        told["verdict"] == "translated" && told["service"] == "default/web",
        "{told:#}"
    );
    // A process's user is asked of it.
    let mut process = app
        .probe("hold")
        .args(["--to", "10.244.1.5:7"])
        .user(1234)
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    process.wait_for_line()?;
    let source = format!("pid:{}", process.id());
    let told = explain(&world, &source, "10.244.1.5:7", &[])?;
    ensure!(told["reason"] == Reason::ExcludedUser.word(), "{told:#}");
    // For people.
    let text = run_args(world.agent()?, ["explain", "default/app", "10.244.1.6:7"])?.exits(0)?;
    text.says(&[
        "this network namespace is workload default/app",
        "rule: outbound-range 10.244.1.6/32 excluded, says mesh.namespaces (default)",
        "left-alone (excluded-range)",
    ])?;
    let unknown = run_args(
        world.agent()?,
        ["explain", "default/nobody", "10.244.1.6:7"],
    )?;
    unknown
        .exits(1)?
        .says(&["no workload default/nobody is captured"])?;
    Ok(())
}

fn only_some_users_are_captured_and_nothing_that_comes_in() -> Result<()> {
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let config = json!({
        "rules": { "mode": "proxy", "includeUIDs": [1234], "excludeGIDs": [999] },
        "workloads": [{
            "name": "default/app",
            "addresses": ["10.244.1.8", "fd00:10:244:1::8"],
            "rules": { "inbound": false, "includeGIDs": [4321, 999] },
        }],
    });
    world.agent_with(&config, &[])?;
    let (all, own) = ("mesh.rules", "mesh.workloads (default/app)");
    for to in ["10.244.1.5:7", "[fd00:10:244:1::5]:7"] {
        let captured = || Case::new(&app, to, "captured", Reason::Captured);
        let other = || Case::new(&app, to, "left-alone", Reason::ExcludedUser);
        for case in [
            captured().of_user(1234),
            captured().of_user(4321),
            other().of_user(7).by("other-users", "", own),
            other().by("other-users", "", own),
            other().of_user(999).by("group", "999", all),
        ] {
            case.check(&world)?;
        }
    }
    for to in ["10.244.1.8:7", "[fd00:10:244:1::8]:7"] {
        let told = explain(&world, &format!("netns:{}", one.netns()), to, &[])?;
        let capture = told["capture"].as_array().and_then(|all| all.last());
        let capture = capture.context("nothing is said of its capture")?;
        ensure!(
            capture["verdict"] == "left-alone" && capture["rule"]["about"] == "inbound",
            "{told:#}"
        );
        let (report, counted) = world.counted(Reason::CapturedInbound, || {
            reaches(&one, to, "connect --count 5", &["app"])
        })?;
        ensure!(counted == 0, "{counted} were captured: {report:?}");
    }
    Ok(())
}

fn explain_says_what_becomes_of_connections_without_a_proxy() -> Result<()> {
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let own = "mesh.workloads (default/app)";
    let both = |verdict, reason| {
        [
            Case::new(&app, "10.244.1.5:7", verdict, reason),
            Case::new(&one, "10.244.1.8:7", verdict, reason),
        ]
    };
    world.capture(foreign(), json!({}))?;
    for case in both("refused", Reason::ProxyDown) {
        case.by("without-proxy", "", "the default").check(&world)?;
    }
    world.capture(foreign(), json!({ "withoutProxy": "pass" }))?;
    for case in both("left-alone", Reason::ProxyBypassed) {
        case.by("without-proxy", "", own).check(&world)?;
    }
    world.capture(foreign(), json!({ "excludeInterfaces": ["eth0"] }))?;
    let case = Case::new(
        &one,
        "10.244.1.8:7",
        "left-alone",
        Reason::ExcludedInterface,
    );
    case.by("interface", "eth0", own).check(&world)?;
    world.capture(json!({}), json!({ "mode": "kernel", "egress": "deny" }))?;
    let case = Case::new(&app, "10.244.2.5:7", "direct", Reason::Direct);
    case.by("mode", "", own).check(&world)?;
    let case = Case::new(&app, "10.244.1.5:7", "refused", Reason::EgressDenied);
    case.by("egress", "", own).check(&world)?;
    Ok(())
}

fn explain_and_status_work_without_the_agent() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let mut config = super::mesh(
        foreign(),
        json!({ "excludeOutboundIPRanges": ["10.244.1.6/32"] }),
    );
    config["guard"] = json!(true);
    world.agent_with(&config, &[])?;
    world.agent.as_mut().context("an agent")?.kill();
    let source = format!("netns:{}", app.netns());
    let told = explain(&world, &source, "10.244.1.6:7", &[])?;
    let rule = &told["capture"][0]["rule"];
    ensure!(
        told["reason"] == Reason::ExcludedRange.word()
            && rule["of"] == "10.244.1.6/32"
            && rule["by"].is_null(),
        "{told:#}"
    );
    reaches(&app, "10.244.1.6:7", "connect", &["two"])?;
    let unknown = run_args(world.agent()?, ["explain", "default/app", "10.244.1.6:7"])?;
    unknown
        .exits(1)?
        .says(&["only a running agent knows the workloads' names"])?;
    // A namespace that the agent has never seen.
    let stranger = app
        .command("unshare")
        .args(["--net", "sleep", "60"])
        .spawn()?;
    let source = format!("pid:{}", stranger.id());
    eventually(|| {
        let told = explain(&world, &source, "10.244.1.5:7", &[])?;
        ensure!(
            told["verdict"] == "refused" && told["reason"] == Reason::Guarded.word(),
            "{told:#}"
        );
        Ok(())
    })?;
    let connects = ["--net", "bash", "-c", ": 3<>/dev/tcp/10.244.1.5/7"];
    let (_, counted) = world.counted(Reason::Guarded, || {
        Ok(app.command("unshare").args(connects).output()?)
    })?;
    ensure!(counted >= 1, "a stranger's connection is not refused");
    let status: Value = serde_json::from_slice(
        &world
            .agent()?
            .dataplane(["status", "-o", "json"])
            .output()?
            .stdout,
    )?;
    let row = &status["mesh"][0];
    ensure!(
        row["name"].is_null() && row["mode"] == "proxy" && row["proxy"] == "down",
        "{status:#}"
    );
    Ok(())
}

fn status_shows_who_is_captured() -> Result<()> {
    let mut world = World::new()?;
    let mut config = super::mesh(foreign(), json!({ "egress": "deny" }));
    let more = [
        json!({ "name": "default/one", "addresses": ["10.244.1.5"], "rules": { "mode": "kernel" } }),
        // The same pod by its other address.
        json!({ "name": "default/twin", "addresses": ["fd00:10:244:1::5"] }),
    ];
    config["workloads"]
        .as_array_mut()
        .context("a list")?
        .extend(more);
    world.agent_with(&config, &[])?;
    let status = |world: &World| -> Result<Value> {
        let output = world
            .agent()?
            .dataplane(["status", "-o", "json"])
            .output()?;
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    let told = status(&world)?;
    let rows = told["mesh"].as_array().context("rows")?;
    ensure!(
        rows.len() == 2
            && rows[0]["name"] == "default/app"
            && rows[0]["mode"] == "proxy"
            && rows[0]["egress"] == "deny"
            && rows[0]["proxy"] == "down"
            && rows[0]["without_proxy"] == "refuse"
            && rows[1]["name"] == "default/one"
            && rows[1]["mode"] == "kernel"
            && rows[1]["proxy"] == "-",
        "{told:#}"
    );
    let findings = told["findings"].to_string();
    ensure!(
        findings.contains("the proxy of default/app does not listen")
            && findings.contains("default/twin: is in the network namespace of default/one"),
        "{findings}"
    );
    let _proxy = Relay::haproxy(&world)?;
    eventually(|| {
        let told = status(&world)?;
        ensure!(told["mesh"][0]["proxy"] == "ready", "{told:#}");
        Ok(())
    })?;
    let text = world.agent()?.dataplane(["status"]).run()?;
    ensure!(
        text.contains("WORKLOAD") && text.contains("default/app") && text.contains("ready"),
        "{text}"
    );
    ask(world.app(), "10.96.0.10:80", "connect")?;
    Ok(())
}
