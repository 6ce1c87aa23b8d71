//! Runs an unmodified program and reports what its bytes cost.
//!
//! [`Session`] loads the interposer (`crates/interpose`) into the processes of a command, through
//! the environment of the command. The interposer counts the bytes of each process in a shared
//! file. [`Counts`] reads the file, and [`RunReport`] turns the counts into what a person can act
//! on.
//!
//! Limits: the interposer is a shared library for glibc. [`obstacle`] tells which programs cannot
//! load it, and why.

#![forbid(unsafe_code)]

mod advice;
pub mod broker;
mod children;
mod congestion;
mod counts;
mod descendants;
mod error;
mod expectation;
mod known_programs;
mod library;
mod program;
mod report;
mod session;
mod share;

pub use advice::Advice;
pub use children::{children_cpu_time, reap_others_until, reap_remaining, spawn};
pub use congestion::check_congestion;
pub use counts::{Counts, ProcessCounts};
pub use descendants::{Descendants, NotLoaded, running};
pub use error::RunError;
pub use expectation::{Expectation, ExpectationResult, ParseExpectationError};
pub use program::{Obstacle, find, obstacle};
pub use report::{Proof, ReportParts, RunReport, RunWarning, SentRow, SizeRow, TransferRow};
pub use session::{Session, SessionOptions};
