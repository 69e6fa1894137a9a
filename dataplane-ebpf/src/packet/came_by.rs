//! The interface by which a flow's client comes, and the path on which the flow began: a word for each cell.

use core::ptr::{read_volatile, write_volatile};

pub use dataplane_common::packet::came_by::THROUGH;
use dataplane_common::packet::{PacketConfig, came_by::KERNELS};

use crate::tables::{CAME_BY, PACKET_CONFIG};

/// Returns the uplink by which the packets of a flow's client come, if there are several uplinks; else 0.
#[inline(always)]
pub fn relevant(index: u32) -> u32 {
    let flags = PACKET_CONFIG.get(0).map_or(0, |config| config.flags);
    if flags & PacketConfig::SEVERAL_UPLINKS == 0 {
        return 0;
    }
    interface(index)
}

/// Whether packets of all flows look at the word of their cell.
#[inline(always)]
pub fn matters() -> bool {
    let flags = PACKET_CONFIG.get(0).map_or(0, |config| config.flags);
    flags & (PacketConfig::SEVERAL_UPLINKS | PacketConfig::STACK) != 0
}

/// Returns the interface by which the packets of a flow's client come; 0: a pod's.
#[inline(always)]
pub fn interface(index: u32) -> u32 {
    origin(index) & !(KERNELS | THROUGH)
}

/// Whether there may be flows that go through the stack.
#[inline(always)]
pub fn may_be_through() -> bool {
    PACKET_CONFIG
        .get(0)
        .is_some_and(|config| config.flags & PacketConfig::STACK_OUT != 0)
}

/// Whether the flow in a cell began on the path through the stack.
#[inline(always)]
pub fn is_through(index: u32) -> bool {
    origin(index) & THROUGH != 0
}

#[inline(always)]
fn origin(index: u32) -> u32 {
    at(index).map_or(0, |by| {
        // SAFETY: an aligned half of an array's element, which stays.
        unsafe { read_volatile(by) }
    })
}

/// Whether the kernel translates the answers of the flow in a cell back.
#[inline(always)]
pub fn is_kernels(index: u32) -> bool {
    origin(index) & KERNELS != 0
}

/// Records that the kernel translates the answers of the flow in a cell back, or that it does not.
#[inline(always)]
pub fn set_kernels(index: u32, is_kernels: bool) {
    let before = origin(index);
    let after = if is_kernels {
        before | KERNELS
    } else {
        before & !KERNELS
    };
    if after != before {
        set(index, after);
    }
}

/// Records the interface by which the packets of a flow's client come, for a held cell: an uplink; 0: a pod's.
#[inline(always)]
pub fn set(index: u32, interface: u32) {
    if let Some(by) = at(index) {
        // SAFETY: as above.
        unsafe { write_volatile(by, interface) };
    }
}

/// Records another interface for a live cell's flow, if it has one.
#[inline(always)]
pub fn follow(index: u32, interface: u32) {
    let before = origin(index);
    let bits = before & (KERNELS | THROUGH);
    if before != bits && before != interface | bits {
        set(index, interface | bits);
    }
}

#[inline(always)]
fn at(index: u32) -> Option<*mut u32> {
    let pair = CAME_BY.get_ptr_mut(index / 2)?.cast::<u32>();
    // SAFETY: one half of the pair or the other.
    Some(unsafe { pair.add(index as usize & 1) })
}
