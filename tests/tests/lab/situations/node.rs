//! Rows about packets of the node itself that no program at a socket has seen, and about its sockets that are bound to an
//! address to which an endpoint's machine has no route.

use super::{Row, row};

pub const ROWS: &[Row] = &[
    row(
        "a raw socket",
        "n: udp --raw --local 192.168.77.1 --local-port 4200 --to 10.96.1.12:53 --count 3",
    )
    .with_source(),
    row(
        "by IPv6",
        "n: udp --raw --local fd77::1 --local-port 4201 --to [fd00:96::112]:53 --count 3",
    )
    .with_source(),
    row(
        "several endpoints",
        "n: udp --raw --local 192.168.77.1 --local-port 4202 --to 10.96.1.11:53 --count 3",
    )
    .by_anybody(),
    row(
        "a load balancer's address",
        "n: udp --raw --local 192.168.77.1 --local-port 4203 --to 203.0.113.12:53 --count 3",
    )
    .with_source(),
    // A tenant writes external IPs: the peer of a tunnel of the node's could be one.
    row(
        "an external IP",
        "n: udp --raw --local 192.168.77.1 --local-port 4206 --to 198.51.100.12:53 --count 1 --timeout-ms 300",
    )
    .differs(EXTERNAL, "TIMEOUT"),
    row(
        "a raw socket, with a strict rp_filter",
        "n: udp --raw --local 192.168.77.1 --local-port 4204 --to 10.96.1.12:53 --count 3",
    )
    .after(&["n: for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $f; done"])
    .then(&["n: for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done"]),
    row(
        "a raw socket and a port that no service has",
        "n: udp --raw --local 192.168.77.1 --local-port 4205 --to 203.0.113.12:54 --count 1 --timeout-ms 300",
    )
    .fails(),
    row(
        "nobody takes the answer, and the endpoint learns that",
        "n: udp --raw --deaf --local 192.168.77.1 --local-port 4209 --to 10.96.1.12:53 --count 1 --timeout-ms 300",
    )
    .fails()
    .after(ERRORS)
    .then(ERROR_CAME),
    row(
        "by IPv6",
        "n: udp --raw --deaf --local fd77::1 --local-port 4210 --to [fd00:96::112]:53 --count 1 --timeout-ms 300",
    )
    .fails()
    .after(ERRORS)
    .then(ERROR_CAME),
    row(
        "a raw socket, and an endpoint on the node itself",
        "n: udp --raw --local 192.168.77.1 --local-port 4208 --to 10.96.1.13:53 --count 1 --timeout-ms 300",
    )
    .beside(&["n: serve --name n --udp 192.168.77.1:5353"])
    .differs(OWN_ENDPOINT, "TIMEOUT"),
    row(
        "a socket, and an endpoint on the node itself",
        "n: udp --to 10.96.1.13:53 --count 3",
    )
    .beside(&["n: serve --name n --udp 192.168.77.1:5353"]),
    row(
        "bound to a bridge's address, by UDP",
        "n: udp --local 172.30.0.1 --to 10.96.1.11:53 --count 20",
    )
    .after(BRIDGE),
    row(
        "by TCP",
        "n: connect --local 172.30.0.1 --to 10.96.1.11:80 --count 20",
    ),
    row(
        "to a node port",
        "n: connect --local 172.30.0.1 --to 192.168.77.1:30080 --count 20",
    ),
    row(
        "without a connection",
        "n: udp --unconnected --local 172.30.0.1 --to 10.96.1.11:53 --count 20",
    ),
    row(
        "on a node that does not forward",
        "n: udp --local 172.30.0.1 --to 10.96.1.11:53 --count 20",
    )
    .after(&["n: echo 0 > /proc/sys/net/ipv4/ip_forward"])
    .then(&["n: echo 1 > /proc/sys/net/ipv4/ip_forward"]),
    row(
        "by IPv6 and TCP",
        "n: connect --local fd30::1 --to [fd00:96::111]:80 --count 20",
    ),
    row(
        "by IPv6 and UDP",
        "n: udp --local fd30::1 --to [fd00:96::111]:53 --count 20",
    )
    .then(NO_BRIDGE),
    row(
        "bound to another address of the uplink",
        "n: connect --local 192.168.77.51 --to 10.96.1.11:80 --count 20",
    )
    .after(&["n: ip addr add 192.168.77.51/24 dev eth0"]),
    row(
        "a raw socket with this address",
        "n: udp --raw --local 192.168.77.51 --local-port 4207 --to 10.96.1.12:53 --count 3",
    )
    .then(&["n: ip addr del 192.168.77.51/24 dev eth0"]),
    row(
        "bound to 127.0.0.1",
        "n: connect --local 127.0.0.1 --to 10.96.1.11:80 --count 20",
    )
    .differs(LOOPBACK, "EINVAL"),
    row(
        "bound to 127.0.0.1, with route_localnet",
        "n: connect --local 127.0.0.1 --to 10.96.1.11:80 --count 20",
    )
    .after(&["n: echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet"]),
    row(
        "by UDP, to a node port",
        "n: udp --local 127.0.0.1 --to 192.168.77.1:30053 --count 20",
    ),
];

/// The documented difference of loopback's addresses.
const LOOPBACK: &str =
    "A socket of the node that is bound to 127.0.0.1 or `::1`, without `route_localnet`";

/// The documented difference of endpoints on the node itself.
const OWN_ENDPOINT: &str = "Packets of the node that no call of a socket's sent (raw sockets, tunnels of the kernel) to a VIP, \
                            if an endpoint is on the node itself";

/// The documented difference of external IPs.
const EXTERNAL: &str = "Such packets to an external IP";

/// Counts the errors that b1 gets about packets that it has sent: its own conntrack has to know the quoted addresses and
/// ports.
const ERRORS: &[&str] = &[
    "b1: nft add table inet errors",
    "b1: nft 'add chain inet errors in { type filter hook input priority 0; }'",
    "b1: nft add rule inet errors in ct state related counter",
];
const ERROR_CAME: &[&str] = &[
    "b1: nft list chain inet errors in | grep -q 'counter packets [1-9]' || { echo 'no error came to b1' >&2; exit 1; }",
    "b1: nft delete table inet errors",
];

/// A bridge to which no other machine has a route.
pub const BRIDGE: &[&str] = &[
    "n: ip link add br7 type bridge",
    "n: ip addr add 172.30.0.1/24 dev br7",
    "n: ip -6 addr add fd30::1/64 dev br7 nodad",
    "n: ip link set br7 up",
];
const NO_BRIDGE: &[&str] = &["n: ip link del br7"];
