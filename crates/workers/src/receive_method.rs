//! The receive methods and their names.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A receive method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReceiveMethod {
    /// `recv` into a buffer.
    Read,
    /// Maps the socket's pages (`TCP_ZEROCOPY_RECEIVE`) and reads what cannot be mapped.
    Mapped,
    /// `splice` through a pipe into a file's page cache.
    SpliceToFile,
    /// io_uring: one multishot `recv` into a ring of buffers.
    UringRead,
    /// Discards the payload in the kernel (`MSG_TRUNC`): the cost of the network stack alone, and
    /// so the lower bound.
    Discard,
    /// The choice of [`haul::Receiver`]: it tries mapping and reading, and keeps the cheaper one.
    Auto,
}

impl ReceiveMethod {
    /// All methods, in the order of tables.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Mapped, Self::SpliceToFile, Self::UringRead, Self::Discard, Self::Auto];

    /// The name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Mapped => "mapped",
            Self::SpliceToFile => "splice-to-file",
            Self::UringRead => "uring-read",
            Self::Discard => "discard",
            Self::Auto => crate::tested_method::AUTO,
        }
    }

    /// Whether the payload reaches the program's memory, so that the program can read it.
    pub fn exposes_bytes(self) -> bool {
        !matches!(self, Self::SpliceToFile | Self::Discard)
    }
}

impl fmt::Display for ReceiveMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// The error for a name that belongs to no receive method.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "unknown receive method {0:?}; the methods are {names}",
    names = ReceiveMethod::ALL.map(ReceiveMethod::name).join(", ")
)]
pub struct UnknownReceiveMethod(String);

impl FromStr for ReceiveMethod {
    type Err = UnknownReceiveMethod;

    fn from_str(text: &str) -> Result<Self, UnknownReceiveMethod> {
        Self::ALL
            .into_iter()
            .find(|method| method.name() == text)
            .ok_or_else(|| UnknownReceiveMethod(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for method in ReceiveMethod::ALL {
            assert_eq!(method.name().parse(), Ok(method));
        }
        let error = "reed".parse::<ReceiveMethod>().unwrap_err().to_string();
        assert!(error.contains("reed") && error.contains("uring-read"), "{error}");
    }
}
