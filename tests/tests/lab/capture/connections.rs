//! Connections from a pod and to it: what is captured, what goes direct, and what is refused.

use std::fs;

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Host, report::Report};
use serde_json::{Value, json};

use super::{World, explain, foreign, pod, relay::Relay};
use crate::{
    cluster::{eventually, lived, peer_is, reaches, refused},
    manifest::{Manifests, Service},
};

scenarios! {
    Dataplane:
    the_original_destination_is_right_in_thousands_of_connections,
    our_proxy_takes_both_directions_and_keeps_the_clients_address,
    our_proxy_keeps_the_clients_address_with_strict_reverse_paths,
    a_workloads_connections_beyond_its_limit_wait,
    rules_change_while_connections_live,
    without_a_proxy_it_is_refused_or_passes,
    unknown_destinations_are_refused_at_once,
    what_goes_direct_is_decided_in_the_kernel,
    what_stays_in_a_workload_is_left_alone,
    ranges_of_loopback_that_are_named_are_captured,
    a_local_port_is_for_each_destination,
}

/// Few ports, so that each is reused again and again, by captured and by other connections.
fn the_original_destination_is_right_in_thousands_of_connections() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let ports = "/proc/sys/net/ipv4/ip_local_port_range";
    let narrow = format!("echo '20000 20999' > {ports}");
    let reuse = "echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse";
    app.command("sh").args(["-c", &narrow]).run()?;
    app.command("sh").args(["-c", reuse]).run()?;
    let _proxy = Relay::haproxy(&world)?;
    let rules = json!({ "excludeOutboundIPRanges": ["10.244.2.0/24"] });
    world.capture(foreign(), rules)?;
    let run = |to: &str, count: usize| {
        app.probe("connect")
            .args(["--to", to, "--count", &count.to_string()])
            .stdout_piped()
            .spawn()
    };
    let count = if dataplane_tests::emulated() {
        300
    } else {
        5000
    };
    let runs = [
        ("10.244.1.5:7", "one"),
        ("10.244.1.6:7", "two"),
        ("10.244.2.5:7", "far"),
        ("[fd00:10:244:1::5]:7", "one"),
    ];
    let started: Vec<_> = runs
        .iter()
        .map(|(to, _)| run(to, count))
        .collect::<Result<_, _>>()?;
    for (process, (to, name)) in started.into_iter().zip(runs) {
        let report: Report = process.wait_json()?;
        ensure!(
            report.answered == report.attempts && report.endpoints.keys().eq([name]),
            "connections to {to} did not all reach {name}: {report:?}"
        );
        peer_is(&report, to)?;
    }
    ensure!(
        world.verdicts(Reason::OriginLost)? == 0,
        "destinations were lost"
    );
    let captured = world.verdicts(Reason::Captured)?;
    ensure!(captured == 3 * count as u64, "{captured} were captured");
    Ok(())
}

fn our_proxy_takes_both_directions_and_keeps_the_clients_address() -> Result<()> {
    takes_both_directions(World::new()?)
}

/// As in some distributions: packets are dropped if they come by another interface than answers would leave by. The
/// packets between the proxy and the application have clients' addresses, and come by the loopback interface.
fn our_proxy_keeps_the_clients_address_with_strict_reverse_paths() -> Result<()> {
    let world = World::new()?;
    for interface in ["all", "default", "lo", "eth0"] {
        let key = format!("ipv4/conf/{interface}/rp_filter");
        world.app().sysctl(&key, "1")?;
    }
    takes_both_directions(world)
}

