//! States of TCP sockets, as the kernel's tracepoints tell: when connections that are measured are established, when
//! they arrive, and when they are over.
//!
//! `sockops` would tell as well, and ask every socket for time limits, windows and ECN: ten calls for a connection
//! that is made and reset, where these are eight, each of them shorter. That took 1 to 2 % of the connections/s that
//! an application makes directly (`cargo xtask bench relay`).
//!
//! They tell of all sockets of the machine. Those that `connect()` has begun to measure are known by their cookies,
//! those that arrive by address and network namespace.
//!
//! The kernel runs none of these inside of itself: while a CPU runs [`changed`] for a system call, what packets that
//! it receives change is not told (`__bpf_trace_run` in `kernel/trace/bpf_trace.c`). [`gone`], during which it
//! receives none, makes up for that; but a connection that arrives in just that moment is not measured.

use aya_ebpf::programs::BtfTracePointContext;
use dataplane_common::{
    Reason,
    capture::{self, CaptureConfig, FROM_CLIENT, Field, has_mark},
};

use super::{
    Live, config, local, meters,
    tcp::{CLOSE, CLOSE_WAIT, CLOSING, ESTABLISHED, FIN_WAIT2, LAST_ACK, SYN_RECV, Socket},
};

/// `inet_sock_set_state`: the state of a socket is about to change.
#[inline(always)]
pub fn changed(ctx: &BtfTracePointContext) {
    let now: u32 = ctx.arg(2);
    if now != ESTABLISHED && now != CLOSE {
        return;
    }
    let socket = Socket::new(ctx.arg(0));
    let before: u32 = ctx.arg(1);
    let cookie = socket.cookie();
    let meter = meters::kept_of(socket, cookie);
    if now == CLOSE {
        if !meter.is_null() {
            let ended = before == FIN_WAIT2 || before == LAST_ACK || before == CLOSING;
            meters::closed(socket, cookie, meter, ended, ended || before == CLOSE_WAIT);
        }
    } else if !meter.is_null() {
        meters::established(meter, socket.remote());
    } else if before == SYN_RECV {
        arrived(socket);
    }
}

/// `tcp_destroy_sock`: of a socket that nobody has any more nothing is kept. The kernel takes no packets on this CPU
/// meanwhile (`inet_csk_destroy_sock` in `net/ipv4/inet_connection_sock.c`), so that this misses none. What is still
/// there was never established, or the kernel did not tell when it was closed: then both sides have ended it, most
/// probably.
#[inline(always)]
pub fn gone(ctx: &BtfTracePointContext) {
    let socket = Socket::new(ctx.arg(0));
    let cookie = socket.cookie();
    let meter = meters::kept_of(socket, cookie);
    if !meter.is_null() {
        meters::closed(socket, cookie, meter, true, true);
    }
}

/// A connection to a workload between whom and its clients nobody stands is measured where it
/// arrives: what a proxy would take, by the same rules.
#[inline(always)]
fn arrived(socket: Socket) {
    let Some(config) = config() else { return };
    if config.flags & CaptureConfig::ARRIVALS == 0 {
        return;
    }
    let (addr, client) = (socket.local(), socket.remote());
    // What a workload says to itself is no proxy's either. That this comes before the table makes
    // it nothing for connections by loopback.
    if addr == client {
        return;
    }
    let Some(found) = local(addr) else {
        return;
    };
    if !found.is_measured() || found.netns != socket.netns() {
        return;
    }
    if let Some(own) = local(client)
        && own.netns == found.netns
    {
        return;
    }
    // What the proxy took while there was one, it counts.
    if has_mark(socket.read::<u32>(Field::Mark), config.mark | FROM_CLIENT) {
        return;
    }
    let port = u32::from(socket.read::<u16>(Field::Port));
    // The kernel does not say by which interface it came.
    if capture::inbound(&Live, &found, port, 0) == Reason::CapturedInbound {
        meters::arrived(socket, found.workload, client);
    }
}
