//! Endpoints: HTTP, TCP and UDP servers that answer with their name and the client's address.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use axum::{
    Router,
    extract::{ConnectInfo, State},
    http::{HeaderMap, header},
    response::IntoResponse,
    routing::get,
    serve::ListenerExt as _,
};
use clap::Args;
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
};

use crate::{client::plain, keep::raise_files};

#[derive(Args)]
pub struct Arguments {
    /// How this endpoint names itself
    #[arg(long)]
    name: String,
    /// Serve HTTP/1.1 here: every GET is answered with {"endpoint", "source", "port", "host"}
    #[arg(long, value_name = "ADDRESS:PORT")]
    http: Vec<SocketAddr>,
    /// Serve TCP here: the line "NAME CLIENT", then everything back
    #[arg(long, value_name = "ADDRESS:PORT")]
    tcp: Vec<SocketAddr>,
    /// Answer UDP here: the line "NAME CLIENT", then the datagram
    #[arg(long, value_name = "ADDRESS:PORT")]
    udp: Vec<SocketAddr>,
    /// Answer UDP here, each answer from a socket of its own at this address, which is connected to the client
    #[arg(long, value_name = "ADDRESS:PORT")]
    udp_connecting: Vec<SocketAddr>,
    /// Print a line for each connection over TCP: "http" or "tcp", and the client's address
    #[arg(long)]
    log: bool,
    /// Threads, each with its own sockets; 0 is one per processor
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// One thread's sockets.
#[derive(Default)]
struct Sockets {
    http: Vec<std::net::TcpListener>,
    tcp: Vec<std::net::TcpListener>,
    udp: Vec<std::net::UdpSocket>,
    udp_connecting: Vec<std::net::UdpSocket>,
}

pub fn run(arguments: Arguments) -> Result<()> {
    raise_files()?;
    let threads = match arguments.threads {
        0 => std::thread::available_parallelism()
            .context("count the processors")?
            .get(),
        some => some,
    };
    // All sockets exist before the line that says so is printed.
    let sockets: Vec<Sockets> = (0..threads)
        .map(|_| open(&arguments, threads > 1))
        .collect::<Result<_>>()?;
    let name: Arc<str> = arguments.name.into();
    println!(
        "{}",
        json!({
            "serving": &*name,
            "http": arguments.http,
            "tcp": arguments.tcp,
            "udp": arguments.udp,
        })
    );
    std::thread::scope(|scope| {
        let serving: Vec<_> = sockets
            .into_iter()
            .map(|sockets| {
                let name = Arc::clone(&name);
                scope.spawn(move || {
                    tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build()
                        .context("start the event loop")?
                        .block_on(serve(sockets, name, arguments.log))
                })
            })
            .collect();
        serving
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no thread panics"))
    })
}

fn open(arguments: &Arguments, shared: bool) -> Result<Sockets> {
    let mut sockets = Sockets::default();
    for address in &arguments.http {
        sockets
            .http
            .push(bind(*address, Type::STREAM, shared)?.into());
    }
    for address in &arguments.tcp {
        sockets
            .tcp
            .push(bind(*address, Type::STREAM, shared)?.into());
    }
    for address in &arguments.udp {
        sockets
            .udp
            .push(bind(*address, Type::DGRAM, shared)?.into());
    }
    for address in &arguments.udp_connecting {
        let socket = bind(*address, Type::DGRAM, true)?;
        sockets.udp_connecting.push(socket.into());
    }
    Ok(sockets)
}

/// Opens a socket. `shared`: several sockets on one address, among which the kernel spreads the clients. Not set for
/// one thread, so that a second server on the address is refused and not joined.
fn bind(address: SocketAddr, kind: Type, shared: bool) -> Result<Socket> {
    let socket = || -> std::io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(address), kind, None::<Protocol>)?;
        if shared {
            socket.set_reuse_port(true)?;
        }
        if kind == Type::STREAM {
            socket.set_reuse_address(true)?;
        } else {
            socket.set_recv_buffer_size(4 << 20)?;
        }
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        if kind == Type::STREAM {
            socket.listen(4096)?;
        }
        Ok(socket)
    };
    socket().with_context(|| format!("listen on {address}"))
}

async fn serve(sockets: Sockets, name: Arc<str>, log: bool) -> Result<()> {
    let mut tasks = tokio::task::JoinSet::new();
    for listener in sockets.http {
        let listener = TcpListener::from_std(listener)?.tap_io(move |stream| {
            let _ = stream.set_nodelay(true);
            if log && let Ok(client) = stream.peer_addr() {
                println!("http {}", plain(client).ip());
            }
        });
        let app = Router::new()
            .fallback(get(answer))
            .with_state(Arc::clone(&name));
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        tasks.spawn(async move { axum::serve(listener, app).await.context("serve HTTP") });
    }
    for listener in sockets.tcp {
        tasks.spawn(serve_tcp(
            TcpListener::from_std(listener)?,
            Arc::clone(&name),
            log,
        ));
    }
    for socket in sockets.udp {
        tasks.spawn(serve_udp(UdpSocket::from_std(socket)?, Arc::clone(&name)));
    }
    for socket in sockets.udp_connecting {
        tasks.spawn(serve_udp_connecting(
            UdpSocket::from_std(socket)?,
            Arc::clone(&name),
        ));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.context("a server panicked")??;
    }
    Ok(())
}

async fn answer(
    State(name): State<Arc<str>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> impl IntoResponse {
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default();
    let client = plain(client);
    let body = json!({
        "endpoint": &*name,
        "source": client.ip(),
        "port": client.port(),
        "host": host,
    });
    (
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
}

async fn serve_tcp(listener: TcpListener, name: Arc<str>, log: bool) -> Result<()> {
    loop {
        match listener.accept().await {
            Ok((stream, client)) => {
                if log {
                    println!("tcp {}", plain(client).ip());
                }
                tokio::spawn(echo(stream, client, Arc::clone(&name)));
            }
            // The client is gone already, or we are out of descriptors for a moment.
            Err(error) => {
                eprintln!("probe serve: accept: {error}");
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        }
    }
}

async fn echo(mut stream: TcpStream, client: SocketAddr, name: Arc<str>) {
    let _ = stream.set_nodelay(true);
    let greeting = greeting(&name, client);
    // The client may leave at any time: that ends the task and is no error.
    if stream.write_all(greeting.as_bytes()).await.is_err() {
        return;
    }
    let mut buffer = [0; 16 * 1024];
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        if stream.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

async fn serve_udp(socket: UdpSocket, name: Arc<str>) -> Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    let mut answer = Vec::with_capacity(64 * 1024);
    loop {
        // An ICMP error for an earlier answer shows up here: not ours to care for.
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        answer.clear();
        answer.extend_from_slice(greeting(&name, client).as_bytes());
        answer.extend_from_slice(&buffer[..length]);
        let _ = socket.send_to(&answer, client).await;
    }
}

async fn serve_udp_connecting(socket: UdpSocket, name: Arc<str>) -> Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    let local = socket.local_addr()?;
    // Open for as long as the answers are on their way, and longer.
    let mut open = Vec::new();
    loop {
        let (length, client) = socket.recv_from(&mut buffer).await?;
        let answer = [greeting(&name, client).as_bytes(), &buffer[..length]].concat();
        let answering: std::net::UdpSocket = bind(local, Type::DGRAM, true)?.into();
        answering.connect(client)?;
        answering.send(&answer)?;
        open.push(answering);
    }
}

fn greeting(name: &str, client: SocketAddr) -> String {
    format!("{name} {}\n", plain(client))
}
