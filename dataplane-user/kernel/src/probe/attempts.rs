//! One function for each way to try an ability of the machine.

use std::{fs, io, path::Path};

use aya_obj::generated::{
    bpf_attach_type::{self, BPF_TRACE_RAW_TP},
    bpf_map_type,
    bpf_prog_type::{self, BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_PROG_TYPE_TRACING},
};
use nix::sys::resource::{Resource, getrlimit};

use crate::{
    cgroup2_root,
    fields::Types,
    opener,
    pins::Pins,
    programs::{self, CAPTURE_PROGRAMS},
    sys::{self, Shape},
};

/// The result of a probe: the detail to show, whether the feature is present or not.
pub type Found = Result<String, String>;

/// The detail of a probe that tells nothing but its success.
pub fn yes<T>(found: io::Result<T>) -> Found {
    found.map(|_| "yes".into()).map_err(word)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub fn word(error: io::Error) -> String {
    error.to_string()
}

pub fn exists(path: &str) -> Found {
    if Path::new(path).exists() {
        Ok(path.into())
    } else {
        Err(format!("{path} is not there"))
    }
}

/// Effective capabilities (`capabilities(7)`), by number in `include/uapi/linux/capability.h`.
///
/// CAP_BPF and CAP_PERFMON are not enough: tables are inner maps, which are opened by their number,
/// and so are the programs of pinned links, to see whose they are. The kernel does that for
/// CAP_SYS_ADMIN only (`bpf_map_get_fd_by_id` in `kernel/bpf/syscall.c`, also in 6.18), which
/// includes the other two, and which an agent has left to its opener. CAP_NET_ADMIN is for interfaces.
pub fn capabilities() -> Found {
    const NEEDED: [(&str, u32); 2] = [("CAP_NET_ADMIN", 12), ("CAP_SYS_ADMIN", 21)];
    let status = fs::read_to_string("/proc/self/status").map_err(word)?;
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .ok_or("cannot read CapEff in /proc/self/status")?;
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(_, bit)| effective & (1 << bit) == 0)
        .filter(|(name, _)| *name != "CAP_SYS_ADMIN" || !opener::is_there())
        .map(|(name, _)| *name)
        .collect();
    if missing.is_empty() {
        Ok(NEEDED.map(|(name, _)| name).join(", "))
    } else {
        Err(format!("missing {}", missing.join(", ")))
    }
}

pub fn cgroup(cgroup: &Path) -> Found {
    let root = cgroup2_root().map_err(|error| error.to_string())?;
    if !cgroup.join("cgroup.procs").exists() {
        return Err(format!(
            "{} is not a cgroup; the hierarchy is mounted at {}",
            cgroup.display(),
            root.display()
        ));
    }
    Ok(format!(
        "{} (mounted at {})",
        cgroup.display(),
        root.display()
    ))
}

pub fn bpffs(directory: &Path) -> Found {
    match Pins::new(directory).is_on_bpffs() {
        Ok(true) => Ok(directory.display().to_string()),
        Ok(false) if directory.starts_with("/sys/fs/bpf") => {
            Ok("not mounted yet; the agent mounts it on /sys/fs/bpf".into())
        }
        Ok(false) => Err(format!("{} is not on one", directory.display())),
        Err(error) => Err(error.to_string()),
    }
}

pub fn map(
    kind: bpf_map_type,
    key_size: u32,
    value_size: u32,
    flags: u32,
    max_entries: u32,
) -> Found {
    let shape = Shape {
        kind,
        key_size,
        value_size,
        flags,
    };
    yes(sys::map_create("probe", &shape, max_entries))
}

/// `r0 = 1; exit`, or with a helper: `r1 = 0; call helper; r0 = 1; exit`.
pub const SET_RESULT: u64 = 0x0000_0001_0000_00b7;
pub const EXIT: u64 = 0x95;
/// A call; the helper's number is in the upper half.
pub const CALL: u64 = 0x85;
pub const GET_NETNS_COOKIE: u64 = 122;

pub fn helper(hook: bpf_attach_type, number: u32) -> Found {
    const CLEAR_ARGUMENT: u64 = 0x0000_0000_0000_01b7;
    let call = CALL | u64::from(number) << 32;
    load(
        BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        hook,
        &[CLEAR_ARGUMENT, call, SET_RESULT, EXIT],
    )
}

/// Whether programs for all tracepoints that ours are for can be loaded.
pub fn traced() -> Found {
    let types = Types::read().map_err(|error| error.to_string())?;
    for tracepoint in CAPTURE_PROGRAMS
        .iter()
        .filter_map(|spec| programs::tracepoint(spec.name))
    {
        let id = types.tracepoint(tracepoint)?;
        let program = &[SET_RESULT, EXIT];
        sys::prog_load_traced(BPF_PROG_TYPE_TRACING, BPF_TRACE_RAW_TP, program, id)
            .map_err(|error| format!("{tracepoint}: {error}"))?;
    }
    Ok("yes".into())
}

pub fn load(kind: bpf_prog_type, hook: bpf_attach_type, instructions: &[u64]) -> Found {
    yes(sys::prog_load(kind, hook, instructions))
}

/// The limit that the agent raises its own to: enough for as many pods as a node usually has, and some thousand
/// connections.
pub fn open_files() -> Found {
    const ENOUGH: u64 = 16_384;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| error.to_string())?;
    if hard < ENOUGH {
        return Err(format!(
            "at most {hard}; {ENOUGH} are enough for most nodes"
        ));
    }
    Ok(format!("at most {hard}"))
}

pub fn jit() -> Found {
    const FILE: &str = "/proc/sys/net/core/bpf_jit_enable";
    match fs::read_to_string(FILE) {
        Ok(value) if value.trim() == "0" => Err(format!("{FILE} is 0")),
        Ok(_) => Ok("on".into()),
        // A kernel with the JIT always on may not show the file.
        Err(_) => Ok("not shown".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use aya_obj::generated::bpf_attach_type::BPF_CGROUP_INET4_CONNECT;

    use super::*;

    /// The kernel runs no program of our type on crafted input: `cg_sock_addr_prog_ops` in
    /// `net/core/filter.c` has no `test_run`. So the programs are tested in the lab, through real
    /// sockets. If this fails, a kernel has learned it, and table tests can be written.
    #[test]
    fn socket_address_programs_cannot_be_test_run() {
        const ENOTSUPP: i32 = 524; // the kernel's own; not in libc
        let program = match sys::prog_load(
            BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
            BPF_CGROUP_INET4_CONNECT,
            &[SET_RESULT, EXIT],
        ) {
            Ok(program) => program,
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied
                    && std::env::var_os("DATAPLANE_REQUIRE_PRIVILEGES").is_none() =>
            {
                println!("skipped socket_address_programs_cannot_be_test_run: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let error = sys::prog_test_run(program.as_fd()).expect_err("a test run");
        assert_eq!(error.raw_os_error(), Some(ENOTSUPP), "{error}");
    }
}
