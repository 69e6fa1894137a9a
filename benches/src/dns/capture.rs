//! Two pods for `bench dns`: the agent on the node answers one pod's queries, the cluster's DNS answers the other's.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use dataplane_tests::{
    Agent, Process,
    api::{Cluster, objects},
};
use serde_json::{Value, json};

use crate::{
    clock::monotonic_ms,
    stage::{carry_out, start_client},
    sync::site,
    worker::{Job, Order, Transport},
};

/// The VIP of the cluster's DNS.
const DNS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 53));
/// The pod of the cluster's DNS, on a node of its own.
const RESOLVER: (&str, &str) = ("resolver", "10.244.3.11");
/// The pods that look up names: a captured pod on the agent's node, and a pod on a node whose agent does not answer
/// queries.
const CAPTURED: (&str, &str) = ("app", "10.244.1.8");
const PLAIN: (&str, &str) = ("plain", "10.244.2.8");
/// Size of the agent's cache, in bytes.
const CACHE: u64 = 64 << 20;
/// The service whose name is looked up.
const NAME: &str = "service-000007.default.svc.cluster.local";
const PATIENCE: Duration = Duration::from_secs(30);

/// An API server, two agents, and their pods.
pub struct Site {
    nodes: site::Site,
    /// The agent on the node without DNS.
    without: Agent,
    changer: Process,
    _resolver: Process,
}

/// A pod that looks up names.
pub struct Client {
    /// `path` of the rows.
    pub path: &'static str,
    process: Process,
}

impl Client {
    /// Looks up a name `count` times. Returns the median and the 99th percentile of the time of a lookup, in µs.
    ///
    /// # Errors
    /// Fails if a query gets no answer.
    pub fn look_up(&mut self, count: u32) -> anyhow::Result<Vec<f64>> {
        carry_out(&mut self.process, &order(Job::LookUp { count }, NAME))
    }
}

fn order(job: Job, name: &str) -> Order {
    Order {
        to: vec![SocketAddr::new(DNS, 53)],
        transport: Transport::Udp,
        job,
        name: name.to_owned(),
    }
}

fn make_objects(cluster: &Cluster) -> anyhow::Result<()> {
    for ((name, address), node, mode) in [(CAPTURED, "agent", "ambient"), (PLAIN, "fresh", "none")]
    {
        let address: IpAddr = address.parse()?;
        let mut pod = objects::pod(name, node, &[address]);
        pod["metadata"]["labels"]["istio.io/dataplane-mode"] = json!(mode);
        cluster.apply(pod);
    }
    let mut service = objects::service("kube-dns", DNS);
    let resolver: IpAddr = RESOLVER.1.parse()?;
    let mut slice = objects::slice(
        "kube-dns",
        "kube-dns-1",
        53,
        &[objects::endpoint(resolver, "far")],
    );
    service["spec"]["ports"] = json!([{ "name": "dns", "port": 53, "protocol": "UDP" }]);
    slice["ports"] = json!([{ "name": "dns", "port": 53, "protocol": "UDP" }]);
    for mut object in [service, slice] {
        object["metadata"]["namespace"] = json!("kube-system");
        cluster.apply(object);
    }
    Ok(())
}

impl Site {
    /// Starts everything, with this many services.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub fn start(services: u32) -> anyhow::Result<Self> {
        let dns = json!({ "capture": "mesh", "cacheBytes": CACHE, "resolvConf": "/dev/null" })
            .to_string();
        let arguments = ["--mesh", r#"{"rules": {"mode": "kernel"}}"#, "--dns", &dns];
        let mut site = site::Site::with_dns(
            services,
            [("agent", CAPTURED), ("fresh", PLAIN), ("far", RESOLVER)],
            make_objects,
            &arguments,
        )?;
        let pod = site.lab().pod(RESOLVER.0);
        let conf = tempfile::NamedTempFile::new()?;
        fs::write(
            conf.path(),
            format!(
                "server:\n directory: \"/\"\n chroot: \"\"\n username: \"\"\n pidfile: \"\"\n use-syslog: no\n logfile: \"\"\n \
                 do-daemonize: no\n verbosity: 0\n num-threads: 1\n interface: {}\n access-control: 0.0.0.0/0 allow\n \
                 module-config: \"iterator\"\n local-zone: \".\" static\n local-zone: \"example.com.\" redirect\n \
                 local-data: \"example.com. 86400 IN A 192.0.2.1\"\n local-data: \"{NAME}. 5 IN A 10.96.1.7\"\n",
                RESOLVER.1
            ),
        )?;
        let resolver = pod
            .command("unbound")
            .args(["-d", "-c"])
            .arg(conf.path())
            .spawn()?;
        site.start()?;
        let without = site.fresh()?;
        let changer = start_client(site.lab().pod(CAPTURED.0))?;
        let mut this = Self {
            nodes: site,
            without,
            changer,
            _resolver: resolver,
        };
        let start = Instant::now();
        while this.captured()? == 0 {
            ensure!(start.elapsed() < PATIENCE, "no query is captured");
            let once = order(Job::LookUp { count: 1 }, NAME);
            // This fails until the cluster's DNS answers.
            let _ = carry_out(&mut this.changer, &once);
            thread::sleep(Duration::from_millis(100));
        }
        drop(conf);
        Ok(this)
    }

