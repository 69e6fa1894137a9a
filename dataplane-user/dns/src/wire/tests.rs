//! Tests of messages: headers, bits and codes, and what fits into an answer.

use hickory_proto::op::Message;

use super::{stored::NotAnAnswer, *};

/// A record with this owner and data, of one minute.
fn record(owner: &[u8], of_type: u8, data: &[u8]) -> Vec<u8> {
    let length = u8::try_from(data.len()).unwrap();
    [owner, &[0, of_type, 0, 1, 0, 0, 0, 60, 0, length], data].concat()
}

/// An answer to the question for `example.com`, type SRV, with these flags, and records in its sections.
fn answer(flags: [u8; 2], sections: [&[Vec<u8>]; 3]) -> Vec<u8> {
    let mut bytes = question(7, &name(), types::SRV, 1, false);
    bytes[2..4].copy_from_slice(&flags);
    for (at, section) in sections.into_iter().enumerate() {
        bytes[7 + 2 * at] = u8::try_from(section.len()).unwrap();
        bytes.extend(section.concat());
    }
    bytes
}

fn name() -> LowerName {
    LowerName::parse("example.com").unwrap()
}

fn parsed(query: &[u8]) -> Query<'_> {
    match Parsed::read(query) {
        Parsed::Query(query) => query,
        other => panic!("{other:?}"),
    }
}

fn read(bytes: &[u8]) -> Result<Stored, NotAnAnswer> {
    Stored::read(bytes, &name(), types::SRV, false)
}

#[test]
fn additional_records_of_one_name_and_type_are_left_out_together() {
    let of = |owner: &[u8], last| record(owner, 1, &[192, 0, 2, last]);
    let (one, two): (&[u8], &[u8]) = (&[1, b'a', 0], &[1, b'b', 0]);
    let mut additional = [of(one, 1), of(two, 2), of(two, 3), of(two, 4)];
    // Whatever their times to live.
    additional[2][two.len() + 4] = 1;
    let bytes = answer([0x81, 0x80], [&[], &[], &additional]);
    let stored = read(&bytes).unwrap();
    let length = additional[0].len();
    let at = bytes.len() - 4 * length;
    for (room, kept) in [(4, 4_u16), (3, 1), (2, 1), (1, 1), (0, 0)] {
        let found = stored.within(at + room * length);
        let end = at + usize::from(kept) * length;
        assert_eq!(found, (end, [0, 0, kept]), "{room}");
    }
    // An answer may be cut between any two records, and TC is set.
    let stored = read(&answer([0x81, 0x80], [&additional, &[], &[]])).unwrap();
    assert_eq!(stored.within(at + 3 * length).1, [3, 0, 0]);
}

/// RFC 2181, 8.
#[test]
fn a_ttl_with_the_upper_bit_set_is_zero() {
    for (of, ttl) in [
        (60, 60),
        (0x7fff_ffff, 0x7fff_ffff),
        (0x8000_0000_u32, 0),
        (u32::MAX, 0),
    ] {
        let mut record = record(&[0xc0, 12], 33, &[0, 0, 0, 1, 0, 80, 1, b'a', 0]);
        record[6..10].copy_from_slice(&of.to_be_bytes());
        let stored = read(&answer([0x81, 0x80], [&[record], &[], &[]])).unwrap();
        assert_eq!(stored.shape().ttl, ttl);
        let at = HEADER + name().bytes().len() + 4 + 6;
        assert_eq!(read_u32(stored.bytes(), at), ttl);
    }
}

#[test]
fn an_answer_that_is_cut_within_a_record_is_truncated() {
    let bytes = answer([0x83, 0x80], [&[record(&[0xc0, 12], 1, &[1; 4])], &[], &[]]);
    let stored = read(&bytes[..bytes.len() - 3]).unwrap();
    assert!(stored.is_truncated() && stored.counts() == [0; 3] && stored.shape().ttl == 0);
    let whole = answer([0x81, 0x80], [&[record(&[0xc0, 12], 1, &[1; 4])], &[], &[]]);
    assert!(read(&whole[..whole.len() - 3]).is_err());
}

