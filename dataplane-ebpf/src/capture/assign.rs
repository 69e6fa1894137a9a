//! Packets of workloads whose sockets are elsewhere, such as virtual machines. The program hands the first packet of a
//! connection to the proxy's listening socket on the node, and later packets to the socket that the listener made of
//! it. Nothing is rewritten: the proxy's socket has the original destination as its own address (`IP_TRANSPARENT`). A
//! query to a resolver goes to the socket of the agent's DNS server that is bound to the resolver's address.
//!
//! This is a program of its own, before `packet_ingress`, only on the interfaces of such workloads. It passes all other
//! packets to `packet_ingress` unchanged. `packet_ingress` recognises packets that were handed to a socket by their
//! mark.

use core::ptr::{from_ref, read_volatile};

use aya_ebpf::{
    EbpfContext,
    bindings::{BPF_TCP_LISTEN, BPF_TCP_TIME_WAIT, bpf_sock, bpf_sock_tuple},
    helpers::generated::{
        bpf_map_lookup_elem, bpf_sk_assign, bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release,
        bpf_skc_lookup_tcp, bpf_tcp_check_syncookie,
    },
    programs::TcContext,
};
use dataplane_common::{
    Addr, Protocol, Reason,
    capture::{self, DNS, Enrolled, FROM_CLIENT, ListenerKey, Local, RuleKey, has_mark},
    decide,
    packet::FlowKey,
    reread::Copied,
    tables::{Endpoint, Frontend},
};

use super::{Live, config, copy};
use crate::{
    packet::{
        DROP, LEAVE_ALONE,
        error::{self, Complaint},
        events,
        parse::{FLOW, MALFORMED, Packet, WHOLE},
        reverse,
        route::{self, Route},
        scratch::scratch,
        skb::{NESTED_PRIORITY, OTHER_VLAN, Skb},
        source_routes,
    },
    select::{self, count},
    socket,
    tables::{LISTENERS, LOCALS},
};

/// Rules for users need a process's socket, which the node does not see.
const EXCLUDES_USER: bool = false;
/// The network namespace of the interface (`BPF_F_CURRENT_NETNS`).
const CURRENT_NETNS: u64 = u64::MAX;

/// Handles a packet from a workload, if the interface is the workload's own.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx.as_ptr().cast());
    let vlan = skb.vlan();
    if vlan == OTHER_VLAN {
        return LEAVE_ALONE;
    }
    let Some(s) = scratch() else {
        return DROP;
    };
    let action = if vlan == NESTED_PRIORITY {
        malformed()
    } else {
        arrived(skb, &mut s.packet, &mut s.way, &mut s.local)
    };
    s.leave();
    action
}

/// Counts and drops a packet that the program cannot read, because its receiver may read it in another way.
#[inline(always)]
fn malformed() -> i32 {
    count(Reason::Malformed);
    DROP
}

/// Handles a packet, with a place for its headers. `way` and `local`: room for results.
#[inline(always)]
fn arrived(skb: Skb, packet: &mut Packet, way: &mut Route, local: &mut Local) -> i32 {
    let outcome = packet.read(skb, route::link_length(skb.ifindex()));
    if packet.routed != 0 {
        source_routes::refuse(skb, packet);
        return DROP;
    }
    if outcome == MALFORMED {
        return malformed();
    }
    if outcome != FLOW {
        return LEAVE_ALONE;
    }
    if !packet.is_tcp() {
        return datagram(skb, packet, way, local);
    }
    // The source decides whose rules count. No host forwards a packet from a link-local source of IPv6.
    let src = packet.key.src;
    let is_forwarded = packet.is_v4() || !src.is_link_local();
    if is_forwarded && !reverse::is_right(skb, packet, way, reverse::BEGINS) {
        count(Reason::SourceForged);
        return DROP;
    }
    match look(src, local) {
        Copied::Found(()) => {}
        Copied::Changing => return DROP,
        Copied::Absent => return LEAVE_ALONE,
    }
    if !local.has_packets() {
        return LEAVE_ALONE;
    }
    if packet.fragment != WHOLE {
        return fragment(local);
    }
    if to_its_socket(skb, packet) {
        return taken(skb);
    }
    if !local.is_by_packets() || local.flags & Enrolled::CAPTURED == 0 {
        return LEAVE_ALONE;
    }
    if packet.is_syn() {
        return begin(skb, packet, local, way);
    }
    let key = ListenerKey::of_packets(local.workload, packet.is_v4());
    if local.flags & Enrolled::PROXY != 0 && to_listener::<true>(skb, packet, &key) {
        return taken(skb);
    }
    if local.resolvers != 0 && packet.key.dst_port == DNS && to_server::<true>(skb, packet) {
        return taken(skb);
    }
    // A packet in the middle of a connection: the connection was not captured when it began.
    LEAVE_ALONE
}

