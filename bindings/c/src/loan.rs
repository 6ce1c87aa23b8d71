//! Memory of the program that is lent to the kernel.

use std::ffi::{c_int, c_void};

/// The release function of a program.
pub type Release = unsafe extern "C" fn(
    context: *mut c_void,
    data: *const c_void,
    sent_bytes: usize,
    outcome: c_int,
);

/// The sender was freed.
pub const ABANDONED: c_int = 2;

/// Lent memory, with the function that tells the program of its end.
pub struct LentMemory {
    data: *const u8,
    length: usize,
    /// `None` once it was called, or if the loan was refused.
    release: Option<Release>,
    context: *mut c_void,
}

// SAFETY: the program promises that the memory stays until the release function was called, and
// that this function may be called by another thread (haul.h).
unsafe impl Send for LentMemory {}
// SAFETY: the memory is only read.
unsafe impl Sync for LentMemory {}

impl LentMemory {
    /// # Safety
    ///
    /// `data` must point at `length` bytes that stay until `release` is called.
    pub unsafe fn new(
        data: *const u8,
        length: usize,
        release: Option<Release>,
        context: *mut c_void,
    ) -> Self {
        Self { data, length, release, context }
    }

    /// Calls the release function.
    pub fn release(mut self, sent_bytes: usize, outcome: c_int) {
        self.call(sent_bytes, outcome);
    }

    /// Forgets a loan that was refused, so that the release function is not called.
    pub fn refuse(mut self) {
        self.release = None;
    }

    fn call(&mut self, sent_bytes: usize, outcome: c_int) {
        if let Some(release) = self.release.take() {
            // SAFETY: the program promised that the function accepts these arguments.
            unsafe { release(self.context, self.data.cast(), sent_bytes, outcome) };
        }
    }
}

impl AsRef<[u8]> for LentMemory {
    fn as_ref(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: the program promised that the memory stays until the release function is called.
        unsafe { std::slice::from_raw_parts(self.data, self.length) }
    }
}

impl Drop for LentMemory {
    /// The sender was freed. After a panic, it is not known whether the kernel has the memory, so
    /// the program does not get the memory back.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.call(0, ABANDONED);
        }
    }
}
