//! An upload whose body is received or whose file is committed.

use crate::log::LogEntry;
use haul_http::request::Request;
use haul_http::status::Status;
use haul_server::admission::eviction::Progress;
use std::net::SocketAddr;
use std::time::Instant;

/// An accepted `PUT`, with what its response and its log entry need.
#[derive(Debug)]
pub struct PendingUpload {
    pub target: String,
    pub keeps_alive: bool,
    pub only_new: bool,
    pub progress: Progress,
    pub minor_version: u8,
    pub received: Instant,
    /// The log entry without its result; `None` without a log.
    entry: Option<LogEntry>,
}

impl PendingUpload {
    pub fn new(
        request: &Request<'_>,
        peer: Option<SocketAddr>,
        received: Instant,
        now_seconds: u32,
        is_logged: bool,
    ) -> Self {
        let entry = || LogEntry::new(peer, request, Status::CREATED, 0, received);
        Self {
            target: request.target.to_owned(),
            keeps_alive: request.keeps_alive,
            only_new: request.fields.if_none_match.is_any(),
            progress: Progress::new(now_seconds),
            minor_version: request.minor_version,
            received,
            entry: is_logged.then(entry),
        }
    }

    /// The log entry with this result.
    pub fn log_entry(&self, status: Status, body_bytes: u64) -> Option<LogEntry> {
        Some(self.entry.as_ref()?.with_result(status, body_bytes))
    }
}
