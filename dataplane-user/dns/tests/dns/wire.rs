//! Any bytes from a client lead to an answer to them, or to silence.

use std::{
    env,
    time::{Duration, Instant},
};

use dataplane_dns::{
    LowerName, Stored, Transport, Ttls, Zone,
    answer::{Decision, answer},
    question,
};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use proptest::prelude::*;
use rand::{SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};

use super::{TTLS, nobody, zone};

/// Says how many inputs the fuzzer makes; without it, as many as fit into [`SHORT`].
const INPUTS: &str = "DATAPLANE_DNS_INPUTS";
const SHORT: Duration = Duration::from_secs(5);

fn answered(query: &[u8]) -> (Decision, Vec<u8>) {
    let mut out = Vec::new();
    let random = &mut rand::rng();
    let decision = answer(&zone(), query, Transport::Udp, nobody, random, &mut out);
    (decision, out)
}

fn query(name: &str) -> Vec<u8> {
    question(0x1234, &LowerName::parse(name).unwrap(), 1, 1, false)
}

const WEB: &str = "web.shop.svc.cluster.local";

#[test]
fn malformed_queries_are_refused_as_the_rfcs_say() {
    let with = |at: usize, bytes: &[u8]| {
        let mut query = query(WEB);
        query.splice(at..at + bytes.len(), bytes.iter().copied());
        query
    };
    let opt = |version: u8| [0, 0, 41, 4, 208, 0, version, 0, 0, 0, 0];
    let with_opts = |count: u8, opts: &[u8]| [&with(11, &[count])[..], opts].concat();
    let end = query(WEB).len();
    let transfer = |of_type: u8| with(end - 3, &[of_type]);
    // The SOA record of the client's copy of the zone, as an authority: a name by a pointer, and data without length.
    let mut since = transfer(251);
    since[9] = 1;
    since.extend([0xc0, 12, 0, 6, 0, 1, 0, 0, 0, 0, 0, 0]);
    for (what, query, code) in [
        ("no question", with(5, &[0]), ResponseCode::FormErr),
        ("two questions", with(5, &[2]), ResponseCode::FormErr),
        (
            "a label that is cut",
            query(WEB)[..20].to_vec(),
            ResponseCode::FormErr,
        ),
        (
            "no class",
            query(WEB)[..end - 2].to_vec(),
            ResponseCode::FormErr,
        ),
        (
            "a pointer to itself",
            with(12, &[0xc0, 12]),
            ResponseCode::FormErr,
        ),
        (
            "a label of 64 bytes",
            with(12, &[64]),
            ResponseCode::FormErr,
        ),
        (
            "a record that is not there",
            with(11, &[1]),
            ResponseCode::FormErr,
        ),
        (
            "two OPT records",
            with_opts(2, &[opt(0), opt(0)].concat()),
            ResponseCode::FormErr,
        ),
        (
            "a version that nobody has",
            with_opts(1, &opt(1)),
            ResponseCode::BADVERS,
        ),
        ("a whole zone", transfer(252), ResponseCode::Refused),
        ("a zone's changes", since, ResponseCode::Refused),
    ] {
        let (decision, out) = answered(&query);
        assert!(
            matches!(decision, Decision::Answered(_)),
            "{what}: {decision:?}"
        );
        let message = Message::from_vec(&out).unwrap_or_else(|error| panic!("{what}: {error}"));
        let found = u16::from(message.metadata.response_code);
        let wanted = (u16::from(code), 0x1234);
        assert_eq!((found, message.metadata.id), wanted, "{what}");
        // Clients take no answer without their question, if it is a question.
        let questions = usize::from(code != ResponseCode::FormErr);
        assert_eq!(message.queries.len(), questions, "{what}");
        let edns = code == ResponseCode::BADVERS;
        assert_eq!(message.edns.is_some(), edns, "{what}");
    }
    for (what, query) in [
        ("nothing", Vec::new()),
        ("less than a header", query(WEB)[..11].to_vec()),
        // Two servers would go on for ever.
        ("an answer", with(2, &[0x80])),
    ] {
        let (decision, out) = answered(&query);
        assert!(
            matches!(decision, Decision::Nothing) && out.is_empty(),
            "{what}"
        );
    }
    // NOTIFY and UPDATE, with the opcode.
    for flags in [0x20, 0x28] {
        let (decision, out) = answered(&with(2, &[flags]));
        assert!(matches!(decision, Decision::Answered(_)), "{flags:x}");
        assert_eq!((out[2] & 0x78, out[3] & 0x0f), (flags, 5));
    }
    for (what, query) in [
        ("another opcode", with(2, &[0x38])),
        ("another class", with(end - 1, &[3])),
    ] {
        assert!(matches!(answered(&query).0, Decision::Relay), "{what}");
    }
}

