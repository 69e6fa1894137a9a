//! An authority of our own, for practice nodes, tests, and machines without a control plane.
//!
//! Its root is in a directory: `ca.crt`, and `ca.key`, which only its owner may read.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use model::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;
use zeroize::Zeroizing;

use super::{issued::Issued, private, read::certificates, request};
use crate::validity::Validity;

/// How long the root of a new authority is valid: ten years.
const ROOT_LIFETIME: Duration = Duration::from_hours(10 * 365 * 24);
/// How far certificates are valid before they are made, for clocks that are behind.
const BACKDATED: Duration = Duration::from_mins(2);

/// An authority cannot be made, read or used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file cannot be read or written.
    #[error("{path}: {error}{hint}", path = path.display(), hint = hint(error))]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// Others can read the key.
    #[error("{path}: others can read the key: chmod 600 {path}", path = .0.display())]
    Exposed(PathBuf),
    /// The certificate is no authority's.
    #[error("{0}")]
    Certificate(String),
    /// The authority signs identities of another trust domain.
    #[error("the authority of trust domain {own} does not sign {identity}")]
    Domain {
        /// The authority's trust domain.
        own: Box<str>,
        /// What it was asked to sign.
        identity: Identity,
    },
    /// A key or a certificate cannot be made.
    #[error("no certificate can be made: {0}")]
    Sign(#[from] rcgen::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; `dataplane ca init` makes an authority",
        io::ErrorKind::AlreadyExists => "; an authority is not replaced: remove it, or use it",
        _ => "",
    }
}

/// An authority that signs the identities of one trust domain.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    validity: Validity,
    trust_domain: Box<str>,
}

impl Authority {
    /// Makes the key and the root of a new authority, in a directory that has none.
    ///
    /// # Errors
    /// If there is an authority already, or the files cannot be written.
    pub fn create(
        directory: &Path,
        trust_domain: &str,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        Identity::new(trust_domain, "namespace", "account").map_err(|_| {
            AuthorityError::Certificate(format!("{trust_domain:?} is no trust domain"))
        })?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = rcgen::DistinguishedName::new();
        let name = format!("dataplane ca {trust_domain}");
        params.distinguished_name.push(DnType::CommonName, name);
        let uri = format!("spiffe://{trust_domain}");
        params.subject_alt_names = vec![SanType::URI(uri.as_str().try_into()?)];
        params.not_before = (now - BACKDATED).into();
        params.not_after = (now + ROOT_LIFETIME).into();
        let certificate = params.self_signed(&key)?;
        let (key_path, certificate_path) = files(directory);
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder
            .create(directory)
            .map_err(|error| AuthorityError::File {
                path: directory.to_owned(),
                error,
            })?;
        let pem = Zeroizing::new(key.serialize_pem());
        write_new(&key_path, 0o600, pem.as_bytes())?;
        write_new(&certificate_path, 0o644, certificate.pem().as_bytes())?;
        Self::open(directory)
    }

    /// Reads an authority.
    ///
    /// # Errors
    /// If there is none, if others can read its key, or if it is not one that [`create`](Self::create) made.
    pub fn open(directory: &Path) -> Result<Self, AuthorityError> {
        let (key_path, certificate_path) = files(directory);
        let at = |path: &Path| {
            let path = path.to_owned();
            move |error| AuthorityError::File { path, error }
        };
        let mode = fs::metadata(&key_path).map_err(at(&key_path))?;
        if mode.permissions().mode() & 0o077 != 0 {
            return Err(AuthorityError::Exposed(key_path));
        }
        let pem = fs::read_to_string(&key_path).map_err(at(&key_path))?;
        let key = KeyPair::from_pem(&Zeroizing::new(pem))?;
        let wrong = |what: &str| {
            AuthorityError::Certificate(format!("{}: {what}", certificate_path.display()))
        };
        let found = certificates(&certificate_path).map_err(AuthorityError::Certificate)?;
        let [certificate] = &found[..] else {
            return Err(wrong("expected one certificate"));
        };
        let read =
            EndEntityCert::try_from(certificate).map_err(|error| wrong(&error.to_string()))?;
        let mut uris = read.valid_uri_names();
        let (Some(uri), None) = (uris.next(), uris.next()) else {
            return Err(wrong("expected one URI, spiffe://TRUSTDOMAIN"));
        };
        let trust_domain = uri
            .strip_prefix("spiffe://")
            .ok_or_else(|| wrong("expected one URI, spiffe://TRUSTDOMAIN"))?;
        if read.subject_public_key_info().as_ref() != key.subject_public_key_info() {
            return Err(wrong("the key in ca.key is another certificate's"));
        }
        Ok(Self {
            trust_domain: trust_domain.into(),
            validity: Validity::of(certificate).map_err(|error| wrong(&error))?,
            issuer: Issuer::from_ca_cert_der(certificate, key)?,
            certificate: certificate.clone(),
        })
    }

