//! A connection is translated at most once, and judged by the destination of its first packet, even if other services
//! claim the address of its endpoint.

mod claims;

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Protocol, Reason};
use dataplane_tests::{Host, Process, emulated, patience, report::LoadReport};
use kernel::trial::Flips;
use serde_json::{Value, json};

use self::claims::whatever_two_tenants_claim_egress_stays_where_it_may_go;
use super::{World, packets};
use crate::{
    cluster::{UDP, ask, reaches, refused, serve},
    explain::packet_reason,
    manifest::{Config, Manifests, Service},
};

scenarios! {
    Dataplane:
    what_the_proxy_has_routed_goes_there,
    no_service_at_a_pods_own_address_opens_egress,
    no_second_service_opens_egress,
    an_exclusion_exempts_where_the_first_packet_goes,
    an_exclusion_exempts_where_a_machines_first_packet_goes,
    no_flip_of_a_slice_opens_egress,
    no_flip_of_a_slice_opens_egress_to_a_machine,
    nobody_answers_whom_he_feigns,
    a_machine_does_not_reach_the_node_by_two_services,
    whatever_two_tenants_claim_egress_stays_where_it_may_go,
}

/// A port without a listener.
const FREE: u16 = 4000;

/// A service with these VIPs, by TCP and UDP, for these endpoints.
fn service(name: &str, number: u8, endpoint: &Host) -> Service {
    Service::new(
        name,
        &[&format!("10.96.0.{number}"), &format!("fd00:96::{number}")],
    )
    .port("tcp", 80, 7)
    .port("udp", 53, UDP)
    .endpoints(&[endpoint])
}

/// A tenant's service that claims a host's addresses, at the ports of its servers and at one without a listener.
fn thief(name: &str, number: u8, of: &Host, endpoint: &Host) -> Service {
    let addresses = of.addresses().map(|ip| ip.to_string());
    service(name, number, endpoint)
        .in_namespace("thief")
        .set("externalIPs", addresses.to_vec())
        .port("tcp-own", 7, 7)
        .port("tcp-free", FREE, 7)
        .port("udp-free", FREE, UDP)
}

fn at(host: &Host, port: u16) -> [String; 2] {
    host.addresses()
        .map(|ip| SocketAddr::from((ip, port)).to_string())
}

/// A world with a host that is no Pod.
fn with_outside() -> Result<(World, Host, Process)> {
    let world = World::with(|lab| {
        lab.pod("node1", "outside", "10.244.1.9")
            .pod("node1", "app", "10.244.1.8")
    })?
    .by_packets();
    let outside = world.lab.pod("outside").clone();
    let server = serve(&outside)?;
    Ok((world, outside, server))
}

/// Outbound, to a service whose endpoint's address is another service's external IP; and inbound, to an application
/// whose address is a service's. An older service does not get another's cluster IP.
fn what_the_proxy_has_routed_goes_there() -> Result<()> {
    for keeps in [true, false] {
        let mut world = World::new()?.by_packets();
        let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
        let far = world.lab.pod("far").clone();
        world.manifests = Manifests::new(&[
            service("near", 20, &one),
            service("away", 21, &far),
            service("app", 22, &app),
            thief("of-one", 30, &one, world.lab.pod("two")),
            thief("of-far", 31, &far, world.lab.pod("two")),
            thief("of-app", 32, &app, world.lab.pod("two")),
            // An older one's claim to a cluster IP of others, which is weaker.
            service("of-near", 33, world.lab.pod("two"))
                .in_namespace("thief")
                .set("externalIPs", vec!["10.96.0.20", "fd00:96::20"])
                .created("2001-01-01T00:00:00Z"),
        ])?;
        world.capture(json!({ "keepSource": keeps }), json!({ "mode": "proxy" }))?;
        for (number, by) in [(20, "one"), (21, "far")] {
            for to in [
                format!("10.96.0.{number}:80"),
                format!("[fd00:96::{number}]:80"),
            ] {
                let (_, counted) = world.counted(Reason::Captured, || {
                    reaches(&app, &to, "connect --count 5", &[by])
                })?;
                ensure!(counted == 5, "{to}: {counted}");
            }
        }
        for to in ["10.96.0.22:80", "[fd00:96::22]:80"] {
            let (_, counted) = world.counted(Reason::CapturedInbound, || {
                reaches(&one, to, "connect --count 5", &["app"])
            })?;
            ensure!(counted == 5, "{to}: {counted}");
        }
        // A client that dials the address itself gets the service that has it, as without a proxy.
        reaches(&app, "10.244.1.5:7", "connect --count 5", &["two"])?;
    }
    Ok(())
}

