//! The reasons for verdicts.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $word:literal, $text:literal;)*) => {
        /// Why a connection or a datagram was treated as it was: the counter's index, the event's
        /// field and the word that a person reads, in one.
        ///
        /// Numbers are part of the pinned layout: append, never renumber.
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[$doc])* $name = $number,)* }

        impl Reason {
            /// Every reason, in the order of its number.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The word: in events, metrics' labels and filters.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// One sentence for a person who has to act on it.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// From the number in an event or a counter's index.
            pub const fn from_number(number: u8) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }

            /// From the word.
            pub fn from_word(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$name),)* _ => None }
            }
        }
    };
}

reasons! {
    /// The destination does not belong to a service.
    NotService = 0, "not-service", "the destination does not belong to a service; left alone";
    /// A service's address; an endpoint was chosen at random.
    Translated = 1, "translated", "an endpoint was chosen at random";
    /// A service's address; the client keeps its earlier endpoint (session affinity, or the same UDP
    /// socket sends to the same VIP again).
    Kept = 2, "kept", "the client keeps its earlier endpoint";
    /// The service has no usable endpoint anywhere.
    NoEndpoints = 3, "no-endpoints", "the service has no ready endpoint; refused";
    /// The service has endpoints, but its traffic policy is Local and none is on this node.
    NoLocalEndpoint = 4, "no-local-endpoint", "the traffic policy is Local and this node has no endpoint; refused";
    /// The address is a service's cluster IP, the port is not one of its ports.
    PortNotServed = 5, "port-not-served", "the service of this cluster IP does not have this port; refused";
    /// The affinity table has no room for the client, which may reach another endpoint next time.
    AffinityFull = 6, "affinity-full", "the affinity table is full; the client's endpoint is not kept";
    /// The socket's VIP could not be stored: `getpeername` and replies show the endpoint.
    PeerNotKept = 7, "peer-not-kept", "the kernel had no memory for the socket's VIP; the client sees the endpoint's address";
    /// An unconnected UDP socket talks to more service endpoints than its table holds.
    FlowForgotten = 8, "flow-forgotten", "a UDP socket talks to more endpoints at once than its table holds; its oldest flow is forgotten";
    /// A table refers to a slot that does not exist, which is a bug.
    Dangling = 9, "dangling", "a table refers to a slot that does not exist (a bug: please report it); refused";
    /// The source of a reply was replaced by the VIP.
    ReplyTranslated = 10, "reply-translated", "the source of a UDP reply was replaced by the VIP";
    /// The packet path: a flow began, masqueraded to an address of the node.
    Masqueraded = 11, "masqueraded", "an endpoint was chosen; the endpoint sees an address of this node";
    /// The packet path: `loadBalancerSourceRanges` do not contain the client.
    SourceDenied = 12, "source-denied", "the client is not in the load balancer's source ranges; dropped";
    /// The packet path: all ports for flows to this endpoint are in use: the node's ports, or the client's ports if
    /// the flow is not masqueraded.
    PortsExhausted = 13, "ports-exhausted", "no port is free for another flow to this endpoint; dropped";
    /// The packet path: the kernel has no route to the endpoint or back to the client, or a route that
    /// the packet path cannot use.
    NoRoute = 14, "no-route", "the kernel's routes do not lead to the endpoint or to the client; dropped";
    /// The packet path: the interface towards the endpoint has no address to masquerade to.
    NoNodeAddress = 15, "no-node-address", "the interface towards the endpoint has no address to masquerade to; dropped";
    /// The packet path: a TCP packet in mid-stream to a VIP that is not the node's address, of an unknown flow.
    UnknownFlow = 16, "unknown-flow", "a packet in the middle of a TCP connection that neither the tables nor the kernel's conntrack know; its sender got a reset";
    /// The packet path: a later fragment whose first fragment was not seen.
    UnknownFragment = 17, "unknown-fragment", "a fragment for a VIP whose first fragment was not seen; dropped";
    /// The packet path: headers that contradict each other or end early.
    Malformed = 18, "malformed", "the packet's headers are truncated or contradict each other; left alone, but dropped if it comes from a workload that is captured by packets, or has two VLAN tags with id 0";
    /// The packet path: too large for the path to the endpoint.
    TooBig = 19, "too-big", "larger than the path to the endpoint allows; the sender was told the MTU";
    /// The packet path: the hop limit ran out on this node.
    TimeExceeded = 20, "time-exceeded", "the hop limit ran out on this node; the sender was told";
    /// The packet path: conntrack has no room for the flow.
    ConntrackFull = 21, "conntrack-full", "the conntrack tables have no room for the flow; dropped";
    /// The packet path: the kernel's own conntrack translates the flow, since before the takeover.
    ForeignFlow = 22, "foreign-flow", "the kernel's own conntrack has translated this flow since before the takeover; left alone";
    /// The packet path: an ICMP error was translated for its recipient.
    ErrorTranslated = 23, "error-translated", "an ICMP error was translated for its recipient";
    /// Capture: an outbound connection was sent to the workload's proxy.
    Captured = 24, "captured", "sent to the workload's proxy";
    /// Capture: an inbound connection was handed to the workload's proxy.
    CapturedInbound = 25, "captured-inbound", "an inbound connection was handed to the workload's proxy";
    /// Capture: `mode: kernel`, or `auto` if a proxy would add nothing.
    Direct = 26, "direct", "decided and counted in the kernel, without a proxy";
    /// Capture: the proxy's own connection.
    ProxysOwn = 27, "proxys-own", "a connection of the proxy itself; not captured";
    /// Capture: the destination is loopback.
    ExcludedLoopback = 28, "excluded-loopback", "to loopback, or to an address of the workload itself; not captured";
    /// Capture: by port.
    ExcludedPort = 29, "excluded-port", "its port is excluded; not captured";
    /// Capture: by destination range.
    ExcludedRange = 30, "excluded-range", "its destination is in an excluded range; not captured";
    /// Capture: by user or group.
    ExcludedUser = 31, "excluded-user", "its user or group is excluded; not captured";
    /// Capture: by interface.
    ExcludedInterface = 32, "excluded-interface", "its inbound interface is excluded; not captured";
    /// Capture: to the proxy's own port.
    Recursive = 33, "recursive", "to the proxy's own port; refused";
    /// Capture: the egress policy is deny and the destination is unknown.
    EgressDenied = 34, "egress-denied", "the egress policy is deny, and the destination is neither a service of Pods, nor a port of a Pod, nor in mesh.reachable; refused";
    /// Capture: no process listens at the proxy's port.
    ProxyDown = 35, "proxy-down", "the workload's proxy does not listen; refused";
    /// Capture: no process listens at the proxy's port, and `withoutProxy` lets the connection pass.
    ProxyBypassed = 36, "proxy-bypassed", "the workload's proxy does not listen; passed, as withoutProxy says";
    /// Capture: the namespace is not known yet.
    Guarded = 37, "guarded", "from a network namespace that the agent does not know; refused";
    /// Capture: the table `ORIGINS` has no room for the original destination, which the proxy needs.
    OriginLost = 38, "origin-lost", "no room to keep the original destination for the proxy; refused";
    /// The packet path: a direct connection to an endpoint, from a port that already has a live connection to the
    /// endpoint through a VIP. The replies of the two connections would look alike.
    PortTaken = 39, "port-taken", "the client already has a connection to this endpoint from the same port through a service; refused";
    /// The packet path: a live flow was evicted, because all cells, or slots, of a new flow were in use.
    FlowPushedOut = 40, "flow-pushed-out", "the conntrack tables had no room: a live flow was evicted for a new one";
    /// The packet path: an ICMP error, such as a refusal, was not sent.
    ErrorLimited = 41, "error-limited", "an ICMP error was not sent, because of the limits in net.ipv4.icmp_ratelimit, net.ipv6.icmp.ratelimit or net.ipv4.icmp_msgs_per_sec";
    /// The packet path, with `PREEMPT_RT`: more programs were preempted on a CPU than SCRATCH has places for.
    Preempted = 42, "preempted", "too many programs were preempted on one CPU (PREEMPT_RT); dropped";
    /// The packet path: another CPU began to make the flow, and did not finish within some microseconds.
    FlowBusy = 43, "flow-busy", "another CPU was making the flow and took too long; dropped";
    /// The packet path: an IPsec policy of the kernel protects the packet, which came in clear or would leave in clear.
    IpsecPolicy = 44, "ipsec-policy", "an IPsec policy protects the packet, which came in clear or would leave in clear; dropped";
    /// Capture by packets: to a loopback or link-local address, or to one of the node. The proxy would connect as the
    /// node.
    ToNode = 45, "to-node", "from a workload that is captured by packets to an address of the node, or to a link-local or loopback address; refused";
    /// Capture: a DNS query was sent to the agent's DNS server.
    CapturedDns = 46, "captured-dns", "a DNS query, sent to the agent's DNS server";
    /// Capture: a DNS query was left alone, because the agent's DNS server does not answer.
    DnsBypassed = 47, "dns-bypassed", "the agent's DNS server does not answer; the query went to the resolver";
    /// The packet path: the node's routes do not lead to the packet's source by the interface at which it arrived.
    SourceForged = 48, "source-forged", "the packet's source address does not belong to the interface at which the packet arrived; dropped";
    /// The packet path: a pod's packet has an IPv6 routing header, or a source route option of IPv4 (RFC 791 section 3.1): its
    /// destination is not the one that the process asked for.
    SourceRouted = 49, "source-routed", "a pod's packet has an IPv6 routing header or an IPv4 source route, so it does not go where its socket was asked to send it; dropped";
    /// Capture by packets: a fragment of TCP. The programs cannot tell to which connection it belongs.
    CapturedFragment = 50, "captured-fragment", "a TCP fragment from a workload that is captured by packets; dropped";
    /// Capture: an object of Istio's limits such connections, and nothing on the node enforces its rules.
    Unsupported = 51, "unsupported", "a waypoint, AuthorizationPolicy or PeerAuthentication of Istio's limits these connections, and nothing on the node enforces it (mesh.unsupported: deny); refused";
    /// Capture: an inbound connection of the kubelet, by its cgroup.
    ExcludedProbe = 52, "excluded-probe", "from the kubelet (mesh.probes.cgroups); not captured";
    /// Capture: the endpoint that was drawn speaks HBONE, which no endpoint of the service did when the connection was decided.
    PlaintextRefused = 53, "plaintext-refused", "while the connection was made, the service got an endpoint that speaks HBONE, and such endpoints are not reached in plaintext; refused";
    /// Capture: an inbound connection of a workload without a proxy, which a policy of Istio's forbids to clients without an identity.
    PolicyDenied = 54, "policy-denied", "an AuthorizationPolicy or PeerAuthentication of Istio's forbids the connection (dataplane policies); refused";
}

