//! Medians with order-statistic intervals of exact coverage.
//!
//! Of `n` independent rounds, the true median lies between the `k`-th smallest and the `k`-th
//! largest with probability `1 − 2·P(Binomial(n, ½) < k)`, for any distribution of the rounds. So
//! the coverage is computed, not estimated: 3 rounds give 75 %, 5 give 93.8 %, and 95 % needs at
//! least 6.
//!
//! The rounds of one run share slowly changing conditions: neighbours in the last-level cache, the
//! distance of the CPUs, the pages that the kernel allocated. So a ratio of two methods varies more
//! from run to run than between the rounds of one run. [`Estimate::widen_for_runs`] adds that part,
//! which was measured over many runs. In metrology the part that a run's own rounds show is called
//! type A, and the part known from other sources type B (JCGM 100:2008, section 4.3).

pub(crate) mod rank_sum;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// The coverage that intervals are chosen for.
const CONFIDENCE: f64 = 0.95;
/// The fewest rounds with an interval. Of two rounds even the whole range covers the median with
/// only 50 %.
const INTERVAL_ROUNDS_MIN: usize = 3;
/// The fewest rounds that support a verdict. Nine is the smallest number whose 95 % interval
/// excludes the extremes (coverage 96.1 %), so a single outlier decides nothing.
pub(crate) const VERDICT_ROUNDS_MIN: usize = 9;
/// Standard deviation, from run to run, of the logarithm of a ratio of two methods. In four
/// sessions of 17 to 32 runs on a shared virtual machine, this value brings the coverage of the
/// intervals to 93 to 97 %. Source: docs/measurements/repeatability.md.
pub(crate) const RUN_TO_RUN_DEVIATION: f64 = 0.07;

/// Standard deviation, from run to run, of the logarithm of the cost of a method. Source:
/// docs/measurements/repeatability.md.
const COST_RUN_TO_RUN_DEVIATION: f64 = 0.25;

/// Standard deviation of the logarithm of the ratio of two series of one command, beyond what their
/// runs show. Source: docs/measurements/repeatability.md.
const SERIES_DEVIATION: f64 = 0.01;

/// Standard deviation of the logarithm of the ratio of a build to itself in the same rounds, beyond
/// what the rounds show. A precaution for other machines: docs/measurements/repeatability.md.
const BUILD_DEVIATION: f64 = 0.015;

/// A median with its interval.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Estimate {
    /// The middle round, or the mean of the two in the middle.
    pub median: f64,
    /// The lower end of the interval; minus infinity, `null` in JSON, without an interval.
    #[serde(deserialize_with = "null_is_minus_infinity")]
    #[schemars(with = "Option<f64>")]
    pub low: f64,
    /// The upper end of the interval; infinity, `null` in JSON, without an interval.
    #[serde(deserialize_with = "null_is_infinity")]
    #[schemars(with = "Option<f64>")]
    pub high: f64,
    /// The number of rounds.
    #[serde(default)]
    pub rounds: usize,
    /// The probability that the interval contains the true median, in percent; 0 without an
    /// interval.
    #[serde(default)]
    pub coverage_percent: f64,
}

impl Estimate {
    /// The estimate of one value for each round; `None` without rounds. Values that are not finite
    /// are left out.
    ///
    /// The interval is the narrowest with a coverage of 95 %, or the whole range if that covers
    /// less.
    pub fn of(rounds: &[f64]) -> Option<Self> {
        Self::with_confidence(rounds, CONFIDENCE, INTERVAL_ROUNDS_MIN)
    }

    /// The estimate of one of `count` comparisons of which the best is selected: all intervals
    /// jointly have a coverage of 95 % (Bonferroni correction). There is no interval if the rounds
    /// are too few for it.
    pub fn with_bonferroni(rounds: &[f64], count: usize) -> Option<Self> {
        let confidence = 1.0 - (1.0 - CONFIDENCE) / count.max(1) as f64;
        let estimate = Self::with_confidence(rounds, confidence, INTERVAL_ROUNDS_MIN)?;
        let is_met = estimate.coverage_percent >= 100.0 * confidence;
        Some(if is_met {
            estimate
        } else {
            Self::without_interval(estimate.median, estimate.rounds)
        })
    }

