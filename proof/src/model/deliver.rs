//! What follows a decision: a translated packet is delivered, a refused packet may be answered, and errors about known
//! flows are translated.

use dataplane_common::{Addr, Reason, packet::FlowKey};

use super::{
    DROP, Input, Model, Moment, NEXT, Output, SEGMENT, Verdict,
    flows::Known,
    read::{self, Fragment, Headers, Limit, Read},
    write::{self, Complaint, Ends},
};
use crate::world::{To, Way};

impl Model<'_> {
    /// Handles a packet that is longer than the MTU of its route. If the packet may be fragmented, the stack fragments
    /// it. The stack does not accept a packet whose source is one of the node's own addresses; for such packets `stack`
    /// is false.
    pub(super) fn too_big(
        &mut self,
        input: &Input,
        headers: &Headers,
        to: &To,
        stack: bool,
    ) -> Option<Fit> {
        let To::Onward(Way { mtu, .. }) = to else {
            return None;
        };
        if !is_longer(input, headers, *mtu) {
            return None;
        }
        if headers.may_be_fragmented && stack {
            return Some(Fit::Fragments);
        }
        self.count(Reason::TooBig);
        let told = complain(input, headers, Complaint::TooBig(*mtu));
        Some(Fit::Told(told))
    }

    /// Sends a packet of a known flow to its other end.
    pub(super) fn onward(&mut self, input: &Input, headers: &Headers, ends: &Ends) -> Output {
        if !self.world.is_right(input.ifindex, headers, false) {
            self.count(Reason::SourceForged);
            return DROP;
        }
        let (to, _) = self.world.way(headers.src, ends.dst, input.ifindex);
        if to == To::Nowhere {
            self.count(Reason::NoRoute);
            return DROP;
        }
        self.deliver(input, headers, ends, &to)
    }

    /// Sends a packet that the node itself has sent: the stack has already routed it.
    fn deliver_of_node(
        &mut self,
        input: &Input,
        headers: &Headers,
        ends: &Ends,
        to: &To,
    ) -> Output {
        let To::Onward(way) = to else {
            self.count(Reason::NoRoute);
            return DROP;
        };
        if self.is_protected(headers, ends) {
            return DROP;
        }
        if let Some(Fit::Told(output)) = self.too_big(input, headers, to, false) {
            return output;
        }
        let frame = write::translated(&input.frame, headers, ends, headers.hops);
        self.send(frame, way)
    }

    pub(super) fn deliver(
        &mut self,
        input: &Input,
        headers: &Headers,
        ends: &Ends,
        to: &To,
    ) -> Output {
        if input.leaves {
            return self.deliver_of_node(input, headers, ends, to);
        }
        if self.is_protected(headers, ends) {
            return DROP;
        }
        match self.too_big(input, headers, to, ends.src == headers.src) {
            Some(Fit::Told(output)) => return output,
            Some(Fit::Fragments) => return up(input, headers, ends),
            None => {}
        }
        let To::Onward(way) = to else {
            let mut output = up(input, headers, ends);
            output.verdict = self.here(input, headers, ends);
            return output;
        };
        if headers.hops <= 1 {
            self.count(Reason::TimeExceeded);
            return complain(input, headers, Complaint::TimeExceeded);
        }
        let frame = write::translated(&input.frame, headers, ends, headers.hops - 1);
        self.send(frame, way)
    }

    /// Returns how a translated packet for the node itself reaches the stack. A reply from a VIP must arrive on the
    /// interface of the route to the VIP, so the program redirects it there.
    fn here(&self, input: &Input, headers: &Headers, ends: &Ends) -> Verdict {
        if ends.src == headers.src || input.ifindex == self.world.interface("eth0").0 {
            Verdict::Next
        } else {
            Verdict::Redirect
        }
    }

    fn send(&self, mut frame: Vec<u8>, way: &Way) -> Output {
        let interface = &self.world.interfaces[&way.ifindex];
        let mut unaddressed = None;
        // If the program does not know the neighbour, the kernel looks it up and writes its address on the way out.
        if let Some(neighbour) = way.neighbour {
            // Packets into a pod bypass the neighbour table.
            unaddressed = (!interface.pod).then(|| frame.clone());
            write::link(&mut frame, neighbour, interface.mac);
        }
        Output {
            verdict: Verdict::Redirect,
            frame: Some(frame),
            unaddressed,
        }
    }

    pub(super) fn refuse(&mut self, input: &Input, headers: &Headers, reason: Reason) -> Output {
        self.count(reason);
        let told = [
            Reason::NoEndpoints,
            Reason::PortNotServed,
            Reason::PortTaken,
        ];
        if told.contains(&reason) {
            complain(input, headers, Complaint::PortUnreachable)
        } else {
            DROP
        }
    }

    /// Handles an ICMP packet. An error about a packet of a flow goes to the sender of that packet.
    pub(super) fn error(&mut self, input: &Input, outer: &Headers, at: Moment) -> Output {
        if !input.leaves && is_nobody(outer.src) {
            return NEXT;
        }
        // Bytes behind the end of the IP packet do not count.
        let packet = &input.frame[..outer.end];
        let kinds: &[u8] = if outer.v4 {
            &[3, 11, 12]
        } else {
            &[1, 2, 3, 4]
        };
        if !packet
            .get(outer.l4)
            .is_some_and(|kind| kinds.contains(kind))
        {
            return NEXT;
        }
        let quoted = if outer.v4 {
            read::v4(packet, outer.l4 + 8, Limit::None)
        } else {
            read::v6(packet, outer.l4 + 8, Limit::None)
        };
        let Some(Read::Flow(quoted)) = quoted else {
            return NEXT;
        };
        if quoted.fragment == Fragment::Later {
            return NEXT;
        }
        // An ICMP error must be addressed to the sender of the packet that it quotes.
        if quoted.src != outer.dst {
            return NEXT;
        }
        // The key of a packet in the opposite direction, which the sender of the error could send on the same flow.
        let sent = quoted.key();
        let back = FlowKey::new(
            sent.dst,
            sent.dst_port,
            sent.src,
            sent.src_port,
            sent.protocol,
        );
        let mut known = Known::No;
        if !input.leaves {
            known = self.request(&back, None, at.tick);
            if matches!(known, Known::No) {
                known = self.answer(&back, None, at.tick, true);
            }
        }
        if matches!(known, Known::No) {
            known = self.answer(&back, None, at.tick, false);
        }
        // The node's packets to a pod's interface are for this pod: none is translated.
        let of_node = input.leaves && !self.world.interfaces[&input.ifindex].pod;
        if of_node && matches!(known, Known::No) {
            known = self.request(&back, None, at.tick);
        }
        let (ends, answers) = match known {
            Known::No | Known::Foreign => return NEXT,
            Known::Answer(flow) => (flow.toward_client(), true),
            Known::Request(flow) => (self.toward_endpoint(&flow), false),
        };
        if self.is_protected(outer, &ends) {
            return DROP;
        }
        let is_routed = !input.leaves || !answers;
        if is_routed && !self.world.is_right(input.ifindex, outer, false) {
            self.count(Reason::SourceForged);
            return DROP;
        }
        self.count(Reason::ErrorTranslated);
        let mut hops = outer.hops;
        let mut onward = None;
        if is_routed {
            match self.world.way(outer.src, ends.dst, input.ifindex).0 {
                To::Here if !input.leaves => {}
                To::Onward(way)
                    if (input.leaves || hops > 1) && !is_longer(input, outer, way.mtu) =>
                {
                    hops -= u8::from(!input.leaves);
                    onward = Some(way);
                }
                _ => {
                    // ICMP errors are never answered by an ICMP error (RFC 1122 section 3.2.2).
                    self.count(Reason::NoRoute);
                    return DROP;
                }
            }
        }
        let frame = write::error_translated(&input.frame, outer, &quoted, &ends, hops);
        match onward {
            Some(way) => self.send(frame, &way),
            None => Output {
                verdict: if answers && !input.leaves {
                    self.here(input, outer, &ends)
                } else {
                    Verdict::Next
                },
                frame: Some(frame),
                unaddressed: None,
            },
        }
    }
}

