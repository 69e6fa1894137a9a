//! The L4 proxy with more connections than it can have: many at once that are slow, many in a row that
//! are refused, and many that do nothing.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Lab, patience, report::KeepReport, whole_machine};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::{
    cluster::{TCP, eventually, reaches},
    manifest::Service,
    proxy::{World, accept, ending, inside, memory, own, services},
};

scenarios! {
    Lab:
    more_than_it_can_have_are_refused_or_wait,
    idle_connections_take_little_memory,
}

/// A number, which an environment variable may replace: the full one takes a while.
fn number(variable: &str, usual: u32) -> Result<u32> {
    match std::env::var(variable) {
        Ok(number) => Ok(number.parse()?),
        Err(_) => Ok(usual),
    }
}

/// Raises this process's limit of open files, which its children inherit, as far as possible.
fn raise_files() -> Result<u32> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = hard.max(100_000);
    // Beyond the hard limit only with CAP_SYS_RESOURCE, as in the guest.
    let reached = setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).map_or(hard, |()| wanted);
    setrlimit(Resource::RLIMIT_NOFILE, reached, reached)?;
    Ok(u32::try_from(reached).unwrap_or(u32::MAX))
}

/// Open files of a process.
fn files(process: u32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{process}/fd"))?.count())
}

/// Processor time of a process, in ticks.
fn ticks(process: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let fields = stat.rsplit(')').next().context("a name")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}

/// So many open files allow the proxy 500 connections beside one workload.
const FILES: usize = 1272;
const MOST: u32 = 500;

fn more_than_it_can_have_are_refused_or_wait() -> Result<()> {
    let slow = number("DATAPLANE_SLOW_CONNECTIONS", 3_000)?;
    let refused = number("DATAPLANE_REFUSED_CONNECTIONS", 5_000)?;
    let each = raise_files()?.saturating_sub(500);
    let services = |lab: &Lab| {
        let mut all = services(lab);
        all.push(
            Service::new("closed", &["10.96.0.13"])
                .port("tcp", 80, 4444)
                .endpoints(&[lab.pod("near")]),
        );
        all
    };
    let arguments = ["--access-log", "off"];
    let world = World::start_with_files(services, &arguments, Some(FILES))?;
    let proxy = world.proxy.id();
    let before = memory(&world.proxy)?;

    // A connection that exists from the beginning, and is used all along.
    let listener = own(&world, false)?;
    let _v6 = own(&world, true)?;
    let mut kept = world.connect("10.96.0.11:80")?;
    let mut server = accept(&listener)?;
    let mut talk = || -> Result<()> {
        let mut seen = [0; 4];
        kept.write_all(b"ping")?;
        server.read_exact(&mut seen)?;
        server.write_all(&seen)?;
        kept.read_exact(&mut seen)?;
        ensure!(&seen == b"ping", "{seen:?}");
        Ok(())
    };
    talk()?;

    // Slow ones: they connect, and send nothing. The server accepts them, and sends nothing either. It does not matter
    // which of them connects in time, and which waits for a place in the queue. Of each family there are as many ports
    // as one address has.
    let app = world.app().clone();
    app.sysctl("ipv4/ip_local_port_range", "2000 65000")?;
    let mut clients = Vec::new();
    let mut left = slow;
    while left > 0 {
        let count = left.min(each);
        left -= count;
        let client = app.probe("keep").args(["--slow", "--count"]);
        let client = client.arg(count.to_string());
        let client = client.args(["--to", "10.96.0.11:80", "--to", "[fd00:96::11]:80"]);
        let mut client = client.stdin_piped().stdout_piped().spawn()?;
        let report: KeepReport = serde_json::from_str(&client.wait_for_line()?)?;
        ensure!(report.alive == u64::from(count), "{report:?}");
        clients.push(client);
    }
    eventually(|| {
        let now = world.metric("dataplane_proxy_connections", "")?;
        ensure!((now - f64::from(MOST)).abs() < 0.5, "{now} connections");
        Ok(())
    })?;
    // Its processor time in two seconds of being full.
    let at_first = ticks(proxy)?;
    thread::sleep(Duration::from_secs(2));
    let spent = ticks(proxy)? - at_first;
    println!(
        "{slow} slow connections: {} open files, {} KiB more, {spent} ticks in 2 s",
        files(proxy)?,
        memory(&world.proxy)?.saturating_sub(before),
    );
    talk()?;
    ensure!(files(proxy)? <= FILES, "{} open files", files(proxy)?);
    let grown = memory(&world.proxy)?.saturating_sub(before);
    ensure!(grown < 32 << 10, "{grown} KiB more");
    // It does not spin on connections that it cannot accept: half of one processor would be 100 ticks.
    ensure!(spent < 100, "{spent} ticks in 2 s");
    // Clients of other endpoints on the node do not notice.
    let near2 = format!("{}:{TCP}", world.lab.pod("near2").ipv4());
    reaches(
        world.lab.pod("near"),
        &near2,
        "connect --count 20",
        &["near2"],
    )?;
    drop(clients);
    // The waiting ones are accepted, found to be closed, and make room.
    eventually(|| {
        let now = world.metric("dataplane_proxy_connections", "")?;
        ensure!(now < 1.5, "{now} connections");
        Ok(())
    })?;
    talk()?;

    // Refused ones, each of which must get a reset: there is no endpoint, or it does not listen.
    let left = Arc::new(AtomicU64::new(refused.into()));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (app, left) = (app.clone(), Arc::clone(&left));
            thread::spawn(move || {
                inside(&app, move || -> Result<()> {
                    let take = |left: u64| left.checked_sub(1);
                    while let Ok(number) =
                        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
                    {
                        let vip = if number % 2 == 0 { 12 } else { 13 };
                        let to = SocketAddr::from(([10, 96, 0, vip], 80));
                        let Ok(stream) = TcpStream::connect(to) else {
                            continue;
                        };
                        stream.set_read_timeout(Some(patience(Duration::from_secs(20))))?;
                        let seen = ending(&stream);
                        ensure!(
                            seen == Err(std::io::ErrorKind::ConnectionReset),
                            "{seen:?}, not a reset"
                        );
                    }
                    Ok(())
                })
            })
        })
        .collect();
    for client in clients {
        let result = client.join();
        result.map_err(|_| anyhow::anyhow!("a client panicked"))??;
    }
    talk()?;
    eventually(|| {
        let now = world.metric("dataplane_proxy_connections", "")?;
        ensure!(now < 1.5, "{now} connections");
        Ok(())
    })?;
    // By service: of the slow ones, too, some were gone before they had been connected, and a few of
    // those may have been found only now.
    let mut failed = 0.0;
    for service in ["empty", "closed"] {
        let service = format!("destination_service_name=\"{service}\"");
        failed += world.metric("istio_tcp_connections_failed_total", &service)?;
    }
    println!(
        "{refused} refused connections: {failed} counted, {} open files, {} KiB more",
        files(proxy)?,
        memory(&world.proxy)?.saturating_sub(before),
    );
    ensure!(
        (failed - f64::from(refused)).abs() < 0.5,
        "{failed} were refused"
    );
    // As before.
    reaches(
        world.app(),
        "10.96.0.10:80",
        "connect --count 20",
        &["near", "near2"],
    )?;
    Ok(())
}

