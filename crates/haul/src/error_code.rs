//! [`ErrorCode`]: the stable numbers and names of errors.

use std::fmt;

/// The code of an [`crate::Error`]. A code keeps its number and its name in every later version,
/// and another code never gets the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u16)]
pub enum ErrorCode {
    /// The kernel refuses a call.
    Refused = 1,
    /// The method does not support the source or the socket.
    Unsupported = 2,
    /// An argument is invalid.
    InvalidInput = 3,
    /// The descriptor is not a socket.
    NotASocket = 4,
    /// The socket is of another kind than the call needs.
    WrongSocket = 5,
    /// The file ends before the range.
    Ended = 6,
    /// The socket is not ready.
    WouldBlock = 7,
    /// A time limit of the program was reached.
    TimedOut = 8,
    /// The loan limits are reached.
    LoanLimit = 9,
    /// An empty buffer cannot be lent.
    LoanEmpty = 10,
    /// A loan is larger than the limits allow.
    LoanTooLarge = 11,
    /// The stream lacks the rest of a loan.
    StreamTorn = 12,
    /// The sender belongs to the parent process.
    Forked = 13,
    /// All buffers of a pool are in use.
    PoolEmpty = 14,
    /// A call failed for another reason.
    Failed = 15,
}

impl ErrorCode {
    /// The number, for other languages.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The name, for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Unsupported => "unsupported",
            Self::InvalidInput => "invalid-input",
            Self::NotASocket => "not-a-socket",
            Self::WrongSocket => "wrong-socket",
            Self::Ended => "ended",
            Self::WouldBlock => "would-block",
            Self::TimedOut => "timed-out",
            Self::LoanLimit => "loan-limit",
            Self::LoanEmpty => "loan-empty",
            Self::LoanTooLarge => "loan-too-large",
            Self::StreamTorn => "stream-torn",
            Self::Forked => "forked",
            Self::PoolEmpty => "pool-empty",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs in other languages compare these numbers. A new code is added to the end.
    #[test]
    fn the_numbers_and_names_are_fixed() {
        let codes = [
            (ErrorCode::Refused, 1, "refused"),
            (ErrorCode::Unsupported, 2, "unsupported"),
            (ErrorCode::InvalidInput, 3, "invalid-input"),
            (ErrorCode::NotASocket, 4, "not-a-socket"),
            (ErrorCode::WrongSocket, 5, "wrong-socket"),
            (ErrorCode::Ended, 6, "ended"),
            (ErrorCode::WouldBlock, 7, "would-block"),
            (ErrorCode::TimedOut, 8, "timed-out"),
            (ErrorCode::LoanLimit, 9, "loan-limit"),
            (ErrorCode::LoanEmpty, 10, "loan-empty"),
            (ErrorCode::LoanTooLarge, 11, "loan-too-large"),
            (ErrorCode::StreamTorn, 12, "stream-torn"),
            (ErrorCode::Forked, 13, "forked"),
            (ErrorCode::PoolEmpty, 14, "pool-empty"),
            (ErrorCode::Failed, 15, "failed"),
        ];
        for (code, number, name) in codes {
            assert_eq!((code.number(), code.name()), (number, name));
        }
    }
}
