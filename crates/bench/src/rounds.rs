//! Rows measured round by round, interleaved, so that a drift hits all alike.

use crate::counters::Counters;
use crate::flow::{FlowError, Sample};
use crate::stats::{Figure, VERDICT_ROUNDS_MIN};
use crate::topology::{Loads, Quiet, Topology};
use crate::warning::{Kind, Warning};
use crate::{BenchError, HostFacts};
use haul_lab::CpuPair;
use haul_soak::Meter;
use std::time::{Duration, Instant};

mod costs;
mod distances;
mod disturbances;
mod pace;
mod regimes;
mod warnings;

pub(crate) use costs::Costs;
use distances::Distances;
pub(crate) use distances::MOVED;
use disturbances::Disturbances;
pub(crate) use disturbances::OTHERS_PERCENT_MAX;
pub(crate) use pace::Steps;
pub use pace::{Pace, Progress};
pub(crate) use warnings::{LOW_LOAD_PERCENT, list, too_few_rounds, unsteady};

/// How long the machine is kept quiet before and after each round to calibrate the meter.
pub(crate) const CALIBRATION: Duration = Duration::from_millis(150);
/// How often a window is measured again in which other programs ran.
const DISTURBED_AGAIN_MAX: usize = 2;
/// How often a window is measured again that slipped. On a shared machine a third of the windows slips at times, and such a
/// window says nothing.
const SLIPPED_AGAIN_MAX: usize = 9;
/// Rounds that are added, at most, where some were left out and too few remain for a verdict.
const ADDED_ROUNDS_MAX: usize = 10;

/// What an experiment measures, a row at a time.
pub(crate) trait Subject {
    /// What tells a row from the others.
    type Case;
    /// What one round of a row comes to.
    type Round;

    /// What the row is called while it is measured.
    fn name(&self, case: &Self::Case) -> String;
    /// Measures a row once.
    fn measure(&mut self, case: &Self::Case, meter: &Meter) -> Result<Sample, FlowError>;
    /// Turns counters into costs; `None` where they say nothing.
    fn judge(&self, case: &Self::Case, sample: &Sample, loads: &Loads) -> Option<Self::Round>;

    /// Rows that differ in this need a change of the machine between them, and are measured one after the other.
    fn block(&self, _cell: &Self::Case) -> usize {
        0
    }

    /// Whether a round was in the regime that was asked for.
    fn is_in_regime(&self, _round: &Self::Round) -> bool {
        true
    }

    /// What both hosts paid, where rounds of one regime are to be kept ([`crate::regime`]).
    fn costs(_round: &Self::Round) -> Option<&Costs> {
        None
    }
}

/// A row and what was measured of it. Rounds carry their number, so that those of different rows can be put
/// side by side though one has failed.
#[derive(Debug)]
pub(crate) struct Series<C, R> {
    pub case: C,
    /// Why nothing was measured, and never will be here.
    pub refused: Option<String>,
    pub rounds: Vec<(usize, R)>,
    /// What other programs used of a host's CPU, in percent, where too few rounds were clean. Such a row has no intervals,
    /// so that nothing is concluded from it.
    pub disturbed_percent: Option<f64>,
    /// Whether most rounds were in another regime than the one asked for ([`crate::regime`]).
    pub is_out_of_regime: bool,
    /// Why rounds are missing.
    failures: Vec<String>,
}

impl<C, R> Series<C, R> {
    pub(crate) fn new(case: C) -> Self {
        Self {
            case,
            refused: None,
            rounds: Vec::new(),
            disturbed_percent: None,
            is_out_of_regime: false,
            failures: Vec::new(),
        }
    }

    /// One value a round, as a figure.
    pub(crate) fn figure(&self, of: impl Fn(&R) -> f64) -> Option<Figure> {
        self.figure_of_some(|round| Some(of(round)))
    }

    /// The same where not every round has a value.
    pub(crate) fn figure_of_some(&self, of: impl Fn(&R) -> Option<f64>) -> Option<Figure> {
        let values: Vec<f64> = self.rounds.iter().filter_map(|(_, round)| of(round)).collect();
        Figure::of(&values).map(|figure| self.doubted(figure))
    }

