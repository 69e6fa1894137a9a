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
}

impl Reason {
    /// How many counters there are: a power of two with room to append, the size of the pinned
    /// counter table.
    pub const SLOTS: u32 = 32;

    /// Whether the connection or datagram was refused.
    pub const fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::NoEndpoints | Self::NoLocalEndpoint | Self::PortNotServed | Self::Dangling
        )
    }
}

const _: () = assert!(Reason::ALL.len() <= Reason::SLOTS as usize);
