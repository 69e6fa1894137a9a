//! The endpoint.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use socket2::SockRef;

use super::{ANSWERED, ECHO, HOLD, STEADY, STEADY_RECEIVE, STREAM, Transport, socket};

/// Serves until stdin closes. Prints `ready` when it listens.
pub fn run(addresses: &[IpAddr], port: u16, connect_port: u16, threads: u32) -> anyhow::Result<()> {
    for addr in addresses {
        let at = SocketAddr::new(*addr, port);
        let listener = socket(*addr, Transport::Tcp)?;
        listener.set_reuse_address(true)?;
        listener
            .bind(&at.into())
            .with_context(|| format!("cannot listen on {at}/tcp"))?;
        listener.listen(4096)?;
        let listener = TcpListener::from(listener);
        // As many threads as a client has, so that no connection waits for another.
        for _ in 0..threads {
            let listener = listener.try_clone()?;
            thread::spawn(move || accept(&listener));
        }
        let pit = socket(*addr, Transport::Tcp)?;
        pit.set_reuse_address(true)?;
        pit.bind(&SocketAddr::new(*addr, connect_port).into())?;
        pit.listen(4096)?;
        pit.set_nonblocking(true)?;
        thread::spawn(move || empty(&TcpListener::from(pit)));
        let datagrams = socket(*addr, Transport::Udp)?;
        datagrams.set_recv_buffer_size(4 << 20)?;
        datagrams
            .bind(&at.into())
            .with_context(|| format!("cannot listen on {at}/udp"))?;
        thread::spawn(move || answer(&UdpSocket::from(datagrams)));
    }
    println!("ready");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// Accepts connections that carry no data. No thread waits for them in `accept()`: the last packet
/// of a handshake would wake this thread, which may or may not run before `connect()` returns to
/// the client on the same CPU. The measured time would then vary.
fn empty(listener: &TcpListener) {
    loop {
        while listener.accept().is_ok() {}
        thread::sleep(Duration::from_millis(5));
    }
}

fn accept(listener: &TcpListener) {
    let mut held = Vec::new();
    let mut buffer = vec![0; 256 << 10];
    while let Ok((stream, _)) = listener.accept() {
        // Clients reset their connections when they are done, so most connections end with an
        // error.
        let _ = serve(stream, &mut buffer, &mut held);
    }
}

fn serve(
    mut stream: TcpStream,
    buffer: &mut [u8],
    held: &mut Vec<TcpStream>,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    match byte[0] {
        ECHO => loop {
            stream.write_all(&byte)?;
            stream.read_exact(&mut byte)?;
        },
        HOLD => {
            stream.write_all(&byte)?;
            held.push(stream);
            Ok(())
        }
        kind @ (STREAM | STEADY) => {
            if kind == STEADY {
                SockRef::from(&stream).set_recv_buffer_size(STEADY_RECEIVE)?;
            }
            let mut length = [0; 8];
            stream.read_exact(&mut length)?;
            let mut left = u64::from_be_bytes(length);
            while left > 0 {
                match stream.read(buffer)? as u64 {
                    0 => return Ok(()),
                    read => left = left.saturating_sub(read),
                }
            }
            stream.write_all(&byte)
        }
        _ => Ok(()),
    }
}

fn answer(socket: &UdpSocket) {
    let mut buffer = [0; 2048];
    loop {
        // If a client closed its socket before the answer came, the next call fails once.
        if let Ok((_, from)) = socket.recv_from(&mut buffer)
            && buffer[0] == ANSWERED
        {
            let _ = socket.send_to(&buffer[..1], from);
        }
    }
}
