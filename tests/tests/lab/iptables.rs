//! `dataplane-migrate`: which variant of iptables a namespace needs, with real programs and rules on each side of the
//! kernel; and the owners of the rules.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command as Local,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_peers::{Cluster as Peers, Mode};
use dataplane_tests::{Command, Host, Lab};
use kernel::netfilter::make_ip_sets;
use serde_json::{Value, json};

use crate::{
    cluster::{TCP, reaches, serve},
    differential::world::load_rules,
    features::on,
    manifest::{Manifests, Service},
};

scenarios! {
    Dataplane:
    detect_tells_the_side_that_holds_rules,
    detect_runs_the_programs_of_another_root,
    programs_of_another_root_are_confined,
    detect_without_programs_reads_the_kernel,
    the_report_tells_owners_and_conflicts,
    the_report_knows_kube_proxys_rules,
    the_report_says_what_it_cannot_read,
    cleanup_leaves_what_is_not_kube_proxys,
    cleanup_leaves_what_is_not_istios,
    cleanup_removes_istios_routing_rules,
    cleanup_waits_for_what_is_translated,
    cleanup_removes_istios_own_examples,
}

fn lab() -> Result<Lab> {
    Ok(Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.5")
        .build()?)
}

/// `dataplane-migrate COMMAND -o json`.
fn migrate(lab: &Lab, host: &Host, arguments: &[&str]) -> Result<Command> {
    let command = host.command(lab.programs().migrate()?);
    Ok(command.args(arguments).args(["-o", "json"]))
}

fn detect(lab: &Lab, host: &Host, more: &[&str]) -> Result<Value> {
    Ok(migrate(lab, host, &[&["detect"], more].concat())?.json()?)
}

/// The report, and whether all was read.
fn report(lab: &Lab, host: &Host, more: &[&str]) -> Result<(Value, bool)> {
    let output = migrate(lab, host, &[&["report"], more].concat())?.output()?;
    let report = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    Ok((report, output.status.success()))
}

pub fn load(host: &Host, program: &str, rules: &str) -> Result<()> {
    let script = format!("{program} <<'end'\n{rules}\nend");
    host.command("sh").args(["-c", &script]).run()?;
    Ok(())
}

/// The decision for a family: `(variant, path of save, number of problems)`.
fn decision(answer: &Value, family: &str) -> Result<(String, String, usize)> {
    let mut all = answer["decisions"].as_array().into_iter().flatten();
    let found = all
        .find(|decision| decision["family"] == family)
        .context("no decision")?;
    let word = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    let problems = found["problems"].as_array().map_or(0, Vec::len);
    Ok((word("variant"), word("save"), problems))
}

fn variant(answer: &Value, family: &str) -> Result<String> {
    Ok(decision(answer, family)?.0)
}

/// The legacy tables as the kernel lists them, without a program of iptables.
fn legacy_tables(host: &Host) -> Result<String> {
    on(host, |_| {
        let names = ["ip", "ip6"].map(|family| {
            fs::read_to_string(format!("/proc/thread-self/net/{family}_tables_names"))
                .unwrap_or_default()
        });
        Ok(names.concat())
    })
}

/// The variant that the name `iptables` is here.
fn system_default(family: &str) -> Result<&'static str> {
    let program = if family == "IPv4" {
        "iptables"
    } else {
        "ip6tables"
    };
    let said = Local::new(program).arg("--version").output()?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    Ok(if said.contains("nf_tables") {
        "nft"
    } else {
        "legacy"
    })
}

const FILTER: &str = "*filter\n-A INPUT -s 192.0.2.1 -j DROP\nCOMMIT";
const FILTER6: &str = "*filter\n-A INPUT -s 2001:db8::1 -j DROP\nCOMMIT";

