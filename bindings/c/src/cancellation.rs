//! Keeps `pthread_cancel` from ending a thread inside the library, because a cancellation cannot
//! unwind the frames of Rust.

use std::ffi::c_int;

/// `PTHREAD_CANCEL_DISABLE` of glibc and musl.
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old_state: *mut c_int) -> c_int;
}

/// Runs a function in which the thread cannot be cancelled. A request to cancel takes effect later.
pub fn without<T>(run: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: the state is valid, and the call writes the state before.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = run();
    // SAFETY: the state is the state before. The functions that are run do not unwind.
    unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
    result
}
