//! `dataplane takeover --owner`: a sidecar's rules in a pod go, and its capture stays.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, Process, report::LoadReport};
use serde_json::{Value, json};

use super::{World, foreign, interfaces, mesh, proxies, relay::Relay};
use crate::{
    cluster::{ask, lived, reaches},
    imported_mesh::{self, NATIVE},
    outcome::{self, Outcome},
    takeover::{is_long, let_traffic_go_on},
};

scenarios! {
    Dataplane:
    a_sidecars_capture_is_taken_over_and_given_back,
    a_takeover_of_capture_that_is_killed_is_finished_or_undone,
    rules_that_do_more_than_capture_stay,
    the_capture_of_a_machine_inside_is_taken_over_and_given_back,
}

const TO: &str = "10.244.1.5:7";
/// The connections that each scenario is about.
const CONNECT: &str = "connect --count 3";

/// A mesh with sidecars.
#[derive(Clone, Copy)]
enum Mesh {
    Istio,
    Osm,
}

impl Mesh {
    fn owner(self) -> &'static str {
        match self {
            Self::Istio => "istio",
            Self::Osm => "osm",
        }
    }

    /// The sidecar's rules: of IPv4, and of IPv6 if it has such.
    fn iptables(self) -> [String; 2] {
        // The proxy here has another user and port.
        let istio = |lo: &str, six: &str, range: &str| {
            let rules = imported_mesh::sidecar(lo, six, range);
            let rules = rules.replace("1337", "1500").replace("15006", "15003");
            // With it, the proxy here would get its own connections to the application.
            let of_itself = |line: &&str| line.starts_with("-A ISTIO_OUTPUT -o lo ! -d");
            let lines = rules.split_inclusive('\n');
            lines.filter(|line| !of_itself(line)).collect()
        };
        match self {
            Self::Istio => [
                istio("127.0.0.1/32", "127.0.0.6/32", "10.96.0.0/12"),
                istio("::1/128", "::6/128", "fd00:96::/64"),
            ],
            Self::Osm => [proxies::OSM.to_owned(), String::new()],
        }
    }

    /// The same as `mesh.rules`.
    fn rules(self) -> Value {
        match self {
            Self::Istio => json!({
                "excludeOutboundIPRanges": ["10.96.0.0/12", "fd00:96::/64"],
                "excludeOutboundPorts": [3306],
                "excludeInboundPorts": [9090],
                "excludeUIDs": [1500],
                "excludeGIDs": [888],
            }),
            Self::Osm => json!({
                "excludeOutboundIPRanges": ["10.244.1.6/32", "::/0"],
                "excludeOutboundPorts": [80],
                "excludeInboundPorts": [80],
                "excludeUIDs": [1500],
            }),
        }
    }
}

/// A pod with a sidecar and its rules, and with a rule of somebody else.
struct Pod {
    mesh: Mesh,
    world: World,
    _proxy: Relay,
}

impl Pod {
    fn start(mesh: Mesh) -> Result<Self> {
        let world = World::new()?;
        let proxy = Relay::haproxy(&world)?;
        Self::with(mesh, world, proxy, &|rules| rules)
    }

    fn with(
        mesh: Mesh,
        world: World,
        proxy: Relay,
        change: &dyn Fn(String) -> String,
    ) -> Result<Self> {
        let path = world.state.path().join("rules");
        let shell = |script: &str| world.app().command("sh").args(["-c", script]).run();
        for (program, rules) in ["iptables-nft", "ip6tables-nft"]
            .iter()
            .zip(mesh.iptables())
        {
            fs::write(&path, change(rules))?;
            shell(&format!("{program}-restore --noflush < {}", path.display()))?;
        }
        shell("iptables-nft -t nat -A POSTROUTING -p tcp --dport 4711 -j ACCEPT")?;
        Ok(Self {
            mesh,
            world,
            _proxy: proxy,
        })
    }

