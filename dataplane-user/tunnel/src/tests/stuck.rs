//! Peers that do not take the bytes that wait for them.

use std::{sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    time::sleep,
};

use super::{fixture::*, raw::*};
use crate::{Settings, copy::CloseReason, error::Error};

/// Settings by which peers that take nothing are given up after 1.5 s.
fn soon() -> Settings {
    Settings {
        ping: Duration::from_millis(500),
        pong: Duration::from_secs(1),
        ..settings()
    }
}

/// Sends frames that need no answer every few milliseconds, so that the peer is never silent, and reads nothing.
async fn send_only(mut stream: impl AsyncWrite + Unpin, every: Duration) {
    // The largest windows: the frame SETTINGS for streams, and WINDOW_UPDATE for the tunnel.
    let settings = frame(4, 0, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]);
    let window = frame(8, 0, 0, &[0x7f, 0, 0, 0]);
    stream
        .write_all(&[settings, window].concat())
        .await
        .unwrap();
    while stream.write_all(&frame(6, 1, 0, &[0; 8])).await.is_ok() {
        let _ = stream.flush().await;
        sleep(every).await;
    }
}

/// Writes until the connection is reset.
async fn write_for_ever(mut socket: TcpStream) {
    while socket.write_all(&vec![0; 64 << 10]).await.is_ok() {}
}

#[test]
fn peers_that_send_and_take_nothing_are_given_up() {
    run(async {
        let mut mesh = mesh_of(soon(), |_| {});
        for every in [2, 50, 300].map(Duration::from_millis) {
            let (application, mut accepted) = application().await;
            let mut frames = Frames::connect(&mesh).await;
            let opened = frame(1, 4, 1, &connect_headers(&application.to_string()));
            frames.stream.write_all(&opened).await.unwrap();
            let writer = tokio::spawn(write_for_ever(accepted.recv().await.unwrap()));
            let peer = tokio::spawn(send_only(frames.stream, every));
            let error = mesh.failed.recv().await.unwrap();
            assert!(matches!(error, Error::Stuck { .. }), "{every:?}: {error}");
            writer.await.unwrap();
            peer.abort();
            assert_eq!(mesh.ended.recv().await.unwrap().0, CloseReason::StreamReset);
        }
        // A server that takes nothing after its answer 200.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let config = server_config(&mesh.certificates);
        tokio::spawn(async move {
            let mut stream = accept(listener.accept().await.unwrap().0, config).await;
            let answer = [frame(4, 0, 0, &[]), frame(1, 4, 1, &[0x88])].concat();
            stream.write_all(&answer).await.unwrap();
            send_only(stream, Duration::from_millis(50)).await;
        });
        let (client, mut ends) = mesh.open_by(to(at, at)).await;
        let writer = tokio::spawn(write_for_ever(client));
        until("the tunnel is up", || !mesh.client.tunnels().is_empty()).await;
        let tunnel = Arc::clone(&mesh.client.tunnels()[0]);
        assert_eq!(ends.recv().await.unwrap().0, CloseReason::StreamReset);
        writer.await.unwrap();
        let failure = tunnel.failure().map(ToString::to_string);
        let wanted = format!("{at} takes no bytes; this side cut the tunnel");
        assert_eq!(failure, Some(wanted));
    });
}

#[test]
fn a_peer_that_takes_bytes_slowly_is_served() {
    run(async {
        let mut mesh = mesh_of(soon(), |_| {});
        let (application, mut accepted) = application().await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(64 << 10).unwrap();
        let mut frames = Frames::by(&mesh, socket.connect(mesh.at).await.unwrap()).await;
        let opened = frame(1, 4, 1, &connect_headers(&application.to_string()));
        frames.stream.write_all(&opened).await.unwrap();
        let writer = tokio::spawn(write_for_ever(accepted.recv().await.unwrap()));
        let (mut read, write) = tokio::io::split(frames.stream);
        let sender = tokio::spawn(send_only(write, Duration::from_millis(50)));
        let mut bytes = vec![0; 16 << 10];
        // So slowly that the kernel lets no write go on for some seconds.
        for _ in 0..60 {
            sleep(Duration::from_millis(100)).await;
            assert!(read.read(&mut bytes).await.unwrap() > 0);
        }
        assert!(mesh.failed.try_recv().is_err() && !writer.is_finished());
        sender.abort();
    });
}