/// Looks up the workload of an address. (Not inlined: a function with its own frame gives its stack back.)
#[inline(never)]
fn look(addr: Addr, local: &mut Local) -> Copied<()> {
    match copy(|| LOCALS.get_ptr(addr)) {
        Copied::Found(found) => {
            *local = found;
            Copied::Found(())
        }
        Copied::Changing => Copied::Changing,
        Copied::Absent => Copied::Absent,
    }
}

/// Whether an address is a workload's in this network namespace. (Not inlined: see [`look`].)
#[inline(never)]
fn is_at(addr: Addr, netns: u64) -> bool {
    super::local(addr).is_some_and(|local| local.netns == netns)
}

/// A datagram: only a query to a resolver is captured.
#[inline(always)]
fn datagram(skb: Skb, packet: &Packet, way: &mut Route, local: &mut Local) -> i32 {
    let key = &packet.key;
    if key.protocol != Protocol::UDP || key.dst_port != DNS || packet.fragment != WHOLE {
        return LEAVE_ALONE;
    }
    if look(key.src, local) != Copied::Found(()) {
        return LEAVE_ALONE;
    }
    if !local.is_by_packets() {
        return LEAVE_ALONE;
    }
    let reason = query(skb, packet, local, way);
    if reason == Reason::NotService {
        return LEAVE_ALONE;
    }
    count(reason);
    match reason {
        Reason::CapturedDns => {
            events::report(skb, packet, reason, 0, &Endpoint::NONE);
            taken(skb)
        }
        Reason::SourceForged => DROP,
        _ => LEAVE_ALONE,
    }
}

/// Whether a packet is a query to one of its workload's resolvers, and goes to the agent's DNS server.
#[inline(always)]
fn query(skb: Skb, packet: &Packet, local: &Local, way: &mut Route) -> Reason {
    let (key, enrolled) = (&packet.key, local.enrolled());
    let to = (key.dst, key.dst_port);
    if !capture::is_query(&Live, &enrolled, to, EXCLUDES_USER) {
        return Reason::NotService;
    }
    if enrolled.flags & Enrolled::EGRESS_DENY != 0 && !is_known(key) {
        return Reason::NotService;
    }
    // The source of a connection was checked already.
    let is_forwarded = packet.is_v4() || !key.src.is_link_local();
    if !packet.is_tcp() && is_forwarded && !reverse::is_right(skb, packet, way, reverse::BEGINS) {
        return Reason::SourceForged;
    }
    if socket::answers_queries() && to_server::<false>(skb, packet) {
        Reason::CapturedDns
    } else {
        Reason::DnsBypassed
    }
}

/// Hands the packet to the agent's DNS server, if the server has a socket at the packet's destination. `COOKIE`: as
/// [`give`].
#[inline(never)]
fn to_server<const COOKIE: bool>(skb: Skb, packet: &Packet) -> bool {
    let Some(config) = config() else {
        return false;
    };
    let mut tuple = [0_u32; 9];
    let size = fill(&mut tuple, packet);
    // SAFETY: the program's context, as much of the stack as we say, and a socket that is released.
    unsafe {
        let tuple = (&raw mut tuple).cast::<bpf_sock_tuple>();
        let sk = if packet.is_tcp() {
            bpf_sk_lookup_tcp(skb.0.cast(), tuple, size, CURRENT_NETNS, 0)
        } else {
            bpf_sk_lookup_udp(skb.0.cast(), tuple, size, CURRENT_NETNS, 0)
        };
        if sk.is_null() {
            return false;
        }
        // Another DNS server of the node may listen at any address.
        let is_ours = has_mark(read_volatile(&raw const (*sk).mark), config.mark);
        let given = is_ours && give::<COOKIE>(skb, packet, sk);
        bpf_sk_release(sk.cast());
        given
    }
}

