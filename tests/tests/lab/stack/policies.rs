//! Network policies as kube-router and Calico write them for iptables: every way to a pod is allowed or refused as with
//! kube-proxy, by default.
//!
//! The chains have the shapes of both projects' documentation. kube-router's sets of addresses are rules here, because
//! not every kernel of the tests has ipset.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use dataplane_peers::Mode;

use super::{Equal, agree, takes, worlds};
use crate::{
    differential::world::{Worker, World},
    iptables::load,
    sockets::address,
};

scenarios! {
    Dataplane:
    policies_as_kube_router_writes_them_hold,
    policies_as_calico_writes_them_hold,
}

/// The pods of node1.
const PODS: [&str; 4] = ["e1", "e2", "vm", "pod"];

/// The sources that may reach the pod e1.
#[derive(Clone, Copy)]
enum Ingress {
    All,
    From(&'static [&'static str]),
    AllBut(&'static str),
}

#[derive(Clone, Copy)]
struct Policy {
    what: &'static str,
    ingress: Ingress,
    /// Whether the pods of node1 may send.
    egress: bool,
    /// The ways that are answered, in the order of `WAYS`.
    wanted: &'static str,
}

const POLICIES: [Policy; 6] = [
    Policy {
        what: "none",
        ingress: Ingress::All,
        egress: true,
        wanted: "yyyyyyyy",
    },
    Policy {
        what: "deny ingress",
        ingress: Ingress::From(&[]),
        egress: true,
        wanted: "nnnynnyn",
    },
    Policy {
        what: "allow clients",
        ingress: Ingress::From(&["vm", "pod", "far"]),
        egress: true,
        wanted: "nnnyyyyy",
    },
    Policy {
        what: "allow outside",
        ingress: Ingress::From(&["ext"]),
        egress: true,
        wanted: "yyyynnyn",
    },
    Policy {
        what: "allow all but outside",
        ingress: Ingress::AllBut("ext"),
        egress: true,
        wanted: "nnnyyyyy",
    },
    Policy {
        what: "deny egress",
        ingress: Ingress::All,
        egress: false,
        wanted: "yyyyynnn",
    },
];

impl Policy {
    /// The matches of the rules that let packets reach the pod.
    fn sources(self, world: &World, v4: bool) -> Vec<String> {
        let from = |name: &str| format!("-s {}", address(world.host(name), v4));
        match self.ingress {
            Ingress::All => vec![String::new()],
            Ingress::From(names) => names.iter().map(|name| from(name)).collect(),
            Ingress::AllBut(name) => vec![format!("! {}", from(name))],
        }
    }
}

/// Declares chains, from which `iptables-restore` then removes earlier rules.
fn declared<'a>(chains: impl Iterator<Item = &'a str>) -> Result<String> {
    let mut rules = "*filter\n".to_owned();
    for chain in chains {
        writeln!(rules, ":{chain} - [0:0]")?;
    }
    Ok(rules)
}

fn kube_router(world: &World, v4: bool, policy: Policy) -> Result<String> {
    let reject = if v4 { "icmp" } else { "icmp6" };
    let chain = |pod: &str| format!("KUBE-POD-FW-{}", pod.to_uppercase());
    let chains = PODS.map(chain);
    let fixed = [
        "KUBE-ROUTER-FORWARD",
        "KUBE-NWPLCY-DEFAULT",
        "KUBE-NWPLCY-IN",
        "KUBE-NWPLCY-OUT",
    ];
    let own = chains.iter().map(String::as_str);
    let mut rules = declared(fixed.into_iter().chain(own))?;
    let accepts = "-j MARK --set-xmark 0x10000/0x10000";
    writeln!(rules, "-A KUBE-NWPLCY-DEFAULT {accepts}")?;
    if policy.egress {
        writeln!(rules, "-A KUBE-NWPLCY-OUT {accepts}")?;
    }
    for source in policy.sources(world, v4) {
        writeln!(rules, "-A KUBE-NWPLCY-IN {source} {accepts}")?;
        writeln!(
            rules,
            "-A KUBE-NWPLCY-IN {source} -m mark --mark 0x10000/0x10000 -j RETURN"
        )?;
    }
    for (pod, fw) in PODS.into_iter().zip(&chains) {
        let ip = address(world.host(pod), v4);
        let ingress = if pod == "e1" { "IN" } else { "DEFAULT" };
        write!(
            rules,
            "-A KUBE-ROUTER-FORWARD -d {ip} -m comment --comment \"rule to jump traffic destined to POD {pod}\" -j {fw}\n\
             -A KUBE-ROUTER-FORWARD -s {ip} -m comment --comment \"rule to jump traffic from POD {pod}\" -j {fw}\n\
             -A {fw} -m conntrack --ctstate INVALID -j DROP\n\
             -A {fw} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
             -A {fw} -d {ip} -m addrtype --src-type LOCAL -j ACCEPT\n\
             -A {fw} -d {ip} -j KUBE-NWPLCY-{ingress}\n\
             -A {fw} -s {ip} -j KUBE-NWPLCY-OUT\n\
             -A {fw} -m mark ! --mark 0x10000/0x10000 -j REJECT --reject-with {reject}-port-unreachable\n\
             -A {fw} -j MARK --set-xmark 0x0/0x10000\n\
             -A {fw} -j MARK --set-xmark 0x20000/0x20000\n"
        )?;
    }
    rules += "-A KUBE-ROUTER-FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT\nCOMMIT";
    Ok(rules)
}

