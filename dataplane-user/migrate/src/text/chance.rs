//! Random texts and time measurements, for the tests of all readers of rules.

use std::{env, time::Duration};

use proptest::prelude::*;
use threads::computed;

/// A change of a text: the place, the number of bytes to replace, and the replacement.
pub type Change = (prop::sample::Index, usize, String);

/// Returns the number of inputs in `DATAPLANE_FUZZ_RUNS`, or `few` if the variable is not set.
pub fn runs(few: u32) -> u32 {
    env::var("DATAPLANE_FUZZ_RUNS").map_or(few, |runs| runs.parse().unwrap())
}

/// Generates a change that replaces some characters by one of these pieces or by a few random characters.
pub fn change(pieces: &[&'static str]) -> impl Strategy<Value = Change> + use<> {
    let piece = prop_oneof![
        3 => prop::sample::select(pieces.to_vec()).prop_map(str::to_owned),
        1 => ".{0,3}",
    ];
    (any::<prop::sample::Index>(), 0_usize..40, piece)
}

/// Applies changes to a text.
pub fn changed(mut bytes: Vec<u8>, changes: Vec<Change>) -> String {
    for (at, length, piece) in changes {
        let start = at.index(bytes.len().max(1)).min(bytes.len());
        let end = (start + length).min(bytes.len());
        bytes.splice(start..end, piece.into_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the shortest CPU time of three runs. Other work on the machine does not count.
pub fn shortest(work: impl Fn() -> usize) -> Duration {
    let tries = (0..3).map(|_| {
        let start = computed();
        std::hint::black_box(work());
        computed().saturating_sub(start)
    });
    tries.min().unwrap()
}