/// Writes a packet's addresses and ports as `struct bpf_sock_tuple` has them, and returns its length.
#[inline(always)]
fn fill(tuple: &mut [u32; 9], packet: &Packet) -> u32 {
    let key = &packet.key;
    let (src, dst) = (key.src.words(), key.dst.words());
    let [a, b] = key.src_port.be().to_ne_bytes();
    let [c, d] = key.dst_port.be().to_ne_bytes();
    let ports = u32::from_ne_bytes([a, b, c, d]);
    if packet.is_v4() {
        tuple[0] = src[3];
        tuple[1] = dst[3];
        tuple[2] = ports;
        12
    } else {
        *tuple = [
            src[0], src[1], src[2], src[3], dst[0], dst[1], dst[2], dst[3], ports,
        ];
        36
    }
}

/// A fragment of TCP. The program cannot tell to which connection it belongs, so it must not pass where connections are
/// captured. TCP sends no fragments if it finds out how large packets may be.
#[inline(always)]
fn fragment(local: &Local) -> i32 {
    if local.flags & Enrolled::CAPTURED == 0 {
        return LEAVE_ALONE;
    }
    count(Reason::CapturedFragment);
    DROP
}

/// The first packet of a connection.
#[inline(always)]
fn begin(skb: Skb, packet: &Packet, local: &Local, way: &mut Route) -> i32 {
    let Some(config) = config() else {
        return LEAVE_ALONE;
    };
    if query(skb, packet, local, way) == Reason::CapturedDns {
        count(Reason::CapturedDns);
        events::report(skb, packet, Reason::CapturedDns, 0, &Endpoint::NONE);
        return taken(skb);
    }
    let enrolled = local.enrolled();
    let key = ListenerKey::of_packets(local.workload, packet.is_v4());
    let to = (packet.key.dst, packet.key.dst_port);
    let asked = Asked {
        key: &packet.key,
        listener: &key,
    };
    // `packet_ingress` judges where the first packet goes.
    let (mut reason, _) = capture::decide_outbound(&asked, config, &enrolled, to, EXCLUDES_USER);
    // The proxy would connect to these destinations as the node.
    let dst = packet.key.dst;
    if reason == Reason::Captured
        && (dst.is_link_local() || dst.is_loopback() || capture::Circumstances::is_own(&asked))
    {
        reason = Reason::ToNode;
    }
    if reason == Reason::Captured && !to_listener::<false>(skb, packet, &key) {
        // The listener was closed just now.
        reason = match enrolled.flags & Enrolled::ENCRYPTS {
            0 => capture::without_proxy(enrolled.flags),
            _ => Reason::ProxyDown,
        };
    }
    count(reason);
    if reason == Reason::Captured || reason.is_refusal() {
        events::report(skb, packet, reason, 0, &Endpoint::NONE);
    }
    if reason == Reason::Captured {
        return taken(skb);
    }
    if reason.is_refusal() {
        let complaint = Complaint::PORT_UNREACHABLE;
        return error::send(skb, packet, &complaint, false);
    }
    LEAVE_ALONE
}

/// Sends the packet up the stack, to the socket that was assigned: by the agent's rule for the mark, because its
/// destination would lead it elsewhere. If another program forwards the packet, the assignment is lost. Other programs
/// see the packet first, with their own bits of the mark unchanged.
#[inline(always)]
fn taken(skb: Skb) -> i32 {
    let Some(config) = config() else {
        return DROP;
    };
    skb.add_mark(config.mark | FROM_CLIENT);
    LEAVE_ALONE
}

/// Hands the packet to the socket of its connection, if there is one here. (The lookup uses the addresses on the wire,
/// so it does not find a socket whose packets are translated on the way.)
#[inline(never)]
fn to_its_socket(skb: Skb, packet: &Packet) -> bool {
    let mut tuple = [0_u32; 9];
    let size = fill(&mut tuple, packet);
    let is_syn = packet.is_syn();
    // SAFETY: the program's context, as much of the stack as we say, and a socket that is released.
    unsafe {
        let tuple = (&raw mut tuple).cast::<bpf_sock_tuple>();
        // Also finds a socket that is not a full one yet, or no longer: the kernel's stack wants these packets, too.
        let sk = bpf_skc_lookup_tcp(skb.0.cast(), tuple, size, CURRENT_NETNS, 0);
        if sk.is_null() {
            return false;
        }
        let state = read_volatile(&raw const (*sk).state);
        // The proxy has ended the earlier connection: a new one begins.
        let again = is_syn && state == BPF_TCP_TIME_WAIT;
        let mut given = -1;
        if state != BPF_TCP_LISTEN && !again {
            given = bpf_sk_assign(skb.0.cast(), sk.cast(), 0);
        }
        bpf_sk_release(sk.cast());
        given == 0
    }
}

