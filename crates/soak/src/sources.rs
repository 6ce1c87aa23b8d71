//! The sources of a CPU's load that belong to no program: its most frequent interrupts and
//! softirqs, and its busiest kernel threads.

use crate::kernel_threads;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// The number of sources of each kind that a report names.
const NAMED_MAX: usize = 5;
/// Interrupts and softirqs less frequent than this, per second, are not named.
const PER_SECOND_MIN: f64 = 1.0;
/// Kernel threads with less of a CPU than this, in percent, are not named.
const THREAD_PERCENT_MIN: f64 = 0.05;

/// The sources of one CPU's load that belong to no program, the most frequent first.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct CpuSources {
    /// The CPU.
    pub cpu: usize,
    /// Interrupts (`/proc/interrupts`).
    pub interrupts: Vec<SourceRate>,
    /// Softirqs (`/proc/softirqs`).
    pub softirqs: Vec<SourceRate>,
}

/// How often a source ran.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SourceRate {
    /// Its name: `virtio3-rx`, `Rescheduling interrupts`, `NET_RX`.
    pub name: String,
    /// How often it ran per second.
    pub per_second: f64,
}

/// The CPU time of a kernel thread.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ThreadLoad {
    /// Its name: `ksoftirqd/0`, `kworker/1:2-events`.
    pub name: String,
    /// Its CPU time in percent of one CPU.
    pub percent: f64,
}

/// A reading of all counters.
pub(crate) struct SourceCounts {
    interrupts: Table,
    softirqs: Table,
    /// Name and CPU time of each kernel thread, by process number.
    threads: BTreeMap<u32, (String, Duration)>,
}

impl SourceCounts {
    /// Reads the counters. What the kernel does not show here is empty.
    pub(crate) fn read() -> Self {
        let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
        Self {
            interrupts: Table::parse(&read("/proc/interrupts")),
            softirqs: Table::parse(&read("/proc/softirqs")),
            threads: named_threads(),
        }
    }

    /// The most frequent sources of each CPU since an earlier reading.
    pub(crate) fn since(&self, earlier: &Self, cpus: &[usize], seconds: f64) -> Vec<CpuSources> {
        let sources = |&cpu: &usize| CpuSources {
            cpu,
            interrupts: self.interrupts.most_frequent(&earlier.interrupts, cpu, seconds),
            softirqs: self.softirqs.most_frequent(&earlier.softirqs, cpu, seconds),
        };
        cpus.iter().map(sources).collect()
    }

    /// The busiest kernel threads since an earlier reading.
    pub(crate) fn busiest_threads(&self, earlier: &Self, seconds: f64) -> Vec<ThreadLoad> {
        let load = |(process, (name, time)): (&u32, &(String, Duration))| {
            let (_, before) = earlier.threads.get(process)?;
            let percent = 100.0 * time.saturating_sub(*before).as_secs_f64() / seconds;
            (percent >= THREAD_PERCENT_MIN).then(|| ThreadLoad { name: name.clone(), percent })
        };
        let mut loads: Vec<ThreadLoad> = self.threads.iter().filter_map(load).collect();
        loads.sort_by(|one, other| other.percent.total_cmp(&one.percent));
        loads.truncate(NAMED_MAX);
        loads
    }
}

/// Counters by label, one column for each CPU.
#[derive(Default)]
struct Table {
    cpus: Vec<usize>,
    rows: Vec<Row>,
}

#[derive(Debug, PartialEq, Eq)]
struct Row {
    /// The number of the interrupt, or a short word such as `LOC`. Only labels are unique: several
    /// ports of a controller may have the same name.
    label: String,
    name: String,
    counts: Vec<u64>,
}

