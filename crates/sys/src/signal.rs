//! The signal mask of threads.

use std::io;
use std::mem::MaybeUninit;

/// Runs `work` while this thread blocks all signals, as threads do that `work` starts.
///
/// A thread of a library must not handle the program's signals: the program may wait for them in
/// its own threads (`sigwait`, `signalfd`).
pub fn with_all_blocked<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut earlier = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initializes the first set; pthread_sigmask reads it and writes the second.
    let result = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), earlier.as_mut_ptr())
    };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(result));
    }
    let outcome = work();
    // SAFETY: the call above has initialized the set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, earlier.as_ptr(), std::ptr::null_mut()) };
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The `SigBlk` line of a thread's status, a bit for each signal.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn a_started_thread_blocks_all_signals_and_the_caller_none() {
        const TERM: u64 = 1 << (libc::SIGTERM - 1);
        let thread = with_all_blocked(|| std::thread::spawn(blocked)).unwrap();
        assert_ne!(thread.join().unwrap() & TERM, 0);
        assert_eq!(blocked() & TERM, 0);
    }
}
