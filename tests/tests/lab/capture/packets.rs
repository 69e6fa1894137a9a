//! A virtual machine, of whose connections this node sees only packets: they go to a proxy on the node, which gets the
//! original destination.
//!
//! A refusal may be counted twice: in a lab the ICMP error arrives while `connect()` holds the socket, which treats it
//! as a passing trouble and tries again.

use std::{fs, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::{
    Agent, LabBuilder, emulated,
    report::{LoadReport, Report},
};
use kernel::{tc::Hook, trial};
use serde_json::{Value, json};

use super::{World, foreign, mesh, pod, relay::Relay, restart::PAUSE};
use crate::{
    cluster::{ask, eventually, lived, reaches, refused, sources_are},
    explain::packet_reason,
    features::on,
    outcome::run_args,
    proxy::{connect, each_end},
};

scenarios! {
    Dataplane:
    our_proxy_learns_where_a_machines_packets_were_to_go,
    other_peoples_programs_see_what_is_captured,
    each_direction_ends_for_itself,
    rules_are_the_same_as_for_sockets,
    unknown_destinations_are_refused_at_once,
    without_a_proxy_it_is_refused_or_passes,
    connections_outlive_capture_and_its_end,
    connections_outlive_a_change_of_what_captures_them,
    agents_take_each_others_place,
    agents_of_another_layout_too,
    other_peoples_proxies_on_the_node,
    nothing_is_left_behind,
}

/// A world whose `app` is a virtual machine.
pub fn world() -> Result<World> {
    world_with(|lab| lab)
}

/// As [`world`], with other pods.
pub fn world_with(more: impl FnOnce(LabBuilder) -> LabBuilder) -> Result<World> {
    Ok(World::with(|lab| more(lab.vm("node1", "app", "10.244.1.8")))?.by_packets())
}

/// These rules, for packets.
fn by_packets(mut rules: Value) -> Value {
    rules["capturedBy"] = json!("packets");
    rules
}

pub fn capture(world: &mut World, rules: Value, args: &[&str]) -> Result<()> {
    let mesh = mesh(json!({}), by_packets(rules));
    world.agent_with_args(&mesh, &[], args)
}

/// Asks, and wants so many connections captured, which servers see come from the node.
fn captured(world: &World, to: &str, how: &str, by: &str) -> Result<()> {
    let (report, counted) =
        world.counted(Reason::Captured, || reaches(world.app(), to, how, &[by]))?;
    ensure!(
        counted == report.attempts,
        "{to}: {counted} of {} were captured",
        report.attempts
    );
    let node = world.lab.node("node1");
    let gateways = [world.app().gateway4().into(), world.app().gateway6().into()];
    sources_are(&report, &[&node.addresses()[..], &gateways].concat())
}

/// Asks, and wants none captured, for this reason: servers see the machine itself.
fn left_alone(world: &World, reason: Reason, to: &str, how: &str, by: &str) -> Result<()> {
    let (report, counted) = world.counted(reason, || reaches(world.app(), to, how, &[by]))?;
    ensure!(
        counted == report.attempts,
        "{to}: {counted} of {} were {}",
        report.attempts,
        reason.word()
    );
    sources_are(&report, &world.app().addresses())
}

fn our_proxy_learns_where_a_machines_packets_were_to_go() -> Result<()> {
    for hook in ["tcx", "clsact"] {
        if hook == "tcx" && Hook::of_kernel().word() != hook {
            println!("skipped with {hook}: this kernel has none");
            continue;
        }
        let mut world = world()?;
        let node = world.lab.node("node1").clone();
        let set = |what: &str, value: &str| {
            let text = format!("echo {value} > /proc/sys/net/ipv4/{what}");
            node.command("sh").args(["-c", &text]).run()
        };
        // As on most nodes, the kernel drops a packet that does not arrive by the interface of the route to its source.
        set("conf/all/rp_filter", "1")?;
        capture(&mut world, json!({ "mode": "proxy" }), &["--tc-hook", hook])?;
        // Endpoints here and on another node, and a service, whose endpoint the proxy chooses.
        for (to, name) in [
            ("10.244.1.5:7", "one"),
            ("10.244.2.5:7", "far"),
            ("[fd00:10:244:1::6]:7", "two"),
            ("[fd00:10:244:2::5]:7", "far"),
            ("10.96.0.10:80", "far"),
            ("[fd00:96::10]:80", "far"),
        ] {
            captured(&world, to, "connect --count 20", name)?;
        }
        // As in a flood of SYNs: the listening socket remembers none.
        set("tcp_syncookies", "2")?;
        for (to, name) in [("10.244.1.5:7", "one"), ("[fd00:10:244:2::5]:7", "far")] {
            captured(&world, to, "connect --count 5", name)?;
        }
        set("tcp_syncookies", "1")?;
        // The connections of another pod are not captured.
        let (_, counted) = world.counted(Reason::Captured, || {
            reaches(world.lab.pod("one"), "10.244.1.6:7", "connect", &["two"])
        })?;
        ensure!(counted == 0, "{counted} of another pod's");
        // No server listens there: the proxy learns this after it has accepted.
        let report = ask(world.app(), "10.244.1.5:9", "connect")?;
        ensure!(report.answered == 0, "{report:?}");
        // The other way, nothing is captured.
        let one = world.lab.pod("one");
        let report = reaches(one, "10.244.1.8:7", "connect --count 3", &["app"])?;
        sources_are(&report, &one.addresses())?;
        // The node's own connections to it are the stack's affair as before.
        reaches(&node, "10.244.1.8:7", "connect", &["app"])?;
        eventually(|| {
            let log = world.agent()?.log();
            for line in [
                "dst=10.96.0.10:80 service=default/web endpoint=10.244.2.5:7",
                "dst=[fd00:96::10]:80 service=default/web endpoint=[fd00:10:244:2::5]:7",
                "dst=10.244.1.5:7 ",
            ] {
                let wanted = |said: &&str| said.contains(line);
                let said = log.lines().find(wanted).with_context(|| log.clone())?;
                let source =
                    said.contains("src=10.244.1.8:") || said.contains("src=[fd00:10:244:1::8]:");
                ensure!(
                    said.contains("workload=default/app outbound") && source,
                    "{said}"
                );
            }
            Ok(())
        })?;
        let told = explain(&world, "default/app", "10.96.0.10:80")?;
        ensure!(told["verdict"] == "captured", "{told:#}");
        let told = explain(&world, "10.244.1.8", "10.244.2.5:7")?;
        ensure!(told["verdict"] == "captured", "{told:#}");
        let status = world.agent()?.dataplane(["status"]).run()?;
        ensure!(
            status.contains("packets 10.244.1.8") && status.contains("ready"),
            "{status}"
        );
    }
    Ok(())
}

/// Other programs at the interface, one before ours and one after it: the second sees captured packets, and the bits of
/// the mark that the first has set are still there when the stack gets the packet.
fn other_peoples_programs_see_what_is_captured() -> Result<()> {
    // Of no mark of ours.
    const THEIRS: i32 = 0x40;
    if Hook::of_kernel() != Hook::Tcx {
        println!(
            "skipped capture::packets::other_peoples_programs_see_what_is_captured: this kernel has no TCX"
        );
        return Ok(());
    }
    let mut world = world()?;
    capture(&mut world, json!({ "mode": "proxy" }), &[])?;
    captured(&world, "10.244.1.5:7", "connect --count 3", "one")?;
    let node = world.lab.node("node1").clone();
    let after = trial::Bystander::load()?;
    let _links = on(&node, |_| {
        let ifindex = nix::net::if_::if_nametoindex("veth-app")?;
        Ok([
            trial::mark(ifindex, THEIRS)?,
            after.attach_tcx(ifindex, false)?,
        ])
    })?;
    let rules = "table inet theirs { chain pre { type filter hook prerouting priority -300; policy accept\n\
                 meta mark 0x80003ade counter\nmeta mark 0x80003a9e counter; }\n}";
    let script = format!("nft -f - <<'end'\n{rules}\nend");
    node.command("sh").args(["-c", &script]).run()?;
    let before = after.seen()?;
    captured(&world, "10.244.1.5:7", "connect --count 3", "one")?;
    captured(&world, "[fd00:10:244:2::5]:7", "connect --count 3", "far")?;
    captured(&world, "10.96.0.10:80", "connect --count 3", "far")?;
    // Of each connection a SYN, an ACK and a FIN at the least.
    let seen = after.seen()? - before;
    ensure!(
        seen >= 27,
        "the program after ours saw {seen} packets of 27"
    );
    let counted = node
        .command("nft")
        .args(["list", "table", "inet", "theirs"])
        .run()?;
    let counts: Vec<u64> = counted
        .split("packets ")
        .skip(1)
        .filter_map(|rest| rest.split(' ').next()?.parse().ok())
        .collect();
    ensure!(
        counts.len() == 2 && counts[0] >= 27 && counts[1] == 0,
        "{counted}"
    );
    Ok(())
}

fn explain(world: &World, source: &str, to: &str) -> Result<Value> {
    let arguments = ["explain", source, to, "-o", "json"];
    run_args(world.agent()?, arguments)?.exits(0)?.json()
}

fn each_direction_ends_for_itself() -> Result<()> {
    let mut world = world()?;
    capture(&mut world, json!({ "mode": "proxy" }), &[])?;
    for to in ["10.244.2.5:9000", "[fd00:10:244:2::5]:9000"] {
        let address: SocketAddr = to.parse()?;
        let listener = world.lab.pod("far").listen(address)?;
        each_end(|| connect(world.app(), to), &listener)?;
    }
    Ok(())
}

fn rules_are_the_same_as_for_sockets() -> Result<()> {
    let mut world = world()?;
    let rules = json!({
        "mode": "proxy",
        "excludeOutboundIPRanges": ["10.244.1.5/32", "fd00:10:244:1::5/128"],
        "excludeOutboundPorts": [80],
        "includeOutboundPorts": [53],
        // The packets do not show whose process it is.
        "excludeUIDs": [0],
    });
    capture(&mut world, rules, &[])?;
    for (reason, to, how, by) in [
        (
            Reason::ExcludedRange,
            "10.244.1.5:7",
            "connect --count 3",
            "one",
        ),
        (
            Reason::ExcludedRange,
            "[fd00:10:244:1::5]:7",
            "connect",
            "one",
        ),
        (
            Reason::ExcludedPort,
            "10.244.1.6:80",
            "http --count 3",
            "two",
        ),
        // Excluded, but still a service: the packet path translates it.
        (
            Reason::ExcludedPort,
            "10.96.0.10:80",
            "connect --count 3",
            "far",
        ),
    ] {
        left_alone(&world, reason, to, how, by)?;
    }
    captured(&world, "10.244.1.6:7", "connect --count 3", "two")?;
    let told = explain(&world, "default/app", "10.244.1.5:7")?;
    ensure!(
        told["verdict"] == "left-alone" && told["capture"][0]["rule"]["of"] == "10.244.1.5/32",
        "{told:#}"
    );
    // To the proxy's port on the node.
    let node = world.lab.node("node1");
    let ((), counted) = world.counted(Reason::Recursive, || {
        refused(world.app(), &format!("{}:15001", node.ipv4()), "connect")
    })?;
    ensure!(counted >= 1, "not refused as recursive");
    // A connection to which a proxy adds nothing goes direct, and is still decided on.
    capture(&mut world, json!({ "mode": "auto" }), &[])?;
    left_alone(
        &world,
        Reason::Direct,
        "10.244.1.6:7",
        "connect --count 3",
        "two",
    )?;
    left_alone(
        &world,
        Reason::Direct,
        "10.96.0.10:80",
        "connect --count 3",
        "far",
    )
}

fn unknown_destinations_are_refused_at_once() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let mut world = world()?;
        let app = world.app().clone();
        capture(&mut world, json!({ "egress": "deny", "mode": mode }), &[])?;
        let ((), counted) = world.counted(Reason::EgressDenied, || {
            refused(&app, "10.244.1.5:7", "connect --count 2")?;
            refused(&app, "192.0.2.1:80", "connect")?;
            refused(&app, "[fd00:10:244:1::6]:7", "connect")
        })?;
        ensure!(counted >= 4, "{mode}: {counted} of 4");
        // A service, and its endpoint.
        reaches(&app, "10.96.0.10:80", "connect --count 2", &["far"])?;
        reaches(&app, "10.244.2.5:7", "connect", &["far"])?;
        for (to, reason) in [
            ("10.244.1.5:7", Reason::EgressDenied),
            ("10.244.2.5:7", Reason::NotService),
        ] {
            let from = SocketAddr::from((app.ipv4(), 4000));
            let told = packet_reason(world.agent()?, "veth-app", from, to, 0)?;
            ensure!(told == reason.word(), "{mode}, {to}: {told} for a packet");
        }
    }
    Ok(())
}

