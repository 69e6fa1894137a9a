//! Generates packets of all kinds from a seed: with well-formed headers, of known flows and of others, whole and in
//! fragments, with mutations; and random bytes.

mod maker;

use dataplane_common::{
    Protocol,
    packet::{FlowKey, Iface, PacketConfig},
    seen,
    tables::{AffinityKey, Endpoint},
};
use ipnet::IpNet;
use plan::ipsec::Policy;
use rand::{Rng, RngExt as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};

use self::maker::Maker;
use crate::{
    model::{Input, deliver::is_nobody, state::State},
    world::{EPHEMERAL, NEARLY_ALL, World, is_own},
};

/// Longest frame: a test run refuses longer ones.
const LONGEST: usize = 3400;

/// An operation of a campaign.
#[derive(Clone, Debug)]
pub enum Op {
    /// A packet arrives or leaves.
    Packet(Input),
    /// The last use of a flow moves back by this many ticks.
    Age(FlowKey, u16),
    /// A flow is removed.
    Forget(FlowKey),
    /// The service no longer lists a flow's endpoint.
    Depart(FlowKey),
    /// The kernel's own conntrack already has a flow. `true`: the flow is masqueraded, and its key reserves a port of
    /// the node at an endpoint.
    Foreign(FlowKey, bool),
    /// Adds a flow with these `seen` bits to an address and port that no longer belong to a service.
    Orphan(FlowKey, Endpoint, u8),
    /// The last use of a client's session affinity moves back by this many seconds.
    AgeClient(AffinityKey, u64),
    /// The default routes appear (`true`) or disappear.
    Route(bool),
}

/// The kind of a packet, for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// From a client to a service, or close to it.
    Request,
    /// From the client of a known flow.
    Known,
    /// From the endpoint of a known flow.
    Answer,
    /// From the client of a known flow, from the same port, to the endpoint itself.
    Beside,
    /// An ICMP error.
    Error,
    /// Any other well-formed packet.
    Other,
    /// Random bytes.
    Raw,
}

impl Kind {
    /// The kind in words, for the report.
    pub fn word(self) -> &'static str {
        match self {
            Self::Request => "to a service",
            Self::Known => "request of a known flow",
            Self::Answer => "answer of a known flow",
            Self::Beside => "beside a known flow",
            Self::Error => "ICMP error",
            Self::Other => "other protocols",
            Self::Raw => "raw bytes",
        }
    }
}

/// The kind of a packet, and whether it was mutated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sort {
    /// The kind.
    pub kind: Kind,
    /// Whether bytes were changed after the packet was built.
    pub mutated: bool,
}

/// Returns the configuration of the programs for a seed.
pub fn config(seed: u64) -> PacketConfig {
    let mut rng = SmallRng::seed_from_u64(seed);
    let range = if rng.random_ratio(1, 8) {
        NEARLY_ALL
    } else {
        EPHEMERAL
    };
    let preemptible = if rng.random() {
        PacketConfig::PREEMPTIBLE
    } else {
        0
    };
    PacketConfig {
        flags: rng.random_range(0..16) | preemptible,
        ephemeral_first: *range.start(),
        ephemeral_last: *range.end(),
        ..PacketConfig::default()
    }
}

/// Returns the check of IPv4 source addresses on the uplink for a seed.
pub fn reverse_path(seed: u64) -> u16 {
    let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32));
    *[0, Iface::STRICT, Iface::LOOSE]
        .choose(&mut rng)
        .unwrap_or(&0)
}

/// Returns the IPsec policies for a seed: in most cases none. The policies are between networks that packets come from
/// and go to, before and after translation.
pub fn policies(seed: u64) -> Vec<Policy> {
    const NETWORKS: [&str; 14] = [
        "0.0.0.0/0",
        "::/0",
        "10.244.0.0/16",
        "10.244.1.10/32",
        "10.244.2.0/24",
        "fd00:10:244::/48",
        "fd00:10:244:1::10/128",
        "192.168.77.0/24",
        "192.168.77.1/32",
        "fd77::/64",
        "10.96.0.0/29",
        "fd00:96::/125",
        "203.0.112.0/22",
        "198.51.100.0/24",
    ];
    let mut rng = SmallRng::seed_from_u64(!seed);
    if rng.random_ratio(3, 4) {
        return Vec::new();
    }
    let network = |rng: &mut SmallRng| -> IpNet {
        NETWORKS[rng.random_range(0..NETWORKS.len())]
            .parse()
            .expect("a network")
    };
    let several = rng.random_range(1..6);
    let all = (0..several).map(|_| {
        let src = network(&mut rng);
        let dst = loop {
            let dst = network(&mut rng);
            if src.addr().is_ipv4() == dst.addr().is_ipv4() {
                break dst;
            }
        };
        Policy {
            kind: (rng.random_range(0..3), 0),
            priority: rng.random_range(0..4),
            src,
            dst,
            narrow: false,
            protects: rng.random_ratio(2, 3),
        }
    });
    all.collect()
}

