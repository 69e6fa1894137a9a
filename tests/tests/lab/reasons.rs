//! `dataplane explain` and the programs, for every reason: both judge the same packet.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    packet::{FlowKey, PacketConfig, Translation, need},
    seen,
};
use dataplane_proof::wire::{Packet, Payload, flags};
use dataplane_tests::{Host, Lab};
use kernel::{
    conntrack::{Conntrack, Flow, now},
    packet::PacketTables,
};

use crate::{
    cluster::{Cluster, TCP, eventually},
    explain::packet_reason,
    manifest::{Config, Service},
    sockets::{address, inject, link},
    ways::{forgotten, narrow},
};

scenarios! {
    Dataplane:
    explain_gives_the_programs_reasons,
}

/// The scenario that compares `explain` with the programs for a reason.
#[derive(Debug, PartialEq, Eq)]
enum Compared {
    /// This one.
    Here,
    /// Another one, by its name.
    By(&'static str),
    /// None, for this reason.
    Not(&'static str),
}

/// A new reason does not compile before it has its place here.
const fn compared(reason: Reason) -> Compared {
    use Compared::{By, Here, Not};
    match reason {
        Reason::Translated
        | Reason::Kept
        | Reason::NoEndpoints
        | Reason::NoLocalEndpoint
        | Reason::PortNotServed
        | Reason::Masqueraded
        | Reason::SourceDenied
        | Reason::PortsExhausted
        | Reason::NoRoute
        | Reason::NoNodeAddress
        | Reason::TooBig
        | Reason::ConntrackFull
        | Reason::PortTaken
        | Reason::IpsecPolicy
        | Reason::SourceForged => Here,
        Reason::EgressDenied => By("capture::packets::unknown_destinations_are_refused_at_once"),
        Reason::Captured
        | Reason::CapturedInbound
        | Reason::ExcludedLoopback
        | Reason::ExcludedPort
        | Reason::ExcludedRange
        | Reason::ExcludedUser
        | Reason::Recursive => By("capture::explain::explain_says_which_rule_decides"),
        Reason::Direct | Reason::ExcludedInterface | Reason::ProxyDown | Reason::ProxyBypassed => {
            By("capture::explain::explain_says_what_becomes_of_connections_without_a_proxy")
        }
        Reason::Guarded => By("capture::explain::explain_and_status_work_without_the_agent"),
        Reason::ToNode => {
            By("capture::deny::one_captured_by_packets_does_not_reach_the_node_itself")
        }
        Reason::Unsupported => By("capture::istio::services_with_a_waypoint_are_named_and_refused"),
        Reason::PolicyDenied => By("capture::by_kernel::policies_hold_without_a_proxy"),
        Reason::CapturedDns => By("dns_capture::queries_are_answered_in_the_name_of_the_resolver"),
        Reason::DnsBypassed => By("dns_capture::no_query_waits_for_an_agent_that_hangs"),
        Reason::PlaintextRefused => {
            Not("the service changes between two programs of one connect()")
        }
        Reason::ExcludedProbe => Not("explain does not know the cgroup of a process on the node"),
        Reason::ProxysOwn => Not("the proxy is no workload"),
        Reason::NotService | Reason::ForeignFlow => {
            Not("the packet programs do not count packets that they leave alone")
        }
        Reason::Dangling => Not("the tables contradict each other only by a bug"),
        Reason::FlowBusy | Reason::Preempted | Reason::OriginLost => {
            Not("it depends on what other CPUs do at the same moment")
        }
        Reason::UnknownFlow
        | Reason::UnknownFragment
        | Reason::CapturedFragment
        | Reason::Malformed
        | Reason::SourceRouted
        | Reason::TimeExceeded => {
            Not("it depends on bytes of the packet that explain does not ask for")
        }
        Reason::AffinityFull
        | Reason::PeerNotKept
        | Reason::FlowForgotten
        | Reason::FlowPushedOut => Not("it is counted beside the decision about the packet"),
        Reason::ReplyTranslated | Reason::ErrorTranslated | Reason::ErrorLimited => {
            Not("it is about an answer, or about an error that follows a decision")
        }
    }
}

/// The ports of the node for the services.
const WEB: u16 = 30_080;
const NOBODY: u16 = 30_081;
const LOCAL: u16 = 30_082;
const ELSEWHERE: u16 = 30_083;
const STICKY: u16 = 30_084;
const LATE: u16 = 30_085;

/// The endpoint of the service `late`.
const LATE_ENDPOINT: &str = "fd00:10:244:2::77";

fn services(lab: &Lab) -> Vec<Service> {
    let (far, near) = ([lab.pod("far")], [lab.pod("near")]);
    let service = |name: &str, number: u16, node_port: u16| {
        let vip = format!("10.96.0.{number}");
        let service = Service::new(name, &[vip.as_str()]);
        service.node_port("tcp", 80, TCP, node_port)
    };
    let local = |service: Service| service.set("externalTrafficPolicy", "Local");
    vec![
        service("web", 10, WEB).endpoints(&far),
        service("nobody", 11, NOBODY),
        local(service("local", 12, LOCAL)).endpoints(&near),
        local(service("elsewhere", 13, ELSEWHERE)).endpoints(&far),
        local(service("sticky", 14, STICKY))
            .affinity(600)
            .endpoints(&near),
        Service::new("ranged", &["10.96.0.15"])
            .port("tcp", 80, TCP)
            .load_balancer("203.0.113.15")
            .set("loadBalancerSourceRanges", vec!["198.51.100.0/24"])
            .endpoints(&far),
        Service::new("late", &["fd00:96::16"])
            .node_port("tcp", 80, TCP, LATE)
            .endpoint_at(
                LATE_ENDPOINT.parse().expect("an address of this file"),
                "node2",
            ),
    ]
}

/// Packets from `ext` to node2, and the reasons that both sides have given.
struct Comparison<'a> {
    cluster: &'a Cluster,
    reasons: BTreeSet<Reason>,
}

impl Comparison<'_> {
    fn node(&self) -> &Host {
        self.cluster.lab.node("node2")
    }

