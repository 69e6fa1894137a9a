//! `dataplane-migrate import`: kube-proxy's rules become manifests, in each of its modes, from the kernel and from a file.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_peers::{Cluster as Peers, LocalDetector, Mode};
use dataplane_tests::{Host, Lab};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    cluster::{Cluster, TCP, UDP, counted, lived, peer_is, reaches, refused, serve},
    differential::world::load_rules,
    manifest::{Manifests, Service},
    outcome::{Outcome, migrate, run},
};

scenarios! {
    Dataplane:
    plans_are_the_same_by_rules_and_by_manifests,
    an_agent_serves_what_rules_say,
    a_fault_in_rules_is_named_with_its_line,
    a_node_is_moved_by_hand_and_given_back,
}

/// Services of every kind.
fn services(lab: &Lab) -> Vec<Service> {
    let [far, near, near2] = ["far", "near", "near2"].map(|name| lab.pod(name));
    let web = || Service::new("web", &["10.96.0.10", "fd00:96::10"]);
    vec![
        web()
            .node_port("tcp", 80, TCP, 30080)
            .port("udp-dns", 53, UDP)
            .endpoints(&[far, near]),
        Service::sticky(TCP, &[far, near, near2]),
        Service::empty(TCP, near),
        Service::new("local", &["10.96.0.13", "fd00:96::13"])
            .set("externalTrafficPolicy", "Local")
            .load_balancer("203.0.113.13")
            .load_balancer("2001:db8:13::1")
            .node_port("tcp", 80, TCP, 30083)
            .endpoints(&[far, near]),
        Service::new("inside", &["10.96.0.14"])
            .set("internalTrafficPolicy", "Local")
            .port("tcp", 80, TCP)
            .endpoints(&[far, near, near2]),
        Service::new("ranges", &["10.96.0.15"])
            .set("externalIPs", vec!["203.0.113.15"])
            .set(
                "loadBalancerSourceRanges",
                vec!["192.0.2.0/24", "10.244.2.8/32"],
            )
            .load_balancer("203.0.113.16")
            .port("tcp", 80, TCP)
            .endpoints(&[near]),
    ]
}

fn peers(host: &Host) -> Result<Peers> {
    Ok(Peers {
        local: LocalDetector::Networks(vec!["10.244.0.0/16".parse()?]),
        node_ports_on: host.addresses().into(),
        ..Peers::default()
    })
}

/// The output of `dataplane-migrate import`: manifests, and keys of the configuration.
struct Imported {
    directory: TempDir,
}

