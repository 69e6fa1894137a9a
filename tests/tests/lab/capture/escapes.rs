//! Ways in which a pod's processes may try to bypass capture: none of them leads to a denied destination, and each
//! connection to an allowed destination is captured.

use std::{fs, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Reason, capture::FROM_CLIENT};
use dataplane_tests::{Command, Host};
use serde_json::json;

use super::World;
use crate::{
    metrics::Metrics,
    sockets::{arrived, tap},
};

scenarios! {
    Dataplane:
    no_way_of_connecting_escapes,
    no_io_uring_escapes,
    no_user_and_no_cgroup_escapes,
    no_source_route_escapes,
    the_proxys_own_port_leads_nowhere,
}

/// An endpoint that is known, and a pod that is not, of each family.
const V4: [&str; 2] = ["10.244.2.5:7", "10.244.1.5:7"];
const V6: [&str; 2] = ["[fd00:10:244:2::5]:7", "[fd00:10:244:1::5]:7"];
/// How long to wait if no server may be reached, in milliseconds: a SYN is sent twice meanwhile.
const SILENCE: [&str; 2] = ["--patience-ms", "1500"];
/// The mark of the agent's proxy, by default.
const MARK: u32 = 15_006;

fn denied() -> Result<World> {
    let mut world = World::new()?.by_packets();
    world.capture(json!({}), json!({ "egress": "deny", "mode": "proxy" }))?;
    Ok(world)
}

/// Checks that a way is captured: `connect` makes the program that connects to a destination.
fn is_captured(
    world: &World,
    way: &str,
    to: [&str; 2],
    connect: impl Fn(&str) -> Command,
) -> Result<()> {
    let [known, _] = to;
    let (said, counted) = world.counted(Reason::Captured, || Ok(connect(known).output()?))?;
    ensure!(
        said.status.success() && String::from_utf8_lossy(&said.stdout).contains("far"),
        "{way} to {known}: {said:?}"
    );
    ensure!(counted >= 1, "{way} to {known} is not captured");
    is_denied(world, way, to, connect)
}

fn is_denied(
    world: &World,
    way: &str,
    [_, unknown]: [&str; 2],
    connect: impl Fn(&str) -> Command,
) -> Result<()> {
    let (said, counted) = world.counted(Reason::EgressDenied, || {
        Ok(connect(unknown).args(SILENCE).output()?)
    })?;
    ensure!(
        !said.status.success(),
        "{way} to {unknown} escapes: {said:?}"
    );
    ensure!(counted >= 1, "{way} to {unknown} is not denied: {said:?}");
    Ok(())
}

fn no_way_of_connecting_escapes() -> Result<()> {
    const WAYS: [&str; 5] = ["plain", "fastopen", "mptcp", "reconnect", "mapped"];
    let world = denied()?;
    // An IPv6 address is not mapped.
    for (ways, of) in [(&WAYS[..], V4), (&WAYS[..4], V6)] {
        for &way in ways {
            for mark in [None, Some(MARK), Some(MARK | FROM_CLIENT)] {
                let connect = |to: &str| {
                    let probe = world.app().probe("escape");
                    let probe = probe.args(["--by", way, "--to", to, "--first", of[0]]);
                    match mark {
                        Some(mark) => probe.args(["--mark".to_owned(), mark.to_string()]),
                        None => probe,
                    }
                };
                let way = format!("{way} with mark {mark:?}");
                if mark == Some(MARK | FROM_CLIENT) {
                    // By this mark, packets come back to sockets of the workload's own namespace: no server is reached.
                    is_denied(&world, &way, of, connect)?;
                } else {
                    is_captured(&world, &way, of, connect)?;
                }
            }
        }
    }
    Ok(())
}

/// A request that the process submits does not pass, and one that a thread of the kernel submits does not either.
fn no_io_uring_escapes() -> Result<()> {
    let world = denied()?;
    for way in ["io-uring", "io-uring-polled"] {
        let connect = |to: &str| {
            let probe = world.app().probe("escape");
            probe.args(["--by", way, "--to", to])
        };
        for of in [V4, V6] {
            is_captured(&world, way, of, connect)?;
        }
    }
    Ok(())
}

/// Users that Istio and Open Service Mesh leave out, and a cgroup that a pod makes in its own.
fn no_user_and_no_cgroup_escapes() -> Result<()> {
    let world = denied()?;
    for user in [0, 1337, super::UID, 65_534] {
        let connect = |to: &str| {
            let probe = world.app().probe("escape").user(user);
            probe.args(["--by", "plain", "--to", to])
        };
        for of in [V4, V6] {
            is_captured(&world, &format!("user {user}"), of, connect)?;
        }
    }
    let deep = world.app().cgroup().join("deep/deeper");
    fs::create_dir_all(&deep)?;
    let probe = world.lab.programs().probe()?;
    let deep_text = deep.to_str().context("a path in UTF-8")?;
    let script = format!("echo 0 > {deep_text}/cgroup.procs && exec \"$0\" \"$@\"");
    let connect = |to: &str| {
        let sh = world.app().command("sh").args(["-c", &script]).arg(&probe);
        sh.args(["escape", "--by", "plain", "--to", to])
    };
    let mut families = [V4, V6].into_iter();
    let result = families.try_for_each(|of| is_captured(&world, "a nested cgroup", of, connect));
    fs::remove_dir(&deep)?;
    fs::remove_dir(deep.parent().context("a parent")?)?;
    result
}

