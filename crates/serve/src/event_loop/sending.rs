//! A response on its way.

use crate::log::Logged;
use crate::response::body::Body;
use std::ops::Range;
use std::time::Instant;

/// What is left of a response, and what its end will need.
#[derive(Debug)]
pub struct Sending {
    pub head: Vec<u8>,
    pub body: Body,
    /// Whether the connection ends after it.
    pub closes: bool,
    pub logged: Option<Logged>,
    /// When the turn began that has read its request, or first did.
    pub started: Instant,
    /// When bytes last went, by the loop's clock.
    pub moved_at: u32,
    /// What of the file that is being sent is known to be in memory, or was just read by a helper: that is sent, come what may.
    pub warm: Range<u64>,
}

impl Sending {
    /// How much is left, in bytes.
    pub fn len(&self) -> u64 {
        self.head.len() as u64 + self.body.len()
    }
}
