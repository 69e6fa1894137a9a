//! On real maps, which no program knows.

use std::{io, thread, time::Duration};

use super::*;

/// Counts the waits for programs.
#[derive(Default)]
struct Waits(u32);

impl Filter for Waits {
    fn let_through(&mut self, _: Addr) {}

    fn let_through_no_more(&mut self, _: Addr) {}

    fn wait_for_programs(&mut self) -> Result<(), Error> {
        self.0 += 1;
        Ok(())
    }
}

/// Creates a packet path without programs. If this process may not create maps, prints the reason and returns `None`.
fn packet_path() -> Option<PacketPath> {
    let tables = match PacketTables::unpinned() {
        Ok(tables) => tables,
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied
                && std::env::var_os("DATAPLANE_REQUIRE_PRIVILEGES").is_none() =>
        {
            println!("skipped, for want of privileges: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    Some(PacketPath {
        node_addrs: NodeAddrs::adopt(|index| tables.node_addr(index)),
        protected: Protected::adopt(tables.config()),
        tables,
        programs: None,
        cells: 0,
        secret: 0,
        fast_since: None,
    })
}

const OUT: u32 = PacketConfig::STACK_OUT;
const STACK: u32 = PacketConfig::STACK;

/// Returns a moment that is later than all before.
fn later() -> Instant {
    thread::sleep(Duration::from_millis(1));
    Instant::now()
}

#[test]
fn programs_look_for_flows_in_the_stack_until_a_walk_has_found_none() {
    let Some(mut path) = packet_path() else {
        return;
    };
    let mut waits = Waits::default();
    let mut set = |path: &mut PacketPath, flags: u32| {
        let config = PacketConfig {
            flags,
            ..PacketConfig::default()
        };
        let mut problems = Vec::new();
        let set = path.protect(&mut waits, &[], config, &mut problems);
        set.expect("no programs to wait for");
        path.tables.config().flags
    };
    let walked = |path: &mut PacketPath, since: Instant| {
        path.none_through_stack(since);
        path.tables.config().flags
    };
    assert_eq!(set(&mut path, STACK), STACK);
    assert_eq!(walked(&mut path, later()), STACK, "flows begin");
    let early = later();
    assert_eq!(set(&mut path, 0), OUT);
    assert_eq!(walked(&mut path, early), OUT, "flows began meanwhile");
    let during = later();
    assert_eq!(set(&mut path, STACK), STACK);
    assert_eq!(set(&mut path, 0), OUT);
    assert_eq!(walked(&mut path, during), OUT, "flows began meanwhile");
    assert_eq!(set(&mut path, 0), OUT, "they stay on the path");
    assert_eq!(walked(&mut path, later()), 0);
    assert_eq!(set(&mut path, 0), 0);
    assert_eq!(set(&mut path, STACK), STACK);
    assert_eq!(set(&mut path, 0), OUT);
    // For the policies, and each time that the stack was left.
    assert_eq!(waits.0, 1 + 3);
}

#[test]
fn the_stack_waits_for_the_last_interface_unless_earlier_programs_know_it() {
    const IN: u32 = PacketConfig::STACK_IN;
    const OTHERS: u32 = PacketConfig::WAYS_BY_ADDRESS | PacketConfig::SEVERAL_UPLINKS;
    for (wanted, before, has_earlier, held_back) in [
        (STACK, 0, true, STACK),
        (STACK | OTHERS, OTHERS, true, STACK),
        // A node without programs: packets may pass no policy by until all interfaces have them.
        (STACK, 0, false, 0),
        // The earlier agent had chosen this path.
        (STACK, STACK, true, 0),
        (STACK, OUT, true, IN),
        (OTHERS, STACK, true, 0),
        (0, 0, true, 0),
    ] {
        let found = late(wanted, before, has_earlier);
        assert_eq!(found, held_back, "{wanted:#x}, {before:#x}, {has_earlier}");
    }
}
