//! Cells whose holders died, slots that lead to cells, and ports of the node's.

use super::{pressure::established, *};

#[test]
fn a_cell_of_a_dead_holder_is_freed_with_its_slot() {
    let shared = Shared::new(16);
    let memory = &shared;
    for client in 0..4 {
        let key = key(2 * client);
        assert!(shared.make(&key, &to(&key, 0), at(0)));
    }
    let key = key(40_000);
    let value = to(&key, 0);
    let index = hold(&memory, &key, at(0));
    write(memory.cell(index).unwrap(), &key, &value);
    let place = place_of_replies(&key, &value, SECRET);
    assert!(lead(&memory, place, index, false, at(0)));
    for other in 0..16 {
        assert!(!free_held(&memory, other, at(5)), "the holder may live");
        assert_eq!(free_held(&memory, other, at(30)), other == index);
    }
    assert!(!free_held(&memory, 16, at(30)), "there is no such cell");
    assert_eq!(shared.is_sound(), 4);
}

#[test]
fn a_home_slot_is_taken_by_flows_that_live() {
    let shared = Shared::new(16);
    let memory = &shared;
    let key = key(40_000);
    let value = Translation {
        seen: seen::PACKET | seen::RST,
        ..to(&key, 0)
    };
    let place = place_of_replies(&key, &value, SECRET);
    let is_taken = |now| is_home_taken(&memory, place, at(now));
    assert!(!is_taken(0));
    let index = hold(&memory, &key, at(0));
    let line = memory.cell(index).unwrap();
    write(line, &key, &value);
    assert!(lead(&memory, place, index, true, at(0)));
    assert!(is_taken(0) && is_taken(60), "the flow is being made");
    assert!(publish(line, &key, memory.holder(at(0))));
    assert!(is_taken(0) && !is_taken(60), "it is over");
    assert!(shared.unmake(&key) && !is_taken(0));
}

/// The replies of a flow find a slot if one of their seventeen is empty, or if the flow of their home is over.
#[test]
fn a_slot_is_foretold() {
    let shared = Shared::new(64);
    let memory = &shared;
    let (first, second) = (key(40_000), key(40_002));
    let value = Translation {
        seen: seen::PACKET | seen::RST,
        ..to(&first, 0)
    };
    assert!(shared.make(&first, &value, at(0)));
    let index = shared.find(&first).unwrap();
    for place in 0..=memory.slots() {
        let slot = memory.slot(place).unwrap();
        assert!(slot.exchange(slot.load(), Slot(0).leading_to(index)));
    }
    let place = place_of_replies(&second, &to(&second, 0), SECRET);
    assert!(!has_slot(&memory, place, at(0)));
    assert!(has_slot(&memory, place, at(60)), "the flow is over");
    let held = hold(&memory, &second, at(0));
    assert!(!lead(&memory, place, held, false, at(0)));
    let last = memory.slot(candidate(place, OTHERS) & memory.slots());
    let last = last.unwrap();
    assert!(last.exchange(last.load(), Slot(0)));
    assert!(has_slot(&memory, place, at(0)));
    assert!(lead(&memory, place, held, false, at(0)));
}

#[test]
fn positions_belong_to_their_cell() {
    let shared = Shared::new(4);
    write_sequences(&&shared, 2, &[5, 6]);
    for (index, words) in shared.sequences.iter().enumerate() {
        let wanted = if index == 2 { [5, 6] } else { [0, 0] };
        assert_eq!([0, 1].map(|word| words.load(word)), wanted);
    }
}

/// Makes masqueraded flows to one endpoint, looks at their ports, lets `meanwhile` act, and evicts one.
fn evicted(flows: &[(FlowKey, Translation)], meanwhile: impl FnOnce(&Shared)) -> Port {
    let shared = Shared::new(64);
    let memory = &shared;
    for (key, value) in flows {
        assert!(shared.make(key, value, at(100)), "{key:?}");
    }
    let mut choice = Choice::default();
    for second in [false, true] {
        for (key, value) in flows {
            look_at_port(&memory, &mut choice, &port(key, value), second, at(100));
        }
    }
    let foretold = may_evict(&choice);
    meanwhile(&shared);
    let evicted = evict_port(&memory, &choice, at(100));
    let left = flows.iter().filter(|(key, _)| shared.find(key).is_some());
    let all_stay = evicted == Port::ANY;
    assert!(foretold || all_stay, "{evicted:?}");
    let stays = |(key, _): &&(FlowKey, Translation)| key.src_port != evicted;
    assert!(all_stay || left.eq(flows.iter().filter(stays)));
    evicted
}

/// Established, masqueraded connections of seventeen clients, or of one. The flow from port 1010 was idle longest. Every
/// second port has a slot of its own.
fn connections(of_one: bool) -> Vec<(FlowKey, Translation)> {
    let flow = |nth: u16| {
        let used = at(if nth == 5 { 40 } else { 60 });
        let client = if of_one { 100 } else { nth };
        let (key, value) = established(client, 1000 + 2 * nth, Protocol::TCP, used);
        let node_port = key.src_port;
        (
            key,
            Translation {
                node_port,
                node_addr: 1,
                ..value
            },
        )
    };
    (0..PORTS_LOOKED_AT as u16).map(flow).collect()
}

