//! The lifetime of tunnels, and the streams that share them.

use std::{
    future::pending,
    io,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};

use super::{fixture::*, raw::*};
use crate::{
    Settings,
    copy::CloseReason,
    error::Error,
    outbound::{Connect, Dial},
};

/// Counts the TCP connections of new tunnels.
fn counted(mut connect: Connect) -> (Connect, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    connect.dial = Arc::new(move |to| {
        counter.fetch_add(1, Ordering::Relaxed);
        Box::pin(TcpStream::connect(to))
    });
    (connect, count)
}

/// Returns this connection once, and an error later.
fn dial_once(socket: TcpStream) -> Dial {
    let socket = Mutex::new(Some(socket.into_std().unwrap()));
    Arc::new(move |_| {
        let socket = socket.lock().unwrap().take();
        Box::pin(async move { TcpStream::from_std(socket.ok_or(io::ErrorKind::NotFound)?) })
    })
}

#[test]
fn streams_share_tunnels_up_to_the_limit() {
    run(async {
        let settings = Settings {
            streams: 3,
            ..settings()
        };
        let mesh = mesh_of(settings, |_| {});
        let (connect, dialled) = counted(to(mesh.at, echo().await));
        // The streams begin at once. Each TCP connection becomes a tunnel that is used.
        let streams = (0..7).map(|_| mesh.open_by(connect.clone()));
        let mut clients = Vec::new();
        for stream in streams {
            clients.push(stream.await.0);
        }
        for client in &mut clients {
            round_trip(client).await;
        }
        assert_eq!(dialled.load(Ordering::Relaxed), 3);
        let mut streams: Vec<_> = mesh
            .client
            .tunnels()
            .iter()
            .map(|tunnel| tunnel.streams())
            .collect();
        streams.sort_unstable();
        assert_eq!(streams, [1, 3, 3]);
        // New streams take free places in existing tunnels.
        clients.truncate(2);
        until("streams end", || {
            mesh.client
                .tunnels()
                .iter()
                .map(|tunnel| tunnel.streams())
                .sum::<usize>()
                == 2
        })
        .await;
        for _ in 0..5 {
            round_trip(&mut mesh.open_by(connect.clone()).await.0).await;
        }
        assert_eq!(dialled.load(Ordering::Relaxed), 3);
    });
}

#[test]
fn other_keys_have_other_tunnels() {
    run(async {
        let mesh = mesh();
        let echo = echo().await;
        mesh.certificates.renew("second", 3);
        let first = to(mesh.at, echo);
        let mut changes = vec![first.clone(); 6];
        changes[1].key.source = identity("second");
        changes[2].key.expected = [identity("second"), identity("server")].into();
        changes[3].key.from = "127.0.0.9".parse().unwrap();
        changes[4].key.attachment = 4;
        changes[5].key.workload = "another uid".into();
        let mut clients = Vec::new();
        for connect in changes {
            let mut client = mesh.open_by(connect).await.0;
            round_trip(&mut client).await;
            clients.push(client);
        }
        assert_eq!(mesh.client.tunnels().len(), 6);
        mesh.client
            .end_outbound(|attachment, uid| attachment == 4 || uid == "another uid");
        until("the tunnels end", || mesh.client.tunnels().len() == 4).await;
        for mut client in clients.drain(4..) {
            assert!(client.read(&mut [0]).await.is_err());
        }
        round_trip(&mut clients[0]).await;
    });
}

#[test]
fn a_pending_tunnel_to_a_workload_that_ends_is_not_used() {
    run(async {
        let mesh = mesh();
        let mut connect = to(mesh.at, echo().await);
        connect.dial = Arc::new(|to| {
            Box::pin(async move {
                sleep(Duration::from_millis(200)).await;
                TcpStream::connect(to).await
            })
        });
        let asked = mesh.connect(connect);
        let ended = async {
            sleep(Duration::from_millis(100)).await;
            mesh.client.end_outbound(|_, uid| uid == "uid");
        };
        let (result, ()) = tokio::join!(asked, ended);
        assert!(matches!(result, Err(Error::Ended { .. })));
        assert!(mesh.client.tunnels().is_empty());
    });
}

#[test]
fn idle_tunnels_end() {
    run(async {
        let settings = Settings {
            idle: Duration::from_millis(200),
            ..settings()
        };
        let mut mesh = mesh_of(settings, |_| {});
        let echo = echo().await;
        let (mut client, _) = mesh.open(echo).await;
        round_trip(&mut client).await;
        sleep(Duration::from_millis(800)).await;
        round_trip(&mut client).await;
        assert_eq!(mesh.client.tunnels().len(), 1);
        drop(client);
        until("the tunnel ends on both sides", || {
            mesh.client.tunnels().is_empty() && mesh.server.tunnels().is_empty()
        })
        .await;
        assert!(
            mesh.failed.try_recv().is_err(),
            "an idle tunnel is no failure"
        );
        round_trip(&mut mesh.open(echo).await.0).await;
    });
}

