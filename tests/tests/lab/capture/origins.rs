//! Table ORIGINS: its entries belong to connections that exist, and a workload that fills its share takes none of
//! others'.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use dataplane_common::Reason;
use dataplane_tests::report::{KeepReport, Report};
use nix::sys::socket::Backlog;
use serde_json::{Value, json};

use super::World;
use crate::cluster::{eventually, reaches};

scenarios! {
    Dataplane:
    a_mark_like_the_proxys_makes_no_entry,
    one_who_fills_his_share_of_origins_has_no_others,
    entries_of_sockets_that_are_gone_are_swept,
}

/// The mark of the proxy's sockets that connect from a client's address.
const MARK: u32 = 0x8000_3a9e;

type Tuple = [u8; 48];
type Origin = [u8; 20];

/// Opens the agent's table `ORIGINS`, for any layout of the agent.
fn table(world: &World) -> Result<HashMap<MapData, Tuple, Origin>> {
    let bpffs = world.agent()?.bpffs().to_owned();
    let layouts = fs::read_dir(bpffs)?.map(|entry| Ok(entry?.path().join("maps/ORIGINS")));
    let pins: Vec<PathBuf> = layouts.collect::<Result<_>>()?;
    let pin = pins.iter().find(|pin| pin.exists()).context("a pin")?;
    Ok(HashMap::try_from(Map::HashMap(MapData::from_pin(pin)?))?)
}

fn entries(world: &World) -> Result<usize> {
    Ok(table(world)?.keys().count())
}

/// By a process that is not captured, and by one that is: with CAP_NET_RAW, both may mark their sockets. An entry is
/// removed when its socket is closed, so the table is read while the sockets are open.
fn a_mark_like_the_proxys_makes_no_entry() -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "proxy" }))?;
    for (name, to) in [
        ("two", "10.244.1.5:7"),
        ("two", "[fd00:10:244:1::5]:7"),
        ("app", "10.244.1.6:7"),
        ("app", "[fd00:10:244:1::6]:7"),
    ] {
        let marked = world.lab.pod(name).probe("marked");
        let marked = marked.args(["--to", to, "--mark", &MARK.to_string(), "--count", "200"]);
        let mut marked = marked.stdin_piped().stdout_piped().spawn()?;
        let made = marked.wait_for_line()?;
        ensure!(made.trim() == "200", "{name}, {to}: {made}");
        let found = entries(&world)?;
        ensure!(found == 0, "{name}, {to}: {found} entries of 200 sockets");
        marked.close_stdin();
        marked.wait()?;
    }
    eventually(|| {
        let entries = entries(&world)?;
        ensure!(entries == 0, "{entries} entries are left");
        Ok(())
    })?;
    // Captured connections, and the proxy's own from the client's address, are as ever.
    let (app, one) = (world.app(), world.lab.pod("one"));
    reaches(app, "10.244.1.5:7", "connect --count 20", &["one"])?;
    reaches(one, "10.244.1.8:7", "connect --count 20", &["app"])?;
    ensure!(world.verdicts(Reason::OriginLost)? == 0, "some were lost");
    let mut held = one.hold("10.244.1.8:7")?;
    let found = entries(&world)?;
    ensure!(
        found == 0,
        "{found} entries of a connection of the proxy's own"
    );
    held.close_stdin();
    let _: Report = held.wait_json()?;
    Ok(())
}

