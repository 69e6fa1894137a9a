//! The pool that answers the first packet of a flow.

use dataplane_common::{
    Port, Reason, decide,
    first::{self, Action},
    packet::Iface,
    tables::{Kind, Pool},
};

use super::{
    parse::LATER,
    refuse, reverse, route,
    scratch::{MASQUERADE, Scratch},
    skb::Skb,
    sources, through,
};
use crate::{
    select::{Live, count},
    tables::PACKET_CONFIG,
};

/// Finds the pool that answers the packet, and decides whether to masquerade the flow. An action: no pool answers it.
#[inline(never)]
pub fn find(skb: Skb, s: &mut Scratch) -> Option<Action> {
    let key = &s.packet.key;
    if key.src.is_nobody() {
        return Some(Action::LeaveAlone);
    }
    if s.packet.fragment == LATER && key.dst_port == Port::ANY {
        // At a node's address the fragment may belong to any other flow; at a cluster IP it cannot.
        if s.frontend.kind() != Kind::CLUSTER_ADDRESS {
            return Some(Action::LeaveAlone);
        }
        count(Reason::UnknownFragment);
        return Some(Action::Drop);
    }
    let frontend = s.frontend;
    let decision = first::decide(&mut Arrived { skb, s }, frontend);
    s.index = decision.pool;
    if decision.reason != Reason::Translated {
        return Some(refuse::because(s, decision.reason));
    }
    s.flow.came_by = if s.way.of_node != 0 {
        skb.ifindex()
    } else {
        uplink(skb) | through::path_of_new_flows()
    };
    s.masquerade = u32::from(decision.masquerade) * MASQUERADE;
    None
}

/// A packet that begins a flow, as the shared decision sees it.
struct Arrived<'a> {
    skb: Skb,
    s: &'a mut Scratch,
}

impl first::Packet for Arrived<'_> {
    #[inline(always)]
    fn config(&self) -> u32 {
        match PACKET_CONFIG.get(0) {
            Some(config) => config.flags,
            None => 0,
        }
    }

    #[inline(always)]
    fn is_of_node(&self) -> bool {
        self.s.way.of_node != 0
    }

    #[inline(always)]
    fn has_right_source(&mut self) -> bool {
        reverse::is_right(self.skb, &self.s.packet, &mut self.s.way, reverse::BEGINS)
    }

    #[inline(always)]
    fn is_by_pods_interface(&self) -> bool {
        route::interface(self.skb.ifindex()).flags & Iface::LOCAL != 0
    }

    #[inline(always)]
    fn is_source_in(&self, set: u32) -> bool {
        sources::contains(set, self.s.packet.key.src)
    }

    #[inline(always)]
    fn read_pool(&mut self, index: u32) -> bool {
        let Some(pool) = decide::Tables::pool(&Live, index) else {
            return false;
        };
        self.s.pool = pool;
        true
    }

    #[inline(always)]
    fn pool(&self) -> &Pool {
        &self.s.pool
    }
}

/// The uplink by which a packet came; 0 for a pod's interface.
#[inline(always)]
fn uplink(skb: Skb) -> u32 {
    let came_by = skb.ifindex();
    if route::interface(came_by).flags & Iface::LOCAL != 0 {
        0
    } else {
        came_by
    }
}
