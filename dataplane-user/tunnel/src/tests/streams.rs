//! The contents of streams: bytes, ends and resets.

use std::{
    future::poll_fn,
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::Method;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

use super::{fixture::*, raw::*};
use crate::{
    Settings,
    copy::{CloseReason, NARROW, WINDOW},
};

fn reset(socket: TcpStream) {
    relay::socket::reset_on_close(&socket);
    drop(socket);
}

/// Returns the client's value before the server's, or after it.
fn ordered<T>(client: T, server: T, client_first: bool) -> (T, T) {
    if client_first {
        (client, server)
    } else {
        (server, client)
    }
}

async fn is_reset(socket: &mut TcpStream) {
    let mut bytes = [0; 1 << 10];
    loop {
        match socket.read(&mut bytes).await {
            Ok(0) => panic!("the connection was closed, not reset"),
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                return;
            }
        }
    }
}

#[test]
fn the_server_knows_the_identity_of_the_client() {
    run(async {
        let mut mesh = mesh();
        let application = echo().await;
        let (mut client, mut ends) = mesh.open(application).await;
        round_trip(&mut client).await;
        let request = mesh.requests.recv().await.unwrap();
        assert_eq!(request.peer, identity("client"));
        assert_eq!(request.destination(), Some(application));
        client.shutdown().await.unwrap();
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        assert_eq!(ends.recv().await, Some((CloseReason::Closed, [4, 4])));
        assert_eq!(mesh.ended.recv().await, Some((CloseReason::Closed, [4, 4])));
    });
}

#[test]
fn a_request_has_the_clients_address_and_names() {
    run(async {
        let mesh = mesh();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let config = server_config(&mesh.certificates);
        let asked = async {
            let stream = accept(listener.accept().await.unwrap().0, config).await;
            let mut connection = h2::server::handshake(stream).await.unwrap();
            connection.accept().await.unwrap().unwrap().0
        };
        let request = tokio::select! {
            request = asked => request,
            made = mesh.connect(to(at, at)) => panic!("no answer was sent: {made:?}"),
        };
        assert_eq!(request.method(), Method::CONNECT);
        assert_eq!(request.uri().to_string(), at.to_string());
        assert_eq!(
            request.headers()["forwarded"],
            "for=\"10.0.0.1:4000\";host=web.shop.svc.cluster.local"
        );
        assert_eq!(request.headers()["baggage"], "k8s.cluster.name=c");
        let trace = request.headers()["traceparent"].to_str().unwrap();
        assert!(
            trace.starts_with("00-") && trace.ends_with("-00"),
            "{trace}"
        );
    });
}

#[test]
fn bulk_arrives_unharmed_both_ways() {
    run(async {
        const SIZE: usize = 64 << 20;
        let mesh = mesh();
        let (client, mut ends) = mesh.open(echo().await).await;
        let (mut read, mut write) = client.into_split();
        let piece: Vec<u8> = (0..1 << 16)
            .map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let sent = piece.clone();
        let writer = tokio::spawn(async move {
            for _ in 0..SIZE / sent.len() {
                write.write_all(&sent).await.unwrap();
            }
            write.shutdown().await.unwrap();
        });
        let mut got = vec![0; piece.len()];
        for _ in 0..SIZE / piece.len() {
            read.read_exact(&mut got).await.unwrap();
            assert!(got == piece);
        }
        assert_eq!(read.read(&mut got).await.unwrap(), 0);
        writer.await.unwrap();
        let (how, bytes) = ends.recv().await.unwrap();
        assert_eq!((how, bytes), (CloseReason::Closed, [SIZE as u64; 2]));
    });
}

#[test]
fn each_side_may_end_first_and_still_read() {
    run(async {
        let mut mesh = mesh();
        let (at, mut accepted) = application().await;
        for client_first in [true, false] {
            let (client, mut ends) = mesh.open(at).await;
            let server = accepted.recv().await.unwrap();
            let (mut first, mut second) = ordered(client, server, client_first);
            let mut text = String::new();
            first.write_all(b"last words").await.unwrap();
            first.shutdown().await.unwrap();
            second.read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "last words");
            sleep(Duration::from_millis(50)).await;
            assert!(ends.try_recv().is_err(), "one direction is open");
            second.write_all(b"and an answer").await.unwrap();
            drop(second);
            text.clear();
            first.read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "and an answer");
            assert_eq!(ends.recv().await.unwrap().0, CloseReason::Closed);
            assert_eq!(mesh.ended.recv().await.unwrap().0, CloseReason::Closed);
        }
    });
}

#[test]
fn a_reset_of_one_side_is_a_reset_of_the_other() {
    run(async {
        let mut mesh = mesh();
        let (at, mut accepted) = application().await;
        // Whether the side that resets, and the other side, have sent FIN before.
        for half_closed in [[false, false], [true, false], [false, true]] {
            for client_first in [true, false] {
                let (client, mut ends) = mesh.open(at).await;
                let server = accepted.recv().await.unwrap();
                let (mut first, mut second) = ordered(client, server, client_first);
                first.write_all(b"hello").await.unwrap();
                second.read_exact(&mut [0; 5]).await.unwrap();
                if half_closed[0] {
                    first.shutdown().await.unwrap();
                    assert_eq!(second.read(&mut [0]).await.unwrap(), 0);
                }
                if half_closed[1] {
                    second.shutdown().await.unwrap();
                    assert_eq!(first.read(&mut [0]).await.unwrap(), 0);
                }
                reset(first);
                let how = ends.recv().await.unwrap().0;
                let other = mesh.ended.recv().await.unwrap().0;
                let expected = (CloseReason::SocketReset, CloseReason::StreamReset);
                let got = ordered(how, other, client_first);
                assert_eq!(got, expected, "{half_closed:?} {client_first}");
                if !half_closed[0] {
                    is_reset(&mut second).await;
                }
            }
        }
    });
}

