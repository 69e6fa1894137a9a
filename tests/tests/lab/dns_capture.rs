//! DNS queries of captured workloads: answered on the node, in the name of the resolver that was asked, and never lost
//! to an agent that is not there.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::report::LookupReport;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    cluster::eventually,
    dns_world::{OUTSIDE, SERVICE, World},
};

scenarios! {
    Dataplane:
    queries_are_answered_in_the_name_of_the_resolver,
    what_is_excluded_is_answered_by_its_resolver,
    no_pod_and_no_policy_is_got_around_by_queries,
    every_pods_queries_are_answered_and_nothing_else_is_captured,
    a_machines_queries_are_captured_by_its_packets,
    no_service_takes_the_agents_way_to_a_resolver,
    no_query_waits_for_an_agent_that_is_not_there,
    no_query_waits_for_an_agent_that_hangs,
    a_resolver_of_the_node_on_loopback_is_named,
    a_new_entrys_name_is_answered_when_the_tables_have_it,
}

fn queries_are_answered_in_the_name_of_the_resolver() -> Result<()> {
    let world = World::start(&json!({}), |text| text)?;
    let before = world.captured()?;
    let mut asked = 0;
    for resolver in ["10.96.0.53", "fd00:96::53"] {
        for (question, wanted) in [
            ("web.shop.svc.cluster.local. A", "10.96.0.10"),
            ("+tcp web.shop.svc.cluster.local. AAAA", "fd00:96::10"),
            ("db.corp.example. A", "192.0.2.90"),
            ("+tcp db.corp.example. A", "192.0.2.90"),
        ] {
            world.dig(resolver, question, wanted)?;
            asked += 1;
        }
    }
    // Of connected and of unconnected sockets.
    for sockets in ["connected", "unconnected"] {
        for (to, name) in [
            ("10.96.0.53:53", SERVICE),
            ("10.96.0.53:53", OUTSIDE),
            ("[fd00:96::53]:53", SERVICE),
        ] {
            let probe = world.app().probe("dns");
            let probe = probe.args(["--to", to, "--name", name, "--count", "20"]);
            let probe = probe.args(["--sockets", sockets]).stdout_piped();
            let mut process = probe.spawn()?;
            process.wait_for_line()?;
            let report: LookupReport = process.wait_json()?;
            ensure!(
                report.answered == 20 && report.errors.is_empty(),
                "{sockets} to {to}: {report:?}"
            );
            asked += 20;
        }
    }
    // Exactly these: queries of the agent itself to the service are not among them.
    let captured = world.captured()? - before;
    ensure!(captured == asked, "{captured} captured of {asked} queries");
    // The C library, by the pod's search list.
    for (name, addr) in [
        ("web", "10.96.0.10"),
        ("api.other", "10.96.0.11"),
        ("db.corp.example", "192.0.2.90"),
    ] {
        let found = world.getent(name)?;
        ensure!(found.contains(addr), "{name}: {found}");
    }
    ensure!(world.captured()? > captured + before, "not captured");
    for (to, verdict, reason) in [
        ("10.96.0.53:53/udp", "captured", "captured-dns"),
        ("10.96.0.53:53", "captured", "captured-dns"),
        ("10.244.1.11:53/udp", "left-alone", "not-service"),
    ] {
        let explain = world
            .agent
            .dataplane(["explain", "shop/app", to, "-o", "json"]);
        let told: Value = explain.json()?;
        ensure!(
            told["verdict"] == verdict && told["reason"] == reason,
            "{to}: {told}"
        );
    }
    // By a name: as the pod finds it, from the cache for names that only resolvers know.
    for (to, verdict, steps) in [
        (
            "web:80",
            "refused",
            &["from Service shop/web", "10.96.0.10"][..],
        ),
        (
            "api.other:80",
            "refused",
            &["from Service other/api", "10.96.0.11"],
        ),
        (
            "db.corp.example:443",
            "direct",
            &["from the cache", "192.0.2.90"],
        ),
        (
            // In the order of the pod's search list.
            "nothing.shop.svc.cluster.local.:80",
            "no-address",
            &["the agent asks 10.96.0.53:53"],
        ),
        (
            "www.example.com.:443/udp",
            "no-address",
            &["the agent asks 10.96.0.53:53"],
        ),
        (
            "nothing.other.svc.cluster.local.:80",
            "no-address",
            &["it does not exist"],
        ),
    ] {
        let explain = world
            .agent
            .dataplane(["explain", "shop/app", to, "-o", "json"]);
        let told: Value = explain.json()?;
        let text = told["steps"].to_string();
        ensure!(
            told["verdict"] == verdict && steps.iter().all(|step| text.contains(step)),
            "{to}: {told}"
        );
    }
    let status = world.agent.dataplane(["status", "-o", "json"]).output()?;
    let status: Value = serde_json::from_slice(&status.stdout)?;
    let dns = &status["agent"]["dns"];
    let count = |field: &str| dns[field].as_u64().unwrap_or_default();
    ensure!(
        count("workloads") == 1
            && count("queries") >= asked
            && count("local") > 0
            && count("cached") > 0,
        "{dns}"
    );
    // Queries are shown as they are answered.
    let monitor = world
        .agent
        .dataplane(["monitor", "--hook", "dns", "--count", "2", "-o", "json"]);
    let mut monitor = monitor.stdout_piped().spawn()?;
    eventually(|| {
        world.dig("10.96.0.53", "web.shop.svc.cluster.local. A", "10.96.0.10")?;
        world.dig("10.96.0.53", "+tcp db.corp.example. A", "192.0.2.90")?;
        ensure!(monitor.try_wait()?.is_some(), "nothing is shown yet");
        Ok(())
    })?;
    let text = monitor.wait()?;
    ensure!(text.lines().count() == 2, "{text}");
    for line in text.lines() {
        let query: Value = serde_json::from_str(line)?;
        ensure!(
            query["client"] == "shop/app" && query["code"] == "No Error",
            "{text}"
        );
    }
    let of_another = world
        .agent
        .dataplane(["explain", "10.244.1.11", "web.shop.svc.cluster.local:80"])
        .output()?;
    let text = String::from_utf8_lossy(&of_another.stderr).into_owned();
    ensure!(
        !of_another.status.success() && text.contains("does not answer the DNS queries"),
        "{text}"
    );
    // Others of the node's go where they went.
    let other = world.lab.pod("upstream").command("dig");
    let other = other.args(["@10.96.0.53", "+short", SERVICE]).run()?;
    ensure!(other.trim().is_empty(), "another pod's: {other}");
    Ok(())
}

