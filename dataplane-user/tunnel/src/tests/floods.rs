//! Peers that send more frames than they may.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
    time::{sleep, timeout},
};

use super::{fixture::*, raw::*};
use crate::{Settings, error::Error, inbound::FAILED, outbound::Connect};

const CALM: u32 = 11;

async fn is_still_served(mesh: &Mesh) {
    let echo = echo().await;
    round_trip(&mut mesh.open(echo).await.0).await;
}

#[test]
fn floods_of_frames_cut_the_tunnel() {
    run(async {
        let mut mesh = mesh();
        let application = echo().await.to_string();
        let opened = frame(1, 4, 1, &connect_headers(&application));
        for (name, what, one) in [
            ("ping", "PING", frame(6, 0, 0, &[0; 8])),
            ("settings", "SETTINGS", frame(4, 0, 0, &[])),
            (
                "window update",
                "WINDOW_UPDATE",
                frame(8, 0, 0, &[0, 0, 0, 1]),
            ),
            ("priority", "PRIORITY", frame(2, 0, 3, &[0, 0, 0, 0, 9])),
            ("unknown", "unknown", frame(99, 0, 0, &[1; 8])),
        ] {
            let frames = Frames::connect(&mesh).await;
            let pieces =
                std::iter::once(opened.clone()).chain((0..20_000).map(|_| one.repeat(100)));
            let (sent, _) = frames.flood(pieces).await;
            // The sockets' buffers have many of the frames.
            assert!(
                sent < 19_000,
                "{name}: {sent} hundreds of frames were taken"
            );
            let error = mesh.failed.recv().await.unwrap();
            assert!(
                matches!(error, Error::Flood { .. }) && error.to_string().contains(what),
                "{name}: {error}"
            );
        }
        is_still_served(&mesh).await;
    });
}

#[test]
fn floods_that_the_library_limits_cut_the_tunnel() {
    run(async {
        let mut mesh = mesh();
        let (application, mut accepted) = application().await;
        let opened = frame(1, 4, 1, &connect_headers(&application.to_string()));
        let held = tokio::spawn(async move { accepted.recv().await });
        for (name, first, one) in [
            ("empty DATA", opened, frame(0, 0, 1, &[])),
            (
                "CONTINUATION",
                frame(1, 0, 1, &[]),
                frame(9, 0, 1, &[0x40, 1, b'a', 1, b'b']),
            ),
        ] {
            let frames = Frames::connect(&mesh).await;
            let pieces = std::iter::once(first).chain((0..100_000).map(|_| one.clone()));
            let (sent, code) = frames.flood(pieces).await;
            assert!(sent < 10_000, "{name}: {sent} frames were taken");
            assert_eq!(code, Some(CALM), "{name}");
            let error = mesh.failed.recv().await.unwrap();
            assert!(matches!(error, Error::Broken { .. }), "{name}: {error}");
        }
        drop(held);
        is_still_served(&mesh).await;
    });
}

#[test]
fn streams_that_are_given_up_at_once_are_limited() {
    run(async {
        let mut mesh = mesh_of(settings(), |server| server.hangs = true);
        let frames = Frames::connect(&mesh).await;
        let headers = connect_headers("127.0.0.1:9");
        let pieces = (0..50_000).map(|number| {
            let stream = number * 2 + 1;
            [
                frame(1, 4, stream, &headers),
                frame(3, 0, stream, &[0, 0, 0, 8]),
            ]
            .concat()
        });
        let (_, code) = frames.flood(pieces).await;
        let error = mesh.failed.recv().await.unwrap();
        let begun = mesh.inbound.begun.load(Ordering::Relaxed);
        assert!(begun < 3000, "{begun} connections were begun: {error}");
        assert!(
            matches!(error, Error::Flood { .. } | Error::Broken { .. }),
            "{error}"
        );
        assert_eq!(code, Some(CALM));
    });
}

#[test]
fn a_peer_has_a_limited_number_of_streams() {
    run(async {
        let mesh = mesh_of(settings(), |server| server.hangs = true);
        let mut frames = Frames::connect(&mesh).await;
        let headers = connect_headers("127.0.0.1:9");
        let mut opened = Vec::new();
        for number in 0..1000 {
            opened.extend(frame(1, 4, number * 2 + 1, &headers));
        }
        frames.stream.write_all(&opened).await.unwrap();
        until("some begin", || {
            mesh.inbound.begun.load(Ordering::Relaxed) >= 256
        })
        .await;
        sleep(Duration::from_millis(200)).await;
        assert_eq!(mesh.inbound.begun.load(Ordering::Relaxed), 256);
    });
}

