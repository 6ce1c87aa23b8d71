//! The common part of `read+write` and `read+send`: a buffer between the file and the socket.

use super::{AttachResult, AttachedMethod, Counts, MethodOptions, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use haul_sys::region::MappedRegion;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Sends a range of memory to a socket.
pub(super) type SendFn = fn(&MappedRegion, BorrowedFd<'_>, Range<usize>) -> io::Result<usize>;

/// Reads into a buffer and sends the buffer. Memory is sent directly.
pub(super) struct BufferedMethod {
    buffer: MappedRegion,
    call: Call,
    send_fn: SendFn,
    counts: Counts,
}

impl BufferedMethod {
    pub fn attach(options: &MethodOptions, call: Call, send_fn: SendFn) -> AttachResult {
        let buffer = MappedRegion::anonymous(options.chunk_bytes).map_err(failed(Call::Mmap))?;
        Ok(Box::new(Self { buffer, call, send_fn, counts: Counts::default() }))
    }
}

impl super::Sealed for BufferedMethod {}

impl AttachedMethod for BufferedMethod {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = first_chunk(source, &range, self.buffer.len())?;
        let sent = if let Some(memory) = source.as_memory() {
            let start = offset as usize;
            (self.send_fn)(memory, socket, start..start + len)
        } else {
            self.counts.calls += 1;
            let read = self
                .buffer
                .fill(source.descriptor(), offset, 0..len)
                .map_err(failed(Call::Pread))?;
            if read == 0 {
                return Err(Error::Ended { at: offset });
            }
            (self.send_fn)(&self.buffer, socket, 0..read)
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
