//! Connections that go to a waypoint.

use std::net::IpAddr;

use model::{Binding, Gateway, GatewayAddress, Identity, IstioNamespace, UseWaypoint};
use ppp::v2::{Addresses, Header, IPv4};
use relay::{Client, Exceeded};
use socket2::{Domain, Socket, Type};

use super::{super::arrive::Arrive, *};
use crate::{
    copy::Flow,
    headers::Statements,
    inbound::{Accepted, Inbound},
    request::{Refusal, Request},
};

/// The waypoint's Pod, and its service.
const GATE: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 9);
const GATE_VIP: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 10);
/// A waypoint, which connects all streams to one application.
struct Gate {
    application: SocketAddr,
    requests: mpsc::Sender<Request>,
}

impl Inbound for Gate {
    async fn connect(&self, request: Request) -> Result<Accepted, Refusal> {
        let _ = self.requests.send(request);
        let socket = tokio::net::TcpStream::connect(self.application).await;
        Ok(Accepted {
            socket: socket.map_err(|_| Refusal::Unavailable)?,
            flow: Arc::new(Flow::default()),
            done: Box::new(|_| {}),
        })
    }

    fn headers(&self) -> http::HeaderMap {
        http::HeaderMap::new()
    }

    fn client(&self, ip: IpAddr) -> Client {
        Client::Address(ip)
    }

    fn stalled(&self) {}

    fn waits(&self, _: Exceeded) {}

    fn failed(&self, _: SocketAddr, _: &Error) {}
}

impl World {
    /// Makes the workload `gate`, at this address, the waypoint of the service.
    fn put_behind(&self, gate: SocketAddr) {
        let mut snapshot = self.proxy.relay().index().1.snapshot().clone();
        let SocketAddr::V4(at) = gate else {
            panic!("{gate}")
        };
        let pod = workload("gate", &[*at.ip()]);
        snapshot.workloads.insert(pod.name.clone(), pod);
        let vip = SocketAddr::new(GATE_VIP.into(), 15008);
        let name = ServiceName::new("shop", "gate");
        let of_gate = Service {
            name: name.clone(),
            ..service(vip, gate)
        };
        snapshot.services.insert(name.clone(), Arc::new(of_gate));
        let gateway = Gateway {
            for_services: true,
            for_workloads: false,
            addresses: [GatewayAddress::Ip(vip.ip())].into(),
            ..Gateway::default()
        };
        let istio = &mut snapshot.istio;
        istio.waypoints = true;
        istio.gateways.insert(name.clone(), Arc::new(gateway));
        let of = IstioNamespace {
            waypoint: Some(UseWaypoint::Gateway(name)),
            ..IstioNamespace::default()
        };
        istio.namespaces.insert("shop".into(), Arc::new(of));
        self.proxy.set_snapshot(snapshot);
    }
}

/// The waypoint gets the service's address as the destination of the stream, and proves the identity of its Pod.
#[test]
fn a_connection_to_a_service_with_a_waypoint_goes_to_the_waypoint() {
    for (account, is_expected) in [("gate", true), ("server", false)] {
        let world = World::new();
        let accepting = TcpListener::bind((GATE, 0)).unwrap();
        let at = accepting.local_addr().unwrap();
        let (requests, seen) = mpsc::channel();
        let gate = Arc::new(Gate {
            application: world.application.local_addr().unwrap(),
            requests,
        });
        let tunnels = &world.engine.tunnels;
        let listening = tunnels
            .listen(accepting, (0, identity(account)), gate)
            .unwrap();
        world.put_behind(at);
        let mut client = world.connect();
        let sent = client.write_all(b"hello");
        if !is_expected {
            assert!(sent.and_then(|()| read(&client)).is_err());
            drop(listening);
            let lines = world.end();
            assert!(lines[0].contains("flags=TLS_FAILURE"), "{lines:?}");
            continue;
        }
        client.shutdown(Shutdown::Write).unwrap();
        let server = world.accept();
        assert_eq!(read(&server).unwrap(), "hello");
        drop(server);
        assert_eq!(read(&client).unwrap(), "");
        let request = seen.recv_timeout(PATIENCE).unwrap();
        assert_eq!(request.destination(), Some(world.vip));
        assert_eq!(request.peer, identity("client"));
        drop(listening);
        let lines = world.end();
        let line = &lines[0];
        let words = [
            format!(" endpoint={at} "),
            format!(" peer={} ", identity("gate")),
        ];
        assert!(words.iter().all(|of| line.contains(of)), "{line}");
        assert_eq!(
            lines.len(),
            1,
            "the endpoint's own proxy got a tunnel: {lines:?}"
        );
    }
}

impl World {
    /// Makes the server a Pod of a Gateway with this binding.
    fn bind_server(&self, binding: Binding) {
        let mut snapshot = self.proxy.relay().index().1.snapshot().clone();
        let label = ("gateway.networking.k8s.io/gateway-name", "gate");
        let server = Workload {
            labels: [(label.0.into(), label.1.into())].into(),
            ..(*workload("server", &[SERVER])).clone()
        };
        snapshot
            .workloads
            .insert(server.name.clone(), Arc::new(server));
        let gateway = Gateway {
            addresses: [GatewayAddress::Ip(GATE_VIP.into())].into(),
            binding: Some(binding),
            ..Gateway::default()
        };
        let name = ServiceName::new("shop", "gate");
        snapshot.istio.gateways.insert(name, Arc::new(gateway));
        self.proxy.set_snapshot(snapshot);
    }
}