/// Its proxy accepts nothing, so all of its connections wait.
fn one_who_fills_his_share_of_origins_has_no_others() -> Result<()> {
    let mut world = World::new()?;
    let hog = world.lab.pod("two").clone();
    // A proxy that never accepts, and has no backlog.
    let listener = hog.listen(("127.0.0.1".parse::<IpAddr>()?, 15001))?;
    nix::sys::socket::listen(&listener, Backlog::new(1)?)?;
    let rules = json!({ "mode": "proxy", "captured": true });
    let workload = |name: &str| {
        let addresses = world.lab.pod(name).addresses();
        json!({ "name": format!("default/{name}"), "addresses": addresses, "rules": rules })
    };
    let config =
        json!({ "proxy": super::foreign(), "workloads": [workload("two"), workload("app")] });
    let _proxy = super::relay::Relay::haproxy(&world)?;
    world.agent_with(&config, &[])?;
    let app = world.app().clone();
    hog.sysctl("ipv4/ip_local_port_range", "10000 60999")?;
    let slow = hog
        .probe("keep")
        .args(["--to", "10.244.2.5:7", "--slow", "--count", "20000"]);
    let mut slow = slow.stdin_piped().stdout_piped().spawn()?;
    let report: KeepReport = serde_json::from_str(&slow.wait_for_line()?)?;
    let refused = report
        .errors
        .get("ECONNREFUSED")
        .copied()
        .unwrap_or_default();
    ensure!(
        report.alive > 10_000 && refused > 1000 && report.alive + refused == 20_000,
        "{report:?}"
    );
    ensure!(
        world.verdicts(Reason::OriginLost)? == refused,
        "{refused} were refused"
    );
    reaches(&app, "10.244.1.5:7", "connect --count 50", &["one"])?;
    slow.close_stdin();
    slow.wait()?;
    eventually(|| {
        let entries = entries(&world)?;
        ensure!(entries == 0, "{entries} entries are left");
        Ok(())
    })?;
    // It has its share again.
    let slow = hog
        .probe("keep")
        .args(["--to", "10.244.2.5:7", "--slow", "--count", "100"]);
    let mut slow = slow.stdin_piped().stdout_piped().spawn()?;
    let report: KeepReport = serde_json::from_str(&slow.wait_for_line()?)?;
    ensure!(report.alive == 100, "{report:?}");
    Ok(())
}

/// As programs of an earlier agent may have left them.
fn entries_of_sockets_that_are_gone_are_swept() -> Result<()> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "mode": "kernel" }))?;
    let output = world
        .agent()?
        .dataplane(["status", "-o", "json"])
        .output()?;
    let status: Value = serde_json::from_slice(&output.stdout)?;
    let place = status["mesh"][0]["place"].as_str().context("a place")?;
    let netns: u64 = place.trim_start_matches("netns ").parse()?;
    // A connection that lives.
    let app = world.app().clone();
    let at = SocketAddr::new(app.ipv4().into(), 9999);
    let listener = app.listen(at)?;
    let peer = world.lab.pod("one").probe("keep");
    let peer = peer.args(["--to", &at.to_string(), "--slow", "--count", "1"]);
    let mut peer = peer.stdin_piped().stdout_piped().spawn()?;
    peer.wait_for_line()?;
    let (_accepted, from) = listener.accept()?;
    let living = tuple(netns, at, from);

    let mut table = table(&world)?;
    world.agent.as_mut().context("an agent")?.kill();
    table.insert(living, [0; 20], 0)?;
    for port in 1..100 {
        // In a namespace that exists, and in one that is gone.
        let netns = if port % 2 == 0 { netns } else { !netns };
        let stale = tuple(netns, SocketAddr::new(at.ip(), port), from);
        table.insert(stale, [0; 20], 0)?;
    }
    world.agent.as_mut().context("an agent")?.launch()?;
    eventually(|| {
        let left: Vec<Tuple> = table.keys().collect::<Result<_, _>>()?;
        ensure!(left == [living], "{} entries are left", left.len());
        Ok(())
    })
}

fn tuple(netns: u64, client: SocketAddr, proxy: SocketAddr) -> Tuple {
    let mut bytes = netns.to_ne_bytes().to_vec();
    for at in [client, proxy] {
        let ip = match at.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes.extend(ip.octets());
    }
    bytes.extend(client.port().to_be_bytes());
    bytes.extend(proxy.port().to_be_bytes());
    bytes.resize(48, 0);
    bytes.try_into().expect("48 bytes")
}
