//! The proxy and the engine in one process: a client's connection goes through a tunnel to an application.

mod identities;
mod same_node;
mod waypoints;

use std::{
    io::{self, Read as _, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use model::{
    Egress, Endpoint, Place, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot,
    Workload, WorkloadName,
};
use proxy::{Proxy, Settings};
use relay::{Attachment, Direction, Namespace};
use smallvec::smallvec;
use threads::none_dies;

use super::{Engine, Manner};
use crate::{
    Tunnels,
    error::Error,
    tests::fixture::{Certificates, identity, settings, to},
};

const VIP: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 5);
const PATIENCE: Duration = Duration::from_secs(10);

/// The access log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct World {
    proxy: Proxy,
    engine: Arc<Engine<Certificates>>,
    log: Lines,
    vip: SocketAddr,
    /// Where the server accepts tunnels.
    tunnels: SocketAddr,
    application: TcpListener,
    /// The client's socket for captured connections.
    captured: TcpListener,
}

fn workload(name: &str, addresses: &[Ipv4Addr]) -> Arc<Workload> {
    Arc::new(Workload {
        addresses: addresses.iter().map(|addr| (*addr).into()).collect(),
        account: name.into(),
        speaks_hbone: true,
        ..Workload::new(WorkloadName::new("shop", name), Place::Address)
    })
}

/// A service with one endpoint.
fn service(vip: SocketAddr, endpoint: SocketAddr) -> Service {
    let endpoint = Endpoint::new(endpoint.ip(), endpoint.port());
    Service {
        cluster_ips: smallvec![vip.ip()],
        ports: smallvec![ServicePort {
            endpoints: vec![endpoint],
            ..ServicePort::new(vip.port(), Protocol::Tcp)
        }],
        ..Service::new(ServiceName::new("shop", "web"), ServiceType::ClusterIp)
    }
}

impl World {
    fn new() -> Self {
        Self::with_client(&[])
    }

    /// Makes a world in which the client has these addresses.
    fn with_client(addresses: &[Ipv4Addr]) -> Self {
        Self::with(addresses, &Settings::default())
    }

