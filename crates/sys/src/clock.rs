//! The CPU clock of a thread, readable from another thread.

use std::io;
use std::time::Duration;

/// The CPU time that one thread has used, readable from any thread of the process.
///
/// The clock is exact to the nanosecond even while the thread runs (the kernel adds the running slice),
/// unlike the tick-counted figures in `/proc`. On a kernel without `CONFIG_IRQ_TIME_ACCOUNTING` it keeps
/// running while an interrupt or its softirq work is served on top of the thread: it then says how long the
/// *scheduler* gave the CPU to the thread, not how long the thread computed.
#[derive(Debug, Clone, Copy)]
pub struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// The clock of the calling thread.
    pub fn of_this_thread() -> io::Result<Self> {
        let mut id: libc::clockid_t = 0;
        // SAFETY: pthread_self is always a live thread here, and `id` is a valid place for the result.
        let errno = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut id) };
        if errno == 0 { Ok(Self(id)) } else { Err(io::Error::from_raw_os_error(errno)) }
    }

    /// CPU time used since the thread began. `EINVAL` once the thread has ended.
    pub fn read(self) -> io::Result<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a valid timespec for the duration of the call.
        if unsafe { libc::clock_gettime(self.0, &raw mut time) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_another_thread_advances_while_it_runs_and_is_refused_once_it_ended() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let spinner = std::thread::spawn({
            let stop = stop.clone();
            move || {
                sender.send(ThreadClock::of_this_thread().unwrap()).unwrap();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        });
        let clock = receiver.recv().unwrap();
        let first = clock.read().unwrap();
        while clock.read().unwrap() == first {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        spinner.join().unwrap();
        // The kernel forgets the thread a moment after join has returned.
        while clock.read().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
