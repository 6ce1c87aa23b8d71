//! `uring-zerocopy`: `SEND_ZC` from registered buffers.
//!
//! Like `zerocopy`, but completions arrive in the ring instead of the error queue, and pages are
//! pinned once instead of at every send. It needs Linux 6.0, and 6.2 to report whether it copied.
//! Only memory can be registered, so a file is first *read* into one of a few registered buffers:
//! that copy is the price. It copies once more where `zerocopy` does; a protocol without support
//! fails instead of copying.
//!
//! Probed by querying the ring for the operation. `RLIMIT_MEMLOCK` limits the bytes that an
//! unprivileged user may register; beyond it the method works unregistered.

use super::uring_send::{is_nonblocking, ring_for};
use super::{AttachedMethod, Copying, Counts, Entry, MethodOptions, SendMethod, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use haul_sys::region::MappedRegion;
use haul_sys::uring::Ring;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Bytes of all buffers of one socket: half of the 8 MiB that an unprivileged user may pin by
/// default.
const BUFFERS_BYTES: usize = 4 << 20;
/// The most buffers of one socket. More do not make a connection faster.
const BUFFERS_MAX: usize = 16;

pub(super) const ENTRY: Entry = Entry {
    name: "uring-zerocopy",
    copying: Copying::ReportedByKernel,
    fallback: Some(SendMethod::Zerocopy),
    attach: |socket, options| {
        let ring = ring_for(socket)?;
        if !ring.has_send_zerocopy().map_err(failed(Call::UringRegister))? {
            return Err(Error::Refused {
                call: Call::UringSendZerocopy,
                error: std::io::Error::other("the kernel is older than 6.0"),
            });
        }
        Ok(Box::new(UringZerocopy {
            ring,
            options: options.clone(),
            buffers: None,
            has_registered: false,
            nonblocking: is_nonblocking(socket)?,
            in_flight: VecDeque::new(),
            copying: None,
            counts: Counts::default(),
        }))
    },
};

/// Buffers of one chunk each, in one region, so that one registration covers them all.
struct Buffers {
    region: Arc<MappedRegion>,
    free: Vec<usize>,
}

/// A send in flight.
struct SendInFlight {
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
    in_flight: VecDeque<SendInFlight>,
    /// Sends what no buffer is free for.
    copying: Option<Box<dyn AttachedMethod>>,
    counts: Counts,
}

impl UringZerocopy {
    /// Registers the first region that it is given. Memory that cannot be pinned for long is sent
    /// unregistered.
    fn register(&mut self, region: &Arc<MappedRegion>) {
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
            let region = Arc::new(
                MappedRegion::anonymous(count.saturating_mul(chunk_bytes))
                    .map_err(failed(Call::Mmap))?,
            );
            self.register(&region);
            self.buffers = Some(Buffers { region, free: (0..count).collect() });
        }
        self.buffers.as_mut().ok_or(Error::Unsupported("no buffers"))
    }

    /// Returns a buffer that the kernel does not hold. If all are in flight, a blocking socket
    /// waits for a completion, and a non-blocking one gets `None`: it may be writable, so the
    /// caller cannot wait for it.
    fn acquire_buffer(&mut self) -> Result<Option<(usize, Arc<MappedRegion>)>, Error> {
        loop {
            self.drain_completions();
            let buffers = self.buffers()?;
            if let Some(buffer) = buffers.free.pop() {
                return Ok(Some((buffer, Arc::clone(&buffers.region))));
            }
            if self.nonblocking {
                return Ok(None);
            }
            self.ring.wait().map_err(failed(Call::UringEnter))?;
        }
    }

    fn drain_completions(&mut self) {
        for completion in self.ring.take_completions() {
            let Some(index) = self.in_flight.iter().position(|sent| sent.send == completion.send)
            else {
                continue;
            };
            if let Some(sent) = self.in_flight.remove(index) {
                if completion.copied {
                    self.counts.copied_bytes += sent.bytes;
                } else {
                    self.counts.zero_copied_bytes += sent.bytes;
                }
                self.release_buffer(sent.buffer);
            }
        }
    }

    fn release_buffer(&mut self, buffer: Option<usize>) {
        if let (Some(buffers), Some(buffer)) = (&mut self.buffers, buffer) {
            buffers.free.push(buffer);
        }
    }

    /// Sends with a copy.
    fn copy(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let copying = match &mut self.copying {
            Some(copying) => copying,
            none => none.insert(SendMethod::ReadSend.attach(socket, &self.options)?),
        };
        copying.send(socket, source, range)
    }

    fn send_region(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
        buffer: Option<usize>,
    ) -> Result<u64, Error> {
        match self.ring.send_zerocopy(socket, region, range) {
            Ok((send, bytes)) => {
                self.in_flight.push_back(SendInFlight { send, bytes: bytes as u64, buffer });
                self.counts.bytes += bytes as u64;
                Ok(bytes as u64)
            }
            Err(error) => {
                self.release_buffer(buffer);
                Err(failed(Call::UringSendZerocopy)(error))
            }
        }
    }
}

impl super::Sealed for UringZerocopy {}

impl AttachedMethod for UringZerocopy {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = first_chunk(source, &range, self.options.chunk_bytes)?;
        if let Some(memory) = source.as_memory() {
            self.register(memory);
            self.drain_completions();
            return self.send_region(socket, memory, offset as usize..offset as usize + len, None);
        }
        let Some((buffer, region)) = self.acquire_buffer()? else {
            return self.copy(socket, source, range);
        };
        let start = buffer * self.options.chunk_bytes;
        self.counts.calls += 1;
        let read = match region.fill(source.descriptor(), offset, start..start + len) {
            Ok(read) if read > 0 => read,
            ended_or_failed => {
                self.release_buffer(Some(buffer));
                return Err(match ended_or_failed {
                    Ok(_) => Error::Ended { at: offset },
                    Err(error) => failed(Call::Pread)(error),
                });
            }
        };
        self.send_region(socket, &region, start..start + read, Some(buffer))
    }

    fn process_completions(&mut self, _socket: BorrowedFd<'_>) -> Result<usize, Error> {
        self.drain_completions();
        Ok(self.in_flight.len())
    }

    fn completion_descriptor(&self) -> Option<BorrowedFd<'_>> {
        (!self.in_flight.is_empty()).then(|| self.ring.as_fd())
    }

    fn counts(&self) -> Counts {
        let copied = self.copying.as_ref().map(|copying| copying.counts()).unwrap_or_default();
        Counts {
            bytes: self.counts.bytes + copied.bytes,
            calls: self.counts.calls + copied.calls + self.ring.enters(),
            copied_bytes: self.counts.copied_bytes + copied.bytes,
            ..self.counts
        }
    }

    fn kernel_copied_bytes(&self) -> u64 {
        self.counts.copied_bytes
    }
}
