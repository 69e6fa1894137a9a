//! `hostPort`: with the rules of the CNI plug-in `portmap`, and with the dataplane, one after the other in one cluster.

use std::{collections::BTreeMap, fmt::Write as _, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    cluster::{TCP, UDP, ask, eventually, reaches, refused, serve},
    outcome::run,
};

scenarios! {
    Dataplane:
    host_ports_are_as_portmap_has_them,
    a_host_port_goes_with_its_pod,
    a_host_port_on_loopback_is_for_the_nodes_own_sockets,
    a_host_port_is_at_no_address_but_the_nodes,
    a_port_that_a_process_of_the_node_has_is_served_with_a_warning,
    no_pod_answers_the_agents_own_probe,
}

/// On all of the node's addresses, on those of one family, and on one.
const PORTS: [(&str, u16, u16); 2] = [("tcp", 8480, TCP), ("udp", 8453, UDP)];
const OF_FAMILY: [(&str, &str, u16, u16); 4] = [
    ("0.0.0.0", "tcp", 8482, TCP),
    ("0.0.0.0", "udp", 8484, UDP),
    ("::", "tcp", 8483, TCP),
    ("::", "udp", 8485, UDP),
];
const ON_ONE: u16 = 8481;

fn lab() -> Result<Lab> {
    Ok(Lab::builder()
        .node("node1")
        .vm("node1", "web", "10.244.1.10")
        .vm("node1", "vm", "10.244.1.20")
        .external("outside")
        .build()?)
}

/// The pod as the API has it.
fn manifest(lab: &Lab, directory: &TempDir, phase: &str) -> Result<()> {
    let (web, node) = (lab.pod("web"), lab.node("node1"));
    let mut ports: Vec<_> = PORTS
        .iter()
        .map(|(protocol, host, container)| {
            json!({ "protocol": protocol.to_uppercase(), "hostPort": host, "containerPort": container })
        })
        .collect();
    for (ip, protocol, host, container) in OF_FAMILY {
        ports.push(json!({
            "protocol": protocol.to_uppercase(), "hostPort": host, "containerPort": container, "hostIP": ip,
        }));
    }
    for ip in node.addresses() {
        ports.push(json!({ "hostPort": ON_ONE, "containerPort": TCP, "hostIP": ip }));
    }
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "nodeName": "node1", "containers": [{ "name": "web", "ports": ports }] },
        "status": { "phase": phase, "podIPs": web.addresses().map(|ip| json!({ "ip": ip })) },
    });
    let file = directory.path().join("pod.json");
    Ok(std::fs::write(file, serde_json::to_vec(&pod)?)?)
}

/// The rules that `portmap` writes, without its marks: packets for the node's ports go to the pod,
/// and the pod's own to itself come back to the node.
fn rules(lab: &Lab) -> Result<()> {
    let (web, node) = (lab.pod("web"), lab.node("node1"));
    let families = [
        ("iptables-nft", web.ipv4().into(), node.ipv4().into()),
        ("ip6tables-nft", web.ipv6().into(), node.ipv6().into()),
    ];
    for (tool, web, node_ip) in families {
        let (web, node_ip): (IpAddr, IpAddr) = (web, node_ip);
        let at = |port| std::net::SocketAddr::new(web, port);
        let mut rules = "*nat\n".to_owned();
        for chain in ["PREROUTING", "OUTPUT"] {
            // portmap writes no `-d` for an unspecified address, and skips those of the other family.
            let of_family = OF_FAMILY
                .iter()
                .filter(|(ip, ..)| ip.contains(':') == web.is_ipv6());
            let of_family = of_family.map(|(_, protocol, port, to)| (*protocol, *port, *to));
            for (protocol, port, to) in PORTS.into_iter().chain(of_family) {
                writeln!(
                    rules,
                    "-A {chain} -m addrtype --dst-type LOCAL -p {protocol} --dport {port} -j DNAT \
                     --to-destination {}",
                    at(to)
                )?;
            }
            writeln!(
                rules,
                "-A {chain} -d {node_ip} -p tcp --dport {ON_ONE} -j DNAT --to-destination {}",
                at(TCP)
            )?;
        }
        writeln!(
            rules,
            "-A POSTROUTING -s {web} -d {web} -j MASQUERADE\nCOMMIT"
        )?;
        let script = format!("{tool}-restore <<'end'\n{rules}end");
        let load = node.command("sh");
        load.args(["-c", &script]).run().with_context(|| rules)?;
    }
    Ok(())
}

