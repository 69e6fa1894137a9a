//! This kernel's verifier and our programs: whether it accepts them, and their cost.
//!
//! Each program is loaded alone, with tables that no other process sees, and is removed when the function returns. aya
//! returns the verifier's log only for refused programs, so this module reads the log itself.

use std::{
    collections::HashSet,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use aya::{Ebpf, EbpfLoader, VerifierLogLevel, maps::Map, programs::Program};
use aya_obj::{
    Object, ProgramSection,
    generated::{
        bpf_attach_type::{
            self, BPF_CGROUP_INET_INGRESS, BPF_CGROUP_SOCK_OPS, BPF_SK_LOOKUP, BPF_TRACE_RAW_TP,
        },
        bpf_prog_type::{
            self, BPF_PROG_TYPE_CGROUP_SOCK, BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
            BPF_PROG_TYPE_CGROUP_SOCKOPT, BPF_PROG_TYPE_SCHED_CLS, BPF_PROG_TYPE_SK_LOOKUP,
            BPF_PROG_TYPE_SOCK_OPS, BPF_PROG_TYPE_TRACING,
        },
    },
};
use nix::time::{ClockId, clock_gettime};

use super::{
    error::{Doing, Error},
    fields::Types,
    object, programs, sys,
};

/// Returns a program's type and hook, which the kernel needs to verify it; `None` for types that none of our programs
/// has. A new type needs a line here, and one in [`refusal`].
fn type_and_hook(section: &ProgramSection) -> Option<(bpf_prog_type, bpf_attach_type)> {
    Some(match *section {
        ProgramSection::CgroupSockAddr { attach_type } => {
            (BPF_PROG_TYPE_CGROUP_SOCK_ADDR, attach_type.into())
        }
        ProgramSection::CgroupSock { attach_type } => {
            (BPF_PROG_TYPE_CGROUP_SOCK, attach_type.into())
        }
        ProgramSection::CgroupSockopt { attach_type } => {
            (BPF_PROG_TYPE_CGROUP_SOCKOPT, attach_type.into())
        }
        // The hook matters only when it is attached; loading takes 0, which is this.
        ProgramSection::SchedClassifier => (BPF_PROG_TYPE_SCHED_CLS, BPF_CGROUP_INET_INGRESS),
        ProgramSection::SkLookup => (BPF_PROG_TYPE_SK_LOOKUP, BPF_SK_LOOKUP),
        ProgramSection::SockOps => (BPF_PROG_TYPE_SOCK_OPS, BPF_CGROUP_SOCK_OPS),
        ProgramSection::BtfTracePoint => (BPF_PROG_TYPE_TRACING, BPF_TRACE_RAW_TP),
        _ => return None,
    })
}

/// The verifier's result for a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The program's name.
    pub program: String,
    /// Its cost, or the verifier's message.
    pub outcome: Result<Cost, String>,
}

/// The cost to verify and to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Instructions that the verifier followed, each as often as it did; it gives up at a million.
    pub processed: u32,
    /// Bytes of stack, of all its functions together. The kernel's limit of 512 is for each chain of
    /// calls, so that a program of many functions may have more.
    pub stack: u32,
    /// Bytes of machine code; 0 if the kernel interprets programs.
    pub jited: u32,
    /// How long the processor was at it, on this machine, now: verifying, and making machine code.
    /// To be compared with other programs' on the same machine, and with nothing else.
    pub time: Duration,
}

/// The kernel's verifier, and our programs before it.
#[derive(Debug)]
pub struct Verifier {
    ebpf: Ebpf,
    object: Object,
    /// The object's types. With them the verifier looks at functions with external linkage once, as when the agent
    /// loads them. `None` on kernels that have none.
    btf: Option<OwnedFd>,
    /// The kernel's own types; `None` on kernels that have none.
    types: Option<Types>,
}