fn without_a_proxy_it_is_refused_or_passes() -> Result<()> {
    for (rule, passes) in [("refuse", false), ("pass", true)] {
        let mut world = world()?;
        let rules = json!({ "mode": "proxy", "withoutProxy": rule });
        capture(&mut world, rules, &[])?;
        let app = world.app().clone();
        let held = app.hold("10.244.1.5:7")?;
        let agent = world.agent.as_mut().context("an agent")?;
        // Killed: its proxy is gone with it.
        agent.kill();
        let report: Report = held.wait_json()?;
        ensure!(!report.errors.is_empty(), "it goes on: {report:?}");
        for (to, by) in [("10.244.1.5:7", "one"), ("[fd00:10:244:1::5]:7", "one")] {
            if passes {
                left_alone(&world, Reason::ProxyBypassed, to, "connect --count 3", by)?;
            } else {
                let ((), counted) =
                    world.counted(Reason::ProxyDown, || refused(&app, to, "connect --count 3"))?;
                ensure!(counted >= 3, "{counted} of 3");
            }
        }
        world.agent.as_mut().context("an agent")?.start()?;
        eventually(|| captured(&world, "10.244.1.5:7", "connect --count 3", "one"))?;
    }
    Ok(())
}

fn connections_outlive_capture_and_its_end() -> Result<()> {
    let mut world = world()?;
    let pods = world.state.path().join("pods.yaml");
    let annotations = json!({ "dataplane.io/captured-by": "packets" });
    let write = |mode: &str| fs::write(&pods, pod(mode, annotations.clone()).to_string());
    write("none")?;
    let config = json!({ "rules": { "mode": "proxy", "allowPackets": true } });
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let app = world.app().clone();
    let both = ["10.244.1.5:7", "10.96.0.10:80"];
    let before = [app.hold(both[0])?, app.hold(both[1])?];
    write("ambient")?;
    eventually(|| captured(&world, "10.244.1.5:7", "connect", "one"))?;
    let during = [app.hold(both[0])?, app.hold(both[1])?];
    for held in before {
        lived(held)?;
    }
    write("none")?;
    eventually(|| {
        let (_, counted) = world.counted(Reason::Captured, || {
            reaches(&app, "10.244.1.5:7", "connect", &["one"])
        })?;
        ensure!(counted == 0, "still captured");
        Ok(())
    })?;
    let report = reaches(&app, "10.96.0.10:80", "connect --count 3", &["far"])?;
    sources_are(&report, &app.addresses())?;
    for held in during {
        lived(held)?;
    }
    // And once more.
    write("ambient")?;
    eventually(|| captured(&world, "10.244.1.5:7", "connect", "one"))
}

