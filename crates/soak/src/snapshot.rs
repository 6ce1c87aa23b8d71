//! Snapshots of the spinners' counters, and the intervals between them.

use crate::proc_stat::{CpuTimes, ProcStat};
use crate::spinner::Counts;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// The counters of all spinners at one time.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(crate) at: Instant,
    pub(crate) counts: Vec<(usize, Counts)>,
    pub(crate) stat: ProcStat,
}

/// The difference between two snapshots, CPU by CPU, before any baseline is subtracted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Interval {
    /// Wall time between the snapshots.
    pub wall: Duration,
    pub(crate) cpus: Vec<CpuInterval>,
}

/// One CPU's part of an [`Interval`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct CpuInterval {
    pub cpu: usize,
    pub own: Duration,
    pub interrupted: Duration,
    pub work: u64,
    pub stat: CpuTimes,
}

impl Snapshot {
    /// Returns the difference between `earlier` and this snapshot, both of the same meter.
    pub fn since(&self, earlier: &Self) -> Interval {
        let cpus = self
            .counts
            .iter()
            .zip(&earlier.counts)
            .map(|(&(cpu, now), (_, then))| CpuInterval {
                cpu,
                own: now.own.saturating_sub(then.own),
                interrupted: now.interrupted.saturating_sub(then.interrupted),
                work: now.work - then.work,
                stat: match (self.stat.0.get(&cpu), earlier.stat.0.get(&cpu)) {
                    (Some(now), Some(then)) => now.since(then),
                    _ => CpuTimes::default(),
                },
            })
            .collect();
        Interval { wall: self.at - earlier.at, cpus }
    }
}

/// Ticks of idle time that the kernel's account may be off by: one at either end.
const IDLE_TICKS_MAX: u64 = 2;

impl Interval {
    /// Returns the largest share of a CPU's time, in percent, in which the CPU was idle although
    /// its spinner was not paused.
    ///
    /// Such a spinner was throttled, stopped or frozen, and the time that it lost is not load. The
    /// kernel's account is exact to a timer tick.
    pub(crate) fn idle_percent_max(&self) -> f64 {
        let has_idled = |cpu: &&CpuInterval| cpu.stat.idle > IDLE_TICKS_MAX;
        let idle = self.cpus.iter().filter(has_idled).map(|cpu| {
            let taken = 1.0 - cpu.own.as_secs_f64() / self.wall.as_secs_f64().max(f64::EPSILON);
            cpu.stat.idle_percent().min(100.0 * taken)
        });
        idle.fold(0.0, f64::max)
    }
}
