//! A worker that the test drives: it handles the events that the test reports, and its clock shows what the test sets.

mod accepting;
mod dialing;
mod holding;
mod lasting;

use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener, TcpStream},
    thread::JoinHandle,
};

use model::{Egress, Place, Service, Snapshot, Workload, WorkloadName};
use relay::{
    AccessLog, Attached, Attachment, Direction, Engine, Limits, Listener, Log, Namespace, Permit,
    Relay, socket,
};
use rustix::event::{PollFd, PollFlags, poll};
use socket2::{Domain, Socket, Type};
use threads::none_dies;

use super::*;
use crate::{
    Settings,
    shared::Accepted,
    tests::{Lines, accept, connect, endpoint, service},
};

/// An engine that takes nothing: the test gives the listening sockets to the worker.
struct Nobody;

impl Engine for Nobody {
    fn take(&self, _: &Arc<Attached>, _: &Arc<[Listener]>) {}
    fn shut(&self, _: &Attached, _: Instant) {}
    fn drain(&mut self, _: Instant) {}
}

struct World {
    worker: Worker,
    relay: Arc<Relay>,
    lines: Lines,
    writer: Option<JoinHandle<Option<()>>>,
}

impl World {
    fn new(settings: Settings) -> Self {
        let lines = Lines::default();
        let (log, writer) = Log::start(AccessLog::Text, lines.clone(), none_dies()).unwrap();
        let limits = Limits::new(settings.max_connections, settings.max_per_workload, 4096);
        let relay = Arc::new(Relay::new(limits, log));
        let (shared, mut mailboxes) = Shared::new(Arc::clone(&relay), settings, 1).unwrap();
        let worker = Worker::new(0, Arc::new(shared), mailboxes.remove(0)).unwrap();
        Self {
            worker,
            relay,
            lines,
            writer,
        }
    }

    /// Attaches a workload whose outbound connections arrive at these sockets.
    fn attach(
        &mut self,
        name: &str,
        egress: Egress,
        namespace: Option<Namespace>,
        outbound: Vec<TcpListener>,
    ) -> Arc<Attached> {
        let workload = Workload::new(WorkloadName::new("default", name), Place::Elsewhere);
        let attachment = Attachment {
            workload: Arc::new(workload),
            namespace,
            outbound,
            inbound: vec![],
            tunnels: vec![],
            egress,
        };
        self.relay.add(attachment, &Nobody).unwrap();
        let entry = self.relay.entries().pop().unwrap();
        self.worker.open(&entry.attached, &entry.listeners.unwrap());
        entry.attached
    }

    /// Attaches a workload that may connect anywhere.
    fn app(&mut self, name: &str) -> Arc<Attached> {
        self.attach(name, Egress::Allow, None, vec![])
    }

    /// Gives the worker a snapshot with these services.
    fn learn(&mut self, services: impl IntoIterator<Item = Service>) {
        let services = services.into_iter().map(Arc::new);
        self.see(Snapshot {
            services: services.map(|of| (of.name.clone(), of)).collect(),
            ..Snapshot::default()
        });
    }

    fn see(&mut self, snapshot: Snapshot) {
        self.relay.set_snapshot(snapshot);
        (self.worker.version, self.worker.index) = self.relay.index();
        self.worker.route_held();
    }

    /// Begins a connection whose client has already sent something. Its original destination is the address of the listening
    /// socket, at which it has really arrived.
    fn begin_with(
        &mut self,
        (of, direction): (&Arc<Attached>, Direction),
        at: &TcpListener,
        said: &[u8],
    ) -> TcpStream {
        let mut client = connect(at.local_addr().unwrap());
        client.write_all(said).unwrap();
        let socket = accept(at);
        socket.set_nonblocking(true).unwrap();
        if !said.is_empty() {
            wait_for(&socket, PollFlags::IN);
        }
        self.worker.begin(Accepted {
            socket: socket.into(),
            client: client.local_addr().unwrap(),
            direction,
            permit: Permit::acquire(of, direction).unwrap(),
        });
        client
    }

