//! Messages between an interposed process and the broker of `haul run`, over a Unix socket that
//! keeps messages apart (`SOCK_SEQPACKET`).
//!
//! A process connects and sends a request of one byte. The broker answers each request.

/// Request: the tally. The answer is one byte with the tally's descriptor.
pub const REQUEST_TALLY: u8 = b'T';
/// Request: a lease of the file whose descriptor comes with the message. The answer is four bytes:
/// the number of the file's entry, or [`REFUSED`] plus the reason, a position in
/// [`crate::NotElided::ALL`].
pub const REQUEST_LEASE: u8 = b'L';
/// An answer of at least this value refuses a lease.
pub const REFUSED: u32 = 1 << 16;
/// The longest time that a process waits for an answer, in ms.
pub const ANSWER_MS_MAX: u64 = 2000;
/// The broker's interval between signs of life, in ms.
pub const HEARTBEAT_MS: u64 = 100;
/// The age of a sign of life from which the broker is taken for ended, in ms. Much shorter than the
/// time after which the kernel breaks a lease that is not returned (45 s by default).
pub const HEARTBEAT_MS_MAX: u64 = 2000;
