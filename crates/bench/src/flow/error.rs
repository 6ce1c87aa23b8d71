//! Why a flow was not measured.

use crate::pair::PairError;
use haul_lab::LabError;
use haul_soak::SoakError;
use std::io;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum FlowError {
    /// What was to be measured does not work here, in words. Other rows may.
    #[error("{0}")]
    Refused(String),
    /// A process failed, in words.
    #[error("a process of the run failed: {0}")]
    Worker(String),
    /// A process was not woken in time.
    #[error("the window slipped: it took {seconds:.3} s (the machine is too busy to measure)")]
    Slipped {
        /// How long it took.
        seconds: f64,
    },
    /// Somebody asked for an end.
    #[error("stopped before it was complete")]
    Stopped,
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] SoakError),
    /// The other machine is gone.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// A process could not be started or spoken to.
    #[error("{step}: {source}")]
    Process {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl FlowError {
    pub(crate) fn at(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Process { step, source }
    }
}