    /// Begins an outbound connection.
    fn begin(&mut self, of: &Arc<Attached>, at: &TcpListener) -> TcpStream {
        self.begin_with((of, Direction::Outbound), at, b"")
    }

    /// Begins an outbound connection to what the listening socket itself is, and returns both sides of it once the worker has
    /// reached the endpoint, and the connection's key.
    fn established(&mut self, of: &Arc<Attached>, at: &TcpListener) -> (TcpStream, TcpStream, Key) {
        let client = self.begin(of, at);
        let key = self.dialing().pop().unwrap();
        self.reach(key);
        (client, accept(at), key)
    }

    /// Reports that the endpoint has taken the connection, if the worker does not know it yet.
    fn reach(&mut self, key: Key) {
        let connection = self.worker.table.get_mut(key).unwrap();
        if connection.session.is_dialing() {
            wait_for(connection.endpoint_socket().unwrap(), PollFlags::OUT);
            self.worker.on_event(key, Side::Endpoint, EventFlags::OUT);
        }
        assert!(!self.dialing().contains(&key));
    }

    fn keys(&self) -> Vec<Key> {
        self.worker.table.iter().map(|(key, _)| key).collect()
    }

    /// Returns the connections that no endpoint has taken yet.
    fn dialing(&self) -> Vec<Key> {
        let all = self.worker.table.iter();
        let dialing = all.filter(|(_, connection)| connection.session.is_dialing());
        dialing.map(|(key, _)| key).collect()
    }

    fn end(&mut self, key: Key, side: Side) -> &mut End {
        let connection = self.worker.table.get_mut(key).unwrap();
        connection.end_mut(side).unwrap()
    }

    /// Lets time pass until then, and reports that the timer has expired.
    fn at(&mut self, time: Instant) {
        self.worker.clock.now = time;
        self.worker.on_timer();
    }

    /// Lets time pass until a millisecond before then.
    fn before(&mut self, time: Instant) {
        self.at(time.checked_sub(Duration::from_millis(1)).unwrap());
    }

    /// Returns the number of commands, or of new snapshots, for which the worker was woken.
    fn woken(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(self.worker.shared.wake(0), &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(error) => {
                assert_eq!(error, Errno::AGAIN);
                0
            }
        }
    }

    /// Ends all connections that are left, and returns the flags of all connections.
    fn flags(mut self) -> Vec<String> {
        self.worker.finish_all(Flag::Cut, |_| true);
        assert_eq!(self.worker.load().connections(), 0);
        self.relay.log.close();
        self.writer.take().unwrap().join().unwrap();
        self.lines.flags()
    }
}

/// Waits until the kernel would report this.
fn wait_for(socket: impl std::os::fd::AsFd, flags: PollFlags) {
    let patience = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    let polled = poll(&mut [PollFd::new(&socket, flags)], Some(&patience));
    assert_eq!(polled, Ok(1), "{flags:?}");
}

/// A listening socket that takes no connection: its backlog is full, so the kernel drops what comes.
fn silent() -> (Socket, TcpStream, SocketAddr) {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let at = listener.local_addr().unwrap().as_socket().unwrap();
    let first = connect(at);
    wait_for(&listener, PollFlags::IN);
    (listener, first, at)
}

/// A service at this listening socket's address.
fn service_at(at: &TcpListener, endpoints: &[SocketAddr]) -> Service {
    let at = at.local_addr().unwrap();
    service(at.ip(), at.port(), endpoints)
}

/// A network namespace: this process's own.
fn namespace(interface: Option<&str>) -> Namespace {
    Namespace {
        open: Arc::new(|v4, count| (0..count).map(|_| socket::new(v4)).collect()),
        interface: interface.map(str::to_owned),
    }
}

/// A connection that no worker has.
pub fn connection() -> Box<Connection> {
    let mut world = World::new(Settings::default());
    let app = world.app("app");
    let (_, _, key) = world.established(&app, &endpoint().0);
    world.worker.table.remove(key).unwrap()
}