    /// Makes a world in which the client has these addresses, and the proxy these settings.
    fn with(addresses: &[Ipv4Addr], settings_of_proxy: &Settings) -> Self {
        let log = Lines::default();
        let plain = Settings {
            workers: 1,
            connect_timeout: PATIENCE,
            ..settings_of_proxy.clone()
        };
        let proxy = Proxy::start_logging_to(plain, log.clone(), &none_dies()).unwrap();
        let bound = |ip: Ipv4Addr| TcpListener::bind((ip, 0)).unwrap();
        let (listener, accepting) = (bound(Ipv4Addr::UNSPECIFIED), bound(SERVER));
        let application = bound(SERVER);
        let tunnels = accepting.local_addr().unwrap();
        let vip = SocketAddr::new(VIP.into(), listener.local_addr().unwrap().port());
        let certificates = Certificates::new();
        certificates.renew("gate", 3);
        let manner = Manner {
            trust_domain: "cluster.local".into(),
            mark: None,
            transparent_mark: None,
            connect_timeout: PATIENCE,
            idle_timeout: None,
            patience: settings_of_proxy.patience,
        };
        let made = Tunnels::start(settings(), certificates, &none_dies()).unwrap();
        let relay = Arc::clone(proxy.relay());
        let engine = Engine::with_port(made, relay, manner, tunnels.port());
        proxy.tunnel_by(Arc::clone(&engine) as _);
        let mut snapshot = Snapshot::default();
        let (client, server) = (workload("client", addresses), workload("server", &[SERVER]));
        for of in [&client, &server] {
            snapshot.workloads.insert(of.name.clone(), Arc::clone(of));
        }
        let web = service(vip, application.local_addr().unwrap());
        snapshot.services.insert(web.name.clone(), Arc::new(web));
        proxy.set_snapshot(snapshot);
        let captured = listener.try_clone().unwrap();
        for (workload, outbound, tunnels) in [
            (client, vec![listener], vec![]),
            (server, vec![], vec![accepting]),
        ] {
            let attached = proxy.add(Attachment {
                workload,
                // Identities are those of network namespaces.
                namespace: settings_of_proxy.attests.as_ref().map(|_| own()),
                outbound,
                inbound: vec![],
                tunnels,
                egress: Egress::Allow,
            });
            attached.unwrap();
        }
        Self {
            proxy,
            engine,
            log,
            vip,
            tunnels,
            application,
            captured,
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.vip).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn accept(&self) -> TcpStream {
        let (stream, _) = self.application.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Ends the world, and returns the access log.
    fn end(self) -> Vec<String> {
        drop(self.engine);
        self.proxy.drain(PATIENCE);
        let log = self.log.0.lock().unwrap();
        let text = String::from_utf8(log.clone()).unwrap();
        text.lines().map(ToOwned::to_owned).collect()
    }
}

/// The network namespace of the test.
fn own() -> Namespace {
    let open = |v4, count| (0..count).map(|_| relay::socket::new(v4)).collect();
    Namespace {
        open: Arc::new(open),
        interface: None,
    }
}

fn read(mut stream: &TcpStream) -> io::Result<String> {
    let mut text = String::new();
    stream.read_to_string(&mut text).map(|_| text)
}

#[test]
fn a_connection_goes_through_a_tunnel_with_the_bytes_read_before() {
    let world = World::new();
    assert!(world.proxy.observer().tunnels().is_empty());
    let mut client = world.connect();
    // The proxy reads this before it knows that there is a tunnel.
    client.write_all(b"first").unwrap();
    let mut server = world.accept();
    let mut first = [0; 5];
    server.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"first");
    let tunnels = world.proxy.observer().tunnels();
    let peers = tunnels.iter().map(|(of, tunnels)| {
        let [tunnel] = &tunnels[..] else {
            panic!("{of}: {tunnels:?}");
        };
        (of.name(), tunnel.direction, &tunnel.peer, tunnel.streams)
    });
    let [by_client, by_server] = ["client", "server"].map(identity);
    let wanted = [
        ("client", Direction::Outbound, &by_server, 1),
        ("server", Direction::Inbound, &by_client, 1),
    ];
    assert_eq!(peers.collect::<Vec<_>>(), wanted);
    client.write_all(b" and then").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read(&server).unwrap(), " and then");
    // The other direction is still open.
    server.write_all(b"answer").unwrap();
    drop(server);
    assert_eq!(read(&client).unwrap(), "answer");
    assert_eq!(
        world.engine.tunnels.tunnels().len(),
        2,
        "both sides of one tunnel"
    );
    let connections = world.proxy.observer().connections();
    for (name, direction, own, peer) in [
        ("client", Direction::Outbound, &by_client, &by_server),
        ("server", Direction::Inbound, &by_server, &by_client),
    ] {
        let of = connections.keys().find(|of| of.key.direction == direction);
        let principals = of.unwrap().key.principals.clone().unwrap();
        assert_eq!(
            (&principals.own, &principals.peer),
            (own, &Some(peer.clone())),
            "{name}"
        );
    }
    let lines = world.end();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (of, peer) in [
        ("workload=shop/client outbound", identity("server")),
        ("workload=shop/server inbound", identity("client")),
    ] {
        let line = lines.iter().find(|line| line.contains(of)).unwrap();
        let bytes = " bytes_received=14 bytes_sent=6 ";
        assert!(line.contains(bytes) && line.ends_with("flags=-"), "{line}");
        assert!(line.contains(&format!(" peer={peer} ")), "{line}");
    }
}

#[test]
fn a_workload_reaches_itself_without_a_tunnel() {
    let world = World::with_client(&[SERVER]);
    let (client, mut server) = (world.connect(), world.accept());
    server.write_all(b"answer").unwrap();
    drop(server);
    assert_eq!(read(&client).unwrap(), "answer");
    assert!(world.engine.tunnels.tunnels().is_empty());
}