fn detect_tells_the_side_that_holds_rules() -> Result<()> {
    let lab = lab()?;
    let node = lab.node("node1");
    let pod = lab.pod("near").netns();
    // From the node's namespace, with the node's programs: about a pod.
    let of_pod = || detect(&lab, node, &["--netns", pod]);
    for family in ["IPv4", "IPv6"] {
        let wanted = system_default(family)?;
        for answer in [detect(&lab, node, &[])?, of_pod()?] {
            ensure!(
                variant(&answer, family)? == wanted,
                "{wanted} is the default: {answer:#}"
            );
        }
    }
    let answer = of_pod()?;
    ensure!(
        answer["tables"].as_array().is_some_and(Vec::is_empty),
        "{answer:#}"
    );
    ensure!(
        legacy_tables(lab.pod("near"))?.is_empty(),
        "asking made a table"
    );
    let version = Local::new("iptables-nft").arg("--version").output()?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let binaries = answer["binaries"]["iptables"]
        .as_array()
        .context("no programs")?;
    let nft = binaries
        .iter()
        .find(|binary| binary["name"] == "iptables-nft")
        .context("no iptables-nft")?;
    ensure!(
        nft["variant"] == "nft" && version.contains(nft["version"].as_str().unwrap_or("?")),
        "{nft:#}"
    );

    // Legacy rules of one family decide about this family; tables without rules about none.
    load(lab.pod("near"), "iptables-legacy-restore", FILTER)?;
    load(
        lab.pod("near"),
        "ip6tables-legacy-restore",
        "*filter\nCOMMIT",
    )?;
    let answer = of_pod()?;
    let found = decision(&answer, "IPv4")?;
    ensure!(
        found.0 == "legacy" && found.1.ends_with("iptables-legacy-save") && found.2 == 0,
        "{answer:#}"
    );
    ensure!(
        variant(&answer, "IPv6")? == system_default("IPv6")?,
        "{answer:#}"
    );
    ensure!(
        variant(&detect(&lab, node, &[])?, "IPv4")? == system_default("IPv4")?,
        "of another namespace"
    );

    // Native tables, even with the names of iptables' own, are no rules of iptables.
    load(
        lab.pod("near"),
        "nft -f -",
        "table ip kube-proxy { chain services { counter; }\nset cluster-ips { type ipv4_addr; }\n}\n\
         table ip6 filter { chain mine { type filter hook input priority 0; policy drop; counter; }\n}",
    )?;
    let answer = of_pod()?;
    ensure!(variant(&answer, "IPv4")? == "legacy", "{answer:#}");
    ensure!(
        variant(&answer, "IPv6")? == system_default("IPv6")?,
        "{answer:#}"
    );
    let tables = answer["tables"].as_array().context("no tables")?;
    let sides: Vec<_> = tables
        .iter()
        .map(|table| {
            format!("{} {} {}", table["side"], table["family"], table["name"]).replace('"', "")
        })
        .collect();
    let wanted = [
        "legacy ip filter",
        "legacy ip6 filter",
        "native ip kube-proxy",
        "native ip6 filter",
    ];
    ensure!(sides == wanted, "{sides:?}");
    load(lab.pod("near"), "nft -f -", "delete table ip6 filter")?;

    // Rules of nft take precedence; with rules of both variants the command reports a problem.
    load(lab.pod("near"), "ip6tables-nft-restore", FILTER6)?;
    load(lab.pod("near"), "iptables-nft-restore", FILTER)?;
    let answer = of_pod()?;
    let (v4, v6) = (decision(&answer, "IPv4")?, decision(&answer, "IPv6")?);
    ensure!(v4.0 == "nft" && v4.2 == 1, "{answer:#}");
    ensure!(
        v6.0 == "nft" && v6.1.ends_with("ip6tables-nft-save") && v6.2 == 0,
        "{answer:#}"
    );
    Ok(())
}

/// The file of a program on PATH.
fn on_path(name: &str) -> Result<PathBuf> {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&places).map(|place| place.join(name));
    let path = places
        .find(|path| path.exists())
        .with_context(|| format!("no {name}"))?;
    Ok(fs::canonicalize(path)?)
}

/// Copies a program to a place below a root, and its libraries to their paths there.
fn copy_program(name: &str, root: &Path, place: &str) -> Result<()> {
    let program = on_path(name)?;
    // The loader itself answers; a program without libraries runs, and prints something else.
    let libraries = Local::new(&program)
        .arg("--version")
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .output()?;
    let libraries = String::from_utf8_lossy(&libraries.stdout).into_owned();
    let files = libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from);
    let libraries = files
        .filter(|file| file.exists())
        .map(|file| (file.clone(), file));
    for (from, to) in libraries.chain([(program, PathBuf::from(place))]) {
        let to = root.join(to.strip_prefix("/")?);
        fs::create_dir_all(to.parent().context("no parent")?)?;
        // By a process of its own: a file that this one has open to write cannot be run while another thread forks.
        let copied = Local::new("cp").args([&from, &to]).status()?;
        ensure!(copied.success(), "cannot copy {}", from.display());
    }
    Ok(())
}

/// All files below a directory.
pub fn walk(directory: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut open) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

/// Programs of another root cannot leave it.
fn programs_of_another_root_are_confined() -> Result<()> {
    let lab = lab()?;
    let root = tempfile::tempdir()?;
    copy_program("sh", root.path(), "/bin/sh")?;
    copy_program("chroot", root.path(), "/bin/chroot")?;
    let script = root.path().join("bin/iptables");
    let words = "chroot / sh -c : && echo 'iptables v1 (nf_tables)' || echo 'iptables v1 (legacy)'";
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$2\" && chmod 755 \"$2\"";
    let written = Local::new("sh")
        .args(["-c", write, "sh", words])
        .arg(&script)
        .status()?;
    ensure!(written.success(), "cannot write {}", script.display());
    let path = root.path().to_str().context("no text")?;
    // The script works, and so does its chroot.
    let free = Local::new("chroot")
        .args([path, "/bin/iptables"])
        .env("PATH", "/bin:/usr/sbin:/usr/bin:/sbin")
        .output()?;
    ensure!(free.stdout == b"iptables v1 (nf_tables)\n", "{free:?}");
    let answer = detect(&lab, lab.pod("near"), &["--host-root", path])?;
    ensure!(
        answer["binaries"]["iptables"][0]["variant"] == "legacy",
        "{answer:#}"
    );
    Ok(())
}