/// In full where the limit of open files can be raised, as in the guest; elsewhere as many as it
/// allows, with `DATAPLANE_IDLE_CONNECTIONS`.
fn idle_connections_take_little_memory() -> Result<()> {
    const BYTES: u64 = 3584;
    let usual = if whole_machine() { 20_000 } else { 2_000 };
    let wanted = number("DATAPLANE_IDLE_CONNECTIONS", usual)?;
    // The proxy has two files for each; clients and servers are processes of their own.
    let possible = (raise_files()?).saturating_sub(500) / 2;
    let count = wanted.min(possible);
    let world = World::start(services, &["--access-log", "off"])?;
    let app = world.app();
    app.sysctl("ipv4/ip_local_port_range", "2000 65000")?;
    let proxy = &world.proxy;
    // Memory that it allocates once and for all.
    reaches(
        app,
        "10.96.0.10:80",
        "connect --count 50",
        &["near", "near2"],
    )?;
    let before = memory(proxy)?;
    let client = app.probe("keep").args(["--to", "10.96.0.10:80"]);
    let client = client.args(["--count", &count.to_string()]);
    let mut client = client.stdin_piped().stdout_piped().spawn()?;
    let report: KeepReport = serde_json::from_str(&client.wait_for_line()?)?;
    ensure!(report.errors.is_empty(), "{report:?}");
    let now = world.metric("dataplane_proxy_connections", "")?;
    ensure!((now - f64::from(count)).abs() < 0.5, "{now} connections");
    // The proxy's upkeep of connections that last runs every five seconds, keepalive included.
    thread::sleep(Duration::from_secs(6));
    let each = memory(proxy)?.saturating_sub(before) * 1024 / u64::from(count);
    println!("{count} idle connections (of {wanted}): {each} bytes each");
    ensure!(
        each <= BYTES,
        "{each} bytes for each of {count} connections"
    );
    // And each of them is alive.
    client.send_line("alive?")?;
    let report: KeepReport = serde_json::from_str(&client.wait_for_line()?)?;
    ensure!(report.errors.is_empty(), "{report:?}");
    drop(client);
    Ok(())
}
