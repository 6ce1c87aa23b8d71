//! Verdicts: the answer to one question of a report, with its confidence, or the reason why there
//! is none.
//!
//! A verdict names only a method that the library may choose, that did what its name says, that
//! costs no less than the network stack alone, and that was measured in at least nine usable rounds
//! of a run whose noise is within its bounds, while no method that the library prefers lacks rounds
//! and may cost as little. Otherwise the verdict is withheld, and says what to do.

use crate::stats::{Estimate, VERDICT_ROUNDS_MIN};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod choice;

pub(crate) use choice::{Candidate, ComparedRow, Subject};

/// A question that an experiment answers.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Question {
    /// The cheapest method of sending files.
    SendFiles,
    /// The cheapest method of sending memory.
    SendMemory,
    /// The cheapest method of receiving into memory.
    Receive,
    /// The cheapest method of forwarding a stream.
    Forward,
    /// The host setting that saves most.
    Settings,
    /// The kernel functions in which the CPU time is spent.
    CpuTime,
    /// The cheapest way of handling many small packets.
    Packets,
    /// The cost of a checksum compared with the cost of a copy.
    Checksums,
    /// What lending pages saves, and how much of it a copy would leave.
    Copies,
}

impl Question {
    /// The question as a heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::SendFiles => "send files",
            Self::SendMemory => "send memory",
            Self::Receive => "receive",
            Self::Forward => "forward",
            Self::Settings => "settings",
            Self::CpuTime => "CPU time",
            Self::Packets => "packets",
            Self::Checksums => "checksums",
            Self::Copies => "copies",
        }
    }
}

/// The confidence of a verdict.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Confidence {
    /// All comparisons that led to the choice hold jointly with a probability of 95 %, or the
    /// choice follows from what the kernel reported.
    Certain,
    /// The comparison with the baseline holds with a probability of 95 %, but not jointly with the
    /// selection among several methods or not for both hosts together.
    Likely,
    /// No difference was shown, or the measurement is not usable.
    Undecided,
}

impl Confidence {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Certain => "certain",
            Self::Likely => "likely",
            Self::Undecided => "undecided",
        }
    }
}

/// Where a piece of advice can be followed.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Safety {
    /// It does not have an effect except on cost.
    SafeAnywhere,
    /// It suits a network without long or lossy paths, whose hosts are under one administration.
    LanOnly,
    /// It can break or delay traffic. Such advice is never a verdict.
    Risky,
}

impl Safety {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::SafeAnywhere => "safe anywhere",
            Self::LanOnly => "LAN only",
            Self::Risky => "risky",
        }
    }
}

/// The answer to one question.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Verdict {
    /// The question.
    pub question: Question,
    /// The confidence.
    pub confidence: Confidence,
    /// The method or setting to use; `null` if undecided.
    pub choice: Option<String>,
    /// The method or setting that it was compared with.
    pub baseline: Option<String>,
    /// The CPU time that the choice saves, in percent of the baseline's; `null` if none was shown.
    pub saving_percent: Option<Estimate>,
    /// The answer as one sentence.
    pub statement: String,
    /// The command or the line of code that follows the advice, or that answers an open question.
    pub how: Option<String>,
    /// Where the advice can be followed.
    pub safety: Safety,
}

impl Verdict {
    /// A verdict on which nothing is saved, without a choice.
    pub(crate) fn without_saving(question: Question, statement: &str) -> Self {
        Self {
            question,
            confidence: Confidence::Certain,
            choice: None,
            baseline: None,
            saving_percent: None,
            statement: statement.into(),
            how: None,
            safety: Safety::SafeAnywhere,
        }
    }

    /// An undecided verdict. The reason is a clause without a full stop; `remedy` is a command or a
    /// clause that says what to do.
    pub(crate) fn withheld(question: Question, reason: &str, remedy: impl Into<String>) -> Self {
        Self {
            confidence: Confidence::Undecided,
            how: Some(remedy.into()),
            ..Self::without_saving(question, &format!("No verdict: {reason}"))
        }
    }
}

/// The reason why rounds support no verdict: there are too few of them; `None` if there are enough.
pub(crate) fn too_few_rounds(rounds: usize) -> Option<String> {
    let plural = if rounds == 1 { "" } else { "s" };
    (rounds < VERDICT_ROUNDS_MIN)
        .then(|| format!("{rounds} usable round{plural}, and a verdict takes {VERDICT_ROUNDS_MIN}"))
}

/// The saving of a cost ratio, in percent.
pub(crate) fn saving(ratio: Estimate) -> Estimate {
    let percent = |ratio: f64| 100.0 * (1.0 - ratio);
    Estimate {
        median: percent(ratio.median),
        low: percent(ratio.high),
        high: percent(ratio.low),
        ..ratio
    }
}

/// A saving with its interval as text: `57 % (48 to 66)`.
pub(crate) fn saving_text(saving: Estimate) -> String {
    format!("{:.0} % ({})", saving.median, saving.interval(0))
}

/// Why a ratio shows no difference; `None` if it shows one.
pub(crate) fn doubt(ratio: Estimate) -> Option<String> {
    let is_shown = ratio.is_below(1.0) || ratio.is_above(1.0);
    let no_difference = || "no difference shown".to_owned();
    (!is_shown).then(|| too_few_rounds(ratio.rounds).unwrap_or_else(no_difference))
}

/// A cost ratio with its interval as text: `0.43 × (0.34 to 0.52)`.
pub(crate) fn ratio_text(ratio: Estimate) -> String {
    format!("{:.2} × ({})", ratio.median, ratio.interval(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saving_turns_the_ends_of_the_ratio_around() {
        let ratio =
            Estimate { median: 0.43, low: 0.34, high: 0.52, rounds: 9, coverage_percent: 96.1 };
        assert_eq!(saving_text(saving(ratio)), "57 % (48 to 66)");
        assert_eq!(ratio_text(ratio), "0.43 × (0.34 to 0.52)");
    }
}
