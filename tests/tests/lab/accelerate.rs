//! `acceleration: sockmap`: bytes of applications to the proxy in their pod bypass the TCP stack, and the applications
//! notice nothing of it.

use std::{
    io::Read as _,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::accelerate::WINDOW;
use dataplane_tests::{Agent, Host, Lab, Process, patience, report::TalkReport};
use serde_json::{Value, json};

use crate::{
    cluster::{eventually, reaches, serve},
    manifest::{Manifests, Service},
    outcome::run_args,
};

scenarios! {
    Dataplane:
    applications_do_not_notice,
    what_is_asked_goes_past_the_tcp_stack,
    a_stalled_reader_holds_up_its_sender,
    nothing_is_lost_when_the_reader_ends_first,
    a_captured_pod_asks_for_it,
}

/// The port of the applications that send bytes back.
const ECHO: u16 = 9100;
/// Where the scenario itself listens.
const OWN: u16 = 9101;

/// A pod with the VIPs, at which its proxy listens.
struct World {
    _proxy: Process,
    _servers: Vec<Process>,
    _manifests: Manifests,
    lab: Lab,
}

impl World {
    fn start(acceleration: &str) -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", "app", "10.244.1.8")
            .pod("node1", "near", "10.244.1.10")
            .build()?;
        let (app, near) = (lab.pod("app"), lab.pod("near"));
        for vip in [
            "10.96.0.10/32",
            "10.96.0.11/32",
            "10.96.0.12/32",
            "fd00:96::10/128",
        ] {
            app.ip(&format!("address add {vip} dev lo"))?;
        }
        // `here` is in the same pod: the server's answers bypass the TCP stack, too.
        let services = [
            Service::new("there", &["10.96.0.10", "fd00:96::10"])
                .port("tcp", 80, ECHO)
                .endpoints(&[near]),
            Service::new("here", &["10.96.0.11"])
                .port("tcp", 80, ECHO)
                .endpoints(&[app]),
            Service::new("own", &["10.96.0.12"])
                .port("tcp", 80, OWN)
                .endpoints(&[near]),
        ];
        let manifests = Manifests::new(&services)?;
        let mut servers = vec![];
        for (pod, at) in [
            (near, SocketAddr::new(near.ipv4().into(), ECHO)),
            (near, SocketAddr::new(near.ipv6().into(), ECHO)),
            (app, SocketAddr::new(app.ipv4().into(), ECHO)),
        ] {
            let server = pod.probe("talk").args(["--serve", &at.to_string()]);
            let mut server = server.stdout_piped().spawn()?;
            server.wait_for_line()?;
            servers.push(server);
        }
        let proxy = app
            .command(lab.programs().dataplane()?)
            .args([
                "proxy",
                "--mark",
                "1337",
                "--outbound",
                "0.0.0.0:80,[::]:80",
            ])
            .args(["--admin-addr", "127.0.0.1:15000"])
            .args(["--acceleration", acceleration, "--cgroup"])
            .arg(lab.node_cgroup("node1"))
            .args(["--access-log", "off", "--node-name", "node1", "--manifests"])
            .arg(manifests.path())
            .spawn()?;
        eventually(|| {
            let curl = app.command("curl").args(["-fsS", "--max-time", "20"]);
            curl.arg("http://127.0.0.1:15000/healthz/ready").run()?;
            Ok(())
        })?;
        Ok(Self {
            _proxy: proxy,
            _servers: servers,
            _manifests: manifests,
            lab,
        })
    }

    fn app(&self) -> &Host {
        self.lab.pod("app")
    }
}

fn applications_do_not_notice() -> Result<()> {
    let world = World::start("sockmap")?;
    let count = if dataplane_tests::emulated() { 20 } else { 200 };
    let clients: Vec<Process> = ["10.96.0.10:80", "10.96.0.11:80", "[fd00:96::10]:80"]
        .into_iter()
        .enumerate()
        .map(|(seed, to)| {
            let client = world.app().probe("talk").args(["--to", to]);
            let client = client.args(["--count", &count.to_string()]);
            let client = client.args(["--seed", &(seed * 100_000).to_string()]);
            client.stdout_piped().spawn()
        })
        .collect::<dataplane_tests::Result<_>>()?;
    for client in clients {
        let report: TalkReport = client.wait_json()?;
        println!("{report:?}");
        ensure!(
            report.answered == count && report.errors.is_empty(),
            "{report:?}"
        );
    }
    Ok(())
}

