//! The rules by which queries are answered.

use super::zone::Meaning;

/// The rule by which a query is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// A service's cluster IPs.
    Service,
    /// The endpoints of a headless service.
    Headless,
    /// An endpoint of a service.
    Endpoint,
    /// A port of a service.
    Port,
    /// A service that stands for another name.
    Alias,
    /// A service or an endpoint that has an address.
    Pointer,
    /// An address that the name itself has.
    Pod,
    /// The cluster's domain itself.
    Apex,
    /// The version of the schema.
    Schema,
    /// A host of a ServiceEntry.
    Host,
    /// A name of the cluster that has no records.
    Empty,
    /// A name of the cluster that does not exist.
    Missing,
    /// A name further on in the client's search list.
    Search,
    /// Resolvers are asked.
    Forward,
    /// The query makes no sense, or asks for something that is refused.
    Refused,
}

impl Rule {
    /// Returns the rule in words, for metrics and messages.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::Headless => "headless",
            Self::Endpoint => "endpoint",
            Self::Port => "port",
            Self::Alias => "alias",
            Self::Pointer => "pointer",
            Self::Pod => "pod",
            Self::Apex => "apex",
            Self::Schema => "schema",
            Self::Host => "service-entry",
            Self::Empty => "empty",
            Self::Missing => "missing",
            Self::Search => "search",
            Self::Forward => "forward",
            Self::Refused => "refused",
        }
    }

    pub(super) fn of(meaning: &Meaning) -> Self {
        match meaning {
            Meaning::Foreign | Meaning::Unsure | Meaning::Doubtful(_) => Self::Forward,
            Meaning::Missing => Self::Missing,
            Meaning::Empty => Self::Empty,
            Meaning::Apex(_) => Self::Apex,
            Meaning::Schema => Self::Schema,
            Meaning::Service(_) => Self::Service,
            Meaning::Headless(_) => Self::Headless,
            Meaning::Endpoints(..) => Self::Endpoint,
            Meaning::Port(..) => Self::Port,
            Meaning::Alias(..) => Self::Alias,
            Meaning::Pod(_) => Self::Pod,
            Meaning::Pointer(_) => Self::Pointer,
            Meaning::Host(..) => Self::Host,
        }
    }
}
