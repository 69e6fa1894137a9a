//! The encrypted connections of workloads to their peers.

use std::collections::BTreeSet;

use model::WorkloadName;
use proxy::Observer;
use relay::{Direction, TunnelView};
use serde::{Deserialize, Serialize};

/// The maximum number of identities that are named of a workload's peers.
const NAMED: usize = 8;

/// The established tunnels of a workload, a part of `GET /status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadTunnels {
    /// Its namespace and name.
    pub workload: String,
    /// The number of tunnels into the workload.
    pub inbound: u64,
    /// The number of tunnels out of it.
    pub outbound: u64,
    /// The number of connections in these tunnels.
    pub connections: u64,
    /// The identities of its peers: the first ones by name.
    pub peers: Vec<String>,
    /// The number of its peers' further identities.
    pub further_peers: u64,
}

/// Returns the tunnels of the workloads that have some.
pub fn list(proxy: &Observer) -> Vec<WorkloadTunnels> {
    let all = proxy.tunnels().into_iter();
    all.map(|(name, tunnels)| of(&name, &tunnels)).collect()
}

fn of(workload: &WorkloadName, tunnels: &[TunnelView]) -> WorkloadTunnels {
    let is_inbound = |tunnel: &&TunnelView| tunnel.direction == Direction::Inbound;
    let inbound = tunnels.iter().filter(is_inbound).count();
    let connections: usize = tunnels.iter().map(|tunnel| tunnel.streams).sum();
    let peers: BTreeSet<_> = tunnels.iter().map(|tunnel| &tunnel.peer).collect();
    WorkloadTunnels {
        workload: workload.to_string(),
        inbound: inbound as u64,
        outbound: (tunnels.len() - inbound) as u64,
        connections: connections as u64,
        further_peers: peers.len().saturating_sub(NAMED) as u64,
        peers: peers
            .into_iter()
            .take(NAMED)
            .map(ToString::to_string)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use model::Identity;

    use super::*;

    #[test]
    fn a_workload_has_its_tunnels_by_direction_and_its_first_peers() {
        let tunnel = |direction, account: &str, streams| TunnelView {
            attachment: 1,
            direction,
            peer: Identity::new("cluster.local", "shop", account).unwrap(),
            address: "10.0.0.1:15008".parse().unwrap(),
            streams,
        };
        let (inbound, outbound) = (Direction::Inbound, Direction::Outbound);
        let mut tunnels = vec![
            tunnel(inbound, "b", 3),
            tunnel(inbound, "b", 4),
            tunnel(outbound, "a", 0),
        ];
        let name = WorkloadName::new("shop", "web");
        let wanted = WorkloadTunnels {
            workload: "shop/web".to_owned(),
            inbound: 2,
            outbound: 1,
            connections: 7,
            peers: ["a", "b"]
                .map(|account| format!("spiffe://cluster.local/ns/shop/sa/{account}"))
                .into(),
            further_peers: 0,
        };
        assert_eq!(of(&name, &tunnels), wanted);
        tunnels.extend((0..10).map(|number| tunnel(outbound, &format!("c{number}"), 1)));
        let further = of(&name, &tunnels);
        assert_eq!((further.peers.len(), further.further_peers), (8, 4));
        assert_eq!((further.inbound, further.outbound), (2, 11));
    }
}