/// Another root has only the legacy variant, and its `iptables` is a link by way of /etc/alternatives.
fn detect_runs_the_programs_of_another_root() -> Result<()> {
    let lab = lab()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    let root = tempfile::tempdir()?;
    let multi = Path::new("/opt/multi");
    copy_program("iptables-legacy", root.path(), "/opt/multi")?;
    let at = |path: &str| root.path().join(path);
    fs::create_dir_all(at("usr/sbin"))?;
    fs::create_dir_all(at("etc/alternatives"))?;
    symlink("/etc/alternatives/iptables", at("usr/sbin/iptables"))?;
    symlink(multi, at("etc/alternatives/iptables"))?;
    for name in [
        "iptables-legacy",
        "iptables-legacy-save",
        "iptables-legacy-restore",
    ] {
        symlink(multi, at("usr/sbin").join(name))?;
    }
    let path = root.path().to_str().context("no text")?;
    load(pod, "iptables-nft-restore", FILTER)?;
    // Both in the pod's namespace and from the node's; and the node's own namespace.
    let of_pod = [
        detect(&lab, pod, &["--host-root", path])?,
        detect(&lab, node, &["--host-root", path, "--netns", pod.netns()])?,
    ];
    for answer in of_pod {
        let (variant, save, problems) = decision(&answer, "IPv4")?;
        ensure!(
            variant == "nft" && save.is_empty() && problems == 3,
            "{answer:#}"
        );
        let names: Vec<&str> = (answer["binaries"]["iptables"]
            .as_array()
            .into_iter()
            .flatten())
        .filter_map(|binary| binary["name"].as_str())
        .collect();
        let wanted = [
            "iptables",
            "iptables-legacy",
            "iptables-legacy-save",
            "iptables-legacy-restore",
        ];
        ensure!(names == wanted, "{answer:#}");
        let unmarked = &answer["binaries"]["iptables"][0];
        let really = multi.to_str().context("no text")?;
        ensure!(
            unmarked["variant"] == "legacy" && unmarked["really"] == really,
            "{unmarked:#}"
        );
        let v6 = decision(&answer, "IPv6")?;
        ensure!(v6 == (String::new(), String::new(), 1), "{answer:#}");
    }
    let answer = detect(&lab, node, &["--host-root", path])?;
    ensure!(variant(&answer, "IPv4")? == "legacy", "{answer:#}");
    // The programs of the other root also print and change rules, with the libraries that they load by name.
    let rules = "*nat\n:KUBE-SERVICES - [0:0]\n:mine - [0:0]\n-A OUTPUT -j KUBE-SERVICES\n-A OUTPUT -p udp -j mine\nCOMMIT";
    load(node, "iptables-legacy-restore", rules)?;
    let libraries = walk(root.path())?;
    let library = libraries
        .iter()
        .find(|path| path.to_string_lossy().contains("/libxtables."));
    let inside = library
        .and_then(|path| path.parent())
        .context("no libxtables")?
        .join("xtables");
    // The library looks there: with /lib for a link to /usr/lib, below the latter.
    let outside = fs::canonicalize(Path::new("/").join(inside.strip_prefix(root.path())?))?;
    let inside = root.path().join(outside.strip_prefix("/")?);
    fs::create_dir_all(&inside)?;
    for entry in fs::read_dir(outside)? {
        let entry = entry?;
        fs::copy(entry.path(), inside.join(entry.file_name()))?;
    }
    let (found, whole) = report(&lab, node, &["--host-root", path])?;
    ensure!(whole && owner(&found, "kube-proxy")?.1 == 1, "{found:#}");
    fs::create_dir_all(at("run"))?;
    cleanup(&lab, node, &["--owner", "kube-proxy", "--host-root", path])?;
    let left = everything(node)?;
    let wanted = [
        "iptables-legacy nat :mine",
        "iptables-legacy nat -A OUTPUT -p udp -j mine",
    ];
    ensure!(left == wanted, "{left:?}");
    let osm = ["apply", "--mesh", "osm", "--host-root", path];
    for outcome in ["applied", "same"] {
        let answer: Value = migrate(&lab, node, &osm)?.json()?;
        ensure!(answer["outcome"] == outcome, "{answer:#}");
    }
    let removed: Value = migrate(&lab, node, &[&osm[..], &["--cleanup-only"]].concat())?.json()?;
    ensure!(removed["outcome"] == "removed", "{removed:#}");
    ensure!(everything(node)? == wanted, "{:?}", everything(node)?);
    let gone = at("gone");
    let failed = migrate(
        &lab,
        node,
        &["detect", "--host-root", gone.to_str().context("no text")?],
    )?
    .output()?;
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    ensure!(!failed.status.success() && said.contains("gone"), "{said}");
    Ok(())
}