/// Checks that the resolver itself answers, which does not know the service.
fn is_left_alone(world: &World, user: Option<u32>) -> Result<()> {
    let before = world.captured()?;
    for transport in ["+notcp", "+tcp"] {
        let mut dig = world.app().command("dig").args(["@10.96.0.53", transport]);
        if let Some(user) = user {
            dig = dig.user(user);
        }
        let text = dig.args(["+tries=1", "+time=4", SERVICE]).run()?;
        ensure!(text.contains("status: NXDOMAIN"), "{transport}: {text}");
    }
    ensure!(world.captured()? == before, "captured");
    Ok(())
}

fn what_is_excluded_is_answered_by_its_resolver() -> Result<()> {
    for rules in [
        json!({ "dns": false }),
        json!({ "excludeOutboundPorts": [53] }),
        json!({ "excludeOutboundIPRanges": ["10.96.0.53/32"] }),
    ] {
        let world = World::start(&rules, |text| text)?;
        is_left_alone(&world, None).with_context(|| format!("{rules}"))?;
    }
    let world = World::start(&json!({ "excludeUIDs": [1500] }), |text| text)?;
    is_left_alone(&world, Some(1500))?;
    world.dig("10.96.0.53", &format!("{SERVICE} A"), "10.96.0.10")?;
    // A server that is not one of the pod's resolvers.
    let other = world.told(&format!("@10.244.1.11 {SERVICE}"))?;
    ensure!(other.contains("status: NXDOMAIN"), "{other}");
    drop(world);
    let annotated = |text: String| {
        let with =
            "name: app, namespace: shop, annotations: {ambient.istio.io/dns-capture: 'false'}";
        text.replace("name: app, namespace: shop", with)
    };
    is_left_alone(&World::start(&json!({}), annotated)?, None)
}

/// A pod that does not want its queries to be captured.
const OTHER: &str = "---
apiVersion: v1
kind: Pod
metadata: {name: other, namespace: shop, annotations: {ambient.istio.io/dns-capture: 'false'}}
spec: {nodeName: node1}
status: {podIP: 10.244.1.12, podIPs: [{ip: 10.244.1.12}]}
";

