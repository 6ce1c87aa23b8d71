//! io_uring for receiving a stream: one multishot receive into buffers that the kernel picks from a
//! ring.
//!
//! Uses `IORING_OP_RECV` multishot (Linux 6.0) and `IORING_REGISTER_PBUF_RING` (5.19).
//!
//! Not supported: several sockets on one ring, bundles, zero-copy receive.

use crate::region::{MappedRegion, page_bytes};
use io_uring::{IoUring, cqueue, opcode, types};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering::Release};

/// ID of the only buffer group.
const GROUP: u16 = 0;
/// Most buffers in a ring (`io_register_pbuf_ring` in `io_uring/kbuf.c`: 32768, and a power of
/// two).
const BUFFERS_MAX: usize = 1 << 15;

/// An io_uring instance that receives from one socket.
///
/// If it is dropped while a request is in flight, its memory is leaked, since the kernel may still
/// write to it.
pub struct ReceiveRing {
    uring: IoUring,
    socket: OwnedFd,
    /// Ring of free buffers that the kernel reads: an array of `struct io_uring_buf`.
    entries: Option<MappedRegion>,
    buffers: Option<MappedRegion>,
    buffer_bytes: usize,
    count: u16,
    tail: u16,
    is_armed: bool,
    enters: u64,
}

impl std::fmt::Debug for ReceiveRing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ReceiveRing").field("buffers", &self.count).finish_non_exhaustive()
    }
}

impl ReceiveRing {
    /// Creates a ring with `count` buffers of `buffer_bytes` each.
    ///
    /// `count` is rounded up to a power of two, `buffer_bytes` to pages. `ENOSYS` or `EPERM` if
    /// io_uring is missing or forbidden, `EINVAL` before Linux 6.0. Only the thread that created
    /// the ring may receive (`IORING_SETUP_SINGLE_ISSUER`); calls of other threads fail with
    /// `EEXIST`.
    pub fn new(socket: impl AsFd, count: usize, buffer_bytes: usize) -> io::Result<Self> {
        let count = count.clamp(1, BUFFERS_MAX).next_power_of_two();
        let buffer_bytes = buffer_bytes.max(1).next_multiple_of(page_bytes());
        let uring = IoUring::builder()
            .setup_cqsize(2 * count as u32)
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(8)?;
        let entries = MappedRegion::anonymous(count * size_of::<types::BufRingEntry>())?;
        let buffers = MappedRegion::anonymous(count * buffer_bytes)?;
        let (address, _) = entries.slice(&(0..entries.len()))?;
        // SAFETY: the region is mapped, page-aligned and large enough for `count` entries, and it
        // stays mapped until the ring is gone (`drop`).
        unsafe {
            uring.submitter().register_buf_ring_with_flags(address as u64, count as u16, GROUP, 0)
        }?;
        let mut ring = Self {
            uring,
            socket: socket.as_fd().try_clone_to_owned()?,
            entries: Some(entries),
            buffers: Some(buffers),
            buffer_bytes,
            count: count as u16,
            tail: 0,
            is_armed: false,
            enters: 0,
        };
        for index in 0..ring.count {
            ring.provide_buffer(index)?;
        }
        ring.publish_tail()?;
        Ok(ring)
    }

    /// Waits for data and passes it to `consume`, piece by piece; returns the number of bytes, 0 at
    /// the end of the stream.
    ///
    /// The buffers of the pieces are provided to the kernel again afterwards.
    pub fn receive(&mut self, mut consume: impl FnMut(&[u8])) -> io::Result<usize> {
        loop {
            if !self.is_armed {
                let entry = opcode::RecvMulti::new(types::Fd(self.socket.as_raw_fd()), GROUP)
                    .build()
                    .user_data(1);
                // SAFETY: the request's memory is the buffer ring's, which outlives it (`drop`);
                // its socket is this ring's own descriptor.
                unsafe { self.uring.submission().push(&entry) }
                    .map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
                self.is_armed = true;
                self.enter()?;
            } else if self.uring.completion().is_empty() {
                self.enter()?;
            }
            let (mut total, mut has_ended, mut failure) = (0, false, None);
            let completions: Vec<(i32, u32)> =
                self.uring.completion().map(|entry| (entry.result(), entry.flags())).collect();
            for (result, flags) in completions {
                if !cqueue::more(flags) {
                    self.is_armed = false;
                }
                match usize::try_from(result) {
                    Ok(0) => has_ended = true,
                    Ok(len) => {
                        let index = cqueue::buffer_select(flags)
                            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
                        total += len;
                        consume(self.buffer(index, len)?);
                        self.provide_buffer(index)?;
                    }
                    // No buffer was free. Buffers are free again now, and the request is submitted
                    // anew.
                    Err(_) if result == -libc::ENOBUFS => {}
                    Err(_) => failure = Some(io::Error::from_raw_os_error(-result)),
                }
            }
            self.publish_tail()?;
            match failure {
                Some(error) if total == 0 => return Err(error),
                _ if total > 0 || has_ended => return Ok(total),
                _ => {}
            }
        }
    }

