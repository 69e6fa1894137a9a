//! `connect()` of a workload: decides whether the connection goes to the proxy.

use core::ptr::read_volatile;

use aya_ebpf::{
    bindings::bpf_sock_addr,
    helpers::generated::{bpf_get_retval, bpf_set_retval},
};
use dataplane_common::{
    Addr, Hook, Port, Protocol, Reason,
    capture::{self, Enrolled, FROM_CLIENT, MESH_GUARD, RuleKey, has_mark},
    decide,
    reread::Copied,
    tables::{Block, Endpoint, Frontend},
};

use super::{
    Live,
    caller::{self, enrolled, is_agent, mark},
    config,
    listens::listens,
    local, meters, origin,
};
use crate::{
    select::{self, Request, Verdict, count},
    socket::{self, Family, GO_ON, SockAddr, events, peers, refuse},
};

/// Decides, and applies the decision. This is a program of its own, attached before the services' program if there is a
/// mesh. Connections that it leaves alone and direct connections reach the services' program unchanged.
#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>, request: &Request, mesh: u64) -> i32 {
    let mut judgement = Judgement {
        reason: Reason::NotService,
        workload: 0,
        left: 0,
    };
    capture_judge(call.ctx.sock_addr, request, mesh, &raw mut judgement);
    carry_out(call, request, mesh, &judgement)
}

/// Not inlined: a function with its own frame gives its stack back.
#[inline(never)]
fn carry_out<F: Family>(
    call: &SockAddr<F>,
    request: &Request,
    mesh: u64,
    judgement: &Judgement,
) -> i32 {
    let ctx = call.ctx.sock_addr;
    let mut reason = judgement.reason;
    if reason == Reason::Captured && !origin::has_room(request.netns) {
        reason = Reason::OriginLost;
    }
    if reason == Reason::NotService {
        return GO_ON;
    }
    count(reason);
    if reason == Reason::Direct {
        meters::begin(ctx, judgement.workload);
    }
    let is_query = reason == Reason::CapturedDns;
    let captured = reason == Reason::Captured || is_query;
    if !captured && !reason.is_refusal() {
        if judgement.left != 0 {
            leave_to_judge(judgement.left);
        }
        return GO_ON;
    }
    let mut verdict = Verdict::without_endpoint(reason, 0);
    if captured {
        let (addr, port) = if is_query {
            dns_server(mesh, request.addr.is_v4())
        } else {
            proxy(call.ctx.sock_addr, request)
        };
        verdict.endpoint = Endpoint::new(addr, port);
    }
    events::report(call, Hook::Connect, request, &verdict);
    if !captured {
        return refuse();
    }
    meters::forget(ctx);
    peers::remember(call, &request.peer(&verdict.endpoint));
    call.set(verdict.endpoint.addr, verdict.endpoint.port);
    GO_ON
}

/// The services' program judges by the egress policy.
pub const EGRESS: u32 = 1;
/// The services' program refuses an endpoint that speaks HBONE.
const PLAIN: u32 = 2;

/// The errors of a system call that `capture4` and `capture6` leave if the services' program after them, which draws the
/// endpoint, has to judge where the first packet goes: this, with [`EGRESS`], [`PLAIN`] or both added (`EKEYREJECTED`,
/// `EKEYREVOKED`, `EKEYEXPIRED`). The services' program removes the error ([`refusal`]): a call that no program judges fails.
const JUDGED: i32 = -130;

/// Leaves the judgement to the services' program, unless another owner's program has refused the call. `left`: [`EGRESS`],
/// [`PLAIN`] or both.
#[inline(always)]
pub fn leave_to_judge(left: u32) {
    // SAFETY: the helpers have no preconditions.
    unsafe {
        if bpf_get_retval() == 0 {
            bpf_set_retval(JUDGED + left.cast_signed());
        }
    }
}

