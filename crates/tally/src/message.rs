//! Messages between an interposed process and the broker of `haul run`, over a Unix socket that
//! keeps messages apart (`SOCK_SEQPACKET`).
//!
//! A process connects and sends a request: the token of the run, and one byte. The broker answers
//! each request.

/// Length of the token. Other users can see the name of the socket, but not the token.
pub const TOKEN_BYTES: usize = 32;
/// Length of a request.
pub const REQUEST_BYTES: usize = TOKEN_BYTES + 1;
/// Request: the tally. The answer is one byte with the tally's descriptor.
pub const REQUEST_TALLY: u8 = b'T';
/// Request: a lease of the file whose descriptor comes with the message. The answer is a
/// [`LeaseAnswer`].
pub const REQUEST_LEASE: u8 = b'L';
/// The longest time that a process waits for an answer, in ms.
pub const ANSWER_MS_MAX: u64 = 2000;
/// The broker's interval between signs of life, in ms.
pub const HEARTBEAT_MS: u64 = 100;
/// The age of a sign of life from which the broker is taken for ended, in ms. Much shorter than the
/// time after which the kernel breaks a lease that is not returned (45 s by default).
pub const HEARTBEAT_MS_MAX: u64 = 2000;

/// The answer to a request for a lease: the number of the file's entry and the state of the entry
/// while the lease stands, or the position of the reason among [`crate::NotElided::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseAnswer(pub Result<(u16, u64), u16>);

impl LeaseAnswer {
    /// Length of an answer.
    pub const BYTES: usize = 11;

    /// One byte, 1 for a lease; then two bytes of the number or of the reason; then the state.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let (is_lease, number, state) = match self.0 {
            Ok((number, state)) => (1, number, state),
            Err(reason) => (0, reason, 0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0] = is_lease;
        bytes[1..3].copy_from_slice(&number.to_le_bytes());
        bytes[3..].copy_from_slice(&state.to_le_bytes());
        bytes
    }

    /// Reads an answer; `None` for bytes that are not one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; Self::BYTES] = bytes.try_into().ok()?;
        let [kind, low, high, state @ ..] = bytes;
        let number = u16::from_le_bytes([low, high]);
        match kind {
            0 => Some(Self(Err(number))),
            1 => Some(Self(Ok((number, u64::from_le_bytes(state))))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_arrives_as_it_was_sent() {
        for answer in [Ok((1023, 0x301)), Err(7)].map(LeaseAnswer) {
            assert_eq!(LeaseAnswer::from_bytes(&answer.to_bytes()), Some(answer));
        }
        assert_eq!(LeaseAnswer::from_bytes(&[2; LeaseAnswer::BYTES]), None);
        assert_eq!(LeaseAnswer::from_bytes(&[0; 4]), None);
    }
}
