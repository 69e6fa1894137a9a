//! Finds manifests and reads them.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use crate::file::{self, Fault};

/// Maximum size of a file in bytes. A few such files hold the objects of 100 000 services, and a wrong file (a disk
/// image, a log) does not fill the memory.
pub const FILE_SIZE_MAX: u64 = 32 << 20;

/// Returns the files at `paths`, each once, in the order of the paths and by name within a directory. Also returns the
/// paths without a manifest, with the reason.
pub fn find(paths: &[PathBuf]) -> (Vec<PathBuf>, Vec<(PathBuf, String)>) {
    let mut found = Found::default();
    for path in paths {
        match fs::metadata(path) {
            Err(error) => found.faults.push((path.clone(), unreadable(&error))),
            Ok(metadata) if metadata.is_dir() => {
                found.met = 0;
                found.directories.clear();
                found.directory(path);
                if found.met == 0 && found.faults.is_empty() {
                    found.faults.push((
                        path.clone(),
                        "no manifest in this directory; expected *.yaml, *.yml or *.json (to \
                         serve nothing, write `{apiVersion: v1, kind: List, items: []}`)"
                            .into(),
                    ));
                }
            }
            Ok(_) => found.file(path),
        }
    }
    (found.files, found.faults)
}

#[derive(Default)]
struct Found {
    files: Vec<PathBuf>,
    faults: Vec<(PathBuf, String)>,
    /// The real paths of `files`, because links and overlapping paths may lead to one file twice.
    real: BTreeSet<PathBuf>,
    /// The real paths of the directories below the current path, because links may form circles.
    directories: BTreeSet<PathBuf>,
    /// Number of manifests below the current path, new or not.
    met: usize,
}

impl Found {
    fn file(&mut self, path: &Path) {
        self.met += 1;
        match path.canonicalize() {
            Err(error) => self.faults.push((path.to_owned(), unreadable(&error))),
            Ok(real) => {
                if self.real.insert(real) {
                    self.files.push(path.to_owned());
                }
            }
        }
    }

    fn directory(&mut self, path: &Path) {
        let result = path.canonicalize().and_then(|real| {
            if self.directories.insert(real) {
                self.entries(path)
            } else {
                Ok(())
            }
        });
        if let Err(error) = result {
            self.faults.push((path.to_owned(), unreadable(&error)));
        }
    }

    fn entries(&mut self, path: &Path) -> io::Result<()> {
        let mut names: Vec<_> = fs::read_dir(path)?
            .map(|entry| Ok(entry?.file_name()))
            .collect::<io::Result<_>>()?;
        names.sort_unstable();
        for name in names.into_iter().filter(|name| !is_hidden(name)) {
            let child = path.join(name);
            // A name that was removed in the meantime is a change, which the watcher reports.
            match fs::metadata(&child) {
                Ok(metadata) if metadata.is_dir() => self.directory(&child),
                _ if is_manifest(&child) => self.file(&child),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns whether a name is hidden. `..data` and similar names are the versions of a mounted ConfigMap, and the
/// visible names link to them.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

fn is_manifest(path: &Path) -> bool {
    path.extension()
        .and_then(OsStr::to_str)
        .is_some_and(|extension| matches!(extension, "yaml" | "yml" | "json"))
}

/// Returns the text of a file.
///
/// # Errors
///
/// The reason, as a text: the kernel's error, or a file that is too large or not UTF-8.
pub fn read(path: &Path) -> Result<String, String> {
    file::read(path, FILE_SIZE_MAX).map_err(|fault| {
        let hint = match fault {
            Fault::Unreadable(_) => "",
            Fault::NotRegular => "; expected a file with manifests",
            Fault::TooLarge(..) => ": split it into several in a directory",
            Fault::NotUtf8(_) => "; expected YAML or JSON in UTF-8",
        };
        format!("{fault}{hint}")
    })
}

fn unreadable(error: &io::Error) -> String {
    format!("cannot be read: {error}")
}
