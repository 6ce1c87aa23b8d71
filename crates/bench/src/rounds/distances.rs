//! The distance between the hosts' CPUs while each row was measured, and the rounds that can be
//! compared.
//!
//! A hypervisor moves a guest's CPUs between core complexes within seconds, which doubles or halves
//! the cost of a copy (docs/measurements/cpu-distance.md). A median over both distances would
//! describe neither. So if a run has seen both, a row keeps the rounds at the majority's distance,
//! if it has enough of them.

use super::Series;
use crate::stats::Estimate;
use crate::warning::{Kind, Warning};
use std::collections::HashMap;
use std::time::Duration;

/// The smallest factor between two distances that shows that a CPU was moved. Readings at one
/// distance differ by a tenth.
pub(crate) const MOVED_FACTOR_MIN: f64 = 2.0;
/// The fewest rounds at the majority's distance. A row with fewer keeps all its rounds.
const ROUNDS_MIN: usize = 2;

/// The distances between the two hosts' CPUs in a run: round trips of a cache line, in ns.
#[derive(Debug, Default)]
pub(super) struct CpuDistances {
    /// By row and round: the readings before and after, in ns; empty if a reading failed.
    readings: HashMap<(usize, usize), Vec<f64>>,
    /// The threshold between near and far, and whether the far rounds were kept.
    kept: Option<(f64, bool)>,
}

impl CpuDistances {
    pub(super) fn record(&mut self, row: usize, round: usize, round_trips: [Option<Duration>; 2]) {
        let ns = round_trips.into_iter().flatten().map(|time| time.as_nanos() as f64).collect();
        self.readings.insert((row, round), ns);
    }

    /// The nearest and the farthest reading, the threshold between them, and whether most rounds
    /// were far. `None` if all rounds had one distance.
    fn majority(&self) -> Option<Majority> {
        let mut all: Vec<f64> = self.readings.values().flatten().copied().collect();
        all.sort_by(f64::total_cmp);
        // Up to one reading in ten may be an outlier.
        let outliers = all.len() / 10;
        let (near, far) = (*all.get(outliers)?, *all.get(all.len().checked_sub(outliers + 1)?)?);
        if far < MOVED_FACTOR_MIN * near {
            return None;
        }
        let threshold = (near * far).sqrt();
        let count = |is_far| {
            let readings = self.readings.values();
            readings.filter(|readings| is_on_side(readings, threshold, is_far)).count()
        };
        Some(Majority { near, far, threshold, is_far: count(true) > count(false) })
    }

    /// Returns the side of the threshold on which a row's round was measured: whether the CPUs were
    /// far apart. `None` if the distance changed during the round.
    pub(super) fn sides(&self) -> impl Fn(usize, usize) -> Option<bool> {
        let majority = self.majority();
        move |row, round| {
            let Some(Majority { threshold, .. }) = &majority else { return Some(false) };
            let readings = self.readings.get(&(row, round))?;
            [true, false].into_iter().find(|&is_far| is_on_side(readings, *threshold, is_far))
        }
    }

