//! Waypoints: the way of a connection that does not lead to its destination at once.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{Binding, Gateway, GatewayAddress, HBONE, ServiceName, Waypoint, Workload};

use super::{Found, Index, Target};

/// The way through a waypoint.
#[derive(Clone, Debug)]
pub struct Via {
    /// The Gateway.
    pub(crate) gateway: ServiceName,
    /// The waypoint's service. `None`: the waypoint is the workload at the address.
    pub(crate) target: Option<Arc<Target>>,
    /// The waypoint's address.
    pub(crate) at: SocketAddr,
    /// The destination of the stream: the service's VIP and port, or the workload's address and port.
    pub(crate) authority: SocketAddr,
    /// Whether the proxies of the nodes accept the waypoint's tunnels, at port 15008 of its Pods ([`Binding`]).
    pub(crate) is_bound: bool,
}

impl Index {
    /// Returns whether the proxy sends connections of a workload to waypoints.
    pub(crate) fn sends_to_waypoints(&self, own: &Workload) -> bool {
        self.snapshot.istio.waypoints && !own.account.is_empty()
    }

    /// Returns the Gateway whose Pod an attached workload is, and how it takes the streams of tunnels. `None`: as other Pods.
    pub fn bound(&self, own: &Arc<Workload>) -> Option<(ServiceName, Binding)> {
        // Its labels may have changed.
        self.snapshot.istio.bound(self.present((0, own)))
    }

    /// Returns the Gateway to whose waypoint a workload's connection goes, and the waypoint's address. `None`: the connection
    /// goes to no waypoint, or past one that cannot be used. The error names the Gateway, and says why the proxy refuses the connection.
    pub fn waypoint(
        &self,
        own: &Workload,
        destination: SocketAddr,
    ) -> Option<Result<(ServiceName, SocketAddr), String>> {
        let via = match self.find(destination) {
            Found::Service(target) => self.via_service(own, &target, destination),
            Found::Known | Found::Unknown => self.via_workload(own, destination),
            Found::UnknownPort => None,
        };
        via.map(|via| via.map(|via| (via.gateway, via.at)))
    }

    /// Returns the way of a workload's connection that is addressed to a service. `None`: to the service's endpoints. The error
    /// says why there is no way.
    pub(crate) fn via_service(
        &self,
        own: &Workload,
        target: &Target,
        destination: SocketAddr,
    ) -> Option<Result<Via, String>> {
        let service = &target.service;
        let waypoint = self.snapshot.istio.waypoint_of_service(service)?;
        let same_family = |ip: &&IpAddr| ip.is_ipv4() == destination.is_ipv4();
        let mut vips = service.cluster_ips.iter().filter(same_family);
        // A waypoint knows the service by its cluster IP, and not by node ports.
        let vip = vips.next().copied().unwrap_or(destination.ip());
        let authority = SocketAddr::new(vip, target.port().port);
        self.via(own, waypoint, authority)
    }

    /// As [`Index::via_service`], of a connection that is addressed to a workload.
    pub(crate) fn via_workload(
        &self,
        own: &Workload,
        destination: SocketAddr,
    ) -> Option<Result<Via, String>> {
        if own.addresses.contains(&destination.ip()) {
            return None;
        }
        let all = self.workloads_at(destination.ip());
        let istio = &self.snapshot.istio;
        let mut waypoints = all.iter().filter_map(|of| istio.waypoint_of_workload(of));
        let waypoint = waypoints.next()?;
        if all.len() > 1 {
            let text = "several workloads have the address, and one of them has a waypoint";
            return Some(Err(text.to_owned()));
        }
        let authority = SocketAddr::new(destination.ip(), destination.port());
        self.via(own, waypoint, authority)
    }

