//! Mesh capture: a workload's connections go to its proxy, which learns where they were to go.

pub mod assign;
pub mod inbound;
pub mod meters;
pub mod origin;
pub mod outbound;
pub mod sockopt;
pub mod states;

use aya_ebpf::maps::lpm_trie::Key;
use dataplane_common::{
    Addr,
    capture::{self, CaptureConfig, RuleKey},
};

use crate::tables::{CAPTURE, RANGES, RULES, Range};

/// The kernel's own tables.
struct Live;

impl capture::Rules for Live {
    #[inline(always)]
    fn rule(&self, key: &RuleKey) -> u32 {
        RULES.get_ptr(key).map_or(0, |said| {
            // SAFETY: one aligned word, written once before its key can be asked for.
            unsafe { *said }
        })
    }

    #[inline(always)]
    fn range(&self, policy: u32, addr: Addr) -> u32 {
        RANGES
            .get(&Key::new(32 + 128, Range { policy, addr }))
            .map_or(0, |said| *said)
    }
}

#[inline(always)]
fn config() -> Option<&'static CaptureConfig> {
    CAPTURE.get(0)
}
