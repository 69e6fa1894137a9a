//! Firewalls as Docker, ufw and firewalld set them up, with the operator's rule for pods; and the rules by which network
//! plug-ins masquerade. Connections to services live, and the kernel's conntrack calls none of their packets invalid.

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::Mode;
use dataplane_tests::Host;

use super::{Equal, agree, counters, takes, worlds};
use crate::{differential::world::Worker, iptables::load};

scenarios! {
    Dataplane:
    firewalls_pass_what_they_pass_with_kube_proxy,
    masquerade_rules_of_plugins_break_no_connection,
}

/// This mode's rules are in tables of their own, and do not accept for others in FORWARD.
const JUDGE: Worker = Worker::KubeProxy(Mode::Nftables);

/// Rules, in the form of `iptables-save` for both families, or of nft.
struct Shape {
    what: &'static str,
    rules: &'static str,
}

/// Only requests have a rule in the last two: replies pass because the kernel knows their flow.
const FIREWALLS: [Shape; 3] = [
    Shape {
        what: "Docker",
        rules: "*filter\n:FORWARD DROP [0:0]\n:DOCKER-USER - [0:0]\n:DOCKER-FORWARD - [0:0]\n:DOCKER-CT - [0:0]\n\
                -A FORWARD -j DOCKER-USER\n-A FORWARD -j DOCKER-FORWARD\n-A DOCKER-FORWARD -j DOCKER-CT\n\
                -A DOCKER-FORWARD -i docker0 -j ACCEPT\n\
                -A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                -A DOCKER-USER -s PODS -j ACCEPT\n-A DOCKER-USER -d PODS -j ACCEPT\nCOMMIT",
    },
    Shape {
        what: "ufw",
        rules: "*filter\n:FORWARD DROP [0:0]\n:ufw-before-input - [0:0]\n:ufw-before-forward - [0:0]\n\
                :ufw-user-forward - [0:0]\n\
                -A INPUT -j ufw-before-input\n-A ufw-before-input -m conntrack --ctstate INVALID -j DROP\n\
                -A FORWARD -j ufw-before-forward\n\
                -A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                -A ufw-before-forward -j ufw-user-forward\n-A ufw-user-forward -d PODS -j ACCEPT\nCOMMIT",
    },
    Shape {
        what: "firewalld",
        rules: "table inet firewalld {\n\
                chain filter_PREROUTING { type filter hook prerouting priority filter + 10; policy accept;\n\
                icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept\n\
                meta nfproto ipv6 fib saddr . mark . iif oif missing drop\n}\n\
                chain filter_FORWARD { type filter hook forward priority filter + 10; policy accept;\n\
                ct state { established, related } accept\nct status dnat accept\niifname lo accept\n\
                ct state invalid drop\nip daddr 10.244.0.0/16 accept\nip6 daddr fd00:10:244::/48 accept\n\
                reject with icmpx admin-prohibited\n}\n}",
    },
];

const MASQUERADES: [Shape; 4] = [
    Shape {
        what: "Flannel",
        rules: "*nat\n:FLANNEL-POSTRTG - [0:0]\n-A POSTROUTING -j FLANNEL-POSTRTG\n\
                -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n\
                -A FLANNEL-POSTRTG -s OWN -d PODS -j RETURN\n-A FLANNEL-POSTRTG -s PODS -d OWN -j RETURN\n\
                -A FLANNEL-POSTRTG ! -s PODS -d OWN -j RETURN\n\
                -A FLANNEL-POSTRTG -s PODS ! -d MULTICAST -j MASQUERADE --random-fully\n\
                -A FLANNEL-POSTRTG ! -s PODS -d PODS -j MASQUERADE --random-fully\nCOMMIT",
    },
    Shape {
        what: "an earlier Flannel",
        rules: "*nat\n-A POSTROUTING -s PODS -d PODS -j RETURN\n-A POSTROUTING -s PODS ! -d MULTICAST -j MASQUERADE\n\
                -A POSTROUTING ! -s PODS -d PODS -j MASQUERADE\nCOMMIT",
    },
    Shape {
        what: "every packet to pods, with random ports",
        rules: "*nat\n-A POSTROUTING ! -s PODS -d PODS -j MASQUERADE --random-fully\nCOMMIT",
    },
    Shape {
        what: "every packet of pods that leaves",
        rules: "*nat\n-A POSTROUTING -s PODS ! -d PODS -j MASQUERADE\nCOMMIT",
    },
];

impl Shape {
    fn load(&self, node: &Host) -> Result<()> {
        if self.rules.starts_with("table") {
            return load(node, "nft -f -", self.rules);
        }
        for (tool, pods, own, multicast) in [
            ("iptables", "10.244.0.0/16", "10.244.1.0/24", "224.0.0.0/4"),
            (
                "ip6tables",
                "fd00:10:244::/48",
                "fd00:10:244:1::/64",
                "ff00::/8",
            ),
        ] {
            let rules = self.rules.replace("PODS", pods);
            let rules = rules.replace("OWN", own).replace("MULTICAST", multicast);
            load(node, &format!("{tool}-nft-restore --noflush"), &rules)?;
        }
        Ok(())
    }

    /// Removes the tables, which have nothing else in them.
    fn remove(&self, node: &Host) -> Result<()> {
        let tables: &[&str] = match &self.rules[..4] {
            "*nat" => &["ip nat", "ip6 nat"],
            "*fil" => &["ip filter", "ip6 filter"],
            _ => &["inet firewalld"],
        };
        for table in tables {
            node.command("nft")
                .arg(format!("delete table {table}"))
                .run()?;
        }
        Ok(())
    }
}

/// Counts packets that the kernel's conntrack cannot assign, and nothing else.
const INVALID: &str = "table inet invalid {\n\
    chain prerouting { type filter hook prerouting priority mangle; ct state invalid counter; }\n\
    chain forward { type filter hook forward priority mangle; ct state invalid counter; }\n}";

fn firewalls_pass_what_they_pass_with_kube_proxy() -> Result<()> {
    let worlds = worlds(&[JUDGE, Worker::Dataplane])?;
    let agent = worlds[1].agent().context("an agent")?;
    for world in &worlds {
        load(world.host("node1"), "nft -f -", INVALID)?;
    }
    for shape in &FIREWALLS {
        for world in &worlds {
            shape.load(world.host("node1")).context(shape.what)?;
        }
        takes(agent, "stack").context(shape.what)?;
        agree(&worlds, Equal::All, "yyyyyyyy").context(shape.what)?;
        let invalid = counters(worlds[1].host("node1"), "invalid")?;
        ensure!(invalid == [0, 0], "{}: invalid: {invalid:?}", shape.what);
        for world in &worlds {
            shape.remove(world.host("node1"))?;
        }
        takes(agent, "fast").context(shape.what)?;
    }
    Ok(())
}

/// By either path. Where such a rule masquerades a connection that kube-proxy does not masquerade, the endpoint's view is
/// another by the fast path.
fn masquerade_rules_of_plugins_break_no_connection() -> Result<()> {
    let worlds = worlds(&[JUDGE, Worker::Dataplane, Worker::Stack])?;
    for shape in &MASQUERADES {
        for world in &worlds {
            shape.load(world.host("node1")).context(shape.what)?;
        }
        takes(worlds[1].agent().context("an agent")?, "fast").context(shape.what)?;
        agree(&worlds, Equal::Endpoints, "yyyyyyyy").context(shape.what)?;
        for world in &worlds {
            shape.remove(world.host("node1"))?;
        }
    }
    Ok(())
}
