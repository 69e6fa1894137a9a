//! The lab in which paths are compared: for each of them a node like the others, with a client pod
//! and three server pods on it.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context as _, bail};
use dataplane::{
    kernel::{Kernel, Limits, Paths},
    plan::Planner,
};
use dataplane_peers::Mode;
use dataplane_tests::{Host, Lab, Process};

use crate::{
    fleet::{CONNECT_PORT, CONNECT_TARGET_PORT, ENDPOINTS, Fleet, PORT, TARGET_PORT},
    say,
    worker::{Answer, Job, Order, Transport},
};

/// Who does the work on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker {
    /// Nobody: no rules, no programs. The endpoint is dialled.
    Plain,
    /// We do.
    Dataplane,
    /// kube-proxy's rules do.
    Peer(Mode),
}

/// A node of the comparison.
#[derive(Clone, Copy, Debug)]
pub struct NodePlan {
    /// Who works on it.
    pub worker: Worker,
    /// For how many services.
    pub services: u32,
    /// Whether the endpoint is dialled too, besides the VIP.
    pub direct: bool,
}

/// A way to reach an endpoint that is compared with others.
#[derive(Clone, Debug)]
pub struct Lane {
    /// `path` of the rows.
    pub path: &'static str,
    /// `services` of the rows.
    pub services: u32,
    /// Whom the client dials, IPv4 and IPv6: a VIP, or, drawn by the client as the others draw for a
    /// VIP, one of its endpoints. Servers are processes of their own, and it takes longer to be
    /// answered by another one each time.
    addrs: [Vec<IpAddr>; 2],
    /// At which port, and at which only to connect.
    ports: [u16; 2],
    /// Whose client.
    node: usize,
}

/// The lab, loaded and ready.
pub struct Stage {
    /// What is compared.
    pub lanes: Vec<Lane>,
    clients: Vec<Process>,
    // Dropped in this order: processes, then tables, then the lab with what is pinned.
    _servers: Vec<Process>,
    _kernels: Vec<Kernel>,
    _lab: Lab,
}

/// The CPU that clients and servers share. One for both: what a path costs is then what is
/// measured, without the time to wake another CPU, which is long and varies most. The last one,
/// since devices tend to interrupt the first.
fn cpu() -> usize {
    thread::available_parallelism().map_or(0, |count| count.get() - 1)
}

impl Stage {
    /// Builds the lab, loads rules and tables, starts clients and servers.
    ///
    /// # Errors
    ///
    /// If the machine lacks something.
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
            })
            .collect();

        let mut servers = vec![];
        let mut clients = vec![];
        for index in 0..nodes.len() {
            for server in 0..ENDPOINTS {
                servers.push(start_server(lab.pod(&server_name(index, server)))?);
            }
            clients.push(start_client(lab.pod(&client_name(index)))?);
        }
        let peers = nodes.iter().zip(&fleets).enumerate();
        let peers = peers.filter_map(|(index, (node, fleet))| match node.worker {
            Worker::Peer(mode) => Some((mode, node_name(index), fleet)),
            _ => None,
        });
        load_peers(&lab, peers)?;
        let mut kernels = vec![];
        for (index, node) in nodes.iter().enumerate() {
            if node.worker == Worker::Dataplane {
                kernels.push(load_dataplane(&lab, &node_name(index), &fleets[index])?);
            }
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
            _kernels: kernels,
            _lab: lab,
        })
    }

    /// Has a lane's client measure something.
    ///
    /// # Errors
    ///
    /// What the client met with.
    pub fn measure(
        &mut self,
        lane: usize,
        v4: bool,
        transport: Transport,
        job: Job,
    ) -> anyhow::Result<f64> {
        let lane = &self.lanes[lane];
        let (addrs, [port, connect_port]) = (&lane.addrs[usize::from(!v4)], lane.ports);
        let port = match (transport, job) {
            (Transport::Tcp, Job::Connect { .. }) => connect_port,
            _ => port,
        };
        let order = Order {
            to: addrs
                .iter()
                .map(|addr| SocketAddr::new(*addr, port))
                .collect(),
            transport,
            job,
        };
        carry_out(&mut self.clients[lane.node], &order)
    }
}

/// Has a client measure something.
///
/// # Errors
///
/// What the client met with.
pub fn carry_out(client: &mut Process, order: &Order) -> anyhow::Result<f64> {
    client.send_line(&serde_json::to_string(order)?)?;
    match serde_json::from_str(&client.wait_for_line()?)? {
        Answer::Value(value) => Ok(value),
        Answer::Error(error) => bail!("{error} (to {:?})", order.to),
    }
}

/// Starts a server on all addresses of a host.
///
/// # Errors
///
/// If it cannot be started.
pub fn start_server(host: &Host) -> anyhow::Result<Process> {
    let mut process = host
        .command(std::env::current_exe()?)
        .args(["worker", "server", "--cpu", &cpu().to_string()])
        .args(["--port", &TARGET_PORT.to_string()])
        .args(["--connect-port", &CONNECT_TARGET_PORT.to_string()])
        .args(host.addresses().map(|addr| addr.to_string()))
        .stdin_piped()
        .stdout_piped()
        .spawn()?;
    process.wait_for_line().context("a server")?;
    Ok(process)
}

/// Starts a client on a host.
///
/// # Errors
///
/// If it cannot be started.
pub fn start_client(host: &Host) -> anyhow::Result<Process> {
    let client = host.command(std::env::current_exe()?).args([
        "worker",
        "client",
        "--cpu",
        &cpu().to_string(),
    ]);
    Ok(client.stdin_piped().stdout_piped().spawn()?)
}

/// The name of the node of the lab with this index.
pub fn node_name(index: usize) -> String {
    format!("node{}", index + 1)
}

/// The name of its client pod.
pub fn client_name(index: usize) -> String {
    format!("c{}", index + 1)
}

/// The name of one of its server pods.
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
                [TARGET_PORT, CONNECT_TARGET_PORT]
            } else {
                [PORT, CONNECT_PORT]
            },
            node: index,
        }
    };
    let mut lanes = vec![match node.worker {
        Worker::Plain => lane("plain", true),
        Worker::Dataplane => lane("dataplane", false),
        Worker::Peer(mode) => lane(mode.word(), false),
    }];
    if node.direct {
        lanes.push(lane("direct", true));
    }
    lanes
}

/// Loads every peer's rules, on all CPUs: `iptables-nft-restore` takes a minute for 10 000
/// services.
///
/// # Errors
///
/// If a program is missing, or does not take the rules.
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
        // The slowest spends its time in user space, and so may load both families at once.
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

/// Programs and tables for one node of the lab, written by this process.
///
/// # Errors
///
/// If the kernel refuses.
pub fn load_dataplane(lab: &Lab, node: &str, fleet: &Fleet) -> anyhow::Result<Kernel> {
    let paths = Paths {
        bpffs: lab.bpffs()?.join(node),
        cgroup: lab.node_cgroup(node),
    };
    let mut kernel = Kernel::open(&paths, Limits::default())?;
    let plan = Planner::new().plan(&fleet.snapshot());
    kernel.reserve(&plan.demand)?;
    kernel.apply(&plan.writes)?;
    Ok(kernel)
}
