//! A certificate authority like istiod's, in this process, with real TLS and HTTP/2. `cargo xtask cluster istiod` runs the last
//! test beside the real istiod.

use std::{env, fs, sync::Mutex, time::SystemTime};

use http::{HeaderMap, Request, Response};
use prost::{Message as _, bytes::Bytes};
use rcgen::{CertificateSigningRequestParams, SanType};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    Credential,
    fixture::{Authority, HOUR, now},
    source::grpc::frame,
};

const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

fn provider() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

/// The authority's reaction to a request.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    Sign,
    /// Signs another name than the requested one.
    SignOther,
    /// Sends the certificate without a root.
    NoRoot,
    /// Refuses in the headers, as gRPC does for an answer without a message.
    Refuse,
    /// Refuses after an empty body.
    RefuseLate,
    /// Answers as a gateway that does not know gRPC.
    Status,
    /// Closes the connection.
    Close,
}

struct Istiod {
    authority: Authority,
    does: Does,
    /// The requests: authorization, cluster, path, and message.
    seen: Mutex<Vec<(String, String, String, CreateCertificate)>>,
}

/// Starts the authority, and returns how to reach it.
async fn start(does: Does) -> (TempDir, IstioCa, Arc<Istiod>) {
    let directory = TempDir::new().unwrap();
    let (roots, token) = (
        directory.path().join("root"),
        directory.path().join("token"),
    );
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["istiod.test".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    fs::write(&roots, certificate.pem()).unwrap();
    fs::write(&token, "first\n").unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ca = IstioCa {
        address: listener.local_addr().unwrap().to_string(),
        server_name: Some("istiod.test".to_owned()),
        roots,
        token,
        cluster: "Kubernetes".to_owned(),
        lifetime: 24 * HOUR,
    };
    let istiod = Arc::new(Istiod {
        authority: Authority::new(),
        does,
        seen: Mutex::default(),
    });
    let serves = istiod.clone();
    tokio::spawn(async move {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // The client does not trust this authority.
            let Ok(stream) = acceptor.accept(stream).await else {
                continue;
            };
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((request, respond))) = connection.accept().await {
                if serves.does == Does::Close {
                    connection.abrupt_shutdown(h2::Reason::NO_ERROR);
                    break;
                }
                tokio::spawn(serves.clone().answer(request, respond));
            }
        }
    });
    (directory, ca, istiod)
}

impl Istiod {
    async fn answer(
        self: Arc<Self>,
        request: Request<h2::RecvStream>,
        mut respond: h2::server::SendResponse<Bytes>,
    ) {
        let (parts, mut body) = request.into_parts();
        let mut bytes = Vec::new();
        while let Some(chunk) = body.data().await {
            bytes.extend_from_slice(&chunk.unwrap());
        }
        let asked = CreateCertificate::decode(&bytes[5..]).unwrap();
        let header = |name: &str| parts.headers[name].to_str().unwrap().to_owned();
        self.seen.lock().unwrap().push((
            header("authorization"),
            header("clusterid"),
            parts.uri.path().to_owned(),
            asked.clone(),
        ));
        let ok = Response::builder().header("content-type", "application/grpc");
        match self.does {
            Does::Refuse => {
                let response = ok.header("grpc-status", "16").header(
                    "grpc-message",
                    "request impersonation authentication%20failure",
                );
                respond
                    .send_response(response.body(()).unwrap(), true)
                    .unwrap();
            }
            Does::Status => {
                let response = Response::builder().status(503).body(()).unwrap();
                respond.send_response(response, true).unwrap();
            }
            _ => {
                let mut stream = respond.send_response(ok.body(()).unwrap(), false).unwrap();
                let late = self.does == Does::RefuseLate;
                if !late {
                    stream.send_data(frame(&self.sign(&asked)), false).unwrap();
                }
                let mut trailers = HeaderMap::new();
                let status = if late { "7" } else { "0" };
                trailers.insert("grpc-status", HeaderValue::from_static(status));
                stream.send_trailers(trailers).unwrap();
            }
        }
    }

    fn sign(&self, asked: &CreateCertificate) -> Created {
        let mut csr = CertificateSigningRequestParams::from_pem(&asked.csr).unwrap();
        let metadata = asked.metadata.as_ref().unwrap();
        let name = match self.does {
            Does::SignOther => "spiffe://cluster.local/ns/shop/sa/other",
            _ => metadata.fields["ImpersonatedIdentity"]
                .string
                .as_deref()
                .unwrap(),
        };
        csr.params.subject_alt_names = vec![SanType::URI(name.try_into().unwrap())];
        csr.params.not_before = (now() - HOUR).into();
        csr.params.not_after = (now() + HOUR).into();
        let mut chain = vec![csr.signed_by(&self.authority.0).unwrap().pem()];
        if self.does != Does::NoRoot {
            // Two roots, as while one is replaced.
            chain.push(format!(
                "{}{}",
                self.authority.0.pem(),
                Authority::new().0.pem()
            ));
        }
        Created { chain }
    }
}

