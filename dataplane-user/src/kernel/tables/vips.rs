//! The filter in front of `FRONTENDS`, kept in line with it.
//!
//! How many frontends stand behind each bit is counted here and not in the kernel: it is known from
//! `FRONTENDS`, and is counted anew whenever an agent starts. A bit is set before a frontend is
//! added, and cleared after the last of its frontends was removed. So an agent that dies in between
//! leaves bits that are set for nothing, which cost a lookup, and never one that is missing.

use std::{io, os::fd::OwnedFd, sync::atomic::Ordering};

use dataplane_common::{
    VIP_ELEMENTS, VipPlace, VipWords,
    tables::{Frontend, FrontendKey},
};

use super::super::map::Mapped;

/// Words in an element, and bits.
const WORDS: usize = size_of::<VipWords>() / size_of::<u64>();
const BITS: usize = 64 * WORDS;

/// The filter.
#[derive(Debug)]
pub struct Vips {
    table: Mapped<VipWords>,
    counts: Counts,
}

impl Vips {
    /// A filter that is there. Its writer counts first, by [`Vips::rebuild`].
    pub fn open(fd: OwnedFd, writable: bool) -> io::Result<Self> {
        Ok(Self {
            table: Mapped::map(fd, VIP_ELEMENTS, writable)?,
            counts: Counts::default(),
        })
    }

    /// An element.
    pub fn get(&self, index: u32) -> VipWords {
        let word = |word| Some(self.table.word(index, word)?.load(Ordering::Acquire));
        match (word(0), word(1), word(2)) {
            (Some(prefixes), Some(addresses), Some(nodes)) => VipWords {
                prefixes,
                addresses,
                nodes,
            },
            _ => VipWords::ALL,
        }
    }

    /// Whether it lets a frontend be found.
    pub fn passes(&self, key: &FrontendKey) -> bool {
        let place = VipPlace::of(key.addr);
        key.addr.is_unspecified() || place.finds(self.get(place.index()), key)
    }

    /// Counts from what `FRONTENDS` holds, and sets every bit as it should be. Each word changes in
    /// one store, so no frontend is missed meanwhile. Returns how many words were wrong.
    pub fn rebuild(&mut self, frontends: &[(FrontendKey, Frontend)]) -> usize {
        self.counts = Counts::default();
        for (key, frontend) in frontends {
            self.counts.add(key, *frontend);
        }
        let mut wrong = 0;
        for index in 0..VIP_ELEMENTS {
            for word in 0..WORDS {
                let Some(stored) = self.table.word(index, word) else {
                    continue;
                };
                let wanted = self.counts.word(index, word);
                if stored.swap(wanted, Ordering::AcqRel) != wanted {
                    wrong += 1;
                }
            }
        }
        wrong
    }

    /// Before a frontend is added.
    pub fn add(&mut self, key: &FrontendKey, frontend: Frontend) {
        if let Some(bit) = self.counts.add(key, frontend)
            && let Some(word) = self.table.word(bit.index, bit.word)
        {
            word.fetch_or(bit.mask, Ordering::AcqRel);
        }
    }

    /// After a frontend was removed.
    pub fn remove(&mut self, key: &FrontendKey, frontend: Frontend) {
        if let Some(bit) = self.counts.remove(key, frontend)
            && let Some(word) = self.table.word(bit.index, bit.word)
        {
            word.fetch_and(!bit.mask, Ordering::AcqRel);
        }
    }
}

/// A bit that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bit {
    index: u32,
    word: usize,
    mask: u64,
}

/// How many frontends stand behind each bit.
#[derive(Debug)]
struct Counts(Vec<u32>);

impl Default for Counts {
    fn default() -> Self {
        // Zero from the start, so that memory is taken only where something is counted.
        Self(vec![0; VIP_ELEMENTS as usize * BITS])
    }
}

impl Counts {
    /// Counts a frontend; its bit, if it is the first there.
    fn add(&mut self, key: &FrontendKey, frontend: Frontend) -> Option<Bit> {
        let (count, bit) = self.at(key, frontend)?;
        *count += 1;
        (*count == 1).then_some(bit)
    }

