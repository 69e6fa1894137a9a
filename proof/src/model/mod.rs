//! A second, independent description of the packet path's programs. From the contents of the tables, the state that
//! earlier packets left, and a packet, the model computes the expected verdict, packet, counters and new state.
//!
//! The model is small and slow on purpose: it parses with slices, computes checksums over whole packets, and looks
//! services up in maps. It shares with the programs only the types of the tables and the choice of cells and slots for
//! a flow. Where the programs choose at random (an endpoint, a port), the model reads the choice from the tables and
//! checks that it was allowed.

pub mod begin;
pub mod flows;
pub mod read;
pub mod room;
pub mod sequences;
mod source_routes;
pub mod state;
pub mod table;
pub mod write;

use begin::is_nobody;
use dataplane_common::{
    Addr, Protocol, Reason,
    packet::{FlowKey, Fragment as FirstFragment, FragmentKey, Tick, Translation},
};
use flows::Known;
use kernel::rig::SkbContext;
use read::{Fragment, Headers, Limit, Read};
use state::State;
use write::{Complaint, Ends};

use crate::{
    wire::flags,
    world::{To, Way, World},
};

/// The verdict of a program about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// The packet goes on to the next program, or to the stack.
    Next,
    /// The packet is dropped.
    Drop,
    /// The program sends the packet itself, by a redirect.
    Redirect,
}

impl Verdict {
    /// Converts the return value of a program (`TC_ACT_…` in `include/uapi/linux/pkt_cls.h`).
    pub fn from_number(number: i32) -> Option<Self> {
        match number {
            -1 => Some(Self::Next),
            2 => Some(Self::Drop),
            7 => Some(Self::Redirect),
            _ => None,
        }
    }
}

/// Bytes of data in each segment of a packet that is still to be segmented (GSO).
const SEGMENT: usize = SkbContext::SEGMENT as usize;

/// A packet at an interface.
#[derive(Clone, Debug)]
pub struct Input {
    /// Whether the packet leaves by the interface; otherwise it arrives there.
    pub leaves: bool,
    /// Index of the interface.
    pub ifindex: u32,
    /// Whether the packet is still to be segmented (GSO).
    pub segmented: bool,
    /// The bytes, from the link-layer header on.
    pub frame: Vec<u8>,
}

/// The expected result of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The program's verdict.
    pub verdict: Verdict,
    /// The packet after the program; `None` if it is dropped.
    pub frame: Option<Vec<u8>>,
    /// The packet without the next hop's link-layer addresses, if the program may leave them to the kernel. The program
    /// does so now and then, so that the kernel learns that the neighbour is in use.
    pub unaddressed: Option<Vec<u8>>,
}

/// The random choices of the programs, read from the tables after the program has run.
pub trait Drawn {
    /// Returns the translation of a flow's packets, if the flow is in the table now.
    fn flow(&self, key: &FlowKey) -> Option<Translation>;
}

/// The model: a configured node, and its state.
pub struct Model<'a> {
    /// The node's configuration.
    pub world: &'a World,
    /// The state that the packets so far have left.
    pub state: State,
    /// Number of verdicts by reason.
    pub reasons: [u64; Reason::SLOTS as usize],
    counted: Vec<Reason>,
    guess: usize,
    guesses: usize,
}

/// The time of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The time in conntrack's units.
    pub tick: Tick,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub ns: u64,
}

type Answer = Result<Output, String>;

const NEXT: Output = Output {
    verdict: Verdict::Next,
    frame: None,
    unaddressed: None,
};
const DROP: Output = Output {
    verdict: Verdict::Drop,
    frame: None,
    unaddressed: None,
};

impl<'a> Model<'a> {
    /// Creates a node with an empty state. `cells`: number of cells for flows. `secret`: the hash secret that decides
    /// which cells a flow may use.
    pub fn new(world: &'a World, cells: u32, secret: u64) -> Self {
        Self {
            world,
            state: State::new(cells, secret),
            reasons: [0; Reason::SLOTS as usize],
            counted: Vec::new(),
            guess: 0,
            guesses: 1,
        }
    }

    /// Computes the expected result of a packet. The tables do not always show what the program did: it may have chosen
    /// an endpoint and then refused the packet, or the packet may belong to either of two flows. `guess` selects one of
    /// these possibilities; [`Model::guesses`] returns their number. The call changes the state; the caller then
    /// confirms the change ([`Model::keep`]) or undoes it ([`Model::take_back`]).
    ///
    /// # Errors
    /// If the program's random choice was not allowed.
    pub fn step(&mut self, input: &Input, at: Moment, drawn: &dyn Drawn, guess: usize) -> Answer {
        self.guess = guess;
        self.guesses = 1;
        self.counted.clear();
        let mut output = if input.leaves {
            self.egress(input, at, drawn)?
        } else {
            self.ingress(input, at, drawn)?
        };
        if output.verdict != Verdict::Drop && output.frame.is_none() {
            output.frame = Some(input.frame.clone());
        }
        Ok(output)
    }

