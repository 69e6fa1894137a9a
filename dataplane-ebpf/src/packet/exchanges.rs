//! The UDP flows that bypass the stack ([`super::bypass`]).
//!
//! Most of them are one question and one answer, as a DNS client's. In an LRU hash, such a flow would cost more than the stack
//! does: most of the hash's elements are in no cache, and a full hash looks for the least recently used one. So they are in an
//! array. A flow's hash leads to two places of 64 bytes, side by side, which both directions share. A new flow takes the
//! place of the older flow. If that flow goes on, it begins anew, and an answer to it goes through the stack.
//!
//! A flow counts for 8.6 s at most. So no agent opens or empties the table, and the flows of earlier programs begin anew.

use core::{
    mem::size_of,
    ptr::{read_volatile, write_volatile},
};

use aya_ebpf::{btf_maps::Array, macros::btf_map};
use dataplane_common::packet::FlowKey;

use crate::atomic;

/// How many places there are: a power of two. A pair begins at an even one.
const PLACES: u32 = 16_384;

/// A flow.
#[repr(C)]
struct Exchange {
    /// When it began, in the upper half, in the units of [`Bypass::since`](dataplane_common::packet::Bypass::since), and
    /// [`THERE`]; or [`BEING_WRITTEN`]; or 0: none is here.
    state: u64,
    key: FlowKey,
    /// The interfaces of both ends, in the order of the key.
    interfaces: [u32; 2],
    reserved: u64,
}

const _: () = assert!(size_of::<Exchange>() == 64);

/// A flow is in the place.
const THERE: u64 = 1;
/// A program is writing a flow into the place.
const BEING_WRITTEN: u64 = 2;

#[btf_map]
static EXCHANGES: Array<Exchange, { PLACES as usize }> = Array::new();

/// The first of a flow's two places.
#[inline(always)]
fn pair(key: &FlowKey) -> u32 {
    let ((a, b), (c, d)) = (key.src.halves(), key.dst.halves());
    let ports = u64::from(key.src_port.host()) << 48 | u64::from(key.dst_port.host()) << 32;
    // As `VipPlace::of`; the key has its ends in order.
    let mixed = (a ^ b).wrapping_mul(3) ^ c ^ d ^ ports;
    let hash = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (hash as u32 % PLACES) & !1
}

/// Returns the number of the flow's place, counted from 1; 0: it is not there. With external linkage, as in `table.rs`: its frame is
/// not in each of its callers.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn exchanges_find(key: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return 0;
    };
    let first = pair(key);
    for number in [first, first + 1] {
        let Some(place) = EXCHANGES.get_ptr_mut(number) else {
            return 0;
        };
        // SAFETY: an element of an array, which stays; the state is one aligned word.
        let is_here = unsafe {
            let state = read_volatile(&raw const (*place).state);
            // Every processor reads the state before the flow.
            let place = place.wrapping_byte_add(atomic::nothing_of(state));
            state & THERE != 0 && (*place).key == *key
        };
        if is_here {
            return number + 1;
        }
    }
    0
}

/// Returns the place of a flow, if it is there.
#[inline(always)]
fn place_of(key: &FlowKey) -> Option<*mut Exchange> {
    EXCHANGES.get_ptr_mut(exchanges_find(key).wrapping_sub(1))
}

/// Returns the flow's interfaces, and when it began. Another flow may take the place while it is read: then one packet more, or
/// one less, goes through the stack.
#[inline(always)]
pub fn find(key: &FlowKey) -> Option<([u32; 2], u32)> {
    let place = place_of(key)?;
    // SAFETY: an element of an array, which stays.
    let (interfaces, state) = unsafe { ((*place).interfaces, (*place).state) };
    Some((interfaces, (state >> 32) as u32))
}

/// The place of the older of two flows.
#[inline(always)]
fn older(key: &FlowKey, now: u32) -> Option<*mut Exchange> {
    let first = pair(key);
    let (one, other) = (
        EXCHANGES.get_ptr_mut(first)?,
        EXCHANGES.get_ptr_mut(first + 1)?,
    );
    // SAFETY: an aligned word of an array's element, which stays.
    let age = |place: *mut Exchange| unsafe {
        let state = read_volatile(&raw const (*place).state);
        now.wrapping_sub((state >> 32) as u32)
    };
    Some(if age(other) > age(one) { other } else { one })
}

/// Adds a flow that begins now. `false` if another CPU uses the place at this moment.
#[inline(always)]
pub fn add(key: &FlowKey, interfaces: [u32; 2], now: u32) -> bool {
    let Some(place) = place_of(key).or_else(|| older(key, now)) else {
        return false;
    };
    // SAFETY: an element of an array, which stays; only the program that has exchanged the word writes the flow.
    unsafe {
        let word = &raw mut (*place).state;
        let state = read_volatile(word);
        if state == BEING_WRITTEN || atomic::compare_exchange(word, state, BEING_WRITTEN) != state {
            return false;
        }
        (*place).key = *key;
        (*place).interfaces = interfaces;
        atomic::compare_exchange(word, BEING_WRITTEN, u64::from(now) << 32 | THERE);
    }
    true
}

/// Forgets the flow. Two CPUs may have added it at once, to both places.
#[inline(always)]
pub fn forget(key: &FlowKey) {
    for _ in 0..2 {
        if let Some(place) = place_of(key) {
            // SAFETY: an aligned word of an array's element, which stays.
            unsafe { write_volatile(&raw mut (*place).state, 0) };
        }
    }
}
