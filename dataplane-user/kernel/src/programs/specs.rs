//! The programs that are attached to cgroups and tracepoints, by name and hook.

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

/// A program and its hook.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its name, in the object, in the kernel and of its link's pin.
    pub name: &'static str,
    /// Its type.
    pub kind: bpf_prog_type,
    /// The hook of the program.
    pub hook: bpf_attach_type,
}

const fn sock_addr(name: &'static str, hook: bpf_attach_type) -> Spec {
    Spec {
        name,
        kind: BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        hook,
    }
}

/// Every program, in the order in which they are attached. Programs that clean up, and programs that answer a socket's
/// queries, come before the programs that cause these queries.
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

/// The programs of mesh capture, which are attached only where there is a mesh, and before those above: these then find
/// out whether a connection that capture leaves alone, or sends direct, belongs to a service. The two programs that see
/// the end of connections, which the others begin, come first.
pub const CAPTURE_PROGRAMS: [Spec; 8] = [
    traced("tcp_states"),
    traced("tcp_gone"),
    Spec {
        name: "getsockopt",
        kind: BPF_PROG_TYPE_CGROUP_SOCKOPT,
        hook: BPF_CGROUP_GETSOCKOPT,
    },
    sock_addr("getsockname4", BPF_CGROUP_INET4_GETSOCKNAME),
    sock_addr("getsockname6", BPF_CGROUP_INET6_GETSOCKNAME),
    sock_addr("capture4", BPF_CGROUP_INET4_CONNECT),
    sock_addr("capture6", BPF_CGROUP_INET6_CONNECT),
    // Swapped last: the programs above have recorded the data of a socket that it asks for.
    TCP_EVENTS,
];

/// The program that follows connections to a proxy. The kernel asks it ten times for every connection, so it is
/// attached when a workload has a proxy ([`attach_events`](super::attach_events)), and stays from then on.
pub const TCP_EVENTS: Spec = Spec {
    name: "tcp_events",
    kind: BPF_PROG_TYPE_SOCK_OPS,
    hook: BPF_CGROUP_SOCK_OPS,
};

/// The program that notes the kubelet's connections to workloads. It is attached to the kubelet's cgroups only, each by a
/// link of its own.
pub const PROBE_EVENTS: Spec = Spec {
    name: "probe_events",
    ..TCP_EVENTS
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

/// The ending of a link's pin while it replaces another.
pub const REPLACEMENT: &str = "-new";

/// The programs that are attached to the cgroup or to tracepoints, in the order in which they are.
pub fn wanted(capture: bool) -> impl Iterator<Item = &'static Spec> {
    let capturing = CAPTURE_PROGRAMS.iter().filter(move |_| capture);
    capturing.chain(&PROGRAMS)
}
