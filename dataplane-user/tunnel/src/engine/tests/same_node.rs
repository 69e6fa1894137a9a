//! Connections between two workloads of this node whose identities the relay attests.

use std::collections::BTreeMap;

use model::{
    Effect, IstioNamespace, IstioPolicy,
    authorization::{Action, Authorization, Match, PeerAuthentication, Rule, Values, Word},
};
use relay::Totals;

use super::*;

const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 8);
/// A workload that does not speak HBONE.
const PLAIN: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 6);

fn attesting() -> World {
    let settings = Settings {
        attests: Some("cluster.local".into()),
        ..Settings::default()
    };
    World::with(&[CLIENT], &settings)
}

impl World {
    fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        let mut snapshot = self.proxy.relay().index().1.snapshot().clone();
        change(&mut snapshot);
        self.proxy.set_snapshot(snapshot);
    }

    /// Makes these the policies of the namespace, and allows plaintext to nobody.
    fn allow_only(&self, account: &str) {
        let word = Word::Exact(format!("cluster.local/ns/shop/sa/{account}").into());
        let of = Match {
            principals: Values {
                any: [word].into(),
                none: Box::default(),
            },
            ..Match::default()
        };
        let allow = Authorization {
            action: Action::Allow,
            dry_run: false,
            rules: [Rule([[of].into()].into())].into(),
        };
        let strict = PeerAuthentication {
            created: None,
            strict: Some(true),
            ports: BTreeMap::new(),
        };
        let effects = [
            Effect::Authorization(Arc::new(allow)),
            Effect::Plaintext(Arc::new(strict)),
        ];
        let mut of = IstioNamespace::default();
        for (number, effect) in effects.into_iter().enumerate() {
            let selector = Some(Box::default());
            let policy = Arc::new(IstioPolicy { selector, effect });
            of.policies.insert(format!("p{number}").into(), policy);
        }
        self.change(|snapshot| {
            snapshot
                .istio
                .namespaces
                .insert("shop".into(), Arc::new(of));
        });
    }

    fn exchange(&self) {
        let mut client = self.connect();
        client.write_all(b"first").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut server = self.accept();
        assert_eq!(read(&server).unwrap(), "first");
        // The other direction is still open.
        server.write_all(b"answer").unwrap();
        drop(server);
        assert_eq!(read(&client).unwrap(), "answer");
    }

    /// Wants a connection to be reset, and not to reach the application.
    fn is_refused(&self) {
        are_reset(&[self.connect()]);
        self.application.set_nonblocking(true).unwrap();
        let accepted = self.application.accept();
        assert_eq!(accepted.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        self.application.set_nonblocking(false).unwrap();
    }
}

