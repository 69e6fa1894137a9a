//! Other proxies, and ours in their place: behind Open Service Mesh's iptables rules and captured by the agent they see
//! the same connections, and so do client and servers.

use std::fs;

use anyhow::{Result, ensure};
use dataplane_common::Reason;
use dataplane_tests::report::Report;
use serde_json::{Value, json};

use super::{World, foreign, mesh, relay::Relay};
use crate::{
    cluster::{ask, eventually, fails, peer_is, reaches, refused},
    daemonset,
    outcome::run,
};

scenarios! {
    Dataplane:
    haproxy_sees_what_it_sees_behind_open_service_meshs_rules,
    haproxy_takes_inbound_connections,
    a_listening_proxys_socket_takes_capabilities,
    nginx_takes_both_directions_as_haproxy_does,
    our_proxy_sees_what_it_sees_behind_open_service_meshs_rules,
}

/// The chains that Open Service Mesh's init container makes, as far as they matter here.
pub const OSM: &str = "\
*nat
:PROXY_INBOUND - [0:0]
:PROXY_IN_REDIRECT - [0:0]
:PROXY_OUTPUT - [0:0]
:PROXY_REDIRECT - [0:0]
-A PROXY_IN_REDIRECT -p tcp -j REDIRECT --to-port 15003
-A PREROUTING -p tcp -j PROXY_INBOUND
-A PROXY_INBOUND -p tcp --dport 15010 -j RETURN
-A PROXY_INBOUND -p tcp --dport 15901 -j RETURN
-A PROXY_INBOUND -p tcp -m multiport --dports 80 -j RETURN
-A PROXY_INBOUND -p tcp -j PROXY_IN_REDIRECT
-A PROXY_REDIRECT -p tcp -j REDIRECT --to-port 15001
-A OUTPUT -p tcp -j PROXY_OUTPUT
-A PROXY_OUTPUT -d 10.244.1.6/32 -j RETURN
-A PROXY_OUTPUT -p tcp -m multiport --dports 80 -j RETURN
-A PROXY_OUTPUT -o lo ! -d 127.0.0.1/32 -m owner --uid-owner 1500 -j PROXY_IN_REDIRECT
-A PROXY_OUTPUT -o lo -m owner ! --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -d 127.0.0.1/32 -j RETURN
-A PROXY_OUTPUT -j PROXY_REDIRECT
COMMIT
";

/// Open Service Mesh's rules as the agent's configuration.
fn osm() -> Value {
    json!({
        "excludeOutboundIPRanges": ["10.244.1.6/32", "fd00:10:244:1::6/128"],
        "excludeOutboundPorts": [80],
        "excludeInboundPorts": [80],
    })
}

/// The view of client, proxy and servers.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    client: Vec<(u64, Vec<String>, Vec<String>)>,
    proxy: Vec<String>,
}

fn seen(report: &Report) -> (u64, Vec<String>, Vec<String>) {
    let servers = report.endpoints.iter().map(|(name, endpoint)| {
        let sources: Vec<_> = endpoint.sources.keys().collect();
        format!("{name} saw {sources:?}")
    });
    let peers = report.peers.iter().map(ToString::to_string);
    (report.answered, servers.collect(), peers.collect())
}

/// Connections of `app` that are captured, that are excluded by range, port and loopback.
fn outbound(world: &World, proxy: &Relay) -> Result<Seen> {
    proxy.forget()?;
    let app = world.app();
    let mut client = Vec::new();
    for (to, how) in [
        ("10.244.1.5:7", "connect --count 3"),
        ("10.244.2.5:7", "connect --count 2"),
        ("10.244.1.5:7", "connect --v4-mapped --count 2"),
        ("10.244.1.6:7", "connect --count 2"),
        ("10.244.2.5:80", "http --count 2"),
    ] {
        client.push(seen(&ask(app, to, how)?));
    }
    let mut saw = proxy.saw("outbound", 7)?;
    saw.sort();
    Ok(Seen { client, proxy: saw })
}

/// The connections once with iptables and once with the agent.
fn behind_both(world: &mut World, proxy: &Relay) -> Result<()> {
    let rules = world.state.path().join("rules");
    fs::write(&rules, OSM)?;
    let load = format!("iptables-legacy-restore < {}", rules.display());
    world.app().command("sh").args(["-c", &load]).run()?;
    let theirs = outbound(world, proxy)?;
    world
        .app()
        .command("iptables-legacy")
        .args(["-t", "nat", "-F"])
        .run()?;
    world.capture(foreign(), osm())?;
    let ours = outbound(world, proxy)?;
    ensure!(
        ours == theirs,
        "not the same:\nwith iptables {theirs:#?}\nwith ours {ours:#?}"
    );
    Ok(())
}

/// Connections to `app` that are captured, and one that is excluded.
fn inbound(world: &World, proxy: &Relay) -> Result<()> {
    let (one, far) = (world.lab.pod("one"), world.lab.pod("far"));
    for (client, to) in [
        (one, "10.244.1.8:7"),
        (far, "10.244.1.8:7"),
        (one, "[fd00:10:244:1::8]:7"),
    ] {
        reaches(client, to, "connect", &["app"])?;
    }
    reaches(one, "10.244.1.8:80", "http", &["app"])?;
    let saw = proxy.saw("inbound", 3)?;
    ensure!(
        saw == ["10.244.1.8:7", "10.244.1.8:7", "fd00:10:244:1::8:7"],
        "{saw:?}"
    );
    Ok(())
}

