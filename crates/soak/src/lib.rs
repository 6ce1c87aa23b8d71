//! The load meter: how busy each CPU is, measured by what is left of it.
//!
//! Network work runs in interrupts that no process is charged for, so adding up processes measures the wrong
//! thing. The [`Meter`] keeps one thread on each CPU that runs whenever nothing else wants to, and looks at
//! what that thread loses. It loses in three ways, and each has a reading of its own:
//!
//! * **taken**: the scheduler gave the CPU to somebody else. The thread's own CPU clock tells, exactly.
//! * **interrupted**: an interrupt, or the softirq work behind it, ran on top of the thread. On a kernel
//!   without `CONFIG_IRQ_TIME_ACCOUNTING` the thread's CPU clock runs on meanwhile and *taken* stays blind to
//!   it, so the thread also watches the wall clock: a jump that its loop cannot explain, and that its CPU
//!   clock went along with, is an interrupt.
//! * **interference**: what time it kept went slower, because others used the caches and the memory.
//!
//! The load is *taken* plus *interrupted*. The thread keeps its CPU from idling, so the timer tick that an
//! idle CPU would not have interrupts it too; that is measured on a quiet machine ([`Baseline`]) and taken
//! off again.
//!
//! [`Meter`] is for loads of one's own session, [`process::watch`] and [`process::during`] for the whole
//! machine's.
//!
//! What the meter cannot know: what a hypervisor takes away looks like load (it is in `steal_percent`), and
//! so does the work of any other process.

#![forbid(unsafe_code)]

mod control_groups;
mod meter;
mod proc_stat;
pub mod process;
mod reading;
pub mod report;
mod spinner;
mod weight;

pub use meter::{Interval, Meter, SLICE, Snapshot};
pub use proc_stat::{CpuTimes, ProcStat};
pub use reading::{Baseline, CpuLoad, Load};

use std::io;

/// Why the meter cannot run.
#[derive(Debug, thiserror::Error)]
pub enum SoakError {
    /// A spinner thread could not be started or set up.
    #[error("cannot put an idle-priority thread on CPU {cpu}: {source}")]
    Spinner {
        /// Which CPU.
        cpu: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The meter's own process could not be started or heard.
    #[error("{step}: {source}")]
    Process {
        /// What was being done.
        step: &'static str,
        /// What went wrong.
        source: io::Error,
    },
    /// The kernel's own account could not be read.
    #[error("cannot read /proc/stat, which the readings are checked against: {0}")]
    ProcStat(io::Error),
}
