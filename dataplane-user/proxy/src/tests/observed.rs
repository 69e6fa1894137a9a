//! The proxy's state as its pages and metrics show it, its settings, and the engine of tunnels beside it.

use model::{Gateway, GatewayAddress, Identity, IstioNamespace, authorization::PolicyName};
use prometheus_client::{collector::Collector, encoding::text};
use relay::{Attached, Direction, Handed, Listener, Tunnelling};
use std::time::Instant;

use super::*;

/// A proxy with two workers, and two workloads: `client` with a listening socket for outbound connections and `server` with
/// one for inbound connections.
fn observed(dns_files: DnsFiles) -> Proxy {
    let settings = Settings {
        access_log: AccessLog::Off,
        workers: 2,
        dns_files,
        ..Settings::default()
    };
    let proxy = Proxy::start(settings, &none_dies()).unwrap();
    attach(&proxy);
    proxy
}

pub fn attach(proxy: &Proxy) {
    let socket = || vec![TcpListener::bind("127.0.0.1:0").unwrap()];
    for (name, outbound, inbound) in [("client", socket(), vec![]), ("server", vec![], socket())] {
        let mut workload = Workload::new(WorkloadName::new("default", name), Place::Elsewhere);
        workload.account = name.into();
        proxy
            .add(Attachment {
                workload: Arc::new(workload),
                namespace: None,
                outbound,
                inbound,
                tunnels: vec![],
                egress: Egress::Allow,
            })
            .unwrap();
    }
}

fn named(name: &str) -> WorkloadName {
    WorkloadName::new("default", name)
}

#[test]
fn a_proxy_is_ready_once_it_has_a_snapshot_and_a_workload() {
    let proxy = Proxy::start(Settings::default(), &none_dies()).unwrap();
    let observer = proxy.observer();
    assert!(!observer.is_ready());
    proxy.set_snapshot(Snapshot::default());
    assert!(!observer.is_ready(), "it accepts nothing");
    attach(&proxy);
    assert!(observer.is_ready());
    drop(proxy);
    assert!(!observer.is_ready(), "it has ended");
    let proxy = observed(DnsFiles::default());
    assert!(!proxy.observer().is_ready(), "it knows no services");
}

#[test]
fn inbound_connections_are_taken_of_those_that_have_a_socket_for_them() {
    let proxy = observed(DnsFiles::default());
    let takes =
        ["client", "server", "other"].map(|name| proxy.observer().takes_inbound(&named(name)));
    assert_eq!(takes, [false, true, false]);
}

#[test]
fn limits_are_shown_and_more_connections_than_files_are_refused() {
    let files = raise_open_files().unwrap();
    let most = Limits::connections(files, 1, DnsFiles::default());
    for (wanted, is_refused) in [(7, false), (most, false), (most + 1, true)] {
        let settings = Settings {
            max_connections: Some(wanted),
            ..Settings::default()
        };
        match Proxy::start(settings, &none_dies()) {
            Ok(proxy) => {
                assert!(!is_refused, "{wanted}");
                assert_eq!(proxy.observer().max_connections(), wanted);
                assert_eq!(proxy.shortage(), None);
            }
            Err(error) => assert!(is_refused, "{wanted}: {error}"),
        }
    }
    let proxy = observed(DnsFiles {
        shared: files,
        per_workload: 0,
    });
    let short = proxy.shortage();
    assert!(short.is_some_and(|text| text.contains("open files are short")));
}