/// A pod whose sockets are here.
fn connections_outlive_a_change_of_what_captures_them() -> Result<()> {
    let mut world = World::new()?.by_packets();
    let pods = world.state.path().join("pods.yaml");
    let write = |by: &str| {
        let annotations = json!({ "dataplane.io/captured-by": by });
        fs::write(&pods, pod("ambient", annotations).to_string())
    };
    write("packets")?;
    let config = json!({ "rules": { "mode": "proxy", "allowPackets": true } });
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let app = world.app().clone();
    let hold = || -> Result<_> { Ok([app.hold("10.244.1.5:7")?, app.hold("10.96.0.10:80")?]) };
    let mut kept = Vec::new();
    for by in ["packets", "sockets", "packets", "sockets"] {
        write(by)?;
        eventually(|| {
            if by == "packets" {
                return captured(&world, "10.244.1.5:7", "connect", "one");
            }
            let (report, counted) = world.counted(Reason::Captured, || {
                reaches(&app, "10.244.1.5:7", "connect", &["one"])
            })?;
            ensure!(counted == 1, "{counted} were captured");
            sources_are(&report, &app.addresses())
        })?;
        // The kernel's cached route of a socket brings it packets that were not assigned to it, until some route
        // changes.
        world.lab.node("node1").ip("route flush cache")?;
        kept.extend(hold()?);
    }
    for connection in kept {
        lived(connection)?;
    }
    Ok(())
}

