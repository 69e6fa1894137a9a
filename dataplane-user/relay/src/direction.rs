//! The direction of a connection.

/// The direction of a connection, seen from the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Made by the workload.
    Outbound,
    /// Made to the workload.
    Inbound,
}

impl Direction {
    /// The word in access logs.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
        }
    }
}
