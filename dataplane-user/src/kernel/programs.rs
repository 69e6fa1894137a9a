//! Our programs, and how they are attached: one pinned cgroup link each, whose program is swapped
//! in place.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{Program, ProgramError},
};
use aya_obj::generated::{
    bpf_attach_type::{
        self, BPF_CGROUP_GETSOCKOPT, BPF_CGROUP_INET_SOCK_RELEASE, BPF_CGROUP_INET4_CONNECT,
        BPF_CGROUP_INET4_GETPEERNAME, BPF_CGROUP_INET4_GETSOCKNAME, BPF_CGROUP_INET6_CONNECT,
        BPF_CGROUP_INET6_GETPEERNAME, BPF_CGROUP_INET6_GETSOCKNAME, BPF_CGROUP_SOCK_OPS,
        BPF_CGROUP_UDP4_RECVMSG, BPF_CGROUP_UDP4_SENDMSG, BPF_CGROUP_UDP6_RECVMSG,
        BPF_CGROUP_UDP6_SENDMSG, BPF_TRACE_RAW_TP,
    },
    bpf_prog_type::{
        self, BPF_PROG_TYPE_CGROUP_SOCK, BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        BPF_PROG_TYPE_CGROUP_SOCKOPT, BPF_PROG_TYPE_SOCK_OPS, BPF_PROG_TYPE_TRACING,
    },
};
use dataplane_common::capture::MeterSets;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use zerocopy::FromZeros as _;

use super::{
    error::{Doing, Error},
    fields::Types,
    map::Mapped,
    object,
    pins::{self, MAPS, Pins, spec},
    sys::{self, LinkTarget},
    tc::Direction,
};

/// A program and its hook.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its name, in the object, in the kernel and of its link's pin.
    pub name: &'static str,
    /// Its type.
    pub kind: bpf_prog_type,
    /// Where it is attached.
    pub hook: bpf_attach_type,
}

const fn sock_addr(name: &'static str, hook: bpf_attach_type) -> Spec {
    Spec {
        name,
        kind: BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        hook,
    }
}

/// Every program, in the order in which they are attached: what cleans up and what answers a
/// socket's questions come before what makes it ask them.
pub const PROGRAMS: [Spec; 9] = [
    Spec {
        name: "sock_release",
        kind: BPF_PROG_TYPE_CGROUP_SOCK,
        hook: BPF_CGROUP_INET_SOCK_RELEASE,
    },
    sock_addr("recvmsg4", BPF_CGROUP_UDP4_RECVMSG),
    sock_addr("recvmsg6", BPF_CGROUP_UDP6_RECVMSG),
    sock_addr("getpeername4", BPF_CGROUP_INET4_GETPEERNAME),
    sock_addr("getpeername6", BPF_CGROUP_INET6_GETPEERNAME),
    sock_addr("sendmsg4", BPF_CGROUP_UDP4_SENDMSG),
    sock_addr("sendmsg6", BPF_CGROUP_UDP6_SENDMSG),
    sock_addr("connect4", BPF_CGROUP_INET4_CONNECT),
    sock_addr("connect6", BPF_CGROUP_INET6_CONNECT),
];

/// The programs of mesh capture, which are attached only where there is a mesh, and before those
/// above: what they leave alone, and what goes direct, is then a service's or not. Those come first that are told when
/// what the others begin is over.
pub const CAPTURE_PROGRAMS: [Spec; 8] = [
    traced("tcp_states"),
    traced("tcp_gone"),
    TCP_EVENTS,
    Spec {
        name: "getsockopt",
        kind: BPF_PROG_TYPE_CGROUP_SOCKOPT,
        hook: BPF_CGROUP_GETSOCKOPT,
    },
    sock_addr("getsockname4", BPF_CGROUP_INET4_GETSOCKNAME),
    sock_addr("getsockname6", BPF_CGROUP_INET6_GETSOCKNAME),
    sock_addr("capture4", BPF_CGROUP_INET4_CONNECT),
    sock_addr("capture6", BPF_CGROUP_INET6_CONNECT),
];

