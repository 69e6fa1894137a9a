//! Measures when a captured pod sees a change, while an unrelated Service changes. The pod's proxy moves to a service's
//! new endpoint, and the agent's DNS knows a new name.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use dataplane_tests::{
    api::{Churn, Cluster, objects},
    report::LoadReport,
};
use serde_json::json;

use super::{seen::Seen, site::Site};
use crate::{
    clock::monotonic_ms,
    stage::{carry_out, first, start_client, values},
    worker::{Job, Order, Transport},
};

/// The captured pod.
const CLIENT: (&str, &str) = ("app", "10.244.1.8");
/// The pods between which the service's endpoint changes.
const SERVERS: [(&str, &str); 2] = [("one", "10.244.1.11"), ("two", "10.244.1.12")];
const PORT: u16 = 8080;
/// The service whose endpoint changes, and the unrelated service that changes all the time.
const SERVICE: u32 = 7;
const OTHER: u32 = 8;
/// Interval between changes of the unrelated service.
const RATE: Duration = Duration::from_millis(300);
/// The pod's resolver. No process answers there: the agent answers the queries.
const DNS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 53);
const PATIENCE: Duration = Duration::from_secs(30);

/// Time in milliseconds until each change was seen.
pub struct Times {
    /// In the kernel's tables.
    pub tables: Vec<f64>,
    /// By a connection through the proxy.
    pub proxy: Vec<f64>,
    /// By a query for a new service's name.
    pub names: Vec<f64>,
}

/// Measures this many changes of each kind.
///
/// # Errors
///
/// Fails if the agent does not run, or if a change is never seen.
pub fn run(services: u32, changes: u32) -> anyhow::Result<Times> {
    let mesh = r#"{"rules": {"mode": "proxy"}, "proxy": {"accessLog": "off"}}"#;
    let dns = r#"{"capture": "mesh", "resolvConf": "/dev/null"}"#;
    let pods = [CLIENT, SERVERS[0], SERVERS[1]].map(|pod| ("agent", pod));
    let arguments = ["--mesh", mesh, "--dns", dns];
    let mut site = Site::with_dns(services, pods, make_objects, &arguments)?;
    let mut servers = Vec::new();
    for (name, address) in SERVERS {
        let at = format!("{address}:{PORT}");
        servers.push(site.lab().pod(name).serve(&["--tcp", &at])?);
    }
    site.start_from_nothing()?;
    let stop = Arc::<AtomicBool>::default();
    let unrelated = {
        let (stop, cluster) = (Arc::clone(&stop), site.cluster().clone());
        thread::spawn(move || {
            for turn in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                cluster.apply(Churn::slice_with(OTHER, 50_000 + turn % 5_000));
                thread::sleep(RATE);
            }
        })
    };
    let measured = endpoints(&site, changes).and_then(|(tables, proxy)| {
        let names = names(&site, changes)?;
        Ok(Times {
            tables,
            proxy,
            names,
        })
    });
    stop.store(true, Ordering::Relaxed);
    unrelated
        .join()
        .ok()
        .context("the thread that changes the other service")?;
    measured
}

fn make_objects(cluster: &Cluster) -> anyhow::Result<()> {
    let mut pod = objects::pod(CLIENT.0, "agent", &[CLIENT.1.parse::<IpAddr>()?]);
    pod["metadata"]["labels"]["istio.io/dataplane-mode"] = json!("ambient");
    cluster.apply(pod);
    let mut service = objects::service("kube-dns", DNS.into());
    service["metadata"]["namespace"] = json!("kube-system");
    service["spec"]["ports"] = json!([{ "name": "dns", "port": 53, "protocol": "UDP" }]);
    cluster.apply(service);
    Ok(())
}

/// Returns the service's slice with one endpoint.
fn slice(server: &str) -> anyhow::Result<serde_json::Value> {
    let mut slice = Churn::slice_with(SERVICE, 0);
    slice["endpoints"] = json!([objects::endpoint(server.parse()?, "agent")]);
    slice["ports"][0]["port"] = json!(PORT);
    Ok(slice)
}

/// Changes the service's endpoint. Returns, for each change, when the tables had it and when a connection of the pod
/// went to the new endpoint.
fn endpoints(site: &Site, changes: u32) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let mut seen = Seen::new(&site.bpffs)?;
    let before = seen.block(SERVICE)?;
    site.cluster().apply(slice(SERVERS[0].1)?);
    seen.wait_for_flip(SERVICE, before)?;
    let to = format!("{}:80", Churn::vip(SERVICE));
    let client = site
        .lab()
        .pod(CLIENT.0)
        .load(&["--to", &to, "--pause-us", "200", "--each"])?;
    let (mut tables, mut done) = (Vec::new(), Vec::new());
    for turn in 1..=changes {
        // Vary the moment relative to the changes of the unrelated service.
        thread::sleep(Duration::from_millis(25 + u64::from(turn % 11) * 3));
        let (server, address) = SERVERS[turn as usize % 2];
        let before = seen.block(SERVICE)?;
        let at = monotonic_ms()?;
        site.cluster().apply(slice(address)?);
        seen.wait_for_flip(SERVICE, before)?;
        tables.push(monotonic_ms()? - at);
        done.push((at, server));
    }
    // The client reports when it ends, so it must first see the last change.
    thread::sleep(Duration::from_secs(1));
    let report: LoadReport = client.wait_json()?;
    ensure!(
        report.errors.is_empty(),
        "connections failed: {:?}",
        report.errors
    );
    let mut proxy = Vec::new();
    let mut events = report.each.iter().peekable();
    for (at, server) in done {
        let ms = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e3;
        while events
            .next_if(|event| ms(event.started_at_ns) < at)
            .is_some()
        {}
        // Earlier connections went to the former endpoint.
        let to_new = events.clone().find(|event| event.endpoint == server);
        let to_new = to_new.context("a change that no connection has seen")?;
        proxy.push(ms(to_new.started_at_ns) - at);
    }
    Ok((tables, proxy))
}

/// Makes new services, and waits until the pod finds their names.
fn names(site: &Site, changes: u32) -> anyhow::Result<Vec<f64>> {
    let mut client = start_client(site.lab().pod(CLIENT.0))?;
    let order = |job, name: &str| Order {
        to: vec![SocketAddr::new(DNS.into(), 53)],
        transport: Transport::Udp,
        job,
        name: format!("{name}.default.svc.cluster.local"),
    };
    let start = Instant::now();
    let known = order(Job::LookUp { count: 1 }, "service-000007");
    while carry_out(&mut client, &known).is_err() {
        ensure!(
            start.elapsed() < PATIENCE,
            "the agent does not answer queries"
        );
        thread::sleep(Duration::from_millis(100));
    }
    let mut times = Vec::new();
    for number in 0..changes {
        let name = format!("new-{number}");
        let [.., high, low] = number.to_be_bytes();
        let address = Ipv4Addr::new(10, 110, high, low);
        let order = order(Job::Await, &name);
        client.send_line(&serde_json::to_string(&order)?)?;
        // Wait until the client sends queries all the time, and vary the moment relative to the unrelated changes.
        thread::sleep(Duration::from_millis(20 + u64::from(number % 11) * 3));
        let before = monotonic_ms()?;
        site.cluster()
            .apply(objects::service(&name, address.into()));
        let found = first(&values(&client.wait_for_line()?)?)?;
        times.push(found - before);
    }
    Ok(times)
}
