//! Computes the load from the counters.

use crate::snapshot::{CpuInterval, Interval};
use crate::weight::{ORDINARY_WEIGHT, SPINNER_WEIGHT};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The most that an assumed baseline may subtract: one percentage point. A timer tick of 1000 Hz
/// costs a guest about this.
const ASSUMED_BASELINE_MAX: f64 = 0.01;
/// The least share of its CPU that a spinner must have kept for a speed reading.
const SPEED_SHARE_MIN: f64 = 0.05;

/// The effect of a quiet CPU on its spinner: interruption by the timer tick, and the speed it
/// reaches.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    cpus: Vec<CpuBaseline>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct CpuBaseline {
    cpu: usize,
    /// Share of the spinner's own time that interrupts took.
    interrupted: f64,
    /// Cache lines dirtied per second of uninterrupted own time.
    speed: f64,
    /// Share of the CPU's time that other programs used during calibration, when it should have
    /// been idle. 0 if nothing disturbed it.
    taken: f64,
}

/// One CPU's readings, in percent of wall time unless noted.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct CpuLoad {
    /// The CPU.
    pub cpu: usize,
    /// Taken plus interrupted, the CPU's load.
    pub load_percent: f64,
    /// The part that the scheduler gave to other tasks.
    pub taken_percent: f64,
    /// The part that interrupts took from the spinner, beyond the quiet baseline.
    pub interrupted_percent: f64,
    /// How much slower the spinner's memory accesses were than in the baseline, in percent; `None`
    /// if too little time was left to the spinner.
    pub interference_percent: Option<f64>,
    /// Load of the same time by `/proc/stat`.
    pub proc_stat_percent: f64,
    /// Share that the hypervisor took, by `/proc/stat`.
    pub steal_percent: f64,
}

/// The readings of every measured CPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Wall time in seconds.
    pub seconds: f64,
    /// One entry for each CPU, in the order in which the meter was given them.
    pub cpus: Vec<CpuLoad>,
}

impl Baseline {
    /// Computes the baseline of a quiet time: the median of the slices, CPU by CPU.
    pub(crate) fn from_quiet(slices: &[Interval]) -> Self {
        let Some(first) = slices.first() else { return Self::default() };
        let cpus = (0..first.cpus.len())
            .map(|index| {
                let median_of = |reading: &dyn Fn(&Interval, &CpuInterval) -> f64| {
                    median(slices.iter().map(|slice| reading(slice, &slice.cpus[index])).collect())
                };
                CpuBaseline {
                    cpu: first.cpus[index].cpu,
                    interrupted: median_of(&|_, cpu| {
                        share(cpu.interrupted.as_secs_f64(), cpu.own.as_secs_f64())
                    }),
                    speed: median_of(&|_, cpu| speed(cpu)),
                    taken: median_of(&|slice, cpu| {
                        1.0 - share(cpu.own.as_secs_f64(), slice.wall.as_secs_f64())
                    }),
                }
            })
            .collect();
        Self { cpus }
    }

    /// Estimates the baseline of a machine that cannot be kept quiet: the least disturbed of
    /// several intervals, CPU by CPU.
    ///
    /// A steady stream of interrupts would be hidden in it, so it never subtracts more than one
    /// point.
    pub(crate) fn from_least_disturbed(intervals: &[Interval]) -> Option<Self> {
        let mut assumed =
            intervals.chunks(1).map(Self::from_quiet).reduce(Self::least_disturbed)?;
        for cpu in &mut assumed.cpus {
            cpu.interrupted = cpu.interrupted.min(ASSUMED_BASELINE_MAX);
        }
        Some(assumed)
    }

    fn least_disturbed(mut self, other: Self) -> Self {
        for (one, other) in self.cpus.iter_mut().zip(other.cpus) {
            one.interrupted = one.interrupted.min(other.interrupted);
            one.speed = one.speed.max(other.speed);
            one.taken = one.taken.min(other.taken);
        }
        self
    }

