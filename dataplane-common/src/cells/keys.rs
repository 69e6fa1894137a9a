//! Keys that have a home among cells or slots.

#![expect(
    clippy::cast_possible_truncation,
    reason = "words are taken apart: what is cut off is another field"
)]

use super::words::{HEAD, half};
use crate::{
    Port,
    packet::{FlowKey, PortKey},
};

/// A key that has a home: addresses, then a word of ports and protocol.
pub trait CellKey: Copy {
    /// How many words the addresses are.
    const WORDS: usize;

    /// A word of the addresses, as it lies in memory; and the last, as a head has it.
    fn word(&self, index: usize) -> u64;

    /// Returns which cell or slot is the key's home, of 2^32. `secret`: [`PacketConfig::secret`].
    ///
    /// All factors depend on the secret. Otherwise a client could choose its addresses and ports such that its flows
    /// have the cells of another client's flow. The topmost bits of a word change the product in a way that does not depend
    /// on the factor, so each product is folded in a way of its own: no two words' topmost bits cancel each other out.
    ///
    /// [`PacketConfig::secret`]: crate::packet::PacketConfig::secret
    #[inline(always)]
    fn place(&self, secret: u64) -> u32 {
        // Odd numbers without any other requirement (fractions of square roots).
        const FACTORS: [u64; 5] = [
            0x6a09_e667_f3bc_c909,
            0xbb67_ae85_84ca_a73b,
            0x3c6e_f372_fe94_f82b,
            0xa54f_f53a_5f1d_36f1,
            0x9e37_79b9_7f4a_7c15,
        ];
        const SHIFTS: [u32; 4] = [32, 29, 26, 23];
        // A secret is even, so that each factor stays odd.
        let head = self.word(Self::WORDS);
        let last = FACTORS[4] ^ secret;
        let mut mixed = (head >> 32).wrapping_mul(last);
        let mut index = 0;
        while index < Self::WORDS {
            let product = self.word(index).wrapping_mul(FACTORS[index] ^ secret);
            mixed ^= product ^ product >> SHIFTS[index];
            index += 1;
        }
        let base = (mixed.wrapping_mul(last) >> 32) as u32;
        // One of the two ports is the client's, the other is shared by many clients. A client takes every second port
        // (`__inet_hash_connect` in `net/ipv4/inet_hashtables.c`): these ports get consecutive places, too.
        let [first, second] = [head as u16, (head >> 16) as u16].map(Port::from_be);
        let ports = first.host().wrapping_add(second.host());
        base.wrapping_add(u32::from(ports.rotate_right(1)))
    }
}

#[inline(always)]
const fn head(first: Port, second: Port, protocol: u8) -> u64 {
    first.be() as u64 | (second.be() as u64) << 16 | (protocol as u64) << 32
}

impl CellKey for FlowKey {
    const WORDS: usize = HEAD;

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
    const WORDS: usize = 2;

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        match index {
            0 | 1 => half(self.endpoint, index),
            _ => head(self.endpoint_port, self.node_port, self.protocol.number()),
        }
    }
}
