//! `sk_lookup` in a workload's network namespace: chooses the socket that takes an incoming connection.

use core::ptr::{from_ref, read_volatile};

use aya_ebpf::{
    bindings::bpf_sk_lookup,
    helpers::generated::{bpf_map_lookup_elem, bpf_sk_assign, bpf_sk_release},
};
use dataplane_common::{
    Addr, Event, Hook, Port, Protocol, Reason,
    capture::{self, CAPTURED, CaptureConfig, Enrolled, ListenerKey, Local, REFUSED_BY, Tuple},
    reread::Copied,
};

use super::{Live, config, copy, meters, probes};
use crate::{
    events,
    select::count,
    socket::read_words,
    tables::{LISTENERS, LOCALS, NAMESPACES},
};

/// The lookup goes on, with the socket that was assigned, if any.
const PASS: u32 = 1;
/// The kernel finds no listener: it refuses the client's connection.
const DROP: u32 = 0;
const TCP: u32 = 6;
const AF_INET: u32 = 2;
/// Loopback is number 1 in every namespace (`LOOPBACK_IFINDEX`); 0 is a lookup without a packet.
const LOOPBACK: u32 = 1;

/// The network namespace that this instance of the program is attached to: the agent loads one instance for each, and
/// the verifier sees a constant. (`sk_lookup` has no helper for it.)
#[unsafe(no_mangle)]
static NETNS: u64 = 0;

#[inline(always)]
pub fn run(ctx: *mut bpf_sk_lookup) -> u32 {
    // SAFETY: fields of the context.
    let (protocol, interface, port) = unsafe {
        (
            read_volatile(&raw const (*ctx).protocol),
            read_volatile(&raw const (*ctx).ingress_ifindex),
            read_volatile(&raw const (*ctx).local_port),
        )
    };
    if protocol != TCP {
        return PASS;
    }
    let addr = local_addr(ctx);
    // SAFETY: a constant of the object. Read as it is loaded, not as it is compiled.
    let here = unsafe { read_volatile(&raw const NETNS) };
    if interface <= LOOPBACK {
        return outbound(ctx, here, addr, port);
    }
    let local = match copy(|| LOCALS.get_ptr(addr)) {
        Copied::Found(local) if local.netns == here => local,
        Copied::Changing => return DROP,
        // Or another workload's address: a virtual interface's packets may be for it, or a process has added it to an
        // interface here. The sockets of the other workload take no connections that arrive here.
        Copied::Found(_) | Copied::Absent => match elsewhere(ctx, here, interface, port) {
            Ok(local) => local,
            Err(verdict) => return verdict,
        },
    };
    let looked_at = Enrolled::INBOUND
        | Enrolled::REFUSES_INBOUND
        | Enrolled::JUDGES_INBOUND
        | Enrolled::TUNNELS;
    if local.flags & looked_at == 0 {
        return PASS;
    }
    let is_captured = local.flags & Enrolled::INBOUND != 0;
    // The workload's own connections to itself. They come by loopback, but the kernel names the interface that has the
    // address (`orig_oif` in `ip_route_output_key_hash_rcu`, `net/ipv4/route.c`). The proxy's connections are bound to
    // loopback.
    let client = remote_addr(ctx);
    let Some(config) = config() else { return PASS };
    let to_inbound = port == u32::from(config.inbound.host());
    let foreign = config.flags & CaptureConfig::FOREIGN != 0;
    let is_own = |own: Local| own.netns == here;
    if client == addr || super::local(client).is_some_and(is_own) {
        if foreign && to_inbound {
            // The proxy connects to its own port after a connection that had this port as destination (see
            // below). The loop ends here.
            count(Reason::Recursive);
            return DROP;
        }
        return PASS;
    }
    // Before the rules, probes and `withoutProxy`: the port is the proxy's, and never the application's.
    if let Some(reason) = capture::tunnel(&local, port) {
        return tunnel(ctx, reason, &ListenerKey::of_tunnels(here, addr.is_v4()));
    }
    if foreign && to_inbound {
        // The port of a sidecar: while netfilter rules redirect connections to it, they arrive at this port.
        return PASS;
    }
    let has_listeners = local.flags & (Enrolled::INBOUND | Enrolled::TUNNELS) != 0;
    if has_listeners && (to_inbound || port == u32::from(config.outbound.host())) {
        count(Reason::Recursive);
        return DROP;
    }
    // Before the rules: probes reach the application under any of them.
    let probe = Tuple {
        netns: 0,
        client,
        proxy: addr,
        client_port: remote_port(ctx),
        proxy_port: Port::new(port as u16),
        reserved: 0,
    };
    if probes::is_one(probe) {
        count(Reason::ExcludedProbe);
        return PASS;
    }
    let reason = capture::inbound(&Live, &local, port, interface);
    if reason == Reason::Unsupported {
        return refuse(here, &probe, reason);
    }
    if reason == Reason::CapturedInbound && local.flags & Enrolled::JUDGES_INBOUND != 0 {
        let said = capture::judged(&Live, &local, client, port);
        if said != CAPTURED {
            meters::refused(local.workload, said >> REFUSED_BY, client);
            return refuse(here, &probe, Reason::PolicyDenied);
        }
    }
    if !is_captured {
        return PASS;
    }
    if reason != Reason::CapturedInbound {
        count(reason);
        return PASS;
    }
    let key = ListenerKey::of_namespace(local.netns, addr.is_v4());
    if assign(ctx, &key) {
        count(Reason::CapturedInbound);
        return PASS;
    }
    let reason = capture::without_proxy(local.flags);
    count(reason);
    if reason.is_refusal() { DROP } else { PASS }
}

