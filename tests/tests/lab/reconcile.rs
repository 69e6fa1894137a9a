//! `dataplane-migrate apply`: rules of a mesh that exist, are missing, exist in part or in another form, with real
//! programs; and the guard, a table of nf_tables that drops every packet meanwhile.

use std::{
    collections::BTreeSet,
    env, fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    process::Output,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::{Command, Host, Lab};
use kernel::netfilter::guard;
use serde_json::Value;

use crate::{
    features::on,
    iptables::{SIDES, everything, load, make_istios_sets, walk},
};

scenarios! {
    Dataplane:
    nothing_passes_a_guard_for_its_time,
    any_rules_of_a_mesh_become_those_that_are_expected,
    each_outcome_is_said,
    a_command_that_dies_or_fails_leaves_no_mixture,
    istios_own_examples_are_reconciled,
}

/// A port without another listener in a lab's namespace.
const PORT: u16 = 4242;
/// Timeout of a connection attempt without an answer: less than a second, after which TCP sends the first packet again.
const SHORT: Duration = Duration::from_millis(200);

fn lab() -> Result<Lab> {
    Ok(Lab::builder()
        .node("node1")
        .pod("node1", "near", "10.244.1.5")
        .build()?)
}

/// Whether a host's connection to an address succeeds; if not, it timed out.
fn connects(from: &Host, to: IpAddr) -> Result<bool> {
    on(from, |_| {
        match TcpStream::connect_timeout(&(to, PORT).into(), SHORT) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(false),
            Err(error) => bail!("{to}: {error}, not dropped"),
        }
    })
}

