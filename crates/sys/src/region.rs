//! A stretch of mapped memory that only the kernel reads and writes.
//!
//! A mapped file may change or shrink under the program at any moment, and memory lent to the kernel is read
//! while the program runs on. Neither can be a `&[u8]`. A [`Region`] therefore never shows its bytes: it can
//! be filled by the kernel, sent by the kernel and nothing else. Where the file behind it has shrunk, the
//! kernel answers `EFAULT`; the program gets no `SIGBUS`, because it never touches the memory itself.

use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// The size of a page. All of haul's targets use 4 KiB or a multiple; the kernel says which.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Mapped memory, unmapped on drop. Pages that the kernel still sends from stay alive by its own reference.
#[derive(Debug)]
pub struct Region {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: a Region is an address range; no method reads or writes the memory from Rust, so threads cannot
// race on it. (`uring_receive` does with regions that nobody else has.)
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// How a send from a region behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendMode {
    /// The kernel copies the bytes before the call returns.
    Copy,
    /// `MSG_ZEROCOPY`: the kernel keeps the pages until it queues a notice ([`crate::error_queue`]).
    Zerocopy,
}

impl Region {
    /// Fresh zeroed memory of at least `len` bytes, readable and writable, all pages present.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is replaced.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }?;
        Self::mapped(start, len)
    }

    /// A read-only window of a file that shares its page cache. `offset` must be a multiple of the page size.
    ///
    /// Pages are mapped at once (`MAP_POPULATE`): one pass over the page cache instead of a fault every 64
    /// KiB.
    pub fn of_file(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Self::of_descriptor(file, offset, len, ProtFlags::READ)
    }

    /// A writable mapping of a memory file (memfd). Registering memory with io_uring needs it writable.
    pub fn of_memory_file(file: impl AsFd, len: usize) -> io::Result<Self> {
        Self::of_descriptor(file, 0, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn of_descriptor(
        file: impl AsFd,
        offset: u64,
        len: usize,
        protection: ProtFlags,
    ) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is replaced.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, offset)
        }?;
        Self::mapped(start, len)
    }

    fn mapped(start: *mut c_void, len: usize) -> io::Result<Self> {
        let start =
            NonNull::new(start).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { start, len })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte (the kernel refuses to map none, so never).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address and length of `range`, for handing to the kernel. `InvalidInput` outside the region.
    pub(crate) fn slice(&self, range: &Range<usize>) -> io::Result<(*mut c_void, usize)> {
        if range.start > range.end || range.end > self.len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("bytes {range:?} lie outside a region of {} bytes", self.len),
            ));
        }
        // SAFETY: the range was just checked to lie inside the mapping.
        Ok((unsafe { self.start.as_ptr().add(range.start) }, range.len()))
    }

    /// `pread` from `file` at `offset` into `range`; returns the bytes read, 0 at the end of the file.
    pub fn fill(&self, file: impl AsFd, offset: u64, range: Range<usize>) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        // SAFETY: the kernel writes at most `len` bytes at `start`, inside the mapping; nobody reads it in
        // Rust.
        crate::checked(|| unsafe {
            libc::pread(file.as_fd().as_raw_fd(), start, len, offset as libc::off_t)
        })
    }

    /// `send` of `range` into a socket; returns the bytes it took. Never raises `SIGPIPE`.
    ///
    /// `EFAULT` where the file behind the region has shrunk. With [`SendMode::Zerocopy`]: `ENOBUFS` when
    /// `net.core.optmem_max` or `RLIMIT_MEMLOCK` is reached.
    pub fn send(
        &self,
        socket: impl AsFd,
        range: Range<usize>,
        mode: SendMode,
    ) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        let flags = match mode {
            SendMode::Copy => libc::MSG_NOSIGNAL,
            SendMode::Zerocopy => libc::MSG_NOSIGNAL | libc::MSG_ZEROCOPY,
        };
        // SAFETY: the kernel only reads the mapping. With MSG_ZEROCOPY it reads on after the call, from
        // pages on which it holds its own reference, so that unmapping cannot give them to anyone else.
        crate::checked(|| unsafe { libc::send(socket.as_fd().as_raw_fd(), start, len, flags) })
    }

    /// `write` of `range` into a descriptor; returns the bytes it took. Raises `SIGPIPE` where that is not
    /// ignored.
    pub fn write(&self, to: impl AsFd, range: Range<usize>) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        // SAFETY: the kernel only reads the mapping, and no longer than the call.
        crate::checked(|| unsafe { libc::write(to.as_fd().as_raw_fd(), start, len) })
    }

    /// `vmsplice`: puts references to the pages of `range` into a pipe (Linux 2.6.17); returns the bytes it
    /// took.
    ///
    /// **No completion exists.** Whoever writes to the memory afterwards changes what the peer receives.
    pub fn vmsplice(
        &self,
        pipe: impl AsFd,
        range: Range<usize>,
        nonblock: bool,
    ) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        let flags = if nonblock { libc::SPLICE_F_NONBLOCK } else { 0 };
        let pages = libc::iovec { iov_base: start, iov_len: len };
        // SAFETY: `pages` lies inside the mapping. The pipe takes page references of its own, so the
        // pages outlive the mapping; without SPLICE_F_GIFT they stay ours.
        crate::checked(|| unsafe {
            libc::vmsplice(pipe.as_fd().as_raw_fd(), &raw const pages, 1, flags)
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would leak it, no more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_filled_region_is_sent_as_it_was_read() {
        let mut file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC)
            .map(std::fs::File::from)
            .unwrap();
        file.write_all(b"0123456789").unwrap();
        let region = Region::anonymous(page_bytes()).unwrap();
        assert_eq!(region.fill(&file, 2, 0..64).unwrap(), 8);
        let (from, mut to) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(region.send(&from, 1..8, SendMode::Copy).unwrap(), 7);
        let mut bytes = [0; 7];
        to.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"3456789");
    }

    #[test]
    fn outside_the_region_is_an_error() {
        let region = Region::anonymous(page_bytes()).unwrap();
        let (from, _to) = std::os::unix::net::UnixStream::pair().unwrap();
        let beyond = 0..page_bytes() + 1;
        let error = region.send(&from, beyond, SendMode::Copy).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_file_that_shrank_is_efault_and_no_signal() {
        let file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC)
            .map(std::fs::File::from)
            .unwrap();
        file.set_len(page_bytes() as u64).unwrap();
        let region = Region::of_file(&file, 0, page_bytes()).unwrap();
        file.set_len(0).unwrap();
        let (from, _to) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = region.send(&from, 0..10, SendMode::Copy).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
