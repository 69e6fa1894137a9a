//! Accepting connections, the events of their sockets, and commands.

use std::io::Read as _;

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::{buffers::SMALL, tests::PATIENCE};

/// Attaches a workload that connects to a VIP. Returns the VIP and the listening socket of its endpoint.
fn listening(world: &mut World, name: &str) -> (SocketAddr, TcpListener) {
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    let vip = own.local_addr().unwrap();
    let (listener, at) = endpoint();
    world.attach(name, Egress::Allow, None, vec![own]);
    world.learn([service(vip.ip(), vip.port(), &[at])]);
    (vip, listener)
}

#[test]
fn many_are_accepted_at_a_time_if_the_wait_before_reported_some_too() {
    let mut world = World::new(Settings::default());
    let (vip, _listener) = listening(&mut world, "app");
    let _clients: Vec<_> = (0..20).map(|_| connect(vip)).collect();
    for (wait, wanted) in [(7, 1), (8, 17), (10, 18)] {
        world.worker.waits = wait;
        world.worker.accept_from(0);
        assert_eq!(world.worker.table.len(), wanted, "wait {wait}");
    }
    assert_eq!(world.worker.load().connections(), 18);
}

#[test]
fn at_the_limit_the_worker_leaves_the_listening_socket_alone_for_a_while() {
    let mut world = World::new(Settings {
        max_connections: Some(1),
        ..Settings::default()
    });
    let (vip, _listener) = listening(&mut world, "app");
    let _clients = [connect(vip), connect(vip)];
    world.worker.accept_from(0);
    assert_eq!(world.worker.table.len(), 1);
    let start = world.worker.clock.now;
    let until = start + Duration::from_millis(50);
    let paused = |world: &World| world.worker.acceptors[0].as_ref().unwrap().paused_until;
    assert_eq!(paused(&world), None);
    world.worker.accept_from(0);
    assert_eq!((world.worker.table.len(), paused(&world)), (1, Some(until)));
    world.before(until);
    assert_eq!(paused(&world), Some(until));
    world.at(until);
    assert_eq!(paused(&world), None);
    world.worker.finish_all(Flag::None, |_| true);
    world.worker.accept_from(0);
    assert_eq!(world.worker.table.len(), 1);
}

#[test]
fn a_listening_socket_whose_events_are_not_reported_is_tried_again() {
    let mut world = World::new(Settings::default());
    listening(&mut world, "app");
    world.worker.epoll = eventfd(0, EventfdFlags::empty()).unwrap();
    world.worker.resume(0);
    let until = world.worker.clock.now + Duration::from_millis(50);
    let acceptor = world.worker.acceptors[0].as_ref().unwrap();
    assert_eq!(acceptor.paused_until, Some(until));
    assert_eq!(world.worker.clock.alarm, Some(until));
}

#[test]
fn what_waits_at_a_socket_is_still_accepted_when_it_is_closed() {
    let mut world = World::new(Settings::default());
    let (vip, _listener) = listening(&mut world, "app");
    let _clients = [connect(vip), connect(vip)];
    let deadline = world.worker.clock.now + Duration::from_secs(3);
    let shared = Arc::clone(&world.worker.shared);
    shared.send(0, Command::Drain(deadline)).unwrap();
    world.worker.obey();
    assert_eq!(world.worker.table.len(), 2);
    assert!(world.worker.acceptors.iter().all(Option::is_none));
    assert_eq!(world.woken(), 0, "the command was taken note of");
    // The place is used again.
    listening(&mut world, "another");
    assert_eq!(world.worker.acceptors.len(), 1);
    world.before(deadline);
    assert_eq!(world.worker.table.len(), 2);
    world.at(deadline);
    assert_eq!(world.flags(), ["DRAIN", "DRAIN"]);
}

