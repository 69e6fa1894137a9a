//! Authorities and certificates for tests.

use std::time::{Duration, SystemTime};

use model::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SanType, SerialNumber,
};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};

use crate::{PeerError, Roots, Verifier};

/// The time of all tests: 2026-01-01.
pub fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_hours(490_896)
}

pub const HOUR: Duration = Duration::from_hours(1);

/// Verifies the chain of a peer.
pub fn verify_peer(
    chain: &[CertificateDer<'_>],
    time: SystemTime,
    roots: &Roots,
) -> Result<Identity, PeerError> {
    Verifier::new(roots).unwrap().verify(chain, time)
}

/// An authority, valid from a day before now until a day after.
pub struct Authority(pub CertifiedIssuer<'static, KeyPair>);

fn authority() -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (now() - 24 * HOUR).into();
    params.not_after = (now() + 24 * HOUR).into();
    params
}

/// The contents of a workload's certificate, by default an hour old and valid for two hours.
pub struct Leaf {
    pub uris: Vec<String>,
    pub from: SystemTime,
    pub to: SystemTime,
    pub uses: Vec<ExtendedKeyUsagePurpose>,
    pub serial: u64,
    pub is_ca: bool,
}

impl Leaf {
    pub fn of(uri: &str) -> Self {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        Self {
            uris: vec![uri.to_owned()],
            from: now() - HOUR,
            to: now() + HOUR,
            uses: vec![ServerAuth, ClientAuth],
            serial: 7,
            is_ca: false,
        }
    }
}

impl Authority {
    /// An authority that signs itself. All have the same name, as roots of Istio have that were replaced.
    pub fn new() -> Self {
        Self::of(authority())
    }

    /// An authority with a name of its own.
    pub fn named(name: &str) -> Self {
        let mut params = authority();
        params.distinguished_name.push(DnType::CommonName, name);
        Self::of(params)
    }

    fn of(params: CertificateParams) -> Self {
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn expired() -> Self {
        let mut params = authority();
        params.not_after = (now() - HOUR).into();
        Self::of(params)
    }

    pub fn intermediate(&self) -> Self {
        let mut params = authority();
        params
            .distinguished_name
            .push(DnType::CommonName, "intermediate");
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::signed_by(params, key, &self.0).unwrap())
    }

    pub fn der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    pub fn sign(&self, leaf: &Leaf, key: &KeyPair) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        let uri = |uri: &String| SanType::URI(uri.as_str().try_into().unwrap());
        params.subject_alt_names = leaf.uris.iter().map(uri).collect();
        params.not_before = leaf.from.into();
        params.not_after = leaf.to.into();
        params.extended_key_usages.clone_from(&leaf.uses);
        params.serial_number = Some(SerialNumber::from(leaf.serial));
        if leaf.is_ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params.signed_by(key, &self.0).unwrap().der().clone()
    }

    /// A certificate with a new key, which is dropped.
    pub fn certify(&self, leaf: &Leaf) -> CertificateDer<'static> {
        self.sign(leaf, &KeyPair::generate().unwrap())
    }

    /// A list of revoked certificates, valid for half an hour.
    pub fn revoke(&self, serials: &[u64]) -> CertificateRevocationListDer<'static> {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: (now() - HOUR).into(),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: (now() - HOUR).into(),
            next_update: (now() + HOUR / 2).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.0).unwrap().into()
    }
}

pub fn roots(of: &[(&str, &Authority)]) -> Roots {
    let mut roots = Roots::default();
    for (domain, authority) in of {
        let of_domain = roots.by_domain.entry((*domain).into()).or_default();
        of_domain.push(authority.der());
    }
    roots
}