/// Returns the pod that each client reaches, and the client's address that the pod sees; for the node's own processes,
/// whose source address is chosen in another way (docs/differences.md), only the pod.
fn seen(lab: &Lab) -> Result<BTreeMap<String, String>> {
    let node = lab.node("node1");
    let clients: [&Host; 4] = [lab.external("outside"), lab.pod("vm"), lab.pod("web"), node];
    let mut seen = BTreeMap::new();
    for client in clients {
        for ip in node.addresses() {
            let targets = PORTS.map(|(protocol, port, _)| (protocol, port));
            let of_family = OF_FAMILY.map(|(_, protocol, port, _)| (protocol, port));
            let targets = targets.into_iter().chain(of_family);
            for (protocol, port) in targets.chain([("tcp", ON_ONE)]) {
                let to = std::net::SocketAddr::new(ip, port).to_string();
                let how = if protocol == "tcp" { "connect" } else { "udp" };
                let report = ask(client, &to, &format!("{how} --count 3"))?;
                let mut said = format!("{:?}", report.errors);
                for (name, endpoint) in &report.endpoints {
                    write!(said, " {name} {}", endpoint.answers)?;
                    if client.name() != node.name() {
                        write!(said, " {:?}", endpoint.sources.keys())?;
                    }
                }
                seen.insert(format!("{} {to}/{protocol}", client.name()), said);
            }
        }
    }
    Ok(seen)
}

fn host_ports_are_as_portmap_has_them() -> Result<()> {
    // In a lab of its own: the kernel remembers flows that it translated, and an agent that finds them
    // leaves them to it, be it that without rules it does so no more.
    let by_rules = {
        let lab = lab()?;
        let _server = serve(lab.pod("web"))?;
        rules(&lab)?;
        seen(&lab)?
    };
    let lab = lab()?;
    let _server = serve(lab.pod("web"))?;
    let directory = TempDir::new()?;
    manifest(&lab, &directory, "Running")?;
    let agent = lab.agent("node1").manifests(directory.path());
    let agent = agent.args(["--pod-cidr", "10.244.0.0/16"]).start()?;
    let by_us = seen(&lab)?;
    ensure!(by_rules == by_us, "portmap: {by_rules:#?}\nus: {by_us:#?}");
    let of_other_family = |flow: &str| {
        let of = |(ip, _, port, _): &(&str, &str, u16, u16)| {
            flow.contains(&format!(":{port}/")) && flow.contains('[') != ip.contains(':')
        };
        OF_FAMILY.iter().any(of)
    };
    for (flow, said) in &by_us {
        let served = said.starts_with("{} web 3");
        ensure!(served != of_other_family(flow), "{flow}: {said}");
    }
    let listed = run(&agent, "services")?.exits(0)?;
    listed.says(&["hostport:web", "host:8480/tcp", "192.168.77.1:8481/tcp"])?;
    let explained = "explain --iface eth0 192.168.77.201:4000 192.168.77.1:8480/tcp";
    run(&agent, explained)?.says(&["hostport:web", "10.244.1.10"])?;
    Ok(())
}

fn a_host_port_goes_with_its_pod() -> Result<()> {
    let lab = lab()?;
    let _server = serve(lab.pod("web"))?;
    let directory = TempDir::new()?;
    manifest(&lab, &directory, "Running")?;
    let agent = lab.agent("node1").manifests(directory.path()).start()?;
    let outside = lab.external("outside");
    reaches(outside, "192.168.77.1:8480", "connect --count 3", &["web"])?;
    manifest(&lab, &directory, "Succeeded")?;
    eventually(|| refused(outside, "192.168.77.1:8480", "connect"))?;
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    ensure!(status["findings"] == json!([]), "{status:#}");
    Ok(())
}

