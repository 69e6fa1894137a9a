//! The L4 proxy, in the pod whose connections it takes, behind the iptables rules that redirect them: the kernel's
//! conntrack answers SO_ORIGINAL_DST with the original destination.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File},
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::{Command, Host, Lab, PANICS, Process, patience, report::TalkReport};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::Signal,
};
use serde_json::Value;
use socket2::SockRef;
use tempfile::TempDir;

use crate::{
    cluster::{TCP, ask, eventually, reaches, serve},
    manifest::{Manifests, Service},
    metrics::Metrics,
};

scenarios! {
    Lab:
    a_vip_leads_to_endpoints_and_is_counted,
    each_direction_ends_for_itself_and_resets_stay_resets,
    endpoints_that_refuse_or_say_nothing_are_passed_over,
    what_leads_nowhere_is_reset,
    egress_is_denied_to_what_nobody_knows,
    a_stalled_reader_costs_little_and_loses_nothing,
    conversations_keep_their_bytes,
    many_short_connections_keep_their_bytes,
    a_restart_refuses_nobody,
    limits_hold_connections_back_and_draining_cuts_them,
    inbound_the_client_keeps_its_address,
    a_thread_that_dies_ends_the_proxy_with_an_error,
}

/// The mark of the proxy's own connections, which are not redirected.
const MARK: &str = "0x539";
const VIP: &str = "10.96.0.10";
const VIP6: &str = "fd00:96::10";

pub struct World {
    pub proxy: Process,
    arguments: Vec<String>,
    manifests: Manifests,
    /// Files here make it panic.
    panics: TempDir,
    _servers: Vec<Process>,
    pub lab: Lab,
}

impl World {
    /// Starts a proxy in the pod `app`. Rules in the pod redirect the pod's connections to the proxy.
    pub fn start(services: impl FnOnce(&Lab) -> Vec<Service>, arguments: &[&str]) -> Result<Self> {
        Self::start_with_files(services, arguments, None)
    }

    /// Likewise, with so many open files.
    pub fn start_with_files(
        services: impl FnOnce(&Lab) -> Vec<Service>,
        arguments: &[&str],
        files: Option<usize>,
    ) -> Result<Self> {
        let lab = Lab::builder()
            .node("node1")
            .pod("node1", "app", "10.244.1.8")
            .pod("node1", "near", "10.244.1.10")
            .pod("node1", "near2", "10.244.1.11")
            .build()?;
        let app = lab.pod("app");
        for (tool, networks, to) in [
            (
                "iptables",
                ["10.96.0.0/16", "10.244.0.0/16"],
                "127.0.0.1:15001",
            ),
            (
                "ip6tables",
                ["fd00:96::/64", "fd00:10:244::/48"],
                "[::1]:15001",
            ),
        ] {
            let mut rules = "*nat\n".to_owned();
            for network in networks {
                writeln!(
                    rules,
                    "-A OUTPUT -p tcp -d {network} -m mark ! --mark {MARK} -j DNAT --to {to}"
                )?;
            }
            rules += "COMMIT\n";
            app.command(format!("{tool}-nft-restore"))
                .stdin_text(&rules)?;
        }
        let servers = ["near", "near2"].map(|name| serve(lab.pod(name)));
        let servers = servers.into_iter().collect::<Result<_>>()?;
        let manifests = Manifests::new(&services(&lab))?;
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        let panics = tempfile::tempdir()?;
        let proxy = start(&lab, &manifests, &arguments, files, panics.path())?;
        Ok(Self {
            proxy,
            arguments,
            manifests,
            panics,
            _servers: servers,
            lab,
        })
    }

    pub fn app(&self) -> &Host {
        self.lab.pod("app")
    }

    /// Starts another proxy with the same arguments.
    fn another(&self) -> Result<Process> {
        start(
            &self.lab,
            &self.manifests,
            &self.arguments,
            None,
            self.panics.path(),
        )
    }

    /// Connects from the pod.
    pub fn connect(&self, to: &str) -> Result<TcpStream> {
        connect(self.app(), to)
    }

    /// Connects and expects a reset, which `connect()` itself returns if the reset comes early.
    fn resets(&self, to: &str) -> Result<()> {
        match self.connect(to) {
            Ok(stream) => is_reset(&stream),
            Err(error) => {
                let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
                ensure!(kind == Some(ErrorKind::ConnectionReset), "{error:#}");
                Ok(())
            }
        }
    }

