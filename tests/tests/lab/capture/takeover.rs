//! `dataplane-migrate takeover --owner`: a sidecar's rules in a pod go, and its capture stays.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, Process, is_long, report::LoadReport};
use serde_json::json;

use super::{
    World, foreign, interfaces, mesh,
    relay::Relay,
    sidecar::{CONNECT, Mesh, Pod, TO},
};
use crate::{
    cluster::{ask, lived, reaches},
    imported_mesh::NATIVE,
    outcome,
    takeover::let_traffic_go_on,
};

scenarios! {
    Dataplane:
    a_sidecars_capture_is_taken_over_and_given_back,
    istios_tables_in_nf_tables_are_taken_over_and_given_back,
    a_takeover_of_capture_that_is_killed_is_finished_or_undone,
    rules_that_do_more_than_capture_stay,
    the_capture_of_a_machine_inside_is_taken_over_and_given_back,
}

fn a_sidecars_capture_is_taken_over_and_given_back() -> Result<()> {
    there_and_back(Pod::start(Mesh::Istio)?)
}

fn istios_tables_in_nf_tables_are_taken_over_and_given_back() -> Result<()> {
    there_and_back(Pod::start(Mesh::IstioNative)?)
}

fn there_and_back(mut pod: Pod) -> Result<()> {
    let by_rules = pod.world.app().hold(TO)?;
    let before = pod.rules()?;
    // No workload is captured.
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
        .says(&["captures default/app as the rules do", pod.mesh.removal()])?;
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
        !left.iter().any(|line| pod.mesh.has(line))
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
    // The node has no rules of kube-proxy: that is no success.
    let of_node = tempfile::tempdir()?;
    let of_node = of_node.path().to_str().context("a path in UTF-8")?;
    outcome::migrate(pod.world.agent()?, ["takeover", "--takeover-dir", of_node])?
        .exits(4)?
        .says(&["there are no rules of kube-proxy", "nothing was taken over"])?;
    // Another program writes other rules: neither direction closes the pod, and neither records that it has begun.
    pod.load(&|rules| rules.replace("3306", "3307"))?;
    for arguments in [&["--revert", "--dry-run"][..], &["--revert"]] {
        pod.takeover(arguments, None)?
            .exits(1)?
            .says(&["somebody has written other rules", "nothing was changed"])?;
        pod.works()?;
    }
    let cleanup = ["cleanup", "--owner", "istio", "--netns"];
    let agent = pod.world.agent()?;
    let netns = pod.world.app().netns();
    outcome::migrate(agent, [&cleanup[..], &[netns]].concat())?.exits(0)?;
    pod.takeover(&[], None)?
        .exits(0)?
        .says(&["taken over already"])?;
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
    for mesh in [Mesh::Osm, Mesh::IstioNative] {
        is_finished_or_undone(Pod::start(mesh)?)?;
    }
    Ok(())
}

