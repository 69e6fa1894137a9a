//! Facts about the node in kube-proxy's rules.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Facts about the node in kube-proxy's rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Which clients of IPv4, and of IPv6, are masqueraded on the way to a cluster IP; none: no service has such a cluster IP.
    pub masquerade: [Option<Masquerade>; 2],
    /// The bit of the mark by which kube-proxy's rules masquerade.
    pub mark: Option<u32>,
    /// The addresses that answer node ports.
    pub node_ports: BTreeSet<IpNet>,
}

/// Which clients are masqueraded on the way to a cluster IP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Masquerade {
    /// None.
    Nobody,
    /// Every client.
    All,
    /// Clients whose addresses are not in this network.
    OutsideOf(IpNet),
    /// Clients whose packets do not arrive at this interface, a bridge.
    NotFromInterface(String),
    /// Clients whose packets arrive at an interface whose name does not begin with this text.
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
    /// Notes which clients of a family are masqueraded. False: other rules say something else.
    pub fn masquerades(&mut self, v4: bool, found: Masquerade) -> bool {
        let known = &mut self.masquerade[usize::from(!v4)];
        if let Some(known) = known {
            return *known == found;
        }
        *known = Some(found);
        true
    }

    /// Notes the bit of the mark. False: other rules say another one.
    pub fn marks(&mut self, mark: u32) -> bool {
        *self.mark.get_or_insert(mark) == mark
    }

    /// Notes that all addresses of a family answer node ports.
    pub fn all_answer(&mut self, v4: bool) {
        self.node_ports.insert(all_of(v4));
    }
}

/// How people call a family.
pub fn family(v4: bool) -> &'static str {
    if v4 { "IPv4" } else { "IPv6" }
}

/// The network of all addresses of a family.
pub fn all_of(v4: bool) -> IpNet {
    if v4 {
        Ipv4Net::default().into()
    } else {
        Ipv6Net::default().into()
    }
}

/// The address of a network of one.
pub fn host(net: IpNet) -> Option<IpAddr> {
    (net.prefix_len() == net.max_prefix_len()).then(|| net.addr())
}