/// Asks `times` times in 100 bytes, and returns how many bytes TCP knows to have sent for it.
fn asked(app: &Host, to: &str, times: u32) -> Result<u64> {
    let client = app.probe("talk").args(["--to", to]);
    let client = client.args(["--ask", &times.to_string()]);
    let mut client = client.stdin_piped().stdout_piped().spawn()?;
    let line = client.wait_for_line()?;
    let port = line.trim_end().rsplit(' ').next().context("a port")?;
    let sockets = app
        .command("ss")
        .args(["-Htin", &format!("sport = :{port}")])
        .run()?;
    // Without it: only the SYN was sent.
    let sent = sockets
        .split_whitespace()
        .find_map(|word| word.strip_prefix("bytes_sent:"));
    let sent = sent.map_or(Ok(0), str::parse)?;
    client.send_line("enough")?;
    client.wait()?;
    Ok(sent)
}

fn what_is_asked_goes_past_the_tcp_stack() -> Result<()> {
    // 400 000 bytes: more than may wait at once.
    const TIMES: u32 = 4000;
    for (acceleration, most) in [("off", u64::MAX), ("sockmap", 0)] {
        let world = World::start(acceleration)?;
        for to in ["10.96.0.10:80", "10.96.0.11:80", "[fd00:96::10]:80"] {
            let sent = asked(world.app(), to, TIMES)?;
            println!("{acceleration}: {to}: {sent} bytes by TCP");
            ensure!(
                sent <= most && (most == 0 || sent >= u64::from(TIMES) * 100),
                "{acceleration}: {to}: {sent} bytes by TCP"
            );
        }
    }
    Ok(())
}

fn a_stalled_reader_holds_up_its_sender() -> Result<()> {
    /// More than the two connections' sockets hold by TCP (`tcp_rmem`, `tcp_wmem`).
    const HELD: u64 = 64 << 20;
    let world = World::start("sockmap")?;
    let stalled = Stalled::start(&world, 256 << 20)?;
    ensure!(stalled.taken < HELD, "{} bytes were taken", stalled.taken);
    stalled.all_arrives()
}

/// Bytes that wait in a socket in a sockmap stay until its owner closes it, also after both sides have sent their FIN
/// (before Linux 6.0 the kernel dropped the bytes then).
fn nothing_is_lost_when_the_reader_ends_first() -> Result<()> {
    let world = World::start("sockmap")?;
    // Most of it then waits in the proxy's socket.
    for host in [world.app(), world.lab.pod("near")] {
        host.sysctl("ipv4/tcp_wmem", "4096 4096 4096")?;
        host.sysctl("ipv4/tcp_rmem", "4096 4096 4096")?;
    }
    let stalled = Stalled::start(&world, 150_000)?;
    ensure!(stalled.taken < WINDOW, "{} bytes were taken", stalled.taken);
    stalled.server.shutdown(Shutdown::Write)?;
    thread::sleep(Duration::from_millis(500));
    stalled.all_arrives()
}

/// A client of a server that does not read.
struct Stalled {
    client: Process,
    server: TcpStream,
    /// Bytes that the client was rid of.
    taken: u64,
}

impl Stalled {
    fn start(world: &World, bytes: u64) -> Result<Self> {
        let near = world.lab.pod("near");
        let listener: TcpListener = near.listen(SocketAddr::new(near.ipv4().into(), OWN))?;
        let client = world.app().probe("talk").args(["--to", "10.96.0.12:80"]);
        let client = client.args(["--fill", &bytes.to_string()]);
        let mut client = client.stdin_piped().stdout_piped().spawn()?;
        let (server, _): (TcpStream, _) = listener.accept()?;
        server.set_read_timeout(Some(patience(Duration::from_secs(20))))?;
        let line = client.wait_for_line()?;
        let taken = line.trim_end().rsplit(' ').next();
        let taken: u64 = taken.context("a number")?.parse()?;
        println!("a stalled reader: {taken} bytes were taken");
        Ok(Self {
            client,
            server,
            taken,
        })
    }

    /// The client ends, and then the server reads: all of it, in order.
    fn all_arrives(mut self) -> Result<()> {
        self.client.send_line("the end")?;
        thread::sleep(Duration::from_millis(500));
        let (mut seen, mut buffer) = (0_u64, vec![0; 1 << 20]);
        loop {
            let read = self.server.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            for byte in &buffer[..read] {
                ensure!(*byte == pattern(seen), "byte {seen} is another");
                seen += 1;
            }
        }
        ensure!(seen == self.taken, "{seen} of {} bytes", self.taken);
        self.client.wait()?;
        Ok(())
    }
}

/// As `probe talk --fill` has it.
fn pattern(at: u64) -> u8 {
    (at % 251).to_le_bytes()[0]
}