/// The program that is told of connections to a proxy. The kernel asks it ten times for every connection, so it is
/// attached when there is somebody with a proxy ([`attach_events`]), and stays from then on.
const TCP_EVENTS: Spec = Spec {
    name: "tcp_events",
    kind: BPF_PROG_TYPE_SOCK_OPS,
    hook: BPF_CGROUP_SOCK_OPS,
};

const fn traced(name: &'static str) -> Spec {
    Spec {
        name,
        kind: BPF_PROG_TYPE_TRACING,
        hook: BPF_TRACE_RAW_TP,
    }
}

/// The kernel's tracepoint of a program that is attached to one.
pub fn tracepoint(program: &str) -> Option<&'static str> {
    match program {
        "tcp_states" => Some("inet_sock_set_state"),
        "tcp_gone" => Some("tcp_destroy_sock"),
        _ => None,
    }
}

impl Spec {
    /// Whether it is attached to a tracepoint, and not to a cgroup.
    pub fn is_traced(&self) -> bool {
        self.kind == BPF_PROG_TYPE_TRACING
    }
}

/// The program that is attached to workloads' network namespaces.
pub const INBOUND: &str = "inbound_lookup";

/// What the name of a link's pin ends with while it replaces another.
pub const REPLACEMENT: &str = "-new";

/// Loads the programs. Maps that are pinned are used; those that are not are created and pinned.
///
/// `flows`: how many the tables of conntrack have room for, if they are created; `packet`: whether
/// the packet path's programs are loaded too, and its tables made; `capture`: those of mesh capture.
pub fn load(pins: &Pins, flows: u32, packet: bool, capture: bool) -> Result<Ebpf, Error> {
    let types = if capture { Some(Types::read()?) } else { None };
    let load = |level| load_logging(pins, flows, packet, types.as_ref(), level);
    // Writing the verifier's log takes most of the time of a load: only where there is something to
    // read in it, and then the path that led to the refusal, without all those that did not.
    load(VerifierLogLevel::DISABLE).or_else(|error| match error {
        Error::Load { .. } => load(VerifierLogLevel::DEBUG),
        error => Err(error),
    })
}

fn load_logging(
    pins: &Pins,
    flows: u32,
    packet: bool,
    types: Option<&Types>,
    level: VerifierLogLevel,
) -> Result<Ebpf, Error> {
    let capture = types.is_some();
    let mut loader = EbpfLoader::new();
    loader.verifier_log_level(level);
    if let Some(types) = types {
        loader.override_global("FIELDS", &types.fields[..], true);
    }
    for map in &MAPS {
        if map.is_of_flows() && !packet {
            // The loader makes every map of the object. Those that no loaded program uses are gone
            // with it; until then, they are as small as can be.
            loader.map_max_entries(map.name, 1);
            continue;
        }
        if let Some(entries) = map.entries(flows) {
            loader.map_max_entries(map.name, entries);
        }
        loader.map_pin_path(map.name, pins.map(map.name));
    }
    let mut ebpf = loader.load(object::programs()?).map_err(Box::new)?;
    // Those for packets are by far the largest: first.
    let packet = Direction::ALL.into_iter().filter(|_| packet);
    let by_packets = Direction::CAPTURE.into_iter().filter(|_| capture);
    let names = packet.chain(by_packets).map(Direction::program);
    let inbound = capture.then_some(INBOUND);
    let names = names.chain(inbound);
    let names: Vec<&'static str> = names.chain(wanted(capture).map(|spec| spec.name)).collect();
    load_all(&mut ebpf, &names, types)?;
    Ok(ebpf)
}