impl Imported {
    /// Imports rules on a node, those in the kernel without a file.
    fn of(node: &Host, program: &Path, more: &[&str]) -> Result<Self> {
        let outcome = import(node, program, more)?.exits(0)?;
        let directory = tempfile::tempdir()?;
        let found = Self { directory };
        let keys: Vec<&str> = (outcome.stdout.lines().skip(1))
            .map_while(|line| line.strip_prefix("# "))
            .filter(|line| !line.starts_with("On the way"))
            .collect();
        fs::write(found.path("config.yaml"), keys.join("\n"))?;
        fs::write(found.path("services.yaml"), outcome.stdout)?;
        Ok(found)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The options of commands that read both.
    fn options(&self) -> Result<[String; 4]> {
        let path = |name| -> Result<String> {
            let path = self.path(name);
            Ok(path.to_str().context("a path in UTF-8")?.to_owned())
        };
        Ok([
            "--config".to_owned(),
            path("config.yaml")?,
            "--manifests".to_owned(),
            path("services.yaml")?,
        ])
    }
}

fn import(node: &Host, program: &Path, more: &[&str]) -> Result<Outcome> {
    let command = node.command(program).arg("import");
    let output = command
        .args(["--node-name", node.name()])
        .args(more)
        .output()?;
    Outcome::of(&output)
}

/// Without an agent, the plan from the rules in the kernel equals the plan from the manifests of which kube-proxy's
/// rules were made. A plan from a file with these rules, as `iptables-save` or `nft` prints them, equals it, too.
fn plans_are_the_same_by_rules_and_by_manifests() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .node("node3")
        .pod("node1", "far", "10.244.1.5")
        .pod("node2", "near", "10.244.2.10")
        .pod("node3", "near2", "10.244.3.11")
        .build()?;
    let manifests = Manifests::new(&services(&lab))?;
    let program = lab.programs().dataplane()?;
    let migrate = lab.programs().migrate()?;
    let directory = tempfile::tempdir()?;
    for (host, mode) in ["node1", "node2", "node3"].into_iter().zip(Mode::ALL) {
        let host = lab.node(host);
        load_rules(host, mode, &manifests.path(), &peers(host)?)?;
        let plan = |source: &[&str]| -> Result<Value> {
            let plan = host
                .command(&program)
                .args(["plan", "-o", "json", "--node-name", host.name()])
                .args(["--bpffs", "/sys/fs/bpf/none"])
                .args(source);
            let output = plan.output()?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.code() == Some(2), "{mode}: {said}");
            let mut answer: Value = serde_json::from_slice(&output.stdout)?;
            // About the rules of the forward hook.
            answer["problems"].take();
            // These rules do not distinguish load balancers' addresses from external IPs.
            for change in answer["changes"].as_array_mut().into_iter().flatten() {
                let is_local = change["service"] == "default/local";
                if mode == Mode::Nftables && is_local && change["after"]["kind"] == "LoadBalancer" {
                    change["after"]["kind"] = "ExternalIP".into();
                }
            }
            Ok(answer)
        };
        let addresses = host.addresses().map(|addr| addr.to_string()).join(",");
        let path = manifests.path().to_string_lossy().into_owned();
        let wanted = plan(&["-f", &path, "--nodeport-addresses", &addresses])?;
        let by_rules = |more: &[&str]| -> Result<Value> {
            let imported = Imported::of(host, &migrate, more)?;
            plan(&imported.options()?.each_ref().map(String::as_str))
        };
        let live = by_rules(&[])?;
        ensure!(live == wanted, "{mode}: {live:#}\nby manifests: {wanted:#}");
        if mode == Mode::Nftables {
            needs_no_program_for_rules_of_others(host, &migrate)?;
        }
        let print = match mode {
            Mode::IptablesLegacy => "iptables-legacy-save; ip6tables-legacy-save",
            Mode::IptablesNft => "iptables-nft-save; ip6tables-nft-save",
            Mode::Nftables => "nft list ruleset",
        };
        let file = directory.path().join("rules");
        fs::write(&file, host.command("sh").args(["-c", print]).run()?)?;
        let file = file.to_string_lossy().into_owned();
        let saved = by_rules(&["--file", &file])?;
        ensure!(
            saved == wanted,
            "{print}: {saved:#}\nby manifests: {wanted:#}"
        );
    }
    Ok(())
}

/// kube-proxy's rules are in native tables, which `nft` prints. A rule of another owner is in a table that only
/// `iptables-save` prints, and this program is missing.
fn needs_no_program_for_rules_of_others(host: &Host, program: &Path) -> Result<()> {
    let nft = host.command("sh").args(["-c", "command -v nft"]).run()?;
    let only_nft = tempfile::tempdir()?;
    symlink(nft.trim(), only_nft.path().join("nft"))?;
    let rule = ["-A", "FORWARD", "-p", "sctp", "-j", "DROP"];
    host.command("iptables-nft").args(rule).run()?;
    let import = host.command(program).arg("import");
    let output = import.env("PATH", only_nft.path()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(0), "{said}");
    let rule = ["-D", "FORWARD", "-p", "sctp", "-j", "DROP"];
    host.command("iptables-nft").args(rule).run()?;
    Ok(())
}

/// A lab of which a node has the rules of kube-proxy, and pods have servers.
struct Served {
    lab: Lab,
    _servers: Vec<dataplane_tests::Process>,
}

impl Served {
    /// Loads the rules of all services on `node2`.
    fn start(mode: Mode) -> Result<Self> {
        let lab = Cluster::lab()?;
        let manifests = Manifests::new(&services(&lab))?;
        let names = ["far", "near", "near2"];
        let servers = names.iter().map(|name| serve(lab.pod(name)));
        let servers = servers.collect::<Result<_>>()?;
        let node = lab.node("node2");
        load_rules(node, mode, &manifests.path(), &peers(node)?)?;
        Ok(Self {
            lab,
            _servers: servers,
        })
    }
}

