//! The layout of the tally: the file in which each process under `haul run` counts its bytes.
//!
//! `haul run` creates the file. The interposer, which the dynamic linker loads into each process of
//! the command, maps the file and adds to its counters. `haul run` reads the counters at the end.
//! This crate has the layout that both sides need, and contains neither input nor output.
//!
//! All counters are 64-bit words in the byte order of the host. The file has three parts:
//!
//! 1. a header of [`HEADER_WORDS`],
//! 2. [`SLOTS`] slots of [`SLOT_WORDS`] each, one for each process,
//! 3. [`LOG_ENTRIES`] log entries of [`LOG_ENTRY_WORDS`] each, one for each connection whose bytes
//!    one process alone cannot account for.
//!
//! Limits: the processes beyond the last slot share the last slot, so their bytes are counted, but
//! not by process. Connections beyond the last log entry are not compared with the kernel's count.

#![forbid(unsafe_code)]

mod layout;
mod vocabulary;

pub use layout::*;
pub use vocabulary::{DescriptorKind, SendMethod, SizeClass};
