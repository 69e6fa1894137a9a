//! Flows of clients outside of the node: listed, forgotten, ended with their endpoint, and taken over
//! from the kernel's own conntrack.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{
    Host, Lab, Process, is_long,
    report::{Flow, Report},
};
use kernel::tc::Hook;

use crate::{
    cluster::{Cluster, TCP, UDP, eventually, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    udp_flows_move_when_their_endpoint_goes,
    a_port_that_was_a_services_is_an_endpoints_next,
    established_flows_survive_the_takeover,
    masqueraded_connections_keep_their_ports,
    flows_that_nobody_translates_any_more_begin_anew,
}

const UDP_PORT: u16 = 30053;
const TCP_PORT: u16 = 30007;

fn service(lab: &Lab, endpoints: &[&str]) -> Service {
    let pods: Vec<_> = endpoints.iter().map(|name| lab.pod(name)).collect();
    Service::new("flows", &["10.96.0.50", "fd00:10:96::50"])
        .node_port("udp", 53, UDP, UDP_PORT)
        .node_port("tcp", 80, TCP, TCP_PORT)
        .endpoints(&pods)
}

/// Starts one UDP socket that sends until it is ended.
pub fn sender(from: &Host, to: SocketAddr) -> Result<Process> {
    let to = to.to_string();
    let how = [
        "--one-socket",
        "--each",
        "--until-stdin-closes",
        "--to",
        &to,
    ];
    let mut process = from
        .probe("udp")
        .args(how)
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    process.wait_for_line()?;
    Ok(process)
}

/// Starts one TCP connection that is used until it is ended.
fn connection(from: &Host, to: SocketAddr) -> Result<Process> {
    Ok(from.hold(&to.to_string())?)
}

/// Returns the output of `dataplane conntrack list`.
fn list(cluster: &Cluster, filter: &[&str]) -> Result<Vec<serde_json::Value>> {
    let command = ["conntrack", "list", "-o", "json"];
    let list: serde_json::Value = cluster
        .agent
        .dataplane(command.iter().chain(filter))
        .json()?;
    Ok(list.as_array().context("an array")?.clone())
}

fn udp_flows_move_when_their_endpoint_goes() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![service(lab, &["near"])])?;
    let node: SocketAddr = (cluster.lab.node("node2").ipv4(), UDP_PORT).into();
    let ext = cluster.lab.external("ext");
    let tcp = connection(ext, (node.ip(), TCP_PORT).into())?;
    let udp = sender(ext, node)?;
    eventually(|| {
        let flows = list(&cluster, &["--protocol", "udp", "--state", "answered"])?;
        ensure!(flows.len() == 1, "{flows:?}");
        let flow = &flows[0];
        ensure!(
            flow["vip"] == node.to_string()
                && flow["endpoint"] == format!("10.244.2.10:{UDP}")
                && flow["service"] == "default/flows"
                && flow["client"]
                    .as_str()
                    .is_some_and(|client| client.starts_with(&format!("{}:", ext.ipv4()))),
            "{flow}"
        );
        Ok(())
    })?;
    ensure!(list(&cluster, &["--state", "established"])?.len() == 1);
    let explain = |from: &str, to: &str| -> Result<serde_json::Value> {
        let uplink = ["explain", "--iface", "eth0", "-o", "json", from, to];
        Ok(cluster.agent.dataplane(uplink).json()?)
    };
    let flow = list(&cluster, &["--protocol", "udp"])?.remove(0);
    let known = explain(
        flow["client"].as_str().unwrap_or_default(),
        &format!("{node}/udp"),
    )?;
    ensure!(
        known["reason"] == "kept" && known["endpoints"][0]["endpoint"] == flow["endpoint"],
        "{known}"
    );
    let new = explain("192.0.2.7:4000", &format!("{node}/udp"))?;
    ensure!(
        new["verdict"] == "translated"
            && new["reason"] == "masqueraded"
            && new["kind"] == "NodePort"
            && new["service"] == "default/flows",
        "{new}"
    );
    let other = explain("192.0.2.7:4000", "192.0.2.8:80")?;
    ensure!(other["verdict"] == "left-alone", "{other}");
    ensure!(list(&cluster, &["--endpoint", "10.244.1.5"])?.is_empty());

    cluster
        .manifests
        .write(&[service(&cluster.lab, &["far"])])?;
    eventually(|| {
        let flows = list(&cluster, &["--protocol", "udp", "--endpoint", "10.244.1.5"])?;
        ensure!(flows.len() == 1, "{flows:?}");
        Ok(())
    })?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    let report: Report = udp.wait_json()?;
    let answers: Vec<_> = report.each.iter().map(|a| a.endpoint.as_deref()).collect();
    let left = answers.partition_point(|endpoint| *endpoint == Some("near"));
    // A datagram may be on its way when its flow ends.
    let moved = &answers[(left + 1).min(answers.len())..];
    ensure!(
        left > 0 && !moved.is_empty() && moved.iter().all(|e| *e == Some("far")),
        "not near, then far: {:?} {:?}",
        report.endpoints,
        report.errors
    );
    // As with kube-proxy, the connection stays.
    let report: Report = tcp.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.endpoints.keys().eq(["near"]),
        "{:?} {:?}",
        report.endpoints,
        report.errors
    );

    // The tables are read without an agent, too.
    let mut cluster = cluster;
    cluster.agent.kill();
    let found = list(&cluster, &[])?.len();
    let forgot: serde_json::Value = cluster
        .agent
        .dataplane(["conntrack", "flush", "--all", "-o", "json"])
        .json()?;
    ensure!(
        found > 0 && forgot["removed"] == found && list(&cluster, &[])?.is_empty(),
        "found {found}, {forgot}"
    );
    let refused = cluster.agent.dataplane(["conntrack", "flush"]).output()?;
    ensure!(!refused.status.success(), "flushed without a filter");
    Ok(())
}

