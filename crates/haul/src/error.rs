//! [`Error`]: why bytes were not moved, and what to do about it.

use crate::call::Call;
use crate::error_code::ErrorCode;
use rustix::io::Errno;
use std::{fmt, io};

/// Why bytes were not moved.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refuses the call, in general or for this socket. Another method may work:
    /// [`crate::SendMethod::fallback`].
    #[non_exhaustive]
    Refused {
        /// The call that was refused.
        call: Call,
        /// The kernel's error.
        error: io::Error,
    },
    /// The method does not support this socket or this source. Another method may work.
    Unsupported(&'static str),
    /// An argument is invalid: no method could do it.
    InvalidInput(&'static str),
    /// The descriptor is not a socket.
    NotASocket,
    /// The socket is of the wrong kind.
    #[non_exhaustive]
    WrongSocket {
        /// The kind of socket that is needed.
        needed: &'static str,
        /// The kind of socket that was given.
        found: &'static str,
    },
    /// The source ended before the range did: the range is too long, or the file was truncated.
    #[non_exhaustive]
    Ended {
        /// The offset from which nothing more could be read.
        at: u64,
    },
    /// The socket is not ready, or its timeout has expired. Wait until it is ready and call again.
    /// Nothing was moved, unless a call reports its progress otherwise ([`SendAllError`],
    /// [`crate::Sender::send_response`]).
    WouldBlock,
    /// A limit on idle time is reached: [`crate::ForwardSettings::idle_timeout`] or
    /// [`crate::ForwardSettings::half_closed_timeout`].
    TimedOut(&'static str),
    /// The loan limits ([`crate::LoanLimits`]) are reached, on a non-blocking socket. Waiting for
    /// `POLLOUT` does not help: wait for `POLLERR`, reclaim, and call again.
    LoanLimit,
    /// The buffer to lend is empty.
    LoanEmpty,
    /// The loan is larger than the limit on all loans together.
    #[non_exhaustive]
    LoanTooLarge {
        /// The size of the loan.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// The stream is torn: part of a loan was sent and the rest failed, so later bytes would follow
    /// a gap.
    StreamTorn,
    /// The process has forked: the kernel's completions belong to the parent.
    Forked,
    /// All buffers of a pool are in use. Return some, or wait
    /// ([`crate::BufferPool::take_timeout`]). The socket stays ready, so do not poll it until then.
    #[non_exhaustive]
    PoolEmpty {
        /// The number of buffers that the pool may have.
        buffers_max: usize,
    },
    /// The call failed for another reason, such as a reset connection or a disk error.
    #[non_exhaustive]
    Failed {
        /// The call that failed.
        call: Call,
        /// The kernel's error.
        error: io::Error,
    },
}

impl Error {
    /// The stable code of the error, for logs, metrics and other languages.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Refused { .. } => ErrorCode::Refused,
            Self::Unsupported(_) => ErrorCode::Unsupported,
            Self::InvalidInput(_) => ErrorCode::InvalidInput,
            Self::NotASocket => ErrorCode::NotASocket,
            Self::WrongSocket { .. } => ErrorCode::WrongSocket,
            Self::Ended { .. } => ErrorCode::Ended,
            Self::WouldBlock => ErrorCode::WouldBlock,
            Self::TimedOut(_) => ErrorCode::TimedOut,
            Self::LoanLimit => ErrorCode::LoanLimit,
            Self::LoanEmpty => ErrorCode::LoanEmpty,
            Self::LoanTooLarge { .. } => ErrorCode::LoanTooLarge,
            Self::StreamTorn => ErrorCode::StreamTorn,
            Self::Forked => ErrorCode::Forked,
            Self::PoolEmpty { .. } => ErrorCode::PoolEmpty,
            Self::Failed { .. } => ErrorCode::Failed,
        }
    }

    /// The kind that the error has as an [`io::Error`].
    pub fn kind(&self) -> io::ErrorKind {
        if let Some(errno) = self.raw_os_error() {
            return io::Error::from_raw_os_error(errno).kind();
        }
        match self {
            Self::Refused { error, .. } | Self::Failed { error, .. } => error.kind(),
            Self::TimedOut(_) => io::ErrorKind::TimedOut,
            // Not `WouldBlock`: a caller would wait until the socket is writable, which it is.
            Self::LoanLimit | Self::PoolEmpty { .. } => io::ErrorKind::ResourceBusy,
            Self::Ended { .. } => io::ErrorKind::UnexpectedEof,
            Self::Unsupported(_) => io::ErrorKind::Unsupported,
            Self::StreamTorn => io::ErrorKind::BrokenPipe,
            // `WouldBlock` and `NotASocket` have a number; the others are the caller's mistake.
            _ => io::ErrorKind::InvalidInput,
        }
    }

    /// The kernel's error number, if the kernel reported one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Refused { error, .. } | Self::Failed { error, .. } => error.raw_os_error(),
            Self::WouldBlock => Some(Errno::AGAIN.raw_os_error()),
            Self::NotASocket => Some(Errno::NOTSOCK.raw_os_error()),
            _ => None,
        }
    }

    /// Whether another method, or a plain copy, may succeed where this one failed.
    pub(crate) fn is_refusal(&self) -> bool {
        self.refusal().is_some()
    }

    /// What a refusal means for later calls; `None` if this is none.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Unsupported(_) => Some(Refusal::Lasting),
            Self::Refused { call, error } => Some(match Errno::from_io_error(error) {
                Some(Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN) => {
                    Refusal::Temporary
                }
                // File systems answer with many numbers that a file cannot be mapped (EIO in
                // /proc).
                _ if *call == Call::Mmap => Refusal::OfFile,
                Some(Errno::INVAL | Errno::NODEV) => Refusal::OfFile,
                _ => Refusal::Lasting,
            }),
            _ => None,
        }
    }
}