    /// Returns the mean of two baselines, taken before and after a measurement.
    #[must_use]
    pub fn middle(&self, other: &Self) -> Self {
        let cpus = self
            .cpus
            .iter()
            .zip(&other.cpus)
            .map(|(one, other)| CpuBaseline {
                cpu: one.cpu,
                interrupted: f64::midpoint(one.interrupted, other.interrupted),
                speed: f64::midpoint(one.speed, other.speed),
                taken: f64::midpoint(one.taken, other.taken),
            })
            .collect();
        Self { cpus }
    }

    /// Returns the largest change of a CPU's quiet speed from this baseline to `later`, in percent.
    ///
    /// It changes with the CPU's frequency and with the load of other guests.
    pub fn drift_percent(&self, later: &Self) -> f64 {
        // A spinner without any time has no speed: other tasks took the CPU, which other readings
        // report.
        let drift = |(one, other): (&CpuBaseline, &CpuBaseline)| {
            if one.speed > 0.0 && other.speed > 0.0 {
                100.0 * (other.speed / one.speed - 1.0)
            } else {
                0.0
            }
        };
        self.cpus
            .iter()
            .zip(&later.cpus)
            .map(drift)
            .fold(0.0, |worst: f64, next| if next.abs() > worst.abs() { next } else { worst })
    }

    /// Returns the largest share that other processes took of a CPU that should have been quiet, in
    /// percent.
    pub fn disturbance_percent(&self) -> f64 {
        100.0 * self.cpus.iter().map(|cpu| cpu.taken).fold(0.0, f64::max)
    }

    /// Returns the share that other processes took of all CPUs while they should have been quiet;
    /// 100 is one CPU.
    pub fn background_percent(&self) -> f64 {
        100.0 * self.cpus.iter().map(|cpu| cpu.taken).sum::<f64>()
    }

    /// Returns the mean share that other processes took of the CPUs during the calibration, in
    /// percent; 0 without CPUs.
    pub fn mean_background_percent(&self) -> f64 {
        self.background_percent() / self.cpus.len().max(1) as f64
    }

    /// Returns the share that other processes took of one CPU while it should have been quiet, in
    /// percent.
    pub fn disturbance_percent_of(&self, cpu: usize) -> f64 {
        self.cpus.iter().find(|quiet| quiet.cpu == cpu).map_or(0.0, |quiet| 100.0 * quiet.taken)
    }
}

impl Interval {
    /// Computes the load in this interval, with the baseline subtracted.
    pub fn load(&self, baseline: &Baseline) -> Load {
        let wall = self.wall.as_secs_f64();
        let cpus = self
            .cpus
            .iter()
            .map(|cpu| {
                let quiet = baseline.cpus.iter().find(|quiet| quiet.cpu == cpu.cpu);
                let own = share(cpu.own.as_secs_f64(), wall);
                let expected = quiet.map_or(0.0, |quiet| quiet.interrupted * own);
                let taken = 100.0 * (1.0 - own);
                let interrupted = 100.0 * (share(cpu.interrupted.as_secs_f64(), wall) - expected);
                let interference = quiet
                    .filter(|_| own >= SPEED_SHARE_MIN)
                    .map(|quiet| 100.0 * (1.0 - share(speed(cpu), quiet.speed)));
                CpuLoad {
                    cpu: cpu.cpu,
                    load_percent: (taken + interrupted).clamp(0.0, 100.0),
                    taken_percent: taken,
                    interrupted_percent: interrupted,
                    interference_percent: interference,
                    proc_stat_percent: cpu.stat.load_percent(100.0 * own),
                    steal_percent: cpu.stat.steal_percent(),
                }
            })
            .collect();
        Load { seconds: wall, cpus }
    }
}

/// Resolution of the readings: how far they differ on a quiet machine, because of the hypervisor
/// and the tick.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Resolution(pub f64);

impl Resolution {
    /// The least number of slices for an estimate.
    const SLICES_MIN: usize = 8;