/// Returns the next operation for a seed and the current state.
pub fn op(seed: u64, world: &World, state: &State) -> (Op, Option<Sort>) {
    let mut rng = SmallRng::seed_from_u64(seed);
    // Rare, because a change of routes takes some milliseconds.
    if rng.random_ratio(1, 512) {
        return (Op::Route(rng.random_ratio(2, 3)), None);
    }
    if rng.random_ratio(1, 24)
        && let Some(op) = event(&mut rng, world, state)
    {
        return (op, None);
    }
    let mut maker = Maker {
        rng,
        world,
        state,
        about: None,
    };
    let (input, sort) = maker.packet();
    (Op::Packet(input), Some(sort))
}

/// Returns a random entry. The same state gives the same entry.
fn any<'a, T>(rng: &mut impl Rng, all: impl Iterator<Item = T> + 'a, count: usize) -> Option<T> {
    if count == 0 {
        return None;
    }
    let at = rng.random_range(0..count);
    let mut all = all;
    all.nth(at)
}

fn event(rng: &mut SmallRng, world: &World, state: &State) -> Option<Op> {
    let flows = state.flows.table();
    let flow = any(rng, flows.iter(), flows.len()).map(|(key, _)| *key);
    Some(match rng.random_range(0..10) {
        // A tick is 4.3 s, so this may exceed any timeout of UDP.
        0..5 => Op::Age(flow?, rng.random_range(1..40)),
        5 => Op::Forget(flow?),
        6 => {
            let (client, (vip, port)) = (*world.clients.choose(rng)?, *world.vips.choose(rng)?);
            let protocol = *[Protocol::TCP, Protocol::UDP].choose(rng)?;
            let (from, to) = (port_number(rng), dataplane_common::Port::new(port));
            let from = dataplane_common::Port::new(from);
            if rng.random() {
                return Some(Op::Foreign(
                    FlowKey::new(client, from, vip, to, protocol),
                    false,
                ));
            }
            let endpoint = *world.endpoints(client.is_v4()).choose(rng)?;
            let nodes = (1..16).map(|index| world.node_addr(index));
            let nodes =
                nodes.filter(|node| !node.is_unspecified() && node.is_v4() == client.is_v4());
            let node = *nodes.collect::<Vec<_>>().choose(rng)?;
            let key = FlowKey::new(node, from, endpoint.addr, endpoint.port, protocol);
            Op::Foreign(key, true)
        }
        7 => Op::Depart(flow?),
        8 => {
            let (client, (vip, port)) = (*world.clients.choose(rng)?, *world.vips.choose(rng)?);
            let from = dataplane_common::Port::new(port_number(rng));
            // No service has this port. (A cluster IP is also known as an address without a port.)
            let to = dataplane_common::Port::new(port + 1000);
            let endpoint = *world.endpoints(client.is_v4()).choose(rng)?;
            let some = [seen::PACKET, seen::FIN, seen::RST];
            let mut seen = seen::PACKET;
            for direction in [0, 4] {
                for flag in some {
                    seen |= (u8::from(rng.random_ratio(1, 3)) * flag) << direction;
                }
            }
            // For flows of the node itself, the programs also know the outgoing interface, so these are left out.
            if vip.is_v4() != client.is_v4() || is_nobody(client) || is_own(client) {
                return None;
            }
            Op::Orphan(
                FlowKey::new(client, from, vip, to, Protocol::TCP),
                endpoint,
                seen,
            )
        }
        _ => {
            let (key, _) = any(rng, state.affinity.iter(), state.affinity.len())?;
            Op::AgeClient(*key, rng.random_range(30..120))
        }
    })
}

/// Returns a client's port. The choice is small, so that flows collide.
fn port_number(rng: &mut SmallRng) -> u16 {
    match rng.random_range(0..9) {
        0 => rng.random(),
        1 => rng.random_range(0..1024),
        2 => rng.random_range(40_000..40_008),
        _ => rng.random_range(2000..2016),
    }
}
