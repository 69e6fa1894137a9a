//! A machine inside a pod that tries to bypass its capture, and parts of the capture that are missing or stale.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
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
    interfaces::{INTERFACE, asks, connect, is_cut_off, join, machine, routed, rules, world},
    pod,
};
use crate::{
    cluster::{eventually, reaches},
    outcome::run_args,
    sockets::{address, arrived, bytes, inject, link, tap, tcp, transfer},
};

scenarios! {
    Dataplane:
    no_forged_answer_escapes,
    no_forgotten_connection_escapes,
    no_number_of_headers_escapes,
    the_table_comes_back,
    an_interface_that_is_made_again_waits_for_the_agent,
    without_the_table_a_denied_machine_is_cut_off,
    machines_answer_each_other,
    smaller_mtus_on_the_way_are_found,
    rules_of_other_ranges_and_of_an_earlier_agent_go,
}

/// How long packets may be in a queue of the kernel's after the sender has stopped waiting.
const QUEUED: Duration = Duration::from_millis(200);

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

/// Whether the pod sends on a packet that would begin a connection from a port to a port, if the machine sends these.
fn leaves(world: &World, packets: &[Packet], ports: [u16; 2]) -> Result<bool> {
    let frames: Vec<_> = packets.iter().map(Packet::frame).collect();
    let sends = || inject(machine(world), "up0", &frames);
    leaves_after(world, ports, flags::SYN, sends)
}

/// Whether the pod sends on a packet from a port to a port that has only this flag, of those that begin or end
/// connections.
fn leaves_after(
    world: &World,
    ports: [u16; 2],
    flag: u8,
    sends: impl FnOnce() -> Result<()>,
) -> Result<bool> {
    let seen = tap(world.app())?;
    sends()?;
    std::thread::sleep(patience(QUEUED));
    let out = link(world.app(), "eth0")?;
    let is_it = |frame: &[u8]| {
        // The ports are where the headers end, wherever that is.
        let ports = ports.map(u16::to_be_bytes).concat();
        let at = frame.windows(4).position(|bytes| bytes == ports);
        let found = at.and_then(|at| frame.get(at + 13));
        found.is_some_and(|found| found & (flags::SYN | flags::ACK | flags::RST) == flag)
    };
    let mut frames = arrived(&seen).into_iter();
    Ok(frames.any(|frame| frame.get(6..12) == Some(&out) && is_it(&frame)))
}

fn denied() -> Value {
    let mut rules = rules();
    rules["egress"] = json!("deny");
    rules
}

/// The machine's address of a family, and a destination that is denied.
fn ends(world: &World, v4: bool, ports: [u16; 2]) -> Result<[SocketAddr; 2]> {
    let own: IpAddr = super::interfaces::MACHINE[usize::from(!v4)].parse()?;
    let other = address(world.lab.pod("one"), v4);
    Ok([(own, ports[0]).into(), (other, ports[1]).into()])
}

/// With a forged packet, the machine makes conntrack treat its connection as an answer: now, or before it was captured.
fn no_forged_answer_escapes() -> Result<()> {
    let mut world = world()?;
    for interface in ["all", INTERFACE] {
        let setting = format!("ipv4/conf/{interface}/rp_filter");
        world.app().sysctl(&setting, "0")?;
    }
    let ways = [(true, true), (false, true), (true, false), (false, false)];
    let tries = |world: &World, first: u16, is_forged: bool| -> Result<Vec<bool>> {
        let mut all = Vec::new();
        for ((v4, is_silent), port) in ways.into_iter().zip(first..) {
            let ports = [port, port + 500];
            let [own, other] = ends(world, v4, ports)?;
            let mut forged = segment(world, [other, own], flags::SYN)?;
            if is_silent {
                // TCP does not answer a packet to several hosts.
                forged.link[0] = [0xff; 6];
            }
            let own = segment(world, [own, other], flags::SYN)?;
            let all_of = [forged, own];
            all.push(leaves(world, &all_of[usize::from(!is_forged)..], ports)?);
        }
        Ok(all)
    };
    let before = tries(&world, 47_000, true)?;
    ensure!(before == [true; 4], "the packets are not seen: {before:?}");
    world.capture(json!({}), denied())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    let prepared = tries(&world, 47_000, false)?;
    ensure!(prepared == [false; 4], "{prepared:?}");
    let after = tries(&world, 47_100, true)?;
    ensure!(after == [false; 4], "{after:?}");
    Ok(())
}

/// Conntrack has forgotten a connection, and treats its next packet as the first of a new connection.
fn no_forgotten_connection_escapes() -> Result<()> {
    let mut world = world()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let node = world.lab.node("node1").clone();
    let inward = format!(
        "-t nat -A PREROUTING -i eth0 -d {} -p tcp -j DNAT --to 10.9.0.2",
        app.ipv4()
    );
    app.command("iptables-nft").args(inward.split(' ')).run()?;
    // The machine does not know it either, and sends a reset.
    let answers = |world: &World, port: u16| -> Result<bool> {
        let [_, other] = ends(world, true, [port, port + 500])?;
        let pod = SocketAddr::new(app.ipv4().into(), port);
        let packet = Packet {
            link: [link(&node, "veth-one")?, link(&one, "eth0")?],
            ..segment(world, [other, pod], flags::ACK)?
        };
        let sends = || inject(&one, "eth0", &[packet.frame()]);
        leaves_after(world, [port, port + 500], flags::RST, sends)
    };
    ensure!(answers(&world, 46_000)?, "the answer is not seen");
    world.capture(json!({}), denied())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    ensure!(!answers(&world, 46_001)?, "it goes on");
    Ok(())
}

