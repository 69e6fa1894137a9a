//! Tenants with every right in their own network namespace: the workload of a connection does not depend on settings
//! that they can change there.

use std::{
    fmt::Write as _,
    fs,
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Command, Host, Process, report::Report};
use serde_json::{Value, json};

use super::{
    World,
    explain::explain,
    list,
    many::number,
    pod_of,
    trouble::{LOOKS, disturb, free_files, status},
};
use crate::{
    cluster::{ask, eventually, reaches, refused},
    manifest::{Manifests, Service},
    metrics::Metrics,
};

scenarios! {
    Dataplane:
    another_tenants_address_on_lo_gets_nothing_of_its,
    a_pod_without_its_address_stays_captured,
    a_pod_that_gives_its_interface_away_stays_captured,
    many_addresses_of_a_pod_slow_nobody,
    what_a_captured_pod_makes_for_itself_stays_closed,
    one_that_is_denied_and_not_found_stays_closed,
    cni_tells_of_a_pod_without_an_interface_of_its_own,
    source_ranges_are_for_the_workloads_own_addresses,
    no_file_left_releases_nobody,
}

/// An unknown host.
const STRANGER: &str = "192.0.2.1:80";
const STRANGER6: &str = "[2001:db8::1]:80";

/// A captured Pod of this host's name and addresses.
fn object(of: &Host, annotations: Value) -> Value {
    pod_of(of, "ambient", annotations)
}

/// Runs the agent with these pods.
fn with_pods(world: &mut World, pods: &[Value], config: &Value) -> Result<PathBuf> {
    let path = world.state.path().join("pods.yaml");
    fs::write(&path, list(pods).to_string())?;
    world.agent_with(config, std::slice::from_ref(&path))?;
    Ok(path)
}

fn denied() -> Value {
    json!({ "dataplane.io/egress": "deny" })
}

/// Has the agent look anew, and waits until it has.
fn looks(world: &World, number: u32) -> Result<()> {
    disturb(world, number)?;
    thread::sleep(LOOKS);
    Ok(())
}

/// A network namespace that a process of a pod has made, behind the pod's own.
struct Nested {
    process: Process,
    probe: PathBuf,
    of: Host,
}

impl Nested {
    /// With addresses 10.99.0.1 and 10.99.0.2 between them, fd99::1 and fd99::2.
    fn new(world: &World, of: &Host) -> Result<Self> {
        let process = of
            .command("unshare")
            .args(["--net", "sleep", "600"])
            .spawn()?;
        let nested = Self {
            process,
            probe: world.lab.programs().probe()?,
            of: of.clone(),
        };
        let own = fs::metadata(Path::new("/run/netns").join(of.netns()))?.ino();
        eventually(|| {
            let its = fs::metadata(nested.path())?.ino();
            let machine = fs::metadata("/proc/self/ns/net")?.ino();
            ensure!(its != own && its != machine, "it has none yet");
            Ok(())
        })?;
        of.ip(&format!(
            "link add inner type veth peer name outer netns {}",
            nested.process.id()
        ))?;
        of.ip("addr add 10.99.0.1/30 dev inner")?;
        of.ip("addr add fd99::1/64 dev inner nodad")?;
        of.ip("link set inner up")?;
        nested.ip("link set lo up")?;
        nested.ip("addr add 10.99.0.2/30 dev outer")?;
        nested.ip("addr add fd99::2/64 dev outer nodad")?;
        nested.ip("link set outer up")?;
        Ok(nested)
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.process.id())
    }

    fn command(&self, program: &str) -> Command {
        let net = format!("--net={}", self.path());
        self.of.command("nsenter").args([net.as_str(), program])
    }

    fn ip(&self, arguments: &str) -> Result<()> {
        let arguments = arguments.split_whitespace();
        Ok(self.command("ip").args(arguments).run().map(drop)?)
    }

    fn connects(&self, to: &str, how: &[&str]) -> Result<Report> {
        let probe = self.command(&self.probe.to_string_lossy());
        let probe = probe.args(["connect", "--timeout-ms", "1000", "--to", to]);
        Ok(probe.args(how).json()?)
    }

    /// Has it connect by the pod's address, and the pod pass it on.
    fn speaks_for(&self) -> Result<()> {
        let Self { of, .. } = self;
        let own = of.ipv4();
        of.sysctl("ipv4/ip_forward", "1")?;
        of.sysctl("ipv4/conf/eth0/proxy_arp", "1")?;
        of.ip(&format!("addr del {own}/32 dev eth0"))?;
        of.ip(&format!(
            "route add default via {} dev eth0 onlink",
            of.gateway4()
        ))?;
        of.ip(&format!("route add {own} dev inner"))?;
        self.ip(&format!("addr add {own}/32 dev outer"))?;
        self.ip(&format!("route add default via 10.99.0.1 src {own}"))?;
        let own = of.ipv6();
        of.sysctl("ipv6/conf/all/forwarding", "1")?;
        of.sysctl("ipv6/conf/eth0/proxy_ndp", "1")?;
        of.ip(&format!("neigh add proxy {own} dev eth0"))?;
        of.ip(&format!("addr del {own}/128 dev eth0"))?;
        let gateway = of.gateway6();
        of.ip(&format!(
            "route replace default via {gateway} dev eth0 onlink"
        ))?;
        of.ip(&format!("route add {own} dev inner"))?;
        self.ip(&format!("addr add {own}/128 dev outer nodad"))?;
        self.ip(&format!("route add default via fd99::1 src {own}"))
    }
}