/// A process asks for a known destination. By a source route, the kernel sends its packets to another host first. An IPv6
/// routing header takes no capability and no privilege.
fn no_source_route_escapes() -> Result<()> {
    let mut world = denied()?;
    // As on routers; without this setting, the node's own stack drops packets that have this IPv4 option.
    let node = world.lab.node("node1");
    let accept = "echo 1 > /proc/sys/net/ipv4/conf/all/accept_source_route";
    node.command("sh").args(["-c", accept]).run()?;
    let taps = [tap(world.lab.pod("one"))?, tap(world.lab.pod("far"))?];
    let [v4, v6] = ["10.244.1.8", "fd00:10:244:1::8"].map(str::parse::<IpAddr>);
    let (v4, v6) = (v4?, v6?);
    let routes = [
        ("10.244.2.5:7", "10.244.1.5", "segments"),
        ("10.244.1.8:7", "10.244.2.5", "segments"),
        ("[fd00:10:244:2::5]:7", "fd00:10:244:1::5", "segments"),
        ("[fd00:10:244:2::5]:7", "fd00:10:244:1::5", "none-left"),
        ("[fd00:10:244:1::8]:7", "fd00:10:244:2::5", "segments"),
        ("[fd00:10:244:1::8]:7", "fd00:10:244:2::5", "none-left"),
    ];
    for (to, through, header) in routes {
        for udp in [false, true] {
            let way = format!("to {to} by {through} ({header}, udp: {udp})");
            // An option of IPv4 takes CAP_NET_RAW.
            let user = if to.starts_with('[') { 65_534 } else { 0 };
            let probe = world.app().probe("escape").user(user);
            let probe = probe.args(["--by", "source-route", "--to", to]);
            let probe = probe.args(["--through", through, "--header", header]);
            let probe = probe.args(SILENCE);
            let probe = if udp { probe.args(["--udp"]) } else { probe };
            // `egress: deny` refuses datagrams that the process does not send to itself.
            let may_send = !udp || to.contains(":8]") || to.starts_with("10.244.1.8");
            let (said, counted) = world.counted(Reason::SourceRouted, || Ok(probe.output()?))?;
            let own = if to.starts_with('[') { v6 } else { v4 };
            for tap in &taps {
                for frame in arrived(tap) {
                    ensure!(!is_from(&frame, own), "{way} escapes: {frame:02x?}");
                }
            }
            ensure!(
                counted >= 1 || !may_send,
                "{way}: nothing was sent: {said:?}"
            );
        }
    }
    let warned = |world: &World| {
        let status = world.agent()?.dataplane(["status"]).output()?;
        let text = String::from_utf8_lossy(&status.stdout);
        Ok::<_, anyhow::Error>(text.contains("routing headers"))
    };
    ensure!(!warned(&world)?, "a warning without a reason");
    let mesh = super::mesh(json!({}), json!({ "egress": "deny" }));
    world.by_packets = false;
    world.agent_with(&mesh, &[])?;
    ensure!(
        warned(&world)?,
        "nobody looks for source routes, and nobody says so"
    );
    Ok(())
}

/// Whether a frame is a packet from an address, and not about neighbours.
fn is_from(frame: &[u8], src: IpAddr) -> bool {
    let (kind, at, src): (_, _, Vec<u8>) = match src {
        IpAddr::V4(src) => ([8, 0], 26, src.octets().into()),
        IpAddr::V6(src) => ([0x86, 0xdd], 22, src.octets().into()),
    };
    let is_icmp6 = kind == [0x86, 0xdd] && frame.get(20) == Some(&58);
    frame.get(12..14) == Some(&kind) && frame[at..].starts_with(&src) && !is_icmp6
}

/// A connection that was not redirected has no destination: the proxy accepts none from the workload and relays none
/// from others.
fn the_proxys_own_port_leads_nowhere() -> Result<()> {
    let world = denied()?;
    let node = world.lab.node("node1");
    // The proxy's open and closed connections.
    let taken = || -> Result<f64> {
        let now = Metrics::scrape(node)?;
        let names = [
            "istio_tcp_connections_opened_total",
            "istio_tcp_connections_failed_total",
            "dataplane_proxy_connections",
        ];
        Ok(names.map(|name| now.sum(name, &[])).into_iter().sum())
    };
    let before = taken()?;
    let nowhere = |from: &Host, to: &str, mark: u32| -> Result<()> {
        let probe = from.probe("escape");
        let said = probe
            .args(["--by", "plain", "--to", to, "--mark", &mark.to_string()])
            .args(SILENCE)
            .output()?;
        ensure!(
            !said.status.success(),
            "{} to {to} with mark {mark}: {said:?}",
            from.name()
        );
        Ok(())
    };
    let has_taken_none = || {
        let more = taken()? - before;
        ensure!(more.abs() < 0.5, "the proxy had {more} connections");
        Ok(())
    };
    let hosts = ["127.0.0.1", "[::1]", "10.244.1.8", "[fd00:10:244:1::8]"];
    let ports = hosts.map(|host| [15_001, 15_006].map(|port| format!("{host}:{port}")));
    let ports = ports.as_flattened();
    for mark in [0, MARK, MARK | FROM_CLIENT] {
        let mut each = ports.iter();
        let all = || each.try_for_each(|to| nowhere(world.app(), to, mark));
        let ((), counted) = world.counted(Reason::Recursive, all)?;
        ensure!(
            counted == ports.len() as u64,
            "mark {mark}: {counted} of {} were refused",
            ports.len()
        );
        has_taken_none().with_context(|| format!("mark {mark}"))?;
    }
    for to in ["10.244.1.8:15006", "[fd00:10:244:1::8]:15001"] {
        nowhere(world.lab.pod("one"), to, MARK)?;
    }
    has_taken_none().context("from another pod")?;
    // It still serves others.
    is_captured(&world, "afterwards", V4, |to| {
        let probe = world.app().probe("escape");
        probe.args(["--by", "plain", "--to", to])
    })
}
