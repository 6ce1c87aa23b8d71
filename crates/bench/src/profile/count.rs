//! Counts ticks by function, by group and by stack.

use super::groups::{Groups, IDLE, USER};
use super::owner::Owners;
use super::record::CpuTicks;
use super::symbols::Symbols;
use haul_sys::perf::CpuSample;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Ticks counted on one CPU or several.
#[derive(Debug, Default)]
pub(super) struct TickCounts {
    /// All ticks, including idle ones.
    pub total: u64,
    /// Ticks on an idle CPU.
    pub idle: u64,
    /// Ticks in other programs, by name; not part of the load.
    pub others: BTreeMap<String, u64>,
    /// Ticks in programs, in user mode.
    pub user: u64,
    /// Profiler samples taken in kernel mode, by the name of the running kernel function.
    pub functions: HashMap<String, FunctionTicks>,
    /// Ticks by stack, from the outermost function to the innermost.
    pub stacks: BTreeMap<Vec<String>, u64>,
}

/// Ticks counted in one function.
#[derive(Debug, Clone, Copy)]
pub(super) struct FunctionTicks {
    pub group: &'static str,
    pub ticks: u64,
    pub size_bytes: u64,
}

impl TickCounts {
    /// Counts recorded ticks. `meter_threads` run only on an otherwise idle CPU. Ticks in other
    /// programs, according to `owners`, are counted separately, except interrupts on top of them.
    pub(super) fn of(
        recorded: &CpuTicks,
        symbols: &Symbols,
        groups: &Groups,
        meter_threads: &HashSet<u32>,
        owners: &Owners,
    ) -> Self {
        let mut counts = Self::default();
        for (tick, &count) in &recorded.ticks {
            let other = owners.other_program(tick.process);
            let other = other.filter(|_| !is_in_interrupt(tick, symbols));
            if let Some(name) = other {
                counts.total += count;
                *counts.others.entry(name.into()).or_default() += count;
            } else {
                let is_meter_thread = meter_threads.contains(&tick.thread);
                counts.count_tick(tick, count, symbols, groups, is_meter_thread);
            }
        }
        counts
    }

    fn count_tick(
        &mut self,
        tick: &CpuSample,
        count: u64,
        symbols: &Symbols,
        groups: &Groups,
        is_meter_thread: bool,
    ) {
        self.total += count;
        let function = symbols.find(tick.address).filter(|_| tick.in_kernel);
        let name = function.map_or("[unknown]", |function| &function.name);
        let names = || tick.kernel_stack.iter().filter_map(|&address| symbols.find(address));
        let group = groups.of(name);
        // The meter's thread itself enters the kernel only to read its own clock, but an interrupt
        // may run on top of that.
        let entry =
            names().find(|outer| outer.name == "do_syscall_64" || outer.name.starts_with("asm_"));
        let is_idle_meter = is_meter_thread
            && (!tick.in_kernel || entry.is_some_and(|entry| entry.name == "do_syscall_64"));
        if is_idle_meter || group == IDLE && tick.in_kernel {
            self.idle += count;
            return;
        }
        if !tick.in_kernel {
            self.user += count;
            *self.stacks.entry(vec![USER.into()]).or_default() += count;
            return;
        }
        let size_bytes = function.map_or(0, |function| function.size_bytes);
        let entry = FunctionTicks { group, ticks: 0, size_bytes };
        self.functions.entry(name.into()).or_insert(entry).ticks += count;
        let mut stack: Vec<String> = names().map(|function| function.name.clone()).collect();
        stack.reverse();
        if stack.last().map(String::as_str) != Some(name) {
            stack.push(name.into());
        }
        *self.stacks.entry(stack).or_default() += count;
    }

    /// Adds the ticks of another count.
    pub(super) fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.idle += other.idle;
        for (name, ticks) in &other.others {
            *self.others.entry(name.clone()).or_default() += ticks;
        }
        self.user += other.user;
        for (name, function) in &other.functions {
            let entry = FunctionTicks { ticks: 0, ..*function };
            self.functions.entry(name.clone()).or_insert(entry).ticks += function.ticks;
        }
        for (stack, ticks) in &other.stacks {
            *self.stacks.entry(stack.clone()).or_default() += ticks;
        }
    }

    /// Ticks on a CPU that worked for the flow.
    pub(super) fn busy(&self) -> u64 {
        self.total - self.idle - self.others.values().sum::<u64>()
    }

    /// Ticks in the kernel.
    pub(super) fn kernel(&self) -> u64 {
        self.functions.values().map(|function| function.ticks).sum()
    }

    /// The load, in percent of the CPU.
    pub(super) fn load_percent(&self) -> f64 {
        100.0 * self.busy() as f64 / self.total.max(1) as f64
    }

    /// Ticks by group, including programs, the largest first.
    pub(super) fn groups(&self) -> Vec<(&'static str, u64)> {
        let mut groups: BTreeMap<&'static str, u64> = BTreeMap::new();
        for function in self.functions.values() {
            *groups.entry(function.group).or_default() += function.ticks;
        }
        if self.user > 0 {
            groups.insert(USER, self.user);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|&(_, ticks)| std::cmp::Reverse(ticks));
        groups
    }
}

/// Whether a tick was in an interrupt that a device or another CPU caused. Its work belongs to the
/// connection, whichever program it interrupted. The timer's own interrupt is excluded, and an
/// exception (`asm_exc_page_fault`) belongs to the program.
fn is_in_interrupt(tick: &CpuSample, symbols: &Symbols) -> bool {
    let is_entry = |name: &str| {
        name.starts_with("asm_sysvec_call_function")
            || name.starts_with("asm_common_interrupt")
            || name == "net_rx_action"
    };
    tick.in_kernel
        && tick
            .kernel_stack
            .iter()
            .filter_map(|&address| symbols.find(address))
            .any(|outer| is_entry(&outer.name))
}
