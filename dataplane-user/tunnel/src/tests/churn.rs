//! Half-open peers: they stop in some phase, and never end their connections.

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};

use super::{fixture::*, fuzz::unlimited, raw::*};
use crate::Settings;

/// The phases in which a peer stops: it has connected, sent a part of its first message, finished TLS, begun HTTP/2, or
/// requested a stream.
const PHASES: usize = 5;
/// The peers of a round that stop in each phase.
const PEERS: usize = 10;
/// The most that the memory may grow while peers come and go, in bytes.
const GROWTH: usize = 4 << 20;

/// Stops in a phase, and waits until the server gives the peer up.
async fn stop(mut peer: TcpStream, phase: usize, config: rustls::ClientConfig, request: Vec<u8>) {
    let mut bytes = [0; 4096];
    if phase < 2 {
        // The header of a record, and no more.
        let part: &[u8] = if phase == 0 {
            &[]
        } else {
            &[22, 3, 1, 2, 0, 1]
        };
        peer.write_all(part).await.unwrap();
        while peer.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
        return;
    }
    let mut peer = connect_by(peer, config).await.unwrap();
    let sent = [[PREFACE, &frame(4, 0, 0, &[])].concat(), request];
    peer.write_all(&sent[..phase - 2].concat()).await.unwrap();
    // Reads PING, and does not answer.
    while peer.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
}

/// Whether the memory stays the same while peers come, stop and are given up, for `DATAPLANE_CHURN_SECONDS` (3). In a process
/// of its own: other tests of this one hold memory, too.
#[test]
fn half_open_peers_leave_nothing() {
    const ALONE: &str = "DATAPLANE_ALONE";
    if env::var_os(ALONE).is_none() {
        let mut alone = Command::new(env::current_exe().unwrap());
        alone.args([
            "--exact",
            "--nocapture",
            "tests::churn::half_open_peers_leave_nothing",
        ]);
        let output = alone.env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed, "{text}{errors}");
        println!("{text}");
        return;
    }
    let seconds = env::var("DATAPLANE_CHURN_SECONDS").map_or(3, |text| text.parse().unwrap());
    unlimited(async {
        let settings = Settings {
            handshake: Duration::from_secs(1),
            ping: Duration::from_millis(200),
            pong: Duration::from_millis(300),
            ..settings()
        };
        let mut mesh = mesh_of(settings, |_| {});
        let echo = echo().await;
        let began = Instant::now();
        let (mut peers, mut kept, mut said) = (0, None, 0);
        while began.elapsed() < Duration::from_secs(seconds) {
            let mut round = JoinSet::new();
            for number in 0..PHASES * PEERS {
                let config = client_config(&mesh.certificates);
                let peer = TcpStream::connect(mesh.at).await.unwrap();
                let block = connect_headers(&echo.to_string());
                // END_HEADERS.
                let request = frame(1, 4, 1, &block);
                round.spawn(stop(peer, number % PHASES, config, request));
            }
            let all = timeout(Duration::from_secs(30), round.join_all()).await;
            peers += all.expect("each peer is given up").len();
            while mesh.failed.try_recv().is_ok() {}
            while mesh.requests.try_recv().is_ok() {}
            while mesh.ended.try_recv().is_ok() {}
            until("all tunnels end", || mesh.server.tunnels().is_empty()).await;
            let elapsed = began.elapsed();
            if elapsed > Duration::from_secs(seconds / 3) {
                kept.get_or_insert_with(memory);
            }
            if elapsed.as_secs() / 60 >= said {
                said += 1;
                println!("{peers} peers in {elapsed:.0?}: {} KiB", memory() >> 10);
            }
        }
        let (before, after) = (kept.unwrap_or_default(), memory());
        println!(
            "{peers} peers: {} KiB, {} KiB after",
            before >> 10,
            after >> 10
        );
        assert!(after < before + GROWTH, "{before} bytes, then {after}");
        // Other peers are served all along.
        round_trip(&mut mesh.open(echo).await.0).await;
    });
}