fn detect_without_programs_reads_the_kernel() -> Result<()> {
    let lab = lab()?;
    let pod = lab.pod("near");
    load(pod, "iptables-legacy-restore", FILTER)?;
    load(
        pod,
        "nft -f -",
        "table inet istio-ambient-nat { chain x { counter; }\n}",
    )?;
    let empty = tempfile::tempdir()?;
    let command = migrate(&lab, pod, &["detect"])?.env("PATH", empty.path());
    let answer: Value = command.json()?;
    let tables = answer["tables"].as_array().context("no tables")?;
    let rules: Vec<_> = tables
        .iter()
        .filter_map(|table| table["rules"].as_u64())
        .collect();
    ensure!(rules == [1, 1], "{answer:#}");
    let missing = answer["missing"].to_string();
    for text in [
        "ip6tables-legacy-save",
        "apt-get install iptables",
        "apt-get install nftables",
    ] {
        ensure!(missing.contains(text), "{text}: {missing}");
    }
    let (variant, _, problems) = decision(&answer, "IPv4")?;
    ensure!(variant.is_empty() && problems == 2, "{answer:#}");
    let text = pod.command(lab.programs().migrate()?).arg("detect");
    let text = text.env("PATH", empty.path()).run()?;
    ensure!(
        text.contains("IPv4: none: ") && text.contains("filter (1 rule)"),
        "{text}"
    );
    Ok(())
}

/// An owner in the report: the plan for its rules, their number, and its conflicts in words.
fn owner(report: &Value, name: &str) -> Result<(String, usize, Vec<String>)> {
    let mut owners = report["owners"].as_array().into_iter().flatten();
    let found = owners
        .find(|owner| owner["owner"] == name)
        .with_context(|| format!("no {name} in {report:#}"))?;
    let conflicts = found["conflicts"].as_array().into_iter().flatten();
    let conflicts = conflicts.filter_map(|conflict| conflict["conflict"].as_str());
    let plan = found["plan"].as_str().unwrap_or_default().to_owned();
    let rules = found["rules"].as_array().map_or(0, Vec::len);
    Ok((plan, rules, conflicts.map(str::to_owned).collect()))
}

/// Every way to load rules: Istio's chains and rules without an owner, one with a name that is quoted.
fn the_report_tells_owners_and_conflicts() -> Result<()> {
    let istio = |to: &str| {
        format!(
            "*nat\n:ISTIO_OUTPUT - [0:0]\n:ISTIO_REDIRECT - [0:0]\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n\
             -A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN\n-A ISTIO_OUTPUT ! -d {to} -j ISTIO_REDIRECT\n\
             -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n*filter\n:FORWARD DROP [0:0]\n\
             -A FORWARD -p tcp -m comment --comment \"a \\\"name\\\"\" -j REJECT\nCOMMIT"
        )
    };
    let rules = [
        ("iptables-legacy", istio("127.0.0.1/32")),
        ("ip6tables-legacy", istio("::1/128")),
        ("iptables-nft", istio("127.0.0.1/32")),
        ("ip6tables-nft", istio("::1/128")),
    ];
    for (program, text) in rules {
        let lab = lab()?;
        let pod = lab.pod("near");
        load(pod, &format!("{program}-restore"), &text)?;
        let before = legacy_tables(pod)?;
        let detected = detect(&lab, lab.node("node1"), &["--netns", pod.netns()])?;
        let mut tables = detected["tables"].as_array().into_iter().flatten();
        let filter = tables
            .find(|table| table["name"] == "filter")
            .context("no filter")?;
        ensure!(
            filter["drops"] == json!(["FORWARD"]) && filter["rules"] == 1,
            "{program}: {filter:#}"
        );
        let (report, whole) = report(&lab, lab.node("node1"), &["--netns", pod.netns()])?;
        ensure!(whole, "{program}: {report:#}");
        let wanted = ("take over".to_owned(), 4, vec![]);
        ensure!(
            owner(&report, "Istio sidecar")? == wanted,
            "{program}: {report:#}"
        );
        let (plan, rules, conflicts) = owner(&report, "foreign")?;
        ensure!(plan == "leave" && rules == 1, "{program}: {report:#}");
        ensure!(
            conflicts == ["forward-policy", "refuses-forwarded"],
            "{program}: {report:#}"
        );
        let line = &report["owners"][1]["rules"][0];
        let text = line["text"].as_str().unwrap_or_default();
        ensure!(text.contains("a \\\"name\\\""), "{program}: {line:#}");
        ensure!(
            line["table"] == format!("{program} filter"),
            "{program}: {line:#}"
        );
        ensure!(
            legacy_tables(pod)? == before,
            "{program}: asking made a table"
        );
    }
    let lab = lab()?;
    let pod = lab.pod("near");
    load(
        pod,
        "nft -f -",
        "table inet istio-proxy-nat { chain output { type nat hook output priority -100; jump istio-output; }\n\
         chain istio-output { meta skuid 1337 return\nmeta l4proto tcp redirect to :15001; }\n}\n\
         table ip mine { map m { type inet_service : verdict; elements = { 80 : drop }; }\n\
         chain x { type filter hook forward priority 0; tcp dport vmap @m; }\n}",
    )?;
    // Istio's rule for ambient pods, its rule for TPROXY, and another program's that asks for a bit of our proxy's
    // mark.
    pod.ip("rule add fwmark 0x111/0xfff lookup 100 priority 32764")?;
    pod.ip("rule add fwmark 1337 lookup 133 priority 100")?;
    pod.ip("-6 rule add fwmark 0x2/0x2 lookup 7")?;
    pod.sysctl("ipv4/conf/all/rp_filter", "2")?;
    let (report, whole) = report(&lab, pod, &[])?;
    ensure!(whole, "{report:#}");
    let rules: Vec<String> = (report["routing_rules"].as_array().into_iter().flatten())
        .map(|rule| {
            let columns = ["family", "rule", "owner", "conflict"].map(|key| rule[key].to_string());
            columns.join(" ").replace('"', "")
        })
        .collect();
    let wanted = [
        "IPv4 fwmark 0x539 lookup 133 Istio sidecar null",
        "IPv4 fwmark 0x111/0xfff lookup 100 Istio ambient null",
        "IPv6 fwmark 0x2/0x2 lookup 7 foreign mark",
    ];
    ensure!(rules == wanted, "{rules:?}");
    let mut paths = report["reverse_paths"].as_array().into_iter().flatten();
    ensure!(
        paths.any(|row| *row == json!({"interface": "all", "rp_filter": 2})),
        "{report:#}"
    );
    ensure!(
        owner(&report, "Istio sidecar")?.0 == "take over",
        "{report:#}"
    );
    ensure!(
        owner(&report, "foreign")?.2 == ["refuses-forwarded"],
        "{report:#}"
    );
    Ok(())
}

