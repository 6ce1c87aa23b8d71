//! Keeps the rounds of a row that were in one regime ([`crate::regime`]): the same method can have
//! several times the interrupts per MiB. A median over two regimes would describe neither.

use super::{Costs, Series};
use crate::rounds::short_list;
use crate::warning::{Kind, Warning};

/// The smallest factor between the interrupts per MiB of two regimes. Within one regime they differ
/// by a third.
const REGIME_FACTOR_MIN: f64 = 2.5;
/// The smallest factor of the gap between two regimes.
const GAP_FACTOR_MIN: f64 = 1.5;
/// The fewest rounds in the larger regime. A row with fewer keeps all its rounds.
const ROUNDS_MIN: usize = 3;

/// Keeps the rounds of each row that were in its larger regime. Returns a warning about the removed
/// ones.
pub(super) fn keep_majority<C, R>(
    rows: &mut [Series<C, R>],
    costs: impl Fn(&R) -> Option<&Costs>,
    name: impl Fn(&C) -> String,
) -> Option<Warning> {
    let interrupts = |round: &R| costs(round)?.both_interrupts_per_mib();
    let (mut left_out, mut names) = (0, Vec::new());
    for row in rows.iter_mut() {
        let counts: Vec<f64> =
            row.rounds.iter().filter_map(|(_, round)| interrupts(round)).collect();
        let Some(is_majority) = majority_regime(&counts) else { continue };
        let before = row.rounds.len();
        row.rounds.retain(|(_, round)| interrupts(round).is_none_or(&is_majority));
        row.rounds_at_other_distance
            .retain(|(_, round)| interrupts(round).is_none_or(&is_majority));
        left_out += before - row.rounds.len();
        names.push(name(&row.case));
    }
    (left_out > 0).then(|| {
        let detail = format!(
            "in {left_out} rounds the interrupts per MiB were several times higher or lower than \
             in the others; these rounds are left out (of {})",
            short_list(&names)
        );
        Warning::new(Kind::Regime, detail)
    })
}

/// Removes rounds that were not in the requested regime, if enough others remain. Returns a warning
/// about them. A row that keeps them is marked ([`Series::is_out_of_regime`]).
pub(super) fn keep_requested<C, R>(
    rows: &mut [Series<C, R>],
    is_in_regime: impl Fn(&R) -> bool,
    name: impl Fn(&C) -> String,
) -> Option<Warning> {
    let (mut left_out, mut names) = (0, Vec::new());
    for row in rows.iter_mut() {
        let kept = row.rounds.iter().filter(|(_, round)| is_in_regime(round)).count();
        if kept >= ROUNDS_MIN && kept < row.rounds.len() {
            left_out += row.rounds.len() - kept;
            row.rounds.retain(|(_, round)| is_in_regime(round));
            row.rounds_at_other_distance.retain(|(_, round)| is_in_regime(round));
            names.push(name(&row.case));
        } else {
            row.is_out_of_regime = kept < row.rounds.len();
        }
    }
    (left_out > 0).then(|| {
        let detail = format!(
            "in {left_out} rounds the receive window did not hold the sender back; these rounds \
             are left out (of {})",
            short_list(&names)
        );
        Warning::new(Kind::Regime, detail)
    })
}

/// Returns whether a count belongs to the larger regime. `None` unless there are two: far apart in
/// total, with a gap between them.
fn majority_regime(counts: &[f64]) -> Option<impl Fn(f64) -> bool> {
    let mut sorted = counts.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (&least, &most) = (sorted.first()?, sorted.last()?);
    if least <= 0.0 || most < REGIME_FACTOR_MIN * least {
        return None;
    }
    let gaps = sorted.windows(2).map(|pair| (pair[1] / pair[0], (pair[0] * pair[1]).sqrt()));
    let (gap, middle) = gaps.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    let above = counts.iter().filter(|&&count| count > middle).count();
    let is_above = above > counts.len() - above;
    let is_clear = gap >= GAP_FACTOR_MIN && above.max(counts.len() - above) >= ROUNDS_MIN;
    is_clear.then_some(move |count: f64| (count > middle) == is_above)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(counts: &[f64]) -> Vec<f64> {
        let is_majority = majority_regime(counts);
        counts
            .iter()
            .copied()
            .filter(|&count| is_majority.as_ref().is_none_or(|is| is(count)))
            .collect()
    }

    #[test]
    fn the_larger_regime_is_kept() {
        assert_eq!(kept(&[6.0, 5.5, 6.2, 38.0, 6.1, 41.0]), [6.0, 5.5, 6.2, 6.1]);
        assert_eq!(kept(&[40.0, 41.0, 39.0, 5.0]), [40.0, 41.0, 39.0]);
    }

    #[test]
    fn rounds_of_the_requested_regime_are_kept_if_enough() {
        let kept = |counts: &[f64]| {
            let mut row = Series::new("sendfile");
            row.rounds = counts.iter().copied().enumerate().collect();
            let mut rows = [row];
            let warning =
                keep_requested(&mut rows, |&count: &f64| count < 10.0, |&name| name.into());
            (rows[0].rounds.len(), warning.is_some(), rows[0].is_out_of_regime)
        };
        assert_eq!(kept(&[30.0, 6.0, 31.0, 6.0, 29.0, 6.0, 33.0]), (3, true, false));
        assert_eq!(kept(&[30.0, 6.0, 31.0, 6.0]), (4, false, true));
        assert_eq!(kept(&[6.0, 6.0, 6.0]), (3, false, false));
    }

    #[test]
    fn one_regime_or_too_few_rounds_keep_all() {
        for all in [
            &[5.0, 6.0, 7.5, 9.0][..],
            &[3.0, 4.0, 5.0, 6.0, 7.5, 8.0],
            &[5.0, 40.0],
            &[],
            &[0.0, 1.0, 9.0],
        ] {
            assert_eq!(kept(all), all);
        }
    }
}
