//! A machine inside a pod, whose packets come into the pod's network namespace by an interface there: its connections are
//! captured as outbound ones of the pod.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Agent, Host, LabBuilder, report::LoadReport};
use serde_json::{Value, json};

use super::{World, foreign, mesh, pod, relay::Relay};
use crate::{
    cluster::{ask, eventually, lived, peer_is, reaches, sources_are},
    outcome::run_args,
};

scenarios! {
    Dataplane:
    a_machine_inside_a_pod_is_captured_by_its_interface,
    pods_name_interfaces_by_annotation,
    only_included_ranges_are_captured,
    somebody_elses_sidecar_takes_its_connections,
    without_a_proxy_a_machine_inside_does_not_connect,
    agents_take_each_others_place,
    egress_is_judged_by_the_agents_proxy_only,
    what_a_pod_says_does_not_free_its_machine,
    a_machine_answers_connections_that_are_forwarded_to_it,
    interfaces_without_effect_are_named,
    nothing_is_left_behind,
}

/// The interface in the pod.
pub const INTERFACE: &str = "virt0";
/// The machine's addresses.
pub const MACHINE: [&str; 2] = ["10.9.0.2", "fd09::2"];

/// A world with a machine that reaches others by `app` only, which translates its addresses.
pub fn world() -> Result<World> {
    let app = |lab: LabBuilder| lab.pod("node1", "app", "10.244.1.8").external("inner");
    let world = World::with(app)?;
    connect(&world)?;
    Ok(world)
}

pub fn machine(world: &World) -> &Host {
    world.lab.external("inner")
}

/// Connects a host behind another host, by an interface there. Each has an address of both families.
pub fn join(
    (host, own): (&Host, [&str; 2]),
    interface: &str,
    (behind, its): (&Host, [&str; 2]),
) -> Result<()> {
    behind.ip("link set eth0 down")?;
    let netns = behind.netns();
    host.ip(&format!(
        "link add {interface} type veth peer name up0 netns {netns}"
    ))?;
    for (host, interface, [v4, v6]) in [(host, interface, own), (behind, "up0", its)] {
        host.ip(&format!("addr add {v4}/24 dev {interface}"))?;
        host.ip(&format!("addr add {v6}/64 dev {interface} nodad"))?;
        host.ip(&format!("link set {interface} up"))?;
    }
    behind.ip(&format!("route replace default via {} dev up0", own[0]))?;
    behind.ip(&format!("-6 route replace default via {} dev up0", own[1]))?;
    Ok(())
}

/// Connects the machine with the pod.
pub fn connect(world: &World) -> Result<()> {
    let (app, machine) = (world.app(), machine(world));
    join(
        (app, ["10.9.0.1", "fd09::1"]),
        INTERFACE,
        (machine, MACHINE),
    )?;
    app.sysctl("ipv4/ip_forward", "1")?;
    app.sysctl("ipv6/conf/all/forwarding", "1")?;
    // As many nodes have it.
    for interface in ["all", INTERFACE] {
        app.sysctl(&format!("ipv4/conf/{interface}/rp_filter"), "1")?;
    }
    for (program, range) in [
        ("iptables-nft", "10.9.0.0/24"),
        ("ip6tables-nft", "fd09::/64"),
    ] {
        let rule = [
            "-t",
            "nat",
            "-A",
            "POSTROUTING",
            "-s",
            range,
            "-o",
            "eth0",
            "-j",
            "MASQUERADE",
        ];
        app.command(program).args(rule).run()?;
    }
    Ok(())
}

pub fn rules() -> Value {
    json!({ "mode": "proxy", "virtualInterfaces": [INTERFACE] })
}

/// The machine asks, and so many connections of it are captured: all or none. Servers see the pod.
pub fn asks(world: &World, to: &str, by: &str, is_captured: bool) -> Result<()> {
    let (report, counted) = world.counted(Reason::Captured, || {
        reaches(machine(world), to, "connect --count 10", &[by])
    })?;
    let wanted = if is_captured { 10 } else { 0 };
    ensure!(counted == wanted, "{to}: {counted} of 10 were captured");
    peer_is(&report, to)?;
    sources_are(&report, &world.app().addresses())
}

/// The pod's routing rules for interfaces.
pub fn routed(world: &World) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for family in ["-4", "-6"] {
        let listed = world.app().command("ip").args([family, "rule"]).run()?;
        let lines = listed.lines().filter(|line| line.contains("iif"));
        found.extend(lines.map(str::to_owned));
    }
    Ok(found)
}

/// The machine does not get through.
pub fn is_cut_off(world: &World, to: &str) -> Result<()> {
    let report = ask(machine(world), to, "connect --timeout-ms 700")?;
    ensure!(report.answered == 0, "{report:?}");
    Ok(())
}

