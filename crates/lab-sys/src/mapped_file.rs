//! [`MappedFile`]: a file that is mapped into memory and can no longer change.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io::{self, Write};
use std::{ptr, slice};

/// A file in memory (`memfd_create`, Linux 3.17), mapped shared and read-only.
///
/// Seals keep it from shrinking and from being written, so that its bytes may be borrowed.
#[derive(Debug)]
pub struct MappedFile {
    start: ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is read-only, the file can no longer be written, and no thread owns either.
unsafe impl Send for MappedFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Creates a file with this content, and maps it. The content must not be empty.
    pub fn new(content: &[u8]) -> io::Result<Self> {
        let file = memfd_create("haul-mapped-file", MemfdFlags::ALLOW_SEALING)?;
        File::from(file.try_clone()?).write_all(content)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::WRITE)?;
        let (len, protection, flags) = (content.len(), ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: the kernel chooses the address, so no other memory is replaced.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, flags, &file, 0) }?;
        let start = ptr::NonNull::new(start.cast())
            .ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { start, len })
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping has `len` bytes and lives as long as `self`. The seals keep the file
        // at its length and its bytes unchanged.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no borrow of it is left.
        let result = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(result, Ok(()));
    }
}
