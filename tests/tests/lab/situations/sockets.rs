//! Rows about sockets of a node and its pods.

use super::{Row, row};

pub const ROWS: &[Row] = &[
    row(
        "another port of a load balancer's address",
        "c: connect --to 203.0.113.12:81 --timeout-ms 300",
    )
    .fails(),
    row(
        "workers that share a port",
        "c: udp --unconnected --local-port 4000 --reuse-port --workers 6 --to 10.96.1.12:53 --count 12",
    ),
    row(
        "workers of a process of the node",
        "n: udp --unconnected --local-port 4000 --reuse-port --workers 6 --to 10.96.1.12:53 --count 12",
    ),
    row(
        "workers, by IPv6",
        "c: udp --unconnected --local-port 4001 --reuse-port --workers 6 --to [fd00:96::112]:53 --count 12",
    ),
    row(
        "workers with IPv6 sockets, by IPv4",
        "c: udp --unconnected --v4-mapped --local-port 4002 --reuse-port --workers 6 --to 10.96.1.12:53 --count 12",
    ),
    row(
        "NodeLocal DNSCache at the cluster IP, from a pod",
        "c: udp --to 10.96.1.12:53 --count 3",
    )
    .after(NODE_LOCAL)
    .beside(&["n: serve --name local --udp 10.96.1.12:53 --tcp 10.96.1.12:53"])
    .then(NO_NODE_LOCAL),
    row(
        "NodeLocal DNSCache at the cluster IP, from a virtual machine",
        "vm: udp --to 10.96.1.12:53 --count 3",
    )
    .after(NODE_LOCAL)
    .beside(&["n: serve --name local --udp 10.96.1.12:53"])
    .then(NO_NODE_LOCAL),
    row(
        "NodeLocal DNSCache at the cluster IP, from the node",
        "n: udp --to 10.96.1.12:53 --count 3",
    )
    .after(NODE_LOCAL)
    .beside(&["n: serve --name local --udp 10.96.1.12:53"])
    .then(NO_NODE_LOCAL),
    row(
        "a port of this cluster IP at which nobody listens",
        "c: connect --to 10.96.1.12:80 --count 3",
    )
    .after(NODE_LOCAL)
    .beside(&["n: serve --name local --udp 10.96.1.12:53"])
    .then(NO_NODE_LOCAL),
    row(
        "the cluster IP without NodeLocal DNSCache",
        "c: udp --to 10.96.1.12:53 --count 3",
    ),
    row(
        "a resolver of the node that names its uplink",
        "n: udp --unconnected --pktinfo eth0 --to 10.96.1.12:53 --count 3",
    ),
    row(
        "by IPv6",
        "n: udp --unconnected --pktinfo eth0 --to [fd00:96::112]:53 --count 3",
    ),
    row(
        "an endpoint that the uplink leads to, too",
        "n: udp --unconnected --pktinfo eth0 --to 10.96.1.11:53 --count 20",
    ),
    row(
        "one port of a pod, and two VIPs of one endpoint",
        "c: connect --local-port 4100 --to 203.0.113.12:80",
    )
    .beside(&["c: hold --local-port 4100 --to 10.96.1.12:80"]),
    row(
        "by IPv6",
        "c: connect --local-port 4101 --to [2001:db8:113::12]:80",
    )
    .beside(&["c: hold --local-port 4101 --to [fd00:96::112]:80"]),
    row("by UDP", "c: udp --local-port 4102 --to 203.0.113.12:53")
        .beside(&["c: udp --local-port 4102 --one-socket --until-stdin-closes --to 10.96.1.12:53"]),
    row(
        "one port of the node, and two VIPs of several endpoints",
        "n: connect --local-port 4103 --to 203.0.113.11:80 --count 12",
    )
    .beside(&["n: hold --local-port 4103 --to 10.96.1.11:80"])
    .by_anybody(),
    row(
        "MPTCP to a cluster IP",
        "c: connect --mptcp --to 10.96.1.12:80 --count 3",
    ),
    row(
        "MPTCP of a process of the node, by IPv6",
        "n: connect --mptcp --to [fd00:96::112]:80 --count 3",
    ),
    row(
        "a raw socket of a pod",
        "c: udp --raw --local 10.244.1.10 --local-port 4104 --to 10.96.1.12:53 --count 3",
    ),
    row(
        "a container of Docker's as an endpoint, from a pod",
        "c: connect --to 10.96.1.12:80 --count 1 --timeout-ms 300",
    )
    .after(CONTAINER)
    .differs(REFUSED_BEFORE, "TIMEOUT"),
    row(
        "from a virtual machine",
        "vm: connect --to 10.96.1.12:80 --count 1 --timeout-ms 300",
    )
    .differs(REFUSED_BEFORE, "TIMEOUT"),
    row(
        "from outside",
        "x: connect --to 192.168.77.1:30081 --count 1 --timeout-ms 300",
    )
    .differs(REFUSED_BEFORE, "TIMEOUT")
    .then(&["n: nft delete table ip docker-bridges"]),
    row(
        "a pod whose own rules lead a VIP elsewhere",
        "c: connect --to 10.96.1.12:80 --count 3",
    )
    .after(OWN_RULES),
    row("by UDP", "c: udp --to 10.96.1.12:53 --count 3"),
    row(
        "without a connection",
        "c: udp --unconnected --to 10.96.1.12:53 --count 3",
    ),
    row("by IPv6", "c: connect --to [fd00:96::112]:80 --count 3"),
    row(
        "a VIP that the rules leave alone",
        "c: connect --to 10.96.1.11:80 --count 20",
    ),
    row(
        "a node port that the rules leave alone",
        "c: connect --to 192.168.77.1:30081 --count 3",
    )
    .then(&["c: nft delete table inet own"]),
    row(
        "the pod without its rules",
        "c: connect --to 10.96.1.12:80 --count 3",
    ),
];

