//! Measures the CPU cost of every method of moving bytes over TCP on this machine.
//!
//! An experiment measures its rows in interleaved rounds, in the [lab](haul_lab), under the
//! [meter](haul_soak). Its result is a [`report::Report`], from which every output is made: the
//! JSON contract, the terminal's table, Markdown and a web page.
//!
//! The experiments are [`send`], [`receive`], [`forward`], [`profile`], [`interrupts`],
//! [`settings`], [`loan`] and [`checksum`]. [`doctor`] reports which methods and settings this
//! machine supports. [`self_check`] compares the meter's readings with known loads.

#![forbid(unsafe_code)]

pub mod checksum;
mod congestion;
mod counters;
pub mod doctor;
mod endpoint;
pub mod export;
mod flow;
pub mod forward;
mod host;
pub mod interrupts;
mod kernel_threads;
mod lines;
pub mod loan;
pub mod matrix;
pub mod pair;
pub mod peers;
pub mod plan;
pub mod profile;
pub mod quantity;
pub mod receive;
pub mod regime;
pub mod report;
mod rounds;
pub mod self_check;
pub mod send;
pub mod settings;
mod stats;
pub mod tested_method;
mod topology;
mod verdict;
pub mod view;
pub mod warning;
pub mod worker;
pub mod workload;

pub use host::HostFacts;
pub use rounds::{Pace, Progress};
pub use stats::Figure;

/// Bytes in a MiB.
pub(crate) const MIB: f64 = (1u64 << 20) as f64;

/// The current time in UTC, rounded to the second, in RFC 3339 format.
fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// An experiment could not be run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The request is invalid; nothing was run.
    #[error("{0}")]
    BadInput(String),
    /// The workload is invalid or could not be created.
    #[error(transparent)]
    Workload(#[from] workload::WorkloadError),
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] haul_lab::LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] haul_soak::SoakError),
    /// The other machine could not be reached, refused, or was lost.
    #[error(transparent)]
    Pair(#[from] pair::PairError),
    /// A flow failed in a way that ends the run.
    #[error(transparent)]
    Flow(flow::FlowError),
    /// The run was stopped before there was anything to report.
    #[error("stopped before there was anything to report")]
    Stopped,
    /// A valid request failed while it was carried out.
    #[error("{0}")]
    Failed(String),
}

impl From<flow::FlowError> for BenchError {
    fn from(error: flow::FlowError) -> Self {
        match error {
            flow::FlowError::Stopped => Self::Stopped,
            flow::FlowError::Pair(error) => Self::Pair(error),
            error => Self::Flow(error),
        }
    }
}

impl BenchError {
    /// Whether the request, and not its execution, is at fault.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::BadInput(_) | Self::Lab(haul_lab::LabError::Mtu(_)) => true,
            Self::Pair(error) => error.is_bad_input(),
            Self::Workload(error) => !matches!(error, workload::WorkloadError::Make { .. }),
            _ => false,
        }
    }
}