/// Hands the packet to the proxy's listening socket. `COOKIE`: as [`give`].
#[inline(never)]
fn to_listener<const COOKIE: bool>(skb: Skb, packet: &Packet, key: &ListenerKey) -> bool {
    let sk = listener(key);
    if sk.is_null() {
        return false;
    }
    let given = give::<COOKIE>(skb, packet, sk);
    // SAFETY: the socket that was found.
    unsafe { bpf_sk_release(sk.cast()) };
    given
}

/// Hands the packet to a socket, which the caller still has to release. `COOKIE`: only if the packet ends a handshake
/// that the listening socket does not remember, because it sent a cookie (`net.ipv4.tcp_syncookies`).
#[inline(always)]
fn give<const COOKIE: bool>(skb: Skb, packet: &Packet, sk: *mut bpf_sock) -> bool {
    if COOKIE {
        // As long as the longer of the two IP headers. TCP's header, which is as long as the rest, is behind it.
        let mut ip = [0_u32; 10];
        let mut tcp = [0_u32; 5];
        if !skb.load(packet.l3, &mut ip) || !skb.load(packet.l4, &mut tcp) {
            return false;
        }
        let length = if packet.is_v4() { 20 } else { 40 };
        let (ip, tcp) = ((&raw mut ip).cast(), (&raw mut tcp).cast());
        // SAFETY: a socket that the caller holds, and as much of the stack as we say.
        if unsafe { bpf_tcp_check_syncookie(sk.cast(), ip, length, tcp, 20) } != 0 {
            return false;
        }
    }
    // SAFETY: the program's context, and a socket that the caller holds.
    unsafe { bpf_sk_assign(skb.0.cast(), sk.cast(), 0) == 0 }
}

/// The proxy's listening socket, which the caller has to release.
#[inline(always)]
fn listener(key: &ListenerKey) -> *mut bpf_sock {
    // SAFETY: a sockhash and a key of it.
    unsafe {
        bpf_map_lookup_elem(from_ref(&LISTENERS).cast_mut().cast(), from_ref(key).cast()).cast()
    }
}

/// A connection, with the facts that the decision needs.
struct Asked<'a> {
    key: &'a FlowKey,
    listener: &'a ListenerKey,
}

impl capture::Rules for Asked<'_> {
    #[inline(always)]
    fn rule(&self, key: &RuleKey) -> u32 {
        Live.rule(key)
    }

    #[inline(always)]
    fn range(&self, policy: u32, addr: Addr) -> u32 {
        Live.range(policy, addr)
    }
}

impl capture::Circumstances for Asked<'_> {
    /// The node's addresses are the proxy's, because the proxy is on the node.
    #[inline(always)]
    fn is_own(&self) -> bool {
        let node = socket::config().map_or(0, |config| config.host_netns);
        is_at(self.key.dst, node)
    }

    /// Packets that a virtual machine sends to itself do not leave it.
    #[inline(always)]
    fn is_itself(&self) -> bool {
        false
    }

    #[inline(always)]
    fn is_known(&self) -> bool {
        is_known(self.key)
    }

    #[inline(always)]
    fn is_refused(&self) -> bool {
        capture_refuses_packet(self.key) != 0
    }

    #[inline(always)]
    fn speaks_hbone(&self) -> bool {
        capture_packet_to_hbone(self.key) != 0
    }

    #[inline(always)]
    fn listens(&self) -> bool {
        let sk = listener(self.listener);
        if sk.is_null() {
            return false;
        }
        // SAFETY: the socket that was found.
        unsafe { bpf_sk_release(sk.cast()) };
        true
    }
}

#[inline(always)]
fn is_known(key: &FlowKey) -> bool {
    capture_knows_packet(key) != 0
}

/// [`is_known`]. With external linkage: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_knows_packet(key: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return 0;
    };
    let (dst, port, protocol) = (key.dst, key.dst_port, key.protocol);
    u32::from(super::is_known(frontend(key), dst, port, protocol))
}

/// Whether the destination is a service to which captured workloads may not connect. With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_refuses_packet(key: *const FlowKey) -> u32 {
    // SAFETY: as above.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return 0;
    };
    u32::from(decide::is_refused(&select::Live, frontend(key)))
}

/// Whether the destination speaks HBONE. With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_packet_to_hbone(key: *const FlowKey) -> u32 {
    // SAFETY: as above.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return 1;
    };
    u32::from(super::speaks_hbone(frontend(key), key.dst))
}

#[inline(always)]
fn frontend(key: &FlowKey) -> Frontend {
    decide::find_frontend(&select::Live, key.dst, key.dst_port, key.protocol, false)
}
