//! The environment of the program, at its start.

use libc::c_char;
use std::ffi::CStr;

/// The value of an environment variable. The pointer stays valid while the program does not change
/// its environment, and this is used before the program runs.
pub fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name is a C string, and no other thread runs.
    let value: *const c_char = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: the C library returns a C string.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// A name with a NUL byte at its end. `LENGTH` is the name's length plus 1.
pub const fn with_nul<const LENGTH: usize>(name: &str) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    let mut index = 0;
    while index + 1 < LENGTH {
        bytes[index] = name.as_bytes()[index];
        index += 1;
    }
    bytes
}
