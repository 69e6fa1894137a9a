//! A server with sockets on loopback: the answers of each kind of client, and its figures.

use std::{
    collections::HashMap,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use dataplane_dns::{
    Captured, Client, Listener, LowerName, ResolvConf, Room, Server, Settings, Zone, question,
};
use hickory_proto::{
    op::Message,
    rr::{RData, Record, RecordType::A, rdata},
};
use model::{Names, WorkloadName};
use prometheus_client::{encoding::text::encode, registry::Registry};
use threads::none_dies;

use super::{TTLS, zone};

/// Longer than any answer takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);
const WEB: &str = "web.shop.svc.cluster.local";
const FOREIGN: &str = "www.example.com";
/// The codes of answers.
const OK: u8 = 0;
const FAILED: u8 = 2;
const MISSING: u8 = 3;
const UNKNOWN: u8 = 4;
const REFUSED: u8 = 5;

fn start(resolvers: Option<Vec<SocketAddr>>) -> Server {
    let settings = Settings {
        workers: 2,
        cache_bytes: 1 << 20,
        stale: Duration::ZERO,
        longest: 3600,
        room: Room::of(1 << 20),
        cluster_dns: Vec::new(),
        node: ResolvConf::default(),
        resolvers,
    };
    Server::start(settings, zone(), Box::new(drop), &none_dies()).unwrap()
}

/// A free port of loopback, for UDP and TCP.
fn sockets() -> (SocketAddr, UdpSocket, TcpListener) {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = udp.local_addr().unwrap();
        if let Ok(tcp) = TcpListener::bind(at) {
            return (at, udp, tcp);
        }
    }
}

fn take(server: &Server, number: u64) -> (SocketAddr, [Listener; 2]) {
    let (at, udp, tcp) = sockets();
    (at, server.take(number, udp, tcp).unwrap())
}

fn capture(server: &Server, number: u64, client: Client) -> (SocketAddr, Captured) {
    let (at, sockets) = take(server, number);
    (at, server.capture(number, client, &sockets))
}

fn client(name: &str, resolvers: &[SocketAddr]) -> Client {
    let search = ["shop.svc.cluster.local", "svc.cluster.local"];
    Client {
        search: search.map(|end| LowerName::parse(end).unwrap()).into(),
        ndots: 5,
        workload: Some(WorkloadName::new("shop", name)),
        namespace: "shop".into(),
        ..Client::unknown(resolvers.to_vec())
    }
}

/// A resolver that answers every question with one address, for a minute.
fn resolver() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 1500];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let query = Message::from_vec(&buffer[..length]).unwrap();
            let mut message = Message::response(query.metadata.id, query.metadata.op_code);
            let question = query.queries[0].clone();
            let data = RData::A(rdata::A::new(192, 0, 2, 7));
            message.add_answer(Record::from_rdata(question.name().clone(), 60, data));
            message.add_query(question);
            let _ = socket.send_to(&message.to_vec().unwrap(), from);
        }
    });
    at
}

/// A port where nobody listens.
fn closed() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1))
}

fn query(name: &str, bits: u8) -> Vec<u8> {
    question(7, &LowerName::parse(name).unwrap(), 1, bits, true)
}

/// Sends a query to the server, and returns the code of its answer.
fn ask_from(own: &str, at: SocketAddr, query: &[u8]) -> u8 {
    let socket = UdpSocket::bind(own).unwrap();
    socket.connect(at).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.send(query).unwrap();
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer).unwrap();
    assert!(length > 11 && answer[..2] == query[..2] && answer[2] & 0x80 != 0);
    // Clients take no answer without their question. A query that is not understood is refused without.
    assert!(answer[5] == 1 || query[11] == 0, "{answer:02x?}");
    answer[3] & 0x0f
}

fn ask(at: SocketAddr, query: &[u8]) -> u8 {
    ask_from("127.0.0.1:0", at, query)
}

/// Sends a query by a connection.
fn tell(stream: &mut TcpStream, query: &[u8]) {
    let length = u16::try_from(query.len()).unwrap().to_be_bytes();
    stream.write_all(&[&length[..], query].concat()).unwrap();
}

/// Returns the code of the next answer of a connection.
fn hear(stream: &mut TcpStream) -> u8 {
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).unwrap();
    answer[3] & 0x0f
}

fn ask_tcp(at: SocketAddr, query: &[u8]) -> u8 {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    tell(&mut stream, query);
    hear(&mut stream)
}

