//! Limits ICMP errors to as many as the kernel sends by its own limits (RFC 4443 section 2.4 (f), RFC 1812 section
//! 4.3.2.8). A client that is refused again and again gets an error once in a while, and no flood of packets makes a
//! flood of errors.

use core::ptr::read_volatile;

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use dataplane_common::{
    Addr,
    packet::{ErrorLimits, take_token},
};

use crate::{
    atomic,
    tables::{ALL_ERRORS, ERRORS, PACKET_CONFIG},
};

/// The time at which the machine started, on the buckets' scale: a bucket that is full now may have been empty before.
const START: u64 = 1 << 62;

/// Whether an error of this kind ([`ErrorLimits::kinds`]) may be sent to an address now. If so, counts it.
#[inline(never)]
pub fn allow(to: &Addr, kind: u32) -> bool {
    let Some(config) = PACKET_CONFIG.get(0) else {
        return true;
    };
    let limits = &config.errors;
    if limits.kinds & kind == 0 {
        return true;
    }
    // SAFETY: the helper has no preconditions.
    let now = START + unsafe { bpf_ktime_get_ns() };
    let milliseconds = if to.is_v4() {
        limits.v4_ms
    } else {
        limits.v6_ms
    };
    // The excess of one address takes no tokens from the others.
    if milliseconds != 0 && !allow_to(to, now, u64::from(milliseconds) * 1_000_000) {
        return false;
    }
    let Some(interval) = 1_000_000_000_u64.checked_div(u64::from(limits.per_second)) else {
        return false;
    };
    match ALL_ERRORS.get_ptr_mut(0) {
        // SAFETY: the element, which is there for as long as the program.
        Some(bucket) => unsafe { take(bucket, now, interval, limits.burst) },
        None => false,
    }
}

#[inline(always)]
fn allow_to(to: &Addr, now: u64, interval: u64) -> bool {
    if let Some(bucket) = ERRORS.get_ptr_mut(to) {
        // SAFETY: an element of a hash, whose memory is there for as long as the program runs. If it is another's by
        // now, that one has a token less.
        return unsafe { take(bucket, now, interval, ErrorLimits::BURST) };
    }
    let Some(first) = take_token(0, now, interval, ErrorLimits::BURST) else {
        return false;
    };
    let _ = ERRORS.insert(to, first, 0);
    true
}

/// Takes a token from a bucket, if it has one.
///
/// # Safety
/// `bucket` must point to eight aligned bytes that the program may write.
#[inline(always)]
unsafe fn take(bucket: *mut u64, now: u64, interval: u64, burst: u32) -> bool {
    // If another CPU has taken a token in between, tries once more.
    for _ in 0..2 {
        // SAFETY: the caller's promise.
        let before = unsafe { read_volatile(bucket) };
        let Some(after) = take_token(before, now, interval, burst) else {
            return false;
        };
        // SAFETY: the caller's promise.
        if unsafe { atomic::compare_exchange(bucket, before, after) } == before {
            return true;
        }
    }
    false
}