/// The attacker's addresses on lo do not change who gets connections and whose rules apply. With a program of its own,
/// the attacker does not reach the other pod's proxy.
fn another_tenants_address_on_lo_gets_nothing_of_its() -> Result<()> {
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let two = world.lab.pod("two").clone();
    // In both orders: which namespace is looked at first is the machine's affair.
    for (victim, attacker) in [(&app, &one), (&one, &app)] {
        let pods = [object(victim, denied()), object(attacker, json!({}))];
        with_pods(&mut world, &pods, &json!({ "rules": { "mode": "proxy" } }))?;
        refused(victim, STRANGER, "connect")?;
        attacker.sysctl("ipv4/tcp_syncookies", "2")?;
        for (addr, bits) in [
            (victim.ipv4().to_string(), 32),
            (victim.ipv6().to_string(), 128),
        ] {
            attacker.ip(&format!("addr add {addr}/{bits} dev lo"))?;
        }
        looks(&world, victim.ipv4().octets()[3].into())?;
        let found = status(&world)?;
        ensure!(found["healthy"] == true, "{found:#}");
        // From behind the attacker, which has this address there.
        let nested = Nested::new(&world, attacker)?;
        nested.ip(&format!("route add {} via 10.99.0.1", victim.ipv4()))?;
        nested.ip(&format!("route add {} via fd99::1", victim.ipv6()))?;
        for (ip, stranger) in victim.addresses().into_iter().zip([STRANGER, STRANGER6]) {
            let to = SocketAddr::new(ip, 7).to_string();
            let (_, counted) = world.counted(Reason::CapturedInbound, || {
                reaches(&two, &to, "connect --count 20", &[victim.name()])
            })?;
            // With SYN cookies the kernel looks for the socket twice.
            ensure!(counted >= 20, "{to}: {counted} of 20 were captured");
            let ((), counted) = world.counted(Reason::EgressDenied, || {
                refused(victim, stranger, "connect")
            })?;
            ensure!(counted == 1, "{stranger}: {counted} were denied");
            let told = explain(&world, &ip.to_string(), stranger, &[])?;
            let whose = &told["capture"][0]["workload"];
            ensure!(*whose == format!("default/{}", victim.name()), "{told:#}");
            let (report, counted) = world.counted(Reason::CapturedInbound, || {
                nested.connects(&to, &["--count", "5"])
            })?;
            ensure!(
                report.answered == 0 && counted == 0,
                "{to}: the victim's proxy got {counted} connections: {report:?}"
            );
        }
        drop(nested);
        attacker.ip(&format!("addr del {}/32 dev lo", victim.ipv4()))?;
        attacker.ip(&format!("addr del {}/128 dev lo", victim.ipv6()))?;
    }
    Ok(())
}