#[test]
fn a_window_of_one_byte_costs_little() {
    run(async {
        let mut mesh = mesh();
        let (application, mut accepted) = application().await;
        let mut frames = Frames::connect(&mesh).await;
        let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
        let opened = frame(1, 4, 1, &connect_headers(&application.to_string()));
        for bytes in [settings, opened] {
            frames.stream.write_all(&bytes).await.unwrap();
        }
        let server = accepted.recv().await.unwrap();
        let writer = tokio::spawn(async move {
            let mut server = server;
            let _ = server.write_all(&vec![0; 1 << 20]).await;
        });
        let one = frame(8, 0, 1, &[0, 0, 0, 1]);
        let (sent, _) = frames.flood((0..20_000).map(|_| one.repeat(100))).await;
        // The sockets' buffers have many of the frames.
        assert!(sent < 19_000, "{sent} hundreds of frames were taken");
        let error = mesh.failed.recv().await.unwrap();
        assert!(
            matches!(
                error,
                Error::Flood {
                    what: "WINDOW_UPDATE",
                    ..
                }
            ),
            "{error}"
        );
        writer.abort();
    });
}

#[test]
fn one_address_has_a_limited_number_of_tunnels() {
    run(async {
        let settings = Settings {
            tunnels_of_address: 3,
            handshake: Duration::from_millis(500),
            ..settings()
        };
        let mut mesh = mesh_of(settings, |_| {});
        let echo = echo().await;
        let mut silent = Vec::new();
        for _ in 0..3 {
            silent.push(TcpStream::connect(mesh.at).await.unwrap());
        }
        let error = mesh.connect(to(mesh.at, echo)).await.unwrap_err();
        assert_eq!(error.flag().word(), "TLS_FAILURE", "{error}");
        let error = mesh.failed.recv().await.unwrap();
        assert!(matches!(error, Error::TooMany { has: 3, .. }), "{error}");
        for _ in 0..3 {
            let error = mesh.failed.recv().await.unwrap();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
        }
        round_trip(&mut mesh.open(echo).await.0).await;
    });
}

#[test]
fn more_than_the_window_is_not_kept() {
    run(async {
        let mesh = mesh();
        let (application, mut accepted) = application().await;
        let mut frames = Frames::connect(&mesh).await;
        let opened = frame(1, 4, 1, &connect_headers(&application.to_string()));
        frames.stream.write_all(&opened).await.unwrap();
        let _stalled = accepted.recv().await.unwrap();
        let before = memory();
        let one = frame(0, 0, 1, &[0; 16 << 10]);
        let (mut read, mut write) = tokio::io::split(frames.stream);
        tokio::spawn(async move { tokio::io::copy(&mut read, &mut tokio::io::sink()).await });
        for _ in 0..8000 {
            // Fails if the peer has cut the tunnel.
            let _ = write.write_all(&one).await;
        }
        // The peer may reset the stream before the answer.
        let no_stream = || {
            mesh.server
                .tunnels()
                .iter()
                .all(|tunnel| tunnel.streams() == 0)
        };
        until("the stream is reset", no_stream).await;
        let grown = memory().saturating_sub(before);
        assert!(grown < 64 << 20, "{grown} bytes");
        is_still_served(&mesh).await;
    });
}

/// Connects from this address of loopback.
async fn connect_from(from: Ipv4Addr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(to).await
}

/// Returns the parameters of a stream whose tunnel comes from this address of loopback.
fn stream_from(from: Ipv4Addr, at: SocketAddr, application: SocketAddr) -> Connect {
    let mut connect = to(at, application);
    connect.key.from = from.into();
    connect.dial = Arc::new(move |to| Box::pin(connect_from(from, to)));
    connect
}

#[test]
fn unfinished_handshakes_leave_room_for_other_clients_and_workloads() {
    run(async {
        let settings = Settings {
            unfinished: 100,
            handshake: Duration::from_mins(1),
            ..settings()
        };
        let mut mesh = mesh_of(settings, |_| {});
        let (other, _listening) = another_workload(&mesh, "shop");
        let echo = echo().await;
        let mut silent = Vec::new();
        for _ in 0..100 {
            // A connection that is refused may be reset before the client has noticed that it was made.
            silent.extend(TcpStream::connect(mesh.at).await);
        }
        let error = mesh.failed.recv().await.unwrap();
        assert!(
            matches!(error, Error::TooMany { has: 70..80, .. }),
            "{error}"
        );
        let stream = stream_from(Ipv4Addr::new(127, 0, 0, 9), mesh.at, echo);
        round_trip(&mut mesh.open_by(stream).await.0).await;
        // Many clients take the workload's share.
        for number in 0..20 {
            let from = Ipv4Addr::new(127, 0, 1, number + 1);
            silent.extend(connect_from(from, mesh.at).await);
        }
        sleep(Duration::from_millis(200)).await;
        for at in [mesh.at, other] {
            let stream = stream_from(Ipv4Addr::new(127, 0, 0, 10), at, echo);
            round_trip(&mut mesh.open_by(stream).await.0).await;
        }
        let mut ended = 0;
        while let Ok(error) = mesh.failed.try_recv() {
            let is_ended = matches!(error, Error::Displaced { .. });
            assert!(
                is_ended || matches!(error, Error::TooMany { .. }),
                "{error}"
            );
            ended += usize::from(is_ended);
        }
        assert!(ended > 0, "the client with the most has lost places");
    });
}