    /// The trust domain whose identities it signs.
    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// The root.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// From when and until when the root is valid.
    pub fn validity(&self) -> (SystemTime, SystemTime) {
        (self.validity.not_before, self.validity.not_after)
    }

    /// Makes a key and a certificate of an identity, which is valid as long as asked for, and not longer than the root.
    ///
    /// # Errors
    /// If the identity belongs to another trust domain.
    pub fn issue(
        &self,
        identity: &Identity,
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<Issued, AuthorityError> {
        if identity.trust_domain() != &*self.trust_domain {
            return Err(AuthorityError::Domain {
                own: self.trust_domain.clone(),
                identity: identity.clone(),
            });
        }
        let (key, mut params) = request(identity)?;
        params.not_before = (now - BACKDATED).max(self.validity.not_before).into();
        let (end, asked) = (self.validity.not_after, now.checked_add(lifetime));
        params.not_after = asked.map_or(end, |asked| asked.min(end)).into();
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let certificate = params.signed_by(&*key, &self.issuer)?;
        Ok(Issued {
            chain: vec![certificate.der().clone()],
            key: private(&key),
            roots: vec![self.certificate.clone()],
        })
    }
}

fn files(directory: &Path) -> (PathBuf, PathBuf) {
    (directory.join("ca.key"), directory.join("ca.crt"))
}

fn write_new(path: &Path, mode: u32, bytes: &[u8]) -> Result<(), AuthorityError> {
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(bytes));
    written.map_err(|error| AuthorityError::File {
        path: path.to_owned(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::{
        Credential, Source,
        fixture::{HOUR, now},
    };

    #[test]
    fn an_authority_signs_the_identities_of_its_trust_domain() {
        let directory = TempDir::new().unwrap();
        let directory = directory.path().join("ca");
        let made = Authority::create(&directory, "cluster.local", now()).unwrap();
        let opened = Authority::open(&directory).unwrap();
        assert_eq!(opened.certificate(), made.certificate());
        assert_eq!(opened.trust_domain(), "cluster.local");
        let web: Identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        let issued = opened.issue(&web, HOUR, now()).unwrap();
        let provider = rustls::crypto::ring::default_provider();
        let credential = Credential::verify(&web, issued, now(), &provider).unwrap();
        assert_eq!(credential.not_after, now() + HOUR);

        // Not longer than the root.
        let (_, end) = opened.validity();
        let late = end - HOUR;
        let issued = opened.issue(&web, Duration::MAX, late).unwrap();
        let credential = Credential::verify(&web, issued, late, &provider).unwrap();
        assert_eq!(credential.not_after, end);

        let other = "spiffe://elsewhere/ns/shop/sa/web".parse().unwrap();
        let error = opened.issue(&other, HOUR, now()).err().unwrap();
        assert_eq!(
            error.to_string(),
            "the authority of trust domain cluster.local does not sign spiffe://elsewhere/ns/shop/sa/web"
        );
    }

    #[test]
    fn what_is_issued_can_be_read() {
        let directory = TempDir::new().unwrap();
        let authority = Authority::create(directory.path(), "cluster.local", now()).unwrap();
        let web: Identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        let out = directory.path().join("out");
        for _ in 0..2 {
            let issued = authority.issue(&web, HOUR, now()).unwrap();
            issued.write(&out, &web).unwrap();
            let mode = fs::metadata(out.join("shop/web/tls.key")).unwrap();
            assert_eq!(mode.permissions().mode() & 0o777, 0o600);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            let provider = rustls::crypto::ring::default_provider();
            let source = Source::Directory(out.clone());
            let read = runtime.block_on(source.issue(&web, now(), &provider));
            let read = read.unwrap();
            assert_eq!(read.chain, issued.chain);
            Credential::verify(&web, read, now(), &provider).unwrap();
        }
    }

    #[test]
    fn an_authority_is_neither_replaced_nor_exposed() {
        let directory = TempDir::new().unwrap();
        let directory = directory.path();
        assert!(
            Authority::open(directory)
                .err()
                .unwrap()
                .to_string()
                .contains("dataplane ca init")
        );
        Authority::create(directory, "cluster.local", now()).unwrap();
        let again = Authority::create(directory, "cluster.local", now());
        assert!(again.err().unwrap().to_string().contains("is not replaced"));
        let key = directory.join("ca.key");
        let mode = |mode| fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o640);
        assert!(
            matches!(Authority::open(directory), Err(AuthorityError::Exposed(path)) if path == key)
        );
        mode(0o600);
        Authority::open(directory).unwrap();
        let other = TempDir::new().unwrap();
        Authority::create(other.path(), "cluster.local", now()).unwrap();
        fs::copy(other.path().join("ca.crt"), directory.join("ca.crt")).unwrap();
        let error = Authority::open(directory).err().unwrap();
        assert!(
            error.to_string().contains("another certificate's"),
            "{error}"
        );
        assert!(Authority::create(&directory.join("new"), "no/domain", now()).is_err());
    }
}