    /// The estimate of one of `count` comparisons: [`Self::of`] for a single one, else
    /// [`Self::with_bonferroni`].
    pub(crate) fn among(rounds: &[f64], count: usize) -> Option<Self> {
        if count > 1 { Self::with_bonferroni(rounds, count) } else { Self::of(rounds) }
    }

    /// An exact value that was not measured in rounds: the interval does not have a width.
    pub(crate) fn exactly(value: f64) -> Self {
        Self { median: value, low: value, high: value, rounds: 1, coverage_percent: 100.0 }
    }

    fn without_interval(median: f64, rounds: usize) -> Self {
        Self { median, low: f64::NEG_INFINITY, high: f64::INFINITY, rounds, coverage_percent: 0.0 }
    }

    fn with_confidence(rounds: &[f64], confidence: f64, rounds_min: usize) -> Option<Self> {
        let mut rounds: Vec<f64> =
            rounds.iter().copied().filter(|round| round.is_finite()).collect();
        if rounds.is_empty() {
            return None;
        }
        let (median, count) = (median(&mut rounds), rounds.len());
        if count < rounds_min {
            return Some(Self::without_interval(median, count));
        }
        let narrowest = (1..=count.div_ceil(2)).rev().find(|&k| coverage(count, k) >= confidence);
        let k = narrowest.unwrap_or(1);
        Some(Self {
            median,
            low: rounds[k - 1],
            high: rounds[count - k],
            rounds: count,
            coverage_percent: 100.0 * coverage(count, k),
        })
    }

    /// The same ratio, with an interval that also covers the variation of a ratio of two methods
    /// from run to run. `count` is the number of comparisons of which the best is selected.
    ///
    /// The two parts are independent, so the squares of their half widths add, on the logarithmic
    /// scale of a ratio.
    pub(crate) fn widen_for_runs(self, count: usize) -> Self {
        self.widen(RUN_TO_RUN_DEVIATION, count)
    }

    /// The same ratio of two builds that were measured in the same rounds, with an interval that
    /// covers what one build differs by from itself.
    pub(crate) fn widen_for_builds(self, count: usize) -> Self {
        self.widen(BUILD_DEVIATION, count)
    }

    /// Adds a deviation of the logarithm from run to run to the interval. A value that may be 0
    /// does not have a logarithm, and so no interval.
    pub(crate) fn widen(self, deviation: f64, count: usize) -> Self {
        if !self.has_interval() || self.low <= 0.0 {
            return self.drop_interval();
        }
        let runs = deviation * normal_quantile(count);
        let factor = |end: f64| (end / self.median).ln().hypot(runs).exp();
        Self { low: self.median / factor(self.low), high: self.median * factor(self.high), ..self }
    }

    /// This ratio divided by the same ratio of another run. `deviation` is the deviation of the
    /// logarithm of such a ratio from run to run, and `count` the number of comparisons of which
    /// the best is selected.
    pub(crate) fn quotient_of_runs(self, other: Self, deviation: f64, count: usize) -> Self {
        self.widen(deviation, count).quotient(other.widen(deviation, count))
    }

    /// This cost divided by the same cost in another run. The interval covers what a cost differs
    /// by from run to run. `count` is the number of comparisons of which the best is selected.
    pub(crate) fn quotient_of_costs(self, other: Self, count: usize) -> Self {
        let cost = |estimate: Self| estimate.widen(COST_RUN_TO_RUN_DEVIATION, count);
        cost(self).quotient(cost(other))
    }

    /// The same ratio of two series of runs, with an interval that also covers what two series of
    /// one command differ by.
    pub(crate) fn widen_for_series(self) -> Self {
        self.widen(SERIES_DEVIATION, 1)
    }

    /// This estimate divided by an independent one: the squares of their half widths add, on the
    /// logarithmic scale. It has as many rounds as the one that has fewer.
    fn quotient(self, other: Self) -> Self {
        let median = self.median / other.median;
        let rounds = self.rounds.min(other.rounds);
        if !self.has_interval() || !other.has_interval() || self.low <= 0.0 || other.low <= 0.0 {
            return Self::without_interval(median, rounds);
        }
        let width = |one: f64, other: f64| one.ln().hypot(other.ln()).exp();
        Self {
            median,
            low: median / width(self.median / self.low, other.high / other.median),
            high: median * width(self.high / self.median, other.median / other.low),
            rounds,
            coverage_percent: self.coverage_percent.min(other.coverage_percent),
        }
    }

