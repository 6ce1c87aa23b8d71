//! Page-aligned memory owned by the program, for buffers that are read, written and lent to the
//! kernel.
//!
//! Unlike a [`crate::region::MappedRegion`], its bytes are accessible, since only its owner writes
//! them. Whole pages make a loan cheap: the kernel takes references to pages, and no other object
//! shares a page with the buffer.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Size of a huge page on x86-64 and on arm64 with 4 KiB pages; the kernel needs this alignment to
/// use one.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A buffer of zeroed memory that begins on a page boundary; unmapped on drop.
#[derive(Debug)]
pub struct PageBuffer {
    mapping: NonNull<u8>,
    mapping_len: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: PageBuffer owns its mapping as a Box<[u8]> owns its allocation; access goes through & and
// &mut.
unsafe impl Send for PageBuffer {}
// SAFETY: as above.
unsafe impl Sync for PageBuffer {}

impl PageBuffer {
    /// Allocates `len` bytes in ordinary pages. `InvalidInput` if `len` is 0.
    pub fn new(len: usize) -> io::Result<Self> {
        Self::allocate(len, crate::region::page_bytes())
    }

    /// Allocates `len` bytes in huge pages where the kernel has them free (`madvise`, Linux
    /// 2.6.38), else in ordinary pages.
    ///
    /// One huge page replaces 512 ordinary ones, so a loan takes that many fewer page references.
    pub fn huge(len: usize) -> io::Result<Self> {
        let pages = Self::allocate(len, HUGE_PAGE_BYTES)?;
        // SAFETY: the range is this value's own mapping, and the advice changes no content.
        let _ = unsafe {
            rustix::mm::madvise(
                pages.mapping.as_ptr().cast(),
                pages.mapping_len,
                Advice::LinuxHugepage,
            )
        };
        Ok(pages)
    }

    fn allocate(len: usize, alignment: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "0 bytes cannot be mapped"));
        }
        // The kernel aligns mappings to pages; a larger alignment needs slack to move the start.
        let slack = if alignment > crate::region::page_bytes() { alignment } else { 0 };
        let mapping_len =
            len.checked_add(slack).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is
        // replaced.
        let mapping = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapping_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let mapping = NonNull::new(mapping.cast::<u8>())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let padding = mapping.as_ptr().align_offset(alignment);
        // SAFETY: `padding` is less than `slack` if the mapping is unaligned, and 0 if it is
        // aligned.
        let start = unsafe { mapping.add(padding) };
        Ok(Self { mapping, mapping_len, start, len })
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` and `len` lie inside the mapping, which lives as long as `self` and is
        // zeroed by the kernel; only `&mut self` allows writing.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would only leak
        // it.
        let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.mapping_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_writable() {
        for (pages, alignment) in [
            (PageBuffer::new(10_000).unwrap(), crate::region::page_bytes()),
            (PageBuffer::huge(3 << 20).unwrap(), HUGE_PAGE_BYTES),
        ] {
            let mut pages = pages;
            assert_eq!(pages.as_ptr() as usize % alignment, 0);
            assert!(pages.iter().all(|&byte| byte == 0));
            let last = pages.len() - 1;
            pages[last] = 7;
            assert_eq!(pages[last], 7);
        }
        assert_eq!(PageBuffer::new(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(PageBuffer::huge(usize::MAX).is_err());
    }
}
