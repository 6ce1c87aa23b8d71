//! The choice among several methods: which one to recommend, and with what confidence.

use super::{Confidence, Question, Safety, Verdict, saving, saving_text, too_few_rounds};
use crate::rounds::Series;
use crate::stats::Estimate;

/// A method that a verdict can name.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    /// The method's name.
    pub name: String,
    /// Its cost divided by the baseline's; `None` for the baseline itself.
    pub ratio: Option<Estimate>,
    /// The candidate's cost divided by the cost of the cheapest candidate, with an interval for all
    /// candidates jointly; `None` for the cheapest.
    pub cheapest_ratio: Option<Estimate>,
    /// The cost of both hosts divided by the baseline's; `None` if only one host was measured.
    pub both_ratio: Option<Estimate>,
    /// The intervals of `ratio` and `both_ratio`, for all candidates jointly.
    pub joint_ratios: [Option<Estimate>; 2],
    /// The reason why no verdict can name it; `None` if one can.
    pub obstacle: Option<String>,
    /// Whether more rounds could remove the obstacle.
    pub lacks_rounds: bool,
    /// Its median cost, with whatever rounds it has; `None` without any.
    pub median_cost: Option<f64>,
}

/// A method that lacks rounds may be as cheap as another one if its median cost is at most this
/// many times the other's. Medians of different rounds differ by up to 25 % on a shared machine
/// (docs/measurements/repeatability.md).
const AS_CHEAP_FACTOR: f64 = 1.25;

/// A measured row that takes part in a choice.
pub(crate) struct ComparedRow<'a, C, R> {
    /// The method's name.
    pub name: String,
    /// The row.
    pub series: &'a Series<C, R>,
    /// Why a verdict cannot name this row; `None` if a verdict can. The number of rounds is checked
    /// separately.
    pub obstacle: Option<String>,
}

impl Candidate {
    /// The candidates of a choice, from rows in the order of preference. `cost` is the cost that is
    /// compared, and `both` the cost of both hosts, if both were measured.
    pub(crate) fn of_rows<C, R>(
        rows: &[ComparedRow<'_, C, R>],
        baseline: &str,
        cost: &dyn Fn(&R) -> f64,
        both: Option<&dyn Fn(&R) -> f64>,
    ) -> Vec<Self> {
        let obstacle = |row: &ComparedRow<'_, C, R>| {
            row.obstacle.clone().or_else(|| series_obstacle(row.series))
        };
        let usable = || rows.iter().filter(|row| obstacle(row).is_none());
        let cheapest = usable()
            .map(|row| row.series)
            .min_by(|one, other| one.median(cost).total_cmp(&other.median(cost)));
        let plain = usable().find(|row| row.name == baseline).map(|row| row.series);
        let comparisons = usable().count().saturating_sub(1);
        let candidate = |row: &ComparedRow<'_, C, R>| {
            let differs = |other: &&Series<C, R>| !std::ptr::eq(*other, row.series);
            let is_usable = obstacle(row).is_none();
            let plain = plain.filter(|_| is_usable).filter(differs);
            let cheapest = cheapest.filter(|_| is_usable).filter(differs);
            let ratio = plain.and_then(|plain| row.series.ratio_to_method(plain, cost));
            let pairs = ratio.map_or(0, |ratio| ratio.rounds);
            let few_pairs = plain.is_some() && too_few_rounds(pairs).is_some();
            let few_pairs =
                few_pairs.then(|| format!("{pairs} usable rounds in common with {baseline}"));
            let is_excluded = row.obstacle.is_some() || row.series.failure_reason().is_some();
            let obstacle = obstacle(row).or(few_pairs);
            let jointly =
                |of: &dyn Fn(&R) -> f64| row.series.ratio_among_methods(plain?, comparisons, of);
            Self {
                name: row.name.clone(),
                ratio,
                joint_ratios: [jointly(cost), both.and_then(jointly)],
                cheapest_ratio: cheapest.and_then(|cheapest| {
                    row.series.ratio_among_methods(cheapest, comparisons, cost)
                }),
                both_ratio: both.and_then(|both| row.series.ratio_to_method(plain?, both)),
                lacks_rounds: obstacle.is_some() && !is_excluded,
                median_cost: Some(row.series.median(cost)).filter(|cost| cost.is_finite()),
                obstacle,
            }
        };
        rows.iter().map(candidate).collect()
    }
}