    /// Returns the number of possible guesses for the last packet.
    pub fn guesses(&self) -> usize {
        self.guesses
    }

    /// Returns the reasons that the last packet was counted under.
    pub fn counted(&self) -> &[Reason] {
        &self.counted
    }

    /// Confirms the last packet's changes: the program behaved as expected.
    pub fn keep(&mut self) {
        for reason in &self.counted {
            self.reasons[*reason as usize] += 1;
        }
        self.state.keep();
    }

    /// Undoes the last packet's changes.
    pub fn take_back(&mut self) {
        self.state.take_back();
    }

    fn count(&mut self, reason: Reason) {
        self.counted.push(reason);
    }

    fn ingress(&mut self, input: &Input, at: Moment, drawn: &dyn Drawn) -> Answer {
        let interface = &self.world.interfaces[&input.ifindex];
        let to = &input.frame[..6];
        // A packet that a pod sends through a bridge is addressed to the bridge, or to another port of the bridge.
        if to != interface.mac && !interface.pod {
            return Ok(NEXT);
        }
        if interface.pod
            && interface.asked != 0
            && source_routes::is_routed(&input.frame, input.segmented)
        {
            self.count(Reason::SourceRouted);
            return Ok(DROP);
        }
        if to != interface.mac && to[0] & 1 != 0 {
            return Ok(NEXT);
        }
        match read::frame(&input.frame, input.segmented) {
            Read::Other => Ok(NEXT),
            Read::Icmp(headers) => Ok(self.error(input, &headers, at)),
            Read::Flow(headers) if has_flags(&headers) => self.arrived(input, headers, at, drawn),
            Read::Malformed | Read::Flow(_) => {
                self.count(Reason::Malformed);
                Ok(NEXT)
            }
        }
    }

    fn egress(&mut self, input: &Input, at: Moment, drawn: &dyn Drawn) -> Answer {
        Ok(match read::frame(&input.frame, input.segmented) {
            Read::Icmp(headers) => self.error(input, &headers, at),
            Read::Flow(mut headers) if has_flags(&headers) => {
                if !self.follow(&mut headers, false) {
                    return Ok(NEXT);
                }
                if headers.is_syn() {
                    // The endpoint of an earlier flow opens a connection of its own, from its service port.
                    self.forget_answered(&headers.key(), at.tick);
                } else if let Known::Answer(flow) =
                    self.answer(&headers.key(), Some(&headers), at.tick, false)
                {
                    let ends = flow.toward_client();
                    if self.is_protected(&headers, &ends) {
                        return Ok(DROP);
                    }
                    return Ok(up(input, &headers, &ends));
                }
                if let Some(output) = self.of_node(input, &headers, at, drawn)? {
                    return Ok(output);
                }
                // The packet comes from a socket of the node. Its source port may belong to a masqueraded flow to the
                // same endpoint.
                let begins = headers.is_syn() || !headers.is_tcp();
                if begins && self.is_port_taken(&headers.key(), at.tick) {
                    return Ok(self.refuse(input, &headers, Reason::PortTaken));
                }
                self.asks(&headers, at.tick)?;
                NEXT
            }
            _ => NEXT,
        })
    }

    /// Stores the ports of a first fragment, and gives a later fragment the ports of its first fragment. Returns
    /// `false` if they are not known.
    fn follow(&mut self, headers: &mut Headers, forged: bool) -> bool {
        let key = FragmentKey {
            src: headers.src,
            dst: headers.dst,
            identification: headers.identification,
            protocol: Protocol::from_number(headers.protocol),
            padding: 0,
            reserved: 0,
        };
        match headers.fragment {
            Fragment::Whole => true,
            Fragment::First => {
                let [src_port, dst_port] = headers.ports;
                let ports = FirstFragment { src_port, dst_port };
                if !forged && !headers.dst.is_loopback() {
                    self.state.fragments.set(key, ports);
                }
                true
            }
            Fragment::Later => match self.state.fragments.get(&key) {
                Some(first) => {
                    headers.ports = [first.src_port, first.dst_port];
                    true
                }
                None => false,
            },
        }
    }

