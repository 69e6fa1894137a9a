//! What tunnels cost, for whoever changes them: `cargo test --release -p dataplane-tunnel measure -- --ignored --nocapture`.
//! Client, both sides of the tunnel and server share the machine.

use std::time::Instant;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::fixture::*;
use crate::Flow;

/// Milliseconds of CPU that this process has taken.
fn computed() -> usize {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = text.rsplit(')').next().unwrap().split(' ').collect();
    let ticks = [12, 13].map(|field: usize| fields[field].parse::<usize>().unwrap());
    (ticks[0] + ticks[1]) * 10
}

#[test]
#[ignore = "measures"]
fn measure() {
    const PIECES: usize = 8000;
    run(async {
        let mesh = mesh();
        let (at, mut accepted) = application().await;
        let echo = echo().await;
        let (mut client, _) = mesh.open(echo).await;
        let began = Instant::now();
        for _ in 0..20_000 {
            round_trip(&mut client).await;
        }
        println!("round trip: {:?}", began.elapsed() / 20_000);
        let began = Instant::now();
        for _ in 0..2000 {
            let mut client = mesh.open(echo).await.0;
            round_trip(&mut client).await;
            client.shutdown().await.unwrap();
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        }
        println!("connection with a round trip: {:?}", began.elapsed() / 2000);
        let (mut from, _) = mesh.open(at).await;
        let mut to_read = accepted.recv().await.unwrap();
        let piece = vec![1; 256 << 10];
        let writer = tokio::spawn(async move {
            for _ in 0..PIECES {
                from.write_all(&piece).await.unwrap();
            }
        });
        let (mut bytes, all) = (vec![0; 1 << 20], PIECES * (256 << 10));
        let (began, before, mut left) = (Instant::now(), computed(), all);
        while left > 0 {
            left -= to_read.read(&mut bytes).await.unwrap();
        }
        writer.await.unwrap();
        let micros = usize::try_from(began.elapsed().as_micros()).unwrap();
        let each = (computed() - before) * 1000 / (all / 1_000_000);
        println!("bulk: {} MB/s, {each} ms of CPU for a GB", all / micros);
        let mut sockets: Vec<TcpStream> = Vec::new();
        let before = memory();
        for _ in 0..500 {
            let mut client = mesh.open(at).await.0;
            let mut server = accepted.recv().await.unwrap();
            client.write_all(b"ping").await.unwrap();
            server.read_exact(&mut [0; 4]).await.unwrap();
            sockets.extend([client, server]);
        }
        println!(
            "idle stream, both sides: {} bytes",
            (memory() - before) / 500
        );
        let stream = mesh.connect(to(mesh.at, at)).await.unwrap();
        let (flow, (socket, _other)) = (Flow::default(), pair().await);
        println!("copy: {} bytes", size_of_val(&stream.copy(socket, &flow)));
    });
}
