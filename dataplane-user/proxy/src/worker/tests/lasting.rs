//! The clock, and the upkeep of connections that last.

use std::io::Read as _;

use relay::{Totals, socket::Patience};
use rustix::net::sockopt as option;

use super::*;

const MILLI: Duration = Duration::from_millis(1);

#[test]
fn the_earliest_alarm_holds() {
    let mut world = World::new(Settings::default());
    let now = world.worker.clock.now;
    for (at, alarm) in [(3600, 3600), (60, 60), (600, 60)] {
        world.worker.clock.wake_by(now + Duration::from_secs(at));
        let alarm = now + Duration::from_secs(alarm);
        assert_eq!(world.worker.clock.alarm, Some(alarm));
    }
    // A time that has passed wakes it, too.
    world.worker.clock.wake_by(now);
    wait_for(&world.worker.clock.timer, PollFlags::IN);
    world.at(now);
    let unread = rustix::io::read(&world.worker.clock.timer, &mut [0; 8]);
    assert_eq!(unread, Err(Errno::AGAIN));
    assert_eq!(world.worker.clock.alarm, None);
}

#[test]
fn a_tick_is_a_tenth_of_a_second() {
    let mut clock = Clock::new().unwrap();
    let start = clock.now;
    for (after, wanted) in [
        (Duration::ZERO, 0),
        (99 * MILLI, 0),
        (100 * MILLI, 1),
        (1050 * MILLI, 10),
        (Duration::from_secs(500_000_000), u32::MAX),
    ] {
        clock.now = start + after;
        assert_eq!(clock.ticks(), wanted, "{after:?}");
    }
}

#[test]
fn upkeeps_are_as_frequent_as_the_settings_need() {
    let seconds = Duration::from_secs;
    for (idle, keepalive, wanted) in [
        (None, None, seconds(5)),
        (None, Some(seconds(180)), seconds(5)),
        (None, Some(seconds(2)), seconds(2)),
        (Some(seconds(4)), Some(seconds(2)), seconds(1)),
        (Some(seconds(60)), None, seconds(5)),
        (Some(100 * MILLI), None, 250 * MILLI),
        (None, Some(MILLI), 250 * MILLI),
    ] {
        let mut world = World::new(Settings {
            idle_timeout: idle,
            patience: Patience {
                keepalive,
                user_timeout: None,
            },
            ..Settings::default()
        });
        world.worker.schedule_upkeep();
        let period = world.worker.next_upkeep - world.worker.clock.now;
        assert_eq!(period, wanted, "{idle:?} {keepalive:?}");
    }
}

#[test]
fn a_new_connection_is_looked_at_a_period_later_at_the_latest() {
    let mut world = World::new(Settings::default());
    let start = world.worker.clock.now;
    for (after, wanted) in [(0, 5), (4, 5), (5, 10), (60, 65)] {
        world.worker.clock.now = start + Duration::from_secs(after);
        world.worker.schedule_upkeep();
        assert_eq!(
            world.worker.next_upkeep,
            start + Duration::from_secs(wanted)
        );
    }
    assert_eq!(
        world.worker.clock.alarm,
        Some(start + Duration::from_secs(5))
    );
}

/// A worker without connections sleeps.
#[test]
fn the_timer_is_set_only_for_what_is_left_to_do() {
    let mut world = World::new(Settings::default());
    let app = world.attach("app", Egress::Allow, Some(namespace(None)), vec![]);
    let now = world.worker.clock.now;
    world.at(now + 10 * MILLI);
    assert_eq!(world.worker.clock.alarm, None);
    let next = world.worker.next_upkeep;
    assert_eq!(next, now + 10 * MILLI + Duration::from_secs(5));
    let later = now + 20 * MILLI;
    let front = endpoint().0;
    let (_client, _server, key) = world.established(&app, &front);
    world.at(later);
    assert_eq!(world.worker.clock.alarm, Some(next), "a connection");
    world.worker.finish(key, Flag::None, false);
    world.at(later);
    assert_eq!(world.worker.clock.alarm, None);
    let held = world.worker.buffers.hold(0, crate::buffers::LARGE);
    world.worker.buffers.release(held);
    world.at(later);
    assert_eq!(world.worker.clock.alarm, Some(next), "a spare buffer");
    world.at(next);
    assert_eq!(world.worker.clock.alarm, None);
    // Two sockets are opened, of which one is spare.
    world.worker.stock.take(&app, true).unwrap();
    world.worker.stock.take(&app, true).unwrap();
    assert!(world.worker.stock.has_some());
    let next = world.worker.next_upkeep;
    world.before(next);
    assert_eq!(world.worker.clock.alarm, Some(next), "a spare socket");
    world.at(next);
    assert!(!world.worker.stock.has_some());
    assert_eq!(world.worker.clock.alarm, None);
}