/// `capture: all`, without a mesh and with a pod that asks for one.
fn every_pods_queries_are_answered_and_nothing_else_is_captured() -> Result<()> {
    let with = "name: app, namespace: shop, labels: {istio.io/dataplane-mode: ambient}";
    let app = |text: String| text.replace("name: app, namespace: shop", with) + OTHER;
    let dns = json!({ "capture": "all", "destinations": "any" });
    let world = World::start_as(None, dns, app, "", None)?;
    let question = format!("{SERVICE} A");
    eventually(|| world.dig("10.96.0.53", &question, "10.96.0.10"))?;
    // To any destination, and also by TCP.
    for to in ["10.244.1.11", "192.0.2.1", "fd00:10:244:1::b"] {
        world.dig(to, &question, "10.96.0.10")?;
        world.dig(to, &format!("+tcp {question}"), "10.96.0.10")?;
    }
    world.dig("192.0.2.1", "db.corp.example. A", "192.0.2.90")?;
    let asks = |pod: &str, to: &str| {
        let dig = world.lab.pod(pod).command("dig");
        let dig = dig.args([to, "+short", "+tries=1", "+time=4", SERVICE]);
        Ok::<_, anyhow::Error>(dig.run()?.trim().to_owned())
    };
    // The pods of the cluster's DNS, and a pod with the annotation, are not captured.
    for (pod, to, wanted) in [
        ("upstream", "@10.96.0.53", ""),
        ("upstream", "@10.244.1.11", ""),
        ("other", "@10.96.0.53", ""),
    ] {
        let found = asks(pod, to)?;
        ensure!(found == wanted, "{pod} {to}: {found:?}");
    }
    for own in ["@127.0.0.1", "@10.244.1.8", "@0.0.0.0"] {
        let answer = asks("app", own);
        ensure!(answer.is_err(), "nobody listens at {own}: {answer:?}");
    }
    // Connections are not captured.
    for (to, protocol) in [("10.244.1.12:80", "tcp"), ("10.244.1.12:5353", "udp")] {
        let to = format!("{to}/{protocol}");
        let explain = world
            .agent
            .dataplane(["explain", "shop/app", &to, "-o", "json"]);
        let told: Value = explain.json()?;
        ensure!(told["reason"] == "not-service", "{to}: {told}");
    }
    for reason in [Reason::Captured, Reason::ProxyDown, Reason::Direct] {
        let count = world.verdicts(reason)?;
        ensure!(count == 0, "{count} of {}", reason.word());
    }
    let status = world.agent.dataplane(["status", "-o", "json"]).output()?;
    let status: Value = serde_json::from_slice(&status.stdout)?;
    ensure!(
        status["agent"]["dns"]["workloads"] == 1 && status["mesh"] == json!([]),
        "{status}"
    );
    // Without the agent, everybody asks whom they meant.
    drop(world.agent);
    let dig = world
        .lab
        .pod("app")
        .command("dig")
        .args(["@10.244.1.11", SERVICE]);
    let text = dig.run()?;
    ensure!(text.contains("status: NXDOMAIN"), "{text}");
    Ok(())
}