/// Loads programs, as many at the same time as there are CPUs: the kernel checks each for itself, which takes most of
/// the time of an agent's start. The error is that of the first by name.
fn load_all(ebpf: &mut Ebpf, names: &[&'static str], types: Option<&Types>) -> Result<(), Error> {
    let mut there: HashMap<String, &mut Program> = ebpf
        .programs_mut()
        .map(|(name, program)| (name.to_owned(), program))
        .collect();
    let mut programs = Vec::new();
    for name in names {
        programs.push((*name, there.remove(*name).ok_or_else(|| absent(name))?));
    }
    let threads = thread::available_parallelism().map_or(1, Into::into);
    let (waiting, failed) = (
        Mutex::new(programs.into_iter()),
        Mutex::new(BTreeMap::new()),
    );
    let next = || lock(&waiting).next();
    let work = || {
        while let Some((name, program)) = next() {
            if let Err(error) = load_one(name, program, types) {
                lock(&failed).insert(name, error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(names.len()) {
            // Without it, this thread does its work.
            let _ = thread::Builder::new()
                .name("load".to_owned())
                .spawn_scoped(scope, work);
        }
        work();
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.into_values().next().map_or(Ok(()), Err)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn load_one(name: &'static str, program: &mut Program, types: Option<&Types>) -> Result<(), Error> {
    let result = match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockopt(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::BtfTracePoint(program) => {
            let (Some(tracepoint), Some(types)) = (tracepoint(name), types) else {
                return Err(absent(name));
            };
            program.load(tracepoint, &types.btf)
        }
        Program::SkLookup(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        _ => return Err(absent(name)),
    };
    result.map_err(|source| load_error(name, source))
}

/// The programs that are attached to the cgroup or to tracepoints, in the order in which they are.
fn wanted(capture: bool) -> impl Iterator<Item = &'static Spec> {
    let capturing = CAPTURE_PROGRAMS.iter().filter(move |_| capture);
    capturing.chain(&PROGRAMS)
}

/// A descriptor of its own of the loaded program that is told of connections to a proxy.
pub fn events_program(ebpf: &Ebpf) -> Result<OwnedFd, Error> {
    descriptor(ebpf, &TCP_EVENTS)?
        .try_clone_to_owned()
        .doing(|| format!("cannot keep program {}", TCP_EVENTS.name))
}

/// A descriptor of its own of the loaded program for workloads' network namespaces.
pub fn inbound_program(ebpf: &Ebpf) -> Result<OwnedFd, Error> {
    let Some(Program::SkLookup(program)) = ebpf.program(INBOUND) else {
        return Err(absent(INBOUND));
    };
    let fd = program.fd().map_err(|source| load_error(INBOUND, source))?;
    fd.as_fd()
        .try_clone_to_owned()
        .doing(|| format!("cannot keep program {INBOUND}"))
}

/// A descriptor of its own of a loaded program for interfaces.
pub fn packet_program(ebpf: &Ebpf, direction: Direction) -> Result<OwnedFd, Error> {
    let name = direction.program();
    let Some(Program::SchedClassifier(program)) = ebpf.program(name) else {
        return Err(absent(name));
    };
    let fd = program.fd().map_err(|source| load_error(name, source))?;
    fd.as_fd()
        .try_clone_to_owned()
        .doing(|| format!("cannot keep program {name}"))
}

/// A loaded program's descriptor.
fn descriptor<'a>(ebpf: &'a Ebpf, spec: &Spec) -> Result<BorrowedFd<'a>, Error> {
    let fd = match ebpf.program(spec.name) {
        Some(Program::CgroupSockAddr(program)) => program.fd(),
        Some(Program::CgroupSock(program)) => program.fd(),
        Some(Program::CgroupSockopt(program)) => program.fd(),
        Some(Program::SockOps(program)) => program.fd(),
        Some(Program::BtfTracePoint(program)) => program.fd(),
        _ => return Err(absent(spec.name)),
    };
    Ok(fd.map_err(|source| load_error(spec.name, source))?.as_fd())
}

pub fn absent(program: &str) -> Error {
    Error::Io {
        what: format!("the object has no program {program}"),
        source: std::io::ErrorKind::NotFound.into(),
    }
}

pub fn load_error(program: &'static str, source: ProgramError) -> Error {
    Error::Load {
        program,
        source: Box::new(source),
    }
}

/// Attaches every program to a cgroup or its tracepoint, or, where its link is there already, swaps the program in
/// place: no moment without one. The one that is told of connections to a proxy is only swapped.
///
/// The kernel runs programs of a cgroup in the order in which they were attached. So where those of
/// capture are new, those for services that have the same hook are attached anew after them, and
/// only then lose the link they had: for a moment they run twice, and the second time find
/// nothing to translate.
///
/// Answers whether they were attached to another cgroup.
pub fn attach(ebpf: &Ebpf, pins: &Pins, cgroup: &Path, capture: bool) -> Result<bool, Error> {
    let directory =
        File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
    let id = cgroup_id(&directory, cgroup)?;
    if !capture {
        detach_capture(pins)?;
    }
    let mut before_us = false;
    let mut moved = false;
    for spec in wanted(capture) {
        let fd = descriptor(ebpf, spec)?;
        let is_capture = CAPTURE_PROGRAMS.iter().any(|other| other.name == spec.name);
        let after = !is_capture && before_us && is_connect(spec);
        match pins.open_link(spec)? {
            None if spec.name == TCP_EVENTS.name => {}
            Some((link, info)) if info.target == LinkTarget::Cgroup(id) && !after => {
                sys::link_update(link.as_fd(), fd)
                    .doing(|| format!("cannot swap program {}", spec.name))?;
            }
            // On another cgroup, or on one that is gone, or on a tracepoint, whose links know no other program: attached
            // anew, then the pin is replaced. For a moment both are told.
            Some((_, info)) => {
                moved |= !spec.is_traced() && info.target != LinkTarget::Cgroup(id);
                create(spec, fd, &directory, &pins.link(spec.name), true)?;
            }
            None => {
                if spec.is_traced() {
                    forget_meters(pins)?;
                }
                before_us |= is_capture && is_connect(spec);
                create(spec, fd, &directory, &pins.link(spec.name), false)?;
            }
        }
    }
    Ok(moved)
}

/// Has a program be told of connections to a proxy, from now on; nothing if one is.
pub fn attach_events(program: BorrowedFd<'_>, pins: &Pins, cgroup: &Path) -> Result<(), Error> {
    if pins.open_link(&TCP_EVENTS)?.is_some() {
        return Ok(());
    }
    let directory =
        File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
    let path = pins.link(TCP_EVENTS.name);
    create(&TCP_EVENTS, program, &directory, &path, false)
}

/// Whether a link's pin has the name of one that an agent looks after, with capture or without.
pub fn is_link(name: &str, capture: bool) -> bool {
    let of_namespace = name
        .strip_prefix(INBOUND)
        .is_some_and(|cookie| cookie.starts_with('-') && !cookie.ends_with(REPLACEMENT));
    wanted(capture).any(|spec| spec.name == name)
        || (capture && of_namespace)
        || Direction::of_pin(name)
            .is_some_and(|(direction, _)| capture || Direction::ALL.contains(&direction))
}

/// Frees the places of connections that were closed while no program was told of it.
fn forget_meters(pins: &Pins) -> Result<(), Error> {
    let what = || "cannot clear table METERS".to_owned();
    let Some((table, info)) = pins.open_map(spec("METERS"))? else {
        return Ok(());
    };
    let meters = Mapped::<MeterSets>::map(table, info.max_entries, true).doing(what)?;
    for element in 0..meters.capacity() {
        meters.set(element, MeterSets::new_zeroed());
    }
    Ok(())
}

fn is_connect(spec: &Spec) -> bool {
    matches!(
        spec.hook,
        BPF_CGROUP_INET4_CONNECT | BPF_CGROUP_INET6_CONNECT
    )
}

/// Detaches what an earlier agent attached for a mesh.
fn detach_capture(pins: &Pins) -> Result<(), Error> {
    for spec in CAPTURE_PROGRAMS.iter().rev() {
        if let Some((link, _)) = pins.open_link(spec)? {
            pins::remove_link(&link, &pins.link(spec.name))?;
        }
    }
    Ok(())
}

fn create(
    spec: &Spec,
    program: BorrowedFd<'_>,
    cgroup: &File,
    path: &Path,
    replace: bool,
) -> Result<(), Error> {
    let link = if spec.is_traced() {
        sys::link_create_traced(program)
            .doing(|| format!("cannot attach program {} to its tracepoint", spec.name))?
    } else {
        sys::link_create_cgroup(program, cgroup.as_fd(), spec.hook)
            .doing(|| format!("cannot attach program {} to the cgroup", spec.name))?
    };
    if !replace {
        return sys::obj_pin(link.as_fd(), path).doing(|| format!("cannot pin {}", path.display()));
    }
    // No dots: a bpffs reserves them (`bpf_lookup` in kernel/bpf/inode.c).
    let mut new = path.as_os_str().to_owned();
    new.push(REPLACEMENT);
    let new = PathBuf::from(new);
    let _ = fs::remove_file(&new);
    sys::obj_pin(link.as_fd(), &new).doing(|| format!("cannot pin {}", new.display()))?;
    fs::rename(&new, path).doing(|| format!("cannot replace {}", path.display()))
}

/// A cgroup's id, which links tell: its directory's inode number (`cgroup_id` in
/// `include/linux/cgroup.h`, with 64-bit inode numbers).
fn cgroup_id(directory: &File, path: &Path) -> Result<u64, Error> {
    directory
        .metadata()
        .map(|m| m.ino())
        .doing(|| format!("cannot look at {}", path.display()))
}

/// Where the cgroup v2 hierarchy is mounted: `/sys/fs/cgroup`, or elsewhere on machines with both
/// versions (`proc_pid_mountinfo(5)`).
///
/// # Errors
/// [`Error::NoCgroup2`] if there is none.
pub fn cgroup2_root() -> Result<PathBuf, Error> {
    cgroup2_mounts()?.into_iter().next().ok_or_else(|| {
        // Not to be read without privilege, and then not said.
        let of_init = fs::read_to_string("/proc/1/mountinfo").unwrap_or_default();
        Error::NoCgroup2 {
            hidden: of_init.lines().find_map(cgroup2_mount),
        }
    })
}

/// Where all or a part of the cgroup v2 hierarchy is mounted, as this process sees it.
pub fn cgroup2_mounts() -> Result<Vec<PathBuf>, Error> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")
        .doing(|| "cannot read /proc/self/mountinfo".into())?;
    Ok(mounts.lines().filter_map(cgroup2_mount).collect())
}

/// Refuses what is no directory of a cgroup v2 file system: the kernel would only say `EBADF`.
///
/// # Errors
/// [`Error::NotCgroup2`]; or the directory cannot be opened.
pub fn check_cgroup(path: &Path) -> Result<(), Error> {
    let found = statfs(path).doing(|| format!("cannot open the cgroup {}", path.display()))?;
    if found.filesystem_type() == CGROUP2_SUPER_MAGIC {
        return Ok(());
    }
    Err(Error::NotCgroup2 {
        path: path.to_owned(),
        root: cgroup2_root().ok(),
    })
}

fn cgroup2_mount(line: &str) -> Option<PathBuf> {
    let (before, after) = line.split_once(" - ")?;
    if after.split(' ').next()? != "cgroup2" {
        return None;
    }
    // The kernel writes spaces in paths as \040.
    Some(before.split(' ').nth(4)?.replace("\\040", " ").into())
}

/// The id of the cgroup that this process is in; `None` if that is not to be found out.
pub fn own_cgroup() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let directory = cgroup2_root().ok()?.join(path);
    fs::metadata(directory).ok().map(|found| found.ino())
}

/// How a program is attached, as the kernel says now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The program's name, which is its hook's.
    pub program: &'static str,
    /// Its link, if there is one.
    pub link_id: Option<u32>,
    /// The program that the link holds.
    pub program_id: Option<u32>,
    /// A hash of the program's instructions.
    pub tag: Option<u64>,
    /// What is wrong, if anything: it is attached, and runs for the cgroup, if this is `None`.
    pub problem: Option<String>,
}

/// Asks the kernel how our programs are attached: the pins, the links in them, and whether the
/// cgroup really runs them.
///
/// # Errors
/// If the cgroup cannot be opened. What is wrong with a single program is in its
/// [`Attachment::problem`].
pub fn attachments(pins: &Pins, cgroup: &Path) -> Result<Vec<Attachment>, Error> {
    let directory =
        File::open(cgroup).doing(|| format!("cannot open the cgroup {}", cgroup.display()))?;
    let id = cgroup_id(&directory, cgroup)?;
    // A mesh is not everywhere: without its first pin, there is none. And one without a proxy has nobody that is told
    // of connections to it.
    let capture = pins.link(CAPTURE_PROGRAMS[0].name).exists();
    Ok(wanted(capture)
        .filter(|spec| spec.name != TCP_EVENTS.name || pins.link(spec.name).exists())
        .map(|spec| attachment(pins, spec, &directory, id))
        .collect())
}

fn attachment(pins: &Pins, spec: &Spec, cgroup: &File, cgroup_id: u64) -> Attachment {
    let mut found = Attachment {
        program: spec.name,
        link_id: None,
        program_id: None,
        tag: None,
        problem: None,
    };
    let link = match pins.open_link(spec) {
        Ok(Some((_, link))) => link,
        Ok(None) => {
            found.problem = Some(format!(
                "not attached: {} is not there",
                pins.link(spec.name).display()
            ));
            return found;
        }
        Err(error) => {
            found.problem = Some(error.to_string());
            return found;
        }
    };
    found.link_id = Some(link.id);
    found.program_id = Some(link.program);
    found.tag = sys::prog_by_id(link.program)
        .and_then(|fd| sys::prog_info(fd.as_fd()))
        .map(|info| info.tag)
        .ok();
    found.problem = if !link.is_attached() {
        Some("its cgroup was removed; restart the agent to attach anew".into())
    } else if let LinkTarget::Cgroup(other) = link.target
        && other != cgroup_id
    {
        Some(format!(
            "attached to another cgroup (id {other}, not {cgroup_id})"
        ))
    } else if spec.is_traced() {
        // A tracepoint runs whatever has a link.
        None
    } else {
        match sys::cgroup_programs(cgroup.as_fd(), spec.hook) {
            Ok(ids) if ids.contains(&link.program) => None,
            Ok(_) => Some("the link is there, but the cgroup does not run the program".into()),
            Err(error) => Some(format!("cannot ask what the cgroup runs: {error}")),
        }
    };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_tell_which_links_an_agent_looks_after() {
        for name in ["connect4", "sock_release", "packet_egress-3"] {
            assert!(is_link(name, false) && is_link(name, true), "{name}");
        }
        for name in [
            "capture6",
            "tcp_events",
            "tcp_gone",
            "packet_capture-3",
            "inbound_lookup-7",
        ] {
            assert!(!is_link(name, false) && is_link(name, true), "{name}");
        }
        for name in [
            "connect4-new",
            "packet_egress-3-new",
            "inbound_lookup-7-new",
            "connect5",
        ] {
            assert!(!is_link(name, true), "{name}");
        }
    }

    #[test]
    fn finds_cgroup2_wherever_it_is_mounted() {
        let hybrid =
            "40 32 0:36 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw";
        assert_eq!(cgroup2_mount(hybrid), Some("/sys/fs/cgroup/unified".into()));
        let spaced = "40 32 0:36 / /mnt/a\\040b rw - cgroup2 none rw";
        assert_eq!(cgroup2_mount(spaced), Some("/mnt/a b".into()));
        let v1 = "33 32 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:10 - cgroup cgroup rw,cpu";
        assert_eq!(cgroup2_mount(v1), None);
    }
}