#[test]
fn an_upkeep_counts_and_turns_on_keepalive() {
    let mut world = World::new(Settings {
        connect_timeout: Duration::from_mins(10),
        ..Settings::default()
    });
    let app = world.app("app");
    let front = endpoint().0;
    let (mut client, mut server, key) = world.established(&app, &front);
    client.write_all(b"question").unwrap();
    let socket = world.end(key, Side::Client).socket.try_clone().unwrap();
    wait_for(&socket, PollFlags::IN);
    world.worker.on_event(key, Side::Client, EventFlags::IN);
    server.read_exact(&mut [0; 8]).unwrap();
    let received = |world: &World| {
        let all = world.relay.connections();
        all.values()
            .map(|totals: &Totals| totals.received)
            .sum::<u64>()
    };
    assert_eq!(received(&world), 0);
    let (_silent, _first, at) = silent();
    world.learn([service_at(&front, &[at])]);
    let _waiting = world.begin(&app, &front);
    let dialing = world.dialing()[0];
    let spare = world.worker.buffers.hold(0, crate::buffers::LARGE);
    let few = world.worker.buffers.hold(0, 10);
    world.worker.buffers.release(spare);
    let next = world.worker.next_upkeep;
    world.before(next);
    assert_eq!((received(&world), world.worker.next_upkeep), (0, next));
    world.at(next);
    assert_eq!(world.worker.next_upkeep, next + Duration::from_secs(5));
    assert_eq!(received(&world), 8);
    assert_eq!(world.worker.shared.held(), 10);
    assert!(
        world.worker.buffers.has_spare(),
        "as long as it may be needed"
    );
    for (key, wanted) in [(key, true), (dialing, false)] {
        let connection = world.worker.table.get_mut(key).unwrap();
        assert_eq!(connection.kept_alive, wanted);
        for side in [Side::Client, Side::Endpoint] {
            let socket = &connection.end_mut(side).unwrap().socket;
            assert_eq!(option::socket_keepalive(socket), Ok(wanted), "{side:?}");
        }
    }
    // Once is enough.
    let socket = &world.end(key, Side::Client).socket;
    option::set_socket_keepalive(socket, false).unwrap();
    world.worker.buffers.release(few);
    let next = world.worker.next_upkeep;
    world.at(next);
    let socket = &world.end(key, Side::Client).socket;
    assert_eq!(option::socket_keepalive(socket), Ok(false));
    assert!(!world.worker.buffers.has_spare());
}

#[test]
fn silence_counts_from_the_last_byte_and_not_while_connecting() {
    let idle = Duration::from_secs(20);
    let mut world = World::new(Settings {
        idle_timeout: Some(idle),
        connect_timeout: Duration::from_mins(10),
        ..Settings::default()
    });
    let app = world.app("app");
    let front = endpoint().0;
    let start = world.worker.clock.now;
    let (_client, _server, silent_one) = world.established(&app, &front);
    let (_client2, _server2, other) = world.established(&app, &front);
    let (_silent, _first, at) = silent();
    world.learn([service_at(&front, &[at])]);
    let _waiting = world.begin(&app, &front);
    let dialing = world.dialing()[0];
    world.worker.clock.now = start + Duration::from_secs(3);
    world.worker.drive(other);
    // The clocks of connections may be behind by a period, 5 s.
    let limit = start + Duration::from_secs(25);
    world.worker.next_upkeep = start;
    world.before(limit);
    assert_eq!(world.keys().len(), 3);
    world.worker.next_upkeep = limit;
    world.at(limit);
    assert_eq!(world.keys(), [other, dialing]);
    assert!(world.worker.table.get_mut(silent_one).is_none());
    world.worker.finish_all(Flag::None, |_| true);
    assert_eq!(world.flags(), ["-", "-", "SI"]);
}
