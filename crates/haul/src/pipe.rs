//! A pipe, and how much is in it.
//!
//! A pipe counts slots, not bytes: 16 by default, each up to a page; a packet of an MTU of 1500 takes one too, and pages
//! that do not start on a page boundary take one more. `F_SETPIPE_SZ` asks for more, up to `fs.pipe-max-size` for an
//! ordinary user, and less once he has 16,384 pages in pipes (`fs.pipe-user-pages-soft`). What is in a pipe when it closes
//! is lost, so whoever has one remembers it.
//!
//! A pipe is filled only while it is empty: a refusal to fill is then always the source's, and one to drain the sink's,
//! which `EAGAIN` alone does not tell.

use haul_sys::region::page_bytes;
use rustix::io::{Result, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most that an ordinary user's pipe may hold by default (`fs.pipe-max-size`).
const CAPACITY_MAX: usize = 1 << 20;
/// What a pipe between a socket and something else is to hold: an ordinary user may have 256 of these.
pub(crate) const SOCKET_PIPE_BYTES: usize = 256 << 10;

/// A pipe that knows how much it holds.
#[derive(Debug)]
pub(crate) struct Pipe {
    read_end: OwnedFd,
    write_end: OwnedFd,
    capacity_bytes: usize,
    held_bytes: usize,
}

impl Pipe {
    /// A pipe with room for `wanted_bytes`, or for what the kernel allows.
    pub fn new(wanted_bytes: usize) -> Result<Self> {
        let (read_end, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let wanted_bytes = wanted_bytes.min(CAPACITY_MAX);
        if rustix::pipe::fcntl_getpipe_size(&write_end)? < wanted_bytes {
            // Refused past the user's limit; the pipe is then as large as it was, which works, only slower.
            let _ = rustix::pipe::fcntl_setpipe_size(&write_end, wanted_bytes);
        }
        let capacity_bytes = rustix::pipe::fcntl_getpipe_size(&write_end)?;
        Ok(Self { read_end, write_end, capacity_bytes, held_bytes: 0 })
    }

    /// A pipe with room for `wanted_bytes` wherever in their pages they start.
    pub fn with_room_for(wanted_bytes: usize) -> Result<Self> {
        Self::new(wanted_bytes.saturating_add(page_bytes()))
    }

    /// Bytes it can hold, if they start on a page boundary.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Bytes that are in it.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Where to put bytes in by other means than [`Pipe::fill`]; report them with [`Pipe::filled`].
    pub fn write_end(&self) -> BorrowedFd<'_> {
        self.write_end.as_fd()
    }

    /// Takes note of bytes that were put in.
    pub fn filled(&mut self, bytes: usize) {
        self.held_bytes += bytes;
    }

    /// Takes up to `len` bytes of what a socket has; returns how many. 0 is the end of the stream, or an urgent
    /// byte, before which splicing stops.
    pub fn fill(&mut self, from: BorrowedFd<'_>, len: usize, flags: SpliceFlags) -> Result<usize> {
        let count =
            retry_on_intr(|| rustix::pipe::splice(from, None, &self.write_end, None, len, flags))?;
        self.held_bytes += count;
        Ok(count)
    }

    /// Passes on up to `len` bytes of what it holds, to `offset` of a file or to a socket; returns how many.
    pub fn drain(
        &mut self,
        to: BorrowedFd<'_>,
        offset: Option<u64>,
        len: usize,
        flags: SpliceFlags,
    ) -> Result<usize> {
        let len = len.min(self.held_bytes);
        let count = retry_on_intr(|| {
            let mut position = offset;
            rustix::pipe::splice(&self.read_end, None, to, position.as_mut(), len, flags)
        })?;
        self.held_bytes -= count;
        Ok(count)
    }

    /// Reads what it holds; returns how many bytes, 0 where there is none.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if self.held_bytes == 0 {
            return Ok(0);
        }
        let count = retry_on_intr(|| rustix::io::read(&self.read_end, &mut *buffer))?;
        self.held_bytes -= count;
        Ok(count)
    }
}
