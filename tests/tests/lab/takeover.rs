//! `dataplane-migrate takeover`: takes over a node with kube-proxy's rules of each mode and gives it back, with traffic
//! throughout; differences and failures stop it; and a kill of any process leaves a node that works.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_common::Reason;
use dataplane_peers::{Cluster as Peers, LocalDetector, Mode};
use dataplane_tests::{Agent, Host, Lab, Process, is_long, report::LoadReport};
use tempfile::TempDir;

use crate::{
    cluster::{Cluster, TCP, UDP, ask, counted, eventually, lived, reaches, serve},
    differential::world::load_rules,
    manifest::{Manifests, Service},
    outcome::Outcome,
};

scenarios! {
    Dataplane:
    rules_of_mode_iptables_are_taken_over_and_given_back,
    rules_of_iptables_legacy_are_taken_over_and_given_back,
    rules_of_mode_nftables_are_taken_over_and_given_back,
    what_differs_stops_a_takeover,
    a_takeover_that_fails_brings_the_rules_back,
    a_takeover_that_is_killed_leaves_a_node_that_works,
    an_agent_takes_over_when_it_serves,
}

const TO: &str = "10.96.0.10:80";
const TO_V6: &str = "[fd00:96::10]:80";
const DNS: &str = "10.96.0.10:53";
/// Rules of others, before, between and behind those of kube-proxy.
const FOREIGN: &[&str] = &[
    "-t nat -I PREROUTING 1 -p tcp -m tcp --dport 4711 -j RETURN",
    "-t nat -A PREROUTING -p tcp -m tcp --dport 4712 -j RETURN",
    "-t filter -I FORWARD 2 -p tcp -m tcp --dport 4713 -j ACCEPT",
];

fn web(lab: &Lab, endpoints: [&str; 2]) -> Service {
    Service::new("web", &["10.96.0.10", "fd00:96::10"])
        .node_port("tcp", 80, TCP, 30080)
        .port("udp-dns", 53, UDP)
        .endpoints(&endpoints.map(|name| lab.pod(name)))
}

fn load_kube_proxys_rules(node: &Host, mode: Mode, manifests: &Manifests) -> Result<()> {
    if mode == Mode::Nftables {
        // Existing chains would have the rules twice.
        let delete = "for f in ip ip6; do nft delete table $f kube-proxy 2>/dev/null || true; done";
        node.command("sh").args(["-c", delete]).run()?;
    }
    let peers = Peers {
        local: LocalDetector::Networks(vec!["10.244.0.0/16".parse()?]),
        node_ports_on: node.addresses().into(),
        ..Peers::default()
    };
    load_rules(node, mode, &manifests.path(), &peers)
}

/// A node with kube-proxy's rules, and an agent that serves the services of those rules.
struct Node {
    // First, because its end needs the lab.
    agent: Agent,
    lab: Lab,
    directory: TempDir,
    mode: Mode,
    /// Connections of a pod and from outside that the rules translated.
    by_rules: Vec<Process>,
    manifests: Manifests,
    _servers: Vec<Process>,
}

impl Node {
    fn start(mode: Mode) -> Result<Self> {
        let lab = Cluster::lab()?;
        let [far, near] = ["far", "near"].map(|name| lab.pod(name));
        let servers = [far, near].map(serve).into_iter().collect::<Result<_>>()?;
        let web = web(&lab, ["far", "near"]);
        let empty = Service::new("empty", &["10.96.0.12"]).port("tcp", 80, TCP);
        let manifests = Manifests::new(&[web, empty])?;
        let node = lab.node("node2");
        load_kube_proxys_rules(node, mode, &manifests)?;
        for rule in FOREIGN {
            let programs: &[&str] = match mode {
                Mode::IptablesLegacy => &["iptables-legacy", "ip6tables-legacy"],
                Mode::IptablesNft => &["iptables-nft", "ip6tables-nft"],
                Mode::Nftables => &[],
            };
            for program in programs {
                node.command(program).args(rule.split(' ')).run()?;
            }
        }
        let by_rules = vec![
            lab.pod("sleep").hold(TO)?,
            lab.pod("sleep").hold(TO_V6)?,
            lab.external("ext")
                .hold(&format!("{}:30080", node.ipv4()))?,
        ];
        let addresses: Vec<String> = node.addresses().map(|addr| addr.to_string()).into();
        let directory = tempfile::tempdir()?;
        let agent = lab.agent("node2").in_the_nodes_cgroup();
        let agent = agent
            .manifests(manifests.path())
            .args(["--pod-cidr", "10.244.0.0/16"])
            .args(["--nodeport-addresses", &addresses.join(",")])
            .start()?;
        Ok(Self {
            agent,
            lab,
            directory,
            mode,
            by_rules,
            manifests,
            _servers: servers,
        })
    }

