//! The result of a send, the same for plain, TLS and kTLS streams.

/// The result of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The socket accepted so many bytes.
    Bytes(u64),
    /// The socket is full.
    Blocked,
    /// The file ends before the range does.
    Ended,
    /// The connection failed.
    Broken,
}

impl From<Result<u64, haul::Error>> for Sent {
    fn from(sent: Result<u64, haul::Error>) -> Self {
        match sent {
            Ok(count) => Self::Bytes(count),
            Err(haul::Error::WouldBlock) => Self::Blocked,
            Err(haul::Error::Ended { .. }) => Self::Ended,
            Err(_) => Self::Broken,
        }
    }
}
