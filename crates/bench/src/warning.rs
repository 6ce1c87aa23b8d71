//! Warnings about the figures of a report.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Kinds of warnings. Their names are stable, for use by programs.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "WarningKind")]
pub enum Kind {
    /// The run was stopped before it was complete.
    Interrupted,
    /// The two hosts are not as separate as two machines.
    Lab,
    /// The hypervisor took CPU time.
    Steal,
    /// Other processes used the measured CPUs.
    Disturbed,
    /// The speed of the quiet CPUs changed during the run, by their frequency or by other guests of
    /// the machine.
    FrequencyDrift,
    /// The hypervisor moved the hosts' CPUs nearer to each other or further apart.
    Moved,
    /// Rounds had many more, or fewer, interrupts per MiB than the others.
    Regime,
    /// A connection was paced although no rate was requested.
    Paced,
    /// Windows had a wrong length and were measured again.
    Slipped,
    /// The rounds of a row differ widely.
    Unsteady,
    /// There are too few rounds for a useful interval.
    TooFewRounds,
    /// A method that avoids copies copied.
    Copied,
    /// No CPU was busy, so something else limits the throughput.
    NotSaturated,
    /// The requested rate was not held.
    RateNotHeld,
    /// The meter and the kernel's accounting disagree.
    AccountsDisagree,
    /// The observer effect of the meter is large.
    Observer,
    /// The plan was measured under other conditions than the rows whose send method it chose.
    Plan,
}

impl std::fmt::Display for Kind {
    /// Formats the kind's name in JSON.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = serde_json::to_value(self).ok();
        formatter.write_str(name.as_ref().and_then(|name| name.as_str()).unwrap_or("?"))
    }
}

/// A warning: its kind, and the text.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Warning {
    /// Kind of the warning.
    pub kind: Kind,
    /// The observation, where it was made, and its effect on the figures.
    pub detail: String,
}

impl Warning {
    /// A warning with this text.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }
}
