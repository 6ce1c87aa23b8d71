//! A pipe between a source and a socket, and what is in it.
//!
//! A pipe counts slots, not bytes: 16 by default, each up to a page. Pages that do not start on a page
//! boundary take a slot more. `F_SETPIPE_SZ` asks for more, up to `fs.pipe-max-size` for an ordinary user,
//! and less once he has many pipes. Data that is left in a pipe when it closes is lost, so what a pipe holds
//! is remembered here and sent before anything else.

use crate::error::{PathError, failed};
use crate::source::Source;
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
    /// The source's number, and the offset in it.
    held_from: (u64, u64),
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
        Ok(Self { read_end, write_end, capacity_bytes, held_bytes: 0, held_from: (0, 0) })
    }

    /// Bytes it can hold, if they start on a page boundary.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// How many bytes it holds of `source` from `offset` on. Bytes from anywhere else are thrown away: the
    /// caller has turned elsewhere.
    pub fn held_from(&mut self, source: &Source, offset: u64) -> io::Result<u64> {
        if self.held_bytes > 0 && self.held_from != (source.number(), offset) {
            *self = Self::new(self.capacity_bytes.saturating_sub(page_bytes()))?;
        }
        Ok(self.held_bytes)
    }

    /// Where to put bytes in; report them with [`Pipe::filled`].
    pub fn write_end(&self) -> BorrowedFd<'_> {
        self.write_end.as_fd()
    }

    /// Remembers that `count` bytes of `source` from `offset` on were put in.
    pub fn filled(&mut self, source: &Source, offset: u64, count: usize) {
        if self.held_bytes == 0 {
            self.held_from = (source.number(), offset);
        }
        self.held_bytes += count as u64;
    }

    /// Moves what it holds, at most `limit` bytes, into the socket; returns the bytes that the socket took.
    /// `more` says that more follows at once.
    pub fn drain(&mut self, socket: BorrowedFd<'_>, limit: u64, more: bool) -> io::Result<u64> {
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
        self.held_from.1 += count as u64;
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
    source: &Source,
    offset: u64,
    len: usize,
    calls: &mut u64,
    mut fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, PathError>,
) -> Result<u64, PathError> {
    let failed = failed("splice");
    let mut sent = 0;
    let mut held = pipe.held_from(source, offset).map_err(&failed)?;
    while sent < len as u64 {
        if held == 0 {
            let wanted = (len - sent as usize).min(pipe.capacity_bytes());
            *calls += 1;
            let count = match fill(pipe, offset + sent, wanted) {
                Ok(0) | Err(_) if sent > 0 => return Ok(sent),
                Ok(0) => return Err(PathError::Ended { at: offset }),
                filled => filled?,
            };
            pipe.filled(source, offset + sent, count);
            held = count as u64;
        }
        *calls += 1;
        // The pipe may hold more than is asked for now, if the caller asked for more before.
        let left = len as u64 - sent;
        match pipe.drain(socket, left, held < left) {
            Ok(count) => {
                sent += count;
                held -= count;
            }
            Err(_) if sent > 0 => return Ok(sent),
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(sent)
}
