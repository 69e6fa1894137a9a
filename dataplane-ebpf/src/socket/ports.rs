//! Tables with a bit for each port.

use core::ptr::read_volatile;

use aya_ebpf::{bindings::BPF_F_MMAPABLE, btf_maps::Array};
use dataplane_common::{Port, tables::PEER_PORTS};

use crate::atomic;

/// A bit for each port, in words that user space may map.
pub type Ports = Array<u64, { PEER_PORTS as usize }, { BPF_F_MMAPABLE as usize }>;

/// The word of a port's bit, and the bit.
#[inline(always)]
fn bit(table: &Ports, port: Port) -> (Option<*mut u64>, u64) {
    let port = u32::from(port.host());
    (table.get_ptr_mut(port / 64), 1 << (port % 64))
}

/// Sets a port's bit.
#[inline(always)]
pub fn mark(table: &Ports, port: Port) {
    let (word, bit) = bit(table, port);
    if let Some(word) = word {
        // SAFETY: an aligned word of an array, whose elements stay.
        unsafe {
            if read_volatile(word) & bit == 0 {
                atomic::set(word, bit);
            }
        }
    }
}

/// Whether a port's bit is set.
#[inline(always)]
pub fn has(table: &Ports, port: Port) -> bool {
    let (word, bit) = bit(table, port);
    // SAFETY: as in `mark`.
    word.is_none_or(|word| unsafe { read_volatile(word) } & bit != 0)
}
