//! `uring-chain`: a read linked to a send, submitted as one system call.
//!
//! The merged system call: the copies of `read+send`, one entry into the kernel a chunk (Linux 5.6). A read
//! that comes out short, because the file was truncated, breaks the chain; what was read is then sent by
//! itself. Memory has nothing to read and nothing to merge. Tried by setting a ring up, as `uring-send`.

use super::uring_send::ring_for;
use super::{BoundMethod, Copying, Counts, Entry, SendMethod, chunk_of};
use crate::Source;
use crate::error::{Error, failed};
use haul_sys::region::Region;
use haul_sys::uring::Ring;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "uring-chain",
    copying: Copying::Always,
    fallback: Some(SendMethod::UringSend),
    open: |socket, options| {
        let ring = ring_for(socket)?;
        let buffer = Arc::new(Region::anonymous(options.chunk_bytes).map_err(failed("mmap"))?);
        Ok(Box::new(UringChain { ring, buffer, bytes: 0 }))
    },
};

struct UringChain {
    ring: Ring,
    buffer: Arc<Region>,
    bytes: u64,
}

impl BoundMethod for UringChain {
    fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        if source.as_memory().is_some() {
            return Err(Error::Unsuited(
                "memory has no read to merge with the send: uring-send sends it as it is",
            ));
        }
        let (offset, len) = chunk_of(&range, self.buffer.len());
        let (read, sent) = self
            .ring
            .read_then_send(source.descriptor(), offset, socket, &self.buffer, 0..len)
            .map_err(failed("io_uring_enter"))?;
        let sent = match read.map_err(failed("IORING_OP_READ"))? {
            0 => return Err(Error::Ended { at: offset }),
            read if read < len => self.ring.send(socket, &self.buffer, 0..read),
            _ => sent,
        };
        let sent = sent.map_err(failed("IORING_OP_SEND"))? as u64;
        self.bytes += sent;
        Ok(sent)
    }

    fn counts(&self) -> Counts {
        Counts { bytes: self.bytes, calls: self.ring.enters(), ..Counts::default() }
    }
}
