//! A worker's buffers.
//!
//! Bytes are read into one buffer that all of a worker's connections share, and written from there at once. So a
//! connection holds memory only for bytes that its reader has not taken: an idle connection, and one whose reader keeps
//! up, hold none.
//!
//! The worker's budget limits the bytes that connections hold. Above half of it, the worker reads less at a time; above
//! all of it, the worker ends connections ([`Buffers::is_over`]).

/// The most that is read at a time.
pub const LARGE: usize = 256 << 10;
/// The most that is read at a time from a connection that has not shown yet that it has more, or whose reader does not
/// keep up: as much is held then.
pub const SMALL: usize = 16 << 10;
/// A connection that holds more bytes than this takes the whole shared buffer, and nothing is copied.
const COPIED: usize = 64 << 10;
/// The maximum number of large buffers that wait for reuse.
const SPARE: usize = 4;

/// A worker's buffers.
#[derive(Debug)]
pub struct Buffers {
    shared: Box<[u8]>,
    spare: Vec<Box<[u8]>>,
    held: usize,
    budget: usize,
}

/// Bytes that were read and not yet written.
#[derive(Debug)]
pub struct Held {
    buffer: Box<[u8]>,
    start: u32,
    end: u32,
}

impl Held {
    /// Returns the bytes that are left to write.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start as usize..self.end as usize]
    }

    /// The memory that it takes.
    pub fn size(&self) -> usize {
        self.buffer.len()
    }

    /// So much of it was written.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "no more than a buffer's size"
    )]
    pub fn consume(&mut self, count: usize) {
        self.start += count as u32;
    }
}

impl Buffers {
    /// Creates the buffers, of which connections may hold `budget` bytes.
    pub fn new(budget: usize) -> Self {
        Self {
            shared: large(),
            spare: Vec::with_capacity(SPARE),
            held: 0,
            budget,
        }
    }

    /// The shared one.
    pub fn shared(&mut self) -> &mut [u8] {
        &mut self.shared
    }

    /// Keeps `start..end` of the shared one.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "no more than a buffer's size"
    )]
    pub fn hold(&mut self, start: usize, end: usize) -> Held {
        let held = if end - start > COPIED {
            let other = self.spare.pop().unwrap_or_else(large);
            Held {
                buffer: std::mem::replace(&mut self.shared, other),
                start: start as u32,
                end: end as u32,
            }
        } else {
            Held {
                buffer: self.shared[start..end].into(),
                start: 0,
                end: (end - start) as u32,
            }
        };
        self.held += held.size();
        held
    }

    /// Takes back bytes that were written, or never will be.
    pub fn release(&mut self, held: Held) {
        self.held -= held.size();
        if held.buffer.len() == LARGE && self.spare.len() < SPARE {
            self.spare.push(held.buffer);
        }
    }

    /// Returns unused buffers to the system.
    pub fn trim(&mut self) {
        self.spare.clear();
    }

    /// Whether there is something to give back.
    pub fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Bytes that connections hold.
    pub fn held(&self) -> usize {
        self.held
    }

    /// How many bytes to read at a time instead of `size`: fewer while much is held.
    pub fn reading(&self, size: usize) -> usize {
        if self.held > self.budget / 2 {
            size.min(SMALL)
        } else {
            size
        }
    }

    /// Whether connections hold more than they may.
    pub fn is_over(&self) -> bool {
        self.held > self.budget
    }

    /// Returns how many bytes connections must release when they hold more than the budget: an eighth of the budget
    /// besides, so that they do not exceed it again at once.
    pub fn excess(&self) -> usize {
        self.held.saturating_sub(self.budget - self.budget / 8)
    }
}

fn large() -> Box<[u8]> {
    vec![0; LARGE].into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_bytes_are_copied_and_many_take_the_buffer() {
        let mut buffers = Buffers::new(1 << 20);
        for (end, byte) in buffers.shared().iter_mut().zip((0..=250).cycle()) {
            *end = byte;
        }
        let pattern = buffers.shared().to_vec();
        let mut all = 0;
        for (count, size) in [(2, 2), (COPIED, COPIED), (COPIED + 1, LARGE)] {
            let mut held = buffers.hold(7, 7 + count);
            assert!(held.bytes() == &pattern[7..7 + count], "{count}");
            all += size;
            assert_eq!((held.size(), buffers.held()), (size, all));
            held.consume(1);
            held.consume(count - 2);
            assert_eq!(held.bytes(), &pattern[6 + count..7 + count]);
        }
        assert_eq!(buffers.shared().len(), LARGE);
    }

    #[test]
    fn large_buffers_wait_for_reuse() {
        let mut buffers = Buffers::new(1 << 30);
        let small = buffers.hold(0, COPIED);
        let large: Vec<Held> = (0..=SPARE).map(|_| buffers.hold(0, LARGE)).collect();
        assert!(!buffers.has_spare());
        buffers.release(small);
        assert!(!buffers.has_spare() && buffers.held() == (SPARE + 1) * LARGE);
        for held in large {
            buffers.release(held);
            assert!(buffers.has_spare());
        }
        assert_eq!((buffers.spare.len(), buffers.held()), (SPARE, 0));
        let again = buffers.hold(0, LARGE);
        assert_eq!(buffers.spare.len(), SPARE - 1);
        buffers.release(again);
        buffers.trim();
        assert!(!buffers.has_spare());
    }

    #[test]
    fn a_budget_bounds_what_is_read_and_held() {
        let budget = 1 << 20;
        let mut buffers = Buffers::new(budget);
        for (held, is_little, is_over, excess) in [
            (0, false, false, 0),
            (budget / 2, false, false, 0),
            (budget / 2 + 1, true, false, 0),
            (budget / 8 * 7, true, false, 0),
            (budget, true, false, budget / 8),
            (budget + 1, true, true, budget / 8 + 1),
        ] {
            buffers.held = held;
            let large = if is_little { SMALL } else { LARGE };
            assert_eq!(buffers.reading(LARGE), large, "{held}");
            assert_eq!(buffers.reading(SMALL / 2), SMALL / 2);
            assert_eq!((buffers.is_over(), buffers.excess()), (is_over, excess));
        }
    }
}