fn a_pod_without_its_address_stays_captured() -> Result<()> {
    for guard in [false, true] {
        let mut world = World::new()?;
        let app = world.app().clone();
        let config = json!({ "guard": guard, "rules": { "mode": "proxy" } });
        with_pods(&mut world, &[object(&app, denied())], &config)?;
        refused(&app, STRANGER, "connect")?;
        let own = app.ipv4();
        app.ip(&format!("addr del {own}/32 dev eth0"))?;
        app.ip(&format!("addr del {}/128 dev eth0", app.ipv6()))?;
        app.ip(&format!("route add local {own} dev lo table local"))?;
        app.ip(&format!(
            "route add default via {} dev eth0 src {own} onlink",
            app.gateway4()
        ))?;
        looks(&world, 1)?;
        // It would reach it: `two` does.
        for to in ["10.244.1.5:7", STRANGER] {
            let ((), counted) =
                world.counted(Reason::EgressDenied, || refused(&app, to, "connect"))?;
            ensure!(counted == 1, "guard {guard}: {to}: {counted} were denied");
        }
        let log = world.agent()?.log();
        ensure!(!log.contains("released"), "guard {guard}: {log}");
        // Then with an agent that starts now.
        let agent = world.agent.as_mut().context("an agent")?;
        agent.kill();
        agent.start()?;
        refused(&app, "10.244.1.5:7", "connect")?;
    }
    Ok(())
}

/// By the node's links the pod is then where its interface is; and where its processes are it stays.
fn a_pod_that_gives_its_interface_away_stays_captured() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let config = json!({ "rules": { "mode": "proxy" } });
    with_pods(&mut world, &[object(&app, denied())], &config)?;
    refused(&app, STRANGER, "connect")?;
    let nested = Nested::new(&world, &app)?;
    let own = app.ipv4();
    let gateway = app.gateway4();
    app.ip(&format!("link set eth0 netns {}", nested.process.id()))?;
    nested.ip("link set eth0 up")?;
    nested.ip(&format!("route add default via {gateway} dev eth0 onlink"))?;
    nested.ip(&format!("route add {own} dev outer"))?;
    let forward =
        "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv4/conf/eth0/proxy_arp";
    nested.command("sh").args(["-c", forward]).run()?;
    app.ip(&format!("addr add {own}/32 dev inner"))?;
    app.ip(&format!("route add default via 10.99.0.2 src {own}"))?;
    for restarted in [false, true] {
        if restarted {
            let agent = world.agent.as_mut().context("an agent")?;
            agent.kill();
            agent.start()?;
        } else {
            looks(&world, 1)?;
        }
        let ((), counted) = world
            .counted(Reason::EgressDenied, || {
                refused(&app, "10.244.1.5:7", "connect")
            })
            .with_context(|| format!("restarted {restarted}"))?;
        ensure!(counted == 1, "restarted {restarted}: {counted} were denied");
        let report = nested.connects("10.244.1.5:7", &[])?;
        ensure!(report.answered == 0, "restarted {restarted}: {report:?}");
    }
    Ok(())
}

