//! The kernel's threads that run on the lab's CPUs (`ksoftirqd/N`, threaded NAPI, workers), and the CPU time they have
//! used.
//!
//! Their time is the kernel's work for the connections under measurement and belongs to what these cost. So a search for
//! other programs must know it. What cannot be seen: work that such a thread does for another program.

use std::fs;
use std::time::Duration;

/// The children of `kthreadd`, which has the process number 2 in the first PID namespace (kernel/init/main.c).
const KERNEL_THREADS: &str = "/proc/2/task/2/children";

/// The kernel's threads on some CPUs.
#[derive(Debug)]
pub(crate) struct KernelThreads(Vec<Thread>);

#[derive(Debug)]
struct Thread {
    process: u32,
    /// The place of its CPU in the list of CPUs.
    index: usize,
}

impl KernelThreads {
    /// Those that last ran on one of `cpus`; `None` where they are not shown, as in a container with process numbers of its
    /// own.
    pub(crate) fn on(cpus: &[usize]) -> Option<Self> {
        let is_kthreadd =
            fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd");
        let children = fs::read_to_string(KERNEL_THREADS).ok().filter(|_| is_kthreadd)?;
        let threads = children.split_ascii_whitespace().filter_map(|process| {
            let process = process.parse().ok()?;
            let cpu = last_cpu(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)?;
            let index = cpus.iter().position(|&other| other == cpu)?;
            Some(Thread { process, index })
        });
        Some(Self(threads.collect()))
    }

    /// The CPU time that they have used so far, for each of `count` CPUs (`/proc/PID/schedstat`, Linux 2.6.9). A thread
    /// that has ended, or that the kernel keeps no such account of, counts as 0.
    pub(crate) fn used(&self, count: usize) -> Vec<Duration> {
        let mut used = vec![Duration::ZERO; count];
        for Thread { process, index } in &self.0 {
            let account =
                fs::read_to_string(format!("/proc/{process}/schedstat")).unwrap_or_default();
            let ns =
                account.split_ascii_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            used[*index] += Duration::from_nanos(ns);
        }
        used
    }
}

/// Whether the kernel charges interrupts to no thread (`CONFIG_IRQ_TIME_ACCOUNTING`), as far as its configuration is at hand.
/// Then what threads used is less than what the connections cost, and other programs cannot be told from that.
pub(crate) fn charges_interrupts_apart() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let configuration = fs::read_to_string(format!("/boot/config-{release}")).unwrap_or_default();
    configuration.lines().any(|line| line == "CONFIG_IRQ_TIME_ACCOUNTING=y")
}

/// The CPU that a thread last ran on, from its `/proc/PID/stat`.
fn last_cpu(stat: &str) -> Option<usize> {
    /// Fields between the name and `processor` (proc_pid_stat(5): fields 2 and 39).
    const PROCESSOR: usize = 36;
    // The name, in parentheses, may hold anything.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(PROCESSOR)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machines_kernel_threads_are_found() {
        let cpus = haul_lab::allowed_cpus().unwrap();
        let Some(threads) = KernelThreads::on(&cpus) else {
            return eprintln!("SKIPPED: the kernel's threads are not shown here");
        };
        assert!(threads.0.len() >= cpus.len(), "{threads:?}");
        assert_eq!(threads.used(cpus.len()).len(), cpus.len());
    }

    #[test]
    fn the_last_cpu_is_read_whatever_the_name_holds() {
        let fields = "S 2 0 0 0 -1 69238848 0 0 0 0 1 2 0 0 20 0 1 0 9 0 0 18446744073709551615 0 0 0 0 0 0 0 2147483647 0 0 0 0 17 3 0 0 0 0 0";
        assert_eq!(last_cpu(&format!("15 (ksoftirqd/3) {fields}")), Some(3));
        assert_eq!(last_cpu(&format!("15 (napi/eth (0)-8) {fields}")), Some(3));
        assert_eq!(last_cpu("15 (ksoftirqd/3) S 2"), None);
        assert_eq!(last_cpu(""), None);
    }
}
