//! The lab of `bench packet`: for each path an equal node with a client pod and three server pods, one more node with
//! three server pods, and one client outside.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::ensure;
use dataplane_tests::{Agent, Lab, Process};
use tempfile::TempDir;

use crate::{
    extent::order,
    fleet::{
        CONNECT_PORT, CONNECT_TARGET_PORT, ENDPOINTS, Fleet, NODE_PORTS, PORT, REMOTE_NODE_PORTS,
        TARGET_PORT,
    },
    node_worker::Worker,
    stage::{
        carry_out, client_name, cpu_of, load_peers, node_name, server_name, start_agent,
        start_client, start_server, track,
    },
    worker::{Job, Order, Transport},
};

/// A path to compare: a worker, and its number of services. Equal lanes measure the same path at several places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The worker on the lane's node.
    pub worker: Worker,
    /// Number of services; 0 if the node has none.
    pub services: u32,
}

/// A client, and the place of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// From outside to a node port of a service with endpoints on that node.
    NodePortLocal,
    /// From outside to a node port of a service with endpoints on that node, by IPv6.
    NodePortLocal6,
    /// From outside to a node port of a service with endpoints on another node.
    NodePortRemote,
    /// From a pod whose sockets the agent does not see to a cluster IP of a service with endpoints on its node.
    ClusterIpPacket,
    /// From outside to a node port of each of two services: endpoints of one are on that node, of the other on another
    /// node.
    NodePorts,
}

impl Lane {
    /// Returns the families of the lane's services; `true` is IPv4. With both families, `iptables-nft-restore` takes
    /// twice as long, so large lanes have only IPv4.
    pub const fn families(self) -> &'static [bool] {
        if self.services <= 1_000 {
            &[true, false]
        } else {
            &[true]
        }
    }
}

/// The lab, loaded and ready.
pub struct Stage {
    /// The lanes to compare.
    pub lanes: Vec<Lane>,
    fleets: Vec<Fleet>,
    nodes: Vec<[IpAddr; 2]>,
    outside: Process,
    clients: Vec<Process>,
    // Fields are dropped in this order: processes first, then the lab with the pinned programs and maps.
    _servers: Vec<Process>,
    agents: Vec<(Agent, TempDir)>,
    lab: Lab,
}

impl Stage {
    /// Builds the lab, loads rules and tables, starts clients and servers.
    ///
    /// # Errors
    ///
    /// Fails if the machine lacks a program.
    pub fn build(lanes: &[Lane]) -> anyhow::Result<Self> {
        let far = lanes.len();
        let mut builder = Lab::builder();
        for index in 0..=far {
            let node = node_name(index);
            let number = index + 1;
            builder = builder.node(&node);
            if index != far {
                builder = builder.vm(&node, &client_name(index), &format!("10.244.{number}.10"));
            }
            for server in 0..ENDPOINTS {
                let addr = format!("10.244.{number}.{}", 20 + server);
                builder = builder.pod(&node, &server_name(index, server), &addr);
            }
        }
        let lab = builder.external("outside").build()?;
        route(&lab, lanes)?;

        let servers_of = |index| (0..ENDPOINTS).map(move |server| server_name(index, server));
        let addrs_of = |index, families: &[bool]| -> Vec<IpAddr> {
            let of_pod = |name: String| lab.pod(&name).addresses();
            let addrs = servers_of(index).flat_map(of_pod);
            addrs
                .filter(|addr| families.contains(&addr.is_ipv4()))
                .collect()
        };
        let fleets: Vec<_> = lanes
            .iter()
            .enumerate()
            .map(|(index, lane)| Fleet {
                services: lane.services,
                target: addrs_of(index, lane.families()),
                remote: addrs_of(far, lane.families()),
                node: lab.node(&node_name(index)).addresses().to_vec(),
            })
            .collect();
        let servers = (0..=far)
            .flat_map(servers_of)
            .map(|name| start_server(lab.pod(&name)));
        let servers = servers.collect::<anyhow::Result<_>>()?;
        let clients = (0..far).map(|index| start_client(lab.pod(&client_name(index))));
        let clients = clients.collect::<anyhow::Result<_>>()?;
        let outside = start_client(lab.external("outside"))?;

        let peers = lanes.iter().zip(&fleets).enumerate();
        let peers = peers.filter_map(|(index, (lane, fleet))| match lane.worker {
            Worker::Peer(mode) => Some((mode, node_name(index), fleet)),
            _ => None,
        });
        load_peers(&lab, peers)?;
        let mut agents = vec![];
        for index in order(lanes.len()) {
            let node = lab.node(&node_name(index)).clone();
            let worker = lanes[index].worker;
            if worker.is_tracked() {
                track(&node)?;
            }
            if let Some(arguments) = worker.arguments() {
                agents.push((index, start_agent(&lab, &node, &fleets[index], arguments)?));
            }
        }
        agents.sort_by_key(|(index, _)| *index);
        let agents = agents.into_iter().map(|(_, agent)| agent).collect();
        let nodes = (0..far).map(|index| lab.node(&node_name(index)).addresses());
        Ok(Self {
            lanes: lanes.to_vec(),
            nodes: nodes.collect(),
            fleets,
            outside,
            clients,
            _servers: servers,
            agents,
            lab,
        })
    }

