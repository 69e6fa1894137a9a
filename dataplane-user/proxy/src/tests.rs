//! The proxy with real sockets, on loopback: its VIPs are addresses of 127.0.0.0/8, all of which are
//! this machine's, and it listens on their ports.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use model::{
    Egress, Endpoint, Place, Protocol, Service, ServiceName, ServicePort, ServiceType, UseWaypoint,
    Workload,
};
use smallvec::smallvec;
use socket2::SockRef;
use threads::none_dies;

use super::*;

/// Long enough for anything on loopback; a test that waits so long fails.
const PATIENCE: Duration = Duration::from_secs(20);
const VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 10, 96, 1));

pub(super) fn service(vip: IpAddr, port: u16, endpoints: &[SocketAddr]) -> Service {
    let mut endpoints: Vec<Endpoint> = endpoints
        .iter()
        .map(|at| Endpoint::new(at.ip(), at.port()))
        .collect();
    endpoints.sort();
    Service {
        cluster_ips: smallvec![vip],
        ports: smallvec![ServicePort {
            endpoints,
            ..ServicePort::new(port, Protocol::Tcp)
        }],
        ..Service::new(ServiceName::new("default", "web"), ServiceType::ClusterIp)
    }
}

fn workload() -> Arc<Workload> {
    Arc::new(Workload::new(
        WorkloadName::new("default", "client"),
        Place::Elsewhere,
    ))
}

/// A proxy with one service, whose VIP and port is returned.
fn proxy(settings: &Settings, endpoints: &[SocketAddr], egress: Egress) -> (Proxy, SocketAddr) {
    proxy_after(settings, endpoints, egress, |_| {})
}

/// Returns a proxy as `proxy` does, for clients that connect before it starts: their bytes wait in their sockets.
fn proxy_after(
    settings: &Settings,
    endpoints: &[SocketAddr],
    egress: Egress,
    before: impl FnOnce(SocketAddr),
) -> (Proxy, SocketAddr) {
    let settings = Settings {
        access_log: AccessLog::Off,
        workers: 2,
        ..settings.clone()
    };
    let proxy = Proxy::start(settings, &none_dies()).unwrap();
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let service = Arc::new(service(VIP, port, endpoints));
    let mut snapshot = Snapshot::default();
    snapshot.services.insert(service.name.clone(), service);
    proxy.set_snapshot(snapshot);
    let attachment = Attachment {
        workload: workload(),
        namespace: None,
        outbound: vec![listener],
        inbound: vec![],
        tunnels: vec![],
        egress,
    };
    let vip = SocketAddr::new(VIP, port);
    before(vip);
    proxy.add(attachment).unwrap();
    (proxy, vip)
}

/// The lowest byte.
fn low(number: usize) -> u8 {
    number.to_le_bytes()[0]
}

/// A listening socket of an endpoint.
fn endpoint() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    (listener, at)
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads to the end: the bytes, or the error.
fn ending(mut stream: &TcpStream) -> Result<Vec<u8>, ErrorKind> {
    let mut read = Vec::new();
    match stream.read_to_end(&mut read) {
        Ok(_) => Ok(read),
        Err(error) => Err(error.kind()),
    }
}

#[test]
fn both_ways_and_each_end_for_itself() {
    let (listener, at) = endpoint();
    let (_proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let mut client = connect(vip);
    let mut server = accept(&listener);
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&server).unwrap(), b"question");
    // The other direction continues.
    thread::sleep(Duration::from_millis(20));
    server.write_all(b"answer").unwrap();
    drop(server);
    assert_eq!(ending(&client).unwrap(), b"answer");
}

#[test]
fn the_server_may_end_first() {
    let (listener, at) = endpoint();
    let (_proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let mut client = connect(vip);
    let mut server = accept(&listener);
    server.write_all(b"greeting").unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&client).unwrap(), b"greeting");
    client.write_all(b"reply").unwrap();
    drop(client);
    assert_eq!(ending(&server).unwrap(), b"reply");
}

#[test]
fn a_reset_stays_a_reset_in_both_directions() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let reset = |stream: TcpStream| {
        SockRef::from(&stream)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
    };
    let client = connect(vip);
    let server = accept(&listener);
    reset(client);
    assert_eq!(ending(&server), Err(ErrorKind::ConnectionReset));
    drop(server);

    let client = connect(vip);
    let mut server = accept(&listener);
    server.write_all(b"last words").unwrap();
    let mut read = [0; 10];
    (&client).read_exact(&mut read).unwrap();
    reset(server);
    assert_eq!(ending(&client), Err(ErrorKind::ConnectionReset));
    while proxy.connections() > 0 {
        thread::yield_now();
    }
}

