//! Raw peers: TLS without this crate, and HTTP/2 frames without the library.

use std::sync::Arc;

use bytes::Bytes;
use rustls::{
    ClientConfig, ServerConfig,
    pki_types::{IpAddr, ServerName},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::fixture::*;
use crate::tls::{self, Check};

fn check(certificates: &Certificates) -> Arc<Check> {
    let roots = Arc::clone(&certificates.roots.borrow());
    Check::new(Arc::new(identity::Verifier::new(&roots).unwrap()), None)
}

pub fn client_config(certificates: &Certificates) -> ClientConfig {
    let config = tls::client(&certificates.get("client"), check(certificates));
    Arc::unwrap_or_clone(config.unwrap())
}

pub fn server_config(certificates: &Certificates) -> ServerConfig {
    let config = tls::server(&certificates.get("server"), check(certificates));
    Arc::unwrap_or_clone(config.unwrap())
}

pub async fn connect(
    at: std::net::SocketAddr,
    config: ClientConfig,
) -> std::io::Result<client::TlsStream<TcpStream>> {
    connect_by(TcpStream::connect(at).await?, config).await
}

pub async fn connect_by(
    socket: TcpStream,
    config: ClientConfig,
) -> std::io::Result<client::TlsStream<TcpStream>> {
    let name = ServerName::IpAddress(IpAddr::V4([127, 0, 0, 1].into()));
    TlsConnector::from(Arc::new(config))
        .connect(name, socket)
        .await
}

pub async fn accept(socket: TcpStream, config: ServerConfig) -> server::TlsStream<TcpStream> {
    TlsAcceptor::from(Arc::new(config))
        .accept(socket)
        .await
        .unwrap()
}

/// Connects a client of the HTTP/2 library.
pub async fn h2_client(mesh: &Mesh) -> h2::client::SendRequest<Bytes> {
    h2_client_to(mesh, mesh.at).await
}

pub async fn h2_client_to(mesh: &Mesh, at: std::net::SocketAddr) -> h2::client::SendRequest<Bytes> {
    let stream = connect(at, client_config(&mesh.certificates))
        .await
        .unwrap();
    let (requests, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    requests
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Returns the headers of a CONNECT to this authority, in HPACK without Huffman's code.
pub fn connect_headers(authority: &str) -> Vec<u8> {
    let mut headers = vec![0x42, 7];
    headers.extend(b"CONNECT");
    headers.extend([0x41, u8::try_from(authority.len()).unwrap()]);
    headers.extend(authority.as_bytes());
    headers
}

/// The first bytes of a client of HTTP/2.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client that writes raw frames. It has sent its preface and SETTINGS.
pub struct Frames {
    pub stream: client::TlsStream<TcpStream>,
}

impl Frames {
    pub async fn connect(mesh: &Mesh) -> Self {
        Self::by(mesh, TcpStream::connect(mesh.at).await.unwrap()).await
    }

    /// Makes a tunnel over this connection.
    pub async fn by(mesh: &Mesh, socket: TcpStream) -> Self {
        let config = client_config(&mesh.certificates);
        let mut stream = connect_by(socket, config).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        stream.write_all(&frame(4, 0, 0, &[])).await.unwrap();
        Self { stream }
    }

    /// Sends pieces until the peer ends the connection, and reads the peer's frames meanwhile. Returns the number of pieces
    /// that were sent, and the error code of GOAWAY.
    pub async fn flood(self, pieces: impl Iterator<Item = Vec<u8>>) -> (usize, Option<u32>) {
        let (mut read, mut write) = tokio::io::split(self.stream);
        let reader = tokio::spawn(async move {
            let mut code = None;
            let mut header = [0; 9];
            while read.read_exact(&mut header).await.is_ok() {
                let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
                let mut payload = vec![0; length as usize];
                if read.read_exact(&mut payload).await.is_err() {
                    break;
                }
                if header[3] == 7 {
                    code = Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
                }
            }
            code
        });
        let mut sent = 0;
        for piece in pieces {
            if write.write_all(&piece).await.is_err() || reader.is_finished() {
                break;
            }
            sent += 1;
        }
        let _ = write.flush().await;
        let limited = tokio::time::timeout(std::time::Duration::from_secs(5), reader).await;
        (
            sent,
            limited.expect("the peer ends the connection").unwrap(),
        )
    }
}
