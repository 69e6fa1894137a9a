//! The journal: the state of a take-over, on disk. If a command was killed, the next command reads the journal and
//! finishes the work or undoes it.

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

/// The directory of the saved rules and of the node's journal.
pub const DIRECTORY: &str = "/var/lib/dataplane/takeover";
/// Prefix of the directories with the journals of network namespaces. The namespace's cookie and the owner follow:
/// `netns-4711-istio`.
pub const OF_NETNS: &str = "netns-";
/// The journal's file name.
const JOURNAL: &str = "journal.json";
/// The lock file's name. A command holds a lock on this file while it changes rules or the journal.
const LOCK: &str = "lock";

/// The state of a take-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The command is removing rules: some may be gone. The dataplane serves all services.
    Removing,
    /// The rules are removed.
    TakenOver,
    /// The command is restoring rules: some may be present. The dataplane serves all services.
    Restoring,
    /// The rules are restored. The dataplane may serve beside them.
    Restored,
}

/// The journal of one take-over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// The state.
    pub state: State,
    /// The file with the saved rules.
    pub file: PathBuf,
    /// The file's SHA-256, as `sha256sum` prints it.
    pub sha256: String,
    /// The time at which the rules were saved: `2026-11-26T20:15:00Z`.
    pub saved: String,
    /// The kernel's boot ID when the journal was written (`/proc/sys/kernel/random/boot_id`): it changes with every
    /// boot.
    #[serde(default)]
    pub boot: String,
}

fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_default().trim().to_owned()
}

impl Journal {
    /// Reads the journal in a directory. Returns `None` if the directory has no journal.
    ///
    /// # Errors
    /// If the file cannot be read, or does not contain a journal.
    pub fn read(directory: &Path) -> io::Result<Option<Self>> {
        let path = directory.join(JOURNAL);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|error| at(&path, &error))?,
        };
        let journal = serde_json::from_str(&text).map_err(|error| at(&path, &error))?;
        Ok(Some(journal))
    }

    /// Writes the journal with a state, in one step, and syncs it to the disk, with the ID of the current boot.
    ///
    /// # Errors
    /// If the journal cannot be written. The old journal then remains.
    pub fn write(&self, state: State, directory: &Path) -> io::Result<()> {
        let journal = Self {
            state,
            boot: boot(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&journal).map_err(io::Error::other)? + "\n";
        may_die();
        replace(&directory.join(JOURNAL), &text)?;
        may_die();
        Ok(())
    }

    /// Removes the journal when no work is left to finish or to undo. The file with the saved rules stays.
    ///
    /// # Errors
    /// If the journal cannot be removed.
    pub fn remove(directory: &Path) -> io::Result<()> {
        may_die();
        let path = directory.join(JOURNAL);
        fs::remove_file(&path).map_err(|error| at(&path, &error))?;
        sync(directory)
    }

    /// Returns true if the kernel lacks some or all of the rules, so that only the saved file has them. A reboot clears
    /// the kernel's rules: rules found after a reboot were written by their owner since. A take-over interrupted before
    /// the reboot therefore does not count.
    pub fn has_the_rules(&self) -> bool {
        match self.state {
            State::TakenOver => true,
            State::Removing | State::Restoring => self.boot == boot(),
            State::Restored => false,
        }
    }

    /// Returns true if the journal was written since the last boot.
    pub fn is_of_this_boot(&self) -> bool {
        self.boot == boot()
    }

    /// Returns the cookies of the network namespaces whose rules are removed, from the journals below a node's
    /// directory.
    ///
    /// # Errors
    /// If a journal cannot be read.
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

/// Creates the directory and locks it: no other command can change rules or the journal until the lock is dropped.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another command holds the lock; another kind if the directory or the lock file
/// cannot be created.
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
        journal.write(State::TakenOver, path).unwrap();
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
