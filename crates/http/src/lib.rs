//! HTTP/1.1 messages: the request head, bodies, conditional requests, ranges and content codings.
//!
//! The crate only computes: it does no I/O and never blocks. All its input is untrusted, so every
//! parser has a limit, a property test and a fuzz target.
//!
//! It does not parse responses and does not support HTTP/2.

#![forbid(unsafe_code)]

pub mod accept;
pub mod chunked;
pub mod conditional;
pub mod credentials;
pub mod encoding;
pub mod host;
pub mod list_field;
pub mod range;
pub mod request;
pub mod status;
pub mod target;
