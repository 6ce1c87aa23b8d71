//! The layout of the tally: the memory that each process under `haul run` shares with `haul run`.
//!
//! `haul run` creates the memory, a sealed memory file, and sends its descriptor to each process of
//! the command that asks for it. The interposer, which the dynamic linker loads into each process,
//! maps the memory and adds to its counters. `haul run` reads the counters at the end. This crate
//! has the layout and the messages that both sides need, and contains neither input nor output.
//!
//! All values are 64-bit words in the byte order of the host, which are accessed atomically:
//!
//! 1. a header of [`HEADER_WORDS`],
//! 2. [`SLOTS`] slots of [`SLOT_WORDS`] each: counters, one slot for each process,
//! 3. [`LOG_ENTRIES`] log entries of [`LOG_ENTRY_WORDS`] each, one for each connection whose bytes
//!    one process alone cannot account for,
//! 4. [`FILES`] entries of [`FILE_ENTRY_WORDS`] each, one for each leased file,
//! 5. [`SOCKETS`] entries of [`SOCKET_ENTRY_WORDS`] each, one for each socket to which pages of a
//!    leased file were sent.
//!
//! Limits: the processes beyond the last slot share the last slot, so their bytes are counted, but
//! not by process. Connections beyond the last log entry are not compared with the kernel's count.
//! Without a free entry for a file or a socket, the bytes are copied.

#![forbid(unsafe_code)]

mod layout;
pub mod message;
mod vocabulary;

pub use layout::*;
pub use vocabulary::{DescriptorKind, NotElided, SendMethod, SizeClass};
