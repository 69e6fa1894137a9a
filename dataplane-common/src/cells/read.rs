//! Reading a cell.

use super::{
    keys::CellKey,
    memory::Line,
    words::{Cell, HEAD, Head, STATE, State, VALUE, key_of, value_of},
};
use crate::packet::{FlowKey, PortKey, Translation};

/// Reads the value of the flow that a cell holds, or held last.
#[inline(always)]
pub fn value<L: Line>(line: L) -> Translation {
    value_of([VALUE, VALUE + 1, STATE].map(|word| line.load(word)))
}

/// Reads the key of a cell's flow. `ports_and_protocol`: the part of the key that the head has ([`Head::key`]).
#[inline(always)]
pub fn key<L: Line>(line: L, ports_and_protocol: u64) -> FlowKey {
    key_of([0, 1, 2, 3].map(|word| line.load(word)), ports_and_protocol)
}

/// A flow as its cell had it at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Snapshot {
    words: Cell,
}

/// Reads a cell; `None` if it has no flow, or is reused for another flow meanwhile (see [`super`], "Reading while
/// others write").
#[inline(always)]
pub fn read<L: Line>(line: L) -> Option<Snapshot> {
    let head = Head(line.load(HEAD));
    head.key()?;
    let mut words = [0; 8];
    let mut seen = head.0;
    let mut index = 0;
    while index < words.len() {
        if index != HEAD {
            words[index] = line.load_after(index, head.0);
            seen = L::both(seen, words[index]);
        }
        index += 1;
    }
    let after = Head(line.load_after(HEAD, seen));
    words[HEAD] = after.0;
    head.is_same(after).then_some(Snapshot { words })
}

impl Snapshot {
    /// The head.
    #[inline(always)]
    pub const fn head(&self) -> Head {
        Head(self.words[HEAD])
    }

    /// The state.
    #[inline(always)]
    pub const fn state(&self) -> State {
        State(self.words[STATE])
    }

    /// The flow's key.
    #[inline(always)]
    pub const fn key(&self) -> FlowKey {
        let [a, b, c, d, head, ..] = self.words;
        key_of([a, b, c, d], head & Head::KEY)
    }

    /// The flow's value.
    #[inline(always)]
    pub const fn value(&self) -> Translation {
        let [.., first, second, state] = self.words;
        value_of([first, second, state])
    }

    /// Whether it is the key's flow.
    #[inline(always)]
    pub fn is_of(&self, key: &FlowKey) -> bool {
        let mut differ = 0;
        let mut index = 0;
        while index < HEAD {
            differ |= self.words[index] ^ key.word(index);
            index += 1;
        }
        self.head().has(key.word(HEAD)) && differ == 0
    }

    /// Whether it is the flow of a reply to a client, which is not masqueraded.
    #[inline(always)]
    pub fn is_answered_by(&self, reply: &FlowKey) -> bool {
        let [first, second, .., head, _, _, state] = self.words;
        // As `Translation::seen_port`, without a branch: the client's own port counts if the flow has no other port.
        let given = state >> 16 & 0xffff;
        let port = given | ((head & 0xffff) * (given.wrapping_sub(1) >> 63));
        let differ = (first ^ reply.word(2))
            | (second ^ reply.word(3))
            | (self.words[VALUE] ^ reply.word(0))
            | (self.words[VALUE + 1] ^ reply.word(1))
            | port ^ u64::from(reply.dst_port.be())
            | (head >> 32 ^ u64::from(reply.protocol.number())) & 0xff
            | (state ^ u64::from(reply.src_port.be())) & 0xffff
            // Masqueraded.
            | state >> 56;
        differ == 0
    }

    /// Whether it is the flow of a reply to one of the node's ports, at any of the node's addresses.
    #[inline(always)]
    pub fn is_answered_by_port(&self, reply: &PortKey) -> bool {
        let [.., head, _, _, state] = self.words;
        let ports = u64::from(reply.endpoint_port.be()) | u64::from(reply.node_port.be()) << 16;
        let differ = (self.words[VALUE] ^ reply.word(0))
            | (self.words[VALUE + 1] ^ reply.word(1))
            | (head >> 32 ^ u64::from(reply.protocol.number())) & 0xff
            | (state ^ ports) & 0xffff_ffff;
        differ == 0 && state >> 56 != 0
    }
}
