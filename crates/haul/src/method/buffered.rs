//! What `read+write` and `read+send` share: a buffer between the file and the socket.

use super::{BoundMethod, Counts, MethodOptions, Opened, chunk_of};
use crate::Source;
use crate::error::{Error, failed};
use haul_sys::region::Region;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Puts a range of memory into a socket.
pub(super) type Put = fn(&Region, BorrowedFd<'_>, Range<usize>) -> io::Result<usize>;

/// Reads into a buffer and puts the buffer into the socket. Memory is put in as it is.
pub(super) struct ThroughBuffer {
    buffer: Region,
    call: &'static str,
    put: Put,
    counts: Counts,
}

impl ThroughBuffer {
    pub fn open(options: &MethodOptions, call: &'static str, put: Put) -> Opened {
        let buffer = Region::anonymous(options.chunk_bytes).map_err(failed("mmap"))?;
        Ok(Box::new(Self { buffer, call, put, counts: Counts::default() }))
    }
}

impl BoundMethod for ThroughBuffer {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = chunk_of(&range, self.buffer.len());
        let sent = if let Some(memory) = source.as_memory() {
            (self.put)(memory, socket, offset as usize..offset as usize + len)
        } else {
            self.counts.calls += 1;
            let read =
                self.buffer.fill(source.descriptor(), offset, 0..len).map_err(failed("pread"))?;
            if read == 0 {
                return Err(Error::Ended { at: offset });
            }
            (self.put)(&self.buffer, socket, 0..read)
        };
        self.counts.calls += 1;
        let sent = sent.map_err(failed(self.call))? as u64;
        self.counts.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
