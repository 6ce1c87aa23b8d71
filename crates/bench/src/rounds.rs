//! Rows measured round by round, interleaved, so that a drift hits all alike.

use crate::flow::{FlowError, Sample};
use crate::site::{HostLoad, Loads, Quiet, Site};
use crate::stats::Figure;
use crate::warning::{Kind, Warning};
use crate::{BenchError, HostFacts, MIB};
use haul_lab::CpuPair;
use haul_soak::Meter;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

mod distances;
mod warnings;

use distances::Distances;
pub(crate) use warnings::{LOW_LOAD_PERCENT, list, too_few_rounds, unsteady};

/// How long the machine is kept quiet before and after each round to calibrate the meter.
pub(crate) const CALIBRATION: Duration = Duration::from_millis(150);
/// Fewer rounds than this make no interval.
pub(crate) const ROUNDS_ENOUGH: usize = 5;
/// How often a window is measured again that slipped.
const AGAIN_MAX: usize = 2;
/// The most rounds that make sense.
const ROUNDS_MAX: usize = 1000;

/// How often and how long to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// How often each row is measured.
    pub rounds: usize,
    /// How long each row is measured in each round.
    pub window: Duration,
}

impl Pace {
    /// Seven rounds.
    pub const FULL: Self = Self { rounds: 7, window: Duration::from_millis(150) };
    /// A quick look: three short rounds.
    pub const QUICK: Self = Self { rounds: 3, window: Duration::from_millis(100) };

    pub(crate) fn check(self) -> Result<(), BenchError> {
        if (1..=ROUNDS_MAX).contains(&self.rounds) {
            return Ok(());
        }
        Err(BenchError::BadInput(format!("rounds must be 1 to {ROUNDS_MAX}, not {}", self.rounds)))
    }
}

/// How far a run has come.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Rows measured, counting each round.
    pub done: usize,
    /// How many there will be.
    pub total: usize,
    /// What is measured next.
    pub next: String,
}

/// Tells how far a run has come, and asks whether it is to go on.
pub(crate) struct Steps<'a> {
    done: usize,
    total: usize,
    is_stopped: &'a AtomicBool,
    tell: &'a mut dyn FnMut(Progress),
}

impl<'a> Steps<'a> {
    pub(crate) fn new(total: usize, is_stopped: &'a AtomicBool, tell: &'a mut dyn FnMut(Progress)) -> Self {
        Self { done: 0, total, is_stopped, tell }
    }

    /// Says what comes next; returns whether to do it.
    pub(crate) fn go_on(&mut self, next: &str) -> bool {
        (self.tell)(Progress { done: self.done, total: self.total, next: next.into() });
        self.done += 1;
        !self.is_stopped.load(Relaxed)
    }
}

/// What an experiment measures, a row at a time.
pub(crate) trait Subject {
    /// What tells a row from the others.
    type Cell;
    /// What one round of a row comes to.
    type Round;

    /// What the row is called while it is measured.
    fn name(&self, cell: &Self::Cell) -> String;
    /// Measures a row once.
    fn measure(&mut self, cell: &Self::Cell, meter: &Meter) -> Result<Sample, FlowError>;
    /// Turns counters into costs; `None` where they say nothing.
    fn judge(&self, cell: &Self::Cell, sample: &Sample, loads: &Loads) -> Option<Self::Round>;
}

/// A row and what was measured of it. Rounds carry their number, so that those of different rows can be put
/// side by side though one has failed.
#[derive(Debug)]
pub(crate) struct Series<C, R> {
    pub cell: C,
    /// Why nothing was measured, and never will be here.
    pub refused: Option<String>,
    pub rounds: Vec<(usize, R)>,
    /// Why rounds are missing.
    failures: Vec<String>,
}

impl<C, R> Series<C, R> {
    pub(crate) fn new(cell: C) -> Self {
        Self { cell, refused: None, rounds: Vec::new(), failures: Vec::new() }
    }

    /// One value a round, as a figure.
    pub(crate) fn figure(&self, of: impl Fn(&R) -> f64) -> Option<Figure> {
        Figure::of(&self.rounds.iter().map(|(_, round)| of(round)).collect::<Vec<_>>())
    }

    /// The same where not every round has a value.
    pub(crate) fn figure_of_some(&self, of: impl Fn(&R) -> Option<f64>) -> Option<Figure> {
        Figure::of(&self.rounds.iter().filter_map(|(_, round)| of(round)).collect::<Vec<_>>())
    }

    /// The median of the rounds, 0 of none.
    pub(crate) fn median(&self, of: impl Fn(&R) -> f64) -> f64 {
        self.figure(of).map_or(0.0, |figure| figure.median)
    }

    /// A value over another row's in the same round.
    pub(crate) fn ratio_to(&self, other: &Self, of: impl Fn(&R) -> f64) -> Option<Figure> {
        let ratios: Vec<f64> = self
            .rounds
            .iter()
            .filter_map(|(number, round)| {
                let (_, same) = other.rounds.iter().find(|(other, _)| other == number)?;
                Some(of(round) / of(same))
            })
            .collect();
        Figure::of(&ratios)
    }