fn haproxy_sees_what_it_sees_behind_open_service_meshs_rules() -> Result<()> {
    let mut world = World::new()?;
    let proxy = Relay::haproxy(&world)?;
    behind_both(&mut world, &proxy)?;
    // And what iptables' rules for IPv4 do not show.
    let six = "[fd00:10:244:1::5]:7";
    peer_is(
        &reaches(world.app(), six, "connect --count 3", &["one"])?,
        six,
    )?;
    ensure!(
        world.verdicts(Reason::Captured)? == 10,
        "not 10 were captured"
    );
    fails(world.app(), "127.0.0.1:15001", "connect", "ECONNREFUSED")?;
    ensure!(
        world.verdicts(Reason::Recursive)? == 1,
        "not refused as recursive"
    );
    // Excluded by its port, but still a service.
    reaches(world.app(), "10.96.0.10:80", "connect", &["far"])?;
    Ok(())
}

fn haproxy_takes_inbound_connections() -> Result<()> {
    let mut world = World::new()?;
    let one = world.lab.pod("one").clone();
    // It listens before the pod is captured: the agent adopts its socket.
    let proxy = Relay::haproxy(&world)?;
    world.capture(foreign(), osm())?;
    inbound(&world, &proxy)?;
    // No server listens at the port: HAProxy accepts, and cannot connect.
    let report = ask(&one, "10.244.1.8:9", "connect")?;
    ensure!(report.answered == 0, "{report:?}");
    // It is killed: connections are refused, and do not reach the application.
    drop(proxy);
    refused(&one, "10.244.1.8:7", "connect")?;
    reaches(&one, "10.244.1.8:80", "http", &["app"])?;
    // It is started: the programs notice that it listens.
    let proxy = Relay::haproxy(&world)?;
    eventually(|| reaches(&one, "10.244.1.8:7", "connect", &["app"]).map(|_| ()))?;
    drop(proxy);
    Ok(())
}

/// With the DaemonSet's capabilities, and those that a component of kustomize's adds, and with no fewer: nginx is
/// another user's process. (HAProxy begins as root, whose descriptors may be listed.)
fn a_listening_proxys_socket_takes_capabilities() -> Result<()> {
    let world = World::new()?;
    let one = world.lab.pod("one");
    let _proxy = Relay::nginx(&world)?;
    let mesh = mesh(foreign(), osm()).to_string();
    let mut capabilities = daemonset::capabilities()?;
    let prepare = |capabilities: &[String]| {
        let agent = world.lab.agent("node1").in_the_nodes_cgroup();
        let agent = agent.manifests(world.manifests.path());
        agent
            .args(["--mesh", &mesh])
            .capabilities(capabilities)
            .prepare()
    };
    for more in daemonset::for_foreign_proxies()? {
        let mut agent = prepare(&capabilities)?;
        agent.launch()?;
        let words = [
            "error: mesh: default/app: ",
            "port 15003: its socket cannot be taken: ",
            "component `foreign-proxy`",
        ];
        eventually(|| run(&agent, "status")?.exits(1)?.says(&words).map(drop))?;
        eventually(|| refused(one, "10.244.1.8:7", "connect"))?;
        capabilities.push(more);
    }
    let mut agent = prepare(&capabilities)?;
    agent.start()?;
    eventually(|| reaches(one, "10.244.1.8:7", "connect", &["app"]).map(drop))
}

/// It takes the socket's own address for the destination, as behind `TPROXY`; iptables has nothing by
/// which it could take outbound connections.
fn nginx_takes_both_directions_as_haproxy_does() -> Result<()> {
    let mut world = World::new()?;
    let proxy = Relay::haproxy(&world)?;
    world.capture(foreign(), osm())?;
    let theirs = outbound(&world, &proxy)?;
    drop(proxy);
    // The programs notice that another proxy listens.
    let proxy = Relay::nginx(&world)?;
    let nginxs = outbound(&world, &proxy)?;
    ensure!(
        nginxs == theirs,
        "not the same:\nHAProxy {theirs:#?}\nnginx {nginxs:#?}"
    );
    let six = "[fd00:10:244:1::5]:7";
    proxy.forget()?;
    peer_is(
        &reaches(world.app(), six, "connect --count 3", &["one"])?,
        six,
    )?;
    ensure!(
        proxy.saw("outbound", 3)? == ["fd00:10:244:1::5:7"; 3],
        "other destinations"
    );
    proxy.forget()?;
    inbound(&world, &proxy)
}

fn our_proxy_sees_what_it_sees_behind_open_service_meshs_rules() -> Result<()> {
    let mut world = World::new()?;
    let proxy = Relay::ours(&world)?;
    behind_both(&mut world, &proxy)?;
    proxy.forget()?;
    inbound(&world, &proxy)
}
