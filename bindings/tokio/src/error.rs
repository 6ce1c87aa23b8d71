//! [`LendError`]: an error with the buffer.

use haul::Buffer;
use std::{error, fmt, io};

/// A buffer was not lent, or was lent and not sent.
#[derive(Debug)]
pub struct LendError {
    /// What failed.
    pub error: io::Error,
    /// The buffer, if the loan did not begin. A loan that began before the error continues, and the
    /// buffer is dropped after its end.
    pub buffer: Option<Buffer>,
}

impl LendError {
    pub(crate) fn new(error: io::Error, buffer: Option<Buffer>) -> Self {
        Self { error, buffer }
    }
}

impl fmt::Display for LendError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(formatter)
    }
}

impl error::Error for LendError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.error.source()
    }
}

impl From<LendError> for io::Error {
    fn from(error: LendError) -> Self {
        error.error
    }
}
