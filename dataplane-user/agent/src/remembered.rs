//! The addresses of ServiceEntries' hosts, in a file beside the agent's socket: the next agent gives the hosts the same
//! addresses.
//!
//! The file has a line for each change, `NAMESPACE HOST NUMBER` and, for a host that is gone, the time; the last line
//! of a host counts. The agent skips lines that were cut off or are malformed.

use std::{
    fs::{self, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use model::{Gravity, Problem};
use plan::vips::{HostName, Number, Record};
use tracing::warn;

/// Lines beyond twice the number of hosts before the file is written anew.
const SPARE_LINES: usize = 1000;

/// Readable only for the agent: the files have all tenants' names.
const PRIVATE: u32 = 0o600;

/// Remembers addresses.
#[derive(Debug)]
pub struct Remembered {
    path: PathBuf,
    lines: usize,
    /// Whether this agent writes the file. Another agent may write it before.
    owned: bool,
    problem: Option<Problem>,
}

impl Remembered {
    /// Reads the addresses in the file `path`. `now`: in seconds since the epoch.
    pub fn read(path: PathBuf, now: u64) -> (Self, Vec<Record>) {
        let text = fs::read(&path).unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(
                    "cannot read {}, so hosts of ServiceEntries may get other addresses than before: {error}",
                    path.display()
                );
            }
            Vec::new()
        });
        let text = String::from_utf8_lossy(&text);
        // A line without an end was cut off.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let records: Vec<Record> = whole.lines().filter_map(|line| parse(line, now)).collect();
        let remembered = Self {
            path,
            lines: whole.lines().count(),
            owned: false,
            problem: None,
        };
        (remembered, records)
    }

    /// Writes the file from now on, beginning with `all`. Other agents have stopped writing it.
    pub fn own(&mut self, all: &[Record]) {
        self.owned = true;
        self.rewrite(all);
    }

    /// Records changes. `all`: the records after them.
    pub fn note(&mut self, changes: &[Record], all: impl FnOnce() -> Vec<Record>) {
        if !self.owned || changes.is_empty() {
            return;
        }
        self.lines += changes.len();
        if self.problem.is_some() || self.lines > SPARE_LINES {
            let all = all();
            if self.problem.is_some() || self.lines > 2 * all.len() + SPARE_LINES {
                return self.rewrite(&all);
            }
        }
        let result = append(&self.path, changes);
        self.told(result);
    }

    /// The reason why the agent cannot remember addresses.
    pub fn problem(&self) -> Option<&Problem> {
        self.problem.as_ref()
    }

    fn rewrite(&mut self, all: &[Record]) {
        self.lines = all.len();
        let result = replace(&self.path, &text(all));
        self.told(result);
    }

    fn told(&mut self, result: io::Result<()>) {
        let then = "hosts of ServiceEntries may get other addresses";
        note_problem(&mut self.problem, &self.path, result, then);
    }
}

/// Sets the problem of a file by the result of writing it, and logs a new one. `then`: the effect after a restart.
pub fn note_problem(
    problem: &mut Option<Problem>,
    path: &Path,
    written: io::Result<()>,
    then: &str,
) {
    let is_new = problem.is_none();
    *problem = written.err().map(|error| Problem {
        gravity: Gravity::Warning,
        place: path.display().to_string(),
        text: format!("cannot be written: {error}; after a restart, {then}"),
    });
    if let Some(problem) = problem.as_ref().filter(|_| is_new) {
        warn!("{}: {}", problem.place, problem.text);
    }
}

fn append(path: &Path, records: &[Record]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(PRIVATE)
        .open(path)?;
    file.write_all(text(records).as_bytes())
}

/// Replaces a file that only the agent reads, in one step, so that a reader finds the old file or the new one.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(PRIVATE)
        .open(&new)?;
    file.set_permissions(Permissions::from_mode(PRIVATE))?;
    file.write_all(text.as_bytes())?;
    fs::rename(new, path)
}

fn text(records: &[Record]) -> String {
    let line = |record: &Record| {
        let Record { host, number, gone } = record;
        let HostName { namespace, host } = host;
        let number = number.get();
        match gone {
            None => format!("{namespace} {host} {number}\n"),
            Some(at) => format!("{namespace} {host} {number} {at}\n"),
        }
    };
    records.iter().map(line).collect()
}

fn parse(line: &str, now: u64) -> Option<Record> {
    let mut words = line.split(' ');
    let mut word = || words.next().filter(|word| !word.is_empty());
    let (namespace, host, number) = (word()?, word()?, word()?);
    let gone = match word() {
        None => None,
        // If the clock was set back, a number is not remembered for longer.
        Some(at) => Some(at.parse::<u64>().ok()?.min(now)),
    };
    Some(Record {
        host: HostName {
            namespace: namespace.into(),
            host: host.into(),
        },
        number: Number::new(number.parse().ok()?)?,
        gone,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn record(host: &str, number: u16, gone: Option<u64>) -> Record {
        Record {
            host: HostName {
                namespace: "shop".into(),
                host: host.into(),
            },
            number: Number::new(number).unwrap(),
            gone,
        }
    }

    #[test]
    fn what_was_noted_is_read_again_by_the_next_agent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vips");
        let (mut first, nothing) = Remembered::read(path.clone(), NOW);
        assert_eq!(nothing, []);
        let one = [record("a.example.com", 1, None)];
        first.note(&one, Vec::new);
        assert!(!path.exists(), "another agent may write it");
        first.own(&one);
        let two = [
            record("b.example.com", 2, None),
            record("a.example.com", 1, Some(NOW - 1)),
        ];
        first.note(&two, || panic!("it is short"));
        assert_eq!(first.problem(), None);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it tells of all tenants' hosts");
        let all = [&one[..], &two].concat();
        assert_eq!(Remembered::read(path.clone(), NOW).1, all);
        // A line that was cut off, and malformed lines.
        fs::write(
            &path,
            format!("{}x\nshop c 0\nshop d 5 x\n\nshop e 6 99", text(&all)),
        )
        .unwrap();
        assert_eq!(Remembered::read(path.clone(), NOW).1, all);
        let earlier = Remembered::read(path, NOW - 100).1;
        assert_eq!(earlier[2].gone, Some(NOW - 100));
    }

    #[test]
    fn the_file_does_not_grow_without_end_and_a_full_disk_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vips");
        let (mut remembered, _) = Remembered::read(path.clone(), NOW);
        let all = vec![record("a.example.com", 1, None)];
        remembered.own(&all);
        for _ in 0..3 * SPARE_LINES {
            remembered.note(&all, || all.clone());
        }
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= SPARE_LINES + 3, "{lines}");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        remembered.note(&all, || all.clone());
        assert!(
            remembered
                .problem()
                .unwrap()
                .text
                .contains("cannot be written")
        );
        fs::remove_dir(&path).unwrap();
        remembered.note(&all, || all.clone());
        assert_eq!(remembered.problem(), None);
        assert_eq!(Remembered::read(path, NOW).1, all);
    }
}
