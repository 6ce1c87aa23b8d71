//! The certainty of a verdict: whether the least of several figures is shown to be the least.

use crate::rounds::short_list;
use crate::stats::{Estimate, VERDICT_ROUNDS_MIN};

/// Returns the end of a sentence about the least of several figures: why it is not shown to be the
/// least. Empty if it is.
///
/// The figures' intervals must not overlap. This is stricter than one interval of the ratio, by
/// enough to cover the selection of the least among a dozen.
pub(crate) fn uncertainty(
    least: Estimate,
    others: impl IntoIterator<Item = (String, Estimate)>,
) -> String {
    if !least.is_conclusive() {
        let rounds = least.rounds;
        return format!(
            "; no verdict: it takes {VERDICT_ROUNDS_MIN} usable rounds, and there are {rounds}"
        );
    }
    let is_shown = |other: &Estimate| other.is_above(least.high);
    let ties: Vec<String> =
        others.into_iter().filter(|(_, other)| !is_shown(other)).map(|(name, _)| name).collect();
    if ties.is_empty() {
        String::new()
    } else {
        format!("; no difference from it was shown for {}", short_list(&ties))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(middle: f64, rounds: usize) -> Estimate {
        let values: Vec<f64> = (0..rounds).map(|round| middle + round as f64).collect();
        Estimate::of(&values).unwrap()
    }

    #[test]
    fn the_least_is_a_verdict_only_if_no_other_interval_overlaps() {
        let others = |middle: f64| [("copy".to_owned(), around(middle, 15))];
        assert_eq!(uncertainty(around(100.0, 15), others(200.0)), "");
        assert!(uncertainty(around(100.0, 15), others(105.0)).ends_with("was shown for copy"));
        assert!(uncertainty(around(100.0, 3), others(200.0)).contains("there are 3"));
        let others = [("splice".to_owned(), around(200.0, 3))];
        assert!(uncertainty(around(100.0, 15), others).contains("splice"));
    }
}
