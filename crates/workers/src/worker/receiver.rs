//! The receiving worker: receives with one method until the stream ends.

use super::{Message, Outcome, WorkCounters, failed, failure_message, now_ns, sleep_until};
use crate::receive_method::ReceiveMethod;
use haul::{Mapping, ReceiveSettings, Receiver};
use haul_sys::uring_receive::ReceiveRing;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum bytes per read: the maximum of iperf3 and many servers, and small enough for a
/// second-level cache. A larger buffer is filled by several calls of this size.
const CALL_BYTES_MAX: usize = 128 * 1024;
/// Maximum size of one buffer in an io_uring buffer ring, so that several can be in flight.
const RING_BUFFER_BYTES_MAX: usize = 64 * 1024;
/// Minimum number of ring buffers. With fewer, receiving stops when no buffer is free.
const RING_BUFFERS_MIN: usize = 4;
/// Size of the temporary file, which is overwritten repeatedly. It is small enough to stay in the
/// page cache until it is deleted.
const FILE_BYTES: u64 = 64 << 20;
/// Stream length given to the library: more than any window receives.
const STREAM_BYTES_MAX: u64 = 1 << 50;

/// Bytes read between two waits of a rate-limited reader. The wake-ups are too few to matter, and
/// the bytes are few compared with the bytes that a window of 100 ms receives at the lowest rates.
const RATE_CHUNK_BYTES: u64 = 256 << 10;

/// Parameters of a receiving task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReceiveTask {
    /// The receive method. Between two machines it is called as it was at first.
    #[serde(rename = "way")]
    pub method: ReceiveMethod,
    /// Bytes of memory filled in a cycle: the buffer, the mapped window, or all buffers of a ring.
    pub buffer_bytes: usize,
    /// Whether the program reads every byte.
    pub touch: bool,
    /// Bytes that must have arrived before the program is woken (`SO_RCVLOWAT`); 1 is the kernel's
    /// default.
    pub low_water_bytes: usize,
    /// Time to poll the device before waiting for an interrupt, in microseconds; 0 disables busy
    /// polling.
    pub busy_poll_us: u32,
    /// Rate at which to read, so that the receive window limits the sender; `None` for full speed.
    pub read_bytes_per_second: Option<u64>,
    /// Pause after a read has emptied the socket, in microseconds, so that more packets are read at
    /// a time; 0 for none. Only for [`ReceiveMethod::Read`].
    pub read_pause_us: u32,
}

impl ReceiveTask {
    /// Default parameters, as in an ordinary program: `recv` into one buffer, whose bytes are not
    /// read.
    pub fn plainly() -> Self {
        Self {
            method: ReceiveMethod::Read,
            buffer_bytes: CALL_BYTES_MAX,
            touch: false,
            low_water_bytes: 1,
            busy_poll_us: 0,
            read_bytes_per_second: None,
            read_pause_us: 0,
        }
    }

    /// Receives until the stream ends.
    pub fn run(&self, stream: &TcpStream, counters: &WorkCounters) -> Result<Outcome, Message> {
        if self.low_water_bytes > 1 {
            haul_sys::sockopt::set_receive_low_water(stream, self.low_water_bytes)
                .map_err(|error| failed("setsockopt SO_RCVLOWAT", error))?;
        }
        super::set_busy_poll(stream, self.busy_poll_us)?;
        match self.method {
            ReceiveMethod::Read => {
                self.read(stream, counters).map_err(|error| failed("recv", error))?;
            }
            ReceiveMethod::UringRead => self.receive_by_ring(stream, counters)?,
            ReceiveMethod::SpliceToFile => self.splice_to_file(stream, counters)?,
            ReceiveMethod::Discard => self.discard(stream, counters)?,
            ReceiveMethod::Mapped => self.receive_mapped(stream, counters, Mapping::Always)?,
            ReceiveMethod::Auto => self.receive_mapped(stream, counters, Mapping::Measured)?,
        }
        counters.outcome()
    }

    fn read(&self, mut stream: &TcpStream, counters: &WorkCounters) -> io::Result<()> {
        let mut buffer = vec![0; self.buffer_bytes];
        let mut offset = 0;
        let mut limiter = RateLimiter::new(self.read_bytes_per_second);
        loop {
            let end = self.buffer_bytes.min(offset + CALL_BYTES_MAX);
            let count = match stream.read(&mut buffer[offset..end]) {
                // Treated as the end of the stream: if the sender failed, its own message has the
                // reason.
                Ok(0) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                other => other?,
            };
            self.touch_bytes(&buffer[offset..offset + count]);
            counters.bytes.fetch_add(count as u64, Relaxed);
            counters.calls.fetch_add(1, Relaxed);
            limiter.wait(count as u64);
            if self.read_pause_us > 0 && count < end - offset {
                sleep_until(now_ns() + u64::from(self.read_pause_us) * 1000);
            }
            offset = if offset + count < self.buffer_bytes { offset + count } else { 0 };
        }
    }

