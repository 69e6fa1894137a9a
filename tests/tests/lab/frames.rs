//! Unusual frames: a VLAN's tag, options, extension headers, frames that are cut short; and checksums and segments that
//! are left to the hardware, or are not.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::Reason;
use dataplane_proof::wire::{LINK, Packet, Payload, flags, protocol};
use dataplane_tests::{Host, Lab};
use kernel::trial::{Offload, set_offload};

use crate::{
    cluster::{Cluster, POD_CIDRS, TCP, UDP, eventually},
    features::on,
    manifest::Service,
    sockets::{
        address, answered, arrived, ask, bytes, inject, inject_partial, link, tap, tcp, transfer,
        udp,
    },
    ways::narrow,
};

scenarios! {
    Dataplane:
    services_are_reached_by_way_of_a_vlan,
    options_and_extension_headers_pass,
    frames_that_are_cut_short_do_no_harm,
    a_priority_is_no_vlan,
    payloads_are_whole_whoever_makes_checksums_and_segments,
    segments_of_a_tunnel_to_a_service_pass,
}

fn web(lab: &Lab, endpoint: &str) -> Service {
    Service::new("web", &["10.96.0.10", "fd00:96::10"])
        .node_port("tcp", 80, TCP, 30080)
        .node_port("udp", 53, UDP, 30053)
        .endpoints(&[lab.pod(endpoint)])
}

/// As [`web`], with the endpoint `far`.
fn elsewhere(lab: &Lab) -> Service {
    Service::new("far", &["10.96.0.11", "fd00:96::11"])
        .node_port("tcp", 80, TCP, 30081)
        .node_port("udp", 53, UDP, 30054)
        .endpoints(&[lab.pod("far")])
}

fn set(host: &Host, interface: &str, what: Offload, to: bool) -> Result<()> {
    on(host, |_| {
        set_offload(interface, what, to).with_context(|| format!("{what:?} of {interface}"))
    })
}

/// The uplink is a VLAN's device: its packets reach the device below with their tag beside them, and
/// are translated once.
fn services_are_reached_by_way_of_a_vlan() -> Result<()> {
    let lab = Cluster::lab()?;
    let trial = lab
        .node("node1")
        .ip("link add link eth0 name eth0.42 type vlan id 42");
    if trial.is_err_and(|error| error.to_string().contains("Unknown device type")) {
        println!(
            "skipped frames::services_are_reached_by_way_of_a_vlan: this kernel has no VLANs (8021q)"
        );
        return Ok(());
    }
    for (host, number) in [(lab.node("node2"), 2), (lab.external("ext"), 9)] {
        host.ip("link add link eth0 name eth0.42 type vlan id 42")?;
        host.ip(&format!("addr add 192.168.142.{number}/24 dev eth0.42"))?;
        host.ip(&format!("addr add fd42::{number}/64 dev eth0.42 nodad"))?;
        host.ip("link set eth0.42 up")?;
    }
    let services = |lab: &Lab| vec![web(lab, "near"), elsewhere(lab)];
    let arguments = ["--nodeport-addresses", "192.168.142.0/24,fd42::/64"];
    let cluster = Cluster::start_in(lab, &["near", "far"], services, &arguments)?;
    let ext = cluster.lab.external("ext");
    for node in ["192.168.142.2", "fd42::2"] {
        let node: IpAddr = node.parse()?;
        let own: IpAddr = if node.is_ipv4() {
            "192.168.142.9".parse()?
        } else {
            "fd42::9".parse()?
        };
        for (offset, endpoint) in [(0, "near"), (1, "far")] {
            let to: SocketAddr = (node, 30080 + offset).into();
            let stream = tcp(ext, to)?;
            ensure!(transfer(&stream, &bytes(200_000, 3))? == endpoint, "{to}");
            let to: SocketAddr = (node, 30053 + offset).into();
            let socket = udp(ext, (own, 0))?;
            ensure!(ask(&socket, to, &bytes(4000, 4))? == endpoint, "{to}");
        }
    }
    Ok(())
}