/// A question of class Chaos, which only resolvers understand.
fn chaos() -> Vec<u8> {
    let mut query = question(7, &LowerName::parse("version.bind").unwrap(), 16, 1, false);
    let end = query.len();
    query[end - 1] = 3;
    query
}

/// The server's metrics as text.
fn figures(server: &Server) -> String {
    let (mut registry, mut text) = (Registry::default(), String::new());
    registry.register_collector(Box::new(server.observer()));
    encode(&mut text, &registry).unwrap();
    text
}

#[test]
fn each_query_gets_an_answer_and_is_counted() {
    let server = start(None);
    let observer = server.observer();
    let (alone, _alone) = capture(&server, 2, client("alone", &[]));
    let (lost, _lost) = capture(&server, 3, client("lost", &[closed()]));
    let (good, _good) = capture(&server, 4, client("good", &[resolver()]));
    assert_eq!((observer.captured(), observer.counted()), (3, [0; 4]));
    let from = observer.queries(None, 1).next;
    for (at, query, code, counted) in [
        (alone, query(WEB, 1), OK, [1, 1, 0, 0]),
        (alone, query(FOREIGN, 1), REFUSED, [2, 1, 0, 0]),
        (alone, chaos(), UNKNOWN, [3, 1, 0, 0]),
        (lost, query(FOREIGN, 1), FAILED, [4, 1, 0, 1]),
        (lost, chaos(), FAILED, [5, 1, 0, 2]),
        (good, query(FOREIGN, 1), OK, [6, 1, 0, 2]),
        (good, query(FOREIGN, 1), OK, [7, 1, 1, 2]),
        (
            good,
            query("no.shop.svc.cluster.local", 1),
            OK,
            [8, 1, 1, 2],
        ),
        (good, chaos(), OK, [9, 1, 1, 2]),
    ] {
        assert_eq!(ask(at, &query), code, "{counted:?}");
        assert_eq!(observer.counted(), counted);
        // The log goes on for a reader that comes again.
        assert!(observer.queries(Some(from), 0).events.is_empty());
    }
    assert_eq!(ask_tcp(good, &query(WEB, 1)), OK);
    assert_eq!(ask_tcp(lost, &query(FOREIGN, 1)), FAILED);
    let v6 = LowerName::parse("kubernetes.default.svc.cluster.local").unwrap();
    assert_eq!(ask(alone, &question(7, &v6, 28, 1, true)), OK);
    let log = observer.queries(Some(from), 100);
    let queries = log.events.iter();
    let said: Vec<_> = queries
        .map(|of| (&*of.by, &*of.client, &*of.protocol))
        .collect();
    assert_eq!(
        said,
        [
            ("service", "shop/alone", "udp"),
            ("forward", "shop/alone", "udp"),
            ("forward", "shop/lost", "udp"),
            ("forward", "shop/good", "udp"),
            ("cache", "shop/good", "udp"),
            ("forward", "shop/good", "udp"),
            ("service", "shop/good", "tcp"),
            ("forward", "shop/lost", "tcp"),
            ("service", "shop/alone", "udp"),
        ]
    );
    for (at, address) in [(3, "192.0.2.7"), (8, "2001:db8::1")] {
        let address: IpAddr = address.parse().unwrap();
        assert_eq!(log.events[at].addresses, [address]);
    }
    let shares = observer.cache_shares();
    assert_eq!(shares.keys().map(|of| &**of).collect::<Vec<_>>(), ["shop"]);
    assert!(
        shares["shop"].0 == 2 && shares["shop"].1 > 100,
        "{shares:?}"
    );
    assert_eq!(observer.cache_room(), 1 << 20);
    let text = figures(&server);
    for line in [
        "istio_dns_requests_total 12",
        "dataplane_dns_cache_entries 2",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(observer.flush(Some(&v6)), 0);
    assert_eq!(observer.flush(Some(&LowerName::parse(FOREIGN).unwrap())), 1);
    assert_eq!(observer.flush(None), 1);
}

/// Only resolvers know whether a host has a record that is no address.
#[test]
fn without_resolvers_the_answer_is_what_is_known() {
    let server = start(None);
    server.set_zone(super::hosts::zone());
    let (at, _captured) = capture(&server, 1, client("web", &[closed()]));
    // Each resolver is asked twice.
    assert_eq!(ask(at, &chaos()), FAILED);
    let failures = figures(&server).contains("istio_dns_upstream_failures_total 2");
    assert!(failures, "{}", figures(&server));
    let host = LowerName::parse("db.example.net").unwrap();
    for (query, code) in [
        (query("www.example.edu.shop.svc.cluster.local", 1), MISSING),
        (query("db.example.net", 1), OK),
        (question(7, &host, 15, 1, true), FAILED),
    ] {
        assert_eq!(ask(at, &query), code);
    }
}

/// Answers differ by the bits of a query: `explain` knows those that common clients set.
#[test]
fn an_explanation_shows_what_is_in_the_cache() {
    let server = start(None);
    let observer = server.observer();
    let (at, captured) = capture(&server, 1, client("web", &[resolver()]));
    let said = |name: &str| {
        let steps = observer.explain(1, name, A)?.unwrap();
        let step = steps.last().unwrap();
        Some((steps.len(), step.cached, step.addresses.len()))
    };
    assert_eq!(said("www.example.com."), Some((1, false, 0)));
    assert_eq!(said("web"), Some((1, false, 1)));
    assert!(observer.explain(2, "web", A).is_none(), "no such workload");
    for bits in [1, 3, 9, 11] {
        assert_eq!(ask(at, &query(FOREIGN, bits)), OK);
        assert_eq!(said("www.example.com."), Some((1, true, 1)), "{bits}");
        observer.flush(None);
    }
    drop(captured);
    while observer.captured() > 0 {
        thread::yield_now();
    }
    assert_eq!(said("web"), None);
}

#[test]
fn names_change_for_all_clients() {
    let server = start(None);
    let (at, _captured) = capture(&server, 1, client("web", &[]));
    assert_eq!(ask(at, &query(WEB, 1)), OK);
    let none = Zone::new(Names::default(), TTLS);
    server.zones().set(none);
    assert_eq!(ask(at, &query(WEB, 1)), REFUSED);
    server.set_zone(zone());
    assert_eq!(ask(at, &query(WEB, 1)), OK);
}

#[test]
fn clients_are_known_by_their_addresses() {
    let resolver = resolver();
    let server = start(Some(vec![resolver]));
    let (at, udp, tcp) = sockets();
    drop((udp, tcp));
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, at.port()));
    server.listen(&[at, v6]).unwrap();
    for name in [WEB, FOREIGN] {
        let query = query(name, 1);
        let codes = [
            ask(at, &query),
            ask_tcp(at, &query),
            ask_from("[::1]:0", v6, &query),
        ];
        assert_eq!(codes, [OK; 3], "{name}");
    }
    // The workload has two addresses; another address is nobody's.
    let server = start(None);
    let (at, sockets) = take(&server, 1);
    assert!(sockets.iter().all(Listener::is_ipv4));
    let (udp, tcp) = (
        UdpSocket::bind("[::1]:0").unwrap(),
        TcpListener::bind("[::1]:0").unwrap(),
    );
    assert!(
        !server
            .take(1, udp, tcp)
            .unwrap()
            .iter()
            .any(Listener::is_ipv4)
    );
    let addr = |last: u8| IpAddr::from([127, 0, 0, last]);
    let clients = [(2, "a"), (3, "a"), (4, "b")];
    let clients = clients.map(|(last, name)| (addr(last), client(name, &[resolver])));
    let captured = server.capture_by_address(1, HashMap::from(clients), &sockets);
    assert_eq!(server.observer().captured(), 2);
    for (own, code) in [
        ("127.0.0.2:0", OK),
        ("127.0.0.4:0", OK),
        ("127.0.0.5:0", REFUSED),
    ] {
        assert_eq!(ask_from(own, at, &query(FOREIGN, 1)), code, "{own}");
    }
    drop(captured);
}

/// 256 queries that wait for resolvers, and 32 connections.
#[test]
fn a_client_has_a_part_of_the_room() {
    let server = start(None);
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let resolvers = [silent.local_addr().unwrap()];
    let (at, _one) = capture(&server, 1, client("one", &resolvers));
    let (other, _two) = capture(&server, 2, client("two", &[]));
    let connect = |to| {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let mut stream = connect(at);
    for number in 0..=256 {
        tell(&mut stream, &query(&format!("n{number}.example.com"), 1));
    }
    assert_eq!(hear(&mut stream), REFUSED);
    assert_eq!(ask(at, &query(WEB, 1)), OK);
    assert_eq!(
        ask(other, &query(FOREIGN, 1)),
        REFUSED,
        "it has no resolvers"
    );
    let open: Vec<_> = (1..32).map(|_| connect(at)).collect();
    // Connections are accepted in their order.
    assert_eq!(connect(at).read(&mut [0]).unwrap(), 0);
    assert_eq!(ask_tcp(other, &query(WEB, 1)), OK);
    drop(open);
}