/// The kernel's routing rules look behind fifteen extension headers for the protocol, and no further. The protocol of a
/// fragment inside a fragment is unknown, and the pod sends on an ordinary fragment.
fn no_number_of_headers_escapes() -> Result<()> {
    let mut world = world()?;
    let mut port = 48_000;
    let mut tries = |world: &World| -> Result<Vec<bool>> {
        let mut all = Vec::new();
        for count in [0, 1, 14, 15, 16, 17, 30] {
            port += 1;
            let ports = [port, port + 500];
            let packet = Packet {
                // One option that pads.
                extensions: vec![(protocol::DESTINATION, vec![0, 1, 4, 0, 0, 0, 0]); count],
                ..segment(world, ends(world, false, ports)?, flags::SYN)?
            };
            all.push(leaves(world, &[packet], ports)?);
        }
        port += 1;
        let ports = [port, port + 500];
        all.push(leaves(world, &nested(world, ports)?, ports)?);
        Ok(all)
    };
    let before = tries(&world)?;
    ensure!(before == [true; 8], "the packets are not seen: {before:?}");
    world.capture(json!({}), denied())?;
    asks(&world, "10.244.2.5:7", "far", true)?;
    let after = tries(&world)?;
    ensure!(after == [false; 8], "{after:?}");
    Ok(())
}

/// Two fragments, each in a fragment that is whole, and the protocol in the second.
fn nested(world: &World, ports: [u16; 2]) -> Result<[Packet; 2]> {
    let whole = segment(world, ends(world, false, ports)?, flags::SYN)?;
    let pads = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let header = |place: u8, id: u8| (protocol::FRAGMENT, vec![0, 0, place, 0, 0, 0, id]);
    // More follow; and from the eighth byte on.
    let first = Packet {
        extensions: vec![header(0, 1), header(1, 3)],
        payload: Payload::Raw(protocol::DESTINATION, pads(protocol::DESTINATION).to_vec()),
        ..whole.clone()
    };
    let rest = [&pads(protocol::TCP)[..], &whole.payload()].concat();
    let second = Packet {
        extensions: vec![header(0, 2), header(8, 3)],
        payload: Payload::Raw(protocol::DESTINATION, rest),
        ..whole
    };
    Ok([first, second])
}

/// Has the agent do nothing meanwhile.
fn without_the_agent<T>(world: &World, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let agent = Pid::from_raw(world.agent()?.id().cast_signed());
    kill(agent, Signal::SIGSTOP)?;
    let done = work();
    kill(agent, Signal::SIGCONT)?;
    done
}

/// A world in which all pods are captured by these rules, and a file whose change makes the agent look at everything.
fn told_by_a_pod(rules: &Value) -> Result<(World, PathBuf)> {
    let mut world = world()?;
    let path = world.state.path().join("pods.yaml");
    changes(&path, "")?;
    let config = json!({ "rules": rules });
    world.agent_with(&config, std::slice::from_ref(&path))?;
    eventually(|| asks(&world, "10.244.2.5:7", "far", true))?;
    Ok((world, path))
}

fn changes(path: &Path, what: &str) -> Result<()> {
    let pod = pod("ambient", json!({ "example.com/changed": what }));
    Ok(fs::write(path, pod.to_string())?)
}

fn the_table_comes_back() -> Result<()> {
    let (world, path) = told_by_a_pod(&rules())?;
    for how in ["delete", "flush"] {
        without_the_agent(&world, || {
            let table = [how, "table", "inet", "dataplane-machines"];
            world.app().command("nft").args(table).run()?;
            asks(&world, "10.244.2.5:7", "far", false)
        })?;
        changes(&path, how)?;
        eventually(|| asks(&world, "10.244.2.5:7", "far", true)).context(how)?;
    }
    Ok(())
}

