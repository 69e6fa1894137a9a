//! The packet path's programs on interfaces: where the agent attaches and detaches them, beside others' programs.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::{
    Host, Lab,
    report::{LoadReport, Report},
};
use kernel::conntrack::room;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    cluster::{Cluster, UDP, eventually, reaches, refused, sources_are},
    commands::services,
    manifest::{Config, Service},
    metrics::Metrics,
    outcome::run,
};

scenarios! {
    Dataplane:
    programs_follow_interfaces,
    a_restarted_agent_swaps_programs_in_place,
    programs_that_somebody_removed_are_missed_and_come_back,
    other_peoples_filters_stay,
    patterns_choose_interfaces,
    off_and_on_again,
    flows_by_a_new_interface_have_its_address,
    machines_at_a_bridge_of_the_node_are_served,
}

/// The interfaces in `status`, by name: their kind, and how programs are attached to them.
fn interfaces(cluster: &Cluster) -> Result<Vec<(String, String, String)>> {
    let status = run(&cluster.agent, "status -o json")?.json()?;
    let all = status["interfaces"].as_array().context("interfaces")?;
    let on = |interface: &Value, way: &str| match &interface[way] {
        on if on["attached"] == true => on["hook"].as_str().unwrap_or("?").to_owned(),
        _ => "no".to_owned(),
    };
    let word = |interface: &Value, key: &str| interface[key].as_str().unwrap_or("?").to_owned();
    Ok(all
        .iter()
        .map(|interface| {
            let (ingress, egress) = (on(interface, "ingress"), on(interface, "egress"));
            let hooks = if ingress == egress {
                ingress
            } else {
                format!("{ingress}/{egress}")
            };
            (word(interface, "name"), word(interface, "role"), hooks)
        })
        .collect())
}

/// Waits until an interface is listed as `role`, with programs, or not at all.
fn becomes(cluster: &Cluster, name: &str, role: Option<&str>) -> Result<()> {
    eventually(|| {
        let all = interfaces(cluster)?;
        let found = all.iter().find(|(n, ..)| n == name);
        let as_wanted = match (found, role) {
            (None, None) => true,
            (Some((_, is, hooks)), Some(role)) => {
                is == role && (hooks == "tcx" || hooks == "clsact")
            }
            _ => false,
        };
        ensure!(as_wanted, "{name} is not {role:?}: {all:?}");
        Ok(())
    })
}

fn node(lab: &Lab) -> &Host {
    lab.node("node2")
}

/// Runs `tc` on the node.
fn tc(lab: &Lab, words: &str) -> Result<String> {
    Ok(node(lab).command("tc").args(words.split(' ')).run()?)
}

/// The kernel's numbers of the programs on all interfaces.
fn programs(cluster: &Cluster) -> Result<Vec<u64>> {
    let status = run(&cluster.agent, "status -o json")?.json()?;
    let all = status["interfaces"].as_array().context("interfaces")?;
    let ids = all.iter().flat_map(|i| [&i["ingress"], &i["egress"]]);
    Ok(ids.filter_map(|on| on["program_id"].as_u64()).collect())
}

fn programs_follow_interfaces() -> Result<()> {
    let cluster = Cluster::start(services)?;
    let all = interfaces(&cluster)?;
    let is = |name: &str| all.iter().find(|(n, ..)| n == name).map(|(_, is, _)| &**is);
    ensure!(is("eth0") == Some("uplink"), "{all:?}");
    ensure!(is("veth-near") == Some("pod"), "{all:?}");
    ensure!(is("lo").is_none(), "{all:?}");

    let node = node(&cluster.lab);
    // A second pod's interface, as a network plug-in makes it: one end goes to the pod.
    node.ip("link add veth-new type veth peer name veth-gone")?;
    let pod = cluster.lab.pod("near").netns().to_owned();
    node.ip(&format!("link set veth-gone netns {pod}"))?;
    node.ip("link set veth-new up")?;
    becomes(&cluster, "veth-new", Some("pod"))?;
    run(&cluster.agent, "status")?.exits(0)?;
    node.ip("link set veth-new down")?;
    becomes(&cluster, "veth-new", Some("pod"))?;
    node.ip("link set veth-new up")?;
    becomes(&cluster, "veth-new", Some("pod"))?;
    node.ip("link delete veth-new")?;
    becomes(&cluster, "veth-new", None)?;

    // A bridge gets programs only once a default route makes it an uplink; a dummy never does.
    node.ip("link add br9 type bridge")?;
    node.ip("addr add 10.99.0.1/24 dev br9")?;
    node.ip("link set br9 up")?;
    node.ip("route add default via 10.99.0.2 dev br9")?;
    becomes(&cluster, "br9", Some("uplink"))?;
    // It stays an uplink: a route that goes comes back when the network is restarted.
    node.ip("route del default via 10.99.0.2 dev br9")?;
    node.ip("link set br9 down")?;
    becomes(&cluster, "br9", Some("uplink"))?;
    node.ip("link delete br9")?;
    becomes(&cluster, "br9", None)?;
    Ok(())
}

