//! What the kernel counts of interrupts and polls on a CPU (`/proc/interrupts`, `/proc/softirqs`).
//!
//! Between the hosts of a lab each interrupt is one CPU telling the other of packets. How many packets share one decides
//! most of what a MiB costs (docs/findings.md).

use haul::pacing::timer_interrupts;
use std::fs;

/// Counts so far, or between two looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Interrupts other than the local timer's.
    pub interrupts: u64,
    /// Interrupts of the local timer. Beyond the tick they are timers that expired: a paced socket has one for each
    /// group of packets.
    pub timer_interrupts: u64,
    /// Times that the kernel set about receiving packets (`NET_RX` softirqs).
    pub polls: u64,
}

impl Counters {
    /// Those of each CPU so far; 0 where the kernel does not tell.
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

    /// What was counted between `earlier` and this.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            interrupts: self.interrupts.saturating_sub(earlier.interrupts),
            timer_interrupts: self.timer_interrupts.saturating_sub(earlier.timer_interrupts),
            polls: self.polls.saturating_sub(earlier.polls),
        }
    }
}

/// The sum of a CPU's column over the lines whose name is wanted. The first line names the columns, which leave out
/// CPUs that are offline.
fn of_cpu(table: &str, cpu: usize, is_wanted: impl Fn(&str) -> bool) -> u64 {
    let mut lines = table.lines();
    let heads = lines.next().unwrap_or_default();
    let Some(column) = heads.split_ascii_whitespace().position(|head| head == format!("CPU{cpu}"))
    else {
        return 0;
    };
    lines
        .filter_map(|line| {
            let (name, counts) = line.trim().split_once(':')?;
            let count = counts.split_ascii_whitespace().nth(column)?;
            is_wanted(name).then(|| count.parse::<u64>().ok())?
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpus_column_is_summed_over_the_wanted_lines() {
        let table = "           CPU0       CPU2\n  1:   10  20  IO-APIC  1-edge  i8042\nLOC:  5  6  Local timer\nERR:  0\nCAL:  7  8  Calls\n";
        assert_eq!(of_cpu(table, 2, |name| name != "LOC"), 28);
        assert_eq!(of_cpu(table, 0, |name| name == "CAL"), 7);
        assert_eq!(of_cpu(table, 1, |_| true), 0);
        assert_eq!(of_cpu("", 0, |_| true), 0);
    }
}