    /// The figure; without its interval where too few rounds were clean.
    fn doubted(&self, figure: Figure) -> Figure {
        if self.disturbed_percent.is_some() { figure.without_its_interval() } else { figure }
    }

    /// The median of the rounds, 0 of none.
    pub(crate) fn median(&self, of: impl Fn(&R) -> f64) -> f64 {
        self.figure(of).map_or(0.0, |figure| figure.median)
    }

    /// A value over that of another method in the same round, with an interval for other runs too
    /// ([`Figure::widened_by_runs`]).
    pub(crate) fn ratio_to_method(&self, other: &Self, of: impl Fn(&R) -> f64) -> Option<Figure> {
        self.ratio_among_methods(other, 1, of)
    }

    /// The same as one of `count` comparisons of which the best is picked ([`Figure::of_one_among`]).
    pub(crate) fn ratio_among_methods(
        &self,
        other: &Self,
        count: usize,
        of: impl Fn(&R) -> f64,
    ) -> Option<Figure> {
        let figure = self.ratio_among(other, count, of)?;
        Some(if std::ptr::eq(self, other) {
            figure
        } else if self.is_out_of_regime != other.is_out_of_regime {
            // The ratio compares two regimes rather than two methods.
            figure.without_its_interval()
        } else {
            figure.widened_by_runs(count)
        })
    }

    /// A value over another row's in the same round.
    pub(crate) fn ratio_to(&self, other: &Self, of: impl Fn(&R) -> f64) -> Option<Figure> {
        self.ratio_among(other, 1, of)
    }

    /// The same as one of `count` comparisons of which the best is picked ([`Figure::of_one_among`]).
    fn ratio_among(&self, other: &Self, count: usize, of: impl Fn(&R) -> f64) -> Option<Figure> {
        let ratios: Vec<f64> = self
            .rounds
            .iter()
            .filter_map(|(number, round)| {
                let (_, same) = other.rounds.iter().find(|(other, _)| other == number)?;
                Some(of(round) / of(same))
            })
            .collect();
        let figure =
            if count > 1 { Figure::of_one_among(&ratios, count) } else { Figure::of(&ratios) };
        figure.map(|figure| other.doubted(self.doubted(figure)))
    }

    /// Why there is no figure.
    pub(crate) fn why_none(&self) -> Option<String> {
        let failure = || self.failures.last().filter(|_| self.rounds.is_empty()).cloned();
        self.refused.clone().or_else(failure)
    }
}

