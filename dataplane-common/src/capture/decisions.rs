//! The verdicts on a workload's connections and datagrams, by its rules: the programs, `explain` and the tests share this code.

use super::{
    CAPTURED, CaptureConfig, DNS, EXCLUDED, Enrolled, JUDGED, Local, REFUSED, RuleKey, TUNNELS,
};
use crate::{Addr, Port, Reason};

/// The source of the rules: the kernel's own tables, or a copy in user space.
pub trait Rules {
    /// [`CAPTURED`], [`EXCLUDED`] or 0 if there is no such rule.
    fn rule(&self, key: &RuleKey) -> u32;
    /// As [`Rules::rule`], for the longest prefix that contains the address.
    fn range(&self, policy: u32, addr: Addr) -> u32;
}

/// Whether the rules leave the connections and queries of a process alone, by its user and group. An excluded user or
/// group wins over a rule that captures the other.
#[inline(always)]
pub fn excludes_user<T: Rules>(tables: &T, enrolled: &Enrolled, (user, group): (u32, u32)) -> bool {
    if enrolled.flags & Enrolled::HAS_USERS == 0 {
        return false;
    }
    let rule = |kind, id| {
        let of = enrolled.policy;
        tables.rule(&RuleKey { of, kind, id })
    };
    let others = if enrolled.flags & Enrolled::ONLY_USERS == 0 {
        CAPTURED
    } else {
        0
    };
    (rule(RuleKey::USER, user) | rule(RuleKey::GROUP, group) | others) != CAPTURED
}

const _: () = assert!(CAPTURED & EXCLUDED == 0);

/// Whether an outbound connection of a workload is captured ([`Reason::Captured`]), or which kind of rule excludes it;
/// and whether the egress policy applies to it. Rules about users come first ([`excludes_user`]), because a proxy is
/// recognised by its user. Then loopback, unless the policy captures a range of loopback. Then ports before ranges,
/// because a rule about a port holds for every destination.
#[inline(always)]
pub fn outbound<T: Rules>(
    tables: &T,
    enrolled: &Enrolled,
    addr: Addr,
    port: Port,
    excludes_user: bool,
) -> (Reason, bool) {
    let rule = |kind, id| {
        tables.rule(&RuleKey {
            of: enrolled.policy,
            kind,
            id,
        })
    };
    if excludes_user {
        return (Reason::ExcludedUser, false);
    }
    if addr.is_unspecified() || addr.is_loopback() && !is_captured_loopback(tables, enrolled, addr)
    {
        return (Reason::ExcludedLoopback, false);
    }
    if enrolled.flags & Enrolled::HAS_OUTBOUND_PORTS != 0 {
        let said = rule(RuleKey::OUTBOUND_PORT, u32::from(port.host()));
        if said == EXCLUDED || said == JUDGED {
            return (Reason::ExcludedPort, said == JUDGED);
        }
        if said == CAPTURED {
            return (Reason::Captured, true);
        }
    }
    if enrolled.flags & Enrolled::HAS_RANGES != 0 {
        let said = tables.range(enrolled.policy, addr);
        if said == EXCLUDED || said == JUDGED {
            return (Reason::ExcludedRange, said == JUDGED);
        }
    }
    (Reason::Captured, true)
}

/// Whether the rules exempt a destination from the egress policy: the configuration excludes its port, or a range that has it.
#[inline(always)]
pub fn exempts<T: Rules>(tables: &T, enrolled: &Enrolled, addr: Addr, port: Port) -> bool {
    let (reason, is_judged) = outbound(tables, enrolled, addr, port, false);
    is_exempt(reason, is_judged)
}

/// As [`exempts`], by the answer of [`outbound`]. If a service is excluded, its endpoints have to be exempt, too: any
/// tenant may choose an excluded port for a service, and endpoints that are not excluded.
#[inline(always)]
pub fn is_exempt(reason: Reason, is_judged: bool) -> bool {
    !is_judged && (reason == Reason::ExcludedPort || reason == Reason::ExcludedRange)
}

/// Whether a workload's policy names a range of loopback that has this address. The policy's ranges exclude all other
/// addresses of loopback if it does.
#[inline(always)]
fn is_captured_loopback<T: Rules>(tables: &T, enrolled: &Enrolled, addr: Addr) -> bool {
    enrolled.flags & Enrolled::LOOPBACK != 0 && tables.range(enrolled.policy, addr) == CAPTURED
}

/// The facts that a decision needs besides the rules.
pub trait Circumstances: Rules {
    /// Whether the destination is an address that the proxy has: with capture by sockets, one of the
    /// workload itself.
    fn is_own(&self) -> bool;
    /// Whether the destination is an address of the workload itself, or a service's that only the workload itself answers.
    fn is_itself(&self) -> bool;
    /// Whether the destination is a service of Pods, an endpoint of such a service, or stated by the operator.
    fn is_known(&self) -> bool;
    /// Whether the destination is a service to which captured workloads may not connect by TCP
    /// ([`Block::REFUSED`](crate::tables::Block::REFUSED)).
    fn is_refused(&self) -> bool;
    /// Whether the destination speaks HBONE: an endpoint of the service, or the workload at the address. Also if this may change
    /// before the connection's first packet.
    fn speaks_hbone(&self) -> bool;
    /// Whether a process listens at the proxy's outbound port, at loopback in the workload's network namespace.
    fn listens(&self) -> bool;
}

