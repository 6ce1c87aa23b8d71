//! Other programs that ran on a host's CPU while a row was measured, and the rounds that can be
//! used.
//!
//! Their time is not attributed to the row. But they evict its cache lines, delay its packets and
//! change how many packets share an interrupt. So disturbed rounds are left out if enough others
//! remain; else the row is marked as disturbed.

use super::Series;
use crate::rounds::short_list;
use crate::stats::VERDICT_ROUNDS_MIN;
use crate::warning::{Kind, Warning};
use std::collections::HashMap;

/// The largest CPU use of other programs in an undisturbed window, in percent: about twice the CPU
/// use of an idle machine's services.
pub(crate) const OTHERS_PERCENT_MAX: f64 = 3.0;
/// The largest CPU use of other programs on one of two machines, in percent of all its CPUs, that
/// is subtracted from a row's load without a mark.
pub(super) const BACKGROUND_PERCENT_MAX: f64 = 10.0;
/// CPU use of other programs on one of two machines, in percent, above which the cost of a row is
/// unknown. Less CPU time is left than the row would use, so the difference of two loads is too
/// small.
pub(super) const UNKNOWN_BACKGROUND_PERCENT_MIN: f64 = 50.0;
/// The fewest undisturbed rounds. A row with fewer keeps all its rounds and is marked.
const ROUNDS_MIN: usize = 3;

/// CPU use of other programs, in percent, by row and round.
#[derive(Debug, Default)]
pub(super) struct Disturbances(HashMap<(usize, usize), f64>);

impl Disturbances {
    pub(super) fn record(&mut self, row: usize, round: usize, others_percent: f64) {
        self.0.insert((row, round), others_percent);
    }

    /// Records the use by other programs of one of two machines, in percent of all its CPUs.
    pub(super) fn record_background(&mut self, row: usize, round: usize, percent: f64) {
        let others_percent = if percent > BACKGROUND_PERCENT_MAX { percent } else { 0.0 };
        self.record(row, round, others_percent);
    }

    pub(super) fn is_undisturbed(&self, row: usize, round: usize) -> bool {
        self.0.get(&(row, round)).is_none_or(|&percent| percent <= OTHERS_PERCENT_MAX)
    }

    /// The median use by other programs over the rounds of a row that were disturbed.
    fn median_of(&self, row: usize) -> Option<f64> {
        let of_row =
            self.0.iter().filter(|((index, _), _)| *index == row).map(|(_, &percent)| percent);
        let disturbed: Vec<f64> = of_row.filter(|&percent| percent > OTHERS_PERCENT_MAX).collect();
        crate::stats::Estimate::of(&disturbed).map(|estimate| estimate.median)
    }

    fn clean_rounds<C, R>(&self, index: usize, row: &Series<C, R>) -> usize {
        row.rounds.iter().filter(|(number, _)| self.is_undisturbed(index, *number)).count()
    }

    /// Removes disturbed rounds, or marks the row as disturbed. Returns warnings about both.
    pub(super) fn keep_clean<C, R>(
        &self,
        rows: &mut [Series<C, R>],
        name: impl Fn(&C) -> String,
    ) -> Vec<Warning> {
        let (mut left_out, mut worst, mut marked) = (0, 0.0f64, Vec::new());
        for (index, row) in rows.iter_mut().enumerate() {
            let clean = self.clean_rounds(index, row);
            let disturbed = row.rounds.len() - clean;
            let percents =
                row.rounds.iter().filter_map(|(number, _)| self.0.get(&(index, *number)).copied());
            let percents: Vec<f64> =
                percents.filter(|&percent| percent > OTHERS_PERCENT_MAX).collect();
            worst = percents.iter().copied().fold(worst, f64::max);
            if row.rounds.is_empty() {
                row.disturbed_percent = self.median_of(index);
            }
            if disturbed > 0 && clean >= ROUNDS_MIN.min(row.rounds.len()) {
                row.rounds.retain(|(number, _)| self.is_undisturbed(index, *number));
                left_out += disturbed;
            } else if disturbed > 0 {
                row.disturbed_percent =
                    crate::stats::Estimate::of(&percents).map(|estimate| estimate.median);
                marked.push(name(&row.case));
            }
        }
        let mut warnings = Vec::new();
        if left_out > 0 {
            let detail = format!(
                "other programs used up to {worst:.0} % of a host's CPU in a window; {left_out} \
                 row measurements are left out (a verdict takes {VERDICT_ROUNDS_MIN} that remain)"
            );
            warnings.push(Warning::new(Kind::Disturbed, detail));
        }
        if !marked.is_empty() {
            let detail = format!(
                "other programs used up to {worst:.0} % of a host's CPU in too many windows to \
                 measure {}: these rows have no intervals and support no verdict. Stop the other \
                 programs, or measure with more rounds",
                short_list(&marked)
            );
            warnings.push(Warning::new(Kind::Disturbed, detail));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rounds: usize) -> Vec<Series<&'static str, f64>> {
        let mut row = Series::new("sendfile");
        row.rounds = (0..rounds).map(|number| (number, number as f64)).collect();
        vec![row]
    }

    #[test]
    fn disturbed_rounds_are_left_out_if_enough_remain() {
        let (mut disturbances, mut rows) = (Disturbances::default(), rows(10));
        for round in 0..10 {
            disturbances.record(0, round, if round < 3 { 30.0 } else { 0.4 });
        }
        let warnings = disturbances.keep_clean(&mut rows, |name| (*name).into());
        assert_eq!(
            rows[0].rounds.iter().map(|(number, _)| *number).collect::<Vec<_>>(),
            [3, 4, 5, 6, 7, 8, 9]
        );
        assert_eq!(rows[0].disturbed_percent, None);
        assert!(
            warnings.len() == 1 && warnings[0].detail.contains("3 row measurements"),
            "{warnings:?}"
        );
    }

    #[test]
    fn a_row_with_too_few_undisturbed_rounds_is_marked_and_has_no_interval() {
        let (mut disturbances, mut rows) = (Disturbances::default(), rows(10));
        for round in 0..10 {
            disturbances.record(0, round, if round < 2 { 0.1 } else { 31.0 });
        }
        let warnings = disturbances.keep_clean(&mut rows, |name| (*name).into());
        assert!(warnings.len() == 1 && warnings[0].detail.contains("sendfile"), "{warnings:?}");
        assert_eq!(rows[0].rounds.len(), 10);
        assert_eq!(rows[0].disturbed_percent, Some(31.0));
        assert!(!rows[0].estimate(|value| *value).unwrap().has_interval());
        assert!(!rows[0].ratio_to(&rows[0], |value| *value + 1.0).unwrap().has_interval());
    }

    #[test]
    fn a_round_without_a_cost_marks_only_a_row_without_others() {
        let (mut disturbances, mut measured) = (Disturbances::default(), rows(9));
        disturbances.record_background(0, 9, 60.0);
        disturbances.keep_clean(&mut measured, |name| (*name).into());
        assert_eq!(measured[0].disturbed_percent, None);
        let mut unmeasured = rows(0);
        disturbances.keep_clean(&mut unmeasured, |name| (*name).into());
        assert_eq!(unmeasured[0].disturbed_percent, Some(60.0));
    }

    #[test]
    fn an_idle_machine_keeps_all_rounds_without_a_warning() {
        let (mut disturbances, mut rows) = (Disturbances::default(), rows(9));
        (0..9).for_each(|round| disturbances.record(0, round, 1.0));
        assert!(disturbances.keep_clean(&mut rows, |name| (*name).into()).is_empty());
        assert_eq!(rows[0].rounds.len(), 9);
    }
}
