//! The public types of loans: identifier, limits, outcome and returned buffer.

use crate::buffer::Buffer;
use crate::error::Error;
use std::fmt;

/// The identifier of a loan, unique within its sender and ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoanId(pub(crate) u64);

impl LoanId {
    /// The number, for other languages.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// A lent buffer that is returned to the caller.
#[derive(Debug)]
#[non_exhaustive]
pub struct Returned {
    /// The identifier of the loan.
    pub id: LoanId,
    /// The buffer, owned by the caller again.
    pub buffer: Buffer,
    /// The other buffers of [`crate::Sender::lend_vectored`], in their order.
    pub more: Vec<Buffer>,
    /// How the bytes were sent.
    pub outcome: LoanOutcome,
    /// How many of the bytes the socket accepted: all, unless the connection failed before.
    pub sent_bytes: usize,
}

/// How the bytes of a loan were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoanOutcome {
    /// The kernel sent all that it accepted from the buffer itself.
    ZeroCopied,
    /// Some or all of the bytes were copied: by this library, because they were few or the socket
    /// does not support zero-copy, or by the kernel.
    Copied,
}

/// Limits on the outstanding loans of one sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoanLimits {
    /// The number of loans.
    pub loans_max: usize,
    /// Bytes of all loans together; a single loan cannot be larger either.
    pub bytes_max: usize,
}

impl Default for LoanLimits {
    /// 64 loans of 16 MiB together: the bandwidth-delay product of 10 Gbit/s and 13 ms. An
    /// unprivileged user may pin 8 MiB (`RLIMIT_MEMLOCK`); loans beyond that are copied.
    fn default() -> Self {
        Self { loans_max: 64, bytes_max: 16 << 20 }
    }
}

impl LoanLimits {
    /// Sets the number of loans.
    #[must_use]
    pub fn with_loans_max(mut self, loans_max: usize) -> Self {
        self.loans_max = loans_max;
        self
    }

    /// Sets the bytes of all loans together.
    #[must_use]
    pub fn with_bytes_max(mut self, bytes_max: usize) -> Self {
        self.bytes_max = bytes_max;
        self
    }
}

/// A loan that was refused, with its buffers unchanged.
#[derive(Debug)]
#[non_exhaustive]
pub struct LendError {
    /// The reason.
    pub error: Error,
    /// The buffer, of which nothing was sent.
    pub buffer: Buffer,
    /// The other buffers of [`crate::Sender::lend_vectored`], in their order.
    pub more: Vec<Buffer>,
}

impl LendError {
    pub(crate) fn new(error: Error, buffer: Buffer) -> Self {
        Self { error, buffer, more: Vec::new() }
    }
}

impl fmt::Display for LendError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(formatter)
    }
}

impl std::error::Error for LendError {}

impl From<LendError> for Error {
    /// Drops the buffers.
    fn from(refused: LendError) -> Self {
        refused.error
    }
}

impl From<LendError> for std::io::Error {
    /// Drops the buffers.
    fn from(refused: LendError) -> Self {
        refused.error.into()
    }
}
