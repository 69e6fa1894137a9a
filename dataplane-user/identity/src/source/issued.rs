//! A certificate, before it is verified.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use model::Identity;
use pem::{Pem, encode};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use super::directory;

/// A certificate that a source gave. It has no `Debug`: a log must not have the key.
pub struct Issued {
    /// The certificate, and those between it and a root.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: Zeroizing<PrivateKeyDer<'static>>,
    /// The roots of the identity's trust domain, as the source says.
    pub roots: Vec<CertificateDer<'static>>,
}

impl Issued {
    /// Writes the files of an identity, as [`Source::Directory`](super::Source::Directory) reads them. Each file is replaced in
    /// one step, and only its owner can read the key. A reader that sees the new key and the old certificate reads again.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, directory: &Path, identity: &Identity) -> io::Result<()> {
        let directory = directory::of(directory, identity).map_err(io::Error::other)?;
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
            // The mode is that of a new file.
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
