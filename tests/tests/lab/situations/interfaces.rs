//! Rows about the interfaces of people's nodes.

use super::{Row, row};

pub const ROWS: &[Row] = &[
    row(
        "a link that went down and up",
        "x: connect --to 192.168.77.1:30080 --count 20",
    )
    .after(&[
        "n: echo 1 > /proc/sys/net/ipv6/conf/eth0/keep_addr_on_down",
        "n: ip link set eth0 down; ip link set eth0 up",
        ROUTES,
    ]),
    row("by IPv6", "x: connect --to [fd77::1]:30080 --count 20"),
    row(
        "by UDP, from a virtual machine",
        "vm: udp --to 10.96.1.11:53 --count 20",
    ),
    row(
        "a socket of the node",
        "n: connect --to 10.96.1.11:80 --count 20",
    ),
    row(
        "a deprecated address, and one in another network",
        "x: udp --to [fd00:96::111]:53 --count 20",
    )
    .after(&[
        "m: ip -6 addr add fd78::2/64 dev eth0 nodad",
        "n: ip -6 addr add fd78::1/64 dev eth0 nodad",
        "n: ip -6 addr change fd77::1/64 dev eth0 preferred_lft 0 valid_lft forever",
    ])
    .then(&[
        "n: ip -6 addr change fd77::1/64 dev eth0 preferred_lft forever valid_lft forever",
        "n: ip -6 addr del fd78::1/64 dev eth0",
        "m: ip -6 addr del fd78::2/64 dev eth0",
    ])
    .with_source(),
    row(
        "a virtual machine at a bridge of the node",
        "vm: connect --to 10.96.1.11:80 --count 20",
    )
    .after(MACHINES),
    row("by UDP", "vm: udp --to 10.96.1.11:53 --count 20"),
    row("by IPv6", "vm: connect --to [fd00:96::111]:80 --count 20"),
    row(
        "to a node port",
        "vm: connect --to 192.168.77.1:30080 --count 20",
    )
    .then(NO_MACHINES),
    row(
        "an uplink with a macvlan of a pod",
        "x: connect --to 192.168.77.1:30080 --count 20",
    )
    .after(&["n: ip link add link eth0 name mv0 netns @vm type macvlan mode bridge"]),
    row(
        "a raw socket",
        "n: udp --raw --local 192.168.77.1 --local-port 4300 --to 10.96.1.12:53 --count 3",
    )
    .then(&["vm: ip link del mv0"])
    .with_source(),
    row(
        "an uplink that does not forward",
        "x: connect --to 192.168.77.1:30081 --count 1 --timeout-ms 300",
    )
    .after(&["n: echo 0 > /proc/sys/net/ipv4/conf/eth0/forwarding"])
    .fails(),
    row(
        "a socket of the node",
        "n: connect --to 10.96.1.11:80 --count 20",
    ),
    row(
        "a raw socket",
        "n: udp --raw --local 192.168.77.1 --local-port 4301 --to 10.96.1.12:53 --count 1 --timeout-ms 300",
    )
    .with_source()
    .then(&["n: echo 1 > /proc/sys/net/ipv4/conf/eth0/forwarding"]),
    row(
        "an uplink that is a bridge",
        "x: connect --to 192.168.77.1:30081 --count 20",
    )
    .after(BRIDGED),
    row(
        "by IPv6 and UDP",
        "x: udp --to [fd77::1]:30054 --count 20",
    ),
    row(
        "a virtual machine",
        "vm: udp --to 10.96.1.11:53 --count 20",
    ),
    row(
        "a resolver that names the bridge",
        "n: udp --unconnected --pktinfo br0 --to 10.96.1.12:53 --count 3",
    ),
    row(
        "a raw socket",
        "n: udp --raw --local 192.168.77.1 --local-port 4302 --to 10.96.1.12:53 --count 3",
    )
    .with_source(),
    row(
        "several endpoints",
        "n: udp --raw --local 192.168.77.1 --local-port 4303 --to 10.96.1.11:53 --count 3",
    )
    .by_anybody()
    .then(NO_BRIDGED),
];

/// The node's routes, which a link loses when it goes down.
const ROUTES: &str = "n: ip route replace default via 192.168.77.201; ip route replace 10.244.2.0/24 via 192.168.77.2; \
                      ip -6 route replace default via fd77::201; ip -6 route replace fd00:10:244:2::/64 via fd77::2";

/// As libvirt makes it: a bridge of the node with an address and taps. Nothing reads the tap. The machine is at another
/// port, a pair with both ends on the node: a pair with one end elsewhere would count as a pod's.
const MACHINES: &[&str] = &[
    "n: ip link add virbr0 up type bridge",
    "n: ip addr add 192.168.122.1/24 dev virbr0; ip -6 addr add fd22::1/64 dev virbr0 nodad",
    "n: ip tuntap add dev tap0 mode tap; ip link set tap0 up master virbr0",
    "n: ip link add m0 up type veth peer name m1; ip link set m0 master virbr0; ip link set m1 up",
    "n: ip link add link m1 name eth1 netns @vm type macvlan mode bridge",
    "vm: ip link set eth1 up; ip addr add 192.168.122.10/24 dev eth1; ip -6 addr add fd22::10/64 dev eth1 nodad",
    "vm: ip route add 10.96.0.0/12 via 192.168.122.1; ip -6 route add fd00:96::/108 via fd22::1",
    "vm: ip route add 192.168.77.1 via 192.168.122.1",
];
const NO_MACHINES: &[&str] = &["n: ip link del m0; ip link del tap0; ip link del virbr0"];

/// A bridge that has the node's addresses, with the node's link as its port. It takes the link's address.
const BRIDGED: &[&str] = &[
    "n: ip addr flush dev eth0 scope global",
    "n: ip link add br0 up type bridge; ip link set eth0 master br0",
    "n: ip addr add 192.168.77.1/24 dev br0; ip -6 addr add fd77::1/64 dev br0 nodad",
    ROUTES,
];
const NO_BRIDGED: &[&str] = &[
    "n: ip link del br0",
    "n: ip addr add 192.168.77.1/24 dev eth0; ip -6 addr add fd77::1/64 dev eth0 nodad",
    ROUTES,
];
