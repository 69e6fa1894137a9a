//! The server: its threads, and their sockets.

use std::{
    collections::HashMap,
    io,
    net::{self, IpAddr, SocketAddr},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use model::WorkloadName;
use threads::Deaths;
use tokio::{
    net::{TcpListener, UdpSocket},
    runtime::{Builder, Handle},
    sync::{
        mpsc::{UnboundedSender, unbounded_channel},
        watch,
    },
};

use super::{
    beats::{self, Renew},
    client::Client,
    observer::Observer,
    shared::{Askers, Settings, Shared},
    sockets::{Listener, open},
    worker::{self, Job},
    zone::Zone,
};

/// How long the threads may take to end, and how often that is looked for.
const LAST: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(2);

/// A server. When it is dropped, it answers the queries that have arrived, and its threads end, or are left alone if
/// they take too long. Every [`Captured`] must be dropped before.
pub struct Server {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    threads: Vec<JoinHandle<Option<()>>>,
    /// Ends the sockets for any client's queries, when it is dropped.
    end: watch::Sender<()>,
}

/// Sets the names from which a server answers.
pub struct Zones(Arc<Shared>);

impl Zones {
    /// Replaces the names.
    pub fn set(&self, zone: Zone) {
        self.0.set_zone(zone);
    }
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
    /// Starts the threads, which answer no queries yet. Each beat of a thread calls `renew` with the time since all
    /// threads had read their sockets.
    ///
    /// # Errors
    ///
    /// No thread can be started.
    pub fn start(
        mut settings: Settings,
        zone: Zone,
        renew: Renew,
        deaths: &Deaths,
    ) -> io::Result<Self> {
        let count = settings.workers.max(1);
        settings.workers = count;
        let shared = Arc::new(Shared::new(settings, zone, renew));
        let (mut workers, mut threads) = (Vec::new(), Vec::new());
        for number in 0..count {
            let (jobs, todo) = unbounded_channel();
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.push(Worker {
                jobs,
                runtime: runtime.handle().clone(),
            });
            let (own, name) = (Arc::clone(&shared), beats::name(number));
            let thread = threads::start(name, Arc::clone(deaths), move || {
                worker::run(&own, number, &runtime, todo).expect("sockets can be waited for");
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

    /// Answers all clients' queries at these addresses, until the server ends.
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
    /// If the kernel refuses.
    pub fn take(
        &self,
        number: u64,
        udp: net::UdpSocket,
        tcp: net::TcpListener,
    ) -> io::Result<[Listener; 2]> {
        self.worker(number).take(udp, tcp)
    }

    /// Answers the queries of a captured workload, which arrive at these sockets. `number`: the number of its network
    /// namespace.
    pub fn capture(&self, number: u64, client: Client, sockets: &[Listener]) -> Captured {
        let (end, ended) = watch::channel(());
        let client = Arc::new(client);
        self.shared.note_captured(number, &client);
        let askers = Askers::One(number, client);
        for socket in sockets {
            let worker = self.worker(number);
            worker.give(socket.clone(), askers.clone(), ended.clone());
        }
        Captured { _end: end }
    }

    /// Answers the queries of workloads that are captured by their packets, by their addresses. The queries arrive at these
    /// sockets, which were taken for `number`. Equal clients are one workload.
    pub fn capture_by_address(
        &self,
        number: u64,
        clients: HashMap<IpAddr, Client>,
        sockets: &[Listener],
    ) -> Captured {
        let (end, ended) = watch::channel(());
        let mut workloads: HashMap<Option<WorkloadName>, Arc<Client>> = HashMap::new();
        let clients = clients.into_iter().map(|(addr, client)| {
            let name = client.workload.clone();
            let known = workloads.entry(name).or_insert_with(|| Arc::new(client));
            (addr, Arc::clone(known))
        });
        let clients: HashMap<_, _> = clients.collect();
        for (at, client) in workloads.values().enumerate() {
            // No network namespace has such a number.
            self.shared.note_captured(u64::MAX - at as u64, client);
        }
        let askers = Askers::ByAddress(Arc::new(clients));
        for socket in sockets {
            let worker = self.worker(number);
            worker.give(socket.clone(), askers.clone(), ended.clone());
        }
        Captured { _end: end }
    }

    /// Replaces the names.
    pub fn set_zone(&self, zone: Zone) {
        self.shared.set_zone(zone);
    }

    /// Sets the names from another thread.
    pub fn zones(&self) -> Zones {
        Zones(Arc::clone(&self.shared))
    }

    /// Begins to end, and does not wait for it.
    pub fn end(&mut self) {
        self.workers.clear();
        self.end = watch::Sender::new(());
    }

    /// Looks at its figures.
    pub fn observer(&self) -> Observer {
        Observer::of(Arc::clone(&self.shared))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
        let deadline = Instant::now() + LAST;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                thread::sleep(POLL);
            }
            if thread.is_finished() {
                // A thread that died has reported it.
                let _ = thread.join();
            } else {
                let name = thread.thread().name().unwrap_or_default();
                tracing::warn!("thread {name} does not end: it is left alone");
            }
        }
    }
}

impl Worker {
    /// Registers sockets with this thread's runtime. They must be non-blocking.
    fn take(&self, udp: net::UdpSocket, tcp: net::TcpListener) -> io::Result<[Listener; 2]> {
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        let _inside = self.runtime.enter();
        Ok([
            Listener::Udp(Arc::new(UdpSocket::from_std(udp)?)),
            Listener::Tcp(Arc::new(TcpListener::from_std(tcp)?)),
        ])
    }

    /// Starts to answer the queries that arrive at a socket.
    fn give(&self, listener: Listener, askers: Askers, end: watch::Receiver<()>) {
        let job = Job {
            listener,
            askers,
            end,
        };
        // Fails only if the thread has died, which it has reported.
        let _ = self.jobs.send(job);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use model::Names;
    use threads::none_dies;

    use super::*;
    use crate::{LowerName, ResolvConf, wire::question};

    /// Longer than a flooding thread delays any client on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(5);

    fn start() -> Server {
        let settings = Settings {
            workers: 1,
            cache_bytes: 1 << 20,
            stale: Duration::ZERO,
            longest: 3600,
            room: crate::Room::of(1 << 20),
            cluster_dns: Vec::new(),
            node: ResolvConf::default(),
            resolvers: None,
        };
        Server::start(
            settings,
            Zone::new(Names::default(), TTLS),
            Box::new(drop),
            &none_dies(),
        )
        .unwrap()
    }

    /// Captures a workload without resolvers, and returns the address of its socket.
    fn capture(server: &Server, number: u64) -> (SocketAddr, Captured) {
        let (udp, tcp) = open("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = udp.local_addr().unwrap();
        let sockets = server.take(number, udp, tcp).unwrap();
        let client = Client::unknown(Vec::new());
        (at, server.capture(number, client, &sockets))
    }

    /// A socket that sends to an address.
    fn socket(to: SocketAddr) -> net::UdpSocket {
        let socket = net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(to).unwrap();
        socket
    }

    const TTLS: crate::Ttls = crate::Ttls {
        services: 5,
        entries: 30,
    };
    const A: u16 = 1;
    /// Is refused at once.
    const AXFR: u16 = 252;

    fn query(of_type: u16) -> Vec<u8> {
        let name = LowerName::parse("www.example.com").unwrap();
        question(7, &name, of_type, 1, true)
    }

    #[test]
    fn a_workload_that_floods_while_it_ends_keeps_nobody_waiting() {
        let server = start();
        let (flooded, captured) = capture(&server, 1);
        let (at, other) = capture(&server, 2);
        // Until the socket is closed.
        let flood = || {
            let socket = socket(flooded);
            let start = Instant::now();
            while start.elapsed() < PATIENCE {
                let sent = socket.send(&query(A));
                if sent.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
                    return true;
                }
            }
            false
        };
        let (answered, closed) = thread::scope(|scope| {
            let floods = [(); 3].map(|()| scope.spawn(flood));
            thread::sleep(Duration::from_millis(100));
            drop(captured);
            let asker = socket(at);
            asker.set_read_timeout(Some(PATIENCE)).unwrap();
            asker.send(&query(A)).unwrap();
            let answered = asker.recv(&mut [0; 512]);
            (answered, floods.map(|thread| thread.join().unwrap()))
        });
        answered.unwrap();
        assert_eq!(closed, [true; 3]);
        drop(other);
        let start = Instant::now();
        drop(server);
        assert!(start.elapsed() < LAST, "{:?}", start.elapsed());
    }

    #[test]
    fn threads_that_go_on_say_so_until_they_end() {
        let server = start();
        let observer = server.observer();
        let stuck = |seconds| observer.stuck(Instant::now() + Duration::from_secs(seconds));
        thread::sleep(Duration::from_millis(100));
        let (name, since) = stuck(60).unwrap();
        assert_eq!(name, "dns-0");
        // Three times as long as it takes it to say so again.
        thread::sleep(beats::EVERY * 3);
        assert!(stuck(60).unwrap().1 < since + beats::EVERY * 2);
        assert_eq!(stuck(0), None);
        drop(server);
        assert_eq!(stuck(60), None);
    }

    /// RFC 7766, 6.2.1.1.
    #[test]
    fn a_query_of_a_connection_does_not_wait_for_another() {
        let server = start();
        let silent = net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (udp, tcp) = open("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = tcp.local_addr().unwrap();
        let sockets = server.take(1, udp, tcp).unwrap();
        let client = Client::unknown(vec![silent.local_addr().unwrap()]);
        let captured = server.capture(1, client, &sockets);
        let asker = net::TcpStream::connect(at).unwrap();
        // Longer than the agent waits for resolvers.
        asker.set_read_timeout(Some(PATIENCE * 4)).unwrap();
        let read = || {
            let mut length = [0; 2];
            (&asker).read_exact(&mut length).unwrap();
            let mut answer = vec![0; u16::from_be_bytes(length).into()];
            (&asker).read_exact(&mut answer).unwrap();
            answer[1]
        };
        let send = |id, of_type| {
            let mut query = query(of_type);
            query[1] = id;
            let length = u16::try_from(query.len()).unwrap();
            (&asker)
                .write_all(&[&length.to_be_bytes()[..], &query].concat())
                .unwrap();
        };
        send(1, A);
        send(2, AXFR);
        // The client reads the answers after it has sent all queries.
        asker.shutdown(net::Shutdown::Write).unwrap();
        assert_eq!([read(), read()], [2, 1]);
        drop(captured);
    }

    #[test]
    fn what_has_arrived_is_answered_at_the_end() {
        let mut server = start();
        let (at, captured) = capture(&server, 1);
        let asker = socket(at);
        asker.set_read_timeout(Some(PATIENCE)).unwrap();
        for _ in 0..100 {
            asker.send(&query(AXFR)).unwrap();
        }
        drop(captured);
        server.end();
        for number in 0..100 {
            let answered = asker.recv(&mut [0; 512]);
            assert!(answered.is_ok(), "{number}: {answered:?}");
        }
    }
}
