//! The thread that waits for signals, for changed files, and for requests to the endpoints.

use std::{
    io,
    sync::{Arc, mpsc::Sender},
    thread::JoinHandle,
    time::Duration,
};

use admin::{Listeners, State, cni::Registrations};
use kernel::{ChangeNews, interfaces::News};
use source::kubernetes::Reviewer;
use threads::may_panic;
use tokio::{
    runtime::{Builder, Runtime},
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

use super::{Event, attacher::Job, deaths};

/// How long changes of interfaces and of rules are gathered.
const SETTLE: Duration = Duration::from_millis(20);
/// The rest between two reports of changed rules: so a storm of changes costs little.
const REST: Duration = Duration::from_millis(200);

/// The running thread.
pub struct Waiter {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Option<()>>,
}

/// The kernel's news.
pub struct KernelNews {
    /// Of interfaces, addresses, routes and routing rules.
    interfaces: News,
    /// Of IPsec policies.
    policies: ChangeNews,
    /// Of rules of nf_tables, if they decide about the path of packets.
    rules: ChangeNews,
}

/// The kernel's news, and their receiver.
pub struct Network {
    pub news: KernelNews,
    pub jobs: Sender<Job>,
}

/// Takes signals before there is a waiter: a signal that comes while the agent starts is handled when it has started,
/// and does not end it halfway.
pub struct Ready {
    runtime: Runtime,
    signals: Signals,
}

impl Ready {
    /// Takes signals from here on.
    pub fn new() -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(4)
            .build()?;
        let signals = {
            let _inside = runtime.enter();
            Signals::new()?
        };
        Ok(Self { runtime, signals })
    }

    /// The kernel's news from here on; `rules`: also those of rules of nf_tables.
    pub fn news(&self, rules: bool) -> Result<KernelNews, kernel::Error> {
        let _inside = self.runtime.enter();
        Ok(KernelNews {
            interfaces: News::new()?,
            policies: ChangeNews::of_policies()?,
            rules: if rules {
                ChangeNews::of_rules()?
            } else {
                ChangeNews::default()
            },
        })
    }

    /// Starts to wait. `reviewer`: decides which clients may read the metrics.
    pub fn start(
        self,
        listeners: Listeners,
        state: Arc<State>,
        reviewer: Option<Arc<Reviewer>>,
        network: Network,
        events: Sender<Event>,
    ) -> io::Result<Waiter> {
        let Self { runtime, signals } = self;
        let (stop, stopped) = oneshot::channel();
        let jobs = network.jobs.clone();
        // Fails only if the agent ends: then the plug-in asks the next agent.
        let pods = Registrations::new(move |ask| _ = jobs.send(Job::Pod(ask)));
        let thread = threads::start("waiter", deaths(&events), move || {
            let result = runtime.block_on(async {
                tokio::select! {
                    result = admin::serve(listeners, state, reviewer, pods) => result,
                    () = signals.pass_on(events.clone()) => Ok(()),
                    result = network.pass_on() => result,
                    _ = stopped => Ok(()),
                }
            });
            if let Err(error) = result {
                // Fails only if the other side ends anyway.
                let _ = events.send(Event::Failed(error));
            }
            // Open requests do not delay the end.
            runtime.shutdown_background();
        })?;
        Ok(Waiter { stop, thread })
    }
}

impl Waiter {
    /// Ends the thread.
    pub fn stop(self) {
        // It may have ended on its own, and then there is no receiver.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

/// The signals that an agent handles.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Passes signals on, for ever.
    async fn pass_on(mut self, events: Sender<Event>) {
        loop {
            let event = tokio::select! {
                _ = self.terminate.recv() => Event::Stop("SIGTERM"),
                _ = self.interrupt.recv() => Event::Stop("SIGINT"),
                _ = self.hangup.recv() => Event::Reload,
            };
            may_panic("waiter");
            if events.send(event).is_err() {
                return;
            }
        }
    }
}

impl Network {
    /// Passes news on, for ever.
    async fn pass_on(self) -> io::Result<()> {
        let Self { news, jobs } = self;
        let KernelNews {
            interfaces,
            policies,
            rules,
        } = news;
        tokio::select! {
            result = self::interfaces(interfaces, &jobs) => result,
            result = protection(policies, &jobs) => result,
            result = self::rules(rules, &jobs) => result,
        }
    }
}

/// Waits for a change, and for those that follow within [`SETTLE`].
async fn gather(mut changed: impl AsyncFnMut() -> io::Result<()>) -> io::Result<()> {
    changed().await?;
    let more = async {
        loop {
            changed().await?;
        }
    };
    match tokio::time::timeout(SETTLE, more).await {
        Err(_) => Ok(()),
        Ok(result) => result,
    }
}

/// Reports changed interfaces and addresses. A pod's start is a handful of changes within milliseconds: they become one
/// report.
async fn interfaces(mut news: News, jobs: &Sender<Job>) -> io::Result<()> {
    loop {
        gather(async || news.changed().await).await?;
        if jobs.send(Job::Network).is_err() {
            return Ok(());
        }
    }
}

/// Reports changed rules of nf_tables.
async fn rules(mut rules: ChangeNews, jobs: &Sender<Job>) -> io::Result<()> {
    loop {
        gather(async || rules.changed().await).await?;
        if jobs.send(Job::Rules).is_err() {
            return Ok(());
        }
        // The kernel keeps the news meanwhile, or says that it has dropped some.
        tokio::time::sleep(REST).await;
    }
}

/// Reports changed IPsec policies, at once: until then their packets leave in clear. The receiving thread gathers the
/// changes that follow.
async fn protection(mut policies: ChangeNews, jobs: &Sender<Job>) -> io::Result<()> {
    loop {
        policies.changed().await?;
        if jobs.send(Job::Policies).is_err() {
            return Ok(());
        }
    }
}