impl Reason {
    /// Number of counters in the pinned table: a power of two, with room for further reasons.
    pub const SLOTS: u32 = 64;

    /// Tells if the connection or datagram was refused.
    pub const fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::NoEndpoints
                | Self::NoLocalEndpoint
                | Self::PortNotServed
                | Self::Dangling
                | Self::SourceDenied
                | Self::PortsExhausted
                | Self::NoRoute
                | Self::NoNodeAddress
                | Self::UnknownFragment
                | Self::ConntrackFull
                | Self::Recursive
                | Self::EgressDenied
                | Self::ProxyDown
                | Self::Guarded
                | Self::OriginLost
                | Self::ToNode
                | Self::PortTaken
                | Self::Preempted
                | Self::FlowBusy
                | Self::IpsecPolicy
                | Self::SourceForged
                | Self::SourceRouted
                | Self::CapturedFragment
                | Self::Unsupported
                | Self::PlaintextRefused
                | Self::PolicyDenied
        )
    }
}

const _: () = assert!(Reason::ALL.len() <= Reason::SLOTS as usize);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every text of a refusal ends with what happens to the packet or connection.
    #[test]
    fn refusals_say_so() {
        for reason in Reason::ALL {
            let text = reason.text();
            let says = text.ends_with("refused") || text.ends_with("; dropped");
            assert_eq!(reason.is_refusal(), says, "{reason:?}: {text}");
        }
    }
}
