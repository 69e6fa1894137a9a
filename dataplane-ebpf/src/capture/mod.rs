//! Mesh capture: a workload's connections go to its proxy, which learns where they were to go.

mod askers;
pub mod assign;
pub mod datagrams;
pub mod inbound;
pub mod meters;
pub mod origin;
pub mod outbound;
pub mod sockopt;
pub mod states;
pub mod tcp;

use aya_ebpf::maps::lpm_trie::Key;
use dataplane_common::{
    Addr, Port, Protocol,
    capture::{self, CAPTURED, CaptureConfig, FROM_CLIENT, REACHABLE, RuleKey, has_mark},
    decide,
    tables::{Frontend, FrontendKey},
};

use crate::{
    select,
    tables::{CAPTURE, KNOWN, RANGES, RULES, Range},
};

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

/// Whether [`assign`] gave a packet with this mark to a socket.
#[inline(always)]
pub fn is_taken(mark: u32) -> bool {
    mark & FROM_CLIENT != 0
        && config()
            .is_some_and(|config| config.mark != 0 && has_mark(mark, config.mark | FROM_CLIENT))
}

/// Whether a destination is a service's of Pods, an endpoint's of one, or stated by the operator. `frontend`: the one
/// that it is.
#[inline(always)]
fn is_known(frontend: Frontend, addr: Addr, port: Port, protocol: Protocol) -> bool {
    if !frontend.is_none() {
        return decide::is_reachable(&select::Live, frontend);
    }
    KNOWN
        .get_ptr(FrontendKey::new(addr, port, protocol))
        .is_some()
        || capture::Rules::range(&Live, REACHABLE, addr) == CAPTURED
}
