//! A pipe between two sockets.
//!
//! It is filled only while it is empty: a refusal to fill is then always the source's, and one to drain the
//! sink's, which `EAGAIN` alone does not tell.

use crate::error::{Error, failed};
use rustix::io::retry_on_intr;
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::os::fd::{BorrowedFd, OwnedFd};

/// What it is to hold. Slots count rather than bytes, and a packet of an MTU of 1500 takes one: 64 slots then
/// hold 90 KB. An ordinary user may have 256 such pipes before new ones get two slots
/// (`fs.pipe-user-pages-soft`).
const PIPE_BYTES: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct Pipe {
    read_end: OwnedFd,
    write_end: OwnedFd,
    held_bytes: usize,
}

impl Pipe {
    pub fn new() -> Result<Self, Error> {
        let (read_end, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
            .map_err(|errno| failed("pipe2")(errno.into()))?;
        // Refused past the user's limit; the pipe is then as large as it was, which works, only slower.
        let _ = rustix::pipe::fcntl_setpipe_size(&write_end, PIPE_BYTES);
        Ok(Self { read_end, write_end, held_bytes: 0 })
    }

    pub fn is_empty(&self) -> bool {
        self.held_bytes == 0
    }

    /// Takes what has arrived; returns how much, 0 at the end of the stream. It must be empty.
    pub fn fill(&mut self, from: BorrowedFd<'_>) -> Result<usize, Error> {
        debug_assert!(self.is_empty());
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        self.held_bytes =
            retry_on_intr(|| rustix::pipe::splice(from, None, &self.write_end, None, PIPE_BYTES, flags))
                .map_err(|errno| failed("splice from a socket")(errno.into()))?;
        Ok(self.held_bytes)
    }

    /// Passes on what it holds; returns how much the socket took.
    pub fn drain(&mut self, to: BorrowedFd<'_>) -> Result<usize, Error> {
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let count =
            retry_on_intr(|| rustix::pipe::splice(&self.read_end, None, to, None, self.held_bytes, flags))
                .map_err(|errno| failed("splice into a socket")(errno.into()))?;
        self.held_bytes -= count;
        Ok(count)
    }
}
