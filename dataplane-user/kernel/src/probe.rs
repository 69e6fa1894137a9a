//! The abilities of this machine: found by trying, not guessed from its version.

use std::{borrow::Cow, fs, io, path::Path};

use aya_obj::generated::{
    bpf_attach_type::{
        self, BPF_CGROUP_GETSOCKOPT, BPF_CGROUP_INET_INGRESS, BPF_CGROUP_INET4_CONNECT,
        BPF_CGROUP_INET4_GETSOCKNAME, BPF_CGROUP_SOCK_OPS, BPF_SK_LOOKUP, BPF_TCX_INGRESS,
        BPF_TRACE_RAW_TP,
    },
    bpf_map_type::{
        self, BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_LRU_HASH, BPF_MAP_TYPE_RINGBUF,
        BPF_MAP_TYPE_SOCKHASH,
    },
    bpf_prog_type::{
        self, BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_PROG_TYPE_CGROUP_SOCKOPT,
        BPF_PROG_TYPE_SCHED_CLS, BPF_PROG_TYPE_SK_LOOKUP, BPF_PROG_TYPE_SOCK_OPS,
        BPF_PROG_TYPE_TRACING,
    },
};
use nix::sys::resource::{Resource, getrlimit};

use super::{
    Paths,
    capture::routing::{FWMARK_ACCEPT, cannot_accept_marks},
    cgroup2_root,
    fields::Types,
    object, opener,
    pins::Pins,
    programs::{self, CAPTURE_PROGRAMS, PROGRAMS},
    sockets,
    sys::{self, Shape},
    sysctl,
};

/// One thing that the dataplane needs of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// The part of the dataplane that needs it.
    pub needed_for: &'static str,
    /// Whether it is here.
    pub present: bool,
    /// Whether nothing works without it.
    pub required: bool,
    /// The behaviour without it, and its cost.
    pub without: Cow<'static, str>,
    /// The result of the probe.
    pub detail: String,
    /// The remedy if it is missing.
    pub remedy: &'static str,
}

impl Feature {
    fn required(
        name: &'static str,
        needed_for: &'static str,
        found: Result<String, String>,
        remedy: &'static str,
    ) -> Self {
        let (present, detail) = match found {
            Ok(detail) => (true, detail),
            Err(detail) => (false, detail),
        };
        Self {
            name,
            needed_for,
            present,
            required: true,
            without: "the agent does not start".into(),
            detail,
            remedy,
        }
    }

    fn useful(
        name: &'static str,
        needed_for: &'static str,
        found: Result<String, String>,
        without: &'static str,
        remedy: &'static str,
    ) -> Self {
        Self {
            required: false,
            without: without.into(),
            ..Self::required(name, needed_for, found, remedy)
        }
    }
}

/// `bpf_set_retval` at the hooks of `connect()` and `sendmsg()` is the newest that is asked for
/// (`cgroup_common_func_proto` in `kernel/bpf/cgroup.c`, Linux 6.1).
const OLD_KERNEL: &str = "use Linux 6.1 or newer";
const NO_BPF: &str = "run as root (or with CAP_NET_ADMIN and CAP_SYS_ADMIN), outside of containers that forbid \
     bpf()";