/// What a refused method means for later calls on the same socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The kernel, a container or the socket does not allow it.
    Lasting,
    /// The file does not support it; another one may.
    OfFile,
    /// Memory or descriptors are used up.
    Temporary,
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { call, error } => {
                write!(formatter, "the kernel refuses {call}: {error}{}", advice(error))
            }
            Self::Unsupported(reason) | Self::InvalidInput(reason) | Self::TimedOut(reason) => {
                formatter.write_str(reason)
            }
            Self::NotASocket => {
                formatter.write_str("the descriptor is not a socket: pass a connected one")
            }
            Self::WrongSocket { needed, found } => {
                write!(formatter, "this needs {needed}, and the socket is {found}")
            }
            Self::Ended { at } => write!(
                formatter,
                "the file ends at byte {at} or before, and the range does not: ask for less, or \
                 check for truncation"
            ),
            Self::WouldBlock => formatter.write_str(
                "the socket would block, or its timeout has expired: wait until it is ready",
            ),
            Self::LoanLimit => formatter.write_str(
                "the loan limits are reached: reclaim, then wait for POLLERR if no buffer is \
                 returned",
            ),
            Self::LoanEmpty => {
                formatter.write_str("an empty buffer cannot be lent: there is nothing to send")
            }
            Self::LoanTooLarge { bytes, bytes_max } => write!(
                formatter,
                "a loan of {bytes} bytes is over the limit of {bytes_max} bytes: lend the buffer \
                 in parts, or raise the limit"
            ),
            Self::StreamTorn => formatter.write_str(
                "the stream lacks the rest of a loan, whose error was returned before: close it",
            ),
            Self::Forked => formatter.write_str(
                "this sender was created before a fork: only the parent may lend and reclaim",
            ),
            Self::PoolEmpty { buffers_max } => write!(
                formatter,
                "all {buffers_max} buffers of the pool are in use: reclaim some, or use a larger \
                 pool"
            ),
            Self::Failed { call, error } => {
                write!(formatter, "{call}: {error}{}", remedy(*call, error))
            }
        }
    }
}

// `source` is `None`: the message has the kernel's error, and a chain would print it twice.
impl std::error::Error for Error {}

impl From<Error> for io::Error {
    /// Keeps the kernel's error number, and with it the kind. Such an error does not name the call:
    /// log the [`Error`] instead. Other errors keep their message.
    fn from(error: Error) -> Self {
        if let Some(errno) = error.raw_os_error() {
            return Self::from_raw_os_error(errno);
        }
        Self::new(error.kind(), error)
    }
}

/// Why [`crate::Sender::send_all`] or [`crate::Sender::send_file_all`] has not sent everything.
#[derive(Debug)]
#[non_exhaustive]
pub struct SendAllError {
    /// The reason.
    pub error: Error,
    /// The bytes that were sent before. To continue, send the rest.
    pub sent_bytes: u64,
}

impl fmt::Display for SendAllError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { error, sent_bytes } = self;
        write!(formatter, "after {sent_bytes} bytes: {error}")
    }
}

