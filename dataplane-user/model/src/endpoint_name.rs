//! Names at whose addresses entries have endpoints.

use std::{fmt, net::IpAddr, sync::Arc};

use super::allocated::is_allocated;

/// The most addresses of a name that become endpoints.
pub const ADDRESSES_MAX: usize = 16;

/// A DNS name at whose addresses entries of a namespace have endpoints. Namespaces share no lookups, so that none slows
/// down those of another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointName {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name in lower case, without a dot at its end.
    pub name: Arc<str>,
}

/// The result of looking up an [`EndpointName`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// The last addresses that resolvers gave, sorted, [`ADDRESSES_MAX`] at most.
    pub addresses: Arc<[IpAddr]>,
    /// The reason why the last lookup failed, as a clause; none if it did not fail.
    pub problem: Option<Box<str>>,
}

impl fmt::Display for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// Whether an address can be an endpoint's, as the API server has it; otherwise, its kind. Loopback and link-local
/// addresses mean something else on each host: an author of endpoints could lead clients to services that a node has
/// for itself, such as its own services at 127.0.0.1 and the cloud's metadata at 169.254.169.254. The allocated
/// addresses of ServiceEntries' hosts lead to endpoints: as endpoints themselves they would be translated twice.
///
/// # Errors
///
/// The kind of address, with its article.
pub fn can_be_endpoint(address: IpAddr) -> Result<(), &'static str> {
    match address.to_canonical() {
        address if address.is_unspecified() => Err("the unspecified address"),
        address if address.is_multicast() => Err("a multicast address"),
        address if address.is_loopback() => Err("a loopback address"),
        IpAddr::V4(v4) if v4.is_broadcast() => Err("the broadcast address"),
        IpAddr::V4(v4) if v4.is_link_local() => Err("a link-local address"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Err("a link-local address"),
        address if is_allocated(address) => {
            Err("an address that nodes give to hosts of ServiceEntries")
        }
        _ => Ok(()),
    }
}
