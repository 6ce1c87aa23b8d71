//! `uring-chain`: a read linked to a send, submitted as one system call.
//!
//! It makes the copies of `read+send`, and enters the kernel once per chunk (Linux 5.6). If the
//! file was truncated, the short read breaks the chain; the bytes that were read are then sent
//! separately. Memory needs no read, so there is nothing to link. Probed by setting up a ring, as
//! `uring-send` is.

use super::uring_send::ring_for;
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
    name: "uring-chain",
    copying: Copying::Always,
    fallback: Some(SendMethod::UringSend),
    attach: |socket, options| {
        let ring = ring_for(socket)?;
        let buffer =
            Arc::new(MappedRegion::anonymous(options.chunk_bytes).map_err(failed(Call::Mmap))?);
        Ok(Box::new(UringChain { ring, buffer, bytes: 0 }))
    },
};

struct UringChain {
    ring: Ring,
    buffer: Arc<MappedRegion>,
    bytes: u64,
}

impl super::Sealed for UringChain {}

impl AttachedMethod for UringChain {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        if source.as_memory().is_some() {
            return Err(Error::Unsupported("memory needs no read: use uring-send"));
        }
        let (offset, len) = first_chunk(source, &range, self.buffer.len())?;
        let (read, sent) = self
            .ring
            .read_then_send(source.descriptor(), offset, socket, &self.buffer, 0..len)
            .map_err(failed(Call::UringEnter))?;
        let sent = match read.map_err(failed(Call::UringRead))? {
            0 => return Err(Error::Ended { at: offset }),
            read if read < len => self.ring.send(socket, &self.buffer, 0..read),
            _ => sent,
        };
        let sent = sent.map_err(failed(Call::UringSend))? as u64;
        self.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        Counts { bytes: self.bytes, calls: self.ring.enters(), ..Counts::default() }
    }
}
