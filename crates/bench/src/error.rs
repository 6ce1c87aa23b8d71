//! Errors of an experiment.

use crate::flow::FlowError;
use crate::pair::PairError;
use haul_lab::LabError;
use haul_soak::SoakError;
use haul_workers::workload::WorkloadError;

/// An experiment could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The request is invalid; nothing was run.
    #[error("{0}")]
    BadInput(String),
    /// The workload is invalid or could not be created.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] SoakError),
    /// The other machine could not be reached, refused, or was lost.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// A flow failed in a way that ends the run.
    #[error(transparent)]
    Flow(FlowError),
    /// The run was stopped before there was anything to report.
    #[error("stopped before there was anything to report")]
    Stopped,
    /// Nothing could be measured, although the request is valid.
    #[error("{0}")]
    Unmeasured(String),
    /// A valid request failed while it was carried out.
    #[error("{0}")]
    Failed(String),
}

impl From<FlowError> for BenchError {
    fn from(error: FlowError) -> Self {
        match error {
            FlowError::Stopped => Self::Stopped,
            FlowError::Pair(error) => Self::Pair(error),
            error => Self::Flow(error),
        }
    }
}

impl BenchError {
    /// Whether the request, and not its execution, is at fault.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::BadInput(_) | Self::Lab(LabError::Mtu(_)) => true,
            Self::Pair(error) => error.is_bad_input(),
            Self::Workload(error) => !matches!(error, WorkloadError::Make { .. }),
            _ => false,
        }
    }

    /// Whether nothing could be measured, although the request is valid and nothing failed.
    pub fn is_unmeasured(&self) -> bool {
        matches!(self, Self::Unmeasured(_) | Self::Soak(SoakError::Quota(_)))
    }
}