#[test]
fn an_answer_has_the_spelling_of_its_query_and_fits_into_what_the_client_takes() {
    let mut query = query("my-pet.headless.default.svc.cluster.local");
    query[12 + 1..].make_ascii_uppercase();
    let (_, out) = answered(&query);
    assert_eq!(out[12..query.len()], query[12..]);
    let message = Message::from_vec(&out).unwrap();
    assert!(message.metadata.authoritative && message.edns.is_none());
    assert_eq!(message.answers.len(), 2);
    assert!(message.answers.iter().all(|record| record.ttl == 5));
    // The times to live of the configuration: for addresses, for records that lead to them, and for all other records.
    let longer = Zone {
        ttls: Ttls {
            services: 30,
            ..TTLS
        },
        ..zone()
    };
    for (name, of_type) in [
        (WEB, 1),
        ("_https._tcp.headless.default.svc.cluster.local", 33),
        ("dns-version.cluster.local", 16),
    ] {
        let name = LowerName::parse(name).unwrap();
        let (mut out, random) = (Vec::new(), &mut rand::rng());
        let query = question(1, &name, of_type, 1, true);
        let _ = answer(&longer, &query, Transport::Udp, nobody, random, &mut out);
        let answers = Message::from_vec(&out).unwrap().answers;
        assert!(!answers.is_empty(), "{name:?}");
        assert!(answers.iter().all(|record| record.ttl == 30), "{answers:?}");
    }
    // Without EDNS, 512 bytes are all that a client takes.
    let name = LowerName::parse("headless.default.svc.cluster.local").unwrap();
    let long = |edns| answered(&question(1, &name, 33, 1, edns)).1;
    let bytes = long(false);
    let short = Message::from_vec(&bytes).unwrap();
    // RFC 2181: additional records that do not fit are left out, and the answer is whole.
    assert!(!short.metadata.truncation && bytes.len() <= 512);
    assert_eq!(short.answers.len(), 7);
    assert!(short.additionals.len() < 6, "{short:?}");
    let whole = Message::from_vec(&long(true)).unwrap();
    assert!(!whole.metadata.truncation && whole.edns.is_some());
    assert_eq!(whole.answers.len(), 7);
}

/// A record of `example.com`, whose name is the question's: type, and data with its length.
fn record(of_type: u8, data: &[u8]) -> Vec<u8> {
    let head = [0xc0, 12, 0, of_type, 0, 1, 0, 0, 0, 60];
    [&head[..], data].concat()
}

#[test]
fn answers_of_all_servers_are_understood() {
    let name = LowerName::parse("example.com").unwrap();
    let query = question(7, &name, 15, 1, false);
    let answer = |flags: [u8; 2], counts: [u8; 4], rest: &[u8]| {
        let counts = counts.map(|count| [0, count]).concat();
        [&query[..2], &flags, &counts, rest].concat()
    };
    let read = |bytes: &[u8]| Stored::read(bytes, &name, 15, false);
    let opt = [0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0];
    // RFC 6891: the OPT record is anywhere in its section.
    let mail = record(15, &[0, 4, 0, 10, 0xc0, 12]);
    let addr = record(1, &[0, 4, 192, 0, 2, 1]);
    for (additional, kept) in [
        ([&opt[..], &addr, &addr].concat(), 0),
        ([&addr, &opt[..], &addr].concat(), 1),
        ([&addr, &addr, &opt[..]].concat(), 2),
    ] {
        let rest = [&query[12..], &mail, &additional].concat();
        let stored = read(&answer([0x81, 0x80], [1, 1, 0, 3], &rest)).unwrap();
        let message = Message::from_vec(stored.bytes()).unwrap();
        assert!(message.edns.is_none());
        assert_eq!(
            (message.answers.len(), message.additionals.len()),
            (1, kept)
        );
        assert_eq!(
            u16::from(stored.code()),
            16,
            "the upper bits are those of the OPT record"
        );
    }
    // A refusal, without the question and with it.
    for code in [1, 2, 4, 5_u8] {
        let short = read(&answer([0x81, 0x80 | code], [0; 4], &[])).unwrap();
        let with = read(&answer([0x81, 0x80 | code], [1, 0, 0, 0], &query[12..])).unwrap();
        assert_eq!(short, with);
        assert_eq!(u16::from(short.code()), u16::from(code));
    }
    // Not a success, not that a name does not exist, and nothing by another name.
    for code in [0, 3] {
        assert!(read(&answer([0x81, 0x80 | code], [0; 4], &[])).is_err());
    }
    let other = question(7, &LowerName::parse("example.org").unwrap(), 15, 1, false);
    assert!(read(&answer([0x81, 0x85], [1, 0, 0, 0], &other[12..])).is_err());
}

