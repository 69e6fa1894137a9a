//! How many entries of table `ORIGINS` each workload may have, so that a workload that fills its share leaves room for
//! the others.
//!
//! An entry is there while its connection waits for the proxy's side: hardly ever, as long as the proxy accepts.

use crate::capture::ORIGINS;

/// Elements of table `ORIGIN_COUNTS`. Element 0 is not used.
pub const COUNTERS: u32 = 16_384;
/// The element that counts the entries of all workloads.
pub const OF_ALL: u16 = 1;
const FIRST: u32 = 2;

/// The most entries of the workloads together.
const ROOM: u64 = (ORIGINS / 4) as u64;

/// The element that counts the entries of a workload; 0: those in the node's own network namespace.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "less than COUNTERS")]
pub const fn counter_of(workload: u32) -> u16 {
    (FIRST + workload % (COUNTERS - FIRST)) as u16
}

/// Whether a workload that has `own` entries may have one more, while all workloads have `all`: a workload has at most
/// as many as are left for the others.
#[inline(always)]
pub const fn has_room(own: u64, all: u64) -> bool {
    all < ROOM && own < ROOM - all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_take_all_they_can_there_is_room_for_one_more() {
        for hogs in [1, 2, 10, 100] {
            // The hog with the fewest entries has as many as each of the others, or one less.
            let mut all = 0;
            while has_room(all / hogs, all) {
                all += 1;
            }
            assert!(has_room(0, all), "{hogs}: {all}");
            assert!(all > ROOM / 3, "{hogs}: {all}");
        }
        assert!(!has_room(0, ROOM) && !has_room(0, u64::MAX));
        assert_eq!(ROOM * 4, u64::from(ORIGINS));
        assert!(has_room(ROOM / 2 - 1, ROOM / 2) && !has_room(ROOM / 2, ROOM / 2));
    }

    #[test]
    fn no_workload_counts_as_all() {
        for workload in [0, 1, COUNTERS - FIRST, COUNTERS, u32::MAX] {
            let counter = counter_of(workload);
            assert!(counter > OF_ALL && u32::from(counter) < COUNTERS);
        }
        let all = COUNTERS - FIRST;
        assert!((0..all).map(counter_of).eq(2..16_384), "each has its own");
        assert_eq!(counter_of(all + 5), counter_of(5));
    }
}