fn a_restarted_agent_swaps_programs_in_place() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    let before = programs(&cluster)?;
    ensure!(!before.is_empty());
    cluster.agent.kill();
    // Without an agent the programs go on; the next agent replaces them in place.
    ensure!(programs(&cluster)? == before);
    cluster.agent.start()?;
    let after = programs(&cluster)?;
    ensure!(after.len() == before.len(), "{before:?}, then {after:?}");
    ensure!(
        after.iter().all(|id| !before.contains(id)),
        "not swapped: {before:?}, then {after:?}"
    );
    cluster.agent.stop()?;
    run(&cluster.agent, "cleanup")?.exits(0)?;
    for way in ["ingress", "egress"] {
        let filters = tc(&cluster.lab, &format!("filter show dev eth0 {way}"))?;
        ensure!(filters.is_empty(), "{filters}");
    }
    let qdiscs = tc(&cluster.lab, "qdisc show")?;
    ensure!(!qdiscs.contains("clsact"), "{qdiscs}");
    Ok(())
}

fn programs_that_somebody_removed_are_missed_and_come_back() -> Result<()> {
    let mut cluster = Cluster::start(services)?;
    let links = cluster.agent.bpffs().join(format!("v{LAYOUT}/links"));
    let mut pins = fs::read_dir(&links)?.filter_map(Result::ok);
    let tcx = pins.find(|pin| {
        pin.file_name()
            .to_string_lossy()
            .starts_with("packet_ingress-")
    });
    match tcx {
        Some(pin) => fs::remove_file(pin.path())?,
        None => {
            tc(&cluster.lab, "qdisc del dev eth0 clsact")?;
        }
    }
    run(&cluster.agent, "status")?
        .exits(1)?
        .says(&["NOT HEALTHY", "ingress: not attached"])?;
    cluster.agent.kill();
    run(&cluster.agent, "status")?.says(&["ingress: not attached"])?;
    cluster.agent.start()?;
    run(&cluster.agent, "status")?.exits(0)?;
    Ok(())
}

/// As filters, also on a kernel that has TCX: another program's filter before and after ours, and the qdisc that it
/// made, are there when we are gone.
fn other_peoples_filters_stay() -> Result<()> {
    let lab = Cluster::lab()?;
    tc(&lab, "qdisc add dev eth0 clsact")?;
    // A classic program that matches nothing: every kernel that can run ours has that.
    let filter = "filter add dev eth0 ingress pref 7 protocol all bpf bytecode";
    let theirs = node(&lab).command("tc").args(filter.split(' '));
    theirs.args(["1,6 0 0 0"]).run()?;
    let mut cluster = Cluster::start_in(lab, &["far", "near"], services, &["--tc-hook", "clsact"])?;
    let filters = |cluster: &Cluster| tc(&cluster.lab, "filter show dev eth0 ingress");
    let both = filters(&cluster)?;
    let ours = both.find("packet_ingress").context("ours")?;
    let theirs = both.find("bytecode").context("theirs")?;
    ensure!(ours < theirs, "{both}");
    run(&cluster.agent, "status")?.exits(0)?.says(&["clsact"])?;

    cluster.agent.stop()?;
    let planned = run(&cluster.agent, "cleanup --dry-run")?.exits(0)?;
    planned.says(&["clsact ingress filter", "would be removed"])?;
    ensure!(filters(&cluster)? == both, "a dry run changed something");
    run(&cluster.agent, "cleanup")?.exits(0)?;
    let left = filters(&cluster)?;
    ensure!(!left.contains("packet_ingress"), "{left}");
    ensure!(left.contains("bytecode"), "{left}");
    // The other interfaces' qdiscs were ours.
    let qdiscs = tc(&cluster.lab, "qdisc show")?;
    ensure!(qdiscs.matches("clsact").count() == 1, "{qdiscs}");
    Ok(())
}

