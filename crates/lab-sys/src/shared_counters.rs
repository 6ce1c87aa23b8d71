//! Counters in memory shared between processes (sealed `memfd_create`, Linux 3.17).

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// An array of counters, starting at 0, shared with every process that has the descriptor.
#[derive(Debug)]
pub struct SharedCounters {
    fd: OwnedFd,
    counters: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the memory is accessed as atomics only, and stays mapped as long as this value lives.
unsafe impl Send for SharedCounters {}
// SAFETY: as above.
unsafe impl Sync for SharedCounters {}

impl SharedCounters {
    /// Creates `count` counters in a new memory file.
    ///
    /// The file is sealed against shrinking, so no process can remove memory that another one has
    /// mapped.
    pub fn create(count: usize) -> io::Result<Self> {
        let fd = memfd_create("haul-counters", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, (count.max(1) * size_of::<AtomicU64>()) as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Self::map(fd)
    }

    /// Maps the counters that another process created, by their descriptor. `InvalidInput` for any
    /// other file.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        // Without the seal its creator could still shrink the file.
        let is_sealed = rustix::fs::fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK);
        if is_sealed { Self::map(fd) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    fn map(fd: OwnedFd) -> io::Result<Self> {
        let bytes = rustix::fs::fstat(&fd)?.st_size as usize;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is
        // replaced.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let counters = NonNull::new(memory.cast())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { fd, counters, count: bytes / size_of::<AtomicU64>() })
    }

    /// Number of counters.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the counter at `index`.
    ///
    /// # Panics
    /// If `index` is not less than [`Self::count`].
    pub fn get(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "there are {} counters", self.count);
        // SAFETY: the mapping holds `count` counters, is aligned to a page, cannot shrink, and
        // lives as long as `self`; every process accesses it as atomics.
        unsafe { self.counters.add(index).as_ref() }
    }
}

impl AsFd for SharedCounters {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedCounters {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `map` made, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.counters.as_ptr().cast(), self.count * size_of::<AtomicU64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn both_mappings_share_the_counters() {
        let one = SharedCounters::create(16).unwrap();
        let other = SharedCounters::open(one.as_fd().try_clone_to_owned().unwrap()).unwrap();
        one.get(15).store(7, Relaxed);
        assert_eq!(other.get(15).load(Relaxed), 7);
        assert_eq!((other.get(0).load(Relaxed), other.count()), (0, 16));
    }

    #[test]
    fn an_unsealed_file_is_refused() {
        let fd = memfd_create("other", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 128).unwrap();
        assert!(SharedCounters::open(fd).is_err(), "it could shrink");
    }
}