    fn ext(&self) -> &Host {
        self.cluster.lab.external("ext")
    }

    /// A client's address at a port.
    fn client(&self, port: u16) -> SocketAddr {
        SocketAddr::new(address(self.ext(), true), port)
    }

    fn node_port(&self, port: u16) -> SocketAddr {
        SocketAddr::new(address(self.node(), true), port)
    }

    fn explained(&self, from: SocketAddr, to: SocketAddr, length: usize) -> Result<String> {
        packet_reason(&self.cluster.agent, "eth0", from, &to.to_string(), length)
    }

    /// Waits until `explain` gives a reason, after a change that the agent makes known to the programs.
    fn becomes(&self, reason: Reason, from: SocketAddr, to: SocketAddr) -> Result<()> {
        eventually(|| {
            let explained = self.explained(from, to, 0)?;
            ensure!(explained == reason.word(), "explained as {explained}");
            Ok(())
        })
    }

    /// Asks for a SYN of this length, 0: the headers' alone, and has it arrive.
    fn agree(
        &mut self,
        reason: Reason,
        from: SocketAddr,
        to: SocketAddr,
        length: usize,
    ) -> Result<()> {
        let what = || format!("{from} to {to}, for {}", reason.word());
        let explained = self.explained(from, to, length).with_context(what)?;
        ensure!(
            explained == reason.word(),
            "{}: explained as {explained}",
            what()
        );
        let headers = if from.is_ipv4() { 40 } else { 60 };
        let payload = Payload::Tcp {
            ports: [from.port(), to.port()],
            flags: flags::SYN,
            options: Vec::new(),
            data: vec![0; length.saturating_sub(headers)],
        };
        let syn = Packet {
            link: [link(self.node(), "eth0")?, link(self.ext(), "eth0")?],
            whole: true,
            ..Packet::new(from.ip(), to.ip(), payload)
        };
        let send = || inject(self.ext(), "eth0", &[syn.frame()]);
        let counted = self.cluster.for_reason(reason, 1, send);
        counted.with_context(what)?;
        self.reasons.insert(reason);
        Ok(())
    }
}