/// Also if the client leaves checksums to its device, and if the node's devices leave them to the stack.
fn options_and_extension_headers_pass() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab, "near"), elsewhere(lab)])?;
    let (ext, node) = (cluster.lab.external("ext"), cluster.lab.node("node2"));
    let links = [link(node, "eth0")?, link(ext, "eth0")?];
    for bits in 0..16 {
        let [v4, is_near, partial, sums] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
        for interface in ["eth0", "veth-near"] {
            set(node, interface, Offload::Checksum, sums)?;
        }
        let (port, endpoint) = if is_near {
            (30053, "near")
        } else {
            (30054, "far")
        };
        let (from, to) = (
            address(ext, v4),
            SocketAddr::from((address(node, v4), port)),
        );
        let socket = udp(ext, (from, 0))?;
        let data = bytes(100, 7);
        let plain = Packet {
            link: links,
            ..Packet::new(
                from,
                to.ip(),
                Payload::Udp {
                    ports: [socket.local_addr()?.port(), to.port()],
                    summed: true,
                    data: data.clone(),
                },
            )
        };
        // An option that a receiver skips if it does not know it (RFC 8200 section 4.2; 0x1e is an experimental one,
        // RFC 4727), in headers of one word and of three.
        let padded = |words: u8| {
            let mut body = vec![words, 0x1e, 4 + 8 * words];
            body.resize(7 + 8 * usize::from(words), 0);
            body
        };
        let mut packets = Vec::new();
        if v4 {
            for words in [1, 3, 10] {
                let mut options = vec![1; 4 * words - 1];
                options.push(0);
                packets.push(Packet {
                    options,
                    ..plain.clone()
                });
            }
        } else {
            for chain in [
                &[(protocol::HOP_BY_HOP, 0)][..],
                &[(protocol::DESTINATION, 0)],
                &[(protocol::HOP_BY_HOP, 2), (protocol::DESTINATION, 2)],
            ] {
                let extensions = chain
                    .iter()
                    .map(|(number, words)| (*number, padded(*words)));
                packets.push(Packet {
                    extensions: extensions.collect(),
                    ..plain.clone()
                });
            }
        }
        for packet in packets {
            if partial {
                inject_partial(ext, "eth0", &packet)?;
            } else {
                inject(ext, "eth0", &[packet.frame()])?;
            }
            let (options, extensions) = (&packet.options, &packet.extensions);
            let what = || {
                format!(
                    "{to}, options {options:?}, {extensions:?}; checksums by the client's device: {partial}, by the \
                     node's: {sums}"
                )
            };
            ensure!(answered(&socket, to, &data).with_context(what)? == endpoint);
        }
    }
    Ok(())
}

/// Adds a link, from `q0` to the node's `q1`, that does not lead through the lab's switch: the switch would look into packets.
fn cable(ext: &Host, node: &Host) -> Result<()> {
    ext.ip(&format!(
        "link add q0 type veth peer name q1 netns {}",
        node.netns()
    ))?;
    node.ip("addr add 192.0.2.1/24 dev q1")?;
    node.ip("addr add fd79::1/64 dev q1 nodad")?;
    node.ip("link set q1 up")?;
    ext.ip("link set q0 up")?;
    Ok(())
}