fn patterns_choose_interfaces() -> Result<()> {
    let lab = Cluster::lab()?;
    let config =
        Config::new(r#"packets: {uplinks: ["!eth*"], podInterfaces: ["veth-*", "!veth-far"]}"#)?;
    let cluster = Cluster::start_in(lab, &["far", "near"], services, &config.arguments())?;
    let all = interfaces(&cluster)?;
    ensure!(
        all.iter()
            .all(|(_, is, hooks)| is == "pod" && hooks != "no"),
        "{all:?}"
    );
    ensure!(all.iter().any(|(name, ..)| name == "veth-near"), "{all:?}");
    Ok(())
}

/// The packet path is switched on and off by restarts, with pins in place: its programs and tables
/// are there as long as it is on, and pods' sockets are served all the time.
fn off_and_on_again() -> Result<()> {
    let lab = Cluster::lab()?;
    let directory = TempDir::new()?;
    let file = directory.path().join("config.json");
    let set = |packets: Value| fs::write(&file, json!({ "packets": packets }).to_string());
    set(json!({ "path": "off" }))?;
    let arguments = ["--config", file.to_str().context("a path in UTF-8")?];
    let mut cluster = Cluster::start_in(lab, &["far", "near"], services, &arguments)?;
    let load = [
        "--to",
        "10.96.0.10:80",
        "--threads",
        "1",
        "--pause-us",
        "2000",
    ];
    let load = cluster.client().load(&load)?;
    let is = |cluster: &Cluster, on: bool, room: u64| -> Result<()> {
        ensure!(interfaces(cluster)?.is_empty() != on);
        for name in ["CONNTRACK", "ANSWERS", "SEQUENCES", "FRAGMENTS"] {
            let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/{name}"));
            ensure!(pin.exists() == on, "on: {on}; {}", pin.display());
        }
        let count = run(&cluster.agent, "conntrack count")?;
        let node = cluster.lab.node("node2");
        let metrics = Metrics::scrape(node)?;
        let path = metrics.sum("dataplane_packet_path", &[]);
        let (outside, door) = (
            cluster.lab.external("ext"),
            format!("{}:30080", node.ipv4()),
        );
        let status = cluster.status()?;
        let tables = status["tables"].as_array().context("tables")?;
        let flows = tables.iter().find(|table| table["name"] == "CONNTRACK");
        if on {
            count.exits(0)?;
            ensure!(path > 0.5);
            let room_there = flows.and_then(|table| table["capacity"].as_u64());
            ensure!(
                room_there == Some(room),
                "room for {room_there:?}, not {room}"
            );
            reaches(outside, &door, "connect --count 3", &["near"])?;
        } else {
            count.exits(1)?.says(&["the packet path is off"])?;
            ensure!(path < 0.5 && flows.is_none(), "{flows:?}");
            refused(outside, &door, "connect")?;
        }
        Ok(())
    };
    let usual = u64::from(room::of_this_machine());
    is(&cluster, false, 0)?;
    for (packets, on, room) in [
        (json!({ "conntrackFlows": 4096 }), true, 4096),
        (json!({ "path": "off" }), false, 0),
        (json!({}), true, usual),
        // Existing tables keep their size.
        (json!({ "conntrackFlows": 4096 }), true, usual),
        (json!({ "path": "off" }), false, 0),
    ] {
        set(packets.clone())?;
        cluster.agent.kill();
        cluster.agent.start()?;
        is(&cluster, on, room).with_context(|| packets.to_string())?;
    }
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 100,
        "{report:?}"
    );
    Ok(())
}