async fn issue(ca: &IstioCa) -> Result<Credential, String> {
    let identity = WEB.parse().unwrap();
    let issued = ca.issue(&identity, &provider()).await?;
    assert_eq!(issued.roots.len(), 2);
    Credential::verify(&identity, issued, now(), &provider())
}

#[tokio::test]
async fn a_key_is_certified_for_the_identity_that_is_asked_for() {
    let (_directory, ca, istiod) = start(Does::Sign).await;
    assert_eq!(issue(&ca).await.unwrap().identity.to_string(), WEB);
    fs::write(&ca.token, "second").unwrap();
    issue(&ca).await.unwrap();
    let seen = istiod.seen.lock().unwrap();
    let tokens: Vec<&str> = seen.iter().map(|seen| &*seen.0).collect();
    assert_eq!(tokens, ["Bearer first", "Bearer second"]);
    let (_, cluster, path, asked) = &seen[0];
    assert_eq!((&**cluster, &**path), ("Kubernetes", METHOD));
    assert_eq!(asked.validity_duration, 86400);
    assert_ne!(asked.csr, seen[1].3.csr, "each certificate has a new key");
}

#[tokio::test]
async fn refusals_say_what_the_control_plane_needs() {
    for (does, messages) in [
        (
            Does::Refuse,
            &[
                "request impersonation authentication failure",
                "not authenticated",
                "CA_TRUSTED_NODE_ACCOUNTS",
            ][..],
        ),
        (
            Does::RefuseLate,
            &["permission denied", "CA_TRUSTED_NODE_ACCOUNTS"],
        ),
        (
            Does::SignOther,
            &[
                "source presented spiffe://cluster.local/ns/shop/sa/other, expected spiffe://cluster.local/ns/shop/sa/web",
            ],
        ),
        (Does::NoRoot, &["sent 1 certificates", "then the roots"]),
        (Does::Status, &["HTTP status 503"]),
        (Does::Close, &["127.0.0.1:"]),
    ] {
        let (_directory, ca, _istiod) = start(does).await;
        let error = issue(&ca).await.unwrap_err();
        for message in messages {
            assert!(error.contains(message), "{error:?} without {message:?}");
        }
        assert!(!error.contains("first"), "the token is in {error:?}");
    }
}

#[tokio::test]
async fn the_authority_is_verified() {
    let (directory, mut ca, istiod) = start(Does::Sign).await;
    ca.server_name = Some("elsewhere.test".to_owned());
    let error = issue(&ca).await.unwrap_err();
    assert!(error.contains("TLS"), "{error}");
    ca.server_name = Some("istiod.test".to_owned());
    fs::write(&ca.roots, Authority::new().0.pem()).unwrap();
    let error = issue(&ca).await.unwrap_err();
    assert!(error.contains("TLS"), "{error}");
    ca.roots = directory.path().join("nothing");
    let error = issue(&ca).await.unwrap_err();
    assert!(error.contains("nothing: "), "{error}");
    assert!(istiod.seen.lock().unwrap().is_empty());
}

/// `DATAPLANE_ISTIO_CA` is a directory of the authority's root, tokens and `cases`, one a line: a token's file, the cluster, an
/// identity, and after `=` a part of the refusal, or `signed`.
#[tokio::test]
async fn the_real_istiod_signs_and_refuses() {
    let Some(directory) = env::var_os("DATAPLANE_ISTIO_CA").map(PathBuf::from) else {
        println!("skipped: `cargo xtask cluster istiod` runs this test beside an istiod");
        return;
    };
    let cases = fs::read_to_string(directory.join("cases")).unwrap();
    for case in cases.lines() {
        let (asked, wanted) = case.split_once(" = ").unwrap();
        let [token, cluster, identity] = *asked.split(' ').collect::<Vec<_>>() else {
            panic!("{case}");
        };
        let ca = IstioCa {
            address: "127.0.0.1:15012".to_owned(),
            server_name: Some("istiod.istio-system.svc".to_owned()),
            roots: directory.join("root.crt"),
            token: directory.join(token),
            cluster: cluster.to_owned(),
            lifetime: 24 * HOUR,
        };
        let identity: Identity = identity.parse().unwrap();
        let issued = ca.issue(&identity, &provider()).await;
        let now = SystemTime::now();
        let credential =
            issued.and_then(|issued| Credential::verify(&identity, issued, now, &provider()));
        match (credential, wanted) {
            (Ok(credential), "signed") => assert_eq!(credential.identity, identity, "{case}"),
            (Ok(_), _) => panic!("{case}: signed"),
            (Err(error), _) => assert!(error.contains(wanted), "{case}: {error}"),
        }
    }
    println!("{} requests", cases.lines().count());
}
