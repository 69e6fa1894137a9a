//! Explains the decision of the programs step by step.

use std::{
    cell::{Cell, RefCell},
    net::SocketAddr,
};

use dataplane_common::{
    Addr, Port, Protocol, Reason, VipPlace, VipWords, decide,
    tables::{AffinityKey, Block, Endpoint, Frontend, FrontendKey, Kind, Pool},
};
use kernel::tables::Tables;

use super::{
    Destination, Namespace,
    explanation::{Choice, Explanation},
};
use crate::monotonic_ns;

/// The tables, with the lookups made in them.
pub struct Recorded<'a, T> {
    pub tables: &'a T,
    pub filter: Cell<VipWords>,
    pub lookups: RefCell<Vec<(FrontendKey, Frontend)>>,
}

impl<T: decide::Tables> decide::Tables for Recorded<'_, T> {
    fn vips(&self, index: u32) -> VipWords {
        self.filter.set(self.tables.vips(index));
        self.filter.get()
    }

    fn frontend(&self, key: &FrontendKey) -> Frontend {
        let found = self.tables.frontend(key);
        self.lookups.borrow_mut().push((*key, found));
        found
    }

    fn pool(&self, index: u32) -> Option<Pool> {
        self.tables.pool(index)
    }

    fn endpoint(&self, slot: u32) -> Option<Endpoint> {
        self.tables.endpoint(slot)
    }
}

/// The table of session affinity. [`decide`] does not use it.
pub trait AffinityTable {
    /// Returns the endpoint that the client used last, and how many nanoseconds ago.
    fn last_used(&self, key: &AffinityKey) -> Option<(Endpoint, u64)>;
}

impl AffinityTable for Tables {
    fn last_used(&self, key: &AffinityKey) -> Option<(Endpoint, u64)> {
        let affinity = self.affinity(key).ok()??;
        Some((
            affinity.endpoint,
            monotonic_ns().saturating_sub(affinity.used_at),
        ))
    }
}

/// Returns the steps that the programs take. `owner` returns the service of a pool, `client` is the client's network
/// namespace; both if known.
pub fn decide<T: decide::Tables + AffinityTable>(
    tables: &T,
    owner: impl Fn(u32) -> Option<String>,
    client: Option<&Namespace>,
    host_netns: u64,
    to: Destination,
) -> Explanation {
    let own_loopback = client.is_some_and(|client| client.cookie == host_netns);
    let mut steps = vec![match client {
        Some(c) if own_loopback => format!("the client is in the node's network namespace ({c})"),
        Some(c) => format!("the client is in the network namespace {c}"),
        None => "no network namespace on this machine has the client's address: explained for a pod without known \
                 session affinity"
            .to_owned(),
    }];
    let (frontend, lookups) = look_up(tables, own_loopback, to);
    steps.extend(lookups);
    let mut told = Explanation {
        steps,
        ..Explanation::of(String::new(), to.to_string())
    };
    if frontend.is_none() {
        let addr = Addr::from(to.addr);
        if (addr.is_loopback() || addr.is_unspecified()) && !own_loopback {
            told.steps.push(
                "in this network namespace a loopback address is the client's own".to_owned(),
            );
        }
        told.steps.push(Reason::NotService.text().to_owned());
        return told;
    }
    told.kind = Some(frontend.kind().word());
    told.pool = Some(frontend.pool());
    told.service = owner(frontend.pool());
    let whose = told.service.as_deref().map_or_else(
        || "a service (name unknown without a running agent)".to_owned(),
        |name| format!("service {name}"),
    );
    let Some(pool) = tables.pool(frontend.pool()) else {
        refuse(&mut told, Reason::Dangling);
        return told;
    };
    if frontend.kind() == Kind::LOAD_BALANCER && pool.ranged != 0 {
        told.steps.push(format!(
            "{whose} has loadBalancerSourceRanges, but the socket has no source address yet: the connection is left \
             alone, and the packet path decides if the packet comes back to this node"
        ));
        return told;
    }
    let block = pool.block;
    told.steps.push(format!(
        "pool {} of {whose} {}",
        frontend.pool(),
        holds(tables, block)
    ));
    if block.is_empty() {
        refuse(&mut told, decide::refusal(block));
        return told;
    }
    told.verdict = "translated";
    told.reason = Reason::Translated.word();
    if pool.affinity_seconds > 0 {
        let client = client.map(|client| Addr::from_netns_cookie(client.cookie));
        let (endpoint, step) = affinity(tables, client, &pool);
        told.steps.push(step);
        if let Some(endpoint) = endpoint {
            told.reason = Reason::Kept.word();
            told.endpoints.push(Choice {
                endpoint: socket(&endpoint),
                probability: 1.0,
            });
            return told;
        }
    }
    told.choose(choices(tables, block));
    told
}

