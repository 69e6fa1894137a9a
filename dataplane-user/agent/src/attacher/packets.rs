//! The packet path's part of the thread's work: IPsec policies, what other programs have put on interfaces, and the interfaces.

use std::time::{Duration, Instant};

use admin::api::Gravity;
use dataplane_common::packet::{Iface, PacketConfig};
use kernel::namespaces::processor_time;
use tracing::{error, info, warn};

use super::Worker;
use crate::{Event, LOOK, RETRY, addresses, due::NEVER, network::network};

/// How often to look for programs and rules of others on the way out of pods' interfaces.
const EGRESS: Duration = Duration::from_millis(250);

impl Worker {
    /// Makes the packet path refuse packets that the present IPsec policies protect. The next look at the whole network
    /// reports problems.
    pub(super) fn policies(&mut self) {
        let start = Instant::now();
        if self.packet.attach.is_some() {
            let set = kernel::routing::ipsec_policies()
                .and_then(|policies| self.kernel.set_ipsec_policies(&policies));
            if let Err(error) = set {
                warn!("cannot tell the packet path of IPsec policies, trying again: {error}");
            }
        }
        // Packets leave in clear during the rest, so the rest is no longer than the work.
        self.policies.done_resting(1, start, NEVER);
    }

    /// Looks for programs and rules of others on the way out of pods' interfaces, and for filters on the way in of any.
    /// Until the packet path knows them, packets bypass them.
    pub(super) fn egress(&mut self) {
        let start = Instant::now();
        let bpffs = &self.state.paths.bpffs;
        let others = kernel::tc::egress_of_others(bpffs, &self.peers);
        let attached = self.attached.iter().copied();
        let is_filtered_anew = self.path.look_at_filters(bpffs, attached);
        // If the kernel does not return them, the look at the whole network reports the error.
        if others.is_ok_and(|others| others == self.others)
            && is_filtered_anew.is_ok_and(|new| !new)
        {
            self.egress.done(start, EGRESS);
            return;
        }
        self.network();
        self.egress.done_resting(1, start, EGRESS);
    }

    /// Brings the packet path in line with the present interfaces, and notifies the agent if the node's addresses have
    /// changed.
    pub(super) fn network(&mut self) {
        let (start, worked) = (Instant::now(), processor_time());
        let mut patience = LOOK;
        let settings = &self.packet;
        let result = kernel::interfaces::interfaces().and_then(|all| {
            let earlier = self.history.look(&all, start);
            patience = earlier.settled_in.unwrap_or(patience);
            let mut network = network(settings, &all, &earlier)?;
            let attached = network.interfaces.iter();
            let attached = attached.filter(|(_, interface)| interface.flags & Iface::ATTACHED != 0);
            self.attached = attached.map(|(index, _)| *index).collect();
            let attached = self.attached.iter().copied();
            self.path
                .look_at_filters(&self.state.paths.bpffs, attached)?;
            network.config.flags |= self.path.choose(&network.policies)?;
            self.history.note(&network);
            let flags = network
                .interfaces
                .iter()
                .map(|(index, i)| (*index, i.flags));
            let peers = flags.filter(|(_, flags)| flags & Iface::PEER != 0);
            self.peers = peers.map(|(index, _)| index).collect();
            self.others = kernel::tc::egress_of_others(&self.state.paths.bpffs, &self.peers)?;
            for index in self.others.keys() {
                if let Some(interface) = network.interfaces.get_mut(index) {
                    interface.flags &= !Iface::PEER;
                }
            }
            let refused = self.kernel.set_network(&network)?;
            let refused = refused.into_iter().map(|text| (Gravity::Node, text));
            let unread = self.path.problem().into_iter().collect();
            let said = [
                settings.left_out(&all),
                settings.loosely_checked(&all),
                unread,
            ];
            let said = said.into_iter().flatten();
            let said = said.map(|text| (Gravity::Warning, text));
            Ok((network, refused.chain(said).collect::<Vec<_>>()))
        });
        let problems = match result {
            Ok((network, problems)) => {
                self.state.through_stack(self.path.because());
                let on = |i: &&kernel::packet::NetworkInterface| i.flags & Iface::ATTACHED != 0;
                let on = network.interfaces.values().filter(on).count();
                let kept = network.config.flags & PacketConfig::WAYS_BY_ADDRESS != 0;
                let protecting = network.policies.iter().filter(|p| p.protects).count();
                if std::mem::replace(&mut self.protecting, protecting) != protecting {
                    warn!(
                        policies = protecting,
                        "IPsec: services' flows that the node's policies cover are refused"
                    );
                }
                if self.interfaces.replace((on, kept)) != Some((on, kept))
                    && let Some(hook) = self.kernel.hook()
                {
                    info!(
                        interfaces = on,
                        by = hook.word(),
                        ways_kept = kept,
                        "the packet path's interfaces"
                    );
                }
                problems
            }
            Err(error) => {
                // Nothing has changed, also for flows that an IPsec policy covers since.
                patience = RETRY;
                vec![(Gravity::Node, error.to_string())]
            }
        };
        if problems != self.problems {
            for (_, problem) in &problems {
                error!("packet path: {problem}");
            }
            self.state.network_problems(&problems);
            self.problems = problems;
        }
        match addresses::look() {
            Ok(seen) => {
                if self.addresses.as_ref().is_some_and(|known| *known != seen) {
                    // Fails only if the agent ends anyway.
                    let _ = self.events.send(Event::Addresses);
                }
                self.addresses = Some(seen);
            }
            Err(error) => warn!("cannot find out the node's addresses: {error}"),
        }
        // Another program may have removed a program of ours without an event.
        let took = processor_time().saturating_sub(worked);
        self.network.done_in(took, patience);
    }
}
