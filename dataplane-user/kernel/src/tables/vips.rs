//! The filter in front of `FRONTENDS`, and its counts, which follow that table.
//!
//! This module, and not the kernel, counts how many frontends stand behind each bit: it derives the counts from
//! `FRONTENDS`, anew whenever an agent starts. A bit is set before a frontend is added, and cleared after the last of
//! its frontends was removed. So an agent that dies in between may leave bits without a frontend, which cost a lookup,
//! and never lacks a bit.
//!
//! A flow goes on until it ends, also if the last frontend with its address goes. So a bit without frontends stays
//! until a walk through all flows, which began later, found no flow that needs it ([`Vips::keep_flows`]).

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    os::fd::OwnedFd,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use dataplane_common::{
    Addr, ClaimedPort, VIP_ELEMENTS, VipElement, VipPlace, VipWords,
    tables::{Frontend, FrontendKey, Kind},
};

use super::super::map::Mapped;

/// Words in an element, and bits.
const WORDS: usize = size_of::<VipElement>() / size_of::<u64>();
const BITS: usize = 64 * WORDS;

/// How much later than a frontend's removal a walk has to begin: a program that still saw the frontend has made its
/// flow by then.
const GRACE: Duration = Duration::from_secs(1);

/// The filter.
#[derive(Debug)]
pub struct Vips {
    table: Mapped<VipElement>,
    counts: Counts,
    kept: StaleBits,
}

/// Bits that are set although no frontend stands behind them.
#[derive(Debug, Default)]
struct StaleBits {
    /// Whether there may be flows: there is a packet path.
    any: bool,
    /// The bits whose last frontend was removed, and when. A map, because a tenant may leave ten thousands of them at once.
    left: BTreeMap<Bit, Instant>,
    /// The bits that flows need, from the last walk.
    flows: BTreeSet<Bit>,
}

impl StaleBits {
    fn has(&self, bit: Bit) -> bool {
        self.flows.contains(&bit) || self.left.contains_key(&bit)
    }

    /// A walk that began at `since` found that flows need `flows`. Returns the bits that nothing needs any longer.
    fn walked(&mut self, flows: BTreeSet<Bit>, since: Instant) -> Vec<Bit> {
        let before = std::mem::replace(&mut self.flows, flows);
        let mut gone: Vec<Bit> = before.into_iter().collect();
        self.left.retain(|bit, at| {
            let is_over = *at + GRACE <= since;
            gone.extend(is_over.then_some(*bit));
            !is_over
        });
        gone.retain(|bit| !self.has(*bit));
        gone
    }
}