/// The reason why a row supports no verdict: it was not measured, or not often enough.
fn series_obstacle<C, R>(series: &Series<C, R>) -> Option<String> {
    if let Some(reason) = series.failure_reason() {
        Some(reason)
    } else if let Some(percent) = series.disturbed_percent {
        Some(format!("other programs used {percent:.0} % of a CPU in most rounds"))
    } else {
        too_few_rounds(series.ratio_rounds())
    }
}

/// The subject of a verdict, for its sentence.
pub(crate) struct Subject<'a> {
    /// The question.
    pub question: Question,
    /// The name of the baseline.
    pub baseline: &'a str,
    /// What the cost is measured in, such as "the sending host's CPU".
    pub cost: &'a str,
    /// The system call or the line of code of a method.
    pub how: fn(&str) -> Option<&'static str>,
    /// The command that answers an open question.
    pub retry: String,
    /// Why no verdict is possible, whatever the rows show.
    pub obstacle: Option<String>,
}

impl Subject<'_> {
    /// The verdict on candidates, which are given in the order of preference.
    pub(crate) fn verdict(self, candidates: &[Candidate]) -> Verdict {
        let Self { question, baseline, cost, how, retry, obstacle } = self;
        if let Some(obstacle) = obstacle {
            return Verdict::withheld(question, &obstacle, retry);
        }
        let verdict = |confidence, choice: String, saving_percent, statement| Verdict {
            question,
            confidence,
            how: how(&choice).map(str::to_owned),
            choice: Some(choice),
            baseline: Some(baseline.into()),
            saving_percent,
            statement,
            safety: Safety::SafeAnywhere,
        };
        match choose(candidates, baseline) {
            Choice::Saves { name, ratio, confidence, ties } => {
                let ties = match ties.as_slice() {
                    [] => String::new(),
                    ties => {
                        format!("; no difference between it and {} was shown", ties.join(" or "))
                    }
                };
                let saving = saving(ratio);
                let statement = format!(
                    "{name} saves {} of {cost} against {baseline}{ties}",
                    saving_text(saving)
                );
                verdict(confidence, name, Some(saving), statement)
            }
            Choice::BaselineIsCheapest(confidence) => {
                let statement = format!("{baseline}: everything else took more of {cost}");
                verdict(confidence, baseline.into(), None, statement)
            }
            Choice::NoDifference => {
                let others = candidates
                    .iter()
                    .filter(|candidate| candidate.name != baseline && candidate.obstacle.is_none());
                let others: Vec<&str> = others.map(|other| other.name.as_str()).collect();
                let reason =
                    format!("no saving over {baseline} was shown for {}", others.join(", "));
                Verdict::withheld(question, &reason, retry)
            }
            Choice::Unusable(reason) => Verdict::withheld(question, &reason, retry),
        }
    }
}

/// The result of a choice.
#[derive(Debug, Clone, PartialEq)]
enum Choice {
    /// A method saves CPU time.
    Saves {
        /// The method.
        name: String,
        /// Its cost divided by the baseline's.
        ratio: Estimate,
        confidence: Confidence,
        /// The other candidates that were not shown to cost more.
        ties: Vec<String>,
    },
    /// Every other method was shown to cost more than the baseline.
    BaselineIsCheapest(Confidence),
    /// No method was shown to cost less than the baseline.
    NoDifference,
    /// The reason why there is no verdict.
    Unusable(String),
}