    fn receive_mapped(
        &self,
        stream: &TcpStream,
        counters: &WorkCounters,
        mapping: Mapping,
    ) -> Result<(), Message> {
        let settings = ReceiveSettings::default()
            .with_mapping(mapping)
            .with_window_bytes(self.buffer_bytes)
            .with_buffer_bytes(self.buffer_bytes.min(CALL_BYTES_MAX));
        let mut receiver =
            Receiver::with_settings(stream, settings).map_err(|error| failure_message(&error))?;
        if let Some(refused) =
            receiver.report().fallbacks.first().filter(|_| mapping == Mapping::Always)
        {
            return Err(Message::Refused(format!(
                "mapped receive is not available: {}",
                refused.reason
            )));
        }
        receiver.expect(STREAM_BYTES_MAX);
        let mut limiter = RateLimiter::new(self.read_bytes_per_second);
        while let Some(chunk) = receiver.receive().map_err(|error| failure_message(&error))? {
            self.touch_bytes(&chunk);
            let count = chunk.len() as u64;
            let report = receiver.report();
            counters.bytes.store(report.mapped.bytes + report.read.bytes, Relaxed);
            counters.mapped_bytes.store(report.mapped.bytes, Relaxed);
            counters.calls.store(report.mapped.calls + report.read.calls, Relaxed);
            limiter.wait(count);
        }
        Ok(())
    }

    fn receive_by_ring(&self, stream: &TcpStream, counters: &WorkCounters) -> Result<(), Message> {
        let buffer_bytes = (self.buffer_bytes / RING_BUFFERS_MIN).min(RING_BUFFER_BYTES_MAX);
        let count = self.buffer_bytes / buffer_bytes.max(1);
        let mut ring = ReceiveRing::new(stream, count, buffer_bytes).map_err(|error| {
            Message::Refused(format!("io_uring with buffer rings is not available: {error}"))
        })?;
        let mut limiter = RateLimiter::new(self.read_bytes_per_second);
        loop {
            let received = ring.receive(|bytes| self.touch_bytes(bytes));
            let count = received.map_err(|error| failed("io_uring recv", error))?;
            if count == 0 {
                return Ok(());
            }
            counters.bytes.fetch_add(count as u64, Relaxed);
            counters.calls.store(ring.enters(), Relaxed);
            limiter.wait(count as u64);
        }
    }

    fn splice_to_file(&self, stream: &TcpStream, counters: &WorkCounters) -> Result<(), Message> {
        let file =
            tempfile::tempfile().map_err(|error| failed("making a temporary file", error))?;
        let mut receiver = Receiver::new(stream).map_err(|error| failure_message(&error))?;
        let mut offset = 0;
        let mut limiter = RateLimiter::new(self.read_bytes_per_second);
        loop {
            let received = receiver.receive_into_file(&file, offset..FILE_BYTES);
            let count = received.map_err(|error| failure_message(&error))?;
            if count == 0 {
                return Ok(());
            }
            offset = (offset + count) % FILE_BYTES;
            counters.bytes.fetch_add(count, Relaxed);
            counters.calls.store(receiver.report().into_file.calls, Relaxed);
            limiter.wait(count);
        }
    }

    fn discard(&self, stream: &TcpStream, counters: &WorkCounters) -> Result<(), Message> {
        let mut receiver = Receiver::new(stream).map_err(|error| failure_message(&error))?;
        let mut limiter = RateLimiter::new(self.read_bytes_per_second);
        loop {
            let count =
                receiver.discard(STREAM_BYTES_MAX).map_err(|error| failure_message(&error))?;
            if count == 0 {
                return Ok(());
            }
            counters.bytes.fetch_add(count, Relaxed);
            counters.calls.store(receiver.report().discarded.calls, Relaxed);
            limiter.wait(count);
        }
    }

    /// Reads every byte once, as a parser or a checksum would, if `touch` is set.
    fn touch_bytes(&self, bytes: &[u8]) {
        if self.touch {
            let (words, rest) = bytes.as_chunks::<8>();
            let sum =
                words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
            black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
        }
    }
}

/// Limits the rate of a reader: after each [`RATE_CHUNK_BYTES`] it sleeps until more is due.
struct RateLimiter {
    /// `None` for full speed.
    bytes_per_second: Option<u64>,
    pending_bytes: u64,
    due_ns: u64,
}

impl RateLimiter {
    fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, pending_bytes: 0, due_ns: now_ns() }
    }

    fn wait(&mut self, bytes: u64) {
        let Some(bytes_per_second) = self.bytes_per_second else { return };
        self.pending_bytes += bytes;
        if self.pending_bytes < RATE_CHUNK_BYTES {
            return;
        }
        let ns_of = |bytes: u64| {
            (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1))) as u64
        };
        // A reader that was delayed catches up on one chunk at most, because a burst would change
        // the regime.
        self.due_ns = (self.due_ns + ns_of(self.pending_bytes))
            .max(now_ns().saturating_sub(ns_of(RATE_CHUNK_BYTES)));
        self.pending_bytes = 0;
        sleep_until(self.due_ns);
    }
}
