//! Verifies the certificate of a peer.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use model::{Identity, NoIdentity};
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, ExtendedKeyUsageValidator,
    KeyPurposeIdIter, KeyUsage, OwnedCertRevocationList, RevocationOptionsBuilder,
    UnknownStatusPolicy,
};

use crate::{Roots, validity::Validity};

/// The reason to refuse a peer. Each message has the identity that the peer's certificate claims, if it claims one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The peer sent no certificate.
    #[error("peer presented no certificate")]
    NoCertificate,
    /// The certificate cannot be read.
    #[error("peer presented a certificate that cannot be read: {0}")]
    Unreadable(Box<str>),
    /// The certificate does not have exactly one URI, as SPIFFE demands.
    #[error("peer presented a certificate with the URIs {0:?}, expected exactly one")]
    NotOneUri(Box<[String]>),
    /// The URI is not the identity of a workload.
    #[error("peer presented {0}")]
    NoIdentity(#[from] NoIdentity),
    /// The peer's trust domain has no roots.
    #[error(
        "peer presented {peer}: trust domain {domain} is not trusted; add its roots to the node's configuration",
        domain = peer.trust_domain()
    )]
    UntrustedDomain {
        /// The identity that the certificate claims.
        peer: Identity,
    },
    /// All roots of the peer's trust domain have expired, or are not valid yet.
    #[error("peer presented {peer}: no root of trust domain {} is valid now", peer.trust_domain())]
    RootsExpired {
        /// The identity that the certificate claims.
        peer: Identity,
    },
    /// A certificate of the peer's chain has expired.
    #[error("peer presented {peer}: certificate expired at {}", Shown(*at))]
    Expired {
        /// The identity that the certificate claims.
        peer: Identity,
        /// The end of the certificate's validity.
        at: SystemTime,
    },
    /// A certificate of the peer's chain is not valid yet: one of the two clocks is wrong.
    #[error("peer presented {peer}: certificate is not valid before {}", Shown(*from))]
    NotYetValid {
        /// The identity that the certificate claims.
        peer: Identity,
        /// The start of the certificate's validity.
        from: SystemTime,
    },
    /// A certificate of the peer's chain is on a list of revoked certificates.
    #[error("peer presented {peer}: certificate is revoked")]
    Revoked {
        /// The identity that the certificate claims.
        peer: Identity,
    },
    /// The chain does not lead to a root of the peer's trust domain.
    #[error("peer presented {peer}: not signed by a root of trust domain {}: {cause}", peer.trust_domain())]
    Unverified {
        /// The identity that the certificate claims.
        peer: Identity,
        /// The reason.
        cause: Box<str>,
    },
    /// The peer has another identity than the destination.
    #[error("peer presented {presented}, expected {}", Listed(expected))]
    Unexpected {
        /// The identity that the peer proved.
        presented: Identity,
        /// The identities that the destination may have.
        expected: Box<[Identity]>,
    },
}

/// Converts an error for the verifiers of rustls. `CertificateError::Other` keeps the [`PeerError`], so that the log has its
/// text.
impl From<PeerError> for rustls::Error {
    fn from(error: PeerError) -> Self {
        rustls::CertificateError::Other(rustls::OtherError(Arc::new(error))).into()
    }
}

/// An error because roots or lists of revoked certificates cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RootsError {
    /// A root cannot be read.
    #[error("a root of trust domain {domain} is not the certificate of an authority: {cause}")]
    Root {
        /// The trust domain.
        domain: Arc<str>,
        /// The reason.
        cause: Box<str>,
    },
    /// A list of revoked certificates cannot be read.
    #[error("a list of revoked certificates cannot be read: {0}")]
    Revoked(Box<str>),
}

/// [`Roots`] in a form that verifies peers fast. The caller makes a verifier for each change of the roots.
#[derive(Debug)]
pub struct Verifier {
    by_domain: BTreeMap<Arc<str>, Vec<Root>>,
    /// Lists of revoked certificates. Each layer has one list of each issuer, because webpki uses only the first list of an
    /// issuer. An issuer with fewer lists than layers repeats its last list, so that each layer has a list of each issuer.
    layers: Vec<Vec<CertRevocationList<'static>>>,
}

#[derive(Debug)]
struct Root {
    anchor: TrustAnchor<'static>,
    validity: Validity,
}

