//! Sockets that share a local port. Records that matter to the other sockets are kept by port and network namespace.
//!
//! For UDP, the kernel hands a datagram to any socket of a group (`SO_REUSEPORT`), also one that did not ask. And a
//! server may answer from another socket than the one that was asked, such as one that it connects to each client.
//!
//! A socket that is bound to a port and then connected must not get the endpoint that another socket at this port has
//! for another VIP: the kernel would refuse the connection (`EADDRNOTAVAIL`), or for UDP hand all answers to one of
//! both.
//!
//! Most sockets share no port. A bit for each local port that the table has ever had saves them the lookup.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext,
    bindings::{SO_REUSEPORT, SOL_SOCKET, bpf_sock_addr},
    helpers::generated::{
        bpf_get_netns_cookie, bpf_get_prandom_u32, bpf_get_socket_cookie, bpf_getsockopt,
    },
    programs::SockAddrContext,
};
use dataplane_common::{
    Addr, Port, Protocol, Reason, decide,
    tables::{Block, Endpoint, Kind, PeerSets, Sibling, SiblingKey},
};

use super::{Family, SockAddr, V4, flows, ports};
use crate::{
    select::{Live, Request, Verdict},
    sets::place_of,
    tables::{PACKET_CONFIG, SHARED_PORTS, SIBLINGS},
};

/// The VIP that one of the sockets asked and that this end answers; or this end itself, if it asked one of them; or
/// [`Endpoint::NONE`].
#[inline(never)]
pub fn vip_of<F: Family>(call: &SockAddr<F>, addr: Addr, port: Port) -> Endpoint {
    if !are_possible(call) {
        return Endpoint::NONE;
    }
    let key = key(call, Protocol::UDP, addr, port);
    match SIBLINGS.get_ptr_mut(key) {
        // SAFETY: an element may be reused while it is read. The value is then another flow's, for one datagram.
        Some(sibling) => unsafe { (*sibling).vip },
        None => Endpoint::NONE,
    }
}

/// Whether other sockets at the socket's port may matter to it.
#[inline(always)]
pub fn are_possible<F: Family>(call: &SockAddr<F>) -> bool {
    let local = local(call);
    local != Port::ANY && ports::has(&SHARED_PORTS, local)
}

/// Whether the socket has a port already.
#[inline(always)]
pub fn is_bound<F: Family>(call: &SockAddr<F>) -> bool {
    local(call) != Port::ANY
}

/// Notes the VIP that an unconnected socket asks now, if other sockets share its port.
#[inline(never)]
pub fn note_asking<F: Family>(call: &SockAddr<F>) {
    let mut shares = 0_u32;
    // SAFETY: the context of a hook that may ask for its socket's options, and a variable of the length in the call.
    let told = unsafe {
        bpf_getsockopt(
            call.ctx.as_ptr(),
            SOL_SOCKET.cast_signed(),
            SO_REUSEPORT.cast_signed(),
            (&raw mut shares).cast(),
            4,
        )
    };
    if told != 0 || shares == 0 {
        return;
    }
    let peer = flows::recent(call);
    if peer.is_null() {
        return;
    }
    // SAFETY: a place of the socket's element. If another thread writes it meanwhile, the entry is of no flow.
    let peer = unsafe { *peer };
    let key = key(call, Protocol::UDP, peer.endpoint, peer.endpoint_port);
    note(&key, Endpoint::new(peer.vip, peer.vip_port), 0);
}

/// Notes the sender of a datagram that comes from a service's address and port: this end has asked the socket, and the
/// answers belong to it (a socket of the node that is bound to a node port, for example). No socket has a cluster IP.
///
/// A datagram from a VIP does not replace the record of a socket that asks this VIP.
#[inline(never)]
pub fn note_asked<F: Family>(call: &SockAddr<F>) {
    let Some(request) = call.request() else {
        return;
    };
    let (addr, port) = (request.addr, request.port);
    let frontend = decide::find_frontend(&Live, addr, port, request.protocol, request.own_loopback);
    let kind = frontend.kind();
    if frontend.is_none() || kind == Kind::CLUSTER_IP || kind == Kind::CLUSTER_ADDRESS {
        return;
    }
    if !flows::endpoint_for(call, addr, port).is_none() {
        return;
    }
    let itself = Endpoint::new(addr, port);
    flows::remember(call, &request.peer(&itself));
    note(&key(call, Protocol::UDP, addr, port), itself, 0);
}

/// Whether a destination has asked this socket, or another socket at its port.
#[inline(always)]
pub fn was_asked<F: Family>(call: &SockAddr<F>, request: &Request) -> bool {
    let used = flows::endpoint_for(call, request.addr, request.port);
    let itself = Endpoint::new(request.addr, request.port);
    if used.is_none() {
        vip_of(call, request.addr, request.port) == itself
    } else {
        used == itself
    }
}

/// How many other endpoints are tried.
const OTHERS: u32 = 8;

/// Chooses an endpoint that no other socket of this port has for another VIP, for a socket that is bound to a port. If
/// every endpoint is taken, a pod's connection is left to the packet path, which can use another port; a process of the
/// node gets the kernel's error.
#[inline(always)]
pub fn keep_apart<F: Family>(call: &SockAddr<F>, request: &Request, verdict: &mut Verdict) {
    siblings_keep_apart(call.ctx.sock_addr, request, verdict);
}

