//! The kernel's own threads (`ksoftirqd/N`, threaded NAPI, workers) and their CPU time.

use std::fs;
use std::time::Duration;

/// The children of `kthreadd`, which has process number 2 in the first PID namespace
/// (kernel/init/main.c).
const KERNEL_THREADS: &str = "/proc/2/task/2/children";

/// The process numbers of the kernel's threads. `None` if they are not visible, as in a container
/// with its own process numbers.
pub fn processes() -> Option<Vec<u32>> {
    let is_kthreadd =
        fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd");
    let children = fs::read_to_string(KERNEL_THREADS).ok().filter(|_| is_kthreadd)?;
    Some(children.split_ascii_whitespace().filter_map(|process| process.parse().ok()).collect())
}

/// The CPU time that a thread has used so far (`/proc/PID/schedstat`, Linux 2.6.9). `None` if the
/// thread has ended or has no such file.
pub fn cpu_time(process: u32) -> Option<Duration> {
    let account = fs::read_to_string(format!("/proc/{process}/schedstat")).ok()?;
    Some(Duration::from_nanos(account.split_ascii_whitespace().next()?.parse().ok()?))
}