impl Verifier {
    /// Reads roots and lists of revoked certificates.
    ///
    /// # Errors
    /// If one of them cannot be read.
    pub fn new(roots: &Roots) -> Result<Self, RootsError> {
        let mut by_domain = BTreeMap::new();
        for (domain, certificates) in &roots.by_domain {
            let read = certificates.iter().map(|certificate| {
                Root::new(certificate).map_err(|cause| RootsError::Root {
                    domain: domain.clone(),
                    cause,
                })
            });
            by_domain.insert(domain.clone(), read.collect::<Result<_, _>>()?);
        }
        let mut by_issuer: BTreeMap<Vec<u8>, Vec<OwnedCertRevocationList>> = BTreeMap::new();
        for list in &roots.revoked {
            let list = OwnedCertRevocationList::from_der(list)
                .map_err(|error| RootsError::Revoked(error.to_string().into()))?;
            let issuer = CertRevocationList::from(list.clone()).issuer().to_owned();
            by_issuer.entry(issuer).or_default().push(list);
        }
        let depth = by_issuer.values().map(Vec::len).max().unwrap_or(0);
        let layers = (0..depth).map(|layer| {
            let of_layer = |lists: &Vec<OwnedCertRevocationList>| {
                let list = lists.get(layer).or(lists.last())?;
                Some(CertRevocationList::from(list.clone()))
            };
            by_issuer.values().filter_map(of_layer).collect()
        });
        Ok(Self {
            by_domain,
            layers: layers.collect(),
        })
    }

    /// Verifies the chain of a peer, the peer's own certificate first, and returns the peer's identity.
    ///
    /// The roots are those of the trust domain that the certificate names. The caller then compares the identity with the
    /// expected identities ([`expect`]).
    ///
    /// # Errors
    /// If the certificate does not have exactly one identity, is not valid at this time, is revoked, or is not signed by a
    /// root of its trust domain. If the signature of a list of revoked certificates is wrong, the certificates of its issuer
    /// are refused. An overdue list still counts.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        time: SystemTime,
    ) -> Result<Identity, PeerError> {
        let (leaf, intermediates) = chain.split_first().ok_or(PeerError::NoCertificate)?;
        let leaf = EndEntityCert::try_from(leaf)
            .map_err(|error| PeerError::Unreadable(error.to_string().into()))?;
        let peer = claimed(&leaf)?;
        let roots = self.by_domain.get(peer.trust_domain());
        let Some(roots) = roots.filter(|roots| !roots.is_empty()) else {
            return Err(PeerError::UntrustedDomain { peer });
        };
        let is_valid = |root: &&Root| root.validity.includes(time);
        let anchors: Vec<_> = roots
            .iter()
            .filter(is_valid)
            .map(|root| root.anchor.clone())
            .collect();
        if anchors.is_empty() {
            return Err(PeerError::RootsExpired { peer });
        }
        match self.verify_layers(&leaf, intermediates, &anchors, time) {
            Ok(()) => Ok(peer),
            Err(error) => Err(refusal(peer, &error)),
        }
    }

    /// Verifies the chain against each layer of lists. Lists of one issuer are signed by different keys if the issuer's key was
    /// replaced and the issuer's name was not. Then one list with the right signature is enough.
    fn verify_layers(
        &self,
        leaf: &EndEntityCert<'_>,
        intermediates: &[CertificateDer<'_>],
        anchors: &[TrustAnchor<'_>],
        time: SystemTime,
    ) -> Result<(), webpki::Error> {
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let time = UnixTime::since_unix_epoch(since_epoch);
        let verify = |layer: &[CertRevocationList<'_>]| {
            let lists: Vec<_> = layer.iter().collect();
            let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|builder| {
                builder
                    .with_status_policy(UnknownStatusPolicy::Allow)
                    .with_expiration_policy(ExpirationPolicy::Ignore)
                    .build()
            });
            let (algorithms, uses) = (webpki::ALL_VERIFICATION_ALGS, BothUses);
            leaf.verify_for_usage(
                algorithms,
                anchors,
                intermediates,
                time,
                uses,
                revocation,
                None,
            )
            .map(drop)
        };
        match &self.layers[..] {
            [] => verify(&[]),
            [layer] => verify(layer),
            layers => {
                // If the chain is correct, a later wrong signature is that of a list.
                verify(&[])?;
                let mut result = Err(webpki::Error::InvalidCrlSignatureForPublicKey);
                for layer in layers {
                    match verify(layer) {
                        Ok(()) => result = Ok(()),
                        Err(error) if is_signature(&error) => {}
                        Err(error) => return Err(error),
                    }
                }
                result
            }
        }
    }
}

