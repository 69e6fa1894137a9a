//! The lab of `bench relay`. The client, the proxies and the server run in one pod, and connect over loopback: the cost
//! of a proxy would be hard to see beside the cost of a network.
//!
//! Two more pods, on nodes of their own, are equal to it and have a client and a server each. The agent captures the
//! connections of one pod and leaves the other pod alone. So the programs on the captured pod's cgroup do not slow the
//! other pods. Some programs see every socket of the machine; they are attached only for the turns of the captured
//! client. The client that connects directly has as little to do between its turns as the captured client.

use std::{
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use dataplane_tests::{Agent, Command, Host, Lab, Process};
use kernel::rig::Traced;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::Signal,
    },
    unistd::Pid,
};

use crate::{
    stage::{carry_out, first},
    worker::{Job, Order, Transport},
};

/// A way to relay connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relay {
    /// No relay: the client connects to the server.
    Direct,
    /// `dataplane proxy`, with as many workers as there are CPUs. Unlike the other relays, it looks up the original
    /// destination and chooses an endpoint.
    Dataplane,
    /// No process relays: the client is captured with `mode: kernel`, and connects to a VIP.
    Kernel,
    /// HAProxy with one thread.
    Haproxy,
    /// HAProxy with two threads and `splice-auto`.
    Haproxy2,
    /// nginx's stream module with two workers.
    Nginx,
    /// tokio's `copy_bidirectional`.
    Tokio,
}

impl Relay {
    /// All relays, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::Direct,
        Self::Dataplane,
        Self::Kernel,
        Self::Haproxy,
        Self::Haproxy2,
        Self::Nginx,
        Self::Tokio,
    ];

    /// Returns the relay's `path` in the rows.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Dataplane => "dataplane",
            Self::Kernel => "dataplane-kernel",
            Self::Haproxy => "haproxy",
            Self::Haproxy2 => "haproxy-2",
            Self::Nginx => "nginx",
            Self::Tokio => "tokio",
        }
    }

    /// Returns whether the relay is a process of its own.
    pub const fn is_process(self) -> bool {
        !matches!(self, Self::Direct | Self::Kernel)
    }

    /// Returns the index of the relay's pod in [`SEATS`].
    const fn seat(self) -> usize {
        match self {
            Self::Direct => 1,
            Self::Kernel => 2,
            _ => 0,
        }
    }

    /// Returns the address that the client connects to.
    fn address(self) -> SocketAddr {
        let port = match self {
            Self::Direct => return server(self.seat()),
            Self::Dataplane | Self::Kernel => return VIP,
            Self::Haproxy => 15_011,
            Self::Haproxy2 => 15_012,
            Self::Nginx => 15_013,
            Self::Tokio => 15_014,
        };
        SocketAddr::new(server(self.seat()).ip(), port)
    }
}

/// The pods, each with its node.
const SEATS: [(&str, &str); 3] = [
    ("bench", "node1"),
    ("direct", "node2"),
    ("captured", "node3"),
];
/// The service's VIP. A pod with proxies that listen at the VIP has it as an address.
const VIP: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1)), 15_001);
/// Returns the address of the server in a pod.
fn server(seat: usize) -> SocketAddr {
    let node = [1, 2, 3][seat];
    (Ipv4Addr::new(10, 244, node, 10), 8_080).into()
}

/// The mesh configuration of the captured pod.
const MESH: &str =
    "{workloads: [{name: default/captured, addresses: [10.244.3.10], rules: {mode: kernel}}]}";
/// Limit of open files for each process: two for each of 20 000 connections, and some more.
const FILES: u64 = 100_000;
/// Number of connections that the server serves at the same time.
const SERVED: u32 = 32;
/// Time after which the kernel has completed a change of a tracepoint's programs.
const SETTLED: Duration = Duration::from_millis(20);
/// Time limit for a relay to start to work.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pods with their processes.
pub struct Stage {
    seats: Vec<Seat>,
    relays: Vec<(Relay, Process)>,
    _agent: Agent,
    traced: Traced,
    lab: Lab,
    /// Number of simultaneous connections that the limit of open files allows.
    pub connections: u64,
    files: tempfile::TempDir,
}

