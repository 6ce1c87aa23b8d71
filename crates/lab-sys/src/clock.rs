//! CPU clocks of threads and processes.

use std::io;
use std::time::Duration;

/// CPU-time clock of one thread, readable from any thread of the process.
///
/// The clock is exact to the nanosecond even while the thread runs (the kernel adds the running
/// slice), unlike the tick-counted figures in `/proc`. On a kernel without
/// `CONFIG_IRQ_TIME_ACCOUNTING` it keeps running while an interrupt or its softirq work runs on top
/// of the thread. It then measures how long the *scheduler* gave the CPU to the thread, not how
/// long the thread computed.
#[derive(Debug, Clone, Copy)]
pub struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// Opens the clock of the calling thread.
    pub fn for_current_thread() -> io::Result<Self> {
        let mut id: libc::clockid_t = 0;
        // SAFETY: pthread_self is always a live thread here, and `id` is a valid place for the
        // result.
        let errno = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut id) };
        if errno == 0 { Ok(Self(id)) } else { Err(io::Error::from_raw_os_error(errno)) }
    }

    /// Returns the CPU time used since the thread began. `EINVAL` once the thread has ended.
    pub fn read(self) -> io::Result<Duration> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a valid timespec for the duration of the call.
        if unsafe { libc::clock_gettime(self.0, &raw mut time) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

/// CPU-time clock of all threads of a process, readable from any process of the same PID namespace.
///
/// For another process the kernel returns the time recorded at the last tick or context switch. A
/// thread that runs all the time is therefore read up to a tick late (1 to 10 ms). Like
/// [`ThreadClock`], it cannot separate interrupts from the process's own work.
#[derive(Debug, Clone, Copy)]
pub struct ProcessClock(libc::clockid_t);

impl ProcessClock {
    /// Opens the clock of a process that runs, or that has ended and was not yet waited for.
    pub fn for_process(process: u32) -> io::Result<Self> {
        let process = libc::pid_t::try_from(process).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut id: libc::clockid_t = 0;
        // SAFETY: `id` is a valid place for the result.
        let errno = unsafe { libc::clock_getcpuclockid(process, &raw mut id) };
        if errno == 0 { Ok(Self(id)) } else { Err(io::Error::from_raw_os_error(errno)) }
    }

    /// Returns the CPU time used since the process began. `EINVAL` once the process has been waited
    /// for.
    pub fn read(self) -> io::Result<Duration> {
        ThreadClock(self.0).read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_another_process_advances_while_it_runs() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let clock = ProcessClock::for_process(child.id()).unwrap();
        let first = clock.read().unwrap();
        while clock.read().unwrap() <= first {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(clock.read().is_err());
    }

    #[test]
    fn the_clock_of_another_thread_advances_while_it_runs_and_is_invalid_after_it_ends() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let spinner = std::thread::spawn({
            let stop = stop.clone();
            move || {
                sender.send(ThreadClock::for_current_thread().unwrap()).unwrap();
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
        // The kernel releases the thread a moment after join has returned.
        while clock.read().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
