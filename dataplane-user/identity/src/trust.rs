//! Roots and lists of revoked certificates in files of an operator.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use x509_parser::{prelude::FromDer as _, revocation_list::CertificateRevocationList};

use crate::{
    Roots, Verifier,
    source::{certificates, revoked},
    validity::at,
};

/// Files of roots and of revoked certificates.
#[derive(Clone, Debug, Default)]
pub struct TrustFiles {
    /// PEM files of roots, by trust domain. They replace the roots from the source of that trust domain.
    pub roots: BTreeMap<Arc<str>, Vec<PathBuf>>,
    /// PEM files of lists of revoked certificates (`X509 CRL`).
    pub revoked: Vec<PathBuf>,
}

/// The contents of the files.
pub(crate) struct Trust {
    pub roots: Roots,
    /// The times at which newer lists are due, with the files of the lists.
    pub next_updates: Vec<(PathBuf, SystemTime)>,
}

impl TrustFiles {
    /// Reads all files.
    ///
    /// # Errors
    /// If a file cannot be read or has no certificate or list.
    pub(crate) fn read(&self) -> Result<Trust, String> {
        let check = |path: &Path, of_file: &Roots| match Verifier::new(of_file) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("{}: {error}", path.display())),
        };
        let mut read = Roots::default();
        let mut next_updates = Vec::new();
        for (domain, files) in &self.roots {
            let roots = read.by_domain.entry(domain.clone()).or_default();
            for path in files {
                let of_file = Roots {
                    by_domain: [(domain.clone(), certificates(path)?)].into(),
                    revoked: Vec::new(),
                };
                check(path, &of_file)?;
                roots.extend(of_file.by_domain.into_values().flatten());
            }
        }
        for path in &self.revoked {
            let of_file = Roots {
                by_domain: BTreeMap::new(),
                revoked: revoked(path)?,
            };
            check(path, &of_file)?;
            for list in &of_file.revoked {
                let read = CertificateRevocationList::from_der(list).ok();
                let next = read.and_then(|(_, list)| list.next_update());
                next_updates.extend(next.map(|next| (path.clone(), at(next))));
            }
            read.revoked.extend(of_file.revoked);
        }
        Ok(Trust {
            roots: read,
            next_updates,
        })
    }

    /// Returns the directories of the files.
    pub(crate) fn directories(&self) -> impl Iterator<Item = &Path> {
        let files = self.roots.values().flatten().chain(&self.revoked);
        files.filter_map(|path| path.parent())
    }
}
