//! Measures rows in interleaved rounds of one window each, so that drift affects all rows alike.

use crate::counters::Counters;
use crate::error::BenchError;
use crate::flow::{FlowError, Sample};
use crate::host::HostFacts;
use crate::pair::PairError;
use crate::stats::{Estimate, VERDICT_ROUNDS_MIN};
use crate::topology::{Loads, Quiet, Topology};
use crate::warning::{Kind, Warning};
use haul_lab::CpuPair;
use haul_soak::Meter;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

mod costs;
mod distances;
mod disturbances;
mod noise;
mod open;
mod pace;
mod regimes;
mod round_cost;
mod series;
mod warnings;

pub(crate) use costs::Costs;
use distances::CpuDistances;
pub(crate) use distances::MOVED_FACTOR_MIN;
use disturbances::Disturbances;
pub(crate) use disturbances::OTHERS_PERCENT_MAX;
use disturbances::{BACKGROUND_PERCENT_MAX, UNKNOWN_BACKGROUND_PERCENT_MIN};
pub use noise::Noise;
use noise::NoiseReadings;
pub(crate) use open::Part;
use pace::ROUNDS_MAX;
pub(crate) use pace::Steps;
pub use pace::{Pace, Progress, TimeLimit};
pub use round_cost::RoundCost;
pub(crate) use series::Series;
pub(crate) use warnings::{LOW_LOAD_PERCENT_MAX, few_rounds_warning, short_list, unsteady_warning};

/// The time before and after each round in which the machine is kept idle to calibrate the meter.
pub(crate) const CALIBRATION: Duration = Duration::from_millis(150);
/// How often a window is measured again because other programs ran in it.
const DISTURBED_RETRIES_MAX: usize = 2;
/// How often a window is measured again because it slipped. On a shared machine up to a third of
/// the windows slip at times, and such a window has no valid result.
const SLIPPED_RETRIES_MAX: usize = 9;
/// The shortest measurement that is proposed where one was too short or too noisy, in seconds.
const LONGER_SECONDS_MIN: u64 = 300;
/// The rounds in which all rows are measured before the rows of a verdict.
const FIRST_ROUNDS: usize = 3;
/// The most rounds that are added if too few usable ones remain for a verdict.
const ADDED_ROUNDS_MAX: usize = 10;

/// An experiment, which measures one row at a time.
pub(crate) trait Experiment {
    /// The identity of a row: its method and conditions.
    type Case;
    /// The result of one round of a row.
    type Round;

    /// The name of the row in progress messages and warnings.
    fn name(&self, case: &Self::Case) -> String;
    /// The name of the row with its conditions, for warnings about all rows together.
    fn description(&self, case: &Self::Case) -> String {
        self.name(case)
    }
    /// Measures a row once.
    fn measure(&mut self, case: &Self::Case, meter: &Meter) -> Result<Sample, FlowError>;
    /// Computes a round's result from the counters; `None` if they give none.
    fn evaluate(&self, case: &Self::Case, sample: &Sample, loads: &Loads) -> Option<Self::Round>;

    /// Rows of one block are measured in succession: changing the block reconfigures the machine.
    fn block(&self, _case: &Self::Case) -> usize {
        0
    }

    /// The part of a row in a question; `None` if no verdict depends on the row.
    fn part(&self, _case: &Self::Case) -> Option<Part> {
        None
    }

    /// The cost that the rows of a question are compared by.
    fn compared_cost(round: &Self::Round) -> f64;

    /// Whether a round was in the requested regime.
    fn is_in_regime(&self, _round: &Self::Round) -> bool {
        true
    }

    /// The costs of both hosts, if only rounds of one regime are to be kept ([`crate::regime`]).
    fn costs(_round: &Self::Round) -> Option<&Costs> {
        None
    }
}

/// A row of an experiment.
type SeriesOf<S> = Series<<S as Experiment>::Case, <S as Experiment>::Round>;