#[test]
fn a_client_gets_no_success_for_a_code_that_its_header_has_no_room_for() {
    let opt = [&[0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0][..]].concat();
    let stored = read(&answer([0x81, 0x80], [&[], &[], &[opt]])).unwrap();
    for (edns, code) in [(true, 0), (false, 2)] {
        let query = question(9, &name(), types::SRV, 1, edns);
        let parsed = parsed(&query);
        let mut out = Vec::new();
        parsed.with_stored(Transport::Udp, &stored, 0, &mut out);
        assert_eq!(out[3] & 0x0f, code, "EDNS: {edns}");
        if edns {
            // The upper bits, in the OPT record.
            assert_eq!(out[out.len() - OPT_LENGTH + 5], 1);
        }
    }
}

#[test]
fn an_answer_that_is_truncated_by_tcp_says_so() {
    let stored = read(&answer([0x83, 0x80], [&[], &[], &[]])).unwrap();
    let query = question(9, &name(), types::SRV, 1, false);
    let parsed = parsed(&query);
    let mut out = Vec::new();
    parsed.with_stored(Transport::Tcp, &stored, 0, &mut out);
    assert_eq!(out[2] & 0x02, 0x02);
}

/// RFC 3597, 4: the types whose data may have pointers.
#[test]
fn pointers_move_with_the_names_that_they_lead_to() {
    let naptr = [0, 1, 0, 2, 1, b'u', 0, 2, b'a', b'b'];
    let cases: [(&[u8], &[u8], usize); 9] = [
        (&[2, 3, 4, 5, 7, 8, 9, 12, 30, 39], &[], 1),
        (&[6, 14, 17], &[], 2),
        (&[15, 18, 21, 36], &[0, 10], 1),
        (&[24], &[9; 18], 1),
        (&[26], &[0, 10], 2),
        (&[33], &[9; 6], 1),
        (&[35], &naptr, 1),
        // Data of other types may look like a pointer.
        (&[1, 13, 16, 99], &[0xc0, 12], 0),
        (&[28], &[], 0),
    ];
    for (of_types, before, names) in cases {
        for of_type in of_types {
            // `start`: the first record's offset; `asked`: that of the question's name.
            let records = |start: usize, asked: u8| {
                let pointer = [0xc0, asked];
                let first = record(
                    &pointer,
                    *of_type,
                    &[before, &pointer.repeat(names)].concat(),
                );
                let second = record(&[1, b'a', 0], 1, &[1; 4]);
                let at = u16::try_from(start + first.len()).unwrap();
                let third = record(&(0xc000 | at).to_be_bytes(), 1, &[2; 4]);
                [first, second, third]
            };
            let start = HEADER + name().bytes().len() + 4;
            let bytes = answer([0x81, 0x80], [&records(start, 12), &[], &[]]);
            let mut out = vec![7; 300];
            assert_eq!(read(&bytes).unwrap().append_to(&mut out, 40, 0), Some(()));
            assert_eq!(out[300..], records(300, 40).concat(), "type {of_type}");
        }
    }
    // A name that goes on behind its record's data.
    let cut = record(&[0xc0, 12], 2, &[1]);
    let next = record(&[2, 0, 0, 0], 1, &[1; 4]);
    let bytes = answer([0x81, 0x80], [&[cut, next], &[], &[]]);
    assert_eq!(
        read(&bytes).unwrap().append_to(&mut Vec::new(), 12, 0),
        None
    );
}