/// Refuses a connection to the workload, counts it, and reports it if there is a listener. `of`: its addresses and ports.
#[inline(always)]
fn refuse(here: u64, of: &Tuple, reason: Reason) -> u32 {
    count(reason);
    let now = events::listened_to();
    if now != 0 {
        events::submit(Event {
            at: now,
            netns: here,
            socket: 0,
            source: of.client,
            destination: of.proxy,
            endpoint: Addr::UNSPECIFIED,
            destination_port: of.proxy_port,
            endpoint_port: Port::ANY,
            pool: 0,
            pid: 0,
            ifindex: 0,
            source_port: of.client_port,
            reserved: 0,
            reason: reason as u8,
            hook: Hook::Lookup as u8,
            protocol: Protocol::TCP,
            padding: 0,
            comm: [0; 16],
        });
    }
    DROP
}

/// A tunnel to the workload, and the verdict on it. Without a listener it is refused.
#[inline(always)]
fn tunnel(ctx: *mut bpf_sk_lookup, mut reason: Reason, key: &ListenerKey) -> u32 {
    if reason == Reason::CapturedInbound && !assign(ctx, key) {
        reason = Reason::ProxyDown;
    }
    count(reason);
    if reason.is_refusal() { DROP } else { PASS }
}

/// A captured outbound connection, or the lookup by which `connect()` checks that a socket takes it: the proxy listens
/// at one address of loopback, and connections to many of them lead there ([`capture::spread`]).
#[inline(always)]
fn outbound(ctx: *mut bpf_sk_lookup, here: u64, addr: Addr, port: u32) -> u32 {
    let Some(config) = config() else { return PASS };
    if port == u32::from(config.outbound.host()) && addr.is_v4() && addr.is_loopback() {
        assign(ctx, &ListenerKey::of_outbound(here));
    }
    PASS
}

/// A connection whose destination is not an address of this namespace's workload. It is captured if it comes by a
/// virtual interface: the agent's routing rules bring such connections to the sockets here, for every destination.
/// `Ok`: the workload has another address here, at which its policies decide as at those that the agent knows. `Err`: the verdict.
#[inline(always)]
fn elsewhere(ctx: *mut bpf_sk_lookup, here: u64, interface: u32, port: u32) -> Result<Local, u32> {
    let enrolled = match copy(|| NAMESPACES.get_ptr(here)) {
        Copied::Found(enrolled) => enrolled,
        Copied::Changing => return Err(DROP),
        Copied::Absent => return Err(PASS),
    };
    let Some(config) = config() else {
        return Err(PASS);
    };
    let at = Port::new(port as u16);
    let mut reason = capture::by_interface(&Live, config, &enrolled, at, interface);
    if reason == Reason::NotService {
        return capture::judged_at(&enrolled, here).ok_or(PASS);
    }
    if reason == Reason::Captured {
        // SAFETY: a field of the context.
        let is_v4 = unsafe { read_volatile(&raw const (*ctx).family) } == AF_INET;
        let key = ListenerKey::of_interfaces(here, enrolled.workload, is_v4);
        if assign(ctx, &key) {
            count(reason);
            return Err(PASS);
        }
        // The connection cannot go on without the proxy: its packets come here, and nowhere else.
        reason = Reason::ProxyDown;
    }
    count(reason);
    Err(DROP)
}

/// Assigns the connection to a listening socket of the proxy. Returns whether there is one.
#[inline(always)]
fn assign(ctx: *mut bpf_sk_lookup, key: &ListenerKey) -> bool {
    // SAFETY: a sockhash and a key of it; a socket that was found is released.
    unsafe {
        let table = from_ref(&LISTENERS).cast_mut().cast();
        let sk = bpf_map_lookup_elem(table, from_ref(key).cast());
        if sk.is_null() {
            return false;
        }
        let result = bpf_sk_assign(ctx.cast(), sk, 0);
        bpf_sk_release(sk);
        result == 0
    }
}

/// Reads all fields, for either family: see `read_words`.
#[inline(always)]
fn local_addr(ctx: *mut bpf_sk_lookup) -> Addr {
    // SAFETY: fields of the context.
    unsafe {
        let v4 = read_volatile(&raw const (*ctx).local_ip4);
        let ip = (&raw const (*ctx).local_ip6).cast::<u32>();
        let v6 = read_words(ip);
        if read_volatile(&raw const (*ctx).family) == AF_INET {
            Addr::from_v4_word(v4)
        } else {
            Addr::from_words(v6)
        }
    }
}

#[inline(always)]
fn remote_addr(ctx: *mut bpf_sk_lookup) -> Addr {
    // SAFETY: fields of the context.
    unsafe {
        let v4 = read_volatile(&raw const (*ctx).remote_ip4);
        let ip = (&raw const (*ctx).remote_ip6).cast::<u32>();
        let v6 = read_words(ip);
        if read_volatile(&raw const (*ctx).family) == AF_INET {
            Addr::from_v4_word(v4)
        } else {
            Addr::from_words(v6)
        }
    }
}

#[inline(always)]
fn remote_port(ctx: *mut bpf_sk_lookup) -> Port {
    // SAFETY: a field of the context, two bytes in network order.
    Port::from_be(unsafe { read_volatile(&raw const (*ctx).remote_port) })
}