/// The frames have a whole link-layer header, and the rest is cut off at every possible length. Then come a frame with
/// the tag of a VLAN and a whole frame.
fn frames_that_are_cut_short_do_no_harm() -> Result<()> {
    let lab = Cluster::lab()?;
    let (ext, node) = (lab.external("ext").clone(), lab.node("node2").clone());
    cable(&ext, &node)?;
    let cluster = Cluster::start_in(lab, &["near"], |lab| vec![web(lab, "near")], &[])?;
    let links = [link(&node, "q1")?, link(&ext, "q0")?];
    for v4 in [true, false] {
        let (from, to) = (address(&ext, v4), address(&node, v4));
        let packet = |payload| Packet {
            link: links,
            ..Packet::new(from, to, payload)
        };
        let syn = |port| {
            packet(Payload::Tcp {
                ports: [port, 30080],
                flags: flags::SYN,
                options: Vec::new(),
                data: Vec::new(),
            })
        };
        let datagram = packet(Payload::Udp {
            ports: [20_000, 30053],
            summed: true,
            data: Vec::new(),
        });
        let mut frames = Vec::new();
        for whole in [syn(20_000).frame(), datagram.frame()] {
            frames.extend((LINK..whole.len()).map(|cut| whole[..cut].to_vec()));
        }
        let cut = u64::try_from(frames.len())?;
        // Of a VLAN that the node is not in: the kernel puts the tag aside, and the rest looks like
        // any other packet.
        let mut tagged = syn(20_001).frame();
        tagged.splice(12..12, [0x81, 0, 0, 42]);
        frames.extend([tagged, syn(20_002).frame()]);
        let before = [Reason::Malformed, Reason::Masqueraded].map(|r| cluster.verdicts(r));
        let [malformed, masqueraded] = before;
        let wanted = [malformed? + cut, masqueraded? + 1];
        inject(&ext, "q0", &frames)?;
        eventually(|| {
            let now = [
                cluster.verdicts(Reason::Malformed)?,
                cluster.verdicts(Reason::Masqueraded)?,
            ];
            ensure!(
                now == wanted,
                "malformed and masqueraded: {now:?}, not {wanted:?}"
            );
            Ok(())
        })?;
        let stream = tcp(&ext, (to, 30080).into())?;
        ensure!(transfer(&stream, &bytes(1000, 1))? == "near");
    }
    Ok(())
}

/// The kernel moves a tag with VLAN id 0 aside and treats the packet as untagged. The packet goes on without its tag.
fn a_priority_is_no_vlan() -> Result<()> {
    const PRIORITY: [u8; 4] = [0x81, 0, 0x60, 0];
    let lab = Cluster::lab()?;
    let (ext, node) = (lab.external("ext").clone(), lab.node("node2").clone());
    cable(&ext, &node)?;
    let cluster = Cluster::start_in(lab, &["near"], |lab| vec![web(lab, "near")], &[])?;
    let near = cluster.lab.pod("near");
    let rules = "table netdev seen { chain arriving { type filter hook ingress device eth0 priority 0; policy accept\n\
                 udp dport 53 counter comment \"all\"\nvlan id 0 counter comment \"tagged\"; }\n}";
    let script = format!("nft -f - <<'end'\n{rules}\nend");
    near.command("sh").args(["-c", &script]).run()?;
    let links = [link(&node, "q1")?, link(&ext, "q0")?];
    for v4 in [true, false] {
        let (from, to) = (address(&ext, v4), address(&node, v4));
        let frame = |port: u16, tags: &[u8]| {
            let payload = Payload::Udp {
                ports: [port, 30053],
                summed: true,
                data: vec![0; 30],
            };
            let packet = Packet {
                link: links,
                ..Packet::new(from, to, payload)
            };
            let mut frame = packet.frame();
            frame.splice(12..12, tags.iter().copied());
            frame
        };
        let before = [Reason::Malformed, Reason::Masqueraded].map(|r| cluster.verdicts(r));
        let [malformed, masqueraded] = before;
        let wanted = [malformed? + 1, masqueraded? + 2];
        let frames = [
            frame(20_001, &PRIORITY),
            // Of a VLAN that the node is not in, alone and in a priority.
            frame(20_002, &[0x81, 0, 0, 42]),
            frame(20_003, &[PRIORITY, [0x81, 0, 0, 42]].concat()),
            frame(20_004, &[PRIORITY, PRIORITY].concat()),
            frame(20_005, &[0x88, 0xa8, 0, 0]),
        ];
        inject(&ext, "q0", &frames)?;
        eventually(|| {
            let now = [
                cluster.verdicts(Reason::Malformed)?,
                cluster.verdicts(Reason::Masqueraded)?,
            ];
            ensure!(
                now == wanted,
                "malformed and masqueraded: {now:?}, not {wanted:?}"
            );
            Ok(())
        })?;
    }
    eventually(|| {
        let seen = near
            .command("nft")
            .args(["list", "table", "netdev", "seen"])
            .run()?;
        let count = |what: &str| {
            let line = seen.lines().find(|line| line.contains(what));
            let count = line.and_then(|line| {
                line.split("packets ")
                    .nth(1)?
                    .split(' ')
                    .next()?
                    .parse::<u64>()
                    .ok()
            });
            count.with_context(|| seen.clone())
        };
        ensure!(count("all")? >= 4, "{seen}");
        ensure!(count("tagged")? == 0, "the tag went along: {seen}");
        Ok(())
    })
}

