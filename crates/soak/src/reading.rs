//! From counters to load.

use crate::meter::{CpuInterval, Interval};
use crate::weight::{ORDINARY_WEIGHT, SPINNER_WEIGHT};
use serde::{Deserialize, Serialize};

/// The most that an assumed baseline may take off, in points. A timer tick of 1000 Hz costs a guest about
/// this.
const ASSUMED_BASELINE_MAX: f64 = 0.01;
/// A spinner that kept less than this share of its CPU has too little left to judge its speed by.
const SPEED_SHARE_MIN: f64 = 0.05;

/// What a quiet CPU does to its spinner: the timer tick that interrupts it, and the speed it reaches.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    cpus: Vec<CpuBaseline>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct CpuBaseline {
    cpu: usize,
    /// Share of the spinner's own time that interrupts took.
    interrupted: f64,
    /// Cache lines dirtied per second of undisturbed own time.
    speed: f64,
    /// Share of the CPU that others took while it should have been quiet.
    taken: f64,
}

/// One CPU's readings, all in percent of wall time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CpuLoad {
    /// Which CPU.
    pub cpu: usize,
    /// Taken plus interrupted: how busy it was.
    pub load_percent: f64,
    /// The part that the scheduler gave to others.
    pub taken_percent: f64,
    /// The part that interrupts took on top of the spinner, beyond the quiet baseline.
    pub interrupted_percent: f64,
    /// How much slower the spinner's remaining time went, `None` when too little remained to tell.
    pub interference_percent: Option<f64>,
    /// What `/proc/stat` claims for the same time.
    pub proc_stat_percent: f64,
    /// What the hypervisor took, by `/proc/stat`.
    pub steal_percent: f64,
}

/// Every measured CPU's readings.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Wall time in seconds.
    pub seconds: f64,
    /// One entry a CPU, in the order the meter was given.
    pub cpus: Vec<CpuLoad>,
}

impl Baseline {
    /// From slices of a time in which the machine was quiet: the median slice, CPU by CPU.
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

    /// From a machine that nobody can keep quiet: the least disturbed of several intervals, CPU by CPU.
    ///
    /// A steady stream of interrupts would hide in it, so it never takes off more than one point.
    pub(crate) fn assumed_from(intervals: &[Interval]) -> Option<Self> {
        let mut assumed = intervals.chunks(1).map(Self::from_quiet).reduce(Self::least_of)?;
        for cpu in &mut assumed.cpus {
            cpu.interrupted = cpu.interrupted.min(ASSUMED_BASELINE_MAX);
        }
        Some(assumed)
    }

    fn least_of(mut self, other: Self) -> Self {
        for (one, other) in self.cpus.iter_mut().zip(other.cpus) {
            one.interrupted = one.interrupted.min(other.interrupted);
            one.speed = one.speed.max(other.speed);
            one.taken = one.taken.min(other.taken);
        }
        self
    }

    /// The middle of two baselines, taken before and after what they frame.
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

    /// How much the quiet speed of the CPUs changed from this baseline to `later`, in percent, the worst
    /// CPU's: the CPU's frequency or the machine's neighbours moved.
    pub fn drift_percent(&self, later: &Self) -> f64 {
        // A spinner that had no time at all has no speed: others were in the way, which is told elsewhere.
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

    /// The most that other processes took of a CPU that should have been quiet, in percent.
    pub fn disturbance_percent(&self) -> f64 {
        100.0 * self.cpus.iter().map(|cpu| cpu.taken).fold(0.0, f64::max)
    }

    /// What other processes took of all CPUs together while they should have been quiet; 100 is one CPU.
    pub fn taken_percent(&self) -> f64 {
        100.0 * self.cpus.iter().map(|cpu| cpu.taken).sum::<f64>()
    }

    /// What other processes took of one CPU while it should have been quiet, in percent.
    pub fn disturbance_percent_of(&self, cpu: usize) -> f64 {
        self.cpus.iter().find(|quiet| quiet.cpu == cpu).map_or(0.0, |quiet| 100.0 * quiet.taken)
    }
}

impl Interval {
    /// The load in this interval, with what `baseline` explains taken off.
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

/// How far readings of a quiet machine differ: what the hypervisor and the tick do to them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Resolution(pub f64);

impl Resolution {
    /// Slices without which nothing is known.
    const SLICES_MIN: usize = 8;