/// The proxy accepts the tunnels to a Pod of a Gateway with a binding, and connects their streams to the Pod, whatever their
/// destination is. Each case has the parts of the binding: the header, and the port.
#[test]
fn a_pod_of_a_gateway_takes_streams_as_its_binding_says() {
    for (has_header, has_port) in [(true, true), (true, false), (false, true), (false, false)] {
        let world = World::new();
        let own = if has_header && has_port {
            Ipv4Addr::LOCALHOST
        } else {
            SERVER
        };
        let pod = TcpListener::bind((own, 0)).unwrap();
        let port = pod.local_addr().unwrap().port();
        world.bind_server(Binding {
            has_header,
            port: has_port.then_some(port),
        });
        let authority = SocketAddr::from(([10, 96, 0, 10], if has_port { 80 } else { port }));
        let asked = to(world.tunnels, authority);
        let (report, made) = mpsc::channel();
        world.engine.tunnels.outbound(move |outbound| async move {
            let _ = report.send(outbound.connect(&asked).await);
        });
        let stream = made.recv_timeout(PATIENCE).unwrap();
        assert!(
            stream.is_ok(),
            "{has_header} {has_port}: {:?}",
            stream.err()
        );
        let (mut accepted, from) = pod.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let mut bytes = [0; 256];
        let read = accepted.read(&mut bytes);
        if has_header {
            let header = Header::try_from(&bytes[..read.unwrap()]).unwrap();
            let Addresses::IPv4(addresses) = header.addresses else {
                panic!("{header:?}")
            };
            let client = addresses.source_address;
            let wanted = IPv4::new(
                client,
                Ipv4Addr::new(10, 96, 0, 10),
                addresses.source_port,
                authority.port(),
            );
            assert_eq!((addresses, client.is_loopback()), (wanted, true));
            let fields: Vec<_> = header
                .tlvs()
                .map(|of| of.unwrap().value.into_owned())
                .collect();
            assert_eq!(fields, [identity("client").to_string().into_bytes()]);
        } else {
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        assert!(from.ip().is_loopback());
        drop(stream);
        let lines = world.end();
        let of = format!(" dst={SERVER}:{port} ");
        assert!(lines.iter().any(|line| line.contains(&of)), "{lines:?}");
    }
}

impl World {
    /// Returns what connects streams to the server.
    fn arrive(&self) -> Arrive {
        let entries = self.proxy.relay().entries();
        let mut all = entries.iter().filter(|entry| entry.listeners.is_some());
        let server = all.find(|entry| entry.attached.workload.name.name() == "server");
        let attached = &server.unwrap().attached;
        Arrive::new(&self.engine.shared, attached, identity("server"))
    }

    /// Runs an attempt to connect a stream of this peer to the server, for this time at most. `None`: the attempt is given up.
    fn arrives(&self, peer: Identity, at_most: Duration) -> Option<Result<(), Refusal>> {
        let request = Request {
            peer,
            client: SocketAddr::from((Ipv4Addr::LOCALHOST, 40_000)),
            authority: "10.96.0.10:80".parse().unwrap(),
            statements: Statements::default(),
        };
        let (arrive, (report, made)) = (self.arrive(), mpsc::channel());
        self.engine.tunnels.outbound(move |_| async move {
            let attempt = tokio::time::timeout(at_most, arrive.connect(request)).await;
            let _ = report.send(attempt.ok().map(|made| made.map(drop)));
        });
        made.recv_timeout(PATIENCE).unwrap()
    }
}

/// The application must not take a part of the header, or the header alone, for a whole connection.
#[test]
fn an_attempt_that_is_given_up_during_the_header_is_reset() {
    let world = World::new();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    // The kernel of the client then keeps only few bytes: the rest of the header waits.
    socket.set_tcp_mss(88).unwrap();
    socket.set_recv_buffer_size(1).unwrap();
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&at.into()).unwrap();
    socket.listen(1).unwrap();
    let pod = TcpListener::from(socket);
    world.bind_server(Binding {
        has_header: true,
        port: Some(pod.local_addr().unwrap().port()),
    });
    let peer = Identity::new("cluster.local", "shop", &"a".repeat(60_000)).unwrap();
    let attempt = world.arrives(peer, Duration::from_millis(500));
    assert!(attempt.is_none(), "the header was written: {attempt:?}");
    let (accepted, _) = pod.accept().unwrap();
    accepted.set_read_timeout(Some(PATIENCE)).unwrap();
    let error = read(&accepted).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
}

/// The route does not find this, because it judges the address of the Pod.
#[test]
fn a_binding_to_a_port_of_the_proxy_is_a_bad_request() {
    let world = World::new();
    let own = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    world.bind_server(Binding {
        has_header: true,
        port: Some(own.local_addr().unwrap().port()),
    });
    let server = workload("server", &[Ipv4Addr::new(10, 244, 2, 5)]);
    world.proxy.remove(&server.name, Duration::ZERO);
    let attached = world.proxy.add(Attachment {
        workload: server,
        namespace: None,
        outbound: vec![own],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    });
    attached.unwrap();
    let refused = world.arrives(identity("client"), PATIENCE);
    assert_eq!(refused, Some(Err(Refusal::BadRequest)));
    let lines = world.end();
    assert!(lines[0].ends_with("flags=LOOP"), "{lines:?}");
}