/// Otherwise its connections would reach sockets of the pod that listen at all addresses. The machine still answers forwarded
/// connections.
fn an_interface_that_is_made_again_waits_for_the_agent() -> Result<()> {
    let (world, path) = told_by_a_pod(&denied())?;
    let app = world.app().clone();
    let inward = format!(
        "-t nat -A PREROUTING -i eth0 -d {} -p tcp --dport 8007 -j DNAT --to 10.9.0.2:7",
        app.ipv4()
    );
    app.command("iptables-nft").args(inward.split(' ')).run()?;
    let _server = app.serve_as("wildcard", &["--tcp", "[::]:9"])?;
    without_the_agent(&world, || {
        app.ip(&format!("link del {INTERFACE}"))?;
        connect(&world)?;
        // As soon as there is any route.
        for to in ["10.244.1.5:53", "[fd00:10:244:1::5]:53"] {
            eventually(|| reaches(machine(&world), to, "udp", &["one"]).map(drop))?;
        }
        for to in ["10.244.2.5:9", "[fd00:10:244:2::5]:9"] {
            is_cut_off(&world, to)?;
        }
        let ports = [49_000, 49_500];
        let packet = segment(&world, ends(&world, true, ports)?, flags::SYN)?;
        ensure!(!leaves(&world, &[packet], ports)?, "it goes on");
        let _server = machine(&world).serve(&["--tcp", "10.9.0.2:7"])?;
        let to = format!("{}:8007", app.ipv4());
        reaches(world.lab.pod("one"), &to, "connect --count 3", &["inner"])?;
        Ok(())
    })?;
    changes(&path, "again")?;
    eventually(|| asks(&world, "10.244.2.5:7", "far", true))
}

/// Another process owns a table of this name, so the agent cannot write its own.
fn without_the_table_a_denied_machine_is_cut_off() -> Result<()> {
    for (rules, said) in [
        (
            rules(),
            "from its virtual interfaces are not captured: cannot write",
        ),
        (
            denied(),
            "at its virtual interfaces are cut off: cannot write",
        ),
    ] {
        let is_denied = rules["egress"] == "deny";
        let (world, path) = told_by_a_pod(&rules)?;
        let nft = || world.app().command("nft");
        let mut owner = nft().arg("-i").stdin_piped().stdout_piped().spawn()?;
        without_the_agent(&world, || {
            nft()
                .args(["delete", "table", "inet", "dataplane-machines"])
                .run()?;
            owner.send_line("add table inet dataplane-machines { flags owner; }")?;
            eventually(|| {
                let tables = nft().args(["list", "tables"]).run()?;
                ensure!(tables.contains("dataplane-machines"), "{tables}");
                Ok(())
            })
        })?;
        changes(&path, "owner")?;
        eventually(|| {
            run_args(world.agent()?, ["status"])?.says(&[said])?;
            Ok(())
        })?;
        if is_denied {
            let ports = [49_001, 49_501];
            let packet = segment(&world, ends(&world, false, ports)?, flags::SYN)?;
            ensure!(!leaves(&world, &[packet], ports)?, "it goes on");
        } else {
            asks(&world, "10.244.2.5:7", "far", false)?;
        }
        // The table is removed with its owner.
        owner.kill();
        eventually(|| asks(&world, "10.244.2.5:7", "far", true))?;
    }
    Ok(())
}

/// A world with a second host besides the machine.
fn world_of_two() -> Result<World> {
    let world = World::with(|lab| {
        lab.pod("node1", "app", "10.244.1.8")
            .external("inner")
            .external("second")
    })?;
    connect(&world)?;
    Ok(world)
}

/// A path behind the machine has a smaller MTU that only the machine knows. It has to report it to the proxy.
fn smaller_mtus_on_the_way_are_found() -> Result<()> {
    let mut world = world_of_two()?;
    let (app, inner) = (world.app().clone(), machine(&world).clone());
    let second = world.lab.external("second").clone();
    let own = ["10.9.1.1", "fd09:1::1"];
    join((&inner, own), "down0", (&second, ["10.9.1.2", "fd09:1::2"]))?;
    inner.ip("link set down0 mtu 1300")?;
    inner.sysctl("ipv4/ip_forward", "1")?;
    inner.sysctl("ipv6/conf/all/forwarding", "1")?;
    app.ip("route add 10.9.1.0/24 via 10.9.0.2")?;
    app.ip("-6 route add fd09:1::/64 via fd09::2")?;
    let data = bytes(200_000, 3);
    for rules in [rules(), denied()] {
        world.capture(json!({}), rules)?;
        for to in ["10.244.2.5:7", "[fd00:10:244:2::5]:7"] {
            let to: SocketAddr = to.parse()?;
            eventually(|| tcp(&second, to).map(drop))?;
            let stream = tcp(&second, to)?;
            let who = transfer(&stream, &data).with_context(|| to.to_string())?;
            ensure!(who == "far", "{to}: {who}");
        }
    }
    Ok(())
}

/// Two machines reach each other without the proxy, because the address of the second one is in no captured range.
fn machines_answer_each_other() -> Result<()> {
    let mut world = world_of_two()?;
    let second = world.lab.external("second").clone();
    let own = ["172.20.0.1", "fd20::1"];
    join(
        (world.app(), own),
        "virt1",
        (&second, ["172.20.0.2", "fd20::2"]),
    )?;
    let _server = second.serve(&["--tcp", "172.20.0.2:7"])?;
    let mut rules = rules();
    rules["virtualInterfaces"] = json!([INTERFACE, "virt1"]);
    rules["includeOutboundIPRanges"] = json!(["10.0.0.0/8"]);
    world.capture(json!({}), rules)?;
    eventually(|| asks(&world, "10.244.1.5:7", "one", true))?;
    reaches(
        machine(&world),
        "172.20.0.2:7",
        "connect --count 3",
        &["second"],
    )?;
    Ok(())
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
        fs::write(&path, pod("ambient", annotations).to_string())
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
