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
        let ports = Ports::of(name, service);
        let demand = Demand::of(&ports, routes);
        let mut free = ports.tcp.clone();
        let mut has: HashMap<usize, RouteName> = HashMap::new();
        for route in routes {
            if let Some(why) = &route.unsupported {
                claims.lose(route, UNSUPPORTED, why.to_string());
                continue;
            }
            let claimed = ports.claimed_by(route);
            let wanted = ports.count(&claimed);
            if wanted == 0 {
                let text = format!("Service {name} has no TCP port that parentRefs names");
                claims.lose(route, NO_PARENT, text);
                continue;
            }
            let won = demand.won(route, &claimed, &free);
            if won.len() < wanted {
                let lost = ports.first_lost(&claimed, &won);
                let winner = lost.and_then(|at| has.get(&at));
                let sibling = lost.and_then(|at| demand.sibling(route, at));
                let port = lost.map_or(0, |at| service.ports[at].port);
                let more = match wanted - won.len() {
                    1 => String::new(),
                    all => format!(" and {} more of its ports", all - 1),
                };
                let (reason, why) = reason(winner, sibling);
                let text = format!("port {port} of Service {name}{more}: {why}");
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

/// The TCP ports of a Service, by their indices, as the parents of routes name them.
struct Ports<'a> {
    service: &'a ServiceName,
    tcp: BTreeSet<usize>,
    numbers: HashMap<u16, usize>,
    names: HashMap<&'a str, usize>,
}

impl<'a> Ports<'a> {
    fn of(name: &'a ServiceName, service: &'a Service) -> Self {
        let all = service.ports.iter().enumerate();
        let tcp = all.filter(|(_, port)| port.protocol == Protocol::Tcp);
        Self {
            service: name,
            numbers: tcp.clone().map(|(at, port)| (port.port, at)).collect(),
            names: tcp.clone().map(|(at, port)| (&*port.name, at)).collect(),
            tcp: tcp.map(|(at, _)| at).collect(),
        }
    }

    fn claimed_by(&self, route: &Route) -> Claimed {
        let mut some = BTreeSet::new();
        for Parent { port, section, .. } in route.parents_at(self.service) {
            let by_port = port.map(|port| self.numbers.get(&port).copied());
            let section = section.as_ref();
            let by_name = section.map(|name| self.names.get(&**name).copied());
            match (by_port, by_name) {
                (None, None) => return Claimed::All,
                (Some(at), None) | (None, Some(at)) => some.extend(at),
                (Some(at), Some(other)) => some.extend(at.filter(|_| at == other)),
            }
        }
        Claimed::Some(some)
    }

    /// Returns the number of the claimed ports.
    fn count(&self, claimed: &Claimed) -> usize {
        match claimed {
            Claimed::All => self.tcp.len(),
            Claimed::Some(ports) => ports.len(),
        }
    }

    /// Returns the first of the claimed ports that is not among the ports that the route has.
    fn first_lost(&self, claimed: &Claimed, won: &[usize]) -> Option<usize> {
        let mut claimed = match claimed {
            Claimed::All => self.tcp.iter(),
            Claimed::Some(ports) => ports.iter(),
        };
        claimed.find(|at| won.binary_search(at).is_err()).copied()
    }
}

/// The claims of all routes of a Service together, in force or not.
#[derive(Default)]
struct Demand<'a> {
    /// The number of routes that claim each port by itself, and of those that claim all ports.
    claiming: HashMap<usize, usize>,
    claiming_all: usize,
    /// The first route of each kind that claims a port and is not supported. If layer 4 cannot tell the connections of
    /// one route apart, it cannot tell those of two routes on one port apart either.
    needing: HashMap<(RouteKind, usize), &'a Route>,
}

impl<'a> Demand<'a> {
    fn of(ports: &Ports<'_>, routes: &'a [Arc<Route>]) -> Self {
        let mut demand = Self::default();
        for route in routes {
            let claimed = match ports.claimed_by(route) {
                Claimed::All => {
                    demand.claiming_all += 1;
                    if route.unsupported.is_none() {
                        continue;
                    }
                    ports.tcp.clone()
                }
                Claimed::Some(ports) => {
                    for at in &ports {
                        *demand.claiming.entry(*at).or_default() += 1;
                    }
                    ports
                }
            };
            if route.unsupported.is_some() {
                for at in claimed {
                    let key = (route.name.kind, at);
                    demand.needing.entry(key).or_insert(route);
                }
            }
        }
        demand
    }

    /// Returns the ports that a route has of those that it claims, in ascending order. `free`: the ports that no earlier
    /// route has.
    fn won(&self, route: &Route, claimed: &Claimed, free: &BTreeSet<usize>) -> Vec<usize> {
        let is_tls = route.name.kind == RouteKind::Tls;
        let won = |at: &usize| {
            if is_tls {
                self.claiming_all + self.claiming.get(at).copied().unwrap_or_default() == 1
            } else {
                self.sibling(route, *at).is_none()
            }
        };
        match claimed {
            Claimed::All if is_tls && self.claiming_all > 1 => Vec::new(),
            Claimed::All => free.iter().copied().filter(won).collect(),
            Claimed::Some(ports) => {
                let ports = ports.iter().copied().filter(|at| free.contains(at));
                ports.filter(won).collect()
            }
        }
    }

    /// Returns the route of the same kind that keeps a route from a port. TLS routes have none: see [`Demand::won`].
    fn sibling(&self, route: &Route, at: usize) -> Option<&'a Route> {
        let kind = route.name.kind;
        let sibling = self.needing.get(&(kind, at)).copied();
        sibling.filter(|_| kind != RouteKind::Tls)
    }
}

/// Returns the reason why a route does not have a port that it claims, and the sentence about it.
fn reason(winner: Option<&RouteName>, sibling: Option<&Route>) -> (&'static str, String) {
    match (winner, sibling) {
        (Some(winner), _) => (CONFLICTED, format!("{winner} comes before it")),
        (None, Some(sibling)) => (
            UNSUPPORTED,
            format!(
                "{} has it, too, which the agent does not follow, and routes of one kind belong together",
                sibling.name
            ),
        ),
        (None, None) => (
            UNSUPPORTED,
            "another route claims it, and nothing but the server's name, which the kernel does not read, tells their \
             connections apart"
                .to_owned(),
        ),
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
