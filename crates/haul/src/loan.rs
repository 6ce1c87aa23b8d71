//! What a program sees of a loan.

use crate::buffer::Buffer;
use crate::error::Error;

/// The number of a loan, unique to its sender and ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoanId(pub(crate) u64);

/// A buffer that has come back.
#[derive(Debug)]
pub struct Returned {
    /// Which loan it was.
    pub id: LoanId,
    /// The buffer, the caller's again.
    pub buffer: Buffer,
    /// What became of it.
    pub outcome: Outcome,
    /// How many of its bytes the socket took: all, unless the connection failed or the sender was done before.
    pub sent_bytes: usize,
}

/// What became of a lent buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The kernel sent all that it took from the buffer itself.
    ZeroCopied,
    /// Some or all of it was copied: by this library, because it was small or the socket cannot do better, or
    /// by the kernel.
    Copied,
}

/// What may be out at a time, for one sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Loans.
    pub loans_max: usize,
    /// Bytes of all loans together; a single loan cannot be larger either.
    pub bytes_max: usize,
}

impl Default for Limits {
    /// 64 loans of 16 MiB together: the product of 10 Gbit/s and 13 ms. An ordinary user may have 8 MiB
    /// pinned (`RLIMIT_MEMLOCK`), beyond which loans are copied.
    fn default() -> Self {
        Self { loans_max: 64, bytes_max: 16 << 20 }
    }
}

impl From<LendError> for Error {
    /// Without the buffer, which is dropped.
    fn from(refused: LendError) -> Self {
        refused.error
    }
}

impl From<LendError> for std::io::Error {
    /// Without the buffer, which is dropped.
    fn from(refused: LendError) -> Self {
        refused.error.into()
    }
}

/// A loan that was not made; the buffer comes back untouched.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct LendError {
    /// Why.
    pub error: Error,
    /// The buffer: nothing of it was sent.
    pub buffer: Buffer,
}
