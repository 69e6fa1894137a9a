//! A node that serves the tenants' objects.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use dataplane_common::{
    Port, decide,
    tables::{Frontend, FrontendKey, Kind},
};
use dataplane_plan::{Planner, entries::Entries};
use model::{
    Entry, EntryName, EntryResolution, Names, Protocol, Service, ServiceName, ServiceType, Snapshot,
};
use source::{Admitted, ExternalIps};

use super::{
    super::{
        oracle,
        properties::reconcile_within,
        sim::{Resolved, Sim},
    },
    HOSTILE, NOW, ROOM,
    steps::{OF_AGENT, RESERVED, Step, of_cluster},
};

/// A node: its planner, its tables, and their wanted contents.
pub struct Node {
    pub planner: Planner,
    pub sim: Sim,
    admits: ExternalIps,
    admitted: Admitted,
    joined: Entries,
    /// The objects of the source.
    pub said: Snapshot,
    /// The snapshot that is served.
    pub snapshot: Snapshot,
}

fn admitted(admits: &ExternalIps) -> Admitted {
    Admitted::new(admits.clone()).with_reserved_ports(RESERVED.to_vec())
}

impl Node {
    pub fn new(admits: &ExternalIps) -> Self {
        let of_cluster = of_cluster().map(|service| (service.name.clone(), Arc::new(service)));
        Self {
            planner: Planner::new().with_room(ROOM),
            sim: Sim::default(),
            admits: admits.clone(),
            admitted: admitted(admits),
            joined: Entries::new([]),
            said: Snapshot {
                services: of_cluster.into_iter().collect(),
                ..Snapshot::default()
            },
            snapshot: Snapshot::default(),
        }
    }

    pub fn put(&mut self, name: EntryName, entry: Option<&Entry>) {
        match entry {
            Some(entry) => {
                let entry = Entry {
                    name: name.clone(),
                    ..entry.clone()
                };
                self.said.entries.insert(name, Arc::new(entry));
            }
            None => _ = self.said.entries.remove(&name),
        }
    }

    pub fn take(&mut self, step: &Step) {
        if step.restart {
            self.sim.grace();
            let adopted = Planner::adopt(self.sim.contents()).expect("consistent tables");
            self.planner = adopted.with_room(ROOM);
            self.joined = Entries::new(self.joined.records());
            self.admitted = admitted(&self.admits);
        }
        let node = Arc::make_mut(&mut self.said.node);
        node.own.clone_from(&node.addresses);
        let (services, _) = self.admitted.take(&self.said.services, &self.said.node);
        let (entries, _) = self.admitted.take_entries(&self.said.entries);
        let taken = self.joined.take(&entries, &services, &self.said, NOW);
        self.snapshot = Snapshot {
            services: taken.services,
            entries: taken.entries,
            ..self.said.clone()
        };
        reconcile_within(ROOM, &mut self.planner, &mut self.sim, &self.snapshot);
        if step.grace {
            self.sim.grace();
            self.planner.grace_passed();
        }
    }

    /// Returns the addresses assigned to hosts. Another node may have assigned others.
    pub fn given(&self) -> BTreeSet<IpAddr> {
        let services = self.snapshot.services.values();
        let entries = services.filter(|service| service.kind == ServiceType::Entry);
        entries
            .flat_map(|entry| entry.cluster_ips.clone())
            .collect()
    }

    /// Returns the answers of the ports of the other tenants' hosts, at their assigned addresses.
    pub fn hosts(&self) -> BTreeMap<(EntryName, Arc<str>, bool, u16), Option<Resolved>> {
        let mut found = BTreeMap::new();
        for entry in self.snapshot.entries.values() {
            if entry.name.namespace() == HOSTILE || entry.resolution == EntryResolution::None {
                continue;
            }
            let mine = entry.addresses.iter().collect::<BTreeSet<_>>();
            for host in &entry.hosts {
                for vip in host.vips.iter().filter(|vip| !mine.contains(vip)) {
                    for port in &entry.ports {
                        let protocol = oracle::protocol(port.protocol);
                        let key = FrontendKey::new((*vip).into(), Port::new(port.port), protocol);
                        let now = self.sim.keys.get(&key);
                        let name = (
                            entry.name.clone(),
                            Arc::clone(&host.name),
                            vip.is_ipv4(),
                            port.port,
                        );
                        found.insert(name, now.map(|frontend| self.sim.resolve(*frontend)));
                    }
                }
            }
        }
        found
    }

    /// Returns the DNS answers for the other tenants' services.
    pub fn names(&self) -> (Vec<Arc<Service>>, Vec<BTreeSet<ServiceName>>) {
        let names = Names::of(&self.snapshot);
        let others = (self.said.services.keys()).filter(|name| name.namespace() != HOSTILE);
        let found: Vec<_> = others
            .filter_map(|name| names.service(name.namespace(), name.name()).cloned())
            .collect();
        let addresses = found.iter().flat_map(|service| service.cluster_ips.clone());
        let pointers = addresses.map(|addr| {
            let services = names.of_address(addr).map(|service| service.name.clone());
            services
                .filter(|name| name.namespace() != HOSTILE)
                .collect()
        });
        let pointers = pointers.collect();
        (found, pointers)
    }