fn the_report_knows_kube_proxys_rules() -> Result<()> {
    for mode in Mode::ALL {
        let lab = lab()?;
        let node = lab.node("node1");
        let services = [Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .node_port("tcp", 80, TCP, 30080)
            .endpoints(&[lab.pod("near")])];
        let manifests = Manifests::new(&services)?;
        load_rules(node, mode, &manifests.path(), &Peers::default())?;
        let (report, whole) = report(&lab, node, &[])?;
        ensure!(whole, "{mode}: {report:#}");
        let (plan, rules, conflicts) = owner(&report, "kube-proxy")?;
        ensure!(
            plan == "take over" && rules > 20 && conflicts.is_empty(),
            "{mode}: {report:#}"
        );
        let owners = report["owners"].as_array().into_iter().flatten();
        let foreign = owners.filter(|owner| owner["owner"] == "foreign").count();
        ensure!(foreign == 0, "{mode}: {report:#}");
        // Then from a file, as far as a file can tell.
        let program = match mode {
            Mode::IptablesLegacy => "iptables-legacy-save",
            Mode::IptablesNft => "iptables-nft-save",
            Mode::Nftables => "nft list ruleset",
        };
        let saved = node.command("sh").args(["-c", program]).run()?;
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), saved)?;
        let path = file.path().to_str().context("no text")?;
        let (of_file, whole) = self::report(&lab, node, &["--file", path])?;
        ensure!(whole, "{mode}: {of_file:#}");
        ensure!(
            owner(&of_file, "kube-proxy")?.1 >= rules / 2,
            "{mode}: {of_file:#}"
        );
    }
    Ok(())
}

fn the_report_says_what_it_cannot_read() -> Result<()> {
    let lab = lab()?;
    let pod = lab.pod("near");
    load(pod, "iptables-legacy-restore", FILTER)?;
    load(pod, "nft -f -", "table inet mine { chain x { counter; }\n}")?;
    let empty = tempfile::tempdir()?;
    let output = migrate(&lab, pod, &["report"])?
        .env("PATH", empty.path())
        .output()?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(output.status.code() == Some(1), "{report:#}");
    let missing: Vec<_> = report["missing"].as_array().into_iter().flatten().collect();
    let missing: Vec<_> = missing.into_iter().filter_map(Value::as_str).collect();
    let wanted = [
        (
            "legacy table ip filter (1 rule)",
            "apt-get install iptables",
        ),
        (
            "nf_tables table inet mine (1 rule)",
            "apt-get install nftables",
        ),
    ];
    let is_said = |(missing, (table, get)): (&&str, &(&str, &str))| {
        missing.contains(table) && missing.ends_with(get)
    };
    ensure!(
        missing.len() == wanted.len() && missing.iter().zip(&wanted).all(is_said),
        "{missing:?}"
    );
    // The error of a line that no program writes has its number.
    let file = tempfile::NamedTempFile::new()?;
    fs::write(
        file.path(),
        "*filter\n:INPUT ACCEPT [0:0]\nrubbish \u{1b}[31m\nCOMMIT\n",
    )?;
    let path = file.path().to_str().context("no text")?;
    let (of_file, whole) = self::report(&lab, pod, &["--file", path])?;
    ensure!(!whole && of_file["unread"][0]["line"] == 3, "{of_file:#}");
    let text = of_file["unread"][0]["text"].as_str().unwrap_or_default();
    ensure!(
        text.starts_with("rubbish") && !text.contains('\u{1b}'),
        "{of_file:#}"
    );
    Ok(())
}

