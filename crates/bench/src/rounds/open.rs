//! The rows that need more rounds, because their questions are still open.
//!
//! A question compares the rows of one group. It is closed for a row whose ratio to the cheapest
//! one is known precisely enough, and for a row of several that is shown to cost more. The cheapest
//! row and the baseline are measured with the open ones, because ratios pair the rows of one round.

use super::{Experiment, Series};
use crate::stats::Estimate;

/// The part of a row in a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// The question. Rows of equal questions are compared.
    pub question: String,
    /// Whether the others are compared with this row.
    pub is_baseline: bool,
}

/// The rows that take part in one question.
#[derive(Debug, Default)]
pub(super) struct OpenQuestion {
    name: String,
    entries: Vec<Entry>,
}

/// The questions of an experiment, with the usable rounds of their rows. `side` returns at which
/// distance of the CPUs a row's round was measured, if it is usable.
pub(super) fn questions<S: Experiment>(
    experiment: &S,
    rows: &[Series<S::Case, S::Round>],
    side: impl Fn(usize, usize) -> Option<bool>,
) -> Vec<OpenQuestion> {
    let mut questions: Vec<OpenQuestion> = Vec::new();
    for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.refused.is_none()) {
        let Some(part) = experiment.part(&row.case) else { continue };
        let cost = |(number, round): &(usize, S::Round)| {
            let is_far = side(index, *number)?;
            Some(((*number, is_far), S::compared_cost(round)))
        };
        let costs = row.rounds.iter().filter_map(cost).collect();
        let is_baseline = part.is_baseline;
        let rounds = row.rounds.len() + row.failures.len();
        let entry = Entry { index, is_baseline, rounds, costs };
        match questions.iter_mut().find(|question| question.name == part.question) {
            Some(question) => question.entries.push(entry),
            None => {
                questions.push(OpenQuestion { name: part.question, entries: vec![entry] });
            }
        }
    }
    questions
}

/// The rows of the questions of which a row has fewer than `pairs` usable rounds in common with its
/// baseline; empty if none has. A row that was measured `rounds_max` times is given up.
pub(super) fn rows_that_lack_pairs(
    questions: &[OpenQuestion],
    pairs: usize,
    rounds_max: usize,
) -> Vec<usize> {
    let lacks = |question: &&OpenQuestion| {
        let baseline = question.entries.iter().find(|entry| entry.is_baseline);
        question.entries.iter().any(|entry| {
            let common = baseline.map_or(entry.costs.len(), |baseline| entry.pairs(baseline));
            common < pairs && entry.rounds < rounds_max
        })
    };
    sorted(questions.iter().filter(lacks).flat_map(OpenQuestion::indices))
}

/// The rows of no question that have fewer than `rounds` rounds.
pub(super) fn rows_that_lack_rounds<C, R>(
    rows: &[Series<C, R>],
    questions: &[OpenQuestion],
    rounds: usize,
) -> Vec<usize> {
    let asked = sorted(questions.iter().flat_map(OpenQuestion::indices));
    let lacks = |(index, row): &(usize, &Series<C, R>)| {
        let attempts = row.rounds.len() + row.failures.len();
        row.refused.is_none() && attempts < rounds && !asked.contains(index)
    };
    rows.iter().enumerate().filter(lacks).map(|(index, _)| index).collect()
}

/// The rows of open questions; empty if every question is closed. `precision` is half the width of
/// a sufficiently narrow interval, as a share of the ratio.
pub(super) fn rows(questions: &[OpenQuestion], precision: f64) -> Vec<usize> {
    sorted(questions.iter().flat_map(|question| open_entries(&question.entries, precision)))
}

fn sorted(indices: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut indices: Vec<usize> = indices.collect();
    indices.sort_unstable();
    indices.dedup();
    indices
}

impl OpenQuestion {
    fn indices(&self) -> impl Iterator<Item = usize> {
        self.entries.iter().map(|entry| entry.index)
    }
}

/// A row of a question.
#[derive(Debug)]
struct Entry {
    index: usize,
    is_baseline: bool,
    /// The number of all rounds, usable or not, and of the failed ones.
    rounds: usize,
    /// The number of each usable round with the distance of the CPUs, and the row's cost in it.
    costs: Vec<((usize, bool), f64)>,
}

impl Entry {
    fn median(&self) -> f64 {
        let costs: Vec<f64> = self.costs.iter().map(|(_, cost)| *cost).collect();
        Estimate::of(&costs).map_or(f64::INFINITY, |estimate| estimate.median)
    }

    /// The costs of the rounds that both rows have, divided by the other's.
    fn ratios(&self, other: &Self) -> Vec<f64> {
        let ratio = |(round, cost): &((usize, bool), f64)| {
            let (_, same) = other.costs.iter().find(|(other, _)| other == round)?;
            Some(cost / same)
        };
        self.costs.iter().filter_map(ratio).collect()
    }