#[test]
fn a_reset_of_one_side_is_a_reset_of_the_other() {
    let world = World::new();
    let (client, server) = (world.connect(), world.accept());
    relay::socket::reset_on_close(&client);
    drop(client);
    let error = read(&server).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    let lines = world.end();
    let ends = |line: &&String| line.ends_with("flags=DC");
    assert_eq!(lines.iter().filter(ends).count(), 2, "{lines:?}");
}

#[test]
fn without_a_tunnel_there_is_no_connection() {
    let world = World::new();
    let name = WorkloadName::new("shop", "server");
    world.proxy.remove(&name, Duration::ZERO);
    let end = Instant::now() + PATIENCE;
    while TcpStream::connect(world.tunnels).is_ok() {
        assert!(Instant::now() < end, "tunnels are accepted");
        thread::sleep(Duration::from_millis(10));
    }
    let mut client = world.connect();
    // A reset is reported once: by the write if it has come by then.
    let sent = client.write_all(b"secret");
    let error = sent.and_then(|()| read(&client)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    world.application.set_nonblocking(true).unwrap();
    let accepted = world.application.accept();
    assert_eq!(accepted.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let lines = world.end();
    assert!(lines[0].contains("flags=CONNECT error="), "{lines:?}");
}

#[test]
fn a_stream_to_another_address_than_the_workloads_is_refused() {
    let world = World::new();
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    for authority in [
        elsewhere.local_addr().unwrap().to_string(),
        format!("[::ffff:{SERVER}]:1"),
        "web.shop:80".to_owned(),
        world.tunnels.to_string(),
    ] {
        let mut asked = to(world.tunnels, world.tunnels);
        asked.authority = authority.parse().unwrap();
        let (report, made) = mpsc::channel();
        world.engine.tunnels.outbound(move |outbound| async move {
            let _ = report.send(outbound.connect(&asked).await);
        });
        let status = match made.recv_timeout(PATIENCE).unwrap() {
            Err(Error::Refused { status, .. }) => status.as_u16(),
            other => panic!("{authority}: {other:?}"),
        };
        // No process listens at the v4-mapped address.
        let wanted = if authority.starts_with('[') { 503 } else { 400 };
        assert_eq!(status, wanted, "{authority}");
    }
    let lines = world.end();
    let of = format!("dst={} ", elsewhere.local_addr().unwrap());
    let line = lines.iter().find(|line| line.contains(&of)).unwrap();
    assert!(
        line.contains(" inbound ") && line.contains("flags=NR error="),
        "{line}"
    );
}

#[test]
fn connections_of_a_workload_that_is_released_end_at_the_deadline() {
    let world = World::new();
    let (client, server) = (world.connect(), world.accept());
    let start = Instant::now();
    let name = WorkloadName::new("shop", "client");
    world.proxy.remove(&name, Duration::from_secs(1));
    assert!(read(&client).is_err() && read(&server).is_err());
    assert!(start.elapsed() >= Duration::from_secs(1));
    let lines = world.end();
    let of = |line: &&String| line.contains("workload=shop/client");
    let line = lines.iter().find(of).unwrap();
    assert!(line.ends_with("flags=DRAIN"), "{line}");
}

#[test]
fn tunnels_to_a_workload_end_with_it() {
    let world = World::new();
    let (client, server) = (world.connect(), world.accept());
    let mut snapshot = world.proxy.relay().index().1.snapshot().clone();
    // Another workload has the address.
    let name = WorkloadName::new("shop", "server");
    snapshot.workloads.remove(&name);
    let other = workload("other", &[SERVER]);
    snapshot.workloads.insert(other.name.clone(), other);
    world.proxy.set_snapshot(snapshot);
    assert!(read(&client).is_err() && read(&server).is_err());
    // The other workload does not have the expected identity.
    let again = world.connect();
    assert!(read(&again).is_err());
    let lines = world.end();
    assert!(
        lines.iter().any(|line| line.contains("flags=TLS_FAILURE")),
        "{lines:?}"
    );
}

#[test]
fn a_workload_with_the_identity_and_address_of_an_earlier_one_has_its_own_tunnels() {
    let world = World::new();
    let exchange = || {
        let (client, mut server) = (world.connect(), world.accept());
        server.write_all(b"answer").unwrap();
        drop(server);
        assert_eq!(read(&client).unwrap(), "answer");
    };
    let attachments = || {
        let tunnels = world.engine.tunnels.tunnels();
        let outbound = tunnels.iter().filter(|tunnel| tunnel.workload.is_some());
        let mut attachments: Vec<_> = outbound.map(|tunnel| tunnel.attachment).collect();
        attachments.sort_unstable();
        attachments
    };
    exchange();
    let first = attachments();
    assert_eq!(first.len(), 1);
    let name = WorkloadName::new("shop", "client");
    world.proxy.remove(&name, PATIENCE);
    // The worker takes the command before it accepts the next connection.
    thread::sleep(Duration::from_millis(100));
    let attached = world.proxy.add(Attachment {
        workload: workload("client", &[]),
        namespace: None,
        outbound: vec![world.captured.try_clone().unwrap()],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    });
    attached.unwrap();
    exchange();
    let deadline = Instant::now() + PATIENCE;
    while attachments().len() != 1 || attachments() == first {
        assert!(Instant::now() < deadline, "{:?}", attachments());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn streams_count_in_the_limits_of_connections() {
    // Both workloads are here, so each connection counts twice.
    let of_all = Settings {
        max_connections: Some(2),
        ..Settings::default()
    };
    let of_workload = Settings {
        max_per_workload: Some(1),
        ..Settings::default()
    };
    for settings in [of_all, of_workload] {
        let world = World::with(&[], &settings);
        let (client, mut server) = (world.connect(), world.accept());
        assert_eq!(world.proxy.connections(), 2);
        let second = world.connect();
        second
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let waits = read(&second).unwrap_err();
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
        second.set_read_timeout(Some(PATIENCE)).unwrap();
        server.write_all(b"first").unwrap();
        drop(server);
        assert_eq!(read(&client).unwrap(), "first");
        drop(client);
        let mut server = world.accept();
        server.write_all(b"second").unwrap();
        drop(server);
        assert_eq!(read(&second).unwrap(), "second");
    }
}

#[test]
fn a_stream_to_a_workload_with_its_share_of_connections_is_refused() {
    let settings = Settings {
        max_per_workload: Some(1),
        ..Settings::default()
    };
    let world = World::with(&[], &settings);
    let _first = (world.connect(), world.accept());
    let mut asked = to(world.tunnels, world.application.local_addr().unwrap());
    asked.key.attachment = 0;
    let (report, made) = mpsc::channel();
    world.engine.tunnels.outbound(move |outbound| async move {
        let _ = report.send(outbound.connect(&asked).await);
    });
    let made = made.recv_timeout(PATIENCE).unwrap();
    assert!(
        matches!(&made, Err(Error::Refused { status, .. }) if status.as_u16() == 503),
        "{made:?}"
    );
}

#[test]
fn a_client_with_its_share_of_tunnels_is_reported() {
    let world = World::new();
    let observer = world.proxy.observer();
    assert!(observer.bounded().is_empty());
    let most = settings().tunnels_of_address;
    let connect = || TcpStream::connect(world.tunnels).unwrap();
    let _silent: Vec<_> = (0..=most).map(|_| connect()).collect();
    let until = Instant::now() + PATIENCE;
    while observer.bounded().is_empty() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    let bounded = observer.bounded();
    let [(name, bounded, why)] = &bounded[..] else {
        panic!("{bounded:?}");
    };
    let found = (name.name(), bounded.refused, bounded.deferred, why.holder);
    assert_eq!(found, ("server", 1, 0, "one client"));
    assert_eq!(why.what, "tunnels to this workload");
}
