//! How a connection ended.

/// Why a connection was refused, or ended as it did; `response_flags` in metrics and access logs.
/// Envoy's letters where it has some for the case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flag {
    /// Both sides were done.
    #[default]
    None,
    /// The service has no endpoint.
    NoEndpoint,
    /// The service has no such port.
    NoRoute,
    /// The destination is not known, and egress is denied; or the client is not in the load
    /// balancer's source ranges.
    Denied,
    /// The destination is the proxy itself.
    Recursive,
    /// No endpoint that was tried took the connection.
    ConnectFailure,
    /// The proxy is at one of its limits.
    Overflow,
    /// The client reset the connection.
    ClientReset,
    /// The endpoint reset the connection.
    EndpointReset,
    /// Nothing was said for too long.
    Idle,
    /// It was cut: the proxy ended, or the workload was released, and the time given was up.
    Cut,
}

impl Flag {
    /// As in metrics and logs.
    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::NoEndpoint => "UH",
            Self::NoRoute => "NR",
            Self::Denied => "DENY",
            Self::Recursive => "LOOP",
            Self::ConnectFailure => "UF",
            Self::Overflow => "UO",
            Self::ClientReset => "DC",
            Self::EndpointReset => "UC",
            Self::Idle => "SI",
            Self::Cut => "DRAIN",
        }
    }

    /// Whether the connection never got to an endpoint.
    pub const fn is_failure(self) -> bool {
        matches!(
            self,
            Self::NoEndpoint
                | Self::NoRoute
                | Self::Denied
                | Self::Recursive
                | Self::ConnectFailure
                | Self::Overflow
        )
    }
}
