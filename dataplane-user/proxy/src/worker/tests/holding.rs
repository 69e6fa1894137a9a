//! Connections that wait for a snapshot, and connections that hold bytes.

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::tests::ending;

const HOLD: Duration = Duration::from_hours(1);

/// A worker, a workload that may only connect to known destinations, and a listening socket for its clients.
fn world() -> (World, Arc<Attached>, TcpListener) {
    let mut world = World::new(Settings {
        hold: HOLD,
        ..Settings::default()
    });
    let app = world.attach("app", Egress::Deny, None, vec![]);
    (world, app, endpoint().0)
}

fn held(world: &World) -> Vec<(Instant, Key)> {
    world.worker.held.iter().copied().collect()
}

#[test]
fn a_connection_waits_for_a_snapshot_that_has_its_destination() {
    let (mut world, app, front) = world();
    let start = world.worker.clock.now;
    let _client = world.begin_with((&app, Direction::Outbound), &front, b"hello");
    let key = world.keys()[0];
    assert_eq!(held(&world), [(start + HOLD, key)]);
    assert_eq!((app.unknown(), world.worker.load().connections()), (1, 1));
    // Another thread's snapshots wake the worker while a connection waits.
    assert_eq!(world.woken(), 0);
    let shared = Arc::clone(&world.worker.shared);
    shared.set_snapshot(Snapshot::default());
    assert_eq!(world.woken(), 1);
    world.see(Snapshot::default());
    assert_eq!(held(&world), [(start + HOLD, key)]);
    let (listener, at) = endpoint();
    world.learn([service_at(&front, &[at])]);
    assert!(held(&world).is_empty());
    world.reach(key);
    let mut server = accept(&listener);
    let mut seen = [0; 5];
    io::Read::read_exact(&mut server, &mut seen).unwrap();
    assert_eq!(&seen, b"hello");
    shared.set_snapshot(Snapshot::default());
    assert_eq!(world.woken(), 0, "no connection waits");
}

#[test]
fn a_snapshot_that_came_just_before_the_wait_wakes_the_worker() {
    let (mut world, app, front) = world();
    world.relay.set_snapshot(Snapshot::default());
    let _client = world.begin(&app, &front);
    assert_eq!(world.woken(), 1, "the worker has not seen it yet");
    world.see(Snapshot::default());
    let _client = world.begin(&app, &front);
    assert_eq!(world.woken(), 0);
}

#[test]
fn a_connection_that_is_refused_for_another_reason_does_not_wait() {
    let (mut world, app, front) = world();
    let early = world.begin(&app, &front);
    // The VIP has no such port.
    let mut service = service_at(&front, &[]);
    service.ports[0].port -= 1;
    world.learn([service]);
    let late = world.begin(&app, &front);
    for client in [early, late] {
        assert_eq!(ending(&client), Err(io::ErrorKind::ConnectionReset));
    }
    assert!(held(&world).is_empty());
    assert_eq!(world.flags(), ["NR", "NR"]);
}

#[test]
fn a_connection_is_refused_once_it_has_waited_for_too_long() {
    let (mut world, app, front) = world();
    let start = world.worker.clock.now;
    let gone = world.begin(&app, &front);
    let stays = world.begin(&app, &front);
    world.worker.clock.now = start + Duration::from_secs(1);
    let later = world.begin(&app, &front);
    // The client of the first resets its connection.
    world
        .worker
        .on_event(world.keys()[0], Side::Client, EventFlags::ERR);
    drop(gone);
    world.before(start + HOLD);
    assert_eq!(world.worker.give_up_held(), Some(start + HOLD));
    assert_eq!(held(&world).len(), 2);
    world.worker.clock.now = start + HOLD;
    let next = start + HOLD + Duration::from_secs(1);
    assert_eq!(world.worker.give_up_held(), Some(next));
    assert_eq!(ending(&stays), Err(io::ErrorKind::ConnectionReset));
    assert_eq!(held(&world).len(), 1);
    world.worker.clock.now = next;
    assert_eq!(world.worker.give_up_held(), None);
    assert_eq!(ending(&later), Err(io::ErrorKind::ConnectionReset));
    assert_eq!(world.flags(), ["DC", "DENY", "DENY"]);
}

#[test]
fn a_client_that_has_gone_meanwhile_is_not_connected() {
    let (mut world, app, front) = world();
    let client = world.begin(&app, &front);
    let (listener, at) = endpoint();
    let linger = Some(Duration::ZERO);
    socket2::SockRef::from(&client).set_linger(linger).unwrap();
    drop(client);
    let key = world.keys()[0];
    wait_for(&world.end(key, Side::Client).socket, PollFlags::ERR);
    world.learn([service_at(&front, &[at])]);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    assert_eq!(world.flags(), ["DC"]);
}