/// The agent serves the manifests that `dataplane-migrate import` made of kube-proxy's rules in the kernel, and continues when
/// the rules are removed.
fn an_agent_serves_what_rules_say() -> Result<()> {
    Mode::ALL.into_iter().try_for_each(serves_what_rules_say)
}

fn serves_what_rules_say(mode: Mode) -> Result<()> {
    let Served { lab, _servers } = &Served::start(mode)?;
    let program = lab.programs().migrate()?;
    let imported = Imported::of(lab.node("node2"), &program, &[])?;
    let agent = lab
        .agent("node2")
        .sockets_only()
        .args(imported.options()?)
        .start()?;
    let client = lab.pod("sleep");
    let check = || -> Result<()> {
        for (to, how, endpoints) in [
            ("10.96.0.10:80", "connect --count 16", &["far", "near"][..]),
            ("[fd00:96::10]:80", "connect --count 16", &["far", "near"]),
            ("10.96.0.10:53", "udp --unconnected --count 3", &["near"]),
            ("203.0.113.13:80", "connect --count 16", &["far", "near"]),
            ("203.0.113.15:80", "connect --count 2", &["near"]),
            ("10.96.0.14:80", "connect --count 16", &["near", "near2"]),
        ] {
            // One datagram socket keeps its endpoint.
            let (report, translated) = counted(&agent, Reason::Translated, || {
                crate::cluster::ask(client, to, how)
            })?;
            ensure!(report.answered == report.attempts, "{to}: {report:?}");
            if how.starts_with("connect") {
                ensure!(report.endpoints.keys().eq(endpoints), "{to}: {report:?}");
                peer_is(&report, to)?;
            }
            ensure!(
                translated > 0,
                "{to}: the rules translated, not the agent's programs"
            );
        }
        let sticky = reaches_one(client, "10.96.0.11:80")?;
        ensure!(sticky == reaches_one(client, "10.96.0.11:80")?, "{sticky}");
        refused(client, "10.96.0.12:80", "connect --count 2")
    };
    check()?;
    let status = run(&agent, "status -o json")?.json()?;
    let networks = status["agent"]["pod_networks"].to_string();
    ensure!(networks.contains("10.244.0.0/16"), "{networks}");
    migrate(&agent, ["cleanup", "--owner", "kube-proxy", "--force"])?.exits(0)?;
    import(lab.node("node2"), &program, &[])?
        .exits(1)?
        .says(&["no rules of kube-proxy"])?;
    check()
}

/// The one endpoint that a client comes to.
fn reaches_one(client: &Host, to: &str) -> Result<String> {
    let report = crate::cluster::ask(client, to, "connect --count 8")?;
    let mut names = report.endpoints.keys().cloned();
    let first = names.next().context("nobody answers")?;
    ensure!(names.next().is_none(), "several: {report:?}");
    Ok(first)
}

/// The import names each line that is not a rule or that it cannot interpret. It leaves out the service with such a
/// line, and no other service.
fn a_fault_in_rules_is_named_with_its_line() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "far", "10.244.1.5")
        .build()?;
    let node = lab.node("node1");
    let program = lab.programs().migrate()?;
    let manifests = Manifests::new(&[
        Service::new("web", &["10.96.0.10"])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("far")]),
        Service::new("other", &["10.96.0.11"]).port("tcp", 80, TCP),
    ])?;
    load_rules(
        node,
        Mode::IptablesNft,
        &manifests.path(),
        &Peers::default(),
    )?;
    let print = ["-c", "iptables-nft-save; ip6tables-nft-save"];
    let good: String = node.command("sh").args(print).run()?;
    let line = 1 + good
        .lines()
        .position(|line| line.contains("-j DNAT"))
        .context("no DNAT")?;
    let odd = good.replace("-j DNAT", "-m time --timestart 08:00 -j DNAT");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    for (text, place) in [
        (good.replace("\nCOMMIT", "\nCOMIT"), "rules:"),
        ("hello\n".to_owned(), "rules:1: "),
        ("*nat\nCOMMIT\n".to_owned(), "no rules of kube-proxy"),
        ("{\"nftables\": [\n{]}".to_owned(), "rules:1: this is JSON"),
    ] {
        fs::write(&file, text)?;
        let outcome = import(node, &program, &["--file", &path])?.exits(1)?;
        ensure!(outcome.stdout.is_empty(), "{}", outcome.stdout);
        outcome.says(&[place])?;
    }
    fs::write(&file, odd)?;
    let outcome = import(node, &program, &["--file", &path])?.exits(2)?;
    ensure!(
        outcome.stdout.contains("name: other") && !outcome.stdout.contains("name: web"),
        "{}",
        outcome.stdout
    );
    outcome.says(&[
        &format!("rules:{line}: "),
        "service default/web is left out",
        "--timestart",
    ])?;
    Ok(())
}