    /// The proxy's answer to a GET from the pod.
    fn get(&self, path: &str) -> Result<String> {
        get(self.app(), path)
    }

    /// A metric, summed over its labels as far as they contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> Result<f64> {
        let text = self.get("/metrics")?;
        Metrics::read(&text)?;
        let lines = text.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(labels)
        });
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(values.sum())
    }
}

fn get(app: &Host, path: &str) -> Result<String> {
    let url = format!("http://127.0.0.1:15000{path}");
    let curl = app.command("curl").args(["-fsS", "--max-time", "20"]);
    Ok(curl.arg(url).run()?)
}

fn start(
    lab: &Lab,
    manifests: &Manifests,
    arguments: &[String],
    files: Option<usize>,
    panics: &Path,
) -> Result<Process> {
    let app = lab.pod("app");
    let program = lab.programs().dataplane()?;
    let own_log = arguments.iter().any(|argument| argument == "--access-log");
    let log: &[&str] = if own_log {
        &[]
    } else {
        &["--access-log", "json"]
    };
    let proxy = match files {
        None => app.command(program),
        Some(files) => app
            .command("sh")
            .args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")])
            .arg(program),
    };
    let proxy = proxy
        .env(PANICS, panics)
        .args(["proxy", "--mark", MARK, "--workload", "default/app"])
        .args(["--node-name", "node1", "--manifests"])
        .arg(manifests.path())
        .args(log)
        .args(["--admin-addr", "127.0.0.1:15000", "--admin-socket"])
        .arg(panics.join("admin.sock"))
        .args(arguments)
        .stdout_piped()
        .spawn()?;
    eventually(|| get(app, "/healthz/ready").map(drop))?;
    Ok(proxy)
}

trait Feed {
    /// Runs it with this on its standard input.
    fn stdin_text(self, text: &str) -> Result<()>;
}

impl Feed for Command {
    fn stdin_text(self, text: &str) -> Result<()> {
        let mut process = self.stdin_piped().spawn()?;
        for line in text.lines() {
            process.send_line(line)?;
        }
        process.wait()?;
        Ok(())
    }
}

/// Does something in a host's network namespace, on a thread of its own.
pub fn inside<T: Send + 'static, E: Into<anyhow::Error> + Send + 'static>(
    host: &Host,
    work: impl FnOnce() -> std::result::Result<T, E> + Send + 'static,
) -> Result<T> {
    let namespace = Path::new("/run/netns").join(host.netns());
    let thread = thread::spawn(move || {
        setns(File::open(namespace)?, CloneFlags::CLONE_NEWNET)?;
        work().map_err(Into::into)
    });
    thread
        .join()
        .map_err(|_| anyhow::anyhow!("a client panicked"))?
}

/// Connects from a host.
pub fn connect(host: &Host, to: &str) -> Result<TcpStream> {
    let to: SocketAddr = to.parse()?;
    let stream = inside(host, move || TcpStream::connect(to))?;
    stream.set_read_timeout(Some(patience(Duration::from_secs(20))))?;
    Ok(stream)
}

/// Takes a connection of a server's.
pub fn accept(listener: &TcpListener) -> Result<TcpStream> {
    let (stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(patience(Duration::from_secs(20))))?;
    Ok(stream)
}

/// Reads to the end: the bytes, or the error.
pub fn ending(mut stream: &TcpStream) -> Result<Vec<u8>, ErrorKind> {
    let mut read = Vec::new();
    match stream.read_to_end(&mut read) {
        Ok(_) => Ok(read),
        Err(error) => Err(error.kind()),
    }
}

fn ends_with(stream: &TcpStream, wanted: &[u8]) -> Result<()> {
    let seen = ending(stream);
    ensure!(seen.as_deref() == Ok(wanted), "{seen:?}, not {wanted:?}");
    Ok(())
}

fn is_reset(stream: &TcpStream) -> Result<()> {
    let seen = ending(stream);
    ensure!(
        seen == Err(ErrorKind::ConnectionReset),
        "{seen:?}, not a reset"
    );
    Ok(())
}

fn reset(stream: TcpStream) -> Result<()> {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    drop(stream);
    Ok(())
}