/// A run: the meter, the hosts, and the observations that become warnings.
pub(crate) struct Run<'a> {
    pub site: Topology<'a>,
    pub meter: Meter,
    pub host: HostFacts,
    pub warnings: Vec<Warning>,
    pace: Pace,
    /// CPU use of other programs in calibrations, in percent, for each round where it was too high.
    disturbances: Vec<f64>,
    /// Change of an idle CPU's speed in percent, for each round where it was too large.
    drifts: Vec<f64>,
    /// Windows that slipped and were measured again.
    slips: usize,
    /// Windows that were measured again because other programs ran in them.
    disturbed_windows: usize,
    /// Distances between the hosts' CPUs, measured around every row, for each set of rows.
    distances: Vec<CpuDistances>,
    /// The noise of the machine.
    noise: NoiseReadings,
    /// With a time limit, the fewest usable rounds of a row that a verdict depends on.
    deciding_rounds: Option<usize>,
    /// The time that the rounds of a verdict would have needed, if it ended earlier.
    time_needed: Option<Duration>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(site: impl Into<Topology<'a>>, pace: Pace) -> Result<Self, BenchError> {
        let site = site.into();
        let mut cpus = match site.cpus() {
            Some(CpuPair { sender, receiver }) => vec![sender, receiver],
            None => {
                haul_lab::allowed_cpus().map_err(FlowError::at("asking for this process's CPUs"))?
            }
        };
        cpus.dedup();
        let meter = Meter::start(&cpus)?;
        Ok(Self {
            site,
            meter,
            host: HostFacts::here(),
            warnings: site.caveats().iter().map(|caveat| Warning::new(Kind::Lab, caveat)).collect(),
            pace,
            disturbances: Vec::new(),
            drifts: Vec::new(),
            slips: 0,
            disturbed_windows: 0,
            distances: Vec::new(),
            noise: NoiseReadings::default(),
            deciding_rounds: None,
            time_needed: None,
        })
    }

    /// The number of steps for the rounds of this many rows.
    pub(crate) fn steps(&self, rows: usize) -> usize {
        self.pace.rounds * rows
    }

    /// Measures every case in every round, or as often as the time limit allows, and warns of what
    /// makes the figures doubtful.
    pub(crate) fn measure_cases<S: Experiment>(
        &mut self,
        experiment: &mut S,
        cases: impl IntoIterator<Item = S::Case>,
        is_stopped: &AtomicBool,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Vec<SeriesOf<S>>, BenchError> {
        let mut rows: Vec<_> = cases.into_iter().map(Series::new).collect();
        let mut steps =
            Steps::new(self.steps(rows.len()), is_stopped, progress).with_limit(self.pace.limit);
        self.measure_all(experiment, &mut rows, &mut steps)?;
        self.warn(&rows, |case| experiment.description(case), S::compared_cost);
        Ok(rows)
    }

    /// Measures every row in every round, or as often as the time limit allows. Returns whether
    /// nothing stopped the run.
    pub(crate) fn measure_all<S: Experiment>(
        &mut self,
        experiment: &mut S,
        rows: &mut [SeriesOf<S>],
        steps: &mut Steps<'_>,
    ) -> Result<bool, BenchError> {
        self.measure_in_share(1.0, experiment, rows, steps)
    }

    /// Like [`Self::measure_all`], in a share of the time that remains of the limit.
    pub(crate) fn measure_in_share<S: Experiment>(
        &mut self,
        share: f64,
        experiment: &mut S,
        rows: &mut [SeriesOf<S>],
        steps: &mut Steps<'_>,
    ) -> Result<bool, BenchError> {
        let mut is_complete = true;
        let start = Instant::now();
        let end = self.pace.limit.map(|limit| limit.end_of_share(share));
        let mut notes = RoundNotes { end, ..RoundNotes::default() };
        let mut number = 0;
        while let Some(selected) = self.next_rows(number, experiment, rows, &notes) {
            let measured =
                self.measure_round(number, &selected, experiment, rows, steps, &mut notes);
            let detail = match measured {
                Ok(RoundEnd::Complete) => {
                    number += 1;
                    continue;
                }
                Ok(RoundEnd::OutOfTime) => break,
                Ok(RoundEnd::Stopped) => {
                    "stopped before it was complete: some rows have fewer rounds".into()
                }
                // The rounds measured so far are still useful.
                Err(BenchError::Pair(error)) if rows.iter().any(|row| !row.rounds.is_empty()) => {
                    format!("{error}: some rows have fewer rounds")
                }
                Err(error) => return Err(error),
            };
            self.warnings.insert(0, Warning::new(Kind::Interrupted, detail));
            is_complete = false;
            break;
        }
        let elapsed = start.elapsed();
        self.warnings.extend(notes.disturbances.keep_clean(rows, |case| experiment.name(case)));
        self.warnings.extend(notes.distances.keep_majority(rows));
        self.warnings.extend(regimes::keep_requested(
            rows,
            |round| experiment.is_in_regime(round),
            |case| experiment.name(case),
        ));
        self.warnings.extend(regimes::keep_majority(rows, S::costs, |case| experiment.name(case)));
        self.distances.push(notes.distances);
        let deciding = rows
            .iter()
            .filter(|row| row.refused.is_none() && experiment.part(&row.case).is_some())
            .map(Series::ratio_rounds)
            .min();
        if let Some(fewest) = deciding.filter(|_| end.is_some()) {
            self.deciding_rounds = Some(self.deciding_rounds.unwrap_or(fewest).min(fewest));
            if fewest < self.pace.rounds {
                self.time_needed = Some(time_for_rounds(elapsed, fewest, self.pace.rounds));
            }
        }
        Ok(is_complete)
    }

    /// The rows of the next round; `None` if there is none.
    ///
    /// Without a time limit these are all rows. With one, all rows are measured a few times, then
    /// those that a verdict depends on as often as it takes, then the others, then the rows of
    /// questions that are still open.
    fn next_rows<S: Experiment>(
        &self,
        number: usize,
        experiment: &S,
        rows: &[SeriesOf<S>],
        notes: &RoundNotes,
    ) -> Option<Vec<usize>> {
        let Some(limit) = self.pace.limit else {
            let is_next = number < self.pace.rounds || self.needs_more(number, rows, notes);
            return is_next.then(|| (0..rows.len()).collect());
        };
        if number < FIRST_ROUNDS {
            return Some((0..rows.len()).collect());
        }
        let questions = open::questions(experiment, rows, notes.usable_rounds());
        let precision = limit.within_percent / 100.0;
        let rounds_max = self.pace.rounds + ADDED_ROUNDS_MAX;
        let lacking = open::rows_that_lack_pairs(&questions, self.pace.rounds, rounds_max);
        let selected = if lacking.is_empty() {
            let others = open::rows_that_lack_rounds(rows, &questions, self.pace.rounds);
            if others.is_empty() { open::rows(&questions, precision) } else { others }
        } else {
            lacking
        };
        let is_next = number < ROUNDS_MAX && !selected.is_empty();
        (is_next && notes.has_time_for(selected.len())).then_some(selected)
    }

    /// Whether to add a round: a verdict was requested, and some row has too few usable rounds.
    fn needs_more<C, R>(&self, done: usize, rows: &[Series<C, R>], notes: &RoundNotes) -> bool {
        self.pace.rounds >= VERDICT_ROUNDS_MIN
            && done < self.pace.rounds + ADDED_ROUNDS_MAX
            && notes.fewest_usable_rounds(rows).is_some_and(|usable| usable < VERDICT_ROUNDS_MIN)
    }

    /// Measures each selected row once, between two calibrations. Each round has its own order, so
    /// that neither drift nor the preceding row affects the same rows every time.
    fn measure_round<S: Experiment>(
        &mut self,
        number: usize,
        selected: &[usize],
        experiment: &mut S,
        rows: &mut [SeriesOf<S>],
        steps: &mut Steps<'_>,
        notes: &mut RoundNotes,
    ) -> Result<RoundEnd, BenchError> {
        // The calibration after the last round is the one before this round.
        let before = match notes.quiet.take() {
            Some(quiet) => quiet,
            None => self.calibrate()?,
        };
        let mut samples = Vec::new();
        let blocks: Vec<usize> =
            selected.iter().map(|&index| experiment.block(&rows[index].case)).collect();
        let order = round_order(number, &blocks).into_iter().map(|place| selected[place]);
        let (mut round_end, mut lost_peer) = (RoundEnd::Complete, None);
        let mut round_trip_before = self.site.cache_line_round_trip()?;
        for index in order {
            let row = &mut rows[index];
            if !steps.go_on(&experiment.name(&row.case)) {
                round_end = RoundEnd::Stopped;
                break;
            }
            if row.refused.is_some() {
                continue;
            }
            if !notes.has_time_for(1) {
                round_end = RoundEnd::OutOfTime;
                break;
            }
            let window_start = Instant::now();
            let measured = self.measure_window(experiment, &row.case);
            notes.record_window(window_start.elapsed());
            let round_trips = [round_trip_before, self.site.cache_line_round_trip()?];
            round_trip_before = round_trips[1];
            match measured {
                Ok(sample) => {
                    // The other programs of two machines are known from the calibrations.
                    if self.site.pair().is_none() {
                        let others_percent = self.others_percent(&sample);
                        notes.disturbances.record(index, number, others_percent);
                        self.noise.disturbed.push(others_percent > OTHERS_PERCENT_MAX);
                    }
                    samples.push((index, sample, round_trips));
                }
                Err(FlowError::Refused(reason)) => row.refused = Some(reason),
                Err(FlowError::Pair(error)) => {
                    lost_peer = Some(error);
                    break;
                }
                Err(error @ (FlowError::Lab(_) | FlowError::Soak(_))) => return Err(error.into()),
                // A failed round must not discard the others.
                Err(error) => row.failures.push(error.to_string()),
            }
        }
        let after = self.calibrate_after(&before, &mut lost_peer)?;
        self.record_calibration(&before, &after);
        let quiet = before.middle(&after);
        notes.quiet = Some(after);
        self.evaluate_round(number, &samples, &quiet, experiment, rows, notes);
        lost_peer.map_or(Ok(round_end), |error| Err(error.into()))
    }

    /// Adds the results of a round to the rows.
    fn evaluate_round<S: Experiment>(
        &mut self,
        number: usize,
        samples: &[(usize, Sample, [Option<Duration>; 2])],
        quiet: &Quiet,
        experiment: &S,
        rows: &mut [SeriesOf<S>],
        notes: &mut RoundNotes,
    ) {
        let background_percent = self.site.pair().map(|_| quiet.background_percent());
        for (index, sample, round_trips) in samples {
            if let Some(percent) = background_percent {
                notes.disturbances.record_background(*index, number, percent);
                self.noise.disturbed.push(percent > BACKGROUND_PERCENT_MAX);
                if percent > UNKNOWN_BACKGROUND_PERCENT_MIN {
                    rows[*index].reject_for_background(percent);
                    continue;
                }
            }
            if let Some(round) = self.evaluate(experiment, &rows[*index].case, sample, quiet) {
                rows[*index].rounds.push((number, round));
                notes.distances.record(*index, number, *round_trips);
            }
        }
    }

    /// Calibrates the meter after a round. If the other machine is lost, the calibration before the
    /// round is used.
    fn calibrate_after(
        &self,
        before: &Quiet,
        lost_peer: &mut Option<PairError>,
    ) -> Result<Quiet, BenchError> {
        if lost_peer.is_some() {
            return Ok(before.clone());
        }
        self.calibrate().or_else(|error| match error {
            BenchError::Pair(error) => {
                *lost_peer = Some(error);
                Ok(before.clone())
            }
            error => Err(error),
        })
    }

    /// Measures a window until it is valid: of the requested length and without other programs.
    /// After several attempts the least disturbed window is used.
    fn measure_window<S: Experiment>(
        &mut self,
        experiment: &mut S,
        case: &S::Case,
    ) -> Result<Sample, FlowError> {
        let mut best: Option<(f64, Sample)> = None;
        for attempt in 0..=DISTURBED_RETRIES_MAX {
            self.disturbed_windows += usize::from(attempt > 0);
            let measured =
                retry_slipped_windows(&mut self.slips, || experiment.measure(case, &self.meter));
            let sample = match measured {
                // A disturbed window is better than none.
                Err(FlowError::Slipped { .. }) if best.is_some() => break,
                measured => measured?,
            };
            let others_percent = self.others_percent(&sample);
            if best.as_ref().is_none_or(|(least, _)| others_percent < *least) {
                best = Some((others_percent, sample));
            }
            if others_percent <= OTHERS_PERCENT_MAX {
                break;
            }
        }
        best.map(|(_, sample)| sample)
            .ok_or_else(|| FlowError::Worker("nothing was measured".into()))
    }

    /// CPU use of other programs in a window, in percent, on the host where it was higher.
    fn others_percent(&self, sample: &Sample) -> f64 {
        let loads = self.site.loads(sample, &Quiet::default());
        let accounts =
            loads.iter().flat_map(|loads| [loads.sender.account, loads.receiver.account]);
        accounts.flatten().map(|account| account.others_percent).fold(0.0, f64::max)
    }

    /// Calibrates the meter on idle machines; on both at once, if there are two.
    fn calibrate(&self) -> Result<Quiet, BenchError> {
        let Some(pair) = self.site.pair() else {
            let cpus: Vec<usize> = self
                .site
                .cpus()
                .into_iter()
                .flat_map(|cpus| [cpus.sender, cpus.receiver])
                .collect();
            let (start, before) = (Instant::now(), Counters::read(&cpus));
            let here = self.meter.calibrate(CALIBRATION);
            let after = Counters::read(&cpus);
            let ticks = after
                .iter()
                .zip(&before)
                .map(|(after, before)| after.since(before).timer_interrupts);
            let ticks_per_second = ticks.max().unwrap_or(0) as f64 / start.elapsed().as_secs_f64();
            return Ok(Quiet { here, ticks_per_second, ..Quiet::default() });
        };
        pair.begin_calibration(CALIBRATION)?;
        let here = self.meter.calibrate(CALIBRATION);
        Ok(Quiet { here, there: pair.calibration()?, ..Quiet::default() })
    }

    fn evaluate<S: Experiment>(
        &mut self,
        experiment: &S,
        case: &S::Case,
        sample: &Sample,
        quiet: &Quiet,
    ) -> Option<S::Round> {
        let loads = self.site.loads(sample, quiet)?;
        self.host.steal_percent = self.host.steal_percent.max(loads.steal_percent);
        self.noise.steal_percents.push(loads.steal_percent);
        experiment.evaluate(case, sample, &loads)
    }

    /// The noise of the machine during the run.
    pub(crate) fn noise(&self) -> Noise {
        Noise { invalid: self.meter.obstacle(), ..self.noise.summary() }
    }

    /// The reason why the run supports no verdict; `None` if it does.
    pub(crate) fn obstacle(&self) -> Option<String> {
        self.noise().obstacle()
    }

    /// A command that measures this experiment again, longer.
    pub(crate) fn longer_command(&self, experiment: &str) -> String {
        let seconds = self.pace.limit.map_or(0, |limit| limit.budget.as_secs());
        let needed = self.time_needed.map_or(0, |needed| needed.as_secs());
        let minutes = (needed.max(2 * seconds).max(LONGER_SECONDS_MIN)).div_ceil(60);
        format!("haul bench {experiment} --for {minutes}m")
    }

    /// The distance between the CPUs in the kept rounds, as the round trip of a cache line.
    pub(crate) fn cache_line_round_trip_ns(&self) -> Option<Estimate> {
        Estimate::of(&self.distances.iter().flat_map(CpuDistances::kept).collect::<Vec<_>>())
    }
}

