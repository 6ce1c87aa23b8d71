//! What is reported about a connection: in the log, to an operator, and to the next process.

use super::ConnectionForwarder;
use crate::record::connection::{ConnectionBytes, Record};
use haul::ForwardReport;
use std::time::Instant;

/// What is reported about a connection.
#[derive(Debug)]
pub(super) struct Account {
    pub record: Record,
    pub accepted_at: Instant,
    /// The bytes that other processes forwarded before a handover.
    pub earlier_bytes: ConnectionBytes,
    /// The length of the header that the upstream is sent first, which is not the client's.
    pub header_bytes: u64,
    /// Whether the end of the connection was logged, or another process logs it.
    pub is_logged: bool,
    turn: Turn,
}

/// A turn of the event loop on the connection.
#[derive(Debug, Default)]
struct Turn {
    /// When the turn started, if its time is measured.
    started: Option<Instant>,
    moved: MovedBytes,
    /// Whether [`super::Connection::prepare`] moved bytes, which a step has not accounted for yet.
    has_prepared: bool,
}

/// Bytes that were moved in each way, in both directions.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct MovedBytes {
    spliced: u64,
    copied: u64,
}

impl MovedBytes {
    /// What a connection moved so far.
    pub fn of(forwarder: &ConnectionForwarder) -> Self {
        let report = forwarder.report();
        Self {
            spliced: report.a_to_b.spliced.bytes + report.b_to_a.spliced.bytes,
            copied: report.a_to_b.copied.bytes + report.b_to_a.copied.bytes,
        }
    }

    /// Adds what was moved between two reports.
    fn add(&mut self, before: Self, after: Self) {
        self.spliced += after.spliced - before.spliced;
        self.copied += after.copied - before.copied;
    }
}

impl Account {
    pub fn new(record: Record, accepted_at: Instant) -> Self {
        Self {
            record,
            accepted_at,
            earlier_bytes: ConnectionBytes::default(),
            header_bytes: 0,
            is_logged: false,
            turn: Turn::default(),
        }
    }

    /// Adds what other processes forwarded.
    pub fn with_earlier(mut self, earlier_bytes: ConnectionBytes, header_bytes: u64) -> Self {
        self.earlier_bytes = earlier_bytes;
        self.header_bytes = header_bytes;
        self
    }

    /// Begins a turn of the event loop.
    pub fn begin_turn(&mut self, measures_time: bool) {
        self.turn.started = measures_time.then(Instant::now);
    }

    /// Adds the time since the turn started to the time of the connection.
    pub fn end_turn(&mut self) {
        if let Some(started) = self.turn.started.take() {
            let MovedBytes { spliced, copied } = std::mem::take(&mut self.turn.moved);
            self.record.loop_time.add(started.elapsed(), spliced, copied);
        }
    }

    /// Records what was prepared for the next step.
    pub fn record_prepared(&mut self, before: MovedBytes, forwarder: &ConnectionForwarder) {
        let after = MovedBytes::of(forwarder);
        self.turn.moved.add(before, after);
        self.turn.has_prepared |= after != before;
    }

    /// Records a step. True if the step moved bytes, or the preparation for it.
    pub fn record_step(&mut self, before: MovedBytes, forwarder: &ConnectionForwarder) -> bool {
        let after = MovedBytes::of(forwarder);
        self.turn.moved.add(before, after);
        let has_moved = after != before || std::mem::take(&mut self.turn.has_prepared);
        // The first bytes to the client of an adopted connection may have come from another
        // process.
        let is_first =
            self.record.first_byte_time.is_none() && self.earlier_bytes.to_client.is_empty();
        if has_moved && is_first && sent_bytes(&forwarder.report())[1] > 0 {
            self.record.first_byte_time = Some(self.accepted_at.elapsed());
        }
        has_moved
    }

    /// The bytes from the beginning, including the bytes that other processes forwarded.
    pub fn whole_bytes(&self, report: &ForwardReport) -> ConnectionBytes {
        let mut bytes = ConnectionBytes::from(report);
        bytes.add_earlier(&self.earlier_bytes);
        bytes
    }

    /// The bytes from the beginning, without the header.
    pub fn client_bytes(&self, report: &ForwardReport) -> ConnectionBytes {
        let mut bytes = self.whole_bytes(report);
        let copied_bytes = &mut bytes.to_upstream.copied_bytes;
        *copied_bytes = copied_bytes.saturating_sub(self.header_bytes);
        bytes
    }
}

/// The bytes that were sent to the upstream, and to the client.
pub(super) fn sent_bytes(report: &ForwardReport) -> [u64; 2] {
    [&report.a_to_b, &report.b_to_a].map(|one| one.spliced.bytes + one.copied.bytes)
}
