//! SPIRE's Delegated Identity API: the certificates of other workloads of the node, from the local SPIRE agent. The Workload
//! API would attest this process, and not its pods.
//!
//! SPIRE's agent makes keys and renews certificates, at half of their lifetime. The store asks it as often as other sources.

use std::{collections::HashMap, fmt, path::Path, time::Duration};

use model::Identity;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::{net::UnixStream, time::timeout};
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};
use zeroize::Zeroizing;

use super::{
    grpc::{self, Answer, CallError},
    issued::Issued,
};

const CERTIFICATES: &str =
    "/spire.api.agent.delegatedidentity.v1.DelegatedIdentity/SubscribeToX509SVIDs";
const ROOTS: &str =
    "/spire.api.agent.delegatedidentity.v1.DelegatedIdentity/SubscribeToX509Bundles";
/// Maximum time to wait for the certificate. SPIRE's agent may send messages without the certificate first.
const PATIENCE: Duration = if cfg!(test) {
    Duration::from_millis(300)
} else {
    Duration::from_secs(5)
};
/// The remedy for a refusal.
const HINT: &str = "; the SPIRE agent must have this agent's SPIFFE ID in authorized_delegates, and an entry for it";

#[derive(Clone, PartialEq, prost::Message)]
struct Subscribe {
    #[prost(message, repeated, tag = "1")]
    selectors: Vec<Selector>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Selector {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Certificates {
    #[prost(message, repeated, tag = "1")]
    all: Vec<WithKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
struct WithKey {
    #[prost(message, optional, tag = "1")]
    certificate: Option<Certificate>,
    /// PKCS #8.
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

/// Omits the key.
impl fmt::Debug for WithKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.certificate.fmt(f)
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Certificate {
    #[prost(bytes = "vec", repeated, tag = "1")]
    chain: Vec<Vec<u8>>,
    #[prost(message, optional, tag = "2")]
    id: Option<SpiffeId>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SpiffeId {
    #[prost(string, tag = "1")]
    trust_domain: String,
    /// With its leading `/`.
    #[prost(string, tag = "2")]
    path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SubscribeToRoots {}

#[derive(Clone, PartialEq, prost::Message)]
struct Bundles {
    /// By trust domain: certificates in DER, one after the other.
    #[prost(map = "string, bytes", tag = "1")]
    by_domain: HashMap<String, Vec<u8>>,
}

/// Gets the certificate of the entry with the selectors `k8s:ns:NAMESPACE` and `k8s:sa:ACCOUNT` whose SPIFFE ID is the identity.
pub async fn issue(socket: &Path, identity: &Identity) -> Result<Issued, String> {
    let issue = async {
        let (chain, key) = certificate(socket, identity).await?;
        let roots = roots(socket, identity.trust_domain()).await?;
        Ok(Issued { chain, key, roots })
    };
    issue.await.map_err(|error: CallError| {
        let hint = if error.is_denied() { HINT } else { "" };
        format!("{}: {error}{hint}", socket.display())
    })
}

type Chain = Vec<CertificateDer<'static>>;

async fn certificate(
    socket: &Path,
    identity: &Identity,
) -> Result<(Chain, Zeroizing<PrivateKeyDer<'static>>), CallError> {
    let selector = |value| Selector {
        kind: "k8s".to_owned(),
        value,
    };
    let subscribe = Subscribe {
        selectors: vec![
            selector(format!("ns:{}", identity.namespace())),
            selector(format!("sa:{}", identity.account())),
        ],
    };
    let wanted = identity.to_string();
    let mut others = Vec::new();
    let read = async |answer: &mut Answer| {
        while let Some(certificates) = answer.next::<Certificates>().await? {
            others.clear();
            for mut with_key in certificates.all {
                let key = PrivatePkcs8KeyDer::from(std::mem::take(&mut with_key.key));
                let key = Zeroizing::new(PrivateKeyDer::Pkcs8(key));
                let certificate = with_key.certificate.unwrap_or_default();
                let id = certificate.id.unwrap_or_default();
                let id = format!("spiffe://{}{}", id.trust_domain, id.path);
                if id == wanted {
                    let chain = certificate.chain.into_iter().map(CertificateDer::from);
                    return Ok((chain.collect(), key));
                }
                others.push(id);
            }
        }
        Err(CallError::Empty)
    };
    let called = timeout(PATIENCE, call(socket, CERTIFICATES, &subscribe, read)).await;
    called.unwrap_or_else(|_| {
        let (namespace, account) = (identity.namespace(), identity.account());
        Err(CallError::Other(format!(
            "no entry of {wanted} has the selectors k8s:ns:{namespace} and k8s:sa:{account}; entries with these selectors: {others:?}"
        )))
    })
}

async fn roots(socket: &Path, trust_domain: &str) -> Result<Chain, CallError> {
    let read = async |answer: &mut Answer| {
        let bundles = answer.next::<Bundles>().await?.ok_or(CallError::Empty)?;
        let url = format!("spiffe://{trust_domain}");
        let found = [trust_domain, &url].into_iter();
        let mut rest = found
            .filter_map(|name| bundles.by_domain.get(name))
            .map(Vec::as_slice)
            .next()
            .unwrap_or_default();
        let mut roots = Vec::new();
        while !rest.is_empty() {
            let (after, _) = X509Certificate::from_der(rest)
                .map_err(|error| CallError::Other(format!("a root cannot be read: {error}")))?;
            let (root, after) = rest.split_at(rest.len() - after.len());
            roots.push(CertificateDer::from(root.to_vec()));
            rest = after;
        }
        Ok(roots)
    };
    call(socket, ROOTS, &SubscribeToRoots {}, read).await
}

async fn call<T>(
    socket: &Path,
    method: &str,
    message: &impl prost::Message,
    read: impl AsyncFnOnce(&mut Answer) -> Result<T, CallError>,
) -> Result<T, CallError> {
    let other = |error: &dyn fmt::Display| CallError::Other(error.to_string());
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| other(&error))?;
    let request = grpc::post("http", "localhost", method)
        .body(())
        .map_err(|error| other(&error))?;
    grpc::call(stream, request, message, read).await
}

#[cfg(test)]
mod tests {
    use http::Response;
    use prost::{Message as _, bytes::Bytes};
    use rcgen::KeyPair;
    use tempfile::TempDir;
    use tokio::net::UnixListener;

    use super::*;
    use crate::{
        Credential,
        fixture::{Authority, Leaf, now},
        source::grpc::frame,
    };

    const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

    /// A SPIRE agent that has certificates for these paths, each in a message of its own. Its streams stay open.
    fn start(directory: &TempDir, paths: &'static [&'static str]) -> std::path::PathBuf {
        let socket = directory.path().join("admin.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            let authority = Authority::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut connection = h2::server::handshake(stream).await.unwrap();
                let mut open = Vec::new();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    open.push(answer(&authority, paths, request, respond).await);
                }
            }
        });
        socket
    }

    async fn answer(
        authority: &Authority,
        paths: &[&str],
        request: http::Request<h2::RecvStream>,
        mut respond: h2::server::SendResponse<Bytes>,
    ) -> h2::SendStream<Bytes> {
        let response = Response::builder().body(()).unwrap();
        let is_roots = request.uri().path() == ROOTS;
        let mut body = request.into_body();
        let asked = body.data().await.unwrap().unwrap();
        let mut stream = respond.send_response(response, false).unwrap();
        if is_roots {
            let other = Authority::new();
            let bundle = [authority.der().to_vec(), other.der().to_vec()].concat();
            let by_domain = [("spiffe://cluster.local".to_owned(), bundle)].into();
            stream
                .send_data(frame(&Bundles { by_domain }), false)
                .unwrap();
            return stream;
        }
        let asked = Subscribe::decode(&asked[5..]).unwrap();
        let values: Vec<&str> = asked.selectors.iter().map(|one| &*one.value).collect();
        assert_eq!(values, ["ns:shop", "sa:web"]);
        stream
            .send_data(frame(&Certificates::default()), false)
            .unwrap();
        for path in paths {
            let key = KeyPair::generate().unwrap();
            let leaf = Leaf::of(&format!("spiffe://cluster.local{path}"));
            let certificate = Certificate {
                chain: vec![authority.sign(&leaf, &key).to_vec()],
                id: Some(SpiffeId {
                    trust_domain: "cluster.local".to_owned(),
                    path: (*path).to_owned(),
                }),
            };
            let all = vec![WithKey {
                certificate: Some(certificate),
                key: key.serialize_der(),
            }];
            stream
                .send_data(frame(&Certificates { all }), false)
                .unwrap();
        }
        stream
    }

    #[tokio::test]
    async fn the_certificate_of_the_identity_is_taken() {
        let directory = TempDir::new().unwrap();
        let socket = start(&directory, &["/ns/shop/sa/other", "/ns/shop/sa/web"]);
        let web = WEB.parse().unwrap();
        let issued = issue(&socket, &web).await.unwrap();
        assert_eq!(issued.roots.len(), 2);
        let provider = rustls::crypto::ring::default_provider();
        Credential::verify(&web, issued, now(), &provider).unwrap();
    }

    #[tokio::test]
    async fn a_missing_entry_is_an_error() {
        let directory = TempDir::new().unwrap();
        let socket = start(&directory, &["/ns/shop/sa/other"]);
        let error = issue(&socket, &WEB.parse().unwrap()).await.err().unwrap();
        for part in [
            "admin.sock",
            WEB,
            "k8s:sa:web",
            "spiffe://cluster.local/ns/shop/sa/other",
        ] {
            assert!(error.contains(part), "{error} without {part}");
        }
        let gone = directory.path().join("gone");
        let error = issue(&gone, &WEB.parse().unwrap()).await.err().unwrap();
        assert!(error.contains("gone: No such file"), "{error}");
    }

    #[test]
    fn a_message_with_a_key_does_not_show_it() {
        let message = WithKey {
            certificate: None,
            key: b"secret".to_vec(),
        };
        assert_eq!(format!("{message:?}"), "None");
    }
}