fn takes_both_directions(mut world: World) -> Result<()> {
    let one = world.lab.pod("one").clone();
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    let app = world.app().clone();
    for (to, name) in [
        ("10.244.1.5:7", "one"),
        ("10.244.2.5:7", "far"),
        ("[fd00:10:244:1::6]:7", "two"),
    ] {
        let (report, counted) = world.counted(Reason::Captured, || {
            reaches(&app, to, "connect --count 20", &[name])
        })?;
        ensure!(counted == 20, "{counted} of 20 were captured");
        peer_is(&report, to)?;
        let sources: Vec<_> = report.endpoints[name].sources.keys().collect();
        ensure!(
            sources
                .iter()
                .all(|source| app.addresses().contains(source)),
            "{name} saw {sources:?}"
        );
    }
    // By a service, whose endpoint the proxy chooses.
    peer_is(
        &reaches(&app, "10.96.0.10:80", "connect --count 5", &["far"])?,
        "10.96.0.10:80",
    )?;
    for to in ["10.244.1.8:7", "[fd00:10:244:1::8]:7"] {
        let (report, counted) = world.counted(Reason::CapturedInbound, || {
            reaches(&one, to, "connect --count 20", &["app"])
        })?;
        ensure!(counted == 20, "{counted} of 20 were captured");
        let sources: Vec<_> = report.endpoints["app"].sources.keys().collect();
        ensure!(
            sources
                .iter()
                .all(|source| one.addresses().contains(source)),
            "the application saw {sources:?}"
        );
    }
    Ok(())
}

fn a_workloads_connections_beyond_its_limit_wait() -> Result<()> {
    let mut world = World::new()?;
    let proxy = json!({ "maxConnectionsPerWorkload": 2 });
    world.capture(proxy, json!({ "mode": "proxy" }))?;
    let hold = || {
        world
            .app()
            .probe("hold")
            .args(["--to", "10.244.1.5:7"])
            .stdin_piped()
            .stdout_piped()
            .spawn()
    };
    let mut two = [hold()?, hold()?];
    for process in &mut two {
        process.wait_for_line()?;
    }
    let third = world.app().probe("connect");
    let third = third.args(["--to", "10.244.1.5:7", "--timeout-ms", "500"]);
    let report: Report = third.json()?;
    ensure!(report.answered == 0, "three at the same time: {report:?}");
    // They go, and others are served.
    drop(two);
    eventually(|| reaches(world.app(), "10.244.1.5:7", "connect", &["one"]).map(drop))
}

fn rules_change_while_connections_live() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let write = |annotations: Value, mode: &str| -> Result<()> {
        Ok(fs::write(&pods, pod(mode, annotations).to_string())?)
    };
    write(json!({}), "ambient")?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let app = world.app().clone();
    let captured = |world: &World, to: &str, name: &str, wanted: bool| {
        eventually(|| {
            let (_, counted) =
                world.counted(Reason::Captured, || reaches(&app, to, "connect", &[name]))?;
            ensure!((counted == 1) == wanted, "captured {counted} times");
            Ok(())
        })
    };
    captured(&world, "10.244.1.5:7", "one", true)?;
    // Connections that live through all of it.
    let mut busy = Vec::new();
    for to in ["10.244.1.5:7", "10.244.1.6:7"] {
        busy.push(app.hold(to)?);
    }
    let excluded = json!({
        "traffic.sidecar.istio.io/excludeOutboundIPRanges": "10.244.1.5/32",
        "openservicemesh.io/outbound-port-exclusion-list": "80",
    });
    write(excluded, "ambient")?;
    captured(&world, "10.244.1.5:7", "one", false)?;
    captured(&world, "10.244.1.6:7", "two", true)?;
    // A wrong entry has no effect, and the log names it. The other annotations count.
    let wrong = json!({ "traffic.sidecar.istio.io/excludeOutboundPorts": "80,http" });
    write(wrong, "ambient")?;
    eventually(|| {
        let log = world.agent()?.log();
        ensure!(
            log.contains("Pod default/app") && log.contains("\"http\" is not a port"),
            "{log}"
        );
        Ok(())
    })?;
    captured(&world, "10.244.1.5:7", "one", true)?;
    captured(&world, "10.244.1.6:7", "two", true)?;
    // Released: nothing is captured any more, and nothing breaks.
    write(json!({}), "none")?;
    captured(&world, "10.244.1.6:7", "two", false)?;
    busy.into_iter().try_for_each(lived)
}

