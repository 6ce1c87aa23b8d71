//! Reading all spinners at once.

use crate::spinner::{Counts, Spinner};
use crate::{Baseline, ProcStat, SoakError};
use std::thread;
use std::time::{Duration, Instant};

/// One spinner on each of some CPUs. While it exists those CPUs never idle.
#[derive(Debug)]
pub struct Meter {
    spinners: Vec<Spinner>,
}

/// The counters of all spinners at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    at: Instant,
    counts: Vec<(usize, Counts)>,
    stat: ProcStat,
}

/// What happened on each CPU between two snapshots, before any baseline is taken off.
#[derive(Debug, Clone)]
pub struct Interval {
    /// Wall time between the snapshots.
    pub wall: Duration,
    pub(crate) cpus: Vec<CpuInterval>,
}

/// One CPU's share of an [`Interval`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuInterval {
    pub cpu: usize,
    pub own: Duration,
    pub interrupted: Duration,
    pub work: u64,
    pub stat: crate::CpuTimes,
}

impl Meter {
    /// Starts a spinner on each of `cpus`.
    pub fn start(cpus: &[usize]) -> Result<Self, SoakError> {
        let spinners = cpus.iter().map(|&cpu| Spinner::start(cpu)).collect::<Result<_, _>>()?;
        Ok(Self { spinners })
    }

    /// Runs `work` while no spinner runs, to see what it does without the meter. Intervals that reach into this time mean nothing.
    pub fn paused<T>(&self, work: impl FnOnce() -> T) -> T {
        let set_paused = |is_paused| self.spinners.iter().for_each(|spinner| spinner.set_paused(is_paused));
        set_paused(true);
        let result = work();
        set_paused(false);
        result
    }

    /// CPU time that the meter's own threads have used so far, which a process must not be charged for.
    pub fn own_cpu_time(&self) -> Duration {
        self.spinners.iter().map(|spinner| spinner.counts().own).sum()
    }

    /// Reads all counters. Takes some microseconds and disturbs no spinner.
    pub fn snapshot(&self) -> Result<Snapshot, SoakError> {
        let stat = ProcStat::read()?;
        let at = Instant::now();
        let counts = self.spinners.iter().map(|spinner| (spinner.cpu(), spinner.counts())).collect();
        Ok(Snapshot { at, counts, stat })
    }

    /// What happens during `duration`, while the caller sleeps.
    pub fn observe(&self, duration: Duration) -> Result<Interval, SoakError> {
        let before = self.snapshot()?;
        thread::sleep(duration);
        Ok(self.snapshot()?.since(&before))
    }

    /// Learns what a quiet CPU looks like, from `duration` in which the caller keeps the machine quiet.
    pub fn calibrate(&self, duration: Duration) -> Result<Baseline, SoakError> {
        Ok(Baseline::from_quiet(&self.observe(duration)?))
    }
}

impl Snapshot {
    /// What happened between `earlier` and this, both of the same meter.
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
                    _ => crate::CpuTimes::default(),
                },
            })
            .collect();
        Interval { wall: self.at - earlier.at, cpus }
    }
}