    /// Counts a frontend off; its bit, if it was the last there.
    fn remove(&mut self, key: &FrontendKey, frontend: Frontend) -> Option<Bit> {
        let (count, bit) = self.at(key, frontend)?;
        *count = count.saturating_sub(1);
        (*count == 0).then_some(bit)
    }

    fn at(&mut self, key: &FrontendKey, frontend: Frontend) -> Option<(&mut u32, Bit)> {
        if !VipPlace::has_one(key) {
            return None;
        }
        let place = VipPlace::of(key.addr);
        let bit = place.bit(frontend.kind()) as usize;
        let count = self.0.get_mut(place.index() as usize * BITS + bit)?;
        let bit = Bit {
            index: place.index(),
            word: bit / 64,
            mask: 1 << (bit % 64),
        };
        Some((count, bit))
    }

    /// What a word of the filter should be.
    fn word(&self, index: u32, word: usize) -> u64 {
        let from = index as usize * BITS + word * 64;
        let counts = self.0.get(from..from + 64).unwrap_or_default();
        (0u32..)
            .zip(counts)
            .fold(0, |bits, (bit, count)| bits | u64::from(*count != 0) << bit)
    }
}

#[cfg(test)]
mod tests {
    use dataplane_common::{Addr, Port, Protocol, tables::Kind};
    use proptest::prelude::*;

    use super::*;

    /// Few addresses, so that several frontends share a bit, and one address has several kinds.
    fn frontends() -> impl Strategy<Value = (FrontendKey, Frontend)> {
        let addr = (0u8..3, 0u8..3).prop_map(|(c, d)| Addr::from_v4([10, 96, c, d * 64]));
        let kind = prop::sample::select(vec![
            Kind::CLUSTER_IP,
            Kind::CLUSTER_ADDRESS,
            Kind::EXTERNAL_IP,
            Kind::NODE_ADDRESS,
        ]);
        (addr, 1u16..4, kind).prop_map(|(addr, port, kind)| {
            let key = FrontendKey::new(addr, Port::new(port), Protocol::TCP);
            (key, Frontend::new(1, kind))
        })
    }

    fn words(counts: &Counts) -> Vec<u64> {
        (0..VIP_ELEMENTS)
            .flat_map(|index| (0..WORDS).map(move |word| counts.word(index, word)))
            .collect()
    }

    fn counted(frontends: &[(FrontendKey, Frontend)]) -> Counts {
        let mut counts = Counts::default();
        for (key, frontend) in frontends {
            counts.add(key, *frontend);
        }
        counts
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever came and went, the bits are those of what is left; and each step says exactly
        /// which bit changes.
        #[test]
        fn bits_are_those_of_what_is_there(
            stay in prop::collection::vec(frontends(), 0..8),
            go in prop::collection::vec(frontends(), 0..8),
        ) {
            let mut counts = counted(&stay);
            let before = words(&counts);
            let mut table = before.clone();
            let place = |bit: Bit| bit.index as usize * WORDS + bit.word;
            for (key, frontend) in &go {
                if let Some(bit) = counts.add(key, *frontend) {
                    table[place(bit)] |= bit.mask;
                }
                prop_assert_eq!(&table, &words(&counts));
            }
            for (key, frontend) in &go {
                if let Some(bit) = counts.remove(key, *frontend) {
                    table[place(bit)] &= !bit.mask;
                }
                prop_assert_eq!(&table, &words(&counts));
            }
            prop_assert_eq!(before, table);
        }
    }

    #[test]
    fn node_ports_have_a_bit_where_nobody_expects_one() {
        for v4 in [true, false] {
            for (port, has_bit) in [
                (29_999, true),
                (30_000, false),
                (32_767, false),
                (32_768, true),
            ] {
                let key = FrontendKey::node_port(v4, Port::new(port), Protocol::UDP);
                let counts = counted(&[(key, Frontend::new(1, Kind::NODE_PORT))]);
                let any = words(&counts).iter().any(|word| *word != 0);
                assert_eq!(any, has_bit, "{port}");
                let place = VipPlace::of(key.addr);
                let word = |word| counts.word(place.index(), word);
                let filter = VipWords {
                    prefixes: word(0),
                    addresses: word(1),
                    nodes: word(2),
                };
                assert_eq!(place.may_have_ports(filter), has_bit, "{port}");
            }
        }
    }
}
