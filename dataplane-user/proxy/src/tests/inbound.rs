//! Inbound connections, the policies that refuse and end them, and snapshots from another thread.

use model::{
    Effect, IstioNamespace, IstioPolicy,
    authorization::{Action, Authorization, Match, Rule, Values},
};
use relay::{Direction, Permit};

use super::*;
use crate::shared::{Accepted, Command};

/// A proxy that logs, and a workload without listening sockets.
fn attached(hold: Duration) -> (Proxy, Lines) {
    let lines = Lines::default();
    let settings = Settings {
        workers: 2,
        hold,
        ..Settings::default()
    };
    let proxy = Proxy::start_logging_to(settings, lines.clone(), &none_dies()).unwrap();
    attach(&proxy, "client", Egress::Allow);
    (proxy, lines)
}

fn attach(proxy: &Proxy, name: &str, egress: Egress) {
    let workload = Workload::new(WorkloadName::new("default", name), Place::Elsewhere);
    proxy
        .add(Attachment {
            workload: Arc::new(workload),
            namespace: None,
            outbound: vec![],
            inbound: vec![],
            tunnels: vec![],
            egress,
        })
        .unwrap();
}

/// A connection of a workload to the listening socket's address, where it has arrived, and worker `number` relays it from
/// there. In a cluster, the kernel redirects it to the proxy.
fn begin(proxy: &Proxy, number: usize, direction: Direction, at: &TcpListener) -> TcpStream {
    let client = connect(at.local_addr().unwrap());
    let socket = accept(at);
    socket.set_nonblocking(true).unwrap();
    let of = proxy.relay().entries().pop().unwrap().attached;
    let accepted = Accepted {
        socket: socket.into(),
        client: client.local_addr().unwrap(),
        direction,
        permit: Permit::acquire(&of, direction).unwrap(),
    };
    let shared = proxy.engines.shared();
    shared.send(number, Command::Relay(accepted)).unwrap();
    client
}

/// Both sides of a connection through the proxy, over which something was said.
fn established(
    proxy: &Proxy,
    number: usize,
    direction: Direction,
    at: &TcpListener,
) -> (TcpStream, TcpStream) {
    let client = begin(proxy, number, direction, at);
    let server = accept(at);
    says(&server, &client);
    (client, server)
}

fn says(mut from: &TcpStream, mut to: &TcpStream) {
    from.write_all(b"word").unwrap();
    let mut seen = [0; 4];
    to.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"word");
}

/// A snapshot with a policy that refuses clients of a range.
fn denying(range: &str) -> Snapshot {
    let sources = Values {
        any: [range.parse().unwrap()].into(),
        none: Box::default(),
    };
    let of = Match {
        sources,
        ..Match::default()
    };
    let policy = IstioPolicy {
        selector: Some(Box::default()),
        effect: Effect::Authorization(Arc::new(Authorization {
            action: Action::Deny,
            dry_run: false,
            rules: [Rule([[of].into()].into())].into(),
        })),
    };
    let mut namespace = IstioNamespace::default();
    let name = "AuthorizationPolicy deny".into();
    namespace.policies.insert(name, Arc::new(policy));
    let mut snapshot = Snapshot::default();
    let namespaces = &mut snapshot.istio.namespaces;
    namespaces.insert("default".into(), Arc::new(namespace));
    snapshot
}

#[test]
fn a_changed_policy_ends_the_inbound_connections_that_it_forbids() {
    let (proxy, lines) = attached(Duration::ZERO);
    let (inbound, outbound) = (Direction::Inbound, Direction::Outbound);
    let listener = endpoint().0;
    proxy.set_snapshot(denying("10.0.0.0/8"));
    let forbidden = [0, 1].map(|number| established(&proxy, number, inbound, &listener));
    let other = established(&proxy, 0, outbound, &listener);
    proxy.set_snapshot(denying("192.0.2.0/24"));
    for (client, server) in forbidden.iter().chain([&other]) {
        says(client, server);
    }
    proxy.routes().set_snapshot(denying("127.0.0.0/8"));
    for (client, server) in &forbidden {
        assert_eq!(ending(client), Err(ErrorKind::ConnectionReset));
        assert_eq!(ending(server), Err(ErrorKind::ConnectionReset));
    }
    says(&other.1, &other.0);
    // A new connection is refused.
    let refused = begin(&proxy, 1, inbound, &listener);
    assert_eq!(ending(&refused), Err(ErrorKind::ConnectionReset));
    drop(other);
    proxy.drain(PATIENCE);
    assert_eq!(lines.flags(), ["-", "DENY", "DENY", "DENY"]);
    let text = lines.text();
    let named = text.lines().filter(|line| {
        line.contains(" inbound ") && line.contains("policy=\"AuthorizationPolicy default/deny\"")
    });
    assert_eq!(named.count(), 3, "{text}");
}

