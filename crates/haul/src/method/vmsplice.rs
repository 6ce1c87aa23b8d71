//! `vmsplice`: mapped pages into a pipe, the pipe into the socket.
//!
//! The program's own pages are sent, on every device that gathers, including loopback and veth. It
//! copies if the device cannot gather.
//!
//! **There is no completion**: the kernel does not report when the peer has received the pages. So
//! this method is only for memory that is never written again. A [`crate::Source`] is such memory:
//! its memory cannot be written, and of a file the method maps windows that it does not write.
//!
//! Probed by calling it; hardened hosts refuse it with `EPERM` or `ENOSYS`.

use super::mmap_send::FileWindow;
use super::piped::SourcePipe;
use super::{AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub(super) const ENTRY: Entry = Entry {
    name: "vmsplice",
    copying: Copying::Pages,
    fallback: Some(SendMethod::Sendfile),
    attach: |_, options| {
        let pipe = SourcePipe::new(options.pipe_bytes.unwrap_or(options.chunk_bytes))?;
        Ok(Box::new(Vmsplice { pipe, options: options.clone(), counts: Counts::default() }))
    },
};

struct Vmsplice {
    pipe: SourcePipe,
    options: MethodOptions,
    counts: Counts,
}

impl super::Sealed for Vmsplice {}

impl AttachedMethod for Vmsplice {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        let mut map_calls = 0;
        let calls = &mut self.counts.calls;
        let sent = self.pipe.send(socket, source, offset, len, calls, |pipe, offset, len| {
            if let Some(memory) = source.as_memory() {
                let range = offset as usize..offset as usize + len;
                return memory
                    .vmsplice(pipe.write_end(), range, true)
                    .map_err(failed(Call::Vmsplice));
            }
            map_calls += 3;
            let window = FileWindow::map(source, offset, len)?;
            window
                .region
                .vmsplice(pipe.write_end(), window.range.clone(), true)
                .map_err(|error| window.failed(Call::Vmsplice, offset, error))
        })?;
        self.counts.calls += map_calls;
        self.counts.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}