/// Both families, both directions, TCP and datagrams: nothing passes while the guard is up, and all passes when its
/// time is over, though no command removes it.
fn nothing_passes_a_guard_for_its_time() -> Result<()> {
    let lab = lab()?;
    let (node, pod) = (lab.node("node1"), lab.pod("near"));
    let any: SocketAddr = format!("[::]:{PORT}").parse()?;
    let (of_node, of_pod) = (node.listen(any)?, pod.listen(any)?);
    let to_pod = pod.addresses();
    let to_node: [IpAddr; 2] = [pod.gateway4().into(), pod.gateway6().into()];
    let all_connect = |wanted: bool| -> Result<()> {
        for (from, to) in to_pod
            .map(|to| (node, to))
            .into_iter()
            .chain(to_node.map(|to| (pod, to)))
        {
            let connects = connects(from, to)?;
            ensure!(connects == wanted, "{} to {to}: {connects}", from.name());
        }
        Ok(())
    };
    all_connect(true)?;
    ensure!(!on(pod, |_| Ok(guard::is_there()?))?);
    let mut held = on(node, |_| Ok(TcpStream::connect((to_pod[0], PORT))?))?;
    let mut accepted = accept_last(&of_pod)?;

    let begin = Instant::now();
    on(pod, |_| Ok(guard::up(Duration::from_secs(30))?))?;
    all_connect(false)?;
    held.write_all(b"x")?;
    accepted.set_read_timeout(Some(SHORT))?;
    ensure!(
        accepted.read(&mut [0]).is_err(),
        "an established connection"
    );
    // The pod to itself, by loopback and by its own address.
    for to in [[127, 0, 0, 1].into(), to_pod[0], to_pod[1]] {
        ensure!(connects(pod, to)?, "the pod to {to} of its own");
    }
    let receiver = on(node, |_| Ok(UdpSocket::bind(any)?))?;
    receiver.set_read_timeout(Some(SHORT))?;
    let send = |to: IpAddr| {
        on(pod, |_| {
            Ok(UdpSocket::bind("[::]:0")?.send_to(b"x", (mapped(to), PORT))?)
        })
    };
    for to in to_node {
        ensure!(
            send(to).is_err_and(|why| why.to_string().contains("not permitted")),
            "a datagram to {to}"
        );
        ensure!(receiver.recv(&mut [0]).is_err(), "a datagram to {to}");
    }
    let listed = pod.command("nft").args(["list", "ruleset"]).run()?;
    for words in [
        "table inet dataplane-guard {",
        "type nf_proto",
        "iif != \"lo\" meta nfproto @up drop",
        "oif != \"lo\" meta nfproto @up drop",
        "no packet passes while rules are changed: dataplane",
    ] {
        ensure!(listed.contains(words), "no {words:?} in {listed}");
    }

    // Renewed with a shorter time, it opens by itself; the packets that waited arrive.
    let time = Duration::from_millis(1500);
    let renewed = Instant::now();
    on(pod, |_| Ok(guard::renew(time)?))?;
    while !connects(node, to_pod[0])? {
        ensure!(
            renewed.elapsed() < Duration::from_secs(20),
            "it stays closed"
        );
    }
    ensure!(
        renewed.elapsed() >= time,
        "open after {:?}",
        renewed.elapsed()
    );
    ensure!(
        begin.elapsed() < Duration::from_secs(30),
        "too slow to tell"
    );
    all_connect(true)?;
    accepted.set_read_timeout(Some(Duration::from_secs(30)))?;
    accepted
        .read_exact(&mut [0])
        .context("what was held back")?;
    ensure!(on(pod, |_| Ok(guard::is_there()?))?, "the table stays");

    // Up a second time, and down.
    on(pod, |_| Ok(guard::up(Duration::from_secs(30))?))?;
    ensure!(!connects(node, to_pod[0])?);
    ensure!(on(pod, |_| Ok(guard::down()?))?);
    all_connect(true)?;
    for to in to_node {
        send(to)?;
        receiver.recv(&mut [0]).context("a datagram")?;
    }
    ensure!(!on(pod, |_| Ok(guard::is_there()?))? && !on(pod, |_| Ok(guard::down()?))?);
    ensure!(
        on(pod, |_| Ok(guard::renew(time)))?.is_err_and(|why| why.kind() == ErrorKind::NotFound)
    );
    // `cleanup` removes the guard that a dead program has left.
    on(pod, |_| Ok(guard::up(Duration::from_secs(30))?))?;
    let bpffs = lab.bpffs()?;
    let cleanup = |more: &[&str]| {
        let command = pod.command(lab.programs().dataplane()?).arg("cleanup");
        command
            .arg("--bpffs")
            .arg(&bpffs)
            .args(more)
            .run()
            .map_err(anyhow::Error::from)
    };
    for more in [&["--dry-run"][..], &["-v"]] {
        let said = cleanup(more)?;
        ensure!(said.contains("nft:inet dataplane-guard"), "{said}");
    }
    ensure!(!on(pod, |_| Ok(guard::is_there()?))?);
    drop(of_node);
    Ok(())
}

/// The last connection in a listener's queue.
fn accept_last(listener: &TcpListener) -> Result<TcpStream> {
    let mut last = listener.accept()?.0;
    listener.set_nonblocking(true)?;
    while let Ok((accepted, _)) = listener.accept() {
        last = accepted;
    }
    last.set_nonblocking(false)?;
    Ok(last)
}

/// For a socket of IPv6.
fn mapped(to: IpAddr) -> IpAddr {
    match to {
        IpAddr::V4(to) => to.to_ipv6_mapped().into(),
        to @ IpAddr::V6(_) => to,
    }
}

/// `dataplane-migrate apply … -o json`.
fn command(lab: &Lab, more: &[&str]) -> Result<Command> {
    let command = lab.pod("near").command(lab.programs().migrate()?);
    let command = command.args(["apply", "-o", "json"]);
    Ok(command.args(more))
}

/// The outcome, with the exit code, and the whole answer.
fn apply(lab: &Lab, more: &[&str]) -> Result<(String, Value)> {
    answer(&command(lab, more)?.output()?)
}