impl Vips {
    /// Opens an existing filter. Its writer must count first, by [`Vips::rebuild`].
    pub fn open(fd: OwnedFd, writable: bool) -> io::Result<Self> {
        Ok(Self {
            table: Mapped::map(fd, VIP_ELEMENTS, writable)?,
            counts: Counts::default(),
            kept: StaleBits::default(),
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

    /// Counts the frontends in `FRONTENDS`, and sets every bit correctly for them and for the addresses of flows. Each
    /// word changes in one store, so no frontend is missed meanwhile. Returns the number of words that were wrong.
    pub fn rebuild(
        &mut self,
        frontends: &[(FrontendKey, Frontend)],
        flows: Option<&HashSet<Addr>>,
    ) -> usize {
        self.counts = Counts::default();
        for (key, frontend) in frontends {
            self.counts.add(key, *frontend);
        }
        self.kept = StaleBits {
            any: flows.is_some(),
            left: BTreeMap::new(),
            flows: self.counts.bits_of_flows(flows.into_iter().flatten()),
        };
        let mut kept = vec![0_u64; VIP_ELEMENTS as usize * WORDS];
        for bit in &self.kept.flows {
            kept[bit.index as usize * WORDS + bit.word] |= bit.mask;
        }
        let mut wrong = 0;
        for index in 0..VIP_ELEMENTS {
            for word in 0..WORDS {
                let Some(stored) = self.table.word(index, word) else {
                    continue;
                };
                let wanted = self.counts.word(index, word) | kept[index as usize * WORDS + word];
                if stored.swap(wanted, Ordering::AcqRel) != wanted {
                    wrong += 1;
                }
            }
        }
        wrong
    }

    /// Counts anew from the contents of `FRONTENDS`. Bits without a frontend stay until the next walk through all
    /// flows.
    pub fn recount(&mut self, frontends: &[(FrontendKey, Frontend)]) {
        self.counts = Counts::default();
        for (key, frontend) in frontends {
            for bit in self.counts.add(key, *frontend) {
                self.set(bit);
            }
        }
        let now = Instant::now();
        for index in 0..VIP_ELEMENTS {
            for bit in (0..).take(BITS).map(|bit| Bit::of(index, bit)) {
                let word = self.table.word(index, bit.word);
                let is_set = word.is_some_and(|word| word.load(Ordering::Acquire) & bit.mask != 0);
                if !is_set || self.counts.has(bit) || self.kept.has(bit) {
                    continue;
                }
                if self.kept.any {
                    self.kept.left.insert(bit, now);
                } else {
                    self.clear(bit);
                }
            }
        }
    }

    /// Before a frontend is added.
    pub fn add(&mut self, key: &FrontendKey, frontend: Frontend) {
        for bit in self.counts.add(key, frontend) {
            self.set(bit);
        }
    }

    /// After a frontend was removed.
    pub fn remove(&mut self, key: &FrontendKey, frontend: Frontend) {
        for bit in self.counts.remove(key, frontend) {
            if self.kept.any {
                self.kept.left.insert(bit, Instant::now());
            } else {
                self.clear(bit);
            }
        }
    }

    /// Takes the result of a walk through all flows, which began at `since`: the addresses of flows. Lets these
    /// addresses through, and clears the bits that no frontend and no flow needs any longer.
    pub fn keep_flows(&mut self, vips: &HashSet<Addr>, since: Instant) {
        let flows = self.counts.bits_of_flows(vips);
        for bit in flows.difference(&self.kept.flows) {
            self.set(*bit);
        }
        for bit in self.kept.walked(flows, since) {
            if !self.counts.has(bit) {
                self.clear(bit);
            }
        }
    }

    fn set(&self, bit: Bit) {
        if let Some(word) = self.table.word(bit.index, bit.word) {
            word.fetch_or(bit.mask, Ordering::AcqRel);
        }
    }

    fn clear(&self, bit: Bit) {
        if let Some(word) = self.table.word(bit.index, bit.word) {
            word.fetch_and(!bit.mask, Ordering::AcqRel);
        }
    }
}

/// A bit that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Bit {
    index: u32,
    word: usize,
    mask: u64,
}

impl Bit {
    /// A bit of an element ([`VipPlace::bit`]).
    fn of(index: u32, bit: u32) -> Self {
        Self {
            index,
            word: bit as usize / 64,
            mask: 1 << (bit % 64),
        }
    }

    /// Returns the bit's number in its element.
    fn number(self) -> usize {
        self.word * 64 + self.mask.trailing_zeros() as usize
    }
}

/// The bits of a frontend: of its address, and of its port.
fn bits(key: &FrontendKey, frontend: Frontend) -> Vec<Bit> {
    let place = VipPlace::of(key.addr);
    let of_addr =
        VipPlace::has_one(key).then(|| Bit::of(place.index(), place.bit(frontend.kind())));
    let port = ClaimedPort::of_frontend(key, frontend.kind());
    let of_port = port.map(|port| Bit::of(port.index(), port.bit()));
    of_addr.into_iter().chain(of_port).collect()
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
    /// Counts a frontend; of its bits those where it is the first.
    fn add(&mut self, key: &FrontendKey, frontend: Frontend) -> Vec<Bit> {
        let mut first = bits(key, frontend);
        first.retain(|bit| {
            let count = self.at(*bit);
            *count += 1;
            *count == 1
        });
        first
    }

    /// Counts a frontend off; of its bits those where it was the last.
    fn remove(&mut self, key: &FrontendKey, frontend: Frontend) -> Vec<Bit> {
        let mut last = bits(key, frontend);
        last.retain(|bit| {
            let count = self.at(*bit);
            *count = count.saturating_sub(1);
            *count == 0
        });
        last
    }

    fn at(&mut self, bit: Bit) -> &mut u32 {
        &mut self.0[bit.index as usize * BITS + bit.number()]
    }

    /// Whether a frontend stands behind a bit.
    fn has(&self, bit: Bit) -> bool {
        let count = self.0.get(bit.index as usize * BITS + bit.number());
        count.is_some_and(|count| *count != 0)
    }

    /// The bits that let addresses through which flows go to and which no frontend lets through: those of very
    /// addresses, by which fewest others pass.
    fn bits_of_flows<'a>(&self, vips: impl IntoIterator<Item = &'a Addr>) -> BTreeSet<Bit> {
        let needed = |addr: &Addr| {
            let place = VipPlace::of(*addr);
            let bit = |kind| Bit::of(place.index(), place.bit(kind));
            let kinds = [Kind::CLUSTER_IP, Kind::EXTERNAL_IP, Kind::NODE_ADDRESS];
            let passes = kinds.into_iter().any(|kind| self.has(bit(kind)));
            (!passes).then(|| bit(Kind::EXTERNAL_IP))
        };
        vips.into_iter().filter_map(needed).collect()
    }

    /// Returns the word that the filter should have.
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
        let protocol = prop::sample::select(vec![Protocol::TCP, Protocol::UDP]);
        (addr, 1u16..4, protocol, kind).prop_map(|(addr, port, protocol, kind)| {
            let key = FrontendKey::new(addr, Port::new(port), protocol);
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
        /// After any additions and removals, the bits are those of the remaining frontends; and each step reports
        /// exactly the bits that change.
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
                for bit in counts.add(key, *frontend) {
                    table[place(bit)] |= bit.mask;
                }
                prop_assert_eq!(&table, &words(&counts));
            }
            for (key, frontend) in &go {
                for bit in counts.remove(key, *frontend) {
                    table[place(bit)] &= !bit.mask;
                }
                prop_assert_eq!(&table, &words(&counts));
            }
            prop_assert_eq!(before, table);
        }
    }

