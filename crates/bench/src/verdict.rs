//! What keeps the least of several figures from being a verdict.

use crate::rounds::list;
use crate::stats::{Figure, VERDICT_ROUNDS_MIN};

/// Why the least of several figures is not shown to be the least, as the end of a sentence about it; empty where it is.
///
/// Intervals of two figures that do not overlap are stricter than one interval of their ratio, by enough for the least to have
/// been picked among a dozen.
pub(crate) fn doubt(least: Figure, others: impl IntoIterator<Item = (String, Figure)>) -> String {
    if !least.is_conclusive() {
        let rounds = least.rounds;
        return format!(
            "; no verdict: it takes {VERDICT_ROUNDS_MIN} usable rounds, and there are {rounds}"
        );
    }
    let is_shown = |other: &Figure| other.is_above(least.high);
    let equals: Vec<String> =
        others.into_iter().filter(|(_, other)| !is_shown(other)).map(|(name, _)| name).collect();
    if equals.is_empty() {
        String::new()
    } else {
        format!("; no difference from it was shown for {}", list(&equals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(middle: f64, rounds: usize) -> Figure {
        let values: Vec<f64> = (0..rounds).map(|round| middle + round as f64).collect();
        Figure::of(&values).unwrap()
    }

    #[test]
    fn the_least_is_a_verdict_only_beside_intervals_apart_from_its_own() {
        let others = |middle: f64| [("copy".to_owned(), around(middle, 15))];
        assert_eq!(doubt(around(100.0, 15), others(200.0)), "");
        assert!(doubt(around(100.0, 15), others(105.0)).ends_with("was shown for copy"));
        assert!(doubt(around(100.0, 3), others(200.0)).contains("there are 3"));
        assert!(
            doubt(around(100.0, 15), [("splice".to_owned(), around(200.0, 3))]).contains("splice")
        );
    }
}
