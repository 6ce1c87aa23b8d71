//! HTTP/1.1 messages: the request head, bodies, conditional requests, ranges and content codings.
//!
//! The crate is arithmetic over bytes. It opens nothing, waits for nothing and sends nothing. All
//! of its input may be hostile: every parser has a limit, a property test and a fuzz target.
//!
//! It does not parse responses, and it knows no HTTP/2.

#![forbid(unsafe_code)]

pub mod chunked;
pub mod conditional;
pub mod credentials;
pub mod encoding;
pub mod range;
pub mod request;
pub mod status;
pub mod target;