    fn pairs(&self, other: &Self) -> usize {
        self.ratios(other).len()
    }

    fn ratio_to(&self, other: &Self) -> Option<Estimate> {
        Estimate::of(&self.ratios(other))
    }
}

fn open_entries(entries: &[Entry], precision: f64) -> Vec<usize> {
    let cheapest = entries.iter().min_by(|one, other| one.median().total_cmp(&other.median()));
    let Some(cheapest) = cheapest.filter(|cheapest| cheapest.median().is_finite()) else {
        return Vec::new();
    };
    let is_open = |entry: &&Entry| {
        let is_wide = |ratio: Estimate| !ratio.is_conclusive() || ratio.spread() > precision;
        // The saving over the baseline has to be precise even if it is certain, and so does the
        // ratio of the only two rows.
        let is_one_of_several = entries.len() > 2 && !entry.is_baseline;
        let is_closed = |ratio: Estimate| ratio.is_above(1.0) && is_one_of_several;
        entry.index != cheapest.index
            && entry.ratio_to(cheapest).is_none_or(|ratio| is_wide(ratio) && !is_closed(ratio))
    };
    let open: Vec<usize> = entries.iter().filter(is_open).map(|entry| entry.index).collect();
    if open.is_empty() {
        return open;
    }
    let needed = entries.iter().filter(|entry| entry.is_baseline || entry.index == cheapest.index);
    sorted(needed.map(|entry| entry.index).chain(open))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of nine rounds whose costs vary by `spread` around `cost`.
    fn entry(index: usize, cost: f64, spread: f64) -> Entry {
        let offsets = [0.0, 1.0, -1.0, 0.5, -0.5, 0.8, -0.8, 0.3, -0.3];
        let shift = |number: usize| offsets[(number * (index + 2)) % offsets.len()];
        let cost_in = |number| cost * (1.0 + spread * shift(number));
        let costs = (0..9).map(|number| ((number, false), cost_in(number))).collect();
        Entry { index, is_baseline: index == 0, rounds: 9, costs }
    }

    #[test]
    fn precise_rows_close_the_question() {
        let entries = [entry(0, 500.0, 0.01), entry(1, 200.0, 0.01), entry(2, 205.0, 0.01)];
        assert!(open_entries(&entries, 0.05).is_empty());
    }

    #[test]
    fn the_leading_rows_and_the_baseline_are_measured_again() {
        let entries = [
            entry(0, 500.0, 0.2),
            entry(1, 200.0, 0.2),
            entry(2, 210.0, 0.2),
            entry(3, 900.0, 0.2),
        ];
        assert_eq!(open_entries(&entries, 0.05), [0, 1, 2]);
    }

    #[test]
    fn a_dear_row_is_closed_but_the_saving_over_the_baseline_has_to_be_precise() {
        let entries = [entry(0, 500.0, 0.2), entry(1, 200.0, 0.02), entry(2, 400.0, 0.05)];
        assert_eq!(open_entries(&entries, 0.05), [0, 1]);
    }

    #[test]
    fn the_ratio_of_two_rows_has_to_be_precise_in_either_order() {
        for costs in [[200.0, 400.0], [400.0, 200.0]] {
            let entries = [entry(0, costs[0], 0.2), entry(1, costs[1], 0.2)];
            assert_eq!(open_entries(&entries, 0.05), [0, 1]);
            let entries = [entry(0, costs[0], 0.01), entry(1, costs[1], 0.01)];
            assert!(open_entries(&entries, 0.05).is_empty());
        }
    }

    #[test]
    fn a_question_without_rounds_is_not_open() {
        let nothing = Entry { index: 0, is_baseline: true, rounds: 0, costs: Vec::new() };
        assert!(open_entries(&[nothing], 0.05).is_empty());
        assert!(open_entries(&[], 0.05).is_empty());
    }

    #[test]
    fn a_row_without_enough_pairs_is_measured_with_all_rows_of_its_question() {
        let question = |entries| OpenQuestion { name: String::new(), entries };
        let whole = [question(vec![entry(0, 500.0, 0.1), entry(1, 200.0, 0.1)])];
        assert!(rows_that_lack_pairs(&whole, 9, 19).is_empty());
        let mut other_side = entry(1, 200.0, 0.1);
        other_side.costs[0].0.1 = true;
        let mut lacking = [question(vec![entry(0, 500.0, 0.1), other_side, entry(2, 200.0, 0.1)])];
        assert_eq!(rows_that_lack_pairs(&lacking, 9, 19), [0, 1, 2]);
        lacking[0].entries[1].rounds = 19;
        assert!(rows_that_lack_pairs(&lacking, 9, 19).is_empty(), "it is given up");
    }
}