#[test]
fn a_socket_is_what_the_kernels_events_say() {
    let mut world = World::new(Settings::default());
    let app = world.app("app");
    let (front, (_silent, _first, at)) = (endpoint().0, silent());
    world.learn([service_at(&front, &[at])]);
    let _client = world.begin(&app, &front);
    let key = world.keys()[0];
    for (flags, readable, writable, closing) in [
        (EventFlags::empty(), false, false, false),
        (EventFlags::IN, true, false, false),
        (EventFlags::OUT, false, true, false),
        (EventFlags::RDHUP, true, false, true),
        (EventFlags::HUP, true, true, true),
        (EventFlags::IN | EventFlags::OUT, true, true, false),
    ] {
        let end = world.end(key, Side::Client);
        (end.readable, end.writable, end.closing) = (false, false, false);
        world.worker.on_event(key, Side::Client, flags);
        let end = world.end(key, Side::Client);
        let seen = (end.readable, end.writable, end.closing);
        assert_eq!(seen, (readable, writable, closing), "{flags:?}");
        assert!(!end.broken);
    }
    // The state stays until a system call finds otherwise.
    let end = world.end(key, Side::Client);
    (end.readable, end.writable, end.closing) = (true, true, true);
    world
        .worker
        .on_event(key, Side::Client, EventFlags::empty());
    let end = world.end(key, Side::Client);
    assert!(end.readable && end.writable && end.closing);
    world.worker.on_event(key, Side::Client, EventFlags::ERR);
    assert!(world.keys().is_empty(), "the client does not wait any more");
    assert_eq!(world.flags(), ["DC"]);
}

#[test]
fn a_broken_socket_may_be_read_and_written_to_its_end() {
    let mut world = World::new(Settings::default());
    let app = world.app("app");
    let front = endpoint().0;
    let (_client, server, key) = world.established(&app, &front);
    world.end(key, Side::Client).broken = true;
    world
        .worker
        .on_event(key, Side::Client, EventFlags::empty());
    drop(server);
    assert_eq!(world.flags(), ["DC"], "it stays broken");
}

/// A report of space to write, before there was none, would only wake the worker for nothing.
#[test]
fn the_kernel_is_asked_for_space_once_there_is_none() {
    let mut world = World::new(Settings::default());
    let app = world.app("app");
    let front = endpoint().0;
    let (mut client, mut server, key) = world.established(&app, &front);
    assert!(world.end(key, Side::Endpoint).asks_for_space);
    server.write_all(b"a little").unwrap();
    wait_for(socket_of(&world, key), PollFlags::IN);
    world.worker.on_event(key, Side::Endpoint, EventFlags::IN);
    let end = world.end(key, Side::Client);
    assert_eq!((end.writable, end.asks_for_space), (true, false));

    server.set_nonblocking(true).unwrap();
    let (chunk, mut sent) = (vec![7; 64 << 10], 8);
    while world.end(key, Side::Client).writable {
        if let Ok(count) = server.write(&chunk) {
            sent += count;
        }
        world.worker.on_event(key, Side::Endpoint, EventFlags::IN);
    }
    assert!(world.end(key, Side::Client).asks_for_space);
    let held = world.worker.table.get_mut(key).unwrap().held();
    assert!(held > 1 && held == world.worker.buffers.held());
    client.set_nonblocking(true).unwrap();
    let (mut read, mut seen, start) = (0, vec![0; 1 << 20], Instant::now());
    while read < sent {
        assert!(start.elapsed() < PATIENCE, "{read} of {sent} bytes");
        read += client.read(&mut seen).unwrap_or(0);
        world.worker.on_event(key, Side::Client, EventFlags::OUT);
        world.worker.on_event(key, Side::Endpoint, EventFlags::IN);
    }
    assert_eq!(world.worker.buffers.held(), 0);
}

fn socket_of(world: &World, key: Key) -> OwnedFd {
    let mut all = world.worker.table.iter();
    let connection = all.find(|(of, _)| *of == key).unwrap().1;
    connection.endpoint_socket().unwrap().try_clone().unwrap()
}

/// Waits until this many small reads of the client's bytes have arrived.
fn arrived(world: &mut World, key: Key, reads: usize) {
    let socket = &world.end(key, Side::Client).socket;
    while rustix::io::ioctl_fionread(socket).unwrap() < (reads * SMALL) as u64 {
        thread::yield_now();
    }
}