/// The end of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundEnd {
    Complete,
    /// The caller stopped the run.
    Stopped,
    /// The time limit was reached.
    OutOfTime,
}

/// Observations of a set of rows during its measurement.
#[derive(Debug, Default)]
struct RoundNotes {
    distances: CpuDistances,
    disturbances: Disturbances,
    /// The calibration after the last round.
    quiet: Option<Quiet>,
    /// The time at which the measurement has to end.
    end: Option<Instant>,
    /// The windows measured, and the time they took with their repetitions.
    windows: u32,
    windows_time: Duration,
}

impl RoundNotes {
    fn record_window(&mut self, elapsed: Duration) {
        self.windows += 1;
        self.windows_time += elapsed;
    }

    /// Whether this many windows, each as long as the mean so far, end in time.
    fn has_time_for(&self, windows: usize) -> bool {
        let mean = self.windows_time / self.windows.max(1);
        self.end.is_none_or(|end| Instant::now() + mean * windows as u32 <= end)
    }

    /// Returns for a row's round at which distance the CPUs were ([`CpuDistances::sides`]); `None`
    /// if the round is not usable.
    fn usable_rounds(&self) -> impl Fn(usize, usize) -> Option<bool> {
        let side = self.distances.sides();
        move |row, number| {
            side(row, number).filter(|_| self.disturbances.is_undisturbed(row, number))
        }
    }

