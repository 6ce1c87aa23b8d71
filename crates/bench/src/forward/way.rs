//! The ways of forwarding, by name.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A way of forwarding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ForwardBy {
    /// Through a buffer: `recv`, `send`.
    Copy,
    /// Through a pipe: `splice` twice.
    Splice,
    /// Inside the kernel: a BPF program passes each packet on.
    Sockmap,
    /// What [`haul::Forwarder`] does: copies what is small and splices what is large.
    Auto,
}

impl ForwardBy {
    /// All of them, as tables show them.
    pub const ALL: [Self; 4] = [Self::Copy, Self::Splice, Self::Sockmap, Self::Auto];

    /// Its name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Splice => "splice",
            Self::Sockmap => "sockmap",
            Self::Auto => crate::way::AUTO,
        }
    }

    /// Whether it goes through a buffer or a pipe whose size can be chosen.
    pub fn has_buffer(self) -> bool {
        matches!(self, Self::Copy | Self::Splice)
    }
}

impl fmt::Display for ForwardBy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that nothing has.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown way {0:?}; the ways of forwarding are {names}", names = ForwardBy::ALL.map(ForwardBy::name).join(", "))]
pub struct UnknownForwardWay(String);

impl FromStr for ForwardBy {
    type Err = UnknownForwardWay;

    fn from_str(text: &str) -> Result<Self, UnknownForwardWay> {
        Self::ALL.into_iter().find(|way| way.name() == text).ok_or_else(|| UnknownForwardWay(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for way in ForwardBy::ALL {
            assert_eq!(way.name().parse(), Ok(way));
        }
        let error = "splise".parse::<ForwardBy>().unwrap_err().to_string();
        assert!(error.contains("splise") && error.contains("sockmap"), "{error}");
    }
}
