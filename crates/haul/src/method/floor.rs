//! `floor`: the same few cached pages, spliced repeatedly.
//!
//! It is no method of sending data, but the lower bound of all methods: the network stack's own
//! cost, with nothing read and no data moved. The peer receives the source's first pages
//! repeatedly, as many bytes as were requested.

use super::piped::SourcePipe;
use super::{AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::pipe::Pipe;
use crate::source::Source;
use rustix::io::retry_on_intr;
use rustix::pipe::SpliceFlags;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// The size of the repeated pages: 16 pages, which any first- or second-level cache holds.
const HOT_BYTES: u64 = 64 * 1024;

pub(super) const ENTRY: Entry = Entry {
    name: "floor",
    copying: Copying::Pages,
    fallback: Some(SendMethod::Sendfile),
    attach: |_, options| {
        let pipe = SourcePipe::new(options.chunk_bytes)?;
        Ok(Box::new(Floor { pipe, options: options.clone(), counts: Counts::default() }))
    },
};

struct Floor {
    pipe: SourcePipe,
    options: MethodOptions,
    counts: Counts,
}

impl super::Sealed for Floor {}

impl AttachedMethod for Floor {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let hot_bytes = HOT_BYTES.min(range.end);
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        let mut fill_calls = 0;
        let calls = &mut self.counts.calls;
        let sent = self.pipe.send(socket, source, offset, len, calls, |pipe, offset, len| {
            // Fills the whole pipe before draining it, as the methods do whose bound this is.
            let mut filled = 0;
            while filled < len {
                let mut position = (offset + filled as u64) % hot_bytes;
                let wanted = (len - filled).min((hot_bytes - position) as usize);
                fill_calls += u64::from(filled > 0);
                match splice_into_pipe(source, &mut position, pipe, wanted) {
                    Ok(count) if count > 0 => filled += count,
                    // The pipe counts slots, so it can be full before its capacity in bytes is
                    // reached.
                    Ok(_) | Err(Error::WouldBlock) if filled > 0 => break,
                    ended_or_failed => return ended_or_failed,
                }
            }
            Ok(filled)
        })?;
        self.counts.calls += fill_calls;
        self.counts.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

fn splice_into_pipe(
    source: Source<'_>,
    position: &mut u64,
    pipe: &Pipe,
    len: usize,
) -> Result<usize, Error> {
    retry_on_intr(|| {
        rustix::pipe::splice(
            source.descriptor(),
            Some(position),
            pipe.write_end(),
            None,
            len,
            SpliceFlags::NONBLOCK,
        )
    })
    .map_err(|errno| failed(Call::Splice)(errno.into()))
}
