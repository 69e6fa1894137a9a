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

use core::{ffi::c_void, ptr::read_volatile};

use aya_ebpf::{helpers::generated::bpf_skc_to_tcp_sock, programs::BtfTracePointContext};
use dataplane_common::{
    Addr, Reason,
    capture::{self, CaptureConfig, FROM_CLIENT, Field, Local, has_mark},
};

use super::{Live, config, meters};
use crate::{socket::read_words, tables::LOCALS};

// States of a TCP socket (`include/net/tcp_states.h`).
const ESTABLISHED: u32 = 1;
const SYN_RECV: u32 = 3;
const FIN_WAIT2: u32 = 5;
pub const CLOSE: u32 = 7;
const CLOSE_WAIT: u32 = 8;
const LAST_ACK: u32 = 9;
const CLOSING: u32 = 11;

const AF_INET6: u16 = 10;

/// Where [`Field`]s are in this kernel: the agent writes it before it loads the programs, and to the verifier they
/// are constants.
#[unsafe(no_mangle)]
static FIELDS: [u32; Field::ALL.len()] = [0; Field::ALL.len()];

/// A TCP socket of the kernel's own, `struct sock`: the verifier knows its type, and checks what is read of it.
#[derive(Clone, Copy)]
pub struct Socket(*const c_void);

/// `inet_sock_set_state`: the state of a socket is about to change.
#[inline(always)]
pub fn changed(ctx: &BtfTracePointContext) {
    let now: u32 = ctx.arg(2);
    if now != ESTABLISHED && now != CLOSE {
        return;
    }
    let socket = Socket(ctx.arg(0));
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
    let socket = Socket(ctx.arg(0));
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
    let Some(found) = LOCALS.get_ptr(addr) else {
        return;
    };
    // SAFETY: a hash's element, freed after a grace period.
    let found: Local = unsafe { *found };
    if !found.is_measured() || found.netns != socket.netns() {
        return;
    }
    if let Some(own) = LOCALS.get_ptr(client)
        // SAFETY: as above.
        && unsafe { (*own).netns } == found.netns
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

impl Socket {
    /// For helpers that take a socket.
    #[inline(always)]
    pub const fn as_ptr(self) -> *mut c_void {
        self.0.cast_mut()
    }

    /// A field of `struct sock`.
    #[inline(always)]
    fn read<T>(self, field: Field) -> T {
        // SAFETY: the verifier lets nothing be read there that is not a field; the kernel makes reading of one that is
        // gone harmless.
        unsafe { read(self.0, field) }
    }

    /// 0 if it has none, and so is none of those that are measured.
    #[inline(always)]
    fn cookie(self) -> u64 {
        self.read(Field::Cookie)
    }

    #[inline(always)]
    fn local(self) -> Addr {
        self.addr(Field::V4, Field::V6)
    }

    #[inline(always)]
    pub fn remote(self) -> Addr {
        self.addr(Field::RemoteV4, Field::RemoteV6)
    }

    #[inline(always)]
    fn addr(self, v4: Field, v6: Field) -> Addr {
        if self.read::<u16>(Field::Family) != AF_INET6 {
            return Addr::from_v4_word(self.read(v4));
        }
        // SAFETY: as in `read`; four words are an address.
        unsafe { Addr::from_words(read_words(self.0.byte_add(at(v6)).cast())) }
    }

    /// Its network namespace's cookie.
    #[inline(always)]
    fn netns(self) -> u64 {
        let net: *const c_void = self.read(Field::Net);
        // SAFETY: as in `read`: `struct net`.
        unsafe { read(net, Field::NetCookie) }
    }

    /// What the other side has acknowledged and what has been received, in bytes: a SYN that was acknowledged counts
    /// as one, and a FIN in either direction.
    #[inline(always)]
    pub fn bytes(self) -> (u64, u64) {
        // SAFETY: the helper checks that it is a TCP socket; fields of `struct tcp_sock`.
        unsafe {
            let tcp: *const c_void = bpf_skc_to_tcp_sock(self.as_ptr()).cast();
            if tcp.is_null() {
                return (0, 0);
            }
            (read(tcp, Field::Acked), read(tcp, Field::Received))
        }
    }
}

#[inline(always)]
fn at(field: Field) -> usize {
    // SAFETY: an element of the array.
    unsafe { read_volatile(&raw const FIELDS[field as usize]) as usize }
}

/// # Safety
/// `from` must be of the field's structure, which the verifier checks.
#[inline(always)]
unsafe fn read<T>(from: *const c_void, field: Field) -> T {
    // SAFETY: the caller's promise.
    unsafe { read_volatile(from.byte_add(at(field)).cast()) }
}
