//! The load meter: reads the spinners of several CPUs together.

use crate::error::SoakError;
use crate::exclusive;
use crate::proc_stat::ProcStat;
use crate::quota::CpuQuotas;
use crate::reading::Baseline;
use crate::snapshot::{Interval, Snapshot};
use crate::spinner::Spinner;
use std::thread;
use std::time::{Duration, Instant};

/// A load meter with one spinner on each of its CPUs. While it exists those CPUs never idle.
#[derive(Debug)]
pub struct Meter {
    spinners: Vec<Spinner>,
    quotas: CpuQuotas,
}

impl Meter {
    /// Starts a spinner on each of `cpus`. [`SoakError::Quota`] if the process may not use them
    /// all.
    pub fn start(cpus: &[usize]) -> Result<Self, SoakError> {
        let quotas = CpuQuotas::read();
        if let Some(shortage) = quotas.shortage(cpus.len()) {
            return Err(SoakError::Quota(shortage));
        }
        exclusive::begin()?;
        let spinners = cpus.iter().map(|&cpu| Spinner::start(cpu)).collect::<Result<_, _>>()?;
        Ok(Self { spinners, quotas })
    }

    /// Returns the reason why the readings since the start are invalid; `None` if they are valid.
    pub fn obstacle(&self) -> Option<String> {
        let together = || "another haul measured at the same time".into();
        self.quotas.throttled_since().or_else(|| exclusive::is_disturbed().then(together))
    }

    /// Runs `work` while all spinners are paused, to observe it without the meter. Intervals that
    /// include this time are invalid.
    pub fn paused<T>(&self, work: impl FnOnce() -> T) -> T {
        let set_paused =
            |is_paused| self.spinners.iter().for_each(|spinner| spinner.set_paused(is_paused));
        set_paused(true);
        let result = work();
        set_paused(false);
        result
    }

    /// Returns the CPU time that the meter's threads have used so far, so that the caller can
    /// subtract it from its process's time.
    pub fn own_cpu_time(&self) -> Duration {
        self.spinners.iter().map(|spinner| spinner.counts().own).sum()
    }

    /// Lists the kernel's thread IDs of the meter's threads, which a profile must exclude.
    pub fn threads(&self) -> Vec<u32> {
        self.spinners.iter().map(Spinner::thread_id).collect()
    }

    /// Reads all counters. Takes a few microseconds and disturbs no spinner.
    pub fn snapshot(&self) -> Result<Snapshot, SoakError> {
        let stat = ProcStat::read()?;
        Ok(Snapshot { stat, ..self.read_counters() })
    }

    /// Measures for `duration`, while the caller sleeps.
    pub fn observe(&self, duration: Duration) -> Result<Interval, SoakError> {
        let before = self.snapshot()?;
        thread::sleep(duration);
        Ok(self.snapshot()?.since(&before))
    }

    /// Measures for `duration` in slices of [`SLICE`], while the caller sleeps. Slices lack the
    /// figures of `/proc/stat`.
    ///
    /// On a shared machine the hypervisor takes the CPU away in bursts that no counter of the guest
    /// shows. They distort a mean, but not the median of slices.
    pub fn observe_slices(&self, duration: Duration) -> Vec<Interval> {
        let mut slices = Vec::new();
        let mut last = self.read_counters();
        let end = last.at + duration;
        while last.at < end {
            thread::sleep(SLICE);
            let next = self.read_counters();
            slices.push(next.since(&last));
            last = next;
        }
        slices
    }

    /// Measures the baseline of quiet CPUs for `duration`, in which the caller must keep the
    /// machine quiet.
    pub fn calibrate(&self, duration: Duration) -> Baseline {
        Baseline::from_quiet(&self.observe_slices(duration))
    }

    fn read_counters(&self) -> Snapshot {
        let at = Instant::now();
        let counts =
            self.spinners.iter().map(|spinner| (spinner.cpu(), spinner.counts())).collect();
        Snapshot { at, counts, stat: ProcStat::default() }
    }
}

/// Length of a slice: a whole number of timer ticks, or nearly, at 100, 250, 300 and 1000 Hz.
pub const SLICE: Duration = Duration::from_millis(20);