    /// Why there is no figure.
    pub(crate) fn why_none(&self) -> Option<String> {
        let failure = || self.failures.last().filter(|_| self.rounds.is_empty()).cloned();
        self.refused.clone().or_else(failure)
    }
}

/// What both hosts paid for what was moved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    pub bytes_per_second: f64,
    pub sender: HostLoad,
    pub receiver: HostLoad,
    pub sender_us_per_mib: f64,
    pub receiver_us_per_mib: f64,
}

impl Costs {
    /// From the loads of a window in which so much was moved; `None` where nothing was.
    pub(crate) fn of(loads: &Loads, bytes_per_second: f64) -> Option<Self> {
        let Loads { sender, receiver, .. } = *loads;
        // Rates, not sums: each process has a window by its own clock.
        let us_per_mib = |host: &HostLoad| host.load_percent / 100.0 * 1e6 / (bytes_per_second / MIB);
        (bytes_per_second > 0.0).then(|| Self {
            bytes_per_second,
            sender_us_per_mib: us_per_mib(&sender),
            receiver_us_per_mib: us_per_mib(&receiver),
            sender,
            receiver,
        })
    }
}

/// A run in the lab: the meter, and what was noticed on the way.
pub(crate) struct Run<'a> {
    pub site: Site<'a>,
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
    /// How far apart the hosts' CPUs were, read around every row; one for each set of rows.
    distances: Vec<Distances>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(site: impl Into<Site<'a>>, pace: Pace) -> Result<Self, BenchError> {
        let site = site.into();
        let mut cpus = match site.cpus() {
            Some(CpuPair { sender, receiver }) => vec![sender, receiver],
            None => haul_lab::allowed_cpus().map_err(FlowError::at("asking for this process's CPUs"))?,
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
        rows: &mut [Series<S::Cell, S::Round>],
        steps: &mut Steps<'_>,
    ) -> Result<bool, BenchError> {
        let mut is_complete = true;
        let mut distances = Distances::default();
        for number in 0..self.pace.rounds {
            let words = match self.round(number, subject, rows, steps, &mut distances) {
                Ok(true) => continue,
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
        self.warnings.extend(distances.keep_one(rows));
        self.distances.push(distances);
        Ok(is_complete)
    }

    /// Measures every row once, between two calibrations. Every other round runs backwards, so that a
    /// drift within a round weighs on no row twice.
    fn round<S: Subject>(
        &mut self,
        number: usize,
        subject: &mut S,
        rows: &mut [Series<S::Cell, S::Round>],
        steps: &mut Steps<'_>,
        distances: &mut Distances,
    ) -> Result<bool, BenchError> {
        let before = self.calibrate()?;
        let mut samples = Vec::new();
        let mut order: Vec<usize> = (0..rows.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        let (mut is_complete, mut lost) = (true, None);
        let mut apart_before = self.site.cache_line_round_trip()?;
        for index in order {
            let row = &mut rows[index];
            if !steps.go_on(&subject.name(&row.cell)) {
                is_complete = false;
                break;
            }
            if row.refused.is_some() {
                continue;
            }
            let measured = at_most_again(&mut self.slips, || subject.measure(&row.cell, &self.meter));
            let apart = [apart_before, self.site.cache_line_round_trip()?];
            apart_before = apart[1];
            match measured {
                Ok(sample) => samples.push((index, sample, apart)),
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
        for (index, sample, apart) in samples {
            if let Some(round) = self.judge(subject, &rows[index].cell, &sample, &quiet) {
                rows[index].rounds.push((number, round));
                distances.note(index, number, apart);
            }
        }
        lost.map_or(Ok(is_complete), |error| Err(error.into()))
    }

    /// Learns what quiet machines look like, both at once where there are two.
    fn calibrate(&self) -> Result<Quiet, BenchError> {
        let Some(pair) = self.site.pair() else {
            return Ok(Quiet { here: self.meter.calibrate(CALIBRATION), ..Quiet::default() });
        };
        pair.begin_calibration(CALIBRATION)?;
        let here = self.meter.calibrate(CALIBRATION);
        Ok(Quiet { here, there: pair.calibration()? })
    }

    fn judge<S: Subject>(
        &mut self,
        subject: &S,
        cell: &S::Cell,
        sample: &Sample,
        quiet: &Quiet,
    ) -> Option<S::Round> {
        let loads = self.site.loads(sample, quiet)?;
        self.host.steal_percent = self.host.steal_percent.max(loads.steal_percent);
        subject.judge(cell, sample, &loads)
    }

    /// How far apart the CPUs were, where rows were kept.
    pub(crate) fn cache_line_round_trip_ns(&self) -> Option<Figure> {
        Figure::of(&self.distances.iter().flat_map(Distances::kept).collect::<Vec<_>>())
    }
}

/// Measures until a window has not slipped, since one that has says nothing; a few times, and counts them.
fn at_most_again<T>(
    slips: &mut usize,
    mut measure: impl FnMut() -> Result<T, FlowError>,
) -> Result<T, FlowError> {
    for _ in 0..AGAIN_MAX {
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
    fn a_window_that_slipped_is_measured_again_and_a_machine_that_is_always_late_given_up() {
        for (late, again, is_measured) in
            [(0, 0, true), (1, 1, true), (2, 2, true), (3, 2, false), (9, 2, false)]
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
