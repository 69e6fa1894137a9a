//! The same small cluster again and again, with another worker on its node1 each time.

use std::{cell::Cell, collections::BTreeMap, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use dataplane_peers::{Cluster, LocalDetector, Mode};
use dataplane_tests::{
    Agent, Host, Lab, Process, Role, emulated,
    report::{Flow, Report},
};
use model::Node;
use source::manifests;

use super::case::{Case, Seen};
use crate::{
    cluster,
    manifest::{Config, Manifests, Service},
};

/// The worker that serves node1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worker {
    /// The rules that kube-proxy would write.
    KubeProxy(Mode),
    /// Our agent and its programs. The agent chooses the path of packets: the fast one, unless the node has rules.
    Dataplane,
    /// Our agent and its programs, by the path through the stack.
    Stack,
    /// Likewise, on a node that [drops](be_strict) what its kernel does not understand.
    Strict,
}

/// How hard a client tries.
#[derive(Debug, Clone, Copy)]
pub struct Tries {
    /// How often.
    pub count: u32,
    /// How long it waits for an answer.
    pub timeout_ms: u64,
    /// After how many of these it gives up.
    pub timeouts: u32,
}

impl Tries {
    /// If chance misses one of two endpoints, the flow is tried again.
    pub const FEW: Self = Self {
        count: 10,
        timeout_ms: 300,
        timeouts: 3,
    };
    /// For flows that seem to differ.
    pub const MANY: Self = Self {
        count: 48,
        timeout_ms: 700,
        timeouts: 10,
    };
    /// For flows that still do: the machine may be very busy.
    pub const PATIENT: Self = Self {
        count: 32,
        timeout_ms: 2500,
        timeouts: 10,
    };
}

/// The settings of both workers, besides the services.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// kube-proxy's settings.
    pub cluster: Cluster,
    /// These settings as arguments of `dataplane run`.
    pub arguments: Vec<&'static str>,
    /// Further settings of the agent, as the text of a configuration file.
    pub config: &'static str,
    /// Another address of node1's uplink.
    pub second_address: Option<&'static str>,
}

/// Networks that lead to node1 from everywhere in the lab.
const VIPS: [&str; 3] = ["10.96.0.0/12", "203.0.113.0/24", "198.51.100.0/24"];
const VIPS6: [&str; 3] = ["fd00:10:96::/108", "2001:db8:113::/64", "2001:db8:100::/64"];
/// The hosts that serve as endpoints: three pods on node1, one on node2, and the nodes themselves.
const SERVERS: [&str; 6] = ["e1", "e2", "e3", "vm", "node1", "node2"];

/// The ports that clients use.
const PORTS: std::ops::Range<u16> = 32_768..61_000;

/// The networks of the lab's pods.
pub fn pod_networks() -> LocalDetector {
    LocalDetector::Networks(
        ["10.244.0.0/16", "fd00:10:244::/48"]
            .map(|net| net.parse().expect("a network"))
            .into(),
    )
}

impl Settings {
    /// Settings that recognise pods by their addresses.
    pub fn base() -> Self {
        Self {
            cluster: Cluster {
                local: pod_networks(),
                service_networks: [VIPS[0], VIPS6[0]]
                    .map(|net| net.parse().expect("a network"))
                    .into(),
                ..Cluster::default()
            },
            arguments: cluster::POD_CIDRS.to_vec(),
            ..Self::default()
        }
    }
}