fn a_machines_queries_are_captured_by_its_packets() -> Result<()> {
    let both = |text: String| {
        let addresses = "{podIP: 10.244.1.8, podIPs: [{ip: 10.244.1.8}, {ip: 'fd00:10:244:1::8'}]}";
        text.replace("{podIP: 10.244.1.8}", addresses)
    };
    let mut world = World::start(&json!({ "capturedBy": "packets" }), both)?;
    let question = format!("{SERVICE} A");
    let all_answered = |world: &World| {
        for resolver in ["10.96.0.53", "fd00:96::53"] {
            world.dig(resolver, &question, "10.96.0.10")?;
            world.dig(resolver, &format!("+tcp {question}"), "10.96.0.10")?;
            world.dig(resolver, "db.corp.example. A", "192.0.2.90")?;
            world.dig(resolver, "+tcp db.corp.example. A", "192.0.2.90")?;
        }
        Ok(())
    };
    eventually(|| world.dig("10.96.0.53", &question, "10.96.0.10"))?;
    let before = world.captured()?;
    all_answered(&world)?;
    let captured = world.captured()? - before;
    ensure!(captured == 8, "{captured} captured of 8 queries");
    // As in a flood of SYNs: the listening socket remembers none.
    let cookies = |value: &str| {
        let text = format!("echo {value} > /proc/sys/net/ipv4/tcp_syncookies");
        let node = world.lab.node("node1").command("sh");
        node.args(["-c", &text]).run()
    };
    cookies("2")?;
    world.dig("10.96.0.53", &format!("+tcp {question}"), "10.96.0.10")?;
    world.dig("fd00:96::53", &format!("+tcp {question}"), "10.96.0.10")?;
    cookies("1")?;
    world.all_answered("10.96.0.53:53", "connected")?;
    world.all_answered("[fd00:96::53]:53", "unconnected")?;
    // Queries to another server, and queries of the node itself, are not captured.
    let other = world.told(&format!("@10.244.1.11 {SERVICE}"))?;
    ensure!(other.contains("status: NXDOMAIN"), "{other}");
    let of_node = world.lab.node("node1").command("dig");
    let of_node = of_node.args(["@10.96.0.53", "+tries=1", SERVICE]).run()?;
    ensure!(of_node.contains("status: NXDOMAIN"), "{of_node}");
    for (to, reason) in [
        ("10.96.0.53:53/udp", "captured-dns"),
        ("10.244.1.11:53/udp", "not-service"),
    ] {
        let explain = world
            .agent
            .dataplane(["explain", "10.244.1.8", to, "-o", "json"]);
        let told: Value = explain.json()?;
        ensure!(told["reason"] == reason, "{to}: {told}");
    }
    // The next agent gets the sockets; without an agent, the resolver answers at once.
    let replaced = world.agent.replace()?;
    all_answered(&world)?;
    replaced.wait()?;
    world.agent.kill();
    for transport in ["+notcp", "+tcp"] {
        let told = world.told(&format!("@10.96.0.53 {transport} {SERVICE}"))?;
        ensure!(told.contains("status: NXDOMAIN"), "{told}");
    }
    world.agent.start()?;
    eventually(|| all_answered(&world))
}

/// A pod's `dnsConfig` does not choose where the node sends queries, and its `egress: deny` does not end at the agent.
fn no_pod_and_no_policy_is_got_around_by_queries() -> Result<()> {
    let own = |text: String| {
        let spec = "{nodeName: node1, dnsPolicy: None, dnsConfig: {nameservers: [10.244.1.11]}}";
        text.replacen("{nodeName: node1}", spec, 1)
    };
    let world = World::start(&json!({}), own)?;
    is_left_alone(&world, None)?;
    let told = world.told(&format!("@10.244.1.11 {SERVICE}"))?;
    ensure!(told.contains("status: NXDOMAIN"), "{told}");
    drop(world);
    // The resolvers of the node, which the policy does not let the pod ask.
    let of_node = |text: String| {
        text.replacen(
            "{nodeName: node1}",
            "{nodeName: node1, dnsPolicy: Default}",
            1,
        )
        .replace(
            "metadata: {name: upstream, namespace: kube-system",
            "metadata: {name: other, namespace: other",
        )
        .replace(
            "podIP: 10.244.1.11, podIPs: [{ip: 10.244.1.11}, {ip: 'fd00:10:244:1::b'}]",
            "podIP: 10.244.7.7",
        )
        .replace("{addresses: [10.244.1.11]}", "{addresses: [10.244.7.7]}")
    };
    for destinations in ["resolvers", "any"] {
        let mesh = json!({ "rules": { "egress": "deny", "captured": true } });
        let dns = json!({ "capture": "mesh", "destinations": destinations });
        let world = World::start_as(Some(&mesh), dns, of_node, "", None)?;
        for to in ["10.244.1.11", "192.0.2.1"] {
            for how in ["", "+tcp "] {
                let refused = world.told(&format!("@{to} {how}{SERVICE}"));
                ensure!(
                    refused.as_ref().is_err(),
                    "{destinations}, {how}: {to} answered though egress is denied: {refused:?}"
                );
            }
        }
        ensure!(world.captured()? == 0, "captured");
    }
    Ok(())
}

/// Returns how many of the queries failed, and how many of those that were sent after a time.
fn failures(report: &LookupReport, after_ns: u64) -> (usize, usize) {
    let late = report.failures.iter().filter(|of| of.at_ns > after_ns);
    (report.failures.len(), late.count())
}

fn now_ns() -> u64 {
    let now = nix::time::ClockId::CLOCK_MONOTONIC.now();
    let now = now.map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or_default()
}