#[test]
fn a_port_is_evicted_as_a_cell_is() {
    let nothing = |_: &Shared| ();
    assert_eq!(evicted(&connections(false), nothing), Port::ANY);
    assert_eq!(evicted(&connections(true), nothing), Port::new(1010));
    let mut one_unanswered = connections(false);
    one_unanswered[7].1.seen = seen::PACKET;
    assert_eq!(evicted(&one_unanswered, nothing), Port::new(1014));
    let gone = one_unanswered[7].0;
    let removed = |shared: &Shared| assert!(shared.unmake(&gone));
    assert_eq!(evicted(&one_unanswered, removed), Port::ANY, "it is gone");
    // Nine of seventeen ports are more than half, eight are not.
    for (theirs, port) in [
        (0..9, Port::new(1010)),
        (8..17, Port::new(1016)),
        (9..17, Port::ANY),
    ] {
        let mut flows = connections(false);
        flows[theirs.clone()].clone_from_slice(&connections(true)[theirs]);
        assert_eq!(evicted(&flows, nothing), port);
    }
}

/// A client with more than half of the ports goes first among flows that are not assured, but not before flows of a
/// lesser class.
#[test]
fn a_crowd_goes_first_in_its_class() {
    let nothing = |_: &Shared| ();
    let of = |theirs: u8, others: u8| {
        let mut flows = connections(true);
        for (nth, (flow, other)) in flows.iter_mut().zip(connections(false)).enumerate() {
            // Nine flows of one client. The flow of port 1010 is another's, and was idle longest.
            let is_other = nth % 2 == 1;
            if is_other {
                *flow = other;
            }
            flow.1.seen = if is_other { others } else { theirs };
            flow.1.used = at(if nth == 5 { 80 } else { 90 });
        }
        flows
    };
    let answered = seen::PACKET | seen::in_replies(seen::PACKET);
    let assured = answered | seen::ASSURED;
    for (theirs, others, port) in [
        (seen::PACKET, seen::PACKET, 1000),
        (answered, answered, 1000),
        (assured, assured, 1000),
        (answered, seen::PACKET, 1010),
        (assured, answered, 1010),
        (seen::PACKET, answered, 1000),
    ] {
        assert_eq!(evicted(&of(theirs, others), nothing), Port::new(port));
    }
}

/// Another flow has the cell by now: its port is not free.
#[test]
fn no_port_is_evicted_of_a_flow_that_came_since() {
    let shared = Shared::new(1);
    let memory = &shared;
    let (first, second) = (key(40_000), key(40_002));
    assert!(shared.make(&first, &to(&first, 1), at(0)));
    let mut choice = Choice::default();
    assert!(!may_evict(&choice));
    let looked_at = port(&first, &to(&first, 1));
    look_at_port(&memory, &mut choice, &looked_at, true, at(50));
    assert!(may_evict(&choice));
    assert!(shared.unmake(&first));
    let used = at(50);
    let value = Translation {
        used,
        ..to(&second, 1)
    };
    assert!(shared.make(&second, &value, used));
    assert_eq!(evict_port(&memory, &choice, at(50)), Port::ANY);
    assert_eq!(shared.is_sound(), 1);
}

#[test]
fn ports_that_are_looked_at_are_far_apart() {
    for random in [0, 7, 0xffff_fff0, 0x8000_1234] {
        let ports: Vec<u16> = (0..PORTS_LOOKED_AT)
            .map(|nth| port_looked_at(random, nth))
            .collect();
        assert_eq!(ports.len(), 17);
        assert_eq!(ports[0], random as u16);
        for (nth, port) in ports.iter().enumerate() {
            let mut others = ports[..nth].iter();
            assert!(
                others.all(|other| port.abs_diff(*other) > 1000),
                "{ports:?}"
            );
        }
    }
}

/// All ports lead to one of two slots, and the flow is to another endpoint.
#[test]
fn no_port_of_another_endpoint_is_evicted() {
    let shared = Shared::new(1);
    let memory = &shared;
    let key = key(40_000);
    let with = |endpoint| Translation {
        endpoint,
        ..to(&key, 1)
    };
    let own = Addr::from_words([1, 2, 3, 4]);
    assert!(shared.make(&key, &with(own), at(0)));
    for other in [[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9]] {
        let mut choice = Choice::default();
        for node_port in 0..64 {
            let wanted = Port::new(node_port);
            let other = PortKey::new(Addr::from_words(other), wanted, wanted, key.protocol);
            look_at_port(&memory, &mut choice, &other, true, at(50));
        }
        assert_eq!(evict_port(&memory, &choice, at(50)), Port::ANY, "{other:?}");
    }
    let mut choice = Choice::default();
    look_at_port(&memory, &mut choice, &port(&key, &with(own)), true, at(50));
    assert_eq!(evict_port(&memory, &choice, at(50)), key.src_port);
}

/// A masqueraded flow of the kernel's own conntrack reserves a port. Others have no slot.
#[test]
fn a_foreign_flow_gives_its_port_back() {
    let shared = Shared::new(64);
    let memory = &shared;
    let key = key(40_000);
    let of = |node_addr| Translation {
        seen: seen::PACKET | seen::FOREIGN,
        ..to(&key, node_addr)
    };
    assert!(shared.make(&key, &of(1), at(0)));
    assert_eq!(shared.is_sound(), 1);
    assert!(shared.unmake(&key));
    shared.is_empty();

    let index = hold(&memory, &key, at(0));
    let line = memory.cell(index).unwrap();
    write(line, &key, &of(0));
    assert!(publish(line, &key, memory.holder(at(0))));
    assert!(shared.unmake(&key));
    shared.is_empty();
}
