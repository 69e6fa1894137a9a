//! `--from-iptables`: kube-proxy's rules as the source, in each of its modes, live and from a file.

use std::{collections::BTreeMap, fs, os::unix::fs::symlink, path::Path};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_peers::{Cluster as Peers, LocalDetector, Mode};
use dataplane_tests::{Host, Lab};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, UDP, counted, eventually, lived, peer_is, reaches, refused, serve},
    differential::world::load_rules,
    iptables::walk,
    manifest::{Manifests, Service},
    outcome::{cannot_run, run, run_args},
};

scenarios! {
    Dataplane:
    plans_are_the_same_by_rules_and_by_manifests,
    an_agent_serves_what_rules_say,
    a_file_with_rules_is_followed_and_faults_change_nothing,
    a_node_is_moved_by_hand_and_given_back,
    a_sidecars_rules_become_a_configuration,
    native_rules_become_the_same_configuration,
    istios_own_examples_become_configurations,
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

/// Without an agent: what a plan would write by the rules in the kernel is what it would write by the manifests that the
/// rules were made of; and the same from files with what the programs print.
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
            // About the rules of the forward hook. Lines that are not understood are errors.
            answer["problems"].take();
            // These rules do not tell load balancers' addresses from external IPs.
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
        let live = plan(&["--strict", "--from-iptables"])?;
        ensure!(live == wanted, "{mode}: {live:#}\nby manifests: {wanted:#}");
        if mode == Mode::Nftables {
            needs_no_program_for_rules_of_others(host, &program)?;
        }
        let prints: &[&str] = match mode {
            Mode::IptablesLegacy => &["iptables-legacy-save; ip6tables-legacy-save"],
            Mode::IptablesNft => &["iptables-nft-save; ip6tables-nft-save"],
            Mode::Nftables => &["nft list ruleset", "nft -j list ruleset"],
        };
        for print in prints {
            let file = directory.path().join("rules");
            fs::write(&file, host.command("sh").args(["-c", print]).run()?)?;
            let file = file.to_string_lossy().into_owned();
            let saved = plan(&["--strict", "--from-iptables", &file])?;
            ensure!(
                saved == wanted,
                "{print}: {saved:#}\nby manifests: {wanted:#}"
            );
        }
    }
    Ok(())
}

/// kube-proxy's rules are in native tables, which `nft` prints. A rule of somebody else is in a table that only `iptables-save`
/// prints, and that program is not there.
fn needs_no_program_for_rules_of_others(host: &Host, program: &Path) -> Result<()> {
    let nft = host.command("sh").args(["-c", "command -v nft"]).run()?;
    let only_nft = tempfile::tempdir()?;
    symlink(nft.trim(), only_nft.path().join("nft"))?;
    let rule = ["-A", "FORWARD", "-p", "sctp", "-j", "DROP"];
    host.command("iptables-nft").args(rule).run()?;
    let plan = host
        .command(program)
        .args(["plan", "--node-name", host.name(), "--strict"])
        .args(["--bpffs", "/sys/fs/bpf/none", "--from-iptables"])
        .env("PATH", only_nft.path());
    let output = plan.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(2), "{said}");
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

/// kube-proxy's rules are in the kernel, and the agent serves the same; and goes on when the rules are gone.
fn an_agent_serves_what_rules_say() -> Result<()> {
    let Served { lab, _servers } = &Served::start(Mode::IptablesNft)?;
    let agent = lab.agent("node2").args(["--from-iptables"]).start()?;
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
    ensure!(
        networks.contains("10.244.0.0/16") && networks.contains("kube-proxy's rules"),
        "{networks}"
    );
    ensure!(status["agent"]["source"]["kind"] == "rules", "{status:#}");
    run_args(
        &agent,
        ["iptables", "cleanup", "--owner", "kube-proxy", "--force"],
    )?
    .exits(0)?;
    kill(pid(&agent), Signal::SIGHUP)?;
    eventually(|| {
        let status = run(&agent, "status")?;
        status
            .says(&["no rules of kube-proxy", "last rules that it read"])
            .map(drop)
    })?;
    check()
}

fn pid(agent: &dataplane_tests::Agent) -> nix::unistd::Pid {
    nix::unistd::Pid::from_raw(i32::try_from(agent.id()).unwrap_or_default())
}