/// Returns the verdict on an outbound connection of a workload, and whether the verdict holds only if the workload may
/// reach the destination of the connection's first packet: the endpoint that is drawn later, or the destination itself
/// if it does not belong to a service then. The connections of its proxy are not included.
#[inline(always)]
pub fn decide_outbound<T: Circumstances>(
    asked: &T,
    config: &CaptureConfig,
    enrolled: &Enrolled,
    (addr, port): (Addr, Port),
    excludes_user: bool,
) -> (Reason, bool) {
    let (reason, is_judged) = outbound(asked, enrolled, addr, port, excludes_user);
    let denies = enrolled.flags & Enrolled::EGRESS_DENY != 0;
    let proxy = enrolled.flags & Enrolled::PROXY != 0;
    if reason != Reason::ExcludedUser
        && proxy
        && (port == config.outbound || port == config.inbound)
        && (addr.is_loopback() || asked.is_own())
    {
        return (Reason::Recursive, false);
    }
    if !is_judged {
        return (reason, denies && is_exempt(reason, is_judged));
    }
    // The workload's connections to itself bypass the proxy, as in `inbound`.
    if asked.is_itself() {
        return (Reason::ExcludedLoopback, denies);
    }
    if denies && !asked.is_known() {
        return (Reason::EgressDenied, false);
    }
    if reason != Reason::Captured {
        return (reason, denies);
    }
    if enrolled.flags & Enrolled::REFUSES_SERVICES != 0 && asked.is_refused() {
        return (Reason::Unsupported, false);
    }
    if !proxy {
        return (Reason::Direct, denies);
    }
    let only_hbone = enrolled.flags & Enrolled::ONLY_HBONE != 0;
    if only_hbone && !asked.speaks_hbone() {
        return (Reason::Direct, denies);
    }
    if asked.listens() {
        return (Reason::Captured, false);
    }
    if only_hbone || enrolled.flags & Enrolled::ENCRYPTS != 0 && asked.speaks_hbone() {
        return (Reason::ProxyDown, false);
    }
    (without_proxy(enrolled.flags), denies)
}

/// Whether a verdict of [`decide_outbound`] holds only if the endpoint that is drawn later does not speak HBONE, or is the
/// workload itself: the service may have changed since. `flags`: as [`Enrolled::flags`].
#[inline(always)]
pub const fn must_be_plain(flags: u32, reason: Reason) -> bool {
    use Reason::{Direct, ExcludedLoopback, ProxyBypassed};
    flags & Enrolled::ENCRYPTS != 0 && matches!(reason, Direct | ProxyBypassed | ExcludedLoopback)
}

/// Returns the verdict on a datagram of a workload, or on a UDP socket that it connects, [`Reason::EgressDenied`] or
/// [`Reason::NotService`], and whether it holds as that of [`decide_outbound`] does.
#[inline(always)]
pub fn decide_datagram<T: Circumstances>(
    asked: &T,
    enrolled: &Enrolled,
    (addr, port): (Addr, Port),
    excludes_user: bool,
) -> (Reason, bool) {
    if enrolled.flags & Enrolled::EGRESS_DENY == 0 {
        return (Reason::NotService, false);
    }
    let (reason, is_judged) = outbound(asked, enrolled, addr, port, excludes_user);
    if !is_judged {
        return (Reason::NotService, is_exempt(reason, is_judged));
    }
    if asked.is_itself() || asked.is_known() {
        return (Reason::NotService, true);
    }
    (Reason::EgressDenied, false)
}

/// Whether a datagram or connection of a workload goes to one of its resolvers, and so to the agent's DNS server if the
/// server listens.
#[inline(always)]
pub fn is_query<T: Rules>(
    tables: &T,
    enrolled: &Enrolled,
    (addr, port): (Addr, Port),
    excludes_user: bool,
) -> bool {
    if enrolled.resolvers == 0 || port != DNS || excludes_user {
        return false;
    }
    tables.range(enrolled.resolvers, addr) == CAPTURED
}

