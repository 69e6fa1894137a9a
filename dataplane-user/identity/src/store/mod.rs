//! The store of this node's certificates: it gets them, renews them, and serves them from memory.

mod keep;
mod list;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

pub use list::{Failed, Listed};
use model::Identity;
use notify::RecursiveMode;
use rustls::{crypto::CryptoProvider, pki_types::CertificateDer};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore, watch},
    task::JoinHandle,
};

use crate::{
    Credential, Identities, IdentityError, Roots, Source, TrustFiles, peer::Shown, trust::Trust,
    watching::Watching,
};

/// Maximum number of requests to a source at the same time.
const REQUESTS_MAX: usize = 8;

type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// Certificates of the identities that are wanted, and the roots that peers are verified against.
///
/// It keeps one key and one certificate for each identity, as long as the identity is [wanted](Self::want). It renews a
/// certificate at about half of its lifetime, and backs off if the source refuses. It serves the old certificate until the
/// end of its validity.
pub struct Store {
    inner: Arc<Inner>,
    runtime: Handle,
    /// Reads the files of roots and revoked certificates.
    follower: JoinHandle<()>,
    _watching: Watching,
}

struct Inner {
    source: Source,
    trust: TrustFiles,
    provider: Arc<CryptoProvider>,
    clock: Clock,
    permits: Semaphore,
    contents: Mutex<Contents>,
    roots: watch::Sender<Arc<Roots>>,
    /// The number of certificates that were replaced.
    replaced: watch::Sender<u64>,
    /// The number of times that files may have changed.
    files: watch::Receiver<u64>,
}

#[derive(Default)]
struct Contents {
    slots: BTreeMap<Identity, Slot>,
    /// The contents of the files of roots. `None`: they have not been read, and no peer is trusted.
    trust: Option<Trust>,
    /// The reason why the files cannot be read.
    problem: Option<Arc<str>>,
}

/// An identity that is wanted.
struct Slot {
    state: watch::Sender<State>,
    /// Wakes the task, because the clock has jumped.
    hurry: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone, Default)]
struct State {
    credential: Option<Arc<Credential>>,
    /// The roots that came with the certificate.
    roots: Vec<CertificateDer<'static>>,
    /// The last attempt, if it failed.
    failed: Option<Failure>,
}

#[derive(Clone)]
struct Failure {
    cause: Arc<str>,
    at: SystemTime,
    next: SystemTime,
}

impl Store {
    /// Starts to watch files. The store has no identities yet, and no roots until the files of roots have been read.
    ///
    /// # Panics
    /// If called outside of a tokio runtime with timers.
    pub fn start(source: Source, trust: TrustFiles, provider: Arc<CryptoProvider>) -> Self {
        Self::with_clock(source, trust, provider, Arc::new(SystemTime::now))
    }

    fn with_clock(
        source: Source,
        trust: TrustFiles,
        provider: Arc<CryptoProvider>,
        clock: Clock,
    ) -> Self {
        let once = |path: &Path| (path.to_owned(), RecursiveMode::NonRecursive);
        let mut directories: Vec<_> = trust.directories().map(once).collect();
        if let Source::Directory(path) = &source {
            directories.push((path.clone(), RecursiveMode::Recursive));
        }
        let watching = Watching::new(directories);
        let inner = Arc::new(Inner {
            source,
            trust,
            provider,
            clock,
            permits: Semaphore::new(REQUESTS_MAX),
            contents: Mutex::default(),
            roots: watch::Sender::default(),
            replaced: watch::Sender::default(),
            files: watching.count(),
        });
        Self {
            follower: tokio::spawn(inner.clone().follow_trust()),
            inner,
            runtime: Handle::current(),
            _watching: watching,
        }
    }

    /// Sets the identities that have a workload on this node. The store gets certificates of new identities, and forgets the
    /// certificates and keys of all other identities.
    pub fn want(&self, identities: &BTreeSet<Identity>) {
        let mut contents = self.inner.contents();
        contents
            .slots
            .retain(|identity, _| identities.contains(identity));
        for identity in identities {
            if !contents.slots.contains_key(identity) {
                let slot = self.slot(identity);
                contents.slots.insert(identity.clone(), slot);
            }
        }
        self.inner.publish(&contents);
    }

