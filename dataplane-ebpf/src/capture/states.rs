//! States of TCP sockets, as the kernel's tracepoints report them: when measured connections are established, when they
//! arrive, and when they are over.
//!
//! `sockops` would report them as well, but it also asks every socket for time limits, windows and ECN: ten calls for a
//! connection that is made and reset, instead of eight, each of them shorter. That took 1 to 2 % of the connections/s
//! that an application makes directly (`cargo xtask bench relay`).
//!
//! The tracepoints report all sockets of the machine. Sockets that `connect()` has begun to measure are known by their
//! cookies, arriving ones by address and network namespace.
//!
//! The kernel runs no tracepoint program inside of itself: while a CPU runs [`changed`] for a system call, it does not
//! report changes by packets that it receives meanwhile (`__bpf_trace_run` in `kernel/trace/bpf_trace.c`). [`gone`],
//! during which the CPU receives none, makes up for that; but a connection that arrives at just that moment is not
//! measured.

use aya_ebpf::programs::BtfTracePointContext;
use dataplane_common::{
    Port, Reason,
    capture::{self, CaptureConfig, FROM_CLIENT, Field, Tuple, has_mark},
};

use super::{
    Live, config, local, meters, probes,
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

/// `tcp_destroy_sock`: removes the meter of a socket that no process has any more. The kernel takes no packets on this
/// CPU meanwhile (`inet_csk_destroy_sock` in `net/ipv4/inet_connection_sock.c`), so this program misses none. A meter
/// that is still there belongs to a connection that was never established, or whose closing the kernel did not report:
/// then both sides have most probably ended it.
#[inline(always)]
pub fn gone(ctx: &BtfTracePointContext) {
    let socket = Socket::new(ctx.arg(0));
    let cookie = socket.cookie();
    let meter = meters::kept_of(socket, cookie);
    if !meter.is_null() {
        meters::closed(socket, cookie, meter, true, true);
    }
}

/// Measures a connection to a workload without a proxy in front of it, at its arrival: the connections that a proxy
/// would take, by the same rules.
#[inline(always)]
fn arrived(socket: Socket) {
    let Some(config) = config() else { return };
    if config.flags & CaptureConfig::ARRIVALS == 0 {
        return;
    }
    let (addr, client) = (socket.local(), socket.remote());
    // A workload's connections to itself do not go to a proxy either. This check comes before the lookup, so
    // connections by loopback cost nothing.
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
    // While there is a proxy, the proxy counts the connections that it takes.
    if has_mark(socket.read::<u32>(Field::Mark), config.mark | FROM_CLIENT) {
        return;
    }
    let port = u32::from(socket.read::<u16>(Field::Port));
    // A tunnel: the proxy counts its streams.
    if capture::tunnel(&found, port).is_some() {
        return;
    }
    // A proxy does not see the kubelet's probes, either.
    let probe = Tuple {
        netns: 0,
        client,
        proxy: addr,
        client_port: Port::from_be(socket.read(Field::RemotePort)),
        proxy_port: Port::new(port as u16),
        reserved: 0,
    };
    // The kernel does not report the interface by which it came.
    if capture::inbound(&Live, &found, port, 0) == Reason::CapturedInbound && !probes::is_one(probe)
    {
        meters::arrived(socket, found.workload, client);
    }
}