#[test]
fn a_workload_with_all_the_connections_that_it_may_have_is_at_its_limit() {
    let (_listener, at) = endpoint();
    let settings = Settings {
        max_per_workload: Some(1),
        ..Settings::default()
    };
    let (proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    assert!(proxy.observer().at_limit().is_empty());
    let _client = connect(vip);
    while proxy.connections() == 0 {
        thread::yield_now();
    }
    assert_eq!(proxy.observer().at_limit(), [(named("client"), 1)]);
}

#[test]
fn the_dump_has_settings_workloads_and_services() {
    let (_listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Deny);
    let mut web = service(VIP, vip.port(), &[at]);
    let mut udp = ServicePort::new(53, Protocol::Udp);
    udp.name = "udp".into();
    web.ports.push(udp);
    let mut snapshot = Snapshot::default();
    snapshot.services.insert(web.name.clone(), Arc::new(web));
    proxy.set_snapshot(snapshot);
    let dump = serde_json::to_value(proxy.observer().dump()).unwrap();
    let settings = &dump["settings"];
    assert_eq!(
        (&settings["attempts"], &settings["connect_timeout_ms"]),
        (&3.into(), &5000.into())
    );
    assert_eq!(dump["workers"].as_array().unwrap().len(), 2);
    let workload = &dump["workloads"][0];
    assert_eq!(workload["name"], "default/client");
    assert_eq!(
        (&workload["egress"], &workload["own_namespace"]),
        (&"deny".into(), &false.into())
    );
    let listener = &workload["listeners"][0];
    assert_eq!(listener["direction"], "outbound");
    assert_eq!(listener["address"], format!("0.0.0.0:{}", vip.port()));
    let service = &dump["services"][0];
    let ports = service["ports"].as_array().unwrap();
    assert_eq!(ports.len(), 1, "the proxy serves TCP: {service}");
    assert_eq!(ports[0]["vips"][0], vip.to_string());
    assert_eq!(ports[0]["endpoints"][0]["address"], at.to_string());
}

#[test]
fn metrics_have_each_pods_counts() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let mut registry = Registry::default();
    let observer = proxy.observer();
    observer.register(&mut registry);
    let shown = || {
        let mut shown = String::new();
        text::encode(&mut shown, &registry).unwrap();
        shown
    };
    let unknown = "dataplane_proxy_unknown_total{namespace=\"default\",pod=\"client\"}";
    assert!(!shown().contains(unknown), "a pod without any is not shown");
    let client = connect(vip);
    let server = accept(&listener);
    drop(server);
    assert_eq!(ending(&client).unwrap(), b"");
    drop(client);
    while proxy.connections() > 0 {
        thread::yield_now();
    }
    let first = proxy.relay().entries().pop().unwrap().attached;
    first.count_unknown();
    first.count_unknown();
    // A connection of it is left when the pod is attached again.
    let kept = connect(vip);
    let _server = accept(&listener);
    proxy.remove(&named("client"), PATIENCE);
    let again = Attachment {
        workload: workload(),
        namespace: None,
        outbound: vec![],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    };
    proxy.add(again).unwrap();
    proxy
        .relay()
        .entries()
        .pop()
        .unwrap()
        .attached
        .count_unknown();
    let policy = PolicyName {
        namespace: "default".into(),
        object: "AuthorizationPolicy deny".into(),
    };
    observer.count_in_kernel(&named("client"), Some(&policy), 5);
    let text = shown();
    let denied = "dataplane_policy_denied_total{namespace=\"default\",policy=\"AuthorizationPolicy deny\",dry_run=\"false\"} 5";
    for wanted in [
        format!("{unknown} 3").as_str(),
        denied,
        "dataplane_proxy_connections 1",
        "dataplane_proxy_workloads 2",
        "dataplane_proxy_access_log_lost_total 0",
        "istio_tcp_connections_closed_total{",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert_eq!(observer.connections().len(), 1);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Without(observer)));
    let mut text = String::new();
    text::encode(&mut text, &registry).unwrap();
    assert!(text.contains("dataplane_proxy_connections 1") && !text.contains("istio_tcp"));
    drop(kept);
}

/// The metrics without those of connections.
#[derive(Debug)]
struct Without(Observer);

impl Collector for Without {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.encode(&mut encoder)
    }
}

#[test]
fn refused_tunnels_are_shown() {
    let proxy = observed(DnsFiles::default());
    assert!(proxy.observer().bounded().is_empty());
    let attached = proxy.relay().entries().pop().unwrap().attached;
    let exceeded = Exceeded {
        holder: "one client",
        what: "tunnels to this node",
    };
    attached.count_bounded(exceeded, true);
    let bounded = proxy.observer().bounded();
    let [(name, count, why)] = &bounded[..] else {
        panic!("{bounded:?}")
    };
    assert_eq!((name, count.refused, *why), (&named("server"), 1, exceeded));
}

