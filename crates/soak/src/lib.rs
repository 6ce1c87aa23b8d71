//! A CPU load meter: measures how busy each CPU is by the time that an idle-priority thread does
//! not get.
//!
//! Network work runs in interrupts, which are charged to no process, so the sum over processes
//! misses it. The [`Meter`] keeps one thread (a *spinner*) on each CPU, which runs whenever no
//! other task needs the CPU, and measures the time that this thread loses. There are three kinds of
//! loss, each with a reading:
//!
//! * **taken**: the scheduler gave the CPU to another task. The thread's CPU clock measures it
//!   exactly.
//! * **interrupted**: an interrupt, or its softirq work, ran on top of the thread. On a kernel
//!   without `CONFIG_IRQ_TIME_ACCOUNTING` the thread's CPU clock keeps running meanwhile, so
//!   *taken* does not include it. Therefore the thread also reads the wall clock. A jump that its
//!   loop cannot explain, and by which its CPU clock advanced too, is an interrupt.
//! * **interference**: the thread ran slower in its remaining time, because other tasks used the
//!   caches and the memory.
//!
//! The load is *taken* plus *interrupted*. The thread keeps its CPU from idling, so the timer tick,
//! which an idle CPU would not have, interrupts it too. That cost is measured on a quiet machine
//! ([`Baseline`]) and subtracted.
//!
//! [`Meter`] is for loads of the same session, [`process::watch`] and [`process::during`] for the
//! whole machine's.
//!
//! Limitations: time taken by a hypervisor is counted as load (`steal_percent` reports it), and so
//! is the work of any other process. The load cannot be read if the kernel does not let the
//! spinner run (a CPU quota, a frozen control group); [`CpuQuotas`] finds quotas.

#![forbid(unsafe_code)]

mod control_groups;
mod error;
pub mod exclusive;
pub mod kernel_threads;
mod meter;
mod orphans;
mod proc_stat;
pub mod process;
mod quota;
mod reading;
pub mod reference;
pub mod report;
mod snapshot;
pub mod sources;
mod spinner;
mod weight;

pub use error::SoakError;
pub use meter::{Meter, SLICE};
pub use proc_stat::{CpuTimes, ProcStat};
pub use quota::CpuQuotas;
pub use reading::{Baseline, CpuLoad, Load};
pub use snapshot::{Interval, Snapshot};
