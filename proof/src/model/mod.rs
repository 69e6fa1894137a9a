//! What the packet path's programs ought to do, said once more: given the tables' contents, what is
//! remembered of earlier packets, and a packet, which verdict, which packet, which counters, and what
//! is remembered then.
//!
//! Small and slow, on purpose: it parses by slices, computes checksums over whole packets, and looks
//! services up in maps. It shares with the programs the types of the tables, and which cells and slots a
//! flow may have, and nothing else. Where the programs draw by lot (an endpoint, a port), the model asks
//! what was drawn and checks that it was among the choices.

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

/// What a program says of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Whoever comes next decides, or the stack.
    Next,
    /// It is dropped.
    Drop,
    /// It leaves from here.
    Redirect,
}

impl Verdict {
    /// From what a program returns (`TC_ACT_…` in `include/uapi/linux/pkt_cls.h`).
    pub fn from_number(number: i32) -> Option<Self> {
        match number {
            -1 => Some(Self::Next),
            2 => Some(Self::Drop),
            7 => Some(Self::Redirect),
            _ => None,
        }
    }
}

/// How much data each segment has of a packet that is yet to be segmented.
const SEGMENT: usize = SkbContext::SEGMENT as usize;

/// A packet at an interface.
#[derive(Clone, Debug)]
pub struct Input {
    /// Whether it leaves by the interface; otherwise it arrives there.
    pub leaves: bool,
    /// Which interface.
    pub ifindex: u32,
    /// Whether it is several packets, yet to be segmented.
    pub segmented: bool,
    /// From its link-layer header on.
    pub frame: Vec<u8>,
}

/// What a program ought to make of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// What it returns.
    pub verdict: Verdict,
    /// The packet then; of a dropped one nobody sees it.
    pub frame: Option<Vec<u8>>,
    /// The same without the link-layer addresses of its way, if it may be left to the kernel to write them: so now
    /// and then the kernel learns that a neighbour is in use.
    pub unaddressed: Option<Vec<u8>>,
}

/// What was drawn by lot: read from the tables after the program has run.
pub trait Drawn {
    /// What a flow's packets are turned into now.
    fn flow(&self, key: &FlowKey) -> Option<Translation>;
}

/// The model: the node as it is configured, and what it remembers.
pub struct Model<'a> {
    /// The node.
    pub world: &'a World,
    /// What it remembers.
    pub state: State,
    /// Verdicts by reason.
    pub reasons: [u64; Reason::SLOTS as usize],
    counted: Vec<Reason>,
    guess: usize,
    guesses: usize,
}