/// One port for three pods, by `hostIP` and protocol, as in Kubernetes' conformance test "HostPort validates that there
/// is no conflict between pods with same hostPort but different hostIP and protocol".
fn a_host_port_on_loopback_is_for_the_nodes_own_sockets() -> Result<()> {
    const PORT: u16 = 54_323;
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "first", "10.244.1.10")
        .pod("node1", "second", "10.244.1.11")
        .pod("node1", "third", "10.244.1.12")
        .vm("node1", "vm", "10.244.1.20")
        .external("outside")
        .build()?;
    let (node, outside) = (lab.node("node1"), lab.external("outside"));
    let names = ["first", "second", "third"];
    let servers = names.map(|name| serve(lab.pod(name)));
    let _servers = servers.into_iter().collect::<Result<Vec<_>>>()?;
    let directory = TempDir::new()?;
    let pod = |name: &str, ports: Vec<serde_json::Value>| -> Result<()> {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": "default" },
            "spec": { "nodeName": "node1", "containers": [{ "name": name, "ports": ports }] },
            "status": { "podIPs": lab.pod(name).addresses().map(|ip| json!({ "ip": ip })) },
        });
        let file = directory.path().join(format!("{name}.json"));
        Ok(std::fs::write(file, serde_json::to_vec(&pod)?)?)
    };
    let port = |ip: &str, protocol: &str, container: u16| json!({ "hostPort": PORT, "hostIP": ip, "protocol": protocol, "containerPort": container });
    let (node4, node6) = (node.ipv4().to_string(), node.ipv6().to_string());
    pod(
        "first",
        vec![
            port("127.0.0.1", "TCP", TCP),
            port("::1", "TCP", TCP),
            port("127.0.0.1", "UDP", UDP),
        ],
    )?;
    pod(
        "second",
        vec![port(&node4, "TCP", TCP), port(&node6, "TCP", TCP)],
    )?;
    pod("third", vec![port(&node4, "UDP", UDP)])?;
    let agent = lab.agent("node1").manifests(directory.path());
    let agent = agent.args(["--pod-cidr", "10.244.0.0/16"]).start()?;

    let loopback = format!("127.0.0.1:{PORT}");
    let own = [format!("{node4}:{PORT}"), format!("[{node6}]:{PORT}")];
    reaches(node, &loopback, "connect --count 3", &["first"])?;
    reaches(
        node,
        &format!("[::1]:{PORT}"),
        "connect --count 3",
        &["first"],
    )?;
    reaches(node, &loopback, "udp --count 3", &["first"])?;
    reaches(node, &loopback, "udp --count 3 --unconnected", &["first"])?;
    for from in [
        node,
        outside,
        lab.pod("vm"),
        lab.pod("second"),
        lab.pod("first"),
    ] {
        for to in &own {
            reaches(from, to, "connect --count 3", &["second"])?;
        }
        reaches(from, &own[0], "udp --count 3", &["third"])?;
    }
    // Another address of loopback is not the requested one, and a pod's loopback is its own.
    refused(node, &format!("127.0.0.2:{PORT}"), "connect")?;
    for from in [lab.pod("second"), lab.pod("vm"), outside] {
        refused(from, &loopback, "connect")?;
        refused(from, &format!("[::1]:{PORT}"), "connect")?;
    }
    // A packet to it, from a neighbour that the node would take it from.
    node.sysctl("ipv4/conf/all/route_localnet", "1")?;
    outside.sysctl("ipv4/conf/all/route_localnet", "1")?;
    outside.ip("addr del 127.0.0.1/8 dev lo")?;
    outside.ip(&format!(
        "route add 127.0.0.1/32 via {node4} src {}",
        outside.ipv4()
    ))?;
    let report = ask(outside, &loopback, "connect --timeout-ms 500")?;
    ensure!(report.answered == 0, "{report:?}");
    let explained = format!(
        "explain --iface eth0 {}:4000 {loopback}/tcp",
        outside.ipv4()
    );
    run(&agent, &explained)?.says(&["left alone"])?;
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    ensure!(status["findings"] == json!([]), "{status:#}");
    Ok(())
}

