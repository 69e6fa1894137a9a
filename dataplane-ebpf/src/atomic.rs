//! Atomic operations, which Rust's `core` does not offer for this target.

use core::arch::asm;

/// Adds to a counter that other CPUs, or a program that preempts this one, may add to as well.
/// Orders nothing else (`BPF_ATOMIC | BPF_ADD`, `Documentation/bpf/standardization/instruction-set.rst`).
///
/// # Safety
/// `counter` must point to eight aligned bytes that the program may write.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, amount: u64) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) amount) };
}

/// Adds to a word of 32 bits. Orders nothing else.
///
/// # Safety
/// `word` must point to four aligned bytes that the program may write.
#[inline(always)]
pub unsafe fn add32(word: *mut u32, amount: u32) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lock *(u32 *)({0} + 0) += {1}", in(reg) word, in(wreg) amount) };
}

/// Sets bits of a word in which other CPUs may set others. Orders nothing else.
///
/// # Safety
/// `word` must point to eight aligned bytes that the program may write.
#[inline(always)]
pub unsafe fn set(word: *mut u64, bits: u64) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lock *(u64 *)({0} + 0) |= {1}", in(reg) word, in(reg) bits) };
}

/// Stores `new` if `word` holds `expected`; returns what it held before. A full barrier if it stores.
///
/// # Safety
/// `word` must point to eight aligned bytes that the program may write.
#[inline(always)]
pub unsafe fn compare_exchange(word: *mut u64, expected: u64, new: u64) -> u64 {
    let before;
    // SAFETY: the caller's promise. The instruction's operand and result are in r0.
    unsafe {
        asm!(
            "r0 = cmpxchg_64({0} + 0, r0, {1})",
            in(reg) word,
            in(reg) new,
            inout("r0") expected => before,
        );
    }
    before
}

/// As [`compare_exchange`], for a word of 32 bits.
///
/// # Safety
/// `word` must point to four aligned bytes that the program may write.
#[inline(always)]
pub unsafe fn compare_exchange32(word: *mut u32, expected: u32, new: u32) -> u32 {
    let before;
    // SAFETY: the caller's promise. The instruction's operand and result are in w0.
    unsafe {
        asm!(
            "w0 = cmpxchg32_32({0} + 0, w0, {1})",
            in(reg) word,
            in(wreg) new,
            inout("w0") expected => before,
        );
    }
    before
}

/// Adds to a word and returns its earlier value. A full barrier on every architecture
/// (`Documentation/core-api/wrappers/atomic_t.rst`: operations that return a value).
///
/// # Safety
/// `word` must point to eight aligned bytes that the program may write.
#[inline(always)]
pub unsafe fn fetch_add(word: *mut u64, amount: u64) -> u64 {
    let before;
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "{1} = atomic_fetch_add((u64 *)({0} + 0), {1})",
            in(reg) word,
            inout(reg) amount => before,
        );
    }
    before
}

/// Orders every access before it against every access after it: a full barrier.
///
/// # Safety
/// `any` must point to eight aligned bytes that the program may write; their value stays.
#[inline(always)]
pub unsafe fn fence(any: *mut u64) {
    // SAFETY: the caller's promise.
    unsafe { fetch_add(any, 0) };
}

/// 0, computed from a number in a way that the compiler does not see: every processor reads the number before it reads
/// from an address to which this 0 is added (`Documentation/memory-barriers.txt`, "address-dependency barriers"; the
/// kernel's JIT compilers leave the operation as it is).
#[inline(always)]
pub fn nothing_of(number: u64) -> usize {
    let mut nothing = number;
    // SAFETY: registers only.
    unsafe { asm!("{0} &= 0", inout(reg) nothing, options(pure, nomem, nostack)) };
    nothing as usize
}

/// A number computed from two, for [`nothing_of`]: the dependency stays even if the compiler knows one of them.
#[inline(always)]
pub fn both(one: u64, other: u64) -> u64 {
    let mut both = one;
    // SAFETY: registers only.
    unsafe { asm!("{0} |= {1}", inout(reg) both, in(reg) other, options(pure, nomem, nostack)) };
    both
}