#[test]
fn an_endpoint_that_refuses_is_not_the_end() {
    let (listener, at) = endpoint();
    let gone: Vec<SocketAddr> = (0..2).map(|_| endpoint().1).collect();
    let (_proxy, vip) = proxy(&Settings::default(), &[gone[0], at, gone[1]], Egress::Allow);
    for _ in 0..20 {
        let client = connect(vip);
        let mut server = accept(&listener);
        server.write_all(b"x").unwrap();
        drop(server);
        assert_eq!(ending(&client).unwrap(), b"x");
    }
    let (_other, vip) = proxy(&Settings::default(), &gone, Egress::Allow);
    assert_eq!(ending(&connect(vip)), Err(ErrorKind::ConnectionReset));
}

#[test]
fn what_was_said_before_it_was_accepted_gets_there() {
    let (listener, at) = endpoint();
    let gone: Vec<SocketAddr> = (0..2).map(|_| endpoint().1).collect();
    let settings = Settings {
        connect_timeout: PATIENCE,
        ..Settings::default()
    };
    // From sizes that fit into one packet to sizes that need several reads.
    let said = |number: usize| vec![low(number); [1, 512, 16 << 10, 100_000][number % 4]];
    let mut clients = vec![];
    let (proxy, _) = proxy_after(&settings, &[gone[0], at, gone[1]], Egress::Allow, |vip| {
        clients = (0..40)
            .map(|number| {
                let mut client = connect(vip);
                client.write_all(&said(number)).unwrap();
                if number % 3 == 0 {
                    client.shutdown(Shutdown::Write).unwrap();
                }
                client
            })
            .collect();
        for _ in 0..10 {
            let mut client = connect(vip);
            client.write_all(b"never mind").unwrap();
            let client = SockRef::from(&client);
            client.set_linger(Some(Duration::ZERO)).unwrap();
        }
    });
    thread::spawn(move || {
        loop {
            let mut stream = accept(&listener);
            thread::spawn(move || {
                // A client that reset its connection may come this far.
                let _ = io::copy(&mut stream.try_clone().unwrap(), &mut stream);
            });
        }
    });
    for (number, mut client) in clients.into_iter().enumerate() {
        let wanted = said(number);
        let mut seen = vec![0; wanted.len()];
        client.read_exact(&mut seen).unwrap();
        assert!(seen == wanted, "{number}: other bytes");
        if number % 3 != 0 {
            client.shutdown(Shutdown::Write).unwrap();
        }
        assert_eq!(ending(&client).unwrap(), b"", "{number}");
    }
    while proxy.connections() > 0 {
        thread::yield_now();
    }
}

#[test]
fn what_has_no_destination_is_reset() {
    let (_listener, at) = endpoint();
    let (_proxy, vip) = proxy(&Settings::default(), &[], Egress::Allow);
    assert_eq!(
        ending(&connect(vip)),
        Err(ErrorKind::ConnectionReset),
        "no endpoint"
    );
    let (_proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let itself = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), vip.port());
    assert_eq!(
        ending(&connect(itself)),
        Err(ErrorKind::ConnectionReset),
        "the proxy itself"
    );
}

/// The kernel's programs do not judge connections that came by a virtual interface.
#[test]
fn a_connection_to_a_service_with_a_waypoint_is_reset() {
    let (_listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let service = Arc::new(service(VIP, vip.port(), &[at]));
    let mut snapshot = Snapshot::default();
    snapshot.services.insert(service.name.clone(), service);
    let of = snapshot.istio.namespaces.entry("default".into());
    let gate = UseWaypoint::Gateway(ServiceName::new("default", "gate"));
    Arc::make_mut(of.or_default()).waypoint = Some(gate);
    snapshot.istio.denies = true;
    proxy.set_snapshot(snapshot);
    assert_eq!(ending(&connect(vip)), Err(ErrorKind::ConnectionReset));
}

#[test]
fn much_arrives_whole_past_readers_that_take_their_time() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let bytes: Vec<u8> = (0..40_u32 << 18).flat_map(u32::to_le_bytes).collect();
    let mut client = connect(vip);
    let server = accept(&listener);
    thread::scope(|scope| {
        scope.spawn(|| {
            client.write_all(&bytes).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
        });
        // Until nothing moves any more: the sender waits, and the proxy holds little.
        thread::sleep(Duration::from_millis(300));
        let mut server = &server;
        let mut seen = Vec::with_capacity(bytes.len());
        let mut chunk = vec![0; 100_000];
        loop {
            match server.read(&mut chunk).unwrap() {
                0 => break,
                count => seen.extend_from_slice(&chunk[..count]),
            }
        }
        assert!(
            seen == bytes,
            "{} of {} bytes, or others",
            seen.len(),
            bytes.len()
        );
    });
    drop(server);
    assert_eq!(ending(&client).unwrap(), b"");
    while proxy.connections() > 0 {
        thread::yield_now();
    }
}