/// The handling of a packet that is longer than the MTU of its route.
pub(super) enum Fit {
    /// The stack sends the packet in fragments.
    Fragments,
    /// The packet is dropped, and its sender gets an ICMP error.
    Told(Output),
}

/// Whether the packet, or one of its segments, is longer than the MTU.
fn is_longer(input: &Input, headers: &Headers, mtu: u16) -> bool {
    let segments_of = input.segmented.then_some(SEGMENT);
    headers.longest(&input.frame, segments_of) > usize::from(mtu)
}

/// Translates the packet and passes it up the stack.
pub(super) fn up(input: &Input, headers: &Headers, ends: &Ends) -> Output {
    let hops = headers.hops;
    Output {
        verdict: Verdict::Next,
        frame: Some(write::translated(&input.frame, headers, ends, hops)),
        unaddressed: None,
    }
}

/// Answers the sender with an ICMP error. Drops the packet if its headers do not allow an answer.
fn complain(input: &Input, headers: &Headers, complaint: Complaint) -> Output {
    if !headers.is_plain() {
        return DROP;
    }
    Output {
        verdict: Verdict::Redirect,
        frame: Some(write::complaint(&input.frame, headers, complaint)),
        unaddressed: None,
    }
}

/// Whether an address never belongs to a single host: "this host", loopback, multicast, and reserved addresses.
pub fn is_nobody(addr: Addr) -> bool {
    let octets = addr.octets();
    if addr.is_v4() {
        matches!(octets[12], 0 | 127 | 224..)
    } else {
        octets[0] == 0xff || (octets[..15] == [0; 15] && octets[15] <= 1)
    }
}
