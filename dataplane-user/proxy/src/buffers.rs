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