fn without_a_proxy_it_is_refused_or_passes() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let one = world.lab.pod("one").clone();
    world.capture(foreign(), json!({}))?;
    let ((), counted) = world.counted(Reason::ProxyDown, || {
        refused(&app, "10.244.1.5:7", "connect --count 2")?;
        refused(&one, "10.244.1.8:7", "connect")
    })?;
    ensure!(counted == 3, "{counted} of 3");
    world.capture(foreign(), json!({ "withoutProxy": "pass" }))?;
    let (_, counted) = world.counted(Reason::ProxyBypassed, || {
        reaches(&app, "10.244.1.5:7", "connect --count 2", &["one"])?;
        reaches(&one, "10.244.1.8:7", "connect", &["app"])
    })?;
    ensure!(counted == 3, "{counted} of 3");
    Ok(())
}

fn unknown_destinations_are_refused_at_once() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let mut world = World::new()?;
        let app = world.app().clone();
        world.capture(json!({}), json!({ "egress": "deny", "mode": mode }))?;
        let ((), counted) = world.counted(Reason::EgressDenied, || {
            refused(&app, "10.244.1.5:7", "connect --count 2")?;
            refused(&app, "192.0.2.1:80", "connect")?;
            refused(&app, "[fd00:10:244:1::6]:7", "connect")
        })?;
        ensure!(counted == 4, "{mode}: {counted} of 4");
        // A service, its endpoint, itself.
        reaches(&app, "10.96.0.10:80", "connect --count 2", &["far"])?;
        reaches(&app, "10.244.2.5:7", "connect", &["far"])?;
    }
    Ok(())
}

fn what_goes_direct_is_decided_in_the_kernel() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    world.capture(json!({}), json!({ "mode": "kernel" }))?;
    let (report, counted) = world.counted(Reason::Direct, || {
        reaches(&app, "10.96.0.10:80", "connect --count 20", &["far"])
    })?;
    ensure!(counted == 20, "{counted} of 20");
    peer_is(&report, "10.96.0.10:80")?;
    ensure!(world.verdicts(Reason::Captured)? == 0, "some were captured");
    Ok(())
}

/// To its own address, of either family, or to a service that only it answers, and back: neither direction is captured,
/// also if the port is captured for every destination, or if unknown destinations are denied.
fn ranges_of_loopback_that_are_named_are_captured() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let _local = app.serve_as("local", &["--tcp", "127.1.2.3:7", "--tcp", "127.0.0.1:7"])?;
    let rules =
        json!({ "mode": "proxy", "includeOutboundIPRanges": ["127.1.2.0/24", "0.0.0.0/0"] });
    world.capture(json!({}), rules)?;
    for (to, name, wanted) in [
        ("127.1.2.3:7", "local", 5),
        ("127.0.0.1:7", "local", 0),
        ("10.244.1.5:7", "one", 5),
    ] {
        let (report, counted) = world.counted(Reason::Captured, || {
            reaches(&app, to, "connect --count 5", &[name])
        })?;
        ensure!(counted == wanted, "{to}: {counted} of 5 were captured");
        peer_is(&report, to)?;
    }
    Ok(())
}