impl Table {
    /// Parses `/proc/interrupts` or `/proc/softirqs`. The first line names the CPUs.
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let header = lines.next().unwrap_or_default();
        let cpu = |name: &str| name.strip_prefix("CPU")?.parse().ok();
        let cpus: Vec<usize> = header.split_ascii_whitespace().filter_map(cpu).collect();
        let row = |line: &str| {
            let (label, rest) = line.trim().split_once(':')?;
            let mut fields = rest.split_ascii_whitespace();
            let counts: Vec<u64> =
                fields.by_ref().take(cpus.len()).map_while(|count| count.parse().ok()).collect();
            let name = name(label, &fields.collect::<Vec<_>>());
            (counts.len() == cpus.len()).then(|| Row { label: label.to_owned(), name, counts })
        };
        let rows = lines.filter_map(row).collect();
        Self { cpus, rows }
    }

    fn most_frequent(&self, earlier: &Self, cpu: usize, seconds: f64) -> Vec<SourceRate> {
        let Some(column) = self.cpus.iter().position(|&other| other == cpu) else {
            return Vec::new();
        };
        // Rows of the same name are summed.
        let mut by_name = BTreeMap::<&str, u64>::new();
        for Row { label, name, counts } in &self.rows {
            let before = earlier.rows.iter().find(|row| row.label == *label);
            // A new row began at 0.
            let before = before.and_then(|row| row.counts.get(column)).copied().unwrap_or(0);
            *by_name.entry(name).or_default() += counts[column].saturating_sub(before);
        }
        let rate = |(name, count): (&str, u64)| {
            let per_second = count as f64 / seconds;
            (per_second >= PER_SECOND_MIN).then(|| SourceRate { name: name.into(), per_second })
        };
        let mut rates: Vec<SourceRate> = by_name.into_iter().filter_map(rate).collect();
        rates.sort_by(|one, other| other.per_second.total_cmp(&one.per_second));
        rates.truncate(NAMED_MAX);
        rates
    }
}

/// The name of a line: the device's for a numbered interrupt, which is its last field, else the
/// description, or the label if there is none (softirqs).
fn name(label: &str, description: &[&str]) -> String {
    match description.last() {
        None => label.to_owned(),
        Some(device) if label.bytes().all(|byte| byte.is_ascii_digit()) => (*device).to_owned(),
        Some(_) => description.join(" "),
    }
}

/// The kernel's threads with their names and CPU times; empty if they are not visible.
fn named_threads() -> BTreeMap<u32, (String, Duration)> {
    let thread = |process: u32| {
        let name = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
        Some((process, (name.trim().to_owned(), kernel_threads::cpu_time(process)?)))
    };
    kernel_threads::processes().into_iter().flatten().filter_map(thread).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "      CPU0    CPU2\n 41:  1000  0 PCI-MSIX-0:4  1-edge  virtio3-rx\n\
                          LOC:  5  6  Local timer interrupts\nERR:  0\n";
    const AFTER: &str = "      CPU0    CPU2\n 41:  3000  0 PCI-MSIX-0:4  1-edge  virtio3-rx\n\
                         LOC:  505  16  Local timer interrupts\nERR:  0\n";

    #[test]
    fn interrupts_are_named_by_device_and_sorted_by_rate() {
        let (before, after) = (Table::parse(BEFORE), Table::parse(AFTER));
        let rates = after.most_frequent(&before, 0, 2.0);
        let named: Vec<(&str, f64)> =
            rates.iter().map(|rate| (rate.name.as_str(), rate.per_second)).collect();
        assert_eq!(named, [("virtio3-rx", 1000.0), ("Local timer interrupts", 250.0)]);
        assert_eq!(after.most_frequent(&before, 2, 2.0).len(), 1, "an idle device is not named");
        assert!(after.most_frequent(&before, 1, 2.0).is_empty(), "the CPU is offline");
    }

    /// PCI ports, USB controllers and DMA channels have the same name several times.
    #[test]
    fn rows_of_the_same_name_are_told_apart_and_summed() {
        let table = |one: u64, other: u64| {
            Table::parse(&format!(
                "   CPU0\n120: {one} PCI-MSI 3276-edge PME\n121: {other} PCI-MSI 3297-edge PME\n"
            ))
        };
        let before = table(100, 1_100_100);
        assert!(table(100, 1_100_100).most_frequent(&before, 0, 2.0).is_empty());
        let rates = table(300, 1_100_104).most_frequent(&before, 0, 2.0);
        assert_eq!(rates, [SourceRate { name: "PME".into(), per_second: 102.0 }]);
    }

    #[test]
    fn softirqs_are_named_by_their_label() {
        let table = Table::parse("      CPU0 CPU1\n  NET_RX:  7  9\n");
        let row = Row { label: "NET_RX".into(), name: "NET_RX".into(), counts: vec![7, 9] };
        assert_eq!(table.rows, [row]);
        assert!(Table::parse("").rows.is_empty() && Table::parse("nonsense\nx").rows.is_empty());
    }

    #[test]
    fn this_machine_has_interrupts() {
        let before = SourceCounts::read();
        std::thread::sleep(Duration::from_millis(200));
        let cpus: Vec<usize> = before.interrupts.cpus.clone();
        let sources = SourceCounts::read().since(&before, &cpus, 0.2);
        assert!(sources.iter().any(|cpu| !cpu.interrupts.is_empty()), "{sources:?}");
    }
}
