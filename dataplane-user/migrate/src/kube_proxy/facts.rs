//! Facts about the node that kube-proxy's rules contain.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Facts about the node that kube-proxy's rules contain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The clients of IPv4, and of IPv6, that are masqueraded on the way to a cluster IP; `None` if no service has a
    /// cluster IP of the family.
    pub masquerade: [Option<Masquerade>; 2],
    /// The bit of the packet's mark by which kube-proxy's rules request masquerading.
    pub mark: Option<u32>,
    /// The addresses that answer node ports.
    pub node_ports: BTreeSet<IpNet>,
}

/// The clients that are masqueraded on the way to a cluster IP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Masquerade {
    /// No client.
    Nobody,
    /// Every client.
    All,
    /// Clients with an address outside this network.
    OutsideOf(IpNet),
    /// Clients whose packets do not arrive at this interface, which is a bridge.
    NotFromInterface(String),
    /// Clients whose packets arrive at an interface whose name does not start with this prefix.
    NotFromPrefix(String),
}

impl fmt::Display for Masquerade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("no client"),
            Self::All => f.write_str("every client"),
            Self::OutsideOf(net) => write!(f, "clients outside of {net}"),
            Self::NotFromInterface(name) => write!(f, "clients not from interface {name}"),
            Self::NotFromPrefix(name) => write!(f, "clients not from interfaces {name}*"),
        }
    }
}

impl Facts {
    /// Notes the clients of a family that are masqueraded. Returns false if other rules contradict.
    pub fn masquerades(&mut self, v4: bool, found: Masquerade) -> bool {
        let known = &mut self.masquerade[usize::from(!v4)];
        if let Some(known) = known {
            return *known == found;
        }
        *known = Some(found);
        true
    }

    /// Notes the bit of the mark. Returns false if other rules use a different bit.
    pub fn marks(&mut self, mark: u32) -> bool {
        *self.mark.get_or_insert(mark) == mark
    }

    /// Notes that all addresses of a family answer node ports.
    pub fn all_answer(&mut self, v4: bool) {
        self.node_ports.insert(all_of(v4));
    }
}

/// Returns a family's name for messages.
pub fn family(v4: bool) -> &'static str {
    if v4 { "IPv4" } else { "IPv6" }
}

/// Returns the network that contains all addresses of a family.
pub fn all_of(v4: bool) -> IpNet {
    if v4 {
        Ipv4Net::default().into()
    } else {
        Ipv6Net::default().into()
    }
}

/// Returns the address of a network that has only one.
pub fn host(net: IpNet) -> Option<IpAddr> {
    (net.prefix_len() == net.max_prefix_len()).then(|| net.addr())
}