fn answer(output: &Output) -> Result<(String, Value)> {
    let said = String::from_utf8_lossy(&output.stderr);
    let answer: Value =
        serde_json::from_slice(&output.stdout).with_context(|| said.into_owned())?;
    let code = output.status.code().unwrap_or(-1);
    let outcome = format!("{} {code}", answer["outcome"].as_str().unwrap_or("?"));
    Ok((outcome, answer))
}

/// The error of a command that has failed.
fn fails(output: &Output) -> Result<String> {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(1) && output.stdout.is_empty(),
        "{output:?}"
    );
    Ok(said)
}

/// Whether a line of [`everything`] is of Istio.
fn is_istios(line: &str) -> bool {
    line.contains("ISTIO_")
}

fn split(host: &Host) -> Result<(Vec<String>, Vec<String>)> {
    Ok(everything(host)?
        .into_iter()
        .partition(|line| is_istios(line)))
}

/// Removes all rules of both variants.
fn clear(host: &Host) -> Result<()> {
    let tables = "for t in nat mangle; do for p in iptables ip6tables; do \
        printf '*%s\\nCOMMIT\\n' $t | $p-legacy-restore; done; done; nft flush ruleset";
    host.command("sh").args(["-c", tables]).run()?;
    Ok(())
}

/// Numbers that look like chance: xorshift64.
struct Chance(u64);

impl Chance {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or_default() % below
    }
}

/// Rules of others, with a chain of theirs that leads to an older chain of Istio.
const OTHERS: &str = "-A PREROUTING -p udp -m comment --comment \"first \\\"x\\\"\" -j mine\n-A OUTPUT -p sctp -j ACCEPT\n\
    -A mine -p udp -m multiport --dports 1,2 -j RETURN\n-A OUTPUT -p udp -j mine\n";

/// Rules of one family in which some of the expected ones are missing, twice, changed or in another order, with others'
/// rules between, and older ones left over.
fn some_rules(expected: &[String], chance: &mut Chance) -> String {
    let mut lines = vec!["*nat".to_owned()];
    let declared = expected.iter().filter(|line| line.starts_with(':'));
    lines.extend(declared.cloned());
    lines.extend([":mine - [0:0]", ":ISTIO_OLD - [0:0]"].map(str::to_owned));
    let mut rules: Vec<String> = Vec::new();
    for rule in expected.iter().filter(|line| line.starts_with("-A")) {
        match chance.next(10) {
            0 => {}
            1 => rules.extend([rule.clone(), rule.clone()]),
            2 => rules.push(rule.replace("1337", "1338").replace("150", "160")),
            _ => rules.push(rule.clone()),
        }
    }
    if chance.next(2) == 0 {
        rules.push("-A mine -g ISTIO_OLD".to_owned());
        rules.push("-A ISTIO_OLD -p tcp -j REDIRECT --to-ports 15001".to_owned());
    }
    rules.extend(OTHERS.lines().map(str::to_owned));
    for _ in 0..chance.next(8) {
        let (from, to) = (chance.next(rules.len()), chance.next(rules.len()));
        let rule = rules.remove(from);
        rules.insert(to, rule);
    }
    lines.extend(rules);
    lines.push("COMMIT".to_owned());
    lines.join("\n")
}