/// A pod's connection to its own address stays in the pod, also if a service has the address.
fn no_service_at_a_pods_own_address_opens_egress() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let (mut world, outside, _server) = with_outside()?;
        let app = world.app().clone();
        world.manifests = Manifests::new(&[thief("evil", 30, &app, &outside)])?;
        world.capture(json!({}), json!({ "egress": "deny", "mode": mode }))?;
        for to in at(&app, 7) {
            reaches(&app, &to, "connect --count 5", &["app"]).context(mode)?;
        }
        for to in at(&app, FREE) {
            for how in ["connect --count 3", "udp"] {
                refused(&app, &to, how).context(mode)?;
            }
            // The kernel reports an error only to connected sockets.
            let report = ask(&app, &to, "udp --unconnected --timeout-ms 300")?;
            ensure!(report.answered == 0, "{mode}: {report:?}");
        }
        for to in at(&app, UDP) {
            for how in ["udp", "udp --unconnected"] {
                reaches(&app, &to, how, &["app"]).context(mode)?;
            }
        }
    }
    Ok(())
}

/// A service of Pods, and another whose external IP is such a Pod's address and whose endpoint is no Pod.
fn no_second_service_opens_egress() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let (mut world, outside, _server) = with_outside()?;
        let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
        let far = world.lab.pod("far").clone();
        world.manifests = Manifests::new(&[
            service("near", 20, &one),
            service("away", 21, &far),
            thief("of-one", 30, &one, &outside),
            thief("of-far", 31, &far, &outside),
        ])?;
        world.capture(json!({}), json!({ "egress": "deny", "mode": mode }))?;
        for (number, by) in [(20, "one"), (21, "far")] {
            for vip in [format!("10.96.0.{number}"), format!("[fd00:96::{number}]")] {
                reaches(&app, &format!("{vip}:80"), "connect --count 5", &[by]).context(mode)?;
                for how in ["udp --count 5", "udp --count 5 --unconnected"] {
                    reaches(&app, &format!("{vip}:53"), how, &[by]).context(mode)?;
                }
            }
        }
        for to in [at(&one, 7), at(&far, 7), at(&one, FREE)].as_flattened() {
            refused(&app, to, "connect --count 3").context(mode)?;
        }
        for to in [at(&one, UDP), at(&far, UDP)].as_flattened() {
            for how in ["udp", "udp --unconnected"] {
                refused(&app, to, how).context(mode)?;
            }
        }
    }
    Ok(())
}

/// Services at excluded ports and addresses: a tenant's, whose endpoint is no Pod; one of Pods; and one whose endpoint
/// is excluded, too.
fn excluded(one: &Host, outside: &Host) -> [Service; 3] {
    let service = |name, number, endpoint, [tcp, udp]: [u16; 2]| {
        service(name, number, endpoint)
            .in_namespace("tenant")
            .port("tcp-excluded", FREE, tcp)
            .port("udp-excluded", FREE, udp)
    };
    [
        service("opens", 40, outside, [7, UDP]),
        service("pods", 41, one, [7, UDP]),
        service("meant", 42, outside, [FREE, FREE]),
    ]
}