/// Why a connection may not go where its first packet goes, according to the verdict: `None`, if the capture program
/// has not [left](leave_to_judge) the judgement to this one.
#[inline(always)]
pub fn refusal(request: &Request, verdict: &Verdict) -> Option<Reason> {
    // SAFETY: the helper has no preconditions.
    let left = unsafe { bpf_get_retval() }
        .wrapping_sub(JUDGED)
        .cast_unsigned();
    if left == 0 || left > EGRESS | PLAIN {
        return None;
    }
    if left & PLAIN != 0
        && verdict.flags & Block::HBONE != 0
        && capture_is_own(request, &raw const verdict.endpoint) == 0
    {
        return Some(Reason::PlaintextRefused);
    }
    if left & EGRESS != 0 && !admits(request, verdict) {
        return Some(Reason::EgressDenied);
    }
    // SAFETY: as above.
    unsafe { bpf_set_retval(0) };
    None
}

/// Whether a workload whose egress is denied may go where a verdict sends it.
#[inline(always)]
pub fn admits(request: &Request, verdict: &Verdict) -> bool {
    // Includes services of a load balancer with source ranges, and of a port that other sockets share.
    let by_packets = verdict.pool != 0 || select::is_by_packets(request.netns);
    let kind = if !verdict.endpoint.is_none() {
        u32::from(verdict.flags)
    } else if verdict.reason != Reason::NotService {
        return true;
    } else if by_packets {
        BY_PACKETS
    } else {
        ITSELF
    };
    capture_admits(request, &raw const verdict.endpoint, kind) != 0
}

/// [`capture_admits`]: no service translates the destination.
const ITSELF: u32 = 1 << 16;
/// [`capture_admits`]: the packet path translates the packets, and judges them.
const BY_PACKETS: u32 = 1 << 17;

/// Whether a workload whose egress is denied may go to an endpoint from a block with these flags, or to the destination itself.
/// With external linkage, as [`capture_leads_back`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_admits(request: *const Request, endpoint: *const Endpoint, kind: u32) -> u32 {
    // SAFETY: values, or null: the verifier sees to it where it is called.
    let (Some(request), Some(endpoint)) = (unsafe { (request.as_ref(), endpoint.as_ref()) }) else {
        return 0;
    };
    let to_service = kind & (ITSELF | BY_PACKETS) == 0;
    if to_service && kind & u32::from(Block::REACHABLE) != 0 {
        return 1;
    }
    let itself = Endpoint::new(request.addr, request.port);
    let goes_to = if to_service { endpoint } else { &itself };
    let known = match kind {
        BY_PACKETS => frontend(request),
        _ => Frontend::NONE,
    };
    let (port, protocol) = (request.port, request.protocol);
    if is_own(request, goes_to.addr)
        || !to_service && super::is_known(known, request.addr, port, protocol)
    {
        return 1;
    }
    capture_exempts(request, goes_to, u32::from(!known.is_none()))
}

/// Whether the rules of the workload exempt an endpoint from its egress policy, or the destination itself. `by_packets`: packets
/// to the destination are translated, and judged if no rule names users. With external linkage, as [`capture_leads_back`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_exempts(
    request: *const Request,
    to: *const Endpoint,
    by_packets: u32,
) -> u32 {
    // SAFETY: as above.
    let (Some(request), Some(to)) = (unsafe { (request.as_ref(), to.as_ref()) }) else {
        return 0;
    };
    let Some(mesh) = socket::config().map(|config| config.mesh) else {
        return 0;
    };
    let Copied::Found(enrolled) = enrolled(request, mesh) else {
        return 0;
    };
    let is_judged_later = by_packets == 0 || enrolled.flags & Enrolled::HAS_USERS == 0;
    u32::from(is_judged_later && capture::exempts(&Live, &enrolled, to.addr, to.port))
}

/// The decision about a connection.
struct Judgement {
    reason: Reason,
    workload: u32,
    /// The judgements that are [left](leave_to_judge) to the services' program; 0 if there are none.
    left: u32,
}

/// [`judge`]. With external linkage, as [`capture_leads_back`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_judge(
    ctx: *mut bpf_sock_addr,
    request: *const Request,
    mesh: u64,
    judgement: *mut Judgement,
) -> u32 {
    // SAFETY: as above.
    if let (Some(request), Some(judgement)) = unsafe { (request.as_ref(), judgement.as_mut()) } {
        let (reason, workload, left) = judge(ctx, request, mesh);
        *judgement = Judgement {
            reason,
            workload,
            left,
        };
    }
    0
}

