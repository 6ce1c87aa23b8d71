//! `uring-zerocopy`: `SEND_ZC` from registered buffers.
//!
//! Completions arrive in the ring instead of the socket's error queue, and pages are pinned once
//! instead of at every send. The method needs Linux 6.0, and Linux 6.2 reports whether the kernel
//! copied. Only memory can be registered, so a file is first *read* into one of a few registered
//! buffers, and this read is a copy. Where the method `zerocopy` copies, `uring-zerocopy` copies
//! once more. A protocol without support fails instead of copying.
//!
//! `RLIMIT_MEMLOCK` limits the bytes that an unprivileged user may register. Beyond the limit the
//! method works with unregistered memory.

use super::{ended, failed, unsupported};
use haul::Counts;
use haul_sys::region::MappedRegion;
use haul_sys::uring::Ring;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Bytes of all buffers of one socket: half of the 8 MiB that an unprivileged user may pin by
/// default.
const BUFFERS_BYTES: usize = 4 << 20;
/// The most buffers of one socket. More do not make a connection faster.
const BUFFERS_MAX: usize = 16;

/// Buffers of one chunk each, in one region, so that one registration covers all of them.
struct Buffers {
    region: Arc<MappedRegion>,
    free: Vec<usize>,
}

/// A send whose memory the kernel may still use.
struct SendInFlight {
    send: u64,
    bytes: u64,
    buffer: Option<usize>,
}

/// Sends without a copy, if the device can.
pub(super) struct ZerocopySender {
    ring: Ring,
    chunk_bytes: usize,
    is_nonblocking: bool,
    buffers: Option<Buffers>,
    has_registered: bool,
    in_flight: VecDeque<SendInFlight>,
    counts: Counts,
}

impl ZerocopySender {
    pub fn new(ring: Ring, chunk_bytes: usize, is_nonblocking: bool) -> io::Result<Self> {
        if !ring.has_send_zerocopy().map_err(failed("io_uring_register"))? {
            return Err(unsupported("the kernel refuses SEND_ZC: it is older than 6.0"));
        }
        Ok(Self {
            ring,
            chunk_bytes,
            is_nonblocking,
            buffers: None,
            has_registered: false,
            in_flight: VecDeque::new(),
            counts: Counts::default(),
        })
    }

    /// Reads a part of a file into a free buffer and sends the buffer. If the kernel uses all
    /// buffers, a blocking socket waits for a completion, and a non-blocking socket would block.
    pub fn send_file(
        &mut self,
        socket: BorrowedFd<'_>,
        file: &File,
        offset: u64,
        len: usize,
    ) -> io::Result<usize> {
        let (buffer, region) = self.acquire_buffer()?;
        let start = buffer * self.chunk_bytes;
        self.counts.calls += 1;
        match region.fill(file, offset, start..start + len) {
            Ok(read) if read > 0 => {
                self.send_region(socket, &region, start..start + read, Some(buffer))
            }
            ended_or_failed => {
                self.release_buffer(Some(buffer));
                ended_or_failed.map_err(failed("pread"))?;
                Err(ended(offset))
            }
        }
    }

    /// Sends mapped memory.
    pub fn send_memory(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
    ) -> io::Result<usize> {
        self.register(region);
        self.process_completions();
        self.send_region(socket, region, range, None)
    }

    /// Processes the completions that arrived. Returns the number of sends in flight.
    pub fn process_completions(&mut self) -> usize {
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
        self.in_flight.len()
    }

    pub fn counts(&self) -> Counts {
        let mut counts = self.counts;
        counts.calls += self.ring.enters();
        counts
    }

    /// Registers the first region. Memory that cannot be pinned for long is sent unregistered.
    fn register(&mut self, region: &Arc<MappedRegion>) {
        if !self.has_registered {
            self.has_registered = true;
            self.counts.calls += 1;
            let _ = self.ring.register(Arc::clone(region));
        }
    }

    fn acquire_buffer(&mut self) -> io::Result<(usize, Arc<MappedRegion>)> {
        loop {
            self.process_completions();
            if self.buffers.is_none() {
                self.buffers = Some(self.allocate_buffers()?);
            }
            if let Some(buffers) = &mut self.buffers
                && let Some(buffer) = buffers.free.pop()
            {
                return Ok((buffer, Arc::clone(&buffers.region)));
            }
            if self.is_nonblocking {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.ring.wait().map_err(failed("io_uring_enter"))?;
        }
    }

    fn allocate_buffers(&mut self) -> io::Result<Buffers> {
        let count = (BUFFERS_BYTES / self.chunk_bytes).clamp(2, BUFFERS_MAX);
        let bytes = count.saturating_mul(self.chunk_bytes);
        let region = Arc::new(MappedRegion::anonymous(bytes).map_err(failed("mmap"))?);
        self.register(&region);
        Ok(Buffers { region, free: (0..count).collect() })
    }

    fn release_buffer(&mut self, buffer: Option<usize>) {
        if let (Some(buffers), Some(buffer)) = (&mut self.buffers, buffer) {
            buffers.free.push(buffer);
        }
    }

    fn send_region(
        &mut self,
        socket: BorrowedFd<'_>,
        region: &Arc<MappedRegion>,
        range: Range<usize>,
        buffer: Option<usize>,
    ) -> io::Result<usize> {
        match self.ring.send_zerocopy(socket, region, range) {
            Ok((send, bytes)) => {
                self.in_flight.push_back(SendInFlight { send, bytes: bytes as u64, buffer });
                self.counts.bytes += bytes as u64;
                Ok(bytes)
            }
            Err(error) => {
                self.release_buffer(buffer);
                Err(failed("SEND_ZC")(error))
            }
        }
    }
}
