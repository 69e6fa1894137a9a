//! Services of every kind and policy, and every client that can reach them.

use anyhow::Result;
use dataplane_peers::{Cluster, LocalDetector};
use dataplane_tests::Lab;

use super::{
    case::{At, Case, Numbered},
    compare::Comparison,
    differences as but,
    world::Settings,
};
use crate::manifest::{Condition, Service};

scenarios! {
    Dataplane:
    who_is_masqueraded,
    who_is_masqueraded_without_a_detector,
    who_is_masqueraded_if_all_are,
    who_is_masqueraded_if_all_are_and_without_a_detector,
    who_is_masqueraded_by_interface,
    traffic_policies_and_terminating_endpoints,
    source_ranges,
    endpoints_that_are_their_own_clients_and_nodes,
    what_is_no_services,
    node_ports_on_chosen_addresses,
    source_ports,
}

const fn numbered(name: &'static str, number: u8) -> Numbered {
    Numbered { name, number }
}

/// Sets a policy to Local.
trait Local {
    fn etp_local(self) -> Self;
    fn itp_local(self) -> Self;
}

impl Local for Service {
    fn etp_local(self) -> Self {
        self.set("externalTrafficPolicy", "Local")
    }

    fn itp_local(self) -> Self {
        self.set("internalTrafficPolicy", "Local")
    }
}

/// Leaves out cases that no proxy can serve: clients in pods of node2 that are not masqueraded. An endpoint on
/// node2 answers such a client directly, past node1, which has translated the request.
fn answered_by_way_of_node1(mut cases: Vec<Case>) -> Vec<Case> {
    cases.retain(|case| {
        let unmasqueraded = |(service, at): (Numbered, At)| {
            at == At::ClusterIp || service.name.contains("etp") || service.name == "for-ext-local"
        };
        case.client != "far" || !case.service.is_some_and(unmasqueraded)
    });
    cases
}

/// kube-proxy's TestInternalExternalMasquerade: every client, every address, every policy.
fn masquerade(settings: Settings, differences: &[&but::Difference]) -> Result<()> {
    const CLUSTER: Numbered = numbered("cluster", 1);
    const ETP: Numbered = numbered("etp-local", 2);
    const ITP: Numbered = numbered("itp-local", 3);
    let all = [CLUSTER, ETP, ITP];
    let services = |lab: &Lab| {
        let endpoints = ["e1", "e3"].map(|name| lab.pod(name));
        vec![
            CLUSTER.service().endpoints(&endpoints),
            ETP.service().etp_local().endpoints(&endpoints),
            ITP.service().itp_local().endpoints(&endpoints),
        ]
    };
    let mut cases = Case::all(&["vm", "pod", "node1", "ext", "far"], &all, &At::ALL);
    cases.extend(Case::all(&["node1"], &all, &[At::Loopback]));
    let comparison = Comparison {
        settings,
        services: &services,
        cases: answered_by_way_of_node1(cases),
        differences,
    };
    comparison.run()
}

fn who_is_masqueraded() -> Result<()> {
    masquerade(
        Settings::base(),
        &[&but::OWN_ADDRESS, &but::OWN_PORT, &but::LOOPBACK],
    )
}

fn who_is_masqueraded_without_a_detector() -> Result<()> {
    masquerade(
        Settings::default(),
        &[
            &but::OWN_ADDRESS,
            &but::OWN_PORT,
            &but::FACING_ADDRESS,
            &but::LOOPBACK,
            &but::ON_THIS_NODE,
        ],
    )
}

fn who_is_masqueraded_if_all_are() -> Result<()> {
    let base = Settings::base();
    let settings = Settings {
        cluster: Cluster {
            masquerade_all: true,
            ..base.cluster
        },
        arguments: base.arguments,
        config: "packets: {masqueradeAll: true}",
        ..Settings::default()
    };
    masquerade(
        settings,
        &[&but::OWN_ADDRESS, &but::OWN_PORT, &but::LOOPBACK],
    )
}

fn who_is_masqueraded_if_all_are_and_without_a_detector() -> Result<()> {
    let settings = Settings {
        cluster: Cluster {
            masquerade_all: true,
            ..Cluster::default()
        },
        config: "packets: {masqueradeAll: true}",
        ..Settings::default()
    };
    masquerade(
        settings,
        &[
            &but::OWN_ADDRESS,
            &but::OWN_PORT,
            &but::LOOPBACK,
            &but::ON_THIS_NODE,
        ],
    )
}