/// A pod takes the cloud's metadata address, another pod's and a service's by its `hostIP`. It gets none of them, and
/// gets an address of the node for as long as the node has it.
fn a_host_port_is_at_no_address_but_the_nodes() -> Result<()> {
    const METADATA: &str = "169.254.169.254";
    const METADATA6: &str = "fd00:ec2::254";
    const FLOATING: [&str; 2] = ["192.0.2.50", "2001:db8::50"];
    const VIPS: [&str; 2] = ["10.96.0.1", "fd00:96::1"];
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "thief", "10.244.1.10")
        .pod("node1", "victim", "10.244.1.11")
        .pod("node1", "client", "10.244.1.12")
        .build()?;
    let (node, victim) = (lab.node("node1"), lab.pod("victim"));
    let _servers = [serve(lab.pod("thief"))?, serve(victim)?];
    let victims = victim.addresses().map(|ip| ip.to_string());
    let port = |ip: &&str| json!({ "hostPort": TCP, "hostIP": ip, "containerPort": TCP });
    let absent = [[METADATA, METADATA6], VIPS, FLOATING];
    let taken = [absent.as_flattened(), &[&*victims[0], &*victims[1]]].concat();
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "thief", "namespace": "default" },
        "spec": { "nodeName": "node1", "containers": [{ "ports": taken.iter().map(port).collect::<Vec<_>>() }] },
        "status": { "podIPs": lab.pod("thief").addresses().map(|ip| json!({ "ip": ip })) },
    });
    let directory = TempDir::new()?;
    std::fs::write(directory.path().join("pod.json"), serde_json::to_vec(&pod)?)?;
    let agent = lab.agent("node1").manifests(directory.path());
    let agent = agent.args(["--pod-cidr", "10.244.0.0/16"]).start()?;

    let at = |ip: &str| {
        if ip.contains(':') {
            format!("[{ip}]:{TCP}")
        } else {
            format!("{ip}:{TCP}")
        }
    };
    for from in [node, lab.pod("client")] {
        for ip in absent.as_flattened() {
            let report = ask(from, &at(ip), "connect --timeout-ms 300")?;
            ensure!(report.answered == 0, "{} at {ip}: {report:?}", from.name());
        }
        for ip in &victims {
            reaches(from, &at(ip), "connect --count 3", &["victim"])?;
        }
    }
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    let said = status["findings"].to_string();
    for ip in &taken {
        ensure!(
            said.contains(&format!("hostIP {ip} is not served")),
            "{said}"
        );
    }

    for (ip, bits) in [(FLOATING[0], 32), (FLOATING[1], 128)] {
        node.ip(&format!("addr add {ip}/{bits} dev lo"))?;
        eventually(|| reaches(node, &at(ip), "connect", &["thief"]).map(drop))?;
        let status = run(&agent, "status -o json")?.exits(0)?.json()?;
        let said = status["findings"].to_string();
        ensure!(!said.contains(ip) && said.contains(METADATA), "{said}");
        node.ip(&format!("addr del {ip}/{bits} dev lo"))?;
        eventually(|| {
            let report = ask(node, &at(ip), "connect --timeout-ms 300")?;
            ensure!(report.answered == 0, "{ip}: {report:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// New connections go to the pod, as with portmap, and `status` names the process that gets none.
fn a_port_that_a_process_of_the_node_has_is_served_with_a_warning() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "web", "10.244.1.10")
        .pod("node1", "client", "10.244.1.12")
        .build()?;
    let node = lab.node("node1");
    let _servers = [serve(lab.pod("web"))?, serve(node)?];
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "nodeName": "node1", "containers": [{ "ports": [
            { "hostPort": TCP, "containerPort": TCP },
            { "hostPort": 31234, "containerPort": TCP },
        ]}]},
        "status": { "podIPs": lab.pod("web").addresses().map(|ip| json!({ "ip": ip })) },
    });
    let directory = TempDir::new()?;
    std::fs::write(directory.path().join("pod.json"), serde_json::to_vec(&pod)?)?;
    let agent = lab.agent("node1").manifests(directory.path());
    let agent = agent.args(["--pod-cidr", "10.244.0.0/16"]).start()?;
    let to = format!("{}:{TCP}", node.ipv4());
    reaches(lab.pod("client"), &to, "connect --count 3", &["web"])?;
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    let said = status["findings"].to_string();
    let words = [
        "probe (pid ",
        &format!("port {TCP}/tcp"),
        &format!("*:{TCP}/tcp"),
    ];
    ensure!(words.iter().all(|word| said.contains(word)), "{said}");
    ensure!(!said.contains("31234") && !said.contains("/udp"), "{said}");
    Ok(())
}

/// The agent is asked at 15021 and 10256, whether it lives or not.
fn no_pod_answers_the_agents_own_probe() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "thief", "10.244.1.10")
        .external("outside")
        .build()?;
    let node = lab.node("node1");
    let _server = serve(lab.pod("thief"))?;
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "thief", "namespace": "default" },
        "spec": { "nodeName": "node1", "containers": [{ "ports": [
            { "hostPort": 15021, "hostIP": "127.0.0.1", "containerPort": TCP },
            { "hostPort": 10256, "containerPort": TCP },
            { "hostPort": 8481, "containerPort": TCP },
        ]}]},
        "status": { "podIPs": lab.pod("thief").addresses().map(|ip| json!({ "ip": ip })) },
    });
    let directory = TempDir::new()?;
    std::fs::write(directory.path().join("pod.json"), serde_json::to_vec(&pod)?)?;
    let agent = lab.agent("node1").manifests(directory.path()).start()?;
    let own = node.ipv4();
    for (from, to) in [
        (node, "127.0.0.1:15021".to_owned()),
        (node, "127.0.0.1:10256".to_owned()),
        (lab.external("outside"), format!("{own}:10256")),
    ] {
        let report = ask(from, &to, "connect --timeout-ms 500")?;
        ensure!(report.endpoints.is_empty(), "{to}: {report:?}");
    }
    reaches(node, &format!("{own}:8481"), "connect", &["thief"])?;
    let status = run(&agent, "status -o json")?.exits(0)?.json()?;
    let said = status["findings"].to_string();
    ensure!(
        said.contains("hostPort 15021 is not served")
            && said.contains("hostPort 10256 is not served"),
        "{said}"
    );
    Ok(())
}
