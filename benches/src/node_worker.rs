//! The worker that carries the traffic of a node of the comparison.

use dataplane_peers::Mode;

/// The worker that carries a node's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker {
    /// No worker: the node has no rules and no programs. The client connects to the endpoint.
    Plain,
    /// No worker, but the kernel's conntrack follows every flow, without translating it.
    Conntrack,
    /// An agent with default options.
    Dataplane,
    /// An agent without the packet path.
    Sockets,
    /// An agent, and the kernel's conntrack follows every flow, because rules of another program ask for it.
    Tracked,
    /// As [`Worker::Tracked`], with packets of services on the path through the stack.
    Stack,
    /// An agent, while a user runs `dataplane monitor`.
    Monitored,
    /// kube-proxy's rules.
    Peer(Mode),
}

impl Worker {
    /// Whether it is an agent with the packet path.
    pub const fn is_agent(self) -> bool {
        matches!(
            self,
            Self::Dataplane | Self::Tracked | Self::Stack | Self::Monitored
        )
    }

    /// Whether rules of another program ask for the kernel's conntrack.
    pub const fn is_tracked(self) -> bool {
        matches!(self, Self::Conntrack | Self::Tracked | Self::Stack)
    }

    /// Returns the arguments of its agent; `None` if it is none.
    pub const fn arguments(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Plain | Self::Conntrack | Self::Peer(_) => None,
            Self::Sockets => Some(&["--packet-path", "off"]),
            Self::Stack => Some(&["--packet-path", "stack"]),
            Self::Dataplane | Self::Tracked | Self::Monitored => Some(&[]),
        }
    }

    /// Returns the worker's `path` in the rows.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Conntrack => "conntrack",
            Self::Dataplane => "dataplane",
            Self::Sockets => "dataplane-sockets",
            Self::Tracked => "dataplane-conntrack",
            Self::Stack => "dataplane-stack",
            Self::Monitored => "dataplane-monitor",
            Self::Peer(mode) => mode.word(),
        }
    }
}
