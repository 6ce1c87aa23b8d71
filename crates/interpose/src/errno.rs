//! Keeps the program's `errno` while the interposer makes system calls.

/// Restores the `errno` of its creation when it is dropped.
pub struct PreservedErrno(libc::c_int);

impl PreservedErrno {
    /// Reads `errno`.
    pub fn read() -> Self {
        // SAFETY: the C library returns a valid address for each thread.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for PreservedErrno {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 };
    }
}
