//! Rules of other programs: iptables, in its legacy form and its nft form, and nft work in the lab, on the kernel of
//! this machine. The scenarios that compare the dataplane with such rules, or run it beside them, depend on this.

use std::net::{AddrParseError, SocketAddr};

use anyhow::{Context as _, Result};
use dataplane_tests::Lab;

use crate::cluster::{fails, reaches, serve};

scenarios! {
    Lab:
    iptables_legacy_translates_and_refuses,
    iptables_over_nftables_translates_and_refuses,
    nft_translates_and_refuses,
}

fn iptables_legacy_translates_and_refuses() -> Result<()> {
    check(|service| {
        (
            format!("{}-legacy-restore", service.tool),
            iptables(service),
        )
    })
}

fn iptables_over_nftables_translates_and_refuses() -> Result<()> {
    check(|service| (format!("{}-nft-restore", service.tool), iptables(service)))
}

fn nft_translates_and_refuses() -> Result<()> {
    check(|service| ("nft -f -".into(), nft(service)))
}

/// A service with one endpoint and one that has none, of each family.
const SERVICES: [Addresses; 2] = [
    Addresses {
        tool: "iptables",
        vip: "10.96.0.50",
        empty: "10.96.0.51",
        endpoint: "10.244.1.5",
        to: "10.244.1.5:7",
    },
    Addresses {
        tool: "ip6tables",
        vip: "fd00:96::50",
        empty: "fd00:96::51",
        endpoint: "fd00:10:244:1::5",
        to: "[fd00:10:244:1::5]:7",
    },
];

struct Addresses {
    /// The tool for rules of their family.
    tool: &'static str,
    vip: &'static str,
    empty: &'static str,
    endpoint: &'static str,
    to: &'static str,
}

/// Loads rules into a node, by the program and of the text that `tool` says for each family, and has
/// a pod of that node use both services.
fn check(tool: impl Fn(&Addresses) -> (String, String)) -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "far", "10.244.1.5")
        .pod("node1", "sleep", "10.244.1.8")
        .build()?;
    let _server = serve(lab.pod("far"))?;
    let sleep = lab.pod("sleep");
    // A packet is routed before it is refused; no host has this gateway's address.
    lab.node("node1")
        .ip("route add 10.96.0.0/16 via 192.168.77.200")?;
    lab.node("node1")
        .ip("-6 route add fd00:96::/64 via fd77::200")?;
    for service in &SERVICES {
        let (load, rules) = tool(service);
        let script = format!("{load} <<'end'\n{rules}\nend");
        let node = lab.node("node1").command("sh").args(["-c", &script]);
        node.run().with_context(|| load)?;
        let at = |ip: &str| Ok::<_, AddrParseError>(SocketAddr::new(ip.parse()?, 80).to_string());
        let (vip, empty) = (at(service.vip)?, at(service.empty)?);
        reaches(sleep, &vip, "connect --count 5", &["far"])?;
        fails(sleep, &empty, "connect", "ECONNREFUSED")?;
    }
    Ok(())
}

/// The matches and targets of kube-proxy's rules, in one chain.
fn iptables(addresses: &Addresses) -> String {
    let Addresses {
        tool,
        vip,
        empty,
        endpoint,
        to,
    } = addresses;
    let reject = match *tool {
        "iptables" => "icmp-port-unreachable",
        _ => "icmp6-port-unreachable",
    };
    format!(
        "*mangle\n\
         -A PREROUTING -j CONNMARK --restore-mark\n\
         COMMIT\n\
         *filter\n\
         -A FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A FORWARD -d {empty} -p tcp -m comment --comment \"no endpoints\" -m multiport --dports 80,81 \
         -j REJECT --reject-with {reject}\n\
         COMMIT\n\
         *nat\n\
         :SERVICE - [0:0]\n\
         -A PREROUTING -m addrtype ! --dst-type LOCAL -j SERVICE\n\
         -A SERVICE -d {vip} -p tcp -m tcp --dport 80 -m recent --name seen --set -j MARK --set-xmark \
         0x4000/0x4000\n\
         -A SERVICE -d {vip} -p tcp -m tcp --dport 80 -m statistic --mode random --probability 0.5 \
         -j DNAT --to-destination {to}\n\
         -A SERVICE -d {vip} -p tcp -m tcp --dport 80 -j DNAT --to-destination {to}\n\
         -A POSTROUTING -d {endpoint} -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully\n\
         COMMIT"
    )
}

fn nft(addresses: &Addresses) -> String {
    let Addresses { vip, empty, to, .. } = addresses;
    let (family, address, unreachable) = match addresses.tool {
        "iptables" => ("ip", "ipv4_addr", "icmp"),
        _ => ("ip6", "ipv6_addr", "icmpv6"),
    };
    format!(
        "table {family} services {{\n\
         map vips {{ type {address} . inet_proto . inet_service : verdict\n\
         elements = {{ {vip} . tcp . 80 : goto service }}; }}\n\
         set refused {{ type {address}; elements = {{ {empty} }}; }}\n\
         chain prerouting {{ type nat hook prerouting priority -100; policy accept\n\
         fib daddr type != local {family} daddr . meta l4proto . th dport vmap @vips; }}\n\
         chain service {{ meta mark set meta mark or 0x4000\n\
         numgen random mod 2 vmap {{ 0 : goto endpoint, 1 : goto endpoint }}; }}\n\
         chain endpoint {{ meta l4proto tcp dnat to {to}; }}\n\
         chain forward {{ type filter hook forward priority 0; policy accept\n\
         ct state invalid drop\n\
         {family} daddr @refused reject with {unreachable} type port-unreachable; }}\n\
         chain postrouting {{ type nat hook postrouting priority 100; policy accept\n\
         meta mark and 0x4000 != 0 masquerade fully-random; }}\n\
         }}"
    )
}