impl std::error::Error for SendAllError {}

impl From<SendAllError> for io::Error {
    /// Keeps the kernel's error number, and drops the number of bytes that were sent. Of a call
    /// that would block after it has sent some, the error is no [`io::ErrorKind::WouldBlock`]: a
    /// caller would send them again.
    fn from(partial: SendAllError) -> Self {
        match partial {
            SendAllError { error: Error::WouldBlock, sent_bytes: 1.. } => Self::other(partial),
            SendAllError { error, .. } => error.into(),
        }
    }
}

/// `ENOTSUPP`, which Linux before 6.0 returns for `SO_ZEROCOPY` on protocols that lack it.
const NOTSUPP: Errno = Errno::from_raw_os_error(524);

/// Converts an error of `call`, and separates errors that another method could avoid from the
/// others.
pub(crate) fn failed(call: Call) -> impl Fn(io::Error) -> Error {
    move |error| {
        match Errno::from_io_error(&error) {
            Some(Errno::AGAIN) if call.waits_for_socket() => Error::WouldBlock,
            Some(Errno::NOTSOCK) => Error::NotASocket,
            Some(
                Errno::INVAL
                | Errno::OPNOTSUPP
                | Errno::PERM
                | Errno::ACCESS
                | Errno::NOSYS
                | Errno::NODEV
                | Errno::NOMEM
                | Errno::MFILE
                | Errno::NFILE
                | Errno::NOPROTOOPT
                // The kernel lacks memory, and the socket may be ready.
                | Errno::AGAIN
                | NOTSUPP,
            ) => Error::Refused { call, error },
            _ => Error::Failed { call, error },
        }
    }
}

/// Advice on an error, appended to its message; empty if none is known.
fn advice(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => " (raise ulimit -n)",
        Some(Errno::PERM | Errno::NOSYS | Errno::ACCESS) => {
            " (a seccomp filter or a container forbids it)"
        }
        _ => "",
    }
}

/// What to do about an error that is not a refusal.
fn remedy(call: Call, error: &io::Error) -> &'static str {
    match (call, Errno::from_io_error(error)) {
        (Call::Recv | Call::RecvPeek, Some(Errno::IO)) => {
            " (the next TLS record is not application data: receive it with its type)"
        }
        (_, Some(Errno::NOTCONN | Errno::DESTADDRREQ)) => " (connect the socket first)",
        (Call::Send | Call::SendZerocopy, Some(Errno::MSGSIZE)) => {
            " (a datagram holds at most 65,507 bytes, a segment what the MTU allows)"
        }
        (_, Some(Errno::BADF)) => " (the descriptor is not open for this direction)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `EAGAIN` of a call that does not wait for the socket must not make the caller wait for it.
    #[test]
    fn only_calls_on_the_socket_would_block() {
        let again = || io::Error::from_raw_os_error(11);
        for call in [Call::Recv, Call::Send, Call::Sendfile, Call::SpliceFromSocket] {
            assert!(matches!(failed(call)(again()), Error::WouldBlock), "{call}");
        }
        for call in [Call::Mmap, Call::Pipe, Call::Fcntl] {
            assert!(failed(call)(again()).is_refusal(), "{call}");
        }
    }

    #[test]
    fn a_blocked_call_that_has_sent_bytes_is_no_would_block() {
        let partial = |sent_bytes| SendAllError { error: Error::WouldBlock, sent_bytes };
        assert_eq!(io::Error::from(partial(0)).kind(), io::ErrorKind::WouldBlock);
        let error = io::Error::from(partial(3));
        assert_eq!(error.kind(), io::ErrorKind::Other);
        assert!(error.to_string().starts_with("after 3 bytes: "), "{error}");
        assert_eq!(io::Error::from(Error::LoanLimit).kind(), io::ErrorKind::ResourceBusy);
    }

    #[test]
    fn only_a_refusal_of_the_kernel_or_the_socket_lasts() {
        let refusal = |errno: Errno| failed(Call::Sendfile)(errno.into()).refusal();
        for errno in [Errno::PERM, Errno::NOSYS, Errno::OPNOTSUPP, NOTSUPP] {
            assert_eq!(refusal(errno), Some(Refusal::Lasting), "{errno}");
        }
        assert_eq!(refusal(Errno::INVAL), Some(Refusal::OfFile));
        assert_eq!(refusal(Errno::MFILE), Some(Refusal::Temporary));
        assert_eq!(refusal(Errno::CONNRESET), None);
    }
}
