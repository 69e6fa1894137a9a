//! The agent's side.

use std::{
    cell::RefCell,
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    process::{Child, Command, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use socket2::{Domain, Protocol, Socket, Type};
use tracing::warn;

use super::wire::{self, Request, Table};
use crate::process::privileges;

/// The hidden command that becomes the opener.
pub const COMMAND: &str = "opener";

/// Maximum number of sockets in one request.
pub const SOCKETS: usize = wire::DESCRIPTORS;

/// This process's opener, if it has one.
static OPENER: OnceLock<Opener> = OnceLock::new();

thread_local! {
    /// The network namespace in which this thread has the opener open sockets; none: the thread's own.
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

/// A network namespace that the opener can enter.
#[derive(Debug)]
struct Here {
    namespace: OwnedFd,
    opened: Opened,
}

/// Sockets of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sockets {
    /// The address family.
    pub domain: Domain,
    /// The type.
    pub kind: Type,
    /// The protocol; none: the usual one.
    pub protocol: Option<Protocol>,
    /// How many, up to [`SOCKETS`].
    pub count: usize,
}

impl Sockets {
    fn request(self) -> Request {
        Request::Sockets {
            domain: self.domain.into(),
            kind: self.kind.into(),
            protocol: self.protocol.map_or(0, Into::into),
            count: self.count.clamp(1, SOCKETS),
        }
    }
}

/// Sockets that the opener has opened in a network namespace, each with its kind, until [`socket`] takes them.
#[derive(Debug, Default)]
pub struct Opened(Vec<(Sockets, OwnedFd)>);

impl Opened {
    fn take(&mut self, one: Sockets) -> Option<OwnedFd> {
        let at = self.0.iter().position(|(kind, _)| *kind == one)?;
        Some(self.0.swap_remove(at).1)
    }
}

/// The agent's end.
#[derive(Debug)]
struct Opener {
    /// One request at a time.
    socket: Mutex<OwnedFd>,
    /// Until a thread waits for it.
    process: Mutex<Option<Child>>,
}

/// Starts the opener and gives up the capabilities that only the opener needs, and those that neither process needs. To
/// be called before there are other threads. Without the capabilities for an opener there is none: the agent names a
/// missing capability when it needs it.
///
/// # Errors
/// If the opener cannot be started, or the kernel does not take the capabilities back.
pub fn separate() -> io::Result<()> {
    let permitted = privileges::permitted()?;
    let kept = privileges::of_the_agent(permitted);
    if !privileges::are_enough_for_two(permitted) {
        if privileges::include_sys_admin(permitted) {
            warn!(
                "keeping CAP_SYS_ADMIN, because CAP_BPF or CAP_PERFMON is missing; grant both to this process, and it \
                 leaves CAP_SYS_ADMIN to a process of its own"
            );
        }
        return Ok(privileges::keep_only(kept)?);
    }
    let (own, others) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let process = Command::new("/proc/self/exe")
        .arg(COMMAND)
        .env_clear()
        .stdin(Stdio::from(others))
        .stdout(Stdio::null())
        .spawn()?;
    // Set once: the agent separates when it starts.
    let _ = OPENER.set(Opener {
        socket: Mutex::new(own),
        process: Mutex::new(Some(process)),
    });
    Ok(privileges::keep_only(kept)?)
}

/// Calls `died` with the reason if the opener ends: without it, the agent finds no workload any more.
///
/// # Errors
/// If no thread can be started.
pub fn watch(died: impl FnOnce(&str, String) + Send + 'static) -> io::Result<()> {
    let process = OPENER.get().and_then(|opener| {
        let mut process = opener
            .process
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        process.take()
    });
    let Some(mut process) = process else {
        return Ok(());
    };
    let wait = move || {
        let why = match process.wait() {
            Ok(status) => match (status.code(), status.signal()) {
                (_, Some(signal)) => format!("signal {signal}"),
                (code, None) => format!("exit code {}", code.unwrap_or_default()),
            },
            Err(error) => error.to_string(),
        };
        died(COMMAND, why);
    };
    thread::Builder::new()
        .name(COMMAND.to_owned())
        .spawn(wait)?;
    Ok(())
}

/// Whether this process has an opener.
pub fn is_there() -> bool {
    OPENER.get().is_some()
}

/// Asks the opener; `None`: there is none.
fn ask(request: Request, namespace: Option<BorrowedFd<'_>>) -> Option<io::Result<Vec<OwnedFd>>> {
    ask_all([(request, namespace)])?.pop()
}

/// Asks the opener for several things; `None`: there is none. It answers the first request while the last is sent, so on a busy
/// machine this waits for a processor as often as one request does.
fn ask_all<'a>(
    requests: impl IntoIterator<Item = (Request, Option<BorrowedFd<'a>>)>,
) -> Option<Vec<io::Result<Vec<OwnedFd>>>> {
    let opener = OPENER.get()?;
    let socket = opener.socket.lock().unwrap_or_else(PoisonError::into_inner);
    let requests = requests.into_iter();
    let sent = requests.map(|(request, namespace)| wire::send(&*socket, request, namespace));
    let sent: Vec<io::Result<()>> = sent.collect();
    let answers = sent.into_iter().map(|sent| {
        let answer = sent.and_then(|()| wire::answer(&*socket));
        answer.unwrap_or_else(|error| {
            let text = format!("the agent's opener does not answer: {error}");
            Err(io::Error::new(error.kind(), text))
        })
    });
    Some(answers.collect())
}

/// Asks the opener for something in the namespace of [`inside`]; `None`: this thread opens it itself.
fn ask_here(request: Request) -> Option<io::Result<Vec<OwnedFd>>> {
    HERE.with_borrow(|here| ask(request, Some(here.as_ref()?.namespace.as_fd())))
}

fn one(answer: io::Result<Vec<OwnedFd>>) -> io::Result<OwnedFd> {
    let missing = || io::Error::other("the agent's opener has sent no descriptor");
    answer?.pop().ok_or_else(missing)
}

/// Has the opener enter network namespaces, and open these sockets in each, for [`inside`]; `None`: there is no opener. Takes few
/// namespaces at a time, because it sends all requests before it reads an answer.
///
/// # Errors
/// For each namespace: if the descriptor is none, or the opener cannot enter it or cannot open the first of the sockets. The kernel's
/// refusal of another socket is the error of [`socket`].
pub fn enter(
    namespaces: &[BorrowedFd<'_>],
    sockets: &[Sockets],
) -> Option<Vec<io::Result<Opened>>> {
    let requests: Vec<Request> = match sockets {
        [] => vec![Request::Enter],
        _ => sockets.iter().map(|kind| kind.request()).collect(),
    };
    let of_one = |namespace| requests.iter().map(move |request| (*request, namespace));
    let all = namespaces.iter().map(|namespace| Some(*namespace));
    let mut answers = ask_all(all.flat_map(of_one))?.into_iter();
    let entered = namespaces.iter().map(|_| {
        // All of its answers are taken, also if the first is an error.
        let its: Vec<_> = answers.by_ref().take(requests.len()).collect();
        let mut opened = Opened::default();
        for (at, answer) in its.into_iter().enumerate() {
            let files = match answer {
                Err(error) if at == 0 => return Err(error),
                answer => answer.unwrap_or_default(),
            };
            if let Some(kind) = sockets.get(at) {
                let one = Sockets { count: 1, ..*kind };
                opened.0.extend(files.into_iter().map(|file| (one, file)));
            }
        }
        Ok(opened)
    });
    Some(entered.collect())
}

/// Runs `work` on this thread. Meanwhile this thread's sockets are those that the opener has opened in the namespace, or opens there.
///
/// # Errors
/// If there is no file left; otherwise the error of `work`.
pub fn inside<T>(
    namespace: BorrowedFd<'_>,
    opened: Opened,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    /// Restores the earlier namespace, also after a panic.
    struct Back(Option<Here>);
    impl Drop for Back {
        fn drop(&mut self) {
            HERE.set(self.0.take());
        }
    }
    let here = Here {
        namespace: namespace.try_clone_to_owned()?,
        opened,
    };
    let _back = Back(HERE.replace(Some(here)));
    work()
}

/// Opens a socket in the network namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn socket(domain: Domain, kind: Type, protocol: Option<Protocol>) -> io::Result<OwnedFd> {
    let wanted = Sockets {
        domain,
        kind,
        protocol,
        count: 1,
    };
    let opened = HERE.with_borrow_mut(|here| here.as_mut()?.opened.take(wanted));
    if let Some(opened) = opened {
        return Ok(opened);
    }
    match ask_here(wanted.request()) {
        Some(answer) => one(answer),
        None => Ok(Socket::new(domain, kind, protocol)?.into()),
    }
}

/// Opens sockets of TCP that do not block, up to [`SOCKETS`], in a network namespace; `None`: this process opens them
/// itself. `v4`: their family.
pub fn tcp_sockets(
    namespace: BorrowedFd<'_>,
    v4: bool,
    count: usize,
) -> Option<io::Result<Vec<OwnedFd>>> {
    let sockets = Sockets {
        domain: if v4 { Domain::IPV4 } else { Domain::IPV6 },
        kind: Type::STREAM.nonblocking(),
        protocol: None,
        count,
    };
    ask(sockets.request(), Some(namespace))
}

/// Opens a table (`/proc/net`) of the network namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn table(table: Table) -> io::Result<File> {
    match ask_here(Request::Table(table)) {
        Some(answer) => Ok(one(answer)?.into()),
        None => File::open(table.path()),
    }
}

/// Opens the network namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn this_namespace() -> io::Result<OwnedFd> {
    let here = HERE.with_borrow(|here| {
        let here = here.as_ref();
        here.map(|here| here.namespace.try_clone()).transpose()
    })?;
    match here {
        Some(here) => Ok(here),
        None => Ok(File::open("/proc/thread-self/ns/net")?.into()),
    }
}

/// Opens the sysctls by which answers have marks, of the network namespace that this thread is in, for writing; `None`: this
/// thread can open them itself.
pub fn mark_settings() -> Option<io::Result<Vec<File>>> {
    let answer = ask_here(Request::MarkSettings)?;
    Some(answer.map(|files| files.into_iter().map(File::from).collect()))
}

/// Opens a map by its id; `None`: this process opens it itself.
pub fn map(id: u32) -> Option<io::Result<OwnedFd>> {
    ask(Request::Map(id), None).map(one)
}

/// Opens a program by its id; `None`: this process opens it itself.
pub fn program(id: u32) -> Option<io::Result<OwnedFd>> {
    ask(Request::Program(id), None).map(one)
}

/// Mounts a BPF file system where it is usually; `None`: this process mounts it itself.
pub fn mount() -> Option<io::Result<()>> {
    ask(Request::Mount, None).map(|answer| answer.map(drop))
}
