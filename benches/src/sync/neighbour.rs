//! One tenant makes the largest changes that it may, again and again, while an endpoint of another tenant's service
//! changes.

use std::{
    net::Ipv4Addr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Context as _;
use dataplane_tests::api::{Cluster, Resource, objects};
use serde_json::{Value, json};

/// The tenant's namespace.
const TENANT: &str = "tenant";
/// Time for which the tenant rests after each change, so that the agent takes in most of it before the next one.
const REST: Duration = Duration::from_millis(700);

/// The objects that the tenant changes.
#[derive(Clone, Copy, Debug)]
pub enum Neighbour {
    /// 43 ServiceEntries with 99 072 addresses come and go: a namespace may have 100 000.
    Entries,
    /// An endpoint of each of ten Services with 100 ports and 990 endpoints: a namespace may have 1 000 000, each
    /// counted once for each port.
    Endpoints,
    /// A Service with 8 ports at 4 096 addresses, one of them its cluster IP, comes and goes: a Service may have 32 768
    /// pairs of them.
    Pairs,
}

impl Neighbour {
    pub const ALL: [Self; 3] = [Self::Entries, Self::Endpoints, Self::Pairs];

    /// Returns the name of the case.
    pub const fn case(self) -> &'static str {
        match self {
            Self::Entries => "beside-entries",
            Self::Endpoints => "beside-endpoints",
            Self::Pairs => "beside-pairs",
        }
    }

    /// Writes a configuration file with which the agent reads these objects.
    pub fn configure(file: &Path) -> anyhow::Result<()> {
        let config = json!({ "source": { "kubernetes": { "serviceEntries": true } } });
        Ok(std::fs::write(file, config.to_string())?)
    }

    /// Changes all of the objects once more.
    pub fn change(self, cluster: &Cluster, turn: u32) {
        match self {
            Self::Entries if turn.is_multiple_of(2) => _ = cluster.apply_all((0..43).map(entry)),
            Self::Entries => {
                for number in 0..43 {
                    cluster.delete(Resource::ServiceEntries, TENANT, &format!("large-{number}"));
                }
            }
            Self::Endpoints if turn == 0 => {
                _ = cluster.apply_all((0..10).flat_map(|n| [service(n, 100, &[]), slice(n, turn)]));
            }
            Self::Endpoints => _ = cluster.apply_all((0..10).map(|n| slice(n, turn))),
            Self::Pairs if turn.is_multiple_of(2) => {
                let first = Ipv4Addr::new(12, 0, 0, 0).to_bits();
                let addresses: Vec<_> = (0..4095).map(|n| Ipv4Addr::from_bits(first + n)).collect();
                cluster.apply(service(99, 8, &addresses));
            }
            Self::Pairs => _ = cluster.delete(Resource::Services, TENANT, "large-99"),
        }
    }
}

/// A tenant that changes its objects until this value is dropped.
pub struct Busy {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Busy {
    /// Starts the tenant, with this turn.
    pub fn start(neighbour: Neighbour, cluster: &Cluster, first: u32) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let (stopped, cluster) = (Arc::clone(&stop), cluster.clone());
        let thread = thread::spawn(move || {
            for turn in first.. {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                neighbour.change(&cluster, turn);
                thread::sleep(REST);
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Stops the tenant.
    ///
    /// # Errors
    ///
    /// Fails if the tenant's thread has panicked.
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it has been stopped")?;
        thread.join().ok().context("the tenant's thread has died")
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn entry(number: u32) -> Value {
    let ranges = (0..9).map(|range| format!("11.{number}.{range}.0/24"));
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "name": format!("large-{number}"), "namespace": TENANT },
        "spec": {
            "hosts": [format!("large-{number}.example.com")], "resolution": "STATIC",
            "addresses": ranges.collect::<Vec<_>>(),
            "ports": [{ "number": 80, "name": "web", "protocol": "TCP" }],
            "endpoints": [{ "address": "192.0.2.77" }],
        },
    })
}

fn service(number: u32, ports: u32, external: &[Ipv4Addr]) -> Value {
    let name = format!("large-{number}");
    let mut service = objects::service(&name, Ipv4Addr::from_bits(0x0a7f_0000 + number).into());
    service["metadata"]["namespace"] = TENANT.into();
    service["spec"]["ports"] = ports_from(80, ports).into();
    service["spec"]["externalIPs"] = json!(external);
    service
}

fn slice(number: u32, turn: u32) -> Value {
    let first = Ipv4Addr::new(10, 200, 0, 0).to_bits();
    let addresses =
        (0..990).map(|n| Ipv4Addr::from_bits(first + if n == 0 { 50_000 + turn } else { n }));
    let endpoints: Vec<_> = addresses
        .map(|address| objects::endpoint(address.into(), "elsewhere"))
        .collect();
    let name = format!("large-{number}");
    let mut slice = objects::slice(&name, &format!("{name}-1"), 8080, &endpoints);
    slice["metadata"]["namespace"] = TENANT.into();
    slice["ports"] = ports_from(8000, 100).into();
    slice
}

fn ports_from(first: u32, count: u32) -> Vec<Value> {
    let port = |n| json!({ "name": format!("p{n}"), "port": first + n, "protocol": "TCP" });
    (0..count).map(port).collect()
}