/// A pod's client and server.
struct Seat {
    client: Process,
    server: Process,
}

impl Seat {
    fn start(pod: &Host, at: SocketAddr) -> anyhow::Result<Self> {
        let server = start_server(pod, at)?;
        Ok(Self {
            client: start_client(pod)?,
            server,
        })
    }
}

impl Stage {
    /// Makes the pods, and starts all processes in them.
    ///
    /// # Errors
    /// Fails if the machine lacks a program.
    pub fn build() -> anyhow::Result<Self> {
        // All processes started from here inherit the limit.
        let hard = getrlimit(Resource::RLIMIT_NOFILE)?.1;
        let files = setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES).map_or(hard, |()| FILES);
        setrlimit(Resource::RLIMIT_NOFILE, files, files)?;
        let mut builder = Lab::builder();
        for (number, (name, node)) in SEATS.into_iter().enumerate() {
            let address = server(number).ip().to_string();
            builder = builder.node(node).pod(node, name, &address);
        }
        let lab = builder.build()?;
        let mut seats = vec![];
        for (number, (name, _)) in SEATS.into_iter().enumerate() {
            let pod = lab.pod(name);
            if number != Relay::Kernel.seat() {
                pod.ip(&format!("address add {}/32 dev lo", VIP.ip()))?;
            }
            pod.sysctl("ipv4/ip_local_port_range", "2000 65000")?;
            // The kernel should not take 20 000 connections in a few seconds for an attack.
            pod.sysctl("ipv4/tcp_max_syn_backlog", "8192")?;
            pod.sysctl("core/somaxconn", "8192")
                .or_else(|_| anyhow::Ok(()))?;
            // After a regular close, the kernel keeps the connection's port in TIME_WAIT for a minute. With many such
            // ports, every later connect() takes longer to find a free one, in the measurements of all relays.
            pod.sysctl("ipv4/tcp_max_tw_buckets", "0")?;
            seats.push(Seat::start(pod, server(number))?);
        }
        let files_of_ours = tempfile::tempdir()?;
        for number in 0..SEATS.len() {
            fs::write(
                manifest(files_of_ours.path(), number),
                manifests(server(number)),
            )?;
        }
        let captured = Relay::Kernel.seat();
        let agent = lab
            .agent(SEATS[captured].1)
            .manifests(manifest(files_of_ours.path(), captured))
            .args(["--mesh", MESH])
            .start()?;
        let traced = Traced::of(agent.bpffs())?;
        traced.detach()?;
        let mut stage = Self {
            seats,
            relays: vec![],
            connections: files.saturating_sub(500) / 2,
            files: files_of_ours,
            _agent: agent,
            traced,
            lab,
        };
        stage.start_relays()?;
        Ok(stage)
    }

    fn pod(&self, relay: Relay) -> &Host {
        self.lab.pod(SEATS[relay.seat()].0)
    }

    fn start_relays(&mut self) -> anyhow::Result<()> {
        for relay in Relay::ALL {
            if let Some(command) = self.command(relay)? {
                let process = command.spawn()?;
                self.relays.push((relay, process));
            }
        }
        for relay in Relay::ALL {
            self.wait_for(relay)?;
        }
        Ok(())
    }

    /// Restarts proxies, servers and clients, so that no state remains.
    ///
    /// # Errors
    /// Fails if a process cannot be started.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        for (_, process) in self.relays.drain(..) {
            // nginx's workers survive when the master is killed.
            process.signal(Signal::SIGTERM)?;
            let _ = process.wait();
        }
        for (number, seat) in self.seats.iter_mut().enumerate() {
            seat.client.kill();
            seat.server.kill();
            *seat = Seat::start(self.lab.pod(SEATS[number].0), server(number))?;
        }
        self.start_relays()
    }

    fn command(&self, relay: Relay) -> anyhow::Result<Option<Command>> {
        let pod = self.pod(relay);
        let file = |name: &str, text: &str| -> anyhow::Result<PathBuf> {
            let path = self.files.path().join(name);
            fs::write(&path, text)?;
            Ok(path)
        };
        let (at, to) = (relay.address(), server(relay.seat()));
        let connections = self.connections;
        let command = match relay {
            Relay::Direct | Relay::Kernel => return Ok(None),
            Relay::Dataplane => pod
                .command(self.lab.programs().dataplane()?)
                .args(["proxy", "--access-log", "off", "--admin-addr", "off"])
                .args(["--metrics-addr", "off", "--node-name", "node1"])
                .args(["--outbound", &format!("0.0.0.0:{}", at.port())])
                .arg("--manifests")
                .arg(manifest(self.files.path(), relay.seat()))
                .env("RUST_LOG", "warn"),
            Relay::Haproxy | Relay::Haproxy2 => {
                let (threads, options) = if relay == Relay::Haproxy {
                    (1, "")
                } else {
                    (2, "    option splice-auto\n")
                };
                let config = file(
                    &format!("{}.cfg", relay.word()),
                    &format!(
                        "global\n    nbthread {threads}\n    maxconn {connections}\n    maxpipes 50\n\
                         defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 1h\n    \
                         timeout server 1h\n{options}\
                         listen relay\n    bind {at} backlog 4096\n    server one {to}\n"
                    ),
                )?;
                pod.command("haproxy").args(["-db", "-q", "-f"]).arg(config)
            }
            Relay::Nginx => {
                let module = Path::new("/usr/lib/nginx/modules/ngx_stream_module.so");
                let load = if module.exists() {
                    format!("load_module {};\n", module.display())
                } else {
                    // The module is built in; otherwise nginx reports an error.
                    String::new()
                };
                let directory = self.files.path().display();
                let worker = connections * 2;
                let config = file(
                    "nginx.conf",
                    &format!(
                        "{load}daemon off;\nworker_processes 2;\npid {directory}/nginx.pid;\n\
                         error_log stderr crit;\nevents {{ worker_connections {worker}; }}\n\
                         stream {{ server {{ listen {at} backlog=4096; proxy_pass {to}; \
                         proxy_half_close on; tcp_nodelay on; }} }}\n"
                    ),
                )?;
                pod.command("nginx")
                    .args(["-e", "stderr", "-c"])
                    .arg(config)
            }
            Relay::Tokio => pod
                .command(std::env::current_exe()?)
                .args(["worker", "relay", "--listen", &at.to_string()])
                .args(["--to", &to.to_string()])
                .stdout_piped(),
        };
        Ok(Some(command))
    }

    /// Waits until a connection through a relay is answered.
    fn wait_for(&mut self, relay: Relay) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            match self.measure(
                relay,
                Job::RoundTrip {
                    count: 1,
                    connections: 1,
                },
            ) {
                Ok(_) => return Ok(()),
                Err(error) if start.elapsed() > PATIENCE => {
                    return Err(error.context(format!("{} does not relay", relay.word())));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Has the client carry out a job through a relay.
    ///
    /// # Errors
    /// Returns the client's error.
    pub fn measure(&mut self, relay: Relay, job: Job) -> anyhow::Result<f64> {
        let order = Order {
            to: vec![relay.address()],
            transport: Transport::Tcp,
            job,
            name: String::new(),
        };
        if relay == Relay::Kernel {
            self.traced.attach()?;
        }
        // Every relay's turn starts after a pause of the same length.
        thread::sleep(SETTLED);
        let result = carry_out(&mut self.seats[relay.seat()].client, &order)
            .and_then(|values| first(&values));
        if relay == Relay::Kernel {
            self.traced.detach()?;
        }
        result
    }

    /// Restricts clients, servers and proxies to one CPU, or lets them run on all.
    ///
    /// # Errors
    /// Fails if this is not possible.
    pub fn pin(&self, one: bool) -> anyhow::Result<()> {
        let count = thread::available_parallelism()?.get();
        let mut set = CpuSet::new();
        // The last CPU, because devices tend to interrupt the first.
        for cpu in if one { count - 1..count } else { 0..count } {
            set.set(cpu)?;
        }
        let own = self
            .seats
            .iter()
            .flat_map(|seat| [seat.client.id(), seat.server.id()]);
        let relays = self.relays.iter().map(|(_, process)| process.id());
        for process in own.into_iter().chain(relays).flat_map(with_children) {
            for thread in threads(process) {
                // The thread may have ended in the meantime.
                let _ = sched_setaffinity(Pid::from_raw(thread.cast_signed()), &set);
            }
        }
        Ok(())
    }

    fn processes(&self, relay: Relay) -> Vec<u32> {
        let found = self.relays.iter().find(|(other, _)| *other == relay);
        found.map_or_else(Vec::new, |(_, process)| with_children(process.id()))
    }

    /// Returns the CPU time that a relay has used so far, in seconds.
    pub fn cpu(&self, relay: Relay) -> f64 {
        let threads = self.processes(relay).into_iter().flat_map(|process| {
            let threads = threads(process).into_iter();
            threads.map(move |thread| format!("/proc/{process}/task/{thread}/schedstat"))
        });
        let used = threads.filter_map(|path| {
            let text = fs::read_to_string(path).ok()?;
            text.split_whitespace().next()?.parse::<f64>().ok()
        });
        used.sum::<f64>() / 1e9
    }

    /// Returns a relay's anonymous memory (not backed by a file), in KiB.
    ///
    /// # Errors
    /// Fails if the relay has ended.
    pub fn memory(&self, relay: Relay) -> anyhow::Result<f64> {
        let mut sum = 0.0;
        for process in self.processes(relay) {
            let status = fs::read_to_string(format!("/proc/{process}/status"))?;
            let line = status.lines().find(|line| line.starts_with("RssAnon:"));
            let number = line.and_then(|line| line.split_whitespace().nth(1));
            match number.and_then(|number| number.parse::<f64>().ok()) {
                Some(number) => sum += number,
                None => bail!("process {process} does not say how much memory it has"),
            }
        }
        Ok(sum)
    }
}

fn start_server(pod: &Host, at: SocketAddr) -> anyhow::Result<Process> {
    let mut process = pod
        .command(std::env::current_exe()?)
        .args(["worker", "server", "--threads", &SERVED.to_string()])
        .args(["--port", &at.port().to_string(), "--connect-port", "8081"])
        .arg(at.ip().to_string())
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    process.wait_for_line().context("the server")?;
    Ok(process)
}

fn start_client(pod: &Host) -> anyhow::Result<Process> {
    let client = pod
        .command(std::env::current_exe()?)
        .args(["worker", "client"]);
    Ok(client.stdin_piped().stdout_piped().spawn()?)
}

fn threads(process: u32) -> Vec<u32> {
    let entries = fs::read_dir(format!("/proc/{process}/task"));
    let entries = entries.into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().parse());
    names.flatten().collect()
}

fn with_children(process: u32) -> Vec<u32> {
    let mut all = vec![process];
    for thread in threads(process) {
        let children = fs::read_to_string(format!("/proc/{process}/task/{thread}/children"));
        let children = children.unwrap_or_default();
        let children = children.split_whitespace().flat_map(str::parse);
        all.extend(children.flat_map(with_children));
    }
    all
}

/// Returns the file with the manifests of a pod's services.
fn manifest(directory: &Path, seat: usize) -> PathBuf {
    directory.join(format!("services-{seat}.yaml"))
}

fn manifests(server: SocketAddr) -> String {
    let mut text = String::new();
    let _ = write!(
        text,
        "apiVersion: v1\nkind: Service\nmetadata: {{name: bench, namespace: default}}\n\
         spec: {{clusterIP: {vip}, clusterIPs: [{vip}], ports: [{{port: {port}}}]}}\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: bench-1, namespace: default, labels: \
         {{kubernetes.io/service-name: bench}}}}\naddressType: IPv4\n\
         ports: [{{port: {to}}}]\nendpoints: [{{addresses: [\"{ip}\"]}}]\n",
        vip = VIP.ip(),
        port = VIP.port(),
        to = server.port(),
        ip = server.ip(),
    );
    text
}