/// Wants these streams to be reset, and not just silent.
fn are_reset(streams: &[TcpStream]) {
    for stream in streams {
        let error = read(stream).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
}

#[test]
fn both_sides_have_the_attested_identities_and_no_tunnel() {
    let world = attesting();
    world.allow_only("client");
    world.exchange();
    assert!(world.engine.tunnels.tunnels().is_empty());
    let [by_client, by_server] = ["client", "server"].map(identity);
    // The client sees the end before the worker counts it.
    let start = Instant::now();
    let connections = loop {
        let connections = world.proxy.observer().connections();
        let have_closed = connections.iter().all(|(_, totals)| totals.closed == 1);
        if have_closed || start.elapsed() > Duration::from_secs(10) {
            break connections;
        }
        thread::yield_now();
    };
    assert_eq!(connections.len(), 2, "{connections:?}");
    for (direction, own, peer) in [
        (Direction::Outbound, &by_client, &by_server),
        (Direction::Inbound, &by_server, &by_client),
    ] {
        let mut all = connections.iter();
        let of = all.find(|(of, _)| of.key.direction == direction);
        let (of, totals) = of.unwrap();
        let principals = of.key.principals.clone().unwrap();
        assert!(principals.is_attested);
        assert_eq!(
            (&principals.own, principals.peer.as_ref()),
            (own, Some(peer))
        );
        let wanted = Totals {
            opened: 1,
            closed: 1,
            failed: 0,
            received: 5,
            sent: 6,
        };
        assert_eq!(*totals, wanted, "{direction:?}");
    }
    let lines = world.end();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (of, peer) in [
        ("client outbound", by_server),
        ("server inbound", by_client),
    ] {
        let of = format!("workload=shop/{of}");
        let line = lines.iter().find(|line| line.contains(&of)).unwrap();
        let words = format!(" peer={peer} security=attested bytes_received=5 bytes_sent=6 ");
        assert!(line.contains(&words) && line.ends_with("flags=-"), "{line}");
    }
    assert!(
        lines
            .iter()
            .any(|line| line.contains(&format!(" src={CLIENT}:")))
    );
}

#[test]
fn policies_decide_by_the_attested_identity_and_end_live_connections() {
    let world = attesting();
    let (client, server) = (world.connect(), world.accept());
    world.allow_only("other");
    are_reset(&[client, server]);
    world.is_refused();
    world.allow_only("client");
    world.exchange();
    world.change(|snapshot| snapshot.istio.unread = true);
    world.is_refused();
    let lines = world.end();
    let denied = |line: &&String| line.contains("flags=DENY");
    let inbound = lines.iter().filter(denied);
    let inbound = inbound.filter(|line| line.contains("shop/server inbound"));
    assert_eq!(inbound.count(), 3, "{lines:?}");
    let outbound = lines.iter().filter(denied);
    let outbound = outbound.filter(|line| line.contains("shop/client outbound"));
    // The policies that were not read may allow it.
    assert_eq!(outbound.count(), 2, "{lines:?}");
}

#[test]
fn a_connection_ends_with_the_workload_that_it_has_reached() {
    let world = attesting();
    let (client, server) = (world.connect(), world.accept());
    world.change(|snapshot| {
        snapshot
            .workloads
            .remove(&WorkloadName::new("shop", "server"));
        let other = workload("other", &[SERVER]);
        snapshot.workloads.insert(other.name.clone(), other);
    });
    are_reset(&[client, server]);
    // The other workload is not here: its tunnel fails.
    world.is_refused();
    let lines = world.end();
    let cut = lines.iter().filter(|line| line.contains("flags=DRAIN"));
    assert_eq!(cut.count(), 2, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("flags=TLS_FAILURE")));
}

#[test]
fn a_connection_ends_with_the_attachment_that_it_has_reached() {
    let world = attesting();
    let (client, server) = (world.connect(), world.accept());
    let start = Instant::now();
    let name = WorkloadName::new("shop", "server");
    world.proxy.remove(&name, Duration::from_secs(1));
    are_reset(&[client, server]);
    assert!(start.elapsed() >= Duration::from_secs(1));
}

/// Half of the connections draw the endpoint that refuses them first.
#[test]
fn after_the_workload_of_this_node_no_endpoint_gets_plaintext() {
    const CONNECTIONS: usize = 40;
    let world = attesting();
    let plain = TcpListener::bind((PLAIN, 0)).unwrap();
    let closed = TcpListener::bind((SERVER, 0)).unwrap();
    let at = [&closed, &plain].map(|socket| socket.local_addr().unwrap());
    drop(closed);
    world.change(|snapshot| {
        let other = Workload {
            speaks_hbone: false,
            ..(*workload("plain", &[PLAIN])).clone()
        };
        snapshot
            .workloads
            .insert(other.name.clone(), Arc::new(other));
        let mut web = service(world.vip, at[0]);
        let endpoints = &mut web.ports[0].endpoints;
        endpoints.push(Endpoint::new(at[1].ip(), at[1].port()));
        snapshot.services.insert(web.name.clone(), Arc::new(web));
    });
    thread::spawn(move || {
        for mut server in plain.incoming().map_while(Result::ok) {
            let _ = server.write_all(b"plain");
        }
    });
    let answers = (0..CONNECTIONS).map(|_| read(&world.connect()));
    let refused = answers.filter(Result::is_err).count();
    assert!((1..CONNECTIONS).contains(&refused), "{refused}");
    let lines = world.end();
    let never_plain =
        |line: &&String| line.contains("flags=CONNECT") && line.contains("does not support HBONE");
    let count = lines.iter().filter(never_plain).count();
    assert_eq!(count, refused, "{lines:?}");
}