/// A snapshot with this service, and a waypoint for it: a Pod with an identity at 127.0.0.9.
pub fn with_waypoint(of: Service) -> Snapshot {
    let mut snapshot = Snapshot::default();
    snapshot.services.insert(of.name.clone(), Arc::new(of));
    let at: IpAddr = "127.0.0.9".parse().unwrap();
    let gate = Workload {
        addresses: smallvec![at],
        account: "gate".into(),
        ..Workload::new(named("gate"), Place::Elsewhere)
    };
    snapshot.workloads.insert(gate.name.clone(), Arc::new(gate));
    let name = ServiceName::new("default", "gate");
    let namespace = IstioNamespace {
        waypoint: Some(UseWaypoint::Gateway(name.clone())),
        ..IstioNamespace::default()
    };
    let gateway = Gateway {
        for_services: true,
        for_workloads: false,
        addresses: [GatewayAddress::Ip(at)].into(),
        ..Gateway::default()
    };
    let istio = &mut snapshot.istio;
    istio.waypoints = true;
    istio
        .namespaces
        .insert("default".into(), Arc::new(namespace));
    istio.gateways.insert(name, Arc::new(gateway));
    snapshot
}

#[test]
fn the_waypoint_of_a_connection_is_told() {
    let proxy = observed(DnsFiles::default());
    proxy.set_snapshot(with_waypoint(service(VIP, 80, &[])));
    let gate = ServiceName::new("default", "gate");
    let observer = proxy.observer();
    let to = SocketAddr::new(VIP, 80);
    let way = observer.waypoint("default/client", to);
    assert!(way.is_some_and(|way| way.is_ok_and(|(of, _)| of == gate)));
    assert!(observer.waypoint("default/nobody", to).is_none());
}

/// An engine of tunnels that notes what it is asked.
#[derive(Debug, Default)]
struct Notes(Mutex<Vec<&'static str>>);

impl Notes {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    fn take_notes(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl Tunnelling for Notes {
    fn carry(&self, _: Handed) {
        self.note("carry");
    }

    fn tunnels(&self) -> Vec<TunnelView> {
        let view = |attachment, streams| TunnelView {
            attachment,
            direction: Direction::Inbound,
            peer: Identity::new("cluster.local", "default", "peer").unwrap(),
            address: "127.0.0.1:15008".parse().unwrap(),
            streams,
        };
        vec![view(1, 3), view(1, 4), view(99, 5)]
    }

    fn held(&self) -> [usize; 2] {
        [0, 1]
    }

    fn take(&self, _: &Arc<Attached>, _: &Arc<[Listener]>) {
        self.note("take");
    }

    fn shut(&self, _: &Attached, _: Instant) {
        self.note("shut");
    }

    fn begin_drain(&self) {
        self.note("begin to drain");
    }

    fn drain(&self, _: Instant) {
        self.note("drain");
    }
}

#[test]
fn the_engine_of_tunnels_learns_what_the_workers_learn() {
    let settings = Settings {
        access_log: AccessLog::Off,
        ..Settings::default()
    };
    let proxy = Proxy::start(settings, &none_dies()).unwrap();
    assert!(proxy.observer().tunnels().is_empty());
    let notes = Arc::new(Notes::default());
    proxy.tunnel_by(notes.clone());
    attach(&proxy);
    assert_eq!(notes.take_notes(), ["take", "take"]);
    let tunnels = proxy.observer().tunnels();
    let told: Vec<_> = tunnels
        .iter()
        .map(|(name, all)| (name.clone(), all.iter().map(|of| of.streams).sum::<usize>()))
        .collect();
    assert_eq!(told, [(named("server"), 7)]);
    let dump = serde_json::to_value(proxy.observer().dump()).unwrap();
    let of_server = dump["workloads"][1]["tunnels"].as_array().unwrap();
    assert_eq!(of_server.len(), 2);
    assert_eq!(
        of_server[0]["peer"],
        "spiffe://cluster.local/ns/default/sa/peer"
    );
    proxy.remove(&named("client"), Duration::ZERO);
    assert_eq!(notes.take_notes(), ["shut"]);
    proxy.drain(Duration::ZERO);
    assert_eq!(notes.take_notes()[..2], ["begin to drain", "drain"]);
}
