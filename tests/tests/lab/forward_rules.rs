//! Rules of others at netfilter's hooks for forwarded packets, which the fast path bypasses: with `packets.path: fast`,
//! `status` warns operators who rely on them; with `auto`, packets go through the stack.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab};
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, eventually},
    features::on,
    manifest::{Config, Service},
};

scenarios! {
    Dataplane:
    rules_that_refuse_are_named_with_their_owner,
    rules_of_others_choose_the_path,
}

/// Rules, the program that loads them, and the words of `status` about them; none if they are harmless.
const RULES: [(&str, &str, &[&str]); 10] = [
    (
        "iptables-legacy-restore",
        "*filter\n:FORWARD DROP [0:0]\n:DOCKER-USER - [0:0]\n:KUBE-FORWARD - [0:0]\n\
         -A FORWARD -j KUBE-FORWARD\n-A FORWARD -j DOCKER-USER\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\nCOMMIT",
        &["iptables-legacy filter FORWARD (Docker) drops what no rule accepts:"],
    ),
    (
        "ip6tables-legacy-restore",
        "*filter\n:FORWARD ACCEPT [0:0]\n:KUBE-POD-FW-X - [0:0]\n:UNUSED - [0:0]\n\
         -A FORWARD -m comment --comment x\n-A FORWARD -j KUBE-POD-FW-X\n-A KUBE-POD-FW-X -p tcp -j REJECT\n\
         -A UNUSED -j DROP\nCOMMIT",
        &[
            "ip6tables-legacy filter FORWARD (kube-router) has rules that refuse packets (KUBE-POD-FW-X):",
        ],
    ),
    (
        "iptables-nft-restore",
        "*filter\n:FORWARD ACCEPT [0:0]\n:cali-FORWARD - [0:0]\n:cali-tw-1 - [0:0]\n:cali-tw-2 - [0:0]\n\
         -A FORWARD -j cali-FORWARD\n-A cali-FORWARD -o cali1 -g cali-tw-1\n-A cali-FORWARD -o cali2 -g cali-tw-2\n\
         -A cali-tw-1 -j DROP\n-A cali-tw-2 -j REJECT\nCOMMIT",
        &["nft ip filter FORWARD (Calico) has rules that refuse packets (cali-tw-1, cali-tw-2):"],
    ),
    (
        "nft -f -",
        "table inet firewalld { chain filter_FORWARD { type filter hook forward priority 10; policy accept\n\
         ct state established accept\njump reject_it; }\nchain reject_it { reject with icmpx admin-prohibited; }\n}\n\
         table ip6 strict { chain strict_fwd { type filter hook forward priority 0; policy drop; }\n}",
        &[
            "nft inet firewalld filter_FORWARD (firewalld) has rules",
            "nft ip6 strict strict_fwd (owner unknown) drops what no rule accepts:",
        ],
    ),
    (
        "nft -f -",
        "table ip kube-proxy { map refused { type ipv4_addr : verdict; }\n\
         chain filter-forward { type filter hook forward priority -1; policy accept\nip daddr vmap @refused; }\n\
         chain reject-chain { reject; }\n}\n\
         table inet others { chain output { type filter hook output priority 0; policy drop; }\n\
         chain passing { type filter hook forward priority 0; policy accept\ncounter accept; }\n}",
        &[],
    ),
    // Maps decide by themselves, or by other chains; a map without elements does not.
    (
        "nft -f -",
        "table inet mapped { map decided { type inet_service : verdict; elements = { 80 : accept, 81 : drop }; }\n\
         chain fw { type filter hook forward priority 0; policy accept\ntcp dport vmap @decided; }\n}\n\
         table ip led { chain deny { drop; }\n\
         chain fw { type filter hook forward priority 0; policy accept\nip saddr vmap { 10.9.9.9 : jump deny }; }\n}",
        &[
            "nft inet mapped fw (owner unknown) has rules that refuse packets (fw):",
            "nft ip led fw (owner unknown) has rules that refuse packets (deny):",
        ],
    ),
    (
        "nft -f -",
        "table ip passing { map decided { type inet_service : verdict; }\nchain deny { drop; }\n\
         chain fw { type filter hook forward priority 0; policy accept\ntcp dport vmap @decided\n\
         ct state vmap { established : accept, new : continue }; }\n}",
        &[],
    ),
    (
        "iptables-nft-restore",
        "*filter\n:FORWARD ACCEPT [0:0]\nCOMMIT",
        &[],
    ),
    // As Docker writes them, by iptables and by nft: a container takes packets from its own bridge only.
    (
        "iptables-nft-restore",
        "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP\nCOMMIT",
        &["nft ip raw PREROUTING (owner unknown) has rules that refuse packets (PREROUTING):"],
    ),
    (
        "nft -f -",
        "table ip docker-bridges { chain raw-PREROUTING { type filter hook prerouting priority raw; policy accept\n\
         ip daddr 172.17.0.2 iifname != docker0 drop; }\n\
         chain nat-PREROUTING { type nat hook prerouting priority dstnat; policy accept\nudp dport 9 drop; }\n}",
        &[
            "nft ip docker-bridges raw-PREROUTING (Docker) has rules that refuse packets (raw-PREROUTING):",
        ],
    ),
];