fn no_query_waits_for_an_agent_that_is_not_there() -> Result<()> {
    let mut world = World::start(&json!({}), |text| text)?;
    let rest = Duration::from_millis(700);
    // Killed, and started again.
    let kinds = ["connected", "unconnected"];
    let loads = kinds.map(|kind| world.look_up(OUTSIDE, &["--sockets", kind]));
    thread::sleep(rest);
    world.agent.kill();
    let dead = now_ns();
    thread::sleep(rest);
    world.agent.start()?;
    eventually(|| world.dig("10.96.0.53", &format!("{SERVICE} A"), "10.96.0.10"))?;
    thread::sleep(rest);
    for (load, kind) in loads.into_iter().zip(kinds) {
        let mut load = load?;
        load.close_stdin();
        let report: LookupReport = load.wait_json()?;
        let (all, late) = failures(&report, dead);
        println!(
            "{kind}: {} queries, {all} in flight when the agent was killed are lost; p50 {} us, slowest {} us",
            report.asked,
            report.took_ns.p50 / 1000,
            report.took_ns.max / 1000
        );
        ensure!(
            late == 0 && all < 20 && report.answered > 300,
            "{kind}: {late} sent after {dead} failed: {report:?}"
        );
    }
    // Replaced three times, once by an agent of another layout, then ended and started again.
    let loads = kinds.map(|kind| world.look_up(OUTSIDE, &["--sockets", kind]));
    let mut replaced = Vec::new();
    for round in 0..3 {
        thread::sleep(rest);
        if round == 2 {
            world.agent.change_layout(LAYOUT, LAYOUT - 1)?;
        }
        replaced.push(world.agent.replace()?);
    }
    thread::sleep(rest);
    for process in replaced {
        process.wait().context("an agent that was replaced")?;
    }
    world.agent.stop()?;
    thread::sleep(rest);
    world.agent.start()?;
    thread::sleep(rest);
    for (load, kind) in loads.into_iter().zip(kinds) {
        let mut load = load?;
        load.close_stdin();
        let report: LookupReport = load.wait_json()?;
        println!(
            "{kind}: {} queries through hand-overs and a restart, slowest {} us",
            report.asked,
            report.took_ns.max / 1000
        );
        ensure!(
            report.failures.len() <= 1 && report.answered > 500,
            "{kind}: {report:?}"
        );
    }
    world.dig("10.96.0.53", &format!("{SERVICE} A"), "10.96.0.10")
}

/// The agent's sockets exist, and no thread reads from them.
fn no_query_waits_for_an_agent_that_hangs() -> Result<()> {
    /// The kernel's lease, the threads' period, and a busy machine.
    const LEASE: Duration = Duration::from_secs(3);
    let world = World::start(&json!({}), |text| text)?;
    let rest = Duration::from_millis(700);
    let pid = Pid::from_raw(world.agent.id().cast_signed());
    let kinds = ["connected", "unconnected"];
    // As long as glibc waits: on a busy machine some answers take 2 s, and a lost query gets none.
    let loads =
        kinds.map(|kind| world.look_up(OUTSIDE, &["--sockets", kind, "--timeout-ms", "5000"]));
    thread::sleep(rest);
    kill(pid, Signal::SIGSTOP)?;
    let bypassed = now_ns() + u64::try_from(LEASE.as_nanos())?;
    thread::sleep(LEASE);
    // The agent is still stopped, so an answer has not waited for it.
    for kind in kinds {
        world.all_answered("10.96.0.53:53", kind)?;
    }
    let status = world.agent.dataplane(["status"]).output()?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        status.contains("queries of captured workloads go to their resolvers")
            && status.contains("DNS server has been silent for"),
        "{status}"
    );
    let explain =
        world
            .agent
            .dataplane(["explain", "10.244.1.8", "10.96.0.53:53/udp", "-o", "json"]);
    let told: Value = explain.json()?;
    let reason = &told["capture"][0]["reason"];
    ensure!(*reason == "dns-bypassed", "{told}");
    ensure!(world.verdicts(Reason::DnsBypassed)? > 400, "not bypassed");
    kill(pid, Signal::SIGCONT)?;
    eventually(|| world.dig("10.96.0.53", &format!("{SERVICE} A"), "10.96.0.10"))?;
    thread::sleep(rest);
    for (load, kind) in loads.into_iter().zip(kinds) {
        let mut load = load?;
        load.close_stdin();
        let report: LookupReport = load.wait_json()?;
        let (all, late) = failures(&report, bypassed);
        println!(
            "{kind}: {} queries, {all} lost before the bypass",
            report.asked
        );
        ensure!(
            late == 0 && all < 600 && report.answered > 800,
            "{kind}: {late} sent after {bypassed} failed: {report:?}"
        );
    }
    Ok(())
}

