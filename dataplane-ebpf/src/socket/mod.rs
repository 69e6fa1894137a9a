//! Decisions at the socket: the programs change the address that a system call passes or returns, and never touch a
//! packet.

pub mod connect;
pub mod events;
pub mod flows;
pub mod getpeername;
pub mod peers;
mod ports;
pub mod recvmsg;
pub mod release;
pub mod sendmsg;
pub mod siblings;

use core::{
    marker::PhantomData,
    ptr::{read_volatile, write_volatile},
};

use aya_ebpf::{
    EbpfContext,
    bindings::bpf_sock_addr,
    helpers::generated::{bpf_get_netns_cookie, bpf_ktime_get_ns, bpf_set_retval},
    programs::SockAddrContext,
};
use dataplane_common::{Addr, OF_AGENT, Port, Protocol, Reason, tables::Config};

use crate::{
    select::{Request, Verdict, count, count_pool},
    tables::CONFIG,
};

/// The system call goes on.
pub const GO_ON: i32 = 1;
/// The system call fails with the error set by [`refuse`].
const REFUSED: i32 = 0;
/// `ECONNREFUSED` on every architecture that we build for (`include/uapi/asm-generic/errno.h`).
const ECONNREFUSED: i32 = 111;

/// The address family of a program.
pub trait Family {
    /// Reads the address of the system call.
    ///
    /// # Safety
    /// `ctx` must be the program's context.
    unsafe fn addr(ctx: *const bpf_sock_addr) -> Addr;
    /// Replaces the address of the system call.
    ///
    /// # Safety
    /// `ctx` must be the program's context.
    unsafe fn set_addr(ctx: *mut bpf_sock_addr, addr: Addr);
    /// Reads the address that a datagram is sent from (`is_sent`), or that the socket is bound to.
    ///
    /// # Safety
    /// `ctx` must be the program's context, and `is_sent` say whether the program is for `sendmsg()`.
    unsafe fn source(ctx: *const bpf_sock_addr, is_sent: bool) -> Addr;
}

/// `user_ip4`.
pub struct V4;
/// `user_ip6`.
pub struct V6;

// The verifier rewrites context accesses one field at a time (`sock_addr_convert_ctx_access` in
// net/core/filter.c), so the compiler must not merge or split them: hence volatile.

impl Family for V4 {
    #[inline(always)]
    unsafe fn addr(ctx: *const bpf_sock_addr) -> Addr {
        // SAFETY: a field of the context.
        Addr::from_v4_word(unsafe { read_volatile(&raw const (*ctx).user_ip4) })
    }

    #[inline(always)]
    unsafe fn set_addr(ctx: *mut bpf_sock_addr, addr: Addr) {
        // SAFETY: a field of the context.
        unsafe { write_volatile(&raw mut (*ctx).user_ip4, addr.words()[3]) };
    }

    #[inline(always)]
    unsafe fn source(ctx: *const bpf_sock_addr, is_sent: bool) -> Addr {
        // SAFETY: fields of the context and of its socket.
        unsafe {
            Addr::from_v4_word(if is_sent {
                read_volatile(&raw const (*ctx).msg_src_ip4)
            } else {
                let sk = read_volatile(&raw const (*ctx).__bindgen_anon_1.sk);
                read_volatile(&raw const (*sk).src_ip4)
            })
        }
    }
}

impl Family for V6 {
    #[inline(always)]
    unsafe fn addr(ctx: *const bpf_sock_addr) -> Addr {
        // SAFETY: fields of the context.
        unsafe { Addr::from_words(read_words((&raw const (*ctx).user_ip6).cast())) }
    }

    #[inline(always)]
    unsafe fn set_addr(ctx: *mut bpf_sock_addr, addr: Addr) {
        let [a, b, c, d] = addr.words();
        // SAFETY: fields of the context.
        unsafe {
            let ip = (&raw mut (*ctx).user_ip6).cast::<u32>();
            write_volatile(ip, a);
            write_volatile(ip.add(1), b);
            write_volatile(ip.add(2), c);
            write_volatile(ip.add(3), d);
        }
    }

    #[inline(always)]
    unsafe fn source(ctx: *const bpf_sock_addr, is_sent: bool) -> Addr {
        // SAFETY: fields of the context and of its socket.
        unsafe {
            Addr::from_words(if is_sent {
                read_words((&raw const (*ctx).msg_src_ip6).cast())
            } else {
                let sk = read_volatile(&raw const (*ctx).__bindgen_anon_1.sk);
                read_words((&raw const (*sk).src_ip6).cast())
            })
        }
    }
}

/// The four words of an IPv6 address. If a program may need either family's address, it reads both: the compiler turns
/// two reads in two branches into one read at a computed place, and the verifier requires that each field of the
/// context is read by itself.
///
/// # Safety
/// `ip` must be such a field of the context, or of a socket.
#[inline(always)]
pub unsafe fn read_words(ip: *const u32) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            read_volatile(ip),
            read_volatile(ip.add(1)),
            read_volatile(ip.add(2)),
            read_volatile(ip.add(3)),
        ]
    }
}