/// A run in the lab: the meter, and what was noticed on the way.
pub(crate) struct Run<'a> {
    pub site: Topology<'a>,
    pub meter: Meter,
    pub host: HostFacts,
    pub warnings: Vec<Warning>,
    pace: Pace,
    /// How much of a CPU others used, in percent: an entry for each round in which that was too much.
    disturbances: Vec<f64>,
    /// By how much a quiet CPU's speed changed, in percent: an entry for each round in which that was too much.
    drifts: Vec<f64>,
    /// How many windows slipped, and were measured again.
    slips: usize,
    /// How many windows were measured again because other programs ran in them.
    repeats: usize,
    /// How far apart the hosts' CPUs were, read around every row; one for each set of rows.
    distances: Vec<Distances>,
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
        Ok(Self {
            site,
            meter: Meter::start(&cpus)?,
            host: HostFacts::here(),
            warnings: site.caveats().iter().map(|caveat| Warning::new(Kind::Lab, caveat)).collect(),
            pace,
            disturbances: Vec::new(),
            drifts: Vec::new(),
            slips: 0,
            repeats: 0,
            distances: Vec::new(),
        })
    }

    /// How many steps the rounds of so many rows take.
    pub(crate) fn steps(&self, rows: usize) -> usize {
        self.pace.rounds * rows
    }

    /// Measures every row as often as the pace says. Returns whether it came to its end.
    pub(crate) fn all<S: Subject>(
        &mut self,
        subject: &mut S,
        rows: &mut [Series<S::Case, S::Round>],
        steps: &mut Steps<'_>,
    ) -> Result<bool, BenchError> {
        let mut is_complete = true;
        let mut notes = Notes::default();
        let mut number = 0;
        while number < self.pace.rounds || self.wants_more(number, rows, &notes) {
            let words = match self.round(number, subject, rows, steps, &mut notes) {
                Ok(true) => {
                    number += 1;
                    continue;
                }
                Ok(false) => "stopped before it was complete: some rows have fewer rounds".into(),
                // What was measured before is worth having.
                Err(BenchError::Pair(error)) if rows.iter().any(|row| !row.rounds.is_empty()) => {
                    format!("{error}: some rows have fewer rounds")
                }
                Err(error) => return Err(error),
            };
            self.warnings.insert(0, Warning::new(Kind::Interrupted, words));
            is_complete = false;
            break;
        }
        self.warnings.extend(notes.disturbances.keep_clean(rows, |case| subject.name(case)));
        self.warnings.extend(notes.distances.keep_one(rows));
        self.warnings.extend(regimes::keep_asked_for(
            rows,
            |round| subject.is_in_regime(round),
            |case| subject.name(case),
        ));
        self.warnings.extend(regimes::keep_one(rows, S::costs, |case| subject.name(case)));
        self.distances.push(notes.distances);
        Ok(is_complete)
    }

    /// Whether rounds are added: where a verdict was to be had, and too few rounds of some row are usable.
    fn wants_more<C, R>(&self, done: usize, rows: &[Series<C, R>], notes: &Notes) -> bool {
        self.pace.rounds >= VERDICT_ROUNDS_MIN
            && done < self.pace.rounds + ADDED_ROUNDS_MAX
            && notes.usable_rounds_min(rows).is_some_and(|usable| usable < VERDICT_ROUNDS_MIN)
    }

    /// Measures every row once, between two calibrations, in an order of each round's own, so that neither a drift nor a
    /// neighbour in time weighs on the same rows again.
    fn round<S: Subject>(
        &mut self,
        number: usize,
        subject: &mut S,
        rows: &mut [Series<S::Case, S::Round>],
        steps: &mut Steps<'_>,
        notes: &mut Notes,
    ) -> Result<bool, BenchError> {
        // What the last round ended with is what this one begins with.
        let before = match notes.quiet.take() {
            Some(quiet) => quiet,
            None => self.calibrate()?,
        };
        let mut samples = Vec::new();
        let blocks: Vec<usize> = rows.iter().map(|row| subject.block(&row.case)).collect();
        let order = order(number, &blocks);
        let (mut is_complete, mut lost) = (true, None);
        let mut apart_before = self.site.cache_line_round_trip()?;
        for index in order {
            let row = &mut rows[index];
            if !steps.go_on(&subject.name(&row.case)) {
                is_complete = false;
                break;
            }
            if row.refused.is_some() {
                continue;
            }
            let measured = self.measure(subject, &row.case);
            let apart = [apart_before, self.site.cache_line_round_trip()?];
            apart_before = apart[1];
            match measured {
                Ok(sample) => {
                    notes.disturbances.note(index, number, self.others_percent(&sample));
                    samples.push((index, sample, apart));
                }
                Err(FlowError::Refused(reason)) => row.refused = Some(reason),
                Err(FlowError::Pair(error)) => {
                    lost = Some(error);
                    break;
                }
                Err(error @ (FlowError::Lab(_) | FlowError::Soak(_))) => return Err(error.into()),
                // One bad round is no reason to lose the others.
                Err(error) => row.failures.push(error.to_string()),
            }
        }
        // Where the other machine is gone, what it looked like before has to do.
        let after = if lost.is_some() { Ok(before.clone()) } else { self.calibrate() };
        let after = after.or_else(|error| match error {
            BenchError::Pair(error) => {
                lost = Some(error);
                Ok(before.clone())
            }
            error => Err(error),
        })?;
        self.note_calibration(&before, &after);
        let quiet = before.middle(&after);
        notes.quiet = Some(after);
        for (index, sample, apart) in samples {
            if let Some(round) = self.judge(subject, &rows[index].case, &sample, &quiet) {
                rows[index].rounds.push((number, round));
                notes.distances.note(index, number, apart);
            }
        }
        lost.map_or(Ok(is_complete), |error| Err(error.into()))
    }

    /// Measures a window until it is clean: of its length, and without other programs in it. After a few tries the one that
    /// they used least of has to do.
    fn measure<S: Subject>(
        &mut self,
        subject: &mut S,
        case: &S::Case,
    ) -> Result<Sample, FlowError> {
        let mut best: Option<(f64, Sample)> = None;
        for attempt in 0..=DISTURBED_AGAIN_MAX {
            self.repeats += usize::from(attempt > 0);
            let measured = at_most_again(&mut self.slips, || subject.measure(case, &self.meter));
            let sample = match measured {
                // A window that was disturbed is better than none.
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

    /// What other programs used of a host's CPU in a window, of the host where it was more.
    fn others_percent(&self, sample: &Sample) -> f64 {
        let loads = self.site.loads(sample, &Quiet::default());
        let accounts =
            loads.iter().flat_map(|loads| [loads.sender.account, loads.receiver.account]);
        accounts.flatten().map(|account| account.others_percent).fold(0.0, f64::max)
    }

    /// Learns what quiet machines look like, both at once where there are two.
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

    fn judge<S: Subject>(
        &mut self,
        subject: &S,
        case: &S::Case,
        sample: &Sample,
        quiet: &Quiet,
    ) -> Option<S::Round> {
        let loads = self.site.loads(sample, quiet)?;
        self.host.steal_percent = self.host.steal_percent.max(loads.steal_percent);
        subject.judge(case, sample, &loads)
    }

    /// How far apart the CPUs were, where rows were kept.
    pub(crate) fn cache_line_round_trip_ns(&self) -> Option<Figure> {
        Figure::of(&self.distances.iter().flat_map(Distances::kept).collect::<Vec<_>>())
    }
}

/// What is noted of a set of rows while it is measured.
#[derive(Debug, Default)]
struct Notes {
    distances: Distances,
    disturbances: Disturbances,
    /// What quiet machines looked like after the last round.
    quiet: Option<Quiet>,
}

impl Notes {
    /// The usable rounds of the row that has fewest: without other programs, and at the distance of most.
    fn usable_rounds_min<C, R>(&self, rows: &[Series<C, R>]) -> Option<usize> {
        let is_at_one = self.distances.rounds_to_keep();
        let usable = |(index, row): (usize, &Series<C, R>)| {
            let numbers = row.rounds.iter().map(|(number, _)| *number);
            numbers
                .filter(|&number| {
                    self.disturbances.is_clean(index, number) && is_at_one(index, number)
                })
                .count()
        };
        rows.iter().enumerate().filter(|(_, row)| !row.rounds.is_empty()).map(usable).min()
    }
}

/// The order of a round: shuffled, but rows of one block stay together. The same in every run, so that runs can be compared.
fn order(number: usize, blocks: &[usize]) -> Vec<usize> {
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

/// Measures until a window has not slipped, since one that has says nothing; a few times, and counts them.
pub(crate) fn at_most_again<T>(
    slips: &mut usize,
    mut measure: impl FnMut() -> Result<T, FlowError>,
) -> Result<T, FlowError> {
    for _ in 0..SLIPPED_AGAIN_MAX {
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
        let orders: Vec<Vec<usize>> = (0..20).map(|number| order(number, &blocks)).collect();
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
        assert_eq!(order(3, &blocks), order(3, &blocks));
    }

    #[test]
    fn a_window_that_slipped_is_measured_again_and_a_machine_that_is_always_late_given_up() {
        for (late, again, is_measured) in
            [(0, 0, true), (1, 1, true), (9, 9, true), (10, 9, false), (30, 9, false)]
        {
            let (mut slips, mut calls) = (0, 0);
            let measured = at_most_again(&mut slips, || {
                calls += 1;
                if calls > late { Ok(calls) } else { Err(FlowError::Slipped { seconds: 1.0 }) }
            });
            assert_eq!((slips, measured.is_ok()), (again, is_measured), "{late} late");
        }
        let mut slips = 0;
        let failed = at_most_again(&mut slips, || Err::<(), _>(FlowError::Refused("no".into())));
        assert!(slips == 0 && failed.is_err(), "another failure is not tried again");
    }
}