/// Excluded are a port, and the addresses of the first two services.
fn exclusions(mode: &str) -> Value {
    let ranges = [40, 41].map(|n| [format!("10.96.0.{n}/32"), format!("fd00:96::{n}/128")]);
    json!({
        "egress": "deny",
        "mode": mode,
        "excludeOutboundPorts": [FREE],
        "excludeOutboundIPRanges": ranges.as_flattened(),
    })
}

fn serve_free(outside: &Host) -> Result<Process> {
    let [v4, v6] = at(outside, FREE);
    Ok(outside.serve(&["--tcp", &v4, "--tcp", &v6, "--udp", &v4, "--udp", &v6])?)
}

/// Asks the services of [`excluded`] as a pod under `egress: deny`, by TCP and by these ways of UDP: only excluded endpoints
/// answer.
fn exempts_endpoints(world: &World, outside: &Host, udp: &[&str]) -> Result<()> {
    let app = world.app();
    for family in ["10.96.0.", "fd00:96::"] {
        let at = |number: u8, port: u16| -> Result<String> {
            let ip: IpAddr = format!("{family}{number}").parse()?;
            Ok(SocketAddr::from((ip, port)).to_string())
        };
        let asked = [(80, "connect"), (FREE, "connect")].into_iter();
        let datagrams = udp.iter().flat_map(|how| [(53, *how), (FREE, *how)]);
        for (port, how) in asked.chain(datagrams) {
            let report = ask(app, &at(40, port)?, &format!("{how} --timeout-ms 500"))?;
            ensure!(report.answered == 0, "{how} {port}: {report:?}");
            reaches(app, &at(41, port)?, how, &["one"])?;
        }
        for how in ["connect"].iter().chain(udp) {
            reaches(app, &at(42, FREE)?, how, &["outside"])?;
        }
    }
    for to in at(outside, FREE) {
        for how in ["connect"].iter().chain(udp) {
            reaches(app, &to, how, &["outside"])?;
        }
    }
    ensure!(world.verdicts(Reason::EgressDenied)? >= 4, "not counted");
    for (number, port, verdict, reason) in [
        (40, 80, "refused", Reason::EgressDenied),
        (40, FREE, "refused", Reason::EgressDenied),
        (41, 80, "translated", Reason::Translated),
        (42, FREE, "translated", Reason::Translated),
    ] {
        let to = format!("10.96.0.{number}:{port}");
        for to in [to.clone(), format!("{to}/udp")].iter().take(1 + udp.len()) {
            let to = to.replace(":80/", ":53/");
            let told = explain(world, &to)?;
            ensure!(
                told["verdict"] == verdict && told["reason"] == reason.word(),
                "{to}: {told:#}"
            );
            let from = SocketAddr::from((app.ipv4(), FREE));
            let of_packet = packet_reason(world.agent()?, "veth-app", from, &to, 0)?;
            ensure!(of_packet == reason.word(), "{to}: {of_packet} for a packet");
        }
    }
    Ok(())
}

fn explain(world: &World, to: &str) -> Result<Value> {
    let explain = world
        .agent()?
        .dataplane(["explain", "default/app", to, "-o", "json"]);
    Ok(serde_json::from_str(&explain.run()?)?)
}

/// The configuration by which services are served for the pod `app` by packets only.
const BY_PACKETS: &str = "packets: {packetsOnly: [veth-app]}";

/// An exclusion exempts a connection from the egress policy if it excludes the destination of the first packet.
fn an_exclusion_exempts_where_the_first_packet_goes() -> Result<()> {
    for (mode, keys) in [("kernel", ""), ("proxy", ""), ("kernel", BY_PACKETS)] {
        let (mut world, outside, _server) = with_outside()?;
        let _free = serve_free(&outside)?;
        let one = world.lab.pod("one").clone();
        world.manifests = Manifests::new(&excluded(&one, &outside))?;
        let config = super::mesh(json!({}), exclusions(mode));
        let keys = Config::new(keys)?;
        world.agent_with_args(&config, &[], &keys.arguments())?;
        exempts_endpoints(&world, &outside, &["udp", "udp --unconnected"])
            .with_context(|| format!("{mode} {keys:?}"))?;
    }
    Ok(())
}