/// RFC 2308: a negative answer is kept for as long as its SOA record says.
#[test]
fn caches_keep_an_answer_for_its_shortest_time() {
    /// A name, the code, the records of each section, and the time in seconds.
    type Case<'a> = (&'a str, u8, [&'a [Vec<u8>]; 3], u32);
    let addr = |ttl| {
        [
            &record(&[0xc0, 12], 1, &[1; 4])[..6],
            &[0, 0, 0, ttl],
            &[0, 4],
            &[1; 4],
        ]
        .concat()
    };
    let soa = |minimum| {
        record(
            &[0xc0, 12],
            6,
            &[&[0; 18][..], &[0, 0, 0, minimum]].concat(),
        )
    };
    let opt = |upper| [0, 0, 41, 4, 208, upper, 0, 0, 0, 0, 0].to_vec();
    let cases: [Case; 12] = [
        (
            "the shortest",
            0,
            [&[addr(70), addr(50)], &[], &[addr(90)]],
            50,
        ),
        (
            "an additional record's",
            0,
            [&[addr(70)], &[], &[addr(40)]],
            40,
        ),
        ("no such name", 3, [&[], &[soa(30)], &[]], 30),
        ("its record's own time", 3, [&[], &[soa(90)], &[]], 60),
        ("no such records", 0, [&[], &[soa(30)], &[]], 30),
        ("an alias to nothing", 0, [&[addr(50)], &[soa(30)], &[]], 30),
        ("an alias to no name", 3, [&[addr(20)], &[soa(30)], &[]], 20),
        ("no SOA record", 3, [&[addr(50)], &[], &[]], 0),
        ("in another section", 0, [&[], &[], &[soa(30)]], 0),
        ("another record", 0, [&[], &[addr(30)], &[]], 0),
        ("a failure", 2, [&[addr(50)], &[], &[]], 0),
        ("a code of EDNS", 0, [&[addr(50)], &[], &[opt(1)]], 0),
    ];
    for (what, code, sections, ttl) in cases {
        let stored = read(&answer([0x81, 0x80 | code], sections)).unwrap();
        assert_eq!(stored.shape().ttl, ttl, "{what}");
    }
}

#[test]
fn other_answers_are_not_taken() {
    let with = |changes: &[(usize, u8)]| {
        let mut bytes = answer([0x81, 0x80], [&[], &[], &[]]);
        for (at, byte) in changes {
            bytes[*at] = *byte;
        }
        read(&bytes).map(|_| ())
    };
    let opt = record(&[0], 41, &[]);
    let (end, other) = (
        HEADER + name().bytes().len(),
        Err(NotAnAnswer::AnotherQuestion),
    );
    assert_eq!(with(&[]), Ok(()));
    for (what, changes) in [
        ("a query", &[(2, 0x01)][..]),
        ("another opcode", &[(2, 0xa1)]),
        ("another name", &[(13, b'E' + 1)]),
        ("another type", &[(end + 1, 1)]),
        ("another class", &[(end + 3, 3)]),
        ("no question", &[(5, 0)]),
        ("two questions and a failure", &[(5, 2), (3, 0x82)]),
    ] {
        assert_eq!(with(changes), other, "{what}");
    }
    // An OPT record in another section, or two.
    let opts = [opt.clone(), opt];
    for (section, count) in [(0, 1), (1, 1), (2, 2)] {
        let mut sections: [&[Vec<u8>]; 3] = [&[]; 3];
        sections[section] = &opts[..count];
        let bytes = answer([0x81, 0x80], sections);
        assert_eq!(read(&bytes), Err(NotAnAnswer::Malformed));
    }
}

#[test]
fn a_question_has_its_bits() {
    for (with, edns) in (0..16).flat_map(|with| [(with, false), (with, true)]) {
        let query = question(7, &name(), types::SRV, with, edns);
        // Without EDNS, there is no place for the bit of DNSSEC.
        let known = if edns { with } else { with & !bits::DO };
        let read = parsed(&query);
        assert_eq!((read.bits(), read.has_edns()), (known, edns));
        let message = Message::from_vec(&query).unwrap();
        let head = &message.metadata;
        let found = [
            (head.recursion_desired, bits::RD),
            (head.authentic_data, bits::AD),
            (head.checking_disabled, bits::CD),
            (
                message
                    .edns
                    .as_ref()
                    .is_some_and(|edns| edns.flags().dnssec_ok),
                bits::DO,
            ),
        ];
        for (is, bit) in found {
            assert_eq!(is, known & bit != 0, "{with} {edns}");
        }
        let payload = message.edns.map(|edns| edns.max_payload());
        assert_eq!(payload, edns.then_some(PAYLOAD));
    }
}

#[test]
fn the_header_of_an_answer_says_who_answers_and_what_was_asked() {
    let query = |first, second, edns| {
        let mut query = question(0x1234, &name(), types::SRV, bits::DO, edns);
        (query[2], query[3]) = (first, second);
        query
    };
    // RD and CD are the client's. AA, TC, RA, AD and the code are not.
    for (head, kept) in [
        ([0, 0], [0, 0]),
        ([1, 0], [1, 0]),
        ([0, 0x10], [0, 0x10]),
        ([0x07, 0xff], [1, 0x10]),
    ] {
        for (code, low, upper) in [(0, 0, 0), (3, 3, 0), (16, 0, 1), (0xabc, 0xc, 0xab)] {
            let query = query(head[0], head[1], true);
            let (mut out, end) = (Vec::new(), query.len() - OPT_LENGTH);
            parsed(&query).with_code(ResponseCode::from(upper, low), &mut out);
            assert_eq!(u16::from(upper) << 4 | u16::from(low), code);
            assert_eq!(out[..4], [0x12, 0x34, 0x80 | kept[0], 0x80 | kept[1] | low]);
            assert_eq!(out[4..HEADER], [0, 1, 0, 0, 0, 0, 0, 1]);
            assert_eq!(out[HEADER..end], query[HEADER..end]);
            assert_eq!(out[end..], [0, 0, 41, 4, 208, upper, 0, DO, 0, 0, 0]);
        }
        let query = query(head[0], head[1], false);
        let mut out = Vec::new();
        parsed(&query).with_addresses(Transport::Udp, 9, [&[1_u8; 4][..]].into_iter(), &mut out);
        assert_eq!(
            out[2..HEADER],
            [0x84 | kept[0], 0x80 | kept[1], 0, 1, 0, 1, 0, 0, 0, 0]
        );
        // A message that cannot be read: its opcode and RD are copied.
        refusal(
            &[1, 2, 0x7e | head[0], head[1]],
            ResponseCode::NotImp,
            &mut out,
        );
        assert_eq!(out, [1, 2, 0xf8 | kept[0], 0x84, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    let mut out = vec![1];
    refusal(&[1, 2, 3], ResponseCode::FormErr, &mut out);
    assert!(out.is_empty());
}

/// The name has 13 bytes, so header and question have 29.
#[test]
fn an_answer_has_as_many_addresses_as_there_is_room_for() {
    let with_payload = |payload: u16| {
        let mut query = question(1, &name(), types::A, 0, true);
        let at = query.len() - OPT_LENGTH + 3;
        query[at..at + 2].copy_from_slice(&payload.to_be_bytes());
        query
    };
    let plain = question(1, &name(), types::A, 0, false);
    let (udp, tcp) = (Transport::Udp, Transport::Tcp);
    for (what, query, transport, length, fit) in [
        ("512 bytes", plain.clone(), udp, 4, (512 - 29) / 16),
        ("512 bytes", plain.clone(), udp, 16, (512 - 29) / 28),
        (
            "less than anybody may take",
            with_payload(100),
            udp,
            4,
            (512 - 40) / 16,
        ),
        ("exactly", with_payload(40 + 50 * 16), udp, 4, 50),
        ("nearly", with_payload(39 + 50 * 16), udp, 4, 49),
        (
            "more than we send",
            with_payload(5000),
            udp,
            4,
            (4096 - 40) / 16,
        ),
        ("a connection", plain, tcp, 4, (65_535 - 29) / 16),
        (
            "a connection",
            with_payload(512),
            tcp,
            4,
            (65_535 - 40) / 16,
        ),
    ] {
        let address = vec![7; length];
        for (count, truncated) in [(fit, 0), (fit + 1, 2)] {
            let mut out = Vec::new();
            let addresses = vec![&*address; count].into_iter();
            parsed(&query).with_addresses(transport, 0x0102_0304, addresses, &mut out);
            let message = Message::from_vec(&out).unwrap();
            assert_eq!(message.answers.len(), fit, "{what}");
            assert_eq!(out[2], 0x84 | truncated, "{what}, {count}");
            let of_type = if length == 4 { 1 } else { 28 };
            let bytes = [
                &[0xc0, 12, 0, of_type, 0, 1, 1, 2, 3, 4, 0][..],
                &[u8::try_from(length).unwrap()],
                &address,
            ];
            assert_eq!(out[29..][..12 + length], bytes.concat(), "{what}");
        }
    }
}

/// A resolver's answer, for a client that takes less or asks for less.
#[test]
fn a_stored_answer_is_what_the_client_can_take() {
    let addr = record(&[0xc0, 12], 1, &[1; 4]);
    let whole = |flags, count: usize, more: usize| {
        read(&answer(
            flags,
            [&vec![addr.clone(); count], &[], &vec![addr.clone(); more]],
        ))
        .unwrap()
    };
    let told = |stored: &Stored, with, edns| {
        let query = question(1, &name(), types::SRV, with, edns);
        let mut out = Vec::new();
        parsed(&query).with_stored(Transport::Udp, stored, 10, &mut out);
        out
    };
    // AD is for clients that ask for it, or for DNSSEC.
    for (with, ad) in [(0, 0), (bits::CD, 0), (bits::AD, 0x20), (bits::DO, 0x20)] {
        let out = told(&whole([0x85, 0xa0], 1, 0), with, true);
        assert_eq!(out[3] & 0x20, ad, "{with}");
        // It is the resolver's answer, not ours.
        assert_eq!(out[2] & 0x06, 0);
        assert_eq!(told(&whole([0x81, 0x80], 1, 0), with, true)[3] & 0x20, 0);
    }
    // 29 bytes and 30 records of 16 are 509; the OPT record needs eleven.
    for (count, more, edns, kept, truncated) in [
        (30, 0, false, [30, 0], 0),
        (31, 0, false, [30, 0], 2),
        (29, 1, false, [29, 1], 0),
        (30, 1, false, [30, 0], 0),
        (74, 0, true, [74, 0], 0),
        (75, 0, true, [74, 0], 2),
    ] {
        let out = told(&whole([0x81, 0x80], count, more), 0, edns);
        let counts = [out[7], out[11]];
        assert_eq!(
            counts,
            [kept[0], kept[1] + u8::from(edns)],
            "{count} {more}"
        );
        assert_eq!(out[2] & 2, truncated, "{count} {more}");
        assert_eq!(out[29 + 9], 50, "ten of its sixty seconds are over");
    }
}

#[test]
fn a_query_is_read_as_the_rfcs_say() {
    let with = |changes: &[(usize, u8)], more: &[u8]| {
        let mut query = question(1, &name(), types::A, 0, false);
        for (at, byte) in changes {
            query[*at] = *byte;
        }
        [&query[..], more].concat()
    };
    let said = |query: &[u8]| match Parsed::read(query) {
        Parsed::Query(query) => format!(
            "query {:?}",
            query.edns.map(|edns| (edns.payload, edns.dnssec))
        ),
        Parsed::Foreign => "foreign".to_owned(),
        Parsed::Refused(_, code) | Parsed::Wrong(code) => format!("{code:?}"),
        Parsed::Nothing => "nothing".to_owned(),
    };
    let end = HEADER + name().bytes().len();
    let opt = |version, flags| [0, 0, 41, 4, 208, 0, version, flags, 1, 0, 0];
    let of = |owner: &[u8], of_type: u8| record(owner, of_type, &[]);
    for (what, query, wanted) in [
        ("plain", with(&[], &[]), "query None"),
        (
            "EDNS",
            with(&[(11, 1)], &opt(0, 0x7f)),
            "query Some((1232, false))",
        ),
        (
            "DNSSEC",
            with(&[(11, 1)], &opt(0, 0x80)),
            "query Some((1232, true))",
        ),
        ("a version", with(&[(11, 1)], &opt(1, 0)), "BADVERS"),
        ("an answer's OPT", with(&[(7, 1)], &opt(0, 0)), "FormErr"),
        ("an authority's OPT", with(&[(9, 1)], &opt(0, 0)), "FormErr"),
        (
            "an owner",
            with(&[(11, 1)], &of(&[1, b'a', 0], 41)),
            "FormErr",
        ),
        ("TSIG", with(&[(11, 1)], &of(&[1, b'a', 0], 250)), "foreign"),
        ("an answer", with(&[(7, 1)], &of(&[0xc0, 12], 1)), "foreign"),
        ("a cut pointer", with(&[(11, 1)], &[0xc0]), "FormErr"),
        (
            "a label of 64",
            with(&[(11, 1)], &of(&[&[64][..], &[9; 64], &[0]].concat(), 250)),
            "FormErr",
        ),
        (
            "a label of 63",
            with(&[(11, 1)], &of(&[&[63][..], &[9; 63], &[0]].concat(), 250)),
            "foreign",
        ),
        (
            "cut data",
            with(&[(11, 1)], &record(&[0], 250, &[1])[..11]),
            "FormErr",
        ),
        ("all types", with(&[(end + 1, 255)], &[]), "query None"),
        ("type OPT", with(&[(end + 1, 41)], &[]), "FormErr"),
        ("Chaos", with(&[(end + 3, 3)], &[]), "foreign"),
        ("IQUERY", with(&[(2, 0x08)], &[]), "foreign"),
        ("NOTIFY", with(&[(2, 0x20)], &[]), "Refused"),
        ("an answer of ours", with(&[(2, 0x80)], &[]), "nothing"),
    ] {
        assert_eq!(said(&query), wanted, "{what}");
    }
}
