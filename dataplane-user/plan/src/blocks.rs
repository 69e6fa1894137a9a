//! Which slots of `ENDPOINTS` are free: a buddy allocator.
//!
//! Blocks are powers of two, aligned to their size. At most half of a block is unused, and a freed block always fits
//! the next block of its size, so endless churn does not fragment the table. The free slots follow from the live blocks
//! alone, not from history: an agent that adopts the tables allocates exactly as the agent before it would have done.

use std::collections::BTreeSet;

use dataplane_common::tables::Block;

/// A block of 2^16 slots holds [`Block::MAX_LEN`] endpoints.
const ORDERS: usize = 17;
const LARGEST: u32 = 16;

const _: () = assert!(1 << LARGEST > Block::MAX_LEN && LARGEST as usize == ORDERS - 1);

/// The free slots below [`Blocks::top`]. All slots from there on are free, too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Free blocks by order. Two buddies are never both free, and no free block ends at `top`.
    free: [BTreeSet<u32>; ORDERS],
    /// The end of the last live block.
    top: u32,
}

/// The reason why [`Blocks::rebuild`] fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// Two blocks, named by their bases, share slots.
    Overlap(u32, u32),
    /// The block does not begin at a multiple of its size.
    Misaligned(u32),
}

/// Returns the number of slots that a block of `len` endpoints occupies.
pub(super) fn slots(len: usize) -> u32 {
    1 << order(len)
}

fn order(len: usize) -> u32 {
    debug_assert!((1..=Block::MAX_LEN).contains(&len));
    len.next_power_of_two().trailing_zeros()
}

impl Blocks {
    /// Returns the allocator in which exactly the blocks `live`, as (base, len), are taken.
    pub(super) fn rebuild(mut live: Vec<(u32, u16)>) -> Result<Self, Damage> {
        live.sort_unstable();
        let mut blocks = Self::default();
        let mut last = 0;
        for (base, len) in live {
            let size = slots(len.into());
            if base % size != 0 || base.checked_add(size).is_none() {
                return Err(Damage::Misaligned(base));
            }
            if base < blocks.top {
                return Err(Damage::Overlap(last, base));
            }
            blocks.free_gap(blocks.top, base);
            blocks.top = base + size;
            last = base;
        }
        Ok(blocks)
    }

    /// Returns the end of the last live block.
    pub(super) fn top(&self) -> u32 {
        self.top
    }

    /// Takes a block for `len` endpoints (at least one) and returns its base.
    pub(super) fn take(&mut self, len: usize) -> u32 {
        let order = order(len);
        // The smallest free block that fits, and among equals the lowest: this leaves large blocks whole and the table
        // short.
        let found = (order..)
            .zip(&mut self.free[order as usize..])
            .find_map(|(found, free)| free.pop_first().map(|base| (found, base)));
        if let Some((found, base)) = found {
            for half in order..found {
                self.free[half as usize].insert(base + (1 << half));
            }
            return base;
        }
        let base = self.top.next_multiple_of(1 << order);
        self.free_gap(self.top, base);
        self.top = base + (1 << order);
        base
    }

    /// Frees a block that [`Blocks::take`] returned for `len` endpoints.
    pub(super) fn give_back(&mut self, mut base: u32, len: usize) {
        let mut order = order(len) as usize;
        while order < ORDERS - 1 && self.free[order].remove(&(base ^ (1 << order))) {
            base &= !(1 << order);
            order += 1;
        }
        self.free[order].insert(base);
        while let Some(order) = (0..ORDERS).find(|&o| {
            self.free[o]
                .last()
                .is_some_and(|base| base + (1 << o) == self.top)
        }) {
            self.top = self.free[order].pop_last().unwrap_or_default();
        }
    }

    /// Returns whether blocks of these lengths fit below `limit`. Takes no block.
    pub(super) fn has_room(&mut self, lens: &[usize], limit: u32) -> bool {
        let mut taken = Vec::with_capacity(lens.len());
        let mut fits = true;
        for len in lens {
            let end = u64::from(self.top) + 2 * u64::from(slots(*len));
            fits = end <= u32::MAX.into();
            if !fits {
                break;
            }
            taken.push((self.take(*len), *len));
            fits = self.top <= limit;
            if !fits {
                break;
            }
        }
        // The free slots follow from the live blocks alone, so the allocator has its former state again.
        for (base, len) in taken {
            self.give_back(base, len);
        }
        fits
    }

