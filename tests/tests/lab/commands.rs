//! The command line, against a running agent, a dead one and none.

use std::{ffi::OsStr, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Lab};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TCP, UDP, ask, eventually, reaches, serve},
    manifest::{Manifests, Service},
    outcome::{Outcome, run, run_args},
};

scenarios! {
    Dataplane:
    plan_shows_what_would_change_and_changes_nothing,
    services_are_listed_for_people_and_programs,
    without_an_agent_services_are_read_from_the_tables,
    every_command_helps,
    nonsense_is_refused_with_a_way_out,
    the_doctor_approves_of_this_machine,
    the_doctor_names_policies_that_keep_tunnels_out,
}

/// One service of each kind with an answer of its own.
pub fn services(lab: &Lab) -> Vec<Service> {
    let (far, near, near2) = (lab.pod("far"), lab.pod("near"), lab.pod("near2"));
    vec![
        Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .port("tcp", 80, TCP)
            .port("udp", 53, UDP)
            .endpoints(&[far, near]),
        Service::sticky(TCP, &[far, near, near2]),
        Service::empty(TCP, near),
        Service::new("local", &["10.96.0.13"])
            .set("internalTrafficPolicy", "Local")
            .port("tcp", 80, TCP)
            .endpoints(&[far]),
        Service::new("door", &["10.96.0.14"])
            .node_port("tcp", 80, TCP, 30080)
            .endpoints(&[near]),
    ]
}

/// `dataplane plan` for manifests.
fn plan(agent: &Agent, manifests: &Path, more: &[&str]) -> Result<Outcome> {
    let arguments = ["plan", "--node-name", "node2", "--manifests"];
    let arguments = arguments
        .iter()
        .map(OsStr::new)
        .chain([manifests.as_os_str()]);
    run_args(agent, arguments.chain(more.iter().map(OsStr::new)))
}

fn plan_shows_what_would_change_and_changes_nothing() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("near"))?;
    let manifests = Manifests::new(&services(&lab))?;
    let mut agent = lab.agent("node2").manifests(manifests.path()).prepare()?;
    // Before any agent ran: everything would be new, and nothing is made for finding it out.
    plan(&agent, &manifests.path(), &[])?.exits(2)?.says(&[
        "no tables in",
        "+ 10.96.0.10:80/tcp",
        "+ [fd00:96::10]:53/udp",
        "+ *:30080/tcp",
    ])?;
    ensure!(!agent.bpffs().exists(), "plan pinned something");

    agent.start()?;
    plan(&agent, &manifests.path(), &[])?
        .exits(0)?
        .says(&["No change"])?;
    let nothing = plan(&agent, &manifests.path(), &["-o", "json"])?.exits(0)?;
    let nothing = nothing.json()?;
    ensure!(
        nothing["changes"] == json!([]) && nothing["writes"] == 0,
        "{nothing:#}"
    );

    // One service gets another endpoint, one is removed, one is new.
    let mut next = services(&lab);
    next[2] = Service::new("empty", &["10.96.0.12"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("near2")]);
    next[3] = Service::new("new", &["10.96.0.15"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("near")]);
    let next = Manifests::new(&next)?;
    let text = plan(&agent, &next.path(), &[])?.exits(2)?;
    text.says(&[
        "~ 10.96.0.12:80/tcp",
        "+ 10.96.0.15:80/tcp",
        "- 10.96.0.13:80/tcp",
        "10.244.2.11:7",
    ])?;
    let changes = plan(&agent, &next.path(), &["-o", "json"])?
        .exits(2)?
        .json()?;
    let of = |key: &str| {
        let mut all = changes["changes"].as_array().into_iter().flatten();
        let found = all.find(|change| change["key"] == key);
        found
            .cloned()
            .with_context(|| format!("{key}: {changes:#}"))
    };
    let filled = of("10.96.0.12:80/tcp")?;
    ensure!(
        filled["service"] == "default/empty"
            && filled["before"]["refuses"] == "no-endpoints"
            && filled["after"]["endpoints"] == json!(["10.244.2.11:7"]),
        "{filled:#}"
    );
    ensure!(of("10.96.0.13:80/tcp")?["after"].is_null(), "{changes:#}");
    ensure!(of("10.96.0.15:80/tcp")?["before"].is_null(), "{changes:#}");
    ensure!(of("10.96.0.10:80/tcp").is_err(), "not changed: {changes:#}");

    next.write_text("{\n]")?;
    plan(&agent, &next.path(), &[])?
        .exits(1)?
        .says(&["services.json:2"])?;
    // All that was for nothing.
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    ensure!(status["agent"]["syncs"] == 1, "{status:#}");
    plan(&agent, &manifests.path(), &[])?.exits(0)?;
    // It reads the tables, not the agent.
    agent.kill();
    plan(&agent, &manifests.path(), &[])?.exits(0).map(drop)
}