/// All rules of all sides, a line each, in their order, without counters, empty tables and chains that are built in.
pub fn everything(host: &Host) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for side in SIDES {
        let text = host.command(format!("{side}-save")).run()?;
        let mut table = String::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = format!("{side} {name}");
            }
            let is_chain = line.starts_with(':') && line.contains(" - ");
            if is_chain || line.starts_with("-A") {
                let line = line.split(" - [").next().unwrap_or_default();
                all.push(format!("{table} {line}"));
            }
        }
    }
    let native = host.command("nft").args(["list", "tables"]).run()?;
    let iptables = [" filter", " nat", " mangle", " raw", " security"];
    let native = native
        .lines()
        .filter(|line| !iptables.iter().any(|name| line.ends_with(name)));
    all.extend(native.map(str::to_owned));
    Ok(all)
}

fn cleanup(lab: &Lab, host: &Host, more: &[&str]) -> Result<Value> {
    Ok(migrate(lab, host, &[&["cleanup"], more].concat())?.json()?)
}

/// Rules of others, with a chain of theirs, before an owner's rules; and more after them.
const BEFORE: &str = "*nat\n:mine - [0:0]\n:KUBE-HOSTPORTS - [0:0]\n\
    -A PREROUTING -p tcp -m comment --comment \"first \\\"x\\\"\" -j mine\n-A mine -p udp -j RETURN\n\
    -A KUBE-HOSTPORTS -p tcp -j RETURN\nCOMMIT\n*filter\n-A FORWARD -p udp -m multiport --dports 1,2 -j DROP\nCOMMIT";
const AFTER: &str = "*nat\n-A PREROUTING -p udp -j ACCEPT\n-A OUTPUT -p sctp -j mine\nCOMMIT\n*filter\n\
    -A INPUT -p tcp -m tcp --dport 9 -j REJECT\nCOMMIT";
pub const SIDES: [&str; 4] = [
    "iptables-legacy",
    "ip6tables-legacy",
    "iptables-nft",
    "ip6tables-nft",
];

fn cleanup_leaves_what_is_not_kube_proxys() -> Result<()> {
    for mode in Mode::ALL {
        let lab = lab()?;
        let node = lab.node("node1");
        for side in SIDES {
            load(node, &format!("{side}-restore --noflush"), BEFORE)?;
        }
        load(
            node,
            "nft -f -",
            "table inet others { chain x { counter; }\n}",
        )?;
        let services = [Service::new("web", &["10.96.0.10", "fd00:96::10"])
            .node_port("tcp", 80, TCP, 30080)
            .endpoints(&[lab.pod("near")])];
        let manifests = Manifests::new(&services)?;
        let before = everything(node)?;
        load_rules(node, mode, &manifests.path(), &Peers::default())?;
        let added = everything(node)?.len() - before.len();
        ensure!(
            added > if mode == Mode::Nftables { 1 } else { 50 },
            "{mode}: {added}"
        );
        for side in SIDES {
            load(node, &format!("{side}-restore --noflush"), AFTER)?;
        }
        let with = everything(node)?;
        let dry = cleanup(&lab, node, &["--owner", "kube-proxy", "--dry-run"])?;
        ensure!(
            dry["changed"] == false && everything(node)? == with,
            "{mode}: a dry run changed something"
        );
        let done = cleanup(&lab, node, &["--owner", "kube-proxy"])?;
        ensure!(done["steps"] == dry["steps"], "{mode}: {dry:#}\n{done:#}");
        ensure!(
            done["steps"].as_array().map(Vec::len) == Some(2),
            "{mode}: {done:#}"
        );
        let after = everything(node)?;
        // The kubelet uses this chain, too.
        let kept: Vec<&String> = with
            .iter()
            .filter(|line| {
                before.contains(line) || is_of_after(line) || line.contains("KUBE-FIREWALL")
            })
            .collect();
        ensure!(
            after.iter().collect::<Vec<_>>() == kept,
            "{mode}: {kept:#?}\n{after:#?}"
        );
        let again = cleanup(&lab, node, &["--owner", "kube-proxy", "--owner", "osm"])?;
        ensure!(
            again["steps"].as_array().is_some_and(Vec::is_empty),
            "{mode}: {again:#}"
        );
    }
    Ok(())
}

/// Whether a line of [`everything`] is one of [`AFTER`].
fn is_of_after(line: &str) -> bool {
    [
        "-A PREROUTING -p udp -j ACCEPT",
        "-A OUTPUT -p sctp -j mine",
        "--dport 9 -j REJECT",
    ]
    .iter()
    .any(|text| line.contains(text))
}