    fn slot(&self, identity: &Identity) -> Slot {
        let (state, hurry) = (watch::Sender::default(), Arc::<Notify>::default());
        let keep = self
            .inner
            .clone()
            .keep(identity.clone(), state.clone(), hurry.clone());
        let task = self.runtime.spawn(keep);
        Slot { state, hurry, task }
    }

    /// Returns the number of certificates that were replaced. The receiver is notified of each change.
    pub fn replaced(&self) -> watch::Receiver<u64> {
        self.inner.replaced.subscribe()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.follower.abort();
        self.inner.contents().slots.clear();
    }
}

impl Identities for Store {
    async fn credential(&self, identity: &Identity) -> Result<Arc<Credential>, IdentityError> {
        let error = |cause: Arc<str>| IdentityError {
            identity: identity.clone(),
            cause,
        };
        let unwanted = || error("no workload of this node has the identity".into());
        let (mut state, hurry) = {
            let contents = self.inner.contents();
            let slot = contents.slots.get(identity).ok_or_else(unwanted)?;
            (slot.state.subscribe(), slot.hurry.clone())
        };
        loop {
            {
                let state = state.borrow_and_update();
                let now = (self.inner.clock)();
                match (&state.credential, &state.failed) {
                    (Some(credential), _) if credential.is_valid(now) => {
                        return Ok(credential.clone());
                    }
                    (Some(credential), Some(failed)) => {
                        let (from, to) = (credential.not_before, credential.not_after);
                        return Err(error(
                            format!(
                                "the certificate is valid only from {} to {}, and renewal failed: {}",
                                Shown(from),
                                Shown(to),
                                failed.cause
                            )
                            .into(),
                        ));
                    }
                    (None, Some(failed)) => return Err(error(failed.cause.clone())),
                    (Some(_), None) => hurry.notify_one(),
                    (None, None) => {}
                }
            }
            state.changed().await.map_err(|_| unwanted())?;
        }
    }

    fn roots(&self) -> watch::Receiver<Arc<Roots>> {
        self.inner.roots.subscribe()
    }
}

impl Inner {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the roots if they have changed: the roots in files, and for other trust domains the roots that came with
    /// certificates.
    fn publish(&self, contents: &Contents) {
        let Some(trust) = &contents.trust else {
            return;
        };
        let mut roots = trust.roots.clone();
        for (identity, slot) in &contents.slots {
            let domain = identity.trust_domain();
            if trust.roots.by_domain.contains_key(domain) {
                continue;
            }
            let of_domain = roots.by_domain.entry(domain.into()).or_default();
            for root in &slot.state.borrow().roots {
                if !of_domain.contains(root) {
                    of_domain.push(root.clone());
                }
            }
        }
        self.roots.send_if_modified(|published| {
            let is_new = **published != roots;
            if is_new {
                *published = Arc::new(roots);
            }
            is_new
        });
    }

    /// Reads the files of roots and revoked certificates, now and at each change. While they cannot be read, their former
    /// contents still count.
    async fn follow_trust(self: Arc<Self>) {
        let mut files = self.files.clone();
        loop {
            files.mark_unchanged();
            let this = self.clone();
            let read = tokio::task::spawn_blocking(move || this.trust.read()).await;
            self.took(read.unwrap_or_else(|error| Err(error.to_string())));
            if files.changed().await.is_err() {
                return;
            }
        }
    }

    fn took(&self, read: Result<Trust, String>) {
        let mut contents = self.contents();
        match read {
            Ok(trust) => {
                contents.trust = Some(trust);
                contents.problem = None;
                self.publish(&contents);
            }
            Err(problem) => {
                let effect = match contents.trust {
                    Some(_) => {
                        "the roots and revoked certificates that were read before still count"
                    }
                    None => "no peer is trusted until it can be read",
                };
                let problem: Arc<str> = format!("{problem}: {effect}").into();
                if contents.problem.as_ref() != Some(&problem) {
                    tracing::error!("{problem}");
                }
                contents.problem = Some(problem);
            }
        }
    }
}

#[cfg(test)]
mod tests;
