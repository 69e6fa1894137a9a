//! Tests of stale answers, which clients get if resolvers do not answer (RFC 8767).

use super::{
    tests::{addresses, answer, asked, client, code, new, old, past, resolver},
    *,
};

/// Resolves a name whose answer in the cache is that of `since`. Its resolvers last failed `failed` ago. Returns the address,
/// and how long that took.
async fn resolve(
    at: SocketAddr,
    since: Option<Instant>,
    failed: Option<Duration>,
) -> (Option<String>, Duration) {
    let (own, client) = (new(), client("shop", &[at]));
    let (question, ask) = asked("old.example.com");
    let (set, shop) = (own.set(&[at]), Arc::<str>::from("shop"));
    if let Some(since) = since {
        let key = question.key(set);
        own.cache.put(&key, &shop, &old(&question), since);
    }
    if let Some(ago) = failed.and_then(|ago| Instant::now().checked_sub(ago)) {
        locked(&own.failures).insert((shop, set), ago);
    }
    let start = Instant::now();
    let reply = own.resolve(&client, &question, &ask).await;
    let address = reply.map(|reply| addresses(&reply).join(" "));
    (address, start.elapsed())
}

#[tokio::test]
async fn a_stale_answer_is_for_clients_that_would_wait_for_long() {
    let (good, _) = resolver(|query| vec![answer(query, 7)]).await;
    let (bad, _) = resolver(|query| vec![code(query, ResponseCode::ServFail)]).await;
    let (silent, _) = resolver(|_| Vec::new()).await;
    let now = Instant::now();
    let (fresh, none, moment) = (Duration::ZERO, Duration::MAX, Duration::from_secs(1));
    for (what, at, since, failed, address, times) in [
        (
            "still fresh",
            silent,
            Some(now),
            None,
            Some("192.0.2.9"),
            fresh..moment,
        ),
        (
            "a new answer",
            good,
            Some(past()),
            None,
            Some("192.0.2.7"),
            fresh..PATIENCE,
        ),
        (
            "a failure",
            bad,
            Some(past()),
            None,
            Some("192.0.2.9"),
            fresh..PATIENCE,
        ),
        (
            "silence",
            silent,
            Some(past()),
            None,
            Some("192.0.2.9"),
            PATIENCE..PATIENCE * 2,
        ),
        (
            "long ago",
            silent,
            Some(past()),
            Some(RECHECK * 2),
            Some("192.0.2.9"),
            PATIENCE..PATIENCE * 2,
        ),
        (
            "away",
            silent,
            Some(past()),
            Some(moment),
            Some("192.0.2.9"),
            fresh..moment,
        ),
        (
            "nothing is stale",
            good,
            None,
            Some(moment),
            Some("192.0.2.7"),
            fresh..none,
        ),
        (
            "nothing at all",
            silent,
            None,
            Some(moment),
            None,
            PATIENCE..none,
        ),
    ] {
        let (found, took) = resolve(at, since, failed).await;
        assert_eq!(found.as_deref(), address, "{what}");
        assert!(times.contains(&took), "{what}: {took:?}");
    }
}