/// The moment of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// In conntrack's units.
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
    /// A node that remembers nothing, with so many cells for flows, in places by this secret.
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

    /// What ought to become of a packet. `guess`: of several endpoints that may have been drawn
    /// without leaving a trace (the packet was refused), which one to assume, or of two flows that a packet
    /// may be of; [`Model::guesses`] says how many there are. Changes what is remembered: then [`Model::keep`] or
    /// [`Model::take_back`].
    ///
    /// # Errors
    /// What was drawn was not among the choices.
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

    /// How many guesses there are for the last packet.
    pub fn guesses(&self) -> usize {
        self.guesses
    }

    /// The reasons that the last packet was counted by.
    pub fn counted(&self) -> &[Reason] {
        &self.counted
    }

    /// The last packet was as it ought to be.
    pub fn keep(&mut self) {
        for reason in &self.counted {
            self.reasons[*reason as usize] += 1;
        }
        self.state.keep();
    }

    /// Forgets the last packet.
    pub fn take_back(&mut self) {
        self.state.take_back();
    }

    fn count(&mut self, reason: Reason) {
        self.counted.push(reason);
    }

    fn ingress(&mut self, input: &Input, at: Moment, drawn: &dyn Drawn) -> Answer {
        let interface = &self.world.interfaces[&input.ifindex];
        let to = &input.frame[..6];
        // Packets that a pod sends through a bridge are addressed to the bridge or to another port of it.
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
                    // The endpoint of an earlier flow connects from its own port.
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
                // A socket of the node's, from the port of a flow that is masqueraded to the same endpoint.
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

    /// Remembers the ports of a first fragment; gives those of its first to a later one. `false`:
    /// they are not known.
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

    /// A packet of TCP or UDP that arrives.
    fn arrived(
        &mut self,
        input: &Input,
        mut headers: Headers,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Answer {
        let mut known = Known::No;
        // What ends a flow, or has fragments follow it, is not believed if it is forged.
        let ends = |flags: u8| flags & (flags::FIN | flags::RST) != 0;
        let tells = headers.is_syn_ack()
            || headers.flags.is_some_and(ends)
            || headers.fragment == Fragment::First;
        let forged = tells && !self.world.may_tell(input.ifindex, &headers);
        let has_ports = self.follow(&mut headers, forged);
        if has_ports {
            let (key, packet) = (headers.key(), (!forged).then_some(&headers));
            // A SYN on its own never answers anything, and one with an ACK does before all else.
            let may_answer = !headers.is_syn();
            let frontend = self.world.frontend(&headers);
            let to_service = !headers.is_tcp() && frontend.is_some();
            // Of one that could be either, nothing in it tells which it is: somebody connects from the very port at which it
            // is an endpoint, to a port of a service's that a masqueraded flow to that endpoint has. The programs look first
            // for what is likelier, by the filter of VIPs.
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
            if matches!(known, Known::No) && self.feigns_a_service(input, &headers) {
                self.count(Reason::SourceForged);
                return Ok(DROP);
            }
            // A datagram to a service is nobody's own answer.
            if may_answer && !to_service && matches!(known, Known::No) {
                known = self.answer(&key, packet, at.tick, false);
            }
            // But the node may have asked from there.
            if to_service && self.world.is_claimed(headers.ports[1]) && matches!(known, Known::No) {
                known = self.asked(&key, packet, at.tick);
            }
        }
        let mut again = None;
        // Of a connection to an endpoint itself: whether nothing is known of it, or it has another port already.
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
            // A SYN on a flow that is known: the same again, or another connection to the same endpoint.
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

    /// Whether a pod's datagram to no service has a service's address and port as its source, and the pod does not have the
    /// address.
    fn feigns_a_service(&self, input: &Input, headers: &Headers) -> bool {
        !headers.is_tcp()
            && self.world.interfaces[&input.ifindex].pod
            && self.world.frontend(headers).is_none()
            && self.world.comes_from_service(headers)
            && !self.world.is_right(input.ifindex, headers, true)
    }

    /// Whether an IPsec policy forbids that a packet goes on with these ends.
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

    /// What becomes of a packet that is too long for its way. Without "don't fragment" the stack sends it in fragments,
    /// if it takes it in; what has one of the node's own addresses as its source it does not.
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

    /// A packet of a known flow.
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

    /// A packet of the node itself, of a flow: the stack has already sent it.
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

    /// How a translated packet comes to the node itself: a reply from a VIP by the interface to which the routes to the VIP
    /// lead.
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
        // Otherwise the kernel finds the neighbour, and writes its address, on the way out.
        if let Some(neighbour) = way.neighbour {
            // Into a pod packets go past the neighbours.
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

    /// An ICMP packet: an error about a packet of a flow is for whom that packet was from.
    fn error(&mut self, input: &Input, outer: &Headers, at: Moment) -> Output {
        if !input.leaves && is_nobody(outer.src) {
            return NEXT;
        }
        // Nothing counts that is not in the packet.
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
        // An error goes to the sender of the packet that it quotes.
        if quoted.src != outer.dst {
            return NEXT;
        }
        // A packet the other way round would be of the same flow.
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
        let (ends, answers) = match known {
            Known::No | Known::Foreign => return NEXT,
            Known::Answer(flow) => (flow.toward_client(), true),
            Known::Request(flow) => (self.toward_endpoint(&flow), false),
        };
        if self.is_protected(outer, &ends) {
            return DROP;
        }
        if !input.leaves && !self.world.is_right(input.ifindex, outer, false) {
            self.count(Reason::SourceForged);
            return DROP;
        }
        self.count(Reason::ErrorTranslated);
        let mut hops = outer.hops;
        let mut onward = None;
        if !input.leaves {
            match self.world.way(outer.src, ends.dst, input.ifindex).0 {
                To::Here => {}
                To::Onward(way) if hops > 1 && !is_longer(input, outer, way.mtu) => {
                    hops -= 1;
                    onward = Some(way);
                }
                _ => {
                    // No error about an error (RFC 1122 section 3.2.2).
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

/// How a packet is sent on that is too long for its way.
enum Fit {
    /// By the stack.
    Fragments,
    /// Not at all: its sender is told.
    Told(Output),
}

/// Whether a packet, or a segment of it, is longer than this.
fn is_longer(input: &Input, headers: &Headers, mtu: u16) -> bool {
    let segments_of = input.segmented.then_some(SEGMENT);
    headers.longest(&input.frame, segments_of) > usize::from(mtu)
}

/// Translated, and up the stack.
fn up(input: &Input, headers: &Headers, ends: &Ends) -> Output {
    let hops = headers.hops;
    Output {
        verdict: Verdict::Next,
        frame: Some(write::translated(&input.frame, headers, ends, hops)),
        unaddressed: None,
    }
}

/// Tells whoever sent a packet what is wrong with it, if that can be told.
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

/// Whether a TCP packet's flags are there, where it ought to have some.
fn has_flags(headers: &Headers) -> bool {
    !headers.is_tcp() || headers.fragment == Fragment::Later || headers.flags.is_some()
}
