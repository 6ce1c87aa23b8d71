//! What came of sending, whatever lies between HTTP and the socket.

/// What came of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// So many bytes went.
    Bytes(u64),
    /// None now.
    Blocked,
    /// The file ends before the range does.
    Ended,
    /// The connection is no more.
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