/// A worker that reads little at a time, and a connection that has more to do than fits a turn.
fn with_more() -> (World, TcpStream, TcpStream, Key) {
    let mut world = World::new(Settings {
        max_held: 100_000,
        ..Settings::default()
    });
    let app = world.app("app");
    let front = endpoint().0;
    let socket = socket2::SockRef::from(&front);
    socket.set_recv_buffer_size(400_000).unwrap();
    let (mut client, server, key) = world.established(&app, &front);
    // It stays until the worker ends.
    world.worker.buffers.hold(0, 60_000);
    client.write_all(&vec![0; 9 * SMALL]).unwrap();
    world.end(key, Side::Client).readable = true;
    arrived(&mut world, key, 9);
    world.worker.drive(key);
    (world, client, server, key)
}

#[test]
fn a_connection_with_more_to_do_waits_for_its_turn_once() {
    let (mut world, mut client, _server, key) = with_more();
    let queued = |world: &mut World| {
        let waits = world.worker.table.get_mut(key).unwrap().queued;
        (waits, world.worker.queue.len())
    };
    assert_eq!(queued(&mut world), (true, 1));
    client.write_all(&vec![0; 8 * SMALL]).unwrap();
    arrived(&mut world, key, 9);
    world.worker.drive(key);
    assert_eq!(queued(&mut world), (true, 1));
}

#[test]
fn the_turn_of_a_connection_comes_without_an_event() {
    let (mut world, client, mut server, _) = with_more();
    let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
    let spare = rustix::buffer::spare_capacity(&mut events);
    let at_once = Some(&Timespec::default());
    epoll::wait(&world.worker.epoll, spare, at_once).unwrap();
    // A clock that never wakes it. The worker ends with its last connection.
    world.worker.clock = Clock::new().unwrap();
    world.worker.drain = Some(world.worker.clock.now + Duration::from_hours(1));
    let World { worker, .. } = world;
    let running = thread::spawn(move || worker.run());
    server.read_exact(&mut vec![0; 9 * SMALL]).unwrap();
    drop((client, server));
    running.join().unwrap();
}

#[test]
fn only_connections_of_the_removed_workload_are_cut() {
    let mut world = World::new(Settings::default());
    let [one, other, third] = ["one", "other", "third"].map(|name| world.app(name));
    let front = endpoint().0;
    let _first = world.established(&one, &front);
    let _second = world.established(&other, &front);
    let deadline = world.worker.clock.now + Duration::from_secs(1);
    let shared = Arc::clone(&world.worker.shared);
    let shut = |attached: &Attached| {
        let command = Command::Shut(attached.id, deadline);
        shared.send(0, command).unwrap();
    };
    let ids = |world: &World| -> Vec<u64> { world.worker.shut.iter().map(|(id, _)| *id).collect() };
    shut(&third);
    shut(&one);
    world.worker.obey();
    assert_eq!(ids(&world), [one.id], "the third has no connections");
    world.before(deadline);
    assert_eq!(world.keys().len(), 2);
    world.at(deadline);
    assert_eq!((one.connections(), other.connections()), (0, 1));
    assert!(ids(&world).is_empty());
    assert_eq!(world.flags(), ["DRAIN", "DRAIN"]);
}

/// Sockets keep their network namespace alive, and so the interfaces of a removed pod.
#[test]
fn spare_sockets_of_a_removed_workload_are_closed() {
    let mut world = World::new(Settings::default());
    let front = endpoint().0;
    let [one, other] = ["one", "other"]
        .map(|name| world.attach(name, Egress::Allow, Some(namespace(None)), vec![]));
    let deadline = world.worker.clock.now + Duration::from_secs(1);
    // Two of them: for the second, two sockets are opened at a time.
    let connections: Vec<_> = (0..2).map(|_| world.established(&one, &front)).collect();
    assert!(world.worker.stock.has_some());
    let shared = Arc::clone(&world.worker.shared);
    let command = Command::Shut(one.id, deadline);
    shared.send(0, command).unwrap();
    world.worker.obey();
    assert!(!world.worker.stock.has_some());
    // A connection may still open some.
    world.worker.stock.take(&one, true).unwrap();
    world.worker.stock.take(&one, true).unwrap();
    assert!(world.worker.stock.has_some());
    world.worker.finish(connections[0].2, Flag::None, false);
    assert!(!world.worker.stock.has_some());
    // Other workloads keep theirs.
    let others: Vec<_> = (0..2).map(|_| world.established(&other, &front)).collect();
    world.worker.finish(others[0].2, Flag::None, false);
    assert!(world.worker.stock.has_some());
}
