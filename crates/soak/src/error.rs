//! Errors of the meter.

use std::io;

/// Errors of the meter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SoakError {
    /// A spinner thread could not be started or set up.
    #[error("cannot put an idle-priority thread on CPU {cpu}: {error}")]
    Spinner {
        /// The CPU.
        cpu: usize,
        /// The kernel's error.
        error: io::Error,
    },
    /// The process that runs the spinners could not be started or read.
    #[error("{step}: {error}")]
    Process {
        /// The step that failed.
        step: &'static str,
        /// The cause.
        error: io::Error,
    },
    /// A signal arrived while this process waited for the end of another measurement.
    #[error("stopped while another measurement ran")]
    Interrupted,
    /// A CPU quota of a control group forbids a reading.
    #[error("{0}")]
    Quota(String),
    /// The process that measures was stopped, and its spinners ended.
    #[error("haul was stopped (Ctrl-Z or SIGSTOP) while it measured: measure again")]
    Stopped,
    /// `/proc/stat` could not be read.
    #[error("cannot read /proc/stat, the cross-check of the readings: {0}")]
    ProcStat(io::Error),
}
