//! Periodic signals, as a profiler or an interval timer sends them.

use std::io;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Sends `SIGUSR1` to every other thread of this process, again and again, until it is dropped.
///
/// The signal has a handler that does nothing and is installed without `SA_RESTART`, so that each
/// signal interrupts the system call in which a thread waits (`EINTR`). The handler stays.
#[derive(Debug)]
pub struct PeriodicSignals {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

extern "C" fn ignore(_: libc::c_int) {}

impl PeriodicSignals {
    /// Starts to send signals, one to each thread every `interval`.
    pub fn start(interval: Duration) -> io::Result<Self> {
        // SAFETY: an all-zero sigaction is a valid value; the handler does nothing, so it may run
        // anywhere.
        let result = unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = ignore as *const () as libc::sighandler_t;
            libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut())
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                while !stop.load(Ordering::Relaxed) {
                    signal_other_threads();
                    thread::sleep(interval);
                }
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for PeriodicSignals {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn signal_other_threads() {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    for entry in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let thread = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        if let Some(thread) = thread.filter(|&thread| thread != own) {
            // SAFETY: the call takes numbers. A thread that has ended since gives ESRCH, and the
            // kernel signals only threads of this process.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn a_waiting_call_of_another_thread_is_interrupted() {
        let _signals = PeriodicSignals::start(Duration::from_millis(10)).unwrap();
        for _ in 0..3 {
            let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
            let waiting = thread::spawn(move || rustix::event::poll(&mut [], Some(&limit)));
            assert_eq!(waiting.join().unwrap(), Err(Errno::INTR));
        }
    }
}