/// [`keep_apart`]. With external linkage: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn siblings_keep_apart(
    ctx: *mut bpf_sock_addr,
    request: *const Request,
    verdict: *mut Verdict,
) -> u32 {
    // SAFETY: a request and a verdict, or null: the verifier sees to it where it is called.
    if let (Some(request), Some(verdict)) = unsafe { (request.as_ref(), verdict.as_mut()) } {
        // The family does not matter: nothing here reads or writes the address of the call.
        let call = SockAddr::<V4>::new(SockAddrContext::new(ctx));
        separate(&call, request, verdict);
    }
    0
}

#[inline(always)]
fn separate<F: Family>(call: &SockAddr<F>, request: &Request, verdict: &mut Verdict) {
    let protocol = request.protocol;
    let chosen = verdict.endpoint;
    let key = key(call, protocol, chosen.addr, chosen.port);
    if !is_taken(call, &key, request) {
        note_connected(call, &key, request);
        return;
    }
    let block = decide::Tables::pool(&Live, verdict.pool).map_or(Block::default(), |p| p.block);
    // SAFETY: the helper has no preconditions.
    let mut slot = decide::draw(block, unsafe { bpf_get_prandom_u32() });
    for _ in 0..OTHERS {
        slot = slot.wrapping_add(1);
        if slot.wrapping_sub(block.base()) >= u32::from(block.len()) {
            slot = block.base();
        }
        let Some(other) = decide::Tables::endpoint(&Live, slot) else {
            return;
        };
        let key = self::key(call, protocol, other.addr, other.port);
        if !other.is_none() && !is_taken(call, &key, request) {
            (verdict.endpoint, verdict.flags) = (other, block.flags());
            note_connected(call, &key, request);
            return;
        }
    }
    let by_packets = PACKET_CONFIG
        .get(0)
        .is_some_and(|config| config.ephemeral_last != 0);
    if by_packets && !request.own_loopback {
        *verdict = Verdict::without_endpoint(Reason::NotService, verdict.pool);
    }
}

/// Whether another live socket has this endpoint for another VIP than this request's.
#[inline(always)]
fn is_taken<F: Family>(call: &SockAddr<F>, key: &SiblingKey, request: &Request) -> bool {
    let vip = Endpoint::new(request.addr, request.port);
    siblings_have(key, &raw const vip, cookie(call)) != 0
}

/// [`is_taken`]. With external linkage: the verifier looks at it once, not once for each endpoint.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn siblings_have(key: *const SiblingKey, vip: *const Endpoint, asking: u64) -> u32 {
    // SAFETY: a key and a VIP, or null: the verifier sees to it where it is called.
    let (Some(key), Some(vip)) = (unsafe { (key.as_ref(), vip.as_ref()) }) else {
        return 0;
    };
    // SAFETY: the same key. Linux 6.1 accepts as a key only memory on this function's stack.
    let key = unsafe { read_volatile(key) };
    let Some(sibling) = SIBLINGS.get_ptr_mut(key) else {
        return 0;
    };
    // SAFETY: one aligned word of the element.
    let socket = unsafe { read_volatile(&raw const (*sibling).socket) };
    // A socket that is connected again leaves its own endpoint.
    if socket == 0 || socket == asking {
        return 0;
    }
    let kept = place_of::<PeerSets>(socket);
    // SAFETY: a place of an array's element, which stays; it may be another socket's by now, and is compared.
    let peer = unsafe {
        if kept.is_null() {
            return 0;
        }
        *kept
    };
    let is_at_endpoint = peer.endpoint_port == key.port && peer.endpoint == key.addr;
    u32::from(is_at_endpoint && !(peer.vip_port == vip.port && peer.vip == vip.addr))
}

#[inline(always)]
fn note_connected<F: Family>(call: &SockAddr<F>, key: &SiblingKey, request: &Request) {
    note(key, Endpoint::new(request.addr, request.port), cookie(call));
}

#[inline(always)]
fn cookie<F: Family>(call: &SockAddr<F>) -> u64 {
    // SAFETY: the program's context.
    unsafe { bpf_get_socket_cookie(call.ctx.as_ptr()) }
}

#[inline(always)]
fn note(key: &SiblingKey, vip: Endpoint, socket: u64) {
    ports::mark(&SHARED_PORTS, key.local);
    // If the kernel has no room at this moment, the other sockets of the group work as without this table.
    let _ = SIBLINGS.insert(key, Sibling { vip, socket }, 0);
}

#[inline(always)]
fn key<F: Family>(call: &SockAddr<F>, protocol: Protocol, addr: Addr, port: Port) -> SiblingKey {
    SiblingKey {
        // SAFETY: the program's context.
        netns: unsafe { bpf_get_netns_cookie(call.ctx.as_ptr()) },
        addr,
        port,
        local: local(call),
        protocol,
        reserved: [0; 3],
    }
}

/// The socket's own port, 0 if it has none yet.
#[inline(always)]
fn local<F: Family>(call: &SockAddr<F>) -> Port {
    // SAFETY: a field of the context, which is never null in our hooks, and one of the socket, in host order.
    let port = unsafe {
        let sk = read_volatile(&raw const (*call.ctx.sock_addr).__bindgen_anon_1.sk);
        read_volatile(&raw const (*sk).src_port)
    };
    Port::new(port as u16)
}