fn a_machine_inside_a_pod_is_captured_by_its_interface() -> Result<()> {
    let mut world = world()?;
    reaches(machine(&world), "10.244.1.5:7", "connect", &["one"])?;
    world.capture(json!({}), rules())?;
    // Endpoints here and on another node, and a service, whose endpoint the proxy chooses.
    for (to, by) in [
        ("10.244.1.5:7", "one"),
        ("10.244.2.5:7", "far"),
        ("[fd00:10:244:1::6]:7", "two"),
        ("[fd00:10:244:2::5]:7", "far"),
        ("10.96.0.10:80", "far"),
    ] {
        asks(&world, to, by, true)?;
    }
    eventually(|| {
        let log = world.agent()?.log();
        for line in ["dst=10.244.1.5:7 ", "dst=10.96.0.10:80 service=default/web"] {
            let its = |said: &&str| said.contains(line) && said.contains("src=10.9.0.2:");
            ensure!(log.lines().any(|said| its(&said)), "{log}");
        }
        Ok(())
    })?;
    // To the pod itself, nothing is captured as outbound.
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(machine(&world), "10.244.1.8:7", "connect", &["app"])
    })?;
    ensure!(counted == 0, "{counted} connections to the pod itself");
    // The pod's own connections, and connections to it.
    let app = world.app().clone();
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])
    })?;
    ensure!(counted == 3, "{counted} of the pod's own");
    let one = world.lab.pod("one").clone();
    let (report, counted) = world.counted(Reason::CapturedInbound, || {
        reaches(&one, "10.244.1.8:7", "connect --count 3", &["app"])
    })?;
    ensure!(counted == 3, "{counted} of those to the pod");
    sources_are(&report, &one.addresses())?;
    // Other traffic keeps its route.
    let report = reaches(machine(&world), "10.244.1.5:53", "udp", &["one"])?;
    sources_are(&report, &app.addresses())?;
    // An interface that is made again has another number.
    app.ip(&format!("link del {INTERFACE}"))?;
    connect(&world)?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", true))?;
    let said = run_args(world.agent()?, ["status", "--workload", "default/app"])?;
    println!("{}", said.stdout);
    Ok(())
}

fn pods_name_interfaces_by_annotation() -> Result<()> {
    let mut world = world()?;
    let path = world.state.path().join("pods.yaml");
    let config = json!({ "rules": { "mode": "proxy" } });
    let write = |annotations: Value| std::fs::write(&path, pod("ambient", annotations).to_string());
    write(json!({ "istio.io/reroute-virtual-interfaces": INTERFACE }))?;
    world.agent_with(&config, std::slice::from_ref(&path))?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", true))?;
    // Malformed values have no effect, and are logged.
    write(json!({ "traffic.sidecar.istio.io/kubevirtInterfaces": format!("lo,{INTERFACE}") }))?;
    eventually(|| {
        let log = world.agent()?.log();
        ensure!(
            log.contains("\"lo\" cannot be a virtual interface"),
            "{log}"
        );
        Ok(())
    })?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    ensure!(routed(&world)?.len() == 2, "{:?}", routed(&world)?);
    // Not named any more.
    write(json!({}))?;
    eventually(|| {
        let rules = routed(&world)?;
        ensure!(rules.is_empty(), "{rules:?}");
        Ok(())
    })?;
    asks(&world, "10.244.1.5:7", "one", false)?;
    let report = reaches(world.app(), "10.244.1.5:7", "connect", &["one"])?;
    peer_is(&report, "10.244.1.5:7")
}

fn only_included_ranges_are_captured() -> Result<()> {
    let mut world = world()?;
    let mut some = rules();
    some["includeOutboundIPRanges"] = json!(["10.244.1.0/24", "fd00:10:244:2::/64"]);
    world.capture(json!({}), some)?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    asks(&world, "[fd00:10:244:2::5]:7", "far", true)?;
    asks(&world, "10.244.2.5:7", "far", false)?;
    asks(&world, "[fd00:10:244:1::6]:7", "two", false)
}

fn somebody_elses_sidecar_takes_its_connections() -> Result<()> {
    let mut world = world()?;
    let sidecar = Relay::haproxy(&world)?;
    let rules = json!({ "virtualInterfaces": [INTERFACE] });
    world.capture(foreign(), rules)?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    asks(&world, "[fd00:10:244:2::5]:7", "far", true)?;
    let mut seen = sidecar.saw("outbound", 20)?;
    seen.sort();
    seen.dedup();
    ensure!(seen == ["10.244.1.5:7", "fd00:10:244:2::5:7"], "{seen:?}");
    Ok(())
}

