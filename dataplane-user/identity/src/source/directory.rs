//! Files of certificates that another program keeps: cert-manager's CSI driver, Vault's agent, mounted Secrets.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use model::Identity;
use pem::{Pem, encode};
use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::{
    issued::Issued,
    read::{certificates, key},
};

/// Reads the files of an identity: `DIRECTORY/NAMESPACE/ACCOUNT/{tls.crt,tls.key,ca.crt}`.
///
/// The program may be writing the files. The caller verifies that key and certificate belong together, and otherwise keeps its
/// certificate.
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

/// Returns the directory of an identity.
fn of(directory: &Path, identity: &Identity) -> Result<PathBuf, String> {
    let parts = [identity.namespace(), identity.account()];
    if parts.iter().any(|part| part.starts_with('.')) {
        return Err(
            "the namespace or the service account begins with a dot, so it has no directory"
                .to_owned(),
        );
    }
    Ok(parts
        .iter()
        .fold(directory.to_owned(), |path, part| path.join(part)))
}

impl Issued {
    /// Writes the files of an identity, as [`Source::Directory`](super::Source::Directory) reads them. Each file is replaced in
    /// one step, and only its owner can read the key. A reader that sees the new key and the old certificate reads again.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, directory: &Path, identity: &Identity) -> io::Result<()> {
        let directory = of(directory, identity).map_err(io::Error::other)?;
        fs::create_dir_all(&directory)?;
        let pem = |ders: &[CertificateDer<'_>]| -> String {
            let texts = ders
                .iter()
                .map(|der| encode(&Pem::new("CERTIFICATE", der.to_vec())));
            texts.collect()
        };
        let key = Zeroizing::new(self.key.secret_der().to_vec());
        let key = Zeroizing::new(encode(&Pem::new("PRIVATE KEY", key.to_vec())));
        for (name, mode, text) in [
            ("tls.key", 0o600, &*key),
            ("tls.crt", 0o644, &pem(&self.chain)),
            ("ca.crt", 0o644, &pem(&self.roots)),
        ] {
            let new = directory.join(format!(".{name}.new"));
            // The mode applies only to a new file.
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = File::options()
                .create_new(true)
                .write(true)
                .mode(mode)
                .open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, directory.join(name))?;
        }
        Ok(())
    }
}
