//! TCP sockets as the kernel has them: their states, and the fields that programs read of them.

use core::{ffi::c_void, ptr::read_volatile};

use aya_ebpf::helpers::generated::bpf_skc_to_tcp_sock;
use dataplane_common::{Addr, capture::Field};

use crate::socket::read_words;

// States of a TCP socket (`include/net/tcp_states.h`).
pub const ESTABLISHED: u32 = 1;
pub const SYN_RECV: u32 = 3;
pub const FIN_WAIT2: u32 = 5;
pub const CLOSE: u32 = 7;
pub const CLOSE_WAIT: u32 = 8;
pub const LAST_ACK: u32 = 9;
pub const CLOSING: u32 = 11;

/// Makes a socket's storage if it is not there (`BPF_SK_STORAGE_GET_F_CREATE`).
pub const CREATE: u64 = 1;

const AF_INET6: u16 = 10;

/// The offsets of [`Field`]s in this kernel: the agent writes them before it loads the programs, and the verifier sees
/// constants.
#[unsafe(no_mangle)]
static FIELDS: [u32; Field::ALL.len()] = [0; Field::ALL.len()];

/// A TCP socket of the kernel's own, `struct sock`: the verifier knows its type, and checks every read.
#[derive(Clone, Copy)]
pub struct Socket(*const c_void);

impl Socket {
    /// The socket of a tracepoint.
    #[inline(always)]
    pub const fn new(socket: *const c_void) -> Self {
        Self(socket)
    }

    /// For helpers that take a socket.
    #[inline(always)]
    pub const fn as_ptr(self) -> *mut c_void {
        self.0.cast_mut()
    }

    /// A field of `struct sock`.
    #[inline(always)]
    pub fn read<T>(self, field: Field) -> T {
        // SAFETY: the verifier lets nothing be read there that is not a field; the kernel makes reading of one that is
        // gone harmless.
        unsafe { read(self.0, field) }
    }

    /// Returns the socket's cookie; 0 if it has none, and so is not measured.
    #[inline(always)]
    pub fn cookie(self) -> u64 {
        self.read(Field::Cookie)
    }

    #[inline(always)]
    pub fn local(self) -> Addr {
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
    pub fn netns(self) -> u64 {
        let net: *const c_void = self.read(Field::Net);
        // SAFETY: as in `read`: `struct net`.
        unsafe { read(net, Field::NetCookie) }
    }

    /// Returns the bytes that the other side has acknowledged, and the bytes received: a SYN that was acknowledged
    /// counts as one, and a FIN in either direction.
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