/// The service `web`, of both pods; and `own`, of a port in the pod `near` that the scenario serves.
pub fn services(lab: &Lab) -> Vec<Service> {
    vec![
        Service::new("web", &[VIP, VIP6])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("near"), lab.pod("near2")]),
        Service::new("own", &["10.96.0.11", "fd00:96::11"])
            .port("tcp", 80, OWN)
            .endpoints(&[lab.pod("near")]),
        Service::new("empty", &["10.96.0.12"]).port("tcp", 80, TCP),
    ]
}

const OWN: u16 = 9000;

/// A listening socket in the pod `near`, behind the service `own`.
pub fn own(world: &World, v6: bool) -> Result<TcpListener> {
    let near = world.lab.pod("near");
    let ip: IpAddr = if v6 {
        near.ipv6().into()
    } else {
        near.ipv4().into()
    };
    Ok(near.listen(SocketAddr::new(ip, OWN))?)
}

fn a_vip_leads_to_endpoints_and_is_counted() -> Result<()> {
    let world = World::start(services, &[])?;
    let both = ["near", "near2"];
    reaches(world.app(), "10.96.0.10:80", "connect --count 40", &both)?;
    reaches(world.app(), "[fd00:96::10]:80", "connect --count 40", &both)?;
    // A pod's address instead of a service's: the proxy connects straight to it.
    let pod = format!("{}:{TCP}", world.lab.pod("near2").ipv4());
    reaches(world.app(), &pod, "connect --count 3", &["near2"])?;

    let web = "destination_service_name=\"web\"";
    eventually(|| {
        let closed = world.metric("istio_tcp_connections_closed_total", web)?;
        ensure!((closed - 80.0).abs() < 0.5, "{closed} of 80 closed");
        Ok(())
    })?;
    let opened = world.metric("istio_tcp_connections_opened_total", "reporter=\"source\"")?;
    ensure!((opened - 83.0).abs() < 0.5, "{opened} of 83 opened");
    let sent = world.metric("istio_tcp_sent_bytes_total", web)?;
    ensure!(sent > 80.0 * 10.0, "{sent} bytes of greetings");

    let dump: Value = serde_json::from_str(&world.get("/config_dump")?)?;
    ensure!(
        dump["workloads"][0]["name"] == "default/app"
            && dump["services"][2]["name"] == "default/web",
        "{dump:#}"
    );
    ensure!(world.get("/logging")?.contains("info"), "the log's level");
    // Not every process may set the level of the log.
    let post = |to: &str| {
        let curl = world.app().command("curl");
        curl.args(["-sS", "-w", " %{http_code}", "-X", "POST", to])
    };
    let by_address = post("http://127.0.0.1:15000/logging?level=debug").run()?;
    ensure!(by_address.ends_with(" 403"), "{by_address}");
    ensure!(world.get("/logging")?.contains("info"), "the log's level");
    let socket = world.panics.path().join("admin.sock");
    let by_socket = post("http://proxy/logging?level=debug").arg("--unix-socket");
    let by_socket = by_socket.arg(&socket).run()?;
    ensure!(
        by_socket == "debug\n 200",
        "the log's new level: {by_socket}"
    );
    let stranger = post("http://proxy/logging?level=trace").arg("--unix-socket");
    let stranger = stranger.arg(&socket).user(1000).output()?;
    ensure!(!stranger.status.success(), "{stranger:?}");

    // One line for each connection.
    let lines = log(world)?;
    let count = |service: &str, key: &str| {
        let of = lines.iter().filter(|line| line["service"] == service);
        of.filter(|line| line[key].is_string()).count()
    };
    ensure!(lines.len() == 83, "{} lines", lines.len());
    ensure!(count("default/web", "endpoint") == 80, "{lines:#?}");
    let first = &lines[0];
    ensure!(
        first["dst"] == "10.96.0.10:80"
            && first["workload"] == "default/app"
            && first["direction"] == "outbound"
            && first["bytes_sent"].as_u64() > Some(10),
        "{first:#}"
    );
    Ok(())
}

/// Ends the proxy, and returns its access log.
fn log(world: World) -> Result<Vec<Value>> {
    world.proxy.signal(Signal::SIGTERM)?;
    let text = world.proxy.wait()?;
    let lines = text.lines().map(serde_json::from_str);
    Ok(lines.collect::<serde_json::Result<_>>()?)
}