/// The lab: endpoints `e1` and `e2` on node1 and `e3` on node2; the clients `vm` (of which node1's programs see packets
/// only) and `pod` (whose sockets they see) on node1 and `far` on node2; `ext` and `ext2` outside. `world` is where
/// node1's default route leads: it accepts every packet and answers none.
pub fn lab() -> Result<Lab> {
    let lab = Lab::builder()
        .node("node1")
        .node("node2")
        .pod("node1", "e1", "10.244.1.101")
        .pod("node1", "e2", "10.244.1.102")
        .pod("node2", "e3", "10.244.2.103")
        .vm("node1", "vm", "10.244.1.10")
        .pod("node1", "pod", "10.244.1.11")
        .pod("node2", "far", "10.244.2.10")
        .external("ext")
        .external("ext2")
        .external("world")
        .build()?;
    let node1 = lab.node("node1");
    let world = lab.external("world");
    node1.ip(&format!("route add default via {}", world.ipv4()))?;
    node1.ip(&format!("-6 route add default via {}", world.ipv6()))?;
    // The pod e2 refuses packets to a port without a listener.
    for host in [node1, lab.pod("e2")] {
        unlimited_icmp(host)?;
    }
    // Without these routes it would answer that there is no route.
    world.ip("route add blackhole default")?;
    world.ip("-6 route add blackhole default")?;
    let others = [lab.node("node2"), lab.external("ext"), lab.external("ext2")];
    for host in others {
        // A node that forwards packets by the link at which they came sends redirects to a shorter route, which
        // bypasses the translation.
        host.sysctl("ipv4/conf/all/accept_redirects", "0")?;
        host.sysctl("ipv4/conf/eth0/accept_redirects", "0")?;
        for (net, net6) in VIPS.iter().zip(VIPS6) {
            host.ip(&format!("route add {net} via {}", node1.ipv4()))?;
            host.ip(&format!("-6 route add {net6} via {}", node1.ipv6()))?;
        }
    }
    Ok(lab)
}

/// Turns off a host's limits of ICMP errors. By default, the kernel sends about six errors to another host at once, and
/// then one in a second.
pub fn unlimited_icmp(node: &Host) -> Result<()> {
    node.sysctl("ipv4/icmp_ratemask", "0")?;
    node.sysctl("ipv4/icmp_ratelimit", "0")?;
    // A list of types; that of unreachable destinations is 1.
    node.sysctl("ipv6/icmp/ratemask", "0")?;
    node.sysctl("ipv6/icmp/ratelimit", "0")?;
    Ok(())
}

/// A lab at work. The fields are dropped in this order.
pub struct World {
    pub agent: Option<Agent>,
    /// The services' file, if the world wrote it.
    manifests: Option<Manifests>,
    _servers: Vec<Process>,
    pub lab: Lab,
    /// The port of a client's next attempt. Flows from one port of a client through two VIPs to one endpoint would be
    /// in each other's way, with kube-proxy and with the dataplane.
    next_port: Cell<u16>,
}

impl World {
    /// Builds the lab and has `worker` serve the services that `services` makes for it.
    pub fn start(
        worker: Worker,
        settings: &Settings,
        services: &dyn Fn(&Lab) -> Vec<Service>,
    ) -> Result<Self> {
        let lab = lab()?;
        if let Some(address) = settings.second_address {
            let add = format!("addr add {address} dev eth0");
            lab.node("node1").ip(&add)?;
        }
        let manifests = Manifests::new(&services(&lab))?;
        let servers = SERVERS
            .iter()
            .filter_map(|name| lab.hosts().iter().find(|host| host.name() == *name))
            .map(cluster::serve)
            .collect::<Result<_>>()?;
        let path = manifests.path();
        let mut world = Self::start_in(lab, worker, settings, &path, servers)?;
        world.manifests = Some(manifests);
        Ok(world)
    }

    /// As [`World::start`], in an existing lab, with these manifests and servers; the lab's first node is served.
    pub fn start_in(
        lab: Lab,
        worker: Worker,
        settings: &Settings,
        manifests: &Path,
        servers: Vec<Process>,
    ) -> Result<Self> {
        let mut hosts = lab.hosts().iter();
        let node = hosts.find(|host| host.role() == Role::Node);
        let node = node.context("a node")?;
        let agent = match worker {
            Worker::KubeProxy(mode) => {
                if mode != Mode::Nftables {
                    // As kube-proxy does for node ports on loopback.
                    node.sysctl("ipv4/conf/all/route_localnet", "1")?;
                }
                load_rules(node, mode, manifests, &settings.cluster)?;
                None
            }
            Worker::Dataplane | Worker::Stack | Worker::Strict => {
                if worker == Worker::Strict {
                    be_strict(node)?;
                }
                let agent = lab.agent(node.name()).manifests(manifests);
                let config = Config::new(settings.config)?;
                let agent = agent.args(config.arguments()).args(&settings.arguments);
                let is_through_stack = worker != Worker::Dataplane;
                let path = is_through_stack.then_some(["--packet-path", "stack"]);
                Some(agent.args(path.into_iter().flatten()).start()?)
            }
        };
        Ok(Self {
            agent,
            manifests: None,
            _servers: servers,
            lab,
            next_port: Cell::new(PORTS.start),
        })
    }