#[test]
fn draining_waits_for_connections_and_cuts_the_rest() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let mut client = connect(vip);
    let server = accept(&listener);
    let (sender, drained) = mpsc::channel();
    thread::spawn(move || {
        proxy.drain(PATIENCE);
        sender.send(()).unwrap();
    });
    // The proxy has closed its listener, and the connection continues.
    while TcpStream::connect(vip).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    client.write_all(b"still").unwrap();
    assert!(drained.try_recv().is_err());
    drop(client);
    assert_eq!(ending(&server).unwrap(), b"still");
    // The drop also ends connections of the loop above that the endpoint did not accept.
    drop((server, listener));
    drained.recv_timeout(PATIENCE).unwrap();

    let (listener, at) = endpoint();
    let (proxy, vip) = self::proxy(&Settings::default(), &[at], Egress::Allow);
    let client = connect(vip);
    let server = accept(&listener);
    proxy.drain(Duration::from_millis(50));
    assert_eq!(ending(&client), Err(ErrorKind::ConnectionReset));
    assert_eq!(ending(&server), Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_removed_workload_can_be_attached_again() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let again = || Attachment {
        workload: workload(),
        namespace: None,
        outbound: vec![],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    };
    assert!(matches!(proxy.add(again()), Err(AttachError::Attached(_))));
    let client = connect(vip);
    let server = accept(&listener);
    proxy.remove(&workload().name, Duration::from_millis(100));
    proxy.add(again()).unwrap();
    assert_eq!(
        ending(&client),
        Err(ErrorKind::ConnectionReset),
        "cut at the deadline"
    );
    drop(server);
}

#[test]
fn only_the_removed_workload_accepts_no_more() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let others = closed.local_addr().unwrap();
    proxy
        .add(Attachment {
            workload: Arc::new(Workload::new(
                WorkloadName::new("default", "other"),
                Place::Elsewhere,
            )),
            namespace: None,
            outbound: vec![closed],
            inbound: vec![],
            tunnels: vec![],
            egress: Egress::Allow,
        })
        .unwrap();
    proxy.remove(&WorkloadName::new("default", "other"), PATIENCE);
    while TcpStream::connect(others).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    let mut client = connect(vip);
    client.write_all(b"still").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&accept(&listener)).unwrap(), b"still");
}

#[test]
fn connections_go_to_a_worker_that_has_far_fewer() {
    let (_listener, at) = endpoint();
    let (proxy, _) = proxy(&Settings::default(), &[at], Egress::Allow);
    let shared = proxy.engines.shared();
    assert_eq!(shared.less_loaded(0, 8), None);
    for count in 1..=9 {
        shared.loads[1].add();
        let other = (count > 8).then_some(0);
        assert_eq!(shared.less_loaded(1, 8), other, "{count}");
        assert_eq!(shared.less_loaded(0, 8), None);
    }
    shared.loads[0].add();
    assert_eq!(shared.less_loaded(1, 8), None);
    shared.loads[0].sub();
    assert_eq!(shared.loads[1].connections(), 9);
    for _ in 0..9 {
        shared.loads[1].sub();
    }
    let held = [5, 7].map(|bytes| bytes << 10);
    for (load, held) in shared.loads.iter().zip(held) {
        load.set_held(held);
    }
    assert_eq!(shared.held(), 12 << 10);
}

#[test]
fn tunnels_are_left_to_another_engine() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    let tunnels = TcpListener::bind("127.0.0.1:0").unwrap();
    let (copy, at) = (tunnels.try_clone().unwrap(), tunnels.local_addr().unwrap());
    let other = Workload::new(WorkloadName::new("default", "other"), Place::Elsewhere);
    proxy
        .add(Attachment {
            workload: Arc::new(other),
            namespace: None,
            outbound: vec![],
            inbound: vec![],
            tunnels: vec![tunnels],
            egress: Egress::Allow,
        })
        .unwrap();
    let tunnel = connect(at);
    let relayed = connect(vip);
    accept(&listener);
    thread::sleep(Duration::from_millis(50));
    let (_, from) = copy.accept().expect("it is still in the backlog");
    assert_eq!(from, tunnel.local_addr().unwrap());
    drop(relayed);
}

