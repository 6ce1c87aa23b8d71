//! Other programs: their CPU time during a measurement, and the files whose cost depends on them.

use haul_lab_sys::clock::ProcessClock;
use haul_soak::{CpuTimes, ProcStat};
use haul_units::Size;
use std::fs;
use std::time::{Duration, Instant};

/// Milliseconds of a tick of `/proc/stat` (`USER_HZ` is 100 on every architecture of haul, see
/// proc(5)).
const TICK_MS: u64 = 10;

/// The CPU time of other programs since a moment.
pub(super) struct Others {
    began: Instant,
    busy: Duration,
    own: Duration,
}

impl Others {
    /// Begins to watch. `None` if the kernel does not show the times.
    pub fn watch() -> Option<Self> {
        Some(Self { began: Instant::now(), busy: busy_time()?, own: own_time()? })
    }

    /// The CPU time of other programs in percent of one CPU.
    pub fn percent(&self) -> Option<f64> {
        let busy = busy_time()?.saturating_sub(self.busy);
        let others = busy.saturating_sub(own_time()?.saturating_sub(self.own));
        Some(100.0 * others.as_secs_f64() / self.began.elapsed().as_secs_f64())
    }
}

/// The time that all CPUs were busy since the start of the machine.
fn busy_time() -> Option<Duration> {
    let stat = ProcStat::read().ok()?;
    let busy = |cpu: &CpuTimes| cpu.total().saturating_sub(cpu.idle).saturating_sub(cpu.steal);
    let ticks: u64 = stat.0.values().map(busy).sum();
    Some(Duration::from_millis(ticks.saturating_mul(TICK_MS)))
}

/// The CPU time of this process.
fn own_time() -> Option<Duration> {
    ProcessClock::for_process(std::process::id()).ok()?.read().ok()
}

/// The sizes of a CPU's caches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Caches {
    /// The largest cache that the CPU shares with other CPUs.
    shared: Size,
    /// The largest cache of the CPU alone.
    private: Size,
}

impl Caches {
    /// Assumed where the kernel does not show the sizes, as in some guests.
    pub const USUAL: Self = Self { shared: Size(64 << 20), private: Size(1 << 20) };

    /// Reads the sizes of the two last levels. `None` if the kernel does not show two levels.
    pub fn of_cpu(cpu: usize) -> Option<Self> {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}/cache");
        let mut sizes: Vec<(u32, Size)> = fs::read_dir(folder)
            .ok()?
            .flatten()
            .filter_map(|entry| {
                let read = |name| fs::read_to_string(entry.path().join(name)).ok();
                let size = format!("{}iB", read("size")?.trim());
                Some((read("level")?.trim().parse().ok()?, size.parse().ok()?))
            })
            .collect();
        sizes.sort_by_key(|&(level, size)| (level, size.0));
        let (last, shared) = *sizes.last()?;
        let (_, private) = *sizes.iter().rev().find(|(level, _)| *level < last)?;
        Some(Self { shared, private })
    }

    /// Whether a part of a file is in the shared cache, so that other programs can displace it. A
    /// smaller file stays in the private cache, and of a larger file each page is gone before its
    /// next use.
    pub fn shares(&self, file_bytes: u64) -> bool {
        (self.private.0 / 2..=self.shared.0.saturating_mul(2)).contains(&file_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_within_the_shared_cache_depends_on_other_programs() {
        let caches = Caches { shared: Size(32 << 20), private: Size(1 << 20) };
        let files = [64 << 10, 4 << 20, 256 << 20];
        assert_eq!(files.map(|bytes| caches.shares(bytes)), [false, true, false]);
    }

    #[test]
    fn the_time_of_another_program_is_counted_and_the_own_time_is_not() {
        let others = Others::watch().unwrap();
        let mut child =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        while others.percent().unwrap() < 1.0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