    /// Number of system calls made so far.
    pub fn enters(&self) -> u64 {
        self.enters
    }

    fn enter(&mut self) -> io::Result<()> {
        self.enters += 1;
        match self.uring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the bytes that the kernel wrote into a completed buffer.
    fn buffer(&self, index: u16, len: usize) -> io::Result<&[u8]> {
        let start = usize::from(index) * self.buffer_bytes;
        let range = start..start + len.min(self.buffer_bytes);
        let (address, len) =
            self.buffers.as_ref().ok_or(io::ErrorKind::NotConnected)?.slice(&range)?;
        // SAFETY: the kernel has completed this buffer and writes it again only after
        // `provide_buffer`, which takes `&mut self` and so ends this borrow. The region was zeroed,
        // so all of it is initialised.
        Ok(unsafe { std::slice::from_raw_parts(address.cast(), len) })
    }

    /// Writes a buffer's entry at the tail; the kernel uses it after [`Self::publish_tail`].
    fn provide_buffer(&mut self, index: u16) -> io::Result<()> {
        let start = usize::from(index) * self.buffer_bytes;
        let buffers = self.buffers.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (address, _) = buffers.slice(&(start..start + self.buffer_bytes))?;
        let slot = self.entry(self.tail & (self.count - 1))?;
        // SAFETY: the slot lies in the entries' region and is aligned, and the kernel reads it only
        // once the tail has passed it. The tail's own field, which overlays the first entry's last
        // two bytes, is not among those written.
        let entry = unsafe { &mut *slot };
        entry.set_addr(address as u64);
        entry.set_len(self.buffer_bytes as u32);
        entry.set_bid(index);
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    fn publish_tail(&self) -> io::Result<()> {
        let first = self.entry(0)?;
        // SAFETY: the tail overlays the reserved field of the first entry (`struct
        // io_uring_buf_ring`), which is mapped, aligned, and otherwise only read by the kernel.
        unsafe { AtomicU16::from_ptr(types::BufRingEntry::tail(first).cast_mut()) }
            .store(self.tail, Release);
        Ok(())
    }

    fn entry(&self, index: u16) -> io::Result<*mut types::BufRingEntry> {
        let size = size_of::<types::BufRingEntry>();
        let start = usize::from(index) * size;
        let entries = self.entries.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (address, _) = entries.slice(&(start..start + size))?;
        Ok(address.cast())
    }
}

impl Drop for ReceiveRing {
    fn drop(&mut self) {
        if self.is_armed {
            // The kernel may still write to this memory, so it is leaked.
            std::mem::forget(self.buffers.take());
            std::mem::forget(self.entries.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    /// Sends more than the buffers hold, so that each is reused often and the ring runs out now and
    /// then.
    #[test]
    fn every_byte_arrives_once_and_in_order() {
        const BYTES: usize = 3_000_001;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let to = listener.accept().unwrap().0;
        let mut ring = match ReceiveRing::new(&to, 4, 4096) {
            Ok(ring) => ring,
            Err(error) => return eprintln!("SKIPPED: no io_uring with buffer rings here: {error}"),
        };
        let sent: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
        let sender = std::thread::spawn(move || {
            from.write_all(&sent).unwrap();
            sent
        });
        let mut received = Vec::new();
        while ring.receive(|bytes| received.extend_from_slice(bytes)).unwrap() > 0 {}
        assert!(sender.join().unwrap() == received, "{} of {BYTES} bytes", received.len());
    }
}
