//! The outcome of a connection.

/// How a connection ended, or why it was refused: `response_flags` in metrics and access logs. The
/// words are Envoy's if Envoy has one for the case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flag {
    /// Both sides ended the connection.
    #[default]
    None,
    /// The service has no endpoint.
    NoEndpoint,
    /// The service has no such port; or the peer of a tunnel asks for an address that the workload does not have.
    NoRoute,
    /// Egress is denied, and the destination is not in the snapshot; the client is not in `loadBalancerSourceRanges`; or
    /// Istio's policies refuse the connection, or ended it.
    Denied,
    /// The client has its share of the workload's inbound connections.
    ClientsShare,
    /// The destination is the proxy.
    Recursive,
    /// No endpoint that was tried took the connection.
    ConnectFailure,
    /// No tunnel to an endpoint could be made, or the endpoint's side refused the connection.
    Tunnel,
    /// The TCP connection for a tunnel timed out, as when a NetworkPolicy keeps clients from port 15008.
    NetworkPolicy,
    /// One side of a tunnel refused the other in the TLS handshake.
    Tls,
    /// The endpoint's side does not speak HTTP/2.
    NotH2,
    /// This side has no certificate.
    Identity,
    /// The certificate of the endpoint's side is revoked.
    Revoked,
    /// One side did not read the other side's data, and the proxy's buffers were full.
    Stalled,
    /// The client reset the connection.
    ClientReset,
    /// The endpoint reset the connection.
    EndpointReset,
    /// The connection was idle for too long.
    Idle,
    /// The proxy ended or the workload was released, and the connection's deadline had passed.
    Cut,
}

impl Flag {
    /// Whether the proxy, or the other side of a tunnel, has decided to refuse the connection, or to end it.
    pub const fn is_refusal(self) -> bool {
        use Flag::{ClientsShare, Denied, NoEndpoint, NoRoute, Recursive};
        matches!(
            self,
            NoEndpoint | NoRoute | Denied | ClientsShare | Recursive
        )
    }

    /// The word in metrics and access logs.
    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::NoEndpoint => "UH",
            Self::NoRoute => "NR",
            Self::Denied => "DENY",
            Self::ClientsShare => "OM",
            Self::Recursive => "LOOP",
            Self::ConnectFailure => "UF",
            Self::Tunnel => "CONNECT",
            Self::NetworkPolicy => "NETWORK_POLICY",
            Self::Tls => "TLS_FAILURE",
            Self::NotH2 => "H2_HANDSHAKE_FAILURE",
            Self::Identity => "IDENTITY_ERROR",
            Self::Revoked => "CERT_REVOKED",
            Self::Stalled => "UO",
            Self::ClientReset => "DC",
            Self::EndpointReset => "UC",
            Self::Idle => "SI",
            Self::Cut => "DRAIN",
        }
    }
}