fn who_is_masqueraded_by_interface() -> Result<()> {
    let settings = Settings {
        cluster: Cluster {
            local: LocalDetector::InterfacePrefix("veth-".into()),
            ..Cluster::default()
        },
        config: "packets: {podsByInterface: true}",
        ..Settings::default()
    };
    masquerade(
        settings,
        &[&but::OWN_ADDRESS, &but::OWN_PORT, &but::LOOPBACK],
    )
}

/// Endpoints here, elsewhere, nowhere, and about to go.
fn traffic_policies_and_terminating_endpoints() -> Result<()> {
    use Condition::{NotReady, Ready, ServingTerminating as Leaving};
    const NONE: Numbered = numbered("none", 11);
    const NONE_ETP: Numbered = numbered("none-etp-local", 12);
    const NONE_ITP: Numbered = numbered("none-itp-local", 13);
    const FAR_ETP: Numbered = numbered("far-etp-local", 14);
    const FAR_ITP: Numbered = numbered("far-itp-local", 15);
    const TWO_LOCAL: Numbered = numbered("two-local", 16);
    const READY_AND_LEAVING: Numbered = numbered("ready-and-leaving", 21);
    const LEAVING_HERE: Numbered = numbered("leaving-here", 22);
    const LEAVING_HERE_ETP: Numbered = numbered("leaving-here-etp-local", 23);
    const LEAVING_HERE_ITP: Numbered = numbered("leaving-here-itp-local", 24);
    const ALL_LEAVING: Numbered = numbered("all-leaving", 25);
    const LEAVING_FAR_ETP: Numbered = numbered("leaving-far-etp-local", 26);
    const NOT_READY: Numbered = numbered("not-ready", 27);
    const NOT_READY_HERE_ETP: Numbered = numbered("not-ready-here-etp-local", 28);
    let services = |lab: &Lab| {
        let with = |service: Service, endpoints: &[(&str, Condition)]| {
            (endpoints.iter()).fold(service, |service, (name, condition)| {
                service.endpoint(lab.pod(name), *condition)
            })
        };
        vec![
            NONE.service(),
            NONE_ETP.service().etp_local(),
            NONE_ITP.service().itp_local(),
            with(FAR_ETP.service().etp_local(), &[("e3", Ready)]),
            with(FAR_ITP.service().itp_local(), &[("e3", Ready)]),
            with(
                TWO_LOCAL.service().etp_local().itp_local(),
                &[("e1", Ready), ("e2", Ready), ("e3", Ready)],
            ),
            with(
                READY_AND_LEAVING.service(),
                &[("e1", Ready), ("e2", Leaving)],
            ),
            with(LEAVING_HERE.service(), &[("e1", Leaving), ("e3", Ready)]),
            with(
                LEAVING_HERE_ETP.service().etp_local(),
                &[("e1", Leaving), ("e3", Ready)],
            ),
            with(
                LEAVING_HERE_ITP.service().itp_local(),
                &[("e1", Leaving), ("e3", Ready)],
            ),
            with(ALL_LEAVING.service(), &[("e1", Leaving), ("e3", Leaving)]),
            with(LEAVING_FAR_ETP.service().etp_local(), &[("e3", Leaving)]),
            with(NOT_READY.service(), &[("e1", NotReady)]),
            with(
                NOT_READY_HERE_ETP.service().etp_local(),
                &[("e1", NotReady), ("e3", Ready)],
            ),
        ]
    };
    let all = [
        NONE,
        NONE_ETP,
        NONE_ITP,
        FAR_ETP,
        FAR_ITP,
        TWO_LOCAL,
        READY_AND_LEAVING,
        LEAVING_HERE,
        LEAVING_HERE_ETP,
        LEAVING_HERE_ITP,
        ALL_LEAVING,
        LEAVING_FAR_ETP,
        NOT_READY,
        NOT_READY_HERE_ETP,
    ];
    let comparison = Comparison {
        settings: Settings::base(),
        services: &services,
        cases: Case::all(&["vm", "node1", "ext"], &all, &At::ALL),
        differences: &[
            &but::OWN_PORT,
            &but::NOT_PERMITTED,
            &but::REFUSED_TO_NODE,
            &but::NO_LOCAL,
        ],
    };
    comparison.run()
}

