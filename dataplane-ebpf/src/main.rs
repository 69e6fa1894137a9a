//! The kernel programs' entry points, one line each, and nothing else.
//!
//! A cgroup program answers 1 (go on) or 0 (refuse, with the error set by `bpf_set_retval`);
//! `recvmsg` and `getpeername` programs may only answer 1 (`check_return_code` in
//! `kernel/bpf/verifier.c`).
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![expect(
    clippy::cast_possible_truncation,
    reason = "the kernel hands over ports, protocols and sizes in wider words than they fill"
)]

#[cfg(target_endian = "big")]
compile_error!("nobody has run the programs on a big-endian machine");

mod atomic;
mod capture;
mod events;
mod packet;
mod select;
mod sets;
mod socket;
mod tables;

use aya_ebpf::{
    macros::{
        btf_tracepoint, cgroup_sock, cgroup_sock_addr, cgroup_sockopt, classifier, sk_lookup,
        sock_ops,
    },
    programs::{
        BtfTracePointContext, SkLookupContext, SockAddrContext, SockContext, SockOpsContext,
        SockoptContext, TcContext,
    },
};

use crate::capture::{assign, datagrams, inbound, origin, probes, sockopt, states};
use crate::socket::{SockAddr, V4, V6, connect, getpeername, recvmsg, release, sendmsg};

/// TCP and UDP `connect()` to an IPv4 address.
#[cgroup_sock_addr(connect4)]
fn connect4(ctx: SockAddrContext) -> i32 {
    connect::run(&SockAddr::<V4>::new(ctx))
}

/// TCP and UDP `connect()` to an IPv6 address, v4-mapped ones included.
#[cgroup_sock_addr(connect6)]
fn connect6(ctx: SockAddrContext) -> i32 {
    connect::run(&SockAddr::<V6>::new(ctx))
}

/// `sendto()` and `sendmsg()` with an IPv4 address on a UDP socket.
#[cgroup_sock_addr(sendmsg4)]
fn sendmsg4(ctx: SockAddrContext) -> i32 {
    sendmsg::run(&SockAddr::<V4>::new(ctx))
}

/// `sendto()` and `sendmsg()` with an IPv6 address on a UDP socket.
#[cgroup_sock_addr(sendmsg6)]
fn sendmsg6(ctx: SockAddrContext) -> i32 {
    sendmsg::run(&SockAddr::<V6>::new(ctx))
}

/// The source of a UDP datagram, as `recvfrom()` reports it.
#[cgroup_sock_addr(recvmsg4)]
fn recvmsg4(ctx: SockAddrContext) -> i32 {
    recvmsg::run(&SockAddr::<V4>::new(ctx))
}

/// The source of a UDP datagram, as `recvfrom()` reports it on an IPv6 socket.
#[cgroup_sock_addr(recvmsg6)]
fn recvmsg6(ctx: SockAddrContext) -> i32 {
    recvmsg::run(&SockAddr::<V6>::new(ctx))
}

/// The peer that `getpeername()` reports.
#[cgroup_sock_addr(getpeername4)]
fn getpeername4(ctx: SockAddrContext) -> i32 {
    getpeername::run(&SockAddr::<V4>::new(ctx))
}

/// The peer that `getpeername()` reports on an IPv6 socket.
#[cgroup_sock_addr(getpeername6)]
fn getpeername6(ctx: SockAddrContext) -> i32 {
    getpeername::run(&SockAddr::<V6>::new(ctx))
}

/// A socket is closed for good: its records are removed.
#[cgroup_sock(sock_release)]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn sock_release(ctx: SockContext) -> i32 {
    release::run(&ctx)
}

/// TCP `connect()` of a workload to an IPv4 address: decides whether it goes to the proxy.
#[cgroup_sock_addr(connect4)]
fn capture4(ctx: SockAddrContext) -> i32 {
    datagrams::connect(&SockAddr::<V4>::new(ctx))
}

/// TCP `connect()` of a workload to an IPv6 address.
#[cgroup_sock_addr(connect6)]
fn capture6(ctx: SockAddrContext) -> i32 {
    datagrams::connect(&SockAddr::<V6>::new(ctx))
}

/// The local address of a socket: for a captured connection at the proxy, the original destination.
#[cgroup_sock_addr(getsockname4)]
fn getsockname4(ctx: SockAddrContext) -> i32 {
    sockopt::getsockname(&SockAddr::<V4>::new(ctx))
}

/// The local address of an IPv6 socket.
#[cgroup_sock_addr(getsockname6)]
fn getsockname6(ctx: SockAddrContext) -> i32 {
    sockopt::getsockname(&SockAddr::<V6>::new(ctx))
}

/// `getsockopt()`: the proxy asks for the original destination.
#[cgroup_sockopt(getsockopt)]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn getsockopt(ctx: SockoptContext) -> i32 {
    sockopt::getsockopt(ctx.sockopt)
}

/// The state of a socket is about to change: a measured connection may be established or closed.
#[btf_tracepoint(function = "inet_sock_set_state")]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn tcp_states(ctx: BtfTracePointContext) -> i32 {
    states::changed(&ctx);
    0
}

/// A TCP socket is gone: its meter is removed.
#[btf_tracepoint(function = "tcp_destroy_sock")]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn tcp_gone(ctx: BtfTracePointContext) -> i32 {
    states::gone(&ctx);
    0
}

/// A TCP socket is being connected to a proxy, accepted by one, closed or begins to listen.
#[sock_ops]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn tcp_events(ctx: SockOpsContext) -> u32 {
    origin::run(ctx.ops)
}

/// A TCP socket of the kubelet is being connected or closed.
#[sock_ops]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn probe_events(ctx: SockOpsContext) -> u32 {
    probes::run(ctx.ops)
}

/// Chooses the socket that takes an incoming connection in a workload's network namespace.
#[sk_lookup]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn inbound_lookup(ctx: SkLookupContext) -> u32 {
    inbound::run(ctx.lookup)
}

/// A packet from a workload whose sockets are elsewhere: decides whether it goes to the proxy.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn packet_capture(ctx: TcContext) -> i32 {
    assign::run(&ctx)
}

/// A packet that arrives: at an uplink from another machine, at a pod's interface from the pod.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn packet_ingress(ctx: TcContext) -> i32 {
    packet::ingress(&ctx)
}

/// A packet that is about to leave this node, or to go to a pod.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn packet_egress(ctx: TcContext) -> i32 {
    packet::egress(&ctx)
}

/// Where the routes lead a packet that `dataplane explain` makes up.
#[classifier]
#[expect(clippy::needless_pass_by_value, reason = "the macro hands it over so")]
fn packet_way(ctx: TcContext) -> i32 {
    packet::way(&ctx)
}

/// There is nothing to unwind to: a panic that the compiler could not prove away becomes a jump to
/// nowhere, which the verifier refuses at load time ("last insn is not an exit or jmp").
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: never reached in a program that loads.
    unsafe { core::hint::unreachable_unchecked() }
}

/// The kernel lets GPL-compatible programs use helpers such as `bpf_ktime_get_ns`.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