#[test]
fn a_peer_that_drains_keeps_its_streams_and_gets_no_new_ones() {
    run(async {
        let mut mesh = mesh();
        let echo = echo().await;
        let (mut old, mut ends) = mesh.open(echo).await;
        round_trip(&mut old).await;
        let listening = mesh.listening.take().unwrap();
        listening.begin_drain();
        // The successor of the listening socket.
        until("the socket is closed", || {
            std::net::TcpListener::bind(mesh.at).is_ok()
        })
        .await;
        let listener = std::net::TcpListener::bind(mesh.at).unwrap();
        let inbound = Arc::clone(&mesh.inbound);
        let _again = mesh
            .server
            .listen(listener, (2, identity("server")), inbound)
            .unwrap();
        let (mut new, _) = mesh.open(echo).await;
        round_trip(&mut new).await;
        round_trip(&mut old).await;
        assert_eq!(mesh.client.tunnels().len(), 2);
        assert!(!listening.is_drained());
        drop(old);
        assert_eq!(ends.recv().await.unwrap().0, CloseReason::Closed);
        until("the drain ends", || listening.is_drained()).await;
        round_trip(&mut new).await;
        until("the old tunnel ends", || mesh.client.tunnels().len() == 1).await;
    });
}

/// A tunnel whose TCP connection was accepted before the drain still carries its streams.
#[test]
fn a_handshake_outlives_the_drain() {
    run(async {
        let mut mesh = mesh();
        let echo = echo().await;
        let socket = TcpStream::connect(mesh.at).await.unwrap();
        let accepted = || mesh.server.core.bounds.unfinished() == 1;
        until("the connection is accepted", accepted).await;
        let listening = mesh.listening.take().unwrap();
        listening.begin_drain();
        until("the socket is closed", || {
            std::net::TcpListener::bind(mesh.at).is_ok()
        })
        .await;
        assert!(!listening.is_drained());
        let connect = Connect {
            dial: dial_once(socket),
            ..to(mesh.at, echo)
        };
        let (mut client, mut ends) = mesh.open_by(connect).await;
        round_trip(&mut client).await;
        drop(client);
        assert_eq!(ends.recv().await.unwrap().0, CloseReason::Closed);
        until("the drain ends", || listening.is_drained()).await;
        assert!(mesh.failed.try_recv().is_err());
    });
}

/// A peer that is about to end sends GOAWAY in a new tunnel. The stream tries another tunnel, which the successor accepts.
#[test]
fn a_new_tunnel_to_a_peer_that_drains_is_tried_again() {
    run(async {
        let mesh = mesh();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let config = server_config(&mesh.certificates);
        let server = tokio::spawn(async move {
            let mut stream = accept(listener.accept().await.unwrap().0, config.clone()).await;
            let ended = frame(7, 0, 0, &[0; 8]);
            let bytes = [frame(4, 0, 0, &[]), ended].concat();
            stream.write_all(&bytes).await.unwrap();
            let again = accept(listener.accept().await.unwrap().0, config).await;
            let mut connection = h2::server::handshake(again).await.unwrap();
            let (_, mut respond) = connection.accept().await.unwrap().unwrap();
            let _answered = respond
                .send_response(http::Response::new(()), false)
                .unwrap();
            while connection.accept().await.is_some() {}
        });
        let stream = mesh.connect(to(at, at)).await.unwrap();
        drop(stream);
        server.abort();
    });
}

#[test]
fn a_peer_that_restarts_gets_new_tunnels() {
    run(async {
        let mut mesh = mesh();
        let echo = echo().await;
        let (mut client, _) = mesh.open(echo).await;
        round_trip(&mut client).await;
        drop(mesh.listening.take());
        assert!(client.read(&mut [0]).await.is_err());
        until("the tunnel ends", || mesh.server.tunnels().is_empty()).await;
        until("the socket is closed", || {
            std::net::TcpListener::bind(mesh.at).is_ok()
        })
        .await;
        let error = mesh.connect(to(mesh.at, echo)).await.unwrap_err();
        assert!(matches!(error, Error::Connect { .. }), "{error}");
        let listener = std::net::TcpListener::bind(mesh.at).unwrap();
        let inbound = Arc::clone(&mesh.inbound);
        let _again = mesh
            .server
            .listen(listener, (2, identity("server")), inbound)
            .unwrap();
        round_trip(&mut mesh.open(echo).await.0).await;
    });
}