impl Verifier {
    /// Prepares the programs in the binary, and tables that no other process sees.
    ///
    /// # Errors
    /// If the programs cannot be prepared: the binary has none, or their maps cannot be created.
    pub fn new() -> Result<Self, Error> {
        let bytes = object::programs()?;
        // The object is parsed twice: aya creates the maps, but does not expose its parsed object.
        let types = Types::read().ok();
        let mut loader = EbpfLoader::new();
        if let Some(types) = &types {
            loader.override_global("FIELDS", &types.fields[..], true);
        }
        loader.override_global("MPTCP", programs::has_mptcp(), true);
        let mut ebpf = loader
            // For a refused program, the log then shows only the path that was refused; a higher level would also show
            // all other paths.
            .verifier_log_level(VerifierLogLevel::DEBUG | VerifierLogLevel::STATS)
            .load(bytes)
            .map_err(Box::new)?;
        let object = relocated(bytes, &ebpf)
            .map_err(std::io::Error::other)
            .doing(|| "cannot prepare the kernel programs".to_owned())?;
        let btf = btf(&mut ebpf);
        Ok(Self {
            ebpf,
            object,
            btf,
            types,
        })
    }

    /// The programs' names, sorted.
    pub fn programs(&self) -> Vec<String> {
        let mut names: Vec<String> = self.object.programs.keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Verifies a program, and changes nothing. A refusal is in [`Verified::outcome`].
    pub fn verify(&mut self, program: &str) -> Verified {
        let (loaded, time) = match self.traced(program) {
            Ok(traced) => timed(|| load(&self.object, self.btf.as_ref(), program, traced)),
            Err(said) => (Err(said), Duration::ZERO),
        };
        let outcome = match loaded {
            Ok((program, log)) => cost(&log, program.as_fd(), time),
            Err(said) => {
                let types = self.types.as_ref();
                Err(end(&refusal(&mut self.ebpf, types, program).unwrap_or(said)))
            }
        };
        Verified {
            program: program.to_owned(),
            outcome,
        }
    }

    /// The kernel's own type of the tracepoint that a program is for; 0 if it is for none.
    fn traced(&self, program: &str) -> Result<u32, String> {
        let Some(tracepoint) = programs::tracepoint(program) else {
            return Ok(0);
        };
        let types = self.types.as_ref().ok_or("this kernel has no BTF")?;
        types.tracepoint(tracepoint)
    }
}

/// Returns the result and this thread's CPU time. Elapsed time would include the time in which other threads run.
fn timed<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let now = || {
        let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
        time.map_or(Duration::ZERO, Duration::from)
    };
    let before = now();
    let done = what();
    (done, now().saturating_sub(before))
}

/// Loads a program by itself. Returns it with the verifier's statistics, or the kernel's message.
fn load(
    object: &Object,
    btf: Option<&OwnedFd>,
    name: &str,
    traced: u32,
) -> Result<(OwnedFd, String), String> {
    let program = &object.programs[name];
    let (kind, hook) = type_and_hook(&program.section)
        .ok_or_else(|| format!("verifier.rs does not know the type {:?}", program.section))?;
    let function = object
        .functions
        .get(&program.function_key())
        .ok_or("the object has no such function")?;
    let functions = function.func_info.func_info_bytes();
    let size = function.func_info_rec_size;
    let types = btf.filter(|_| size != 0).map(|btf| sys::Types {
        btf: btf.as_fd(),
        functions: &functions,
        size,
    });
    sys::prog_verify(kind, hook, &function.instructions, types.as_ref(), traced)
        .map_err(|(error, log)| format!("{error}\n{log}"))
}

/// Returns the object's types as aya has loaded them. Aya does not expose them, but a program that it has loaded refers
/// to them.
fn btf(ebpf: &mut Ebpf) -> Option<OwnedFd> {
    let Some(Program::CgroupSockAddr(program)) = ebpf.program_mut(SMALL) else {
        return None;
    };
    program.load().ok()?;
    let btf = program.info().ok().and_then(|info| info.btf_id());
    let btf = btf.and_then(|id| sys::btf_by_id(id).ok());
    // A loaded program could not be loaded again.
    program.unload().ok()?;
    btf
}

/// One of the smallest programs.
const SMALL: &str = "getsockname4";

