//! Page-aligned memory of the program's own, for buffers that are read, written and lent.
//!
//! Unlike a [`crate::region::Region`] its bytes can be seen, since nobody but its owner writes it. Whole pages
//! make a loan cheap: the kernel takes references to pages, and no other object shares one with the buffer.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Huge pages of x86-64 and of 4 KiB-page arm64, and the alignment at which the kernel can use them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory that begins on a page boundary; unmapped on drop.
#[derive(Debug)]
pub struct Pages {
    mapping: NonNull<u8>,
    mapping_len: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: Pages owns its mapping as a Box<[u8]> owns its allocation; access goes through & and &mut.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `len` bytes in ordinary pages. `InvalidInput` for none.
    pub fn new(len: usize) -> io::Result<Self> {
        Self::mapped(len, crate::region::page_bytes())
    }

    /// `len` bytes, in huge pages where the kernel has some to give (`madvise`, Linux 2.6.38), else in
    /// ordinary ones. One huge page instead of 512 makes a loan's page references as few.
    pub fn huge(len: usize) -> io::Result<Self> {
        let pages = Self::mapped(len, HUGE_PAGE_BYTES)?;
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

    fn mapped(len: usize, alignment: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "memory of no bytes cannot be mapped",
            ));
        }
        // The kernel aligns mappings to pages; for more there must be room to move.
        let room = if alignment > crate::region::page_bytes() { alignment } else { 0 };
        let mapping_len =
            len.checked_add(room).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is replaced.
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
        let before = mapping.as_ptr().align_offset(alignment);
        // SAFETY: `before` is less than `room` where the mapping is unaligned, and 0 where it is aligned.
        let start = unsafe { mapping.add(before) };
        Ok(Self { mapping, mapping_len, start, len })
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` and `len` lie inside the mapping, which lives as long as `self` and is zeroed by
        // the kernel; only `&mut self` allows writing.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in this type and is unmapped once; an error would leak it, no more.
        let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.mapping_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_writable() {
        for (pages, alignment) in [
            (Pages::new(10_000).unwrap(), crate::region::page_bytes()),
            (Pages::huge(3 << 20).unwrap(), HUGE_PAGE_BYTES),
        ] {
            let mut pages = pages;
            assert_eq!(pages.as_ptr() as usize % alignment, 0);
            assert!(pages.iter().all(|&byte| byte == 0));
            let last = pages.len() - 1;
            pages[last] = 7;
            assert_eq!(pages[last], 7);
        }
        assert_eq!(Pages::new(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(Pages::huge(usize::MAX).is_err());
    }
}
