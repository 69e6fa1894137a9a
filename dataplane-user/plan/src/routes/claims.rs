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

#[cfg(test)]
mod tests {
    use model::{Named, Records, ServicePort};

    use super::*;

    /// A Service with the ports 80 and 81 of TCP, and 82 of UDP; each has a name such as `p80`.
    fn service() -> Service {
        let port = |port: u16, protocol| ServicePort {
            name: format!("p{port}").into(),
            ..ServicePort::new(port, protocol)
        };
        let ports = [
            port(80, Protocol::Tcp),
            port(81, Protocol::Tcp),
            port(82, Protocol::Udp),
        ];
        Service {
            cluster_ips: smallvec::smallvec![[10, 96, 0, 1].into()],
            ports: ports.into_iter().collect(),
            ..Service::new(ServiceName::new("shop", "web"), ServiceType::ClusterIp)
        }
    }

    /// A route, as `TCP a@7! 80 p81 82=p82`: kind, name, age, `!` if it is not supported, and the ports of its parents: by
    /// number, by name or by both; `*`: all.
    fn route(text: &str) -> Arc<Route> {
        let mut words = text.split(' ');
        let kind = match words.next().unwrap() {
            "GRPC" => RouteKind::Grpc,
            "HTTP" => RouteKind::Http,
            "TLS" => RouteKind::Tls,
            _ => RouteKind::Tcp,
        };
        let name = words.next().unwrap();
        let (name, age) = name
            .trim_end_matches('!')
            .split_once('@')
            .unwrap_or((name, ""));
        let parent = |text: &str| Parent {
            service: service().name,
            port: text.split('=').find_map(|text| text.parse().ok()),
            section: text
                .split('=')
                .find(|text| text.starts_with('p'))
                .map(Into::into),
        };
        Arc::new(Route {
            name: RouteName {
                namespace: "shop".into(),
                name: name.trim_end_matches('!').into(),
                kind,
            },
            created: age.parse().ok(),
            unsupported: text.contains('!').then(|| "spec.rules".into()),
            parents: words.map(parent).collect(),
            abroad: None,
            backends: Vec::new(),
        })
    }

    fn decide(service: Option<&Service>, routes: &str) -> Claims {
        let mut routes: Vec<_> = routes.split(", ").map(route).collect();
        sort(&mut routes);
        Claims::of(&self::service().name, service, &routes)
    }

    /// Each line has routes, the ports that each has, and the words of the sentences about other ports.
    #[test]
    fn ports_go_to_the_route_that_says_most_and_then_to_the_oldest() {
        const ANOTHER: &str = "another route claims it";
        const NEEDED: &str = "a has it, too";
        for (routes, won, lost) in [
            ("TCP a *", "a 80 81", &[][..]),
            ("TCP a 81", "a 81", &[]),
            ("TCP a p81", "a 81", &[]),
            ("TCP a 80=p80", "a 80", &[]),
            ("TCP a 80=p81", "", &["Service shop/web has no TCP port"]),
            ("TCP a 82 99", "", &["Service shop/web has no TCP port"]),
            (
                "TCP b *, TCP a *",
                "a 80 81",
                &["port 80 of Service shop/web and 1 more"],
            ),
            (
                "TCP a@2 *, TCP b@1 80",
                "b 80, a 81",
                &["port 80 of Service shop/web: "],
            ),
            (
                "TCP a 80 81, TCP b@1 81",
                "b 81, a 80",
                &["port 81 of Service shop/web: "],
            ),
            ("TCP a@1 80, HTTP b 80", "b 80", &["b comes before it"]),
            ("HTTP a@1 80, GRPC b *", "b 80 81", &["b comes before it"]),
            ("TLS a@1 80, TCP b 80", "b 80", &["b comes before it"]),
            ("TCP a! 80, TCP b *", "b 81", &["spec.rules", NEEDED]),
            ("TCP a! *, TCP b 81", "", &["spec.rules", NEEDED]),
            ("HTTP a! 80, TCP b *", "b 80 81", &["spec.rules"]),
            ("TLS a *", "a 80 81", &[]),
            ("TLS a 80, TLS b 81", "a 80, b 81", &[]),
            ("TLS a 80, TLS b 80", "", &[ANOTHER, ANOTHER]),
            ("TLS a *, TLS b *", "", &[ANOTHER, ANOTHER]),
            ("TLS a *, TLS b 80", "a 81", &[ANOTHER, ANOTHER]),
            ("TLS a! 80, TLS b 80", "", &["spec.rules", ANOTHER]),
        ] {
            let service = service();
            let claims = decide(Some(&service), routes);
            let found = claims.won.iter().map(|(route, ports)| {
                let ports = ports
                    .iter()
                    .map(|at| format!(" {}", service.ports[*at].port));
                format!("{}{}", route.name.name, ports.collect::<String>())
            });
            assert_eq!(found.collect::<Vec<_>>().join(", "), won, "{routes}");
            assert_eq!(claims.lost.len(), lost.len(), "{routes}: {:?}", claims.lost);
            for ((_, reason, text), wanted) in claims.lost.iter().zip(lost) {
                assert!(text.contains(wanted), "{routes}: {text}");
                let is_conflict = text.contains("comes before it");
                let no_parent = text.contains("has no TCP port");
                let wanted = match (is_conflict, no_parent) {
                    (true, _) => CONFLICTED,
                    (_, true) => NO_PARENT,
                    _ => UNSUPPORTED,
                };
                assert_eq!(*reason, wanted, "{routes}: {text}");
            }
        }
    }

    #[test]
    fn only_services_with_a_cluster_ip_of_our_own_are_split() {
        let elsewhere = Records::Object(Box::new(Named {
            elsewhere: true,
            ..Named::default()
        }));
        let of = |kind| Service { kind, ..service() };
        let headless = Service {
            cluster_ips: smallvec::smallvec![],
            ..service()
        };
        let others = Service {
            records: elsewhere,
            ..service()
        };
        for (service, wanted) in [
            (None, "there is no Service shop/web"),
            (
                Some(of(ServiceType::HostPort)),
                "Service shop/web does not exist",
            ),
            (
                Some(of(ServiceType::Entry)),
                "Service shop/web does not exist",
            ),
            (
                Some(of(ServiceType::ExternalName)),
                "Service shop/web is of type ExternalName",
            ),
            (Some(others), "Service shop/web is left to another proxy"),
            (Some(headless), "Service shop/web is headless"),
        ] {
            let claims = decide(service.as_ref(), "TCP a *, TCP b 80");
            assert!(claims.won.is_empty() && claims.lost.len() == 2, "{wanted}");
            for (_, reason, text) in claims.lost {
                assert!(reason == NO_PARENT && text.starts_with(wanted), "{text}");
            }
        }
        let node_port = of(ServiceType::NodePort);
        assert_eq!(decide(Some(&node_port), "TCP a *").won.len(), 1);
    }
}