/// Returns the frontend that the programs find, and the steps of the search.
fn look_up(
    tables: &impl decide::Tables,
    own_loopback: bool,
    to: Destination,
) -> (Frontend, Vec<String>) {
    let mut steps = Vec::new();
    let recorded = Recorded {
        tables,
        filter: Cell::new(VipWords::ALL),
        lookups: RefCell::default(),
    };
    let (addr, port) = (Addr::from(to.addr), Port::new(to.port));
    let frontend = decide::find_frontend(&recorded, addr, port, to.protocol, own_loopback);
    let (place, filter) = (VipPlace::of(addr), recorded.filter.get());
    if !place.is_set(filter) && !addr.is_loopback() && !addr.is_unspecified() {
        steps.push(format!(
            "the filter VIPS excludes {addr}: neither a service nor this node has this address, and \
             nothing is looked up"
        ));
    }
    let key = FrontendKey::new(addr, port, to.protocol);
    for key in [key, FrontendKey::address(addr)] {
        let found = tables.frontend(&key);
        if !place.finds(filter, &key) && !found.is_none() {
            steps.push(format!(
                "the filter is wrong, {}. This is a bug: please report it. A restart of the agent \
                 corrects the filter",
                lookup(&key, found)
            ));
        }
    }
    let lookups = recorded.lookups.into_inner();
    steps.extend(lookups.iter().map(|(key, found)| lookup(key, *found)));
    (frontend, steps)
}

/// Returns a pool's number of usable endpoints, as the end of a sentence.
pub fn holds(tables: &impl decide::Tables, block: Block) -> String {
    let choices = choices(tables, block).into_iter();
    match choices.filter(|choice| choice.endpoint != REFUSED).count() {
        0 if block.flags() & Block::NO_SUCH_PORT != 0 => {
            "is for ports that the service does not have".to_owned()
        }
        0 => "has no usable endpoint".to_owned(),
        1 => "has 1 usable endpoint".to_owned(),
        n => format!("has {n} usable endpoints"),
    }
}

/// Returns a pool's endpoints, with the probability of each: an endpoint with more weight has more slots.
pub fn choices(tables: &impl decide::Tables, block: Block) -> Vec<Choice> {
    let len = u32::from(block.len());
    let slots: Vec<_> = (0..len)
        .map(|offset| tables.endpoint(block.base() + offset))
        .collect();
    let same = slots.chunk_by(|a, b| a == b);
    same.map(|same| Choice {
        endpoint: match &same[0] {
            None => "(no such slot: a bug, please report it)".to_owned(),
            Some(endpoint) if endpoint.is_none() => REFUSED.to_owned(),
            Some(endpoint) => socket(endpoint),
        },
        probability: f64::from(u32::try_from(same.len()).unwrap_or(len)) / f64::from(len),
    })
    .collect()
}

/// Stands for an endpoint if the backend of a route has none.
const REFUSED: &str = "refused";

fn refuse(told: &mut Explanation, reason: Reason) {
    told.verdict = "refused";
    told.reason = reason.word();
    told.steps.push(format!("{} (ECONNREFUSED)", reason.text()));
}

/// Returns a sentence about one lookup.
pub fn lookup(key: &FrontendKey, found: Frontend) -> String {
    let what = if key.protocol == Protocol::ANY {
        format!("the address {}", key.addr)
    } else if *key == FrontendKey::node_port(key.addr.is_v4(), key.port, key.protocol) {
        let family = if key.addr.is_v4() { "IPv4" } else { "IPv6" };
        format!("the {family} node port {}/{}", key.port, key.protocol)
    } else {
        format!(
            "{}/{}",
            SocketAddr::new(key.addr.ip(), key.port.host()),
            key.protocol
        )
    };
    if found.is_none() {
        return format!("{what} has no entry");
    }
    match found.kind() {
        Kind::NODE_ADDRESS => {
            format!("{what} is this node's: the node answers node ports there")
        }
        Kind::CLUSTER_ADDRESS => {
            format!("{what} is a cluster IP: ports that its service does not have are refused")
        }
        kind => format!(
            "{what} matches: {}, answered by pool {}",
            kind.word(),
            found.pool()
        ),
    }
}

