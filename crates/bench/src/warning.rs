//! What a reader of the figures should know about how they came about.

use serde::{Deserialize, Serialize};

/// The kinds of warning. Programs may rely on the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The run was stopped before it was complete.
    Interrupted,
    /// The two hosts are not as separate as two machines.
    Lab,
    /// The hypervisor took CPU time away.
    Steal,
    /// Other processes used the measured CPUs.
    Disturbed,
    /// The CPUs' quiet speed changed during the run: their frequency, or the machine's neighbours.
    FrequencyDrift,
    /// The hypervisor moved the hosts' CPUs nearer to each other or further apart.
    Moved,
    /// Rounds had many more, or fewer, interrupts for each MiB than the others.
    Regime,
    /// A connection's packets left by timers although no rate was to be held.
    Paced,
    /// Windows were not of the length that was asked for, and were measured again.
    Slipped,
    /// A row's rounds differ widely.
    Unsteady,
    /// Too few rounds for an interval that means much.
    TooFewRounds,
    /// A path that was to go without a copy copied.
    Copied,
    /// Nothing was busy, so something other than CPU bounds the throughput.
    NotSaturated,
    /// The rate that was asked for was not held.
    RateNotHeld,
    /// The meter and the kernel's accounts disagree.
    AccountsDisagree,
    /// The meter changes what it measures.
    Observer,
    /// A plan was measured under other conditions than the rows that it chose for.
    Plan,
}

impl std::fmt::Display for Kind {
    /// As programs read it.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = serde_json::to_value(self).ok();
        formatter.write_str(name.as_ref().and_then(|name| name.as_str()).unwrap_or("?"))
    }
}

/// One of them, in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Which kind.
    pub kind: Kind,
    /// What was seen, where, and what it means for the figures.
    pub detail: String,
}

impl Warning {
    /// A warning in words.
    pub fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }
}