fn many_addresses_of_a_pod_slow_nobody() -> Result<()> {
    const EACH: u32 = 1000;
    let mut world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let interfaces = if dataplane_tests::emulated() { 3 } else { 66 };
    let config = json!({ "rules": { "mode": "proxy" } });
    let pods = [object(&app, json!({})), object(&one, json!({}))];
    let path = with_pods(&mut world, &pods, &config)?;
    // How long it takes until the rules of others have changed.
    let change = |world: &World, excluded: bool| -> Result<Duration> {
        let (rule, reason) = if excluded {
            (
                json!({ "traffic.sidecar.istio.io/excludeOutboundPorts": "7" }),
                Reason::ExcludedPort,
            )
        } else {
            (json!({}), Reason::Captured)
        };
        let all = list(&[object(&app, rule), object(&one, json!({}))]);
        let begin = Instant::now();
        fs::write(&path, all.to_string())?;
        eventually(|| {
            let (_, counted) = world.counted(reason, || {
                reaches(&app, "10.244.1.6:7", "connect", &["two"])
            })?;
            ensure!(counted == 1, "the rules are as before");
            Ok(())
        })?;
        Ok(begin.elapsed())
    };
    let before = change(&world, true)?;
    change(&world, false)?;
    let mut batch = String::new();
    for interface in 0..interfaces {
        let _ = writeln!(
            batch,
            "link add d{interface} up type veth peer name e{interface}"
        );
        for n in 0..EACH {
            let [_, a, b, c] = (interface * EACH + n).to_be_bytes();
            let _ = writeln!(batch, "addr add 172.{}.{b}.{c}/32 dev d{interface}", 16 + a);
        }
    }
    let file = world.state.path().join("batch");
    fs::write(&file, batch)?;
    one.command("ip").arg("-batch").arg(&file).run()?;
    looks(&world, 1)?;
    // As long as before on this machine. Other work may delay it, but not each time.
    let most = before * 3 + Duration::from_secs(1);
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= most) {
        ensure!(took.len() < 3, "it took {took:?}, and {before:?} before");
        if !took.is_empty() {
            change(&world, false)?;
        }
        took.push(change(&world, true)?);
    }
    let found = status(&world)?;
    ensure!(
        !found["findings"].to_string().contains("LOCALS"),
        "{found:#}"
    );
    Ok(())
}

/// A namespace of a pod that is not captured is let go, like the pod. Both stay as they are over a restart of the
/// agent.
fn what_a_captured_pod_makes_for_itself_stays_closed() -> Result<()> {
    let mut world = World::new()?;
    let (app, two) = (world.app().clone(), world.lab.pod("two").clone());
    let mut free = object(&two, json!({}));
    free["metadata"]["labels"]["istio.io/dataplane-mode"] = "none".into();
    let config = json!({ "guard": true, "rules": { "mode": "proxy" } });
    with_pods(&mut world, &[object(&app, denied()), free], &config)?;
    for (of, is_open) in [(&two, true), (&app, false)] {
        // A network namespace needs a process in it for as long as it is looked at.
        let _inside = of.command("sleep").arg("600").spawn()?;
        let nested = Nested::new(&world, of)?;
        nested.speaks_for()?;
        looks(&world, of.ipv4().octets()[3].into())?;
        for restarted in [false, true] {
            if restarted {
                let agent = world.agent.as_mut().context("an agent")?;
                agent.kill();
                agent.start()?;
            }
            stays(&world, &nested, is_open)
                .with_context(|| format!("{}, restarted: {restarted}", of.name()))?;
        }
    }
    Ok(())
}

/// Wants a network namespace that a pod has made to be let go, or to be refused all connections by the guard.
fn stays(world: &World, nested: &Nested, is_open: bool) -> Result<()> {
    const PEERS: [&str; 2] = ["10.244.1.5:7", "[fd00:10:244:1::5]:7"];
    if is_open {
        return eventually(|| {
            for to in PEERS {
                let report = nested.connects(to, &[])?;
                ensure!(report.answered == 1, "{to}: {report:?}");
            }
            Ok(())
        });
    }
    for to in PEERS {
        let ((), counted) = world.counted(Reason::Guarded, || {
            let report = nested.connects(to, &["--count", "3"])?;
            ensure!(report.answered == 0, "{to}: {report:?}");
            Ok(())
        })?;
        ensure!(counted == 3, "{to}: {counted} were refused by the guard");
    }
    eventually(|| {
        let found = status(world)?;
        let said = found["findings"].to_string();
        let process = format!("process {}", nested.process.id());
        ensure!(said.contains(&process), "{found:#}");
        ensure!(found["healthy"] == true, "{found:#}");
        Ok(())
    })
}