/// The one endpoint that a client comes to.
fn reaches_one(client: &Host, to: &str) -> Result<String> {
    let report = crate::cluster::ask(client, to, "connect --count 8")?;
    let mut names = report.endpoints.keys().cloned();
    let first = names.next().context("nobody answers")?;
    ensure!(names.next().is_none(), "several: {report:?}");
    Ok(first)
}

/// A file is read again when it changes. What is no rule, and with `--strict` what is not understood, is named with its line,
/// and changes nothing.
fn a_file_with_rules_is_followed_and_faults_change_nothing() -> Result<()> {
    const TO: &str = "10.96.0.10:80";
    let lab = Cluster::lab()?;
    let [far, near] = ["far", "near"].map(|name| lab.pod(name));
    let servers = [serve(far)?, serve(near)?];
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    // The rules of another node: of this one, no rule serves.
    let web = |pod: &Host| {
        Service::new("web", &["10.96.0.10"])
            .port("tcp", 80, TCP)
            .endpoints(&[pod])
    };
    let rules = |pod: &Host, print: &str, mode| -> Result<String> {
        let manifests = Manifests::new(&[
            web(pod),
            Service::new("other", &["10.96.0.11"]).port("tcp", 80, TCP),
        ])?;
        load_rules(
            lab.node("node1"),
            mode,
            &manifests.path(),
            &Peers::default(),
        )?;
        Ok(lab.node("node1").command("sh").args(["-c", print]).run()?)
    };
    let good = rules(
        far,
        "iptables-nft-save; ip6tables-nft-save",
        Mode::IptablesNft,
    )?;

    let agent = lab
        .agent("node2")
        .args(["--from-iptables", &path])
        .prepare()?;
    let line = 1 + good
        .lines()
        .position(|line| line.contains("-j DNAT"))
        .context("no DNAT")?;
    let odd = good.replace("-j DNAT", "-m time --timestart 08:00 -j DNAT");
    for (text, more, place) in [
        (good.replace("\nCOMMIT", "\nCOMIT"), &[][..], "rules:"),
        ("hello\n".to_owned(), &[], "rules:1: "),
        ("*nat\nCOMMIT\n".to_owned(), &[], "no rules of kube-proxy"),
        ("{\"nftables\": [\n{]}".to_owned(), &[], "rules:2:2: "),
        (odd.clone(), &["--strict"], &*format!("rules:{line}: ")),
    ] {
        fs::write(&file, text)?;
        cannot_run(&agent, [&["--from-iptables", &path], more].concat())?
            .exits(1)?
            .says(&[place, "nothing was changed"])?;
        ensure!(!agent.bpffs().exists(), "something was pinned");
    }

    fs::write(&file, &good)?;
    let mut agent = agent;
    agent.start()?;
    let client = lab.pod("sleep");
    reaches(client, TO, "connect --count 3", &["far"])?;
    // Faults: what was read before is served.
    fs::write(&file, format!("{good}rubbish\n"))?;
    let place = format!("rules:{}: ", 1 + good.lines().count());
    eventually(|| {
        run(&agent, "status")?
            .says(&[&place, "last rules that it read"])
            .map(drop)
    })?;
    reaches(client, TO, "connect --count 3", &["far"])?;
    // In the other mode's words, with another endpoint. First as the one of two programs leaves it.
    let print = "nft list table ip kube-proxy; nft list table ip6 kube-proxy";
    let moved = rules(near, print, Mode::Nftables)?;
    let [v4, _] = moved.split_once("table ip6 ").context("no IPv6")?.into();
    fs::write(&file, v4)?;
    eventually(|| {
        run(&agent, "status")?
            .says(&[
                "rules for IPv6, and they are gone",
                "last rules that it read",
            ])
            .map(drop)
    })?;
    reaches(client, TO, "connect --count 3", &["far"])?;
    fs::write(&file, moved)?;
    eventually(|| reaches(client, TO, "connect --count 3", &["near"]).map(drop))?;
    // The service with such a line is left out, and no other.
    fs::write(&file, odd)?;
    eventually(|| {
        run(&agent, "status")?
            .says(&["service default/web is left out", "--timestart"])
            .map(drop)
    })?;
    let named = run(&agent, "services -o json")?.exits(0)?.json()?;
    let named = named.as_array().context("no list")?.iter();
    let named: Vec<&str> = named
        .filter_map(|service| service["name"].as_str())
        .collect();
    ensure!(named == ["other"], "{named:?}");
    drop(servers);
    Ok(())
}