    /// Removes rounds that were measured while the distance changed, and sets those at another
    /// distance than the majority aside for ratios. Returns a warning about it.
    pub(super) fn keep_majority<C, R>(&mut self, rows: &mut [Series<C, R>]) -> Option<Warning> {
        let Majority { near, far, threshold, is_far } = self.majority()?;
        let (mut total, mut left_out, mut rows_kept_whole) = (0, 0, 0);
        for (index, row) in rows.iter_mut().enumerate().filter(|(_, row)| !row.rounds.is_empty()) {
            let is_kept = |number: usize| {
                self.readings
                    .get(&(index, number))
                    .is_some_and(|readings| is_on_side(readings, threshold, is_far))
            };
            total += row.rounds.len();
            if row.rounds.iter().filter(|(number, _)| is_kept(*number)).count() < ROUNDS_MIN {
                rows_kept_whole += 1;
                continue;
            }
            let is_at_other = |number: usize| {
                self.readings
                    .get(&(index, number))
                    .is_some_and(|readings| is_on_side(readings, threshold, !is_far))
            };
            let before = row.rounds.len();
            let (kept, others): (Vec<_>, Vec<_>) =
                row.rounds.drain(..).partition(|(number, _)| is_kept(*number));
            row.rounds = kept;
            row.rounds_at_other_distance =
                others.into_iter().filter(|(number, _)| is_at_other(*number)).collect();
            left_out += before - row.rounds.len();
        }
        self.kept = Some((threshold, is_far));
        let kept = Estimate::of(&self.kept().collect::<Vec<_>>());
        let kept_ns = kept.map_or(0.0, |estimate| estimate.median);
        let rest = if rows_kept_whole > 0 {
            format!("; {rows_kept_whole} rows had too few of those and keep all")
        } else {
            String::new()
        };
        Some(Warning::new(
            Kind::Moved,
            format!(
                "the CPUs were not always equally far apart (a hypervisor moves them): a cache \
                 line went from one to the other and back in {near:.0} to {far:.0} ns, which \
                 changes what copies cost; costs are those at {kept_ns:.0} ns, and {left_out} of \
                 {total} row measurements at another distance count only for ratios, or not at all \
                 if it changed meanwhile{rest}"
            ),
        ))
    }

    /// The readings at the kept distance, in ns.
    pub(super) fn kept(&self) -> impl Iterator<Item = f64> {
        let is_kept =
            |ns: &f64| self.kept.is_none_or(|(threshold, is_far)| (*ns > threshold) == is_far);
        self.readings.values().flatten().copied().filter(is_kept)
    }
}

/// The distance at which most rounds were measured, in ns.
struct Majority {
    near: f64,
    far: f64,
    threshold: f64,
    is_far: bool,
}

/// Whether all readings are on one side of the threshold.
fn is_on_side(readings: &[f64], threshold: f64, is_far: bool) -> bool {
    !readings.is_empty() && readings.iter().all(|&ns| (ns > threshold) == is_far)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rounds: usize) -> Vec<Series<(), usize>> {
        let mut row = Series::new(());
        row.rounds = (0..rounds).map(|number| (number, number)).collect();
        vec![row]
    }

    fn record(distances: &mut CpuDistances, round: usize, before: u64, after: u64) {
        distances.record(0, round, [before, after].map(|ns| Some(Duration::from_nanos(ns))));
    }

    #[test]
    fn rounds_at_the_majority_distance_are_kept() {
        let (mut distances, mut rows) = (CpuDistances::default(), rows(5));
        for (round, before, after) in
            [(0, 60, 55), (1, 60, 310), (2, 300, 310), (3, 300, 320), (4, 305, 300)]
        {
            record(&mut distances, round, before, after);
        }
        let warning = distances.keep_majority(&mut rows).unwrap();
        assert_eq!(rows[0].rounds.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2, 3, 4]);
        // Round 0 was near, and in round 1 the CPUs were moved.
        assert_eq!(rows[0].rounds_at_other_distance, [(0, 0)]);
        assert!(warning.detail.contains("2 of 5"), "{}", warning.detail);
        assert!(distances.kept().all(|ns| ns > 290.0));
    }

    #[test]
    fn without_a_move_or_with_one_round_at_each_distance_all_rounds_are_kept() {
        let (mut distances, mut kept_rows) = (CpuDistances::default(), rows(2));
        record(&mut distances, 0, 60, 55);
        record(&mut distances, 1, 50, 90);
        assert_eq!(distances.keep_majority(&mut kept_rows), None);
        assert_eq!(kept_rows[0].rounds.len(), 2);
        let (mut distances, mut kept_rows) = (CpuDistances::default(), rows(2));
        record(&mut distances, 0, 60, 55);
        record(&mut distances, 1, 300, 310);
        // One round at each distance: neither is enough.
        assert!(distances.keep_majority(&mut kept_rows).is_some());
        assert_eq!(kept_rows[0].rounds.len(), 2);
    }
}