#[test]
fn endpoints_are_in_every_order() {
    let name = LowerName::parse("headless.default.svc.cluster.local").unwrap();
    let (zone, random, mut out) = (zone(), &mut rand::rng(), Vec::new());
    for (of_type, count) in [(1, 4), (28, 2)] {
        let query = question(1, &name, of_type, 1, false);
        let mut firsts = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let _ = answer(&zone, &query, Transport::Udp, nobody, random, &mut out);
            let message = Message::from_vec(&out).unwrap();
            firsts.insert(message.answers[0].data.to_string());
        }
        assert_eq!(firsts.len(), count);
    }
}

/// Checks an answer to any query.
fn check(query: &[u8], decision: &Decision, out: &[u8]) -> Result<(), String> {
    match decision {
        Decision::Answered(_) => {
            let message = Message::from_vec(out).map_err(|error| error.to_string())?;
            if out[..2] != query[..2] {
                return Err("another id".to_owned());
            }
            if out.len() > 4096 {
                return Err(format!("{} bytes", out.len()));
            }
            if message.queries.len() > 1 {
                return Err("several questions".to_owned());
            }
            Ok(())
        }
        Decision::Ask(ask) if ask.candidates.is_empty() => Err("nobody to ask".to_owned()),
        Decision::Ask(_) | Decision::Relay | Decision::Nothing => Ok(()),
    }
}

/// Labels that mean something.
const LABELS: &[&str] = &[
    "web",
    "shop",
    "svc",
    "cluster",
    "local",
    "default",
    "headless",
    "my-pet",
    "_https",
    "_tcp",
    "pod",
    "10-244-1-8",
    "foo",
    "inner",
    "circle",
    "in-addr",
    "ip6",
    "arpa",
    "10",
    "1",
    "dns-version",
    "published",
    "8",
    "b",
    "d",
    "0",
];

/// A query by the grammar, or nearly: of the cluster's labels, with a few bytes changed.
fn bytes(random: &mut SmallRng) -> Vec<u8> {
    if random.random_ratio(1, 8) {
        let mut bytes = vec![0; random.random_range(0..600)];
        random.fill_bytes(&mut bytes);
        return bytes;
    }
    let tails = [
        "svc.cluster.local",
        "default.svc.cluster.local",
        "in-addr.arpa",
        "pod.cluster.local",
        "",
    ];
    let count = random.random_range(0..6);
    let mut labels: Vec<&str> = (0..count)
        .filter_map(|_| LABELS.choose(random).copied())
        .collect();
    labels.extend(
        tails
            .choose(random)
            .into_iter()
            .flat_map(|tail| tail.split('.')),
    );
    let name = labels.join(".");
    let name = LowerName::parse(name.trim_matches('.')).unwrap_or_else(|_| LowerName::root());
    let types = [1, 28, 5, 12, 33, 16, 255, 6, 2, 65, 250, 252, 41];
    let of_type = *types.choose(random).unwrap_or(&1);
    let mut bytes = question(
        random.random(),
        &name,
        of_type,
        random.random(),
        random.random(),
    );
    if random.random() {
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..bytes.len());
            bytes[at] = random.random();
        }
    }
    if random.random_ratio(1, 8) {
        bytes.truncate(random.random_range(0..bytes.len()));
    }
    if random.random_ratio(1, 8) {
        let more = random.random_range(0..40);
        bytes.extend((0..more).map(|_| random.random::<u8>()));
    }
    bytes
}

#[test]
fn any_bytes_have_an_answer_or_none() {
    let inputs: Option<u64> = env::var(INPUTS).ok().map(|text| text.parse().unwrap());
    let (zone, client) = (zone(), nobody());
    let start = Instant::now();
    let seed = rand::random();
    let random = &mut SmallRng::seed_from_u64(seed);
    let mut out = Vec::new();
    let mut count = 0;
    while inputs.map_or_else(|| start.elapsed() < SHORT, |inputs| count < inputs) {
        let query = bytes(random);
        let transport = if random.random() {
            Transport::Udp
        } else {
            Transport::Tcp
        };
        out.clear();
        let who = || std::sync::Arc::clone(&client);
        let decision = answer(&zone, &query, transport, who, random, &mut out);
        if let Err(wrong) = check(&query, &decision, &out) {
            panic!("seed {seed}, input {count}: {wrong}\n{query:02x?}\n{decision:?}\n{out:02x?}");
        }
        count += 1;
    }
    println!("{count} inputs in {:?}, seed {seed}", start.elapsed());
    assert!(count > 1000);
}

proptest! {
    #[test]
    fn a_question_is_read_as_it_was_written(
        labels in proptest::collection::vec("[a-zA-Z0-9_-]{1,20}", 0..8),
        of_type in 1..65000_u16,
    ) {
        let text = labels.join(".");
        let name = LowerName::parse(&text).unwrap();
        let bytes = question(1, &name, of_type, 1, true);
        let message = Message::from_vec(&bytes).unwrap();
        prop_assert_eq!(message.queries.len(), 1);
        prop_assert_eq!(message.queries[0].query_type(), RecordType::from(of_type));
        prop_assert_eq!(message.queries[0].name(), &name.to_name());
    }
}