/// Returns the reason, the workload, and what is [left to be judged](leave_to_judge).
#[inline(always)]
fn judge(ctx: *mut bpf_sock_addr, request: &Request, mesh: u64) -> (Reason, u32, u32) {
    let Some(config) = config() else {
        return (Reason::NotService, 0, 0);
    };
    let mark = mark(ctx);
    // Also in a namespace that is no longer captured, or not yet: `sk_lookup` may not know that.
    if has_mark(mark, config.mark | FROM_CLIENT) && is_agent(config) {
        return (Reason::ProxysOwn, 0, 0);
    }
    let enrolled = match enrolled(request, mesh) {
        Copied::Found(enrolled) => enrolled,
        Copied::Changing => return (Reason::Guarded, 0, 0),
        Copied::Absent if mesh & MESH_GUARD != 0 && !request.own_loopback => {
            return (Reason::Guarded, 0, 0);
        }
        Copied::Absent => return (Reason::NotService, 0, 0),
    };
    if !enrolled.is_judged() {
        return (Reason::NotService, 0, 0);
    }
    if has_mark(mark, config.mark) && is_agent(config) {
        return (Reason::ProxysOwn, 0, 0);
    }
    let (asked, excludes_user) = (Call { ctx, request }, caller::excludes_user(&enrolled));
    let to = (request.addr, request.port);
    // First, because the verifier walks this code once for each result of the code before it.
    if of_query(&asked, &enrolled, mesh, excludes_user) == Reason::CapturedDns
        && (enrolled.flags & Enrolled::EGRESS_DENY == 0 || capture::Circumstances::is_known(&asked))
    {
        return (Reason::CapturedDns, enrolled.workload, 0);
    }
    if enrolled.flags & Enrolled::CAPTURED == 0 {
        return (Reason::NotService, 0, 0);
    }
    let (reason, is_judged) =
        capture::decide_outbound(&asked, config, &enrolled, to, excludes_user);
    let mut left = if is_judged { EGRESS } else { 0 };
    if capture::must_be_plain(enrolled.flags, reason) {
        left |= PLAIN;
    }
    (reason, enrolled.workload, left)
}

/// Whether a query to a workload's resolver goes to the agent's DNS server: [`Reason::CapturedDns`]; otherwise the
/// reason why not. It does not if the server does not listen there now or does not read, or if the socket is bound to
/// an interface, which is not the loopback.
#[inline(always)]
pub fn of_query(asked: &Call<'_>, enrolled: &Enrolled, mesh: u64, excludes_user: bool) -> Reason {
    let request = asked.request;
    let to = (request.addr, request.port);
    if !capture::is_query(asked, enrolled, to, excludes_user) || is_bound_to_interface(asked.ctx) {
        return Reason::NotService;
    }
    let (_, port) = dns_server(mesh, request.addr.is_v4());
    if socket::answers_queries()
        && listens(
            asked.ctx,
            request.protocol,
            loopback(request.addr.is_v4()),
            port,
        )
    {
        Reason::CapturedDns
    } else {
        Reason::DnsBypassed
    }
}

/// `SO_BINDTODEVICE` of the socket.
#[inline(always)]
fn is_bound_to_interface(ctx: *mut bpf_sock_addr) -> bool {
    // SAFETY: fields of the context and of the socket.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_1.sk);
        read_volatile(&raw const (*sk).bound_dev_if) != 0
    }
}

/// Whether packets to the request's destination stay in its network namespace: the address is one of a captured
/// workload there. No service translates it, as with kube-proxy, which does not see it.
#[inline(always)]
pub fn stays(request: &Request) -> bool {
    is_own(request, request.addr)
}

/// A call of `connect()` or `sendmsg()`, with the facts that the decision needs.
pub struct Call<'a> {
    pub ctx: *mut bpf_sock_addr,
    pub request: &'a Request,
}

impl capture::Rules for Call<'_> {
    #[inline(always)]
    fn rule(&self, key: &RuleKey) -> u32 {
        Live.rule(key)
    }

    #[inline(always)]
    fn range(&self, policy: u32, addr: Addr) -> u32 {
        Live.range(policy, addr)
    }
}

