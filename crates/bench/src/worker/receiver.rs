//! The receiving process: one way of receiving, until the stream ends.

use super::{Message, Outcome, Tally, failed, now_ns, sleep_until, stopped};
use crate::receive::method::ReceiveMethod;
use haul::{Mapping, ReceiveSettings, Receiver};
use haul_sys::uring_receive::ReceiveRing;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::atomic::Ordering::Relaxed;

/// The most that one call reads: what iperf3 and many servers use at most, and small enough for a second-level
/// cache. A larger buffer is filled in calls of this size.
const CALL_BYTES_MAX: usize = 128 * 1024;
/// The largest buffer of a ring: several must be on their way at a time.
const RING_BUFFER_BYTES_MAX: usize = 64 * 1024;
/// A ring with fewer buffers stops for want of one.
const RING_BUFFERS_MIN: usize = 4;
/// The file that is written over and over, small enough to stay in the page cache until it is gone.
const FILE_BYTES: u64 = 64 << 20;
/// More than comes in any window.
const ENDLESS: u64 = 1 << 50;

/// How much is read at a time where a rate is held: few enough wake-ups not to matter, and small beside what a window of
/// 100 ms receives at the lowest rates.
const HELD_BYTES: u64 = 256 << 10;

/// How to receive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Receiving {
    pub way: ReceiveMethod,
    /// The memory that is filled, round and round: the buffer, the window, or all buffers of a ring.
    pub buffer_bytes: usize,
    /// Whether the program looks at every byte.
    pub touch: bool,
    /// What must have arrived before the program is woken (`SO_RCVLOWAT`); 1 is the kernel's default.
    pub low_water_bytes: usize,
    /// For how long to poll the device before waiting for an interrupt, in microseconds; 0 for not at all.
    pub busy_poll_us: u32,
    /// The rate to read at, so that the window is what holds the sender back; full speed where `None`.
    pub read_bytes_per_second: Option<u64>,
    /// How long to wait once a read has emptied the socket, in microseconds, so that more packets come together; 0 for not
    /// at all. Only for [`ReceiveMethod::Read`].
    pub read_pause_us: u32,
}

impl Receiving {
    /// As an ordinary program does: `recv` into one buffer, not looked at.
    pub(crate) fn plainly() -> Self {
        Self {
            way: ReceiveMethod::Read,
            buffer_bytes: CALL_BYTES_MAX,
            touch: false,
            low_water_bytes: 1,
            busy_poll_us: 0,
            read_bytes_per_second: None,
            read_pause_us: 0,
        }
    }

    /// Receives until the stream ends.
    pub(super) fn run(&self, stream: &TcpStream, tally: &Tally) -> Result<Outcome, Message> {
        if self.low_water_bytes > 1 {
            haul_sys::sockopt::set_receive_low_water(stream, self.low_water_bytes)
                .map_err(|error| failed("setsockopt SO_RCVLOWAT", error))?;
        }
        super::poll_busily(stream, self.busy_poll_us)?;
        match self.way {
            ReceiveMethod::Read => {
                self.read(stream, tally).map_err(|error| failed("recv", error))?
            }
            ReceiveMethod::UringRead => self.read_by_ring(stream, tally)?,
            ReceiveMethod::SpliceToFile => self.splice_to_file(stream, tally)?,
            ReceiveMethod::Discard => self.discard(stream, tally)?,
            ReceiveMethod::Mapped => self.map(stream, tally, Mapping::Always)?,
            ReceiveMethod::Auto => self.map(stream, tally, Mapping::Measured)?,
        }
        tally.outcome()
    }

    fn read(&self, mut stream: &TcpStream, tally: &Tally) -> io::Result<()> {
        let mut buffer = vec![0; self.buffer_bytes];
        let mut at = 0;
        let mut rate = HeldRate::new(self.read_bytes_per_second);
        loop {
            let end = self.buffer_bytes.min(at + CALL_BYTES_MAX);
            let count = match stream.read(&mut buffer[at..end]) {
                // A sender that failed says more about why than its reset does.
                Ok(0) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                other => other?,
            };
            self.look_at(&buffer[at..at + count]);
            tally.bytes.fetch_add(count as u64, Relaxed);
            tally.calls.fetch_add(1, Relaxed);
            rate.wait(count as u64);
            if self.read_pause_us > 0 && count < end - at {
                sleep_until(now_ns() + u64::from(self.read_pause_us) * 1000);
            }
            at = if at + count < self.buffer_bytes { at + count } else { 0 };
        }
    }