    fn takeover(&self, arguments: &[&str], dies: Option<u32>) -> Result<Outcome> {
        let directory = self.world.state.path().join("takeover");
        let directory = directory.to_string_lossy().into_owned();
        let netns = self.world.app().netns().to_owned();
        let all = ["takeover", "--owner", self.mesh.owner(), "--netns", &netns];
        let all = [&all, &["--takeover-dir", &directory][..], arguments].concat();
        let agent = self.world.agent()?;
        let Some(point) = dies else {
            return outcome::run_args(agent, all);
        };
        let command = agent.dataplane(all);
        let output = command
            .env("DATAPLANE_TAKEOVER_DIES", point.to_string())
            .output()?;
        Ok(Outcome {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout)?,
            stderr: String::from_utf8(output.stderr)?,
        })
    }

    /// The rules of the pod, without counters.
    fn rules(&self) -> Result<Vec<String>> {
        let print = "iptables-nft-save; ip6tables-nft-save";
        let all = self.world.app().command("sh").args(["-c", print]).run()?;
        let lines = all.lines().filter(|line| !line.starts_with('#'));
        let mut lines: Vec<String> = lines
            .map(|line| line.split(" [").next().unwrap_or_default().to_owned())
            .collect();
        // The kernel lists chains in an order of its own; rules of a chain stay in theirs.
        lines.sort_by_key(|line| line.split(' ').nth(1).map(str::to_owned));
        Ok(lines)
    }

    /// Nobody would capture its connections.
    fn is_not_cleaned_up(&mut self) -> Result<()> {
        let directory = self.world.state.path().join("takeover");
        let directory = directory.to_string_lossy().into_owned();
        let agent = self.world.agent.as_mut().context("an agent")?;
        agent.kill();
        let cleanup = ["cleanup", "--takeover-dir", &directory];
        outcome::run_args(agent, cleanup)?.exits(1)?.says(&[
            "nothing was removed",
            "--revert",
            "--force",
        ])?;
        let shown = outcome::run_args(agent, [&cleanup[..], &["--dry-run"]].concat())?;
        shown.exits(0)?.says(&["would be removed"])?;
        agent.start()?;
        Ok(())
    }

    /// Whether connections get where they are to go.
    fn works(&self) -> Result<()> {
        reaches(self.world.app(), TO, CONNECT, &["one"])?;
        reaches(self.world.lab.pod("one"), "10.244.1.8:7", CONNECT, &["app"])?;
        Ok(())
    }
}

fn a_sidecars_capture_is_taken_over_and_given_back() -> Result<()> {
    let mut pod = Pod::start(Mesh::Istio)?;
    let by_rules = pod.world.app().hold(TO)?;
    let before = pod.rules()?;
    // Nobody is captured.
    pod.world.agent_with(&json!({}), &[])?;
    pod.takeover(&[], None)?.exits(1)?.says(&[
        "captures no workload",
        "import-mesh",
        "nothing was changed",
    ])?;
    // Something differs.
    let mut other = pod.mesh.rules();
    other["excludeOutboundPorts"] = json!([3306, 3307]);
    other["withoutProxy"] = json!("pass");
    let mut one_family = mesh(foreign(), other);
    one_family["workloads"][0]["addresses"] = json!(["10.244.1.8"]);
    pod.world.agent_with(&one_family, &[])?;
    pod.takeover(&[], None)?.exits(2)?.says(&[
        "outbound-port",
        "3307",
        "inbound-address",
        "fd00:10:244:1::8",
        "without-proxy",
    ])?;
    ensure!(pod.rules()? == before, "rules were changed");
    pod.world.capture(foreign(), pod.mesh.rules())?;
    // Beside the rules, and inbound connections come by them.
    pod.works()?;
    pod.takeover(&["--dry-run"], None)?
        .exits(0)?
        .says(&["captures default/app as the rules do", "-X ISTIO_OUTPUT"])?;
    ensure!(pod.rules()? == before, "--dry-run changed rules");
    let pause = if is_long() { "200" } else { "2000" };
    let load = |pod: &Pod| -> Result<_> {
        let start =
            |host: &Host, to: &str| host.load(&["--to", to, "--threads", "2", "--pause-us", pause]);
        let world = &pod.world;
        Ok([
            start(world.app(), TO)?,
            start(world.lab.pod("one"), "10.244.1.8:7")?,
        ])
    };
    let there = load(&pod)?;
    let_traffic_go_on();
    let told = pod.takeover(&["-o", "json"], None)?.exits(0)?.json()?;
    ensure!(told["outcome"] == "taken-over", "{told:#}");
    let left = pod.rules()?;
    ensure!(
        !left.iter().any(|line| line.contains("ISTIO_"))
            && left.iter().any(|line| line.contains("4711")),
        "{left:#?}"
    );
    let guard = pod
        .world
        .app()
        .command("nft")
        .args(["list", "tables"])
        .run()?;
    ensure!(!guard.contains("guard"), "{guard}");
    let ((), captured) = pod.world.counted(Reason::Captured, || pod.works())?;
    ensure!(captured >= 3, "{captured} of 3 were captured");
    let nothing = pod.takeover(&[], None)?.exits(0)?;
    nothing.says(&["taken over already"])?;
    let none_failed = |loads: [Process; 2]| -> Result<()> {
        for (load, way) in loads.into_iter().zip(["outbound", "inbound"]) {
            let report: LoadReport = load.wait_json()?;
            ensure!(report.errors.is_empty(), "{way}: {:?}", report.failures);
            println!("{way}: {} connections, none failed", report.answered);
            ensure!(report.answered > 10, "{way}: {}", report.answered);
        }
        Ok(())
    };
    let_traffic_go_on();
    none_failed(there)?;
    pod.is_not_cleaned_up()?;
    let by_programs = pod.world.app().hold(TO)?;
    let back = load(&pod)?;
    let_traffic_go_on();
    pod.takeover(&["--revert"], None)?
        .exits(3)?
        .says(&["default/app", "beside the rules"])?;
    ensure!(pod.rules()? == before, "{:#?}", pod.rules()?);
    let_traffic_go_on();
    none_failed(back)?;
    lived(by_rules)?;
    lived(by_programs)?;
    pod.world.agent_with(&json!({}), &[])?;
    pod.takeover(&["--revert"], None)?.exits(0)?;
    pod.works()?;
    let again = pod.takeover(&["--revert"], None)?.exits(1)?;
    again.says(&["nothing was taken over"])?;
    Ok(())
}

