//! The cluster's network: a switch that connects the control plane and the nodes, static routes to pods, no route
//! outside.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns};

use super::place::{CONTROL, CONTROL_V4, CONTROL_V6, NETNS_PREFIX, Node, SWITCH, in_netns, netns};
use crate::command::{check, output};

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
        // The default route ends at the control plane, which has no default route itself.
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

/// Unplugs a member from the switch, like a cut cable, or plugs it in again.
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

/// Removes the route of [`route`].
pub fn unroute(address: &str) -> Result<()> {
    ip_in(CONTROL, &format!("route delete {address}"))
}

/// Has the nodes' router silently drop packets to an address, or stops this.
pub fn swallow(address: &str, on: bool) -> Result<()> {
    let what = if on { "replace" } else { "delete" };
    ip_in(CONTROL, &format!("route {what} blackhole {address}"))
}

/// Has the control plane silently drop packets of a node's established TCP connections, like a firewall that has lost
/// its state. New connections work. Returns the number of these connections.
pub fn forget_connections(node: Node, port: u16) -> Result<usize> {
    let established = output(in_netns(CONTROL, "cat").arg("/proc/net/tcp"))?;
    let ports = ports_of(&established, node.ipv4(), port);
    let list: Vec<String> = ports.iter().map(ToString::to_string).collect();
    let (list, address) = (list.join(", "), node.ipv4());
    let rules = format!(
        "table ip {FORGOTTEN} {{
            chain in {{
                type filter hook input priority 0;
                ip saddr {address} tcp dport {port} tcp sport {{ {list} }} drop
            }}
            chain out {{
                type filter hook output priority 0;
                ip daddr {address} tcp sport {port} tcp dport {{ {list} }} drop
            }}
        }}"
    );
    check(nft().arg(rules))?;
    Ok(ports.len())
}

/// Removes the rules of [`forget_connections`].
pub fn remember_connections() -> Result<()> {
    check(nft().arg(format!("delete table ip {FORGOTTEN}")))
}

const FORGOTTEN: &str = "forgotten";

fn nft() -> Command {
    in_netns(CONTROL, "nft")
}

/// Returns the remote ports of established connections with this local port, from `/proc/net/tcp`.
fn ports_of(table: &str, remote: Ipv4Addr, port: u16) -> BTreeSet<u16> {
    const ESTABLISHED: &str = "01";
    let remote = format!("{:08X}", u32::from_ne_bytes(remote.octets()));
    let local = format!("{port:04X}");
    let mut ports = BTreeSet::new();
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, here, there, state, ..] = fields.as_slice() else {
            continue;
        };
        let (Some((_, from)), Some((address, to))) = (here.split_once(':'), there.split_once(':'))
        else {
            continue;
        };
        if *state == ESTABLISHED && from == local && address == remote {
            ports.extend(u16::from_str_radix(to, 16));
        }
    }
    ports
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

/// Sends an HTTP request from a member's network namespace. Returns status and body of the answer.
pub fn get(member: &str, to: &str, path: &str) -> Result<(u16, String)> {
    request(
        member,
        to,
        &format!("GET {path} HTTP/1.0\r\nHost: {to}\r\n\r\n"),
    )
}

/// Sends an HTTP POST request with a body.
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
    // This runs in a thread of its own, because the thread stays in the namespace.
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

/// Returns the members that have a namespace.
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

/// Removes all namespaces, with their links and routes.
pub fn remove() -> Result<()> {
    for member in members() {
        let name = format!("{NETNS_PREFIX}{member}");
        check(Command::new("ip").args(["netns", "delete", &name]))
            .with_context(|| format!("cannot remove the network namespace {name}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn established_connections_are_found_by_address_and_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n   \
            0: 0100090A:192B 00000000:0000 0A 00000000:00000000\n   \
            1: 0100090A:192B 0B00090A:C350 01 00000000:00000000\n   \
            2: 0100090A:192B 0C00090A:C351 01 00000000:00000000\n   \
            3: 0100090A:192B 0B00090A:C352 06 00000000:00000000\n";
        let ports = |last| ports_of(table, Ipv4Addr::new(10, 9, 0, last), 6443);
        assert_eq!(ports(11), BTreeSet::from([50_000]));
        assert_eq!(ports(12), BTreeSet::from([50_001]));
        assert!(ports(13).is_empty());
    }
}