/// Each line has the number of tunnels of the process, and the number of those to a workload that leave room for a workload of
/// this namespace.
#[test]
fn the_tunnels_to_one_workload_or_namespace_leave_room_for_others() {
    for (all, most, namespace) in [(30, 23, "shop"), (10, 8, "blog")] {
        run(async {
            let settings = Settings {
                tunnels_of_process: Some(all),
                ..settings()
            };
            let mesh = mesh_of(settings, |_| {});
            let (other, _listening) = another_workload(&mesh, namespace);
            let echo = echo().await;
            let opened = frame(1, 4, 1, &connect_headers(&echo.to_string()));
            let mut tunnels = Vec::new();
            for _ in 0..most {
                let mut frames = Frames::connect(&mesh).await;
                frames.stream.write_all(&opened).await.unwrap();
                tunnels.push(frames);
            }
            let streams = || {
                mesh.server
                    .tunnels()
                    .iter()
                    .map(|of| of.streams())
                    .sum::<usize>()
            };
            until("all tunnels have streams", || streams() == most).await;
            assert_eq!(mesh.inbound.waited.load(Ordering::Relaxed), 0);
            let from = Ipv4Addr::new(127, 0, 0, 8);
            let next = Frames::by(&mesh, connect_from(from, mesh.at).await.unwrap());
            tokio::pin!(next);
            let waiting = timeout(Duration::from_millis(300), &mut next).await;
            assert!(waiting.is_err(), "the next tunnel waits");
            assert_eq!(mesh.inbound.waited.load(Ordering::Relaxed), 1);
            tunnels.pop();
            tunnels.push(next.await);
            let mut stream = stream_from(Ipv4Addr::new(127, 0, 0, 9), other, echo);
            stream.key.expected = [identity_in(namespace, "server")].into();
            round_trip(&mut mesh.open_by(stream).await.0).await;
        });
    }
}

#[test]
fn handshakes_that_fail_at_once_are_limited() {
    run(async {
        let settings = Settings {
            unfinished: 10,
            ..settings()
        };
        let mut mesh = mesh_of(settings, |_| {});
        for _ in 0..30 {
            let mut socket = TcpStream::connect(mesh.at).await.unwrap();
            socket.write_all(&[b'x'; 100]).await.unwrap();
        }
        let mut failed = 0;
        for _ in 0..30 {
            let error = mesh.failed.recv().await.unwrap();
            failed += usize::from(!matches!(error, Error::TooMany { .. }));
        }
        assert!((1..10).contains(&failed), "{failed} handshakes");
        sleep(FAILED).await;
        is_still_served(&mesh).await;
    });
}

#[test]
fn bytes_before_the_answer_are_limited() {
    run(async {
        let settings = Settings {
            buffered: 1 << 20,
            ..settings()
        };
        let mesh = mesh_of(settings, |server| server.hangs = true);
        let mut frames = Frames::connect(&mesh).await;
        // Without the acknowledgement of SETTINGS, the streams have small windows.
        let acknowledged = frame(4, 1, 0, &[]);
        frames.stream.write_all(&acknowledged).await.unwrap();
        let headers = connect_headers("127.0.0.1:9");
        for stream in [1, 3, 5, 7] {
            let opened = frame(1, 4, stream, &headers);
            frames.stream.write_all(&opened).await.unwrap();
        }
        let begun = || mesh.inbound.begun.load(Ordering::Relaxed) == 4;
        until("all streams begin", begun).await;
        let streams = || mesh.server.tunnels()[0].streams();
        for (count, is_much) in [(12, false), (40, true)] {
            for stream in [1, 3, 5, 7] {
                let data = frame(0, 0, stream, &[0; 16 << 10]).repeat(count);
                frames.stream.write_all(&data).await.unwrap();
            }
            if is_much {
                until("streams end", || streams() <= 1).await;
                assert!(mesh.inbound.stalled.load(Ordering::Relaxed) >= 3);
            } else {
                sleep(Duration::from_millis(300)).await;
                assert_eq!(streams(), 4, "the budget suffices");
                assert_eq!(mesh.inbound.stalled.load(Ordering::Relaxed), 0);
                assert_eq!(mesh.server.held(), [4 * 12 * (16 << 10), 1 << 20]);
            }
        }
    });
}
