//! Services are left to others, such as kube-proxy's rules, before the tables go.

use dataplane_common::tables::{Frontend, FrontendKey, Kind};

use super::{
    super::error::{Doing, Error},
    Tables,
};

impl Tables {
    /// Removes every frontend of a service, so that the programs leave new connections to the kernel. Existing connections go on: the
    /// filter of addresses, the flows and the sockets stay. The caller removes the tables next.
    pub(crate) fn retire(&self) -> Result<(), Error> {
        let all = leaving(self.contents()?.frontends);
        for key in all {
            let removed = self.frontends.remove(&key);
            removed.doing(|| format!("cannot remove {key:?} from FRONTENDS"))?;
        }
        self.grace()
    }
}

/// The frontends of services in the order in which they go: an address before its ports, because the programs refuse its other
/// ports.
fn leaving(frontends: impl IntoIterator<Item = (FrontendKey, Frontend)>) -> Vec<FrontendKey> {
    let all = frontends.into_iter();
    let all = all.filter(|(_, frontend)| frontend.kind() != Kind::NODE_ADDRESS);
    let mut all: Vec<_> = all.map(|(key, _)| key).collect();
    all.sort_by_key(|key| !key.is_address());
    all
}

#[cfg(test)]
mod tests {
    use dataplane_common::{Addr, Port, Protocol};

    use super::*;

    /// If a port's key were removed before its address, a connection to the port would be refused, although another
    /// server has the port.
    #[test]
    fn addresses_leave_before_their_ports() {
        let [vip, node] = [10, 192].map(|first| Addr::from_v4([first, 96, 0, 10]));
        let port = FrontendKey::new(vip, Port::new(80), Protocol::TCP);
        let address = FrontendKey::address(vip);
        let of = |kind| Frontend::new(1, kind);
        let all = [
            (port, of(Kind::CLUSTER_IP)),
            (address, of(Kind::CLUSTER_ADDRESS)),
            (FrontendKey::address(node), of(Kind::NODE_ADDRESS)),
        ];
        assert_eq!(leaving(all), [address, port]);
    }
}
