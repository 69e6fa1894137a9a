//! Hostile requests: for any bytes, a connection gets an answer or is closed, no handler panics, and the next client is
//! served.

use std::{env, time::Duration};

use plan::Served;
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

use super::*;
use crate::Learnt;

/// The default number of connections, without `DATAPLANE_FUZZ_RUNS`.
const RUNS: u64 = 2000;
const SEED: u64 = 28;
/// Longer than any answer takes. The client ends a request that is not whole.
const PATIENCE: Duration = Duration::from_secs(20);

const REQUESTS: &[&str] = &[
    "GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "GET /healthz/ready HTTP/1.1\r\nhost: x\r\n\r\n",
    "GET /services?namespace=a&after=a/b&limit=3 HTTP/1.1\r\nhost: x\r\n\r\n",
    "GET /pools?pool=4294967295&after=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "GET /metrics HTTP/1.0\r\nauthorization: Bearer x\r\n\r\n",
    "POST /logging?level=debug HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
    "PUT /mesh HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "GET /version HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nupgrade: h2c\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

const PIECES: &[&str] = &[
    "\r\n",
    "\n",
    "\0",
    " ",
    ":",
    "%",
    "%00",
    "%ff%fe",
    "?",
    "&",
    "=",
    "/../",
    "//",
    "#",
    "after=",
    "limit=-1",
    "limit=18446744073709551616",
    "pool=x",
    "content-length: 18446744073709551615\r\n",
    "content-length: -1\r\n",
    "transfer-encoding: gzip, chunked\r\n",
    "fffffffffffffffff\r\n",
    "host: \r\n",
    "HTTP/9.9",
    "\u{feff}",
    "\t",
];

/// A request with some changed bytes.
fn request(random: &mut SmallRng) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..random.random_range(1..4) {
        bytes.extend_from_slice(REQUESTS[random.random_range(0..REQUESTS.len())].as_bytes());
    }
    for _ in 0..random.random_range(0..6) {
        let start = random.random_range(0..=bytes.len());
        let end = (start + random.random_range(0..20)).min(bytes.len());
        let piece: Vec<u8> = match random.random_range(0..4) {
            0 => (0..random.random_range(0..8))
                .map(|_| random.random())
                .collect(),
            1 => PIECES[random.random_range(0..PIECES.len())]
                .repeat(random.random_range(1..300))
                .into(),
            _ => PIECES[random.random_range(0..PIECES.len())].into(),
        };
        bytes.splice(start..end, piece);
    }
    bytes
}

/// Sends the bytes, with an end of the stream if `ends`, and reads until the server has closed. Returns the status of
/// each answer. (The server may close a connection that has ended without an answer.)
async fn statuses(at: SocketAddr, bytes: &[u8], ends: bool) -> Vec<u16> {
    let mut stream = TcpStream::connect(at).await.unwrap();
    // Fails if the server has closed already.
    let _ = stream.write_all(bytes).await;
    if ends {
        let _ = stream.shutdown().await;
    }
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    assert!(
        read.is_ok(),
        "neither answered nor closed: {:?}",
        String::from_utf8_lossy(bytes)
    );
    let text = String::from_utf8_lossy(&answer);
    let lines = text.lines().filter_map(|line| line.strip_prefix("HTTP/1."));
    lines
        .filter_map(|line| line.get(2..5)?.parse().ok())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_sent_is_answered_or_closed() {
    let state = Arc::new(State::new(
        kernel::Paths {
            bpffs: "/nowhere".into(),
            cgroup: "/nowhere".into(),
        },
        kernel::tables::Limits::default(),
        watch::channel(Served::default()).1,
        false,
        source::Health::default(),
        Learnt::default(),
    ));
    let registry = metrics::registry(&state);
    let context = Arc::new(Context {
        state,
        registry,
        renderings: Renderings::default(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let routes = admin_routes(&context);
    let server = tokio::spawn(limits::serve(listener, routes));
    let runs = env::var("DATAPLANE_FUZZ_RUNS").map_or(RUNS, |runs| runs.parse().unwrap());
    let mut random = SmallRng::seed_from_u64(SEED);
    let (mut answered, mut refused) = (0, 0);
    for run in 0..runs {
        let bytes = request(&mut random);
        for status in statuses(at, &bytes, true).await {
            let text = String::from_utf8_lossy(&bytes);
            // 501: an unknown transfer coding; 503: not ready.
            let is_known = status < 500 || matches!(status, 501 | 503 | 505);
            assert!(is_known, "run {run}: {status} to {text:?}");
            answered += 1;
            refused += u64::from(status >= 400);
        }
    }
    assert!(
        answered > runs / 2 && refused > runs / 10,
        "{answered} answers, {refused} refusals: what is sent is too wrong, or not wrong enough"
    );
    let whole = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    assert_eq!(statuses(at, whole, false).await, [200]);
    server.abort();
}
