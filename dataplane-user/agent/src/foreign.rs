//! The listening sockets of a proxy that is not the agent's, and need not know of the agent.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use kernel::{capture::Namespace, listening::Listening, namespaces};
use plan::enrol::Problem;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tracing::debug;

/// The requirements for copies of other processes' sockets.
const REMEDY: &str = "the agent needs the host's PID namespace, CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH \
                      (kustomize component `foreign-proxy`, chart value `foreignProxy`); or restart the \
                      proxy after its pod is captured; the kernel then reports its socket";

/// Listening sockets of a proxy.
#[derive(Debug)]
pub struct ForeignListeners {
    /// Each with the family of connections that it takes.
    pub sockets: Vec<(u32, OwnedFd)>,
    /// Why some sockets could not be taken.
    pub problem: Option<Problem>,
}

/// Returns the sockets that listen at a port in a namespace, for the families that are `wanted`.
///
/// # Errors
/// If they cannot be read: it is then unknown whether there is one.
pub fn listeners(
    namespace: &Namespace,
    port: u16,
    wanted: impl Fn(u32) -> bool,
) -> Result<ForeignListeners, Problem> {
    let mut taken = ForeignListeners {
        sockets: Vec::new(),
        problem: None,
    };
    if !wanted(4) && !wanted(6) {
        return Ok(taken);
    }
    let listening = || -> Result<Vec<Listening>, Problem> {
        let read = move || kernel::listening::listening(port);
        namespaces::within(namespace.file.as_fd(), read).map_err(|error| {
            Problem::of_node(format!(
                "cannot look for its proxy's listening socket: {error}"
            ))
        })
    };
    // An IPv6 socket takes both families, except with `IPV6_V6ONLY`; this is read once the socket is there.
    let mut inodes: HashMap<u64, &[u32]> = HashMap::new();
    for socket in listening()? {
        let families: &[u32] = if socket.addr.is_ipv4() { &[4] } else { &[6, 4] };
        inodes.insert(socket.inode, families);
    }
    inodes.retain(|_, families| families.iter().any(|family| wanted(*family)));
    let Search { found, refused } = search(&inodes);
    let mut missing: BTreeSet<u64> = inodes.keys().copied().collect();
    for (inode, socket) in found {
        missing.remove(&inode);
        let only_v6 = rustix::net::sockopt::ipv6_v6only(&socket).map_err(|error| {
            Problem::of_node(format!(
                "cannot look at its proxy's listening socket: {error}"
            ))
        });
        // An IPv4 socket does not have this option.
        let only_v6 = inodes[&inode] != [4] && only_v6?;
        for family in inodes[&inode] {
            if *family == 4 && only_v6 || !wanted(*family) {
                continue;
            }
            let socket = socket.try_clone().map_err(|error| {
                Problem::of_node(format!("cannot keep its proxy's listening socket: {error}"))
            })?;
            taken.sockets.push((*family, socket));
        }
    }
    if missing.is_empty() {
        return Ok(taken);
    }
    // A socket that was closed meanwhile is no problem.
    let still: BTreeSet<u64> = listening()?.iter().map(|socket| socket.inode).collect();
    if missing.is_disjoint(&still) {
        return Ok(taken);
    }
    let begin = format!(
        "inbound connections do not reach its proxy, which listens at port {port}: its socket cannot be taken"
    );
    taken.problem = Some(match refused {
        Some(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Problem::of_node(format!("{begin}: {error}; {REMEDY}"))
        }
        Some(error) => Problem::of_node(format!("{begin}: {error}")),
        None if !namespaces::sees_all_processes().unwrap_or(false) => Problem::of_node(format!(
            "{begin}: the socket belongs to no process that the agent sees; {REMEDY}"
        )),
        None => Problem::of_workload(format!("{begin}: no process has it open")),
    });
    Ok(taken)
}

/// The outcome of a look at the descriptors of all processes.
#[derive(Debug, Default)]
struct Search {
    /// Descriptors of our own, with their sockets' inodes.
    found: Vec<(u64, OwnedFd)>,
    /// Why a process could not be read, or a descriptor not copied; of several reasons, the first.
    refused: Option<io::Error>,
}

impl Search {
    /// A process that ends, or a descriptor that is closed, during the search is no refusal.
    fn refuse(&mut self, error: io::Error) {
        const PASSING: [i32; 3] = [libc::ENOENT, libc::ESRCH, libc::EBADF];
        let is_passing = error.raw_os_error().is_some_and(|n| PASSING.contains(&n));
        if !is_passing {
            self.refused.get_or_insert(error);
        }
    }
}

/// Searches the descriptors of other processes for sockets.
fn search(inodes: &HashMap<u64, &[u32]>) -> Search {
    let mut search = Search::default();
    if inodes.is_empty() {
        return search;
    }
    let processes = match fs::read_dir("/proc") {
        Ok(processes) => processes,
        Err(error) => {
            search.refuse(error);
            return search;
        }
    };
    for process in processes {
        let process = match process {
            Ok(process) => process,
            Err(error) => {
                search.refuse(error);
                break;
            }
        };
        let pid = process.file_name().to_str().and_then(|n| n.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            continue;
        };
        if let Err(error) = of_process(pid, &process.path(), inodes, &mut search) {
            search.refuse(error);
        }
    }
    search
}

/// Searches the descriptors of one process.
fn of_process(
    pid: Pid,
    directory: &Path,
    inodes: &HashMap<u64, &[u32]>,
    search: &mut Search,
) -> io::Result<()> {
    for entry in fs::read_dir(directory.join("fd"))? {
        let entry = entry?;
        let link = match fs::read_link(entry.path()) {
            Ok(link) => link,
            Err(error) => {
                search.refuse(error);
                continue;
            }
        };
        let inode = link
            .to_str()
            .and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']'))
            .and_then(|inode| inode.parse().ok());
        let Some(inode) = inode.filter(|inode| inodes.contains_key(inode)) else {
            continue;
        };
        if search.found.iter().any(|(known, _)| *known == inode) {
            continue;
        }
        let number = entry.file_name().to_str().and_then(|n| n.parse().ok());
        let Some(number) = number else {
            continue;
        };
        let taken = pidfd_open(pid, PidfdFlags::empty())
            .and_then(|process| pidfd_getfd(process, number, PidfdGetfdFlags::empty()));
        match taken {
            Ok(socket) => search.found.push((inode, socket)),
            Err(error) => {
                debug!(?pid, number, "cannot take a listening socket: {error}");
                search.refuse(error.into());
            }
        }
    }
    Ok(())
}