/// As Docker has them: a rule that takes packets to a container from its own interface only.
const CONTAINER: &[&str] = &[
    "n: nft add table ip docker-bridges",
    "n: nft 'add chain ip docker-bridges raw-PREROUTING { type filter hook prerouting priority raw; }'",
    "n: nft add rule ip docker-bridges raw-PREROUTING ip daddr 10.244.1.101 iifname != veth-b1 drop",
];

/// The documented difference of such rules.
const REFUSED_BEFORE: &str = "PREROUTING: rules that refuse packets to an endpoint's address before kube-proxy would \
                              translate the packet, such as Docker's in table `raw` for each container";

/// Rules of a pod's own, as of a sidecar: they choose by the VIP.
const OWN_RULES: &[&str] = &[
    "c: nft add table inet own",
    "c: nft 'add chain inet own out { type nat hook output priority -100; }'",
    "c: nft add rule inet own out ip daddr 10.96.1.12 tcp dport 80 dnat ip to 10.244.1.102:8080",
    "c: nft add rule inet own out ip daddr 10.96.1.12 udp dport 53 dnat ip to 10.244.1.102:5353",
    "c: nft 'add rule inet own out ip6 daddr fd00:96::112 tcp dport 80 dnat ip6 to [fd00:10:244:1::102]:8080'",
];

/// The setup of a node-local DNS cache: puts the cluster IP on an interface, and exempts its packets from conntrack.
const NODE_LOCAL: &[&str] = &[
    "n: ip addr add 10.96.1.12/32 dev lo",
    "n: nft add table ip nodelocal",
    "n: nft 'add chain ip nodelocal in { type filter hook prerouting priority raw; }'",
    "n: nft 'add chain ip nodelocal out { type filter hook output priority raw; }'",
    "n: nft add rule ip nodelocal in ip daddr 10.96.1.12 udp dport 53 notrack",
    "n: nft add rule ip nodelocal out ip daddr 10.96.1.12 udp dport 53 notrack",
    "n: nft add rule ip nodelocal out ip saddr 10.96.1.12 udp sport 53 notrack",
];
const NO_NODE_LOCAL: &[&str] = &[
    "n: nft delete table ip nodelocal",
    "n: ip addr del 10.96.1.12/32 dev lo",
];