/// The address in a system call, and its socket.
pub struct SockAddr<F> {
    pub ctx: SockAddrContext,
    family: PhantomData<F>,
}

impl<F: Family> SockAddr<F> {
    #[inline(always)]
    pub fn new(ctx: SockAddrContext) -> Self {
        Self {
            ctx,
            family: PhantomData,
        }
    }

    #[inline(always)]
    pub fn addr(&self) -> Addr {
        // SAFETY: the program's context.
        unsafe { F::addr(self.ctx.sock_addr) }
    }

    #[inline(always)]
    pub fn port(&self) -> Port {
        // SAFETY: a field of the context; the port is its low half, in network order.
        let port = unsafe { read_volatile(&raw const (*self.ctx.sock_addr).user_port) };
        Port::from_be(port as u16)
    }

    /// Replaces address and port of the system call.
    #[inline(always)]
    pub fn set(&self, addr: Addr, port: Port) {
        // SAFETY: fields of the context.
        unsafe {
            F::set_addr(self.ctx.sock_addr, addr);
            write_volatile(
                &raw mut (*self.ctx.sock_addr).user_port,
                u32::from(port.be()),
            );
        }
    }

    /// The address that the socket is bound to, or that the call names (`IPV6_PKTINFO`): unspecified if neither. `is_sent`: the
    /// call is `sendmsg()`.
    #[inline(always)]
    pub fn source(&self, is_sent: bool) -> Addr {
        // SAFETY: the program's context, whose socket is never null in our hooks.
        unsafe { F::source(self.ctx.sock_addr, is_sent) }
    }

    /// Whether the socket is connected to any peer.
    #[inline(always)]
    fn is_connected(&self) -> bool {
        // SAFETY: a field of the context, which is never null in our hooks, and one of the socket.
        let port = unsafe {
            let sk = read_volatile(&raw const (*self.ctx.sock_addr).__bindgen_anon_1.sk);
            read_volatile(&raw const (*sk).dst_port)
        };
        port != 0
    }

    /// Returns the request of this system call; `None` if services do not have its protocol.
    #[inline(always)]
    pub fn request(&self) -> Option<Request> {
        // SAFETY: a field of the context.
        let number = unsafe { read_volatile(&raw const (*self.ctx.sock_addr).protocol) };
        let protocol = Protocol::from_number(number as u8);
        if protocol != Protocol::TCP && protocol != Protocol::UDP {
            return None;
        }
        // SAFETY: the program's context.
        let netns = unsafe { bpf_get_netns_cookie(self.ctx.as_ptr()) };
        Some(Request {
            addr: self.addr(),
            port: self.port(),
            protocol,
            netns,
            own_loopback: config().is_some_and(|config| config.host_netns == netns),
        })
    }

    /// Whether the socket has the priority of the agent's sockets to the API server and to resolvers (`SO_PRIORITY`).
    #[inline(always)]
    fn is_of_agent(&self) -> bool {
        // SAFETY: a field of the context, which is never null in our hooks, and one of the socket.
        let priority = unsafe {
            let sk = read_volatile(&raw const (*self.ctx.sock_addr).__bindgen_anon_1.sk);
            read_volatile(&raw const (*sk).priority)
        };
        priority == OF_AGENT
    }

    /// Counts a verdict and applies the part that all system calls share.
    #[inline(always)]
    fn carry_out(&self, verdict: &Verdict) -> i32 {
        if verdict.reason == Reason::NotService {
            count(verdict.reason);
            return GO_ON;
        }
        let reason = verdict.reason();
        count(reason);
        count_pool(verdict.pool, reason);
        if verdict.endpoint.is_none() {
            if verdict.reason == Reason::Dangling {
                // Cannot happen, so it is worth a line in the agent's log if it does.
                aya_log_ebpf::error!(&self.ctx, "pool {} or its block is not there", verdict.pool);
            }
            return refuse();
        }
        self.set(verdict.endpoint.addr, verdict.endpoint.port);
        GO_ON
    }
}

#[inline(always)]
pub fn config() -> Option<&'static Config> {
    CONFIG.get(0)
}

/// Whether the lease of the agent's DNS server says that it answers.
#[inline(always)]
pub fn answers_queries() -> bool {
    let Some(config) = config() else {
        return false;
    };
    // SAFETY: user space stores the whole word; the helper has no preconditions.
    unsafe { bpf_ktime_get_ns() < read_volatile(&raw const config.queries_until) }
}

/// Makes the system call fail as it does when an iptables `REJECT` answers: at once, with
/// `ECONNREFUSED`.
#[inline(always)]
pub fn refuse() -> i32 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_set_retval(-ECONNREFUSED) };
    REFUSED
}
