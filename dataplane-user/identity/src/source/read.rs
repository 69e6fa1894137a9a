//! Reads PEM files. Errors name the file.

use std::{fs, path::Path};

use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer,
    pem::{self, PemObject},
};
use zeroize::Zeroizing;

/// Reads the certificates of a file.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    all(path, "certificate")
}

/// Reads the lists of revoked certificates of a file.
pub fn revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    all(path, "list of revoked certificates (X509 CRL)")
}

/// Reads the key of a file.
pub fn key(path: &Path) -> Result<Zeroizing<PrivateKeyDer<'static>>, String> {
    let text = Zeroizing::new(read(path)?);
    // The error could quote the file.
    PrivateKeyDer::from_pem_slice(&text)
        .map(Zeroizing::new)
        .map_err(|_| format!("{}: no private key in PEM", path.display()))
}

fn all<T: PemObject>(path: &Path, what: &str) -> Result<Vec<T>, String> {
    let text = read(path)?;
    let items: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&text).collect();
    let items = items.map_err(|error| format!("{}: {error}", path.display()))?;
    if items.is_empty() {
        return Err(format!("{}: no {what} in PEM", path.display()));
    }
    Ok(items)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}