/// A program that first moves itself to a pod's cgroup, as the kubelet makes them.
fn in_pods_cgroup(of: &Host, program: &str, arguments: &[&str]) -> Command {
    let cgroup = of
        .cgroup()
        .join("kubepods/pod8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60/1");
    let script = "mkdir -p \"$0\" && echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
    let shell = of.command("sh").args(["-c", script]).arg(cgroup);
    shell.arg(program).args(arguments)
}

/// No route on the node leads to it, and it would reach others: its workload is unknown. Known pods may connect.
fn one_that_is_denied_and_not_found_stays_closed() -> Result<()> {
    let mut world = World::new()?;
    let (app, two) = (world.app().clone(), world.lab.pod("two").clone());
    let node = world.lab.node("node1").clone();
    let _inside = in_pods_cgroup(&app, "sleep", &["600"]).spawn()?;
    let probe = world.lab.programs().probe()?;
    let mut free = object(&two, json!({}));
    free["metadata"]["labels"]["istio.io/dataplane-mode"] = "none".into();
    // By a neighbour, as at a bridge.
    let [v4, v6] = app.addresses();
    node.ip(&format!("route del {v4}/32 dev veth-app"))?;
    node.ip(&format!("route del {v6}/128 dev veth-app"))?;
    node.ip(&format!("route add {v4}/32 via {v4} dev veth-app onlink"))?;
    let config = json!({ "rules": { "mode": "proxy" } });
    with_pods(&mut world, &[object(&app, denied()), free], &config)?;
    let connects = || -> Result<Report> {
        let arguments = ["connect", "--to", "10.244.1.5:7"];
        Ok(in_pods_cgroup(&app, &probe.to_string_lossy(), &arguments).json()?)
    };
    let (report, counted) = world.counted(Reason::Guarded, connects)?;
    ensure!(
        report.answered == 0 && counted == 1,
        "{counted}: {report:?}"
    );
    eventually(|| {
        let found = status(&world)?;
        let said = found["findings"].to_string();
        for word in ["default/app", "10.244.1.8", "egress: deny"] {
            ensure!(said.contains(word), "no {word} in {found:#}");
        }
        ensure!(found["healthy"] == true, "{found:#}");
        Ok(())
    })?;
    reaches(&two, "10.244.1.5:7", "connect --count 3", &["one"])?;
    reaches(
        world.lab.pod("one"),
        "10.244.1.6:7",
        "connect --count 3",
        &["two"],
    )?;
    // Found: as all are.
    node.ip(&format!(
        "route replace {v4}/32 dev veth-app src 10.244.1.1"
    ))?;
    looks(&world, 1)?;
    let (report, counted) = world.counted(Reason::EgressDenied, connects)?;
    ensure!(
        report.answered == 0 && counted == 1,
        "{counted}: {report:?}"
    );
    for from in ["one", "two"] {
        reaches(
            world.lab.pod(from),
            "10.244.2.5:7",
            "connect --count 3",
            &["far"],
        )?;
    }
    Ok(())
}

