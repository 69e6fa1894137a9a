//! A machine inside a pod that wants to get past its capture, and parts of the capture that are missing, or are those of another
//! time.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_proof::wire::{Packet, Payload, flags, protocol};
use dataplane_tests::patience;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{
    World,
    interfaces::{INTERFACE, asks, connect, is_cut_off, machine, routed, rules, world},
    pod,
};
use crate::{
    cluster::eventually,
    sockets::{address, arrived, inject, link, tap},
};

scenarios! {
    Dataplane:
    no_forged_answer_escapes,
    no_number_of_headers_escapes,
    the_table_comes_back,
    an_interface_that_is_made_again_waits_for_the_agent,
    rules_of_other_ranges_and_of_an_earlier_agent_go,
}

/// A segment of the machine's, without data.
fn segment(world: &World, [from, to]: [SocketAddr; 2], flags: u8) -> Result<Packet> {
    let payload = Payload::Tcp {
        ports: [from.port(), to.port()],
        flags,
        options: Vec::new(),
        data: Vec::new(),
    };
    Ok(Packet {
        link: [link(world.app(), INTERFACE)?, link(machine(world), "up0")?],
        ..Packet::new(from.ip(), to.ip(), payload)
    })
}

/// Whether the pod sends on what the machine sends to a port: one that nothing else is sent to.
fn leaves(world: &World, packets: &[Packet], port: u16) -> Result<bool> {
    /// Packets that nobody waits for may be in a queue of the kernel's for so long.
    const QUEUED: Duration = Duration::from_millis(200);
    let seen = tap(world.app())?;
    let frames: Vec<_> = packets.iter().map(Packet::frame).collect();
    inject(machine(world), "up0", &frames)?;
    std::thread::sleep(patience(QUEUED));
    let out = link(world.app(), "eth0")?;
    Ok(has_left(&seen, out, port))
}

fn has_left(seen: &OwnedFd, from: [u8; 6], port: u16) -> bool {
    let port = port.to_be_bytes();
    let frames = arrived(seen).into_iter();
    // The ports are where the headers end, wherever that is.
    let mut out = frames.filter(|frame| frame.get(6..12) == Some(&from));
    out.any(|frame| frame.windows(2).any(|bytes| bytes == port))
}

fn denied() -> Value {
    let mut rules = rules();
    rules["egress"] = json!("deny");
    rules
}

/// The machine's address of a family, and one that nobody may connect to.
fn ends(world: &World, v4: bool, ports: [u16; 2]) -> Result<[SocketAddr; 2]> {
    let own: IpAddr = super::interfaces::MACHINE[usize::from(!v4)].parse()?;
    let other = address(world.lab.pod("one"), v4);
    Ok([(own, ports[0]).into(), (other, ports[1]).into()])
}

/// By a packet in the name of somebody else, the machine has conntrack take its connection for the answer.
fn no_forged_answer_escapes() -> Result<()> {
    let mut world = world()?;
    for interface in ["all", INTERFACE] {
        let setting = format!("ipv4/conf/{interface}/rp_filter");
        world.app().sysctl(&setting, "0")?;
    }
    let mut port = 47_000;
    let mut forges = |world: &World| -> Result<Vec<bool>> {
        let mut all = Vec::new();
        for (v4, is_silent) in [(true, true), (false, true), (true, false), (false, false)] {
            port += 1;
            let [own, other] = ends(world, v4, [port, port + 500])?;
            let mut forged = segment(world, [other, own], flags::SYN)?;
            if is_silent {
                // TCP says nothing to what was not for this host alone.
                forged.link[0] = [0xff; 6];
            }
            let own = segment(world, [own, other], flags::SYN)?;
            all.push(leaves(world, &[forged, own], port + 500)?);
        }
        Ok(all)
    };
    let before = forges(&world)?;
    ensure!(before == [true; 4], "the packets are not seen: {before:?}");
    world.capture(json!({}), denied())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    let after = forges(&world)?;
    // A forged packet that TCP answers makes the pod itself speak to that address.
    ensure!(after[..2] == [false; 2], "{after:?}");
    Ok(())
}

/// The kernel's routing rules look behind fifteen extension headers for the protocol, and no further.
fn no_number_of_headers_escapes() -> Result<()> {
    let mut world = world()?;
    let mut port = 48_000;
    let mut tries = |world: &World| -> Result<Vec<bool>> {
        let mut all = Vec::new();
        for count in [0, 1, 14, 15, 16, 17, 30] {
            port += 1;
            let packet = Packet {
                // One option that pads.
                extensions: vec![(protocol::DESTINATION, vec![0, 1, 4, 0, 0, 0, 0]); count],
                ..segment(world, ends(world, false, [port, port + 500])?, flags::SYN)?
            };
            all.push(leaves(world, &[packet], port + 500)?);
        }
        Ok(all)
    };
    let before = tries(&world)?;
    ensure!(before == [true; 7], "the packets are not seen: {before:?}");
    world.capture(json!({}), denied())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    let after = tries(&world)?;
    ensure!(after == [false; 7], "{after:?}");
    Ok(())
}