/// From any start, any number of runs end in the same state, and rules of others stay as they are. `DATAPLANE_RECONCILE_RUNS`: how many starts.
fn any_rules_of_a_mesh_become_those_that_are_expected() -> Result<()> {
    let runs = env::var("DATAPLANE_RECONCILE_RUNS")
        .ok()
        .and_then(|runs| runs.parse().ok());
    // Among twelve there is a start of each kind.
    let runs: u64 = runs.unwrap_or(12);
    let lab = lab()?;
    let pod = lab.pod("near");
    // The expected rules, as each program prints them.
    let (outcome, answer) = apply(&lab, &["--mesh", "istio"])?;
    ensure!(outcome == "applied 0", "{answer:#}");
    let (istios, _) = split(pod)?;
    let as_printed = |side: &str| -> Vec<String> {
        let of = istios
            .iter()
            .filter_map(|line| line.strip_prefix(side)?.strip_prefix(" nat "));
        of.map(|line| {
            line.strip_prefix(':')
                .map_or(line.to_owned(), |chain| format!(":{chain} - [0:0]"))
        })
        .collect()
    };
    let default = if istios.iter().any(|line| line.starts_with("iptables-nft")) {
        "nft"
    } else {
        "legacy"
    };
    let texts = ["iptables", "ip6tables"].map(|family| as_printed(&format!("{family}-{default}")));
    ensure!(texts.iter().all(|text| text.len() == 22), "{texts:?}");
    let mut seen = BTreeSet::new();
    for seed in 1..=runs {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        clear(pod)?;
        let side = ["nft", "legacy"][chance.next(2)];
        for (family, text) in ["iptables", "ip6tables"].iter().zip(&texts) {
            let rules = match chance.next(6) {
                0 => format!("*nat\n:mine - [0:0]\n{OTHERS}COMMIT"),
                _ => some_rules(text, &mut chance),
            };
            load(pod, &format!("{family}-{side}-restore --noflush"), &rules)?;
        }
        if chance.next(3) == 0 && side == "nft" {
            let left = "*mangle\n:ISTIO_OLD - [0:0]\n-A OUTPUT -j ISTIO_OLD\n-A OUTPUT -p sctp -j ACCEPT\nCOMMIT";
            load(pod, "iptables-legacy-restore --noflush", left)?;
        }
        let before = everything(pod)?;
        // A line that leads to a chain of Istio is Istio's, in any chain.
        let others: Vec<&String> = before.iter().filter(|line| !is_istios(line)).collect();
        if chance.next(4) == 0 {
            apply(&lab, &["--mesh", "istio"])?;
        }
        let (outcome, answer) = apply(&lab, &["--mesh", "istio", "--reconcile"])?;
        let context = || format!("seed {seed}: {before:#?}\n{answer:#}");
        ensure!(
            ["same 0", "applied 0", "reconciled 0"].contains(&&*outcome),
            "{outcome}: {}",
            context()
        );
        let (now, left) = split(pod)?;
        ensure!(
            left.iter().eq(others.iter().copied()),
            "{left:#?} {}",
            context()
        );
        let wanted = istios.iter().map(|line| line.replace(default, side));
        ensure!(
            outcome == "same 0" || wanted.eq(now.iter().cloned()),
            "{now:#?} {}",
            context()
        );
        let again = apply(&lab, &["--mesh", "istio", "--reconcile"])?.0;
        ensure!(
            again == "same 0" && split(pod)? == (now, left),
            "{again} {}",
            context()
        );
        let removed = apply(&lab, &["--mesh", "istio", "--cleanup-only"])?.0;
        let (now, left) = split(pod)?;
        ensure!(
            removed == "removed 0" && now.is_empty(),
            "{removed} {now:#?} {}",
            context()
        );
        ensure!(left.iter().eq(others), "{left:#?} {}", context());
        let tables = pod.command("nft").args(["list", "tables"]).run()?;
        ensure!(!tables.contains("dataplane-guard"), "{tables}");
        seen.insert(outcome);
    }
    ensure!(runs < 20 || seen.len() > 1, "{seen:?}");
    Ok(())
}

