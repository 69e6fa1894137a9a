//! Connecting to endpoints: attempts that fail, endpoints that say nothing, and tunnels.

use std::{io::Read as _, sync::Mutex};

use relay::{Handed, TunnelView, Tunnelling};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::{
    pump::Haste,
    tests::{ending, observed::with_waypoint},
};

const TIMEOUT: Duration = Duration::from_secs(5);

/// A worker, a workload, and a listening socket for its clients.
fn world() -> (World, Arc<Attached>, TcpListener) {
    let mut world = World::new(Settings {
        connect_timeout: TIMEOUT,
        ..Settings::default()
    });
    let app = world.app("app");
    (world, app, endpoint().0)
}

fn pending(world: &World) -> Vec<(Instant, Key, usize)> {
    world.worker.pending.iter().copied().collect()
}

#[test]
fn an_endpoint_that_says_nothing_is_given_up_at_the_deadline() {
    let (mut world, app, front) = world();
    let silent = [silent(), silent()];
    world.learn([service_at(&front, &silent.each_ref().map(|of| of.2))]);
    let start = world.worker.clock.now;
    let client = world.begin(&app, &front);
    let key = world.keys()[0];
    let deadline = start + TIMEOUT;
    assert_eq!(pending(&world), [(deadline, key, 0)]);
    let endpoint = |world: &mut World| {
        let connection = world.worker.table.get_mut(key).unwrap();
        connection.session.endpoint()
    };
    let first = endpoint(&mut world);
    world.before(deadline);
    assert_eq!(pending(&world), [(deadline, key, 0)]);
    assert_eq!(world.worker.give_up(), Some(deadline));
    world.at(deadline);
    assert_eq!(pending(&world), [(deadline + TIMEOUT, key, 1)]);
    assert_ne!(endpoint(&mut world), first);
    world.at(deadline + TIMEOUT);
    assert!(world.keys().is_empty() && pending(&world).is_empty());
    assert_eq!(ending(&client), Err(io::ErrorKind::ConnectionReset));
    let lines = world.lines.clone();
    assert_eq!(world.flags(), ["UF"]);
    assert!(
        lines.text().contains("error=\"timed out\""),
        "{}",
        lines.text()
    );
}

#[test]
fn attempts_that_have_succeeded_are_not_waited_for() {
    let (mut world, app, front) = world();
    let (_silent, _first, at) = silent();
    let start = world.worker.clock.now;
    let _established = world.established(&app, &front);
    assert_eq!(pending(&world).len(), 1);
    assert_eq!(world.worker.give_up(), None);
    assert!(pending(&world).is_empty());
    let _established = world.established(&app, &front);
    world.learn([service_at(&front, &[at])]);
    let later = start + Duration::from_secs(1);
    world.worker.clock.now = later;
    let _waiting = world.begin(&app, &front);
    let key = world.dialing()[0];
    assert_eq!(pending(&world), [(later + TIMEOUT, key, 0)]);
    let _waiting = world.begin(&app, &front);
    assert_eq!(pending(&world).len(), 2);
    // All is over by the deadline of the one that was established.
    assert_eq!(world.worker.give_up(), Some(later + TIMEOUT));
}

#[test]
fn bytes_that_one_endpoint_did_not_take_get_to_the_next() {
    let (mut world, app, front) = world();
    let (listener, at) = endpoint();
    let (_silent, _first, silent) = silent();
    world.learn([service_at(&front, &[at, silent])]);
    // Until one of them gets to the silent endpoint first.
    let mut clients = vec![];
    let key = loop {
        clients.push(world.begin_with((&app, Direction::Outbound), &front, b"hello"));
        let dialing = world.dialing().into_iter().find(|key| {
            let connection = world.worker.table.get_mut(*key).unwrap();
            connection.session.endpoint() == silent
        });
        if let Some(key) = dialing {
            break key;
        }
    };
    let connection = world.worker.table.get_mut(key).unwrap();
    assert!(connection.holds_first() && connection.held() == 5);
    let broken = EventFlags::ERR | EventFlags::HUP;
    world.worker.on_event(key, Side::Endpoint, broken);
    let connection = world.worker.table.get_mut(key).unwrap();
    assert_eq!(connection.session.endpoint(), at);
    assert_eq!(connection.session.attempt(), Some(1));
    world.reach(key);
    let connection = world.worker.table.get_mut(key).unwrap();
    assert!(!connection.holds_first() && connection.session.bytes == [5, 0]);
    for key in world.dialing() {
        world.reach(key);
    }
    for _ in &clients {
        let mut seen = [0; 5];
        accept(&listener).read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"hello");
    }
}

/// As long as nothing was sent, the first write may take its time.
#[test]
fn a_client_that_has_said_nothing_sends_nothing() {
    let (mut world, app, front) = world();
    let (_client, _server, key) = world.established(&app, &front);
    let connection = world.worker.table.get_mut(key).unwrap();
    let written = connection.write_first(&mut world.worker.buffers, 0);
    assert!(written.is_ok_and(|is_reached| !is_reached));
    assert_eq!(world.end(key, Side::Endpoint).haste, Haste::Unsent);
}

/// A handshake that waits for the client's bytes would hold up a server that speaks first, by 200 ms.
#[test]
fn an_endpoint_learns_at_once_of_a_client_that_says_nothing() {
    let (mut world, app, front) = world();
    let (listener, at) = endpoint();
    world.learn([service_at(&front, &[at])]);
    let times = (0..10).map(|_| {
        let start = Instant::now();
        let _client = world.begin(&app, &front);
        accept(&listener);
        start.elapsed()
    });
    let least = times.min().unwrap();
    assert!(least < Duration::from_millis(150), "{least:?}");
}