#[test]
fn a_tunnel_that_is_ended_resets_its_streams() {
    run(async {
        let mut mesh = mesh();
        let (at, mut accepted) = application().await;
        let (mut client, mut ends) = mesh.open(at).await;
        let mut server = accepted.recv().await.unwrap();
        server.write_all(b"hello").await.unwrap();
        client.read_exact(&mut [0; 5]).await.unwrap();
        mesh.server.tunnels()[0].end();
        is_reset(&mut client).await;
        is_reset(&mut server).await;
        assert_eq!(ends.recv().await.unwrap().0, CloseReason::StreamReset);
        assert_eq!(mesh.ended.recv().await.unwrap().0, CloseReason::StreamReset);
        until("no tunnel is left", || {
            mesh.client.tunnels().is_empty() && mesh.server.tunnels().is_empty()
        })
        .await;
    });
}

/// Writes until the tunnel takes no more bytes. Returns their number.
async fn stall(client: &TcpStream) -> usize {
    let (bytes, mut filled) = (vec![7; 1 << 20], 0);
    while timeout(Duration::from_millis(300), client.writable())
        .await
        .is_ok()
    {
        filled += client.try_write(&bytes).unwrap_or(0);
    }
    filled
}

#[test]
fn stalled_readers_do_not_slow_other_streams() {
    run(async {
        let mesh = mesh();
        let (at, mut accepted) = application().await;
        let echo = echo().await;
        let mut others = Vec::new();
        for _ in 0..20 {
            others.push(mesh.open(echo).await.0);
        }
        let mut stalled = Vec::new();
        for _ in 0..12 {
            let client = mesh.open(at).await.0;
            let server = accepted.recv().await.unwrap();
            let filled = stall(&client).await;
            assert!(filled < 32 << 20, "{filled} bytes were taken");
            stalled.push((client, server));
        }
        assert_eq!(mesh.client.tunnels().len(), 1, "all streams share a tunnel");
        let began = Instant::now();
        for client in &mut others {
            for _ in 0..20 {
                round_trip(client).await;
            }
        }
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "{:?}",
            began.elapsed()
        );
        // Bulk transfer is not slow, either.
        let (mut read, mut write) = others.pop().unwrap().into_split();
        let writer = tokio::spawn(async move { write.write_all(&vec![1; 16 << 20]).await });
        read.read_exact(&mut vec![0; 16 << 20]).await.unwrap();
        writer.await.unwrap().unwrap();
    });
}

#[test]
fn streams_that_hold_too_much_end() {
    run(async {
        let settings = Settings {
            buffered: 4 << 20,
            ..settings()
        };
        let mut mesh = mesh_of(settings, |_| {});
        let (at, mut accepted) = application().await;
        let mut stalled = Vec::new();
        for _ in 0..6 {
            let client = mesh.open(at).await.0;
            stall(&client).await;
            stalled.push((client, accepted.recv().await.unwrap()));
        }
        assert_eq!(mesh.ended.recv().await.unwrap().0, CloseReason::Stalled);
        // Other streams are still served.
        let echo = echo().await;
        round_trip(&mut mesh.open(echo).await.0).await;
    });
}

/// Returns the window, in bytes, that the server at this address gives to a stream after the application has taken a whole
/// window.
async fn window_after_one(mesh: &Mesh, at: SocketAddr) -> usize {
    let (application, mut accepted) = application().await;
    let mut requests = h2_client_to(mesh, at).await.ready().await.unwrap();
    let request = http::Request::builder()
        .method(Method::CONNECT)
        .uri(application.to_string())
        .body(())
        .unwrap();
    let (response, mut send) = requests.send_request(request, false).unwrap();
    let _response = response.await.unwrap();
    let mut server = accepted.recv().await.unwrap();
    let reader = tokio::spawn(async move {
        server
            .read_exact(&mut vec![0; WINDOW as usize])
            .await
            .unwrap();
        server
    });
    let mut left = WINDOW as usize;
    while left > 0 {
        send.reserve_capacity(left);
        while send.capacity() == 0 {
            poll_fn(|cx| send.poll_capacity(cx)).await.unwrap().unwrap();
        }
        let piece = send.capacity().min(left);
        send.send_data(Bytes::from(vec![0; piece]), false).unwrap();
        left -= piece;
    }
    let _server = reader.await.unwrap();
    send.reserve_capacity(WINDOW as usize);
    sleep(Duration::from_millis(300)).await;
    send.capacity()
}

#[test]
fn a_namespace_whose_readers_stall_leaves_others_their_windows() {
    run(async {
        let settings = Settings {
            buffered: 8 << 20,
            ..settings()
        };
        let mesh = mesh_of(settings, |_| {});
        let (other, _listening) = another_workload(&mesh, "blog");
        let (at, mut accepted) = application().await;
        let mut stalled = Vec::new();
        for _ in 0..3 {
            let client = mesh.open(at).await.0;
            stall(&client).await;
            stalled.push((client, accepted.recv().await.unwrap()));
        }
        let own = window_after_one(&mesh, mesh.at).await;
        assert!((1..=NARROW).contains(&own), "{own} bytes");
        let others = window_after_one(&mesh, other).await;
        assert!(others > NARROW, "{others} bytes");
    });
}
