//! What a take-over has come to, on disk: a command that was killed is finished, or undone, by the next one.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::{
    disk::{at, replace, sync},
    may_die,
};

/// Where rules and the journal are kept.
pub const DIRECTORY: &str = "/var/lib/dataplane/takeover";
/// How the directories begin that have the journals of network namespaces; a cookie and an owner follow: `netns-4711-istio`.
pub const OF_NETNS: &str = "netns-";
/// The journal's file.
const JOURNAL: &str = "journal.json";
/// The file that whoever changes something holds a lock on.
const LOCK: &str = "lock";

/// How far a take-over has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Rules are being removed: some may have gone. The dataplane serves all services.
    Removing,
    /// The rules have gone.
    TakenOver,
    /// Rules are being brought back: some may be there. The dataplane serves all services.
    Restoring,
    /// The rules are back. The dataplane may serve beside them.
    Restored,
}

/// The journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// How far it has come.
    pub state: State,
    /// The file with the rules as they were.
    pub file: PathBuf,
    /// The file's SHA-256, as `sha256sum` prints it.
    pub sha256: String,
    /// When the rules were saved: `2026-11-26T20:15:00Z`.
    pub saved: String,
    /// The kernel's name for the time since its start, when the journal was written (`/proc/sys/kernel/random/boot_id`).
    #[serde(default)]
    pub boot: String,
}

fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_default().trim().to_owned()
}

impl Journal {
    /// Reads the journal in a directory. `None`: there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not a journal.
    pub fn read(directory: &Path) -> io::Result<Option<Self>> {
        let path = directory.join(JOURNAL);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| at(&path, &error))?,
        };
        let journal = serde_json::from_str(&text).map_err(|error| at(&path, &error))?;
        Ok(Some(journal))
    }

    /// Writes the journal, in one step and onto the disk.
    ///
    /// # Errors
    /// It cannot be written. The journal is then as before.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let journal = Self {
            boot: boot(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&journal).map_err(io::Error::other)? + "\n";
        may_die();
        replace(&directory.join(JOURNAL), &text)?;
        may_die();
        Ok(())
    }

    /// Removes the journal, once nothing is left to be finished or undone. The file with the rules stays.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(directory: &Path) -> io::Result<()> {
        may_die();
        let path = directory.join(JOURNAL);
        fs::remove_file(&path).map_err(|error| at(&path, &error))?;
        sync(directory)
    }

    /// Whether the file has the rules, and the kernel has none or some of them. After a restart of the machine, the kernel has what
    /// somebody has written since.
    pub fn has_the_rules(&self) -> bool {
        match self.state {
            State::TakenOver => true,
            State::Removing | State::Restoring => self.boot == boot(),
            State::Restored => false,
        }
    }

    /// Whether it was written since the machine's last start.
    pub fn is_of_this_boot(&self) -> bool {
        self.boot == boot()
    }

    /// The network namespaces, by their cookies, whose rules have gone by journals below a node's directory.
    ///
    /// # Errors
    /// A journal cannot be read.
    pub fn of_namespaces(directory: &Path) -> io::Result<Vec<u64>> {
        let mut cookies = Vec::new();
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(cookies),
            entries => entries.map_err(|error| at(directory, &error))?,
        };
        for entry in entries {
            let entry = entry.map_err(|error| at(directory, &error))?;
            let name = entry.file_name();
            let cookie = (name.to_str())
                .and_then(|name| name.strip_prefix(OF_NETNS)?.split('-').next()?.parse().ok());
            let Some(cookie) = cookie else { continue };
            let journal = Self::read(&entry.path())?;
            if journal.is_some_and(|journal| journal.is_of_this_boot() && journal.has_the_rules()) {
                cookies.push(cookie);
            }
        }
        Ok(cookies)
    }
}

/// Makes the directory, and keeps other commands from changing something in it while the lock is there.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`]: another command has it. Otherwise the directory cannot be made.
pub fn lock(directory: &Path) -> io::Result<Flock<File>> {
    fs::create_dir_all(directory).map_err(|error| at(directory, &error))?;
    let path = directory.join(LOCK);
    let file = File::options().create(true).append(true).open(&path);
    let file = file.map_err(|error| at(&path, &error))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_no_journal_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(Journal::read(path).unwrap(), None);
        let journal = Journal {
            state: State::TakenOver,
            file: path.join("rules"),
            sha256: "00".to_owned(),
            saved: "2026-11-26T20:15:00Z".to_owned(),
            boot: boot(),
        };
        journal.write(path).unwrap();
        assert_eq!(Journal::read(path).unwrap(), Some(journal.clone()));
        for text in ["", "{}", "{\"state\": \"gone\"}"] {
            fs::write(path.join(JOURNAL), text).unwrap();
            let why = Journal::read(path).unwrap_err().to_string();
            assert!(why.contains(JOURNAL), "{why}");
        }
        Journal::remove(path).unwrap();
        assert_eq!(Journal::read(path).unwrap(), None);
    }

    #[test]
    fn one_command_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock(directory.path()).unwrap();
        let busy = lock(directory.path()).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::WouldBlock);
        drop(held);
        lock(directory.path()).unwrap();
    }
}