/// Older and newer chains, partial rules, TPROXY, and jumps from chains of others.
fn cleanup_leaves_what_is_not_istios() -> Result<()> {
    let lab = lab()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    for (side, to) in SIDES
        .into_iter()
        .zip(["127.0.0.1/32", "::1/128"].into_iter().cycle())
    {
        let restore = format!("{side}-restore --noflush");
        load(pod, &restore, BEFORE)?;
        load(pod, &restore, AFTER)?;
        load(
            pod,
            &restore,
            "*nat\n-A PREROUTING -i eth1 -j RETURN\nCOMMIT",
        )?;
        let before = everything(pod)?;
        let rules = format!(
            "*nat\n:ISTIO_OUTPUT - [0:0]\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_OLD - [0:0]\n\
             -I OUTPUT 1 -p tcp -j ISTIO_OUTPUT\n-I PREROUTING 1 -i eth1 -p tcp -j ISTIO_REDIRECT\n-A mine -g ISTIO_OLD\n\
             -A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN\n-A ISTIO_OUTPUT ! -d {to} -j ISTIO_REDIRECT\n\
             -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n*mangle\n:ISTIO_DIVERT - [0:0]\n\
             -A PREROUTING -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT\n\
             -A PREROUTING -p tcp -m mark --mark 1337 -j CONNMARK --save-mark\n\
             -A OUTPUT ! -d {to} -p tcp -o lo -m owner --uid-owner 1337 -j MARK --set-mark 1338\n\
             -A OUTPUT -p tcp -m connmark --mark 1337 -j CONNMARK --restore-mark\n\
             -A ISTIO_DIVERT -j MARK --set-mark 1337\n-A ISTIO_DIVERT -j ACCEPT\nCOMMIT"
        );
        load(pod, &restore, &rules)?;
        load(
            pod,
            "nft -f -",
            "table inet istio-proxy-nat { set s { type inet_service; }\nchain x { tcp dport @s counter; }\n}",
        )?;
        ensure!(
            everything(pod)?.len() == before.len() + 17,
            "{side}: {:#?}",
            everything(pod)?
        );
        let done = cleanup(&lab, node, &["--owner", "istio", "--netns", pod.netns()])?;
        let after = everything(pod)?;
        ensure!(after == before, "{side}: {done:#}\n{before:#?}\n{after:#?}");
        ensure!(
            done["stays"].as_array().is_some_and(Vec::is_empty),
            "{side}: {done:#}"
        );
        let again = cleanup(&lab, node, &["--owner", "istio", "--netns", pod.netns()])?;
        ensure!(
            again["steps"].as_array().is_some_and(Vec::is_empty),
            "{side}: {again:#}"
        );
    }
    // Rules that are not jumps stay, and the command reports them; and without programs nothing is touched.
    load(
        pod,
        "iptables-nft-restore --noflush",
        "*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n*mangle\n\
         -A OUTPUT -m mark --mark 0x111/0xfff -j ACCEPT\nCOMMIT",
    )?;
    let done = cleanup(&lab, pod, &["--owner", "istio"])?;
    ensure!(
        done["stays"].to_string().contains("0x111/0xfff"),
        "{done:#}"
    );
    let before = everything(pod)?;
    let empty = tempfile::tempdir()?;
    let failed = migrate(&lab, pod, &["cleanup", "--owner", "kube-proxy"])?;
    let failed = failed.env("PATH", empty.path()).output()?;
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    ensure!(
        !failed.status.success() && said.contains("apt-get install iptables"),
        "{said}"
    );
    ensure!(everything(pod)? == before, "something was changed");
    Ok(())
}

