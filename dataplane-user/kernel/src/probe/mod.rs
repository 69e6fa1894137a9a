//! The abilities of this machine: found by trying, not guessed from its version.

mod attempts;

use std::borrow::Cow;

use aya_obj::generated::{
    bpf_attach_type::{
        BPF_CGROUP_GETSOCKOPT, BPF_CGROUP_INET_INGRESS, BPF_CGROUP_INET4_CONNECT,
        BPF_CGROUP_INET4_GETSOCKNAME, BPF_CGROUP_SOCK_OPS, BPF_SK_LOOKUP, BPF_TCX_INGRESS,
    },
    bpf_map_type::{
        BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_LRU_HASH, BPF_MAP_TYPE_RINGBUF, BPF_MAP_TYPE_SOCKHASH,
    },
    bpf_prog_type::{
        BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_PROG_TYPE_CGROUP_SOCKOPT, BPF_PROG_TYPE_SCHED_CLS,
        BPF_PROG_TYPE_SK_LOOKUP, BPF_PROG_TYPE_SOCK_OPS,
    },
};

use self::attempts::{
    CALL, EXIT, Found, GET_NETNS_COOKIE, SET_RESULT, bpffs, capabilities, cgroup, exists, helper,
    jit, load, map, open_files, traced, word, yes,
};
use super::{
    Paths,
    capture::routing::{FWMARK_ACCEPT, cannot_accept_marks},
    object,
    programs::PROGRAMS,
    sockets, sys, sysctl,
};

/// One thing that the dataplane needs of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// The part of the dataplane that needs it.
    pub needed_for: &'static str,
    /// Whether the kernel has the ability.
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

/// A feature to ask for.
struct Check {
    name: &'static str,
    needed_for: &'static str,
    /// The behaviour without it; `None`: the agent does not start.
    without: Option<&'static str>,
    remedy: &'static str,
    probe: fn(&Paths) -> Found,
}

impl Check {
    fn run(&self, paths: &Paths) -> Feature {
        let found = (self.probe)(paths);
        Feature::of(self.name, self.needed_for, self.without, self.remedy, found)
    }
}

impl Feature {
    fn of(
        name: &'static str,
        needed_for: &'static str,
        without: Option<&'static str>,
        remedy: &'static str,
        found: Found,
    ) -> Self {
        Self {
            name,
            needed_for,
            present: found.is_ok(),
            required: without.is_none(),
            without: without.unwrap_or("the agent does not start").into(),
            detail: found.unwrap_or_else(|detail| detail),
            remedy,
        }
    }
}

/// `bpf_set_retval` at the hooks of `connect()` and `sendmsg()` is the newest required ability
/// (`cgroup_common_func_proto` in `kernel/bpf/cgroup.c`, Linux 6.1).
const OLD_KERNEL: &str = "use Linux 6.1 or newer";
const NO_BPF: &str = "run as root (or with CAP_NET_ADMIN and CAP_SYS_ADMIN), outside of containers that forbid \
     bpf()";

/// The effect on a mesh.
const NO_MESH: &str = "no connections can be captured: leave `mesh` out of the configuration";

/// A feature without which the agent does not start.
const fn required(
    name: &'static str,
    needed_for: &'static str,
    remedy: &'static str,
    probe: fn(&Paths) -> Found,
) -> Check {
    Check {
        name,
        needed_for,
        without: None,
        remedy,
        probe,
    }
}

/// A feature that only a node with a mesh needs.
const fn mesh(name: &'static str, needed_for: &'static str, probe: fn(&Paths) -> Found) -> Check {
    Check {
        without: Some(NO_MESH),
        ..required(name, needed_for, OLD_KERNEL, probe)
    }
}

/// The features to ask for before the programs at sockets.
const BEFORE_PROGRAMS: [Check; 7] = [
    required(
        "kernel programs in this binary",
        "everything",
        "build with `cargo xtask build`",
        |_| {
            object::programs()
                .map(|object| format!("{} KiB", object.len() / 1024))
                .map_err(|error| error.to_string())
        },
    ),
    required("capabilities", "loading, attaching", NO_BPF, |_| {
        capabilities()
    }),
    required(
        "cgroup v2",
        "attaching the programs",
        "mount one (`mount -t cgroup2 none /sys/fs/cgroup`), or name it with --cgroup",
        |paths| cgroup(&paths.cgroup),
    ),
    required(
        "bpffs",
        "programs and tables that outlive the agent",
        "mount one (`mount -t bpf bpf /sys/fs/bpf`), or name a directory on one with --bpffs",
        |paths| bpffs(&paths.bpffs),
    ),
    required(
        "mapped arrays",
        "flipping a service's endpoints by one store",
        OLD_KERNEL,
        |_| map(BPF_MAP_TYPE_ARRAY, 4, 16, (1 << 10) | (1 << 12), 1),
    ),
    required(
        "LRU hash",
        "fragments, limits of ICMP errors",
        OLD_KERNEL,
        |_| map(BPF_MAP_TYPE_LRU_HASH, 20, 32, 0, 1024),
    ),
    required("ring buffer", "`dataplane monitor`", OLD_KERNEL, |_| {
        map(BPF_MAP_TYPE_RINGBUF, 0, 0, 0, 4096)
    }),
];

