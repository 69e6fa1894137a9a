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
