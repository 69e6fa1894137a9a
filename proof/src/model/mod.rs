//! A second, independent description of the packet path's programs. From the contents of the tables, the state that
//! earlier packets left, and a packet, the model computes the expected verdict, packet, counters and new state.
//!
//! The model is small and slow on purpose: it parses with slices, computes checksums over whole packets, and looks
//! services up in maps. It shares with the programs only the types of the tables and the choice of cells and slots for
//! a flow. Where the programs choose at random (an endpoint, a port), the model reads the choice from the tables and
//! checks that it was allowed.

mod begin;
pub mod deliver;
pub mod flows;
mod ports;
pub mod read;
pub mod room;
pub mod sequences;
mod source_routes;
pub mod state;
pub mod table;
pub mod write;

use dataplane_common::{
    Addr, Protocol, Reason,
    packet::{FlowKey, Fragment as FirstFragment, FragmentKey, Tick, Translation},
};
use deliver::up;
use flows::Known;
use kernel::rig::SkbContext;
use read::{Fragment, Headers, Read};
use state::State;
use write::Ends;

use crate::{wire::flags, world::World};

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
}

/// Whether the flags of a TCP packet are present. Always true for UDP, and for later fragments, which have none.
fn has_flags(headers: &Headers) -> bool {
    !headers.is_tcp() || headers.fragment == Fragment::Later || headers.flags.is_some()
}
