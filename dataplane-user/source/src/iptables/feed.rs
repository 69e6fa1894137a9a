//! kube-proxy's rules as a feed: a file with them, or those in the kernel.

use std::{path::PathBuf, sync::Arc, time::Duration};

use imbl::OrdMap;
use model::{Gravity, Problem, Service, ServiceName};
use tracing::{error, info};

use super::{
    Imported, Leftover, ReadError, Text,
    facts::family,
    import,
    texts::{self, Live, Print, Prints},
};
use crate::{
    Feed, Notice, OpenError, View,
    manifests::{self, Watcher},
    watching::Watching,
};

/// The name of the thread that watches.
const THREAD: &str = "iptables";
/// How often the kernel's rules are read. Nothing tells of changes of legacy rules.
const LOOK: Duration = Duration::from_secs(30);

/// The rules that a feed reads.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A file with rules; none: those in the kernel.
    pub file: Option<PathBuf>,
    /// Prints those in the kernel, or those that a take-over saved.
    pub live: Live,
    /// The directory with the journal of take-overs; none: the kernel's rules are read in any case.
    pub takeover: Option<PathBuf>,
    /// Whether it is an error if a line of kube-proxy's is not understood.
    pub strict: bool,
    /// The rules as they were read a moment ago.
    pub first: Option<First>,
}

/// Rules that were read, with what tells whether they changed since.
#[derive(Clone, Debug)]
pub struct First {
    /// What the rules say.
    pub imported: Imported,
    prints: Prints,
    print: Print,
}

impl Settings {
    /// How people call what is read.
    fn place(&self) -> PathBuf {
        let file = self.file.clone();
        file.unwrap_or_else(|| "kube-proxy's rules in the kernel".into())
    }

    fn texts(
        &self,
        prints: &Prints,
        known: Option<Print>,
    ) -> Result<(Vec<Text>, Print), ReadError> {
        let live = (self.live, self.takeover.as_deref());
        texts::get(self.file.as_deref(), live, prints, known)
    }
}

/// Reads the services out of rules.
///
/// # Errors
///
/// The rules cannot be read, or there are none, or a line has a fault. With `strict` also if a line is not understood.
pub fn read(settings: &Settings) -> Result<First, ReadError> {
    let prints = Prints::default();
    let (texts, print) = settings.texts(&prints, None)?;
    Ok(First {
        imported: of_texts(settings, &texts, &OrdMap::new())?,
        prints,
        print,
    })
}

/// Shares with `previous` the services that did not change.
fn of_texts(
    settings: &Settings,
    texts: &[Text],
    previous: &OrdMap<ServiceName, Arc<Service>>,
) -> Result<Imported, ReadError> {
    let imported = import(texts, previous)?;
    if settings.strict && !imported.leftovers.is_empty() {
        return Err(ReadError::Strict(imported.leftovers, imported.more));
    }
    Ok(imported)
}

/// kube-proxy's rules that are read, and read again when they may have changed: a file when it is written, the kernel's
/// every half minute.
#[derive(Debug)]
pub struct Rules {
    settings: Settings,
    prints: Prints,
    /// The print of the rules that were read last without an error.
    print: Print,
    /// Which families had rules: IPv4, IPv6.
    families: [bool; 2],
    /// The services of the last view. The next view shares those that did not change.
    last: OrdMap<ServiceName, Arc<Service>>,
    /// The problems of the last view.
    problems: Arc<[Problem]>,
    /// The view that was read when the rules were opened.
    first: Option<View>,
    watching: Watching,
    health: Arc<manifests::Health>,
}

