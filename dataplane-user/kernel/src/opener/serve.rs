//! The opener's side.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{SigSet, Signal},
};
use socket2::{Domain, Protocol, Socket, Type};

use super::wire::{self, Request};
use crate::{capture::routing::mark_settings, pins, process::privileges, sys};

/// Answers requests at this socket until the agent has ended.
///
/// # Errors
/// If the socket is not an agent's, or a request is one that no agent sends.
pub fn serve(agent: impl AsFd) -> io::Result<()> {
    // A signal to the agent's group is the agent's: it needs this process until its own end.
    let mut others = SigSet::empty();
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM] {
        others.add(signal);
    }
    others.thread_block()?;
    privileges::keep_only(privileges::of_the_opener(privileges::permitted()?))?;
    let home = File::open("/proc/thread-self/ns/net")?;
    while let Some((request, namespace)) = wire::receive(&agent)? {
        let result = match &namespace {
            None => open(request),
            Some(namespace) => open_in(namespace.as_fd(), home.as_fd(), request)?,
        };
        wire::reply(&agent, &result)?;
    }
    Ok(())
}

/// Opens something in a network namespace.
///
/// # Errors
/// If this thread cannot come back.
fn open_in(
    namespace: BorrowedFd<'_>,
    home: BorrowedFd<'_>,
    request: Request,
) -> io::Result<io::Result<Vec<OwnedFd>>> {
    if let Err(error) = setns(namespace, CloneFlags::CLONE_NEWNET) {
        return Ok(Err(error.into()));
    }
    let result = open(request);
    // Return at once: a thread keeps a namespace alive, and with it the interfaces of a removed pod.
    setns(home, CloneFlags::CLONE_NEWNET)?;
    Ok(result)
}

fn open(request: Request) -> io::Result<Vec<OwnedFd>> {
    match request {
        Request::Enter => Ok(Vec::new()),
        Request::Sockets {
            domain,
            kind,
            protocol,
            count,
        } => {
            let protocol = (protocol != 0).then(|| Protocol::from(protocol));
            let open = |_| {
                let socket = Socket::new(Domain::from(domain), Type::from(kind), protocol)?;
                Ok(socket.into())
            };
            (0..count).map(open).collect()
        }
        Request::Table(table) => Ok(vec![File::open(table.path())?.into()]),
        Request::MarkSettings => Ok(mark_settings()?.into_iter().map(OwnedFd::from).collect()),
        Request::Map(id) => Ok(vec![sys::map_by_id(id)?]),
        Request::Program(id) => Ok(vec![sys::prog_by_id(id)?]),
        Request::Mount => {
            pins::mount()?;
            Ok(Vec::new())
        }
    }
}