/// Chooses among candidates, which are given in the order of preference: of several that are not
/// shown to differ, the first is recommended. `baseline` is the name of the baseline.
fn choose(candidates: &[Candidate], baseline: &str) -> Choice {
    let Some(plain) = candidates.iter().find(|candidate| candidate.name == baseline) else {
        return Choice::Unusable(format!(
            "{baseline}, which the others are compared with, is missing"
        ));
    };
    if let Some(obstacle) = &plain.obstacle {
        return Choice::Unusable(format!("{baseline}: {obstacle}"));
    }
    let usable = || candidates.iter().filter(|candidate| candidate.obstacle.is_none());
    let others = || usable().filter(|candidate| candidate.name != baseline);
    if others().next().is_none() {
        let obstacle = candidates.iter().find_map(|candidate| {
            Some(format!("{}: {}", candidate.name, candidate.obstacle.as_ref()?))
        });
        let reason = obstacle.unwrap_or_else(|| format!("nothing was compared with {baseline}"));
        return Choice::Unusable(reason);
    }
    let is_leading =
        |candidate: &&Candidate| !candidate.cheapest_ratio.is_some_and(|ratio| ratio.is_above(1.0));
    // A method that moves its cost to the other host saves nothing.
    let saves = |candidate: &&Candidate| {
        candidate.ratio.is_some_and(|ratio| ratio.is_below(1.0))
            && !candidate.both_ratio.is_some_and(|ratio| ratio.is_above(1.0))
    };
    let Some(best) = others().filter(is_leading).find(saves) else {
        let is_dearer =
            |candidate: &Candidate| candidate.ratio.is_some_and(|ratio| ratio.is_above(1.0));
        return if let Some(open) = open_candidate(candidates.iter(), plain) {
            open
        } else if others().all(is_dearer) {
            Choice::BaselineIsCheapest(confidence(others(), |ratio| ratio.is_above(1.0)))
        } else {
            Choice::NoDifference
        };
    };
    let preferred = candidates.iter().take_while(|candidate| candidate.name != best.name);
    if let Some(open) = open_candidate(preferred, best) {
        return open;
    }
    let confidence = confidence(std::iter::once(best), |ratio| ratio.is_below(1.0));
    // A method that was not shown to save anything is not an alternative.
    let is_tie = |candidate: &&Candidate| candidate.name != best.name && saves(candidate);
    let ties = others().filter(is_leading).filter(is_tie);
    Choice::Saves {
        name: best.name.clone(),
        ratio: best.ratio.unwrap_or(Estimate::exactly(1.0)),
        confidence,
        ties: ties.map(|candidate| candidate.name.clone()).collect(),
    }
}

/// The reason for no verdict if one of the candidates lacks rounds and may be as cheap as `best`:
/// the choice would be an accident.
fn open_candidate<'a>(
    mut candidates: impl Iterator<Item = &'a Candidate>,
    best: &Candidate,
) -> Option<Choice> {
    let may_be_as_cheap = |candidate: &Candidate| match (candidate.median_cost, best.median_cost) {
        (Some(cost), Some(best)) => cost <= AS_CHEAP_FACTOR * best,
        _ => true,
    };
    let open = candidates.find(|candidate| candidate.lacks_rounds && may_be_as_cheap(candidate))?;
    let obstacle = open.obstacle.as_deref().unwrap_or_default();
    Some(Choice::Unusable(format!("{}: {obstacle}", open.name)))
}

