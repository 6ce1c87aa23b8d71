//! Descriptors that the interposer keeps open in the program: numbers that programs do not use, and
//! closed at `exec`.

use crate::kernel;
use crate::next;
use libc::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// The lowest number. The limit of open files is at least 1024 on common systems.
const NUMBER_MIN: c_int = 512;

/// Duplicates a descriptor to a high number. `None` if the limit of open files does not allow it.
pub fn duplicate(fd: c_int) -> Option<c_int> {
    // SAFETY: the call takes numbers only.
    let high = unsafe { next::fcntl(fd, libc::F_DUPFD_CLOEXEC, NUMBER_MIN.into()) };
    (high >= 0).then_some(high)
}

/// Moves a descriptor to a high number, and closes the original. `None` if the limit of open files
/// does not allow it.
pub fn raise(fd: c_int) -> Option<c_int> {
    if fd < 0 {
        return None;
    }
    let high = duplicate(fd);
    // SAFETY: the caller gives the descriptor away.
    unsafe { next::close(fd) };
    high
}

/// Whether a descriptor has a number that the interposer may use.
pub fn is_high(fd: c_int) -> bool {
    fd >= NUMBER_MIN
}

/// Waits until other threads do not use a descriptor that the program is about to close: they
/// checked that the number is the interposer's. At most 100 ms, in which a thread that is about to
/// make its call runs also on a busy machine.
pub fn wait_while(is_used: impl Fn() -> bool) {
    const PAUSES_MAX: usize = 1000;
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    for _ in 0..PAUSES_MAX {
        if !is_used() {
            return;
        }
        // SAFETY: the structure lives through the call.
        unsafe { libc::nanosleep(&raw const pause, std::ptr::null_mut()) };
    }
}

/// A descriptor of the interposer that stays open. The program can close it, and open something
/// else under its number.
pub struct KeptDescriptor {
    /// -1: not open.
    fd: AtomicI32,
    /// Device and inode, which identify the file.
    device: AtomicU64,
    inode: AtomicU64,
}

impl KeptDescriptor {
    /// No descriptor.
    pub const fn none() -> Self {
        Self { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    /// The descriptor, without a check whether it is still the interposer's.
    pub fn get(&self) -> Option<c_int> {
        Some(self.fd.load(Relaxed)).filter(|&fd| fd >= 0)
    }

    /// Keeps a descriptor, which is raised. Returns it. If another thread was faster, that
    /// thread's.
    pub fn keep(&self, fd: c_int) -> Option<c_int> {
        let raised = raise(fd)?;
        let status = kernel::status(raised)?;
        self.device.store(status.st_dev, Relaxed);
        self.inode.store(status.st_ino, Relaxed);
        if self.fd.compare_exchange(-1, raised, Relaxed, Relaxed).is_err() {
            // SAFETY: the descriptor is this function's.
            unsafe { next::close(raised) };
        }
        self.get()
    }

    /// Whether the number still is the interposer's descriptor.
    pub fn is_own(&self) -> bool {
        self.get().and_then(kernel::status).is_some_and(|status| {
            status.st_dev == self.device.load(Relaxed) && status.st_ino == self.inode.load(Relaxed)
        })
    }

    /// Closes the descriptor, if it still is the interposer's.
    pub fn close(&self) {
        let is_own = self.is_own();
        let fd = self.fd.swap(-1, Relaxed);
        if is_own && fd >= 0 {
            // SAFETY: the descriptor is the interposer's.
            unsafe { next::close(fd) };
        }
    }

    /// Forgets the descriptor if it is in a range that the program is about to close.
    pub fn before_close_range(&self, first: usize, last: usize) {
        let fd = self.fd.load(Relaxed);
        if usize::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd)) {
            let _ = self.fd.compare_exchange(fd, -1, Relaxed, Relaxed);
        }
    }
}
