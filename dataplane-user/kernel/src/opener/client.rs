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
use crate::privileges;

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
    /// A socket of IPv4 there, until [`socket_v4`] takes it.
    socket: Option<OwnedFd>,
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
    ask_of_each(request, &[namespace])?.pop()
}

/// Asks the opener for the same in several network namespaces; `None`: there is none. It answers the first request while the last is
/// sent, so on a busy machine this waits for a processor as often as one request does.
fn ask_of_each(
    request: Request,
    namespaces: &[Option<BorrowedFd<'_>>],
) -> Option<Vec<io::Result<Vec<OwnedFd>>>> {
    let opener = OPENER.get()?;
    let socket = opener.socket.lock().unwrap_or_else(PoisonError::into_inner);
    let sent = namespaces
        .iter()
        .map(|namespace| wire::send(&*socket, request, *namespace));
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

/// Asks the opener for something in the namespace of [`within`]; `None`: this thread opens it itself.
fn ask_here(request: Request) -> Option<io::Result<Vec<OwnedFd>>> {
    HERE.with_borrow(|here| ask(request, Some(here.as_ref()?.namespace.as_fd())))
}

fn one(answer: io::Result<Vec<OwnedFd>>) -> io::Result<OwnedFd> {
    let missing = || io::Error::other("the agent's opener has sent no descriptor");
    answer?.pop().ok_or_else(missing)
}

/// Runs `work` on this thread. Meanwhile the opener opens this thread's sockets in the namespace.
///
/// # Errors
/// If the descriptor is not a network namespace, or the opener cannot enter it; otherwise the error of `work`.
pub fn within<T>(namespace: BorrowedFd<'_>, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    ask(Request::Enter, Some(namespace)).transpose()?;
    inside(namespace, None, work)
}

/// Opens a socket in each of these network namespaces, for [`inside`]; `None`: there is no opener.
///
/// # Errors
/// For each: if the descriptor is not a network namespace, or the opener cannot enter it.
pub fn enter(namespaces: &[Option<BorrowedFd<'_>>]) -> Option<Vec<io::Result<OwnedFd>>> {
    let request = Request::Sockets {
        domain: Domain::IPV4.into(),
        kind: Type::DGRAM.into(),
        protocol: 0,
        count: 1,
    };
    let answers = ask_of_each(request, namespaces)?;
    Some(answers.into_iter().map(one).collect())
}

/// As [`within`], in a network namespace that the opener can enter. `socket`: one of IPv4 there.
///
/// # Errors
/// If there is no file left; otherwise the error of `work`.
pub fn inside<T>(
    namespace: BorrowedFd<'_>,
    socket: Option<OwnedFd>,
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
        socket,
    };
    let _back = Back(HERE.replace(Some(here)));
    work()
}

/// Opens any socket of IPv4 in the network namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn socket_v4() -> io::Result<OwnedFd> {
    let opened = HERE.with_borrow_mut(|here| here.as_mut()?.socket.take());
    opened.map_or_else(|| socket(Domain::IPV4, Type::DGRAM, None), Ok)
}

/// Opens a socket in the network namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn socket(domain: Domain, kind: Type, protocol: Option<Protocol>) -> io::Result<OwnedFd> {
    let request = Request::Sockets {
        domain: domain.into(),
        kind: kind.into(),
        protocol: protocol.map_or(0, Into::into),
        count: 1,
    };
    match ask_here(request) {
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
    let domain = if v4 { Domain::IPV4 } else { Domain::IPV6 };
    let request = Request::Sockets {
        domain: domain.into(),
        kind: Type::STREAM.nonblocking().into(),
        protocol: 0,
        count: count.clamp(1, SOCKETS),
    };
    ask(request, Some(namespace))
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