    /// Computes by how many points the load differs among the quietest quarter of the slices, for
    /// the CPU where it differs most.
    pub(crate) fn of(slices: &[Interval], baseline: &Baseline) -> Option<Self> {
        if slices.len() < Self::SLICES_MIN {
            return None;
        }
        let loads: Vec<Load> =
            slices.iter().map(|slice| slice.load(baseline).corrected_for_spinner_share()).collect();
        let spread_of_cpu = |index: usize| {
            let mut slice_loads: Vec<f64> =
                loads.iter().map(|load| load.cpus[index].load_percent).collect();
            slice_loads.sort_by(f64::total_cmp);
            slice_loads[slice_loads.len() / 4] - slice_loads[0]
        };
        Some(Self((0..loads[0].cpus.len()).map(spread_of_cpu).fold(0.0, f64::max)))
    }
}

impl Load {
    /// Corrects the readings of full CPUs for the spinners' share of CPU time.
    ///
    /// The scheduler's fairness gives spinners of the least weight 1.4 % of a full CPU: their
    /// weight's share. CPU time beyond that is idle time. Between once and twice that share the two
    /// cannot be separated, so the corrected reading is interpolated linearly from 100 % to the
    /// uncorrected one.
    #[must_use]
    pub(crate) fn corrected_for_spinner_share(mut self) -> Self {
        const FAIR_PERCENT: f64 = 100.0 * SPINNER_WEIGHT / (SPINNER_WEIGHT + ORDINARY_WEIGHT);
        for cpu in &mut self.cpus {
            let own_percent = 100.0 - cpu.taken_percent;
            if own_percent < 2.0 * FAIR_PERCENT {
                cpu.taken_percent = 100.0 - 2.0 * (own_percent - FAIR_PERCENT).max(0.0);
                cpu.load_percent = (cpu.taken_percent + cpu.interrupted_percent).clamp(0.0, 100.0);
            }
        }
        self
    }

    /// Returns the median of the loads of slices, reading by reading, so that bursts do not have an
    /// effect.
    ///
    /// Slices lack the figures of `/proc/stat`, which come from `whole`.
    pub fn median_of(slices: &[Self], whole: &Self) -> Self {
        let cpus = whole
            .cpus
            .iter()
            .enumerate()
            .map(|(index, &cpu)| {
                let median_of = |reading: fn(&CpuLoad) -> f64| {
                    median(slices.iter().map(|slice| reading(&slice.cpus[index])).collect())
                };
                let (taken_percent, interrupted_percent) =
                    (median_of(|cpu| cpu.taken_percent), median_of(|cpu| cpu.interrupted_percent));
                let load_percent = (taken_percent + interrupted_percent).clamp(0.0, 100.0);
                CpuLoad { load_percent, taken_percent, interrupted_percent, ..cpu }
            })
            .collect();
        Self { seconds: whole.seconds, cpus }
    }

    /// Returns the readings of one CPU.
    pub fn of(&self, cpu: usize) -> Option<&CpuLoad> {
        self.cpus.iter().find(|load| load.cpu == cpu)
    }

    /// Returns the mean load of the measured CPUs, in percent.
    pub fn total_percent(&self) -> f64 {
        share(self.cpus.iter().map(|cpu| cpu.load_percent).sum(), self.cpus.len() as f64)
    }

    /// Returns the sum of the loads of the measured CPUs; 100 is one CPU.
    ///
    /// A CPU's negative reading offsets the positive reading of another, so noise does not add up.
    pub fn whole_percent(&self) -> f64 {
        self.cpus.iter().map(|cpu| cpu.taken_percent + cpu.interrupted_percent).sum()
    }

    /// Returns the CPU time of all this load, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        self.seconds * self.cpus.iter().map(|cpu| cpu.load_percent / 100.0).sum::<f64>()
    }

    /// Returns the largest share that the hypervisor took of any CPU, in percent.
    pub fn steal_percent(&self) -> f64 {
        self.cpus.iter().map(|cpu| cpu.steal_percent).fold(0.0, f64::max)
    }
}

/// Cache lines dirtied per second of uninterrupted time of the spinner.
fn speed(cpu: &CpuInterval) -> f64 {
    share(cpu.work as f64, cpu.own.saturating_sub(cpu.interrupted).as_secs_f64())
}

