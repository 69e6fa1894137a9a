//! kube-proxy's rules as a feed: a file with them, or those in the kernel.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use imbl::OrdMap;
use tracing::{error, info};

use super::{Imported, Leftover, ReadError, Text, import};
use crate::{
    model::{Gravity, Problem, Service, ServiceName},
    source::{
        self, Feed, Notice, OpenError, View, file,
        manifests::{self, Watcher},
        watching::Watching,
    },
};

/// The name of the thread that watches.
const THREAD: &str = "iptables";
/// The largest file that is read, in bytes: the rules of 100 000 services.
const FILE_SIZE_MAX: u64 = 256 << 20;
/// How often the kernel's rules are read. Nothing tells of changes of legacy rules.
const LOOK: Duration = Duration::from_secs(30);

/// Prints kube-proxy's rules that are in the kernel, or says why it cannot.
pub type Live = fn() -> Result<Vec<Text>, String>;

/// The rules that a feed reads.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A file with rules; none: those in the kernel.
    pub file: Option<PathBuf>,
    /// Prints those in the kernel.
    pub live: Live,
    /// Whether it is an error if a line of kube-proxy's is not understood.
    pub strict: bool,
}

impl Settings {
    /// How people call what is read.
    fn place(&self) -> PathBuf {
        let file = self.file.clone();
        file.unwrap_or_else(|| "kube-proxy's rules in the kernel".into())
    }
}

/// Reads the services out of rules. Shares with `previous` the services that did not change.
///
/// # Errors
///
/// The rules cannot be read, or there are none, or a line has a fault. With `strict` also if a line is not understood.
pub fn read(
    settings: &Settings,
    previous: &OrdMap<ServiceName, Arc<Service>>,
) -> Result<Imported, ReadError> {
    let texts = match &settings.file {
        Some(path) => vec![of_file(path)?],
        None => (settings.live)().map_err(ReadError::Live)?,
    };
    let imported = import(&texts, previous)?;
    if settings.strict && !imported.leftovers.is_empty() {
        return Err(ReadError::Strict(imported.leftovers, imported.more));
    }
    Ok(imported)
}

fn of_file(path: &Path) -> Result<Text, ReadError> {
    let text = file::read(path, FILE_SIZE_MAX).map_err(|fault| ReadError::File {
        path: path.to_owned(),
        why: fault.to_string(),
    })?;
    Ok(Text {
        origin: path.display().to_string(),
        text,
    })
}

/// kube-proxy's rules that are read, and read again when they may have changed: a file when it is written, the kernel's
/// every half minute.
#[derive(Debug)]
pub struct Rules {
    settings: Settings,
    /// The services of the last view. The next view shares those that did not change.
    last: OrdMap<ServiceName, Arc<Service>>,
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
        settings: Settings,
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
        let mut rules = Self {
            health: Arc::new(manifests::Health::of(&[settings.place()])),
            watching: watching.map_err(thread)?,
            last: OrdMap::new(),
            first: None,
            settings,
        };
        let imported = read(&rules.settings, &rules.last)?;
        rules.first = Some(rules.keep(imported));
        Ok(rules)
    }

    fn keep(&mut self, imported: Imported) -> View {
        info!(
            services = imported.services.len(),
            not_understood = imported.leftovers.len() + imported.more,
            from = %self.settings.place().display(),
            "read kube-proxy's rules"
        );
        self.health.set(None);
        self.last = imported.services.clone();
        View {
            services: imported.services,
            problems: problems(&imported.leftovers, imported.more),
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
        match read(&self.settings, &self.last) {
            Ok(imported) => Some(self.keep(imported)),
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

    fn health(&self) -> source::Health {
        source::Health::Rules(Arc::clone(&self.health))
    }
}
