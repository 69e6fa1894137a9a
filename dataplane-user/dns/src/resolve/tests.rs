use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_proto::{
    op::{Message, MessageType},
    rr::{RData, Record, rdata::A},
};
use tokio::{net::UdpSocket, task::JoinSet};

use super::*;
use crate::{LowerName, answer::Candidate};

/// A resolver on loopback that answers each query with the result of `answers`. Returns also the number of its queries.
pub(super) async fn resolver(
    answers: impl Fn(Message) -> Vec<Vec<u8>> + Send + 'static,
) -> (SocketAddr, Arc<AtomicUsize>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (at, count) = (socket.local_addr().unwrap(), Arc::<AtomicUsize>::default());
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            counted.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(50)).await;
            for answer in answers(Message::from_vec(&buffer[..length]).unwrap()) {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    (at, count)
}

/// The answer to a query: this address.
pub(super) fn answer(mut query: Message, last: u8) -> Vec<u8> {
    query.metadata.message_type = MessageType::Response;
    let name = query.queries[0].name().clone();
    query.add_answer(Record::from_rdata(
        name,
        60,
        RData::A(A::new(192, 0, 2, last)),
    ));
    query.to_vec().unwrap()
}

pub(super) fn asked(name: &str) -> (Question, Ask) {
    let name = LowerName::parse(name).unwrap();
    let candidate = Candidate {
        records: Vec::new(),
        name: name.clone(),
        known: None,
    };
    let ask = Ask {
        rule: Rule::Forward,
        candidates: [candidate].into_iter().collect(),
        otherwise: None,
    };
    let question = Question {
        name,
        of_type: 1,
        bits: 1,
        edns: true,
    };
    (question, ask)
}

pub(super) fn addresses(reply: &Reply) -> Vec<String> {
    let message = Message::from_vec(reply.stored.bytes()).unwrap();
    message
        .answers
        .iter()
        .map(|of| of.data.to_string())
        .collect()
}

pub(super) fn client(namespace: &str, resolvers: &[SocketAddr]) -> Client {
    Client {
        namespace: namespace.into(),
        ..Client::unknown(resolvers.to_vec())
    }
}

const FLIGHTS: usize = 1000;

pub(super) fn new() -> Arc<Resolver> {
    Arc::new(Resolver::new(
        Cache::new(1 << 20, Duration::from_hours(24)),
        FLIGHTS,
        3600,
        Arc::default(),
    ))
}

/// A resolver's answer with a code and no record.
pub(super) fn code(mut query: Message, code: ResponseCode) -> Vec<u8> {
    query.metadata.message_type = MessageType::Response;
    query.metadata.response_code = code;
    query.to_vec().unwrap()
}

#[tokio::test]
async fn what_is_known_counts_if_resolvers_do_not_help() {
    for what in [
        None,
        Some(ResponseCode::NXDomain),
        Some(ResponseCode::ServFail),
    ] {
        let says = move |query| what.map(|what| code(query, what)).into_iter().collect();
        let (at, _) = resolver(says).await;
        let own = new();
        let (question, mut ask) = asked("db.shop.svc.cluster.local");
        let mut known = Message::response(0, hickory_proto::op::OpCode::Query);
        known.add_query(hickory_proto::op::Query::query(
            question.name.to_name(),
            hickory_proto::rr::RecordType::A,
        ));
        let known = answer(known, 7);
        let known = Stored::read(&known, &question.name, 1, true).unwrap();
        ask.candidates[0].known = Some(known);
        // Then from the cache, or at once because resolvers were silent.
        for round in 0..2 {
            let client = client("shop", &[at]);
            let reply = Arc::clone(&own).resolve(&client, &question, &ask).await;
            assert_eq!(
                addresses(&reply.unwrap()),
                ["192.0.2.7"],
                "{what:?}, {round}"
            );
        }
        // There is no resolver to ask.
        let client = client("shop", &[]);
        let reply = Arc::clone(&own).resolve(&client, &question, &ask).await;
        assert_eq!(addresses(&reply.unwrap()), ["192.0.2.7"], "{what:?}");
    }
}

#[tokio::test]
async fn a_failure_is_not_asked_for_again_at_once() {
    let (at, count) = resolver(|query| vec![code(query, ResponseCode::ServFail)]).await;
    let own = new();
    let (question, ask) = asked("www.example.com");
    for _ in 0..10 {
        let client = client("shop", &[at]);
        let reply = Arc::clone(&own).resolve(&client, &question, &ask).await;
        assert_eq!(reply.unwrap().stored.code(), ResponseCode::ServFail);
    }
    // With EDNS0 and without.
    assert_eq!(count.load(Ordering::Relaxed), 2);
    sleep(FAILED * 2).await;
    let client = client("shop", &[at]);
    Arc::clone(&own).resolve(&client, &question, &ask).await;
    assert_eq!(count.load(Ordering::Relaxed), 4);
}