/// Returns the verdict on a connection that comes into a workload's network namespace by an interface, to an address
/// that is not the workload's: [`Reason::Captured`] if it goes to the proxy, [`Reason::NotService`] if the workload's
/// rules do not name the interface. The routing rules that bring it here have decided by its destination, unless the
/// destination is another address of the namespace itself: the kernel looks at local addresses before any routing rule.
/// The agent's proxy applies the egress policy; if the proxy is not the agent's, no component can.
#[inline(always)]
pub fn by_interface<T: Rules>(
    tables: &T,
    config: &CaptureConfig,
    enrolled: &Enrolled,
    port: Port,
    interface: u32,
) -> Reason {
    if enrolled.flags & Enrolled::VIRTUAL == 0 {
        return Reason::NotService;
    }
    let of = enrolled.workload;
    let key = RuleKey {
        of,
        kind: RuleKey::INTERFACE,
        id: interface,
    };
    if tables.rule(&key) & CAPTURED == 0 {
        return Reason::NotService;
    }
    let is_foreign = config.flags & CaptureConfig::FOREIGN != 0;
    let is_judged = !is_foreign && enrolled.flags & Enrolled::PROXY != 0;
    // Before the other rules, because any client that reaches a sidecar's ports may use them.
    if enrolled.flags & Enrolled::EGRESS_DENY != 0 && !is_judged {
        return Reason::EgressDenied;
    }
    if port == config.outbound || port == config.inbound {
        // The port of a sidecar: while netfilter rules redirect connections to it, they arrive at this port.
        return if is_foreign {
            Reason::NotService
        } else {
            Reason::Recursive
        };
    }
    Reason::Captured
}

/// Returns the verdict on a connection to a proxy that does not listen; `flags`: as
/// [`Enrolled::flags`].
#[inline(always)]
pub const fn without_proxy(flags: u32) -> Reason {
    if flags & Enrolled::FAIL_OPEN != 0 {
        Reason::ProxyBypassed
    } else {
        Reason::ProxyDown
    }
}

/// Returns the verdict on an inbound connection that is a tunnel: [`Reason::CapturedInbound`] if it goes to the proxy's
/// listener for tunnels; `None` if the connection is no tunnel, and other rules decide. Rules about ports, interfaces and
/// probes do not apply to tunnels. The kernel does not see the ports to which a tunnel's streams go, so it refuses tunnels
/// ([`Reason::Unsupported`]) if connections to some ports of the workload are to be refused.
#[inline(always)]
pub fn tunnel(local: &Local, port: u32) -> Option<Reason> {
    if local.flags & Enrolled::TUNNELS == 0 || port != u32::from(TUNNELS.host()) {
        return None;
    }
    Some(if local.flags & Enrolled::REFUSES_INBOUND == 0 {
        Reason::CapturedInbound
    } else {
        Reason::Unsupported
    })
}

/// Whether an inbound connection of a workload is captured ([`Reason::CapturedInbound`]) or refused
/// ([`Reason::Unsupported`]), or which kind of rule excludes it.
#[inline(always)]
pub fn inbound<T: Rules>(tables: &T, local: &Local, port: u32, interface: u32) -> Reason {
    if local.flags & Enrolled::HAS_INTERFACES != 0 {
        let key = RuleKey {
            of: local.workload,
            kind: RuleKey::INTERFACE,
            id: interface,
        };
        if tables.rule(&key) & EXCLUDED != 0 {
            return Reason::ExcludedInterface;
        }
    }
    let mut said = 0;
    if local.flags & Enrolled::HAS_INBOUND_PORTS != 0 {
        said = tables.rule(&RuleKey {
            of: local.policy,
            kind: RuleKey::INBOUND_PORT,
            id: port,
        });
    }
    if said == 0 && local.flags & Enrolled::INBOUND_OTHERS != 0 {
        said = if local.flags & Enrolled::REFUSES_OTHER_PORTS == 0 {
            CAPTURED
        } else {
            REFUSED
        };
    }
    match said {
        CAPTURED => Reason::CapturedInbound,
        REFUSED => Reason::Unsupported,
        _ => Reason::ExcludedPort,
    }
}

/// Returns a workload as it is at the addresses of its network namespace that are not in `LOCALS`, if Istio's policies decide about
/// connections to it.
#[inline(always)]
pub const fn judged_at(enrolled: &Enrolled, netns: u64) -> Option<Local> {
    if enrolled.flags & Enrolled::JUDGES_INBOUND == 0 {
        return None;
    }
    Some(Local {
        netns,
        policy: enrolled.policy,
        flags: enrolled.flags,
        workload: enrolled.workload,
        resolvers: 0,
    })
}

/// Returns what Istio's policies say about a client without an identity that connects to a workload with
/// [`Enrolled::JUDGES_INBOUND`]: [`CAPTURED`] if they allow it. If the tables lack a rule, the client is refused, too.
#[inline(always)]
pub fn judged<T: Rules>(tables: &T, local: &Local, client: Addr, port: u32) -> u32 {
    let set = |id| {
        tables.rule(&RuleKey {
            of: local.policy,
            kind: RuleKey::SOURCES,
            id,
        })
    };
    let mut clients = set(port);
    if clients == 0 {
        clients = set(RuleKey::ALL_PORTS);
    }
    if clients == 0 {
        return REFUSED;
    }
    match tables.range(clients, client) {
        0 => REFUSED,
        said => said,
    }
}