/// Ends connections from both sides, with FIN and with RST, and checks that the other side sees each end as it was.
pub fn each_end(connect: impl Fn() -> Result<TcpStream>, listener: &TcpListener) -> Result<()> {
    // The client ends first.
    let mut client = connect()?;
    let mut server = accept(listener)?;
    client.write_all(b"question")?;
    client.shutdown(Shutdown::Write)?;
    ends_with(&server, b"question")?;
    server.write_all(b"answer")?;
    drop(server);
    ends_with(&client, b"answer")?;
    // The server ends first.
    let mut client = connect()?;
    let mut server = accept(listener)?;
    server.write_all(b"greeting")?;
    server.shutdown(Shutdown::Write)?;
    ends_with(&client, b"greeting")?;
    client.write_all(b"thanks")?;
    drop(client);
    ends_with(&server, b"thanks")?;
    // The client resets.
    let client = connect()?;
    let server = accept(listener)?;
    reset(client)?;
    is_reset(&server)?;
    // The server resets, also before the client has sent anything.
    let client = connect()?;
    let mut server = accept(listener)?;
    server.write_all(b"last words")?;
    let mut words = [0; 10];
    (&client).read_exact(&mut words)?;
    reset(server)?;
    is_reset(&client)?;
    Ok(())
}

fn each_direction_ends_for_itself_and_resets_stay_resets() -> Result<()> {
    let world = World::start(services, &[])?;
    for (vip, v6) in [("10.96.0.11:80", false), ("[fd00:96::11]:80", true)] {
        let listener = own(&world, v6)?;
        each_end(|| world.connect(vip), &listener)?;
    }
    let lines = log(world)?;
    let flags = |flag: &str| lines.iter().filter(|l| l["response_flags"] == flag).count();
    ensure!(
        (flags("-"), flags("DC"), flags("UC")) == (4, 2, 2),
        "{lines:#?}"
    );
    Ok(())
}

fn endpoints_that_refuse_or_say_nothing_are_passed_over() -> Result<()> {
    let services = |lab: &Lab| {
        let silent = lab.pod("near2");
        vec![
            // No server listens at this port of `near2`.
            Service::new("web", &[VIP])
                .port("tcp", 80, OWN)
                .endpoints(&[lab.pod("near"), silent]),
        ]
    };
    let world = World::start(services, &["--connect-timeout", "200ms"])?;
    let listener = own(&world, false)?;
    let talk = || -> Result<()> {
        let mut client = world.connect("10.96.0.10:80")?;
        let mut server = accept(&listener)?;
        server.write_all(b"here")?;
        drop(server);
        ends_with(&client, b"here")?;
        client.flush()?;
        Ok(())
    };
    for _ in 0..12 {
        talk()?;
    }
    // The pod does not even refuse.
    world.lab.pod("near2").ip("link set eth0 down")?;
    for _ in 0..6 {
        talk()?;
    }
    let lines = log(world)?;
    ensure!(lines.len() == 18, "{lines:#?}");
    Ok(())
}

fn what_leads_nowhere_is_reset() -> Result<()> {
    let world = World::start(services, &[])?;
    let nowhere = [
        ("10.96.0.12:80", "UH"),
        ("10.96.0.10:81", "NR"),
        ("127.0.0.1:15001", "LOOP"),
        ("[::1]:15001", "LOOP"),
        // A pod's port that is closed.
        ("10.244.1.10:4444", "UF"),
    ];
    for (to, _) in nowhere {
        world.resets(to).with_context(|| to.to_owned())?;
    }
    let failed = world.metric(
        "istio_tcp_connections_failed_total",
        "response_flags=\"UH\"",
    )?;
    ensure!(
        (failed - 1.0).abs() < 0.5,
        "{failed} failed for want of endpoints"
    );
    let lines = log(world)?;
    let flags: BTreeMap<&str, &str> = lines
        .iter()
        .filter_map(|line| Some((line["dst"].as_str()?, line["response_flags"].as_str()?)))
        .collect();
    ensure!(flags == nowhere.into(), "{flags:?}");
    ensure!(
        lines[4]["error"]
            .as_str()
            .is_some_and(|e| e.contains("refused")),
        "{lines:#?}"
    );
    Ok(())
}

