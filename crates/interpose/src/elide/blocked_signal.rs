//! Blocks SIGPIPE during a `sendfile`, which does not have `MSG_NOSIGNAL`, and which raises the
//! signal also if a part of the bytes was sent. `write` does not raise the signal then.

/// SIGPIPE, blocked in this thread.
pub struct BlockedSignal {
    before: libc::sigset_t,
    was_pending: bool,
}

impl BlockedSignal {
    /// Blocks the signal; `None` if the program ignores it.
    pub fn block() -> Option<Self> {
        // SAFETY: the sets and the action are filled by the calls.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action);
            if action.sa_sigaction == libc::SIG_IGN {
                return None;
            }
            let pipe = Self::set();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const pipe, &raw mut before);
            Some(Self { before, was_pending: Self::is_pending() })
        }
    }

    fn set() -> libc::sigset_t {
        // SAFETY: the set is initialized by the first call.
        unsafe {
            let mut pipe: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut pipe);
            libc::sigaddset(&raw mut pipe, libc::SIGPIPE);
            pipe
        }
    }

    fn is_pending() -> bool {
        // SAFETY: the set is filled by the call.
        unsafe {
            let mut pending: libc::sigset_t = std::mem::zeroed();
            libc::sigpending(&raw mut pending);
            libc::sigismember(&raw const pending, libc::SIGPIPE) == 1
        }
    }

    /// Unblocks the signal as before. Unless the program is to receive the signal, takes it back
    /// first.
    pub fn restore(self, is_kept: bool) {
        // SAFETY: the sets are valid, and the wait returns at once.
        unsafe {
            if !is_kept && !self.was_pending && Self::is_pending() {
                let pipe = Self::set();
                let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                libc::sigtimedwait(&raw const pipe, std::ptr::null_mut(), &raw const at_once);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut());
        }
    }
}