/// Each outcome in words and by its exit code; bad input is an error that changes nothing.
fn each_outcome_is_said() -> Result<()> {
    let lab = lab()?;
    let pod = lab.pod("near");
    let expect = |more: &[&str], wanted: &str| -> Result<Value> {
        let (outcome, answer) = apply(&lab, more)?;
        ensure!(
            outcome == wanted,
            "{more:?}: {outcome}, not {wanted}: {answer:#}"
        );
        Ok(answer)
    };
    let osm = ["--mesh", "osm"];
    let dry = expect(&["--mesh", "osm", "--dry-run"], "applied 2")?;
    ensure!(
        dry["changed"] == false && everything(pod)?.is_empty(),
        "{dry:#}"
    );
    let done = expect(&osm, "applied 0")?;
    ensure!(
        done["changed"] == true && done["steps"] == dry["steps"],
        "{done:#}"
    );
    let same = expect(&osm, "same 0")?;
    ensure!(
        same["changed"] == false && same["steps"].as_array().is_some_and(Vec::is_empty),
        "{same:#}"
    );
    // Two ports of the proxy in another order; and the owner's catch-all rule after them.
    let swap = "iptables-nft -t nat -D PROXY_INBOUND 1; iptables-nft -t nat -I PROXY_INBOUND 3 -p tcp --dport 15010 -j RETURN";
    pod.command("sh").args(["-c", swap]).run()?;
    expect(&osm, "same 0")?;
    let swap = "iptables-nft -t nat -D PROXY_OUTPUT 1; iptables-nft -t nat -A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN";
    pod.command("sh").args(["-c", swap]).run()?;
    let dry = expect(
        &["--mesh", "osm", "--reconcile", "--dry-run"],
        "reconciled 2",
    )?;
    ensure!(
        dry["differences"][0]
            .as_str()
            .is_some_and(|line| line.contains("another order")),
        "{dry:#}"
    );
    expect(&["--mesh", "osm", "--reconcile"], "reconciled 0")?;
    // On top: older rules stay.
    load(
        pod,
        "iptables-nft-restore --noflush",
        "*nat\n:PROXY_OLD - [0:0]\n-A OUTPUT -j PROXY_OLD\n-D OUTPUT -p tcp -j PROXY_OUTPUT\nCOMMIT",
    )?;
    expect(&osm, "on-top 2")?;
    expect(&osm, "on-top 2")?;
    let all = everything(pod)?;
    let jumps: Vec<_> = all
        .iter()
        .filter(|line| line.contains("-A OUTPUT"))
        .collect();
    ensure!(jumps.len() == 2, "{all:#?}");
    expect(&["--mesh", "osm", "--reconcile"], "reconciled 0")?;
    let text = pod
        .command(lab.programs().migrate()?)
        .args(["apply", "--mesh", "osm"])
        .run()?;
    ensure!(
        text.contains("as expected") && text.contains("nothing was changed"),
        "{text}"
    );
    let before = everything(pod)?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    for (rules, why) in [
        ("*nat\n-N MINE\nrubbish\nCOMMIT\n", "rules: line 3:"),
        (
            "*nat\n-N MINE\n-A MINE --frob\nCOMMIT\n",
            "does not take the expected rules of table nat (from line 1 on)",
        ),
        (
            "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n",
            "belongs to kube-proxy",
        ),
    ] {
        fs::write(&file, rules)?;
        let said = fails(&command(&lab, &["--mesh", &path, "--reconcile"])?.output()?)?;
        ensure!(said.contains(why), "{said}");
    }
    // A mesh without built-in knowledge: its chains are those that the file declares.
    fs::write(
        &file,
        "*nat\n-N MINE\n-I OUTPUT -p tcp -j MINE\n-A MINE -d 10.0.0.1 -j RETURN\nCOMMIT\n",
    )?;
    expect(&["--mesh", &path], "applied 0")?;
    let first = everything(pod)?
        .into_iter()
        .find(|line| line.contains("-A OUTPUT"));
    ensure!(
        first.is_some_and(|line| line.ends_with("-j MINE")),
        "{:?}",
        everything(pod)?
    );
    expect(&["--mesh", &path], "same 0")?;
    expect(&["--mesh", &path, "--cleanup-only"], "removed 0")?;
    expect(&["--mesh", &path, "--cleanup-only"], "nothing 0")?;
    ensure!(everything(pod)? == before, "{:?}", everything(pod)?);
    // Without programs, and beside another command.
    let empty = directory.path().to_string_lossy().into_owned();
    let said = fails(&command(&lab, &osm)?.env("PATH", empty).output()?)?;
    ensure!(said.contains("apt-get install iptables"), "{said}");
    on(pod, |_| {
        use std::os::{linux::net::SocketAddrExt as _, unix::net};
        let name = net::SocketAddr::from_abstract_name("dataplane-iptables-apply")?;
        let _other = net::UnixListener::bind_addr(&name)?;
        let said = fails(&command(&lab, &osm)?.output()?)?;
        ensure!(said.contains("another `dataplane-migrate apply`"), "{said}");
        Ok(())
    })
}