/// Loads a program that was refused once more, as the agent would: then it has its source's lines,
/// which the verifier quotes. `None` if it is taken now.
fn refusal(ebpf: &mut Ebpf, types: Option<&Types>, name: &str) -> Option<String> {
    let loaded = match ebpf.program_mut(name) {
        Some(Program::CgroupSockAddr(program)) => program.load(),
        Some(Program::CgroupSock(program)) => program.load(),
        Some(Program::CgroupSockopt(program)) => program.load(),
        Some(Program::SchedClassifier(program)) => program.load(),
        Some(Program::SkLookup(program)) => program.load(),
        Some(Program::SockOps(program)) => program.load(),
        Some(Program::BtfTracePoint(program)) => {
            program.load(programs::tracepoint(name)?, &types?.btf)
        }
        _ => return None,
    };
    loaded.err().map(|error| error.to_string())
}

/// The last lines of the verifier's log that a report has: the reason for a refusal is at the end.
const LOG_LINES: usize = 400;

fn end(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    match lines.len().checked_sub(LOG_LINES) {
        None | Some(0) => log.to_owned(),
        Some(before) => format!(
            "({before} lines before these)\n{}",
            lines[before..].join("\n")
        ),
    }
}

/// The object, with the maps' descriptors in its instructions.
fn relocated(
    bytes: &[u8],
    ebpf: &Ebpf,
) -> Result<Object, Box<dyn std::error::Error + Send + Sync>> {
    let mut object = Object::parse(bytes)?;
    let sections: HashSet<usize> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    let maps = std::mem::take(&mut object.maps);
    let descriptors = maps.iter().filter_map(|(name, map)| {
        Some((name.as_str(), descriptor(ebpf.map(name)?)?.as_raw_fd(), map))
    });
    object.relocate_maps(descriptors, &sections)?;
    object.relocate_calls(&sections)?;
    Ok(object)
}

/// A map's descriptor.
fn descriptor(map: &Map) -> Option<BorrowedFd<'_>> {
    match map {
        Map::Array(map)
        | Map::ArrayOfMaps(map)
        | Map::CpuMap(map)
        | Map::DevMap(map)
        | Map::DevMapHash(map)
        | Map::HashMap(map)
        | Map::HashOfMaps(map)
        | Map::LpmTrie(map)
        | Map::LruHashMap(map)
        | Map::PerCpuArray(map)
        | Map::PerCpuHashMap(map)
        | Map::PerCpuLruHashMap(map)
        | Map::ProgramArray(map)
        | Map::RingBuf(map)
        | Map::SkStorage(map)
        | Map::SockHash(map)
        | Map::SockMap(map) => Some(map.fd().as_fd()),
        // Types that we have no use for.
        _ => None,
    }
}

fn cost(log: &str, program: BorrowedFd<'_>, time: Duration) -> Result<Cost, String> {
    let (processed, stack) =
        read_log(log).ok_or_else(|| format!("the verifier's log is not understood: {log}"))?;
    let info = sys::prog_info(program).map_err(|error| error.to_string())?;
    Ok(Cost {
        processed,
        stack,
        jited: info.jited,
        time,
    })
}

/// Instructions processed, and the stack: `stack depth 112+0`, one number for each function, and
/// `processed 829 insns (limit 1000000) ...` (`print_verification_stats` in
/// `kernel/bpf/verifier.c`).
fn read_log(log: &str) -> Option<(u32, u32)> {
    let after = |key: &str| log.lines().find_map(|line| line.strip_prefix(key));
    let stack = after("stack depth ")?
        .trim_end()
        .split('+')
        .map(|depth| depth.parse::<u32>().ok())
        .sum::<Option<u32>>()?;
    let processed = after("processed ")?.split(' ').next()?.parse().ok()?;
    Some((processed, stack))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_verifiers_statistics() {
        let log = "verification time 1421 usec\nstack depth 112+16\nprocessed 829 insns (limit \
                   1000000) max_states_per_insn 4 total_states 41 peak_states 41 mark_read 12\n";
        assert_eq!(read_log(log), Some((829, 128)));
        assert_eq!(read_log("func#0 @0\n"), None);
    }

    #[test]
    fn a_long_log_keeps_its_end() {
        let log = |lines: usize| {
            let lines: Vec<String> = (0..lines).map(|n| format!("{n}: (95) exit")).collect();
            lines.join("\n")
        };
        assert_eq!(end(&log(LOG_LINES)), log(LOG_LINES));
        let shortened = end(&log(LOG_LINES + 7));
        assert!(shortened.starts_with("(7 lines before these)\n7: (95) exit\n"));
        assert!(shortened.ends_with("\n406: (95) exit"));
    }
}
