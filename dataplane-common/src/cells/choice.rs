//! The state of a search among a key's cells for a flow to evict (`room.rs`).

/// State of the search. It looks at a key's cells one after the other, twice.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    /// The client that has more than half of the cells, if one has: otherwise any.
    pub(super) most: [u64; 2],
    /// How often it was seen more than other clients, in the first round (Boyer and Moore's vote).
    pub(super) ahead: u32,
    /// How many cells it has.
    pub(super) has: u32,
    /// The highest rank of all flows, and where it is.
    pub(super) any: u32,
    pub(super) any_at: u32,
    /// The highest rank of that client's flows, and where it is.
    pub(super) of_most: u32,
    pub(super) of_most_at: u32,
}
