//! A row and its rounds, and the statistics of the row.

use crate::stats::Estimate;

/// A row and its rounds. A round's number identifies the same round of other rows.
#[derive(Debug)]
pub(crate) struct Series<C, R> {
    pub case: C,
    /// The reason why the row cannot be measured here at all.
    pub refused: Option<String>,
    pub rounds: Vec<(usize, R)>,
    /// Rounds at the other distance of the CPUs. Their costs do not compare with the costs of
    /// `rounds`, but their ratios do, because both rows of a pair were measured at that distance.
    pub rounds_at_other_distance: Vec<(usize, R)>,
    /// CPU use of other programs in percent, if too few rounds were undisturbed: no interval then.
    pub disturbed_percent: Option<f64>,
    /// Whether rounds in another regime than the requested one were kept ([`crate::regime`]).
    pub is_out_of_regime: bool,
    /// The errors of failed rounds.
    pub(super) failures: Vec<String>,
}

impl<C, R> Series<C, R> {
    pub(crate) fn new(case: C) -> Self {
        Self {
            case,
            refused: None,
            rounds: Vec::new(),
            rounds_at_other_distance: Vec::new(),
            disturbed_percent: None,
            is_out_of_regime: false,
            failures: Vec::new(),
        }
    }

    /// The estimate of one value for each round.
    pub(crate) fn estimate(&self, of: impl Fn(&R) -> f64) -> Option<Estimate> {
        self.estimate_of_some(|round| Some(of(round)))
    }

    /// The estimate of a value that some rounds lack.
    pub(crate) fn estimate_of_some(&self, of: impl Fn(&R) -> Option<f64>) -> Option<Estimate> {
        let values: Vec<f64> = self.rounds.iter().filter_map(|(_, round)| of(round)).collect();
        Estimate::of(&values).map(|estimate| self.drop_disturbed_interval(estimate))
    }

    /// The estimate; without its interval if too few rounds were undisturbed.
    fn drop_disturbed_interval(&self, estimate: Estimate) -> Estimate {
        if self.disturbed_percent.is_some() { estimate.drop_interval() } else { estimate }
    }

    /// The median over the rounds; 0 without rounds.
    pub(crate) fn median(&self, of: impl Fn(&R) -> f64) -> f64 {
        self.estimate(of).map_or(0.0, |estimate| estimate.median)
    }

    /// Like [`Self::ratio_to`]. The interval also covers other runs ([`Estimate::widen_for_runs`]).
    pub(crate) fn ratio_to_method(&self, other: &Self, of: impl Fn(&R) -> f64) -> Option<Estimate> {
        self.ratio_among_methods(other, 1, of)
    }

    /// Like [`Self::ratio_to_method`], for methods whose ratio has another `deviation` from run to
    /// run.
    pub(crate) fn ratio_with_deviation(
        &self,
        other: &Self,
        deviation: f64,
        of: impl Fn(&R) -> f64,
    ) -> Option<Estimate> {
        let estimate = self.ratio_to(other, of)?;
        let is_one_regime = self.is_out_of_regime == other.is_out_of_regime;
        Some(if is_one_regime { estimate.widen(deviation, 1) } else { estimate.drop_interval() })
    }

    /// Like [`Self::ratio_to_method`], for the best of `count` ([`Estimate::with_bonferroni`]).
    pub(crate) fn ratio_among_methods(
        &self,
        other: &Self,
        count: usize,
        of: impl Fn(&R) -> f64,
    ) -> Option<Estimate> {
        let estimate = self.ratio_among(other, count, of)?;
        Some(if std::ptr::eq(self, other) {
            estimate
        } else if self.is_out_of_regime != other.is_out_of_regime {
            // The ratio compares two regimes, not two methods.
            estimate.drop_interval()
        } else {
            estimate.widen_for_runs(count)
        })
    }

    /// A value divided by the value of another row in the same round.
    pub(crate) fn ratio_to(&self, other: &Self, of: impl Fn(&R) -> f64) -> Option<Estimate> {
        self.ratio_among(other, 1, of)
    }

    /// Like [`Self::ratio_to`], for the best of `count` comparisons
    /// ([`Estimate::with_bonferroni`]).
    pub(crate) fn ratio_among(
        &self,
        other: &Self,
        count: usize,
        of: impl Fn(&R) -> f64,
    ) -> Option<Estimate> {
        let pairs = |own: &[(usize, R)], others: &[(usize, R)]| -> Vec<f64> {
            let ratio = |(number, round): &(usize, R)| {
                let (_, same) = others.iter().find(|(other, _)| other == number)?;
                let (value, same) = (of(round), of(same));
                // Noise can make a cost negative, which makes the ratio meaningless.
                (value > 0.0 && same > 0.0).then(|| value / same)
            };
            own.iter().filter_map(ratio).collect()
        };
        let mut ratios = pairs(&self.rounds, &other.rounds);
        ratios.extend(pairs(&self.rounds_at_other_distance, &other.rounds_at_other_distance));
        Estimate::among(&ratios, count)
            .map(|estimate| other.drop_disturbed_interval(self.drop_disturbed_interval(estimate)))
    }

    /// The number of rounds whose ratios can be used.
    pub(crate) fn ratio_rounds(&self) -> usize {
        self.rounds.len() + self.rounds_at_other_distance.len()
    }

    /// Records that a round gave no cost, because other programs took so much of a machine.
    pub(super) fn reject_for_background(&mut self, percent: f64) {
        self.failures.push(format!(
            "other programs used {percent:.0} % of a machine while it should have been idle, so \
             that the load of the row is not known: stop them"
        ));
    }

    /// Why the estimate is missing; `None` with an estimate.
    pub(crate) fn failure_reason(&self) -> Option<String> {
        let failure = || self.failures.last().filter(|_| self.rounds.is_empty()).cloned();
        self.refused.clone().or_else(failure)
    }
}
