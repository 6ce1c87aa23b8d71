//! How a kernel stores the bytes that it sums, as constants for a const generic parameter.

/// Stores nothing.
pub(crate) const NONE: u8 = 0;
/// Ordinary stores into the caches.
pub(crate) const CACHED: u8 = 1;
/// Streaming stores, which bypass the caches.
pub(crate) const STREAMED: u8 = 2;