    fn captured(&self) -> anyhow::Result<u64> {
        let status = self.nodes.status()?;
        Ok(status["verdicts"]["captured-dns"]
            .as_u64()
            .unwrap_or_default())
    }

    /// Starts the pods' clients.
    ///
    /// # Errors
    /// Fails if a client cannot be started.
    pub fn clients(&self) -> anyhow::Result<[Client; 2]> {
        let client = |path, pod| -> anyhow::Result<Client> {
            let process = start_client(self.nodes.lab().pod(pod))?;
            Ok(Client { path, process })
        };
        Ok([
            client("dataplane", CAPTURED.0)?,
            client("cluster-dns", PLAIN.0)?,
        ])
    }

    /// Fills the agent's cache with this many names.
    ///
    /// # Errors
    /// Fails if the cache does not have the names afterwards.
    pub fn fill_cache(&self, names: u32) -> anyhow::Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        let queries: Vec<String> = (0..names)
            .map(|number| format!("n{number}.example.com A\n"))
            .collect();
        fs::write(file.path(), queries.concat())?;
        let pod = self.nodes.lab().pod(CAPTURED.0);
        let dnsperf = pod
            .command("dnsperf")
            .args(["-s", &DNS.to_string(), "-n", "1"]);
        dnsperf
            .args(["-c", "1", "-q", "100", "-d"])
            .arg(file.path())
            .run()?;
        let cache: Value = self
            .nodes
            .agent()
            .dataplane(["dns", "cache", "-o", "json"])
            .json()?;
        let entries = cache["entries"].as_u64().unwrap_or_default();
        ensure!(
            entries >= u64::from(names) * 99 / 100,
            "the cache has {entries} of {names} names"
        );
        Ok(())
    }

    /// Resident memory of the agent that answers queries, in MiB.
    ///
    /// # Errors
    /// Fails if the agent has ended.
    pub fn memory(&self) -> anyhow::Result<f64> {
        self.nodes.rss_mib()
    }

    /// Resident memory of the agent that does not answer queries, in MiB.
    ///
    /// # Errors
    /// Fails if the agent has ended.
    pub fn memory_without(&self) -> anyhow::Result<f64> {
        site::rss_mib(&Path::new("/proc").join(self.without.id().to_string()))
    }

    /// Makes a service at the API server. Returns after how many milliseconds the pod finds the service's name.
    ///
    /// # Errors
    /// Fails if the pod does not find it.
    pub fn change(&mut self, number: u32) -> anyhow::Result<f64> {
        let name = format!("new-{number}");
        let mut service = objects::service(&name, Ipv4Addr::new(10, 110, 0, 1).into());
        let [high, low] = u16::try_from(number)?.to_be_bytes();
        let address = Ipv4Addr::new(10, 110, high, low.wrapping_add(1)).to_string();
        service["spec"]["clusterIP"] = json!(address);
        service["spec"]["clusterIPs"] = json!([address]);
        let order = order(Job::Await, &format!("{name}.default.svc.cluster.local"));
        self.changer.send_line(&serde_json::to_string(&order)?)?;
        // Wait until the pod sends queries all the time.
        thread::sleep(Duration::from_millis(20));
        let before = monotonic_ms()?;
        self.nodes.cluster().apply(service);
        let answer = self.changer.wait_for_line()?;
        let values = crate::stage::values(&answer)?;
        Ok(values.first().context("no time")? - before)
    }
}
