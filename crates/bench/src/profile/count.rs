//! Ticks by function, by group and by stack.

use super::groups::{Groups, IDLE, USER};
use super::owner::Owners;
use super::record::Seen;
use super::symbols::Symbols;
use haul_sys::perf::Tick;
use std::collections::{BTreeMap, HashMap, HashSet};

/// What was counted on a CPU, or on several.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// All looks, idle ones included.
    pub total: u64,
    /// Those at a CPU without work.
    pub idle: u64,
    /// Those at other programs, by name: no part of the load.
    pub others: BTreeMap<String, u64>,
    /// Those at a program.
    pub user: u64,
    /// Those in the kernel, by function.
    pub functions: HashMap<String, InFunction>,
    /// Stacks from the outermost function to the innermost, and how often they were seen.
    pub stacks: BTreeMap<Vec<String>, u64>,
}

/// What was counted in one function.
#[derive(Debug, Clone, Copy)]
pub(super) struct InFunction {
    pub group: &'static str,
    pub ticks: u64,
    pub size_bytes: u64,
}

impl Counted {
    /// Counts what was seen; the `own` threads are the meter's, which run when nothing else does. What `owners` says to be
    /// another program's is counted apart, but for interrupts on top of it.
    pub(super) fn of(
        seen: &Seen,
        symbols: &Symbols,
        groups: &Groups,
        own: &HashSet<u32>,
        owners: &Owners,
    ) -> Self {
        let mut counted = Self::default();
        for (tick, &count) in &seen.ticks {
            let other = owners.other(tick.process).filter(|_| !is_in_interrupt(tick, symbols));
            match other {
                Some(name) => {
                    counted.total += count;
                    *counted.others.entry(name.into()).or_default() += count;
                }
                None => counted.look(tick, count, symbols, groups, own.contains(&tick.thread)),
            }
        }
        counted
    }

    fn look(&mut self, tick: &Tick, count: u64, symbols: &Symbols, groups: &Groups, is_own: bool) {
        self.total += count;
        let function = symbols.find(tick.address).filter(|_| tick.in_kernel);
        let name = function.map_or("[unknown]", |function| &function.name);
        let names = || tick.kernel_stack.iter().filter_map(|&address| symbols.find(address));
        let group = groups.of(name);
        // The meter's thread enters the kernel by itself only to read its own clock; an interrupt may come on top of that.
        let entry =
            names().find(|outer| outer.name == "do_syscall_64" || outer.name.starts_with("asm_"));
        let is_meters =
            is_own && (!tick.in_kernel || entry.is_some_and(|entry| entry.name == "do_syscall_64"));
        if is_meters || group == IDLE && tick.in_kernel {
            self.idle += count;
            return;
        }
        if !tick.in_kernel {
            self.user += count;
            *self.stacks.entry(vec![USER.into()]).or_default() += count;
            return;
        }
        let size_bytes = function.map_or(0, |function| function.size_bytes);
        let entry = InFunction { group, ticks: 0, size_bytes };
        self.functions.entry(name.into()).or_insert(entry).ticks += count;
        let mut stack: Vec<String> = names().map(|function| function.name.clone()).collect();
        stack.reverse();
        if stack.last().map(String::as_str) != Some(name) {
            stack.push(name.into());
        }
        *self.stacks.entry(stack).or_default() += count;
    }

    /// Adds what was counted elsewhere.
    pub(super) fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.idle += other.idle;
        for (name, ticks) in &other.others {
            *self.others.entry(name.clone()).or_default() += ticks;
        }
        self.user += other.user;
        for (name, there) in &other.functions {
            let entry = InFunction { ticks: 0, ..*there };
            self.functions.entry(name.clone()).or_insert(entry).ticks += there.ticks;
        }
        for (stack, ticks) in &other.stacks {
            *self.stacks.entry(stack.clone()).or_default() += ticks;
        }
    }

    /// Looks at a CPU with work of the flow.
    pub(super) fn busy(&self) -> u64 {
        self.total - self.idle - self.others.values().sum::<u64>()
    }

    /// Looks at the kernel at work.
    pub(super) fn kernel(&self) -> u64 {
        self.functions.values().map(|function| function.ticks).sum()
    }

    /// The load, in percent of the CPU.
    pub(super) fn load_percent(&self) -> f64 {
        100.0 * self.busy() as f64 / self.total.max(1) as f64
    }

    /// Ticks by group, programs among them, the largest first.
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

/// Whether a tick was in an interrupt that a device or another CPU caused: its work is the connection's, whatever program it
/// interrupted. The timer's own interrupt is not, and an exception (`asm_exc_page_fault`) is the program's.
fn is_in_interrupt(tick: &Tick, symbols: &Symbols) -> bool {
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
