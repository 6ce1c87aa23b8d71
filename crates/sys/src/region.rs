//! Mapped memory that only the kernel reads and writes.
//!
//! A mapped file may change or shrink at any moment, and memory lent to the kernel is read while
//! the program runs on. Neither can be a `&[u8]`. A [`MappedRegion`] therefore never exposes its
//! bytes: the kernel can fill it and send from it, nothing else.
//!
//! If the file behind the region has shrunk, the kernel returns `EFAULT`. The program gets no
//! `SIGBUS`, because it never accesses the memory itself.

use crate::retry::{WaitsFor, retry_call};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// Returns the size of a page in bytes. All of haul's targets use 4 KiB or a multiple of it.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// A memory mapping, unmapped on drop. The kernel holds its own references to pages that it still
/// sends from.
#[derive(Debug)]
pub struct MappedRegion {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: a MappedRegion is an address range; no method reads or writes the memory from Rust, so
// threads cannot race on it. `uring_receive` reads regions from Rust, but only ones that it does
// not share.
unsafe impl Send for MappedRegion {}
// SAFETY: as above.
unsafe impl Sync for MappedRegion {}

/// How a send from a region treats the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendMode {
    /// The kernel copies the bytes before the call returns.
    Copy,
    /// `MSG_ZEROCOPY`: the kernel uses the pages until it queues a completion
    /// ([`crate::error_queue`]).
    Zerocopy,
}

impl MappedRegion {
    /// Maps at least `len` bytes of zeroed anonymous memory, readable and writable, all pages
    /// present.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is
        // replaced.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }?;
        Self::from_mapping(start, len)
    }

    /// Maps a range of a file read-only, sharing its page cache. `offset` must be a multiple of the
    /// page size.
    ///
    /// The pages are mapped at once (`MAP_POPULATE`): one pass over the page cache instead of a
    /// fault every 64 KiB.
    pub fn of_file(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Self::map_descriptor(file, offset, len, ProtFlags::READ)
    }

    /// Maps a memory file (memfd) writable. Registering memory with io_uring requires a writable
    /// mapping.
    pub fn of_memory_file(file: impl AsFd, len: usize) -> io::Result<Self> {
        Self::map_descriptor(file, 0, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map_descriptor(
        file: impl AsFd,
        offset: u64,
        len: usize,
        protection: ProtFlags,
    ) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is
        // replaced.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, offset)
        }?;
        Self::from_mapping(start, len)
    }

    fn from_mapping(start: *mut c_void, len: usize) -> io::Result<Self> {
        let start =
            NonNull::new(start).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { start, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region is empty; never true, since the kernel refuses to map 0 bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address and length of `range`, to pass to the kernel. `InvalidInput` outside the
    /// region.
    pub(crate) fn slice(&self, range: &Range<usize>) -> io::Result<(*mut c_void, usize)> {
        if range.start > range.end || range.end > self.len {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("bytes {range:?} are outside a region of {} bytes", self.len),
            ));
        }
        // SAFETY: the range was just checked to lie inside the mapping.
        Ok((unsafe { self.start.as_ptr().add(range.start) }, range.len()))
    }

    /// Reads from `file` at `offset` into `range` (`pread`); returns the bytes read, 0 at the end
    /// of the file.
    pub fn fill(&self, file: impl AsFd, offset: u64, range: Range<usize>) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        // A C library with an offset of 32 bits must not read from another place.
        let offset = libc::off_t::try_from(offset)
            .map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        // SAFETY: the kernel writes at most `len` bytes at `start`, inside the mapping, which Rust
        // code never reads.
        crate::syscall(|| unsafe { libc::pread(file.as_fd().as_raw_fd(), start, len, offset) })
    }

    /// Sends `range` to a socket (`send`); returns the bytes accepted. Never raises `SIGPIPE`.
    ///
    /// `EFAULT` if the file behind the region has shrunk. With [`SendMode::Zerocopy`], `ENOBUFS`
    /// when `net.core.optmem_max` or `RLIMIT_MEMLOCK` is reached.
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
        // SAFETY: the kernel only reads the mapping. With MSG_ZEROCOPY it reads on after the call,
        // from pages on which it holds its own reference, so unmapping cannot hand them to another
        // owner.
        retry_call(&socket, WaitsFor::Send, || unsafe {
            libc::send(socket.as_fd().as_raw_fd(), start, len, flags)
        })
    }

    /// Writes `range` to a descriptor (`write`); returns the bytes accepted. Raises `SIGPIPE` if
    /// that signal is not ignored.
    pub fn write(&self, to: impl AsFd, range: Range<usize>) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        // SAFETY: the kernel only reads the mapping, and no longer than the call.
        retry_call(&to, WaitsFor::Send, || unsafe {
            libc::write(to.as_fd().as_raw_fd(), start, len)
        })
    }

    /// Puts references to the pages of `range` into a pipe (`vmsplice`, Linux 2.6.17); returns the
    /// bytes accepted.
    ///
    /// **There is no completion.** A later write to the memory changes the bytes that the peer
    /// receives.
    pub fn vmsplice(
        &self,
        pipe: impl AsFd,
        range: Range<usize>,
        nonblock: bool,
    ) -> io::Result<usize> {
        let (start, len) = self.slice(&range)?;
        let flags = if nonblock { libc::SPLICE_F_NONBLOCK } else { 0 };
        let pages = libc::iovec { iov_base: start, iov_len: len };
        // SAFETY: `pages` lies inside the mapping. The pipe takes page references of its own, so
        // the pages outlive the mapping; without SPLICE_F_GIFT this process keeps ownership.
        crate::syscall(|| unsafe {
            libc::vmsplice(pipe.as_fd().as_raw_fd(), &raw const pages, 1, flags)
        })
    }
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would only leak
        // it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_region_filled_from_a_file_sends_the_same_bytes() {
        let mut file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC)
            .map(std::fs::File::from)
            .unwrap();
        file.write_all(b"0123456789").unwrap();
        let region = MappedRegion::anonymous(page_bytes()).unwrap();
        assert_eq!(region.fill(&file, 2, 0..64).unwrap(), 8);
        let (from, mut to) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(region.send(&from, 1..8, SendMode::Copy).unwrap(), 7);
        let mut bytes = [0; 7];
        to.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"3456789");
    }

    /// Where `off_t` has 32 bits, offsets beyond 2 GiB would also wrap.
    #[test]
    fn an_offset_beyond_the_c_librarys_is_an_error() {
        let file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let region = MappedRegion::anonymous(page_bytes()).unwrap();
        let error = region.fill(&file, u64::MAX, 0..64).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOVERFLOW));
    }

    #[test]
    fn a_range_outside_the_region_is_an_error() {
        let region = MappedRegion::anonymous(page_bytes()).unwrap();
        let (from, _to) = std::os::unix::net::UnixStream::pair().unwrap();
        let beyond = 0..page_bytes() + 1;
        let error = region.send(&from, beyond, SendMode::Copy).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn sending_from_a_truncated_file_is_efault_and_raises_no_signal() {
        let file = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC)
            .map(std::fs::File::from)
            .unwrap();
        file.set_len(page_bytes() as u64).unwrap();
        let region = MappedRegion::of_file(&file, 0, page_bytes()).unwrap();
        file.set_len(0).unwrap();
        let (from, _to) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = region.send(&from, 0..10, SendMode::Copy).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