/// Certain if a statement holds for the joint intervals of all `candidates`, on both hosts.
fn confidence<'a>(
    mut candidates: impl Iterator<Item = &'a Candidate>,
    holds: impl Fn(Estimate) -> bool,
) -> Confidence {
    let is_certain = candidates.all(|candidate| {
        let [ratio, both] = candidate.joint_ratios;
        ratio.is_some_and(&holds) && (candidate.both_ratio.is_none() || both.is_some_and(&holds))
    });
    if is_certain { Confidence::Certain } else { Confidence::Likely }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(low: f64, median: f64, high: f64) -> Estimate {
        Estimate { median, low, high, rounds: 15, coverage_percent: 96.5 }
    }

    fn candidate(name: &str, ratio: Estimate, to_cheapest: Option<Estimate>) -> Candidate {
        Candidate {
            name: name.into(),
            ratio: Some(ratio),
            cheapest_ratio: to_cheapest,
            both_ratio: None,
            joint_ratios: [Some(ratio), None],
            obstacle: None,
            lacks_rounds: false,
            median_cost: Some(100.0 * ratio.median),
        }
    }

    /// `read+write`, shown to be dearer than the cheapest or not.
    fn plain(is_shown: bool) -> Candidate {
        let low = if is_shown { 1.5 } else { 0.9 };
        Candidate {
            ratio: None,
            ..candidate("read+write", estimate(1.0, 1.0, 1.0), Some(estimate(low, 2.0, 3.0)))
        }
    }

    #[test]
    fn of_equals_the_preferred_method_is_chosen() {
        let sendfile =
            candidate("sendfile", estimate(0.3, 0.42, 0.5), Some(estimate(0.9, 1.05, 1.2)));
        let splice = candidate("splice", estimate(0.3, 0.4, 0.5), None);
        let choice = choose(&[sendfile, plain(true), splice], "read+write");
        let Choice::Saves { name, confidence, ties, .. } = choice else { panic!("{choice:?}") };
        assert_eq!((name.as_str(), confidence), ("sendfile", Confidence::Certain));
        assert_eq!(ties, ["splice"]);
    }

    #[test]
    fn a_saving_that_only_a_single_comparison_shows_is_likely() {
        let mut sendfile = candidate("sendfile", estimate(0.7, 0.8, 0.95), None);
        sendfile.joint_ratios = [Some(estimate(0.6, 0.8, 1.1)), None];
        let choice = choose(&[sendfile, plain(false)], "read+write");
        assert!(
            matches!(choice, Choice::Saves { confidence: Confidence::Likely, .. }),
            "{choice:?}"
        );
    }

    #[test]
    fn a_method_that_burdens_the_other_host_is_not_chosen() {
        let mut sendfile = candidate("sendfile", estimate(0.3, 0.4, 0.5), None);
        sendfile.both_ratio = Some(estimate(0.8, 0.95, 1.1));
        sendfile.joint_ratios[1] = sendfile.both_ratio;
        let choice = choose(&[sendfile.clone(), plain(true)], "read+write");
        assert!(matches!(choice, Choice::Saves { confidence: Confidence::Likely, .. }));
        sendfile.both_ratio = Some(estimate(1.1, 1.3, 1.5));
        let choice = choose(&[sendfile, plain(true)], "read+write");
        assert_eq!(choice, Choice::NoDifference);
    }

    #[test]
    fn an_obstacle_excludes_a_method_and_one_of_the_baseline_the_verdict() {
        let copied = Candidate {
            obstacle: Some("it copied".into()),
            ..candidate("zerocopy", estimate(0.1, 0.2, 0.3), None)
        };
        let choice = choose(&[copied.clone(), plain(true)], "read+write");
        assert_eq!(choice, Choice::Unusable("zerocopy: it copied".into()));
        let few = Candidate { obstacle: Some("3 rounds".into()), ..plain(true) };
        assert_eq!(choose(&[few], "read+write"), Choice::Unusable("read+write: 3 rounds".into()));
        assert!(matches!(choose(&[copied], "read+write"), Choice::Unusable(_)));
    }

    #[test]
    fn a_preferred_method_that_lacks_rounds_withholds_the_verdict() {
        let splice = candidate("splice", estimate(0.3, 0.4, 0.5), None);
        let copied = Candidate {
            obstacle: Some("it copied".into()),
            ..candidate("sendfile", estimate(0.3, 0.4, 0.5), None)
        };
        let choice = choose(&[copied.clone(), splice.clone(), plain(true)], "read+write");
        assert!(matches!(choice, Choice::Saves { .. }), "{choice:?}");
        let open = Candidate { lacks_rounds: true, obstacle: Some("7 rounds".into()), ..copied };
        let choice = choose(&[open.clone(), splice.clone(), plain(true)], "read+write");
        assert_eq!(choice, Choice::Unusable("sendfile: 7 rounds".into()));
        let choice = choose(&[splice.clone(), open.clone(), plain(true)], "read+write");
        assert!(matches!(choice, Choice::Saves { .. }), "{choice:?}");
        let dear = Candidate { median_cost: Some(90.0), ..open.clone() };
        let choice = choose(&[dear, splice.clone(), plain(true)], "read+write");
        assert!(matches!(choice, Choice::Saves { .. }), "{choice:?}");
        // The baseline is not the cheapest while another method may be.
        let dearer = candidate("splice", estimate(1.5, 1.8, 2.0), Some(estimate(1.4, 1.8, 2.0)));
        let choice = choose(&[open, dearer, plain(false)], "read+write");
        assert_eq!(choice, Choice::Unusable("sendfile: 7 rounds".into()));
    }

    #[test]
    fn without_a_shown_difference_there_is_none() {
        let sendfile = candidate("sendfile", estimate(0.8, 0.96, 1.1), None);
        assert_eq!(choose(&[sendfile, plain(false)], "read+write"), Choice::NoDifference);
        let splice = candidate("splice", estimate(1.5, 1.8, 2.0), Some(estimate(1.4, 1.8, 2.0)));
        let cheapest = Candidate { cheapest_ratio: None, ..plain(false) };
        let choice = choose(&[splice.clone(), cheapest.clone()], "read+write");
        assert_eq!(choice, Choice::BaselineIsCheapest(Confidence::Certain));
        let unclear = Candidate { joint_ratios: [Some(estimate(0.9, 1.8, 2.2)), None], ..splice };
        let choice = choose(&[unclear, cheapest], "read+write");
        assert_eq!(choice, Choice::BaselineIsCheapest(Confidence::Likely));
    }
}
