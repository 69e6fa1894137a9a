//! Which files there are, and what is in them.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use crate::file::{self, Fault};

/// The largest file that is read, in bytes. The objects of 100 000 services fit in a few such
/// files, and a file of the wrong kind (a disk image, a log) does not end up in memory.
pub const FILE_SIZE_MAX: u64 = 32 << 20;

/// The files at `paths`, each once, in the order of the paths and by name within a directory, and
/// the paths at which there is nothing to read, with the reason.
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
    /// The real paths of `files`: links, and paths that overlap, lead to one twice.
    real: BTreeSet<PathBuf>,
    /// The real paths of the directories below the path at hand: links may lead in circles.
    directories: BTreeSet<PathBuf>,
    /// How many manifests there were below the path at hand, new or not.
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
            // A name that is gone by now is a change, which the watcher reports.
            match fs::metadata(&child) {
                Ok(metadata) if metadata.is_dir() => self.directory(&child),
                _ if is_manifest(&child) => self.file(&child),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Among them `..data` and its like: the versions of a mounted ConfigMap, to which the visible
/// names link.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

fn is_manifest(path: &Path) -> bool {
    path.extension()
        .and_then(OsStr::to_str)
        .is_some_and(|extension| matches!(extension, "yaml" | "yml" | "json"))
}

/// A file's text, or what is wrong with it.
///
/// # Errors
/// The reason, in words: what the kernel says, or a file that is too large or no UTF-8.
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
