//! `uring-zerocopy`: `SEND_ZC` from registered buffers.
//!
//! As `zerocopy`, with completions in the ring instead of the error queue, and with pages that were pinned
//! once instead of at every send (Linux 6.0; 6.2 to be told whether it copied). Only memory can be
//! registered, so a file is first *read* into one of a few registered buffers: that copy is the price. It
//! copies once more where `zerocopy` does; a protocol without support fails rather than copies.
//!
//! Tried by asking the ring for the operation. `RLIMIT_MEMLOCK` bounds what an ordinary user may register;
//! past it the path works unregistered.

use super::uring_send::{is_nonblocking, ring_for};
use super::{BoundMethod, Copying, Counts, Entry, MethodOptions, SendMethod, chunk_of};
use crate::Source;
use crate::error::{Error, failed};
use haul_sys::region::Region;
use haul_sys::uring::Ring;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What the buffers of one path take together: half of the 8 MiB that an ordinary user may pin by default.
const BUFFERS_BYTES: usize = 4 << 20;
/// More buffers than this do not make a connection faster.
const BUFFERS_MAX: usize = 16;

pub(super) const ENTRY: Entry = Entry {
    name: "uring-zerocopy",
    copying: Copying::KernelTells,
    fallback: Some(SendMethod::Zerocopy),
    open: |socket, options| {
        let ring = ring_for(socket)?;
        if !ring.has_send_zerocopy().map_err(failed("io_uring_register"))? {
            return Err(Error::Refused {
                call: "SEND_ZC",
                source: std::io::Error::other("the kernel is older than 6.0"),
            });
        }
        Ok(Box::new(UringZerocopy {
            ring,
            options: options.clone(),
            buffers: None,
            has_registered: false,
            nonblocking: is_nonblocking(socket)?,
            open: VecDeque::new(),
            counts: Counts::default(),
        }))
    },
};

/// Buffers of one chunk each, in one region, so that registering it registers them all.
struct Buffers {
    region: Arc<Region>,
    free: Vec<usize>,
}

/// A send whose notice has not come.
struct Open {
    send: u64,
    bytes: u64,
    buffer: Option<usize>,
}

struct UringZerocopy {
    ring: Ring,
    options: MethodOptions,
    buffers: Option<Buffers>,
    has_registered: bool,
    nonblocking: bool,
    open: VecDeque<Open>,
    counts: Counts,
}

impl UringZerocopy {
    /// Registers the first region it is given; memory that cannot be pinned for long is sent unregistered.
    fn register(&mut self, region: &Arc<Region>) {
        if !self.has_registered {
            self.has_registered = true;
            self.counts.calls += 1;
            let _ = self.ring.register(Arc::clone(region));
        }
    }

    fn buffers(&mut self) -> Result<&mut Buffers, Error> {
        if self.buffers.is_none() {
            let chunk_bytes = self.options.chunk_bytes;
            let count = (BUFFERS_BYTES / chunk_bytes).clamp(2, BUFFERS_MAX);
            let region = Arc::new(Region::anonymous(count * chunk_bytes).map_err(failed("mmap"))?);
            self.register(&region);
            self.buffers = Some(Buffers { region, free: (0..count).collect() });
        }
        self.buffers.as_mut().ok_or(Error::Unsuited("no buffers"))
    }

    /// A buffer that the kernel does not hold, waiting for one if the socket may block.
    fn free_buffer(&mut self) -> Result<(usize, Arc<Region>), Error> {
        loop {
            self.reap();
            let buffers = self.buffers()?;
            if let Some(buffer) = buffers.free.pop() {
                return Ok((buffer, Arc::clone(&buffers.region)));
            }
            if self.nonblocking {
                return Err(Error::WouldBlock);
            }
            self.ring.wait().map_err(failed("io_uring_enter"))?;
        }
    }

    fn reap(&mut self) {
        for notice in self.ring.take_completions() {
            let Some(index) = self.open.iter().position(|open| open.send == notice.send) else {
                continue;
            };
            if let Some(open) = self.open.remove(index) {
                if notice.copied {
                    self.counts.copied_bytes += open.bytes;
                } else {
                    self.counts.zero_copied_bytes += open.bytes;
                }
                self.give_back(open.buffer);
            }
        }
    }

    fn give_back(&mut self, buffer: Option<usize>) {
        if let (Some(buffers), Some(buffer)) = (&mut self.buffers, buffer) {
            buffers.free.push(buffer);
        }
    }

    fn lend(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &Arc<Region>,
        range: Range<usize>,
        buffer: Option<usize>,
    ) -> Result<u64, Error> {
        match self.ring.send_zerocopy(socket, region, range) {
            Ok((send, bytes)) => {
                self.open.push_back(Open { send, bytes: bytes as u64, buffer });
                self.counts.bytes += bytes as u64;
                Ok(bytes as u64)
            }
            Err(error) => {
                self.give_back(buffer);
                Err(failed("SEND_ZC")(error))
            }
        }
    }
}

impl BoundMethod for UringZerocopy {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = chunk_of(&range, self.options.chunk_bytes);
        if let Some(memory) = source.as_memory() {
            self.register(memory);
            self.reap();
            return self.lend(socket, memory, offset as usize..offset as usize + len, None);
        }
        let (buffer, region) = self.free_buffer()?;
        let start = buffer * self.options.chunk_bytes;
        self.counts.calls += 1;
        let read = match region.fill(source.descriptor(), offset, start..start + len) {
            Ok(read) if read > 0 => read,
            ended_or_failed => {
                self.give_back(Some(buffer));
                return Err(match ended_or_failed {
                    Ok(_) => Error::Ended { at: offset },
                    Err(error) => failed("pread")(error),
                });
            }
        };
        self.lend(socket, &region, start..start + read, Some(buffer))
    }

    fn settle(&mut self, _socket: BorrowedFd<'_>) -> Result<usize, Error> {
        self.reap();
        Ok(self.open.len())
    }

    fn counts(&self) -> Counts {
        Counts { calls: self.counts.calls + self.ring.enters(), ..self.counts }
    }
}
