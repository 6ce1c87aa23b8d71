//! How far apart the hosts' CPUs were while each row was measured, and which rounds can be compared.
//!
//! A hypervisor moves a guest's CPUs between core complexes within seconds, and a copy then costs twice as much or half
//! (docs/findings.md). A median over both would be a figure of neither. So where a run has seen both, a row keeps the
//! rounds at the distance that most were measured at, if it has enough of them.

use super::Series;
use crate::stats::Figure;
use crate::warning::{Kind, Warning};
use std::collections::HashMap;
use std::time::Duration;

/// CPUs whose distance changes by this factor were moved: readings in one place differ by a tenth.
pub(crate) const MOVED: f64 = 2.0;
/// A row with fewer rounds at the one distance keeps all it has.
const ROUNDS_MIN: usize = 2;

/// The readings of a run.
#[derive(Debug, Default)]
pub(super) struct Distances {
    /// By row and round: before it and after, in ns; none where a reading failed.
    readings: HashMap<(usize, usize), Vec<f64>>,
    /// What lies between near and far, and which of them was kept.
    kept: Option<(f64, bool)>,
}

impl Distances {
    pub(super) fn note(&mut self, row: usize, round: usize, apart: [Option<Duration>; 2]) {
        let ns = apart.into_iter().flatten().map(|time| time.as_nanos() as f64).collect();
        self.readings.insert((row, round), ns);
    }

    /// The nearest and the farthest reading, what lies between, and whether most rounds were far; `None` where all were at one
    /// distance.
    fn majority(&self) -> Option<Majority> {
        let mut all: Vec<f64> = self.readings.values().flatten().copied().collect();
        all.sort_by(f64::total_cmp);
        // One reading in ten may be a stray.
        let stray = all.len() / 10;
        let (near, far) = (*all.get(stray)?, *all.get(all.len().checked_sub(stray + 1)?)?);
        if far < MOVED * near {
            return None;
        }
        let middle = (near * far).sqrt();
        let count = |is_far| {
            self.readings.values().filter(|readings| is_at(readings, middle, is_far)).count()
        };
        Some(Majority { near, far, middle, is_far: count(true) > count(false) })
    }

    /// Tells of a row and a round whether it was measured at the distance of most.
    pub(super) fn rounds_to_keep(&self) -> impl Fn(usize, usize) -> bool {
        let majority = self.majority();
        move |row, round| {
            let readings = self.readings.get(&(row, round));
            majority.as_ref().is_none_or(|Majority { middle, is_far, .. }| {
                readings.is_some_and(|readings| is_at(readings, *middle, *is_far))
            })
        }
    }

    /// Leaves out rounds that were measured at another distance than most, or while it changed; says what was done.
    pub(super) fn keep_one<C, R>(&mut self, rows: &mut [Series<C, R>]) -> Option<Warning> {
        let Majority { near, far, middle, is_far } = self.majority()?;
        let (mut total, mut left_out, mut mixed) = (0, 0, 0);
        for (index, row) in rows.iter_mut().enumerate().filter(|(_, row)| !row.rounds.is_empty()) {
            let is_kept = |number: usize| {
                self.readings
                    .get(&(index, number))
                    .is_some_and(|readings| is_at(readings, middle, is_far))
            };
            total += row.rounds.len();
            if row.rounds.iter().filter(|(number, _)| is_kept(*number)).count() < ROUNDS_MIN {
                mixed += 1;
                continue;
            }
            let before = row.rounds.len();
            row.rounds.retain(|(number, _)| is_kept(*number));
            left_out += before - row.rounds.len();
        }
        self.kept = Some((middle, is_far));
        let here = Figure::of(&self.kept().collect::<Vec<_>>()).map_or(0.0, |figure| figure.median);
        let rest = if mixed > 0 {
            format!("; {mixed} rows had too few of those and keep all")
        } else {
            String::new()
        };
        Some(Warning::new(
            Kind::Moved,
            format!(
                "the CPUs were not always equally far apart (a hypervisor moves them): a cache line went from one to the other and back in {near:.0} to {far:.0} ns, which changes what copies cost; rounds at {here:.0} ns are kept, {left_out} of {total} row measurements at another distance are left out{rest}"
            ),
        ))
    }

    /// The readings that belong to what was kept, in ns.
    pub(super) fn kept(&self) -> impl Iterator<Item = f64> {
        let is_kept = |ns: &f64| self.kept.is_none_or(|(middle, is_far)| (*ns > middle) == is_far);
        self.readings.values().flatten().copied().filter(is_kept)
    }
}

/// The distance that most rounds were measured at, in ns.
struct Majority {
    near: f64,
    far: f64,
    middle: f64,
    is_far: bool,
}

/// Whether all readings are on one side.
fn is_at(readings: &[f64], middle: f64, is_far: bool) -> bool {
    !readings.is_empty() && readings.iter().all(|&ns| (ns > middle) == is_far)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rounds: usize) -> Vec<Series<(), usize>> {
        let mut row = Series::new(());
        row.rounds = (0..rounds).map(|number| (number, number)).collect();
        vec![row]
    }

    fn note(distances: &mut Distances, round: usize, before: u64, after: u64) {
        distances.note(0, round, [before, after].map(|ns| Some(Duration::from_nanos(ns))));
    }

    #[test]
    fn rounds_at_the_distance_of_most_are_kept() {
        let (mut distances, mut rows) = (Distances::default(), rows(5));
        for (round, before, after) in
            [(0, 60, 55), (1, 60, 310), (2, 300, 310), (3, 300, 320), (4, 305, 300)]
        {
            note(&mut distances, round, before, after);
        }
        let warning = distances.keep_one(&mut rows).unwrap();
        assert_eq!(rows[0].rounds.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2, 3, 4]);
        assert!(warning.detail.contains("2 of 5"), "{}", warning.detail);
        assert!(distances.kept().all(|ns| ns > 290.0));
    }

    #[test]
    fn a_machine_that_stays_put_keeps_all_and_one_round_is_not_enough() {
        let (mut distances, mut rows_) = (Distances::default(), rows(2));
        note(&mut distances, 0, 60, 55);
        note(&mut distances, 1, 50, 90);
        assert_eq!(distances.keep_one(&mut rows_), None);
        assert_eq!(rows_[0].rounds.len(), 2);
        let (mut distances, mut rows_) = (Distances::default(), rows(2));
        note(&mut distances, 0, 60, 55);
        note(&mut distances, 1, 300, 310);
        // One round at each: neither is enough.
        assert!(distances.keep_one(&mut rows_).is_some());
        assert_eq!(rows_[0].rounds.len(), 2);
    }
}
