//! An agent beside a live istiod. A new host waits for istiod's address, and an address that the agent has given serves
//! on after istiod has given another.

use std::{
    fs::{self, File},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{cgroup2_mount, report::Report};
use serde_json::{Value, json};

use super::{NODE, list, text};
use crate::{
    cluster::{
        Cluster,
        cgroups::{self, CGROUP},
        control::Part,
        identity,
        kubectl::eventually,
        place::{CONTROL, control_directory, in_netns, netns},
    },
    command::{check, output, shown},
    progress::note,
};

/// The cgroups of the agent, and of the clients that it serves.
const AGENT: &str = "agent";
const CLIENTS: &str = "clients";
/// The namespace of the new entries, and their endpoint.
const NAMESPACE: &str = "plain";
const ENDPOINT: &str = "10.9.0.77";
const PORT: u16 = 7000;
/// Time for which clients use the agent's address after istiod has given another: twice the TTL of DNS.
const KEPT: Duration = Duration::from_mins(1);
/// Maximum time until the agent, or istiod, has given a host an address.
const LIMIT: Duration = Duration::from_mins(2);

/// An agent, and the endpoint of the entries. The end of the cluster ends both.
struct Live<'a> {
    cluster: &'a Cluster,
    socket: PathBuf,
    _processes: [Child; 2],
}

/// Runs the agent, and fails if it gives an address too early or withdraws one.
pub fn keep_addresses(cluster: &Cluster, kept: &Path) -> Result<()> {
    let live = Live::start(cluster, kept)?;
    // An entry of `objects.txt`: the agent serves what is there.
    eventually(LIMIT, || live.served("twice-older"))?;
    live.apply("waits")?;
    let first = eventually(LIMIT, || live.served("waits"))?;
    let given = eventually(LIMIT, || live.given("waits"))?;
    ensure!(
        first == [given],
        "the agent gave {first:?} before istiod gave {given}"
    );
    live.reaches(given)?;
    note(&format!("a new host waits for istiod's address, {given}"));

    Part::Istiod.kill()?;
    live.apply("moves")?;
    let own = eventually(LIMIT, || live.served("moves"))?[0];
    Part::Istiod.start(&cluster.programs)?;
    let started = Instant::now();
    let mut moved: Option<(IpAddr, Instant)> = None;
    while moved.is_none_or(|(_, since)| since.elapsed() < KEPT) {
        live.reaches(own)?;
        if moved.is_none() {
            ensure!(started.elapsed() < LIMIT, "istiod gives no address");
            moved = live
                .given("moves")
                .ok()
                .map(|given| (given, Instant::now()));
        }
        thread::sleep(Duration::from_millis(200));
    }
    let (given, _) = moved.context("an address of istiod's")?;
    ensure!(given != own, "istiod gave the agent's own address, {own}");
    let served = live.served("moves")?;
    ensure!(served.contains(&given), "{served:?} lacks {given}");
    live.reaches(given)?;
    note(&format!(
        "{own}, which the agent had given, served for {} s after istiod gave {given}",
        KEPT.as_secs()
    ));
    Ok(())
}