fn egress_is_denied_to_what_nobody_knows() -> Result<()> {
    let services = |lab: &Lab| {
        vec![
            Service::new("web", &[VIP])
                .port("tcp", 80, TCP)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    let world = World::start(services, &["--egress", "deny"])?;
    reaches(world.app(), "10.96.0.10:80", "connect --count 3", &["near"])?;
    // An endpoint's address is known, with any port.
    let known = format!("{}:{TCP}", world.lab.pod("near").ipv4());
    reaches(world.app(), &known, "connect --count 3", &["near"])?;
    let unknown = format!("{}:{TCP}", world.lab.pod("near2").ipv4());
    world.resets(&unknown)?;
    let lines = log(world)?;
    // A connection that ended earlier may be logged later, by another worker.
    let denied = lines.iter().filter(|line| line["response_flags"] == "DENY");
    ensure!(lines.len() == 7 && denied.count() == 1, "{lines:#?}");
    Ok(())
}

/// The lowest byte.
fn low(number: u64) -> u8 {
    number.to_le_bytes()[0]
}

/// Resident memory that no file backs, in KiB.
pub fn memory(process: &Process) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("RssAnon")?.parse()?)
}

fn a_stalled_reader_costs_little_and_loses_nothing() -> Result<()> {
    const EACH: usize = 24 << 20;
    const CONNECTIONS: usize = 6;
    let world = World::start(services, &[])?;
    let listener = own(&world, false)?;
    let before = memory(&world.proxy)?;
    let mut pairs = Vec::new();
    for number in 0..CONNECTIONS {
        let client = world.connect("10.96.0.11:80")?;
        let server = accept(&listener)?;
        // Every byte differs from its neighbours, and from those of other connections.
        let bytes: Vec<u8> = (0..EACH)
            .map(|at| low((at * 31 + at / 251 + number) as u64))
            .collect();
        let bytes = Arc::new(bytes);
        let sent = Arc::clone(&bytes);
        let mut writer = client.try_clone()?;
        let writing = thread::spawn(move || {
            writer.write_all(&sent)?;
            writer.shutdown(Shutdown::Write)
        });
        pairs.push((client, server, bytes, writing));
    }
    // Waits until no byte moves any more.
    let mut moved = 0.0;
    eventually(|| {
        thread::sleep(Duration::from_millis(300));
        let before = std::mem::replace(&mut moved, world.metric("dataplane_proxy_held_bytes", "")?);
        ensure!((before - moved).abs() < 0.5, "still moving");
        Ok(())
    })?;
    let grown = memory(&world.proxy)?.saturating_sub(before);
    println!("{CONNECTIONS} stalled connections: {grown} KiB more");
    // At most a large buffer each, however much is sent, and some for the worker.
    let limit = 256 * (CONNECTIONS as u64 + 8);
    ensure!(
        grown < limit,
        "{grown} KiB for {CONNECTIONS} stalled connections"
    );
    for (client, mut server, bytes, writing) in pairs {
        let mut seen = Vec::with_capacity(EACH);
        server.read_to_end(&mut seen)?;
        ensure!(seen == *bytes, "{} of {EACH} bytes, or others", seen.len());
        writing
            .join()
            .map_err(|_| anyhow::anyhow!("a writer panicked"))??;
        drop((client, server));
    }
    Ok(())
}

