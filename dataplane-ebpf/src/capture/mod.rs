//! Mesh capture: a workload's connections go to its proxy, which gets the original destination.

mod askers;
pub mod assign;
pub mod caller;
pub mod datagrams;
pub mod inbound;
mod listens;
pub mod meters;
pub mod origin;
pub mod outbound;
pub mod probes;
pub mod sockopt;
pub mod states;
pub mod tcp;

use core::ptr::read_volatile;

use aya_ebpf::maps::lpm_trie::Key;
use dataplane_common::{
    Addr, Port, Protocol,
    capture::{self, CaptureConfig, FROM_CLIENT, HBONE, Local, RuleKey, has_mark},
    decide, first,
    reread::{self, Copied},
    tables::{Frontend, FrontendKey},
};

use crate::{
    select, socket,
    tables::{CAPTURE, KNOWN, LOCALS, RANGES, RULES, Range},
};

/// The kernel's own tables.
pub struct Live;

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

impl first::Workloads for Live {
    #[inline(always)]
    fn mesh(&self) -> u64 {
        socket::config().map_or(0, |config| config.mesh)
    }

    #[inline(always)]
    fn local(&self, addr: Addr) -> Option<Local> {
        local(addr)
    }

    #[inline(always)]
    fn has(&self, to: &FrontendKey) -> bool {
        KNOWN.get_ptr(to).is_some()
    }
}

#[inline(always)]
fn config() -> Option<&'static CaptureConfig> {
    CAPTURE.get(0)
}

/// Copies the value of a key of a hash table ([`reread`]).
#[inline(always)]
fn copy<V: Copy + PartialEq>(find: impl Fn() -> Option<*const V>) -> Copied<V> {
    // SAFETY: an element of a hash table, whose memory stays the table's while this program runs.
    reread::copy(find, |found| unsafe { read_volatile(found) })
}

/// Returns the workload at an address. Also `None` if the entry changes at this moment.
#[inline(always)]
fn local(addr: Addr) -> Option<Local> {
    match copy(|| LOCALS.get_ptr(addr)) {
        Copied::Found(local) => Some(local),
        _ => None,
    }
}

/// Whether [`assign`] gave a packet with this mark to a socket.
#[inline(always)]
pub fn is_taken(mark: u32) -> bool {
    mark & FROM_CLIENT != 0
        && config()
            .is_some_and(|config| config.mark != 0 && has_mark(mark, config.mark | FROM_CLIENT))
}

/// Whether a destination is a service of Pods, an endpoint of such a service, or stated by the operator. `frontend`:
/// the destination's frontend.
#[inline(always)]
fn is_known(frontend: Frontend, addr: Addr, port: Port, protocol: Protocol) -> bool {
    if !frontend.is_none() {
        return decide::is_reachable(&select::Live, frontend);
    }
    first::is_known(&Live, &FrontendKey::new(addr, port, protocol))
}

/// Whether a destination speaks HBONE: an endpoint of the service, or the workload at the address. `frontend`: the
/// destination's frontend.
#[inline(always)]
fn speaks_hbone(frontend: Frontend, addr: Addr) -> bool {
    if !frontend.is_none() {
        return decide::may_speak_hbone(&select::Live, frontend);
    }
    KNOWN
        .get_ptr(FrontendKey::address(addr))
        .is_some_and(|known| {
            // SAFETY: one aligned word.
            unsafe { read_volatile(known) & HBONE != 0 }
        })
}