fn calico(world: &World, v4: bool, policy: Policy) -> Result<String> {
    let chains = PODS.map(|pod| [format!("cali-fw-{pod}"), format!("cali-tw-{pod}")]);
    let fixed = [
        "cali-FORWARD",
        "cali-from-wl-dispatch",
        "cali-to-wl-dispatch",
        "cali-pi-p",
        "cali-po-p",
        "cali-pri-kns",
    ];
    let own = chains.iter().flatten().map(String::as_str);
    let mut rules = declared(fixed.into_iter().chain(own))?;
    rules += "-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000\n\
              -A cali-FORWARD -i veth-+ -j cali-from-wl-dispatch\n\
              -A cali-FORWARD -o veth-+ -j cali-to-wl-dispatch\n\
              -A cali-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT\n";
    let accepts = "-j MARK --set-xmark 0x10000/0x10000";
    writeln!(rules, "-A cali-pri-kns {accepts}")?;
    if policy.egress {
        writeln!(rules, "-A cali-po-p {accepts}")?;
    }
    for source in policy.sources(world, v4) {
        writeln!(rules, "-A cali-pi-p {source} {accepts}")?;
        writeln!(
            rules,
            "-A cali-pi-p -m mark --mark 0x10000/0x10000 -j RETURN"
        )?;
    }
    for (pod, [fw, tw]) in PODS.into_iter().zip(&chains) {
        writeln!(rules, "-A cali-from-wl-dispatch -i veth-{pod} -g {fw}")?;
        writeln!(rules, "-A cali-to-wl-dispatch -o veth-{pod} -g {tw}")?;
        let ingress = if pod == "e1" {
            "cali-pi-p"
        } else {
            "cali-pri-kns"
        };
        for (chain, decides) in [(fw, "cali-po-p"), (tw, ingress)] {
            write!(
                rules,
                "-A {chain} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                 -A {chain} -m conntrack --ctstate INVALID -j DROP\n\
                 -A {chain} -j MARK --set-xmark 0x0/0x10000\n\
                 -A {chain} -j {decides}\n\
                 -A {chain} -m mark --mark 0x10000/0x10000 -j RETURN\n\
                 -A {chain} -j DROP\n"
            )?;
        }
    }
    rules += "-A cali-from-wl-dispatch -m comment --comment \"Unknown interface\" -j DROP\n\
              -A cali-to-wl-dispatch -m comment --comment \"Unknown interface\" -j DROP\nCOMMIT";
    Ok(rules)
}

/// Compares all ways beside each policy. `chain`: where the rules begin.
fn hold(chain: &str, rules: fn(&World, bool, Policy) -> Result<String>) -> Result<()> {
    let judge = Worker::KubeProxy(Mode::IptablesNft);
    let worlds = worlds(&[judge, Worker::Dataplane])?;
    for (number, policy) in POLICIES.into_iter().enumerate() {
        for world in &worlds {
            let node = world.host("node1");
            for (v4, tool) in [(true, "iptables-nft"), (false, "ip6tables-nft")] {
                let restore = format!("{tool}-restore --noflush");
                load(node, &restore, &rules(world, v4, policy)?)?;
                if number == 0 {
                    let begin = ["-I", "FORWARD", "-j", chain];
                    node.command(tool).args(begin).run()?;
                }
            }
        }
        if number == 0 {
            takes(worlds[1].agent().context("an agent")?, "stack")?;
        }
        agree(&worlds, Equal::All, policy.wanted).context(policy.what)?;
    }
    Ok(())
}

fn policies_as_kube_router_writes_them_hold() -> Result<()> {
    hold("KUBE-ROUTER-FORWARD", kube_router)
}

fn policies_as_calico_writes_them_hold() -> Result<()> {
    hold("cali-FORWARD", calico)
}
