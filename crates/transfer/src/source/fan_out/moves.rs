//! The hosts that moved to the end of the chain.

use std::time::Instant;

/// The hosts that moved to the end of the chain.
#[derive(Debug)]
pub struct Moves {
    /// The move that is not judged yet.
    pub last: Option<Move>,
    /// The number of trials.
    pub trials: u32,
    /// When the last trial began, or the transfer.
    pub trial_at: Instant,
}

/// A host that moved to the end of the chain.
#[derive(Debug)]
pub struct Move {
    pub name: String,
    /// The bytes per second that the host received.
    pub rate: f64,
    /// The place where the host was.
    pub place: usize,
    pub at: Instant,
}

impl Default for Moves {
    fn default() -> Self {
        Self { last: None, trials: 0, trial_at: Instant::now() }
    }
}