/// What `takeover` does, by hand, with connections that live throughout: one that kube-proxy's rules translated, and
/// one that the agent's programs did.
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

    let mut agent = lab
        .agent("node2")
        .args(["--from-iptables", &rules])
        .start()?;
    let compare = |more: &[&str]| run_args(&agent, [&["iptables", "compare"], more].concat());
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
    run(&agent, "iptables cleanup --owner kube-proxy")?.exits(0)?;
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

/// A sidecar's rules for one family. `lo`: loopback; `six`: the address from which the proxy connects to the application.
pub fn sidecar(lo: &str, six: &str, range: &str) -> String {
    format!(
        "*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 9090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -p udp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -o lo -s {six} -j RETURN
-A ISTIO_OUTPUT -o lo ! -d {lo} -p tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN
-A ISTIO_OUTPUT -d {lo} -j RETURN
-A ISTIO_OUTPUT -d {range} -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
"
    )
}

/// What a sidecar captures by rules in a pod becomes a configuration that `config check` accepts; what the configuration cannot
/// express is an error with its line.
fn a_sidecars_rules_become_a_configuration() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.5")
        .build()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    let program = lab.programs().dataplane()?;
    let import = || -> Result<(Option<i32>, String, String)> {
        let command = node.command(&program).args(["iptables", "import-mesh"]);
        let output = command.args(["--netns", pod.netns()]).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = output.status.code();
        Ok((code, text(&output.stdout), text(&output.stderr)))
    };
    let load = |program: &str, rules: &str| -> Result<()> {
        let script = format!("{program} <<'end'\n{rules}\nend");
        pod.command("sh").args(["-c", &script]).run()?;
        Ok(())
    };
    let (code, out, said) = import()?;
    ensure!(
        code == Some(1) && out.is_empty() && said.contains("no rule of Istio"),
        "{out}{said}"
    );
    load(
        "iptables-nft-restore",
        &sidecar("127.0.0.1/32", "127.0.0.6/32", "10.96.0.0/12"),
    )?;
    load(
        "ip6tables-nft-restore",
        &sidecar("::1/128", "::6/128", "fd00:96::/64"),
    )?;
    let (code, out, said) = import()?;
    ensure!(code == Some(0), "{said}");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("config.yaml");
    fs::write(&file, &out)?;
    let check = node.command(&program).args(["config", "check"]);
    check.arg(file.to_string_lossy().into_owned()).run()?;
    let lines: Vec<&str> = out.lines().map(str::trim).collect();
    for wanted in [
        "captured: true",
        "- 10.96.0.0/12",
        "- fd00:96::/64",
        "- 3306",
        "- 9090",
        "- 1337",
        "- 888",
    ] {
        ensure!(lines.contains(&wanted), "{wanted}: {out}");
    }
    ensure!(
        !lines.contains(&"- 15021") && out.contains("15008, 15021 are the mesh's own"),
        "{out}"
    );
    for program in ["iptables-nft-restore", "ip6tables-nft-restore"] {
        load(
            &format!("{program} --noflush"),
            "*nat\n-I ISTIO_OUTPUT -m owner ! --gid-owner 7 -j RETURN\nCOMMIT",
        )?;
    }
    let (code, out, said) = import()?;
    ensure!(
        code == Some(0) && out.contains("includeGIDs:\n    - 7\n"),
        "{out}{said}"
    );
    // By which interface a connection leaves, a socket does not know: routes say it.
    load(
        "iptables-nft-restore --noflush",
        "*nat\n-I OUTPUT -o net1 -j RETURN\nCOMMIT",
    )?;
    pod.ip("link add net1 type veth peer name net2")?;
    pod.ip("link set net2 up")?;
    pod.ip("link set net1 up")?;
    pod.ip("route add 198.18.0.0/15 dev net1")?;
    pod.ip("-6 route add 2001:db8:7::/48 dev net1")?;
    let (code, out, said) = import()?;
    ensure!(
        code == Some(0)
            && out.contains("- 198.18.0.0/15\n")
            && out.contains("reached by net1 now")
            && !out.contains("2001:db8:7::"),
        "{out}{said}"
    );
    // A routing rule may say otherwise.
    pod.ip("rule add from 192.0.2.0/24 lookup 7")?;
    let (code, out, said) = import()?;
    ensure!(code == Some(1) && out.is_empty(), "{out}");
    ensure!(
        said.contains("iptables-nft:") && said.contains("-o net1 -j RETURN"),
        "{said}"
    );
    Ok(())
}