#[test]
fn each_end_and_its_flag() {
    let (proxy, lines) = attached(Duration::ZERO);
    let listener = endpoint().0;
    let reset = |stream: TcpStream| {
        let linger = Some(Duration::ZERO);
        SockRef::from(&stream).set_linger(linger).unwrap();
    };
    let talk = || established(&proxy, 1, Direction::Inbound, &listener);
    let (client, server) = talk();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ending(&server).unwrap(), b"");
    says(&server, &client);
    drop(server);
    assert_eq!(ending(&client).unwrap(), b"");
    let (client, server) = talk();
    reset(client);
    assert_eq!(ending(&server), Err(ErrorKind::ConnectionReset));
    let (client, server) = talk();
    reset(server);
    assert_eq!(ending(&client), Err(ErrorKind::ConnectionReset));
    let left = talk();
    // Also a proxy that is dropped leaves nothing.
    drop(proxy);
    assert_eq!(ending(&left.0), Err(ErrorKind::ConnectionReset));
    assert_eq!(ending(&left.1), Err(ErrorKind::ConnectionReset));
    assert_eq!(lines.flags(), ["-", "DC", "DRAIN", "UC"]);
    let bytes = lines.text().matches("bytes_sent=4").count();
    assert_eq!(bytes, 3, "{}", lines.text());
}

#[test]
fn much_arrives_whole_at_a_client_that_takes_its_time() {
    let (proxy, _) = attached(Duration::ZERO);
    let listener = endpoint().0;
    let bytes: Vec<u8> = (0..5_u32 << 18).flat_map(u32::to_le_bytes).collect();
    let (client, mut server) = established(&proxy, 0, Direction::Inbound, &listener);
    thread::scope(|scope| {
        scope.spawn(|| {
            server.write_all(&bytes).unwrap();
            server.shutdown(Shutdown::Write).unwrap();
        });
        receives(&client, &bytes, 30_000);
    });
}

#[test]
fn a_connection_waits_for_its_destination_and_the_snapshot_wakes_its_worker() {
    let (proxy, lines) = attached(Duration::from_hours(1));
    attach(&proxy, "waits", Egress::Deny);
    let (front, (listener, at)) = (endpoint().0, endpoint());
    let client = begin(&proxy, 1, Direction::Outbound, &front);
    let of = proxy.relay().entries().pop().unwrap().attached;
    while of.unknown() == 0 {
        thread::yield_now();
    }
    let mut snapshot = Snapshot::default();
    let vip = front.local_addr().unwrap();
    let service = Arc::new(service(vip.ip(), vip.port(), &[at]));
    snapshot.services.insert(service.name.clone(), service);
    proxy.set_snapshot(snapshot);
    let server = accept(&listener);
    says(&client, &server);
    drop((client, server));
    proxy.drain(PATIENCE);
    assert_eq!(lines.flags(), ["-"]);
}

#[test]
fn a_removed_workload_drains_while_it_has_connections() {
    let (proxy, _) = attached(Duration::ZERO);
    let listener = endpoint().0;
    let name = WorkloadName::new("default", "client");
    let (client, server) = established(&proxy, 1, Direction::Outbound, &listener);
    assert!(!proxy.drains(&name), "it is still attached");
    proxy.remove(&name, PATIENCE);
    assert!(proxy.drains(&name) && !proxy.drains(&WorkloadName::new("default", "other")));
    says(&client, &server);
    drop((client, server));
    while proxy.drains(&name) {
        thread::yield_now();
    }
    assert_eq!(proxy.connections(), 0);
}