/// Has the agent do nothing meanwhile.
fn without_the_agent<T>(world: &World, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let agent = Pid::from_raw(world.agent()?.id().cast_signed());
    kill(agent, Signal::SIGSTOP)?;
    let done = work();
    kill(agent, Signal::SIGCONT)?;
    done
}

fn the_table_comes_back() -> Result<()> {
    let mut world = world()?;
    let path = world.state.path().join("pods.yaml");
    let write = |annotations: Value| std::fs::write(&path, pod("ambient", annotations).to_string());
    write(json!({}))?;
    let config = json!({ "rules": rules() });
    world.agent_with(&config, std::slice::from_ref(&path))?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", true))?;
    for how in ["delete", "flush"] {
        without_the_agent(&world, || {
            let table = [how, "table", "inet", "dataplane-machines"];
            world.app().command("nft").args(table).run()?;
            asks(&world, "10.244.1.5:7", "one", false)
        })?;
        // Any change has the agent look.
        write(json!({ "example.com/changed": how }))?;
        eventually(|| asks(&world, "10.244.1.5:7", "one", true)).context(how)?;
    }
    Ok(())
}

/// Otherwise it would reach those who listen at all addresses in the pod.
fn an_interface_that_is_made_again_waits_for_the_agent() -> Result<()> {
    let mut world = world()?;
    world.capture(json!({}), denied())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    let _server = world.app().serve_as("wildcard", &["--tcp", "[::]:9"])?;
    without_the_agent(&world, || {
        world.app().ip(&format!("link del {INTERFACE}"))?;
        connect(&world)?;
        for to in ["10.244.2.5:9", "[fd00:10:244:2::5]:9", "10.244.2.5:7"] {
            is_cut_off(&world, to)?;
        }
        Ok(())
    })?;
    eventually(|| asks(&world, "10.244.2.5:7", "far", true))
}

fn rules_of_other_ranges_and_of_an_earlier_agent_go() -> Result<()> {
    let mut world = world()?;
    let app = world.app().clone();
    // As an earlier version wrote them.
    for (family, to) in [("-4", "0.0.0.0/0"), ("-6", "::/0")] {
        for to in [
            to,
            if family == "-4" {
                "10.0.0.0/8"
            } else {
                "fd00::/8"
            },
        ] {
            app.ip(&format!(
                "{family} rule add to {to} iif {INTERFACE} ipproto tcp lookup 15006"
            ))?;
        }
    }
    let path = world.state.path().join("pods.yaml");
    let write = |ranges: &str| {
        let annotations = if ranges.is_empty() {
            json!({})
        } else {
            json!({ "traffic.sidecar.istio.io/includeOutboundIPRanges": ranges })
        };
        std::fs::write(&path, pod("ambient", annotations).to_string())
    };
    write("")?;
    let config = json!({ "rules": rules() });
    world.agent_with(&config, std::slice::from_ref(&path))?;
    let are = |wanted: &[&str]| {
        eventually(|| {
            let all = routed(&world)?;
            let is = |wanted: &&str| {
                let its = all.iter().filter(|line| match *wanted {
                    "all" => !line.contains(" to "),
                    range => line.contains(&format!(" to {range} ")),
                });
                its.count()
            };
            let marked = all.iter().all(|line| line.contains("fwmark 0x2000/0x2000"));
            let counts: Vec<usize> = wanted.iter().map(is).collect();
            let sum = counts.iter().sum::<usize>();
            ensure!(
                marked && sum == all.len() && !counts.contains(&0),
                "{wanted:?}: {all:#?}"
            );
            Ok(())
        })
    };
    are(&["all"])?;
    asks(&world, "10.244.1.5:7", "one", true)?;
    for (ranges, wanted) in [
        ("10.0.0.0/8,fd00::/8", &["10.0.0.0/8", "fd00::/8"][..]),
        ("10.244.1.0/24", &["10.244.1.0/24"]),
        ("*", &["all"]),
        ("10.0.0.0/8", &["10.0.0.0/8"]),
    ] {
        write(ranges)?;
        are(wanted).context(ranges)?;
        asks(&world, "10.244.1.5:7", "one", true).context(ranges)?;
    }
    Ok(())
}
