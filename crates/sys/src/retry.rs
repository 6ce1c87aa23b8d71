//! Calls on a socket that a signal has interrupted (`EINTR`), and the socket's timeout.
//!
//! With `SO_RCVTIMEO` or `SO_SNDTIMEO` the kernel never restarts an interrupted call itself
//! (signal(7)). A call that is simply repeated waits for the whole timeout again, so that under a
//! periodic signal, such as a profiler's, the timeout never expires.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, Result};
use rustix::net::sockopt::{self, Timeout};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// What a call on a socket waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitsFor {
    /// Bytes to receive (`SO_RCVTIMEO`).
    Receive,
    /// Room to send (`SO_SNDTIMEO`).
    Send,
}

/// Makes a call on `socket` and repeats it after a signal. `EAGAIN` once the socket's timeout has
/// expired since the first signal.
pub fn retry<T>(
    socket: impl AsFd,
    waits_for: WaitsFor,
    mut call: impl FnMut() -> Result<T>,
) -> Result<T> {
    match call() {
        Err(Errno::INTR) => repeat(socket.as_fd(), waits_for, call),
        result => result,
    }
}

#[cold]
fn repeat<T>(
    socket: BorrowedFd<'_>,
    waits_for: WaitsFor,
    mut call: impl FnMut() -> Result<T>,
) -> Result<T> {
    let (timeout, events) = match waits_for {
        WaitsFor::Receive => (Timeout::Recv, PollFlags::IN),
        WaitsFor::Send => (Timeout::Send, PollFlags::OUT),
    };
    // A descriptor that is not a socket does not have a timeout.
    let timeout = sockopt::socket_timeout(socket, timeout).unwrap_or(None);
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Errno::AGAIN);
            }
            let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
            match rustix::event::poll(&mut [PollFd::from_borrowed_fd(socket, events)], Some(&left))
            {
                Ok(0) => return Err(Errno::AGAIN),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            }
        }
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Like [`retry`], for a call of the C library that returns -1 and sets `errno`.
pub(crate) fn retry_call(
    socket: impl AsFd,
    waits_for: WaitsFor,
    mut call: impl FnMut() -> libc::ssize_t,
) -> std::io::Result<usize> {
    let result = retry(socket, waits_for, || {
        usize::try_from(call()).map_err(|_| {
            Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
        })
    });
    result.map_err(std::io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn a_call_that_is_always_interrupted_ends_at_the_timeout() {
        let (socket, _other) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut calls = 0;
        let result = retry(&socket, WaitsFor::Receive, || -> Result<()> {
            calls += 1;
            Err(Errno::INTR)
        });
        assert_eq!((result, calls), (Err(Errno::AGAIN), 1));
        // The socket is writable, so the call itself is repeated.
        socket.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let result = retry(&socket, WaitsFor::Send, || -> Result<()> { Err(Errno::INTR) });
        assert_eq!(result, Err(Errno::AGAIN));
    }

    extern "C" fn ignore(_: libc::c_int) {}

    /// A profiler's or an interval timer's signal arrives more often than the timeout expires.
    #[test]
    fn a_receiver_times_out_under_periodic_signals() {
        // SAFETY: an all-zero sigaction is a valid value; the handler does nothing, so it may run
        // anywhere. Without SA_RESTART the call is interrupted.
        let is_set = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as *const () as libc::sighandler_t;
            libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut())
        };
        assert_eq!(is_set, 0);
        let (socket, _other) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        // SAFETY: both calls only return numbers. A thread's number can be sent between threads on
        // every C library, unlike a pthread_t.
        let (process, receiver) = unsafe { (libc::getpid(), libc::gettid()) };
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_secs(20);
                while !is_done.load(Ordering::Relaxed) && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(50));
                    // SAFETY: the call takes numbers; that thread lives until this scope ends.
                    unsafe {
                        libc::syscall(libc::SYS_tgkill, process, receiver, libc::SIGUSR1);
                    }
                }
            });
            let started = Instant::now();
            let result = retry(&socket, WaitsFor::Receive, || {
                rustix::net::recv(&socket, &mut [0u8; 1], rustix::net::RecvFlags::empty())
            });
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(result.unwrap_err(), Errno::AGAIN);
            assert!(started.elapsed() < Duration::from_secs(15), "the signals prolong the timeout");
        });
    }

    #[test]
    fn a_call_without_a_timeout_is_repeated() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let mut results = [Err(Errno::INTR), Err(Errno::INTR), Ok(7)].into_iter();
        assert_eq!(retry(&socket, WaitsFor::Receive, || results.next().unwrap()), Ok(7));
    }
}
