//! The cluster's network: a switch, the control plane and the nodes at it, static routes to pods, no route outside.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns};

use super::place::{CONTROL, CONTROL_V4, CONTROL_V6, NETNS_PREFIX, Node, SWITCH, netns};
use crate::command::check;

/// Makes all namespaces, links and routes.
pub fn make(nodes: &[Node]) -> Result<()> {
    add_netns(SWITCH)?;
    ip_in(SWITCH, "link add br0 type bridge")?;
    ip_in(SWITCH, "link set br0 up")?;
    connect(CONTROL, &[CONTROL_V4.into(), CONTROL_V6.into()])?;
    forward(CONTROL)?;
    for node in nodes {
        connect(&node.name(), &node.addresses())?;
        forward(&node.name())?;
        // The way to everything else ends at the control plane, which has no default route.
        ip_in(&node.name(), &format!("route add default via {CONTROL_V4}"))?;
        ip_in(&node.name(), &format!("route add default via {CONTROL_V6}"))?;
    }
    for node in nodes {
        let others = nodes
            .iter()
            .filter(|other| *other != node)
            .map(|n| n.name());
        for member in others.chain([CONTROL.to_owned()]) {
            for (range, via) in node.pod_ranges().iter().zip(node.addresses()) {
                ip_in(&member, &format!("route add {range} via {via}"))?;
            }
        }
    }
    Ok(())
}

/// Takes a member off the switch, or puts it back: what a cut cable does.
pub fn plug(member: &str, up: bool) -> Result<()> {
    let state = if up { "up" } else { "down" };
    ip_in(SWITCH, &format!("link set port-{member} {state}"))
}

/// Routes an address from the outside client to a node, as a cloud's load balancer does.
pub fn route(address: &str, node: Node) -> Result<()> {
    let via = if address.contains(':') {
        node.ipv6().to_string()
    } else {
        node.ipv4().to_string()
    };
    ip_in(CONTROL, &format!("route replace {address} via {via}"))
}

fn add_netns(member: &str) -> Result<()> {
    check(Command::new("ip").args(["netns", "add", &format!("{NETNS_PREFIX}{member}")]))?;
    ip_in(member, "link set lo up")
}

fn connect(member: &str, addresses: &[IpAddr]) -> Result<()> {
    add_netns(member)?;
    ip_in(
        SWITCH,
        &format!("link add port-{member} type veth peer name eth0 netns {NETNS_PREFIX}{member}"),
    )?;
    ip_in(SWITCH, &format!("link set port-{member} master br0 up"))?;
    ip_in(member, "link set eth0 up")?;
    for address in addresses {
        if address.is_ipv4() {
            ip_in(member, &format!("address add {address}/24 dev eth0"))?;
        } else {
            ip_in(member, &format!("address add {address}/64 dev eth0 nodad"))?;
        }
    }
    Ok(())
}

fn forward(member: &str) -> Result<()> {
    check(
        Command::new("nsenter")
            .arg(format!("--net={}", netns(member).display()))
            .args(["sysctl", "--quiet", "--write"])
            .args(["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])
            .args([
                "net.ipv4.conf.all.rp_filter=0",
                "net.ipv4.conf.default.rp_filter=0",
            ]),
    )
}

fn ip_in(member: &str, arguments: &str) -> Result<()> {
    check(
        Command::new("ip")
            .args(["-netns", &format!("{NETNS_PREFIX}{member}")])
            .args(arguments.split(' ')),
    )
}

/// A request by HTTP from a member's network namespace: the answer's status and body.
pub fn get(member: &str, to: &str, path: &str) -> Result<(u16, String)> {
    request(
        member,
        to,
        &format!("GET {path} HTTP/1.0\r\nHost: {to}\r\n\r\n"),
    )
}

/// Likewise, with a body.
pub fn post(member: &str, to: &str, path: &str, body: &str) -> Result<(u16, String)> {
    let length = body.len();
    request(
        member,
        to,
        &format!("POST {path} HTTP/1.0\r\nHost: {to}\r\nContent-Length: {length}\r\n\r\n{body}"),
    )
}

fn request(member: &str, to: &str, request: &str) -> Result<(u16, String)> {
    let (namespace, address, request) =
        (netns(member), to.parse::<SocketAddr>()?, request.to_owned());
    // A thread of its own: it does not come back from the namespace.
    let asking = thread::spawn(move || -> Result<String> {
        setns(File::open(&namespace)?, CloneFlags::CLONE_NEWNET)?;
        let limit = Duration::from_secs(5);
        let mut stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    });
    let answer = asking.join().expect("a thread that does not panic");
    let answer = answer.with_context(|| format!("cannot ask {to} from {member}"))?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("an answer without an end")?;
    let status = head
        .split(' ')
        .nth(1)
        .context("an answer without a status")?;
    Ok((status.parse()?, body.to_owned()))
}

/// The members that have a namespace.
pub fn members() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/run/netns") else {
        return Vec::new();
    };
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter_map(|name| name.strip_prefix(NETNS_PREFIX).map(str::to_owned))
        .collect()
}

/// Removes all namespaces, and with them links and routes.
pub fn remove() -> Result<()> {
    for member in members() {
        let name = format!("{NETNS_PREFIX}{member}");
        check(Command::new("ip").args(["netns", "delete", &name]))
            .with_context(|| format!("cannot remove the network namespace {name}"))?;
    }
    Ok(())
}