    /// Returns the entries that decide about names by which a client with a search list also asks for the other tenants'
    /// services, and about names that resolvers answer themselves: by the client's namespace and the name.
    pub fn short_names(&self) -> BTreeMap<(&'static str, String), Option<EntryName>> {
        let names = Names::of(&self.snapshot);
        let mut asked = BTreeSet::new();
        for client in ["test", "other", "third"] {
            asked.extend(
                ["web", "wpad", "localhost", "db.localhost", "db.invalid"]
                    .map(|name| (client, name.to_owned())),
            );
            for service in self.said.services.keys() {
                let (name, of) = (service.name(), service.namespace());
                if of == HOSTILE {
                    continue;
                }
                let own = (of == client).then(|| name.to_owned());
                let others = [format!("{name}.{of}"), format!("{name}.{of}.svc")];
                for form in others.into_iter().chain(own) {
                    asked.insert((client, format!("pod.{form}")));
                    asked.insert((client, form));
                }
            }
        }
        let decided = asked.into_iter().map(|(client, name)| {
            let found = names.host(&name, client, None);
            let found = found.map(|(entry, _)| entry.name.clone());
            ((client, name), found)
        });
        decided.collect()
    }

    fn find(&self, addr: IpAddr, port: u16, protocol: Protocol) -> Frontend {
        let (port, protocol) = (Port::new(port), oracle::protocol(protocol));
        decide::find_frontend(&self.sim, addr.into(), port, protocol, true)
    }

    /// Returns the endpoints to which the agent's own sockets connect; `None`: they connect to the destination itself. The
    /// programs translate cluster IPs for these sockets, and no other VIPs.
    pub fn of_agent(&self) -> [Option<Resolved>; OF_AGENT.len()] {
        OF_AGENT.map(|(addr, port, protocol)| {
            let frontend = self.find(addr.parse().unwrap(), port, protocol);
            (frontend.kind() == Kind::CLUSTER_IP).then(|| self.sim.resolve(frontend))
        })
    }

    /// Asserts that no service has a port that the agent listens on, at an address of the node. Cluster IPs do not count,
    /// because the API server assigns none that a node has.
    pub fn assert_agents_ports_are_free(&self) {
        let own = self.snapshot.node.own.iter().copied();
        for addr in own.chain([IpAddr::from([127, 0, 0, 1])]) {
            for (port, protocol) in RESERVED
                .into_iter()
                .flat_map(|port| [(port, Protocol::Tcp), (port, Protocol::Udp)])
            {
                let found = self.find(addr, port, protocol);
                let is_of_cluster =
                    [Kind::CLUSTER_IP, Kind::CLUSTER_ADDRESS].contains(&found.kind());
                assert!(
                    found.is_none() || is_of_cluster,
                    "{addr}, {port}: {found:?}"
                );
            }
        }
    }

    /// Returns the pools of each service, and the endpoints in them.
    pub fn sizes(&self) -> BTreeMap<ServiceName, [usize; 2]> {
        let mut sizes = BTreeMap::<_, [usize; 2]>::new();
        for (index, owner) in self.planner.served().pools_after(0) {
            let size = sizes.entry(owner.service.clone()).or_default();
            size[0] += 1;
            size[1] += self.planner.pool(index).map_or(0, |(_, pool)| pool.len());
        }
        sizes
    }

    /// Asserts that the tables hold no more for the hostile tenant than its objects' size: a key for each port at each
    /// address, a pool for each port, family and policy, and in the pools the endpoints by their weights.
    pub fn assert_bounded(&self) {
        /// Addresses of an entry's hosts: of each family, for each of five hosts, now and in each step before.
        const OF_HOSTS: usize = 2 * 5 * 10;

        if self.planner.is_waiting() {
            return; // An earlier state of an object is served.
        }
        let mut bounds = [0; 3];
        let mut add = |keys, pools, endpoints| {
            for (bound, more) in bounds.iter_mut().zip([keys, pools, endpoints]) {
                *bound += more;
            }
        };
        for service in self.said.services.values() {
            if service.name.namespace() == HOSTILE {
                let (ports, own) = (service.ports.len(), service.cluster_ips.len());
                let more = service.external_ips.len() + service.load_balancer_ips.len();
                let endpoints = service.ports.iter().map(|port| port.endpoints.len());
                let node_ports = 2;
                let keys = ports * (own + more + node_ports) + own;
                add(keys, 4 * ports + 1, 2 * endpoints.sum::<usize>());
            }
        }
        for entry in self.said.entries.values() {
            if entry.name.namespace() == HOSTILE {
                let (ports, addresses) = (entry.ports.len(), entry.addresses.len() + OF_HOSTS);
                let places = entry.backends.iter().map(|backend| backend.weight as usize);
                add(
                    (ports + 1) * addresses,
                    2 * ports + 1,
                    ports * places.sum::<usize>(),
                );
            }
        }
        let is_hostile = |frontend: &&Frontend| {
            let owner = self.planner.pool_owner(frontend.pool());
            owner.is_some_and(|owner| owner.service.namespace() == HOSTILE)
        };
        let mut taken = [self.sim.keys.values().filter(is_hostile).count(), 0, 0];
        for (name, [pools, endpoints]) in self.sizes() {
            if name.namespace() == HOSTILE {
                taken[1] += pools;
                taken[2] += endpoints;
            }
        }
        let is_within = taken
            .iter()
            .zip(&bounds)
            .all(|(taken, bound)| taken <= bound);
        assert!(is_within, "{taken:?} of {bounds:?}");
    }
}