impl<'a> Live<'a> {
    fn start(cluster: &'a Cluster, kept: &Path) -> Result<Self> {
        for cgroup in [AGENT, CLIENTS] {
            cgroups::create(&Path::new(CGROUP).join(cgroup))?;
        }
        let directory = control_directory().join("agent");
        let bpf = directory.join("bpf");
        fs::create_dir_all(&bpf).with_context(|| format!("cannot make {}", bpf.display()))?;
        let address = format!("{ENDPOINT}/32");
        check(in_netns(CONTROL, "ip").args(["addr", "add", &address, "dev", "lo"]))?;
        let mut server = joining(AGENT)?;
        let at = format!("{ENDPOINT}:{PORT}");
        server
            .arg(&cluster.probe)
            .args(["serve", "--name", "endpoint", "--tcp", &at]);

        let socket = directory.join("agent.sock");
        let config = json!({
            "source": { "kubernetes": {
                "kubeconfig": identity::file("admin.conf"), "serviceEntries": true,
            } },
            "node": { "name": NODE },
            "packets": { "path": "off" },
            "listen": {
                "socket": socket, "metrics": "off", "health": "off", "healthz": "off", "proxyMode": "off",
            },
            "kernel": {
                "bpffs": bpf.join("dataplane"),
                "cgroup": cgroup2_mount()?.join(CGROUP).join(CLIENTS),
            },
        });
        let file = directory.join("config.yaml");
        fs::write(&file, config.to_string())
            .with_context(|| format!("cannot write {}", file.display()))?;
        let mut agent = joining(AGENT)?;
        // The mount ends with the agent.
        let mount = "mount -t bpf bpf \"$0\" && exec \"$@\"";
        agent
            .args(["unshare", "--mount", "sh", "-c", mount])
            .arg(&bpf)
            .arg(&cluster.dataplane)
            .args(["run", "--config"])
            .arg(&file);
        let log = kept.join("agent.log");
        let log = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        Ok(Self {
            cluster,
            socket,
            _processes: [spawn(server, &log)?, spawn(agent, &log)?],
        })
    }

    /// Creates an entry with one host.
    fn apply(&self, name: &str) -> Result<()> {
        self.cluster.kubectl.apply(&json!({
            "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": { "name": name, "namespace": NAMESPACE },
            "spec": {
                "hosts": [format!("{name}.example.com")], "resolution": "STATIC",
                "ports": [{ "number": 443, "name": "tls", "protocol": "TLS" }],
                "endpoints": [{ "address": ENDPOINT, "ports": { "tls": PORT } }],
            },
        }))
    }

    /// Returns the IPv4 addresses at which the agent serves an entry; at least one.
    fn served(&self, name: &str) -> Result<Vec<IpAddr>> {
        let mut command = Command::new(&self.cluster.dataplane);
        command
            .args(["services", "--output=json", "--socket"])
            .arg(&self.socket)
            .arg(format!("{NAMESPACE}/serviceentry:{name}"));
        let services: Value = serde_json::from_str(&output(&mut command)?)?;
        let lists =
            list(&services).flat_map(|of| ["cluster_ips", "external_ips"].map(|at| &of[at]));
        let found: Vec<IpAddr> = lists.flat_map(list).filter_map(v4).collect();
        ensure!(!found.is_empty(), "{name} has no address");
        Ok(found)
    }

    /// Returns the IPv4 address that istiod has given the host of an entry.
    fn given(&self, name: &str) -> Result<IpAddr> {
        let entry = (self.cluster.kubectl).get(&["-n", NAMESPACE, "serviceentry", name])?;
        let found = list(&entry["status"]["addresses"]).find_map(|given| v4(&given["value"]));
        found.context("no address in the status")
    }

    /// Connects to the endpoint by an address.
    fn reaches(&self, vip: IpAddr) -> Result<()> {
        let to = SocketAddr::new(vip, 443).to_string();
        let mut client = joining(CLIENTS)?;
        client
            .arg(&self.cluster.probe)
            .args(["connect", "--count", "3", "--to", &to]);
        let report: Report = serde_json::from_str(&output(&mut client)?)?;
        ensure!(report.answered == report.attempts, "{to}: {report:?}");
        Ok(())
    }
}

fn v4(value: &Value) -> Option<IpAddr> {
    let address: Option<IpAddr> = text(value).parse().ok();
    address.filter(IpAddr::is_ipv4)
}

/// Returns a command in a cgroup and in the control plane's network namespace. The program is its next argument.
fn joining(cgroup: &str) -> Result<Command> {
    let mut command = cgroups::joining(&Path::new(CGROUP).join(cgroup))?;
    command
        .arg("nsenter")
        .arg(format!("--net={}", netns(CONTROL).display()));
    Ok(command)
}

fn spawn(mut command: Command, log: &File) -> Result<Child> {
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log.try_clone()?)
        .spawn()
        .with_context(|| format!("cannot start {}", shown(&command)))
}