/// The same rules, as Istio writes them into tables of its own.
pub const NATIVE: &str = "\
table inet istio-proxy-nat {
 chain prerouting { type nat hook prerouting priority -100; }
 chain output { type nat hook output priority -100; }
 chain istio-inbound { }
 chain istio-redirect { }
 chain istio-in-redirect { }
 chain istio-output { }
}
add rule inet istio-proxy-nat prerouting meta l4proto tcp counter jump istio-inbound
add rule inet istio-proxy-nat output counter jump istio-output
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 15008 counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 15021 counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 9090 counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-in-redirect meta l4proto tcp counter redirect to :15006
add rule inet istio-proxy-nat istio-redirect meta l4proto tcp counter redirect to :15001
add rule inet istio-proxy-nat istio-output tcp dport 3306 counter return
add rule inet istio-proxy-nat istio-output udp dport 3306 counter return
add rule inet istio-proxy-nat istio-output oifname lo ip saddr 127.0.0.6/32 counter return
add rule inet istio-proxy-nat istio-output oifname lo ip6 saddr ::6/128 counter return
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 tcp dport != { 53, 15008 } skuid 1337 \
counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip6 daddr != ::1/128 tcp dport != 15008 skuid 1337 \
counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo skuid != 1337 counter return
add rule inet istio-proxy-nat istio-output skuid 1337 counter return
add rule inet istio-proxy-nat istio-output skgid 888 counter return
add rule inet istio-proxy-nat istio-output ip daddr 127.0.0.1/32 counter return
add rule inet istio-proxy-nat istio-output ip6 daddr ::1/128 counter return
add rule inet istio-proxy-nat istio-output ip daddr 10.96.0.0/12 counter return
add rule inet istio-proxy-nat istio-output ip6 daddr fd00:96::/64 counter return
add rule inet istio-proxy-nat istio-output counter jump istio-redirect
";

/// What `import-mesh` prints for the rules of a host, without remarks.
fn imports(host: &Host, program: &Path, more: &[&str]) -> Result<String> {
    let command = host.command(program).args(["iptables", "import-mesh"]);
    let output = command.args(more).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    Ok(said_by(&output.stdout))
}

/// A configuration without remarks.
fn said_by(output: &[u8]) -> String {
    let said = String::from_utf8_lossy(output);
    let lines = said.lines().filter(|line| !line.starts_with('#'));
    lines.collect::<Vec<_>>().join("\n")
}

fn native_rules_become_the_same_configuration() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "native", "10.244.1.5")
        .pod("node1", "usual", "10.244.1.6")
        .build()?;
    let (native, usual) = (lab.pod("native"), lab.pod("usual"));
    let program = lab.programs().dataplane()?;
    let load = |host: &Host, program: &str, rules: &str| -> Result<()> {
        let script = format!("{program} <<'end'\n{rules}\nend");
        host.command("sh").args(["-c", &script]).run()?;
        Ok(())
    };
    load(
        usual,
        "iptables-nft-restore",
        &sidecar("127.0.0.1/32", "127.0.0.6/32", "10.96.0.0/12"),
    )?;
    load(
        usual,
        "ip6tables-nft-restore",
        &sidecar("::1/128", "::6/128", "fd00:96::/64"),
    )?;
    load(native, "nft -f -", NATIVE)?;
    let wanted = imports(usual, &program, &[])?;
    // From the kernel, and as nft prints it.
    let found = imports(native, &program, &[])?;
    ensure!(found == wanted, "{found}\n{wanted}");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    fs::write(
        &file,
        native.command("nft").args(["list", "ruleset"]).run()?,
    )?;
    let found = imports(native, &program, &["--file", &path])?;
    ensure!(found == wanted, "{found}\n{wanted}");
    // Somebody else's rule may come first.
    let other = "*nat\n-A OUTPUT -d 192.0.2.1/32 -j ACCEPT\nCOMMIT";
    load(native, "iptables-nft-restore", other)?;
    let failed = imports(native, &program, &[]).unwrap_err().to_string();
    ensure!(
        failed.contains("may keep connections") && failed.contains("192.0.2.1"),
        "{failed}"
    );
    load(native, "iptables-nft-restore", "*nat\nCOMMIT")?;
    // What has no counterpart is named with its line.
    load(
        native,
        "nft -f -",
        "add rule inet istio-proxy-nat prerouting tcp flags syn counter drop",
    )?;
    let failed = imports(native, &program, &[]).unwrap_err().to_string();
    ensure!(
        failed.starts_with("dataplane: nft:5: ") && failed.contains("not understood"),
        "{failed}"
    );
    Ok(())
}