/// An exclusion exempts the connections of a virtual machine likewise.
fn an_exclusion_exempts_where_a_machines_first_packet_goes() -> Result<()> {
    for mode in ["kernel", "proxy"] {
        let mut world = packets::world_with(|lab| lab.pod("node1", "outside", "10.244.1.9"))?;
        let outside = world.lab.pod("outside").clone();
        let (_server, _free) = (serve(&outside)?, serve_free(&outside)?);
        let one = world.lab.pod("one").clone();
        world.manifests = Manifests::new(&excluded(&one, &outside))?;
        packets::capture(&mut world, exclusions(mode), &[])?;
        exempts_endpoints(&world, &outside, &[]).context(mode)?;
    }
    Ok(())
}

/// How often the endpoints change and change back: `DATAPLANE_FLIPS=1000000` for the long form.
fn flips() -> u32 {
    let said = std::env::var("DATAPLANE_FLIPS").ok();
    said.and_then(|said| said.parse().ok())
        .unwrap_or(if emulated() { 20_000 } else { 50_000 })
}

/// Two services that exchange their endpoints, in turn.
fn flipping(one: &Host, outside: &Host) -> [Service; 2] {
    [service("flip", 20, one), service("flop", 21, outside)]
}

/// The endpoint changes between a Pod and a host that is none, while the workload connects and sends all the time.
fn no_flip_of_a_slice_opens_egress() -> Result<()> {
    let (mut world, outside, _server) = with_outside()?;
    world.manifests = Manifests::new(&flipping(world.lab.pod("one"), &outside))?;
    let how = [("tcp", 80), ("connected", 53), ("unconnected", 53)];
    // Rules that name users, and services by packets only: the program that draws sees no user.
    let config = super::mesh(
        json!({}),
        json!({ "egress": "deny", "mode": "kernel", "excludeUIDs": [super::UID] }),
    );
    let by_packets = Config::new(BY_PACKETS)?;
    world.agent_with_args(&config, &[], &by_packets.arguments())?;
    flip(&world, &how).context("by packets, with users")?;
    world.capture(json!({}), json!({ "egress": "deny", "mode": "kernel" }))?;
    flip(&world, &how)
}

/// With the packets of a virtual machine.
fn no_flip_of_a_slice_opens_egress_to_a_machine() -> Result<()> {
    let mut world = packets::world_with(|lab| lab.pod("node1", "outside", "10.244.1.9"))?;
    let outside = world.lab.pod("outside").clone();
    let _server = serve(&outside)?;
    world.manifests = Manifests::new(&flipping(world.lab.pod("one"), &outside))?;
    packets::capture(
        &mut world,
        json!({ "egress": "deny", "mode": "kernel" }),
        &[],
    )?;
    flip(&world, &[("tcp", 80)])
}

