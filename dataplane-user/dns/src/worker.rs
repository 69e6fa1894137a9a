//! A thread that answers the queries that arrive at its sockets.

use std::{
    cell::RefCell,
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rand::{SeedableRng as _, rngs::SmallRng};
use tokio::{
    io::Interest,
    net::{TcpListener, TcpStream, UdpSocket},
    runtime::Runtime,
    sync::{
        Notify,
        mpsc::{self, UnboundedReceiver},
        watch,
    },
    task::{JoinSet, LocalSet, yield_now},
    time::{sleep, timeout},
};

use super::{
    batch::{BATCH, Batch},
    beats,
    busy_poll::BusyPoll,
    exchange::{receive, send},
    rule::Rule,
    shared::{Asker, Askers, Now, Shared},
    sockets::Listener,
    wire::Transport,
};

/// The rule of queries for which the agent asked resolvers.
const FORWARD: &str = Rule::Forward.word();
/// How long a connection may be idle, or take to send a query.
const IDLE: Duration = Duration::from_secs(10);
/// How many batches a socket's last are at most: more than the kernel's default room (`net.core.rmem_default`) holds. A
/// client may send faster than this thread answers.
const LAST: usize = 512 / BATCH;

/// A socket whose queries are to be answered.
pub struct Job {
    pub listener: Listener,
    pub askers: Askers,
    /// Ends when its sender is dropped.
    pub end: watch::Receiver<()>,
}

/// A thread's buffers and state for the queries of one system call, from any of its sockets.
struct Desk {
    batch: Batch,
    answers: Vec<(Vec<u8>, SocketAddr)>,
    spare: Vec<Vec<u8>>,
    random: SmallRng,
    poll: BusyPoll,
    /// Wakes the task that polls.
    polls: Rc<Notify>,
}

/// Answers queries until the server's sender of sockets is dropped and all sockets of this thread have ended.
pub fn run(
    shared: &Arc<Shared>,
    number: usize,
    runtime: &Runtime,
    mut jobs: UnboundedReceiver<Job>,
) -> io::Result<()> {
    let polls = Rc::new(Notify::new());
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let desk = Rc::new(RefCell::new(Desk {
        batch: Batch::new(),
        answers: Vec::with_capacity(BATCH),
        spare: Vec::with_capacity(BATCH),
        random: SmallRng::from_rng(&mut rand::rng()),
        poll: BusyPoll::new(cpus),
        polls: Rc::clone(&polls),
    }));
    let poll = async {
        loop {
            polls.notified().await;
            // The runtime polls for arrived packets at each turn, and does not sleep.
            while desk.borrow_mut().poll.goes_on(Instant::now()) {
                // Threads that wait for this CPU run first.
                thread::yield_now();
                yield_now().await;
            }
        }
    };
    let take_jobs = async {
        let mut tasks = JoinSet::new();
        loop {
            let job = tokio::select! {
                job = jobs.recv() => job,
                // None: there is no task.
                Some(ended) = tasks.join_next() => {
                    ended?;
                    continue;
                }
            };
            let Some(job) = job else { break };
            let (shared, desk) = (Arc::clone(shared), Rc::clone(&desk));
            tasks.spawn_local(async move {
                if let Err(error) = work(&shared, &desk, job).await {
                    tracing::debug!("a socket's queries are not answered any more: {error}");
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended?;
        }
        io::Result::Ok(())
    };
    let beat = async {
        loop {
            shared.beats.say(number, Instant::now());
            sleep(beats::EVERY).await;
        }
    };
    let result = LocalSet::new().block_on(runtime, async {
        tokio::select! {
            result = take_jobs => result,
            () = beat => Ok(()),
            () = poll => Ok(()),
        }
    });
    shared.beats.end(number);
    result
}

async fn work(shared: &Arc<Shared>, desk: &RefCell<Desk>, job: Job) -> io::Result<()> {
    let Job {
        listener,
        askers,
        end,
    } = job;
    match listener {
        Listener::Udp(socket) => answer_datagrams(shared, desk, socket, &askers, end).await,
        Listener::Tcp(socket) => {
            tokio::select! {
                () = accept(shared, socket, &askers) => {}
                () = ended(end) => {}
            }
            Ok(())
        }
    }
}

/// Returns when the sender is dropped.
async fn ended(mut end: watch::Receiver<()>) {
    // No value is ever sent.
    while end.changed().await.is_ok() {}
}

async fn answer_datagrams(
    shared: &Arc<Shared>,
    desk: &RefCell<Desk>,
    socket: Arc<UdpSocket>,
    askers: &Askers,
    end: watch::Receiver<()>,
) -> io::Result<()> {
    let end = ended(end);
    tokio::pin!(end);
    let v4 = socket.local_addr()?.is_ipv4();
    let answer = || {
        let mut desk = desk.borrow_mut();
        desk.answer(shared, (&socket, v4), askers)
    };
    let mut turn = 0;
    loop {
        tokio::select! {
            ready = socket.readable() => ready?,
            () = &mut end => {
                // Answers the queries that have already arrived, as the last ones.
                for _ in 0..LAST {
                    if answer().is_err() {
                        break;
                    }
                    yield_now().await;
                }
                return Ok(());
            }
        }
        let count = match socket.try_io(Interest::READABLE, answer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            // A client to which an answer went does not listen any more.
            Err(error) => {
                tracing::debug!("cannot receive queries: {error}");
                BATCH
            }
        };
        // After a batch, other tasks of this thread run. Yielding costs a system call.
        turn += count;
        if turn >= BATCH {
            turn = 0;
            yield_now().await;
        }
    }
}

impl Desk {
    /// Answers the queries of one system call, and returns their number.
    fn answer(
        &mut self,
        shared: &Arc<Shared>,
        (socket, v4): (&Arc<UdpSocket>, bool),
        askers: &Askers,
    ) -> io::Result<usize> {
        let Self {
            batch,
            answers,
            spare,
            random,
            poll,
            polls,
        } = self;
        let zone = shared.zone();
        let mut count = 0;
        batch.receive(&**socket, v4, |query, from| {
            count += 1;
            let mut out = spare.pop().unwrap_or_default();
            out.clear();
            let asker = Asker {
                of: askers,
                addr: from.ip(),
            };
            let arrived = shared.log.begin();
            match shared.now(&zone, query, asker, Transport::Udp, random, &mut out) {
                Now::Answered(by) => {
                    shared.note(arrived, asker, Transport::Udp, (query, &out), by);
                    answers.push((out, from));
                }
                Now::Nothing => spare.push(out),
                Now::Later(later) => {
                    spare.push(out);
                    // A socket that no task receives from any more must close at once, so that captured queries go to
                    // their resolvers again.
                    let (own, socket) = (Arc::clone(shared), Arc::downgrade(socket));
                    let (query, of) = (query.to_vec(), askers.clone());
                    tokio::spawn(async move {
                        let answer = own.later(later, &query, Transport::Udp).await;
                        let asker = Asker {
                            of: &of,
                            addr: from.ip(),
                        };
                        let messages = (&query[..], &answer[..]);
                        own.note(arrived, asker, Transport::Udp, messages, FORWARD);
                        if let Some(socket) = socket.upgrade() {
                            // The client asks again if this fails.
                            let _ = socket.try_send_to(&answer, from);
                        }
                    });
                }
            }
        })?;
        poll.arrived(Instant::now());
        if !answers.is_empty() {
            batch.send(&**socket, answers);
            spare.extend(answers.drain(..).map(|(bytes, _)| bytes));
            if count < BATCH && poll.answered(Instant::now()) {
                polls.notify_one();
            }
        }
        Ok(count)
    }
}

async fn accept(shared: &Arc<Shared>, socket: Arc<TcpListener>, askers: &Askers) {
    loop {
        let (stream, from) = match socket.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // The process is out of file descriptors, or the client is gone. The pause prevents a busy loop in all
                // cases.
                tracing::debug!("cannot accept a connection: {error}");
                sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let asker = Asker {
            of: askers,
            addr: from.ip(),
        };
        let Some(counted) = shared.connection(asker) else {
            continue;
        };
        let (shared, askers) = (Arc::clone(shared), askers.clone());
        tokio::spawn(async move {
            let _counted = counted;
            // The client's connection: it knows why it broke.
            let _ = serve(&shared, stream, from, &askers).await;
        });
    }
}

/// Answers the queries of a connection, each as soon as its answer is known (RFC 7766, 6.2.1.1).
async fn serve(
    shared: &Arc<Shared>,
    stream: TcpStream,
    from: SocketAddr,
    askers: &Askers,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = stream.into_split();
    let (answers, mut answered) = mpsc::channel::<Vec<u8>>(BATCH);
    let write = async {
        while let Some(answer) = answered.recv().await {
            timeout(IDLE, send(&mut writer, &answer)).await??;
        }
        Ok(())
    };
    let read = async move {
        let mut random = SmallRng::from_rng(&mut rand::rng());
        while let Ok(query) = timeout(IDLE, receive(&mut reader)).await {
            // The client sends no more, but still gets the answers to its earlier queries.
            let Ok(query) = query else { break };
            let mut out = Vec::new();
            let asker = Asker {
                of: askers,
                addr: from.ip(),
            };
            let arrived = shared.log.begin();
            let now = {
                let zone = shared.zone();
                shared.now(&zone, &query, asker, Transport::Tcp, &mut random, &mut out)
            };
            match now {
                Now::Answered(by) => {
                    shared.note(arrived, asker, Transport::Tcp, (&query, &out), by);
                    if answers.send(out).await.is_err() {
                        break;
                    }
                }
                Now::Nothing => break,
                Now::Later(later) => {
                    let (own, of, answers) = (Arc::clone(shared), askers.clone(), answers.clone());
                    tokio::spawn(async move {
                        let answer = own.later(later, &query, Transport::Tcp).await;
                        let asker = Asker {
                            of: &of,
                            addr: from.ip(),
                        };
                        own.note(arrived, asker, Transport::Tcp, (&query, &answer), FORWARD);
                        // The connection may be gone.
                        let _ = answers.send(answer).await;
                    });
                }
            }
        }
        io::Result::Ok(())
    };
    tokio::try_join!(read, write).map(drop)
}