#[tokio::test]
async fn no_answer_is_valid_for_longer_than_allowed() {
    let say = |ttl: u32| {
        move |query: Message| {
            let mut bytes = answer(query, 1);
            // The record is the last: TTL, length, address.
            let at = bytes.len() - 10;
            bytes[at..at + 4].copy_from_slice(&ttl.to_be_bytes());
            vec![bytes]
        }
    };
    for (ttl, wanted) in [(60, 60), (1_000_000, 3600), (0x8000_0001, 0)] {
        let (at, _) = resolver(say(ttl)).await;
        let (mut question, ask) = asked("www.example.com");
        question.edns = false;
        let client = client("shop", &[at]);
        let reply = new().resolve(&client, &question, &ask).await.unwrap();
        let message = Message::from_vec(reply.stored.bytes()).unwrap();
        assert_eq!(message.answers[0].ttl, wanted);
        assert_eq!(reply.stored.shape().ttl, wanted);
    }
}

#[tokio::test]
async fn many_who_ask_the_same_are_one_query() {
    let (at, count) = resolver(|query| vec![answer(query, 1)]).await;
    let own = new();
    let mut askers = JoinSet::new();
    for _ in 0..100 {
        let own = Arc::clone(&own);
        askers.spawn(async move {
            let (question, ask) = asked("www.example.com");
            own.resolve(&client("", &[at]), &question, &ask)
                .await
                .unwrap()
        });
    }
    for reply in askers.join_all().await {
        assert_eq!(addresses(&reply), ["192.0.2.1"]);
    }
    assert_eq!(count.load(Ordering::Relaxed), 1);
    // And from then on none.
    let (question, ask) = asked("WWW.example.com");
    assert!(own.cached(&client("", &[at]), &question, &ask).is_some());
    // Clients of other resolvers do not get it.
    let other = "127.0.0.2:53".parse().unwrap();
    assert!(own.cached(&client("", &[other]), &question, &ask).is_none());
}

#[tokio::test]
async fn an_empty_answer_ends_no_search_list() {
    let (at, _) = resolver(|query| {
        let name = query.queries[0].name().to_lowercase().to_string();
        let mut empty = query.clone();
        empty.metadata.message_type = MessageType::Response;
        if name.starts_with("fails") {
            empty.metadata.response_code = ResponseCode::ServFail;
        }
        let answer = if name.starts_with("www") {
            answer(query, 1)
        } else {
            empty.to_vec().unwrap()
        };
        vec![answer]
    })
    .await;
    let (own, asker) = (new(), client("", &[at]));
    let searched = |label: &str, rule| {
        let (question, mut ask) = asked(&format!("{label}.shop.svc.cluster.local"));
        ask.rule = rule;
        let candidate = &mut ask.candidates[0];
        candidate.name = LowerName::parse(&format!("{label}.corp.example")).unwrap();
        candidate.records = vec![compose::alias(&question.name, &candidate.name, 5)];
        (question, ask)
    };
    for (label, rule, code, records) in [
        ("www", Rule::Search, ResponseCode::NoError, 2),
        ("empty", Rule::Search, ResponseCode::NoError, 0),
        ("fails", Rule::Search, ResponseCode::ServFail, 1),
        // The service is an alias, so its answer has a record even if the target has none.
        ("empty", Rule::Alias, ResponseCode::NoError, 1),
    ] {
        let (question, ask) = searched(label, rule);
        let reply = own.clone().resolve(&asker, &question, &ask).await;
        let stored = reply.unwrap().stored;
        let found = (stored.code(), stored.counts()[0]);
        assert_eq!(found, (code, records), "{label} {rule:?}");
    }
}

#[tokio::test]
async fn forged_answers_are_not_taken() {
    let (at, _) = resolver(|query| {
        let mut other_id = query.clone();
        other_id.metadata.id = query.metadata.id.wrapping_add(1);
        let mut other_name = query.clone();
        let name = LowerName::parse("www.example.net").unwrap();
        other_name.queries[0].set_name(name.to_name());
        let mut other_type = query.clone();
        other_type.queries[0].set_query_type(hickory_proto::rr::RecordType::AAAA);
        let no_answer = query.to_vec().unwrap();
        let cut = answer(query.clone(), 66)[..20].to_vec();
        vec![
            answer(other_id, 66),
            answer(other_name, 66),
            answer(other_type, 66),
            no_answer,
            cut,
            answer(query, 1),
        ]
    })
    .await;
    let (question, ask) = asked("www.example.com");
    let reply = new()
        .resolve(&client("", &[at]), &question, &ask)
        .await
        .unwrap();
    assert_eq!(addresses(&reply), ["192.0.2.1"]);
}

