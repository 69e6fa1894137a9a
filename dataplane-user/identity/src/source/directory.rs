//! Files of certificates that another program keeps: cert-manager's CSI driver, Vault's agent, mounted Secrets.

use std::path::{Path, PathBuf};

use model::Identity;

use super::{
    Issued,
    read::{certificates, key},
};

/// Reads the files of an identity: `DIRECTORY/NAMESPACE/ACCOUNT/{tls.crt,tls.key,ca.crt}`.
///
/// What is there may be half-written: then the caller, who verifies that key and certificate are a pair, keeps what it has.
pub fn read(directory: &Path, identity: &Identity) -> Result<Issued, String> {
    let directory = of(directory, identity)?;
    // The kubelet replaces this link, so that all files change at once: resolve it once.
    let directory = directory.join("..data").canonicalize().unwrap_or(directory);
    Ok(Issued {
        chain: certificates(&directory.join("tls.crt"))?,
        key: key(&directory.join("tls.key"))?,
        roots: certificates(&directory.join("ca.crt"))?,
    })
}

/// The directory of an identity.
pub fn of(directory: &Path, identity: &Identity) -> Result<PathBuf, String> {
    let parts = [identity.namespace(), identity.account()];
    if parts.iter().any(|part| part.starts_with('.')) {
        return Err("names with a leading dot have no directory".to_owned());
    }
    Ok(parts
        .iter()
        .fold(directory.to_owned(), |path, part| path.join(part)))
}
