//! Interrupt and poll counters of a CPU (`/proc/interrupts`, `/proc/softirqs`).
//!
//! Between the hosts of a lab, each interrupt is one CPU notifying the other of packets. The number
//! of packets per interrupt determines most of the cost of a MiB (docs/measurements/interrupts.md).

use haul::pacing::timer_interrupts;
use std::fs;

/// Counters since boot, or the difference of two readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Interrupts other than the local timer's.
    pub interrupts: u64,
    /// Interrupts of the local timer. Those beyond the tick are expired timers: a paced socket has
    /// one for each group of packets.
    pub timer_interrupts: u64,
    /// Runs of the `NET_RX` softirq, each of which polls for received packets.
    pub polls: u64,
}

impl Counters {
    /// Reads the counters of each CPU; 0 if the kernel does not show them.
    pub(crate) fn read(cpus: &[usize]) -> Vec<Self> {
        let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let (interrupts, softirqs) = (read("/proc/interrupts"), read("/proc/softirqs"));
        let of = |&cpu| Self {
            interrupts: of_cpu(&interrupts, cpu, |_| true)
                .saturating_sub(timer_interrupts(&interrupts, cpu).unwrap_or(0)),
            timer_interrupts: timer_interrupts(&interrupts, cpu).unwrap_or(0),
            polls: of_cpu(&softirqs, cpu, |name| name == "NET_RX"),
        };
        cpus.iter().map(of).collect()
    }

    /// The difference between `earlier` and these counters.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            interrupts: self.interrupts.saturating_sub(earlier.interrupts),
            timer_interrupts: self.timer_interrupts.saturating_sub(earlier.timer_interrupts),
            polls: self.polls.saturating_sub(earlier.polls),
        }
    }
}

/// The sum of a CPU's column over the lines whose name `includes` accepts. The first line names the
/// columns, which omit CPUs that are offline.
fn of_cpu(table: &str, cpu: usize, includes: impl Fn(&str) -> bool) -> u64 {
    let mut lines = table.lines();
    let header = lines.next().unwrap_or_default();
    let Some(column) = header.split_ascii_whitespace().position(|name| name == format!("CPU{cpu}"))
    else {
        return 0;
    };
    lines
        .filter_map(|line| {
            let (name, counts) = line.trim().split_once(':')?;
            let count = counts.split_ascii_whitespace().nth(column)?;
            includes(name).then(|| count.parse::<u64>().ok())?
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpus_column_is_summed_over_the_included_lines() {
        let table = "           CPU0       CPU2\n  1:   10  20  IO-APIC  1-edge  i8042\n\
                     LOC:  5  6  Local timer\nERR:  0\nCAL:  7  8  Calls\n";
        assert_eq!(of_cpu(table, 2, |name| name != "LOC"), 28);
        assert_eq!(of_cpu(table, 0, |name| name == "CAL"), 7);
        assert_eq!(of_cpu(table, 1, |_| true), 0);
        assert_eq!(of_cpu("", 0, |_| true), 0);
    }
}
