//! How long a look at a file is good.
//!
//! Looking is a system call, and a loop that answers many requests for one file need not look for each of them: what was
//! so after all that was asked had come is so for all who have asked.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// No moment of one loop is taken for a moment of another, whoever looks at a file.
static NEXT_LOOP: AtomicU64 = AtomicU64::new(1);
/// More moments than any loop lives through.
const MOMENTS_OF_A_LOOP: u64 = 1 << 48;

/// A point in an event loop's life. Two looks in the same moment would see the same.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    heard: u64,
    moved: u64,
}

impl Moment {
    /// The first moment of a loop.
    pub fn first() -> Self {
        let first = NEXT_LOOP.fetch_add(1, Relaxed) * MOMENTS_OF_A_LOOP;
        Self { heard: first, moved: first }
    }

    /// A client has said something, or time has passed: whatever was looked at before may be another by now.
    pub fn heard(&mut self) {
        self.heard += 1;
        self.moved += 1;
    }

    /// A response has gone, or a part of a file has: files whose pages are sent are to be looked at again, right before they are.
    pub fn moved(&mut self) {
        self.moved += 1;
    }

    /// What a look at something is good for whose bytes in memory are sent: they are what they are, and only have to be what
    /// they were when somebody asked.
    pub fn of_memory(self) -> u64 {
        self.heard
    }

    /// What a look at something is good for whose pages are sent, which may change at any time.
    pub fn of_pages(self) -> u64 {
        self.moved
    }
}
