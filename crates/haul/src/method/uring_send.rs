//! `uring-send`: io_uring reads into a buffer, io_uring sends the buffer.
//!
//! It makes the copies of `read+send`, submitted through a ring (Linux 5.6), one call each. It
//! shows the cost or the saving of the ring itself on one connection; a server with many
//! connections would submit for all of them at once. Memory is sent directly.
//!
//! Probed by setting up a ring: `ENOSYS` without io_uring, `EPERM` if `kernel.io_uring_disabled` or
//! seccomp forbids it.

use super::{AttachedMethod, Copying, Counts, Entry, SendMethod, first_chunk};
use crate::call::Call;
use crate::error::{Error, failed};
use crate::source::Source;
use haul_sys::region::MappedRegion;
use haul_sys::uring::Ring;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "uring-send",
    copying: Copying::Always,
    fallback: Some(SendMethod::ReadSend),
    attach: |socket, options| {
        let ring = ring_for(socket)?;
        let buffer =
            Arc::new(MappedRegion::anonymous(options.chunk_bytes).map_err(failed(Call::Mmap))?);
        Ok(Box::new(UringSend { ring, buffer, bytes: 0 }))
    },
};

/// A ring that waits for `socket` if the socket is blocking now, and returns `EAGAIN` otherwise.
pub(super) fn ring_for(socket: BorrowedFd<'_>) -> Result<Ring, Error> {
    let mut ring = Ring::new().map_err(failed(Call::UringSetup))?;
    if is_nonblocking(socket)? {
        ring.set_nonblocking();
    }
    Ok(ring)
}

pub(super) fn is_nonblocking(socket: BorrowedFd<'_>) -> Result<bool, Error> {
    let flags =
        rustix::fs::fcntl_getfl(socket).map_err(|errno| failed(Call::Fcntl)(errno.into()))?;
    Ok(flags.contains(rustix::fs::OFlags::NONBLOCK))
}

struct UringSend {
    ring: Ring,
    buffer: Arc<MappedRegion>,
    bytes: u64,
}

impl super::Sealed for UringSend {}

impl AttachedMethod for UringSend {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        let (offset, len) = first_chunk(source, &range, self.buffer.len())?;
        let sent = if let Some(memory) = source.as_memory() {
            self.ring.send(socket, memory, offset as usize..offset as usize + len)
        } else {
            let read = self
                .ring
                .read(source.descriptor(), offset, &self.buffer, 0..len)
                .map_err(failed(Call::UringRead))?;
            if read == 0 {
                return Err(Error::Ended { at: offset });
            }
            self.ring.send(socket, &self.buffer, 0..read)
        }
        .map_err(failed(Call::UringSend))? as u64;
        self.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        Counts { bytes: self.bytes, calls: self.ring.enters(), ..Counts::default() }
    }
}
