//! Why a verdict was given.

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
    /// The destination is no service's.
    NotService = 0, "not-service", "the destination is no service's; left alone";
    /// A service's; an endpoint was drawn at random.
    Translated = 1, "translated", "an endpoint was chosen at random";
    /// A service's; the client's earlier endpoint was kept (session affinity, or the same UDP
    /// socket sending to the same VIP again).
    Kept = 2, "kept", "the client's earlier endpoint was kept";
    /// The service has no usable endpoint anywhere.
    NoEndpoints = 3, "no-endpoints", "the service has no ready endpoint; refused";
    /// The service has endpoints, but its traffic policy is Local and none is on this node.
    NoLocalEndpoint = 4, "no-local-endpoint", "the traffic policy is Local and no endpoint is on this node; refused";
    /// The address is a service's cluster IP, the port is not one of its ports.
    PortNotServed = 5, "port-not-served", "the service of this cluster IP does not have this port; refused";
    /// The affinity table could not take the client: it may reach another endpoint next time.
    AffinityFull = 6, "affinity-full", "the affinity table is full; this client's endpoint was not remembered";
    /// The socket could not remember the VIP: `getpeername` and replies show the endpoint.
    PeerNotKept = 7, "peer-not-kept", "the kernel had no memory for the socket's VIP; the client sees the endpoint's address";
    /// An unconnected UDP socket talks to more service endpoints than it can remember.
    FlowForgotten = 8, "flow-forgotten", "a UDP socket talks to more endpoints at once than are remembered; its oldest flow was forgotten";
    /// A table slot that must exist does not: a fault of ours.
    Dangling = 9, "dangling", "a table refers to a slot that is not there (a bug: please report it); refused";
    /// A reply's source was turned back into the VIP.
    ReplyTranslated = 10, "reply-translated", "the source of a UDP reply was turned back into the VIP";
    /// The packet path: a flow began, masqueraded to an address of the node's.
    Masqueraded = 11, "masqueraded", "an endpoint was chosen; it sees an address of this node";
    /// The packet path: `loadBalancerSourceRanges` do not contain the client.
    SourceDenied = 12, "source-denied", "the load balancer's source ranges do not contain the client; dropped";
    /// The packet path: every port of the node's, or of the client's if its address is kept, towards this endpoint is in
    /// use.
    PortsExhausted = 13, "ports-exhausted", "no free port for another flow to this endpoint; dropped";
    /// The packet path: the kernel has no route to the endpoint or back to the client, or one that
    /// cannot be taken from here.
    NoRoute = 14, "no-route", "the kernel's routes do not lead to the endpoint or the client; dropped";
    /// The packet path: there is no address of the node's to masquerade to on the way.
    NoNodeAddress = 15, "no-node-address", "the interface towards the endpoint has no address to masquerade to; dropped";
    /// The packet path: a TCP packet in mid-stream to a VIP, of a flow that is not known.
    UnknownFlow = 16, "unknown-flow", "in the middle of a TCP connection that is not known here; left alone";
    /// The packet path: a later fragment whose first was not seen.
    UnknownFragment = 17, "unknown-fragment", "a fragment for a VIP whose first fragment was not seen; dropped";
    /// The packet path: headers that contradict each other or end early.
    Malformed = 18, "malformed", "the packet's headers are truncated or contradict each other; left alone";
    /// The packet path: too large for the way to the endpoint.
    TooBig = 19, "too-big", "larger than the way to the endpoint allows; the sender was told";
    /// The packet path: its time to live ran out here.
    TimeExceeded = 20, "time-exceeded", "its hop limit ran out on this node; the sender was told";
    /// The packet path: conntrack could not take the flow.
    ConntrackFull = 21, "conntrack-full", "the conntrack tables could not take the flow; dropped";
    /// The packet path: the flow is the kernel's own conntrack's, from before the takeover.
    ForeignFlow = 22, "foreign-flow", "translated by the kernel's own conntrack since before the takeover; left alone";
    /// The packet path: an ICMP error was translated back for whom it is meant.
    ErrorTranslated = 23, "error-translated", "an ICMP error was translated for whom it is meant";
    /// Capture: an outbound connection was sent to the workload's proxy.
    Captured = 24, "captured", "sent to the workload's proxy";
    /// Capture: an inbound connection was handed to the workload's proxy.
    CapturedInbound = 25, "captured-inbound", "an inbound connection was handed to the workload's proxy";
    /// Capture: `mode: kernel`, or `auto` where a proxy would add nothing.
    Direct = 26, "direct", "decided and counted in the kernel, without a proxy";
    /// Capture: the proxy's own connection.
    ProxysOwn = 27, "proxys-own", "a connection of the proxy itself; not captured";
    /// Capture: the destination is loopback.
    ExcludedLoopback = 28, "excluded-loopback", "to loopback, or to an address of the workload itself; not captured";
    /// Capture: by port.
    ExcludedPort = 29, "excluded-port", "its port is excluded; not captured";
    /// Capture: by destination range.
    ExcludedRange = 30, "excluded-range", "its destination is in a range that is excluded; not captured";
    /// Capture: by user or group.
    ExcludedUser = 31, "excluded-user", "of a user or group that is excluded; not captured";
    /// Capture: by interface.
    ExcludedInterface = 32, "excluded-interface", "came in by an interface that is excluded; not captured";
    /// Capture: to the proxy's own port.
    Recursive = 33, "recursive", "to the proxy's own port; refused";
    /// Capture: the egress policy is deny and the destination unknown.
    EgressDenied = 34, "egress-denied", "no known service or workload, and the egress policy is deny; refused";
    /// Capture: nobody listens at the proxy's port.
    ProxyDown = 35, "proxy-down", "the workload's proxy does not listen; refused";
    /// Capture: the same, and the workload is to do without.
    ProxyBypassed = 36, "proxy-bypassed", "the workload's proxy does not listen; passed, as withoutProxy says";
    /// Capture: the namespace is not known yet.
    Guarded = 37, "guarded", "from a network namespace that the agent has not looked at yet; refused";
    /// Capture: the original destination could not be kept for the proxy.
    OriginLost = 38, "origin-lost", "no room to keep the original destination for the proxy";
    /// The packet path: a connection to an endpoint itself, from a port from which a live one goes to it by way of
    /// a VIP: whose answers were whose could not be told.
    PortTaken = 39, "port-taken", "the client has a connection to this endpoint from the same port by way of a service; refused";
    /// The packet path: a flow that is not over went, since all cells, or slots, of a new one were taken.
    FlowPushedOut = 40, "flow-pushed-out", "too little room in conntrack: a flow that was not over was forgotten for a new one";
    /// The packet path: an ICMP error, such as a refusal, was not sent.
    ErrorLimited = 41, "error-limited", "an ICMP error was not sent: the limits of net.ipv4.icmp_ratelimit, net.ipv6.icmp.ratelimit or net.ipv4.icmp_msgs_per_sec";
    /// The packet path, with `PREEMPT_RT`: more programs were preempted on a CPU than there are places for.
    Preempted = 42, "preempted", "too many programs were preempted on one CPU (PREEMPT_RT); dropped";
    /// The packet path: another CPU had begun to make the flow, and had not come to an end after some microseconds.
    FlowBusy = 43, "flow-busy", "another CPU was making the flow and took too long; dropped";
    /// The packet path: an IPsec policy of the kernel covers the packet, and what is sent on from here is not encrypted.
    IpsecPolicy = 44, "ipsec-policy", "an IPsec policy covers the packet, which the packet path cannot encrypt; dropped";
}

impl Reason {
    /// How many counters there are: a power of two with room to append, the size of the pinned
    /// counter table.
    pub const SLOTS: u32 = 64;

    /// Whether the connection or datagram was refused.
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
                | Self::PortTaken
                | Self::FlowBusy
                | Self::IpsecPolicy
        )
    }
}

const _: () = assert!(Reason::ALL.len() <= Reason::SLOTS as usize);
