//! [`Pipe`]: a pipe that counts the bytes it holds.
//!
//! A pipe's capacity is in slots, not bytes: 16 by default, each for up to a page. A packet of an
//! MTU of 1500 takes a slot, too, and pages that do not start on a page boundary take one more.
//! `F_SETPIPE_SZ` requests more: up to `fs.pipe-max-size` for an unprivileged user, and less once
//! that user has 16,384 pages in pipes (`fs.pipe-user-pages-soft`). Bytes in a pipe are lost when
//! it closes, so its owner must count them.
//!
//! A pipe is filled only while it is empty. A refusal to fill is then always the source's, and a
//! refusal to drain the sink's; `EAGAIN` alone does not distinguish them.

use haul_sys::fork;
use haul_sys::ktls;
use haul_sys::region::page_bytes;
use haul_sys::retry::{WaitsFor, retry};
use rustix::io::{Errno, Result, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The largest pipe of an unprivileged user by default, in bytes (`fs.pipe-max-size`).
const CAPACITY_MAX: usize = 1 << 20;
/// The capacity to request for a pipe between a socket and a file or another socket, in bytes. An
/// unprivileged user may have 256 of these.
pub(crate) const SOCKET_PIPE_BYTES: usize = 256 << 10;

/// A pipe that counts the bytes it holds.
#[derive(Debug)]
pub(crate) struct Pipe {
    read_end: OwnedFd,
    write_end: OwnedFd,
    capacity_bytes: usize,
    held_bytes: usize,
    process: u64,
}

impl Pipe {
    /// Creates a pipe with a capacity of `wanted_bytes`, or as large as the kernel allows.
    pub fn new(wanted_bytes: usize) -> Result<Self> {
        let (read_end, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let wanted_bytes = wanted_bytes.min(CAPACITY_MAX);
        if rustix::pipe::fcntl_getpipe_size(&write_end)? < wanted_bytes {
            // Refused beyond the user's limit; the pipe then keeps its size, which works, only
            // slower.
            let _ = rustix::pipe::fcntl_setpipe_size(&write_end, wanted_bytes);
        }
        let capacity_bytes = rustix::pipe::fcntl_getpipe_size(&write_end)?;
        Ok(Self { read_end, write_end, capacity_bytes, held_bytes: 0, process: fork::generation() })
    }

    /// Creates a pipe with room for `wanted_bytes`, wherever in their pages they start.
    pub fn with_room_for(wanted_bytes: usize) -> Result<Self> {
        Self::new(wanted_bytes.saturating_add(page_bytes()))
    }

    /// The capacity in bytes, if the bytes start on a page boundary.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Whether the kernel has granted the capacity that [`Pipe::new`] requests for `wanted_bytes`.
    pub fn has_capacity(&self, wanted_bytes: usize) -> bool {
        self.capacity_bytes >= wanted_bytes.min(CAPACITY_MAX)
    }

    /// Whether the pipe was created before a fork, by the parent, which shares it. Its bytes are
    /// the parent's.
    pub fn is_inherited(&self) -> bool {
        self.process != fork::generation()
    }

    /// The bytes in the pipe.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// The write end, to add bytes by other means than [`Pipe::fill`]. Count them with
    /// [`Pipe::record_filled`].
    pub fn write_end(&self) -> BorrowedFd<'_> {
        self.write_end.as_fd()
    }

    /// Counts bytes that were added through [`Pipe::write_end`].
    pub fn record_filled(&mut self, bytes: usize) {
        self.held_bytes += bytes;
    }

    /// Moves up to `len` bytes from a socket into the pipe; returns how many. 0 is the end of the
    /// stream, an urgent byte or a TLS record that is not application data: `recv` tells which.
    pub fn fill(&mut self, from: BorrowedFd<'_>, len: usize, flags: SpliceFlags) -> Result<usize> {
        let filled = retry(from, WaitsFor::Receive, || {
            rustix::pipe::splice(from, None, &self.write_end, None, len, flags)
        });
        let count = match filled {
            Err(Errno::INVAL) if ktls::is_control_record_next(from) => 0,
            filled => filled?,
        };
        self.held_bytes += count;
        Ok(count)
    }

    /// Moves up to `len` bytes from the pipe to `offset` of a file or to a socket; returns how
    /// many.
    pub fn drain(
        &mut self,
        to: BorrowedFd<'_>,
        offset: Option<u64>,
        len: usize,
        flags: SpliceFlags,
    ) -> Result<usize> {
        let len = len.min(self.held_bytes);
        let count = retry(to, WaitsFor::Send, || {
            let mut position = offset;
            rustix::pipe::splice(&self.read_end, None, to, position.as_mut(), len, flags)
        })?;
        self.held_bytes -= count;
        Ok(count)
    }

    /// Reads from the pipe; returns the number of bytes, 0 if it is empty.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if self.held_bytes == 0 {
            return Ok(0);
        }
        let count = retry_on_intr(|| rustix::io::read(&self.read_end, &mut *buffer))?;
        self.held_bytes -= count;
        Ok(count)
    }
}
