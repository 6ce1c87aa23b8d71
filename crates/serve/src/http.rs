//! HTTP/1.1 as far as files go: what bytes mean. Nothing here opens, waits or sends; all of it meets hostile input, and is fuzzed.

pub mod chunked;
pub mod conditional;
pub mod credentials;
pub mod encoding;
pub mod range;
pub mod request;
pub mod status;
pub mod target;
