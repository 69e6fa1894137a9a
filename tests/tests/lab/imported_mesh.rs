//! `dataplane-migrate import-mesh`: a mesh's rules become a configuration.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Result, ensure};
use dataplane_tests::{Host, Lab};

use crate::iptables::walk;

scenarios! {
    Dataplane:
    a_sidecars_rules_become_a_configuration,
    native_rules_become_the_same_configuration,
    istios_own_examples_become_configurations,
}

/// A sidecar's rules for one family. `lo`: loopback; `six`: the address from which the proxy connects to the
/// application.
pub fn sidecar(lo: &str, six: &str, range: &str) -> String {
    format!(
        "*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 15021 -j RETURN
-A ISTIO_INBOUND -p tcp --dport 9090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -p udp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -o lo -s {six} -j RETURN
-A ISTIO_OUTPUT -o lo ! -d {lo} -p tcp ! --dport 15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN
-A ISTIO_OUTPUT -d {lo} -j RETURN
-A ISTIO_OUTPUT -d {range} -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
"
    )
}

/// `config check` accepts the configuration. A rule that the configuration cannot express is an error with its line.
fn a_sidecars_rules_become_a_configuration() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.5")
        .build()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    let program = lab.programs().migrate()?;
    let import = || -> Result<(Option<i32>, String, String)> {
        let command = node.command(&program).arg("import-mesh");
        let output = command.args(["--netns", pod.netns()]).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = output.status.code();
        Ok((code, text(&output.stdout), text(&output.stderr)))
    };
    let load = |program: &str, rules: &str| -> Result<()> {
        let script = format!("{program} <<'end'\n{rules}\nend");
        pod.command("sh").args(["-c", &script]).run()?;
        Ok(())
    };
    let (code, out, said) = import()?;
    ensure!(
        code == Some(1) && out.is_empty() && said.contains("no rule of Istio"),
        "{out}{said}"
    );
    load(
        "iptables-nft-restore",
        &sidecar("127.0.0.1/32", "127.0.0.6/32", "10.96.0.0/12"),
    )?;
    load(
        "ip6tables-nft-restore",
        &sidecar("::1/128", "::6/128", "fd00:96::/64"),
    )?;
    let (code, out, said) = import()?;
    ensure!(code == Some(0), "{said}");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("config.yaml");
    fs::write(&file, &out)?;
    let check = node
        .command(lab.programs().dataplane()?)
        .args(["config", "check"]);
    check.arg(file.to_string_lossy().into_owned()).run()?;
    let lines: Vec<&str> = out.lines().map(str::trim).collect();
    for wanted in [
        "captured: true",
        "- 10.96.0.0/12",
        "- fd00:96::/64",
        "- 3306",
        "- 9090",
        "- 1337",
        "- 888",
    ] {
        ensure!(lines.contains(&wanted), "{wanted}: {out}");
    }
    ensure!(
        !lines.contains(&"- 15021") && out.contains("15008, 15021 are the mesh's own"),
        "{out}"
    );
    for program in ["iptables-nft-restore", "ip6tables-nft-restore"] {
        load(
            &format!("{program} --noflush"),
            "*nat\n-I ISTIO_OUTPUT -m owner ! --gid-owner 7 -j RETURN\nCOMMIT",
        )?;
    }
    let (code, out, said) = import()?;
    ensure!(
        code == Some(0) && out.contains("includeGIDs:\n    - 7\n"),
        "{out}{said}"
    );
    // A socket does not know the interface by which a connection leaves: routes decide it.
    load(
        "iptables-nft-restore --noflush",
        "*nat\n-I OUTPUT -o net1 -j RETURN\nCOMMIT",
    )?;
    pod.ip("link add net1 type veth peer name net2")?;
    pod.ip("link set net2 up")?;
    pod.ip("link set net1 up")?;
    pod.ip("route add 198.18.0.0/15 dev net1")?;
    pod.ip("-6 route add 2001:db8:7::/48 dev net1")?;
    let (code, out, said) = import()?;
    ensure!(
        code == Some(0)
            && out.contains("- 198.18.0.0/15\n")
            && out.contains("reached by net1 now")
            && !out.contains("2001:db8:7::"),
        "{out}{said}"
    );
    // A routing rule may decide otherwise.
    pod.ip("rule add from 192.0.2.0/24 lookup 7")?;
    let (code, out, said) = import()?;
    ensure!(code == Some(1) && out.is_empty(), "{out}");
    ensure!(
        said.contains("iptables-nft:") && said.contains("-o net1 -j RETURN"),
        "{said}"
    );
    Ok(())
}

