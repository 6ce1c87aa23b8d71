//! What the kernel counts of interrupts and polls on a CPU.

use haul_lab::Host;
use std::fs;

/// Counts so far, or between two looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Interrupts but those of the clock.
    pub interrupts: u64,
    /// Times that the kernel set about receiving packets (`NET_RX` softirqs).
    pub polls: u64,
}

impl Counters {
    /// Those of a host's CPU; 0 where the kernel does not tell.
    pub(crate) fn read(host: &Host) -> Self {
        let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let interrupts = of_cpu(&read("/proc/interrupts"), host.cpu(), |name| name != "LOC");
        let polls = of_cpu(&read("/proc/softirqs"), host.cpu(), |name| name == "NET_RX");
        Self { interrupts, polls }
    }

    /// What was counted between `earlier` and this.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            interrupts: self.interrupts.saturating_sub(earlier.interrupts),
            polls: self.polls.saturating_sub(earlier.polls),
        }
    }
}

/// The sum of a CPU's column over the lines whose name is wanted. The first line names the columns, which leave out
/// CPUs that are offline.
fn of_cpu(table: &str, cpu: usize, is_wanted: impl Fn(&str) -> bool) -> u64 {
    let mut lines = table.lines();
    let heads = lines.next().unwrap_or_default();
    let Some(column) = heads.split_ascii_whitespace().position(|head| head == format!("CPU{cpu}")) else {
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