/// With any setting: its packets have no other way.
fn without_a_proxy_a_machine_inside_does_not_connect() -> Result<()> {
    let mut world = world()?;
    let mut rules = rules();
    rules["withoutProxy"] = json!("pass");
    world.capture(json!({}), rules)?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    let Some(agent) = &mut world.agent else {
        anyhow::bail!("no agent");
    };
    agent.kill();
    for (to, error) in [
        ("10.244.1.5:7", "TIMEOUT"),
        ("[fd00:10:244:1::5]:7", "ECONNREFUSED"),
    ] {
        let report = ask(machine(&world), to, "connect --timeout-ms 700")?;
        ensure!(report.errors.contains_key(error), "{to}: {report:?}");
    }
    let Some(agent) = &mut world.agent else {
        anyhow::bail!("no agent");
    };
    agent.start()?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", true))?;
    // Agents that no longer find the interface named, or that have no mesh, after the rules of an earlier one.
    let first = killed(&mut world)?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", false))?;
    ensure!(routed(&world)?.is_empty(), "{:?}", routed(&world)?);
    world.capture(json!({}), self::rules())?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", true))?;
    let second = killed(&mut world)?;
    let agent = world.lab.agent("node1").in_the_nodes_cgroup();
    let agent = agent.manifests(world.manifests.path()).start()?;
    ensure!(routed(&world)?.is_empty(), "{:?}", routed(&world)?);
    reaches(machine(&world), "10.244.1.5:7", "connect", &["one"])?;
    // Each dropped agent cleans up. The two agents that were killed clean up last.
    drop(agent);
    drop([first, second]);
    Ok(())
}

/// Kills the agent. Its programs and rules stay as long as the result lives.
fn killed(world: &mut World) -> Result<Agent> {
    let mut agent = world.agent.take().context("an agent")?;
    agent.kill();
    Ok(agent)
}

fn agents_take_each_others_place() -> Result<()> {
    let mut world = world()?;
    world.capture(json!({}), rules())?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    let load = machine(&world).load(&[
        "--to",
        "10.244.1.5:7",
        "--threads",
        "2",
        "--pause-us",
        "300",
    ])?;
    let held = machine(&world).hold("10.244.1.6:7")?;
    let Some(agent) = &mut world.agent else {
        anyhow::bail!("no agent");
    };
    let mut before = Vec::new();
    for _ in 0..2 {
        before.push(agent.replace()?);
    }
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 100,
        "{report:?}"
    );
    lived(held)?;
    asks(&world, "10.244.1.5:7", "one", true)
}

fn egress_is_judged_by_the_agents_proxy_only() -> Result<()> {
    let mut world = world()?;
    let mut rules = rules();
    rules["egress"] = json!("deny");
    world.capture(json!({}), rules.clone())?;
    asks(&world, "10.96.0.10:80", "far", true)?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    // No endpoint of a service, and no port that a Pod declares.
    is_cut_off(&world, "10.244.1.5:7")?;
    // The agent's proxy has the sidecar's ports.
    world.agent = None;
    let _sidecar = Relay::haproxy(&world)?;
    rules["mode"] = json!("auto");
    world.agent_with(&mesh(foreign(), rules), &[])?;
    let ((), counted) =
        world.counted(Reason::EgressDenied, || is_cut_off(&world, "10.244.1.5:7"))?;
    ensure!(counted > 0, "it was not refused");
    let said = run_args(world.agent()?, ["status"])?;
    said.says(&["only the agent's own proxy can judge them"])?;
    Ok(())
}

fn what_a_pod_says_does_not_free_its_machine() -> Result<()> {
    let mut world = world()?;
    let pods = world.state.path().join("pods.yaml");
    let write = |mode: &str, annotations: &Value| -> Result<()> {
        Ok(std::fs::write(
            &pods,
            pod(mode, annotations.clone()).to_string(),
        )?)
    };
    write("ambient", &json!({}))?;
    let mut rules = rules();
    rules["captured"] = json!(true);
    rules["egress"] = json!("deny");
    world.agent_with(&json!({ "rules": rules }), std::slice::from_ref(&pods))?;
    eventually(|| asks(&world, "10.244.2.5:7", "far", true))?;
    is_cut_off(&world, "10.244.1.5:7")?;
    let exclude = json!({ "traffic.sidecar.istio.io/excludeOutboundIPRanges": "0.0.0.0/0" });
    let include = json!({ "traffic.sidecar.istio.io/includeOutboundIPRanges": "192.0.2.0/24" });
    for (mode, annotations, is_relayed) in [
        ("ambient", exclude, true),
        ("ambient", include, true),
        ("ambient", json!({ "sidecar.istio.io/status": "{}" }), false),
        ("ambient", json!({ "dataplane.io/mode": "kernel" }), false),
        ("none", json!({}), false),
    ] {
        write(mode, &annotations)?;
        let what = || format!("{mode}, {annotations}");
        // A connection to a known destination goes through the proxy, or fails.
        eventually(|| {
            if is_relayed {
                // The pod's own connection shows whether the annotation is in force.
                let (_, counted) = world.counted(Reason::ExcludedRange, || {
                    reaches(world.app(), "10.244.2.5:7", "connect", &["far"])
                })?;
                ensure!(counted > 0, "the pod's own connection is not excluded");
                return asks(&world, "10.244.2.5:7", "far", true);
            }
            run_args(world.agent()?, ["status"])?
                .says(&["from its virtual interfaces are refused"])?;
            let ((), counted) =
                world.counted(Reason::EgressDenied, || is_cut_off(&world, "10.244.2.5:7"))?;
            ensure!(counted > 0, "it was not refused");
            Ok(())
        })
        .with_context(what)?;
        for to in ["10.244.1.5:7", "[fd00:10:244:1::6]:7"] {
            is_cut_off(&world, to).with_context(what)?;
        }
    }
    Ok(())
}