fn is_finished_or_undone(mut pod: Pod) -> Result<()> {
    pod.world.capture(foreign(), pod.mesh.rules())?;
    let before = pod.rules()?;
    for (way, arguments) in [&[][..], &["--revert"]].into_iter().enumerate() {
        let mut killed = 0;
        for point in (1..).step_by(if is_long() { 1 } else { 9 }) {
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
                    !left.iter().any(|line| pod.mesh.has(line)),
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
        println!("{:?}, way {way}: killed at {killed} points", pod.mesh);
        ensure!(killed > 1, "{killed}");
        if way == 0 {
            pod.takeover(&["--revert"], None)?.exits(3)?;
        }
    }
    Ok(())
}

/// Connections that come into the pod by an interface are treated like those of the pod.
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
    ensure!(!left.iter().any(|line| pod.mesh.has(line)), "{left:#?}");
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

/// Rules that the agent cannot replace stay, even if it captures the pod: in ambient mode, ztunnel encrypts, and with
/// TPROXY, the sidecar needs rules of its own.
fn rules_that_do_more_than_capture_stay() -> Result<()> {
    let mut world = World::new()?;
    let _sidecar = Relay::haproxy(&world)?;
    world.capture(foreign(), json!({}))?;
    for (program, rules, words) in [
        (
            "iptables-nft-restore",
            AMBIENT,
            ["ambient mode", "ztunnel's tunnels"],
        ),
        (
            "iptables-nft-restore",
            TPROXY,
            ["by TPROXY", "interceptionMode"],
        ),
        (
            "nft flush ruleset; nft -f -",
            NATIVE_TPROXY,
            ["by TPROXY", "interceptionMode"],
        ),
        // A rule of another owner comes first.
        (
            "nft flush ruleset; iptables-nft -t nat -A OUTPUT -d 192.0.2.1 -j ACCEPT; nft -f -",
            NATIVE,
            ["may keep connections", "192.0.2.1"],
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
            let command = world.agent()?.migrate(all)?;
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

/// As Istio writes them in nf_tables.
const NATIVE_TPROXY: &str = "\
add table inet istio-proxy-nat
add chain inet istio-proxy-nat prerouting { type nat hook prerouting priority -100 ; }
add chain inet istio-proxy-nat output { type nat hook output priority -100 ; }
add chain inet istio-proxy-nat istio-inbound
add chain inet istio-proxy-nat istio-redirect
add chain inet istio-proxy-nat istio-in-redirect
add chain inet istio-proxy-nat istio-output
add chain inet istio-proxy-nat istio-output-dns
add rule inet istio-proxy-nat prerouting iifname not-istio-nic counter return
add rule inet istio-proxy-nat output oifname not-istio-nic counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 15008 counter return
add rule inet istio-proxy-nat istio-redirect meta l4proto tcp counter redirect to :15001
add rule inet istio-proxy-nat istio-in-redirect meta l4proto tcp counter redirect to :15006
add rule inet istio-proxy-nat output counter jump istio-output
add rule inet istio-proxy-nat istio-output oifname lo ip saddr 127.0.0.6/32 counter return
add rule inet istio-proxy-nat istio-output oifname lo ip6 saddr ::6/128 counter return
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 tcp dport != { 53, 15008 } skuid 1337 counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip6 daddr != ::1/128 tcp dport != { 53, 15008 } skuid 1337 counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp tcp dport != 53 skuid != 1337 counter return
add rule inet istio-proxy-nat istio-output skuid 1337 counter return
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 tcp dport != 15008 skgid 1337 counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip6 daddr != ::1/128 tcp dport != 15008 skgid 1337 counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp tcp dport != 53 skgid != 1337 counter return
add rule inet istio-proxy-nat istio-output skgid 1337 counter return
add rule inet istio-proxy-nat istio-output counter jump istio-output-dns
add rule inet istio-proxy-nat istio-output-dns ip daddr 127.0.0.53/32 tcp dport 53 counter redirect to :15053
add rule inet istio-proxy-nat istio-output-dns ip daddr 127.0.0.53/32 udp dport 53 counter redirect to :15053
add rule inet istio-proxy-nat istio-output ip daddr 127.0.0.1/32 counter return
add rule inet istio-proxy-nat istio-output ip6 daddr ::1/128 counter return
add rule inet istio-proxy-nat istio-output ip daddr 1.1.0.0/16 counter return
add rule inet istio-proxy-nat istio-output ip daddr 9.9.0.0/16 counter jump istio-redirect
add table inet istio-proxy-mangle
add chain inet istio-proxy-mangle prerouting { type filter hook prerouting priority -150 ; }
add chain inet istio-proxy-mangle output { type route hook output priority -150 ; }
add chain inet istio-proxy-mangle istio-divert
add chain inet istio-proxy-mangle istio-tproxy
add chain inet istio-proxy-mangle istio-inbound
add rule inet istio-proxy-mangle prerouting iifname not-istio-nic counter return
add rule inet istio-proxy-mangle output oifname not-istio-nic counter return
add rule inet istio-proxy-mangle istio-divert counter meta mark set 1337
add rule inet istio-proxy-mangle istio-divert counter accept
add rule inet istio-proxy-mangle istio-tproxy meta l4proto tcp ip daddr != 127.0.0.1/32 tproxy ip to :15006 meta mark set 1337 counter accept
add rule inet istio-proxy-mangle istio-tproxy meta l4proto tcp ip6 daddr != ::1/128 tproxy ip6 to :15006 meta mark set 1337 counter accept
add rule inet istio-proxy-mangle prerouting meta l4proto tcp counter jump istio-inbound
add rule inet istio-proxy-mangle istio-inbound meta l4proto tcp ct state related,established counter jump istio-divert
add rule inet istio-proxy-mangle istio-inbound meta l4proto tcp counter jump istio-tproxy
add rule inet istio-proxy-mangle prerouting meta l4proto tcp mark 1337 counter ct mark set mark
add rule inet istio-proxy-mangle output oifname lo meta l4proto tcp mark 1337 counter return
add rule inet istio-proxy-mangle output oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 skuid 1337 counter meta mark set 1338
add rule inet istio-proxy-mangle output oifname lo meta l4proto tcp ip6 daddr != ::1/128 skuid 1337 counter meta mark set 1338
add rule inet istio-proxy-mangle output oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 skgid 1337 counter meta mark set 1338
add rule inet istio-proxy-mangle output oifname lo meta l4proto tcp ip6 daddr != ::1/128 skgid 1337 counter meta mark set 1338
add rule inet istio-proxy-mangle output meta l4proto tcp ct mark 1337 counter meta mark set ct mark
insert rule inet istio-proxy-mangle istio-inbound index 0 meta l4proto tcp mark 1337 counter return
insert rule inet istio-proxy-mangle istio-inbound index 1 iifname lo meta l4proto tcp ip saddr 127.0.0.6/32 counter return
insert rule inet istio-proxy-mangle istio-inbound index 1 iifname lo meta l4proto tcp ip6 saddr ::6/128 counter return
insert rule inet istio-proxy-mangle istio-inbound index 2 iifname lo meta l4proto tcp mark != 1338 counter return
add table inet istio-proxy-raw
add chain inet istio-proxy-raw prerouting { type filter hook prerouting priority -300 ; }
add chain inet istio-proxy-raw output { type filter hook output priority -300 ; }
add chain inet istio-proxy-raw istio-inbound
add chain inet istio-proxy-raw istio-output-dns
add rule inet istio-proxy-raw output counter jump istio-output-dns
add rule inet istio-proxy-raw istio-output-dns udp dport 53 meta skuid 1337 counter ct zone set 1
add rule inet istio-proxy-raw istio-output-dns udp sport 15053 meta skuid 1337 counter ct zone set 2
add rule inet istio-proxy-raw istio-output-dns udp dport 53 meta skgid 1337 counter ct zone set 1
add rule inet istio-proxy-raw istio-output-dns udp sport 15053 meta skgid 1337 counter ct zone set 2
add rule inet istio-proxy-raw prerouting counter jump istio-inbound
add rule inet istio-proxy-raw istio-output-dns udp dport 53 ip daddr 127.0.0.53/32 counter ct zone set 2
add rule inet istio-proxy-raw istio-inbound udp sport 53 ip saddr 127.0.0.53/32 counter ct zone set 1
";
