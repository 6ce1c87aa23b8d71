//! Detects that the process was forked.
//!
//! A forked child has a copy of the memory, but shares sockets, pipes and io_uring rings with its
//! parent. Code that keeps the state of one of these in memory must not use it in a child. The
//! process id does not tell a child from its parent if each is the first process of its namespace,
//! and reading it is a system call.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A page that the kernel clears in a forked child (`MADV_WIPEONFORK`, Linux 4.14), or
/// [`UNSUPPORTED`].
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// What [`PAGE`] points at if the kernel does not clear pages.
static UNSUPPORTED: AtomicU64 = AtomicU64::new(0);
/// The generation of this process. A fork copies the counter, and the child increases its copy.
static LATEST: AtomicU64 = AtomicU64::new(0);

/// A number that differs between this process, its ancestors and its descendants. It stays the same
/// until the process is forked, and then changes in the child.
pub fn generation() -> u64 {
    let page = page();
    if ptr::eq(page, &raw const UNSUPPORTED) {
        return u64::from(std::process::id());
    }
    match page.load(Ordering::Relaxed) {
        // The first call, or the first one in a child.
        0 => {
            let next = LATEST.fetch_add(1, Ordering::Relaxed) + 1;
            match page.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => next,
                Err(other_threads) => other_threads,
            }
        }
        generation => generation,
    }
}

/// The page, which is mapped by the first call. Without a lock, which a fork could leave locked.
fn page() -> &'static AtomicU64 {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let new = map_page().map_or((&raw const UNSUPPORTED).cast_mut(), NonNull::as_ptr);
        match PAGE.compare_exchange(page, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => page = new,
            // Another thread was faster. This page is leaked, once for each such thread.
            Err(other_threads) => page = other_threads,
        }
    }
    // SAFETY: the pointer refers to a static or to a whole page that is never unmapped. Zeroed
    // memory, which the kernel also provides in a child, is a valid AtomicU64.
    unsafe { &*page }
}

/// Maps a page that the kernel clears in a forked child; `None` if it cannot.
fn map_page() -> Option<NonNull<AtomicU64>> {
    let len = crate::region::page_bytes();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a null hint lets the kernel choose the address, so no existing mapping is replaced.
    let page =
        unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE) };
    let page = page.ok()?;
    // SAFETY: the range is the mapping made above, to which nothing refers yet.
    match unsafe { rustix::mm::madvise(page, len, Advice::LinuxWipeOnFork) } {
        Ok(()) => NonNull::new(page.cast()),
        Err(_) => None,
    }
}