/// A client whose packets are translated asks a service, and then the service's endpoint itself, from the same port:
/// the kernel assigns ports to connections by their destination, so this happens by itself.
fn a_port_that_was_a_services_is_an_endpoints_next() -> Result<()> {
    let one = |lab: &Lab, name: &str, number: u8| {
        let ips = [format!("10.96.0.{number}"), format!("fd00:10:96::{number}")];
        Service::new(name, &[&ips[0], &ips[1]])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod(name)])
    };
    let cluster = Cluster::start_in(
        Cluster::lab_of_packets()?,
        &["far", "near"],
        |lab| vec![one(lab, "near", 51), one(lab, "far", 52)],
        &[],
    )?;
    let mut flows = Vec::new();
    let mut expected = Vec::new();
    for (name, number) in [("near", 51), ("far", 52)] {
        for address in cluster.lab.pod(name).addresses() {
            let vip: IpAddr = if address.is_ipv4() {
                format!("10.96.0.{number}").parse()?
            } else {
                format!("fd00:10:96::{number}").parse()?
            };
            for (to, port) in [(vip, 80), (address, TCP), (vip, 80), (address, TCP)] {
                flows.push(Flow {
                    to: (to, port).into(),
                    udp: false,
                    count: 1,
                    timeout_ms: 1_000,
                    timeouts: 1,
                    from_port: Some(40_000),
                });
                expected.push(name);
            }
        }
    }
    let client = cluster.lab.pod("sleep");
    let mut process = client.probe("flows").stdin_piped().stdout_piped().spawn()?;
    process.send_line(&serde_json::to_string(&flows)?)?;
    process.close_stdin();
    let reports: Vec<Report> = process.wait_json()?;
    for ((flow, report), name) in flows.iter().zip(&reports).zip(&expected) {
        ensure!(
            report.errors.is_empty() && report.endpoints.keys().eq([name]),
            "{} from the port of the one before: {:?} {:?}",
            flow.to,
            report.endpoints,
            report.errors
        );
    }
    ensure!(flows.len() == 16 && reports.len() == flows.len());
    // While a connection lives, the endpoint sees another connection from its port with another port, and `explain`
    // reports it.
    let held = connection(client, "10.96.0.51:80".parse()?)?;
    eventually(|| {
        let flows = list(&cluster, &["--state", "established"])?;
        ensure!(flows.len() == 1, "{flows:?}");
        Ok(())
    })?;
    let flow = list(&cluster, &["--state", "established"])?.remove(0);
    let from = flow["client"].as_str().context("a client")?;
    let to = format!("{}/tcp", flow["endpoint"].as_str().context("an endpoint")?);
    let explain = ["explain", "--iface", "eth0", "-o", "json", from, &to];
    let told: serde_json::Value = cluster.agent.dataplane(explain).json()?;
    ensure!(
        told["verdict"] == "translated" && told["steps"].to_string().contains("another port"),
        "{told}"
    );
    drop(held);
    // By its packets, or nothing was tried.
    ensure!(
        cluster.verdicts(Reason::Translated)? >= 8,
        "not by packets: {}",
        cluster.status()?
    );
    Ok(())
}