impl Rules {
    /// Reads the rules and begins to watch them.
    ///
    /// # Errors
    ///
    /// The rules cannot be read, or have faults, or no thread can be started.
    pub fn open(
        mut settings: Settings,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, OpenError> {
        let thread = |error| OpenError::Thread {
            what: "kube-proxy's rules",
            error,
        };
        // Before the file is read, so that no change is missed in between.
        let watching = match &settings.file {
            Some(path) => {
                let mut watcher = Watcher::new(std::slice::from_ref(path))?;
                Watching::start(THREAD, notify, async move || watcher.changed().await)
            }
            None => Watching::start(THREAD, notify, async || tokio::time::sleep(LOOK).await),
        };
        let watching = watching.map_err(thread)?;
        let first = settings.first.take();
        let is_current = |first: &First| {
            let read = || settings.texts(&first.prints, None);
            settings.file.is_none() || read().is_ok_and(|(_, print)| print == first.print)
        };
        let First {
            imported,
            prints,
            print,
        } = match first.filter(is_current) {
            Some(first) => first,
            None => read(&settings)?,
        };
        let mut rules = Self {
            health: Arc::new(manifests::Health::of(&[settings.place()])),
            watching,
            prints,
            print,
            families: [false; 2],
            last: OrdMap::new(),
            problems: Arc::default(),
            first: None,
            settings,
        };
        rules.first = Some(rules.keep(imported, print));
        Ok(rules)
    }

    /// Reads the rules again. None: they say what they said before.
    fn again(&mut self) -> Result<Option<View>, ReadError> {
        let (texts, print) = self.settings.texts(&self.prints, Some(self.print))?;
        if print == self.print {
            self.health.set(None);
            return Ok(None);
        }
        let imported = of_texts(&self.settings, &texts, &self.last)?;
        // A file that is written has the rules of one family for a while.
        for (index, v4) in [true, false].into_iter().enumerate() {
            if self.families[index] && !imported.families[index] {
                return Err(ReadError::Gone {
                    place: self.settings.place().display().to_string(),
                    family: family(v4),
                });
            }
        }
        let services = imported.services.values();
        let is_same = services.len() == self.last.len()
            && services
                .zip(self.last.values())
                .all(|(new, known)| Arc::ptr_eq(new, known))
            && problems(&imported.leftovers, imported.more) == self.problems;
        if is_same {
            self.print = print;
            self.families = imported.families;
            self.health.set(None);
            return Ok(None);
        }
        Ok(Some(self.keep(imported, print)))
    }

    fn keep(&mut self, imported: Imported, print: Print) -> View {
        info!(
            services = imported.services.len(),
            not_understood = imported.leftovers.len() + imported.more,
            stale_chains = imported.stale,
            from = %self.settings.place().display(),
            "read kube-proxy's rules"
        );
        self.health.set(None);
        self.print = print;
        self.families = imported.families;
        self.last = imported.services.clone();
        self.problems = problems(&imported.leftovers, imported.more);
        View {
            services: imported.services,
            problems: Arc::clone(&self.problems),
            ..View::default()
        }
    }
}

/// Turns lines that the import did not understand into problems.
fn problems(leftovers: &[Leftover], more: usize) -> Arc<[Problem]> {
    let problem = |place: String, text: String| Problem {
        gravity: Gravity::Warning,
        place,
        text,
    };
    let listed = leftovers
        .iter()
        .map(|leftover| problem(leftover.place(), leftover.what()));
    let more = (more > 0).then(|| {
        let place = "kube-proxy's rules".to_owned();
        problem(
            place,
            format!("and {more} more lines that are not understood"),
        )
    });
    listed.chain(more).collect()
}

impl Feed for Rules {
    fn take(&mut self) -> Option<View> {
        let first = self.first.take();
        if !self.watching.changed() {
            return first;
        }
        match self.again() {
            Ok(view) => view.or(first),
            Err(why) => {
                error!("{why}");
                error!("the agent still serves the services of the last rules that it read");
                self.health.set(Some(why.to_string()));
                first
            }
        }
    }

    fn refresh(&mut self) {
        self.watching.refresh();
    }

    fn health(&self) -> crate::Health {
        crate::Health::Rules(Arc::clone(&self.health))
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, fs};

    use super::*;

    const SAVED: &str = include_str!("../../../../tests/data/kube-proxy-1.36/iptables-save.txt");
    const LISTED: &str = include_str!("../../../../tests/data/kube-proxy-1.36/nft-ruleset.txt");

    thread_local! {
        /// The texts that the kernel has, one after the other; none: a program fails.
        static KERNEL: RefCell<Vec<Option<&'static str>>> = const { RefCell::new(Vec::new()) };
    }

