//! Encrypted connections between workloads: the certificates of the captured workloads, and the engine of tunnels.

use std::{collections::BTreeSet, io, sync::Arc, thread::JoinHandle, time::Duration};

use identity::{IstioCa, Source, Store, TrustFiles};
use model::Workload;
use nix::sys::{
    prctl,
    resource::{Resource, setrlimit},
};
use proxy::Proxy;
use settings::MeshIdentity;
use threads::{Deaths, may_panic};
use tokio::{runtime::Builder, sync::oneshot};
use tracing::warn;
use tunnel::{Engine, Manner, Tunnels};

/// The name of the thread that gets certificates.
const THREAD: &str = "identities";
/// How long the thread's end waits for files that are being read.
const END: Duration = Duration::from_secs(1);

/// The certificates of the captured workloads. Dropping it ends the thread that gets them.
pub struct Encryption {
    store: Arc<Store>,
    trust_domain: Arc<str>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Option<()>>>,
}

impl Encryption {
    /// Starts to get certificates, and makes the proxy hand connections over to an engine of tunnels. From now on, the kernel
    /// writes no core of this process, because the keys are in its memory.
    ///
    /// # Errors
    /// If a thread cannot be started, or cores cannot be turned off.
    pub fn start(
        identity: &MeshIdentity,
        proxy: &Proxy,
        (manner, settings): (Manner, tunnel::Settings),
        deaths: &Deaths,
    ) -> io::Result<Self> {
        keep_memory_private()?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let store = {
            let _inside = runtime.enter();
            let (source, trust) = (source(identity), trust(identity));
            Arc::new(Store::start(source, trust, tunnel::provider()))
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = threads::start(THREAD, Arc::clone(deaths), move || {
            runtime.block_on(async {
                may_panic(THREAD);
                // Fails if the sender was dropped, which stops, too.
                let _ = stopped.await;
            });
            runtime.shutdown_timeout(END);
        })?;
        let trust_domain = Arc::clone(&manner.trust_domain);
        let tunnels = Tunnels::start(settings, Arc::clone(&store), deaths)?;
        proxy.tunnel_by(Engine::new(tunnels, Arc::clone(proxy.relay()), manner));
        Ok(Self {
            store,
            trust_domain,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The certificates.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Gets certificates for these workloads, and forgets those of others.
    pub fn want<'a>(&self, workloads: impl Iterator<Item = &'a Workload>) {
        let identities = workloads.filter_map(|workload| workload.identity(&self.trust_domain));
        let identities: BTreeSet<_> = identities.collect();
        self.store.want(&identities);
    }

    /// Describes certificates that are missing or overdue because the source has failed, and what is wrong with the files of
    /// roots and of revoked certificates.
    pub fn problems(&self) -> Vec<String> {
        let certificates = self.store.list().into_iter().filter(|of| of.overdue);
        let failed = certificates.filter_map(|of| {
            let (effect, cause) = match &of.serial {
                Some(_) => ("should have been renewed", of.failed?.cause),
                None => (
                    "is missing, so connections that need it fail",
                    of.failed?.cause,
                ),
            };
            Some(format!(
                "the certificate of {} {effect}: {cause}",
                of.identity
            ))
        });
        failed.chain(self.store.problems()).collect()
    }
}

impl Drop for Encryption {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }
}

/// Keeps the process's memory from cores and from debuggers without `CAP_SYS_PTRACE`.
fn keep_memory_private() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    if let Err(error) = prctl::set_dumpable(false) {
        warn!("debuggers of the agent's user can read the keys of workloads: {error}");
    }
    Ok(())
}

fn source(identity: &MeshIdentity) -> Source {
    let given = &identity.source;
    if let Some(istio) = &given.istio {
        return Source::Istio(IstioCa {
            address: istio.address().to_owned(),
            server_name: istio.server_name.clone(),
            roots: istio.roots().to_owned(),
            token: istio.token().to_owned(),
            cluster: istio.cluster().to_owned(),
            lifetime: istio.lifetime(),
        });
    }
    if let Some(socket) = &given.spire {
        return Source::Spire(socket.clone());
    }
    if let Some(ca) = &given.ca {
        return Source::Authority {
            directory: ca.directory.clone(),
            lifetime: ca.lifetime(),
        };
    }
    // The settings were checked: there is one source.
    Source::Directory(given.directory.clone().unwrap_or_default())
}

fn trust(identity: &MeshIdentity) -> TrustFiles {
    let mut trust = TrustFiles {
        revoked: identity.revoked.clone(),
        ..TrustFiles::default()
    };
    for roots in &identity.roots {
        let files = trust.roots.entry(roots.trust_domain.as_str().into());
        files.or_default().extend(roots.files.iter().cloned());
    }
    trust
}
