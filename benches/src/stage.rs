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
use dataplane_tests::{Lab, Process};

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
            })
            .collect();

        let program = std::env::current_exe()?;
        let cpu = cpu().to_string();
        let mut servers = vec![];
        let mut clients = vec![];
        for index in 0..nodes.len() {
            for server in 0..ENDPOINTS {
                let pod = lab.pod(&server_name(index, server));
                let mut process = pod
                    .command(&program)
                    .args(["worker", "server", "--cpu", &cpu])
                    .args(["--port", &TARGET_PORT.to_string()])
                    .args(["--connect-port", &CONNECT_TARGET_PORT.to_string()])
                    .args(pod.addresses().map(|addr| addr.to_string()))
                    .stdin_piped()
                    .stdout_piped()
                    .spawn()?;
                process.wait_for_line().context("a server")?;
                servers.push(process);
            }
            clients.push(
                lab.pod(&client_name(index))
                    .command(&program)
                    .args(["worker", "client", "--cpu", &cpu])
                    .stdin_piped()
                    .stdout_piped()
                    .spawn()?,
            );
        }
        load_peers(&lab, nodes, &fleets)?;
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
        let client = &mut self.clients[lane.node];
        client.send_line(&serde_json::to_string(&order)?)?;
        match serde_json::from_str(&client.wait_for_line()?)? {
            Answer::Value(value) => Ok(value),
            Answer::Error(error) => bail!("{error} (to {:?})", order.to),
        }
    }
}

fn node_name(index: usize) -> String {
    format!("node{}", index + 1)
}

fn client_name(index: usize) -> String {
    format!("c{}", index + 1)
}

fn server_name(index: usize, server: u32) -> String {
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
fn load_peers(lab: &Lab, nodes: &[NodePlan], fleets: &[Fleet]) -> anyhow::Result<()> {
    let cluster = Fleet::cluster();
    let mut jobs = vec![];
    for (index, node) in nodes.iter().enumerate() {
        let Worker::Peer(mode) = node.worker else {
            continue;
        };
        let loads = dataplane_peers::rules(mode, &fleets[index].snapshot(), &cluster);
        let netns = lab.node(&node_name(index)).netns().to_owned();
        // The slowest spends its time in user space, and so may load both families at once.
        if mode == Mode::IptablesNft {
            jobs.extend(
                loads
                    .into_iter()
                    .map(|load| (mode, node.services, netns.clone(), vec![load])),
            );
        } else {
            jobs.push((mode, node.services, netns, loads));
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
