//! Clusters of any number of services, as a [`Snapshot`].

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use dataplane_peers::{Cluster, LocalDetector};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use model::{Endpoint, Node, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot};
use smallvec::{SmallVec, smallvec};

/// The port on the VIPs.
pub const PORT: u16 = 80;
/// The endpoints' port.
pub const TARGET_PORT: u16 = 8080;
/// The port on the target's VIP at which clients only connect.
pub const CONNECT_PORT: u16 = 81;
/// The target's port behind [`CONNECT_PORT`].
pub const CONNECT_TARGET_PORT: u16 = 8081;
/// The port on the target's VIP for many clients at the same time.
pub const CROWD_PORT: u16 = 82;
/// The target's port behind [`CROWD_PORT`].
pub const CROWD_TARGET_PORT: u16 = 8082;
/// Number of endpoints of every service.
pub const ENDPOINTS: u32 = 3;
/// The target's node ports: for data, and for connections only.
pub const NODE_PORTS: [u16; 2] = [30080, 30081];
/// Node ports of the service with endpoints on another node.
pub const REMOTE_NODE_PORTS: [u16; 2] = [30082, 30083];

const PODS_V4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 244, 0, 0), 16);
const PODS_V6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 0), 56);
const SERVICES_V4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 96, 0, 0), 12);
const SERVICES_V6: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0), 108);

/// A cluster: `services` services with a TCP port and three endpoints each. The service in the
/// middle is the *target*: its endpoints really run, and it has two more TCP ports and a UDP port.
///
/// The target is in the middle because iptables walks the services in order: a connection to a
/// random service walks half of them on average.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Number of services.
    pub services: u32,
    /// The target's endpoints. Every service has their families.
    pub target: Vec<IpAddr>,
    /// The endpoints of one more service, on another node. If there are any, this service and the
    /// target have node ports.
    pub remote: Vec<IpAddr>,
    /// The node's own addresses.
    pub node: Vec<IpAddr>,
}

impl Fleet {
    /// Returns the networks that [`Fleet::snapshot`] uses.
    pub fn cluster() -> Cluster {
        Cluster {
            local: LocalDetector::Networks(vec![PODS_V4.into(), PODS_V6.into()]),
            service_networks: vec![SERVICES_V4.into(), SERVICES_V6.into()],
            ..Cluster::default()
        }
    }

    /// Returns the target's VIP.
    pub fn vip(&self, v4: bool) -> IpAddr {
        vip(self.services / 2, v4)
    }

    /// Returns the services as a snapshot.
    pub fn snapshot(&self) -> Snapshot {
        let services = (0..self.services).map(|index| {
            let service = self.service(index);
            (service.name.clone(), Arc::new(service))
        });
        let remote = (!self.remote.is_empty()).then(|| {
            let service = self.real("remote", self.services, &self.remote, false);
            (service.name.clone(), Arc::new(service))
        });
        let node = Node {
            addresses: self.node.clone(),
            ..Node::default()
        };
        Snapshot {
            node: Arc::new(node),
            services: services.chain(remote).collect(),
            ..Snapshot::default()
        }
    }

    fn service(&self, index: u32) -> Service {
        let name = format!("service-{index:06}");
        if index == self.services / 2 {
            return self.real(&name, index, &self.target, true);
        }
        let families = self.families();
        let endpoints = elsewhere(index, families.iter().copied());
        let port = port("tcp", Protocol::Tcp, PORT, None, endpoints);
        service(&name, index, &families, smallvec![port])
    }

    /// Returns the families of every service; `true` is IPv4.
    fn families(&self) -> Vec<bool> {
        let has = |v4: &bool| self.target.iter().any(|addr| addr.is_ipv4() == *v4);
        [true, false].into_iter().filter(has).collect()
    }

    /// Returns a service whose endpoints really run.
    fn real(&self, name: &str, index: u32, addrs: &[IpAddr], local: bool) -> Service {
        let endpoints = |port| {
            let endpoint = |addr: &IpAddr| endpoint(*addr, port, local);
            let mut endpoints: Vec<_> = addrs.iter().map(endpoint).collect();
            endpoints.sort();
            endpoints
        };
        let node_ports = if local { NODE_PORTS } else { REMOTE_NODE_PORTS };
        let [node, connect] = node_ports.map(|port| (!self.remote.is_empty()).then_some(port));
        let ports = smallvec![
            port("tcp", Protocol::Tcp, PORT, node, endpoints(TARGET_PORT)),
            port("udp", Protocol::Udp, PORT, node, endpoints(TARGET_PORT)),
            port(
                "connect",
                Protocol::Tcp,
                CONNECT_PORT,
                connect,
                endpoints(CONNECT_TARGET_PORT)
            ),
            port(
                "crowd",
                Protocol::Tcp,
                CROWD_PORT,
                None,
                endpoints(CROWD_TARGET_PORT)
            ),
        ];
        service(name, index, &self.families(), ports)
    }
}

fn port(
    name: &str,
    protocol: Protocol,
    port: u16,
    node_port: Option<u16>,
    endpoints: Vec<Endpoint>,
) -> ServicePort {
    ServicePort {
        name: name.into(),
        node_port,
        endpoints,
        ..ServicePort::new(port, protocol)
    }
}

fn service(
    name: &str,
    index: u32,
    families: &[bool],
    ports: SmallVec<[ServicePort; 1]>,
) -> Service {
    let node_port = ports.iter().any(|port| port.node_port.is_some());
    Service {
        created: Some(1_700_000_000),
        cluster_ips: families.iter().map(|v4| vip(index, *v4)).collect(),
        ports,
        ..Service::new(
            ServiceName::new("bench", name),
            if node_port {
                ServiceType::NodePort
            } else {
                ServiceType::ClusterIp
            },
        )
    }
}

fn vip(index: u32, v4: bool) -> IpAddr {
    // The first 256 addresses of a service network are reserved for the cluster's own services.
    host(
        if v4 {
            SERVICES_V4.into()
        } else {
            SERVICES_V6.into()
        },
        256 + index,
    )
}

/// Returns endpoints on other nodes. They do not exist, and no client connects to them.
fn elsewhere(index: u32, families: impl Iterator<Item = bool>) -> Vec<Endpoint> {
    // Pods of a /16. If there are more endpoints than addresses, each pod has several ports.
    const PODS: u32 = 60_000;
    let mut endpoints: Vec<_> = families
        .flat_map(|v4| {
            let network = if v4 { PODS_V4.into() } else { PODS_V6.into() };
            (index * ENDPOINTS..(index + 1) * ENDPOINTS).map(move |number| {
                let port = TARGET_PORT + u16::try_from(number / PODS).unwrap_or(0);
                endpoint(host(network, 4096 + number % PODS), port, false)
            })
        })
        .collect();
    endpoints.sort();
    endpoints
}

fn endpoint(addr: IpAddr, port: u16, local: bool) -> Endpoint {
    Endpoint {
        local,
        ..Endpoint::new(addr, port)
    }
}

fn host(network: IpNet, number: u32) -> IpAddr {
    match network.network() {
        IpAddr::V4(base) => Ipv4Addr::from_bits(base.to_bits() + number).into(),
        IpAddr::V6(base) => Ipv6Addr::from_bits(base.to_bits() + u128::from(number)).into(),
    }
}