/// Returns the endpoint that session affinity chooses, if it chooses one, and a sentence that says why or why not.
pub fn affinity<T: decide::Tables + AffinityTable>(
    tables: &T,
    client: Option<Addr>,
    pool: &Pool,
) -> (Option<Endpoint>, String) {
    let seconds = pool.affinity_seconds;
    let intro = format!("session affinity ClientIP, {seconds} s");
    let Some(client) = client else {
        return (None, format!("{intro}: unknown for this client"));
    };
    let key = AffinityKey {
        client,
        group: pool.affinity_group,
    };
    let Some((endpoint, age)) = tables.last_used(&key) else {
        return (
            None,
            format!("{intro}: no endpoint is kept for this client"),
        );
    };
    let used = format!(
        "{intro}: the client used {} {} s ago",
        socket(&endpoint),
        age / 1_000_000_000
    );
    if age >= u64::from(seconds) * 1_000_000_000 {
        (None, format!("{used}, which is too long ago"))
    } else if !decide::contains(tables, pool.block, &endpoint) {
        (None, format!("{used}, which is no longer usable"))
    } else {
        (Some(endpoint), format!("{used} and keeps it"))
    }
}

/// Formats an endpoint.
pub fn socket(endpoint: &Endpoint) -> String {
    SocketAddr::new(endpoint.addr.ip(), endpoint.port.host()).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Tables in this process, because only the explanation is tested.
    #[derive(Default)]
    struct Fake {
        frontends: HashMap<FrontendKey, Frontend>,
        pools: Vec<Pool>,
        endpoints: Vec<Endpoint>,
        affinity: HashMap<AffinityKey, (Endpoint, u64)>,
        /// Whether the address filter lets no destination through.
        blind: bool,
    }

    impl decide::Tables for Fake {
        fn vips(&self, index: u32) -> VipWords {
            let there = self
                .frontends
                .keys()
                .any(|key| VipPlace::of(key.addr).index() == index);
            if there && !self.blind {
                VipWords::ALL
            } else {
                VipWords::default()
            }
        }
        fn frontend(&self, key: &FrontendKey) -> Frontend {
            self.frontends.get(key).copied().unwrap_or(Frontend::NONE)
        }
        fn pool(&self, index: u32) -> Option<Pool> {
            self.pools.get(index as usize).copied()
        }
        fn endpoint(&self, slot: u32) -> Option<Endpoint> {
            self.endpoints.get(slot as usize).copied()
        }
    }

    impl AffinityTable for Fake {
        fn last_used(&self, key: &AffinityKey) -> Option<(Endpoint, u64)> {
            self.affinity.get(key).copied()
        }
    }

    fn endpoint(last: u8) -> Endpoint {
        Endpoint::new(Addr::from_v4([10, 244, 1, last]), Port::new(80))
    }

    const VIP: Addr = Addr::from_v4([10, 96, 0, 1]);
    const NODE: Addr = Addr::from_v4([192, 0, 2, 1]);

    fn fake() -> Fake {
        let port = |n| Port::new(n);
        Fake {
            frontends: HashMap::from([
                (
                    FrontendKey::new(VIP, port(80), Protocol::TCP),
                    Frontend::new(1, Kind::CLUSTER_IP),
                ),
                (
                    FrontendKey::address(VIP),
                    Frontend::new(2, Kind::CLUSTER_ADDRESS),
                ),
                (
                    FrontendKey::address(NODE),
                    Frontend::new(0, Kind::NODE_ADDRESS),
                ),
                (
                    FrontendKey::node_port(true, port(30080), Protocol::TCP),
                    Frontend::new(1, Kind::NODE_PORT),
                ),
            ]),
            pools: vec![
                Pool::default(),
                Pool {
                    block: Block::new(1, 2, 0),
                    affinity_seconds: 60,
                    affinity_group: 1,
                    ..Pool::default()
                },
                Pool {
                    block: Block::new(0, 0, Block::NO_SUCH_PORT),
                    ..Pool::default()
                },
            ],
            endpoints: vec![endpoint(0), endpoint(5), endpoint(6)],
            affinity: HashMap::new(),
            blind: false,
        }
    }

    /// Cookie of the node's own network namespace.
    const HOST: u64 = 1;

    fn told(fake: &Fake, cookie: Option<u64>, to: &str) -> Explanation {
        let client = cookie.map(|cookie| Namespace {
            cookie,
            place: "test".to_owned(),
            path: None,
        });
        decide(fake, |_| None, client.as_ref(), HOST, to.parse().unwrap())
    }

    #[test]
    fn a_vip_is_translated_with_equal_shares() {
        let told = told(&fake(), Some(7), "10.96.0.1:80");
        assert_eq!(
            (told.verdict, told.reason, told.kind),
            ("translated", "translated", Some("ClusterIP"))
        );
        assert_eq!(told.endpoints.len(), 2);
        assert_eq!(told.endpoints[0].endpoint, "10.244.1.5:80");
        assert!((told.endpoints[0].probability - 0.5).abs() < f64::EPSILON);
    }

    #[test]
    fn affinity_keeps_what_is_fresh_and_usable() {
        let mut fake = fake();
        let key = AffinityKey {
            client: Addr::from_netns_cookie(7),
            group: 1,
        };
        fake.affinity.insert(key, (endpoint(6), 59_000_000_000));
        let kept = told(&fake, Some(7), "10.96.0.1:80");
        assert_eq!((kept.reason, kept.endpoints.len()), ("kept", 1));
        assert_eq!(kept.endpoints[0].endpoint, "10.244.1.6:80");
        // Another client, an unknown client, an old entry, an endpoint that left.
        assert_eq!(told(&fake, Some(8), "10.96.0.1:80").reason, "translated");
        assert_eq!(told(&fake, None, "10.96.0.1:80").reason, "translated");
        fake.affinity.insert(key, (endpoint(6), 60_000_000_000));
        assert_eq!(told(&fake, Some(7), "10.96.0.1:80").reason, "translated");
        fake.affinity.insert(key, (endpoint(9), 0));
        assert_eq!(told(&fake, Some(7), "10.96.0.1:80").reason, "translated");
    }

    #[test]
    fn refusals_and_what_is_left_alone() {
        let fake = fake();
        let refused = told(&fake, Some(7), "10.96.0.1:81");
        assert_eq!(
            (refused.verdict, refused.reason),
            ("refused", "port-not-served")
        );
        let alone = told(&fake, Some(7), "192.0.2.9:80");
        assert_eq!((alone.verdict, alone.reason), ("left-alone", "not-service"));
        // UDP has another key.
        assert_eq!(told(&fake, Some(7), "10.96.0.1:80/udp").verdict, "refused");
    }

    #[test]
    fn the_filter_is_believed_as_the_programs_believe_it() {
        let mut fake = fake();
        let told_of = |fake: &Fake| {
            let told = told(fake, Some(7), "10.96.0.1:80");
            (told.verdict, told.steps.join("\n"))
        };
        let (verdict, steps) = told_of(&fake);
        assert_eq!(verdict, "translated");
        assert!(!steps.contains("filter"), "{steps}");
        fake.blind = true;
        let (verdict, steps) = told_of(&fake);
        assert_eq!(verdict, "left-alone");
        assert!(
            steps.contains("the filter is wrong, 10.96.0.1:80/tcp matches"),
            "{steps}"
        );
        assert!(
            steps.contains("the filter is wrong, the address 10.96.0.1 is"),
            "{steps}"
        );
        let alone = told(&fake, Some(7), "192.0.2.77:80").steps.join("\n");
        assert!(
            alone.contains("nothing is looked up") && !alone.contains("wrong"),
            "{alone}"
        );
    }

    #[test]
    fn node_ports_on_loopback_are_the_nodes_own() {
        let fake = fake();
        assert_eq!(
            told(&fake, Some(7), "192.0.2.1:30080").kind,
            Some("NodePort")
        );
        assert_eq!(
            told(&fake, Some(HOST), "127.0.0.1:30080").kind,
            Some("NodePort")
        );
        assert_eq!(
            told(&fake, Some(7), "127.0.0.1:30080").verdict,
            "left-alone"
        );
    }
}
