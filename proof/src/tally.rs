//! Counts the outcomes of many packets.

use std::collections::BTreeMap;

use dataplane_common::Reason;

use crate::{
    compare::Reasons,
    generate::Sort,
    model::{
        Input, Output, Verdict,
        read::{self, Read},
        write,
    },
};

/// The outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The packet passed unchanged.
    LeftAlone,
    /// Translated, and passed to this host's stack.
    Up,
    /// Translated and sent on.
    Onward,
    /// Answered by an ICMP error.
    Answered,
    /// Dropped by the program.
    Dropped,
}

impl Outcome {
    /// The outcome in words, for the report.
    pub fn word(self) -> &'static str {
        match self {
            Self::LeftAlone => "left alone",
            Self::Up => "translated, for this host",
            Self::Onward => "translated, sent on",
            Self::Answered => "answered by an ICMP error",
            Self::Dropped => "dropped",
        }
    }
}

/// The counts of a campaign.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Number of packets.
    pub packets: u64,
    /// Number of other events, for example flows that aged or were removed.
    pub events: u64,
    /// Packets without a complete IP header. Newer kernels refuse to run a program on them in a test run.
    pub too_short: u64,
    /// Packets by sort and outcome.
    pub outcomes: BTreeMap<(Sort, Outcome), u64>,
    /// Verdicts by reason.
    pub reasons: Reasons,
    /// Changed packets whose checksums are correct, computed over the whole packet.
    pub right: u64,
    /// Changed packets with a wrong checksum: the packet arrived with the same error, or in fragments.
    pub wrong_before: u64,
    /// Packets that left through the stack with the same bytes as by the fast path.
    pub through: u64,
    /// Flows in a cell other than their home at the end of an epoch, and flows in a slot other than their home; summed
    /// over all epochs.
    pub elsewhere: [u64; 2],
    /// Flows that were over and were evicted by new flows.
    pub gave_way: u64,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            packets: 0,
            events: 0,
            too_short: 0,
            outcomes: BTreeMap::new(),
            reasons: [0; Reason::SLOTS as usize],
            right: 0,
            wrong_before: 0,
            through: 0,
            elsewhere: [0; 2],
            gave_way: 0,
        }
    }
}

impl Tally {
    pub(crate) fn add(&mut self, sort: Sort, input: &Input, output: &Output, counted: &[Reason]) {
        self.packets += 1;
        let changed = output.frame.as_ref().filter(|frame| **frame != input.frame);
        let errors = [
            Reason::NoEndpoints,
            Reason::PortNotServed,
            Reason::PortTaken,
            Reason::TooBig,
            Reason::TimeExceeded,
        ];
        let outcome = match (output.verdict, changed) {
            (Verdict::Drop, _) => Outcome::Dropped,
            (Verdict::Next, None) => Outcome::LeftAlone,
            (Verdict::Next, Some(_)) => Outcome::Up,
            (Verdict::Redirect, _) if counted.iter().any(|r| errors.contains(r)) => {
                Outcome::Answered
            }
            (Verdict::Redirect, _) => Outcome::Onward,
        };
        *self.outcomes.entry((sort, outcome)).or_default() += 1;
        if let Some(frame) = changed {
            match read::frame(frame, input.segmented) {
                Read::Flow(headers) | Read::Icmp(headers) => {
                    if write::is_right(frame, &headers) {
                        self.right += 1;
                    } else {
                        self.wrong_before += 1;
                    }
                }
                _ => {}
            }
        }
    }
}