/// If the node's route does not lead to the pod's own interface, libcni's result says where the pod is. Another pod's
/// result does not count for it.
fn cni_tells_of_a_pod_without_an_interface_of_its_own() -> Result<()> {
    const UID: &str = "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";
    let mut world = World::new()?;
    let app = world.app().clone();
    let node = world.lab.node("node1").clone();
    let [v4, v6] = app.addresses();
    node.ip(&format!("route del {v6}/128 dev veth-app"))?;
    node.ip(&format!(
        "route replace {v4}/32 via {v4} dev veth-app onlink"
    ))?;
    let results = world.state.path().join("results");
    fs::create_dir(&results)?;
    let result = |uid: &str, netns: &str| {
        json!({
            "kind": "cniCacheV1",
            "networkName": "bridge",
            "cniArgs": [["K8S_POD_NAMESPACE", "default"], ["K8S_POD_NAME", "app"], ["K8S_POD_UID", uid]],
            "result": {
                "cniVersion": "1.0.0",
                "interfaces": [
                    { "name": "cni0" },
                    { "name": "eth0", "sandbox": format!("/var/run/netns/{netns}") },
                ],
                "ips": [{ "address": format!("{v4}/24"), "interface": 1 }],
            },
        })
    };
    let write = |name: &str, value: Value| fs::write(results.join(name), value.to_string());
    // Of an earlier pod with this address; and another's.
    let before = "7e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";
    write(
        "bridge-0-eth0",
        result(before, world.lab.pod("two").netns()),
    )?;
    write("bridge-1-eth0", result(UID, "cni-gone"))?;
    let mut object = object(&app, denied());
    object["metadata"]["uid"] = UID.into();
    let pods = world.state.path().join("pods.yaml");
    fs::write(&pods, list(&[object]).to_string())?;
    let mount = format!(
        "mkdir -p /var/lib/cni/results && mount --bind {} /var/lib/cni/results",
        results.display()
    );
    let config = json!({ "rules": { "mode": "proxy" } });
    let agent = world.lab.agent("node1").in_the_nodes_cgroup();
    let agent = agent.manifests(world.manifests.path()).manifests(&pods);
    let agent = agent.args(["--mesh", &config.to_string()]).mounts(&mount);
    world.agent = Some(agent.start()?);
    eventually(|| {
        let found = status(&world)?;
        let said = found["findings"].to_string();
        ensure!(said.contains("default/app: is not captured"), "{found:#}");
        Ok(())
    })?;
    write("bridge-2-eth0", result(UID, app.netns()))?;
    eventually(|| {
        let ((), counted) = world.counted(Reason::EgressDenied, || {
            refused(&app, "10.244.1.5:7", "connect")
        })?;
        ensure!(counted == 1, "it is not captured");
        Ok(())
    })?;
    let (_, counted) = world.counted(Reason::CapturedInbound, || {
        reaches(
            world.lab.pod("two"),
            "10.244.1.8:7",
            "connect --count 3",
            &["app"],
        )
    })?;
    ensure!(counted == 3, "{counted} of 3");
    Ok(())
}

/// At the proxy, source ranges apply to the workload's addresses that the node knows: an address that the workload adds
/// opens no service, and a service is not refused because the connection comes to the proxy by loopback.
fn source_ranges_are_for_the_workloads_own_addresses() -> Result<()> {
    let mut world = World::new()?;
    let app = world.app().clone();
    let far = world.lab.pod("far").clone();
    let ranged = |name: &str, ip: &str, range: &str| {
        let vip = ip.replace("203.0.113.", "10.96.1.");
        Service::new(name, &[&vip])
            .port("tcp", 80, 7)
            .load_balancer(ip)
            .set("loadBalancerSourceRanges", vec![range])
            .endpoints(&[&far])
    };
    world.manifests = Manifests::new(&[
        ranged("others", "203.0.113.10", "198.51.100.0/24"),
        ranged("loopback", "203.0.113.11", "127.0.0.0/8"),
        ranged("own", "203.0.113.12", "10.244.1.8/32"),
    ])?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    app.ip("addr add 198.51.100.7/32 dev lo")?;
    for (ip, how) in [
        ("203.0.113.10", "connect --local 198.51.100.7"),
        ("203.0.113.10", "connect"),
        ("203.0.113.11", "connect"),
        ("203.0.113.12", "connect"),
        ("203.0.113.12", "connect --local 198.51.100.7"),
        ("203.0.113.12", "connect --local 10.244.1.8"),
    ] {
        let to = format!("{ip}:80");
        if ip == "203.0.113.12" {
            reaches(&app, &to, how, &["far"])?;
        } else {
            let report = ask(&app, &to, how)?;
            ensure!(report.answered == 0, "{how} to {to}: {report:?}");
        }
    }
    Ok(())
}

