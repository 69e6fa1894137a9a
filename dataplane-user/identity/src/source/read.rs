//! Reads files of certificates, keys and tokens. Errors name the file.

use std::{
    fs::OpenOptions,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use nix::fcntl::OFlag;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer,
    pem::{self, PemObject},
};
use zeroize::Zeroizing;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

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

/// Reads a regular file of at most 1 MiB. Opens it without waiting, because a FIFO without a writer would hold up all
/// certificates.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    let read = || {
        let mut options = OpenOptions::new();
        options.read(true);
        let file = options.custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        // A buffer that grew would leave parts of a key behind.
        let size = usize::try_from(found.len().min(LARGEST)).unwrap_or_default() + 1;
        let mut text = Vec::with_capacity(size);
        file.take(LARGEST + 1).read_to_end(&mut text)?;
        if text.len() as u64 > LARGEST {
            return Err(io::Error::other("the file has more than 1 MiB"));
        }
        Ok(text)
    };
    read().map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn only_regular_files_of_up_to_one_mebibyte_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name| directory.path().join(name);
        mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        fs::write(at("full"), vec![b'a'; 1 << 20]).unwrap();
        fs::write(at("more"), vec![b'a'; (1 << 20) + 1]).unwrap();
        assert_eq!(read(&at("full")).unwrap().len(), 1 << 20);
        for (name, wanted) in [
            ("fifo", "not a regular file"),
            ("", "not a regular file"),
            ("more", "more than 1 MiB"),
            ("none", "No such file"),
        ] {
            let error = read(&at(name)).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