#[test]
fn connections_beyond_the_limit_wait_in_the_kernel() {
    let (listener, at) = endpoint();
    let settings = Settings {
        max_connections: Some(2),
        ..Settings::default()
    };
    let (proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    let first = [connect(vip), connect(vip)];
    let servers = [accept(&listener), accept(&listener)];
    let mut third = connect(vip);
    third.write_all(b"patience").unwrap();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(proxy.connections(), 2);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    listener.set_nonblocking(false).unwrap();
    drop((first, servers));
    let server = accept(&listener);
    drop(third);
    assert_eq!(ending(&server).unwrap(), b"patience");
}

/// The effect of keepalive, when the machine of one side is gone.
#[test]
fn a_side_that_breaks_after_its_last_byte_ends_the_connection() {
    let (listener, at) = endpoint();
    let (proxy, vip) = proxy(&Settings::default(), &[at], Egress::Allow);
    for of_client in [false, true] {
        let client = connect(vip);
        let server = accept(&listener);
        let (gone, left) = if of_client {
            (client, server)
        } else {
            (server, client)
        };
        gone.shutdown(Shutdown::Write).unwrap();
        assert_eq!((&left).read(&mut [0]).unwrap(), 0);
        SockRef::from(&gone)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
        drop(gone);
        for _ in 0..300 {
            if proxy.connections() == 0 {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(proxy.connections(), 0, "of the client: {of_client}");
        let error = (&left)
            .write(b"still there?")
            .and_then(|_| (&left).write(b"!"));
        assert!(error.is_err(), "{error:?}");
    }
}

#[test]
fn silence_ends_a_connection_where_that_is_asked_for() {
    let (listener, at) = endpoint();
    let settings = Settings {
        idle_timeout: Some(Duration::from_secs(1)),
        ..Settings::default()
    };
    let (_proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    let client = connect(vip);
    let server = accept(&listener);
    assert_eq!(ending(&client), Err(ErrorKind::ConnectionReset));
    assert_eq!(ending(&server), Err(ErrorKind::ConnectionReset));
}

/// Writes until the reader takes no more bytes.
fn fill(mut stream: &TcpStream) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (mut written, mut refused) = (0, 0);
    let chunk = vec![7; 64 << 10];
    while refused < 6 {
        match stream.write(&chunk) {
            Ok(count) => (written, refused) = (written + count, 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                refused += 1;
                thread::sleep(Duration::from_millis(5));
            }
            // The proxy has ended it.
            Err(_) => break,
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

#[test]
fn readers_that_stall_cost_their_own_workload_its_connections() {
    // The values in docs/security.md and docs/proxy.md.
    assert_eq!(Settings::default().max_held, 128 << 20);
    let (listener, at) = endpoint();
    // Little fits the endpoint's socket.
    SockRef::from(&listener)
        .set_recv_buffer_size(16 << 10)
        .unwrap();
    let settings = Settings {
        max_held: 2 << 20,
        ..Settings::default()
    };
    let (proxy, vip) = proxy(&settings, &[at], Egress::Allow);
    let other = TcpListener::bind("0.0.0.0:0").unwrap();
    let other_vip = SocketAddr::new(VIP, other.local_addr().unwrap().port());
    let mut snapshot = Snapshot::default();
    for (name, vip) in [("web", vip), ("other", other_vip)] {
        let mut service = service(vip.ip(), vip.port(), &[at]);
        service.name = ServiceName::new("default", name);
        let service = Arc::new(service);
        snapshot.services.insert(service.name.clone(), service);
    }
    proxy.set_snapshot(snapshot);
    let hog = WorkloadName::new("default", "hog");
    proxy
        .add(Attachment {
            workload: Arc::new(Workload::new(hog.clone(), Place::Elsewhere)),
            namespace: None,
            outbound: vec![other],
            inbound: vec![],
            tunnels: vec![],
            egress: Egress::Allow,
        })
        .unwrap();
    let slow = connect(vip);
    let slow_server = accept(&listener);
    let sent = fill(&slow);
    let hogs: Vec<_> = (0..120)
        .map(|_| {
            let client = connect(other_vip);
            let server = accept(&listener);
            fill(&client);
            (client, server)
        })
        .collect();
    let stalled = proxy.observer().stalled();
    let held = proxy.engines.shared().held();
    assert!(
        matches!(&stalled[..], [(name, 1..120)] if *name == hog),
        "{stalled:?}, {held} bytes are held"
    );
    assert!(held <= settings.max_held, "{held} bytes are held");
    // The connection that has stalled for longest is another workload's.
    drop(hogs);
    slow.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&slow_server).unwrap().len(), sent);
}
