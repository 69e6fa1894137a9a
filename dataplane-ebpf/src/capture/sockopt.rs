//! Answers a proxy's questions about an accepted connection: `SO_ORIGINAL_DST`, as after an iptables `REDIRECT`, and
//! `getsockname()`, as after `TPROXY`.

use core::{
    arch::asm,
    mem::offset_of,
    ptr::{from_ref, null_mut, read_volatile},
};

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sockopt},
    helpers::generated::bpf_sk_storage_get,
};
use dataplane_common::capture::Origin;

use crate::{
    socket::{Family, GO_ON, SockAddr},
    tables::ACCEPTED,
};

const SOL_IP: i32 = 0;
const SOL_IPV6: i32 = 41;
/// `SO_ORIGINAL_DST` (`linux/netfilter_ipv4.h`) and `IP6T_SO_ORIGINAL_DST`.
const ORIGINAL_DST: i32 = 80;
const OPTLEN: usize = offset_of!(bpf_sockopt, optlen);
const RETVAL: usize = offset_of!(bpf_sockopt, retval);
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// `getsockopt()`. For other options the kernel's answer stays: `optlen` 0 means this, for answers larger than a page,
/// too (`Documentation/bpf/prog_cgroup_sockopt.rst`).
#[inline(always)]
pub fn getsockopt(ctx: *mut bpf_sockopt) -> i32 {
    let length = answer(ctx);
    // SAFETY: fields of the context. In assembler, since the compiler makes one store at a computed
    // address of two in two branches, and the verifier wants fields of the context at fixed ones.
    unsafe {
        asm!("*(u32 *)({0} + {1}) = {2}", in(reg) ctx, const OPTLEN, in(reg) u64::from(length));
        if length != 0 {
            asm!("*(u32 *)({0} + {1}) = {2}", in(reg) ctx, const RETVAL, in(reg) 0u64);
        }
    }
    GO_ON
}

/// Writes the answer and returns its length; 0 if this program has no answer.
#[inline(always)]
fn answer(ctx: *mut bpf_sockopt) -> u32 {
    // SAFETY: fields of the context.
    let (level, option) = unsafe {
        (
            read_volatile(&raw const (*ctx).level),
            read_volatile(&raw const (*ctx).optname),
        )
    };
    if option != ORIGINAL_DST || (level != SOL_IP && level != SOL_IPV6) {
        return 0;
    }
    // SAFETY: a field of the context.
    let origin = kept(unsafe { read_volatile(&raw const (*ctx).__bindgen_anon_1.sk) });
    if origin.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage.
    let origin = unsafe { *origin };
    let v4 = origin.addr.is_v4();
    if v4 != (level == SOL_IP) {
        return 0;
    }
    // SAFETY: every write is within the answer's buffer, in the form of check that the verifier requires; a
    // `struct sockaddr_in` has 16 bytes, a `struct sockaddr_in6` 28.
    unsafe {
        let start = read_volatile(&raw const (*ctx).__bindgen_anon_2.optval).cast::<u32>();
        let end = read_volatile(&raw const (*ctx).__bindgen_anon_3.optval_end).cast::<u32>();
        // Family and port share the first word.
        let (family, port) = (start.cast::<u16>(), start.cast::<u16>().add(1));
        let words = origin.addr.words();
        if v4 {
            if start.add(4) > end {
                return 0;
            }
            family.write(AF_INET);
            port.write(origin.port.be());
            start.add(1).write(words[3]);
            start.add(2).write(0);
            start.add(3).write(0);
            16
        } else {
            if start.add(7) > end {
                return 0;
            }
            family.write(AF_INET6);
            port.write(origin.port.be());
            start.add(1).write(0);
            start.add(2).write(words[0]);
            start.add(3).write(words[1]);
            start.add(4).write(words[2]);
            start.add(5).write(words[3]);
            start.add(6).write(0);
            28
        }
    }
}

/// `getsockname()`.
#[inline(always)]
pub fn getsockname<F: Family>(call: &SockAddr<F>) -> i32 {
    // SAFETY: a field of the context.
    let sk = unsafe { read_volatile(&raw const (*call.ctx.sock_addr).__bindgen_anon_1.sk) };
    let origin = kept(sk);
    if !origin.is_null() {
        // SAFETY: the socket's storage.
        let origin = unsafe { *origin };
        call.set(origin.addr, origin.port);
    }
    GO_ON
}

/// Returns the original destination of a socket's connection, or null.
#[inline(always)]
fn kept(sk: *mut bpf_sock) -> *const Origin {
    if sk.is_null() {
        return null_mut();
    }
    // SAFETY: a socket, and a socket storage table.
    unsafe {
        let table = from_ref(&ACCEPTED).cast_mut().cast();
        bpf_sk_storage_get(table, sk.cast(), null_mut(), 0).cast()
    }
}