    fn via(
        &self,
        own: &Workload,
        waypoint: Waypoint<'_>,
        authority: SocketAddr,
    ) -> Option<Result<Via, String>> {
        if !self.sends_to_waypoints(own) {
            return None;
        }
        let unusable = |why: String| {
            let name = waypoint.name.as_str().escape_debug();
            let is_refused = !self.snapshot.istio.passes;
            is_refused.then(|| Err(format!("waypoint {name} cannot be used: {why}")))
        };
        let gateway = match waypoint.gateway {
            Ok(gateway) => gateway,
            Err(why) => return unusable(why.to_string()),
        };
        let is_bound = self.snapshot.istio.binding(gateway).is_some();
        let ports = ports(gateway, is_bound);
        let addresses = gateway.addresses.iter();
        let mut found = addresses.flat_map(|address| {
            let (ips, named) = match address {
                GatewayAddress::Ip(ip) => (std::slice::from_ref(ip), None),
                GatewayAddress::Service(name) => {
                    let service = self.snapshot.services.get(name);
                    let ips = service.map_or(&[][..], |service| &service.cluster_ips[..]);
                    (ips, Some(name))
                }
            };
            let of = waypoint.name.namespace();
            let all = ips.iter().flat_map(|ip| {
                let ports = ports.iter();
                ports.map(|port| SocketAddr::new(*ip, *port))
            });
            let found = all.filter_map(|at| self.entrance(at, named, of));
            found.collect::<Vec<_>>()
        });
        let Some((target, at)) = found.next() else {
            return unusable(format!(
                "no address of the Gateway leads to a Pod of its namespace at port {HBONE}"
            ));
        };
        let is_own = |pod: SocketAddr| {
            let pod = self.workload(pod.ip());
            pod.is_some_and(|pod| {
                pod.account == own.account && pod.name.namespace() == own.name.namespace()
            })
        };
        // A waypoint's own connections go to the endpoints.
        let is_from_waypoint = match &target {
            Some(target) => target.endpoints(at.is_ipv4()).any(is_own),
            None => is_own(at),
        };
        (!is_from_waypoint).then(|| {
            Ok(Via {
                gateway: waypoint.name.clone(),
                target,
                at,
                authority,
                is_bound,
            })
        })
    }

    /// Returns the service and the address by which a waypoint is reached. `None`: the address leads to no Pod, or to another
    /// author's: any tenant may claim an address. It has to lead to the service of this name, or else into the Gateway's namespace.
    fn entrance(
        &self,
        at: SocketAddr,
        named: Option<&ServiceName>,
        namespace: &str,
    ) -> Option<(Option<Arc<Target>>, SocketAddr)> {
        match self.find(at) {
            Found::Service(target) if target.has_endpoint(at.is_ipv4()) => {
                let service = target.service();
                let is_its = named.map_or(service.namespace() == namespace, |name| name == service);
                is_its.then_some((Some(target), at))
            }
            Found::Known => {
                let pod = self.workload(at.ip())?;
                (pod.name.namespace() == namespace).then_some((None, at))
            }
            _ => None,
        }
    }
}