/// The steps of `takeover`, by hand, with connections that live throughout: one that kube-proxy's rules translated, and
/// one that the agent's programs translated.
fn a_node_is_moved_by_hand_and_given_back() -> Result<()> {
    const TO: &str = "10.96.0.10:80";
    let Served { lab, _servers } = &Served::start(Mode::Nftables)?;
    let (node, client) = (lab.node("node2"), lab.pod("sleep"));
    let directory = tempfile::tempdir()?;
    let file = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    // Each family's table.
    let save = || -> Result<String> {
        let tables = ["ip", "ip6"].map(|family| {
            let list = ["list", "table", family, "kube-proxy"];
            node.command("nft").args(list).run()
        });
        let [v4, v6] = tables;
        Ok(v4? + "\n" + &v6?)
    };
    let saved = save()?;
    let (rules, other) = (file("rules"), file("other"));
    fs::write(&rules, &saved)?;
    fs::write(&other, saved.replace("10.244.1.5 . 7", "10.244.1.6 . 7"))?;
    let by_rules = client.hold(TO)?;
    reaches(client, TO, "connect --count 16", &["far", "near"])?;

    let imported = Imported::of(node, &lab.programs().migrate()?, &["--file", &rules])?;
    let mut agent = lab
        .agent("node2")
        .sockets_only()
        .args(imported.options()?)
        .start()?;
    let compare = |more: &[&str]| migrate(&agent, [&["compare"], more].concat());
    compare(&[])?.exits(0)?.says(&["none differs"])?;
    let differs = compare(&["--file", &other])?.exits(2)?;
    differs.says(&[TO, "default/web", "10.244.1.6:7", "10.244.1.5:7", "differ."])?;
    fs::write(&other, saved.replace("numgen random", "numgen inc"))?;
    compare(&["--file", &other])?
        .exits(2)?
        .says(&["not compared", "numgen inc"])?;
    // A file that was saved in part, too.
    let [v4, _] = saved.split_once("table ip6 ").context("no IPv6")?.into();
    fs::write(&other, v4)?;
    compare(&["--file", &other])?.exits(2)?.says(&[
        "only in the tables: [fd00:96::10]:80/tcp",
        "no address of IPv6",
    ])?;
    let by_programs = client.hold(TO)?;
    run(&agent, "keep-nat")?.exits(0)?;
    migrate(&agent, ["cleanup", "--owner", "kube-proxy"])?.exits(0)?;
    compare(&[])?.exits(1)?.says(&["no rules of kube-proxy"])?;
    compare(&["--file", &rules])?
        .exits(0)?
        .says(&["none differs"])?;
    let (_, translated) = counted(&agent, Reason::Translated, || {
        reaches(client, TO, "connect --count 16", &["far", "near"])
    })?;
    ensure!(translated == 16, "{translated} of 16 connections");
    lived(by_rules).context("translated by kube-proxy's rules")?;

    node.command("nft").args(["-f", &rules]).run()?;
    ensure!(save()? == saved, "the rules are others than before");
    compare(&[])?.exits(0)?;
    agent.stop()?;
    run(&agent, "cleanup")?.exits(0)?;
    reaches(client, TO, "connect --count 16", &["far", "near"])?;
    lived(by_programs).context("translated by the agent's programs")?;
    Ok(())
}
