//! The ways of receiving, by name.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A way of receiving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReceiveMethod {
    /// `recv` into a buffer.
    Read,
    /// Map the socket's pages (`TCP_ZEROCOPY_RECEIVE`), read what cannot be mapped.
    Mapped,
    /// `splice` through a pipe into a file's page cache.
    SpliceToFile,
    /// io_uring: one `recv` that completes again and again, into a ring of buffers.
    UringRead,
    /// Throw it away untouched (`MSG_TRUNC`): the stack's own cost, and so the floor.
    Discard,
    /// What [`haul::Receiver`] does: maps and reads in turn, and keeps to the cheaper.
    Auto,
}

impl ReceiveMethod {
    /// All of them, as tables show them.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Mapped, Self::SpliceToFile, Self::UringRead, Self::Discard, Self::Auto];

    /// Its name in reports and flags.
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

    /// Whether the bytes come to stand in the program's memory, so that it could look at them.
    pub fn shows_bytes(self) -> bool {
        !matches!(self, Self::SpliceToFile | Self::Discard)
    }
}

impl fmt::Display for ReceiveMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that nothing has.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown way {0:?}; the ways of receiving are {names}", names = ReceiveMethod::ALL.map(ReceiveMethod::name).join(", "))]
pub struct UnknownReceiveMethod(String);

impl FromStr for ReceiveMethod {
    type Err = UnknownReceiveMethod;

    fn from_str(text: &str) -> Result<Self, UnknownReceiveMethod> {
        Self::ALL
            .into_iter()
            .find(|way| way.name() == text)
            .ok_or_else(|| UnknownReceiveMethod(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for way in ReceiveMethod::ALL {
            assert_eq!(way.name().parse(), Ok(way));
        }
        let error = "reed".parse::<ReceiveMethod>().unwrap_err().to_string();
        assert!(error.contains("reed") && error.contains("uring-read"), "{error}");
    }
}