/// A Service whose external IP is the node's resolver, and whose endpoint is a pod that does not answer.
const THIEF: &str = "---
apiVersion: v1
kind: Service
metadata: {name: thief, namespace: other}
spec:
  clusterIPs: [10.96.0.66]
  externalIPs: [10.244.1.11]
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: thief, namespace: other, labels: {kubernetes.io/service-name: thief}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.12]}]
ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
";

/// This holds for the node's resolver and for the cluster's, which is a service itself.
fn no_service_takes_the_agents_way_to_a_resolver() -> Result<()> {
    for (policy, resolver) in [("Default", "10.244.1.11"), ("ClusterFirst", "10.96.0.53")] {
        let world = World::start(&json!({}), |text| {
            let spec = format!("{{nodeName: node1, dnsPolicy: {policy}}}");
            text.replacen("{nodeName: node1}", &spec, 1) + THIEF
        })?;
        // Other hosts on the node get the service's answer.
        let other = world.lab.node("node1").command("dig");
        let other = other.args(["@10.244.1.11", "+tries=1", "+time=2", OUTSIDE]);
        ensure!(!other.output()?.status.success(), "not taken from others");
        for transport in ["", "+tcp "] {
            let question = format!("{transport}{OUTSIDE} A");
            world
                .dig(resolver, &question, "192.0.2.90")
                .context(policy)?;
        }
        // Names that are in no cache, by TCP from the agent on.
        world.dig(resolver, &format!("{OUTSIDE} A"), "192.0.2.90")?;
    }
    Ok(())
}

/// systemd-resolved's address: in a pod it is the pod's own, so the pod's queries cannot be captured.
fn a_resolver_of_the_node_on_loopback_is_named() -> Result<()> {
    let world = World::start(&json!({}), |text| {
        let spec = "{nodeName: node1, dnsPolicy: Default}";
        text.replacen("{nodeName: node1}", spec, 1)
    })?;
    let status = || -> Result<String> {
        let status = world.agent.dataplane(["status"]).output()?;
        Ok(String::from_utf8_lossy(&status.stdout).into_owned())
    };
    let named = "the node's resolver 127.0.0.53 is on loopback";
    let before = status()?;
    ensure!(!before.contains(named), "{before}");
    fs::write(world.resolv_conf(), "nameserver 127.0.0.53\n")?;
    eventually(|| {
        let said = status()?;
        ensure!(
            said.contains(named) && said.contains("dns.resolvConf"),
            "{said}"
        );
        Ok(())
    })
}

/// An entry whose host has this address, and a service that differs each time.
fn entry(round: usize) -> String {
    format!(
        "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {{name: n{round}, namespace: default}}
spec:
  hosts: [n{round}.entry.example]
  addresses: [198.51.100.{round}]
  resolution: STATIC
  ports: [{{number: 80, name: http, protocol: TCP}}]
  endpoints: [{{address: 10.244.1.12}}]
---
apiVersion: v1
kind: Service
metadata: {{name: restless, namespace: default}}
spec: {{clusterIP: 10.96.7.{round}, ports: [{{port: 80}}]}}
"
    )
}

/// Also while other services change all the time: the thread that attaches rests after each change. Each name is asked for
/// once.
fn a_new_entrys_name_is_answered_when_the_tables_have_it() -> Result<()> {
    let world = World::start(&json!({}), |text| text)?;
    let base = fs::read_to_string(world.manifests())?;
    let next = world.directory().join("next");
    for round in 1..10 {
        fs::write(&next, format!("{base}{}", entry(round)))?;
        fs::rename(&next, world.manifests())?;
        let address = format!("198.51.100.{round}");
        eventually(|| {
            let services = world.agent.dataplane(["services"]).output()?;
            let services = String::from_utf8_lossy(&services.stdout).into_owned();
            ensure!(
                services.contains(&format!("{address}:80/tcp")),
                "{services}"
            );
            Ok(())
        })?;
        world.dig("10.96.0.53", &format!("n{round}.entry.example A"), &address)?;
    }
    Ok(())
}
