//! Measures every pair of hosts of a job: throughput in both directions and latency.
//!
//! Rank 0 orders the measurements through its connections to the other ranks. The pairs are
//! measured in rounds, so that no host is in two pairs at a time. A pair that is slow is measured
//! again while no other pair is measured. [`Findings`] then name the slow link, the slow host, and
//! the host with another MTU or another congestion control.

#![forbid(unsafe_code)]

mod coordinator;
mod findings;
mod host;
mod html;
mod measure;
mod message;
mod report;
mod rounds;
mod text;

pub use coordinator::{Member, measure_all};
pub use host::serve;
pub use html::html;
pub use report::{Findings, HostRow, PairRow, PairsReport};
pub use rounds::rounds;
pub use text::text;
