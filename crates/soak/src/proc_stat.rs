//! `/proc/stat`: the kernel's accounting of each CPU's time, sampled at its timer tick.
//!
//! It is a cross-check, not the measurement. On a kernel with tick accounting it samples the task
//! that runs at the tick, every 10 ms, and charges the whole 10 ms to that task.

use crate::error::SoakError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;

/// Ticks of one CPU by kind of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTimes {
    /// User mode at nice 0 or below.
    pub user: u64,
    /// User mode at a positive nice value: mostly the meter's spinner.
    pub nice: u64,
    /// Kernel mode.
    pub system: u64,
    /// Idle, including idle while waiting for a disk.
    pub idle: u64,
    /// Hard interrupts.
    pub irq: u64,
    /// Softirqs.
    pub softirq: u64,
    /// Steal: taken by the hypervisor.
    pub steal: u64,
}

impl CpuTimes {
    /// Returns the sum of all ticks. Guest time is part of `user` already.
    pub fn total(&self) -> u64 {
        let all =
            [self.user, self.nice, self.system, self.idle, self.irq, self.softirq, self.steal];
        all.into_iter().fold(0, u64::saturating_add)
    }

    /// Returns the difference between `earlier` and this. A counter that decreased (idle may, on
    /// some kernels) counts as 0.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let difference = u64::saturating_sub;
        Self {
            user: difference(self.user, earlier.user),
            nice: difference(self.nice, earlier.nice),
            system: difference(self.system, earlier.system),
            idle: difference(self.idle, earlier.idle),
            irq: difference(self.irq, earlier.irq),
            softirq: difference(self.softirq, earlier.softirq),
            steal: difference(self.steal, earlier.steal),
        }
    }

    /// Returns the load in percent: everything but idle, steal and the meter's own spinner.
    ///
    /// The spinner is niced and had `own_percent` of the time.
    pub fn load_percent(&self, own_percent: f64) -> f64 {
        let unniced = [self.user, self.system, self.irq, self.softirq]
            .into_iter()
            .fold(0, u64::saturating_add);
        percent(unniced, self.total()) + (percent(self.nice, self.total()) - own_percent).max(0.0)
    }

    /// Returns the share in which the CPU was idle, in percent.
    pub fn idle_percent(&self) -> f64 {
        percent(self.idle, self.total())
    }

    /// Returns the share that the hypervisor took, in percent.
    pub fn steal_percent(&self) -> f64 {
        percent(self.steal, self.total())
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

/// The times of every CPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcStat(pub BTreeMap<usize, CpuTimes>);

impl ProcStat {
    /// Reads `/proc/stat`.
    pub fn read() -> Result<Self, SoakError> {
        fs::read_to_string("/proc/stat").map(|text| Self::parse(&text)).map_err(SoakError::ProcStat)
    }

    /// Parses the `cpuN` lines of `/proc/stat`; other lines and malformed lines are skipped.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(parse_line).collect())
    }
}

fn parse_line(line: &str) -> Option<(usize, CpuTimes)> {
    let mut columns = line.strip_prefix("cpu")?.split_ascii_whitespace();
    if !line.as_bytes().get(3)?.is_ascii_digit() {
        return None;
    }
    let cpu = columns.next()?.parse().ok()?;
    let mut next = || columns.next()?.parse::<u64>().ok();
    let (user, nice, system, idle) = (next()?, next()?, next()?, next()?);
    // Columns that old kernels lack count as 0.
    let (iowait, irq, softirq, steal) =
        (next().unwrap_or(0), next().unwrap_or(0), next().unwrap_or(0), next().unwrap_or(0));
    Some((
        cpu,
        CpuTimes { user, nice, system, idle: idle.saturating_add(iowait), irq, softirq, steal },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cpu_lines_are_parsed() {
        let stat = ProcStat::parse(
            "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu12 1 0 0 3\nintr 5 0\n\
             cpux 1 2 3 4\n",
        );
        let first = CpuTimes { user: 1, nice: 2, system: 3, idle: 9, irq: 6, softirq: 7, steal: 8 };
        let second = CpuTimes { user: 1, idle: 3, ..CpuTimes::default() };
        assert_eq!(stat.0, BTreeMap::from([(0, first), (12, second)]));
        assert!((second.load_percent(0.0) - 25.0).abs() < 1e-9);
        // 60 % niced, of which the spinner used 40: another niced program used the rest.
        let niced = CpuTimes { user: 10, nice: 60, idle: 30, ..CpuTimes::default() };
        assert!((niced.load_percent(40.0) - 30.0).abs() < 1e-9);
        assert!((niced.load_percent(60.5) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn this_machine_has_cpus() {
        assert!(!ProcStat::read().unwrap().0.is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_safe_to_parse(text in "(cpu|[0-9 \n]){0,80}") {
            let _ = ProcStat::parse(&text);
        }
    }
}
