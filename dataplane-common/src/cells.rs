//! Cells: where an entry of a flow is found by one look.
//!
//! `FORWARD`, `REPLY` and `MASQUERADE` are arrays of cells of 64 bytes, one line of a cache: an entry's key and
//! value. Each key has one cell that may have it ([`CellKey::place`]), and if another key has that, the entry is in
//! a hash beside the array (`MORE_FORWARD` and so on), whose least recently used entry makes room for a new one.
//! The cell says whether any of its keys is there: where none is, which is nearly always, a search in vain has
//! read one line.
//!
//! Ports that follow each other have cells that follow each other: a client counts its ports up, so the next flow's
//! cells are in pages that the last one's were in. Cells scattered as a hash scatters them are hardly faster than the
//! kernel's hashes (`docs/performance.md`): what takes long is memory that was not used lately.
//!
//! # Who may do what
//!
//! The word behind the addresses, the [`Head`], says whether the cell is free. Who takes it does so by
//! compare-and-exchange, writes the rest, and then the head again, now with ports and protocol. Who frees it does so by
//! compare-and-exchange of what was read: a head has a number that is another for each entry.

use crate::{
    Addr, Port,
    packet::{FlowKey, PortKey},
};

/// A cell: the key's addresses, the [`Head`], the value.
pub type Cell = [u64; 8];

/// A key whose entry may be in a cell: addresses, then a word of ports and protocol.
pub trait CellKey: Copy {
    /// Which word is the head: how many words the addresses are.
    const HEAD: usize;

    /// A word of the addresses, as it lies in memory; and the last, as the head has it.
    fn word(&self, index: usize) -> u64;

    /// Which cell may have it, of 2^32.
    #[inline(always)]
    fn place(&self) -> u32 {
        // Odd numbers of which nothing else is asked (fractions of square roots).
        const FACTORS: [u64; 5] = [
            0x6a09_e667_f3bc_c909,
            0xbb67_ae85_84ca_a73b,
            0x3c6e_f372_fe94_f82b,
            0xa54f_f53a_5f1d_36f1,
            0x9e37_79b9_7f4a_7c15,
        ];
        let head = self.word(Self::HEAD);
        let mut mixed = (head >> 32).wrapping_mul(FACTORS[4]);
        let mut index = 0;
        while index < Self::HEAD {
            mixed ^= self.word(index).wrapping_mul(FACTORS[index]);
            index += 1;
        }
        mixed ^= mixed >> 29;
        let base = (mixed.wrapping_mul(FACTORS[4]) >> 32) as u32;
        // One of the two is the client's, and the other the same for many. Clients take every second port
        // (`__inet_hash_connect` in `net/ipv4/inet_hashtables.c`): these follow each other, too.
        let [a, b, c, d, ..] = head.to_le_bytes();
        let ports = u16::from_be_bytes([a, b]).wrapping_add(u16::from_be_bytes([c, d]));
        base.wrapping_add(u32::from(ports.rotate_right(1)))
    }
}

#[inline(always)]
const fn half(addr: Addr, index: usize) -> u64 {
    let words = addr.words();
    words[index * 2] as u64 | (words[index * 2 + 1] as u64) << 32
}

#[inline(always)]
const fn head(first: Port, second: Port, protocol: u8) -> u64 {
    first.be() as u64 | (second.be() as u64) << 16 | (protocol as u64) << 32
}

impl CellKey for FlowKey {
    const HEAD: usize = 4;

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        match index {
            0 | 1 => half(self.src, index),
            2 | 3 => half(self.dst, index - 2),
            _ => head(self.src_port, self.dst_port, self.protocol.number()),
        }
    }
}

impl CellKey for PortKey {
    const HEAD: usize = 2;

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        match index {
            0 | 1 => half(self.endpoint, index),
            _ => head(self.endpoint_port, self.node_port, self.protocol.number()),
        }
    }
}

/// The word of a cell that says what it is: ports and protocol as the key has them (40 bits, 0: free), how many
/// entries of this cell's keys are in the hash beside (8 bits), and a number (16 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Head(pub u64);

impl Head {
    const KEY: u64 = (1 << 40) - 1;
    /// No protocol of ours: the entry is being written.
    const TAKEN: u64 = 0xff << 32;
    /// One more entry in the hash beside.
    pub const ONE_MORE: u64 = 1 << 40;
    /// With so many or more nobody counts any longer: an entry is looked for in the hash for good.
    const MANY: u64 = 1 << 47;
    const NUMBER: u64 = 1 << 48;