    /// The same median without an interval, for rounds whose interval would be too narrow.
    pub(crate) fn drop_interval(self) -> Self {
        Self::without_interval(self.median, self.rounds)
    }

    /// Whether there is an interval.
    pub fn has_interval(&self) -> bool {
        self.low.is_finite() && self.high.is_finite()
    }

    /// Whether the estimate supports a verdict: enough rounds, and an interval with a coverage of
    /// at least 95 %.
    pub fn is_conclusive(&self) -> bool {
        self.rounds >= VERDICT_ROUNDS_MIN && self.coverage_percent >= 100.0 * CONFIDENCE
    }

    /// Whether all of a conclusive interval lies below `bound`.
    pub fn is_below(&self, bound: f64) -> bool {
        self.is_conclusive() && self.high < bound
    }

    /// Whether all of a conclusive interval lies above `bound`.
    pub fn is_above(&self, bound: f64) -> bool {
        self.is_conclusive() && self.low > bound
    }

    /// The interval as text, with `digits` digits after the point; `no interval of N rounds` if
    /// there is none.
    pub fn interval(&self, digits: usize) -> String {
        match (self.has_interval(), self.rounds) {
            (true, _) => format!("{:.digits$} to {:.digits$}", self.low, self.high),
            (false, 1) => "no interval of 1 round".into(),
            (false, rounds) => format!("no interval of {rounds} rounds"),
        }
    }

    /// Half the interval's width as a share of the median; 0 without an interval.
    pub fn spread(&self) -> f64 {
        if self.median == 0.0 || !self.has_interval() {
            return 0.0;
        }
        (self.high - self.low) / 2.0 / self.median.abs()
    }
}

/// The probability that the true median of `count` rounds lies between the `k`-th smallest and the
/// `k`-th largest.
fn coverage(count: usize, k: usize) -> f64 {
    // P(Binomial(count, ½) = i) for i = 0, 1, …, each from the one before.
    let mut term = 0.5f64.powi(count as i32);
    let mut tail = 0.0;
    for i in 0..k {
        tail += term;
        term *= (count - i) as f64 / (i + 1) as f64;
    }
    1.0 - 2.0 * tail
}

/// The number of standard deviations on each side that contain a normal value with 95 %, or all of
/// `count` such values. For several it is the bound `P(|Z| > z) ≤ 2·exp(−z²/2)`, which is too wide
/// by a fifth rather than too narrow.
fn normal_quantile(count: usize) -> f64 {
    if count <= 1 { 1.96 } else { (2.0 * (2.0 * count as f64 / (1.0 - CONFIDENCE)).ln()).sqrt() }
}

/// The middle value, or the mean of the two in the middle. Sorts its argument, which must not be
/// empty.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

fn null_is_minus_infinity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NEG_INFINITY))
}