/// A node that serves clients by packets.
fn start(arguments: &[&str]) -> Result<Cluster> {
    let services = |lab: &Lab| {
        vec![
            Service::new("web", &["10.96.0.10"])
                .port("tcp", 80, TCP)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    Cluster::start_in(Cluster::lab_of_packets()?, &["near"], services, arguments)
}

/// Loads rules into a node.
fn load(node: &Host, by: &str, rules: &str) -> Result<()> {
    let script = format!("{by} <<'end'\n{rules}\nend");
    let loaded = node.command("sh").args(["-c", &script]).run();
    loaded.with_context(|| by.to_owned())?;
    Ok(())
}

/// Removes all rules of a node.
fn flush(node: &Host) -> Result<()> {
    for tool in ["iptables-legacy", "ip6tables-legacy"] {
        if legacy_tables(node)?.contains("filter") {
            node.command(tool).args(["-P", "FORWARD", "ACCEPT"]).run()?;
            node.command(tool).args(["-F"]).run()?;
        }
    }
    node.command("nft").args(["flush", "ruleset"]).run()?;
    Ok(())
}

fn rules_that_refuse_are_named_with_their_owner() -> Result<()> {
    let config = Config::new("packets: {path: fast}")?;
    let cluster = start(&config.arguments())?;
    let node = cluster.lab.node("node2");
    let tables = legacy_tables(node)?;
    let before = said(&cluster)?;
    ensure!(before.is_empty(), "without any rules: {before:?}");
    ensure!(
        legacy_tables(node)? == tables,
        "asking made a table: {tables:?}, then {:?}",
        legacy_tables(node)?
    );
    for (by, rules, wanted) in RULES {
        load(node, by, rules)?;
        let found = said(&cluster)?;
        ensure!(
            found.len() == usize::from(!wanted.is_empty()),
            "{rules}\n{found:?}"
        );
        for text in wanted {
            ensure!(
                found[0].contains(text),
                "{text}\nis not said of\n{rules}\nbut {found:?}"
            );
        }
        let plan = ["plan", "--node-name", "node2", "-o", "json", "--manifests"];
        let plan = cluster
            .agent
            .dataplane(plan)
            .args([cluster.manifests.path()])
            .args(config.arguments())
            .output()?;
        let plan: Value = serde_json::from_slice(&plan.stdout)?;
        let problems = plan["problems"].as_array().into_iter().flatten();
        let problems = problems.filter(|text| {
            text.as_str()
                .is_some_and(|t| t.contains("pass these hooks"))
        });
        ensure!(problems.count() == found.len(), "{plan:#}");
        let doctor = cluster.agent.dataplane(["doctor", "-o", "json"]).output()?;
        let doctor: Value = serde_json::from_slice(&doctor.stdout)?;
        let mut rows = doctor.as_array().into_iter().flatten();
        let row = rows
            .find(|row| row["feature"] == "fast path")
            .context("no row")?;
        ensure!(row["present"] == wanted.is_empty(), "{row:#}");
        for text in wanted {
            let chain = chain_of(text)?;
            ensure!(
                row["detail"]
                    .as_str()
                    .is_some_and(|said| said.contains(chain)),
                "{row:#}"
            );
        }
        flush(node)?;
    }
    Ok(())
}

/// The chain and its owner, of a text about them.
fn chain_of(text: &str) -> Result<&str> {
    let end = text.find(')').context("no owner")?;
    Ok(&text[..=end])
}

fn rules_of_others_choose_the_path() -> Result<()> {
    let cluster = start(&[])?;
    let node = cluster.lab.node("node2");
    // Also after each change.
    let takes = |wanted: &[&str]| {
        eventually(|| {
            let status = cluster.status()?;
            let path = if wanted.is_empty() { "fast" } else { "stack" };
            let because = status["agent"]["stack_because"]
                .as_str()
                .unwrap_or_default();
            ensure!(status["packet_path"] == path, "{wanted:?}: {status:#}");
            for text in wanted {
                ensure!(because.contains(text), "{text} in {because}");
            }
            Ok(())
        })
    };
    takes(&[])?;
    for (by, rules, wanted) in RULES {
        load(node, by, rules)?;
        let chains = wanted.iter().map(|text| chain_of(text));
        let chains: Vec<&str> = chains.collect::<Result<_>>()?;
        takes(&chains).with_context(|| rules)?;
        ensure!(said(&cluster)?.is_empty(), "a warning about {rules}");
        flush(node)?;
        takes(&[]).with_context(|| format!("after {rules}"))?;
    }
    // Rules that act on packets, and never refuse any.
    let hook = "type filter hook prerouting priority mangle; policy accept";
    for rule in ["meta mark set 7", "notrack", "ip dscp set cs1"] {
        let rules = format!("table ip acts {{ chain pre {{ {hook}\n{rule}; }}\n}}");
        load(node, "nft -f -", &rules)?;
        takes(&["nft ip acts pre (owner unknown)"])?;
        flush(node)?;
        takes(&[])?;
    }
    for to in ["add", "del"] {
        let rule = ["rule", to, "fwmark", "0x80/0x80", "lookup", "main"];
        node.command("ip").args(rule).run()?;
        let rule = "IPv4 routing rule fwmark 0x80/0x80 lookup 254 (owner unknown)";
        let wanted: &[&str] = if to == "add" { &[rule] } else { &[] };
        takes(wanted)?;
    }
    Ok(())
}

/// Warnings of `dataplane status` about these hooks.
fn said(cluster: &Cluster) -> Result<Vec<String>> {
    let status = cluster.status()?;
    let findings = status["findings"].as_array().into_iter().flatten();
    let warnings = findings.filter(|finding| finding["severity"] == "warning");
    let texts = warnings.filter_map(|finding| finding["text"].as_str());
    let of_this = texts.filter(|text| text.contains("such flows pass these hooks"));
    Ok(of_this.map(str::to_owned).collect())
}

/// The legacy tables that are in use.
fn legacy_tables(node: &Host) -> Result<String> {
    on(node, |_| {
        let names = ["ip", "ip6"].map(|family| {
            fs::read_to_string(format!("/proc/thread-self/net/{family}_tables_names"))
                .unwrap_or_default()
        });
        Ok(names.concat())
    })
}
