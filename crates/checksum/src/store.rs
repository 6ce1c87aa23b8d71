//! What a kernel does with the bytes that it sums, as numbers that can be a kernel's parameter.

/// Nothing.
pub(crate) const NONE: u8 = 0;
/// Stores them as any copy does.
pub(crate) const CACHED: u8 = 1;
/// Stores them past the caches.
pub(crate) const STREAMED: u8 = 2;