fn null_is_infinity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counted(count: usize) -> Vec<f64> {
        (1..=count).map(|value| value as f64).collect()
    }

    #[test]
    fn the_median_is_the_middle() {
        let estimate = Estimate::of(&[3.0, 1.0, 2.0, f64::NAN]).unwrap();
        assert!((estimate.median - 2.0).abs() < 1e-9 && estimate.rounds == 3);
        assert_eq!(Estimate::of(&[]), None);
        let even = Estimate::of(&[1.0, 2.0, 3.0, 10.0]).unwrap();
        assert!((even.median - 2.5).abs() < 1e-9);
    }

    /// Ranks and coverages as in tables of the sign test.
    #[test]
    fn the_coverage_is_exact() {
        for (count, low, high, percent) in [
            (3, 1.0, 3.0, 75.0),
            (5, 1.0, 5.0, 93.75),
            (6, 1.0, 6.0, 96.875),
            (9, 2.0, 8.0, 96.094),
            (15, 4.0, 12.0, 96.484),
            (31, 10.0, 22.0, 97.056),
        ] {
            let estimate = Estimate::of(&counted(count)).unwrap();
            assert!(
                (estimate.low - low).abs() < 1e-9 && (estimate.high - high).abs() < 1e-9,
                "{estimate:?}"
            );
            assert!((estimate.coverage_percent - percent).abs() < 1e-3, "{estimate:?}");
        }
    }

    #[test]
    fn two_rounds_have_no_interval_and_eight_give_no_verdict() {
        let two = Estimate::of(&[1.0, 2.0]).unwrap();
        assert!(!two.has_interval() && !two.is_below(100.0) && !two.is_above(-100.0));
        assert_eq!(two.interval(1), "no interval of 2 rounds");
        assert!(!Estimate::of(&counted(8)).unwrap().is_below(100.0));
        let nine = Estimate::of(&counted(9)).unwrap();
        assert!(
            nine.is_below(8.5) && !nine.is_below(8.0) && nine.is_above(1.5) && !nine.is_above(2.0)
        );
    }

    #[test]
    fn the_best_of_many_needs_a_wider_interval_or_has_none() {
        let alone = Estimate::with_bonferroni(&counted(9), 1).unwrap();
        assert_eq!(alone, Estimate::of(&counted(9)).unwrap());
        let of_ten = Estimate::with_bonferroni(&counted(9), 10).unwrap();
        assert!((of_ten.low - 1.0).abs() < 1e-9 && (of_ten.high - 9.0).abs() < 1e-9, "{of_ten:?}");
        assert!(!Estimate::with_bonferroni(&counted(9), 20).unwrap().has_interval());
    }

    #[test]
    fn an_interval_for_other_runs_is_wider_on_both_sides() {
        let rounds: Vec<f64> = (0..9).map(|round| 0.98 + 0.005 * f64::from(round)).collect();
        let within = Estimate::of(&rounds).unwrap();
        let across = within.widen_for_runs(1);
        // 1.96 standard deviations of 0.07, combined with the 1.5 % of the rounds.
        assert!(
            (0.86..0.872).contains(&across.low) && (1.147..1.16).contains(&across.high),
            "{across:?}"
        );
        assert!(across.widen_for_runs(1).low < across.low);
        assert!(
            within.widen_for_runs(10).low < across.low && within.widen_for_runs(10).is_conclusive()
        );
        let none = Estimate::of(&[1.0, 2.0]).unwrap();
        assert_eq!(none.widen_for_runs(1), none);
    }

    #[test]
    fn a_missing_interval_survives_serialization() {
        let none = Estimate::of(&[1.0]).unwrap();
        let text = serde_json::to_string(&none).unwrap();
        assert!(text.contains("\"low\":null"), "{text}");
        assert_eq!(serde_json::from_str::<Estimate>(&text).unwrap(), none);
        // A report of an earlier version has neither rounds nor coverage, and supports no verdict.
        let old: Estimate =
            serde_json::from_str("{\"median\":1.0,\"low\":0.5,\"high\":0.6}").unwrap();
        assert!(old.has_interval() && !old.is_below(1.0));
    }

    /// The stated coverage holds: the share of intervals that contain the true median, over many
    /// samples.
    #[test]
    fn intervals_have_the_stated_coverage() {
        const SAMPLES: usize = 20_000;
        let mut random = fastrand::Rng::with_seed(1);
        for count in [3, 5, 7, 9, 12, 15] {
            let (mut held, mut stated) = (0, 0.0);
            for _ in 0..SAMPLES {
                // Skewed, with a true median of ln 2.
                let rounds: Vec<f64> = (0..count).map(|_| -random.f64().ln()).collect();
                let estimate = Estimate::of(&rounds).unwrap();
                held +=
                    usize::from((estimate.low..=estimate.high).contains(&std::f64::consts::LN_2));
                stated = estimate.coverage_percent;
            }
            let percent = 100.0 * held as f64 / SAMPLES as f64;
            assert!(
                (percent - stated).abs() < 1.0,
                "{count} rounds: {percent} instead of {stated}"
            );
        }
    }

    proptest! {
        #[test]
        fn the_interval_contains_the_median_and_lies_within_the_rounds(
            rounds in proptest::collection::vec(0.1f64..1e6, 3..40)
        ) {
            let estimate = Estimate::of(&rounds).unwrap();
            let least = rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let most = rounds.iter().copied().fold(0.0, f64::max);
            prop_assert!(least <= estimate.low && estimate.low <= estimate.median);
            prop_assert!(estimate.median <= estimate.high && estimate.high <= most);
        }
    }
}
