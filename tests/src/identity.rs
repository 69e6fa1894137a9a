//! The owners of labs, and the removal of a lab: by its owner, or by a later process when its owner died.
//!
//! Everything that a lab makes outside of its process carries the lab's id in its name, and the id carries the
//! creator's pid and start time. So any process can distinguish a living creator's lab, which is left alone, from a
//! dead creator's, and a reused pid does not deceive it.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use nix::mount::{MntFlags, umount2};

use crate::{
    error::{Doing, Error, Result},
    netns::{self, NETNS_DIR},
    patience::patience,
    requirements::cgroup2_mount,
};

const STATE_DIR: &str = "/run/dataplane-lab";
const CGROUP: &str = "dataplane-lab";
const NETNS_PREFIX: &str = "dplab-";

/// A lab's name: unique on this machine, with the creator of the lab in it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabId {
    pid: u32,
    /// Start of the process `pid`, in clock ticks since boot.
    started: u64,
    /// Distinguishes the labs of one process.
    nonce: String,
}

/// Whether the process that made a lab still runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreatorState {
    /// It runs; the lab is its own business.
    Alive,
    /// The process is gone; only a sweep removes the lab.
    Dead,
}

impl LabId {
    /// A new id for a lab of this process.
    pub(crate) fn new() -> Result<Self> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let pid = std::process::id();
        let started = start_time(pid)
            .ok_or_else(|| Error::Requirement("cannot read /proc/self/stat: mount /proc".into()))?;
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let random: u16 = rand::random();
        Ok(Self {
            pid,
            started,
            nonce: format!("{count}x{random:04x}"),
        })
    }

    /// The labs that left a trace on this machine, of living and dead creators.
    pub fn all() -> BTreeSet<Self> {
        let mut found = BTreeSet::new();
        for name in names_in(NETNS_DIR) {
            found.extend(
                name.strip_prefix(NETNS_PREFIX)
                    .and_then(|id| id.parse().ok()),
            );
        }
        found.extend(names_in(STATE_DIR).iter().filter_map(|id| id.parse().ok()));
        if let Ok(mount) = cgroup2_mount() {
            found.extend(
                names_in(mount.join(CGROUP))
                    .iter()
                    .filter_map(|id| id.parse().ok()),
            );
        }
        found
    }

    /// The process that made the lab.
    pub fn creator(&self) -> u32 {
        self.pid
    }

    /// Whether that process still runs.
    pub fn creator_state(&self) -> CreatorState {
        if start_time(self.pid) == Some(self.started) {
            CreatorState::Alive
        } else {
            CreatorState::Dead
        }
    }

    /// The name of the network namespace of one of the lab's hosts.
    pub(crate) fn netns(&self, host: &str) -> String {
        format!("{NETNS_PREFIX}{self}-{host}")
    }

    /// The lab's cgroup; those of its hosts are below.
    ///
    /// # Errors
    /// When cgroup v2 is mounted nowhere.
    pub(crate) fn cgroup(&self) -> Result<PathBuf> {
        Ok(cgroup2_mount()?.join(CGROUP).join(self.to_string()))
    }

    /// The directory of the lab's sockets, logs and pins.
    pub fn state_dir(&self) -> PathBuf {
        Path::new(STATE_DIR).join(self.to_string())
    }

    /// Where the lab mounts a BPF file system of its own: unmounting it removes every pin.
    pub(crate) fn bpffs(&self) -> PathBuf {
        self.state_dir().join("bpffs")
    }

    /// Ends the lab's processes and removes everything that it made. Goes on after an error, to remove as much as
    /// possible, and returns the first error.
    pub(crate) fn remove(&self) -> Result<()> {
        let mut first = Ok(());
        let mut note = |result: Result<()>| {
            if first.is_ok() {
                first = result;
            }
        };
        let cgroup = self.cgroup();
        if let Ok(cgroup) = &cgroup {
            note(kill_all(cgroup));
        }
        let bpffs = self.bpffs();
        // More than one mount may be stacked there when an agent mounted its own.
        while umount2(&bpffs, MntFlags::MNT_DETACH).is_ok() {}
        let prefix = self.netns("");
        let namespaces: Vec<String> = names_in(NETNS_DIR)
            .into_iter()
            .filter(|name| name.starts_with(&prefix))
            .collect();
        note(netns::delete(&namespaces));
        if let Ok(cgroup) = &cgroup {
            note(remove_tree(cgroup));
            let _ = cgroup.parent().map(fs::remove_dir);
        }
        let state = self.state_dir();
        note(
            ignore_missing(fs::remove_dir_all(&state))
                .doing(|| format!("remove {}", state.display())),
        );
        let _ = fs::remove_dir(STATE_DIR);
        first
    }
}