/// Asks the machine for everything that we need of it. Changes nothing: maps and programs made on
/// the way are gone when this returns.
pub fn features(paths: &Paths) -> Vec<Feature> {
    let mut features = vec![
        Feature::required(
            "kernel programs in this binary",
            "everything",
            object::programs()
                .map(|object| format!("{} KiB", object.len() / 1024))
                .map_err(|error| error.to_string()),
            "build with `cargo xtask build`",
        ),
        Feature::required("capabilities", "loading, attaching", capabilities(), NO_BPF),
        Feature::required(
            "cgroup v2",
            "attaching the programs",
            cgroup(&paths.cgroup),
            "mount one (`mount -t cgroup2 none /sys/fs/cgroup`), or name it with --cgroup",
        ),
        Feature::required(
            "bpffs",
            "programs and tables that outlive the agent",
            bpffs(&paths.bpffs),
            "mount one (`mount -t bpf bpf /sys/fs/bpf`), or name a directory on one with --bpffs",
        ),
        Feature::required(
            "mapped arrays",
            "flipping a service's endpoints by one store",
            map(BPF_MAP_TYPE_ARRAY, 4, 16, (1 << 10) | (1 << 12), 1),
            OLD_KERNEL,
        ),
        Feature::required(
            "LRU hash",
            "fragments, limits of ICMP errors",
            map(BPF_MAP_TYPE_LRU_HASH, 20, 32, 0, 1024),
            OLD_KERNEL,
        ),
        Feature::required(
            "ring buffer",
            "`dataplane monitor`",
            map(BPF_MAP_TYPE_RINGBUF, 0, 0, 0, 4096),
            OLD_KERNEL,
        ),
    ];
    for program in &PROGRAMS {
        features.push(Feature::required(
            program.name,
            match program.name {
                "connect4" | "connect6" => "choosing an endpoint at connect()",
                "sendmsg4" | "sendmsg6" => "unconnected UDP",
                "sock_release" => "freeing the record of a socket",
                "recvmsg4" | "recvmsg6" => "UDP replies that come from the VIP",
                _ => "getpeername() that answers the VIP",
            },
            load(program.kind, program.hook, &[SET_RESULT, EXIT]),
            OLD_KERNEL,
        ));
    }
    features.extend([
        Feature::required(
            "bpf_set_retval",
            "ECONNREFUSED for services without endpoints",
            helper(BPF_CGROUP_INET4_CONNECT, 187),
            OLD_KERNEL,
        ),
        Feature::required(
            "network namespace cookies",
            "session affinity by pod, the node's own loopback",
            sys::netns_cookie()
                .map(|cookie| format!("this one is {cookie}"))
                .map_err(word),
            OLD_KERNEL,
        ),
        Feature::useful(
            "socket destruction",
            "connected sockets that learn at once that their endpoint is gone",
            sockets::can_destroy().map(|()| "yes".into()).map_err(word),
            "they keep sending to an endpoint that is gone, until their process gives up",
            "a kernel with CONFIG_INET_DIAG_DESTROY and CONFIG_INET_UDP_DIAG",
        ),
        Feature::required(
            "packet_ingress, packet_egress",
            "clients outside of the cluster, and pods that are VMs",
            load(
                BPF_PROG_TYPE_SCHED_CLS,
                BPF_CGROUP_INET_INGRESS,
                &[SET_RESULT, EXIT],
            ),
            OLD_KERNEL,
        ),
        Feature::required(
            "socket storage",
            "the record of a socket",
            sys::socket_storage_create()
                .map(|_| "yes".into())
                .map_err(word),
            OLD_KERNEL,
        ),
        mesh(
            "sockops",
            "mesh: the original destination, from the client's socket to the proxy's",
            load(
                BPF_PROG_TYPE_SOCK_OPS,
                BPF_CGROUP_SOCK_OPS,
                &[CALL | GET_NETNS_COOKIE << 32, SET_RESULT, EXIT],
            ),
        ),
        Feature::useful(
            "tracepoints",
            "mesh: byte counts of direct connections",
            traced(),
            NO_MESH,
            "a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_BPF_EVENTS",
        ),
        mesh(
            "cgroup/getsockopt",
            "mesh: proxies that ask for SO_ORIGINAL_DST",
            load(
                BPF_PROG_TYPE_CGROUP_SOCKOPT,
                BPF_CGROUP_GETSOCKOPT,
                &[SET_RESULT, EXIT],
            ),
        ),
        mesh(
            "cgroup/getsockname",
            "mesh: proxies that ask for their socket's own address",
            load(
                BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
                BPF_CGROUP_INET4_GETSOCKNAME,
                &[SET_RESULT, EXIT],
            ),
        ),
        mesh(
            "sk_lookup",
            "mesh: inbound connections to the proxy",
            load(BPF_PROG_TYPE_SK_LOOKUP, BPF_SK_LOOKUP, &[SET_RESULT, EXIT]),
        ),
        mesh(
            "sockhash",
            "mesh: the proxy's listening sockets",
            map(BPF_MAP_TYPE_SOCKHASH, 16, 4, 0, 1),
        ),
        mesh(
            "tcp_fwmark_accept",
            "mesh: applications that see the client's address (keepSource)",
            sysctl::open(FWMARK_ACCEPT)
                .map(|_| "/proc/sys/net/ipv4/tcp_fwmark_accept".into())
                .map_err(|error| cannot_accept_marks(&error)),
        ),
        Feature::useful(
            "TCX",
            "programs on interfaces, in an order among other programs, by links",
            sys::tcx_programs(1, BPF_TCX_INGRESS)
                .map(|_| "yes".into())
                .map_err(|_| "this kernel does not know it".into()),
            "filters of a clsact qdisc (modules sch_ingress and cls_bpf), which are found again by \
             their names; other programs' TCX links run before them",
            "use Linux 6.6 or newer",
        ),
        Feature::useful(
            "open files",
            "mesh: many pods and connections",
            open_files(),
            "the agent's proxy takes few connections at the same time",
            "raise the hard limit of open files (LimitNOFILE=, `ulimit -Hn`)",
        ),
        Feature::useful(
            "JIT compiler",
            "speed",
            jit(),
            "the kernel interprets the programs: the same verdicts, several times slower",
            "sysctl -w net.core.bpf_jit_enable=1",
        ),
        Feature::useful(
            "BTF of the kernel",
            "readable maps and programs in bpftool",
            exists("/sys/kernel/btf/vmlinux"),
            "numbers instead of names there, and no mesh",
            "a kernel with CONFIG_DEBUG_INFO_BTF",
        ),
    ]);
    features
}