/// The features to ask for after the programs at sockets.
const AFTER_PROGRAMS: [Check; 16] = [
    required(
        "bpf_set_retval",
        "ECONNREFUSED for services without endpoints",
        OLD_KERNEL,
        |_| helper(BPF_CGROUP_INET4_CONNECT, 187),
    ),
    required(
        "network namespace cookies",
        "session affinity by pod, the node's own loopback",
        OLD_KERNEL,
        |_| {
            sys::netns_cookie()
                .map(|cookie| format!("this one is {cookie}"))
                .map_err(word)
        },
    ),
    Check {
        name: "socket destruction",
        needed_for: "connected sockets that learn at once that their endpoint is gone",
        without: Some(
            "they keep sending to an endpoint that is gone, until their process gives up",
        ),
        remedy: "a kernel with CONFIG_INET_DIAG_DESTROY and CONFIG_INET_UDP_DIAG",
        probe: |_| yes(sockets::can_destroy()),
    },
    required(
        "packet_ingress, packet_egress",
        "clients outside of the cluster, and pods that are VMs",
        OLD_KERNEL,
        |_| {
            load(
                BPF_PROG_TYPE_SCHED_CLS,
                BPF_CGROUP_INET_INGRESS,
                &[SET_RESULT, EXIT],
            )
        },
    ),
    required(
        "socket storage",
        "the record of a socket",
        OLD_KERNEL,
        |_| yes(sys::socket_storage_create()),
    ),
    mesh(
        "sockops",
        "mesh: the original destination, from the client's socket to the proxy's",
        |_| {
            load(
                BPF_PROG_TYPE_SOCK_OPS,
                BPF_CGROUP_SOCK_OPS,
                &[CALL | GET_NETNS_COOKIE << 32, SET_RESULT, EXIT],
            )
        },
    ),
    Check {
        remedy: "a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_BPF_EVENTS",
        ..mesh(
            "tracepoints",
            "mesh: byte counts of direct connections",
            |_| traced(),
        )
    },
    mesh(
        "cgroup/getsockopt",
        "mesh: proxies that ask for SO_ORIGINAL_DST",
        |_| {
            load(
                BPF_PROG_TYPE_CGROUP_SOCKOPT,
                BPF_CGROUP_GETSOCKOPT,
                &[SET_RESULT, EXIT],
            )
        },
    ),
    mesh(
        "cgroup/getsockname",
        "mesh: proxies that ask for their socket's own address",
        |_| {
            load(
                BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
                BPF_CGROUP_INET4_GETSOCKNAME,
                &[SET_RESULT, EXIT],
            )
        },
    ),
    mesh(
        "sk_lookup",
        "mesh: inbound connections to the proxy",
        |_| load(BPF_PROG_TYPE_SK_LOOKUP, BPF_SK_LOOKUP, &[SET_RESULT, EXIT]),
    ),
    mesh("sockhash", "mesh: the proxy's listening sockets", |_| {
        map(BPF_MAP_TYPE_SOCKHASH, 16, 4, 0, 1)
    }),
    mesh(
        "tcp_fwmark_accept",
        "mesh: applications that see the client's address (keepSource)",
        |_| {
            sysctl::open(FWMARK_ACCEPT)
                .map(|_| "/proc/sys/net/ipv4/tcp_fwmark_accept".into())
                .map_err(|error| cannot_accept_marks(&error))
        },
    ),
    Check {
        name: "TCX",
        needed_for: "programs on interfaces, in an order among other programs, by links",
        without: Some(
            "filters of a clsact qdisc (modules sch_ingress and cls_bpf), which are found again by \
             their names; other programs' TCX links run before them",
        ),
        remedy: "use Linux 6.6 or newer",
        probe: |_| {
            yes(sys::tcx_programs(1, BPF_TCX_INGRESS))
                .map_err(|_| "this kernel does not know it".into())
        },
    },
    Check {
        name: "open files",
        needed_for: "mesh: many pods and connections",
        without: Some("the agent's proxy takes few connections at the same time"),
        remedy: "raise the hard limit of open files (LimitNOFILE=, `ulimit -Hn`)",
        probe: |_| open_files(),
    },
    Check {
        name: "JIT compiler",
        needed_for: "speed",
        without: Some(
            "the kernel interprets the programs: the same verdicts, several times slower",
        ),
        remedy: "sysctl -w net.core.bpf_jit_enable=1",
        probe: |_| jit(),
    },
    Check {
        name: "BTF of the kernel",
        needed_for: "readable maps and programs in bpftool",
        without: Some("numbers instead of names there, and no mesh"),
        remedy: "a kernel with CONFIG_DEBUG_INFO_BTF",
        probe: |_| exists("/sys/kernel/btf/vmlinux"),
    },
];

/// Asks the machine for everything that we need of it. Changes nothing: maps and programs made on
/// the way are gone when this returns.
pub fn features(paths: &Paths) -> Vec<Feature> {
    let before = BEFORE_PROGRAMS.iter().map(|check| check.run(paths));
    let programs = PROGRAMS.iter().map(|program| {
        let needed_for = match program.name {
            "connect4" | "connect6" => "choosing an endpoint at connect()",
            "sendmsg4" | "sendmsg6" => "unconnected UDP",
            "sock_release" => "freeing the record of a socket",
            "recvmsg4" | "recvmsg6" => "UDP replies that come from the VIP",
            _ => "getpeername() that answers the VIP",
        };
        let found = load(program.kind, program.hook, &[SET_RESULT, EXIT]);
        Feature::of(program.name, needed_for, None, OLD_KERNEL, found)
    });
    let after = AFTER_PROGRAMS.iter().map(|check| check.run(paths));
    before.chain(programs).chain(after).collect()
}