impl capture::Circumstances for Call<'_> {
    #[inline(always)]
    fn is_own(&self) -> bool {
        is_own(self.request, self.request.addr)
    }

    /// For a service with several endpoints this is unknown until the proxy has chosen one.
    #[inline(always)]
    fn is_itself(&self) -> bool {
        is_own(self.request, self.request.addr) || capture_leads_back(self.request) != 0
    }

    #[inline(always)]
    fn is_known(&self) -> bool {
        capture_knows(self.request) != 0
    }

    #[inline(always)]
    fn is_refused(&self) -> bool {
        capture_refuses(self.request) != 0
    }

    #[inline(always)]
    fn speaks_hbone(&self) -> bool {
        capture_speaks_hbone(self.request) != 0
    }

    #[inline(always)]
    fn listens(&self) -> bool {
        let (addr, port) = proxy(self.ctx, self.request);
        listens(self.ctx, Protocol::TCP, addr, port)
    }
}

/// Where a captured connection goes: to the loopback address for its destination, if a socket listens there. A proxy
/// that is not the agent's listens at one address.
#[inline(always)]
fn proxy(ctx: *mut bpf_sock_addr, request: &Request) -> (Addr, Port) {
    let port = config().map_or(Port::ANY, |config| config.outbound);
    let v4 = request.addr.is_v4();
    if v4 {
        let own = capture::spread(request.addr, request.port);
        if listens(ctx, Protocol::TCP, own, port) {
            return (own, port);
        }
    }
    (loopback(v4), port)
}

/// Where a captured query goes.
#[inline(always)]
pub fn dns_server(mesh: u64, v4: bool) -> (Addr, Port) {
    (loopback(v4), capture::dns_server(mesh))
}

#[inline(always)]
fn loopback(v4: bool) -> Addr {
    if v4 {
        Addr::from_v4([127, 0, 0, 1])
    } else {
        Addr::from_words([0, 0, 0, 1u32.to_be()])
    }
}

/// Whether an endpoint is the workload itself. With external linkage, as [`capture_leads_back`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_is_own(request: *const Request, endpoint: *const Endpoint) -> u32 {
    // SAFETY: values, or null: the verifier sees to it where it is called.
    match unsafe { (request.as_ref(), endpoint.as_ref()) } {
        (Some(request), Some(endpoint)) => u32::from(is_own(request, endpoint.addr)),
        _ => 0,
    }
}

/// Whether an address is the workload's own.
#[inline(always)]
pub fn is_own(request: &Request, addr: Addr) -> bool {
    local(addr).is_some_and(|local| local.netns == request.netns)
}

/// Whether the destination is a service that only the workload itself answers. With external linkage, as in
/// `packet/table.rs`: the verifier looks at it once, not on each way that leads to it.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_leads_back(request: *const Request) -> u32 {
    // SAFETY: a request, or null: the verifier sees to it where it is called.
    let Some(request) = (unsafe { request.as_ref() }) else {
        return 0;
    };
    let endpoint = decide::only_endpoint(&select::Live, frontend(request));
    u32::from(!endpoint.is_none() && is_own(request, endpoint.addr))
}

/// Whether the destination is a service of Pods, an endpoint of such a service, or stated by the operator. With
/// external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_knows(request: *const Request) -> u32 {
    // SAFETY: as above.
    let Some(request) = (unsafe { request.as_ref() }) else {
        return 0;
    };
    u32::from(super::is_known(
        frontend(request),
        request.addr,
        request.port,
        request.protocol,
    ))
}

/// Whether the destination is a service to which captured workloads may not connect. With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_refuses(request: *const Request) -> u32 {
    // SAFETY: as above.
    let Some(request) = (unsafe { request.as_ref() }) else {
        return 0;
    };
    u32::from(decide::is_refused(&select::Live, frontend(request)))
}

/// Whether the destination speaks HBONE. With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_speaks_hbone(request: *const Request) -> u32 {
    // SAFETY: as above.
    let Some(request) = (unsafe { request.as_ref() }) else {
        return 1;
    };
    u32::from(super::speaks_hbone(frontend(request), request.addr))
}

#[inline(always)]
fn frontend(request: &Request) -> Frontend {
    decide::find_frontend(
        &select::Live,
        request.addr,
        request.port,
        request.protocol,
        request.own_loopback,
    )
}
