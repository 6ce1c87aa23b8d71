//! The source of a TLS stream: encrypts the same memory repeatedly and sends the records.

use super::{Message, Outcome, WorkCounters, failed, report_started};
use crate::tls_records::{PLAINTEXT_BYTES_MAX, RecordSealer};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering::Relaxed;

/// Parameters of a task that sends a TLS stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TlsSendTask {
    /// Plaintext bytes of one call: whole records, and the rest as a smaller one.
    pub chunk_bytes: usize,
    /// Pacing rate; `None` for full speed.
    pub rate_bits_per_second: Option<u64>,
}

impl TlsSendTask {
    /// Sends until the window is over. Only the bytes of the plaintext count.
    pub fn run(&self, mut stream: &TcpStream, counters: &WorkCounters) -> Result<Outcome, Message> {
        if let Some(rate) = self.rate_bits_per_second {
            haul_sys::sockopt::set_max_pacing_rate(stream, rate / 8)
                .map_err(|error| failed("setting SO_MAX_PACING_RATE", error))?;
        }
        counters.watch_socket(stream);
        let plaintext = vec![b'h'; self.chunk_bytes];
        let mut sealer = RecordSealer::default();
        let mut records = Vec::new();
        let mut has_started = false;
        while !counters.is_over() {
            records.clear();
            for part in plaintext.chunks(PLAINTEXT_BYTES_MAX) {
                records.extend(sealer.seal(part).map_err(|error| failed("encrypting", error))?);
            }
            stream.write_all(&records).map_err(|error| failed("sending", error))?;
            counters.bytes.fetch_add(plaintext.len() as u64, Relaxed);
            counters.calls.fetch_add(1, Relaxed);
            if !has_started {
                has_started = true;
                report_started()?;
            }
        }
        let outcome = counters.outcome()?;
        // Fails if the receiver has closed the connection, which needs no handling.
        let _ = stream.shutdown(Shutdown::Write);
        Ok(outcome)
    }
}
