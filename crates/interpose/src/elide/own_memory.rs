//! Whether this process has the memory that it had when the library was prepared.
//!
//! A child that was made by a system call of the program, without the C library's `fork`, has
//! copies of the interposer's tables and descriptors, which belong to its parent. The kernel clears
//! a marked page in such a child (`MADV_WIPEONFORK`, Linux 4.14).

use crate::next;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

const PAGE_BYTES: usize = 4096;

/// The marked page.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// Marks the memory as this process's.
pub fn mark() {
    let mut page = PAGE.load(Relaxed);
    if page.is_null() {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address, so nothing is replaced. The page stays mapped.
        unsafe {
            let mapped = next::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, flags, -1, 0);
            let is_marked = mapped != libc::MAP_FAILED
                && libc::madvise(mapped, PAGE_BYTES, libc::MADV_WIPEONFORK) == 0;
            if !is_marked {
                return;
            }
            page = mapped.cast();
        }
        PAGE.store(page, Relaxed);
    }
    // SAFETY: the page is mapped and aligned.
    unsafe { (*page).store(1, Relaxed) };
}

/// Whether the tables are this process's. False in a child that the interposer did not see begin.
pub fn is_own() -> bool {
    let page = PAGE.load(Relaxed);
    // SAFETY: the page is mapped and aligned.
    !page.is_null() && unsafe { (*page).load(Relaxed) } == 1
}