/// Changes a node's NAT rules, by `iptables` or `ip6tables`.
fn nat(node: &Host, command: &str, rule: &str) -> Result<()> {
    let iptables = node.command(command).args(["-w", "-t", "nat"]);
    iptables.args(rule.split_whitespace()).run()?;
    Ok(())
}

/// Rules like kube-proxy's translate the packets to the node ports. Then an agent starts, and then the
/// rules are removed.
fn established_flows_survive_the_takeover() -> Result<()> {
    let lab = Cluster::lab()?;
    let node = lab.node("node2").clone();
    let iptables = |rule: &str| nat(&node, "iptables", rule);
    let rules: Vec<String> = [("udp", UDP_PORT, UDP), ("tcp", TCP_PORT, TCP)]
        .into_iter()
        .flat_map(|(protocol, port, target)| {
            [
                format!(
                    "PREROUTING -p {protocol} --dport {port} -j DNAT --to-destination \
                     10.244.2.10:{target}"
                ),
                format!("POSTROUTING -p {protocol} -d 10.244.2.10 --dport {target} -j MASQUERADE"),
            ]
        })
        .collect();
    for rule in &rules {
        iptables(&format!("-A {rule}"))?;
    }
    // A network plugin's, which stays. Without any rule at all `iptables` removes the chains, and
    // without these the kernel translates nothing, established or not.
    iptables("-A POSTROUTING -s 10.244.0.0/16 -d 203.0.113.0/24 -j MASQUERADE")?;
    let mut flows = Vec::new();
    let cluster = Cluster::start_in(
        lab,
        &["far", "near", "near2"],
        |lab| {
            let (ext, ip) = (lab.external("ext"), lab.node("node2").ipv4());
            flows.push(sender(ext, (ip, UDP_PORT).into()));
            flows.push(connection(ext, (ip, TCP_PORT).into()));
            std::thread::sleep(std::time::Duration::from_millis(100));
            // Not the endpoint that they have, so that a moved flow is noticed.
            vec![service(lab, &["far", "near", "near2"])]
        },
        &[],
    )?;
    // The UDP flow; and the node's ports, of both.
    let foreign = list(&cluster, &["--state", "foreign"])?;
    let (of_node, others): (Vec<_>, Vec<_>) = foreign
        .iter()
        .partition(|flow| flow["vip"] == flow["endpoint"]);
    ensure!(
        of_node.len() == 2
            && others.len() == 1
            && others[0]["endpoint"] == format!("10.244.2.10:{UDP}"),
        "{foreign:?}\n{}",
        cluster.agent.log()
    );
    std::thread::sleep(std::time::Duration::from_millis(300));
    // As kube-proxy removes its own.
    for rule in &rules {
        iptables(&format!("-D {rule}"))?;
    }
    std::thread::sleep(std::time::Duration::from_millis(300));
    // New flows reach all endpoints, through the dataplane.
    let ext = cluster.lab.external("ext");
    let all = ["far", "near", "near2"];
    let to = SocketAddr::from((node.ipv4(), UDP_PORT)).to_string();
    reaches(ext, &to, "udp --count 60", &all)?;
    let to = SocketAddr::from((node.ipv4(), TCP_PORT)).to_string();
    reaches(ext, &to, "connect --count 60", &all)?;
    // To add a clsact qdisc, the kernel stops the interface and drops packets that are to leave by it for some
    // milliseconds (docs/kernels.md). TCP sends them again; one datagram is lost for each interface.
    let stopped = if Hook::of_kernel() == Hook::Tcx { 0 } else { 4 };
    for process in flows {
        let report: Report = process?.wait_json()?;
        let lost = report.errors.get("TIMEOUT").copied().unwrap_or_default();
        ensure!(
            report.errors.keys().all(|error| error == "TIMEOUT")
                && lost <= stopped
                && report.endpoints.keys().eq(["near"])
                && report.answered > 100,
            "{:?} {:?} {:?} of {}",
            report.endpoints,
            report.errors,
            report
                .each
                .iter()
                .enumerate()
                .filter_map(|(at, attempt)| Some((at, attempt.error.as_deref()?)))
                .collect::<Vec<_>>(),
            report.each.len()
        );
    }
    Ok(())
}