fn agents_take_each_others_place() -> Result<()> {
    take_places(false, &[])
}

fn agents_of_another_layout_too() -> Result<()> {
    for hook in ["tcx", "clsact"] {
        if hook == "clsact" || Hook::of_kernel().word() == hook {
            take_places(true, &["--tc-hook", hook]).context(hook)?;
        }
    }
    Ok(())
}

fn take_places(of_other_layouts: bool, args: &[&str]) -> Result<()> {
    let mut world = world()?;
    capture(&mut world, json!({ "mode": "proxy" }), args)?;
    let app = world.app().clone();
    let held = app.hold("10.244.1.5:7")?;
    let load = app.load(&["--to", "10.96.0.10:80", "--pause-us", PAUSE])?;
    let agent = world.agent.as_mut().context("an agent")?;
    let replace = |agent: &mut Agent, cgroup: &str| {
        // Another pod's.
        agent.move_to_cgroup(cgroup)?;
        if of_other_layouts {
            agent.change_layout(LAYOUT, LAYOUT - 1)?;
        }
        agent.replace()
    };
    let mut replaced = vec![replace(agent, "agent-1")?];
    // On an emulated machine one change takes most of the time that a leaving agent grants its connections.
    if !emulated() {
        replaced.push(replace(agent, "agent-2")?);
    }
    std::thread::sleep(std::time::Duration::from_millis(200));
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 20,
        "{report:?}"
    );
    for reason in [Reason::ProxyDown, Reason::ProxyBypassed] {
        let count = world.verdicts(reason)?;
        ensure!(count == 0, "{count} times {}", reason.word());
    }
    lived(held)?;
    for process in replaced {
        process.wait().context("an agent that was replaced")?;
    }
    Ok(())
}