    /// Returns the dataplane's agent, if there is one.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// Returns a host by its name, of any role.
    pub fn host(&self, name: &str) -> &Host {
        let hosts = self.lab.hosts();
        hosts
            .iter()
            .find(|host| host.name() == name)
            .unwrap_or_else(|| panic!("this lab has no {name}"))
    }

    /// Has every case's client try it so many times.
    pub fn see(&self, cases: &[Case], tries: Tries) -> Result<Vec<Seen>> {
        // So many at a time that waits for no answer delay no other client, and so few that the others are answered in
        // time.
        let parallel = if emulated() { 12 } else { 64 };
        let reports = self.reports(cases, tries, parallel)?;
        Ok(reports.iter().map(Seen::of).collect())
    }

    /// As [`World::see`], with so many flows of each client at one time, and with every attempt.
    pub fn reports(&self, cases: &[Case], tries: Tries, parallel: usize) -> Result<Vec<Report>> {
        let mut by_client: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (number, case) in cases.iter().enumerate() {
            by_client.entry(&case.client).or_default().push(number);
        }
        let mut clients = vec![];
        let first_port = self.next_port.get();
        for (name, numbers) in by_client {
            let flows: Vec<Flow> = numbers
                .iter()
                .map(|number| Flow {
                    to: cases[*number].to,
                    udp: cases[*number].udp,
                    count: tries.count,
                    timeout_ms: tries.timeout_ms,
                    timeouts: tries.timeouts,
                    from_port: cases[*number].from_port,
                })
                .collect();
            let probe = self.host(name).probe("flows");
            let probe = probe.args(["--parallel", &parallel.to_string()]);
            let probe = probe.args(["--first-port", &first_port.to_string()]);
            let mut process = probe.stdin_piped().stdout_piped().spawn()?;
            process.send_line(&serde_json::to_string(&flows)?)?;
            process.close_stdin();
            clients.push((numbers, process));
        }
        let mut all: BTreeMap<usize, Report> = BTreeMap::new();
        let mut most = 0;
        for (numbers, process) in clients {
            let reports: Vec<Report> = process.wait_json()?;
            let used: u64 = reports.iter().map(|report| report.attempts + 2).sum();
            most = most.max(used);
            all.extend(numbers.into_iter().zip(reports));
        }
        let next = first_port.saturating_add(u16::try_from(most).unwrap_or(u16::MAX));
        let next = if PORTS.contains(&next) {
            next
        } else {
            PORTS.start
        };
        self.next_port.set(next);
        Ok(all.into_values().collect())
    }
}

/// Has a node drop packets whose source its routes do not lead back to, and packets that fit no flow of its kernel's
/// conntrack. The packets of a service pass only if the kernel sees one flow between the client and the endpoint.
pub fn be_strict(node: &Host) -> Result<()> {
    node.sysctl("ipv4/conf/all/rp_filter", "1")?;
    let hook = |hook: &str| {
        format!(
            "chain {hook} {{ type filter hook {hook} priority mangle; ct state invalid counter drop; }}\n"
        )
    };
    let chains = ["prerouting", "forward", "postrouting"].map(hook).concat();
    let rules = format!("table inet strict {{\n{chains}}}");
    node.command("nft").arg(&rules).run()?;
    Ok(())
}

/// Loads kube-proxy's rules for manifests into a node.
pub fn load_rules(node: &Host, mode: Mode, manifests: &Path, cluster: &Cluster) -> Result<()> {
    let about = Node {
        name: node.name().into(),
        addresses: node.addresses().into(),
        ..Node::default()
    };
    let loaded = manifests::load(&[manifests.to_owned()], &about)
        .map_err(|errors| anyhow::anyhow!("{errors}"))?;
    let snapshot = model::Snapshot {
        node: Arc::new(about),
        ..loaded.snapshot
    };
    for load in dataplane_peers::rules(mode, &snapshot, cluster) {
        load.run(|program| {
            let mut command = std::process::Command::new("ip");
            command.args(["netns", "exec", node.netns(), program]);
            command
        })
        .with_context(|| format!("{mode} on {}", node.name()))?;
    }
    Ok(())
}