/// Applications with blocking sockets: random sizes, both directions at once, questions and answers, half-closed
/// connections, resets. Every byte is compared.
fn conversations_keep_their_bytes() -> Result<()> {
    let world = World::start(services, &["--access-log", "off"])?;
    let near = world.lab.pod("near");
    let mut servers = Vec::new();
    for at in near.addresses() {
        let at = SocketAddr::new(at, OWN);
        let server = near.probe("talk").args(["--serve", &at.to_string()]);
        let mut server = server.stdout_piped().spawn()?;
        server.wait_for_line()?;
        servers.push(server);
    }
    let count = if dataplane_tests::emulated() { 20 } else { 200 };
    let clients: Vec<Process> = ["10.96.0.11:80", "[fd00:96::11]:80"]
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

/// Connections of a byte pattern each, whose answer must be the same pattern. In full, with
/// `DATAPLANE_SHORT_CONNECTIONS=100000`.
fn many_short_connections_keep_their_bytes() -> Result<()> {
    const CLIENTS: u64 = 4;
    let count: u64 = match std::env::var("DATAPLANE_SHORT_CONNECTIONS") {
        Ok(count) => count.parse()?,
        Err(_) => 3_000,
    };
    // Several VIPs, or the ports of one would be used up within a minute: connections end in order,
    // and rest in TIME_WAIT.
    let services = |lab: &Lab| -> Vec<Service> {
        let vips = 1..=16;
        vips.map(|number| {
            Service::new(&format!("s{number}"), &[&format!("10.96.1.{number}")])
                .port("tcp", 80, OWN)
                .endpoints(&[lab.pod("near"), lab.pod("near2")])
        })
        .collect()
    };
    let world = World::start(services, &[])?;
    // The proxy's own connections go to two endpoints only.
    world.app().sysctl("ipv4/tcp_tw_reuse", "1")?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut servers = Vec::new();
    for name in ["near", "near2"] {
        let pod = world.lab.pod(name);
        let listener = pod.listen(SocketAddr::new(pod.ipv4().into(), OWN))?;
        for _ in 0..CLIENTS {
            let (listener, stop) = (listener.try_clone()?, Arc::clone(&stop));
            servers.push(thread::spawn(move || -> Result<()> {
                while !stop.load(Ordering::Relaxed) {
                    let (mut stream, _) = listener.accept()?;
                    let mut bytes = Vec::new();
                    stream.read_to_end(&mut bytes)?;
                    stream.write_all(&bytes)?;
                }
                Ok(())
            }));
        }
    }
    let done = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (done, app) = (Arc::clone(&done), world.app().clone());
            thread::spawn(move || {
                inside(&app, move || -> Result<()> {
                    let mut turn = number;
                    while done.fetch_add(1, Ordering::Relaxed) < count {
                        turn += CLIENTS;
                        let vip = SocketAddr::from(([10, 96, 1, 1 + low(turn % 16)], 80));
                        let length = (turn * 7919 % 20_000) as usize;
                        let bytes: Vec<u8> = (0..length as u64)
                            .map(|at| low(at ^ (turn * 131)))
                            .collect();
                        let mut stream = TcpStream::connect(vip)?;
                        stream.set_read_timeout(Some(patience(Duration::from_secs(20))))?;
                        stream.write_all(&bytes)?;
                        stream.shutdown(Shutdown::Write)?;
                        let mut back = Vec::with_capacity(length);
                        stream.read_to_end(&mut back)?;
                        ensure!(back == bytes, "{} of {length} bytes, or others", back.len());
                    }
                    Ok(())
                })
            })
        })
        .collect();
    let start = Instant::now();
    for client in clients {
        client
            .join()
            .map_err(|_| anyhow::anyhow!("a client panicked"))??;
    }
    println!("{count} connections in {:.1?}", start.elapsed());
    stop.store(true, Ordering::Relaxed);
    let opened = world.metric("istio_tcp_connections_opened_total", "")?;
    #[expect(clippy::cast_precision_loss, reason = "100 000")]
    let wanted = count as f64;
    ensure!(
        (opened - wanted).abs() < 0.5,
        "{opened} of {count} were opened"
    );
    let failed = world.metric("istio_tcp_connections_failed_total", "")?;
    ensure!(failed < 0.5, "{failed} failed");
    Ok(())
}

fn a_restart_refuses_nobody() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("proxy.sock");
    let socket = socket.to_str().context("a path")?;
    let mut world = World::start(services, &["--handover", socket, "--drain-time", "20s"])?;
    // A connection that lives through it.
    let mut kept = world.connect("10.96.0.10:80")?;
    let mut greeting = [0; 4];
    kept.read_exact(&mut greeting)?;
    let load = world
        .app()
        .load(&["--to", "10.96.0.10:80", "--threads", "3"])?;
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(150));
        let another = world.another()?;
        let old = std::mem::replace(&mut world.proxy, another);
        // Connections that it relays go on until they end by themselves.
        thread::spawn(move || drop(old.wait()));
    }
    thread::sleep(Duration::from_millis(150));
    let report: dataplane_tests::report::LoadReport = load.wait_json()?;
    println!("{} connections through three restarts", report.answered);
    ensure!(
        report.errors.is_empty() && report.answered > 100,
        "{} answered, errors {:?}",
        report.answered,
        report.errors
    );
    Ok(())
}