    fn node(&self) -> &Host {
        self.lab.node("node2")
    }

    fn client(&self) -> &Host {
        self.lab.pod("sleep")
    }

    /// Runs `dataplane-migrate takeover`, with variables.
    fn takeover(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Outcome> {
        let directory = self.directory.path().to_str().context("a path in UTF-8")?;
        let all = ["takeover", "--takeover-dir", directory];
        let mut command = self.agent.migrate([&all, arguments].concat())?;
        for (name, value) in variables {
            command = command.env(name, value);
        }
        let output = command.output()?;
        Outcome::of(&output)
    }

    /// All rules, without counters and remarks.
    fn rules(&self) -> Result<String> {
        let print = match self.mode {
            Mode::IptablesLegacy => "iptables-legacy-save; ip6tables-legacy-save",
            Mode::IptablesNft => "iptables-nft-save; ip6tables-nft-save",
            Mode::Nftables => {
                "for f in ip ip6; do nft -s list table $f kube-proxy 2>/dev/null || true; done"
            }
        };
        let all = self.node().command("sh").args(["-c", print]).run()?;
        // Chains have an order of their own in the kernel.
        let mut chains = Vec::new();
        let mut lines = Vec::new();
        for line in all.lines().filter(|line| !line.starts_with('#')) {
            match line.split_once(" [") {
                Some((chain, _)) if line.starts_with(':') => chains.push(chain),
                _ => lines.push(line),
            }
        }
        if self.mode != Mode::Nftables {
            lines = by_chain(lines);
        }
        chains.sort_unstable();
        Ok([chains, lines].concat().join("\n") + "\n")
    }

    fn has_rules(&self) -> Result<bool> {
        let rules = self.rules()?;
        Ok(rules.contains("KUBE-SERVICES") || rules.contains("table ip kube-proxy"))
    }

    /// The files in the directory that begin so.
    fn files(&self, name: &str) -> Result<Vec<PathBuf>> {
        let all = fs::read_dir(self.directory.path())?;
        let paths: Vec<PathBuf> = all
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_, std::io::Error>>()?;
        let is = |path: &PathBuf| {
            let file = path.file_name().unwrap_or_default();
            file.to_string_lossy().starts_with(name)
        };
        Ok(paths.into_iter().filter(is).collect())
    }

    fn is_served(&self) -> Result<()> {
        for to in [TO, TO_V6] {
            let report = ask(self.client(), to, "connect --count 4")?;
            ensure!(report.answered == 4, "{to}: {report:?}");
        }
        Ok(())
    }
}

/// The rules of each chain stay together in their order, and each table's chains are sorted.
fn by_chain(lines: Vec<&str>) -> Vec<&str> {
    let mut all = lines;
    for table in all.split_mut(|line| *line == "COMMIT") {
        table.sort_by_key(|line| line.split(' ').nth(1).map(str::to_owned));
    }
    all
}

/// Traffic of all kinds, until it is stopped. `pause`: between two connections of a client outside, in microseconds.
fn with_traffic(node: &Node, pause: u32, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let outside = format!("{}:30080", node.node().ipv4());
    let start = |host: &Host, to: &[&str], pause: u32| {
        let to = to.iter().flat_map(|to| ["--to", to]);
        let pause = pause.to_string();
        let arguments = to.chain(["--threads", "2", "--pause-us", &pause]);
        host.load(&arguments.collect::<Vec<_>>())
    };
    let loads = [
        (
            "a pod",
            start(
                node.client(),
                &[TO, TO_V6],
                if is_long() { 200 } else { 2_000 },
            )?,
        ),
        (
            "outside",
            start(node.lab.external("ext"), &[&outside], pause)?,
        ),
    ];
    let stop = AtomicBool::new(false);
    let datagrams = thread::scope(|scope| -> Result<u64> {
        let udp = scope.spawn(|| -> Result<u64> {
            let mut answered = 0;
            while !stop.load(Ordering::Relaxed) {
                let report = ask(node.client(), DNS, "udp --unconnected --count 100")?;
                ensure!(report.answered == report.attempts, "{report:?}");
                answered += report.answered;
            }
            Ok(answered)
        });
        let_traffic_go_on();
        let worked = work();
        let_traffic_go_on();
        stop.store(true, Ordering::Relaxed);
        let datagrams = udp.join().ok().context("the UDP client panicked")?;
        worked?;
        datagrams
    })?;
    for (who, load) in loads {
        let report: LoadReport = load.wait_json()?;
        let failures = &report.failures;
        ensure!(report.errors.is_empty(), "from {who}: {failures:?}");
        println!(
            "{}, from {who}: {} connections, none failed",
            node.mode, report.answered
        );
        ensure!(report.answered > 10, "from {who}: {}", report.answered);
    }
    println!("{}: {datagrams} datagrams, none lost", node.mode);
    ensure!(datagrams > 0, "no datagrams");
    Ok(())
}

/// In the long form, waits until there are as many connections as docs/takeover.md says.
pub fn let_traffic_go_on() {
    if is_long() {
        thread::sleep(Duration::from_secs(5));
    }
}

fn there_and_back(mode: Mode) -> Result<()> {
    let mut node = Node::start(mode)?;
    let by_rules = std::mem::take(&mut node.by_rules);
    let before = node.rules()?;
    let outside = format!("{}:30080", node.node().ipv4());
    let of_mode = match mode {
        Mode::Nftables => "nft delete table ip kube-proxy",
        _ => "-X KUBE-SERVICES",
    };
    let dry_run = node.takeover(&["--dry-run"], &[])?.exits(0)?;
    dry_run.says(&["would be in", "would run", of_mode])?;
    ensure!(node.rules()? == before, "--dry-run changed rules");
    ensure!(node.files("rules-")?.is_empty(), "--dry-run saved rules");
    let pause = if is_long() { 500 } else { 20_000 };
    with_traffic(&node, pause, || {
        let by_programs = [node.client().hold(TO)?, node.client().hold(TO_V6)?];
        node.takeover(&[], &[])?.exits(0)?.says(&[
            "SHA-256",
            "answer by the dataplane's programs",
            "without the rules",
        ])?;
        ensure!(!node.has_rules()?, "{}", node.rules()?);
        for rule in FOREIGN.iter().filter(|_| mode != Mode::Nftables) {
            let port = rule.split("--dport ").nth(1).context("a port")?;
            ensure!(
                node.rules()?.contains(port),
                "the rule of others is gone: {rule}"
            );
        }
        let (_, translated) = counted(&node.agent, Reason::Translated, || {
            reaches(node.client(), TO, "connect --count 16", &["far", "near"])
        })?;
        ensure!(translated >= 16, "{translated} of 16 connections");
        let again = node.takeover(&["-o", "json"], &[])?.exits(0)?.json()?;
        ensure!(again["outcome"] == "taken-over", "{again:#}");
        crate::outcome::run(&node.agent, "status")?.exits(0)?;
        let [saved] = &node.files("rules-")?[..] else {
            bail!("not one file with rules");
        };
        let saved = saved.to_str().context("a path in UTF-8")?;
        let compare = ["compare", "--file", saved];
        crate::outcome::migrate(&node.agent, compare)?.exits(0)?;

        node.takeover(&["--revert"], &[])?
            .exits(3)?
            .says(&["no service has changed", "an agent runs"])?;
        let back = node.rules()?;
        ensure!(back == before, "{back}\nbefore:\n{before}");
        for held in by_programs {
            lived(held).context("translated by the agent's programs")?;
        }
        for held in by_rules {
            lived(held).context("translated by kube-proxy's rules")?;
        }
        Ok(())
    })?;
    // kube-proxy has started, and has brought its rules up to date.
    let other = web(&node.lab, ["near", "near2"]);
    load_kube_proxys_rules(node.node(), node.mode, &Manifests::new(&[other])?)?;
    let fresh = node.rules()?;
    ensure!(fresh != before, "{fresh}");
    let _near2 = serve(node.lab.pod("near2"))?;
    let held = node.client().hold(TO)?;
    let from_outside = node.lab.external("ext").hold(&outside)?;
    node.agent.stop()?;
    with_traffic(&node, pause, || {
        node.takeover(&["--revert"], &[])?
            .exits(0)?
            .says(&["the rules are back", "to the kernel's conntrack", "removed"])
            .map(drop)
    })?;
    let after = node.rules()?;
    ensure!(
        after == fresh,
        "kube-proxy's new rules are gone: {after}\nbefore:\n{fresh}"
    );
    reaches(node.client(), TO, "connect --count 16", &["near", "near2"])?;
    lived(held).context("translated by the agent's programs")?;
    lived(from_outside).context("translated by the packet path")?;
    node.takeover(&["--revert"], &[])?
        .exits(1)?
        .says(&["nothing was taken over"])?;
    Ok(())
}

fn rules_of_mode_iptables_are_taken_over_and_given_back() -> Result<()> {
    there_and_back(Mode::IptablesNft)
}

fn rules_of_iptables_legacy_are_taken_over_and_given_back() -> Result<()> {
    there_and_back(Mode::IptablesLegacy)
}

fn rules_of_mode_nftables_are_taken_over_and_given_back() -> Result<()> {
    there_and_back(Mode::Nftables)
}

fn what_differs_stops_a_takeover() -> Result<()> {
    let mut node = Node::start(Mode::IptablesNft)?;
    // kube-proxy has heard of another endpoint.
    let other = web(&node.lab, ["near", "near2"]);
    load_kube_proxys_rules(node.node(), node.mode, &Manifests::new(&[other])?)?;
    let before = node.rules()?;
    let untouched = |node: &Node| -> Result<()> {
        ensure!(node.rules()? == before, "rules were changed");
        ensure!(node.files("rules-")?.is_empty(), "a file is left");
        ensure!(node.files("journal")?.is_empty(), "a journal is left");
        Ok(())
    };
    for dry_run in [&[][..], &["--dry-run"]] {
        let stopped = node.takeover(dry_run, &[])?.exits(2)?;
        stopped.says(&["10.244.2.11:", "10.244.1.5:", "default/web"])?;
        untouched(&node)?;
    }
    node.agent.stop()?;
    node.takeover(&[], &[])?
        .exits(1)?
        .says(&["start `dataplane run`"])?;
    untouched(&node)
}

/// A directory with programs, each of which fails when it is to change something for the nth time, and otherwise runs
/// the real program.
fn failing(programs: &[(&str, u32)]) -> Result<TempDir> {
    let directory = tempfile::tempdir()?;
    for (name, nth) in programs {
        let program = directory.path().join(name);
        let count = directory.path().join(format!("{name}.count"));
        let script = format!(
            "#!/bin/sh\ncase \"$1\" in --version) exec /usr/sbin/{name} \"$@\";; esac\n\
             n=$(cat {count} 2>/dev/null || echo 0); n=$((n + 1)); echo $n > {count}\n\
             if [ $n = {nth} ]; then echo a test asked for it >&2; exit 1; fi\nexec /usr/sbin/{name} \"$@\"\n",
            count = count.display()
        );
        fs::write(&program, script)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    }
    Ok(directory)
}

fn a_takeover_that_fails_brings_the_rules_back() -> Result<()> {
    let mut node = Node::start(Mode::IptablesNft)?;
    let before = node.rules()?;
    let path = |directory: &Path| format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", directory.display());
    // IPv4's rules are gone when IPv6's cannot be removed.
    let programs = failing(&[("ip6tables-nft-restore", 1)])?;
    node.takeover(&[], &[("PATH", &path(programs.path()))])?
        .exits(1)?
        .says(&["a test asked for it", "the rules are back as they were"])?;
    let back = node.rules()?;
    ensure!(back == before, "{back}\nbefore:\n{before}");
    ensure!(node.files("journal")?.is_empty(), "a journal is left");
    node.is_served()?;
    // The old rules cannot come back either: the next command goes on.
    let programs = failing(&[("ip6tables-nft-restore", 1), ("iptables-nft-restore", 2)])?;
    node.takeover(&[], &[("PATH", &path(programs.path()))])?
        .exits(1)?
        .says(&["could not be brought back"])?;
    ensure!(node.rules()? != before, "the rules came back");
    node.is_served()?;
    node.takeover(&[], &[])?
        .exits(0)?
        .says(&["a take-over was interrupted"])?;
    ensure!(!node.has_rules()?, "rules are left");
    node.is_served()?;
    // A changed file is not loaded, and one that is whole comes back, by its name.
    let files = node.files("rules-")?;
    let file = files.iter().max().context("no file with rules")?;
    let (name, text) = (
        file.to_str().context("a path in UTF-8")?,
        fs::read_to_string(file)?,
    );
    fs::write(file, text.replace("10.244.1.5", "10.244.1.6"))?;
    node.takeover(&["--revert"], &[])?
        .exits(1)?
        .says(&["the file was changed"])?;
    fs::write(file, &text[..text.len() / 2])?;
    node.takeover(&["--revert", name], &[])?.exits(1)?;
    ensure!(!node.has_rules()?, "rules are there");
    fs::write(file, &text)?;
    node.takeover(&["--revert", name], &[])?.exits(3)?;
    let back = node.rules()?;
    ensure!(back == before, "{back}\nbefore:\n{before}");

    // With --watch, kube-proxy's rules go again, until `--revert`.
    let directory = node.directory.path().to_str().context("a path in UTF-8")?;
    let watch = ["takeover", "--takeover-dir", directory, "--watch"];
    let watching = node.agent.migrate(watch)?.stdout_piped().spawn()?;
    let gone = |node: &Node| {
        eventually(|| {
            ensure!(!node.has_rules()?, "rules are there");
            Ok(())
        })
    };
    gone(&node)?;
    load_kube_proxys_rules(node.node(), node.mode, &node.manifests)?;
    gone(&node)?;
    eventually(|| node.takeover(&["--revert"], &[])?.exits(3).map(drop))?;
    let said = watching.wait()?;
    ensure!(said.contains("not watching any more"), "{said}");
    ensure!(node.has_rules()?, "--watch removed what was given back");
    Ok(node.agent.stop()?)
}

/// Dies at each point of a take-over, of bringing the rules back, and of removing the dataplane. The services are served each time,
/// and the next command finishes or undoes it.
fn a_takeover_that_is_killed_leaves_a_node_that_works() -> Result<()> {
    let modes: &[Mode] = if is_long() {
        &Mode::ALL
    } else {
        &[Mode::IptablesNft]
    };
    for mode in modes {
        let mut node = Node::start(*mode)?;
        let before = node.rules()?;
        let is_back = |node: &Node, point: &str| -> Result<()> {
            let back = node.rules()?;
            ensure!(
                back == before,
                "after point {point}: {back}\nbefore:\n{before}"
            );
            Ok(())
        };
        let mut killed = [0; 3];
        for way in 0..3 {
            let arguments: &[&str] = if way == 0 { &[] } else { &["--revert"] };
            let step = if is_long() { 1 } else { [5, 5, 4][way] };
            for point in (1..).step_by(step) {
                if way > 0 {
                    node.takeover(&[], &[])?.exits(0)?;
                }
                if way == 2 {
                    node.takeover(&["--revert"], &[])?.exits(3)?;
                    node.agent.stop()?;
                }
                let point = point.to_string();
                let outcome = node.takeover(arguments, &[("DATAPLANE_TAKEOVER_DIES", &point)])?;
                node.is_served()
                    .with_context(|| format!("killed at point {point}"))?;
                if outcome.code.is_some() {
                    outcome.exits([0, 3, 0][way])?;
                    break;
                }
                killed[way] += 1;
                // The command again, or its opposite.
                match way {
                    0 if killed[way] % 2 == 0 => {
                        let undone = node.takeover(&["--revert"], &[])?;
                        let is_undone = undone.code == Some(3)
                            || undone.stderr.contains("nothing was taken over");
                        ensure!(is_undone, "{undone:?}");
                        is_back(&node, &point)?;
                    }
                    0 | 1 => {
                        node.takeover(&[], &[])?
                            .exits(0)
                            .with_context(|| format!("after point {point}"))?;
                        ensure!(!node.has_rules()?, "rules are left after point {point}");
                        node.is_served()?;
                        node.takeover(&["--revert"], &[])?.exits(3)?;
                        is_back(&node, &point)?;
                    }
                    _ => {
                        let ended = node.takeover(&["--revert"], &[])?;
                        // Killed after its last change.
                        let is_over = ended.stderr.contains("nothing was taken over");
                        ensure!(ended.code == Some(0) || is_over, "{ended:?}");
                        is_back(&node, &point)?;
                        node.is_served()?;
                    }
                }
                if way == 2 {
                    node.agent.start()?;
                }
            }
        }
        println!("{mode}: killed at {killed:?} points");
        ensure!(killed.iter().all(|points| *points > 1), "{killed:?}");
    }
    Ok(())
}

/// `takeover --wait`, as a unit or a container starts it with the agent.
fn an_agent_takes_over_when_it_serves() -> Result<()> {
    let mut node = Node::start(Mode::Nftables)?;
    node.agent.stop()?;
    let directory = node.directory.path().to_str().context("a path in UTF-8")?;
    let wait = ["takeover", "--takeover-dir", directory, "--wait"];
    let waiting = node.agent.migrate(wait)?.stdout_piped().spawn()?;
    thread::sleep(Duration::from_secs(1));
    ensure!(node.has_rules()?, "the rules are gone, and no agent serves");
    node.agent.start()?;
    let said = waiting.wait()?;
    ensure!(
        said.contains("no agent listens")
            && said.contains("connect")
            && said.contains("without the rules"),
        "{said}"
    );
    ensure!(!node.has_rules()?, "{}", node.rules()?);
    node.agent.stop()?;
    node.is_served()?;
    node.agent.start()?;
    node.is_served()?;
    let status = crate::outcome::run(&node.agent, "status")?.exits(0)?;
    status.says(&["Services  2, with"]).map(drop)
}
