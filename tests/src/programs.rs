//! Where the programs of this workspace are that a lab runs.

use std::path::{Path, PathBuf};

use crate::error::{Doing, Error, Result};

/// A directory of built programs. `DATAPLANE_PROBE_BIN`, `DATAPLANE_BIN` and `DATAPLANE_MIGRATE_BIN` name others.
#[derive(Debug, Clone)]
pub struct Programs {
    directory: PathBuf,
}

impl Programs {
    /// The programs in a directory, such as `target/release`.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// The programs that were built with the running program: they are beside it, or above it when it is a test.
    ///
    /// # Errors
    /// When the operating system does not return its path.
    pub fn beside_this_one() -> Result<Self> {
        let own = std::env::current_exe().doing(|| "find this program's own path".into())?;
        let mut directory = own.parent().unwrap_or(Path::new("/")).to_owned();
        if directory.ends_with("deps") {
            directory.pop();
        }
        Ok(Self { directory })
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The lab's own program.
    ///
    /// # Errors
    /// When it has not been built.
    pub fn probe(&self) -> Result<PathBuf> {
        let build = "cargo build -p dataplane-tests --bin probe";
        self.find("probe", "DATAPLANE_PROBE_BIN", build)
    }

    /// The agent and its command line.
    ///
    /// # Errors
    /// When it has not been built.
    pub fn dataplane(&self) -> Result<PathBuf> {
        self.find("dataplane", "DATAPLANE_BIN", "cargo xtask build --debug")
    }

    /// The program that takes rules over.
    ///
    /// # Errors
    /// When it has not been built.
    pub fn migrate(&self) -> Result<PathBuf> {
        self.find(
            "dataplane-migrate",
            "DATAPLANE_MIGRATE_BIN",
            "cargo xtask build --debug",
        )
    }

    fn find(
        &self,
        name: &'static str,
        variable: &'static str,
        build: &'static str,
    ) -> Result<PathBuf> {
        let path =
            std::env::var_os(variable).map_or_else(|| self.directory.join(name), PathBuf::from);
        if path.is_file() {
            Ok(path)
        } else {
            Err(Error::NotBuilt {
                name,
                path,
                build,
                variable,
            })
        }
    }
}