    /// By how many points the load differs among the quietest quarter of the slices, of the CPU where that is most.
    pub(crate) fn of(slices: &[Interval], baseline: &Baseline) -> Option<Self> {
        if slices.len() < Self::SLICES_MIN {
            return None;
        }
        let loads: Vec<Load> = slices
            .iter()
            .map(|slice| slice.load(baseline).with_a_fair_share_given_back())
            .collect();
        let of_cpu = |index: usize| {
            let mut of_slices: Vec<f64> =
                loads.iter().map(|load| load.cpus[index].load_percent).collect();
            of_slices.sort_by(f64::total_cmp);
            of_slices[of_slices.len() / 4] - of_slices[0]
        };
        Some(Self((0..loads[0].cpus.len()).map(of_cpu).fold(0.0, f64::max)))
    }
}

impl Load {
    /// Gives back what spinners of the least weight take of a full CPU by the scheduler's fairness: their weight's share,
    /// 1.4 %. What a spinner has beyond that is idle time. Between once and twice its share the two cannot be separated, and
    /// the corrected reading is interpolated linearly from 100 % to the uncorrected one.
    #[must_use]
    pub(crate) fn with_a_fair_share_given_back(mut self) -> Self {
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

    /// The median of the loads of slices, reading by reading: what is steady in them, without the bursts.
    /// What `/proc/stat` says is not in slices and comes from `whole`.
    pub fn median_of(slices: &[Self], whole: &Self) -> Self {
        let cpus = whole
            .cpus
            .iter()
            .enumerate()
            .map(|(index, &cpu)| {
                let of = |reading: fn(&CpuLoad) -> f64| {
                    median(slices.iter().map(|slice| reading(&slice.cpus[index])).collect())
                };
                let (taken_percent, interrupted_percent) =
                    (of(|cpu| cpu.taken_percent), of(|cpu| cpu.interrupted_percent));
                let load_percent = (taken_percent + interrupted_percent).clamp(0.0, 100.0);
                CpuLoad { load_percent, taken_percent, interrupted_percent, ..cpu }
            })
            .collect();
        Self { seconds: whole.seconds, cpus }
    }

    /// The readings of one CPU.
    pub fn of(&self, cpu: usize) -> Option<&CpuLoad> {
        self.cpus.iter().find(|load| load.cpu == cpu)
    }

    /// The mean over the measured CPUs, in percent.
    pub fn total_percent(&self) -> f64 {
        share(self.cpus.iter().map(|cpu| cpu.load_percent).sum(), self.cpus.len() as f64)
    }

    /// The sum over the measured CPUs, of which 100 is one. What a CPU reads below nothing makes up for what another reads
    /// above, so that noise does not add up.
    pub fn whole_percent(&self) -> f64 {
        self.cpus.iter().map(|cpu| cpu.taken_percent + cpu.interrupted_percent).sum()
    }

    /// The CPU time that all this load came to, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        self.seconds * self.cpus.iter().map(|cpu| cpu.load_percent / 100.0).sum::<f64>()
    }

    /// The largest share that the hypervisor took of any CPU, in percent.
    pub fn steal_percent(&self) -> f64 {
        self.cpus.iter().map(|cpu| cpu.steal_percent).fold(0.0, f64::max)
    }
}

/// Lines dirtied per second of time that the spinner really had.
fn speed(cpu: &CpuInterval) -> f64 {
    share(cpu.work as f64, cpu.own.saturating_sub(cpu.interrupted).as_secs_f64())
}

/// The middle value, 0 of none.
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
                stat: crate::CpuTimes::default(),
            }],
        }
    }

    #[test]
    fn load_is_what_was_taken_and_what_was_interrupted_beyond_the_tick() {
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
    fn slower_work_in_the_time_kept_is_interference_and_not_load() {
        let quiet = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let load = interval(500, 0, 400).load(&quiet);
        let cpu = load.of(3).unwrap();
        assert!((cpu.load_percent - 50.0).abs() < 1e-9);
        assert!((cpu.interference_percent.unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(interval(10, 0, 10).load(&quiet).of(3).unwrap().interference_percent, None);
    }

    #[test]
    fn a_burst_in_one_slice_moves_neither_a_baseline_nor_a_median() {
        let slices = [interval(1000, 8, 990), interval(1000, 300, 700), interval(1000, 8, 990)];
        let quiet = Baseline::from_quiet(&slices);
        assert_eq!(quiet, Baseline::from_quiet(&slices[..1]));
        let loads: Vec<Load> = slices.iter().map(|slice| slice.load(&quiet)).collect();
        assert!(Load::median_of(&loads, &loads[1]).of(3).unwrap().load_percent.abs() < 1e-9);
    }

    #[test]
    fn an_assumed_baseline_never_hides_more_than_a_point() {
        let assumed =
            Baseline::assumed_from(&[interval(1000, 90, 1), interval(1000, 80, 1)]).unwrap();
        let load = interval(1000, 85, 1).load(&assumed);
        assert!((load.of(3).unwrap().load_percent - 7.5).abs() < 1e-9);
    }

    #[test]
    fn a_full_cpu_reads_full_and_an_almost_idle_one_as_it_is() {
        let quiet = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let read = |own_ms| {
            let load = interval(own_ms, 0, 0).load(&quiet).with_a_fair_share_given_back();
            load.of(3).unwrap().load_percent
        };
        assert!((read(0) - 100.0).abs() < 1e-9 && (read(14) - 100.0).abs() < 1e-9, "{}", read(14));
        assert!((98.0..99.5).contains(&read(20)), "{}", read(20));
        assert!((read(30) - 97.0).abs() < 1e-9 && (read(990) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_resolution_is_what_quiet_slices_differ_by() {
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
    fn drift_is_the_worst_cpus() {
        let before = Baseline::from_quiet(&[interval(1000, 0, 1000)]);
        let after = Baseline::from_quiet(&[interval(1000, 0, 900)]);
        assert!((before.drift_percent(&after) + 10.0).abs() < 1e-9);
    }
}
