//! Limits for clients of the agent's ports: how many connections there are at the same time, and how long one lasts.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, serve::Listener};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::sleep,
};

use super::places::{Place, Places, Share, Shared};

/// Connections of a port at the same time. For a further one, [another ends](super::places).
const CONNECTIONS: usize = 64;
/// Connections of a port for load balancers at the same time. Many load balancers may ask at once.
const CHECKS: usize = 256;
/// Connections of all services' ports for health checks together. Authors of services decide how many ports there are.
const ALL_CHECKS: usize = 1024;
/// How long a connection may last, with one request and its answer, however little arrives or leaves at a time. Metrics
/// of 10 000 services are a megabyte.
const LONGEST: Duration = Duration::from_mins(1);

/// The places of all services' ports for health checks.
pub fn all_checks() -> Arc<Shared> {
    Arc::new(Shared::new(ALL_CHECKS))
}

/// Answers the clients of a port until it is dropped.
pub async fn serve(listener: impl Listener<Addr = SocketAddr>, routes: Router) {
    accept(listener, routes, Places::new(CONNECTIONS), None, LONGEST).await;
}

/// Answers the health checks of load balancers until it is dropped. `shared`: the connections that several ports share.
pub async fn serve_checks(
    listener: impl Listener<Addr = SocketAddr>,
    routes: Router,
    shared: Option<Arc<Shared>>,
) {
    accept(listener, routes, Places::new(CHECKS), shared, LONGEST).await;
}

async fn accept(
    mut listener: impl Listener<Addr = SocketAddr>,
    routes: Router,
    places: Arc<Places>,
    shared: Option<Arc<Shared>>,
    longest: Duration,
) {
    if let Some(shared) = &shared {
        shared.add(&places);
    }
    loop {
        let (io, addr) = listener.accept().await;
        let place = places.take(addr.ip()).await;
        let share = match &shared {
            Some(shared) => Some(Arc::clone(shared).take(&place).await),
            None => None,
        };
        tokio::spawn(answer(io, routes.clone(), place, share, longest));
    }
}

