//! An answer belongs to the flow that asked, also if a service claims the flow's port.

use super::{Row, row};

pub const ROWS: &[Row] = &[
    row(
        "a socket at a node port asks an endpoint",
        "n: udp --local 192.168.77.1 --local-port 30054 --to 10.244.1.102:5353 --count 3",
    ),
    row(
        "by IPv6",
        "n: udp --local fd77::1 --local-port 30054 --to [fd00:10:244:1::102]:5353 --count 3",
    ),
    row(
        "without a connection",
        "n: udp --unconnected --local 192.168.77.1 --local-port 30054 --to 10.244.1.102:5353 --count 3",
    ),
    row(
        "an endpoint that answers from a socket for each client",
        "n: udp --local 192.168.77.1 --local-port 30054 --to 10.244.1.102:5354 --count 3",
    )
    .beside(&["b2: serve --name b2 --udp-connecting 10.244.1.102:5354"]),
    row(
        "by IPv6, too",
        "n: udp --local fd77::1 --local-port 30054 --to [fd00:10:244:1::102]:5354 --count 3",
    )
    .beside(&["b2: serve --name b2 --udp-connecting [fd00:10:244:1::102]:5354"]),
    row(
        "workers of an endpoint",
        "n: udp --local 192.168.77.1 --local-port 30054 --to 10.244.1.102:5354 --count 3",
    )
    .beside(&["b2: serve --name b2 --threads 4 --udp 10.244.1.102:5354"]),
    row(
        "a process of the node asks another one",
        "n: udp --local 192.168.77.1 --local-port 30054 --to 192.168.77.1:5354 --count 3",
    )
    .beside(&["n: serve --name n --udp 192.168.77.1:5354"]),
    row(
        "a node port is served as before",
        "c: udp --to 192.168.77.1:30054 --count 3",
    ),
    row(
        "an endpoint that has answered a node port asks there",
        "b2: udp --unconnected --local-port 5355 --to 10.96.1.12:53 --count 3",
    ),
];