/// Where the devices of the way make checksums and segments, and where the stack does.
fn payloads_are_whole_whoever_makes_checksums_and_segments() -> Result<()> {
    use Offload::{Checksum, Receive, Segments};
    let cluster = Cluster::start(|lab| vec![web(lab, "near"), elsewhere(lab)])?;
    let lab = &cluster.lab;
    let (ext, node) = (lab.external("ext"), lab.node("node2"));
    let (near, far) = (lab.pod("near"), lab.pod("far"));
    let devices = [
        (ext, "eth0"),
        (node, "eth0"),
        (node, "veth-near"),
        (near, "eth0"),
        (far, "eth0"),
    ];
    for (sums, segments, receive) in [
        (true, true, true),
        (true, true, false),
        (true, false, true),
        (true, false, false),
        (false, false, true),
        (false, false, false),
    ] {
        for (host, interface) in devices {
            set(host, interface, Checksum, sums)?;
            set(host, interface, Segments, segments)?;
            set(host, interface, Receive, receive)?;
        }
        for v4 in [true, false] {
            for (offset, endpoint) in [(0, "near"), (1, "far")] {
                let what = || format!("{sums} {segments} {receive}: {v4}, {endpoint}");
                let to: SocketAddr = (address(node, v4), 30080 + offset).into();
                let stream = tcp(ext, to).with_context(what)?;
                let who = transfer(&stream, &bytes(1_000_000, 9)).with_context(what)?;
                ensure!(who == endpoint, "{}", what());
                let to: SocketAddr = (address(node, v4), 30053 + offset).into();
                let socket = udp(ext, (address(ext, v4), 0))?;
                for length in [1, 1400, 5000] {
                    let who = ask(&socket, to, &bytes(length, 2)).with_context(what)?;
                    ensure!(who == endpoint, "{}", what());
                }
            }
        }
    }
    Ok(())
}

/// A pod sends packets of VXLAN to a VIP, many segments in one, and the way is narrower than they are. The programs do not
/// see the headers inside: the segments may be longer than the way's MTU (`docs/differences.md`).
fn segments_of_a_tunnel_to_a_service_pass() -> Result<()> {
    const VXLAN: u16 = 4789;
    let tunnel = |lab: &Lab| {
        let service = Service::new("tunnel", &["10.96.0.13"]).port("udp", VXLAN, VXLAN);
        vec![service.endpoints(&[lab.pod("far")])]
    };
    let lab = Cluster::lab_of_packets()?;
    let cluster = Cluster::start_in(lab, &["far"], tunnel, &POD_CIDRS)?;
    let (client, far) = (cluster.client(), cluster.lab.pod("far"));
    let node = cluster.lab.node("node2");
    narrow(node)?;
    set(node, "eth0", Offload::Segments, false)?;
    let back = client.ipv4().to_string();
    for (host, to, own) in [(client, "10.96.0.13", 1), (far, &back, 2)] {
        host.ip(&format!(
            "link add vx type vxlan id 7 dstport {VXLAN} remote {to} dev eth0 nolearning"
        ))?;
        host.ip("link set vx mtu 1400 up")?;
        host.ip(&format!("addr add 172.31.0.{own}/24 dev vx"))?;
    }
    let inside = SocketAddr::from(([172, 31, 0, 2], 7));
    let _server = far.serve(&["--tcp", &inside.to_string()])?;
    let beyond = cluster.lab.node("node1");
    let (at, seen) = (link(beyond, "eth0")?, tap(beyond)?);
    let stream = tcp(client, inside)?;
    ensure!(transfer(&stream, &bytes(300_000, 4))? == "far");
    let frames = arrived(&seen).into_iter();
    let lengths = frames.filter_map(|frame| frame.strip_prefix(&at).map(|rest| rest.len() - 8));
    let longest = lengths.max().context("no frame")?;
    println!("a VXLAN's longest packet on a way of 1400 bytes: {longest}");
    Ok(())
}