#[tokio::test]
async fn a_resolver_that_is_away_is_asked_after_the_others() {
    let away = {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.local_addr().unwrap()
    };
    let (at, count) = resolver(|query| vec![answer(query, 1)]).await;
    let own = new();
    let start = Instant::now();
    for number in 0..10 {
        let (question, ask) = asked(&format!("www-{number}.example.com"));
        assert!(
            own.clone()
                .resolve(&client("", &[away, at]), &question, &ask)
                .await
                .is_some()
        );
    }
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(count.load(Ordering::Relaxed), 10);
    assert_eq!(own.metrics.upstream_failures.get(), 1);
    let (question, ask) = asked("www.example.com");
    assert!(
        own.resolve(&client("", &[away]), &question, &ask)
            .await
            .is_none()
    );
}

#[tokio::test]
async fn a_namespace_that_asks_much_leaves_room_to_ask_for_others() {
    let own = new();
    let (greedy, small) = (client("greedy", &[]), client("small", &[]));
    let set = own.set(&[]);
    // They are asked when this waits for something, which it does not.
    let ask = |client, number| {
        let (question, _) = asked(&format!("{number}.example.com"));
        let key = question.key(set);
        own.flight(set, client, &question, &key).is_some()
    };
    let asked = (0..FLIGHTS).filter(|number| ask(&greedy, *number)).count();
    assert_eq!(asked, FLIGHTS / 2);
    assert_eq!(own.metrics.refused.get(), (FLIGHTS / 2) as u64);
    assert!(ask(&small, FLIGHTS));
    // A question that another client has in flight already costs nothing.
    assert!(ask(&greedy, FLIGHTS));
    assert!(own.relay(&greedy, &[0; 12], Transport::Udp).await.is_none());
    assert_eq!(own.metrics.upstream_requests.get(), 0);
}

#[tokio::test]
async fn a_namespace_that_asks_too_much_gets_the_stale_answers_that_are_there() {
    let own = new();
    let greedy = client("greedy", &[]);
    let set = own.set(&[]);
    for number in 0..FLIGHTS {
        let (question, _) = asked(&format!("{number}.example.com"));
        drop(own.flight(set, &greedy, &question, &question.key(set)));
    }
    let (question, ask) = asked("old.example.com");
    own.cache.put(
        &question.key(set),
        &"greedy".into(),
        &old(&question),
        past(),
    );
    let reply = own.clone().resolve(&greedy, &question, &ask).await.unwrap();
    assert_eq!(addresses(&reply), ["192.0.2.9"]);
    assert_eq!(own.metrics.stale.get(), 1);
    let (question, ask) = asked("new.example.com");
    assert!(own.resolve(&greedy, &question, &ask).await.is_none());
}

/// An answer for a minute.
pub(super) fn old(question: &Question) -> Arc<Stored> {
    let mut message = Message::response(0, hickory_proto::op::OpCode::Query);
    message.add_query(hickory_proto::op::Query::query(
        question.name.to_name(),
        hickory_proto::rr::RecordType::A,
    ));
    let bytes = answer(message, 9);
    Arc::new(Stored::read(&bytes, &question.name, 1, false).unwrap())
}

pub(super) fn past() -> Instant {
    Instant::now()
        .checked_sub(Duration::from_secs(100))
        .unwrap()
}