    /// Returns the kernel's numbers of the programs on the interfaces of a lane's node. The worker must be an agent.
    ///
    /// # Errors
    /// Fails if the agent does not list them.
    pub fn programs(&self, lane: usize) -> anyhow::Result<BTreeSet<u32>> {
        let ours = |lane: &&Lane| lane.worker.is_agent();
        let (agent, _) = &self.agents[self.lanes[..lane].iter().filter(ours).count()];
        let status = agent.dataplane(["status", "-o", "json"]).run()?;
        let status: serde_json::Value = serde_json::from_str(&status)?;
        let interfaces = status["interfaces"].as_array().into_iter().flatten();
        let ways = interfaces.flat_map(|interface| [&interface["ingress"], &interface["egress"]]);
        let numbers = ways.filter_map(|way| way["program_id"].as_u64());
        let numbers: BTreeSet<u32> = numbers.filter_map(|id| u32::try_from(id).ok()).collect();
        ensure!(!numbers.is_empty(), "no interface has a program: {status}");
        Ok(numbers)
    }

    /// Returns whether a lane has a case. Without translation, packets always reach the other node's endpoints through
    /// the plain lane's node, so the conntrack lane does not have this case. Only lanes with few services have IPv6.
    pub fn measures(&self, lane: usize, case: Case) -> bool {
        let lane = self.lanes[lane];
        match case {
            Case::NodePortRemote => lane.worker != Worker::Conntrack,
            Case::NodePortLocal6 => lane.families().contains(&false),
            _ => true,
        }
    }

    /// Returns the CPU time in seconds that the client outside and all processes on a lane's node took so far. This
    /// includes the kernel's work on their behalf, such as forwarding, but not the work of the kernel's own threads.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be read.
    pub fn cpu(&self, lane: usize) -> anyhow::Result<f64> {
        let node = self.lab.node_cgroup(&node_name(lane));
        Ok(cpu_of(&node)? + cpu_of(self.lab.external("outside").cgroup())?)
    }

    /// Has a client carry out a job.
    ///
    /// # Errors
    ///
    /// Returns the client's error.
    pub fn measure(
        &mut self,
        lane: usize,
        case: Case,
        transport: Transport,
        job: Job,
    ) -> anyhow::Result<Vec<f64>> {
        let (fleet, node) = (&self.fleets[lane], self.nodes[lane]);
        let routed = matches!(self.lanes[lane].worker, Worker::Plain | Worker::Conntrack);
        let (addrs, ports) = match case {
            Case::NodePortRemote if routed => {
                (fleet.remote.clone(), [TARGET_PORT, CONNECT_TARGET_PORT])
            }
            _ if routed => (fleet.target.clone(), [TARGET_PORT, CONNECT_TARGET_PORT]),
            Case::NodePortLocal | Case::NodePortLocal6 | Case::NodePorts => {
                (node.to_vec(), NODE_PORTS)
            }
            Case::NodePortRemote => (node.to_vec(), REMOTE_NODE_PORTS),
            Case::ClusterIpPacket => (vec![fleet.vip(true)], [PORT, CONNECT_PORT]),
        };
        let port = match (transport, job) {
            (Transport::Tcp, Job::Connect { .. }) => ports[1],
            _ => ports[0],
        };
        let v4 = case != Case::NodePortLocal6;
        let addrs = addrs.into_iter().filter(|addr| addr.is_ipv4() == v4);
        let mut to: Vec<_> = addrs.map(|addr| SocketAddr::new(addr, port)).collect();
        if case == Case::NodePorts {
            // Two destinations on any path.
            to.truncate(2);
            let another = SocketAddr::new(to[0].ip(), REMOTE_NODE_PORTS[0]);
            to.extend((!routed).then_some(another));
        }
        let order = Order {
            to,
            transport,
            job,
            name: String::new(),
        };
        let client = match case {
            Case::ClusterIpPacket => &mut self.clients[lane],
            _ => &mut self.outside,
        };
        carry_out(client, &order)
    }
}

/// Adds the routes for connections without translation. The outside client reaches pods through their node. It reaches
/// the last node's pods through the plain lane's node, and their answers return through this node.
fn route(lab: &Lab, lanes: &[Lane]) -> anyhow::Result<()> {
    let outside = lab.external("outside");
    let (far, far_number) = (lab.node(&node_name(lanes.len())), lanes.len() + 1);
    for (index, lane) in lanes.iter().enumerate() {
        let node = lab.node(&node_name(index));
        // A node that forwards a packet out of the interface that it came in by sends the sender a redirect to a
        // shorter path.
        node.sysctl("ipv4/conf/all/send_redirects", "0")?;
        node.sysctl("ipv4/conf/eth0/send_redirects", "0")?;
        let (number, via) = (index + 1, node.ipv4());
        outside.ip(&format!("route add 10.244.{number}.0/24 via {via}"))?;
        let via6 = node.ipv6();
        outside.ip(&format!(
            "-6 route add fd00:10:244:{number}::/64 via {via6}"
        ))?;
        if lane.worker == Worker::Plain {
            outside.ip(&format!("route add 10.244.{far_number}.0/24 via {via}"))?;
            far.ip(&format!("route add {}/32 via {via}", outside.ipv4()))?;
        }
    }
    Ok(())
}
