//! The proxy with real sockets, on loopback: its VIPs are addresses of 127.0.0.0/8, all of which are
//! this machine's, and it listens on their ports.

mod endings;
mod inbound;
pub(super) mod observed;

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, mpsc},
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
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
pub(super) const VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 10, 96, 1));

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

/// An access log that the test reads.
#[derive(Clone, Default)]
pub(super) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Returns the flags of all connections, sorted.
    pub fn flags(&self) -> Vec<String> {
        let text = self.text();
        let flags = text
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("flags="));
        let mut flags: Vec<_> = flags.map(str::to_owned).collect();
        flags.sort();
        flags
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
pub(super) fn endpoint() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    (listener, at)
}

pub(super) fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub(super) fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads until the end, at most `chunk` bytes at a time, and wants these bytes.
pub(super) fn receives(mut stream: &TcpStream, bytes: &[u8], chunk: usize) {
    let (mut seen, mut chunk) = (Vec::with_capacity(bytes.len()), vec![0; chunk]);
    loop {
        match stream.read(&mut chunk).unwrap() {
            0 => break,
            count => seen.extend_from_slice(&chunk[..count]),
        }
    }
    let (count, wanted) = (seen.len(), bytes.len());
    assert!(seen == bytes, "{count} of {wanted} bytes, or others");
}

/// Reads to the end: the bytes, or the error.
pub(super) fn ending(mut stream: &TcpStream) -> Result<Vec<u8>, ErrorKind> {
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
        receives(&server, &bytes, 100_000);
    });
    drop(server);
    assert_eq!(ending(&client).unwrap(), b"");
    while proxy.connections() > 0 {
        thread::yield_now();
    }
}
