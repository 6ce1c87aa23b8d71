//! Counts samples by function, by group and by stack.

use super::groups::{Groups, IDLE, USER};
use super::owner::Owners;
use super::record::CpuSamples;
use super::symbols::Symbols;
use haul_lab_sys::perf::CpuSample;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Samples counted on one CPU or several.
#[derive(Debug, Default)]
pub(super) struct SampleCounts {
    /// All samples, including idle ones.
    pub total: u64,
    /// Samples on an idle CPU.
    pub idle: u64,
    /// Samples in other programs, by name; not part of the load.
    pub others: BTreeMap<String, u64>,
    /// Samples in programs, in user mode.
    pub user: u64,
    /// Profiler samples taken in kernel mode, by the name of the running kernel function.
    pub functions: HashMap<String, FunctionSamples>,
    /// Samples by stack, from the outermost function to the innermost.
    pub stacks: BTreeMap<Vec<String>, u64>,
}

/// Samples counted in one function.
#[derive(Debug, Clone, Copy)]
pub(super) struct FunctionSamples {
    pub group: &'static str,
    pub samples: u64,
    pub size_bytes: u64,
}

impl SampleCounts {
    /// Counts recorded samples. `meter_threads` run only on an otherwise idle CPU. Samples in other
    /// programs, according to `owners`, are counted separately, except interrupts on top of them.
    pub(super) fn of(
        recorded: &CpuSamples,
        symbols: &Symbols,
        groups: &Groups,
        meter_threads: &HashSet<u32>,
        owners: &Owners,
    ) -> Self {
        let mut counts = Self::default();
        for (sample, &count) in &recorded.samples {
            let other = owners.other_program(sample.process);
            let other = other.filter(|_| !is_in_interrupt(sample, symbols));
            if let Some(name) = other {
                counts.total += count;
                *counts.others.entry(name.into()).or_default() += count;
            } else {
                let is_meter_thread = meter_threads.contains(&sample.thread);
                counts.count_sample(sample, count, symbols, groups, is_meter_thread);
            }
        }
        counts
    }

    fn count_sample(
        &mut self,
        sample: &CpuSample,
        count: u64,
        symbols: &Symbols,
        groups: &Groups,
        is_meter_thread: bool,
    ) {
        self.total += count;
        let function = symbols.find(sample.address).filter(|_| sample.in_kernel);
        let name = function.map_or("[unknown]", |function| &function.name);
        let names = || sample.kernel_stack.iter().filter_map(|&address| symbols.find(address));
        let group = groups.of(name);
        // The meter's thread itself enters the kernel only to read its own clock, but an interrupt
        // may run on top of that.
        let entry =
            names().find(|outer| outer.name == "do_syscall_64" || outer.name.starts_with("asm_"));
        let is_idle_meter = is_meter_thread
            && (!sample.in_kernel || entry.is_some_and(|entry| entry.name == "do_syscall_64"));
        if is_idle_meter || group == IDLE && sample.in_kernel {
            self.idle += count;
            return;
        }
        if !sample.in_kernel {
            self.user += count;
            *self.stacks.entry(vec![USER.into()]).or_default() += count;
            return;
        }
        let size_bytes = function.map_or(0, |function| function.size_bytes);
        let entry = FunctionSamples { group, samples: 0, size_bytes };
        self.functions.entry(name.into()).or_insert(entry).samples += count;
        let mut stack: Vec<String> = names().map(|function| function.name.clone()).collect();
        stack.reverse();
        if stack.last().map(String::as_str) != Some(name) {
            stack.push(name.into());
        }
        *self.stacks.entry(stack).or_default() += count;
    }

    /// Adds the samples of another count.
    pub(super) fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.idle += other.idle;
        for (name, samples) in &other.others {
            *self.others.entry(name.clone()).or_default() += samples;
        }
        self.user += other.user;
        for (name, function) in &other.functions {
            let entry = FunctionSamples { samples: 0, ..*function };
            self.functions.entry(name.clone()).or_insert(entry).samples += function.samples;
        }
        for (stack, samples) in &other.stacks {
            *self.stacks.entry(stack.clone()).or_default() += samples;
        }
    }

    /// Samples on a CPU that worked for the flow.
    pub(super) fn busy(&self) -> u64 {
        self.total - self.idle - self.others.values().sum::<u64>()
    }

    /// Samples in the kernel.
    pub(super) fn kernel(&self) -> u64 {
        self.functions.values().map(|function| function.samples).sum()
    }

    /// The load, in percent of the CPU.
    pub(super) fn load_percent(&self) -> f64 {
        100.0 * self.busy() as f64 / self.total.max(1) as f64
    }

    /// Samples by group, including programs, the largest first.
    pub(super) fn groups(&self) -> Vec<(&'static str, u64)> {
        let mut groups: BTreeMap<&'static str, u64> = BTreeMap::new();
        for function in self.functions.values() {
            *groups.entry(function.group).or_default() += function.samples;
        }
        if self.user > 0 {
            groups.insert(USER, self.user);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|&(_, samples)| std::cmp::Reverse(samples));
        groups
    }
}

/// Whether a sample was in an interrupt that a device or another CPU caused. Its work belongs to
/// the connection, whichever program it interrupted. The timer's own interrupt is excluded, and an
/// exception (`asm_exc_page_fault`) belongs to the program.
fn is_in_interrupt(sample: &CpuSample, symbols: &Symbols) -> bool {
    let is_entry = |name: &str| {
        name.starts_with("asm_sysvec_call_function")
            || name.starts_with("asm_common_interrupt")
            || name == "net_rx_action"
    };
    sample.in_kernel
        && sample
            .kernel_stack
            .iter()
            .filter_map(|&address| symbols.find(address))
            .any(|outer| is_entry(&outer.name))
}