fn other_peoples_proxies_on_the_node() -> Result<()> {
    let mut world = world()?;
    let node = world.lab.node("node1").clone();
    let config = mesh(foreign(), by_packets(json!({})));
    let haproxy = Relay::haproxy_on(&world, &node)?;
    world.agent_with(&config, &[])?;
    let connections = [
        ("10.244.1.5:7", "one"),
        ("[fd00:10:244:1::6]:7", "two"),
        ("10.96.0.10:80", "far"),
    ];
    let all = |world: &World, proxy: &Relay| -> Result<()> {
        proxy.forget()?;
        for (to, by) in connections {
            captured(world, to, "connect --count 2", by)?;
        }
        let mut saw = proxy.saw("outbound", 6)?;
        saw.sort();
        let wanted = ["10.244.1.5:7", "10.96.0.10:80", "fd00:10:244:1::6:7"];
        ensure!(saw == wanted.map(|to| [to; 2]).concat(), "{saw:?}");
        Ok(())
    };
    all(&world, &haproxy)?;
    drop(haproxy);
    refused(world.app(), "10.244.1.5:7", "connect --count 2")?;
    let nginx = Relay::nginx_on(&world, &node)?;
    eventually(|| captured(&world, "[fd00:10:244:1::6]:7", "connect", "two"))?;
    eventually(|| captured(&world, "10.244.1.5:7", "connect", "one"))?;
    all(&world, &nginx)
}

/// The rules, routes and programs at the machine's interface.
fn traces(world: &World) -> Result<String> {
    let node = world.lab.node("node1");
    let mut all = String::new();
    for arguments in [
        "rule",
        "-6 rule",
        "route show table 15006",
        "-6 route show table 15006",
    ] {
        // A missing table gives an error, which does not count.
        let output = node.command("ip").args(arguments.split(' ')).output()?;
        all += &String::from_utf8_lossy(&output.stdout);
    }
    for arguments in [
        "qdisc show dev veth-app",
        "filter show dev veth-app ingress",
    ] {
        all += &node.command("tc").args(arguments.split(' ')).run()?;
    }
    Ok(all)
}

fn nothing_is_left_behind() -> Result<()> {
    let args = ["--tc-hook", "clsact"];
    let mut world = world()?;
    let clean = traces(&world)?;
    let start = |world: &mut World| -> Result<()> {
        capture(world, json!({ "mode": "proxy" }), &args)?;
        captured(world, "10.244.1.5:7", "connect", "one")?;
        let there = traces(world)?;
        ensure!(
            there.contains("packet_capture") && there.matches("lookup 15006").count() == 2,
            "{there}"
        );
        world.agent.as_mut().context("an agent")?.kill();
        Ok(())
    };
    start(&mut world)?;
    world.agent()?.dataplane(["cleanup"]).run()?;
    ensure!(!world.agent()?.bpffs().exists(), "pins are left");
    let left = traces(&world)?;
    ensure!(left == clean, "left: {left}\nbefore: {clean}");
    reaches(world.app(), "10.244.1.5:7", "connect", &["one"])?;
    // An agent without a mesh removes a mesh's programs and rules.
    start(&mut world)?;
    let without = world.lab.agent("node1").in_the_nodes_cgroup();
    let without = without.manifests(world.manifests.path()).args(args);
    let _without = without.start()?;
    let there = traces(&world)?;
    ensure!(
        there.contains("packet_ingress")
            && !there.contains("packet_capture")
            && !there.contains("15006"),
        "{there}"
    );
    reaches(world.app(), "10.244.1.5:7", "connect", &["one"]).map(drop)
}
