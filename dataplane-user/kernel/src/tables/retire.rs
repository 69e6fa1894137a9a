//! Frontends go: those of services that are gone, or all, before the tables go and services are left to others, such as
//! kube-proxy's rules.

use dataplane_common::tables::{Frontend, FrontendKey, Kind};

use super::{
    super::error::{Doing, Error},
    Tables,
};

impl Tables {
    /// Removes existing frontends, which have these values.
    pub(crate) fn remove_frontends(
        &mut self,
        keys: &[FrontendKey],
        frontends: &[Frontend],
    ) -> Result<(), Error> {
        self.frontends
            .remove_all(keys)
            .doing(|| format!("cannot remove {} entries from FRONTENDS", keys.len()))?;
        for (key, frontend) in keys.iter().zip(frontends) {
            self.vips.remove(key, *frontend);
        }
        Ok(())
    }

    /// Removes every frontend of a service, so that the programs leave new connections to the kernel. Existing connections go on: the
    /// filter of addresses, the flows and the sockets stay. The caller removes the tables next.
    pub(crate) fn retire(&self) -> Result<(), Error> {
        let all = leaving(self.contents()?.frontends);
        let removed = self.frontends.remove_all(&all);
        removed.doing(|| format!("cannot remove {} entries from FRONTENDS", all.len()))?;
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