/// Istio's rules in both families and an older table, so that several transactions are needed.
const OLD: &str = "*nat\n:ISTIO_OUTPUT - [0:0]\n:ISTIO_OLD - [0:0]\n-A OUTPUT -p sctp -j ACCEPT\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n\
    -A OUTPUT -p udp -j ACCEPT\n-A ISTIO_OUTPUT -p tcp -m tcp --dport 9 -j ISTIO_OLD\nCOMMIT\n*mangle\n:ISTIO_OLD - [0:0]\n\
    -A OUTPUT -j ISTIO_OLD\nCOMMIT";

/// kill -9 between the transactions: nothing passes until the guard's time is over, and the next run ends like any
/// other. And a program that refuses the second family's rules: the first family's old ones come back, to their places.
fn a_command_that_dies_or_fails_leaves_no_mixture() -> Result<()> {
    let lab = lab()?;
    let pod = lab.pod("near");
    let start = || -> Result<Vec<String>> {
        clear(pod)?;
        for family in ["iptables", "ip6tables"] {
            load(pod, &format!("{family}-nft-restore --noflush"), OLD)?;
        }
        everything(pod)
    };
    start()?;
    let reconcile = ["--mesh", "istio", "--reconcile"];
    ensure!(apply(&lab, &reconcile)?.0 == "reconciled 0");
    let wanted = everything(pod)?;
    for point in 1..=5 {
        let before = start()?;
        let output = command(&lab, &reconcile)?
            .env("DATAPLANE_TAKEOVER_DIES", point.to_string())
            .output()?;
        ensure!(output.status.code().is_none(), "point {point}: {output:?}");
        let died = everything(pod)?;
        let guard = "table inet dataplane-guard".to_owned();
        ensure!(died.contains(&guard), "point {point}: {died:#?}");
        ensure!(point > 1 || died.len() == before.len() + 1, "{died:#?}");
        ensure!(apply(&lab, &reconcile)?.0.ends_with(" 0"), "point {point}");
        ensure!(
            everything(pod)? == wanted,
            "point {point}: {:#?}",
            everything(pod)?
        );
    }
    // The first four families' and tables' changes, and the end.
    let before = start()?;
    let last = command(&lab, &reconcile)?
        .env("DATAPLANE_TAKEOVER_DIES", "6")
        .output()?;
    ensure!(
        last.status.success(),
        "more points than were tried: {last:?}"
    );
    start()?;

    let directory = tempfile::tempdir()?;
    let script = directory.path().join("ip6tables-nft-restore");
    let real = pod
        .command("sh")
        .args(["-c", "command -v ip6tables-nft-restore"])
        .run()?;
    let real = real.trim();
    // A program prints rules in another form than that of the expected ones.
    let words = format!(
        "#!/bin/sh\ncase \"$*\" in *version*) exec {real} \"$@\";; esac\ninput=$(cat)\n\
         case \"$input\" in *ISTIO_OLD*) echo 'no more' >&2; exit 1;; esac\nprintf '%s\\n' \"$input\" | {real} \"$@\"\n"
    );
    fs::write(directory.path().join("text"), words)?;
    // By a process of its own: a file that this one has open to write cannot be run while another thread forks.
    let install = ["-m", "755", "text", "ip6tables-nft-restore"];
    let install = std::process::Command::new("install")
        .args(install)
        .current_dir(directory.path())
        .status()?;
    ensure!(install.success() && script.exists());
    let path = format!("{}:{}", directory.path().display(), env::var("PATH")?);
    let said = fails(&command(&lab, &reconcile)?.env("PATH", path).output()?)?;
    ensure!(
        said.contains("no more") && said.contains("the rules are as they were before"),
        "{said}"
    );
    ensure!(everything(pod)? == before, "{:#?}", everything(pod)?);
    Ok(())
}