/// Their answers come by the interface as well.
fn a_machine_answers_connections_that_are_forwarded_to_it() -> Result<()> {
    let mut world = world()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let own = app.addresses();
    for (program, addr, to) in [
        ("iptables-nft", own[0], "10.9.0.2:7"),
        ("ip6tables-nft", own[1], "[fd09::2]:7"),
    ] {
        let rule =
            format!("-t nat -A PREROUTING -i eth0 -d {addr} -p tcp --dport 8007 -j DNAT --to {to}");
        app.command(program).args(rule.split(' ')).run()?;
    }
    let _server = machine(&world).serve(&["--tcp", "10.9.0.2:7", "--tcp", "[fd09::2]:7"])?;
    let to = own
        .iter()
        .map(|addr| SocketAddr::new(*addr, 8007).to_string());
    let to: Vec<String> = to.collect();
    let works = || -> Result<()> {
        for to in &to {
            let report = reaches(&one, to, "connect --count 5", &["inner"])?;
            sources_are(&report, &one.addresses())?;
        }
        Ok(())
    };
    works()?;
    let before = one.hold(&to[0])?;
    world.capture(json!({}), rules())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    works()?;
    lived(before)?;
    let mut denied = rules();
    denied["egress"] = json!("deny");
    world.capture(json!({}), denied)?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    works()?;
    // Another agent does not repeat the decision which side began the connection.
    let before = one.hold(&to[0])?;
    let first = world.agent.as_mut().context("an agent")?.replace()?;
    works()?;
    lived(before)?;
    drop(first);
    Ok(())
}

fn interfaces_without_effect_are_named() -> Result<()> {
    let mut world = world()?;
    world.capture(json!({}), json!({ "virtualInterfaces": [INTERFACE] }))?;
    asks(&world, "10.244.1.5:7", "one", false)?;
    run_args(world.agent()?, ["status"])?
        .says(&["from its virtual interfaces are not captured"])?;
    world.capture(json!({}), rules())?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    let said = run_args(world.agent()?, ["status"])?;
    ensure!(
        !said.stdout.contains("virtual interfaces"),
        "{}",
        said.stdout
    );
    Ok(())
}

/// The rules that mark the machine's packets.
fn marks(world: &World) -> Result<String> {
    let listed = world.app().command("nft").args(["list", "ruleset"]).run()?;
    Ok(listed)
}

fn nothing_is_left_behind() -> Result<()> {
    let mut world = world()?;
    world.capture(json!({}), rules())?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    ensure!(routed(&world)?.len() == 2, "{:?}", routed(&world)?);
    let there = marks(&world)?;
    for line in [
        "type filter hook prerouting priority mangle + 10; policy accept;",
        "iifname \"virt0\" exthdr frag exists drop",
        "iifname \"virt0\" meta l4proto != tcp ct state related ct protocol tcp ct direction original meta mark set",
        "iifname \"virt0\" meta l4proto != tcp accept",
        "iifname \"virt0\" goto machines",
        "ct direction reply accept",
        "iifname \"virt0\" iif != \"virt0\" drop",
        "meta mark set meta mark | 0x00002000",
    ] {
        ensure!(there.contains(line), "{line}: {there}");
    }
    let table = "inet dataplane-machines";
    let Some(agent) = &mut world.agent else {
        anyhow::bail!("no agent");
    };
    agent.kill();
    let shown = run_args(agent, ["cleanup", "--dry-run"])?.exits(0)?;
    shown.says(&["iif virt0 lookup", table])?;
    run_args(agent, ["cleanup"])?.exits(0)?;
    ensure!(routed(&world)?.is_empty(), "{:?}", routed(&world)?);
    ensure!(!marks(&world)?.contains(table), "{}", marks(&world)?);
    reaches(machine(&world), "10.244.1.5:7", "connect", &["one"])?;
    Ok(())
}
