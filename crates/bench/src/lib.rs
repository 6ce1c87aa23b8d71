//! What every way of moving bytes costs on this machine.
//!
//! An experiment runs its rows round by round, interleaved, in the [lab](haul_lab), under the
//! [meter](haul_soak), and makes a [`report::Report`], from which every output is made: the JSON contract,
//! the terminal's table, Markdown and a web page.
//!
//! The experiments are [`send`], [`receive`], [`forward`], [`profile`],
//! [`interrupts`], [`settings`], [`loan`] and [`checksum`]. [`doctor`] says what this machine allows; [`self_check`] shows
//! that the meter reads right.

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

/// Now, to the second, as RFC 3339 writes it in UTC.
fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// Why an experiment could not be run.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// What was asked for makes no sense; nothing was run.
    #[error("{0}")]
    BadInput(String),
    /// A workload that cannot be had.
    #[error(transparent)]
    Workload(#[from] workload::WorkloadError),
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] haul_lab::LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] haul_soak::SoakError),
    /// There is no other machine to measure with, or no longer.
    #[error(transparent)]
    Pair(#[from] pair::PairError),
    /// A connection failed where it must not.
    #[error(transparent)]
    Flow(flow::FlowError),
    /// Somebody asked for an end before there was anything to report.
    #[error("stopped before there was anything to report")]
    Stopped,
    /// Something that was asked for rightly did not work.
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
    /// Whether the fault lies in what was asked for.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::BadInput(_) | Self::Lab(haul_lab::LabError::Mtu(_)) => true,
            Self::Pair(error) => error.is_bad_input(),
            Self::Workload(error) => !matches!(error, workload::WorkloadError::Make { .. }),
            _ => false,
        }
    }
}
