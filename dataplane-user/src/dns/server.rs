//! The server: its threads, and their sockets.

use std::{
    io,
    net::{self, SocketAddr},
    sync::Arc,
    thread::JoinHandle,
};

use tokio::{
    net::{TcpListener, UdpSocket},
    runtime::{Builder, Handle},
    sync::{
        mpsc::{UnboundedSender, unbounded_channel},
        watch,
    },
};

use super::{
    client::Client,
    metrics::Observer,
    shared::{Askers, Settings, Shared},
    sockets::{Listener, open},
    worker::{self, Job},
    zone::Zone,
};
use crate::threads::{self, Deaths};

/// A server. When it is dropped, it answers the queries that have arrived, and its threads end. Every [`Captured`] must
/// be dropped before.
pub struct Server {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    threads: Vec<JoinHandle<Option<()>>>,
    /// Of the sockets at which anybody's queries arrive.
    end: watch::Sender<()>,
}

/// A thread, as others have it.
struct Worker {
    jobs: UnboundedSender<Job>,
    runtime: Handle,
}

/// A captured workload's queries are answered until this is dropped.
#[derive(Debug)]
#[must_use = "its queries are answered until it is dropped"]
pub struct Captured {
    _end: watch::Sender<()>,
}

impl Server {
    /// Starts the threads. Nobody's queries are answered yet.
    ///
    /// # Errors
    ///
    /// No thread can be started.
    pub fn start(settings: Settings, zone: Zone, deaths: &Deaths) -> io::Result<Self> {
        let count = settings.workers.max(1);
        let shared = Arc::new(Shared::new(settings, zone));
        let (mut workers, mut threads) = (Vec::new(), Vec::new());
        for number in 0..count {
            let (jobs, todo) = unbounded_channel();
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.push(Worker {
                jobs,
                runtime: runtime.handle().clone(),
            });
            let (own, name) = (Arc::clone(&shared), format!("dns-{number}"));
            let thread = threads::start(name, Arc::clone(deaths), move || {
                worker::run(&own, &runtime, todo).expect("sockets can be waited for");
            })?;
            threads.push(thread);
        }
        Ok(Self {
            shared,
            workers,
            threads,
            end: watch::Sender::new(()),
        })
    }

    /// Answers everybody's queries at these addresses, until the server ends.
    ///
    /// # Errors
    ///
    /// An address cannot be listened on.
    pub fn listen(&self, addresses: &[SocketAddr]) -> io::Result<()> {
        for worker in &self.workers {
            for at in addresses {
                let (udp, tcp) = open(*at)?;
                for socket in worker.take(udp, tcp)? {
                    worker.give(socket, Askers::Anybody, self.end.subscribe());
                }
            }
        }
        Ok(())
    }

    /// The worker of a captured workload.
    fn worker(&self, number: u64) -> &Worker {
        let number = usize::try_from(number).unwrap_or_default();
        &self.workers[number % self.workers.len()]
    }

    /// Takes sockets at which the queries of a captured workload arrive, for [`Server::capture`].
    ///
    /// # Errors
    ///
    /// The kernel's refusal.
    pub fn take(
        &self,
        number: u64,
        udp: net::UdpSocket,
        tcp: net::TcpListener,
    ) -> io::Result<[Listener; 2]> {
        self.worker(number).take(udp, tcp)
    }

    /// Answers the queries of a captured workload, which arrive at these sockets. `number`: of its network namespace.
    pub fn capture(&self, number: u64, client: Client, sockets: &[Listener]) -> Captured {
        let (end, ended) = watch::channel(());
        let askers = Askers::One(number, Arc::new(client));
        for socket in sockets {
            let worker = self.worker(number);
            worker.give(socket.clone(), askers.clone(), ended.clone());
        }
        Captured { _end: end }
    }

    /// Answers from other names.
    pub fn set_zone(&self, zone: Zone) {
        self.shared.set_zone(zone);
    }

    /// Looks at its figures.
    pub fn observer(&self) -> Observer {
        self.shared.observer()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.workers.clear();
        self.end = watch::Sender::new(());
        for thread in self.threads.drain(..) {
            // One that has died was told.
            let _ = thread.join();
        }
    }
}

impl Worker {
    /// Has sockets wait for queries on this thread. They must not block.
    fn take(&self, udp: net::UdpSocket, tcp: net::TcpListener) -> io::Result<[Listener; 2]> {
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let _inside = self.runtime.enter();
        Ok([
            Listener::Udp(Arc::new(UdpSocket::from_std(udp)?)),
            Listener::Tcp(Arc::new(TcpListener::from_std(tcp)?)),
        ])
    }

    /// Has the queries answered that arrive at a socket.
    fn give(&self, listener: Listener, askers: Askers, end: watch::Receiver<()>) {
        let job = Job {
            listener,
            askers,
            end,
        };
        // Fails only if the thread has died, which was told.
        let _ = self.jobs.send(job);
    }
}