#[test]
fn a_client_whose_events_are_not_reported_does_not_wait() {
    let (mut world, app, front) = world();
    world.worker.epoll = eventfd(0, EventfdFlags::empty()).unwrap();
    let client = world.begin(&app, &front);
    assert!(world.keys().is_empty());
    assert_eq!(ending(&client), Err(io::ErrorKind::ConnectionReset));
    assert_eq!(world.flags(), ["UF"]);
}

#[test]
fn one_workload_may_have_an_eighth_of_the_connections_that_wait() {
    let (mut world, app, front) = world();
    let other = world.attach("other", Egress::Deny, None, vec![]);
    assert!(world.worker.may_hold(&app));
    let _client = world.begin(&app, &front);
    let (deadline, key) = held(&world)[0];
    let mut fill = |count| {
        world.worker.held = vec![(deadline, key); count].into();
        (world.worker.may_hold(&app), world.worker.may_hold(&other))
    };
    assert_eq!(fill(127), (true, true));
    assert_eq!(fill(128), (false, true));
    assert_eq!(fill(1023), (false, true));
    assert_eq!(fill(1024), (false, false));
    // Those whose client has gone take no room.
    world.worker.finish(key, Flag::ClientReset, true);
    assert!(world.worker.may_hold(&app) && held(&world).is_empty());
    let mut none = World::new(Settings::default());
    let app = none.app("app");
    assert!(
        !none.worker.may_hold(&app),
        "unless the settings ask for it"
    );
}

/// `Connection::shares_port` shows whether the connection to the endpoint may have the client's port.
#[test]
fn inbound_connections_share_the_clients_port_if_all_packets_come_by_one_interface() {
    for (transparent, direction, interface, wanted) in [
        (true, Direction::Inbound, Some("lo"), true),
        (false, Direction::Inbound, Some("lo"), false),
        (true, Direction::Outbound, Some("lo"), false),
        (true, Direction::Inbound, None, false),
        (true, Direction::Inbound, Some("nosuch0"), false),
    ] {
        let mut world = World::new(Settings {
            hold: HOLD,
            transparent,
            ..Settings::default()
        });
        let app = world.attach("app", Egress::Deny, Some(namespace(interface)), vec![]);
        // So connections in both directions wait.
        let mut unread = Snapshot::default();
        unread.istio.unread = true;
        world.see(unread);
        let front = endpoint().0;
        let _client = world.begin_with((&app, direction), &front, b"");
        let key = held(&world)[0].1;
        let shares = world.worker.table.get_mut(key).unwrap().shares_port;
        assert_eq!(shares, wanted, "{transparent} {direction:?} {interface:?}");
        let socket = &world.end(key, Side::Client).socket;
        let device = socket2::SockRef::from(socket).device().unwrap();
        assert_eq!(device.is_some(), wanted);
    }
}

#[test]
fn a_connection_that_holds_nothing_is_not_shed() {
    let mut world = World::new(Settings {
        max_held: 0,
        ..Settings::default()
    });
    let app = world.app("app");
    let front = endpoint().0;
    let (_client, _server, idle) = world.established(&app, &front);
    let (_silent, _first, at) = silent();
    world.learn([service_at(&front, &[at])]);
    world.worker.clock.now += Duration::from_secs(1);
    let client = world.begin_with((&app, Direction::Outbound), &front, b"held");
    assert_eq!(world.keys(), [idle]);
    assert_eq!(ending(&client), Err(io::ErrorKind::ConnectionReset));
    assert_eq!((app.stalled(), world.worker.buffers.held()), ((1, true), 0));
    world.worker.finish_all(Flag::None, |_| true);
    assert_eq!(world.flags(), ["-", "UO"]);
}

#[test]
fn of_connections_that_hold_bytes_the_latest_stays() {
    let mut world = World::new(Settings {
        max_held: 8,
        ..Settings::default()
    });
    let app = world.app("app");
    let front = endpoint().0;
    let (_silent, _first, at) = silent();
    world.learn([service_at(&front, &[at])]);
    let outbound = (&app, Direction::Outbound);
    let early = world.begin_with(outbound, &front, b"early");
    let first = world.keys();
    world.worker.clock.now += Duration::from_secs(1);
    let _late = world.begin_with(outbound, &front, b"late");
    assert_eq!(ending(&early), Err(io::ErrorKind::ConnectionReset));
    assert_ne!(world.keys(), first);
    assert_eq!((world.keys().len(), world.worker.buffers.held()), (1, 4));
}