fn is_signature(error: &webpki::Error) -> bool {
    matches!(
        error,
        webpki::Error::InvalidSignatureForPublicKey
            | webpki::Error::InvalidCrlSignatureForPublicKey
            | webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_)
            | webpki::Error::UnsupportedCrlSignatureAlgorithmForPublicKeyContext(_)
    )
}

impl Root {
    fn new(certificate: &CertificateDer<'_>) -> Result<Self, Box<str>> {
        let anchor =
            webpki::anchor_from_trusted_cert(certificate).map_err(|error| error.to_string())?;
        Ok(Self {
            anchor: anchor.to_owned(),
            validity: Validity::of(certificate)?,
        })
    }
}

/// Returns the identity that a certificate claims. The claim is not verified.
pub(crate) fn claimed(leaf: &EndEntityCert<'_>) -> Result<Identity, PeerError> {
    let uris: Vec<&str> = leaf.valid_uri_names().collect();
    let [uri] = uris[..] else {
        let uris = uris.into_iter().map(str::to_owned).collect();
        return Err(PeerError::NotOneUri(uris));
    };
    Ok(uri.parse()?)
}

/// Returns the first second at which a certificate is no longer valid.
///
/// # Errors
/// If the certificate cannot be read.
pub fn end(certificate: &CertificateDer<'_>) -> Result<SystemTime, PeerError> {
    let validity = Validity::of(certificate);
    let validity = validity.map_err(|error| PeerError::Unreadable(error.into()))?;
    // `notAfter` is part of the validity.
    Ok(validity.not_after + Duration::from_secs(1))
}

/// Compares the identity that a peer proved with the identities that the destination may have.
///
/// # Errors
/// If the peer has none of these identities.
pub fn expect(presented: Identity, expected: &[Identity]) -> Result<Identity, PeerError> {
    if expected.contains(&presented) {
        return Ok(presented);
    }
    Err(PeerError::Unexpected {
        presented,
        expected: expected.into(),
    })
}

/// Requires that an extended key usage, if the certificate has one, includes client and server authentication. A workload is
/// a client and a server, and SPIFFE demands both.
struct BothUses;

impl ExtendedKeyUsageValidator for BothUses {
    fn validate(&self, uses: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let (mut has_usage, mut client, mut server) = (false, false, false);
        for one in uses {
            let oid = one?.to_decoded_oid();
            has_usage = true;
            client |= oid == KeyUsage::CLIENT_AUTH_REPR;
            server |= oid == KeyUsage::SERVER_AUTH_REPR;
        }
        if has_usage && !(client && server) {
            #[expect(
                deprecated,
                reason = "no other crate can make the error that replaces it"
            )]
            return Err(webpki::Error::RequiredEkuNotFound);
        }
        Ok(())
    }
}

fn refusal(peer: Identity, error: &webpki::Error) -> PeerError {
    let at = |time: &UnixTime| UNIX_EPOCH + Duration::from_secs(time.as_secs());
    match error {
        webpki::Error::CertExpired { not_after, .. } => PeerError::Expired {
            peer,
            at: at(not_after),
        },
        webpki::Error::CertNotValidYet { not_before, .. } => PeerError::NotYetValid {
            peer,
            from: at(not_before),
        },
        webpki::Error::CertRevoked => PeerError::Revoked { peer },
        error => PeerError::Unverified {
            peer,
            cause: cause(error).into(),
        },
    }
}

fn cause(error: &webpki::Error) -> String {
    let cause = match error {
        webpki::Error::UnknownIssuer => {
            "the issuer is unknown, or an intermediate certificate is missing"
        }
        webpki::Error::InvalidSignatureForPublicKey => "another key made the signature",
        webpki::Error::CaUsedAsEndEntity => {
            "the certificate belongs to an authority, not to a workload"
        }
        webpki::Error::EndEntityUsedAsCa => "a workload's certificate signed it",
        webpki::Error::InvalidCrlSignatureForPublicKey => {
            "the list of revoked certificates of its issuer is signed by another key; replace the list"
        }
        #[expect(deprecated, reason = "`BothUses` makes it")]
        webpki::Error::RequiredEkuNotFound => {
            "its extended key usage must have both client and server authentication"
        }
        other => return other.to_string(),
    };
    cause.to_owned()
}

/// A time in UTC, as RFC 3339 writes it, without fractions of a second.
pub(crate) struct Shown(pub SystemTime);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::try_from(self.0) {
            Ok(time) => write!(f, "{time:.0}"),
            Err(_) => write!(f, "{:?}", self.0),
        }
    }
}

struct Listed<'a>(&'a [Identity]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, identity) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { " or " };
            write!(f, "{separator}{identity}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