/// The same rules, as Istio writes them into tables of its own.
pub const NATIVE: &str = "\
table inet istio-proxy-nat {
 chain prerouting { type nat hook prerouting priority -100; }
 chain output { type nat hook output priority -100; }
 chain istio-inbound { }
 chain istio-redirect { }
 chain istio-in-redirect { }
 chain istio-output { }
}
add rule inet istio-proxy-nat prerouting meta l4proto tcp counter jump istio-inbound
add rule inet istio-proxy-nat output counter jump istio-output
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 15008 counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 15021 counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp tcp dport 9090 counter return
add rule inet istio-proxy-nat istio-inbound meta l4proto tcp counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-in-redirect meta l4proto tcp counter redirect to :15006
add rule inet istio-proxy-nat istio-redirect meta l4proto tcp counter redirect to :15001
add rule inet istio-proxy-nat istio-output tcp dport 3306 counter return
add rule inet istio-proxy-nat istio-output udp dport 3306 counter return
add rule inet istio-proxy-nat istio-output oifname lo ip saddr 127.0.0.6/32 counter return
add rule inet istio-proxy-nat istio-output oifname lo ip6 saddr ::6/128 counter return
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 tcp dport != { 53, 15008 } skuid 1337 \
counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo meta l4proto tcp ip6 daddr != ::1/128 tcp dport != 15008 skuid 1337 \
counter jump istio-in-redirect
add rule inet istio-proxy-nat istio-output oifname lo skuid != 1337 counter return
add rule inet istio-proxy-nat istio-output skuid 1337 counter return
add rule inet istio-proxy-nat istio-output skgid 888 counter return
add rule inet istio-proxy-nat istio-output ip daddr 127.0.0.1/32 counter return
add rule inet istio-proxy-nat istio-output ip6 daddr ::1/128 counter return
add rule inet istio-proxy-nat istio-output ip daddr 10.96.0.0/12 counter return
add rule inet istio-proxy-nat istio-output ip6 daddr fd00:96::/64 counter return
add rule inet istio-proxy-nat istio-output counter jump istio-redirect
";

/// Runs `import-mesh` for the rules of a host, and returns the configuration without remarks.
fn imports(host: &Host, program: &Path, more: &[&str]) -> Result<String> {
    let command = host.command(program).arg("import-mesh");
    let output = command.args(more).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    Ok(said_by(&output.stdout))
}

/// A configuration without remarks.
fn said_by(output: &[u8]) -> String {
    let said = String::from_utf8_lossy(output);
    let lines = said.lines().filter(|line| !line.starts_with('#'));
    lines.collect::<Vec<_>>().join("\n")
}

fn native_rules_become_the_same_configuration() -> Result<()> {
    let lab = Lab::builder()
        .node("node1")
        .pod("node1", "native", "10.244.1.5")
        .pod("node1", "usual", "10.244.1.6")
        .build()?;
    let (native, usual) = (lab.pod("native"), lab.pod("usual"));
    let program = lab.programs().migrate()?;
    let load = |host: &Host, program: &str, rules: &str| -> Result<()> {
        let script = format!("{program} <<'end'\n{rules}\nend");
        host.command("sh").args(["-c", &script]).run()?;
        Ok(())
    };
    load(
        usual,
        "iptables-nft-restore",
        &sidecar("127.0.0.1/32", "127.0.0.6/32", "10.96.0.0/12"),
    )?;
    load(
        usual,
        "ip6tables-nft-restore",
        &sidecar("::1/128", "::6/128", "fd00:96::/64"),
    )?;
    load(native, "nft -f -", NATIVE)?;
    let wanted = imports(usual, &program, &[])?;
    // From the kernel, and as nft prints it.
    let found = imports(native, &program, &[])?;
    ensure!(found == wanted, "{found}\n{wanted}");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    fs::write(
        &file,
        native.command("nft").args(["list", "ruleset"]).run()?,
    )?;
    let found = imports(native, &program, &["--file", &path])?;
    ensure!(found == wanted, "{found}\n{wanted}");
    // A rule of another owner may come first.
    let other = "*nat\n-A OUTPUT -d 192.0.2.1/32 -j ACCEPT\nCOMMIT";
    load(native, "iptables-nft-restore", other)?;
    let failed = imports(native, &program, &[]).unwrap_err().to_string();
    ensure!(
        failed.contains("may keep connections") && failed.contains("192.0.2.1"),
        "{failed}"
    );
    load(native, "iptables-nft-restore", "*nat\nCOMMIT")?;
    // So may one in the other variant of iptables.
    let other = "*nat\n-A OUTPUT -d 192.0.2.1/32 -p tcp -j DNAT --to-destination 192.0.2.2\nCOMMIT";
    for host in [native, usual] {
        load(host, "iptables-legacy-restore", other)?;
        let failed = imports(host, &program, &[]).unwrap_err().to_string();
        ensure!(
            failed.contains("iptables-legacy:") && failed.contains("may keep connections"),
            "{failed}"
        );
        load(host, "iptables-legacy-restore", "*nat\nCOMMIT")?;
    }
    // So may one in a table of nf_tables, also with iptables' names: its programs do not print it.
    let rules = "chain OUTPUT { type nat hook output priority -110; ip daddr 192.0.2.1 dnat to 192.0.2.2; };";
    load(native, "nft -f -", "add table ip nat; delete table ip nat")?;
    for (host, table) in [
        (native, "table ip nat"),
        (native, "table ip other"),
        (usual, "table ip other"),
    ] {
        load(host, "nft -f -", &format!("{table} {{ {rules} }}"))?;
        let failed = imports(host, &program, &[]).unwrap_err().to_string();
        ensure!(
            failed.contains("may keep connections") && failed.contains("dnat to 192.0.2.2"),
            "{failed}"
        );
        load(host, "nft -f -", &format!("delete {table}"))?;
    }
    // Istio's own tables go as a whole, so all of their rules count.
    let raw = "table inet istio-proxy-raw { chain istio-output-dns { udp dport 53 ct zone set 1; }\n\
               chain output { type filter hook output priority raw; jump istio-output-dns; ip daddr 192.0.2.1 counter drop; }; }";
    load(native, "nft -f -", raw)?;
    let failed = imports(native, &program, &[]).unwrap_err().to_string();
    ensure!(
        failed.contains("only zones of conntrack") && failed.contains("192.0.2.1"),
        "{failed}"
    );
    load(native, "nft -f -", "delete table inet istio-proxy-raw")?;
    // The error of a rule without a counterpart names its line.
    load(
        native,
        "nft -f -",
        "add rule inet istio-proxy-nat prerouting tcp flags syn counter drop",
    )?;
    let failed = imports(native, &program, &[]).unwrap_err().to_string();
    ensure!(
        failed.starts_with("dataplane-migrate: nft:5: ") && failed.contains("not understood"),
        "{failed}"
    );
    Ok(())
}