fn explain_gives_the_programs_reasons() -> Result<()> {
    let config = Config::new("packets: {path: fast, conntrackFlows: 131072}")?;
    let lab = Cluster::lab_of_packets()?;
    let cluster = Cluster::start_in(lab, &["far", "near"], services, &config.arguments())?;
    let mut both = Comparison {
        cluster: &cluster,
        reasons: BTreeSet::new(),
    };
    let mut wanted: BTreeSet<Reason> = Reason::ALL.iter().copied().collect();
    wanted.retain(|reason| compared(*reason) == Compared::Here);
    for reason in Reason::ALL {
        if let Compared::By(scenario) = compared(*reason) {
            let is_there = crate::ALL.concat().iter().any(|of| of.is(scenario));
            ensure!(is_there, "{}: no scenario is {scenario}", reason.word());
        }
    }
    // Before there are flows, whose packets the policy would refuse, too.
    if let Err(error) = both.node().ip("xfrm policy") {
        println!("skipped in part: this kernel takes no IPsec policies: {error:#}");
        wanted.remove(&Reason::IpsecPolicy);
    } else {
        policy(&mut both)?;
    }
    decisions(&mut both)?;
    no_address(&mut both)?;
    routes(&mut both)?;
    tables(&mut both)?;
    ensure!(both.reasons == wanted, "{:?}, not {wanted:?}", both.reasons);
    Ok(())
}

/// A policy that protects packets from the client to the endpoint.
fn policy(both: &mut Comparison<'_>) -> Result<()> {
    let (from, to) = (both.client(4000), both.node_port(WEB));
    let ends = format!("src {}/32 dst 10.244.1.0/24 dir fwd", from.ip());
    let template = "tmpl src 192.168.77.2 dst 192.168.77.1 proto esp mode tunnel";
    both.node()
        .ip(&format!("xfrm policy add {ends} {template}"))?;
    both.becomes(Reason::IpsecPolicy, from, to)?;
    both.agree(Reason::IpsecPolicy, from, to, 0)?;
    both.node().ip(&format!("xfrm policy delete {ends}"))?;
    both.becomes(Reason::Masqueraded, from, to)
}

/// Services, pools, source ranges, and the packet's source.
fn decisions(both: &mut Comparison<'_>) -> Result<()> {
    let gateway = both.cluster.lab.pod("near").gateway4();
    for (reason, from, to) in [
        (Reason::Masqueraded, both.client(4001), both.node_port(WEB)),
        (Reason::Translated, both.client(4002), both.node_port(LOCAL)),
        (
            Reason::NoEndpoints,
            both.client(4003),
            both.node_port(NOBODY),
        ),
        (
            Reason::NoLocalEndpoint,
            both.client(4004),
            both.node_port(ELSEWHERE),
        ),
        (
            Reason::PortNotServed,
            both.client(4005),
            "10.96.0.10:81".parse()?,
        ),
        (
            Reason::SourceDenied,
            both.client(4006),
            "203.0.113.15:80".parse()?,
        ),
        (
            Reason::Translated,
            both.client(4007),
            both.node_port(STICKY),
        ),
        (Reason::Kept, both.client(4008), both.node_port(STICKY)),
        (
            Reason::SourceForged,
            (gateway, 4009).into(),
            both.node_port(WEB),
        ),
    ] {
        both.agree(reason, from, to, 0)?;
    }
    Ok(())
}

/// The interface towards the endpoint has no address while its only one is tentative.
fn no_address(both: &mut Comparison<'_>) -> Result<()> {
    let (node, near) = (both.node(), both.cluster.lab.pod("near"));
    node.ip("link add veth-late type veth peer name late0")?;
    node.ip(&format!("link set late0 netns {}", near.netns()))?;
    near.ip("link set late0 up")?;
    // The kernel asks for duplicates once a second.
    for (key, value) in [("accept_dad", "1"), ("dad_transmits", "600")] {
        node.sysctl(&format!("ipv6/conf/veth-late/{key}"), value)?;
    }
    node.ip("link set veth-late up")?;
    node.ip("-6 addr add fd99::1/64 dev veth-late")?;
    node.ip(&format!("-6 route add {LATE_ENDPOINT}/128 dev veth-late"))?;
    let from = SocketAddr::new(address(both.ext(), false), 4000);
    let to = SocketAddr::new(address(node, false), LATE);
    both.becomes(Reason::NoNodeAddress, from, to)?;
    both.agree(Reason::NoNodeAddress, from, to, 0)
}

/// No route to the endpoint, and a route for short packets alone.
fn routes(both: &mut Comparison<'_>) -> Result<()> {
    let route = "10.244.1.0/24 via 192.168.77.1";
    let to = both.node_port(WEB);
    both.node().ip(&format!("route del {route}"))?;
    forgotten();
    both.agree(Reason::NoRoute, both.client(4010), to, 0)?;
    both.node().ip(&format!("route add {route}"))?;
    narrow(both.node())?;
    both.agree(Reason::Masqueraded, both.client(4011), to, 1400)?;
    both.agree(Reason::TooBig, both.client(4012), to, 1401)
}

