//! The lab of `bench socket`: for each path an equal node with a client pod and three server pods.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context as _, bail};
use dataplane_peers::Mode;
use dataplane_tests::{Agent, Host, Lab, Process};
use tempfile::TempDir;

use crate::{
    fleet::{
        CONNECT_PORT, CONNECT_TARGET_PORT, CROWD_PORT, CROWD_TARGET_PORT, ENDPOINTS, Fleet, PORT,
        TARGET_PORT,
    },
    manifests,
    node_worker::Worker,
    say,
    worker::{Answer, Job, Order, Transport},
};

/// A node of the comparison.
#[derive(Clone, Copy, Debug)]
pub struct NodePlan {
    /// The node's worker.
    pub worker: Worker,
    /// Number of services.
    pub services: u32,
    /// Whether the client also connects directly to an endpoint, besides the VIP.
    pub direct: bool,
}

/// A way to reach an endpoint, to compare with others.
#[derive(Clone, Debug)]
pub struct Lane {
    /// `path` of the rows.
    pub path: &'static str,
    /// `services` of the rows.
    pub services: u32,
    /// The addresses to connect to, IPv4 and IPv6: a VIP, or all endpoints of the service. For each connection the
    /// client chooses one of the endpoints at random, as other lanes do for a VIP. Servers are separate processes, and
    /// an answer from a different server each time takes longer.
    addrs: [Vec<IpAddr>; 2],
    /// The service's port for data, for connections only, and for many clients.
    ports: [u16; 3],
    /// The node of the client.
    node: usize,
}

/// The lab, loaded and ready.
pub struct Stage {
    /// The lanes to compare.
    pub lanes: Vec<Lane>,
    /// Two clients for each node: the first runs on the CPU that the servers use, the second on any.
    clients: Vec<[Process; 2]>,
    // Fields are dropped in this order: processes first, then the lab with the pinned programs and maps.
    _servers: Vec<Process>,
    _monitors: Vec<Process>,
    _agents: Vec<(Agent, TempDir)>,
    lab: Lab,
}

/// Returns the CPU that clients and servers share. They share one so that the figures are the cost of the path, without
/// the time to wake another CPU, which is long and varies most. It is the last CPU, because devices tend to interrupt
/// the first.
fn cpu() -> usize {
    thread::available_parallelism().map_or(0, |count| count.get() - 1)
}

impl Stage {
    /// Builds the lab, loads rules and tables, starts clients and servers.
    ///
    /// # Errors
    ///
    /// Fails if the machine lacks a program.
    pub fn build(nodes: &[NodePlan]) -> anyhow::Result<Self> {
        let mut builder = Lab::builder();
        for index in 0..nodes.len() {
            let node = node_name(index);
            let number = index + 1;
            builder =
                builder
                    .node(&node)
                    .pod(&node, &client_name(index), &format!("10.244.{number}.10"));
            for server in 0..ENDPOINTS {
                let addr = format!("10.244.{number}.{}", 20 + server);
                builder = builder.pod(&node, &server_name(index, server), &addr);
            }
        }
        let lab = builder.build()?;
        let fleets: Vec<_> = nodes
            .iter()
            .enumerate()
            .map(|(index, node)| Fleet {
                services: node.services,
                target: (0..ENDPOINTS)
                    .flat_map(|server| lab.pod(&server_name(index, server)).addresses())
                    .collect(),
                remote: vec![],
                node: lab.node(&node_name(index)).addresses().to_vec(),
            })
            .collect();

        let mut servers = vec![];
        let mut clients = vec![];
        for index in 0..nodes.len() {
            for server in 0..ENDPOINTS {
                let pod = lab.pod(&server_name(index, server));
                servers.push(start_server(pod)?);
                servers.push(start_crowd_server(pod)?);
            }
            let pod = lab.pod(&client_name(index));
            // Sockets in TIME_WAIT would use up the ports within seconds.
            pod.sysctl("ipv4/tcp_max_tw_buckets", "0")?;
            clients.push([start_client(pod)?, start_client_on(pod, None)?]);
        }
        let peers = nodes.iter().zip(&fleets).enumerate();
        let peers = peers.filter_map(|(index, (node, fleet))| match node.worker {
            Worker::Peer(mode) => Some((mode, node_name(index), fleet)),
            _ => None,
        });
        load_peers(&lab, peers)?;
        let (mut agents, mut monitors) = (vec![], vec![]);
        for (index, node) in nodes.iter().enumerate() {
            let host = lab.node(&node_name(index)).clone();
            if node.worker.is_tracked() {
                track(&host)?;
            }
            let Some(arguments) = node.worker.arguments() else {
                continue;
            };
            let (agent, directory) = start_agent(&lab, &host, &fleets[index], arguments)?;
            if node.worker == Worker::Monitored {
                let monitor = agent.dataplane(["monitor"]).stdout(Stdio::null());
                monitors.push(monitor.spawn()?);
            }
            agents.push((agent, directory));
        }
        let lanes = nodes
            .iter()
            .zip(&fleets)
            .enumerate()
            .flat_map(|(i, (n, f))| lanes(i, *n, f));
        Ok(Self {
            lanes: lanes.collect(),
            clients,
            _servers: servers,
            _monitors: monitors,
            _agents: agents,
            lab,
        })
    }

