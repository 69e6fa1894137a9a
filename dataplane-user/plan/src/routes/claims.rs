//! Decides which route has which port of a Service.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use model::{Parent, Protocol, Route, RouteKind, RouteName, Service, ServiceName, ServiceType};

const NO_PARENT: &str = "NoMatchingParent";
const UNSUPPORTED: &str = "UnsupportedValue";
const CONFLICTED: &str = "Conflicted";

/// The result for the routes that are attached to one Service.
#[derive(Debug, Default)]
pub struct Claims {
    /// The routes in force, with the indices of the ports that each has.
    pub won: Vec<(Arc<Route>, Vec<usize>)>,
    /// The routes, or ports of routes, that are not accepted: Gateway API's name for the reason, and a sentence.
    pub lost: Vec<(RouteName, &'static str, String)>,
}

/// The ports that a route claims.
enum Claimed {
    All,
    Some(BTreeSet<usize>),
}

/// Sorts routes: first the kind that says most about a connection (GEP-1294), then the oldest, then the first by name.
/// TLS routes come last: they split a port only if no other route claims it.
pub fn sort(routes: &mut [Arc<Route>]) {
    routes.sort_by_cached_key(|route| {
        let rank = match route.name.kind {
            RouteKind::Grpc => 0,
            RouteKind::Http => 1,
            RouteKind::Tcp => 2,
            RouteKind::Tls => 3,
        };
        (
            rank,
            route.created.is_none(),
            route.created,
            route.name.clone(),
        )
    });
}

impl Claims {
    /// Decides about routes in their order. The cost grows with routes plus ports, not with their product.
    pub fn of(name: &ServiceName, service: Option<&Service>, routes: &[Arc<Route>]) -> Self {
        let mut claims = Self::default();
        let Some(service) = service else {
            for route in routes {
                claims.lose(route, NO_PARENT, format!("there is no Service {name}"));
            }
            return claims;
        };
        if let Some(wrong) = wrong_parent(service) {
            for route in routes {
                let text = format!("Service {name} {wrong}");
                claims.lose(route, NO_PARENT, text);
            }
            return claims;
        }
        let tcp = |(index, port): (usize, &model::ServicePort)| {
            (port.protocol == Protocol::Tcp).then_some(index)
        };
        let tcp: BTreeSet<usize> = service.ports.iter().enumerate().filter_map(tcp).collect();
        let numbers: HashMap<u16, usize> =
            tcp.iter().map(|&at| (service.ports[at].port, at)).collect();
        let names: HashMap<&str, usize> = tcp
            .iter()
            .map(|&at| (&*service.ports[at].name, at))
            .collect();
        let claimed_by = |route: &Route| -> Claimed {
            let mut some = BTreeSet::new();
            for Parent { port, section, .. } in route.parents_at(name) {
                let by_port = port.map(|port| numbers.get(&port).copied());
                let by_name = section.as_ref().map(|name| names.get(&**name).copied());
                match (by_port, by_name) {
                    (None, None) => return Claimed::All,
                    (Some(at), None) | (None, Some(at)) => some.extend(at),
                    (Some(at), Some(other)) => some.extend(at.filter(|_| at == other)),
                }
            }
            Claimed::Some(some)
        };
        // Number of routes that claim each port, in force or not.
        let mut claiming: HashMap<usize, usize> = HashMap::new();
        let mut claiming_all = 0;
        for route in routes {
            match claimed_by(route) {
                Claimed::All => claiming_all += 1,
                Claimed::Some(ports) => {
                    for at in ports {
                        *claiming.entry(at).or_default() += 1;
                    }
                }
            }
        }
        // If layer 4 cannot tell the connections of one route apart, it cannot tell those of two routes on one port
        // apart either.
        let mut needing: HashMap<(RouteKind, usize), &Route> = HashMap::new();
        for route in routes.iter().filter(|route| route.unsupported.is_some()) {
            let ports = match claimed_by(route) {
                Claimed::All => tcp.clone(),
                Claimed::Some(ports) => ports,
            };
            for at in ports {
                needing.entry((route.name.kind, at)).or_insert(route);
            }
        }
        let is_sole =
            |at: &usize| claiming_all + claiming.get(at).copied().unwrap_or_default() == 1;
        let mut free = tcp.clone();
        let mut has: HashMap<usize, RouteName> = HashMap::new();
        for route in routes {
            if let Some(why) = &route.unsupported {
                claims.lose(route, UNSUPPORTED, why.to_string());
                continue;
            }
            let is_tls = route.name.kind == RouteKind::Tls;
            let (wanted, mut won): (usize, Vec<usize>) = match claimed_by(route) {
                Claimed::All if is_tls && claiming_all > 1 => (tcp.len(), Vec::new()),
                Claimed::All => (tcp.len(), free.iter().copied().collect()),
                Claimed::Some(ports) => {
                    let won = ports.iter().copied().filter(|at| free.contains(at));
                    (ports.len(), won.collect())
                }
            };
            if wanted == 0 {
                let text = format!("Service {name} has no TCP port that parentRefs names");
                claims.lose(route, NO_PARENT, text);
                continue;
            }
            let sibling = |at: usize| needing.get(&(route.name.kind, at)).copied();
            if is_tls {
                won.retain(is_sole);
            } else {
                won.retain(|at| sibling(*at).is_none());
            }
            if won.len() < wanted {
                let lost = match claimed_by(route) {
                    Claimed::All => tcp
                        .iter()
                        .copied()
                        .find(|at| won.binary_search(at).is_err()),
                    Claimed::Some(ports) => ports.into_iter().find(|at| !won.contains(at)),
                };
                let port = lost.map_or(0, |at| service.ports[at].port);
                let more = match wanted - won.len() {
                    1 => String::new(),
                    all => format!(" and {} more of its ports", all - 1),
                };
                let winner = lost.and_then(|at| has.get(&at));
                let sibling = lost.and_then(sibling).filter(|_| !is_tls);
                let of = name;
                let (reason, text) = match (winner, sibling) {
                    (Some(winner), _) => (
                        CONFLICTED,
                        format!("port {port} of Service {of}{more}: {winner} comes before it"),
                    ),
                    (None, Some(sibling)) => (
                        UNSUPPORTED,
                        format!(
                            "port {port} of Service {of}{more}: {} has it, too, which the agent does not follow, and \
                             routes of one kind belong together",
                            sibling.name
                        ),
                    ),
                    (None, None) => (
                        UNSUPPORTED,
                        format!(
                            "port {port} of Service {of}{more}: another route claims it, and nothing but the server's name, \
                             which the kernel does not read, tells their connections apart"
                        ),
                    ),
                };
                claims.lose(route, reason, text);
            }
            for at in &won {
                free.remove(at);
                has.insert(*at, route.name.clone());
            }
            if !won.is_empty() {
                claims.won.push((Arc::clone(route), won));
            }
        }
        claims
    }

    fn lose(&mut self, route: &Route, reason: &'static str, text: String) {
        self.lost.push((route.name.clone(), reason, text));
    }
}

/// Returns the reason why a Service's connections cannot be split.
fn wrong_parent(service: &Service) -> Option<&'static str> {
    match service.kind {
        ServiceType::HostPort | ServiceType::Entry => Some("does not exist"),
        ServiceType::ExternalName => Some("is of type ExternalName, which has no connections"),
        _ if service.records.is_elsewhere() => Some("is left to another proxy"),
        _ if service.cluster_ips.is_empty() => {
            Some("is headless: its clients choose among its endpoints themselves")
        }
        _ => None,
    }
}
