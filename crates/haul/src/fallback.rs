//! [`Fallback`]: the change from one method to another, with its reason.

use std::fmt;

/// Bytes that the kernel may copy, if it sends none without a copy, before a zero-copy method is
/// given up for the rest of the connection.
pub(crate) const COPIED_BYTES_BEFORE_FALLBACK: u64 = 1 << 20;

/// A fallback from one method to another. A missing fast method is not an error, so the reports
/// list the fallback instead.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fallback {
    /// The method that was refused or given up, by its name in every report.
    pub from: &'static str,
    /// The method that was used instead.
    pub to: &'static str,
    /// The reason, as text.
    pub reason: String,
}

impl fmt::Display for Fallback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} instead of {}: {}", self.to, self.from, self.reason)
    }
}

/// Records a fallback, once for each reason: a file or a shortage may cause it again and again.
pub(crate) fn record(fallbacks: &mut Vec<Fallback>, fallback: Fallback) {
    if !fallbacks.contains(&fallback) {
        #[cfg(feature = "tracing")]
        tracing::debug!(target: "haul", from = fallback.from, to = fallback.to, "{fallback}");
        fallbacks.push(fallback);
    }
}
