//! The lab of `bench packet`: for each path a node like the others, with a client pod and three
//! server pods on it; one more node with three server pods; and one client outside.

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
    stage::{
        Worker, carry_out, client_name, cpu_of, load_peers, node_name, server_name, start_agent,
        start_client, start_server, track,
    },
    worker::{Job, Order, Transport},
};

/// A path that is compared with others: a worker, and for how many services. Those that are equal are the same
/// thing measured at several places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Who works on its node.
    pub worker: Worker,
    /// For how many services; 0 if for none.
    pub services: u32,
}

/// A client, and where the endpoints are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// From outside to a node port of a service with endpoints on that node.
    NodePortLocal,
    /// Likewise, by IPv6.
    NodePortLocal6,
    /// From outside to a node port of a service with endpoints on another node.
    NodePortRemote,
    /// From a pod whose sockets nobody sees to a cluster IP of a service with endpoints on its node.
    ClusterIpPacket,
    /// From outside to a node port of each of two services, with endpoints on that node, and on another.
    NodePorts,
}

impl Lane {
    /// The families of its services, by whether it is IPv4. Loading both takes `iptables-nft-restore` twice as long.
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
    /// What is compared.
    pub lanes: Vec<Lane>,
    fleets: Vec<Fleet>,
    nodes: Vec<[IpAddr; 2]>,
    outside: Process,
    clients: Vec<Process>,
    // Dropped in this order: processes, then the lab with what is pinned.
    _servers: Vec<Process>,
    agents: Vec<(Agent, TempDir)>,
    lab: Lab,
}

impl Stage {
    /// Builds the lab, loads rules and tables, starts clients and servers.
    ///
    /// # Errors
    ///
    /// If the machine lacks something.
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
            match lanes[index].worker {
                Worker::Dataplane => {
                    agents.push((index, start_agent(&lab, &node, &fleets[index], &[])?));
                }
                Worker::Conntrack => track(&node)?,
                _ => {}
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

    /// The kernel's numbers of the programs on the interfaces of a lane's node, which is one of ours.
    ///
    /// # Errors
    /// If its agent does not tell.
    pub fn programs(&self, lane: usize) -> anyhow::Result<BTreeSet<u32>> {
        let ours = |lane: &&Lane| lane.worker == Worker::Dataplane;
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

    /// Whether a case goes by way of a lane's node: what is not translated reaches the other node's
    /// endpoints by way of the plain one, always. IPv6 is there where there are few services.
    pub fn measures(&self, lane: usize, case: Case) -> bool {
        let lane = self.lanes[lane];
        match case {
            Case::NodePortRemote => lane.worker != Worker::Conntrack,
            Case::NodePortLocal6 => lane.families().contains(&false),
            _ => true,
        }
    }

    /// CPU time in seconds that the client outside and everything on a lane's node took so far, with the kernel's work
    /// on their behalf, as forwarding; not what the kernel's own threads did for them.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    pub fn cpu(&self, lane: usize) -> anyhow::Result<f64> {
        let node = self.lab.node_cgroup(&node_name(lane));
        Ok(cpu_of(&node)? + cpu_of(self.lab.external("outside").cgroup())?)
    }

    /// Has a client measure something.
    ///
    /// # Errors
    ///
    /// What the client met with.
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

/// Routes for what is dialled without translation: the outside client reaches pods by way of their
/// node, those of the last node by way of the plain one, and is answered by the same way.
fn route(lab: &Lab, lanes: &[Lane]) -> anyhow::Result<()> {
    let outside = lab.external("outside");
    let (far, far_number) = (lab.node(&node_name(lanes.len())), lanes.len() + 1);
    for (index, lane) in lanes.iter().enumerate() {
        let node = lab.node(&node_name(index));
        // A node that sends out what came in by the same link tells the sender of a shorter way.
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