/// Ambient's and TPROXY's rules go with the routes that only they lead to; others' rules stay, and so does a route that
/// one of these leads to.
fn cleanup_removes_istios_routing_rules() -> Result<()> {
    let lab = lab()?;
    let pod = lab.pod("near");
    let ip = |commands: &str| pod.command("sh").args(["-ec", commands]).run();
    let everything = || {
        ip("ip rule; ip -6 rule; ip route show table all; ip -6 route show table all type local")
    };
    ip(
        "ip rule add fwmark 0x7/0xff lookup 77; ip route add local default dev lo table 77
        ip rule add from 10.9.9.9 lookup 133; ip route add local default dev lo table 133
        ip route add unreachable 10.8.0.0/16 table 100",
    )?;
    let before = everything()?;
    ip("ip rule add fwmark 0x111/0xfff pref 32764 lookup 100; ip route add local default dev lo table 100
        ip -6 rule add fwmark 0x111/0xfff pref 32764 lookup 100; ip -6 route add local default dev lo table 100
        ip rule add fwmark 1337 lookup 133")?;
    let full = everything()?;
    let dry = cleanup(&lab, pod, &["--owner", "istio", "--dry-run"])?;
    ensure!(everything()? == full, "{dry:#}");
    let done = cleanup(&lab, pod, &["--owner", "istio"])?;
    let after = everything()?;
    ensure!(after == before, "{done:#}\n{before}\n{after}");
    ensure!(
        dry["routing"] == done["routing"]
            && done["routing"].as_array().is_some_and(|all| all.len() == 5),
        "{dry:#}\n{done:#}"
    );
    let again = cleanup(&lab, pod, &["--owner", "istio", "--owner", "osm"])?;
    ensure!(
        again["routing"].as_array().is_some_and(Vec::is_empty),
        "{again:#}"
    );
    // The commands in its answer have this effect, too.
    ip(
        "ip rule add fwmark 0x111/0xfff pref 32764 lookup 100; ip route add local default dev lo table 100",
    )?;
    let dry = cleanup(&lab, pod, &["--owner", "istio", "--dry-run"])?;
    for command in dry["routing"].as_array().context("no commands")? {
        ip(command.as_str().context("no text")?)?;
    }
    ensure!(everything()? == before, "{dry:#}");
    Ok(())
}

/// A connection that rules translate breaks when the last NAT chain goes.
fn cleanup_waits_for_what_is_translated() -> Result<()> {
    let lab = lab()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    let _server = serve(pod)?;
    load(
        node,
        "iptables-nft-restore",
        "*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j KUBE-SERVICES\n\
         -A KUBE-SERVICES -d 10.96.0.10 -p tcp -j DNAT --to-destination 10.244.1.5:7\nCOMMIT",
    )?;
    node.ip("route add 10.96.0.0/16 via 192.168.77.200")?;
    reaches(node, "10.96.0.10:80", "connect", &["near"])?;
    let before = everything(node)?;
    let failed = migrate(&lab, node, &["cleanup", "--owner", "kube-proxy"])?.output()?;
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    ensure!(
        !failed.status.success() && said.contains("keep-nat"),
        "{said}"
    );
    ensure!(everything(node)? == before, "something was changed");
    node.command(lab.programs().dataplane()?)
        .args(["keep-nat"])
        .run()?;
    cleanup(&lab, node, &["--owner", "kube-proxy"])?;
    let left = everything(node)?;
    ensure!(left == ["table inet dataplane-keep-nat"], "{left:?}");
    Ok(())
}

/// Makes the sets that the rules of Istio's agent use on a node.
pub fn make_istios_sets(host: &Host) -> Result<()> {
    on(host, |_| {
        for v4 in [true, false] {
            let name = format!("istio-inpod-probes-v{}", if v4 { 4 } else { 6 });
            make_ip_sets(&[name].into(), v4)?;
        }
        Ok(())
    })
}

/// `DATAPLANE_ISTIO_RULES` names a directory with Istio's source, or its test data: files `*.golden` with the rules
/// that its programs write for many configurations. Each that the kernel takes is loaded, and removed.
fn cleanup_removes_istios_own_examples() -> Result<()> {
    let Some(root) = std::env::var_os("DATAPLANE_ISTIO_RULES") else {
        println!(
            "skipped iptables::cleanup_removes_istios_own_examples: DATAPLANE_ISTIO_RULES names no directory"
        );
        return Ok(());
    };
    let mut files = walk(Path::new(&root))?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "golden"));
    files.sort();
    let lab = lab()?;
    let pod = lab.pod("near");
    make_istios_sets(pod)?;
    let (mut removed, mut refused) = (0, Vec::new());
    for path in &files {
        let text = fs::read_to_string(path)?;
        let name = path.display();
        let mut loaded = 0;
        for block in text
            .split("COMMIT")
            .filter_map(|block| Some(&block[block.find('*')?..]))
        {
            // Groups by names that not every machine has.
            let block = format!("{block}\nCOMMIT")
                .replace("java", "201")
                .replace("ftp", "202");
            // A block does not say its family.
            let load = |family: &str| {
                let program = format!("{family}-nft-restore --noflush 2>/dev/null");
                load(pod, &program, &block).is_ok()
            };
            if load("iptables") || load("ip6tables") {
                loaded += 1;
            } else {
                refused.push(format!(
                    "{name}: {}",
                    block.lines().next().unwrap_or_default()
                ));
            }
        }
        if loaded > 0 {
            let before = everything(pod)?;
            let (report, whole) = report(&lab, pod, &[])?;
            ensure!(whole, "{name}: {report:#}");
            cleanup(&lab, pod, &["--owner", "istio"])?;
            let after = everything(pod)?;
            let signs = ["ISTIO", "0x539", "0x53a", "0x111"];
            let left: Vec<_> = after
                .iter()
                .filter(|line| signs.iter().any(|sign| line.contains(sign)))
                .collect();
            ensure!(left.is_empty(), "{name}: {before:#?}\n{left:#?}");
            let others = before
                .iter()
                .filter(|line| !signs.iter().any(|sign| line.contains(sign)));
            ensure!(others.eq(after.iter()), "{name}: {before:#?}\n{after:#?}");
            removed += 1;
        }
        pod.command("nft").args(["flush", "ruleset"]).run()?;
    }
    println!(
        "{removed} of {} files were loaded and removed; not loaded: {refused:#?}",
        files.len()
    );
    ensure!(removed > 0, "{refused:#?}");
    Ok(())
}