/// A flow that is established, used a moment ago.
fn established(client: SocketAddr, vip: SocketAddr, endpoint: SocketAddr) -> Flow {
    let end = |of: SocketAddr| (Addr::from(of.ip()), Port::new(of.port()));
    let ((src, src_port), (dst, dst_port)) = (end(client), end(vip));
    let (endpoint, endpoint_port) = end(endpoint);
    Flow {
        key: FlowKey::new(src, src_port, dst, dst_port, Protocol::TCP),
        to: Translation {
            endpoint,
            endpoint_port,
            node_port: Port::ANY,
            used: now(),
            seen: seen::PACKET | seen::in_replies(seen::PACKET) | seen::ASSURED,
            node_addr: 0,
        },
    }
}

/// Tables that other flows fill: ports of the client, ports of the node, and cells.
fn tables(both: &mut Comparison<'_>) -> Result<()> {
    let conntrack = Conntrack::open(both.cluster.agent.bpffs())?.context("tables of flows")?;
    let (mut flows, mut batch) = (conntrack.flows(), Vec::new());
    while flows.read(&mut batch) {
        for flow in &batch {
            conntrack.remove_if(flow, |_| true);
        }
    }
    let end = |host: &Host| SocketAddr::new(address(host, true), TCP);
    let far = end(both.cluster.lab.pod("far"));
    // All ports that a client at a port below 512 may have (`nf_nat_l4proto_unique_tuple`).
    for port in 1..512 {
        let flow = established(both.client(port), "10.96.0.10:80".parse()?, far);
        ensure!(conntrack.add(&flow), "the client's port {port}");
    }
    both.agree(Reason::PortTaken, both.client(100), far, 0)?;
    fill_ports(both, &conntrack, far)?;
    both.agree(
        Reason::PortsExhausted,
        both.client(4013),
        both.node_port(WEB),
        0,
    )?;
    let near = end(both.cluster.lab.pod("near"));
    let without_room = fill_cells(both, &conntrack, near)?;
    both.agree(
        Reason::ConntrackFull,
        without_room,
        both.node_port(LOCAL),
        0,
    )
}

/// Fills the ports of the node towards an endpoint, with flows of as many clients.
fn fill_ports(both: &Comparison<'_>, conntrack: &Conntrack, endpoint: SocketAddr) -> Result<()> {
    let config = PacketTables::open(both.cluster.agent.bpffs())?.config();
    let own = Addr::from(address(both.node(), true));
    let node_addr = (1..=u8::MAX).find(|index| conntrack.node_addr(*index) == Some(own));
    let node_addr = node_addr.context("an address of the node")?;
    let is_flows = |port: &u16| !config.avoids(*port, Protocol::TCP, need::ALL);
    for port in (PacketConfig::FIRST_PORT..=u16::MAX).filter(is_flows) {
        let [high, low] = port.to_be_bytes();
        let client = SocketAddr::from(([100, 64, high, low], port));
        let mut flow = established(client, both.node_port(WEB), endpoint);
        (flow.to.node_addr, flow.to.node_port) = (node_addr, Port::new(port));
        // A flow that is not added finds its slot taken: no other flow gets this port, either.
        conntrack.add(&flow);
    }
    Ok(())
}

/// Fills nearly all cells, with flows of as many clients. Returns a client whose next flow finds none.
fn fill_cells(
    both: &Comparison<'_>,
    conntrack: &Conntrack,
    endpoint: SocketAddr,
) -> Result<SocketAddr> {
    let to = both.node_port(LOCAL);
    let mut refused = 0;
    for number in 0..4_000_000_u32 {
        let client = IpAddr::from((0x0b00_0000 + number).to_be_bytes());
        let flow = established(SocketAddr::new(client, 40_000), to, endpoint);
        refused = if conntrack.add(&flow) { 0 } else { refused + 1 };
        if refused == 100 {
            break;
        }
    }
    ensure!(refused == 100, "the table takes any number of flows");
    for port in 20_000..21_000 {
        let flow = established(both.client(port), to, endpoint);
        if !conntrack.add(&flow) {
            return Ok(both.client(port));
        }
    }
    anyhow::bail!("all flows of a client find room")
}