fn services_are_listed_for_people_and_programs() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let agent = &cluster.agent;
    reaches(
        cluster.client(),
        "10.96.0.14:80",
        "connect --count 9",
        &["near"],
    )?;
    ask(cluster.client(), "10.96.0.12:80", "connect --count 4")?;
    let lines = |arguments: &str| -> Result<Vec<Vec<String>>> {
        let text = run(agent, arguments)?.exits(0)?.stdout;
        // Two spaces separate columns, one space separates words.
        let cells = |line: &str| -> Vec<String> {
            let cells = line.split("  ").map(str::trim);
            cells
                .filter(|cell| !cell.is_empty())
                .map(str::to_owned)
                .collect()
        };
        Ok(text.lines().map(cells).collect())
    };
    let all = lines("services")?;
    ensure!(
        all[0]
            == [
                "NAME",
                "VIP",
                "TYPE",
                "ENDPOINTS",
                "POLICY",
                "AFFINITY",
                "CONNECTIONS"
            ],
        "{all:?}"
    );
    ensure!(all.len() == 7, "six ports and the headings: {all:?}");
    let row = |name: &str, vip: &str| {
        let row = all.iter().find(|row| row[0] == name && row[1] == vip);
        row.with_context(|| format!("{name} {vip}: {all:?}"))
    };
    ensure!(
        row("default/door", "10.96.0.14:80/tcp")?[2..] == ["NodePort", "1/1", "Cluster", "-", "9"]
    );
    ensure!(row("default/empty", "10.96.0.12:80/tcp")?[3] == "0/1");
    ensure!(row("default/local", "10.96.0.13:80/tcp")?[4] == "Local");
    ensure!(row("default/sticky", "10.96.0.11:80/tcp")?[5] == "ClientIP 10m0s");
    // Two pods, each an endpoint of both families.
    ensure!(row("default/web", "10.96.0.10:53/udp")?[3] == "2/2");

    let wide = run(agent, "services -o wide")?.exits(0)?;
    wide.says(&[
        "[fd00:96::10]:80/tcp",
        "node port 30080",
        "no-endpoints 4",
        "10.244.2.10:7 (local, not ready)",
        "10.244.1.5:7",
    ])?;

    let names = |arguments: &str| -> Result<Vec<String>> {
        let services = run(agent, &format!("services -o json {arguments}"))?;
        let services = services.exits(0)?.json()?;
        let services = services.as_array().context("an array")?.iter();
        let name = |s: &Value| s["name"].as_str().map(str::to_owned).context("a name");
        services.map(name).collect()
    };
    ensure!(names("")? == ["door", "empty", "local", "sticky", "web"]);
    ensure!(names("web default/door")? == ["door", "web"]);
    ensure!(names("--not-ready")? == ["empty"]);
    ensure!(names("--namespace default --not-ready")? == ["empty"]);
    ensure!(names("--namespace elsewhere")? == [""; 0]);
    run(agent, "services elsewhere/web")?
        .exits(1)?
        .says(&["no such service", "elsewhere/web"])?;
    let services = run(agent, "services -o json door")?.json()?;
    let port = &services[0]["ports"][0];
    ensure!(
        port["connections"] == 9 && port["node_port"] == 30080 && port["ready"] == 1,
        "{services:#}"
    );
    Ok(())
}