/// Returns the ports at which a Gateway's service may lead to its Pods. If the proxies of the nodes accept the tunnels, the
/// service need not have the port of tunnels.
fn ports(gateway: &Gateway, is_bound: bool) -> Vec<u16> {
    let further = gateway.listeners.iter().filter(|_| is_bound);
    [HBONE]
        .into_iter()
        .chain(further.map(|of| of.port))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{io, time::Instant};

    use model::{
        AllowedNamespaces, Egress, Endpoint, Gateway, GatewayListener, IstioNamespace, Place,
        Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot, UseWaypoint,
        WorkloadName,
    };
    use smallvec::smallvec;
    use threads::none_dies;

    use super::*;
    use crate::{
        AccessLog, Attached, Attachment, Direction, Limits, Log, Permit, Session, Way,
        limits::Holders,
    };

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn service(name: &str, vip: &str, node_port: Option<u16>, endpoint: Option<&str>) -> Service {
        let (vip, endpoint) = (at(vip), endpoint.map(at));
        let endpoint = endpoint.map(|of| Endpoint::new(of.ip(), of.port()));
        Service {
            cluster_ips: smallvec![vip.ip()],
            ports: smallvec![ServicePort {
                node_port,
                endpoints: endpoint.into_iter().collect(),
                ..ServicePort::new(vip.port(), Protocol::Tcp)
            }],
            ..Service::new(ServiceName::new("shop", name), ServiceType::ClusterIp)
        }
    }

    fn pod(name: &str, addr: &str) -> Arc<Workload> {
        Arc::new(Workload {
            addresses: [addr.parse().unwrap()].into_iter().collect(),
            account: name.into(),
            ..Workload::new(WorkloadName::new("shop", name), Place::Address)
        })
    }

    fn attached(workload: Arc<Workload>) -> Arc<Attached> {
        let (log, _) = Log::start(AccessLog::Off, io::sink(), none_dies()).unwrap();
        let attachment = Attachment {
            workload,
            namespace: None,
            outbound: vec![],
            inbound: vec![],
            tunnels: vec![],
            egress: Egress::Allow,
        };
        let limits = Arc::new(Limits::new(Some(10), None, 1024));
        let shared = (limits, Holders::default(), Arc::new(log));
        Attached::new(0, attachment, Box::default(), shared)
            .unwrap()
            .0
    }

    /// Returns the way of a connection, its endpoint and the destination of its stream; or the flag.
    fn told(index: &Index, own: Arc<Workload>, to: &str) -> String {
        let (attached, outbound) = (attached(own), Direction::Outbound);
        let permit = Permit::acquire(&attached, outbound).unwrap();
        let client = at("10.0.0.8:1");
        let mut session = Session::begin(permit, outbound, client, at(to), 3, Instant::now());
        if let Err(refusal) = session.route(index) {
            return refusal.flag.word().to_owned();
        }
        let endpoint = session.next_endpoint().unwrap();
        let way = match session.way(index) {
            Way::Plain => "plain".to_owned(),
            Way::Tunnel(workload) => workload.name.to_string(),
            Way::Unclear => "unclear".to_owned(),
        };
        let tunnel = session.accepts_tunnels_at(1);
        let authority = session.authority();
        session.failed(io::Error::other("a test"));
        assert!(session.next_endpoint().is_none(), "only one endpoint");
        format!("{way} {endpoint} {tunnel} {authority}")
    }

    /// Makes a Gateway for connections to `what`, at an address, or at the service of this name.
    fn gateway(what: &str, address: &str, is_bound: bool) -> Gateway {
        let address = match address.parse() {
            Ok(ip) => Some(GatewayAddress::Ip(ip)),
            Err(_) if address == "-" => None,
            Err(_) => Some(GatewayAddress::Service(ServiceName::new("shop", address))),
        };
        let listener = GatewayListener {
            protocol: "istio.io/PROXY".into(),
            port: 15088,
            allowed: AllowedNamespaces::Same,
        };
        Gateway {
            for_services: ["service", "all"].contains(&what),
            for_workloads: ["workload", "all"].contains(&what),
            addresses: address.into_iter().collect(),
            listeners: [listener].into(),
            class: if is_bound { "sandwich" } else { "" }.into(),
            ..Gateway::default()
        }
    }

    /// Returns whether the text about a way, or about why there is none, names the Gateway for a connection that goes as `wanted`;
    /// and the text.
    fn names(
        way: Option<Result<(ServiceName, SocketAddr), String>>,
        gateway: &ServiceName,
        wanted: &str,
    ) -> (bool, String) {
        let found = match way {
            Some(Ok((name, at))) => format!("{name} {at}"),
            Some(Err(why)) => why,
            None => "plain".to_owned(),
        };
        let is_so = match wanted.split(' ').next() {
            // No Pod with an identity is known behind the waypoint that is unclear.
            Some("shop/gate" | "unclear") => found.starts_with("shop/gate 10."),
            Some("CONNECT") => {
                let named = format!("waypoint {gateway} cannot be used: ");
                found.starts_with(&named) || found.starts_with("several workloads")
            }
            _ => found == "plain",
        };
        (is_so, found)
    }

    /// `web` leads to `far`, and `gate` to the waypoint's Pod, at another port. Each case has the client, what the Gateway is
    /// for, its address, further words, the destination, and the way, endpoint, address for tunnels, and authority.
    const CASES: &str = "
        app service 10.96.0.99 - 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.96.0.10:80
        app all gate - 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.96.0.10:80
        app service 10.0.0.9 - 10.96.0.10:80 => shop/gate 10.0.0.9:15008 10.0.0.9:15008 10.96.0.10:80
        app service 10.96.0.99 - 192.0.2.1:30080 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.96.0.10:80
        app service 10.96.0.99 empty 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.96.0.10:80
        app workload 10.96.0.99 - 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        app workload 10.96.0.99 - 10.0.0.5:7 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.0.0.5:7
        app service 10.96.0.99 - 10.0.0.5:7 => plain 10.0.0.5:7 10.0.0.5:1 10.0.0.5:7
        app none 10.96.0.99 - 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        app workload 10.96.0.99 - 198.51.100.1:7 => plain 198.51.100.1:7 198.51.100.1:1 198.51.100.1:7
        app all 10.0.0.77 - 10.96.0.10:80 => CONNECT
        app all other - 10.0.0.5:7 => CONNECT
        app all - - 10.96.0.10:80 => CONNECT
        app all - pass 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        app all - pass,empty 10.96.0.10:80 => UH
        app all 10.0.0.77 pass 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        app all 10.96.0.99 pass,lost 10.0.0.5:7 => plain 10.0.0.5:7 10.0.0.5:1 10.0.0.5:7
        app all 10.96.0.99 pass,twin 10.0.0.5:7 => CONNECT
        app all 10.96.0.99 pass 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.96.0.10:80
        app all 10.96.0.99 lost 10.0.0.5:7 => CONNECT
        app all 10.96.0.99 twin 10.0.0.5:7 => CONNECT
        app all 10.96.0.99 bound 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15008 10.96.0.10:80
        app all gate bound,named 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15008 10.96.0.10:80
        app all 10.0.0.9 named 10.96.0.10:80 => shop/gate 10.0.0.9:15008 10.0.0.9:15008 10.96.0.10:80
        app all 10.96.0.99 named 10.96.0.10:80 => CONNECT
        app all 10.96.0.99 strange 10.96.0.10:80 => unclear 10.0.0.66:15009 10.0.0.66:15009 10.96.0.10:80
        gate all 10.96.0.99 - 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        gate all 10.0.0.9 - 10.0.0.5:7 => plain 10.0.0.5:7 10.0.0.5:1 10.0.0.5:7
        gate all 10.0.0.9 - 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        nobody all 10.96.0.99 - 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        nobody all 10.96.0.99 deny 10.96.0.10:80 => DENY
        app all 10.96.0.99 deny 10.96.0.10:80 => shop/gate 10.0.0.9:15009 10.0.0.9:15009 10.96.0.10:80
        app all 10.96.0.99 deny,off 10.96.0.10:80 => DENY
        app all 10.96.0.99 off 10.96.0.10:80 => plain 10.0.0.5:8080 10.0.0.5:1 10.0.0.5:8080
        app all 10.96.0.99 - 10.0.0.8:7 => plain 10.0.0.8:7 10.0.0.8:1 10.0.0.8:7";

    #[test]
    fn connections_go_to_the_waypoint_of_what_they_are_addressed_to() {
        for case in CASES.lines().skip(1) {
            let (given, wanted) = case.split_once(" => ").unwrap();
            let words: Vec<&str> = given.split_whitespace().collect();
            let [client, what, address, further, to] = words[..] else {
                panic!("{case}")
            };
            let has = |word| further.split(',').any(|given| given == word);
            let mut snapshot = Snapshot::default();
            Arc::make_mut(&mut snapshot.node).addresses = vec![at("192.0.2.1:0").ip()];
            let gate = if has("strange") {
                "10.0.0.66:15009"
            } else {
                "10.0.0.9:15009"
            };
            // Its service has no port of tunnels.
            let vip = if has("named") {
                "10.96.0.99:15088"
            } else {
                "10.96.0.99:15008"
            };
            let endpoint = (!has("empty")).then_some("10.0.0.5:8080");
            for of in [
                service("web", "10.96.0.10:80", Some(30080), endpoint),
                service("gate", vip, None, Some(gate)),
            ] {
                snapshot.services.insert(of.name.clone(), Arc::new(of));
            }
            let twin = has("twin").then(|| pod("twin", "10.0.0.5"));
            let pods = [
                pod("app", "10.0.0.8"),
                pod("far", "10.0.0.5"),
                pod("gate", "10.0.0.9"),
            ];
            for of in pods.into_iter().chain(twin) {
                snapshot.workloads.insert(of.name.clone(), of);
            }
            let named = ServiceName::new("shop", if has("lost") { "lost" } else { "gate" });
            let of = IstioNamespace {
                waypoint: Some(UseWaypoint::Gateway(named.clone())),
                // Istio labels the Service and the Pods of a waypoint, which the source understands as `none`.
                labels: [(Arc::from("Service gate"), UseWaypoint::None)]
                    .into_iter()
                    .collect(),
                ..IstioNamespace::default()
            };
            let istio = &mut snapshot.istio;
            istio.namespaces.insert("shop".into(), Arc::new(of));
            (istio.waypoints, istio.denies) = (!has("off"), has("deny"));
            istio.passes = has("pass");
            let binding = Binding {
                has_header: true,
                port: Some(15088),
            };
            istio.classes.insert("sandwich".into(), binding);
            let gateway = Arc::new(gateway(what, address, has("bound")));
            istio
                .gateways
                .insert(ServiceName::new("shop", "gate"), gateway);
            let own = match client {
                "nobody" => Arc::new(Workload {
                    account: "".into(),
                    ..(*pod("nobody", "10.0.0.7")).clone()
                }),
                "gate" => pod("gate", "10.0.0.9"),
                _ => pod("app", "10.0.0.8"),
            };
            let index = Index::default().updated(snapshot);
            let way = index.waypoint(&own, at(to));
            assert_eq!(told(&index, own, to), wanted, "{case}");
            let (is_so, found) = names(way, &named, wanted);
            assert!(is_so, "{case}: {found}");
        }
    }
}
