//! The lab of `bench relay`. The client, the proxies and the server run in one pod, and connect over loopback: the cost
//! of a proxy would be hard to see beside the cost of a network.
//!
//! Two more pods, on nodes of their own, are equal to it and have a client and a server each. The agent captures the
//! connections of one pod and leaves the other pod alone. So the programs on the captured pod's cgroup do not slow the
//! other pods. Some programs see every socket of the machine; they are attached only for the turns of the captured
//! client. The client that connects directly has as little to do between its turns as the captured client.
//!
//! The clients and servers of tunnels are in pods on two nodes ([`super::tunnels`]).

use std::{
    fmt::Write as _,
    fs,
    net::SocketAddr,
    ops::Range,
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

use super::{
    relays::{Relay, SEATS, VIP, server},
    tunnels::{PORT, Tunnelled, Tunnels, check},
};
use crate::{
    stage::{carry_out, first},
    worker::{Job, Order, Transport},
};

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

/// The CPUs of clients, servers and proxies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpus {
    /// All run on all CPUs.
    All,
    /// All share the last CPU. Devices tend to interrupt the first.
    One,
    /// The proxies have the last CPU for themselves.
    Apart,
}

/// The pods with their processes.
pub struct Stage {
    seats: Vec<Seat>,
    relays: Vec<(Relay, Process)>,
    tunnels: Vec<(Relay, Tunnels)>,
    tunnelled: Tunnelled,
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
    /// Makes the pods, and starts all processes in them. `ztunnel`: the program of [`Relay::Ztunnel`].
    ///
    /// # Errors
    /// Fails if the machine lacks a program.
    pub fn build(ztunnel: Option<&Path>) -> anyhow::Result<Self> {
        // All processes started from here inherit the limit.
        let hard = getrlimit(Resource::RLIMIT_NOFILE)?.1;
        let files = setrlimit(Resource::RLIMIT_NOFILE, FILES, FILES).map_or(hard, |()| FILES);
        setrlimit(Resource::RLIMIT_NOFILE, files, files)?;
        let mut builder = Lab::builder();
        let count = if ztunnel.is_some() {
            SEATS.len()
        } else {
            Relay::Ztunnel.seat()
        };
        for (number, (name, node)) in SEATS.into_iter().take(count).enumerate() {
            let address = server(number).ip().to_string();
            builder = builder.node(node).pod(node, name, &address);
        }
        let lab = builder.build()?;
        let mut seats = vec![];
        for (number, (name, _)) in SEATS.into_iter().take(count).enumerate() {
            let pod = lab.pod(name);
            if number < Relay::Kernel.seat() {
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
        for number in 0..=Relay::Kernel.seat() {
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
            tunnels: vec![],
            tunnelled: Tunnelled::prepare(&lab, ztunnel)?,
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

    /// Returns all relays except ztunnel, if there is no program for it.
    pub fn all(&self) -> Vec<Relay> {
        let is_there = |relay: &Relay| relay.seat() < self.seats.len();
        Relay::ALL.into_iter().filter(is_there).collect()
    }

    fn start_relays(&mut self) -> anyhow::Result<()> {
        let all = self.all();
        for relay in &all {
            if relay.is_tunnel() {
                let tunnels = self.tunnelled.start(&self.lab, *relay)?;
                self.tunnels.push((*relay, tunnels));
            } else if let Some(command) = self.command(*relay)? {
                let process = command.spawn()?;
                self.relays.push((*relay, process));
            }
        }
        for relay in all {
            let works = self.wait_for(relay);
            if let Some(tunnels) = self.tunnels_of(relay) {
                works
                    .and_then(|()| check(self.pod(relay)))
                    .with_context(|| tunnels.log())?;
            } else {
                works?;
            }
        }
        Ok(())
    }

    fn tunnels_of(&self, relay: Relay) -> Option<&Tunnels> {
        let found = self.tunnels.iter().find(|(other, _)| *other == relay);
        found.map(|(_, tunnels)| tunnels)
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
        self.tunnels.clear();
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
            Relay::Direct | Relay::Kernel | Relay::Hbone | Relay::Ztunnel => return Ok(None),
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
        let mut order = Order {
            to: vec![relay.address()],
            transport: Transport::Tcp,
            job,
            name: String::new(),
        };
        let mut seat = relay.seat();
        if let Job::Handshake { .. } = job {
            // A client that nobody captures.
            seat = Relay::Direct.seat();
            order.to = vec![SocketAddr::new(relay.address().ip(), PORT)];
            order.name = self.tunnelled.certificate().to_string_lossy().into_owned();
        }
        self.trace(relay, true)?;
        // Every relay's turn starts after a pause of the same length.
        thread::sleep(SETTLED);
        let result =
            carry_out(&mut self.seats[seat].client, &order).and_then(|values| first(&values));
        self.trace(relay, false)?;
        result
    }

    /// Attaches or detaches the programs of a relay's agents that see every socket of the machine.
    fn trace(&self, relay: Relay, on: bool) -> anyhow::Result<()> {
        let of_tunnels = self.tunnels_of(relay).into_iter().flat_map(Tunnels::traced);
        let of_kernel = (relay == Relay::Kernel).then_some(&self.traced);
        for traced in of_tunnels.chain(of_kernel) {
            if on {
                traced.attach()?;
            } else {
                traced.detach()?;
            }
        }
        Ok(())
    }

    /// Places clients, servers and proxies on CPUs.
    ///
    /// # Errors
    /// Fails if this is not possible.
    pub fn pin(&self, cpus: Cpus) -> anyhow::Result<()> {
        let count = thread::available_parallelism()?.get();
        let (all, last) = (0..count, count - 1..count);
        let (ends, proxies) = match cpus {
            Cpus::All => (all.clone(), all),
            Cpus::One => (last.clone(), last),
            Cpus::Apart => (0..last.start.max(1), last),
        };
        for seat in &self.seats {
            place(seat.client.id(), &ends)?;
            place(seat.server.id(), &ends)?;
        }
        let processes = self
            .all()
            .into_iter()
            .flat_map(|relay| self.processes(relay));
        processes
            .into_iter()
            .try_for_each(|process| place(process, &proxies))
    }

    fn processes(&self, relay: Relay) -> Vec<u32> {
        let of_tunnels = self
            .tunnels_of(relay)
            .into_iter()
            .flat_map(Tunnels::processes);
        let others = self.relays.iter().filter(|(other, _)| *other == relay);
        let all = others.map(|(_, process)| process.id()).chain(of_tunnels);
        all.flat_map(with_children).collect()
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

/// Restricts a process and its threads to CPUs.
fn place(process: u32, cpus: &Range<usize>) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus.clone() {
        set.set(cpu)?;
    }
    for thread in threads(process) {
        // The thread may have ended in the meantime.
        let _ = sched_setaffinity(Pid::from_raw(thread.cast_signed()), &set);
    }
    Ok(())
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