/// `DATAPLANE_ISTIO_RULES` names a directory with Istio's source, or its test data: files `*.golden` that have what its programs
/// write for many configurations. Each that iptables takes is applied, reconciled and removed.
fn istios_own_examples_are_reconciled() -> Result<()> {
    let Some(root) = env::var_os("DATAPLANE_ISTIO_RULES") else {
        println!(
            "skipped reconcile::istios_own_examples_are_reconciled: DATAPLANE_ISTIO_RULES names no directory"
        );
        return Ok(());
    };
    let mut files: Vec<PathBuf> = walk(Path::new(&root))?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "golden"));
    files.sort();
    let lab = lab()?;
    let pod = lab.pod("near");
    make_istios_sets(pod)?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("rules");
    let path = file.to_string_lossy().into_owned();
    let (mut reconciled, mut refused) = (0, Vec::new());
    for example in &files {
        let name = example.display();
        let text = fs::read_to_string(example)?;
        let blocks = text
            .split("COMMIT")
            .filter_map(|block| Some(&block[block.find('*')?..]));
        let blocks: Vec<String> = blocks.map(|block| format!("{block}COMMIT\n")).collect();
        let rules = blocks.concat();
        if rules.is_empty() {
            refused.push(format!("{name}: no rules for iptables-restore"));
            continue;
        }
        // Groups by names that not every machine has.
        fs::write(&file, rules.replace("java", "201").replace("ftp", "202"))?;
        clear(pod)?;
        for side in SIDES {
            load(
                pod,
                &format!("{side}-restore --noflush"),
                "*nat\n-A OUTPUT -p sctp -j ACCEPT\nCOMMIT",
            )?;
        }
        let before = everything(pod)?;
        let output = command(&lab, &["--mesh", &path])?.output()?;
        if output.status.code() == Some(1) {
            let said = fails(&output)?;
            // Placeholders in the place of names, as tests of Istio's own have them; no rules of a mesh.
            let known = ["-restore does not take", "no chain is declared"];
            let is_builders = example
                .components()
                .any(|part| part.as_os_str() == "builder");
            ensure!(
                said.contains(known[1]) || is_builders && said.contains(known[0]),
                "{name}: {said}"
            );
            refused.push(format!("{name}: {}", said.trim()));
            continue;
        }
        ensure!(answer(&output)?.0 == "applied 0", "{name}: {output:?}");
        let expected = everything(pod)?;
        for (how, wanted) in [
            ("", "same 0"),
            ("-D OUTPUT", "reconciled 0"),
            ("", "same 0"),
        ] {
            if !how.is_empty() {
                load(
                    pod,
                    "iptables-nft-restore --noflush",
                    "*nat\n:ISTIO_LEFT - [0:0]\n-I PREROUTING -j ISTIO_LEFT\nCOMMIT",
                )?;
            }
            let (outcome, answer) = apply(&lab, &["--mesh", &path, "--reconcile"])?;
            ensure!(outcome == wanted, "{name}: {outcome}: {answer:#}");
            ensure!(
                everything(pod)? == expected,
                "{name}: {:#?}",
                everything(pod)?
            );
        }
        ensure!(
            apply(&lab, &["--mesh", &path, "--cleanup-only"])?.0 == "removed 0",
            "{name}"
        );
        ensure!(
            everything(pod)? == before,
            "{name}: {:#?}",
            everything(pod)?
        );
        reconciled += 1;
    }
    println!(
        "{reconciled} of {} files were reconciled and removed; not: {refused:#?}",
        files.len()
    );
    ensure!(reconciled > 0, "{refused:#?}");
    Ok(())
}
