//! A middle and how sure it is.

use serde::{Deserialize, Serialize};

/// Resamples of a bootstrap: enough for two digits of a 95 % interval.
const RESAMPLES: usize = 2000;

/// A median with the 95 % interval that the rounds allow.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The middle round.
    pub median: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Figure {
    /// From one value a round; `None` from no round. Values that are not numbers are left out.
    ///
    /// The interval is the percentile bootstrap of the median: draw as many rounds again with replacement,
    /// take the middle, many times over. The draws are the same every time, so that a report can be computed
    /// again.
    pub fn of(rounds: &[f64]) -> Option<Self> {
        let mut rounds: Vec<f64> = rounds.iter().copied().filter(|round| round.is_finite()).collect();
        if rounds.is_empty() {
            return None;
        }
        let mut random = fastrand::Rng::with_seed(7);
        let mut draw = rounds.clone();
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                draw.fill_with(|| rounds[random.usize(..rounds.len())]);
                median(&mut draw)
            })
            .collect();
        medians.sort_by(f64::total_cmp);
        let at = |share: f64| medians[((RESAMPLES - 1) as f64 * share).round() as usize];
        Some(Self { median: median(&mut rounds), low: at(0.025), high: at(0.975) })
    }

    /// Half the interval's width as a share of the median.
    pub fn spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.high - self.low) / 2.0 / self.median.abs() }
    }
}

/// The middle value, or the mean of the two in the middle. Sorts its argument, which must not be empty.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_median_is_the_middle() {
        let figure = Figure::of(&[3.0, 1.0, 2.0, f64::NAN]).unwrap();
        assert!((figure.median - 2.0).abs() < 1e-9);
        assert_eq!(Figure::of(&[]), None);
        let even = Figure::of(&[1.0, 2.0, 3.0, 10.0]).unwrap();
        assert!((even.median - 2.5).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_median_and_stays_inside_the_rounds(
            rounds in proptest::collection::vec(0.1f64..1e6, 1..12)
        ) {
            let figure = Figure::of(&rounds).unwrap();
            let least = rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let most = rounds.iter().copied().fold(0.0, f64::max);
            prop_assert!(least <= figure.low && figure.low <= figure.median);
            prop_assert!(figure.median <= figure.high && figure.high <= most);
        }
    }
}