/// Returns the median, or 0 if there are no values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn interval(own_ms: u64, interrupted_ms: u64, work: u64) -> Interval {
        Interval {
            wall: Duration::from_secs(1),
            cpus: vec![CpuInterval {
                cpu: 3,
                own: Duration::from_millis(own_ms),
                interrupted: Duration::from_millis(interrupted_ms),
                work,
                stat: crate::proc_stat::CpuTimes::default(),
            }],
        }
    }

    #[test]
    fn load_is_taken_plus_interrupted_beyond_the_baseline() {
        let quiet = Baseline::from_quiet(&[interval(1000, 10, 990)]);
        let load = interval(500, 105, 395).load(&quiet);
        let cpu = load.of(3).unwrap();
        assert!((cpu.taken_percent - 50.0).abs() < 1e-9);
        assert!((cpu.interrupted_percent - 10.0).abs() < 1e-9);
        assert!((cpu.load_percent - 60.0).abs() < 1e-9);
        assert!(cpu.interference_percent.unwrap().abs() < 1e-9);
        assert!((load.cpu_seconds() - 0.6).abs() < 1e-9);
    }

    #[test]
    fn slower_work_in_the_remaining_time_is_interference_and_not_load() {
        let quiet = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let load = interval(500, 0, 400).load(&quiet);
        let cpu = load.of(3).unwrap();
        assert!((cpu.load_percent - 50.0).abs() < 1e-9);
        assert!((cpu.interference_percent.unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(interval(10, 0, 10).load(&quiet).of(3).unwrap().interference_percent, None);
    }

    #[test]
    fn a_burst_in_one_slice_changes_neither_a_baseline_nor_a_median() {
        let slices = [interval(1000, 8, 990), interval(1000, 300, 700), interval(1000, 8, 990)];
        let quiet = Baseline::from_quiet(&slices);
        assert_eq!(quiet, Baseline::from_quiet(&slices[..1]));
        let loads: Vec<Load> = slices.iter().map(|slice| slice.load(&quiet)).collect();
        assert!(Load::median_of(&loads, &loads[1]).of(3).unwrap().load_percent.abs() < 1e-9);
    }

    #[test]
    fn an_assumed_baseline_subtracts_at_most_one_point() {
        let assumed =
            Baseline::from_least_disturbed(&[interval(1000, 90, 1), interval(1000, 80, 1)])
                .unwrap();
        let load = interval(1000, 85, 1).load(&assumed);
        assert!((load.of(3).unwrap().load_percent - 7.5).abs() < 1e-9);
    }

    #[test]
    fn a_full_cpu_reads_100_percent_and_an_idle_cpu_is_not_corrected() {
        let quiet = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let read = |own_ms| {
            let load = interval(own_ms, 0, 0).load(&quiet).corrected_for_spinner_share();
            load.of(3).unwrap().load_percent
        };
        assert!((read(0) - 100.0).abs() < 1e-9 && (read(14) - 100.0).abs() < 1e-9, "{}", read(14));
        assert!((98.0..99.5).contains(&read(20)), "{}", read(20));
        assert!((read(30) - 97.0).abs() < 1e-9 && (read(990) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_resolution_is_the_spread_of_the_quietest_slices() {
        let quiet = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let busy = (0..6).map(|_| interval(300, 0, 300));
        let slices: Vec<Interval> =
            busy.chain([interval(999, 0, 1), interval(995, 0, 1)]).collect();
        let Resolution(percent) = Resolution::of(&slices[..], &quiet).unwrap();
        assert!((percent - 69.9).abs() < 1e-9, "{percent}");
        let calm: Vec<Interval> = (0..9).map(|index| interval(999 - index, 0, 1)).collect();
        let Resolution(percent) = Resolution::of(&calm, &quiet).unwrap();
        assert!((percent - 0.2).abs() < 1e-9, "{percent}");
        assert_eq!(Resolution::of(&calm[..7], &quiet), None);
    }

    #[test]
    fn drift_is_that_of_the_worst_cpu() {
        let before = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let after = Baseline::from_quiet(&[interval(1000, 0, 900)]);
        assert!((before.drift_percent(&after) + 10.0).abs() < 1e-9);
    }
}
