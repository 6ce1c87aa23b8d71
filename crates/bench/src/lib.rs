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
pub mod compare;
mod congestion;
pub mod copies;
mod counters;
pub mod doctor;
mod endpoint;
mod error;
pub mod export;
mod flow;
pub mod forward;
mod host;
pub mod interrupts;
mod kernel_hardening;
mod kernel_threads;
mod listen;
pub mod loan;
pub mod matrix;
pub mod pair;
pub mod peers;
pub mod plan;
pub mod profile;
pub mod receive;
pub mod regime;
pub mod report;
mod rounds;
pub mod self_check;
pub mod send;
pub mod settings;
pub mod soak_series;
mod stats;
pub mod summary;
mod topology;
pub mod verdict;
pub mod view;
pub mod warning;

pub use error::BenchError;
pub use haul_workers::{page_cache, tested_method, worker, workload};
pub use host::HostFacts;
pub use listen::listen;
pub use rounds::{Noise, Pace, Progress, RoundCost, TimeLimit};
pub use stats::Estimate;