/// The effect on a mesh.
const NO_MESH: &str = "no connections can be captured: leave `mesh` out of the configuration";

/// A feature that only a node with a mesh needs.
fn mesh(name: &'static str, needed_for: &'static str, found: Result<String, String>) -> Feature {
    Feature::useful(name, needed_for, found, NO_MESH, OLD_KERNEL)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn word(error: io::Error) -> String {
    error.to_string()
}

fn exists(path: &str) -> Result<String, String> {
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
fn capabilities() -> Result<String, String> {
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

fn cgroup(cgroup: &Path) -> Result<String, String> {
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

fn bpffs(directory: &Path) -> Result<String, String> {
    match Pins::new(directory).is_on_bpffs() {
        Ok(true) => Ok(directory.display().to_string()),
        Ok(false) if directory.starts_with("/sys/fs/bpf") => {
            Ok("not mounted yet; the agent mounts it on /sys/fs/bpf".into())
        }
        Ok(false) => Err(format!("{} is not on one", directory.display())),
        Err(error) => Err(error.to_string()),
    }
}

fn map(
    kind: bpf_map_type,
    key_size: u32,
    value_size: u32,
    flags: u32,
    max_entries: u32,
) -> Result<String, String> {
    let shape = Shape {
        kind,
        key_size,
        value_size,
        flags,
    };
    sys::map_create("probe", &shape, max_entries)
        .map(|_| "yes".into())
        .map_err(word)
}

/// `r0 = 1; exit`, or with a helper: `r1 = 0; call helper; r0 = 1; exit`.
const SET_RESULT: u64 = 0x0000_0001_0000_00b7;
const EXIT: u64 = 0x95;
/// A call; the helper's number is in the upper half.
const CALL: u64 = 0x85;
const GET_NETNS_COOKIE: u64 = 122;

fn helper(hook: bpf_attach_type, number: u32) -> Result<String, String> {
    const CLEAR_ARGUMENT: u64 = 0x0000_0000_0000_01b7;
    let call = CALL | u64::from(number) << 32;
    load(
        BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        hook,
        &[CLEAR_ARGUMENT, call, SET_RESULT, EXIT],
    )
}

/// Whether programs for all tracepoints that ours are for can be loaded.
fn traced() -> Result<String, String> {
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

fn load(
    kind: bpf_prog_type,
    hook: bpf_attach_type,
    instructions: &[u64],
) -> Result<String, String> {
    sys::prog_load(kind, hook, instructions)
        .map(|_| "yes".into())
        .map_err(word)
}

/// The limit that the agent raises its own to: enough for as many pods as a node usually has, and some thousand
/// connections.
fn open_files() -> Result<String, String> {
    const ENOUGH: u64 = 16_384;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| error.to_string())?;
    if hard < ENOUGH {
        return Err(format!(
            "at most {hard}; {ENOUGH} are enough for most nodes"
        ));
    }
    Ok(format!("at most {hard}"))
}

fn jit() -> Result<String, String> {
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