/// kube-proxy's TestLoadBalancer: the clients of a load balancer's addresses.
fn source_ranges() -> Result<()> {
    const EXT: Numbered = numbered("for-ext", 31);
    const PODS: Numbered = numbered("for-pods", 32);
    const EXT4: Numbered = numbered("for-ext-v4", 33);
    const NODE: Numbered = numbered("for-node", 34);
    const NONE: Numbered = numbered("for-ext-none", 35);
    const EXT_ETP: Numbered = numbered("for-ext-local", 36);
    const WIDE: Numbered = numbered("for-many", 37);
    let services = |lab: &Lab| {
        let endpoints = ["e1", "e3"].map(|name| lab.pod(name));
        let ranges = |service: Service, ranges: &[&str]| {
            service.set("loadBalancerSourceRanges", ranges.to_vec())
        };
        let for_ext = |service| ranges(service, &[" 192.168.77.201/32", "fd77::201/128 "]);
        vec![
            for_ext(EXT.service()).endpoints(&endpoints),
            ranges(PODS.service(), &["10.244.0.0/16", "fd00:10:244::/48"]).endpoints(&endpoints),
            ranges(EXT4.service(), &["192.168.77.201/32"]).endpoints(&endpoints),
            ranges(NODE.service(), &["192.168.77.1/32", "fd77::1/128"]).endpoints(&endpoints),
            for_ext(NONE.service()),
            for_ext(EXT_ETP.service().etp_local()).endpoints(&endpoints),
            ranges(
                WIDE.service(),
                &["192.168.77.192/28", "fd77::200/124", "10.244.1.8/29"],
            )
            .endpoints(&endpoints),
        ]
    };
    let comparison = Comparison {
        settings: Settings::base(),
        services: &services,
        cases: answered_by_way_of_node1(Case::all(
            &["vm", "pod", "node1", "ext", "ext2", "far"],
            &[EXT, PODS, EXT4, NODE, NONE, EXT_ETP, WIDE],
            &[At::LoadBalancer, At::NodePort],
        )),
        differences: &[
            &but::OWN_ADDRESS,
            &but::RANGED_NONE,
            &but::OWN_PORT,
            &but::NOT_PERMITTED,
        ],
    };
    comparison.run()
}

/// Hairpins: clients that are endpoints of the service. And endpoints in nodes' own namespaces.
fn endpoints_that_are_their_own_clients_and_nodes() -> Result<()> {
    const SELF: Numbered = numbered("self", 41);
    const SELF_AND_FAR: Numbered = numbered("self-and-far", 42);
    const SELF_ETP: Numbered = numbered("self-etp-local", 43);
    const SELF_ITP: Numbered = numbered("self-itp-local", 44);
    const HERE: Numbered = numbered("node-here", 45);
    const THERE: Numbered = numbered("node-there", 46);
    const BOTH_ETP: Numbered = numbered("nodes-etp-local", 47);
    let services = |lab: &Lab| {
        let (vm, e3) = (lab.pod("vm"), lab.pod("e3"));
        let (node1, node2) = (lab.node("node1"), lab.node("node2"));
        vec![
            SELF.service().endpoints(&[vm]),
            SELF_AND_FAR.service().endpoints(&[vm, e3]),
            SELF_ETP.service().etp_local().endpoints(&[vm, e3]),
            SELF_ITP.service().itp_local().endpoints(&[vm, e3]),
            HERE.service().endpoints(&[node1]),
            THERE.service().endpoints(&[node2]),
            BOTH_ETP.service().etp_local().endpoints(&[node1, node2]),
        ]
    };
    let comparison = Comparison {
        settings: Settings::base(),
        services: &services,
        cases: answered_by_way_of_node1(Case::all(
            &["vm", "node1", "ext", "far"],
            &[
                SELF,
                SELF_AND_FAR,
                SELF_ETP,
                SELF_ITP,
                HERE,
                THERE,
                BOTH_ETP,
            ],
            &At::ALL,
        )),
        differences: &[&but::OWN_PORT],
    };
    comparison.run()
}

