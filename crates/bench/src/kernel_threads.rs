//! CPU time of the kernel's threads on the lab's CPUs (`ksoftirqd/N`, threaded NAPI, workers).
//!
//! Their time is the kernel's work for the measured connections and part of their cost. A search
//! for other programs must therefore subtract it. Limitation: work that such a thread does for
//! another program is not detected.

use haul_soak::kernel_threads;
use std::fs;
use std::time::Duration;

/// The kernel's threads on some CPUs.
#[derive(Debug)]
pub(crate) struct KernelThreads(Vec<Thread>);

#[derive(Debug)]
struct Thread {
    process: u32,
    /// Index of its CPU in the list of CPUs.
    index: usize,
}

impl KernelThreads {
    /// The kernel threads that last ran on one of `cpus`. `None` if kernel threads are not visible,
    /// as in a container with its own PID namespace.
    pub(crate) fn on(cpus: &[usize]) -> Option<Self> {
        let threads = kernel_threads::processes()?.into_iter().filter_map(|process| {
            let cpu = last_cpu(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)?;
            let index = cpus.iter().position(|&other| other == cpu)?;
            Some(Thread { process, index })
        });
        Some(Self(threads.collect()))
    }

    /// The CPU time that the threads have used so far, for each of `count` CPUs. A thread that has
    /// ended counts as 0.
    pub(crate) fn cpu_times(&self, count: usize) -> Vec<Duration> {
        let mut times = vec![Duration::ZERO; count];
        for Thread { process, index } in &self.0 {
            times[*index] += kernel_threads::cpu_time(*process).unwrap_or_default();
        }
        times
    }
}

/// Whether the kernel charges interrupts to no thread (`CONFIG_IRQ_TIME_ACCOUNTING`), as far as its
/// configuration is readable. In that case the threads' CPU time is less than the connections'
/// cost, and other programs cannot be separated from it.
pub(crate) fn has_irq_time_accounting() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let configuration = fs::read_to_string(format!("/boot/config-{release}")).unwrap_or_default();
    configuration.lines().any(|line| line == "CONFIG_IRQ_TIME_ACCOUNTING=y")
}

/// The CPU on which a thread last ran, from its `/proc/PID/stat`.
fn last_cpu(stat: &str) -> Option<usize> {
    /// Index of `processor` after the name (proc_pid_stat(5): fields 2 and 39).
    const PROCESSOR: usize = 36;
    // The name, in parentheses, may contain any character.
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
        assert_eq!(threads.cpu_times(cpus.len()).len(), cpus.len());
    }

    #[test]
    fn the_last_cpu_is_parsed_for_any_thread_name() {
        let fields = "S 2 0 0 0 -1 69238848 0 0 0 0 1 2 0 0 20 0 1 0 9 0 0 18446744073709551615 \
                      0 0 0 0 0 0 0 2147483647 0 0 0 0 17 3 0 0 0 0 0";
        assert_eq!(last_cpu(&format!("15 (ksoftirqd/3) {fields}")), Some(3));
        assert_eq!(last_cpu(&format!("15 (napi/eth (0)-8) {fields}")), Some(3));
        assert_eq!(last_cpu("15 (ksoftirqd/3) S 2"), None);
        assert_eq!(last_cpu(""), None);
    }
}