/// Answers one request. A connection that lasted for further requests would need limits for the time between them, and
/// could always wait for the client to read the answer before.
async fn answer(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    routes: Router,
    mut place: Place,
    _share: Option<Share>,
    longest: Duration,
) {
    let mut http = Builder::new(TokioExecutor::new()).http1_only();
    http.http1().keep_alive(false);
    let routes = TowerToHyperService::new(routes);
    tokio::select! {
        // An error is the client's, which has gone or does not speak HTTP.
        _ = http.serve_connection(TokioIo::new(io), routes) => {}
        _ = &mut place.ends => {}
        () = sleep(longest) => {}
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpSocket, TcpStream},
        task::JoinHandle,
        time::timeout,
    };

    use super::*;

    const SOON: Duration = Duration::from_millis(300);

    /// Starts a server with so many places.
    async fn server(
        places: usize,
        shared: Option<&Arc<Shared>>,
        longest: Duration,
    ) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let routes = Router::new()
            .route("/", get(async || "hello"))
            .route("/much", get(async || vec![b'x'; MUCH]));
        let places = Places::new(places);
        let server = accept(listener, routes, places, shared.cloned(), longest);
        (at, tokio::spawn(server))
    }

    async fn asks(stream: &mut TcpStream) -> bool {
        let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut answer = [0; 12];
        let answered = timeout(SOON, stream.read_exact(&mut answer)).await;
        answered.is_ok_and(|read| read.is_ok()) && &answer == b"HTTP/1.1 200"
    }

    /// Connects from an address of loopback.
    async fn from(client: [u8; 4], at: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((client, 0).into()).unwrap();
        socket.connect(at).await.unwrap()
    }

    /// Returns how many of these connections the server has not closed.
    async fn are_open(clients: &mut [TcpStream]) -> usize {
        let mut open = 0;
        for client in clients {
            let read = timeout(SOON / 6, client.read(&mut [0])).await;
            open += usize::from(read.is_err());
        }
        open
    }

    const HOG: [u8; 4] = [127, 0, 0, 2];
    const OTHER: [u8; 4] = [127, 0, 0, 3];
    const THIRD: [u8; 4] = [127, 0, 0, 4];

    #[tokio::test]
    async fn a_client_that_takes_all_places_keeps_nobody_waiting() {
        let (at, server) = server(8, None, LONGEST).await;
        let mut other = [from(OTHER, at).await];
        // Some are silent, others send a part of a request.
        let mut hogs = Vec::new();
        for n in 0..20 {
            let mut hog = from(HOG, at).await;
            if n % 3 == 0 {
                hog.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
            }
            hogs.push(hog);
        }
        assert!(asks(&mut from(THIRD, at).await).await);
        // A client with few connections keeps them.
        assert_eq!(are_open(&mut other).await, 1);
        assert_eq!(are_open(&mut hogs).await, 6);
        assert!(asks(&mut other[0]).await);
        server.abort();
    }

    #[tokio::test]
    async fn a_connection_that_says_nothing_ends() {
        let longest = SOON * 4;
        let (at, server) = server(8, None, longest).await;
        let mut clients = [from(HOG, at).await, from(HOG, at).await];
        assert_eq!(are_open(&mut clients).await, 2);
        sleep(longest).await;
        assert_eq!(are_open(&mut clients).await, 0);
        server.abort();
    }

    #[tokio::test]
    async fn of_ports_that_share_the_one_with_most_connections_loses_one() {
        const PORTS: usize = 20;
        let shared = Arc::new(Shared::new(PORTS + 4));
        let mut ports = Vec::new();
        for _ in 0..PORTS {
            ports.push(server(100, Some(&shared), LONGEST).await);
        }
        // The clients of all ports but one try to take all places, one port after the other.
        let mut hogs = Vec::new();
        for (at, _) in &ports[1..] {
            for _ in 0..PORTS + 10 {
                hogs.push(from(HOG, *at).await);
            }
            assert!(
                asks(&mut from(HOG, *at).await).await,
                "a client's newest connection is its own"
            );
        }
        let mut other = [from(OTHER, ports[0].0).await];
        for (at, _) in &ports[1..] {
            hogs.push(from(HOG, *at).await);
            assert!(asks(&mut from(HOG, *at).await).await);
        }
        assert_eq!(are_open(&mut other).await, 1);
        assert!(asks(&mut other[0]).await);
        let open = are_open(&mut hogs).await;
        assert!((PORTS..PORTS + 4).contains(&open), "{open}");
        for (_, server) in ports {
            server.abort();
        }
    }

    /// More bytes than the sockets' buffers hold, that a client may still read within a test.
    const MUCH: usize = 32 << 20;

    /// A client that sends a request a byte at a time, and a client that reads its answer a byte at a time.
    #[tokio::test]
    async fn a_byte_at_a_time_gains_no_time() {
        let longest = SOON * 2;
        let (at, server) = server(8, None, longest).await;
        let mut slow = TcpStream::connect(at).await.unwrap();
        let mut ended = false;
        for byte in b"GET / HTTP/1.1\r\nhost: x\r\nx-long: xxxxxxxxxxxxxxxxxxxx" {
            let sent = slow.write_all(&[*byte]).await;
            sleep(SOON / 10).await;
            let closed = timeout(Duration::from_millis(1), slow.read(&mut [0])).await;
            ended |= sent.is_err() || closed.is_ok();
        }
        assert!(ended, "a request may take for ever");

        // A second request, sent at once, gains none either.
        let mut slow = TcpStream::connect(at).await.unwrap();
        let request = b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n".repeat(2);
        slow.write_all(&request).await.unwrap();
        let mut read = 0;
        let all = timeout(longest * 10, async {
            let mut buffer = vec![0; MUCH / 200];
            while let Ok(more @ 1..) = slow.read(&mut buffer).await {
                read += more;
                sleep(SOON / 10).await;
            }
        });
        assert!(all.await.is_ok() && read < MUCH, "{read} of {MUCH} bytes");
        server.abort();
    }
}