/// Ports, protocols and addresses beside those of services.
fn what_is_no_services() -> Result<()> {
    const WEB: Numbered = numbered("web", 51);
    let services = |lab: &Lab| {
        let endpoints = ["e1", "e3"].map(|name| lab.pod(name));
        vec![
            WEB.service().endpoints(&endpoints),
            Service::new("tcp-only", &["10.96.0.52", "fd00:10:96::52"])
                .node_port("tcp", 80, crate::cluster::TCP, 30_052)
                .endpoints(&endpoints),
            Service::new("udp-only", &["10.96.0.53", "fd00:10:96::53"])
                .node_port("udp", 80, crate::cluster::UDP, 30_053)
                .endpoints(&endpoints),
        ]
    };
    let mut cases = vec![];
    for client in ["vm", "ext", "far", "node1"] {
        for (what, to) in [
            ("another port of a cluster IP", "10.96.0.51:81"),
            ("another port of a cluster IP", "[fd00:10:96::51]:81"),
            ("another port of a load balancer", "203.0.113.51:81"),
            ("another port of a load balancer", "[2001:db8:113::51]:81"),
            ("another port of an external IP", "198.51.100.51:81"),
            ("another port of the node", "192.168.77.1:30999"),
            ("another port of the node", "[fd77::1]:30999"),
            ("an unused cluster IP", "10.96.9.9:80"),
            ("an unused cluster IP", "[fd00:10:96::9:9]:80"),
            ("one protocol's cluster IP", "10.96.0.52:80"),
            ("one protocol's cluster IP", "10.96.0.53:80"),
            ("one protocol's cluster IP", "[fd00:10:96::52]:80"),
            ("one protocol's cluster IP", "[fd00:10:96::53]:80"),
            ("one protocol's node port", "192.168.77.1:30052"),
            ("one protocol's node port", "192.168.77.1:30053"),
            ("a node port of another node", "192.168.77.2:30051"),
            ("the gateway's node port", "10.244.1.1:30051"),
            ("the second address' node port", "192.168.77.92:30051"),
            ("a pod", "10.244.1.102:7"),
            ("a pod", "[fd00:10:244:1::102]:7"),
        ] {
            // See `answered_by_way_of_node1`.
            if client != "far" || what != "one protocol's cluster IP" {
                cases.extend(Case::other(client, what, to));
            }
        }
    }
    let comparison = Comparison {
        settings: Settings {
            second_address: Some("192.168.77.92/24"),
            ..Settings::base()
        },
        services: &services,
        cases,
        differences: &[
            &but::WRONG_PORT,
            &but::PRIMARY_ADDRESS,
            &but::OWN_PORT,
            &but::NOT_PERMITTED,
        ],
    };
    comparison.run()
}

/// kube-proxy's TestNodePorts.
fn node_ports_on_chosen_addresses() -> Result<()> {
    const WEB: Numbered = numbered("web", 61);
    let services = |lab: &Lab| {
        let endpoints = ["e1", "e3"].map(|name| lab.pod(name));
        vec![WEB.service().endpoints(&endpoints)]
    };
    let mut cases = vec![];
    for client in ["vm", "ext", "far", "node1"] {
        for (what, to) in [
            ("the primary address' node port", "192.168.77.1:30061"),
            ("the primary address' node port", "[fd77::1]:30061"),
            ("the second address' node port", "192.168.77.92:30061"),
            ("the gateway's node port", "10.244.1.1:30061"),
        ] {
            cases.extend(Case::other(client, what, to));
        }
    }
    let base = Settings::base();
    let settings = Settings {
        cluster: Cluster {
            node_ports_on: vec!["192.168.77.92".parse()?, "fd77::1".parse()?],
            ..base.cluster
        },
        arguments: [
            base.arguments,
            vec!["--nodeport-addresses", "192.168.77.92/32,fd77::1/128"],
        ]
        .concat(),
        second_address: Some("192.168.77.92/24"),
        ..Settings::default()
    };
    let comparison = Comparison {
        settings,
        services: &services,
        cases,
        differences: &[&but::OWN_PORT],
    };
    comparison.run()
}

/// From which ports endpoints see clients come that chose theirs themselves.
fn source_ports() -> Result<()> {
    const HERE: Numbered = numbered("here", 71);
    const THERE: Numbered = numbered("there", 72);
    const HERE_ETP: Numbered = numbered("here-etp-local", 73);
    let services = |lab: &Lab| {
        let (e1, e3) = (lab.pod("e1"), lab.pod("e3"));
        vec![
            HERE.service().endpoints(&[e1]),
            THERE.service().endpoints(&[e3]),
            HERE_ETP.service().etp_local().endpoints(&[e1]),
        ]
    };
    let clients = ["vm", "ext", "far"];
    let all = Case::all(
        &clients,
        &[HERE, THERE, HERE_ETP],
        // Only one: from one port through two VIPs to one endpoint, only one flow can keep the port.
        &[At::NodePort],
    );
    // Within the range that the node's own sockets get theirs from, and beside it.
    let with_ports = |case: Case| {
        [40_000, 20_000].map(|port| {
            let client = (0..).zip(clients).find(|(_, name)| *name == case.client);
            Case {
                from_port: client.map(|(number, _)| port + number),
                ..case.clone()
            }
        })
    };
    let comparison = Comparison {
        settings: Settings::base(),
        services: &services,
        cases: all.into_iter().flat_map(with_ports).collect(),
        differences: &[&but::KEPT_PORT],
    };
    comparison.run()
}
