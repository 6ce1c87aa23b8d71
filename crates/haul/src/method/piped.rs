//! What `splice`, `vmsplice` and `floor` share: a pipe between a source and the socket.
//!
//! Bytes that the socket did not take stay in the pipe and go first with the next call, if that goes on where this one
//! stopped, in the same state of the same file. Bytes of anything else are thrown away: the caller has turned
//! elsewhere.

use crate::error::{Error, failed};
use crate::pipe::Pipe;
use crate::source::{Identity, Source};
use rustix::pipe::SpliceFlags;
use std::os::fd::BorrowedFd;

/// A pipe that remembers whose bytes it holds between two calls.
#[derive(Debug)]
pub(super) struct SourcePipe {
    pipe: Pipe,
    chunk_bytes: usize,
    /// The source, and the offset of the first byte.
    held_from: Option<(Identity, u64)>,
}

impl SourcePipe {
    /// A pipe for calls of `chunk_bytes`, or for what the kernel allows.
    pub fn new(chunk_bytes: usize) -> Result<Self, Error> {
        let pipe =
            Pipe::with_room_for(chunk_bytes).map_err(|errno| failed("pipe2")(errno.into()))?;
        Ok(Self { pipe, chunk_bytes, held_from: None })
    }

    /// Moves up to `len` bytes of `source` to the socket; `fill` fills the pipe when it is empty.
    ///
    /// An error after some bytes went is not reported: what went must be, and the error comes back on the next
    /// call. `fill(pipe, offset, len)` returns the bytes it put in, 0 at the end of the source. `calls` counts
    /// system calls.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        offset: u64,
        len: usize,
        calls: &mut u64,
        fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, Error>,
    ) -> Result<u64, Error> {
        if self.pipe.held_bytes() > 0 {
            let now = (source.identity().map_err(failed("fstat"))?, offset);
            if self.held_from != Some(now) {
                *self = Self::new(self.chunk_bytes)?;
            }
        }
        let mut sent = 0;
        let moved = self.fill_and_drain(socket, offset, len, calls, fill, &mut sent);
        let holds_some = self.pipe.held_bytes() > 0;
        let identity = if holds_some { source.identity().ok() } else { None };
        self.held_from = identity.map(|identity| (identity, offset + sent));
        match moved {
            Err(error) if sent == 0 => Err(error),
            _ => Ok(sent),
        }
    }

    /// Fills and drains the pipe until `len` bytes went or one end refuses; `sent` says how far it came.
    fn fill_and_drain(
        &mut self,
        socket: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        calls: &mut u64,
        mut fill: impl FnMut(&Pipe, u64, usize) -> Result<usize, Error>,
        sent: &mut u64,
    ) -> Result<(), Error> {
        let pipe = &mut self.pipe;
        while *sent < len as u64 {
            let left = len - *sent as usize;
            if pipe.held_bytes() == 0 {
                *calls += 1;
                let count = fill(pipe, offset + *sent, left.min(pipe.capacity_bytes()))?;
                if count == 0 {
                    return Err(Error::Ended { at: offset + *sent });
                }
                pipe.filled(count);
            }
            *calls += 1;
            // The pipe may hold more than is asked for now, if the caller asked for more before.
            let flags =
                if pipe.held_bytes() < left { SpliceFlags::MORE } else { SpliceFlags::empty() };
            let drained = pipe.drain(socket, None, left, flags);
            *sent += drained.map_err(|errno| failed("splice")(errno.into()))? as u64;
        }
        Ok(())
    }
}