/// Rules like kube-proxy's have masqueraded connections, which have their clients' ports; then an agent starts, and then the rules
/// go. Another client connects from the same ports, which its flows would have first, too. No connection takes another's replies.
fn masqueraded_connections_keep_their_ports() -> Result<()> {
    const CLIENTS: usize = 4;
    const PORTS: &str = "20000 20003";
    /// Where no service is, but rules that stay.
    const OTHER_PORT: u16 = 30008;
    let is_long = is_long();
    let lab = Cluster::lab()?;
    let node = lab.node("node2").clone();
    let ext = lab.external("ext").clone();
    ext.sysctl("ipv4/ip_local_port_range", PORTS)?;
    let mut rules = Vec::new();
    for (command, target, other) in [
        ("iptables", "10.244.2.10", "203.0.113.0/24"),
        ("ip6tables", "fd00:10:244:2::10", "2001:db8::/64"),
    ] {
        let to = if command == "iptables" {
            target.to_owned()
        } else {
            format!("[{target}]")
        };
        let translate = |port: u16| {
            format!("PREROUTING -p tcp --dport {port} -j DNAT --to-destination {to}:{TCP}")
        };
        let masquerade = format!("POSTROUTING -p tcp -d {target} --dport {TCP} -j MASQUERADE");
        rules.push((command, translate(TCP_PORT)));
        // These stay. Without any rule the kernel translates nothing.
        nat(
            &node,
            command,
            &format!("-A POSTROUTING -d {other} -j MASQUERADE"),
        )?;
        if is_long {
            nat(&node, command, &format!("-A {}", translate(OTHER_PORT)))?;
            nat(&node, command, &format!("-A {masquerade}"))?;
        } else {
            rules.push((command, masquerade));
        }
    }
    for (command, rule) in &rules {
        nat(&node, command, &format!("-A {rule}"))?;
    }
    let addresses: [IpAddr; 2] = [node.ipv4().into(), node.ipv6().into()];
    let hold = |port: u16| -> Result<Vec<Process>> {
        let all = addresses
            .iter()
            .flat_map(|address| std::iter::repeat_n(*address, CLIENTS));
        let mut held = Vec::new();
        for address in all {
            let to = SocketAddr::new(address, port).to_string();
            let probe = ext.probe("hold").args(["--pause-ms", "20", "--to", &to]);
            let mut process = probe.stdin_piped().stdout_piped().spawn()?;
            process.wait_for_line()?;
            held.push(process);
        }
        Ok(held)
    };
    let mut older = Vec::new();
    let cluster = Cluster::start_in(
        lab,
        &["near"],
        |lab| {
            older.push(hold(TCP_PORT));
            vec![service(lab, &["near"])]
        },
        &[],
    )?;
    let mut connections = older.remove(0)?;
    let ports_held = |wanted: usize| -> Result<()> {
        let foreign = list(&cluster, &["--state", "foreign", "--protocol", "tcp"])?;
        ensure!(
            foreign.len() == wanted,
            "{foreign:?}\n{}",
            cluster.agent.log()
        );
        Ok(())
    };
    ports_held(2 * CLIENTS)?;
    for (command, rule) in &rules {
        nat(&node, command, &format!("-D {rule}"))?;
    }
    // The other client: as many connections as there are ports.
    ext.ip("addr add 192.168.77.199/24 dev eth0")?;
    ext.ip("-6 addr add fd77::199/64 dev eth0 nodad")?;
    ext.ip(&format!(
        "route add {}/32 dev eth0 src 192.168.77.199",
        node.ipv4()
    ))?;
    ext.ip(&format!(
        "-6 route add {}/128 dev eth0 src fd77::199",
        node.ipv6()
    ))?;
    connections.extend(hold(TCP_PORT)?);
    std::thread::sleep(std::time::Duration::from_millis(300));
    let masqueraded = cluster.verdicts(Reason::Masqueraded)?;
    ensure!(
        masqueraded >= 2 * CLIENTS as u64,
        "{masqueraded} masqueraded"
    );
    if is_long {
        // The kernel's own conntrack gives ports as long as there are rules, and takes them back.
        connections.extend(hold(OTHER_PORT)?);
        eventually(|| ports_held(4 * CLIENTS))?;
        for state in ["time_wait", "close"] {
            node.sysctl(&format!("netfilter/nf_conntrack_tcp_timeout_{state}"), "1")?;
        }
    }
    for (at, mut process) in connections.into_iter().enumerate() {
        process.close_stdin();
        let report: Report = process.wait_json()?;
        ensure!(
            report.errors.is_empty() && report.answered > 5 && report.endpoints.keys().eq(["near"]),
            "connection {at}: {} answers, {:?}, {:?}",
            report.answered,
            report.errors,
            report.endpoints
        );
    }
    if is_long {
        eventually(|| ports_held(0))?;
    }
    Ok(())
}