fn without_an_agent_services_are_read_from_the_tables() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    reaches(
        cluster.client(),
        "10.96.0.14:80",
        "connect --count 9",
        &["near"],
    )?;
    cluster.agent.kill();
    run(&cluster.agent, "services")?.exits(0)?.says(&[
        "hold no names",
        "10.96.0.14:80/tcp",
        "NodePort",
    ])?;
    let ports = run(&cluster.agent, "services -o json")?.exits(0)?.json()?;
    let ports = ports.as_array().context("an array")?;
    let of = |vip: &str| {
        let port = ports.iter().find(|port| port["vip"] == vip);
        port.with_context(|| format!("{vip}: {ports:?}"))
    };
    let door = of("10.96.0.14:80/tcp")?;
    ensure!(
        door["endpoints"] == json!(["10.244.2.10:7"]) && door["connections"] == 9,
        "{door}"
    );
    ensure!(of("10.96.0.12:80/tcp")?["endpoints"] == json!([]));
    ensure!(of("10.96.0.11:80/tcp")?["affinity_seconds"] == 600);
    run(&cluster.agent, "services web")?
        .exits(1)?
        .says(&["hold no names"])
        .map(drop)
}

fn every_command_helps() -> Result<()> {
    let lab = Cluster::lab()?;
    let agent = lab.agent("node2").prepare()?;
    let all = run(&agent, "--help")?.exits(0)?.stdout;
    let commands = [
        "run",
        "plan",
        "status",
        "services",
        "explain",
        "monitor",
        "doctor",
        "cleanup",
        "completions",
    ];
    for command in commands {
        ensure!(
            all.lines().any(|l| l.trim_start().starts_with(command)),
            "{command} is not in: {all}"
        );
        let help = run(&agent, &format!("{command} --help"))?.exits(0)?;
        ensure!(help.stderr.is_empty(), "{help:?}");
        help.says(&["Usage: dataplane", command])?;
        run(&agent, &format!("{command} -h"))?.exits(0)?;
    }
    run(&agent, "--version")?
        .exits(0)?
        .says(&["dataplane 0."])?;
    run(&agent, "")?.exits(64)?;

    let directory = tempfile::tempdir()?;
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&agent, &format!("completions {shell}"))?
            .exits(0)?
            .stdout;
        for command in commands {
            ensure!(script.contains(command), "{shell}: without {command}");
        }
        if shell == "bash" {
            let path = directory.path().join("completions");
            fs::write(&path, script)?;
            let bash = lab.node("node2").command("bash");
            bash.arg("-n").arg(&path).run()?;
        }
    }
    run(&agent, "completions tcsh")?.exits(64).map(drop)
}

fn nonsense_is_refused_with_a_way_out() -> Result<()> {
    let cluster = Cluster::start(services)?;
    for (command, code, words) in [
        ("statsu", 64, "status"),
        ("status --output yaml", 64, "json"),
        ("run", 64, "--manifests"),
        ("run --manifests x --metrics-addr 15020", 64, "ADDRESS:PORT"),
        ("run --manifests x --on-exit stay", 64, "detach"),
        ("explain sleep 10.96.0.10:80", 64, "netns:NAME"),
        ("explain node 10.96.0.10", 64, "ADDRESS:PORT"),
        ("explain node 10.96.0.10:80/sctp", 64, "udp"),
        (
            "explain netns:nowhere 10.96.0.10:80",
            1,
            "/run/netns/nowhere",
        ),
        ("explain pid:4194304 10.96.0.10:80", 1, "/proc/4194304"),
        ("monitor --reason sunspots", 64, "no-endpoints"),
        ("monitor --service web", 1, "NAMESPACE/NAME"),
        ("services --namespace a/b", 1, "a/b"),
        ("plan --manifests /nowhere.yaml", 1, "/nowhere.yaml"),
        ("cleanup --bpffs /tmp", 3, "end it first"),
        (
            "cleanup --bpffs /tmp --socket /nowhere",
            1,
            "not on a BPF filesystem",
        ),
        (
            "services --socket /nowhere --bpffs /tmp/nowhere",
            1,
            "/tmp/nowhere",
        ),
    ] {
        let outcome = run(&cluster.agent, command)?;
        outcome
            .exits(code)
            .and_then(|outcome| outcome.says(&[words]))
            .with_context(|| command.to_owned())?;
    }
    eventually(|| run(&cluster.agent, "status")?.exits(0).map(drop))
}