/// `DATAPLANE_ISTIO_RULES` names a directory with Istio's source, or its test data: files `*.golden` that have what its programs
/// write for many configurations. Each that captures connections becomes a configuration.
fn istios_own_examples_become_configurations() -> Result<()> {
    let Some(root) = std::env::var_os("DATAPLANE_ISTIO_RULES") else {
        println!(
            "skipped imported_mesh::istios_own_examples_become_configurations: DATAPLANE_ISTIO_RULES names no directory"
        );
        return Ok(());
    };
    let lab = Lab::builder().node("node1").build()?;
    let (node, program) = (lab.node("node1"), lab.programs().migrate()?);
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    let (mut imported, mut refused, mut twice) = (0, 0, 0);
    let mut configurations = BTreeMap::new();
    let mut examples = walk(root.as_ref())?;
    examples.sort();
    for example in examples {
        if example.extension().is_none_or(|ending| ending != "golden") {
            continue;
        }
        let text = fs::read_to_string(&example)?;
        let name = example.display();
        let blocks = text.split("COMMIT");
        let blocks = blocks.filter_map(|block| Some(&block[block.find('*')?..]));
        let blocks: Vec<String> = blocks.map(|block| format!("{block}COMMIT\n")).collect();
        // Groups by names that not every machine has.
        let named = |rules: &str| rules.replace("java", "201").replace("ftp", "202");
        let native = text.contains("add table inet istio-");
        let rules = blocks.concat();
        if rules.is_empty() && !native {
            continue;
        }
        fs::write(&file, named(if native { &text } else { &rules }))?;
        let command = node.command(&program).arg("import-mesh");
        let output = if native {
            node.command("nft").args(["flush", "ruleset"]).run()?;
            // The sets that some rules ask.
            if text.contains("@istio-inpod-probes") {
                let table = "inet istio-ambient-nat";
                let set = |v| {
                    format!("add set {table} istio-inpod-probes-v{v} {{ type ipv{v}_addr; }}\n")
                };
                let sets = format!("add table {table}\n{}{}", set(4), set(6));
                fs::write(&file, sets + &text)?;
            }
            node.command("nft").args(["-f", &path]).run()?;
            command.output()?
        } else {
            // Its routes tell which addresses an interface reaches.
            let netns = ["--netns", "/proc/self/ns/net"];
            command.args(["--file", &path]).args(netns).output()?
        };
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            imported += 1;
            println!("{name}: a configuration");
            // Istio writes one text for both kinds of rules.
            let its = said_by(&output.stdout);
            let group = if example.iter().any(|part| part == "cni") {
                "cni"
            } else {
                "tools"
            };
            let kind = (group, example.file_name().map(ToOwned::to_owned));
            if let Some((other, known)) =
                configurations.insert(kind, (name.to_string(), its.clone()))
            {
                ensure!(known == its, "{name} and {other}: {its}\n{known}");
                twice += 1;
            }
        } else {
            let captures_nothing = ["no rule of Istio", "the rules are the node's"];
            ensure!(
                captures_nothing.iter().any(|what| said.contains(what)),
                "{name}: {said}"
            );
            refused += 1;
            println!("{name}: {}", said.trim());
        }
    }
    ensure!(
        imported > 0,
        "no example of {refused} became a configuration"
    );
    println!(
        "{imported} examples became configurations, {twice} of them the same as another's of the same name; {refused} have rules that \
         capture nothing"
    );
    Ok(())
}
