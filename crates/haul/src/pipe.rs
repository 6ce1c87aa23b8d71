//! A pipe between a source and a socket, and what is in it.
//!
//! A pipe counts slots, not bytes: 16 by default, each up to a page. Pages that do not start on a page
//! boundary take a slot more. `F_SETPIPE_SZ` asks for more, up to `fs.pipe-max-size` for an ordinary user,
//! and less once he has many pipes. Data that is left in a pipe when it closes is lost, so what a pipe holds
//! is remembered here and sent before anything else.

use crate::error::{Error, failed};
use crate::source::{Identity, Source};
use haul_sys::region::page_bytes;
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most that an ordinary user's pipe may hold by default (`fs.pipe-max-size`).
const CAPACITY_MAX: usize = 1 << 20;

/// A pipe that remembers which bytes of the source it holds.
#[derive(Debug)]
pub(crate) struct Pipe {
    read_end: OwnedFd,
    write_end: OwnedFd,
    capacity_bytes: usize,
    held_bytes: u64,
    /// Whose bytes it holds between two calls, and from which offset on.
    held_from: Option<(Identity, u64)>,
}

impl Pipe {
    /// A pipe with room for `wanted_bytes` wherever they start, or for what the kernel allows.
    pub fn new(wanted_bytes: usize) -> io::Result<Self> {
        let (read_end, write_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let wanted_bytes = wanted_bytes.saturating_add(page_bytes()).min(CAPACITY_MAX);
        if rustix::pipe::fcntl_getpipe_size(&write_end)? < wanted_bytes {
            // Refused past the user's limit; the pipe is then as large as it was, which works, only slower.
            let _ = rustix::pipe::fcntl_setpipe_size(&write_end, wanted_bytes);
        }
        let capacity_bytes = rustix::pipe::fcntl_getpipe_size(&write_end)?;
        Ok(Self { read_end, write_end, capacity_bytes, held_bytes: 0, held_from: None })
    }

    /// Bytes it can hold, if they start on a page boundary.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// How many bytes it holds of `source` from `offset` on. Bytes from anywhere else are thrown away: the
    /// caller has turned elsewhere.
    fn held_from(&mut self, source: Source<'_>, offset: u64) -> io::Result<u64> {
        if self.held_bytes > 0 && self.held_from != Some((source.identity()?, offset)) {
            *self = Self::new(self.capacity_bytes.saturating_sub(page_bytes()))?;
        }
        Ok(self.held_bytes)
    }

    /// Remembers, at the end of a call, whose bytes it holds: those of `source` from `offset` on.
    fn keep(&mut self, source: Source<'_>, offset: u64) {
        self.held_from = if self.held_bytes > 0 {
            source.identity().ok().map(|identity| (identity, offset))
        } else {
            None
        };
    }

    /// Where to put bytes in.
    pub fn write_end(&self) -> BorrowedFd<'_> {
        self.write_end.as_fd()
    }

    /// Moves what it holds, at most `limit` bytes, into the socket; returns the bytes that the socket took.
    /// `more` says that more follows at once.
    fn drain(&mut self, socket: BorrowedFd<'_>, limit: u64, more: bool) -> io::Result<u64> {
        let flags = if more { SpliceFlags::MORE } else { SpliceFlags::empty() };
        let count = loop {
            match rustix::pipe::splice(
                &self.read_end,
                None,
                socket,
                None,
                usize::try_from(self.held_bytes.min(limit)).unwrap_or(usize::MAX),
                flags,
            ) {
                Err(rustix::io::Errno::INTR) => {}
                result => break result?,
            }
        };
        self.held_bytes -= count as u64;
        Ok(count as u64)
    }
}

/// Moves up to `len` bytes of `source` to the socket through `pipe`, which `fill` fills when it is empty.
///
/// An error after some bytes went is not reported: what went must be, and the error comes back on the next
/// call. `fill(pipe, offset, len)` returns the bytes it put in, 0 at the end of the source. `calls` counts
/// system calls.
pub(crate) fn through(
    pipe: &mut Pipe,
    socket: BorrowedFd<'_>,
    source: Source<'_>,
    offset: u64,
    len: usize,
    calls: &mut u64,
    fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, Error>,
) -> Result<u64, Error> {
    pipe.held_from(source, offset).map_err(failed("fstat"))?;
    let mut sent = 0;
    let moved = fill_and_drain(pipe, socket, offset, len, calls, fill, &mut sent);
    pipe.keep(source, offset + sent);
    match moved {
        Err(error) if sent == 0 => Err(error),
        _ => Ok(sent),
    }
}

/// Fills and drains the pipe until `len` bytes went or one end refuses; `sent` says how far it came.
fn fill_and_drain(
    pipe: &mut Pipe,
    socket: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    calls: &mut u64,
    mut fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, Error>,
    sent: &mut u64,
) -> Result<(), Error> {
    while *sent < len as u64 {
        if pipe.held_bytes == 0 {
            let wanted = (len - *sent as usize).min(pipe.capacity_bytes());
            *calls += 1;
            let count = fill(pipe, offset + *sent, wanted)?;
            if count == 0 {
                return Err(Error::Ended { at: offset + *sent });
            }
            pipe.held_bytes = count as u64;
        }
        *calls += 1;
        // The pipe may hold more than is asked for now, if the caller asked for more before.
        let left = len as u64 - *sent;
        *sent += pipe.drain(socket, left, pipe.held_bytes < left).map_err(failed("splice"))?;
    }
    Ok(())
}
