//! Keeps `SIGPIPE` from the program, because `sendfile`, `splice` and `write` cannot
//! suppress the signal by a flag.
//!
//! The kernel sends the signal to the thread that made the call. So the thread blocks the signal
//! during the call, and takes a signal that was not pending before the call.

use std::mem::MaybeUninit;
use std::ptr;

/// Runs a function in which no `SIGPIPE` reaches the thread.
pub fn without<T>(run: impl FnOnce() -> T) -> T {
    let restored = Blocked::new();
    let result = run();
    drop(restored);
    result
}

/// Restores the signal mask when it is dropped, so also after a panic.
struct Blocked {
    pipe: libc::sigset_t,
    was_masked: bool,
    was_pending: bool,
}

impl Blocked {
    fn new() -> Self {
        let mut pipe = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the calls write the sets before they are read, and `SIGPIPE` is a valid signal.
        unsafe {
            libc::sigemptyset(pipe.as_mut_ptr());
            libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
            let pipe = pipe.assume_init();
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const pipe, before.as_mut_ptr());
            let was_masked = libc::sigismember(before.as_ptr(), libc::SIGPIPE) == 1;
            Self { pipe, was_masked, was_pending: was_masked && is_pending() }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let pipe = &raw const self.pipe;
        // SAFETY: the set is valid, and a null pointer asks for no information.
        unsafe {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            if !self.was_pending {
                while libc::sigtimedwait(pipe, ptr::null_mut(), &raw const now) == -1
                    && *libc::__errno_location() == libc::EINTR
                {}
            }
            if !self.was_masked {
                libc::pthread_sigmask(libc::SIG_UNBLOCK, pipe, ptr::null_mut());
            }
        }
    }
}

/// Whether a `SIGPIPE` is pending.
fn is_pending() -> bool {
    let mut pending = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the call writes the set before it is read.
    unsafe {
        libc::sigpending(pending.as_mut_ptr()) == 0
            && libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1
    }
}
