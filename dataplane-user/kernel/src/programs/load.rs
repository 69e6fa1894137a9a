//! Loading the programs.

use std::{
    collections::{BTreeMap, HashMap},
    error::Error as StdError,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{Program, ProgramError},
};

use super::{
    super::{
        error::{Doing, Error},
        fields::Types,
        object,
        pins::{MAPS, Pins},
        tc::Direction,
    },
    specs::{PROBE_EVENTS, Spec, tracepoint, wanted},
};

/// Loads the programs. Uses pinned maps; creates and pins the others.
///
/// `flows`: number of flows that the tables of conntrack have room for, if they are created. `packet`: whether to load
/// the packet path's programs and create its tables. `capture`: whether to load the programs of mesh capture, except
/// the one that has an instance in each network namespace.
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
    loader.override_global("MPTCP", has_mptcp(), true);
    for map in &MAPS {
        if map.is_of_flows() && !packet {
            // The loader creates every map of the object, and closes the unused ones after loading. So an unused map
            // gets the smallest size.
            loader.map_max_entries(map.name, 1);
            continue;
        }
        if let Some(entries) = map.entries(flows) {
            loader.map_max_entries(map.name, entries);
        }
        loader.map_pin_path(map.name, pins.map(map.name));
    }
    let mut ebpf = loader.load(object::programs()?).map_err(Box::new)?;
    // The packet programs are by far the largest, so they are loaded first.
    let packet = Direction::ALL.into_iter().filter(|_| packet);
    let by_packets = Direction::CAPTURE.into_iter().filter(|_| capture);
    let names = packet.chain(by_packets).map(Direction::program);
    let of_kubelet = capture.then_some(&PROBE_EVENTS);
    let others = wanted(capture).chain(of_kubelet).map(|spec| spec.name);
    let names: Vec<&'static str> = names.chain(others).collect();
    load_all(&mut ebpf, &names, types)?;
    Ok(ebpf)
}

/// Returns the constant by which the programs know whether the kernel has MPTCP: 1 if it has.
pub(crate) fn has_mptcp() -> &'static u32 {
    if Path::new("/proc/sys/net/mptcp/enabled").exists() {
        &1
    } else {
        &0
    }
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

/// Maximum number of attempts to load a program whose verification is interrupted by a signal.
const TRIES: usize = 5;

/// Loads a program, and again if a signal came meanwhile, such as when a process that this one has started ends: the verifier then
/// gives up with `EAGAIN` (`do_check` in kernel/bpf/verifier.c).
pub fn patiently<T, E: StdError + 'static>(mut load: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    for _ in 1..TRIES {
        match load() {
            Err(why) if is_interrupted(&why) => {}
            result => return result,
        }
    }
    load()
}

fn is_interrupted(why: &(dyn StdError + 'static)) -> bool {
    let own = why.downcast_ref::<io::Error>();
    let is = own.is_some_and(|error| error.raw_os_error() == Some(libc::EAGAIN));
    is || why.source().is_some_and(is_interrupted)
}

fn load_one(name: &'static str, program: &mut Program, types: Option<&Types>) -> Result<(), Error> {
    patiently(|| load_once(name, program, types))
}

fn load_once(
    name: &'static str,
    program: &mut Program,
    types: Option<&Types>,
) -> Result<(), Error> {
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
        Program::SchedClassifier(program) => program.load(),
        _ => return Err(absent(name)),
    };
    result.map_err(|source| load_error(name, source))
}

/// Returns a separate descriptor of a loaded program, which is attached later.
pub fn kept_program(ebpf: &Ebpf, spec: &Spec) -> Result<OwnedFd, Error> {
    descriptor(ebpf, spec)?
        .try_clone_to_owned()
        .doing(|| format!("cannot keep program {}", spec.name))
}

/// Returns a separate descriptor of a loaded program for interfaces.
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
pub fn descriptor<'a>(ebpf: &'a Ebpf, spec: &Spec) -> Result<BorrowedFd<'a>, Error> {
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

fn absent(program: &str) -> Error {
    Error::Io {
        what: format!("the object has no program {program}"),
        source: io::ErrorKind::NotFound.into(),
    }
}

pub fn load_error(program: &'static str, source: ProgramError) -> Error {
    Error::Load {
        program,
        source: Box::new(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("a program")]
    struct Of(#[source] io::Error);

    #[test]
    fn what_a_signal_interrupts_is_done_again() {
        for (code, times, wanted) in [
            (libc::EAGAIN, 3, true),
            (libc::EAGAIN, 9, false),
            (libc::EPERM, 1, false),
        ] {
            let mut left = times;
            let result = patiently(|| {
                left -= 1;
                if left < 0 {
                    return Ok(());
                }
                Err(Of(io::Error::from_raw_os_error(code)))
            });
            assert_eq!(result.is_ok(), wanted, "{code} {times} times");
        }
    }
}
