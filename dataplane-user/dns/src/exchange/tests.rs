use hickory_proto::{
    op::{Message, MessageType},
    rr::{RData, Record, rdata::A},
};
use tokio::net::TcpListener;

use super::*;
/// An answer to a query: this address.
fn answer(query: &[u8], last: u8) -> Vec<u8> {
    let mut message = Message::from_vec(query).unwrap();
    message.metadata.message_type = MessageType::Response;
    let name = message.queries[0].name().clone();
    let data = RData::A(A::new(192, 0, 2, last));
    message.add_answer(Record::from_rdata(name, 60, data));
    message.to_vec().unwrap()
}

/// A resolver on loopback that answers each datagram with the result of `says`: an empty answer is a pause. By TCP, if
/// at all, it answers with 192.0.2.9.
async fn resolver(
    says: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static,
    by_tcp: bool,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let socket = UdpSocket::bind(at).await.unwrap();
    if by_tcp {
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let query = receive(&mut stream).await.unwrap();
                send(&mut stream, &answer(&query, 9)).await.unwrap();
            }
        });
    }
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            for answer in says(&buffer[..length]) {
                if answer.is_empty() {
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
    at
}

fn asked(edns: bool) -> Question {
    Question {
        name: LowerName::parse("www.example.com").unwrap(),
        of_type: 1,
        bits: 1,
        edns,
    }
}

/// The last byte of the address that a resolver gives, and how many answers were suspect.
async fn ask(at: SocketAddr, edns: bool) -> (io::Result<String>, u64) {
    let metrics = Metrics::default();
    let end = Instant::now() + Duration::from_secs(30);
    let stored = exchange(at, &asked(edns), end, &metrics).await;
    let address = stored.map(|stored| {
        let message = Message::from_vec(stored.bytes()).unwrap();
        let truncated = if stored.is_truncated() {
            " truncated"
        } else {
            ""
        };
        let all = message.answers.iter().map(|of| of.data.to_string());
        all.collect::<Vec<_>>().join(" ") + truncated
    });
    (address, metrics.forged.get())
}

#[tokio::test]
async fn a_resolver_that_ignores_edns_is_asked_without() {
    let at = resolver(
        |query| match query[11] {
            0 => vec![answer(query, 1)],
            _ => Vec::new(),
        },
        false,
    )
    .await;
    assert_eq!(ask(at, true).await.0.unwrap(), "192.0.2.1");
    assert_eq!(ask(at, false).await.0.unwrap(), "192.0.2.1");
}

#[tokio::test]
async fn a_resolver_that_fails_by_edns_is_asked_without() {
    // An answer that refuses need not have a question.
    for without_question in [false, true] {
        let says = move |query: &[u8]| {
            let mut answer = answer(query, 1);
            if query[11] != 0 {
                answer[3] |= 2;
                if without_question {
                    answer.truncate(HEADER);
                    answer[4..].fill(0);
                }
            }
            vec![answer]
        };
        let told = ask(resolver(says, false).await, true).await;
        assert_eq!((told.0.unwrap(), told.1), ("192.0.2.1".to_owned(), 0));
    }
}

#[tokio::test]
async fn the_answer_is_waited_for_after_something_else_and_a_closed_port_is_an_error() {
    let says = |query: &[u8]| vec![vec![0; 5], Vec::new(), answer(query, 1)];
    let told = ask(resolver(says, false).await, false).await;
    assert_eq!((told.0.unwrap(), told.1), ("192.0.2.1".to_owned(), 0));
    let closed = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let at = closed.local_addr().unwrap();
    drop(closed);
    let error = ask(at, false).await.0.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_truncated_answer_is_better_than_none() {
    let truncated = |query: &[u8]| {
        let mut answer = answer(query, 1);
        answer[2] |= 2;
        vec![answer]
    };
    let at = resolver(truncated, true).await;
    assert_eq!(ask(at, true).await.0.unwrap(), "192.0.2.9");
    // The TCP listener is dropped, so connections are refused.
    let at = resolver(truncated, false).await;
    assert_eq!(ask(at, true).await.0.unwrap(), "192.0.2.1 truncated");
}

#[tokio::test]
async fn a_forged_answer_does_not_count() {
    let wrong_id = |query: &[u8]| {
        let mut forged = answer(query, 66);
        forged[0] ^= 1;
        forged
    };
    let wrong_case = |query: &[u8]| {
        let mut forged = query.to_vec();
        forged[HEADER + 1] ^= 0x20;
        answer(&forged, 66)
    };
    // A wrong guess before the answer.
    for forge in [wrong_id, wrong_case] {
        let says = move |query: &[u8]| vec![forge(query), answer(query, 1)];
        let told = ask(resolver(says, true).await, false).await;
        assert_eq!((told.0.unwrap(), told.1), ("192.0.2.9".to_owned(), 1));
    }
    // A right guess, and the answer after it.
    let says = |query: &[u8]| vec![answer(query, 66), answer(query, 1)];
    let at = resolver(says, true).await;
    let mut noticed = 0;
    for _ in 0..50 {
        let told = ask(at, false).await;
        noticed += told.1;
        if told.1 == 1 {
            assert_eq!(told.0.unwrap(), "192.0.2.9");
        }
    }
    assert!(noticed > 0, "both answers have arrived at once in no case");
    // The same answer twice is no forgery.
    let says = |query: &[u8]| vec![answer(query, 1), answer(query, 1)];
    let told = ask(resolver(says, true).await, false).await;
    assert_eq!((told.0.unwrap(), told.1), ("192.0.2.1".to_owned(), 0));
}

/// Some resolvers and firewalls write all names in lower case.
#[tokio::test]
async fn a_resolver_that_does_not_repeat_the_case_is_understood() {
    let lower = |query: &[u8]| {
        let mut query = query.to_vec();
        query[HEADER..].make_ascii_lowercase();
        vec![answer(&query, 1)]
    };
    for (by_tcp, address) in [(true, "192.0.2.9"), (false, "192.0.2.1")] {
        let at = resolver(lower, by_tcp).await;
        // One of many queries is in lower case itself.
        let mut suspect = 0;
        for _ in 0..20 {
            let told = ask(at, false).await;
            suspect += told.1;
            if told.1 > 0 {
                assert_eq!(told.0.unwrap(), address);
            }
        }
        assert!(suspect > 10, "{suspect}");
    }
}

/// A query that this server does not understand: of another opcode.
#[tokio::test]
async fn a_query_that_is_passed_on_gets_only_its_own_answer() {
    const NOTIFY: u8 = 4 << 3;
    let mut query = query(&asked(false), false);
    query[2] |= NOTIFY;
    let wanted = |query: &[u8], flags: u8| {
        let mut answer = answer(query, 1);
        answer[2] |= flags;
        answer
    };
    let says = move |query: &[u8]| {
        let right = wanted(query, 0);
        let with = |at: usize, mask: u8| {
            let mut wrong = right.clone();
            wrong[at] ^= mask;
            wrong
        };
        let cut = right[..HEADER - 1].to_vec();
        let wrong = [cut, with(0, 1), with(1, 1), with(2, 0x80), with(2, NOTIFY)];
        wrong.into_iter().chain([right.clone()]).collect()
    };
    for transport in [Transport::Udp, Transport::Tcp] {
        let at = resolver(says, true).await;
        let found = pass_on(at, &query, transport).await.unwrap();
        assert_eq!(found, wanted(&query, 0), "{transport:?}");
    }
    // A truncated answer is asked for again by TCP for a client that came by TCP.
    let says = move |query: &[u8]| vec![wanted(query, 2)];
    let found = pass_on(resolver(says, true).await, &query, Transport::Udp).await;
    assert_eq!(found.unwrap(), wanted(&query, 2));
    let found = pass_on(resolver(says, true).await, &query, Transport::Tcp).await;
    assert_eq!(found.unwrap(), answer(&query, 9));
}