/// By the agent's own proxy: the pod's connections are captured, and the proxy has a limit on how far it may fall
/// behind.
fn a_captured_pod_asks_for_it() -> Result<()> {
    for acceleration in ["off", "sockmap"] {
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", "app", "10.244.1.8")
            .pod("node1", "near", "10.244.1.10")
            .build()?;
        let (app, near) = (lab.pod("app"), lab.pod("near"));
        let there = Service::new("there", &["10.96.0.10", "fd00:96::10"])
            .port("tcp", 80, ECHO)
            .endpoints(&[near]);
        let manifests = Manifests::new(&[there])?;
        let mut servers = vec![serve(app)?];
        for at in near.addresses() {
            let at = SocketAddr::new(at, ECHO);
            let server = near.probe("talk").args(["--serve", &at.to_string()]);
            let mut server = server.stdout_piped().spawn()?;
            server.wait_for_line()?;
            servers.push(server);
        }
        let mesh = json!({
            "rules": { "acceleration": acceleration },
            "workloads": [{
                "name": "default/app",
                "addresses": ["10.244.1.8", "fd00:10:244:1::8"],
                "rules": { "mode": "proxy" },
            }, {
                // Acceleration is configured, and there is nothing to accelerate.
                "name": "default/near",
                "addresses": ["10.244.1.10"],
                "rules": { "mode": "kernel" },
            }],
        });
        let agent = lab
            .agent("node1")
            .in_the_nodes_cgroup()
            .manifests(manifests.path())
            .args(["--mesh", &mesh.to_string()])
            .start()?;
        for to in ["10.96.0.10:80", "[fd00:96::10]:80"] {
            let sent = asked(app, to, 4000)?;
            println!("{acceleration}: {to}: {sent} bytes by TCP");
            ensure!(
                (sent == 0) == (acceleration == "sockmap"),
                "{acceleration}: {to}: {sent} bytes by TCP"
            );
            let client = app.probe("talk").args(["--to", to, "--count", "60"]);
            let report: TalkReport = client.json()?;
            ensure!(
                report.answered == 60 && report.errors.is_empty(),
                "{acceleration}: {report:?}"
            );
        }
        // Inbound: the proxy connects to the application, whose answers are accelerated.
        reaches(near, "10.244.1.8:7", "connect --count 20", &["app"])
            .with_context(|| format!("{acceleration}: {}", agent.log()))?;
        said_to_be(acceleration, &agent)
            .with_context(|| format!("{acceleration}: what is said of it"))?;
    }
    Ok(())
}

/// Checks the output of `status` and `explain` for `default/app`, whose acceleration this is, and `default/near`.
fn said_to_be(acceleration: &str, agent: &Agent) -> Result<()> {
    let json = |args: &[&str]| -> Result<Value> {
        let args = [args, &["-o", "json"]].concat();
        run_args(agent, args)?.exits(0)?.json()
    };
    let status = json(&["status"])?;
    let row = |n: usize| {
        let row = &status["mesh"][n];
        ["name", "acceleration", "not_accelerated"].map(|field| row[field].as_str())
    };
    let is_on = acceleration == "sockmap";
    let direct = "its connections go direct";
    ensure!(
        row(0) == [Some("default/app"), Some(acceleration), None]
            && row(1) == [Some("default/near"), Some("off"), is_on.then_some(direct)],
        "{status:#}"
    );
    let text = run_args(agent, ["status"])?.exits(0)?;
    let off = format!("off: {direct}");
    text.says(&["ACCELERATION", if is_on { &off } else { "off" }])?;
    // To a service, by what it answers to its proxy; and into it.
    let elsewhere = "it is not in the workload's network namespace";
    for (from, to, legs) in [
        ("default/app", "10.96.0.10:80", [true, false]),
        ("10.244.1.10", "10.244.1.8:7", [false, true]),
    ] {
        let told = json(&["explain", from, to])?;
        let last = told["capture"].as_array().and_then(|all| all.last());
        let said = &last.with_context(|| format!("{told:#}"))?["acceleration"];
        for (leg, here) in ["client", "destination"].into_iter().zip(legs) {
            let why = match (is_on, here) {
                (true, true) => None,
                (true, false) => Some(elsewhere),
                (false, _) => Some("acceleration is off, says mesh.rules"),
            };
            ensure!(
                said[leg]["accelerated"] == (is_on && here) && said[leg]["why"].as_str() == why,
                "{from} to {to}: {told:#}"
            );
        }
    }
    let told = run_args(agent, ["explain", "default/app", "10.244.1.10:7"])?.exits(0)?;
    told.says(&[if is_on {
        "the client's bytes go to the proxy past the TCP stack"
    } else {
        "not accelerated: acceleration is off, says mesh.rules"
    }])?;
    // Direct connections have no proxy.
    let told = json(&["explain", "default/near", "10.244.1.8:9"])?;
    ensure!(told["capture"][0]["acceleration"].is_null(), "{told:#}");
    Ok(())
}
