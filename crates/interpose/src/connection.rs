//! Compares the bytes that the interposer counted with the kernel's count, when a TCP socket is
//! closed.

use crate::kernel;
use crate::tally::{self, LogEntry};
use haul_tally::slot;
use libc::c_int;

/// A TCP socket that is about to be closed.
pub struct Connection {
    /// The socket.
    pub fd: c_int,
    /// Bytes that the kernel had counted when this process first used the socket.
    pub begin_bytes: u64,
    /// Bytes that the interposer counted in this process.
    pub seen_bytes: u64,
    /// Whether another process can send on the socket.
    pub is_shared: bool,
}

impl Connection {
    /// Reads the kernel's count, and adds both counts to the counters of the process. If the counts
    /// differ, or if another process has the socket too, they go to the log: `haul run` adds up the
    /// entries of a socket.
    pub fn compare(&self) {
        let Some(given) = kernel::bytes_given(self.fd) else { return };
        let counted = self.begin_bytes + self.seen_bytes;
        let end_bytes = counted.clamp(given.bytes_min, given.bytes_max);
        tally::add(slot::CONNECTIONS, 1);
        tally::add(slot::COMPARED_BYTES, self.seen_bytes);
        let kernel_bytes = end_bytes.saturating_sub(self.begin_bytes);
        if let Some(control) = kernel::congestion_control(self.fd) {
            tally::add(slot::CONGESTION + control, self.seen_bytes);
        }
        if !self.is_shared && kernel_bytes == self.seen_bytes {
            tally::add(slot::KERNEL_BYTES, kernel_bytes);
            return;
        }
        let entry = kernel::cookie(self.fd).map(|cookie| LogEntry {
            cookie,
            begin_bytes: self.begin_bytes,
            end_bytes,
            seen_bytes: self.seen_bytes,
        });
        if !entry.is_some_and(|entry| tally::log(&entry)) {
            tally::add(slot::UNLOGGED_BYTES, self.seen_bytes);
        }
    }
}
