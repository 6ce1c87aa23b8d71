//! The forward methods and their names.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A forward method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TestedForwardMethod {
    /// Through a buffer in user space: `recv`, then `send`.
    Copy,
    /// Through a pipe: two calls of `splice`.
    Splice,
    /// Inside the kernel: a BPF program redirects each packet (sockmap).
    Sockmap,
    /// The choice of [`haul::Forwarder`]: it copies small amounts and splices large ones.
    Auto,
    /// TLS, decrypted in the program: `recv`, decryption in place, then `send`.
    TlsCopy,
    /// TLS, decrypted in the kernel (kTLS): `recv`, then `send`.
    KtlsCopy,
    /// TLS, decrypted in the kernel (kTLS), through a pipe.
    KtlsSplice,
}

impl TestedForwardMethod {
    /// All methods, in the order of tables.
    pub const ALL: [Self; 7] = [
        Self::Copy,
        Self::Splice,
        Self::Sockmap,
        Self::Auto,
        Self::TlsCopy,
        Self::KtlsCopy,
        Self::KtlsSplice,
    ];

    /// The name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Splice => "splice",
            Self::Sockmap => "sockmap",
            Self::Auto => crate::tested_method::AUTO,
            Self::TlsCopy => "tls-copy",
            Self::KtlsCopy => "ktls-copy",
            Self::KtlsSplice => "ktls-splice",
        }
    }

    /// Whether the method uses a buffer or a pipe whose size can be set.
    pub fn has_buffer(self) -> bool {
        !matches!(self, Self::Sockmap | Self::Auto)
    }

    /// Whether the method ends TLS: it receives a TLS stream and sends the plaintext.
    pub fn ends_tls(self) -> bool {
        matches!(self, Self::TlsCopy | Self::KtlsCopy | Self::KtlsSplice)
    }
}

impl fmt::Display for TestedForwardMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// The error for a name that belongs to no forward method.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "unknown forward method {0:?}; the methods are {names}",
    names = TestedForwardMethod::ALL.map(TestedForwardMethod::name).join(", ")
)]
pub struct UnknownForwardMethod(String);

impl FromStr for TestedForwardMethod {
    type Err = UnknownForwardMethod;

    fn from_str(text: &str) -> Result<Self, UnknownForwardMethod> {
        Self::ALL
            .into_iter()
            .find(|method| method.name() == text)
            .ok_or_else(|| UnknownForwardMethod(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for method in TestedForwardMethod::ALL {
            assert_eq!(method.name().parse(), Ok(method));
        }
        let error = "splise".parse::<TestedForwardMethod>().unwrap_err().to_string();
        assert!(error.contains("splise") && error.contains("sockmap"), "{error}");
    }
}
