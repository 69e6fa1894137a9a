extern crate std;

use std::{collections::HashMap, vec::Vec};

use super::*;
use crate::tables::Block;

/// A packet, and the pools.
#[derive(Clone, Default)]
struct Fake {
    config: u32,
    is_of_node: bool,
    is_forged: bool,
    is_by_pods_interface: bool,
    source_in: Vec<u32>,
    pools: HashMap<u32, Pool>,
    read: Pool,
    facts: Vec<Fact>,
}

impl Packet for Fake {
    fn config(&self) -> u32 {
        self.config
    }

    fn is_of_node(&self) -> bool {
        self.is_of_node
    }

    fn has_right_source(&mut self) -> bool {
        !self.is_forged
    }

    fn is_by_pods_interface(&self) -> bool {
        self.is_by_pods_interface
    }

    fn is_source_in(&self, set: u32) -> bool {
        self.source_in.contains(&set)
    }

    fn read_pool(&mut self, index: u32) -> bool {
        self.read = self.pools.get(&index).copied().unwrap_or_default();
        self.pools.contains_key(&index)
    }

    fn pool(&self) -> &Pool {
        &self.read
    }

    fn note(&mut self, fact: Fact) {
        self.facts.push(fact);
    }
}

/// The pools of a service with endpoints and with `externalTrafficPolicy: Cluster`.
const CLUSTER: u32 = 1;
/// `Local`, with an endpoint on this node, and that endpoint.
const LOCAL_POLICY: u32 = 2;
const LOCAL_PART: u32 = 3;
/// `Local`, without one.
const ELSEWHERE: u32 = 4;
const NO_PART: u32 = 5;
/// The pool for clients outside of the cluster is missing.
const BROKEN: u32 = 6;
/// Open to some clients only.
const RANGED: u32 = 7;
const EMPTY: u32 = 8;
const MISSING: u32 = 9;

fn packet() -> Fake {
    let pool = |len, flags, external, ranged| Pool {
        block: Block::new(0, len, flags),
        external,
        ranged,
        ..Pool::default()
    };
    let pools = [
        (CLUSTER, pool(2, 0, 0, 0)),
        (LOCAL_POLICY, pool(2, 0, LOCAL_PART, 0)),
        (LOCAL_PART, pool(1, 0, 0, 0)),
        (ELSEWHERE, pool(2, 0, NO_PART, 0)),
        (NO_PART, pool(0, Block::NO_LOCAL, 0, 0)),
        (BROKEN, pool(2, 0, MISSING, 0)),
        (RANGED, pool(2, 0, 0, 1)),
        (EMPTY, pool(0, 0, 0, 0)),
    ];
    Fake {
        pools: pools.into(),
        ..Fake::default()
    }
}

/// A packet of a pod, by its address or by its interface.
fn of_pod(by_address: bool) -> Fake {
    let mut packet = packet();
    if by_address {
        packet.config = PacketConfig::DETECT_BY_ADDRESS;
        packet.source_in.push(SourceKey::PODS);
    } else {
        packet.config = PacketConfig::DETECT_BY_INTERFACE;
        packet.is_by_pods_interface = true;
    }
    packet
}

/// Checks the decision: its reason, its pool, whether the flow is masqueraded, and its facts.
#[track_caller]
fn check(mut packet: Fake, (kind, pool): (Kind, u32), wanted: (Reason, u32, bool), facts: &[Fact]) {
    let Decision {
        reason,
        pool,
        masquerade,
    } = decide(&mut packet, Frontend::new(pool, kind));
    assert_eq!((reason, pool, masquerade), wanted);
    assert_eq!(packet.facts, facts);
}

const OUTSIDE: [Kind; 3] = [Kind::NODE_PORT, Kind::EXTERNAL_IP, Kind::LOAD_BALANCER];

