//! Istio's certificate authority: gRPC, `istio.v1.auth.IstioCertificateService/CreateCertificate`.

use std::{collections::HashMap, fmt, path::PathBuf, sync::Arc, time::Duration};

use http::{HeaderValue, header};
use model::Identity;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use super::{
    blocking,
    grpc::{self, Answer},
    issued::Issued,
    private,
    read::{certificates, read},
    request,
};

const METHOD: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";
/// The remedy for a refusal.
const HINT: &str = "; istiod must have the agent's NAMESPACE/SERVICEACCOUNT in CA_TRUSTED_NODE_ACCOUNTS and know the cluster by its \
     name here, the token must be of the agent's Pod and have the audience istio-ca, and a Pod of the account must run on \
     the agent's node";

/// How to reach Istio's certificate authority.
#[derive(Clone, Debug)]
pub struct IstioCa {
    /// `HOST:PORT`, such as `istiod.istio-system.svc:15012`.
    pub address: String,
    /// The name in the authority's certificate. `None`: the host of the address.
    pub server_name: Option<String>,
    /// A file of the roots against which the authority's certificate is verified.
    pub roots: PathBuf,
    /// A file of the agent's token, with audience `istio-ca`. It is read for each call.
    pub token: PathBuf,
    /// The cluster's name in the mesh (header `ClusterID`).
    pub cluster: String,
    /// Requested lifetime of certificates. The authority may shorten it.
    pub lifetime: Duration,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CreateCertificate {
    #[prost(string, tag = "1")]
    csr: String,
    /// In seconds.
    #[prost(int64, tag = "3")]
    validity_duration: i64,
    #[prost(message, optional, tag = "4")]
    metadata: Option<Struct>,
}

/// `google.protobuf.Struct`.
#[derive(Clone, PartialEq, prost::Message)]
struct Struct {
    #[prost(map = "string, message", tag = "1")]
    fields: HashMap<String, Value>,
}

/// `google.protobuf.Value`, of which only strings are used.
#[derive(Clone, PartialEq, prost::Message)]
struct Value {
    #[prost(string, optional, tag = "3")]
    string: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Created {
    /// The certificate, the intermediate certificates, and the roots, in PEM.
    #[prost(string, repeated, tag = "1")]
    chain: Vec<String>,
}

impl IstioCa {
    /// Makes a key, and gets a certificate for it. The key does not leave this process.
    pub(crate) async fn issue(
        &self,
        identity: &Identity,
        provider: &CryptoProvider,
    ) -> Result<Issued, String> {
        let (key, params) = request(identity).map_err(|error| error.to_string())?;
        let csr = params.serialize_request(&*key).and_then(|csr| csr.pem());
        let name = Value {
            string: Some(identity.to_string()),
        };
        let asked = CreateCertificate {
            csr: csr.map_err(|error| error.to_string())?,
            validity_duration: i64::try_from(self.lifetime.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(Struct {
                fields: [("ImpersonatedIdentity".to_owned(), name)].into(),
            }),
        };
        let created = self.call(&asked, provider).await?;
        let (chain, roots) = read_chain(&created)?;
        Ok(Issued {
            chain,
            key: private(&key),
            roots,
        })
    }

    async fn call(
        &self,
        asked: &CreateCertificate,
        provider: &CryptoProvider,
    ) -> Result<Created, String> {
        let ca = self.clone();
        let provider = Arc::new(provider.clone());
        let (authorization, tls) =
            blocking(move || Ok((ca.authorization()?, ca.tls(provider)?))).await?;
        let failed = |error: &dyn fmt::Display| format!("{}: {error}", self.address);
        let stream = TcpStream::connect(&self.address)
            .await
            .map_err(|error| failed(&error))?;
        let host = self.address.rsplit_once(':').map_or("", |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name).map_err(|error| failed(&error))?;
        let stream = TlsConnector::from(Arc::new(tls))
            .connect(name, stream)
            .await
            .map_err(|error| failed(&format_args!("TLS: {error}")))?;
        let request = grpc::post("https", &self.address, METHOD)
            .header(header::AUTHORIZATION, authorization)
            .header("clusterid", &self.cluster)
            .body(())
            .map_err(|error| failed(&error))?;
        let called = grpc::call(stream, request, asked, Answer::only).await;
        called.map_err(|error| {
            // istiod answers "not authenticated" also to clients that it does not trust.
            let hint = if error.is_denied() { HINT } else { "" };
            failed(&format_args!("{error}{hint}"))
        })
    }

    fn authorization(&self) -> Result<HeaderValue, String> {
        let file = self.token.display();
        let token = Zeroizing::new(read(&self.token)?);
        let bearer = Zeroizing::new([b"Bearer ", token.trim_ascii()].concat());
        let mut value = HeaderValue::from_bytes(&bearer)
            .map_err(|_| format!("{file}: not a token; expected one line of text"))?;
        value.set_sensitive(true);
        Ok(value)
    }

    fn tls(&self, provider: Arc<CryptoProvider>) -> Result<ClientConfig, String> {
        let mut roots = RootCertStore::empty();
        for root in certificates(&self.roots)? {
            roots
                .add(root)
                .map_err(|error| format!("{}: {error}", self.roots.display()))?;
        }
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

type Chain = Vec<CertificateDer<'static>>;

/// Returns the chain and the roots: the roots are the last element of the answer, which may have several.
fn read_chain(created: &Created) -> Result<(Chain, Chain), String> {
    let Some((roots, chain @ [_, ..])) = created.chain.split_last() else {
        let count = created.chain.len();
        return Err(format!(
            "the control plane sent {count} certificates; expected the certificate and then the roots"
        ));
    };
    let read = |pem: &String| {
        CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<Chain, _>>()
            .map_err(|error| {
                format!("the control plane sent a certificate that is not PEM: {error}")
            })
    };
    let chain: Result<Vec<Chain>, String> = chain.iter().map(read).collect();
    Ok((chain?.concat(), read(roots)?))
}

#[cfg(test)]
mod tests;
