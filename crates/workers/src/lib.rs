//! The worker processes of a measurement, and the operations whose cost it measures.
//!
//! A measurement starts its own program again for each end of a flow ([`worker`]); the process
//! receives its task as JSON and sends, receives, forwards or echoes until its window is over. What
//! runs inside a measured window is in this crate, apart from the code that plans, evaluates and
//! prints: so this crate is optimized fully, and the other builds fast.

#![forbid(unsafe_code)]

pub mod checksum_operation;
pub mod forward_method;
pub mod lines;
pub mod lock_step;
pub mod one_copy;
pub mod page_cache;
pub mod receive_method;
pub mod ring_method;
pub mod tested_method;
pub mod tls_records;
pub mod worker;
pub mod workload;