fn what_stays_in_a_workload_is_left_alone() -> Result<()> {
    for (mode, others) in [("proxy", "captured"), ("kernel", "direct")] {
        let mut world = World::new()?;
        let rules = json!({ "mode": mode, "egress": "deny", "includeOutboundPorts": [7] });
        let app = world.app().clone();
        let service = |name, vips: &[&str], endpoints: &[&Host]| {
            Service::new(name, vips)
                .port("tcp", 7, 7)
                .endpoints(endpoints)
        };
        let two = world.lab.pod("two");
        let itself = service("itself", &["10.96.0.20", "fd00:96::20"], &[&app]);
        let shared = service("shared", &["10.96.0.21"], &[&app, two]);
        let web = service("web", &["10.96.0.10"], &[world.lab.pod("far")]);
        world.manifests = Manifests::new(&[itself, shared, web])?;
        world.capture(json!({}), rules)?;
        for to in [
            "10.244.1.8:7",
            "[fd00:10:244:1::8]:7",
            "10.96.0.20:7",
            "[fd00:96::20]:7",
        ] {
            let before = world.verdicts(Reason::CapturedInbound)?;
            let (report, counted) = world.counted(Reason::ExcludedLoopback, || {
                reaches(&app, to, "connect --count 3", &["app"])
            })?;
            ensure!(counted == 3, "{mode}, {to}: {counted} of 3 were left alone");
            ensure!(world.verdicts(Reason::CapturedInbound)? == before, "{to}");
            peer_is(&report, to)?;
            let told = explain::explain(&world, "default/app", to, &[])?;
            let left_alone = told["verdict"] != "captured" && told["verdict"] != "direct";
            ensure!(left_alone, "{mode}, {to}: {told:#}");
        }
        let others = match others {
            "captured" => Reason::Captured,
            _ => Reason::Direct,
        };
        let (_, counted) = world.counted(others, || {
            reaches(&app, "10.244.2.5:7", "connect --count 3", &["far"])
        })?;
        ensure!(counted == 3, "{mode}: {counted} of 3");
        // If another pod answers too, the proxy chooses.
        let (_, counted) = world.counted(others, || {
            reaches(&app, "10.96.0.21:7", "connect --count 40", &["app", "two"])
        })?;
        ensure!(counted == 40, "{mode}: {counted} of 3 to a service");
    }
    Ok(())
}

/// Two sockets of one local port connect to several destinations; and connections may use more local ports than one
/// destination has.
fn a_local_port_is_for_each_destination() -> Result<()> {
    for rules in [
        json!({ "mode": "proxy" }),
        json!({ "mode": "proxy", "inbound": false }),
    ] {
        let mut world = World::new()?;
        world.capture(json!({}), rules)?;
        let app = world.app().clone();
        let destinations = [
            ("10.244.1.5:7", "one"),
            ("10.244.1.6:7", "two"),
            ("10.96.0.10:80", "far"),
        ];
        for (port, more) in [("30123", &[][..]), ("30124", &["--reuse-port"][..])] {
            let mut held = Vec::new();
            for (to, name) in destinations {
                let probe = app
                    .probe("hold")
                    .args(["--to", to, "--local-port", port])
                    .args(more);
                let (one, counted) = world.counted(Reason::Captured, || {
                    let mut one = probe.stdin_piped().stdout_piped().spawn()?;
                    one.wait_for_line()?;
                    Ok(one)
                })?;
                ensure!(counted == 1, "{to}: {counted} captured");
                held.push((one, to, name));
            }
            for (mut one, to, name) in held {
                one.close_stdin();
                let report: Report = one.wait_json()?;
                ensure!(
                    report.errors.is_empty() && report.endpoints.keys().eq([name]),
                    "{to} from port {port}: {report:?}"
                );
                peer_is(&report, to)?;
            }
        }
        // Eight connections to each, of ten ports.
        app.sysctl("ipv4/ip_local_port_range", "40000 40009")?;
        let mut kept = Vec::new();
        for (to, _) in destinations {
            let probe = app.probe("keep").args(["--to", to, "--count", "8"]);
            let mut one = probe.stdin_piped().stdout_piped().spawn()?;
            let report: dataplane_tests::report::KeepReport =
                serde_json::from_str(&one.wait_for_line()?)?;
            ensure!(report.alive == 8, "{to}: {report:?}");
            kept.push(one);
        }
    }
    Ok(())
}
