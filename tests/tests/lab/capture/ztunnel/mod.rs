//! Tunnels between the agent and Istio's ztunnel, both ways. The environment variable `ZTUNNEL_BIN` names ztunnel's program.

mod said;
mod world;

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::mpsc::{self, TryRecvError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{
    Host,
    report::{KeepReport, TalkReport},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use self::{
    said::both_say_the_same_of_a_connection,
    world::{APP, FAR, World},
};
use crate::{
    cluster::{ask, eventually, lived, reaches, sources_are},
    metrics::Metrics,
    sockets::{bytes, tcp},
};

scenarios! {
    Dataplane:
    pods_beside_ztunnel_and_ours_reach_each_other,
    bytes_and_their_ends_pass_both_ways,
    more_streams_than_a_tunnel_takes,
    each_side_refuses_as_the_other_expects,
    either_side_may_restart,
    both_say_the_same_of_a_connection,
}

/// What leads from `app` to `far`, and back.
const TO_FAR: [&str; 3] = ["10.244.2.5:80", "10.96.0.10:80", "[fd00:10:244:2::5]:80"];
const TO_APP: [&str; 3] = ["10.244.1.8:80", "10.96.0.11:80", "[fd00:10:244:1::8]:80"];

/// Runs a scenario if there is a ztunnel.
fn with(name: &str, scenario: impl FnOnce(World) -> Result<()>) -> Result<()> {
    with_log(name, "text", scenario)
}

/// As [`with`], with this format of the agent's access log.
fn with_log(
    name: &str,
    access_log: &str,
    scenario: impl FnOnce(World) -> Result<()>,
) -> Result<()> {
    let Some(program) = std::env::var_os("ZTUNNEL_BIN") else {
        println!("skipped capture::ztunnel::{name}: ZTUNNEL_BIN names no program");
        return Ok(());
    };
    scenario(World::new(program.into(), access_log)?)
}

fn pods_beside_ztunnel_and_ours_reach_each_other() -> Result<()> {
    with("pods_beside_ztunnel_and_ours_reach_each_other", |world| {
        let taps = world.taps()?;
        for (from, all, name) in [(world.app(), TO_FAR, "far"), (world.far(), TO_APP, "app")] {
            for to in all {
                let report = reaches(from, to, "http --count 5", &[name])?;
                sources_are(&report, &from.addresses()).context(to)?;
                // Only IPv4's packets are counted.
                let tunnelled = world.only_tunnels(&taps)?;
                ensure!(tunnelled > 0 || to.starts_with('['), "{to}: no tunnel");
            }
        }
        eventually(|| {
            let log = world.agent.log();
            for line in ["outbound", "inbound"] {
                let of = |text: &&str| text.contains(line) && text.contains(&format!("peer={FAR}"));
                ensure!(log.lines().any(|text| of(&text)), "{line} to {FAR}: {log}");
            }
            world.ztunnel_says(&[r#"direction="inbound""#, &format!("src.identity=\"{APP}\"")])?;
            world.ztunnel_says(&[
                r#"direction="outbound""#,
                &format!("dst.identity=\"{APP}\""),
                "dst.hbone_addr=10.244.1.8:80",
            ])
        })?;
        let metrics = Metrics::scrape(world.lab.node("node1"))?;
        for reporter in ["source", "destination"] {
            let labels = [
                ("reporter", reporter),
                ("connection_security_policy", "mutual_tls"),
            ];
            let opened = metrics.sum("istio_tcp_connections_opened_total", &labels);
            ensure!(opened > 14.5, "{reporter}: {opened} of 15");
        }
        Ok(())
    })
}

/// How a connection's direction to the server ended, after how many bytes.
type End = (usize, io::Result<()>);

/// Sends back what clients send, until the result's sender is dropped.
fn echo(listener: TcpListener) -> Result<(mpsc::Sender<()>, thread::JoinHandle<Vec<End>>)> {
    let (until, stop) = mpsc::channel();
    listener.set_nonblocking(true)?;
    let server = thread::spawn(move || {
        let mut clients = Vec::new();
        while stop.try_recv() != Err(TryRecvError::Disconnected) {
            match listener.accept() {
                Ok((stream, _)) => clients.push(thread::spawn(move || send_back(stream))),
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
        let ended = clients.into_iter().map(thread::JoinHandle::join);
        ended.map(|end| end.expect("no panic")).collect()
    });
    Ok((until, server))
}

fn send_back(mut stream: TcpStream) -> End {
    let (mut bytes, mut buffer) = (0, vec![0; 64 << 10]);
    let mut work = || {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        loop {
            let read = stream.read(&mut buffer)?;
            if read == 0 {
                return stream.shutdown(Shutdown::Write);
            }
            bytes += read;
            stream.write_all(&buffer[..read])?;
        }
    };
    let ended = work();
    (bytes, ended)
}

/// Exchanges, questions and answers, half-closed connections, and resets: ten of each.
fn talks(from: &Host, to: &Host) -> Result<()> {
    let at = std::net::SocketAddr::from((to.ipv4(), 9000));
    let (until, server) = echo(to.listen(at)?)?;
    let at = at.to_string();
    let talk = from.probe("talk").args(["--to", &at]);
    let report: TalkReport = talk.args(["--count", "40", "--seed", "7"]).json()?;
    drop(until);
    ensure!(
        report.answered == 40 && report.errors.is_empty(),
        "from {}: {report:?}",
        from.name()
    );
    // A client that resets its connection at once may never reach the server.
    let ended = server.join().expect("no panic");
    let (closed, others): (Vec<_>, Vec<_>) = ended.iter().partition(|(_, end)| end.is_ok());
    println!(
        "from {}: {} of 40 connections ended by FIN, {} otherwise",
        from.name(),
        closed.len(),
        others.len()
    );
    let hang = |end: &&&End| (end.1.as_ref()).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
    ensure!(
        closed.len() >= 30 && others.len() <= 10 && others.iter().find(hang).is_none(),
        "from {}: {ended:?}",
        from.name()
    );
    Ok(())
}

fn bytes_and_their_ends_pass_both_ways() -> Result<()> {
    with("bytes_and_their_ends_pass_both_ways", |world| {
        const LARGE: usize = 256 << 20;
        for (from, to) in [(world.app(), world.far()), (world.far(), world.app())] {
            talks(from, to)?;
            // One way, then the end.
            let at = std::net::SocketAddr::from((to.ipv4(), 9001));
            let listener = to.listen(at)?;
            let server = thread::spawn(move || -> io::Result<u64> {
                let (mut stream, _) = listener.accept()?;
                stream.set_read_timeout(Some(Duration::from_mins(1)))?;
                io::copy(&mut stream, &mut io::sink())
            });
            let send = format!(
                "exec 3<>/dev/tcp/{}/9001; head -c {LARGE} /dev/zero >&3",
                to.ipv4()
            );
            from.command("bash").args(["-c", &send]).run()?;
            let arrived = server.join().expect("no thread panics")?;
            ensure!(arrived == LARGE as u64, "{arrived} of {LARGE} bytes");
        }
        // The client ends its direction, and the answer still comes.
        let at = (world.app().ipv4(), 9002).into();
        let (until, server) = echo(world.app().listen(at)?)?;
        let mut stream = tcp(world.far(), at)?;
        let sent = bytes(100_000, 3);
        stream.write_all(&sent)?;
        stream.shutdown(Shutdown::Write)?;
        let mut back = Vec::new();
        stream.read_to_end(&mut back)?;
        ensure!(back == sent, "{} of {} bytes", back.len(), sent.len());
        drop(until);
        let ended = server.join().expect("no panic");
        ensure!(matches!(ended[..], [(100_000, Ok(()))]), "{ended:?}");
        Ok(())
    })
}

/// ztunnel accepts 200 streams in a tunnel, and makes 100.
fn more_streams_than_a_tunnel_takes() -> Result<()> {
    with("more_streams_than_a_tunnel_takes", |world| {
        for (from, to) in [(world.app(), "10.244.2.5:7"), (world.far(), "10.244.1.8:7")] {
            let keep = from
                .probe("keep")
                .args(["--to", to, "--count", "500", "--threads", "16"])
                .args(["--timeout-ms", "20000"]);
            let mut keep = keep.stdin_piped().stdout_piped().spawn()?;
            for ask in [false, true, true] {
                if ask {
                    // Longer than the time between ztunnel's PINGs, and the time that it waits for the answer.
                    thread::sleep(Duration::from_secs(16));
                    keep.send_line("")?;
                }
                let report: KeepReport = serde_json::from_str(&keep.wait_for_line()?)?;
                ensure!(report.alive == 500, "from {}: {report:?}", from.name());
            }
        }
        Ok(())
    })
}

fn denies(account: &str) -> Value {
    let principal = format!("cluster.local/ns/default/sa/{account}");
    json!({
        "apiVersion": "security.istio.io/v1",
        "kind": "AuthorizationPolicy",
        "metadata": { "name": "limit", "namespace": "default" },
        "spec": {
            "selector": { "matchLabels": { "app": "app" } },
            "action": "DENY",
            "rules": [{ "from": [{ "source": { "principals": [principal] } }] }],
        },
    })
}

fn each_side_refuses_as_the_other_expects() -> Result<()> {
    with("each_side_refuses_as_the_other_expects", |mut world| {
        // Our policy, and an open connection that it ends.
        let mut held = world.far().hold("10.244.1.8:7")?;
        world.write(&[denies("far")])?;
        eventually(|| {
            let report = ask(world.far(), TO_APP[0], "http")?;
            ensure!(report.answered == 0, "in spite of our policy: {report:?}");
            world.ztunnel_says(&[r#"direction="outbound""#, "401"])
        })?;
        eventually(|| {
            ensure!(held.try_wait()?.is_some(), "an open connection lives");
            Ok(())
        })?;
        world.write(&[])?;
        eventually(|| reaches(world.far(), TO_APP[0], "http", &["app"]).map(drop))?;

        // Another address than the Pod's own: ztunnel takes `app` for the waypoint of a service, and rules in the
        // namespace of `far` translate the address of `moved` to `far`.
        let report = ask(world.far(), "10.96.0.12:80", "http")?;
        ensure!(report.answered == 0, "by a waypoint: {report:?}");
        eventually(|| {
            world.ztunnel_says(&["dst.hbone_addr=10.96.0.12:80", "400"])?;
            world.we_say(&["inbound", "dst=10.96.0.12:80", "flags=NR"])
        })?;
        let report = ask(world.app(), "10.244.2.99:80", "http")?;
        ensure!(report.answered == 0, "moved: {report:?}");
        eventually(|| world.we_say(&["dst=10.244.2.99:80", "flags=CONNECT", "400"]))?;

        // Its policy. One of another account refuses nobody.
        for (account, is_denied) in [("far", false), ("app", true)] {
            world.restart(&[account])?;
            let report = ask(world.app(), TO_FAR[0], "http")?;
            ensure!((report.answered == 0) == is_denied, "{account}: {report:?}");
        }
        eventually(|| {
            world.we_say(&["dst=10.244.2.5:80", "flags=DENY"])?;
            world.ztunnel_says(&[
                r#"direction="inbound""#,
                &format!("src.identity=\"{APP}\""),
                "policy",
            ])
        })
    })
}

fn either_side_may_restart() -> Result<()> {
    with("either_side_may_restart", |mut world| {
        let of = [(TO_FAR[0], "far"), (TO_APP[0], "app")];
        let both = |world: &World| -> Result<()> {
            reaches(world.app(), of[0].0, "http --count 5", &[of[0].1])?;
            reaches(world.far(), of[1].0, "http --count 5", &[of[1].1]).map(drop)
        };
        both(&world)?;
        // Our agent: streams go on, new ones reach the successor.
        let held = [
            world.app().hold("10.244.2.5:7")?,
            world.far().hold("10.244.1.8:7")?,
        ];
        let before = world.agent.replace()?;
        for _ in 0..3 {
            both(&world)?;
        }
        held.into_iter().try_for_each(lived)?;
        before.wait().context("an agent that was replaced")?;

        // ztunnel drains: it sends GOAWAY, and open streams go on until its deadline.
        let held = world.app().hold("10.244.2.5:7")?;
        world.ztunnel()?.signal(Signal::SIGTERM)?;
        thread::sleep(Duration::from_secs(2));
        lived(held).context("a stream while ztunnel drains")?;
        world.restart(&[])?;
        both(&world)?;

        // It is killed.
        world.ztunnel()?.signal(Signal::SIGKILL)?;
        world.restart(&[])?;
        both(&world)
    })
}
