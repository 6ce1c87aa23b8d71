//! A step down from one way to a plainer one, and why.

use std::fmt;

/// A step down. Nothing fails because a fast way is missing; but whoever asks is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The way that was given up, by its name in every report.
    pub from: &'static str,
    /// The one taken instead.
    pub to: &'static str,
    /// Why, in words.
    pub reason: String,
}

impl fmt::Display for Fallback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} instead of {}: {}", self.to, self.from, self.reason)
    }
}