/// `DATAPLANE_ISTIO_RULES` names a directory with Istio's source, or its test data: files `*.golden` that have what its programs
/// write for many configurations. Each that captures connections becomes a configuration.
fn istios_own_examples_become_configurations() -> Result<()> {
    let Some(root) = std::env::var_os("DATAPLANE_ISTIO_RULES") else {
        println!(
            "skipped imported::istios_own_examples_become_configurations: DATAPLANE_ISTIO_RULES names no directory"
        );
        return Ok(());
    };
    let lab = Lab::builder().node("node1").build()?;
    let (node, program) = (lab.node("node1"), lab.programs().dataplane()?);
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    let (mut imported, mut refused, mut twice) = (0, 0, 0);
    let mut configurations = BTreeMap::new();
    let mut examples = walk(root.as_ref())?;
    examples.sort();
    for example in examples {
        if example.extension().is_none_or(|ending| ending != "golden") {
            continue;
        }
        let text = fs::read_to_string(&example)?;
        let name = example.display();
        let blocks = text.split("COMMIT");
        let blocks = blocks.filter_map(|block| Some(&block[block.find('*')?..]));
        let blocks: Vec<String> = blocks.map(|block| format!("{block}COMMIT\n")).collect();
        // Groups by names that not every machine has.
        let named = |rules: &str| rules.replace("java", "201").replace("ftp", "202");
        let native = text.contains("add table inet istio-");
        let rules = blocks.concat();
        if rules.is_empty() && !native {
            continue;
        }
        fs::write(&file, named(if native { &text } else { &rules }))?;
        let command = node.command(&program).args(["iptables", "import-mesh"]);
        let output = if native {
            node.command("nft").args(["flush", "ruleset"]).run()?;
            // The sets that some rules ask.
            if text.contains("@istio-inpod-probes") {
                let table = "inet istio-ambient-nat";
                let set = |v| {
                    format!("add set {table} istio-inpod-probes-v{v} {{ type ipv{v}_addr; }}\n")
                };
                let sets = format!("add table {table}\n{}{}", set(4), set(6));
                fs::write(&file, sets + &text)?;
            }
            node.command("nft").args(["-f", &path]).run()?;
            command.output()?
        } else {
            // Its routes say what is reached by an interface.
            let netns = ["--netns", "/proc/self/ns/net"];
            command.args(["--file", &path]).args(netns).output()?
        };
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            imported += 1;
            println!("{name}: a configuration");
            // Istio writes the same for either kind of rules.
            let its = said_by(&output.stdout);
            let group = if example.iter().any(|part| part == "cni") {
                "cni"
            } else {
                "tools"
            };
            let kind = (group, example.file_name().map(ToOwned::to_owned));
            if let Some((other, known)) =
                configurations.insert(kind, (name.to_string(), its.clone()))
            {
                ensure!(known == its, "{name} and {other}: {its}\n{known}");
                twice += 1;
            }
        } else {
            let captures_nothing = ["no rule of Istio", "the rules are the node's"];
            ensure!(
                captures_nothing.iter().any(|what| said.contains(what)),
                "{name}: {said}"
            );
            refused += 1;
            println!("{name}: {}", said.trim());
        }
    }
    ensure!(
        imported > 0,
        "no example of {refused} became a configuration"
    );
    println!(
        "{imported} examples became configurations, {twice} of them the same as another's of the same name; {refused} have rules that \
         capture nothing"
    );
    Ok(())
}