/// Killed at any point, packets pass as before or none does, for a time; the next command finishes or undoes it.
fn a_takeover_of_capture_that_is_killed_is_finished_or_undone() -> Result<()> {
    let mut pod = Pod::start(Mesh::Osm)?;
    pod.world.capture(foreign(), pod.mesh.rules())?;
    let before = pod.rules()?;
    for (way, arguments) in [&[][..], &["--revert"]].into_iter().enumerate() {
        let mut killed = 0;
        for point in (1..).step_by(if is_long() { 1 } else { 5 }) {
            if way == 1 {
                pod.takeover(&[], None)?.exits(0)?;
            }
            let outcome = pod.takeover(arguments, Some(point))?;
            if outcome.code.is_some() {
                outcome.exits([0, 3][way])?;
                break;
            }
            killed += 1;
            if killed % 2 == 1 {
                pod.takeover(&[], None)?.exits(0)?;
                let left = pod.rules()?;
                ensure!(
                    !left.iter().any(|line| line.contains("PROXY_")),
                    "point {point}: {left:#?}"
                );
                pod.works()?;
            }
            let undone = pod.takeover(&["--revert"], None)?;
            ensure!(
                undone.code == Some(3) || undone.stderr.contains("nothing was taken over"),
                "point {point}: {undone:?}"
            );
            ensure!(pod.rules()? == before, "point {point}: {:#?}", pod.rules()?);
            // A guard that was left ends with the next command.
            let report = ask(pod.world.app(), TO, CONNECT)?;
            ensure!(report.answered == 3, "point {point}: {report:?}");
        }
        println!("way {way}: killed at {killed} points");
        ensure!(killed > 1, "{killed}");
        if way == 0 {
            pod.takeover(&["--revert"], None)?.exits(3)?;
        }
    }
    Ok(())
}

/// Connections that come into the pod by an interface go on as those of the pod do.
fn the_capture_of_a_machine_inside_is_taken_over_and_given_back() -> Result<()> {
    let world = interfaces::world()?;
    let proxy = Relay::haproxy_everywhere(&world)?;
    let interface = interfaces::INTERFACE;
    let redirect = |rules: String| {
        let first = "-A PREROUTING -p tcp -j ISTIO_INBOUND";
        let own = format!(
            "-A PREROUTING -i {interface} -j ISTIO_REDIRECT\n-A PREROUTING -i {interface} -j RETURN"
        );
        rules.replacen(first, &format!("{own}\n{first}"), 1)
    };
    let mut pod = Pod::with(Mesh::Istio, world, proxy, &redirect)?;
    let before = pod.rules()?;
    let by_rules = interfaces::machine(&pod.world).hold(TO)?;
    let mut rules = pod.mesh.rules();
    rules["excludeInterfaces"] = json!([interface]);
    pod.world.capture(foreign(), rules.clone())?;
    pod.takeover(&[], None)?
        .exits(2)?
        .says(&["virtual-interface", interface])?;
    rules["virtualInterfaces"] = json!([interface]);
    pod.world.capture(foreign(), rules)?;
    let load = |pod: &Pod| {
        interfaces::machine(&pod.world).load(&["--to", TO, "--threads", "2", "--pause-us", "2000"])
    };
    let there = load(&pod)?;
    pod.takeover(&[], None)?.exits(0)?;
    let left = pod.rules()?;
    ensure!(
        !left.iter().any(|line| line.contains("ISTIO_")),
        "{left:#?}"
    );
    let (_, captured) = pod.world.counted(Reason::Captured, || {
        reaches(interfaces::machine(&pod.world), TO, CONNECT, &["one"])
    })?;
    ensure!(captured >= 3, "{captured} of 3 were captured");
    let_traffic_go_on();
    let by_programs = interfaces::machine(&pod.world).hold(TO)?;
    let none_failed = |load: Process| -> Result<()> {
        let report: LoadReport = load.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.answered > 10,
            "{report:?}"
        );
        Ok(())
    };
    none_failed(there)?;
    let back = load(&pod)?;
    pod.takeover(&["--revert"], None)?.exits(3)?;
    ensure!(pod.rules()? == before, "{:#?}", pod.rules()?);
    let_traffic_go_on();
    none_failed(back)?;
    lived(by_rules)?;
    lived(by_programs)?;
    pod.world.agent_with(&json!({}), &[])?;
    pod.takeover(&["--revert"], None)?.exits(0)?;
    reaches(interfaces::machine(&pod.world), TO, CONNECT, &["one"])?;
    Ok(())
}