#[test]
fn the_traffic_policy_chooses_the_pool() {
    let by_address = PacketConfig::DETECT_BY_ADDRESS;
    let client = || Fake {
        config: by_address,
        ..packet()
    };
    let node = || Fake {
        is_of_node: true,
        // The node's own packets need no right source.
        is_forged: true,
        ..packet()
    };
    let translated = Reason::Translated;
    for kind in OUTSIDE {
        let any = [Fact::AnyEndpoint];
        check(client(), (kind, CLUSTER), (translated, CLUSTER, true), &any);
        check(node(), (kind, CLUSTER), (translated, CLUSTER, true), &any);
        let local = [Fact::NoPod, Fact::LocalEndpoint];
        let part = (translated, LOCAL_PART, false);
        check(client(), (kind, LOCAL_POLICY), part, &local);
        let refused = (Reason::NoLocalEndpoint, NO_PART, false);
        check(client(), (kind, ELSEWHERE), refused, &local);
        let dangling = (Reason::Dangling, MISSING, false);
        check(client(), (kind, BROKEN), dangling, &local);
        let unknown = [Fact::PodsUnknown, Fact::LocalEndpoint];
        check(packet(), (kind, LOCAL_POLICY), part, &unknown);
        let all = (translated, LOCAL_POLICY, true);
        check(node(), (kind, LOCAL_POLICY), all, &[Fact::LocalForPod]);
        for (by_address, fact) in [(true, Fact::PodByAddress), (false, Fact::PodByInterface)] {
            let all = (translated, LOCAL_POLICY, false);
            let facts = [fact, Fact::LocalForPod];
            check(of_pod(by_address), (kind, LOCAL_POLICY), all, &facts);
        }
        let empty = (Reason::NoEndpoints, EMPTY, true);
        check(client(), (kind, EMPTY), empty, &any);
    }
}

#[test]
fn clients_of_cluster_ips_are_masqueraded_if_they_are_no_pods() {
    let kind = Kind::CLUSTER_IP;
    let to = (kind, CLUSTER);
    let (plain, masqueraded) = (
        (Reason::Translated, CLUSTER, false),
        (Reason::Translated, CLUSTER, true),
    );
    check(packet(), to, plain, &[Fact::PodsUnknown]);
    check(of_pod(true), to, plain, &[Fact::PodByAddress]);
    check(of_pod(false), to, plain, &[Fact::PodByInterface]);
    // What identifies a pod counts only if the configuration says so.
    let swap = |mut packet: Fake| {
        packet.config ^= PacketConfig::DETECTS;
        packet
    };
    let outsider = [Fact::NoPod, Fact::Outsider];
    check(swap(of_pod(true)), to, masqueraded, &outsider);
    check(swap(of_pod(false)), to, masqueraded, &outsider);
    let node = Fake {
        is_of_node: true,
        ..of_pod(true)
    };
    check(node, to, masqueraded, &[Fact::MasqueradeAll]);
    let all = Fake {
        config: PacketConfig::DETECTS | PacketConfig::MASQUERADE_ALL,
        ..of_pod(true)
    };
    check(all, to, masqueraded, &[Fact::MasqueradeAll]);
    let local = (Reason::Translated, LOCAL_POLICY, false);
    check(packet(), (kind, LOCAL_POLICY), local, &[Fact::PodsUnknown]);
}

#[test]
fn a_packet_that_may_not_begin_a_flow_is_refused() {
    let forged = Fake {
        is_forged: true,
        ..packet()
    };
    for kind in OUTSIDE.into_iter().chain([Kind::CLUSTER_IP]) {
        let wanted = (Reason::SourceForged, CLUSTER, false);
        check(forged.clone(), (kind, CLUSTER), wanted, &[]);
        let wanted = (Reason::Dangling, MISSING, false);
        check(packet(), (kind, MISSING), wanted, &[]);
    }
}

#[test]
fn source_ranges_hold_for_load_balancers() {
    let to = (Kind::LOAD_BALANCER, RANGED);
    check(packet(), to, (Reason::SourceDenied, RANGED, false), &[]);
    let mut inside = packet();
    inside.source_in.push(RANGED);
    let facts = [Fact::InRanges, Fact::AnyEndpoint];
    check(inside, to, (Reason::Translated, RANGED, true), &facts);
    for kind in [Kind::NODE_PORT, Kind::EXTERNAL_IP] {
        let wanted = (Reason::Translated, RANGED, true);
        check(packet(), (kind, RANGED), wanted, &[Fact::AnyEndpoint]);
    }
}

#[test]
fn a_way_may_have_an_obstacle() {
    let passes = Reason::Translated;
    for (answer, mtu, same_source, new_source) in [
        (ONWARD, 0, passes, passes),
        (LOCAL, 1500, passes, passes),
        (TOO_BIG, 1500, Reason::TooBig, Reason::TooBig),
        (NOWHERE, 0, Reason::NoRoute, Reason::NoRoute),
        (UNREADY, 0, Reason::NoRoute, Reason::NoRoute),
        (FORGED, 0, Reason::SourceForged, Reason::SourceForged),
        (STACK, 0, passes, Reason::NoRoute),
        (STACK, 1500, passes, Reason::TooBig),
    ] {
        assert_eq!(obstacle(answer, mtu, false), same_source, "{answer} {mtu}");
        assert_eq!(obstacle(answer, mtu, true), new_source, "{answer} {mtu}");
    }
}