/// A pod's interface as a network plug-in makes it: up first, and its address some time later. A flow that begins in
/// between is not masqueraded to another of the node's addresses, which it would keep. An interface that gets no
/// address has another's, as with `MASQUERADE`.
fn flows_by_a_new_interface_have_its_address() -> Result<()> {
    const NODE_PORT: u16 = 30_053;
    let late: std::net::IpAddr = "10.244.2.77".parse()?;
    let cluster = Cluster::start(|_| {
        let service = Service::new("late", &["10.96.0.77"]);
        let service = service.node_port("udp", 53, UDP, NODE_PORT);
        vec![service.endpoint_at(late, "node2")]
    })?;
    let (node, pod) = (node(&cluster.lab), cluster.lab.pod("near"));
    let (ext, gateway) = (cluster.lab.external("ext"), pod.gateway4());
    let make = || -> Result<()> {
        node.ip("link add veth-late type veth peer name late0")?;
        node.ip(&format!("link set late0 netns {}", pod.netns()))?;
        pod.ip("link set late0 up")?;
        pod.ip(&format!("addr add {late}/32 dev late0"))?;
        Ok(())
    };
    let to = format!("{}:{NODE_PORT}", node.ipv4());
    let asks = || {
        let how = ["--to", &to, "--timeout-ms", "100", "--until-stdin-closes"];
        let asks = ext.probe("udp").args(how).stdin_piped().stdout_piped();
        let mut asks = asks.spawn()?;
        asks.wait_for_line()?;
        anyhow::Ok(asks)
    };
    make()?;
    let _server = pod.serve_as("late", &["--udp", &format!("{late}:{UDP}")])?;
    let before = cluster.verdicts(Reason::NoNodeAddress)?;
    let clients = asks()?;
    let script = format!(
        "ip link set veth-late up; ip route add {late}/32 dev veth-late; sleep 0.5; \
         ip addr add {gateway}/32 dev veth-late"
    );
    node.command("sh").args(["-c", &script]).run()?;
    eventually(|| reaches(ext, &to, "udp --timeout-ms 200", &["late"]).map(drop))?;
    let report: Report = clients.wait_json()?;
    sources_are(&report, &[gateway.into()])?;
    let refused = cluster.verdicts(Reason::NoNodeAddress)? - before;
    ensure!(refused > 0, "nothing was tried in between: {report:?}");

    // Without an address: the source that the kernel would choose.
    node.ip("link delete veth-late")?;
    make()?;
    node.ip("link set veth-late up")?;
    node.ip(&format!("route add {late}/32 dev veth-late"))?;
    eventually(|| {
        let report = reaches(ext, &to, "udp --timeout-ms 200", &["late"])?;
        sources_are(&report, &[node.ipv4().into()])
    })
}

/// As libvirt makes it: a bridge of the node with an address and taps, without a network plug-in. The machine's own
/// port is a pair here, which the operator excludes from pods' interfaces.
fn machines_at_a_bridge_of_the_node_are_served() -> Result<()> {
    let lab = Cluster::lab_of_packets()?;
    let (node, machine) = (lab.node("node2"), lab.pod("sleep"));
    for line in [
        "link add virbr0 up type bridge",
        "addr add 192.168.122.1/24 dev virbr0",
        "-6 addr add fd22::1/64 dev virbr0 nodad",
        "link add veth-vm type veth peer name vm0",
        "link set veth-vm up master virbr0",
        "tuntap add dev tap0 mode tap",
        "link set tap0 up master virbr0",
    ] {
        node.ip(line).with_context(|| line.to_owned())?;
    }
    node.ip(&format!("link set vm0 netns {}", machine.netns()))?;
    for line in [
        "link set vm0 up",
        "addr add 192.168.122.10/24 dev vm0",
        "-6 addr add fd22::10/64 dev vm0 nodad",
        "route add 10.96.0.0/16 via 192.168.122.1 dev vm0",
        "-6 route add fd00:96::/64 via fd22::1 dev vm0",
    ] {
        machine.ip(line).with_context(|| line.to_owned())?;
    }
    let web = |lab: &Lab| {
        let web = Service::new("web", &["10.96.0.10", "fd00:96::10"]);
        let web = web
            .port("tcp", 80, crate::cluster::TCP)
            .port("udp", 53, UDP);
        vec![web.endpoints(&[lab.pod("far"), lab.pod("near")])]
    };
    let config = Config::new(
        r#"packets: {podInterfaces: ["!veth-vm"], podCidrs: ["10.244.0.0/16", "fd00:10:244::/48"]}"#,
    )?;
    let cluster = Cluster::start_in(lab, &["far", "near"], web, &config.arguments())?;
    becomes(&cluster, "virbr0", Some("uplink"))?;
    let machine = cluster.lab.pod("sleep");
    for to in ["10.96.0.10", "[fd00:96::10]"] {
        let how = "connect --count 20 --timeout-ms 1000";
        reaches(machine, &format!("{to}:80"), how, &["far", "near"])?;
        let how = "udp --count 20 --timeout-ms 1000";
        reaches(machine, &format!("{to}:53"), how, &["far", "near"])?;
    }
    Ok(())
}