/// Flips the services' endpoints while clients ask by these ways and ports, each by both families. The test writes the words of
/// the pools itself, as the agent does: the agent waits for files that change all the time.
fn flip(world: &World, how: &[(&str, u16)]) -> Result<()> {
    let app = world.app().clone();
    let mut clients = Vec::new();
    let mut pairs = Vec::new();
    for &(by, port) in how {
        for vips in [["10.96.0.20", "10.96.0.21"], ["fd00:96::20", "fd00:96::21"]] {
            let mut pair = Vec::new();
            for vip in vips {
                pair.push(SocketAddr::from((vip.parse::<IpAddr>()?, port)));
            }
            let to = pair[0].to_string();
            let protocol = if by == "tcp" {
                Protocol::TCP
            } else {
                Protocol::UDP
            };
            if !pairs.contains(&([pair[0], pair[1]], protocol)) {
                pairs.push(([pair[0], pair[1]], protocol));
            }
            let client = app.probe("storm").args(["--by", by, "--to", &to]);
            let mut client = client.stdin_piped().stdout_piped().spawn()?;
            client.wait_for_line()?;
            clients.push((format!("{by} {to}"), client));
        }
    }
    let mut flips = Flips::open(world.agent()?.bpffs(), &pairs)?;
    // There and back, so that each service has its own endpoints in the end.
    let mut left = self::flips();
    // Long enough for each client to ask on a busy machine.
    let until = Instant::now() + patience(Duration::from_secs(3));
    while left > 0 || Instant::now() < until {
        left = left.saturating_sub(1);
        flips.flip()?;
        flips.flip()?;
    }
    reaches(&app, "10.96.0.20:80", "connect", &["one"])?;
    std::thread::sleep(patience(Duration::from_secs(1)));
    for (what, mut client) in clients {
        client.close_stdin();
        let report: LoadReport = client.wait_json()?;
        println!("{what}: {report:?}");
        ensure!(
            report.endpoints.keys().eq(["one"]),
            "{what}: {:?}",
            report.endpoints
        );
    }
    ensure!(world.verdicts(Reason::EgressDenied)? > 0, "never outside");
    Ok(())
}

/// "Has sent it a datagram" holds for others only.
fn nobody_answers_whom_he_feigns() -> Result<()> {
    let (mut world, outside, _server) = with_outside()?;
    let app = world.app().clone();
    world.capture(json!({}), json!({ "egress": "deny", "mode": "kernel" }))?;
    let [_, source] = at(&outside, UDP);
    for own in [app.ipv6().to_string(), "::1".to_owned()] {
        for connected in [&[][..], &["--connected"]] {
            let feign = app
                .probe("feign")
                .args(["--source", &source, "--own", &own]);
            let said = feign.args(connected).output()?;
            let text = String::from_utf8_lossy(&said.stderr);
            ensure!(
                !said.status.success() && text.contains("cannot feign"),
                "{own}, {connected:?}: {said:?}"
            );
        }
    }
    ensure!(world.verdicts(Reason::SourceForged)? >= 4, "not counted");
    // It does speak for itself.
    let [_, own] = at(&app, 4001);
    let feign = app.probe("feign").args(["--source", &own]);
    feign.args(["--own", &app.ipv6().to_string()]).run()?;
    Ok(())
}

/// The endpoint of the first is the external IP of the second, whose endpoint is the node.
fn a_machine_does_not_reach_the_node_by_two_services() -> Result<()> {
    for mode in ["proxy", "kernel"] {
        let mut world = packets::world_with(|lab| lab)?;
        let node = world.lab.node("node1").clone();
        let _server = serve(&node)?;
        let ips = [IpAddr::from([203, 0, 113, 7]), "2001:db8::7".parse()?];
        let second =
            service("second", 31, &node).set("externalIPs", ips.map(|ip| ip.to_string()).to_vec());
        let mut first = Service::new("first", &["10.96.0.30", "fd00:96::30"])
            .port("tcp", 80, 80)
            .port("udp", 53, 53);
        for ip in ips {
            first = first.endpoint_at(ip, "node1");
        }
        world.manifests = Manifests::new(&[first, second])?;
        packets::capture(&mut world, json!({ "mode": mode }), &[])?;
        let app = world.app().clone();
        for vip in ["10.96.0.30", "[fd00:96::30]"] {
            for (port, how) in [(80, "connect"), (53, "udp"), (53, "udp --unconnected")] {
                let to = format!("{vip}:{port}");
                let report = ask(&app, &to, &format!("{how} --timeout-ms 1000"))?;
                ensure!(
                    report.answered == 0,
                    "{mode}, {how} {to}: {:?}",
                    report.endpoints
                );
            }
        }
    }
    Ok(())
}