    /// Returns the CPU time in seconds that all processes on a lane's node took so far: clients, servers and the agent,
    /// with the kernel's work on their behalf, but not the work of the kernel's own threads (`cpu.stat` of the node's
    /// cgroup).
    ///
    /// # Errors
    ///
    /// Fails if it cannot be read.
    pub fn cpu(&self, lane: usize) -> anyhow::Result<f64> {
        let node = node_name(self.lanes[lane].node);
        cpu_of(&self.lab.node_cgroup(&node))
    }

    /// Has a lane's client carry out a job.
    ///
    /// # Errors
    ///
    /// Returns the client's error.
    pub fn measure(
        &mut self,
        lane: usize,
        v4: bool,
        transport: Transport,
        job: Job,
    ) -> anyhow::Result<Vec<f64>> {
        let lane = &self.lanes[lane];
        let (addrs, [port, connect_port, crowd_port]) = (&lane.addrs[usize::from(!v4)], lane.ports);
        let crowd = matches!(job, Job::Crowd { .. });
        let port = match (transport, job) {
            (Transport::Tcp, Job::Connect { .. }) => connect_port,
            _ if crowd => crowd_port,
            _ => port,
        };
        let order = Order {
            to: addrs
                .iter()
                .map(|addr| SocketAddr::new(*addr, port))
                .collect(),
            transport,
            job,
            name: String::new(),
        };
        carry_out(&mut self.clients[lane.node][usize::from(crowd)], &order)
    }
}

/// Returns the CPU time in seconds that the processes of a cgroup took, including processes that have ended.
///
/// # Errors
///
/// Fails if it cannot be read.
pub fn cpu_of(cgroup: &Path) -> anyhow::Result<f64> {
    let path = cgroup.join("cpu.stat");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut lines = text.lines();
    let usage = lines.find_map(|line| line.strip_prefix("usage_usec "));
    let micros: f64 = usage.context("no usage_usec in cpu.stat")?.parse()?;
    Ok(micros / 1e6)
}

/// Has a client carry out an order.
///
/// # Errors
///
/// Returns the client's error.
pub fn carry_out(client: &mut Process, order: &Order) -> anyhow::Result<Vec<f64>> {
    client.send_line(&serde_json::to_string(order)?)?;
    values(&client.wait_for_line()?).with_context(|| format!("to {:?}", order.to))
}

/// Reads a client's answer to an order.
///
/// # Errors
///
/// Fails if the answer is not JSON. Returns the client's error.
pub fn values(line: &str) -> anyhow::Result<Vec<f64>> {
    match serde_json::from_str(line)? {
        Answer::Values(values) => Ok(values),
        Answer::Error(error) => bail!("{error}"),
    }
}

/// Returns the first of a job's outputs.
///
/// # Errors
///
/// Fails if there is none.
pub fn first(values: &[f64]) -> anyhow::Result<f64> {
    values.first().copied().context("a job without an output")
}

/// Starts a server on all addresses of a host, on the CPU that its clients use.
///
/// # Errors
///
/// Fails if the server cannot be started.
pub fn start_server(host: &Host) -> anyhow::Result<Process> {
    let cpu = cpu().to_string();
    start_server_at(host, [TARGET_PORT, CONNECT_TARGET_PORT], &["--cpu", &cpu])
}

/// Starts a server for many clients at the same time, on all CPUs.
fn start_crowd_server(host: &Host) -> anyhow::Result<Process> {
    let ports = [CROWD_TARGET_PORT, CROWD_TARGET_PORT + 1];
    start_server_at(host, ports, &["--threads", "16"])
}

fn start_server_at(host: &Host, ports: [u16; 2], arguments: &[&str]) -> anyhow::Result<Process> {
    let [port, connect_port] = ports.map(|port| port.to_string());
    let mut process = host
        .command(std::env::current_exe()?)
        .args(["worker", "server", "--port", &port])
        .args(["--connect-port", &connect_port])
        .args(arguments)
        .args(host.addresses().map(|addr| addr.to_string()))
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    process.wait_for_line().context("a server")?;
    Ok(process)
}

/// Starts a client on a host, on the CPU that its servers use.
///
/// # Errors
///
/// Fails if the client cannot be started.
pub fn start_client(host: &Host) -> anyhow::Result<Process> {
    start_client_on(host, Some(cpu()))
}

fn start_client_on(host: &Host, cpu: Option<usize>) -> anyhow::Result<Process> {
    let client = host
        .command(std::env::current_exe()?)
        .args(["worker", "client"]);
    let cpu = cpu.map(|cpu| cpu.to_string());
    let client = client.args(cpu.iter().flat_map(|cpu| ["--cpu", cpu.as_str()]));
    Ok(client.stdin_piped().stdout_piped().spawn()?)
}

