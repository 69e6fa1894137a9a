//! Checks whether the node's pods are where the programs expect them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use admin::{State, api};
use kernel::{interfaces::Interface, sockets::pod_cgroups};
use plan::Served;
use tokio::sync::watch;
use tracing::{debug, warn};

use super::SHARE;
use crate::{astray::Astray, interfaces::PacketSettings, roles::Role};

/// How long to rest between two checks.
const PODS: Duration = Duration::from_mins(1);

/// Checks pods' sockets and the routes to pods.
pub struct Pods {
    state: Arc<State>,
    served: watch::Receiver<Served>,
    /// Decides which interfaces are pods' sides.
    packet: PacketSettings,
    astray: Astray,
    /// When the next check is due.
    next: Instant,
}

impl Pods {
    pub fn new(state: Arc<State>, served: watch::Receiver<Served>, packet: PacketSettings) -> Self {
        Self {
            state,
            served,
            packet,
            astray: Astray::default(),
            next: Instant::now(),
        }
    }

    /// Checks that the sockets of pods are in the cgroup that the programs are attached to, and that the node's routes lead to
    /// its pods, if that is due.
    pub fn check(&mut self) {
        let start = Instant::now();
        if start < self.next {
            return;
        }
        let found = kernel::interfaces::interfaces().and_then(|all| {
            self.look_at_routes(&all);
            let pods = all
                .iter()
                .filter(|i| i.up && self.packet.role(i) == Role::Pod);
            pod_cgroups(&self.state.paths.cgroup, &pods.map(|i| i.index).collect())
        });
        let took = start.elapsed();
        match found {
            Ok(found) => {
                let pods = api::PodCgroups::from(&found);
                debug!(
                    inside = pods.inside,
                    outside = pods.outside,
                    unknown = pods.unknown,
                    ?took,
                    "looked at pods"
                );
                if pods.outside > 0 && self.state.pods().is_none_or(|before| before.outside == 0) {
                    warn!(
                        pods = pods.outside,
                        others = ?pods.others,
                        cgroup = %self.state.paths.cgroup.display(),
                        "pods have their sockets in other cgroups than kernel.cgroup: they are served by packets only"
                    );
                }
                self.state.pods_seen(pods);
            }
            Err(error) => debug!("cannot look at where pods' sockets are: {error}"),
        }
        self.next = start + PODS.max(took * SHARE * 10);
    }

    /// Checks whether the node's routes lead to its own pods by uplinks.
    fn look_at_routes(&mut self, interfaces: &[Interface]) {
        let services = self.served.borrow().snapshot.services.clone();
        let ports = services.values().flat_map(|service| &service.ports);
        let endpoints = ports.flat_map(|port| &port.endpoints);
        let pods = endpoints.filter(|e| e.local && e.ready).map(|e| e.addr);
        let leaves_by = |addr| kernel::interfaces::leaves_by(addr).ok().flatten();
        let led = self
            .astray
            .look(&self.packet, interfaces, &pods.collect(), leaves_by);
        if self.state.pods_led_elsewhere(led.clone())
            && let Some(text) = led
        {
            warn!("packet path: {text}");
        }
    }
}
