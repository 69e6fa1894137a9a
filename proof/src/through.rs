//! The path through the stack, compared with the fast path: both must send the same bytes.
//!
//! The comparison needs no second model. When the programs have sent a packet on by the fast path, second tables get the packet's
//! flow, as a flow on the path through the stack. There the program on the way in gives the packet its new destination. The work
//! of the stack is done here: it takes one from the hops that are left. The program on the way out translates the rest.

use anyhow::Result;
use dataplane_common::packet::{FlowKey, PortKey};
use dataplane_tests::Lab;
use kernel::{
    rig::{Rig, SkbContext},
    tc::Direction,
};

use crate::{
    compare::{Bytes, empty, run},
    model::{
        Input, Output, Verdict,
        read::{self, Fragment, Headers, Read},
    },
    wire::LINK,
    world::{To, World, is_own},
};

/// The programs with second tables.
pub struct Stack(Rig);

impl Stack {
    /// Loads the programs once more, with the same services.
    pub fn new(lab: &Lab, cells: u32) -> Result<Self> {
        let mut rig = Rig::new(&lab.bpffs()?.join("stack"), cells)?;
        World::new(lab, &mut rig)?;
        rig.direct.expect();
        Ok(Self(rig))
    }

    /// Gives the programs the configuration of the node, with the path through the stack.
    pub fn configure(&mut self, world: &World) -> Result<()> {
        world.configure_through_stack(&mut self.0)?;
        self.forget_ways()
    }

    /// As [`Rig::forget_ways`].
    pub fn forget_ways(&self) -> Result<()> {
        Ok(self.0.forget_ways()?)
    }

    /// Sends a packet through the stack that `fast` has just processed. Returns the difference between the bytes that leave, if
    /// there is one; `None`: the fast path has not sent the packet on, or it is not one of a flow.
    pub fn compare(
        &self,
        fast: &Rig,
        world: &World,
        input: &Input,
        output: &Output,
    ) -> Result<Option<Result<(), String>>> {
        let (Some(wanted), Some(before)) = (sent_on(input, output), flow(&input.frame, input))
        else {
            return Ok(None);
        };
        // A second SYN to a service that is gone ends the flow.
        let ends = before.is_syn() && world.frontend(&before).is_none();
        if ends || !self.learn(fast, &before.key())? {
            return Ok(None);
        }
        let half = run(&self.0, input)?;
        let frame = half.frame.unwrap_or_default();
        let differs = |what: &str, found: &[u8]| {
            let (half, found, wanted) = (Bytes(&frame), Bytes(found), Bytes(wanted));
            let what = format!(
                "through the stack: {what}:\n    {found}\nnot {wanted}\nin the stack {half}"
            );
            Ok(Some(Err(what)))
        };
        if half.verdict != Verdict::Next {
            return differs(&format!("{:?} on the way in", half.verdict), &frame);
        }
        let Some(headers) = flow(&frame, input) else {
            return differs("it is no packet of TCP or UDP any more", &frame);
        };
        // Requests and answers of a client that is its own endpoint, at one port, would look alike. There is no such flow.
        if headers.src == headers.dst && headers.ports[0] == headers.ports[1] {
            return Ok(None);
        }
        let (To::Onward(way), _) = world.way(headers.src, headers.dst, input.ifindex) else {
            return differs("there is no route", &frame);
        };
        let mut leaves = frame.clone();
        leaves[..6].copy_from_slice(&world.interfaces[&way.ifindex].mac);
        forward(&mut leaves, &headers);
        let context = SkbContext::new(way.ifindex, u32::from(input.segmented) * 2);
        let context = context.forwarded_from(input.ifindex);
        let mut found = vec![0; leaves.len() + 256];
        let ran = self
            .0
            .run(Direction::Egress, &context, &leaves, &mut found)?;
        found.truncate(ran.len);
        if Verdict::from_number(ran.verdict) != Some(Verdict::Next) {
            return differs(&format!("verdict {} on the way out", ran.verdict), &found);
        }
        if packet(&found, &headers) != packet(wanted, &headers) {
            return differs("other bytes leave", &found);
        }
        Ok(Some(Ok(())))
    }

    /// Has the tables know only the flow of a packet. Returns `false` if there is none.
    fn learn(&self, fast: &Rig, key: &FlowKey) -> Result<bool> {
        let (from, to) = (&fast.conntrack, &self.0.conntrack);
        empty(to)?;
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        let keys = [Some(*key), from.by_client(key), from.by_node(&port)];
        let mut is_known = false;
        for key in keys.into_iter().flatten() {
            if let Some(translation) = from.get(&key)
                && to.add(&key, &translation)
            {
                if let Some(sequences) = from.sequences(&key) {
                    to.set_sequences(&key, sequences);
                }
                to.set_through(&key);
                is_known = true;
            }
        }
        Ok(is_known)
    }
}

/// The headers of a packet of TCP or UDP that has ports.
fn flow(frame: &[u8], input: &Input) -> Option<Headers> {
    match read::frame(frame, input.segmented) {
        Read::Flow(headers) if headers.fragment != Fragment::Later => Some(headers),
        _ => None,
    }
}

/// Returns the frame that the fast path has sent on from an arriving one: to another host, and not back.
fn sent_on<'a>(input: &Input, output: &'a Output) -> Option<&'a [u8]> {
    let frame = output.frame.as_deref()?;
    if input.leaves || output.verdict != Verdict::Redirect || frame.len() != input.frame.len() {
        return None;
    }
    let (before, after) = (flow(&input.frame, input)?, flow(frame, input)?);
    let goes_back = after.src == before.dst && after.dst == before.src;
    let is_forwarded = after.hops.checked_add(1) == Some(before.hops);
    (is_forwarded && !goes_back && !is_own(after.dst)).then_some(frame)
}

/// Takes one from the hops that are left, as a router does (`ip_decrease_ttl` in `include/net/ip.h`).
fn forward(frame: &mut [u8], headers: &Headers) {
    let at = headers.l3;
    if !headers.v4 {
        frame[at + 7] = frame[at + 7].wrapping_sub(1);
        return;
    }
    frame[at + 8] = frame[at + 8].wrapping_sub(1);
    let sum = u16::from_be_bytes([frame[at + 10], frame[at + 11]]);
    let (mut sum, carry) = sum.overflowing_add(0x0100);
    if carry {
        sum += 1;
    }
    frame[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
}

/// The packet without its link-layer header. Both forms of zero in an IPv4 header's checksum are the same.
fn packet(frame: &[u8], headers: &Headers) -> Vec<u8> {
    let mut packet = frame.get(LINK..).unwrap_or_default().to_vec();
    if headers.v4
        && let Some(sum) = packet.get_mut(10..12)
        && sum == [0xff; 2]
    {
        sum.fill(0);
    }
    packet
}