/// The kernel has no memory for the events of another socket.
#[test]
fn a_socket_whose_events_are_not_reported_ends_its_connection() {
    for said in [&b""[..], b"hello"] {
        let (mut world, app, front) = world();
        let (listener, at) = endpoint();
        world.learn([service_at(&front, &[at])]);
        world.worker.epoll = eventfd(0, EventfdFlags::empty()).unwrap();
        let client = world.begin_with((&app, Direction::Outbound), &front, said);
        assert!(world.keys().is_empty());
        assert_eq!(ending(&client), Err(io::ErrorKind::ConnectionReset));
        let server = accept(&listener);
        assert_eq!(ending(&server).is_err(), !said.is_empty());
        let lines = world.lines.clone();
        assert_eq!(world.flags(), ["UF"]);
        let text = lines.text();
        assert_eq!(text.contains("Invalid argument"), said.is_empty(), "{text}");
    }
}

/// An engine of tunnels that keeps the connections that it gets.
#[derive(Debug, Default)]
struct Tunnels(Mutex<Vec<Handed>>);

impl Tunnelling for Tunnels {
    fn carry(&self, handed: Handed) {
        self.0.lock().unwrap().push(handed);
    }

    fn tunnels(&self) -> Vec<TunnelView> {
        vec![]
    }

    fn held(&self) -> [usize; 2] {
        [0, 1]
    }

    fn take(&self, _: &Arc<Attached>, _: &Arc<[Listener]>) {}
    fn shut(&self, _: &Attached, _: Instant) {}
    fn begin_drain(&self) {}
    fn drain(&self, _: Instant) {}
}

/// Attaches a workload that has an identity.
fn with_identity(world: &mut World) -> Arc<Attached> {
    let mut own = Workload::new(WorkloadName::new("default", "mesh"), Place::Elsewhere);
    own.account = "mesh".into();
    let attachment = Attachment {
        workload: Arc::new(own),
        namespace: None,
        outbound: vec![],
        inbound: vec![],
        tunnels: vec![],
        egress: Egress::Allow,
    };
    world.relay.add(attachment, &Nobody).unwrap();
    world.relay.entries().pop().unwrap().attached
}

#[test]
fn a_connection_to_a_waypoint_is_reset_without_an_engine_of_tunnels() {
    let (mut world, _, front) = world();
    let mesh = with_identity(&mut world);
    world.see(with_waypoint(service_at(&front, &[])));
    let client = world.begin(&mesh, &front);
    assert_eq!(ending(&client), Err(io::ErrorKind::ConnectionReset));
    assert_eq!(world.flags(), ["CONNECT"]);
}

#[test]
fn connections_to_pods_with_hbone_are_handed_over_with_what_was_said() {
    let (mut world, _, front) = world();
    let mesh = with_identity(&mut world);
    let tunnels = Arc::new(Tunnels::default());
    let shared = Arc::clone(&world.worker.shared);
    shared.tunnels.set(tunnels.clone()).unwrap();
    for (speaks_hbone, direction, is_handed) in [
        (false, Direction::Outbound, false),
        (true, Direction::Inbound, false),
        (true, Direction::Outbound, true),
    ] {
        let mut pod = Workload::new(WorkloadName::new("default", "pod"), Place::Elsewhere);
        pod.addresses = [front.local_addr().unwrap().ip()].into_iter().collect();
        pod.speaks_hbone = speaks_hbone;
        let mut snapshot = Snapshot::default();
        snapshot.workloads.insert(pod.name.clone(), Arc::new(pod));
        world.see(snapshot);
        let mut client = world.begin_with((&mesh, direction), &front, b"hello");
        let handed = tunnels.0.lock().unwrap().pop();
        assert_eq!(handed.is_some(), is_handed, "{speaks_hbone} {direction:?}");
        assert_eq!(world.keys().len(), usize::from(!is_handed));
        assert_eq!(world.worker.load().connections(), usize::from(!is_handed));
        if let Some(handed) = handed {
            assert_eq!(handed.first, b"hello");
            rustix::net::send(&handed.client, b"back", rustix::net::SendFlags::empty()).unwrap();
            let mut seen = [0; 4];
            client.read_exact(&mut seen).unwrap();
            assert_eq!(&seen, b"back");
        } else {
            drop(accept(&front));
        }
        world.worker.finish_all(Flag::None, |_| true);
    }
    assert_eq!(world.worker.buffers.held(), 0);
}

#[test]
fn the_workers_own_address_is_the_source_without_transparency() {
    let from: SocketAddr = "127.9.9.9:0".parse().unwrap();
    for (transparent, direction) in [(false, Direction::Inbound), (true, Direction::Outbound)] {
        let mut world = World::new(Settings {
            transparent,
            ..Settings::default()
        });
        let app = world.app("app");
        let front = endpoint().0;
        let at = front.local_addr().unwrap();
        let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        client.bind(&from.into()).unwrap();
        client.connect(&at.into()).unwrap();
        let client = TcpStream::from(client);
        let socket = accept(&front);
        socket.set_nonblocking(true).unwrap();
        world.worker.begin(Accepted {
            socket: socket.into(),
            client: client.local_addr().unwrap(),
            direction,
            permit: Permit::acquire(&app, direction).unwrap(),
        });
        assert_eq!(world.keys().len(), 1);
        let (_server, source) = front.accept().unwrap();
        assert_eq!(source.ip().to_string(), "127.0.0.1", "{direction:?}");
    }
}