/// Then another resolver answers the other namespaces, and they get no stale answers.
#[tokio::test]
async fn slow_names_of_one_namespace_cost_no_other_namespace() {
    let asks = |query: &Message, word| {
        query.queries[0]
            .name()
            .to_lowercase()
            .to_string()
            .starts_with(word)
    };
    let (first, _) = resolver(move |query| {
        if asks(&query, "slow") {
            return Vec::new();
        }
        vec![answer(query, 1)]
    })
    .await;
    let (second, _) = resolver(move |query| {
        if asks(&query, "slower") {
            return Vec::new();
        }
        vec![answer(query, 2)]
    })
    .await;
    let own = new();
    let (greedy, small) = (
        client("greedy", &[first, second]),
        client("small", &[first, second]),
    );
    // The first resolver's earlier answer has expired.
    let (old_question, _) = asked("old.example.com");
    own.cache.put(
        &old_question.key(own.set(&[first, second])),
        &"shop".into(),
        &old(&old_question),
        past(),
    );
    for (slow, answered, name) in [
        ("slow.example.com", true, "www.example.com"),
        ("slower.example.com", false, "old.example.com"),
    ] {
        let (question, ask) = asked(slow);
        let reply = own.clone().resolve(&greedy, &question, &ask).await;
        assert_eq!(reply.is_some(), answered, "{slow}");
        let (question, ask) = asked(name);
        let reply = own.clone().resolve(&small, &question, &ask).await.unwrap();
        assert_eq!(addresses(&reply), ["192.0.2.1"], "{name}");
    }
}

#[tokio::test]
async fn a_resolver_that_cannot_help_is_not_the_last_one_asked() {
    let (second, _) = resolver(|query| vec![answer(query, 2)]).await;
    for (what, helps) in [
        (ResponseCode::ServFail, false),
        (ResponseCode::Refused, false),
        (ResponseCode::NotImp, false),
        (ResponseCode::NXDomain, true),
    ] {
        let (first, _) = resolver(move |query| vec![code(query, what)]).await;
        for (resolvers, wanted) in [
            (
                vec![first, second],
                if helps { what } else { ResponseCode::NoError },
            ),
            (vec![first], what),
        ] {
            let (question, ask) = asked("www.example.com");
            let reply = new()
                .resolve(&client("", &resolvers), &question, &ask)
                .await;
            assert_eq!(reply.unwrap().stored.code(), wanted, "{what} {resolvers:?}");
        }
    }
    // A query that is passed on goes to the resolver that answers, too.
    let away = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let resolvers = [away.local_addr().unwrap(), second];
    let (question, _) = asked("www.example.com");
    let query = crate::wire::question(7, &question.name, 1, 1, false);
    for resolvers in [&resolvers[1..], &resolvers] {
        let client = client("", resolvers);
        let found = new().relay(&client, &query, Transport::Udp).await.unwrap();
        assert_eq!(found, answer(Message::from_vec(&query).unwrap(), 2));
    }
}

/// Each line has the candidates, of which those that begin with `no` do not exist, whether there is an answer if none exists,
/// and the code and the addresses of the answer.
#[tokio::test]
async fn candidates_are_asked_for_in_turn() {
    let (at, _) = resolver(|query| {
        let name = query.queries[0].name().to_lowercase().to_string();
        vec![match name.as_bytes()[0] {
            b'n' => code(query, ResponseCode::NXDomain),
            first => answer(query, first),
        }]
    })
    .await;
    let (own, client) = (new(), client("", &[at]));
    for (names, has_otherwise, wanted, addresses_wanted) in [
        ("a b", false, ResponseCode::NoError, "192.0.2.97"),
        ("no1 a", false, ResponseCode::NoError, "192.0.2.97"),
        ("no1 no2 b", true, ResponseCode::NoError, "192.0.2.98"),
        ("no1", false, ResponseCode::NXDomain, ""),
        ("no1 no2", false, ResponseCode::NXDomain, ""),
        ("no1", true, ResponseCode::NoError, "192.0.2.9"),
        ("no1 no2", true, ResponseCode::NoError, "192.0.2.9"),
    ] {
        let (question, mut ask) = asked("www.example.com");
        ask.candidates = names
            .split(' ')
            .map(|name| asked(name).1.candidates[0].clone())
            .collect();
        ask.otherwise = has_otherwise.then(|| (*old(&question)).clone());
        let reply = own.clone().resolve(&client, &question, &ask).await.unwrap();
        let found = (reply.stored.code(), addresses(&reply).concat());
        assert_eq!(found, (wanted, addresses_wanted.to_owned()), "{names}");
        // Answers without a TTL are not in the cache.
        let cached = own
            .cached(&client, &question, &ask)
            .map(|of| addresses(&of));
        let is_cached = !names.contains("no");
        assert_eq!(cached, is_cached.then(|| addresses(&reply)), "{names}");
        let known = own.known(&client, &question, &ask);
        assert_eq!(known, is_cached.then(|| reply.stored.bytes().to_vec()));
    }
    let (question, ask) = asked("a");
    let key = question.key(own.set(&[at]));
    own.cache.put(&key, &"".into(), &old(&question), past());
    assert_eq!(own.known(&client, &question, &ask), None, "it is stale");
}
