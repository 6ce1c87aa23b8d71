//! The ways of forwarding, by name.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A way of forwarding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TestedForwardMethod {
    /// Through a buffer: `recv`, `send`.
    Copy,
    /// Through a pipe: `splice` twice.
    Splice,
    /// Inside the kernel: a BPF program passes each packet on.
    Sockmap,
    /// What [`haul::Forwarder`] does: copies what is small and splices what is large.
    Auto,
}

impl TestedForwardMethod {
    /// All of them, as tables show them.
    pub const ALL: [Self; 4] = [Self::Copy, Self::Splice, Self::Sockmap, Self::Auto];

    /// Its name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Splice => "splice",
            Self::Sockmap => "sockmap",
            Self::Auto => crate::tested_method::AUTO,
        }
    }

    /// Whether it goes through a buffer or a pipe whose size can be chosen.
    pub fn has_buffer(self) -> bool {
        matches!(self, Self::Copy | Self::Splice)
    }
}

impl fmt::Display for TestedForwardMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that nothing has.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown way {0:?}; the ways of forwarding are {names}", names = TestedForwardMethod::ALL.map(TestedForwardMethod::name).join(", "))]
pub struct UnknownForwardMethod(String);

impl FromStr for TestedForwardMethod {
    type Err = UnknownForwardMethod;

    fn from_str(text: &str) -> Result<Self, UnknownForwardMethod> {
        Self::ALL
            .into_iter()
            .find(|way| way.name() == text)
            .ok_or_else(|| UnknownForwardMethod(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for way in TestedForwardMethod::ALL {
            assert_eq!(way.name().parse(), Ok(way));
        }
        let error = "splise".parse::<TestedForwardMethod>().unwrap_err().to_string();
        assert!(error.contains("splise") && error.contains("sockmap"), "{error}");
    }
}