/// Ambient mode encrypts, and by TPROXY the sidecar needs rules of its own: both stay, whatever the agent captures.
fn rules_that_do_more_than_capture_stay() -> Result<()> {
    let mut world = World::new()?;
    let _sidecar = Relay::haproxy(&world)?;
    world.capture(foreign(), json!({}))?;
    for (program, rules, words) in [
        (
            "iptables-nft-restore",
            AMBIENT,
            ["ambient mode", "ztunnel encrypts"],
        ),
        (
            "iptables-nft-restore",
            TPROXY,
            ["by TPROXY", "interceptionMode"],
        ),
        (
            "nft flush ruleset; nft -f -",
            NATIVE,
            ["own in nf_tables", "import-mesh"],
        ),
    ] {
        let path = world.state.path().join("rules");
        fs::write(&path, rules)?;
        let restore = format!("{program} < {}", path.display());
        world.app().command("sh").args(["-c", &restore]).run()?;
        let print = || {
            let list = ["-s", "list", "ruleset"];
            world.app().command("nft").args(list).run()
        };
        let before = print()?;
        ensure!(before.contains("15001"), "no rule was loaded: {before}");
        let directory = world.state.path().join("takeover");
        let netns = world.app().netns().to_owned();
        for more in [&["--dry-run"][..], &[]] {
            let all = [
                "takeover",
                "--owner",
                "istio",
                "--netns",
                &netns,
                "--takeover-dir",
            ];
            let command = world.agent()?.dataplane(all);
            let output = command.arg(&directory).args(more).output()?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(
                output.status.code() == Some(1) && words.iter().all(|word| said.contains(word)),
                "{more:?}: {output:?}"
            );
            ensure!(said.contains("nothing was changed"), "{said}");
        }
        ensure!(print()? == before, "rules were changed");
        let saved = fs::read_dir(&directory).into_iter().flatten().flatten();
        let saved = saved
            .flat_map(|entry| fs::read_dir(entry.path()))
            .flatten()
            .flatten();
        let left: Vec<_> = saved
            .map(|entry| entry.file_name())
            .filter(|name| name != "lock")
            .collect();
        ensure!(left.is_empty(), "files were left: {left:?}");
    }
    Ok(())
}

/// As Istio's CNI agent writes them.
const AMBIENT: &str = "\
*mangle
:ISTIO_OUTPUT - [0:0]
:ISTIO_PRERT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
COMMIT
*nat
:ISTIO_OUTPUT - [0:0]
:ISTIO_PRERT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -d 169.254.7.127/32 -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
-A ISTIO_PRERT -s 169.254.7.127/32 -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
COMMIT
";

/// As `istio-iptables` writes them, for the proxy here.
const TPROXY: &str = "\
*mangle
:ISTIO_DIVERT - [0:0]
:ISTIO_INBOUND - [0:0]
:ISTIO_TPROXY - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A PREROUTING -p tcp -m mark --mark 0x539 -j CONNMARK --save-mark
-A OUTPUT -o lo -p tcp -m mark --mark 0x539 -j RETURN
-A OUTPUT -p tcp -m connmark --mark 0x539 -j CONNMARK --restore-mark
-A ISTIO_DIVERT -j MARK --set-xmark 0x539/0xffffffff
-A ISTIO_DIVERT -j ACCEPT
-A ISTIO_INBOUND -p tcp -m mark --mark 0x539 -j RETURN
-A ISTIO_INBOUND -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT
-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY
-A ISTIO_TPROXY ! -d 127.0.0.1/32 -p tcp -j TPROXY --on-port 15003 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff
COMMIT
*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15003
-A ISTIO_OUTPUT -m owner --uid-owner 1500 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";
