//! Memory for bytes of any length, in cells of one size.
//!
//! The cells have memory chunks of their own. So short-lived allocations for a query never lie between two answers, and
//! any new answer fits into the cells of a removed answer.

use std::iter;

/// Bytes of a cell, and of its part that is not the number of the next cell.
const CELL: usize = 64;
const DATA: usize = CELL - size_of::<u32>();
/// Cells of a chunk.
const CHUNK: usize = 256;
/// The number of no cell.
const NONE: u32 = u32::MAX;

struct Cell {
    data: [u8; DATA],
    /// The next cell of the same bytes, or the next free cell.
    next: u32,
}

/// Cells with bytes, and free cells.
pub struct Cells {
    chunks: Vec<Box<[Cell]>>,
    /// The first free cell.
    free: u32,
}

impl Default for Cells {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            free: NONE,
        }
    }
}

impl Cells {
    /// Returns the number of bytes of the cells for `length` bytes.
    pub const fn size(length: usize) -> usize {
        length.div_ceil(DATA) * CELL
    }

    /// Copies bytes, of which there is at least one, into cells. Returns the number of the first cell.
    pub fn put(&mut self, bytes: &[u8]) -> u32 {
        let mut next = NONE;
        for piece in bytes.chunks(DATA).rev() {
            if self.free == NONE {
                self.grow();
            }
            let at = self.free;
            let cell = self.cell_mut(at);
            cell.data[..piece.len()].copy_from_slice(piece);
            self.free = std::mem::replace(&mut cell.next, next);
            next = at;
        }
        next
    }

    /// Copies the bytes in `range` of those that begin at a cell.
    pub fn read(&self, first: u32, range: std::ops::Range<usize>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(range.len());
        let mut skip = range.start;
        for cell in self.chain(first) {
            let data = cell.data.get(skip..).unwrap_or_default();
            let wanted = range.len() - bytes.len();
            bytes.extend_from_slice(&data[..wanted.min(data.len())]);
            skip = skip.saturating_sub(DATA);
        }
        bytes
    }

    /// Whether the bytes that begin at a cell begin with others.
    pub fn starts_with(&self, first: u32, others: &[u8]) -> bool {
        let mut cells = self.chain(first);
        let mut others = others.chunks(DATA);
        others.all(|other| {
            cells
                .next()
                .is_some_and(|cell| cell.data.starts_with(other))
        })
    }

    /// Frees the cells of bytes.
    pub fn free(&mut self, first: u32) {
        let mut last = first;
        while self.cell(last).next != NONE {
            last = self.cell(last).next;
        }
        self.cell_mut(last).next = std::mem::replace(&mut self.free, first);
    }

    /// Adds a chunk. Its cells are free.
    fn grow(&mut self) {
        let start = self.chunks.len() * CHUNK;
        let cells = (start..start + CHUNK).map(|at| Cell {
            data: [0; DATA],
            next: u32::try_from(at + 1).expect("memory is less than 2^32 cells"),
        });
        let mut chunk: Box<[Cell]> = cells.collect();
        chunk[CHUNK - 1].next = std::mem::replace(&mut self.free, chunk[0].next - 1);
        self.chunks.push(chunk);
    }

    fn chain(&self, first: u32) -> impl Iterator<Item = &Cell> {
        let cell = |at| (at != NONE).then(|| self.cell(at));
        iter::successors(cell(first), move |last| cell(last.next))
    }

    fn cell(&self, at: u32) -> &Cell {
        &self.chunks[at as usize / CHUNK][at as usize % CHUNK]
    }

    fn cell_mut(&mut self, at: u32) -> &mut Cell {
        &mut self.chunks[at as usize / CHUNK][at as usize % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_are_as_they_were_put(
            puts in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 1..300)), 1..200),
        ) {
            let mut cells = Cells::default();
            let mut kept: Vec<(u32, Vec<u8>)> = vec![];
            let mut most = 0;
            for (index, bytes) in puts {
                // The test retains two of three.
                if bytes[0] % 3 == 0 && !kept.is_empty() {
                    let (first, _) = kept.swap_remove(index.index(kept.len()));
                    cells.free(first);
                }
                kept.push((cells.put(&bytes), bytes));
                most = most.max(kept.iter().map(|(_, bytes)| Cells::size(bytes.len())).sum());
                for (first, bytes) in &kept {
                    let range = index.index(bytes.len())..bytes.len();
                    prop_assert_eq!(&cells.read(*first, range.clone()), &bytes[range.clone()]);
                    prop_assert!(cells.starts_with(*first, &bytes[..range.start]));
                    let mut other = bytes[..=range.start].to_vec();
                    other[range.start] ^= 1;
                    prop_assert!(!cells.starts_with(*first, &other));
                }
                // The cells reuse freed cells of any length before they allocate more.
                prop_assert_eq!(cells.chunks.len(), usize::div_ceil(most, CHUNK * CELL));
            }
        }
    }
}