/// Rules like kube-proxy's have gone before the agent starts, and with the last of them the kernel has
/// stopped translating, but it still lists its flows: sockets that go on are served by us at once.
fn flows_that_nobody_translates_any_more_begin_anew() -> Result<()> {
    let lab = Cluster::lab()?;
    let node = lab.node("node2").clone();
    for (command, target) in [
        ("iptables", "10.244.2.10"),
        ("ip6tables", "[fd00:10:244:2::10]"),
    ] {
        nat(
            &node,
            command,
            &format!(
                "-A PREROUTING -p udp --dport {UDP_PORT} -j DNAT --to-destination {target}:{UDP}"
            ),
        )?;
    }
    let addresses: [IpAddr; 2] = [node.ipv4().into(), node.ipv6().into()];
    let mut flows = Vec::new();
    let cluster = Cluster::start_in(
        lab,
        &["near"],
        |lab| {
            for address in addresses {
                flows.push(sender(lab.external("ext"), (address, UDP_PORT).into()));
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
            // IPv4's rules go while IPv6's stay: each family is checked on its own.
            let _ = nat(&node, "iptables", "-F");
            let _ = nat(&node, "iptables", "-X");
            vec![service(lab, &["near"])]
        },
        &[],
    )?;
    let foreign = list(&cluster, &["--state", "foreign"])?;
    ensure!(
        foreign.len() == 1
            && foreign[0]["vip"] == SocketAddr::from((node.ipv6(), UDP_PORT)).to_string(),
        "{foreign:?}\n{}",
        cluster.agent.log()
    );
    // While no rules translated, it was refused until the node's ICMP limit was reached; then it waits for an answer,
    // for two seconds.
    eventually(|| {
        let answered = list(&cluster, &["--protocol", "udp", "--state", "answered"])?;
        ensure!(answered.len() == 1, "{answered:?}");
        Ok(())
    })?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    for process in flows {
        let report: Report = process?.wait_json()?;
        // Its failures from the time without translation are over.
        let last = report.each.iter().rev().take(20);
        ensure!(
            report.answered > 20 && last.clone().all(|attempt| attempt.error.is_none()),
            "{:?} {:?}, at last {:?}",
            report.endpoints,
            report.errors,
            last.collect::<Vec<_>>()
        );
    }
    Ok(())
}
