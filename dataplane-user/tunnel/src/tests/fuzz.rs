//! Hostile bytes: those that a peer sends before it is authenticated, and the headers of a request.

use std::{env, io::Cursor, net::SocketAddr, sync::Arc, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use rustls::{
    ClientConnection,
    pki_types::{IpAddr, ServerName},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::{fixture::*, raw::*};
use crate::{Settings, request::Refusal};

/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// Lengths of the headers of a TLS record, and of a message of the handshake.
const RECORD: usize = 5;
const MESSAGE: usize = 4;
/// Types of records of TLS, and of frames of HTTP/2.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;

/// Returns the number of inputs in `DATAPLANE_FUZZ_RUNS`, or `few` if the variable is not set.
fn runs(few: u32) -> u32 {
    env::var("DATAPLANE_FUZZ_RUNS").map_or(few, |runs| runs.parse().unwrap())
}

/// Runs without a time limit: a long run takes hours.
pub fn unlimited(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    runtime.block_on(test);
}

/// Changes bytes, up to five times: replaces some of them by others or by pieces.
fn change(random: &mut SmallRng, bytes: &mut Vec<u8>, pieces: &[&[u8]]) {
    for _ in 0..random.random_range(0..6) {
        let start = random.random_range(0..=bytes.len());
        let end = (start + random.random_range(0..20)).min(bytes.len());
        let piece: Vec<u8> = match random.random_range(0..4) {
            0 => (0..random.random_range(0..8))
                .map(|_| random.random())
                .collect(),
            1 => pieces[random.random_range(0..pieces.len())].repeat(random.random_range(1..100)),
            2 if start < end => {
                // The length stays.
                let mut same = bytes[start..end].to_vec();
                same[0] ^= 1 << random.random_range(0..8);
                same
            }
            _ => pieces[random.random_range(0..pieces.len())].to_vec(),
        };
        bytes.splice(start..end, piece);
    }
}

/// Bytes of other protocols, further TLS records, and parts of a ClientHello.
const OF_TLS: &[&[u8]] = &[
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"PROXY TCP4 10.0.0.1 10.0.0.2 1 15008\r\n",
    b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c",
    &[20, 3, 3, 0, 1, 1],
    &[ALERT, 3, 3, 0, 2, 2, 40],
    &[ALERT, 3, 3, 0, 2, 1, 0],
    &[23, 3, 3, 0x40, 0],
    &[23, 3, 3, 0, 1, 0],
    &[HANDSHAKE, 3, 1, 0xff, 0xff],
    &[HANDSHAKE, 3, 1, 0, 0],
    &[1, 0xff, 0xff, 0xff],
    &[0, 43, 0, 3, 2, 3, 4],
    &[0, 43, 0, 3, 2, 3, 3],
    &[0, 51, 0xff, 0xff],
    &[0, 41, 0, 0],
    &[0, 0, 0, 0],
    &[0xff],
    &[0],
];

/// Returns the first message of a client of this crate, without the header of the record.
fn client_hello(mesh: &Mesh) -> Vec<u8> {
    let name = ServerName::IpAddress(IpAddr::V4([127, 0, 0, 1].into()));
    let config = Arc::new(client_config(&mesh.certificates));
    let mut hello = Cursor::new(Vec::new());
    let mut client = ClientConnection::new(config, name).unwrap();
    client.write_tls(&mut hello).unwrap();
    hello.into_inner().split_off(RECORD)
}

/// Gives a message a header of the handshake, and a record, with its length.
fn framed(body: &[u8]) -> Vec<u8> {
    let length = |bytes: usize| u32::try_from(bytes).unwrap().to_be_bytes();
    let [_, high, middle, low] = length(body.len());
    let [.., first, second] = length(body.len() + MESSAGE);
    let head = [HANDSHAKE, 3, 1, first, second, 1, high, middle, low];
    [&head, body].concat()
}

/// Sends bytes and the end, and returns the answer.
async fn answer(at: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).await.unwrap();
    // Fails if the server has closed already.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "not closed: {bytes:x?}");
    answer
}

#[test]
fn whatever_an_unknown_peer_sends_is_refused() {
    unlimited(async {
        // A failed handshake keeps its place for a second.
        let many = 1 << 24;
        let mut mesh = mesh_of(
            Settings {
                unfinished: many,
                tunnels: many,
                tunnels_of_address: many,
                tunnels_of_process: Some(many),
                ..settings()
            },
            |_| {},
        );
        let hello = client_hello(&mesh);
        let mut random = SmallRng::seed_from_u64(57);
        let runs = runs(600);
        let (mut hellos, mut alerts) = (0, 0);
        for run in 0..runs {
            let bytes = if random.random() {
                // Every length of the outer layers is right.
                let mut body = hello[MESSAGE..].to_vec();
                change(&mut random, &mut body, OF_TLS);
                let mut bytes = framed(&body);
                if random.random() {
                    let mut rest = Vec::new();
                    change(&mut random, &mut rest, OF_TLS);
                    bytes.extend(rest);
                }
                bytes
            } else {
                let mut bytes = framed(&hello[MESSAGE..]);
                change(&mut random, &mut bytes, OF_TLS);
                bytes
            };
            match answer(mesh.at, &bytes).await.first() {
                Some(&HANDSHAKE) => hellos += 1,
                Some(&ALERT) => alerts += 1,
                None => {}
                Some(other) => panic!("run {run}: {other} to {bytes:x?}"),
            }
            let failed = timeout(PATIENCE, mesh.failed.recv()).await;
            assert!(failed.is_ok(), "run {run}: no error: {bytes:x?}");
            assert!(mesh.server.tunnels().is_empty(), "run {run}: {bytes:x?}");
        }
        assert!(mesh.requests.try_recv().is_err());
        assert!(
            hellos > runs / 20 && alerts > runs / 20,
            "{hellos} hellos, {alerts} alerts: what is sent is too wrong, or not wrong enough"
        );
        let echo = echo().await;
        round_trip(&mut mesh.open(echo).await.0).await;
    });
}

const OF_HEADERS: &[&[u8]] = &[
    b":",
    b"@",
    b"[",
    b"]",
    b"[::1]",
    b"%",
    b"0.0.0.0",
    b"::ffff:10.0.0.1",
    b"65536",
    b"-1",
    b",",
    b";",
    b"=",
    b"\"",
    b"for=",
    b"for=\"[::1]:1\"",
    b"host=",
    b"by=",
    b"k8s.pod.name=",
    b"k8s.cluster.name=",
    b"%2",
    b"%ff",
    b"\r\n",
    b"\0",
    b" ",
    b"\xff",
    b"\xc3\xa9",
    b"00-",
    b"/",
    b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n",
];
const AUTHORITIES: &[&str] = &[
    "127.0.0.1:1",
    "[::1]:1",
    "[::ffff:127.0.0.1]:1",
    "web.shop.svc.cluster.local:80",
    "127.0.0.1",
];
/// What Istio's proxies send.
const OTHERS: &[(&str, &str)] = &[
    (
        "baggage",
        "k8s.cluster.name=c,k8s.namespace.name=shop,k8s.deployment.name=app,service.name=app,service.version=v1,\
         cloud.region=r,cloud.availability_zone=z",
    ),
    (
        "forwarded",
        "for=\"[fd00::1]:4000\";by=10.0.0.2:15008;host=web.shop.svc.cluster.local",
    ),
    (
        "traceparent",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ),
    ("x-istio-workload", "spiffe://cluster.local/ns/shop/sa/root"),
];

/// Adds a text to a block of HPACK, without Huffman's code.
fn text(block: &mut Vec<u8>, text: &[u8]) {
    let mut length = text.len();
    if length < 127 {
        block.push(u8::try_from(length).unwrap());
    } else {
        block.push(127);
        length -= 127;
        while length >= 128 {
            block.push(u8::try_from(length % 128).unwrap() | 128);
            length /= 128;
        }
        block.push(u8::try_from(length).unwrap());
    }
    block.extend_from_slice(text);
}

/// Returns the headers of a CONNECT with this authority, and others.
fn headers(authority: &[u8], others: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    // Entries of the static table: `:method`, `:authority`.
    let mut block = vec![2];
    text(&mut block, b"CONNECT");
    block.push(1);
    text(&mut block, authority);
    for (name, value) in others {
        block.push(0);
        text(&mut block, name);
        text(&mut block, value);
    }
    block
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Response,
    Reset,
    /// The tunnel ended.
    Ended,
}

/// Sends a request on a new stream of a tunnel, and returns the kind of its answer.
async fn ask(frames: &mut Frames, stream: u32, flags: u8, block: &[u8]) -> Answer {
    let request = frame(HEADERS, flags, stream, block);
    if frames.stream.write_all(&request).await.is_err() || frames.stream.flush().await.is_err() {
        return Answer::Ended;
    }
    let mut header = [0; 9];
    while frames.stream.read_exact(&mut header).await.is_ok() {
        let [high, middle, low, kind, _, id @ ..] = header;
        let length = u32::from_be_bytes([0, high, middle, low]);
        let mut payload = vec![0; length as usize];
        if frames.stream.read_exact(&mut payload).await.is_err() {
            break;
        }
        match kind {
            HEADERS if u32::from_be_bytes(id) == stream => return Answer::Response,
            RST_STREAM if u32::from_be_bytes(id) == stream => return Answer::Reset,
            GOAWAY => break,
            _ => {}
        }
    }
    Answer::Ended
}

#[test]
fn whatever_headers_say_peer_and_client_stay_what_they_are() {
    unlimited(async {
        let refuse = |server: &mut Server| server.answer = Some(Refusal::Denied);
        let mut mesh = mesh_of(settings(), refuse);
        let mut random = SmallRng::seed_from_u64(57);
        let runs = runs(2000);
        let (mut reached, mut refused) = (0, 0);
        let mut frames = Frames::connect(&mesh).await;
        let mut stream = 1;
        for run in 0..runs {
            let mut authority: Vec<u8> =
                AUTHORITIES[random.random_range(0..AUTHORITIES.len())].into();
            if random.random() {
                change(&mut random, &mut authority, OF_HEADERS);
            }
            let mut others = Vec::new();
            for _ in 0..random.random_range(0..5) {
                let (name, value) = OTHERS[random.random_range(0..OTHERS.len())];
                let (mut name, mut value) = (name.as_bytes().to_vec(), value.as_bytes().to_vec());
                if random.random_range(0..20) == 0 {
                    change(&mut random, &mut name, OF_HEADERS);
                }
                change(&mut random, &mut value, OF_HEADERS);
                others.push((name, value));
            }
            let mut block = headers(&authority, &others);
            let is_whole = random.random_range(0..10) > 0;
            if !is_whole {
                change(&mut random, &mut block, OF_HEADERS);
            }
            // A larger frame ends the tunnel.
            block.truncate(60_000);
            let flags = if random.random() { 4 } else { 5 };
            let asked = timeout(PATIENCE, ask(&mut frames, stream, flags, &block)).await;
            let asked = asked.unwrap_or_else(|_| panic!("run {run}: no answer: {block:x?}"));
            match mesh.requests.try_recv() {
                Ok(request) => {
                    reached += 1;
                    assert_eq!(request.peer, identity("client"), "run {run}: {block:x?}");
                    assert_eq!(request.client.ip(), mesh.at.ip(), "run {run}: {block:x?}");
                    let sent = request.authority.as_str().as_bytes();
                    assert!(!is_whole || sent == authority, "run {run}: {block:x?}");
                    // Does not panic.
                    let _ = request.destination();
                }
                Err(_) => refused += 1,
            }
            stream += 2;
            if asked == Answer::Ended || stream > 2000 {
                frames = Frames::connect(&mesh).await;
                stream = 1;
            }
        }
        assert!(
            reached > runs / 5 && refused > runs / 10,
            "{reached} reached the workload, {refused} did not: what is sent is too wrong, or not wrong enough"
        );
        let mut frames = Frames::connect(&mesh).await;
        let whole = headers(b"127.0.0.1:1", &[]);
        assert_eq!(ask(&mut frames, 1, 4, &whole).await, Answer::Response);
        assert_eq!(mesh.requests.try_recv().unwrap().peer, identity("client"));
    });
}
