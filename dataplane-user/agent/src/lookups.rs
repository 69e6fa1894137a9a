//! Lookups of the DNS names of ServiceEntries' endpoints. The agent keeps the addresses in a file beside its socket, so the
//! next agent starts with them.
//!
//! The file has a line for each name: `NAMESPACE NAME ADDRESS,ADDRESS`. The agent skips malformed lines.

use std::{
    collections::HashMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use dns::LowerName;
use model::{ADDRESSES_MAX, EndpointName, Problem, Resolved, can_be_endpoint};
use plan::entries::Entries;
use source::Notice;
use threads::Deaths;
use tracing::{debug, warn};

use super::remembered::{note_problem, replace};

/// The file is written at most this often.
const PAUSE: Duration = Duration::from_secs(1);

/// Looks up the names that entries need.
pub struct Lookups {
    resolv_conf: PathBuf,
    domain: LowerName,
    notify: Arc<dyn Fn(Notice) + Send + Sync>,
    /// None before the first name.
    running: Option<dns::Lookups>,
    path: PathBuf,
    /// Whether this agent writes the file. Another agent may write it before.
    owned: bool,
    written: Option<Instant>,
    /// Whether the file is out of date.
    unwritten: bool,
    /// The reason why the agent cannot write the file.
    problem: Option<Problem>,
}

impl std::fmt::Debug for Lookups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lookups({})", self.path.display())
    }
}

impl Lookups {
    /// Reads the addresses of an earlier agent, from the file `path`. `dns`: the file with the node's resolvers.
    pub fn new(
        dns: Option<&settings::Dns>,
        path: PathBuf,
        notify: impl Fn(Notice) + Send + Sync + 'static,
    ) -> (Self, HashMap<EndpointName, Resolved>) {
        let dns = dns.cloned().unwrap_or_default();
        let known = read(&path);
        let lookups = Self {
            resolv_conf: dns.resolv_conf().to_owned(),
            // Validation of the configuration has checked the domain.
            domain: LowerName::parse(dns.domain()).unwrap_or_else(|_| LowerName::root()),
            notify: Arc::new(notify),
            running: None,
            path,
            owned: false,
            written: None,
            unwritten: false,
            problem: None,
        };
        (lookups, known)
    }

    /// Writes the file from now on. Other agents have stopped writing it.
    pub fn own(&mut self, entries: &Entries) {
        self.owned = true;
        self.unwritten = true;
        self.write(entries);
    }

    /// Passes new addresses on to `entries`. Returns the time of the first of them, if they change an entry.
    pub fn tell(&mut self, entries: &mut Entries) -> Option<Instant> {
        let (found, since) = self.running.as_mut()?.take();
        for (name, resolved) in &found {
            debug!(namespace = %name.namespace, %name, addresses = ?resolved.addresses, problem = ?resolved.problem, "looked up");
        }
        let moved = entries.learn(found);
        self.unwritten |= moved;
        self.write(entries);
        since.filter(|_| moved)
    }

    /// Looks up the names that `entries` need now.
    pub fn follow(&mut self, entries: &mut Entries) {
        let Some(names) = entries.take_wanted_names() else {
            return;
        };
        self.unwritten = true;
        if self.running.is_none() && names.is_empty() {
            return;
        }
        let running = match self.running.take() {
            Some(running) => running,
            None => match self.start() {
                Ok(running) => running,
                Err(error) => {
                    let died = Notice::Died {
                        thread: "lookups",
                        why: format!("cannot be started: {error}"),
                    };
                    return (self.notify)(died);
                }
            },
        };
        let known = entries.known_names();
        let last = |name: &EndpointName| {
            let known = known.get(name);
            known.map_or_else(Arc::default, |known| Arc::clone(&known.addresses))
        };
        self.running.insert(running).want(names, last);
    }

    fn start(&self) -> io::Result<dns::Lookups> {
        let (notify, died) = (Arc::clone(&self.notify), Arc::clone(&self.notify));
        let deaths: Deaths = Arc::new(move |_, why| {
            died(Notice::Died {
                thread: "lookups",
                why,
            });
        });
        dns::Lookups::start(
            self.resolv_conf.clone(),
            self.domain.clone(),
            move || notify(Notice::Changed),
            deaths,
        )
    }

    /// Writes the file, if there are new addresses and some time has passed.
    pub fn write(&mut self, entries: &Entries) {
        let is_soon = self.written.is_some_and(|at| at.elapsed() < PAUSE);
        if !self.owned || !self.unwritten || is_soon {
            return;
        }
        self.written = Some(Instant::now());
        let result = replace(&self.path, &text(entries));
        self.unwritten = result.is_err();
        let then = "ServiceEntries have no endpoints at names until they are looked up";
        note_problem(&mut self.problem, &self.path, result, then);
    }

    /// Returns the reason why the agent cannot write the file.
    pub fn problem(&self) -> Option<&Problem> {
        self.problem.as_ref()
    }
}

fn text(entries: &Entries) -> String {
    let known = entries.known_names().iter();
    let known = known.filter(|(_, resolved)| !resolved.addresses.is_empty());
    let line = |(name, resolved): (&EndpointName, &Resolved)| {
        let addresses: Vec<String> = resolved.addresses.iter().map(IpAddr::to_string).collect();
        format!("{} {name} {}\n", name.namespace, addresses.join(","))
    };
    known.map(line).collect()
}

fn read(path: &Path) -> HashMap<EndpointName, Resolved> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            warn!(
                "cannot read {}, so ServiceEntries have no endpoints at names until they are looked up: {error}",
                path.display()
            );
        }
        String::new()
    });
    text.lines().filter_map(parse).collect()
}

fn parse(line: &str) -> Option<(EndpointName, Resolved)> {
    let mut words = line.split(' ');
    let (namespace, name, addresses) = (words.next()?, words.next()?, words.next()?);
    let addresses: Vec<IpAddr> = addresses
        .split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()
        .ok()?;
    let is_good = |address: &IpAddr| can_be_endpoint(*address).is_ok();
    if addresses.len() > ADDRESSES_MAX || !addresses.iter().all(is_good) {
        return None;
    }
    let name = EndpointName {
        namespace: namespace.into(),
        name: name.into(),
    };
    let resolved = Resolved {
        addresses: addresses.into(),
        problem: None,
    };
    Some((name, resolved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_stays_while_the_source_has_said_nothing() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("names");
        fs::write(&path, "shop db.example.com 192.0.2.1\n").unwrap();
        let (mut lookups, known) = Lookups::new(None, path.clone(), drop);
        let entries = Entries::new([]).with_names(known);
        lookups.own(&entries);
        assert_eq!(read(&path).len(), 1);
        // A file that the agent cannot write is a problem.
        drop(directory);
        let (mut lookups, known) = Lookups::new(None, path, drop);
        lookups.own(&Entries::new([]).with_names(known));
        assert!(lookups.problem().is_some());
    }

    #[test]
    fn lines_that_make_no_sense_are_skipped() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("names");
        assert!(read(&path).is_empty());
        let text = "shop db.example.com 192.0.2.1,2001:db8::1\nshop cut\n\nshop a.example.com 127.0.0.1\n\
                    shop b.example.com 192.0.2.1,nonsense\nother db.example.com 192.0.2.2\n";
        fs::write(&path, text).unwrap();
        let known = read(&path);
        assert_eq!(known.len(), 2);
        let name = EndpointName {
            namespace: "shop".into(),
            name: "db.example.com".into(),
        };
        let addresses: Vec<String> = known[&name]
            .addresses
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(addresses, ["192.0.2.1", "2001:db8::1"]);
    }
}