    /// Whether the cell has no entry.
    #[inline(always)]
    pub const fn is_free(self) -> bool {
        self.0 & Self::KEY == 0
    }

    /// Whether the cell's entry has these ports and this protocol ([`CellKey::word`]).
    #[inline(always)]
    pub const fn has(self, ports_and_protocol: u64) -> bool {
        self.0 & Self::KEY == ports_and_protocol
    }

    /// The ports and the protocol; `None` if the cell is free or being written.
    #[inline(always)]
    pub const fn key(self) -> Option<u64> {
        match self.0 & Self::KEY {
            0 | Self::TAKEN => None,
            key => Some(key),
        }
    }

    /// Whether an entry of one of this cell's keys is in the hash beside.
    #[inline(always)]
    pub const fn has_more(self) -> bool {
        self.0 & (0xff << 40) != 0
    }

    /// Whether entries in the hash beside are counted.
    #[inline(always)]
    pub const fn counts(self) -> bool {
        self.0 & Self::MANY == 0
    }

    /// That with one entry less in the hash beside, of which there is one.
    #[inline(always)]
    pub const fn one_less(self) -> Self {
        Self(self.0.wrapping_sub(Self::ONE_MORE))
    }

    /// That of a free cell, once somebody has taken it.
    #[inline(always)]
    pub const fn taken(self) -> Self {
        Self(self.0 | Self::TAKEN)
    }

    /// What is added to a taken cell's when its entry is written.
    #[inline(always)]
    pub const fn written(ports_and_protocol: u64) -> u64 {
        ports_and_protocol
            .wrapping_sub(Self::TAKEN)
            .wrapping_add(Self::NUMBER)
    }

    /// That of a cell with an entry, once that is removed.
    #[inline(always)]
    pub const fn freed(self) -> Self {
        Self(self.0 & !Self::KEY)
    }
}

const _: () = assert!(size_of::<Cell>() == 64);

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{collections::HashSet, vec::Vec};

    use super::*;
    use crate::Protocol;

    fn key(client: u16) -> FlowKey {
        FlowKey::new(
            Addr::from_v4([192, 0, 2, 7]),
            Port::new(client),
            Addr::from_v4([10, 96, 0, 10]),
            Port::new(443),
            Protocol::TCP,
        )
    }

    #[test]
    fn ports_that_a_client_takes_one_after_the_other_have_cells_one_after_the_other() {
        let first = key(32_768 - 443).place();
        for step in 0..1000_u16 {
            let next = key(32_768 - 443 + 2 * step).place();
            assert_eq!(next, first.wrapping_add(u32::from(step)));
        }
        let back = |port| PortKey::new(key(1).dst, Port::new(80), Port::new(port), Protocol::UDP);
        let first = back(40_000).place();
        assert_eq!(back(40_002).place(), first.wrapping_add(1));
    }

    #[test]
    fn all_ports_have_cells_of_their_own() {
        let mut places: Vec<u32> = (0..=u16::MAX).map(|port| key(port).place()).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 1 << 16);
    }

    #[test]
    fn every_part_of_an_address_tells() {
        let bases: HashSet<u32> = (0..=255_u8)
            .flat_map(|n| {
                [[n, 0, 2, 7], [192, n, 2, 7], [192, 0, n, 7], [192, 0, 2, n]].map(|src| {
                    let src = Addr::from_v4(src);
                    FlowKey { src, ..key(1) }.place() & 0xffff
                })
            })
            .collect();
        // Of 1021 different ones; by chance 8 meet.
        assert!(bases.len() > 980, "{}", bases.len());
    }

    #[test]
    fn a_head_goes_round() {
        let key = key(1000).word(FlowKey::HEAD);
        let free = Head(7 * Head::ONE_MORE + 3 * Head::NUMBER);
        assert!(free.is_free() && free.has_more() && free.key().is_none());
        let taken = free.taken();
        assert!(!taken.is_free() && taken.key().is_none());
        // Somebody counts one more meanwhile.
        let counted = Head(taken.0 + Head::ONE_MORE);
        let full = Head(counted.0.wrapping_add(Head::written(key)));
        assert!(full.has(key) && full.key() == Some(key));
        assert_eq!(full.freed(), Head(8 * Head::ONE_MORE + 4 * Head::NUMBER));
        assert_eq!(full.one_less().0 + Head::ONE_MORE, full.0);
        let last = Head(u64::MAX << 48);
        let full = Head(last.taken().0.wrapping_add(Head::written(key)));
        assert_eq!(full, Head(key), "the number begins anew");
    }
}