impl fmt::Display for LabId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.pid, self.started, self.nonce)
    }
}

impl FromStr for LabId {
    type Err = ();

    /// Reads an id, and ignores what follows it after another dash (a host's name).
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.splitn(4, '-');
        let mut next = || parts.next().ok_or(());
        let pid = next()?.parse().map_err(drop)?;
        let started = next()?.parse().map_err(drop)?;
        let nonce = next()?.to_owned();
        if nonce.is_empty() {
            return Err(());
        }
        Ok(Self {
            pid,
            started,
            nonce,
        })
    }
}

/// Removes the labs whose creator died without removing them (SIGKILL, Ctrl-C in a test).
/// Returns their ids. Errors are ignored: another process may be sweeping the same lab.
pub fn sweep() -> Vec<LabId> {
    let dead: Vec<LabId> = LabId::all()
        .into_iter()
        .filter(|id: &LabId| id.creator_state() == CreatorState::Dead)
        .collect();
    for id in &dead {
        let _ = id.remove();
    }
    dead
}

/// Returns when a process started, in clock ticks since boot; `None` when there is no such process.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // proc(5): the second field is the name in parentheses and may hold anything, the third
    // (the first one here) is the state, the 22nd the start time.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    // A zombie has ended: it will not remove anything any more.
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn names_in(directory: impl AsRef<Path>) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Kills every process in the cgroup and below it, and waits until they are gone.
fn kill_all(cgroup: &Path) -> Result<()> {
    if !cgroup.exists() {
        return Ok(());
    }
    ignore_missing(fs::write(cgroup.join("cgroup.kill"), "1"))
        .doing(|| format!("kill the processes in {}", cgroup.display()))?;
    let limit = Instant::now() + patience(Duration::from_mins(1));
    loop {
        let events = fs::read_to_string(cgroup.join("cgroup.events")).unwrap_or_default();
        if !events.contains("populated 1") {
            return Ok(());
        }
        if Instant::now() > limit {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .doing(|| format!("wait for the end of the processes in {}", cgroup.display()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Removes a cgroup and those below it. (`remove_dir_all` would try to unlink their files.)
fn remove_tree(cgroup: &Path) -> Result<()> {
    if let Ok(entries) = fs::read_dir(cgroup) {
        for entry in entries
            .flatten()
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        {
            remove_tree(&entry.path())?;
        }
    }
    ignore_missing(fs::remove_dir(cgroup)).doing(|| format!("remove cgroup {}", cgroup.display()))
}

/// Creates a directory (or a cgroup) and its parents, also while another lab's end removes the
/// empty parent at the same moment.
pub(crate) fn create_dir(path: &Path) -> Result<()> {
    let mut result = fs::create_dir_all(path);
    for _ in 0..10 {
        if result.is_ok() {
            break;
        }
        result = fs::create_dir_all(path);
    }
    result.doing(|| format!("create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_back_from_the_names_made_with_it() {
        let id = LabId::new().unwrap();
        assert_eq!(id.to_string().parse(), Ok(id.clone()));
        let netns = id.netns("sleep-2");
        assert_eq!(
            netns.strip_prefix(NETNS_PREFIX).unwrap().parse(),
            Ok(id.clone())
        );
        assert_eq!(id.creator_state(), CreatorState::Alive);
        for not_an_id in ["", "1-2", "1-2-", "x-2-3", "1--3"] {
            assert_eq!(not_an_id.parse::<LabId>(), Err(()), "{not_an_id:?}");
        }
    }

    #[test]
    fn a_dead_creator_and_a_reused_pid_are_told_from_a_living_one() {
        let reused = LabId {
            started: 1,
            ..LabId::new().unwrap()
        };
        assert_eq!(reused.creator_state(), CreatorState::Dead);
        let dead = LabId {
            pid: u32::MAX,
            ..LabId::new().unwrap()
        };
        assert_eq!(dead.creator_state(), CreatorState::Dead);
    }

    #[test]
    fn two_labs_of_one_process_differ() {
        assert_ne!(LabId::new().unwrap(), LabId::new().unwrap());
    }
}
