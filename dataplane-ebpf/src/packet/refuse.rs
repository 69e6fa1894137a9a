//! Refused packets: the reason is counted and reported, and the sender gets an error if iptables' `REJECT` would send one.

use dataplane_common::{Reason, first::Action, tables::Endpoint};

use super::{error::Complaint, events, scratch::Scratch, skb::Skb};
use crate::select::{count, count_pool};

/// Takes note of the reason, for [`refuse`]: the pool is that of [`Scratch::index`].
#[inline(always)]
pub fn because(s: &mut Scratch, reason: Reason) -> Action {
    s.refusal = reason;
    Action::Refuse
}

/// Refuses a packet: [`Action::Complain`] or [`Action::Drop`].
#[inline(never)]
pub fn refuse(skb: Skb, s: &mut Scratch) -> Action {
    let reason = s.refusal;
    count(reason);
    // The other reasons are not about missing endpoints: a pool's counter would show them as connections.
    if reason == Reason::NoEndpoints
        || reason == Reason::NoLocalEndpoint
        || reason == Reason::PortNotServed
    {
        count_pool(s.index, reason);
    }
    events::report(skb, &s.packet, reason, s.index, &Endpoint::NONE);
    if reason == Reason::NoEndpoints
        || reason == Reason::PortNotServed
        || reason == Reason::PortTaken
        || reason == Reason::EgressDenied
    {
        s.complaint = Complaint::PORT_UNREACHABLE;
        Action::Complain
    } else if reason == Reason::TooBig {
        s.complaint = Complaint::too_big(s.way.mtu);
        Action::Complain
    } else {
        Action::Drop
    }
}
