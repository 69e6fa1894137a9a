//! Connections that go to a waypoint.

use std::net::IpAddr;

use model::{AllowedNamespaces, Gateway, GatewayAddress, IstioNamespace, UseWaypoint};
use relay::{Client, Exceeded};

use super::*;
use crate::{
    copy::Flow,
    inbound::{Accepted, Inbound, Refusal, Request},
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
            allowed: AllowedNamespaces::Same,
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