fn the_doctor_approves_of_this_machine() -> Result<()> {
    let lab = Cluster::lab()?;
    let agent = lab.agent("node2").prepare()?;
    run(&agent, "doctor")?.exits(0)?.says(&[
        "FEATURE",
        "NEEDED FOR",
        "cgroup v2",
        "`dataplane run` works on this machine",
    ])?;
    let features = run(&agent, "doctor -o json")?.exits(0)?.json()?;
    let features = features.as_array().context("an array")?;
    ensure!(features.len() > 5, "{features:?}");
    for feature in features {
        ensure!(
            feature["present"] == true || feature["required"] == false,
            "{feature}"
        );
        for field in ["feature", "needed_for", "remedy"] {
            ensure!(
                feature[field].as_str().is_some_and(|s| !s.is_empty()),
                "{feature}"
            );
        }
    }
    // If a requirement is missing, `doctor` names it and fails.
    run(&agent, "doctor --cgroup /nowhere")?
        .exits(1)?
        .says(&["NO", "does not work on this machine"])
        .map(drop)
}

fn the_doctor_names_policies_that_keep_tunnels_out() -> Result<()> {
    let lab = Cluster::lab()?;
    let agent = lab.agent("node2").prepare()?;
    let pod = |name: &str, mode: &str| {
        let metadata = json!({
            "name": name,
            "namespace": "shop",
            "labels": { "app": "web", "istio.io/dataplane-mode": mode },
        });
        json!({ "kind": "Pod", "metadata": metadata, "spec": { "containers": [] } })
    };
    let policy = json!({
        "kind": "NetworkPolicy",
        "metadata": { "name": "web", "namespace": "shop" },
        "spec": {
            "podSelector": { "matchLabels": { "app": "web" } },
            "ingress": [{ "ports": [{ "port": 8080 }] }],
        },
    });
    let directory = tempfile::tempdir()?;
    let write = |name: &str, value: Value| -> Result<String> {
        let file = directory.path().join(name);
        fs::write(&file, value.to_string())?;
        Ok(file.to_str().context("a path in UTF-8")?.to_owned())
    };
    let pods = [
        pod("web-1", "ambient"),
        pod("web-2", "none"),
        pod("web-3", ""),
    ];
    let items = [&pods[..], &[policy]].concat();
    let all = write("all.json", json!({ "kind": "List", "items": items }))?;
    let config = write(
        "config.yaml",
        json!({ "mesh": { "rules": { "captured": true } } }),
    )?;
    // By its label only; or also by the configuration.
    for (more, named) in [
        (vec![], "web-1"),
        (vec!["--config", &*config], "web-1, web-3"),
    ] {
        let of = |output| {
            let always = ["doctor", "--output", output, "--network-policies", &*all];
            run_args(&agent, always.iter().chain(&more))
        };
        let patch = "kubectl patch networkpolicy web -n shop --type=json -p '[{\"op\":\"add\",\"path\":\"/spec/ingress/0/ports/-\"";
        let pods = format!("of enrolled Pods: {named}\n");
        of("text")?
            .exits(0)?
            .says(&["NetworkPolicy shop/web lets clients in", &pods, patch])?;
        let rows = of("json")?.exits(0)?.json()?;
        let rows = rows.as_array().context("an array")?;
        let row = rows
            .iter()
            .find(|row| row["feature"] == "NetworkPolicy shop/web");
        let row = row.context("the policy")?;
        let remedy = row["remedy"].as_str().context("a remedy")?;
        ensure!(
            row["present"] == false && remedy.starts_with(patch),
            "{row}"
        );
    }
    let none = write("none.json", json!({ "items": pods }))?;
    run_args(&agent, ["doctor", "--network-policies", &none])?
        .exits(0)?
        .says(&["No NetworkPolicy in"])?;
    run_args(&agent, ["doctor", "--network-policies", "/nowhere"])?
        .exits(1)?
        .says(&["cannot read /nowhere"])
        .map(drop)
}
