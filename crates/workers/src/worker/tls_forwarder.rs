//! Forwarding of a TLS stream that the program decrypts: receive records, decrypt them in place,
//! send the plaintext.

use super::{Message, Outcome, WorkCounters, failed};
use crate::tls_records::{RECORD_BYTES_MAX, RecordOpener};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering::Relaxed;

/// The buffer that receives records.
struct RecordBuffer {
    bytes: Vec<u8>,
    /// Bytes at the front that were received and not yet decrypted: part of one record.
    received: usize,
}

/// Decrypts and forwards in one direction until the source has ended. `buffer_bytes` is the size
/// of the buffer; the part of a record that has not arrived whole takes up to a record more.
pub(super) fn run(
    mut from: &TcpStream,
    to: &TcpStream,
    buffer_bytes: usize,
    counters: &WorkCounters,
) -> Result<Outcome, Message> {
    let mut opener = RecordOpener::default();
    let mut buffer = RecordBuffer { bytes: vec![0; buffer_bytes + RECORD_BYTES_MAX], received: 0 };
    loop {
        let end = buffer.received + buffer_bytes;
        let count = match from.read(&mut buffer.bytes[buffer.received..end]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result.map_err(|error| failed("receiving", error))?,
        };
        counters.calls.fetch_add(1, Relaxed);
        if count == 0 {
            // Fails if the receiver has closed the connection, which needs no handling.
            let _ = to.shutdown(Shutdown::Write);
            return counters.outcome();
        }
        buffer.received += count;
        buffer.forward_records(&mut opener, to, counters)?;
    }
}

impl RecordBuffer {
    /// Decrypts the whole records, sends their plaintext, and moves the rest to the front.
    fn forward_records(
        &mut self,
        opener: &mut RecordOpener,
        to: &TcpStream,
        counters: &WorkCounters,
    ) -> Result<(), Message> {
        let mut plaintexts = Vec::new();
        let mut rest = &mut self.bytes[..self.received];
        loop {
            // A record that is incomplete stays as it is.
            let rest_bytes = rest.len();
            let opened = opener.open(rest).map_err(|error| failed("opening a record", error))?;
            let Some((plaintext, behind)) = opened else {
                send_all(to, &mut plaintexts, counters)?;
                self.bytes.copy_within(self.received - rest_bytes..self.received, 0);
                self.received = rest_bytes;
                return Ok(());
            };
            plaintexts.push(IoSlice::new(plaintext));
            rest = behind;
        }
    }
}

fn send_all(
    mut to: &TcpStream,
    mut parts: &mut [IoSlice<'_>],
    counters: &WorkCounters,
) -> Result<(), Message> {
    while !parts.is_empty() {
        let count = match to.write_vectored(parts) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result.map_err(|error| failed("sending", error))?,
        };
        counters.calls.fetch_add(1, Relaxed);
        counters.bytes.fetch_add(count as u64, Relaxed);
        IoSlice::advance_slices(&mut parts, count);
    }
    Ok(())
}
