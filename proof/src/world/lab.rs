//! The node of the lab, with its interfaces and routes.

use std::{collections::BTreeMap, fmt::Write as _, sync::atomic::Ordering};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::packet::Iface;
use dataplane_tests::{Host, Lab};

use super::{Interface, World, addr};

/// Builds the lab: a node with four pods and a default route. One pod's link has a small MTU, and one pod is silent.
///
/// # Errors
/// If the lab cannot be built.
pub fn lab() -> Result<Lab> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.10")
        .pod("node1", "near2", "10.244.1.11")
        .pod("node1", "small", "10.244.1.12")
        .pod("node1", "quiet", "10.244.1.13")
        .build()?;
    let node = lab.node("node1");
    let mut script = String::from(
        "link set veth-small mtu 1400
         route add default via 192.168.77.254
         -6 route add default via fd77::254
         route add blackhole 10.9.0.0/16
         -6 route add blackhole fd09::/16
         route add prohibit 10.10.0.0/16
         -6 route add prohibit fd10::/16
         route add unreachable 10.11.0.0/16
         -6 route add unreachable fd11::/16
         route add throw 10.12.0.0/16
         -6 route add throw fd12::/16
         route add local 10.13.0.0/16 dev lo
         -6 route add local fd13::/16 dev lo
         neigh replace 192.168.77.254 lladdr 02:00:00:00:fe:fe dev eth0 nud permanent
         -6 neigh replace fd77::254 lladdr 02:00:00:00:fe:fe dev eth0 nud permanent\n",
    );
    for interface in [
        "eth0",
        "veth-near",
        "veth-near2",
        "veth-small",
        "veth-quiet",
    ] {
        // The model has no routes to link-local addresses.
        let _ = writeln!(script, "-6 addr flush dev {interface} scope link");
    }
    for (number, name) in [(10, "near"), (11, "near2"), (12, "small")] {
        for address in [
            format!("10.244.1.{number}"),
            format!("fd00:10:244:1::{number}"),
        ] {
            let mac = format!("02:00:00:00:01:{number}");
            let neigh =
                format!("neigh replace {address} lladdr {mac} dev veth-{name} nud permanent");
            let _ = writeln!(script, "{neigh}");
        }
    }
    for line in script.lines() {
        node.ip(line)?;
    }
    Ok(lab)
}

/// Reads the node's interfaces from `ip`: name, index, address, MTU.
pub(super) fn interfaces(node: &Host) -> Result<BTreeMap<u32, Interface>> {
    let links: Vec<serde_json::Value> = node.command("ip").args(["-json", "link"]).json()?;
    let mut all = BTreeMap::new();
    for link in links {
        let name = link["ifname"].as_str().unwrap_or_default().to_owned();
        if name != "eth0" && !name.starts_with("veth-") {
            continue;
        }
        let number = |key: &str| link[key].as_u64().context("a number");
        let mut mac = [0; 6];
        let text = link["address"].as_str().unwrap_or_default();
        for (byte, digits) in mac.iter_mut().zip(text.split(':')) {
            *byte = u8::from_str_radix(digits, 16)?;
        }
        let pod = name != "eth0";
        let masquerade_to = match name.as_str() {
            "eth0" => [Some(addr("192.168.77.1")), Some(addr("fd77::1"))],
            "veth-quiet" => [None; 2],
            _ => [Some(addr("10.244.1.1")), Some(addr("fd00:10:244:1::1"))],
        };
        let interface = Interface {
            name,
            mac,
            pod,
            asked: if pod { Iface::STRICT } else { 0 },
            segment: 0,
            masquerade: [0; 2],
            masquerade_to,
            mtu: number("mtu")?.try_into()?,
        };
        all.insert(number("ifindex")?.try_into()?, interface);
    }
    ensure!(all.len() == 5, "not the interfaces of the lab: {all:?}");
    Ok(all)
}

impl World {
    /// Adds the default routes to the node of [`lab`], or removes them.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn route(&self, lab: &Lab, routed: bool) -> Result<()> {
        if self.routed.swap(routed, Ordering::Relaxed) != routed {
            let verb = if routed { "add" } else { "del" };
            let node = lab.node("node1");
            node.ip(&format!("route {verb} default via 192.168.77.254"))?;
            node.ip(&format!("-6 route {verb} default via fd77::254"))?;
        }
        Ok(())
    }
}
