//! `splice`: file to pipe, pipe to socket.
//!
//! It does what `sendfile` does inside the kernel, with a pipe of the program's own. That takes two
//! calls, but the pipe may be larger than the kernel's 16 slots, and it can be kept if the socket
//! blocks. It copies where `sendfile` does.
//!
//! Probed by calling it; hardened hosts refuse it with `EPERM` or `ENOSYS`. `EAGAIN` does not
//! identify the end that blocks. The pipe is filled only when empty, so it is always the socket.

use super::piped::SourcePipe;
use super::{AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use rustix::io::retry_on_intr;
use rustix::pipe::SpliceFlags;
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub(super) const ENTRY: Entry = Entry {
    name: "splice",
    copying: Copying::Pages,
    fallback: Some(SendMethod::Sendfile),
    attach: |_, options| {
        let pipe = SourcePipe::new(options.pipe_bytes.unwrap_or(options.chunk_bytes))?;
        Ok(Box::new(Splice { pipe, options: options.clone(), counts: Counts::default() }))
    },
};

struct Splice {
    pipe: SourcePipe,
    options: MethodOptions,
    counts: Counts,
}

impl super::Sealed for Splice {}

impl AttachedMethod for Splice {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        let calls = &mut self.counts.calls;
        let sent = self.pipe.send(socket, source, offset, len, calls, |pipe, offset, len| {
            let mut position = offset;
            retry_on_intr(|| {
                rustix::pipe::splice(
                    source.descriptor(),
                    Some(&mut position),
                    pipe.write_end(),
                    None,
                    len,
                    SpliceFlags::empty(),
                )
            })
            .map_err(|errno| failed(Call::Splice)(errno.into()))
        })?;
        self.counts.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