    /// The fewest usable rounds of a row.
    fn fewest_usable_rounds<C, R>(&self, rows: &[Series<C, R>]) -> Option<usize> {
        let is_usable = self.usable_rounds();
        let usable = |(index, row): (usize, &Series<C, R>)| {
            row.rounds.iter().filter(|(number, _)| is_usable(index, *number).is_some()).count()
        };
        rows.iter().enumerate().filter(|(_, row)| !row.rounds.is_empty()).map(usable).min()
    }
}

/// The time that `rounds` rounds take, if `done` rounds took `elapsed`; with a tenth for rounds
/// that are measured again.
fn time_for_rounds(elapsed: Duration, done: usize, rounds: usize) -> Duration {
    elapsed.mul_f64(1.1 * rounds as f64 / done.max(1) as f64)
}

/// The order of a round: shuffled, with blocks kept together, and the same in every run.
fn round_order(number: usize, blocks: &[usize]) -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(number as u64);
    let mut names: Vec<usize> = blocks.to_vec();
    names.sort_unstable();
    names.dedup();
    random.shuffle(&mut names);
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    random.shuffle(&mut order);
    order.sort_by_key(|&row| names.iter().position(|&name| name == blocks[row]));
    order
}

/// Repeats a measurement whose windows slipped (started or ended late), up to a limit. Counts the
/// slipped windows.
pub(crate) fn retry_slipped_windows<T>(
    slips: &mut usize,
    mut measure: impl FnMut() -> Result<T, FlowError>,
) -> Result<T, FlowError> {
    for _ in 0..SLIPPED_RETRIES_MAX {
        match measure() {
            Err(FlowError::Slipped { .. }) => *slips += 1,
            measured => return measured,
        }
    }
    measure()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_its_own_order_and_blocks_stay_together() {
        let blocks = [0, 1, 0, 1, 0, 1, 0, 1];
        let orders: Vec<Vec<usize>> = (0..20).map(|number| round_order(number, &blocks)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..8).collect::<Vec<_>>());
            assert_eq!(
                order.windows(2).filter(|pair| blocks[pair[0]] != blocks[pair[1]]).count(),
                1
            );
        }
        assert!(
            orders.iter().any(|order| order[0] % 2 == 0)
                && orders.iter().any(|order| order[0] % 2 == 1)
        );
        assert_ne!(orders[0], orders[1]);
        assert_eq!(round_order(3, &blocks), round_order(3, &blocks));
    }

    #[test]
    fn slipped_windows_are_retried_up_to_a_limit() {
        for (late, again, is_measured) in
            [(0, 0, true), (1, 1, true), (9, 9, true), (10, 9, false), (30, 9, false)]
        {
            let (mut slips, mut calls) = (0, 0);
            let measured = retry_slipped_windows(&mut slips, || {
                calls += 1;
                if calls > late { Ok(calls) } else { Err(FlowError::Slipped { seconds: 1.0 }) }
            });
            assert_eq!((slips, measured.is_ok()), (again, is_measured), "{late} late");
        }
        let mut slips = 0;
        let failed =
            retry_slipped_windows(&mut slips, || Err::<(), _>(FlowError::Refused("no".into())));
        assert!(slips == 0 && failed.is_err(), "another failure is not retried");
    }
}
