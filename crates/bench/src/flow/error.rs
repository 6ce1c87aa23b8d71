//! Errors of a flow.

use crate::pair::PairError;
use haul_lab::LabError;
use haul_soak::SoakError;
use std::io;

/// A flow was not measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// The method is not available on this machine, for this reason. Other rows may be.
    #[error("{0}")]
    Refused(String),
    /// A worker process failed, for this reason.
    #[error("a process of the run failed: {0}")]
    Worker(String),
    /// A process was not woken in time, so that the window had a wrong length.
    #[error("the window slipped: it took {seconds:.3} s (the machine is too busy to measure)")]
    Slipped {
        /// Measured length of the window.
        seconds: f64,
    },
    /// The run was stopped.
    #[error("stopped before it was complete")]
    Stopped,
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] SoakError),
    /// The other machine was lost.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// A process could not be started, or its pipe failed.
    #[error("{step}: {error}")]
    Process {
        /// The step that failed.
        step: &'static str,
        /// The cause.
        error: io::Error,
    },
}

impl FlowError {
    pub(crate) fn at(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Process { step, error }
    }
}
