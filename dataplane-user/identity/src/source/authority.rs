//! The project's own authority (`dataplane ca`), for practice nodes, tests, and machines without a control plane.
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

use super::{
    issued::Issued,
    private,
    read::{certificates, key},
    request,
};
use crate::validity::Validity;

/// Lifetime of the root of a new authority: ten years.
const ROOT_LIFETIME: Duration = Duration::from_hours(10 * 365 * 24);
/// Time between the start of a certificate's validity and its signing, for clocks that are behind.
const BACKDATED: Duration = Duration::from_mins(2);

/// An error of an authority.
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
    /// Users other than its owner can access the key.
    #[error("{path}: users other than the owner can access the key; run chmod 600 {path}", path = .0.display())]
    Exposed(PathBuf),
    /// The key, the certificate or the trust domain cannot be used.
    #[error("{0}")]
    Unusable(String),
    /// The authority signs identities of another trust domain.
    #[error("the authority of trust domain {own} does not sign {identity}")]
    Domain {
        /// The authority's trust domain.
        own: Box<str>,
        /// The requested identity.
        identity: Identity,
    },
    /// A key or a certificate cannot be made.
    #[error("cannot make a key or a certificate: {0}")]
    Sign(#[from] rcgen::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; `dataplane ca init` makes an authority",
        io::ErrorKind::AlreadyExists => {
            "; the directory has an authority, which is not replaced; use it, or remove the files"
        }
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
    /// If the directory has an authority, or the files cannot be written.
    pub fn create(
        directory: &Path,
        trust_domain: &str,
        now: SystemTime,
    ) -> Result<Self, AuthorityError> {
        Identity::new(trust_domain, "namespace", "account").map_err(|_| {
            AuthorityError::Unusable(format!(
                "{trust_domain:?} is not a trust domain; expected a name such as cluster.local"
            ))
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
        // Before the key is written, so that a directory with a certificate stays as it is.
        if certificate_path.exists() {
            return Err(AuthorityError::File {
                path: certificate_path,
                error: io::ErrorKind::AlreadyExists.into(),
            });
        }
        write_new(&key_path, 0o600, pem.as_bytes())?;
        write_new(&certificate_path, 0o644, certificate.pem().as_bytes())?;
        Self::open(directory)
    }

    /// Reads an authority.
    ///
    /// # Errors
    /// If the directory has no authority that [`create`](Self::create) made, or if users other than its owner can access the
    /// key.
    pub fn open(directory: &Path) -> Result<Self, AuthorityError> {
        let (key_path, certificate_path) = files(directory);
        let mode = fs::metadata(&key_path).map_err(|error| AuthorityError::File {
            path: key_path.clone(),
            error,
        })?;
        if mode.permissions().mode() & 0o077 != 0 {
            return Err(AuthorityError::Exposed(key_path));
        }
        let key = key(&key_path).map_err(AuthorityError::Unusable)?;
        let key = KeyPair::try_from(&*key)?;
        let wrong = |reason: &str| {
            AuthorityError::Unusable(format!("{}: {reason}", certificate_path.display()))
        };
        let found = certificates(&certificate_path).map_err(AuthorityError::Unusable)?;
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
            return Err(wrong("ca.key is the key of another certificate"));
        }
        Ok(Self {
            trust_domain: trust_domain.into(),
            validity: Validity::of(certificate).map_err(|error| wrong(&error))?,
            issuer: Issuer::from_ca_cert_der(certificate, key)?,
            certificate: certificate.clone(),
        })
    }

    /// Returns the trust domain whose identities the authority signs.
    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// Returns the start and the end of the root's validity.
    pub fn validity(&self) -> (SystemTime, SystemTime) {
        (self.validity.not_before, self.validity.not_after)
    }

    /// Makes a key and a certificate of an identity. The certificate is valid for `lifetime`, and not longer than the root.
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
        assert_eq!(opened.certificate, made.certificate);
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
    fn an_issued_certificate_can_be_read() {
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
        fs::rename(&key, directory.join("away")).unwrap();
        assert!(Authority::create(directory, "cluster.local", now()).is_err());
        fs::rename(directory.join("away"), &key).unwrap();
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
            error.to_string().contains("of another certificate"),
            "{error}"
        );
        assert!(Authority::create(&directory.join("new"), "no/domain", now()).is_err());
    }
}