fn limits_hold_connections_back_and_draining_cuts_them() -> Result<()> {
    let world = World::start(services, &["--max-connections", "2", "--drain-time", "1s"])?;
    let listener = own(&world, false)?;
    let vip = "10.96.0.11:80";
    let clients = [world.connect(vip)?, world.connect(vip)?];
    let servers = [accept(&listener)?, accept(&listener)?];
    // The kernel takes it, and the proxy does not.
    let mut third = world.connect(vip)?;
    third.write_all(b"patience")?;
    thread::sleep(Duration::from_millis(300));
    let now = world.metric("dataplane_proxy_connections", "")?;
    ensure!((now - 2.0).abs() < 0.5, "{now} connections");
    drop((clients, servers));
    let mut server = accept(&listener)?;
    let mut seen = [0; 8];
    server.read_exact(&mut seen)?;
    ensure!(&seen == b"patience", "{seen:?}");

    // On SIGTERM it closes its listeners, drains, and resets the connections that are left.
    world.proxy.signal(Signal::SIGTERM)?;
    eventually(|| {
        let refused = world.connect(vip).is_err();
        ensure!(refused, "still accepted");
        Ok(())
    })?;
    third.write_all(b"still here")?;
    let mut seen = [0; 10];
    server.read_exact(&mut seen)?;
    is_reset(&third)?;
    is_reset(&server)?;
    let text = world.proxy.wait()?;
    ensure!(text.contains("\"DRAIN\""), "{text}");
    Ok(())
}

/// As in a sidecar: rules redirect connections to the pod's port to the proxy, which connects to the application from
/// the client's address; marks bring the answers back to it.
fn inbound_the_client_keeps_its_address() -> Result<()> {
    let world = World::start(services, &["--inbound", "0.0.0.0:15006", "--transparent"])?;
    let app = world.app();
    app.command("iptables-nft-restore").stdin_text(&format!(
        "*nat\n-A PREROUTING -p tcp -d {}/32 --dport {OWN} -j REDIRECT --to-ports 15006\nCOMMIT\n",
        app.ipv4()
    ))?;
    app.ip(&format!("rule add fwmark {MARK} lookup 100"))?;
    app.ip("route add local default dev lo table 100")?;
    app.sysctl("ipv4/tcp_fwmark_accept", "1")?;
    let at = SocketAddr::new(app.ipv4().into(), OWN);
    let _server = app.serve(&["--tcp", &at.to_string()])?;
    let client = world.lab.pod("near");
    let report = ask(client, &at.to_string(), "connect --count 10")?;
    ensure!(report.answered == 10, "{report:?}");
    let saw: Vec<&IpAddr> = report.endpoints["app"].sources.keys().collect();
    ensure!(saw == [&IpAddr::V4(client.ipv4())], "{report:?}");
    let lines = log(world)?;
    ensure!(
        lines.len() == 10 && lines.iter().all(|line| line["direction"] == "inbound"),
        "{lines:#?}"
    );
    if lines[0]["endpoint"] != at.to_string() {
        bail!("{:#}", lines[0]);
    }
    Ok(())
}

fn a_thread_that_dies_ends_the_proxy_with_an_error() -> Result<()> {
    let web = |lab: &Lab| {
        vec![
            Service::new("web", &[VIP])
                .port("tcp", 80, TCP)
                .endpoints(&[lab.pod("near")]),
        ]
    };
    for thread in ["manifests", "relay", "access-log"] {
        let mut world = World::start(web, &["--drain-time", "1s"])?;
        fs::write(world.panics.path().join(thread), "")?;
        if thread == "manifests" {
            world.manifests.write(&[])?;
        } else {
            // This connection may end either way.
            world
                .app()
                .probe("connect")
                .args(["--to", &format!("{VIP}:80"), "--timeout-ms", "500"])
                .output()?;
        }
        let mut ended = None;
        eventually(|| {
            ended = world.proxy.try_wait()?;
            ensure!(ended.is_some(), "{thread} has died, and the proxy goes on");
            Ok(())
        })?;
        ensure!(
            ended.is_some_and(|status| status.code() == Some(1)),
            "{thread}: {ended:?}"
        );
    }
    Ok(())
}