    /// Handles a TCP or UDP packet that arrives.
    fn arrived(
        &mut self,
        input: &Input,
        mut headers: Headers,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Answer {
        let mut known = Known::No;
        // A forged packet must not end a flow, or store ports for later fragments.
        let ends = |flags: u8| flags & (flags::FIN | flags::RST) != 0;
        let tells = headers.is_syn_ack()
            || headers.flags.is_some_and(ends)
            || headers.fragment == Fragment::First;
        let forged = tells && !self.world.may_tell(input.ifindex, &headers);
        let has_ports = self.follow(&mut headers, forged);
        if has_ports {
            let (key, packet) = (headers.key(), (!forged).then_some(&headers));
            // A SYN without an ACK is never a reply. A SYN with an ACK is looked up as a reply first.
            let may_answer = !headers.is_syn();
            let frontend = self.world.frontend(&headers);
            let to_service = !headers.is_tcp() && frontend.is_some();
            // The packet alone does not show to which of two flows it belongs: as a request, from a client that sends
            // from the port at which it is an endpoint, to a service's port; or as that endpoint's reply to a
            // masqueraded flow that has the same port. The programs try the more likely flow first, by the filter of
            // VIPs.
            let either = may_answer && !headers.is_syn_ack() && self.is_either(&key);
            if either {
                self.guesses = 2;
            }
            if headers.is_syn_ack() || (either && self.guess == 1) {
                known = self.answer(&key, packet, at.tick, true);
            }
            if matches!(known, Known::No) {
                known = self.request(&key, packet, at.tick);
            }
            if may_answer && matches!(known, Known::No) {
                known = self.answer(&key, packet, at.tick, true);
            }
            if matches!(known, Known::No | Known::Foreign) && self.feigns_a_service(input, &headers)
            {
                self.count(Reason::SourceForged);
                return Ok(DROP);
            }
            // A datagram to a service is not looked up as the reply of a flow that is not masqueraded.
            if may_answer && !to_service && matches!(known, Known::No) {
                known = self.answer(&key, packet, at.tick, false);
            }
            // But it may answer a datagram that the node sent from the service's port.
            if to_service && self.world.is_claimed(headers.ports[1]) && matches!(known, Known::No) {
                known = self.asked(&key, packet, at.tick);
            }
        }
        let mut again = None;
        // Whether this may be a connection to an endpoint itself: no flow is known, or the known flow is such a
        // connection.
        let mut direct = has_ports && matches!(known, Known::No);
        if let Known::Request(flow) = &known {
            direct = flow.is_direct();
        }
        match known {
            Known::Foreign => return Ok(NEXT),
            Known::Answer(flow) => return Ok(self.onward(input, &headers, &flow.toward_client())),
            Known::Request(flow) if !headers.is_syn() => {
                let ends = self.toward_endpoint(&flow);
                return Ok(self.onward(input, &headers, &ends));
            }
            // A SYN of a known flow: retransmitted, or of a new connection to the same endpoint.
            Known::Request(flow) => again = Some(flow),
            Known::No => {}
        }
        if headers.is_tcp() && !headers.is_syn() {
            return Ok(NEXT);
        }
        if direct && headers.is_syn() && self.world.frontend(&headers).is_none() {
            return self.pass(input, &headers, again, at, drawn);
        }
        self.begin(input, &headers, again, at, drawn)
    }

    /// Whether a pod sends a datagram from the address and port of a service, without having the address, to a
    /// destination that is not a service.
    fn feigns_a_service(&self, input: &Input, headers: &Headers) -> bool {
        !headers.is_tcp()
            && self.world.interfaces[&input.ifindex].pod
            && self.world.frontend(headers).is_none()
            && self.world.comes_from_service(headers)
            && !self.world.is_right(input.ifindex, headers, true)
    }

    /// Whether an IPsec policy forbids sending a packet on with these ends.
    fn is_protected(&mut self, headers: &Headers, ends: &Ends) -> bool {
        let pairs = [
            (headers.src, headers.dst),
            (headers.src, ends.dst),
            (ends.src, ends.dst),
        ];
        let protects = |(src, dst): &(Addr, Addr)| self.world.protects(*src, *dst);
        let is_protected = pairs.iter().any(protects);
        if is_protected {
            self.count(Reason::IpsecPolicy);
        }
        is_protected
    }

    /// Handles a packet that is longer than the MTU of its route. If the packet may be fragmented, the stack fragments
    /// it. The stack does not accept a packet whose source is one of the node's own addresses; for such packets `stack`
    /// is false.
    fn too_big(&mut self, input: &Input, headers: &Headers, to: &To, stack: bool) -> Option<Fit> {
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

    fn deliver(&mut self, input: &Input, headers: &Headers, ends: &Ends, to: &To) -> Output {
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

    fn refuse(&mut self, input: &Input, headers: &Headers, reason: Reason) -> Output {
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
    fn error(&mut self, input: &Input, outer: &Headers, at: Moment) -> Output {
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
enum Fit {
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
fn up(input: &Input, headers: &Headers, ends: &Ends) -> Output {
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

/// Whether the flags of a TCP packet are present. Always true for UDP, and for later fragments, which have none.
fn has_flags(headers: &Headers) -> bool {
    !headers.is_tcp() || headers.fragment == Fragment::Later || headers.flags.is_some()
}