/// As many connections as there can be, from outside to the metrics and from two pods through the proxy, while the agent
/// has to look anew, and a third pod comes: nothing is released, nothing opens, and the control side has its files.
fn no_file_left_releases_nobody() -> Result<()> {
    let (files, each) = if dataplane_tests::emulated() {
        (1000, 500)
    } else {
        (6000, 4000)
    };
    let files = number("DATAPLANE_AGENT_FILES", files)?;
    let to_metrics = number("DATAPLANE_METRICS_CONNECTIONS", each)?;
    let each = number("DATAPLANE_PROXY_CONNECTIONS", each)?;
    let mut world = World::new()?;
    let node = world.lab.node("node1").clone();
    let names = ["app", "one", "two"];
    let hosts: Vec<Host> = names
        .iter()
        .map(|name| world.lab.pod(name).clone())
        .collect();
    let path = world.state.path().join("pods.yaml");
    let write = |count: usize| {
        let pods = hosts[..count].iter().map(|host| object(host, json!({})));
        fs::write(&path, list(&pods.collect::<Vec<_>>()).to_string())
    };
    write(2)?;
    let config = json!({ "rules": { "mode": "proxy" }, "proxy": { "accessLog": "off" } });
    let agent = world.lab.agent("node1").in_the_nodes_cgroup();
    let agent = agent.open_files(files, files);
    let agent = agent.manifests(world.manifests.path()).manifests(&path);
    let agent = agent.args([
        "--mesh",
        &config.to_string(),
        "--metrics-addr",
        "0.0.0.0:15020",
    ]);
    world.agent = Some(agent.start()?);
    let flood = |from: &Host, to: &str, count: usize| -> Result<Process> {
        let keep = from.probe("keep").args(["--slow", "--to", to]);
        let keep = keep.args(["--count", &count.to_string()]);
        let mut flood = keep.stdin_piped().stdout_piped().spawn()?;
        flood.wait_for_line()?;
        Ok(flood)
    };
    let far = world.lab.pod("far").clone();
    let metrics = format!("{}:15020", node.ipv4());
    let mut floods = vec![flood(&far, &metrics, to_metrics)?];
    for host in &hosts[..2] {
        floods.push(flood(host, "10.244.2.5:7", each)?);
    }
    for number in 1..=3 {
        looks(&world, number)?;
        if number == 2 {
            write(3)?;
        }
    }
    // The third is captured although the others have all that they can have.
    eventually(|| {
        let (_, counted) = world.counted(Reason::Captured, || {
            reaches(&hosts[2], "10.244.2.5:7", "connect", &["far"])
        })?;
        ensure!(counted == 1, "it is not captured");
        Ok(())
    })?;
    let log = world.agent()?.log();
    ensure!(!log.contains("released"), "{log}");
    ensure!(!log.contains("Too many open files"), "{log}");
    drop(floods);
    // Then with none left.
    free_files(world.agent()?, Some(0))?;
    looks(&world, 4)?;
    free_files(world.agent()?, None)?;
    looks(&world, 5)?;
    let log = world.agent()?.log();
    ensure!(!log.contains("released"), "{log}");
    for host in &hosts {
        let (_, counted) = world.counted(Reason::Captured, || {
            reaches(host, "10.244.2.5:7", "connect", &["far"])
        })?;
        ensure!(counted == 1, "{} is not captured", host.name());
    }
    let scraped = Metrics::scrape(&node)?;
    let problems = scraped.sum("dataplane_mesh_workload_problem", &[]);
    ensure!(problems < 0.5, "{problems}");
    Ok(())
}
