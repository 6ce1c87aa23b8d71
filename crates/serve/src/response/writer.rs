//! A response that is being sent.

use crate::log::LogEntry;
use crate::response::body::Body;
use haul_server::admission::eviction::Progress;
use std::ops::Range;
use std::time::Instant;

/// The unsent rest of a response, and what its completion needs.
#[derive(Debug)]
pub struct ResponseWriter {
    pub head: Vec<u8>,
    pub body: Body,
    /// Whether the connection closes after it.
    pub closes: bool,
    pub log_entry: Option<LogEntry>,
    /// The start of the turn that received the request.
    pub received: Instant,
    /// The second of the clock in which the socket last accepted bytes.
    pub accepted_at: u32,
    pub progress: Progress,
    /// The range of the current file that is in memory, or that an offload thread has just read.
    /// The range is sent even if the kernel dropped it by now.
    pub resident: Range<u64>,
}

impl ResponseWriter {
    /// The number of unsent bytes.
    pub fn len(&self) -> u64 {
        self.head.len() as u64 + self.body.len()
    }
}
