//! Keys that differ from a flow's in one bit, or in the same bit of two parts, are not the flow's.

use super::*;

/// The parts of a key: eight words of addresses, two ports, the protocol.
const PARTS: usize = 11;

/// Flips a bit of a part.
fn flipped(mut key: FlowKey, part: usize, bit: u32) -> FlowKey {
    let word = |addr: Addr, at: usize| {
        let mut words = addr.words();
        words[at] ^= 1 << bit;
        Addr::from_words(words)
    };
    let of_port = |port: Port| Port::from_be(port.be() ^ 1 << (bit % 16));
    match part {
        0..4 => key.src = word(key.src, part),
        4..8 => key.dst = word(key.dst, part - 4),
        8 => key.src_port = of_port(key.src_port),
        9 => key.dst_port = of_port(key.dst_port),
        _ => key.protocol = Protocol::from_number(key.protocol.number() ^ 1 << (bit % 8)),
    }
    key
}

/// All keys that differ from a key in one bit of these parts, or in the same bit of two.
fn others(key: FlowKey, parts: &[usize]) -> Vec<FlowKey> {
    let mut all = Vec::new();
    for bit in 0..32 {
        for (nth, part) in parts.iter().enumerate() {
            let one = flipped(key, *part, bit);
            all.push(one);
            let rest = parts[nth + 1..].iter();
            all.extend(rest.map(|other| flipped(one, *other, bit)));
        }
    }
    all
}

fn v6(number: u32) -> Addr {
    Addr::from_words([number, number + 1, number + 2, number + 3])
}

/// The flow of a cell: masqueraded, or with another port of the client's or with its own.
fn found(key: &FlowKey, node_port: Port, node_addr: u8) -> (Snapshot, Translation) {
    let shared = Shared::new(1);
    let value = Translation {
        endpoint: v6(0x5a5a_0000),
        node_port,
        ..to(key, node_addr)
    };
    assert!(shared.make(key, &value, at(0)));
    let line = (&&shared).cell(0).unwrap();
    let head = Head(line.load(HEAD));
    let all: Vec<usize> = (0..PARTS).collect();
    assert!(has(line, head, key));
    let different = others(*key, &all);
    assert!(different.iter().all(|other| !has(line, head, other)));
    (read(line).unwrap(), value)
}

#[test]
fn a_flow_is_found_by_its_own_keys() {
    let all: Vec<usize> = (0..PARTS).collect();
    let key = FlowKey {
        src: v6(0x1111_0000),
        dst: v6(0x2222_0000),
        ..key(40_000)
    };
    for (node_port, node_addr) in [
        (Port::ANY, 0),
        (Port::new(50_000), 0),
        (Port::new(50_000), 3),
        (key.src_port, 0x80),
    ] {
        let (found, value) = found(&key, node_port, node_addr);
        assert!(found.is_of(&key) && found.key() == key);
        let different = others(key, &all);
        assert!(different.iter().all(|other| !found.is_of(other)));
        let masqueraded = node_addr != 0;

        let own = FlowKey {
            dst_port: value.seen_port(&key),
            ..reply(&key, &value)
        };
        assert_eq!(found.is_answered_by(&own), !masqueraded);
        for other in others(own, &all) {
            assert!(!found.is_answered_by(&other), "{other:?}");
        }

        let by_port = |key: FlowKey| {
            let reply = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
            found.is_answered_by_port(&reply)
        };
        let own = FlowKey {
            dst_port: node_port,
            ..own
        };
        assert_eq!(by_port(own), masqueraded);
        for other in others(own, &[0, 1, 2, 3, 8, 9, 10]) {
            assert!(!by_port(other), "{other:?}");
        }
    }
}
