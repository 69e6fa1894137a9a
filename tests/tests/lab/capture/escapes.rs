//! Ways past capture that a pod's processes may try: none of them leads to a destination that is denied, and each is
//! captured to one that is not.

use std::{fs, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{Reason, capture::FROM_CLIENT};
use dataplane_tests::Command;
use serde_json::json;

use super::World;
use crate::sockets::{arrived, tap};

scenarios! {
    Dataplane:
    no_way_of_connecting_escapes,
    no_io_uring_escapes,
    no_user_and_no_cgroup_escapes,
    no_source_route_escapes,
    the_proxys_own_port_leads_nowhere,
}

/// An endpoint that is known, and a pod that is not.
const KNOWN: &str = "10.244.2.5:7";
const UNKNOWN: &str = "10.244.1.5:7";
/// The mark of the agent's proxy, by default.
const MARK: u32 = 15_006;

fn denied() -> Result<World> {
    let mut world = World::new()?;
    world.capture(json!({}), json!({ "egress": "deny", "mode": "proxy" }))?;
    Ok(world)
}

/// What a way comes to: `connect` makes the program that connects to a destination.
fn is_captured(world: &World, way: &str, connect: impl Fn(&str) -> Command) -> Result<()> {
    let (said, counted) = world.counted(Reason::Captured, || Ok(connect(KNOWN).output()?))?;
    ensure!(
        said.status.success() && String::from_utf8_lossy(&said.stdout).contains("far"),
        "{way}: {said:?}"
    );
    ensure!(counted >= 1, "{way} is not captured");
    is_denied(world, way, connect)
}

fn is_denied(world: &World, way: &str, connect: impl Fn(&str) -> Command) -> Result<()> {
    let (said, counted) = world.counted(Reason::EgressDenied, || Ok(connect(UNKNOWN).output()?))?;
    ensure!(!said.status.success(), "{way} escapes: {said:?}");
    ensure!(counted >= 1, "{way} is not denied: {said:?}");
    Ok(())
}

fn no_way_of_connecting_escapes() -> Result<()> {
    let world = denied()?;
    for way in ["plain", "mapped", "fastopen", "mptcp", "reconnect"] {
        for mark in [None, Some(MARK), Some(MARK | FROM_CLIENT)] {
            let connect = |to: &str| {
                let probe = world.app().probe("escape");
                let probe = probe.args(["--by", way, "--to", to, "--first", KNOWN]);
                match mark {
                    Some(mark) => probe.args(["--mark".to_owned(), mark.to_string()]),
                    None => probe,
                }
            };
            let way = format!("{way} with mark {mark:?}");
            if mark == Some(MARK | FROM_CLIENT) {
                // By this mark, packets come back to sockets of the workload's own namespace: nobody is reached.
                is_denied(&world, &way, connect)?;
            } else {
                is_captured(&world, &way, connect)?;
            }
        }
    }
    Ok(())
}

/// Neither a request that the process submits nor one that a thread of the kernel's does.
fn no_io_uring_escapes() -> Result<()> {
    let world = denied()?;
    for way in ["io-uring", "io-uring-polled"] {
        let connect = |to: &str| {
            let probe = world.app().probe("escape");
            probe.args(["--by", way, "--to", to])
        };
        is_captured(&world, way, connect)?;
    }
    Ok(())
}

/// Users that Istio and Open Service Mesh leave out, and a cgroup that a pod makes in its own.
fn no_user_and_no_cgroup_escapes() -> Result<()> {
    let world = denied()?;
    for user in [0, 1337, super::UID, 65_534] {
        is_captured(&world, &format!("user {user}"), |to| {
            let probe = world.app().probe("escape").user(user);
            probe.args(["--by", "plain", "--to", to])
        })?;
    }
    let deep = world.app().cgroup().join("deep/deeper");
    fs::create_dir_all(&deep)?;
    let probe = world.lab.programs().probe()?;
    let deep_text = deep.to_str().context("a path in UTF-8")?;
    let script = format!("echo 0 > {deep_text}/cgroup.procs && exec \"$0\" \"$@\"");
    let result = is_captured(&world, "a nested cgroup", |to| {
        let sh = world.app().command("sh").args(["-c", &script]).arg(&probe);
        sh.args(["escape", "--by", "plain", "--to", to])
    });
    fs::remove_dir(&deep)?;
    fs::remove_dir(deep.parent().context("a parent")?)?;
    result
}

/// A process asks for a known destination. By a source route, the kernel sends its packets to another host first. An IPv6
/// routing header takes no capability and no privilege.
fn no_source_route_escapes() -> Result<()> {
    let mut world = denied()?;
    // As routers have it; otherwise the node's own stack drops what has such an option of IPv4.
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
    world.agent_with_args(&mesh, &[], &["--packet-path", "off"])?;
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

/// A connection that nobody redirected has no destination.
fn the_proxys_own_port_leads_nowhere() -> Result<()> {
    let world = denied()?;
    for to in ["127.0.0.1:15001", "127.0.0.1:15006", "10.244.1.8:15001"] {
        for mark in [0, MARK, MARK | FROM_CLIENT] {
            let probe = world.app().probe("escape");
            let said = probe
                .args(["--by", "plain", "--to", to, "--mark", &mark.to_string()])
                .output()?;
            ensure!(!said.status.success(), "{to} with mark {mark}: {said:?}");
        }
    }
    // It serves others all the same.
    is_captured(&world, "afterwards", |to| {
        let probe = world.app().probe("escape");
        probe.args(["--by", "plain", "--to", to])
    })
}