    fn kernel(_: Option<&std::path::Path>) -> Result<Vec<Text>, String> {
        let next = KERNEL
            .with_borrow_mut(Vec::pop)
            .expect("more is read than expected");
        let text = next.ok_or("iptables-save: killed")?;
        Ok(vec![Text {
            origin: "iptables-save".into(),
            text: text.into(),
        }])
    }

    fn open(file: Option<&std::path::Path>, first: Option<First>) -> Rules {
        let settings = Settings {
            file: file.map(Into::into),
            live: kernel,
            takeover: None,
            strict: false,
            first,
        };
        Rules::open(settings, |_| {}).unwrap()
    }

    fn again(rules: &mut Rules) -> (Option<usize>, Option<String>) {
        rules.refresh();
        let view = rules.take();
        let failure = rules.health.failure().map(|(_, why)| why);
        (view.map(|view| view.services.len()), failure)
    }

    #[test]
    fn a_file_that_has_lost_a_family_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules");
        fs::write(&path, LISTED).unwrap();
        let mut rules = open(Some(&path), None);
        assert_eq!(rules.take().unwrap().services.len(), 12);
        // As the first of two programs leaves it.
        fs::write(&path, LISTED.split_once("table ip6 ").unwrap().0).unwrap();
        let (view, why) = again(&mut rules);
        let why = why.unwrap();
        assert_eq!(view, None);
        assert!(
            why.contains("rules for IPv6") && why.contains("gone"),
            "{why}"
        );
        fs::write(&path, LISTED.replacen("10.96.1.1 ", "10.96.1.200 ", 1)).unwrap();
        assert_eq!(again(&mut rules), (Some(12), None));
    }

    #[test]
    fn rules_that_say_the_same_are_no_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules");
        fs::write(&path, LISTED).unwrap();
        let mut rules = open(Some(&path), None);
        rules.take().unwrap();
        // A client of session affinity, another order of elements.
        for same in [LISTED.replacen("788ms", "9s", 1), LISTED.to_owned()] {
            fs::write(&path, same).unwrap();
            assert_eq!(again(&mut rules), (None, None));
        }
        fs::write(&path, "hello\n").unwrap();
        assert!(again(&mut rules).1.is_some());
        fs::write(&path, LISTED).unwrap();
        assert_eq!(again(&mut rules), (None, None));
    }

    #[test]
    fn a_program_that_fails_changes_nothing() {
        let set = |texts: &[Option<&'static str>]| {
            KERNEL.set(texts.iter().rev().copied().collect());
        };
        let left = || KERNEL.with_borrow(Vec::len);
        set(&[Some(SAVED), Some(SAVED)]);
        let mut rules = open(None, None);
        assert_eq!(rules.take().unwrap().services.len(), 12);
        set(&[None]);
        let (view, why) = again(&mut rules);
        assert_eq!(view, None);
        assert!(why.unwrap().contains("killed"));
        // The same rules are read once.
        set(&[Some(SAVED)]);
        assert_eq!(again(&mut rules), (None, None));
        assert_eq!(left(), 0);
    }

    #[test]
    fn rules_that_were_read_a_moment_ago_are_read_once() {
        KERNEL.set(vec![Some(SAVED), Some(SAVED)]);
        let settings = Settings {
            file: None,
            live: kernel,
            takeover: None,
            strict: false,
            first: None,
        };
        let first = read(&settings).unwrap();
        assert_eq!(open(None, Some(first)).take().unwrap().services.len(), 12);
        // A file may have been written since.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules");
        fs::write(&path, SAVED).unwrap();
        let settings = Settings {
            file: Some(path.clone()),
            ..settings
        };
        let first = read(&settings).unwrap();
        let same = open(Some(&path), Some(first.clone())).take().unwrap();
        assert!(same.services.ptr_eq(&first.imported.services));
        let line = "-A KUBE-SERVICES -d 10.96.1.10/32";
        let lines = SAVED.split_inclusive('\n');
        let other: String = lines.filter(|of| !of.starts_with(line)).collect();
        fs::write(&path, other).unwrap();
        assert_eq!(
            open(Some(&path), Some(first))
                .take()
                .unwrap()
                .services
                .len(),
            11
        );
    }
}
