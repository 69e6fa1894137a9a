//! A certificate authority that ztunnel can ask, as istiod is: gRPC, `istio.v1.auth.IstioCertificateService/CreateCertificate`.

use std::{fs, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Response};
use prost::{Message as _, bytes::Bytes};
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, ExtendedKeyUsagePurpose, Issuer, KeyPair,
    SanType,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::{Builder, Runtime},
};
use tokio_rustls::TlsAcceptor;

use crate::lab::Host;

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;
const HOUR: Duration = Duration::from_hours(1);

#[derive(Clone, PartialEq, prost::Message)]
struct Asked {
    #[prost(string, tag = "1")]
    csr: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Created {
    #[prost(string, repeated, tag = "1")]
    chain: Vec<String>,
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    root: String,
}

/// Reads what `dataplane ca init` made in a directory: the issuer, and the root's certificate in PEM.
fn read(directory: &Path) -> Result<(Issuer<'static, KeyPair>, String)> {
    let root = fs::read_to_string(directory.join("ca.crt"))?;
    let key = fs::read_to_string(directory.join("ca.key"))?;
    let issuer = Issuer::from_ca_cert_pem(&root, KeyPair::from_pem(&key)?)?;
    Ok((issuer, root))
}

/// Issues a certificate of an identity (a SPIFFE ID), which is valid for an hour. Returns it and its key, in PEM.
///
/// # Errors
/// When the root in `directory` cannot be read.
pub fn issue(directory: &Path, identity: &str) -> Result<String> {
    let (issuer, _) = read(directory)?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.subject_alt_names = vec![SanType::URI(identity.try_into()?)];
    limit(&mut params);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    Ok(certificate.pem() + &key.serialize_pem())
}

/// Makes a certificate one for both sides of TLS, valid for an hour.
fn limit(params: &mut CertificateParams) {
    let now = std::time::SystemTime::now();
    params.not_before = (now - HOUR).into();
    params.not_after = (now + HOUR).into();
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
}

/// Serves at port 15012 of the host's 127.0.0.1 until the result is dropped. It signs any request, with the root of
/// `directory`, which `dataplane ca init` made.
///
/// # Errors
/// When the root cannot be read, or the port is taken.
pub fn serve(host: &Host, directory: &Path) -> Result<Runtime> {
    let (issuer, root) = read(directory)?;
    let key = KeyPair::generate()?;
    let own = CertificateParams::new(["127.0.0.1".to_owned()])?.signed_by(&key, &issuer)?;
    let tls = tls(own.der().clone(), &key)?;
    let listener = host.listen(([127, 0, 0, 1], 15012))?;
    listener.set_nonblocking(true)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let authority = Arc::new(Authority { issuer, root });
    runtime.spawn(async move {
        let listener = TcpListener::from_std(listener)?;
        loop {
            let (stream, _) = listener.accept().await?;
            let (tls, authority) = (tls.clone(), Arc::clone(&authority));
            tokio::spawn(async move {
                let served = serve_client(authority, tls, stream).await;
                served.inspect_err(|error| println!("the authority: {error:#}"))
            });
        }
        #[expect(unreachable_code, reason = "the type of the block's result")]
        anyhow::Ok(())
    });
    Ok(runtime)
}

fn tls(own: CertificateDer<'static>, key: &KeyPair) -> Result<TlsAcceptor> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![own], key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn serve_client(
    authority: Arc<Authority>,
    tls: TlsAcceptor,
    stream: TcpStream,
) -> Result<()> {
    let mut connection = h2::server::handshake(tls.accept(stream).await?).await?;
    while let Some(request) = connection.accept().await {
        let ((request, respond), authority) = (request?, Arc::clone(&authority));
        // The connection reads the body while it waits for the next request.
        tokio::spawn(async move {
            let mut body = request.into_body();
            let mut bytes = Vec::new();
            while let Some(chunk) = body.data().await {
                bytes.extend_from_slice(&chunk?);
            }
            let answered = authority.answer(&bytes, respond);
            answered.inspect_err(|error| println!("the authority: {error:#}"))
        });
    }
    Ok(())
}

impl Authority {
    fn answer(&self, request: &[u8], mut respond: SendResponse<Bytes>) -> Result<()> {
        let asked = request.get(PREFIX..).context("no message")?;
        let created = self.sign(&Asked::decode(asked)?)?;
        let mut message = vec![0];
        message.extend(u32::try_from(created.encoded_len())?.to_be_bytes());
        created.encode(&mut message)?;
        let response = Response::builder().header("content-type", "application/grpc");
        let mut stream = respond.send_response(response.body(())?, false)?;
        stream.send_data(message.into(), false)?;
        let status = ("grpc-status".try_into()?, HeaderValue::from_static("0"));
        stream.send_trailers(HeaderMap::from_iter([status]))?;
        Ok(())
    }

    fn sign(&self, asked: &Asked) -> Result<Created> {
        let mut csr = CertificateSigningRequestParams::from_pem(&asked.csr)?;
        limit(&mut csr.params);
        let certificate = csr.signed_by(&self.issuer)?.pem();
        Ok(Created {
            chain: vec![certificate, self.root.clone()],
        })
    }
}
