//! What a check expects of a program: a share of its bytes that goes by a method.

use crate::counts::Counts;
use crate::share::{method_name, percent};
use haul_tally::SendMethod;
use std::fmt;
use std::str::FromStr;

/// The least share of the bytes sent to TCP that goes by a method, such as `sendfile=90%`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expectation {
    method: ExpectedMethod,
    percent_min: f64,
}

/// One method, or several that have something in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedMethod {
    One(SendMethod),
    /// Every method that does not copy.
    NotCopied,
}

/// A text is not an expectation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected METHOD=PERCENT%, such as sendfile=90%; METHOD is one of {NAMES}")]
pub struct ParseExpectationError;

/// The methods that a check can expect.
const NAMES: &str = "sendfile, splice, zerocopy, not-copied";

impl FromStr for Expectation {
    type Err = ParseExpectationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, share) = text.split_once('=').ok_or(ParseExpectationError)?;
        let method = match name.trim() {
            "sendfile" => ExpectedMethod::One(SendMethod::Sendfile),
            "splice" => ExpectedMethod::One(SendMethod::Splice),
            "zerocopy" => ExpectedMethod::One(SendMethod::Zerocopy),
            "not-copied" => ExpectedMethod::NotCopied,
            _ => return Err(ParseExpectationError),
        };
        let number = share.trim().strip_suffix('%').ok_or(ParseExpectationError)?;
        let percent_min: f64 = number.trim().parse().map_err(|_| ParseExpectationError)?;
        let is_share = (0.0..=100.0).contains(&percent_min);
        is_share.then_some(Self { method, percent_min }).ok_or(ParseExpectationError)
    }
}

impl fmt::Display for Expectation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}={}%", self.name(), self.percent_min)
    }
}

impl Expectation {
    fn name(&self) -> &'static str {
        match self.method {
            ExpectedMethod::One(method) => method_name(method),
            ExpectedMethod::NotCopied => "not-copied",
        }
    }

    /// Compares the expectation with the counts. Bytes by calls that were not seen, and bytes that
    /// `MSG_ZEROCOPY` copied after all, do not count for any method.
    pub fn check(&self, counts: &Counts) -> ExpectationResult {
        let all = counts.sent_by_all().bytes.saturating_add(counts.unseen_bytes());
        let bytes = |method: SendMethod| {
            let bytes = counts.sent(method).bytes;
            let (completions, copied) = counts.zerocopy_completions();
            if method == SendMethod::Zerocopy && completions > 0 {
                let share = 1.0 - copied.min(completions) as f64 / completions as f64;
                (bytes as f64 * share) as u64
            } else {
                bytes
            }
        };
        let sent: u64 = match self.method {
            ExpectedMethod::One(method) => bytes(method),
            ExpectedMethod::NotCopied => {
                SendMethod::ALL.into_iter().filter(|method| !method.is_copy()).map(bytes).sum()
            }
        };
        let percent = percent(sent, all);
        ExpectationResult {
            method: self.name().into(),
            percent_min: self.percent_min,
            percent,
            is_met: percent.is_some_and(|percent| percent >= self.percent_min),
        }
    }
}

/// An expectation and what was counted.
#[derive(Debug, Clone, PartialEq, serde::Serialize, schemars::JsonSchema)]
pub struct ExpectationResult {
    /// The method, or `not-copied` for all methods that do not copy.
    pub method: String,
    /// The expected share of the bytes sent to TCP, in percent.
    pub percent_min: f64,
    /// The share that was counted, in percent. Absent if nothing was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<f64>,
    /// Whether the share is at least the expected one. Not met if nothing was sent.
    pub is_met: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_parsed_and_printed() {
        let parsed: Expectation = "sendfile=90%".parse().unwrap();
        assert_eq!(parsed.to_string(), "sendfile=90%");
        let parsed: Expectation = "not-copied = 99.5 %".parse().unwrap();
        assert_eq!(parsed.to_string(), "not-copied=99.5%");
        for text in ["", "sendfile", "sendfile=90", "sendfile=101%", "sendfile=nan%", "read=1%"] {
            assert_eq!(text.parse::<Expectation>(), Err(ParseExpectationError), "{text}");
        }
    }

    #[test]
    fn a_program_that_sent_nothing_meets_no_expectation() {
        let result = "sendfile=0%".parse::<Expectation>().unwrap().check(&Counts::default());
        assert!(!result.is_met && result.percent.is_none());
    }
}