/// Returns the name of the lab's node with this index.
pub fn node_name(index: usize) -> String {
    format!("node{}", index + 1)
}

/// Returns the name of the client pod on this node.
pub fn client_name(index: usize) -> String {
    format!("c{}", index + 1)
}

/// Returns the name of a server pod on this node.
pub fn server_name(index: usize, server: u32) -> String {
    format!("s{}-{server}", index + 1)
}

fn lanes(index: usize, node: NodePlan, fleet: &Fleet) -> Vec<Lane> {
    let endpoints = |v4| {
        let of_family = |addr: &IpAddr| addr.is_ipv4() == v4;
        fleet.target.iter().copied().filter(of_family).collect()
    };
    let lane = |path, direct| {
        let vip = |v4| fleet.vip(v4);
        Lane {
            path,
            services: node.services,
            addrs: [true, false].map(|v4| if direct { endpoints(v4) } else { vec![vip(v4)] }),
            ports: if direct {
                [TARGET_PORT, CONNECT_TARGET_PORT, CROWD_TARGET_PORT]
            } else {
                [PORT, CONNECT_PORT, CROWD_PORT]
            },
            node: index,
        }
    };
    let dials_endpoints = matches!(node.worker, Worker::Plain | Worker::Conntrack);
    let mut lanes = vec![lane(node.worker.path(), dials_endpoints)];
    if node.direct {
        lanes.push(lane("direct", true));
    }
    lanes
}

/// Loads the rules of all peers, on all CPUs: `iptables-nft-restore` takes a minute for 10 000 services.
///
/// # Errors
///
/// Fails if a program is missing, or if it rejects the rules.
pub fn load_peers<'a>(
    lab: &Lab,
    peers: impl Iterator<Item = (Mode, String, &'a Fleet)>,
) -> anyhow::Result<()> {
    let cluster = Fleet::cluster();
    let mut jobs = vec![];
    for (mode, node, fleet) in peers {
        let services = fleet.services;
        let loads = dataplane_peers::rules(mode, &fleet.snapshot(), &cluster);
        let netns = lab.node(&node).netns().to_owned();
        // The slowest program spends its time in user space, so it can load both families at the same time.
        if mode == Mode::IptablesNft {
            jobs.extend(
                loads
                    .into_iter()
                    .map(|load| (mode, services, netns.clone(), vec![load])),
            );
        } else {
            jobs.push((mode, services, netns, loads));
        }
    }
    let slowness = |mode| match mode {
        Mode::IptablesLegacy => 0,
        Mode::Nftables => 1,
        Mode::IptablesNft => 2,
    };
    jobs.sort_by_key(|(mode, services, ..)| (*services, slowness(*mode)));
    let jobs = Mutex::new(jobs);
    let next = || jobs.lock().ok().and_then(|mut jobs| jobs.pop());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..thread::available_parallelism().map_or(1, usize::from))
            .map(|_| {
                scope.spawn(|| -> anyhow::Result<()> {
                    while let Some((mode, services, netns, loads)) = next() {
                        for load in loads {
                            let start = Instant::now();
                            load.run(|program| {
                                let mut command = Command::new("ip");
                                command.args(["netns", "exec", &netns, program]);
                                command
                            })?;
                            let took = start.elapsed().as_secs_f64();
                            if took > 1.0 {
                                say!(
                                    "{mode}, {services} services: {} took {took:.1} s",
                                    load.program
                                );
                            }
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(done) => done,
                Err(_) => bail!("a loader panicked"),
            })
    })
}

/// Has the kernel's conntrack follow the flows that a node forwards, by a rule as network plug-ins have it.
///
/// # Errors
///
/// Fails if nft rejects the rule.
pub fn track(node: &Host) -> anyhow::Result<()> {
    let rules = "table ip bench {\n\
                 chain leaves { type nat hook postrouting priority 100;\n\
                 ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade; }\n\
                 }\n\
                 table ip6 bench {\n\
                 chain leaves { type nat hook postrouting priority 100;\n\
                 ip6 saddr fd00:10:244::/48 ip6 daddr != fd00:10:244::/48 masquerade; }\n\
                 }";
    let script = format!("nft -f - <<'end'\n{rules}\nend");
    node.command("sh").args(["-c", &script]).run()?;
    Ok(())
}

/// Starts an agent on a node, with manifests of a fleet's services. The manifests exist as long as the directory.
///
/// # Errors
///
/// Fails if the agent does not become ready.
pub fn start_agent(
    lab: &Lab,
    node: &Host,
    fleet: &Fleet,
    arguments: &[&str],
) -> anyhow::Result<(Agent, TempDir)> {
    let services = fleet.services;
    if services >= 10_000 {
        say!("starting an agent with manifests of {services} services");
    }
    let directory = tempfile::tempdir()?;
    manifests::write(&fleet.snapshot(), node.name(), directory.path())?;
    let agent = lab
        .agent(node.name())
        .manifests(directory.path())
        .args(["--pod-cidr", "10.244.0.0/16,fd00:10:244::/48"])
        .args(arguments)
        .start()?;
    Ok((agent, directory))
}