    /// A bit whose last frontend went stays until a walk that began later finds no flow that needs it.
    #[test]
    fn bits_of_flows_stay() {
        let vip = Addr::from_v4([10, 96, 0, 1]);
        let key = FrontendKey::new(vip, Port::new(80), Protocol::TCP);
        let cluster_ip = Frontend::new(1, Kind::CLUSTER_IP);
        let mut counts = Counts::default();
        let [prefix] = counts.add(&key, cluster_ip)[..] else {
            panic!("it is the first, and has one bit");
        };
        assert!(counts.bits_of_flows([&vip]).is_empty(), "it passes");
        assert_eq!(counts.remove(&key, cluster_ip), [prefix]);
        let address = counts.bits_of_flows([&vip]);
        assert_eq!(address.len(), 1);
        let gone = Instant::now();
        let mut kept = StaleBits {
            any: true,
            left: [(prefix, gone)].into(),
            flows: BTreeSet::new(),
        };
        // A walk that began before may have missed a flow.
        assert!(kept.walked(BTreeSet::new(), gone).is_empty());
        // After a walk that began later, the bit is the flow's own.
        assert_eq!(kept.walked(address.clone(), gone + GRACE), [prefix]);
        assert!(kept.walked(address.clone(), gone + 2 * GRACE).is_empty());
        let over: Vec<Bit> = address.iter().copied().collect();
        assert_eq!(kept.walked(BTreeSet::new(), gone + 3 * GRACE), over);
        assert!(!kept.has(over[0]) && !kept.has(prefix));
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
                let port_bit = ClaimedPort::of(key.port);
                let ports = counts.word(port_bit.index(), WORDS - 1);
                assert!(port_bit.is_set(ports) && ports.is_power_of_two(), "{port}");
                let set = |word: &&u64| **word != 0;
                let others = words(&counts).iter().filter(set).count() - 1;
                assert_eq!(others != 0, has_bit, "{port}");
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