    /// Marks `from..to` as free, in blocks as large as their alignment allows.
    fn free_gap(&mut self, mut from: u32, to: u32) {
        while from < to {
            let order = from.trailing_zeros().min((to - from).ilog2()).min(LARGEST);
            self.free[order as usize].insert(from);
            from += 1 << order;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hundred_thousand_services_of_three_endpoints_fit_into_400_000_slots() {
        let mut blocks = Blocks::default();
        for _ in 0..100_000 {
            blocks.take(3);
        }
        assert_eq!(blocks.top(), 400_000);
    }

    #[test]
    fn the_largest_block_and_the_smallest() {
        let mut blocks = Blocks::default();
        assert_eq!(blocks.take(1), 0);
        assert_eq!(blocks.take(Block::MAX_LEN), 65_536);
        assert_eq!(blocks.take(2), 2, "from the gap before the large block");
        blocks.give_back(65_536, Block::MAX_LEN);
        assert_eq!(blocks.top(), 4);
    }

    #[test]
    fn two_of_the_largest_blocks_do_not_merge() {
        let mut blocks = Blocks::default();
        let largest = [0, 1, 2].map(|nth| nth << LARGEST);
        assert_eq!(largest.map(|_| blocks.take(Block::MAX_LEN)), largest);
        assert!(blocks.has_room(&[Block::MAX_LEN], 1 << 20));
        blocks.give_back(0, Block::MAX_LEN);
        blocks.give_back(1 << LARGEST, Block::MAX_LEN);
        assert_eq!(blocks.take(Block::MAX_LEN), 0);
    }

    #[test]
    fn there_is_no_room_behind_the_last_number() {
        let base = u32::MAX << (LARGEST + 1);
        let mut blocks = Blocks::rebuild(vec![(base, u16::MAX)]).unwrap();
        assert!(!blocks.has_room(&[Block::MAX_LEN], u32::MAX));
        // There may be a gap before a block that is as large as the block.
        assert!(!blocks.has_room(&[1 << 15], u32::MAX));
        assert!(blocks.has_room(&[1], u32::MAX));
    }

    #[test]
    fn damage_is_named() {
        assert_eq!(
            Blocks::rebuild(vec![(4, 2), (0, 5)]),
            Err(Damage::Overlap(0, 4))
        );
        assert_eq!(Blocks::rebuild(vec![(2, 3)]), Err(Damage::Misaligned(2)));
        assert_eq!(
            Blocks::rebuild(vec![(u32::MAX, 1)]),
            Err(Damage::Misaligned(u32::MAX))
        );
        assert!(Blocks::rebuild(vec![(4, 3), (0, 4)]).is_ok());
    }

    proptest! {
        /// Compares with a model that knows only the live blocks.
        #[test]
        fn live_blocks_never_overlap_and_free_ones_depend_on_them_alone(
            steps in prop::collection::vec((any::<bool>(), 1usize..40, any::<prop::sample::Index>()), 1..120),
        ) {
            let mut blocks = Blocks::default();
            let mut live = BTreeMap::<u32, usize>::new();
            for (take, len, which) in steps {
                if take || live.is_empty() {
                    let base = blocks.take(len);
                    prop_assert_eq!(base % slots(len), 0);
                    for (&other, &other_len) in &live {
                        prop_assert!(
                            base + slots(len) <= other || other + slots(other_len) <= base,
                            "{}+{} overlaps {}+{}", base, len, other, other_len
                        );
                    }
                    live.insert(base, len);
                } else {
                    let (&base, &len) = live.iter().nth(which.index(live.len())).unwrap();
                    live.remove(&base);
                    blocks.give_back(base, len);
                }
                let end = live.last_key_value().map_or(0, |(base, len)| base + slots(*len));
                prop_assert_eq!(blocks.top(), end);
                let before = blocks.clone();
                let limit = end + 64;
                let has_room = blocks.has_room(&[len, 3, 1], limit);
                prop_assert_eq!(&blocks, &before);
                let mut after = before.clone();
                for len in [len, 3, 1] {
                    after.take(len);
                }
                prop_assert_eq!(has_room, after.top() <= limit);
                let from_live = live.iter().map(|(base, len)| (*base, u16::try_from(*len).unwrap())).collect();
                prop_assert_eq!(Blocks::rebuild(from_live), Ok(blocks.clone()));
            }
        }
    }
}
