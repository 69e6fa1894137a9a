//! Where the dataplane is meant to differ from kube-proxy. `docs/differences.md` has the reasons.

use std::net::IpAddr;

use dataplane_peers::Mode;

use super::case::{At, Case, Seen};

/// A difference: where kube-proxy shows a client something, we show it something else.
pub struct Difference {
    /// The difference, in the words of `docs/differences.md`.
    pub what: &'static str,
    /// Returns the results here for results with kube-proxy in this mode; `None` if they are equal.
    pub here: fn(&Case, Mode, &Seen) -> Option<Seen>,
}

/// Returns the address of a client that is not a node, in the family of its destination.
fn own_address(case: &Case) -> Option<IpAddr> {
    let (v4, v6) = match &*case.client {
        "vm" => ("10.244.1.10", "fd00:10:244:1::10"),
        "pod" => ("10.244.1.11", "fd00:10:244:1::11"),
        "e1" => ("10.244.1.101", "fd00:10:244:1::101"),
        _ => return None,
    };
    let text = if case.to.is_ipv4() { v4 } else { v6 };
    Some(text.parse().expect("an address"))
}

impl Case {
    /// Whether it is a load balancer's address with source ranges. Ranges of one family leave the other family's
    /// addresses open.
    fn is_ranged(&self) -> bool {
        self.service.is_some_and(|(service, at)| {
            at == At::LoadBalancer
                && service.name.starts_with("for-")
                && (self.to.is_ipv4() || service.name != "for-ext-v4")
        })
    }

    fn is_from_node(&self) -> bool {
        self.client == "node1"
    }
}

/// Whom the node's programs see at the socket keeps its address.
pub static OWN_ADDRESS: Difference = Difference {
    what: "Source address that endpoints see, from a pod to a node port, an external IP or a load balancer's address",
    here: |case, _, there| {
        let own = own_address(case)?;
        (case.at_socket() && !case.is_ranged() && there.answered()).then(|| {
            let seen = Seen {
                answers: (there.answers.keys())
                    .map(|endpoint| (endpoint.clone(), [own].into()))
                    .collect(),
                ..there.clone()
            };
            seen.with_own_port()
        })
    },
};

/// Processes of the node itself keep their port; their address is the one that they are masqueraded to.
pub static OWN_PORT: Difference = Difference {
    what: "Source port that endpoints see, from the node itself",
    here: |case, _, there| {
        (case.is_from_node() && !case.is_ranged()).then(|| there.clone().with_own_port())
    },
};

/// Where kube-proxy does not masquerade them, they have the address that faces the VIP, not the
/// endpoint.
pub static FACING_ADDRESS: Difference = Difference {
    what: "Source address that endpoints see, from the node itself, if nobody is masqueraded",
    here: |case, _, there| {
        (case.is_from_node() && there.answered()).then(|| Seen {
            answers: (there.answers.keys())
                .map(|endpoint| (endpoint.clone(), [facing(case, endpoint)].into()))
                .collect(),
            ..there.clone()
        })
    },
};

/// The node's address that an endpoint sees.
fn facing(case: &Case, endpoint: &str) -> IpAddr {
    let far = endpoint == "e3";
    let text = match (case.to.is_ipv4(), far) {
        (true, true) => "192.168.77.1",
        (true, false) => "10.244.1.1",
        (false, true) => "fd77::1",
        (false, false) => "fd00:10:244:1::1",
    };
    text.parse().expect("an address")
}

/// In mode nftables kube-proxy has no node ports on loopback, in mode iptables none on `::1`.
pub static LOOPBACK: Difference = Difference {
    what: "Node port on the node's loopback, from the node",
    here: |case, _, there| {
        (case.is_at(At::Loopback) && there.is("refused")).then(|| {
            let seen = Seen {
                answers: ["e1", "e3"]
                    .map(|endpoint| (endpoint.to_owned(), [facing(case, endpoint)].into()))
                    .into(),
                ..Seen::default()
            };
            seen.with_own_port()
        })
    },
};

/// A cluster IP's port that its service does not have is refused at once.
pub static WRONG_PORT: Difference = Difference {
    what: "A port that a cluster IP's service does not have",
    here: |case, mode, there| {
        let wrong = ["another port of a cluster IP", "one protocol's cluster IP"];
        (wrong.contains(&&*case.what) && mode != Mode::Nftables && there.is("timeout"))
            .then(|| Seen::failed("refused"))
    },
};

/// Node ports are on the primary addresses, as in mode nftables.
pub static PRIMARY_ADDRESS: Difference = Difference {
    what: "Node ports on the node's other addresses",
    here: |case, mode, there| {
        let other = ["the gateway's node port", "the second address' node port"];
        (other.contains(&&*case.what) && mode != Mode::Nftables && there.answered())
            .then(|| Seen::failed("refused"))
    },
};

/// Masqueraded flows keep the client's port if the port cannot be one of the node's own.
pub static KEPT_PORT: Difference = Difference {
    what: "Source port that endpoints see, of a masqueraded flow",
    here: |case, _, there| {
        let kept = case
            .from_port
            .is_some_and(|port| !(32_768..=60_999).contains(&port));
        // The node's own socket has its port.
        (kept && !case.is_from_node()).then(|| there.clone().with_own_port())
    },
};

/// If netfilter drops the packet of a send(2), the call fails with EPERM, both by a rule that drops and by a rule that
/// rejects.
pub static NOT_PERMITTED: Difference = Difference {
    what: "UDP from the node itself to what is refused or dropped",
    here: |case, _, there| {
        (case.is_from_node() && there.is("EPERM")).then(|| {
            let alone = case.is_ranged() || case.what == "an unused cluster IP";
            Seen::failed(if alone { "timeout" } else { "refused" })
        })
    },
};

/// Mode iptables looks at packets of the node itself only if they are for a cluster IP.
pub static REFUSED_TO_NODE: Difference = Difference {
    what: "A load balancer's address or an external IP without endpoints, from the node itself",
    here: |case, mode, there| {
        let outside = case.is_at(At::LoadBalancer) || case.is_at(At::ExternalIp);
        (case.is_from_node() && outside && mode != Mode::Nftables && there.is("timeout"))
            .then(|| Seen::failed("refused"))
    },
};

/// At the socket a program can refuse at once.
pub static NO_LOCAL: Difference = Difference {
    what: "`internalTrafficPolicy: Local` without an endpoint on the node",
    here: |case, _, there| {
        (case.at_socket() && case.is_at(At::ClusterIp) && there.is("timeout"))
            .then(|| Seen::failed("refused"))
    },
};

/// Mode iptables has the rule that drops others only if there are endpoints.
pub static RANGED_NONE: Difference = Difference {
    what: "A load balancer's address with source ranges and without endpoints, from elsewhere",
    here: |case, mode, there| {
        let allowed = case.client == "ext";
        (case.is_ranged() && !allowed && mode != Mode::Nftables && there.is("refused"))
            .then(|| Seen::failed("timeout"))
    },
};

/// A client that is served at its socket is on this node, with any address.
pub static ON_THIS_NODE: Difference = Difference {
    what: "`externalTrafficPolicy: Local` from a pod, without a detector of pods",
    here: |case, _, there| {
        let own = own_address(case)?;
        (case.client == "pod"
            && case.service?.0.name == "etp-local"
            && there.answers.keys().eq(["e1"]))
        .then(|| {
            let seen = Seen {
                answers: ["e1", "e3"]
                    .map(|name| (name.to_owned(), [own].into()))
                    .into(),
                ..there.clone()
            };
            seen.with_own_port()
        })
    },
};