#[test]
fn streams_outlive_certificates_that_rotate() {
    run(async {
        let mesh = mesh();
        let echo = echo().await;
        let end = SystemTime::now() + Duration::from_secs(1);
        mesh.certificates.expire("client", end);
        let (mut old, _) = mesh.open(echo).await;
        round_trip(&mut old).await;
        let first = mesh.client.tunnels()[0].clone();
        mesh.certificates.renew("client", 11);
        mesh.certificates.renew("server", 12);
        round_trip(&mut mesh.open(echo).await.0).await;
        assert_eq!(
            mesh.client.tunnels().len(),
            1,
            "the old certificate is still valid"
        );
        until("the old certificate expires", || SystemTime::now() > end).await;
        let (mut new, _) = mesh.open(echo).await;
        round_trip(&mut new).await;
        round_trip(&mut old).await;
        let tunnels = mesh.client.tunnels();
        assert_eq!(tunnels.len(), 2, "the old certificate has expired");
        let second = tunnels
            .iter()
            .find(|tunnel| !Arc::ptr_eq(tunnel, &first))
            .unwrap();
        assert_ne!(
            second.peer.chain, first.peer.chain,
            "the server has a new certificate, too"
        );
        // The roots change. No certificate in use is revoked.
        let roots = mesh.certificates.authority.roots(&[99]);
        mesh.certificates.roots.send_replace(roots.into());
        sleep(Duration::from_millis(200)).await;
        round_trip(&mut new).await;
        round_trip(&mut old).await;
        // The server's old certificate is revoked: the old tunnel ends.
        let roots = mesh.certificates.authority.roots(&[2]);
        mesh.certificates.roots.send_replace(roots.into());
        assert!(old.read(&mut [0]).await.is_err());
        round_trip(&mut new).await;
    });
}

#[test]
fn a_peer_that_does_not_answer_ping_is_given_up() {
    run(async {
        let settings = Settings {
            ping: Duration::from_millis(200),
            pong: Duration::from_millis(300),
            ..settings()
        };
        let mesh = mesh_of(settings, |_| {});
        // This peer answers PING. Its tunnel has been silent for longer than the dead peer's.
        let (mut alive, _) = mesh.open(echo().await).await;
        round_trip(&mut alive).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let config = server_config(&mesh.certificates);
        tokio::spawn(async move {
            let stream = accept(listener.accept().await.unwrap().0, config).await;
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let (_, mut respond) = connection.accept().await.unwrap().unwrap();
            let stream = respond.send_response(http::Response::new(()), false);
            // Sends the answer, and hangs with open sockets.
            let _ = tokio::time::timeout(Duration::from_millis(100), connection.accept()).await;
            pending::<()>().await;
            drop((stream, connection));
        });
        let (mut client, _) = mesh.open_by(to(at, at)).await;
        assert!(client.read(&mut [0]).await.is_err());
        // The ticks of the two tunnels are at most half of `ping` apart.
        sleep(Duration::from_millis(200)).await;
        round_trip(&mut alive).await;
    });
}

/// In a process of its own: other tests of this one hold memory, too.
#[test]
fn idle_streams_hold_little() {
    const ALONE: &str = "DATAPLANE_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "tests::pooling::idle_streams_hold_little"]);
        let output = alone.env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        return;
    }
    run(async {
        let mesh = mesh();
        let echo = echo().await;
        let mut clients = Vec::new();
        for _ in 0..100 {
            clients.push(mesh.open(echo).await.0);
        }
        let before = memory();
        for _ in 0..400 {
            let mut client = mesh.open(echo).await.0;
            round_trip(&mut client).await;
            clients.push(client);
        }
        // Includes both sides of the tunnel, and the test's own memory.
        let each = memory().saturating_sub(before) / 400;
        assert!(each < 64 << 10, "{each} bytes for an idle stream");
    });
}

#[test]
fn a_tunnel_ends_after_the_certificate_of_its_peer() {
    run(async {
        let settings = Settings {
            ping: Duration::from_millis(200),
            ..settings()
        };
        let mesh = mesh_of(settings, |_| {});
        let now = SystemTime::now();
        let end = now + Duration::from_secs(2);
        mesh.certificates
            .set("client", 3, now - Duration::from_mins(1), end);
        let echo = echo().await;
        let (mut old, _) = mesh.open(echo).await;
        round_trip(&mut old).await;
        // The server checks the certificate at least every 100 ms.
        let checked = mesh.server.tunnels()[0].peer.until + Duration::from_millis(300);
        until("the server sends GOAWAY", || SystemTime::now() > checked).await;
        // The open stream continues. The tunnel ends with the stream.
        round_trip(&mut old).await;
        assert_eq!(mesh.server.tunnels().len(), 1);
        drop(old);
        until("the tunnel ends", || mesh.server.tunnels().is_empty()).await;
    });
}