    fn map(&self, stream: &TcpStream, tally: &Tally, mapping: Mapping) -> Result<(), Message> {
        let settings = ReceiveSettings {
            mapping,
            window_bytes: self.buffer_bytes,
            buffer_bytes: self.buffer_bytes.min(CALL_BYTES_MAX),
        };
        let mut receiver = Receiver::with(stream, settings).map_err(|error| stopped(&error))?;
        if let Some(refused) =
            receiver.report().fallbacks.first().filter(|_| mapping == Mapping::Always)
        {
            return Err(Message::Refused(format!(
                "mapping does not work here: {}",
                refused.reason
            )));
        }
        receiver.expect(ENDLESS).map_err(|error| stopped(&error))?;
        let mut rate = HeldRate::new(self.read_bytes_per_second);
        while let Some(chunk) = receiver.receive().map_err(|error| stopped(&error))? {
            self.look_at(chunk.bytes());
            let count = chunk.bytes().len() as u64;
            let report = receiver.report();
            tally.bytes.store(report.mapped.bytes + report.read.bytes, Relaxed);
            tally.mapped_bytes.store(report.mapped.bytes, Relaxed);
            tally.calls.store(report.mapped.calls + report.read.calls, Relaxed);
            rate.wait(count);
        }
        Ok(())
    }

    fn read_by_ring(&self, stream: &TcpStream, tally: &Tally) -> Result<(), Message> {
        let buffer_bytes = (self.buffer_bytes / RING_BUFFERS_MIN).min(RING_BUFFER_BYTES_MAX);
        let count = self.buffer_bytes / buffer_bytes.max(1);
        let mut ring = ReceiveRing::new(stream, count, buffer_bytes).map_err(|error| {
            Message::Refused(format!("no io_uring with buffer rings here: {error}"))
        })?;
        let mut rate = HeldRate::new(self.read_bytes_per_second);
        loop {
            let received = ring.receive(|bytes| self.look_at(bytes));
            let count = received.map_err(|error| failed("io_uring recv", error))?;
            if count == 0 {
                return Ok(());
            }
            tally.bytes.fetch_add(count as u64, Relaxed);
            tally.calls.store(ring.enters(), Relaxed);
            rate.wait(count as u64);
        }
    }

    fn splice_to_file(&self, stream: &TcpStream, tally: &Tally) -> Result<(), Message> {
        let file =
            tempfile::tempfile().map_err(|error| failed("making a temporary file", error))?;
        let mut receiver = Receiver::new(stream).map_err(|error| stopped(&error))?;
        let mut at = 0;
        let mut rate = HeldRate::new(self.read_bytes_per_second);
        loop {
            let received = receiver.receive_into_file(&file, at..FILE_BYTES);
            let count = received.map_err(|error| stopped(&error))?;
            if count == 0 {
                return Ok(());
            }
            at = (at + count) % FILE_BYTES;
            tally.bytes.fetch_add(count, Relaxed);
            tally.calls.store(receiver.report().into_file.calls, Relaxed);
            rate.wait(count);
        }
    }

    fn discard(&self, stream: &TcpStream, tally: &Tally) -> Result<(), Message> {
        let mut receiver = Receiver::new(stream).map_err(|error| stopped(&error))?;
        let mut rate = HeldRate::new(self.read_bytes_per_second);
        loop {
            let count = receiver.discard(ENDLESS).map_err(|error| stopped(&error))?;
            if count == 0 {
                return Ok(());
            }
            tally.bytes.fetch_add(count, Relaxed);
            tally.calls.store(receiver.report().discarded.calls, Relaxed);
            rate.wait(count);
        }
    }

    /// Reads every byte once, as a parser or a checksum would, if it is to be touched.
    fn look_at(&self, bytes: &[u8]) {
        if self.touch {
            let (words, rest) = bytes.as_chunks::<8>();
            let sum =
                words.iter().fold(0u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
            black_box(rest.iter().fold(sum, |sum, &byte| sum.wrapping_add(byte.into())));
        }
    }
}

/// Holds a reader to a rate: sleeps after each [`HELD_BYTES`] until more is due.
struct HeldRate {
    /// `None` for full speed.
    bytes_per_second: Option<u64>,
    unpaid_bytes: u64,
    due_ns: u64,
}

impl HeldRate {
    fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, unpaid_bytes: 0, due_ns: now_ns() }
    }

    fn wait(&mut self, bytes: u64) {
        let Some(bytes_per_second) = self.bytes_per_second else { return };
        self.unpaid_bytes += bytes;
        if self.unpaid_bytes < HELD_BYTES {
            return;
        }
        let ns_of = |bytes: u64| {
            (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1))) as u64
        };
        // A reader that was kept from its CPU catches up on one piece and no more: a burst is another regime.
        self.due_ns = (self.due_ns + ns_of(self.unpaid_bytes))
            .max(now_ns().saturating_sub(ns_of(HELD_BYTES)));
        self.unpaid_bytes = 0;
        sleep_until(self.due_ns);
    }
}
