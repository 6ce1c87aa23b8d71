//! [`Error`]: why bytes were not moved, and what to do about it.

use crate::call::Call;
use std::io;

/// Why bytes were not moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel does not support the call, in general or for this socket. Another method may
    /// work: [`crate::SendMethod::fallback`].
    #[error("the kernel refuses {call}: {error}{}", advice(*.call, .error))]
    Refused {
        /// The call that was refused.
        call: Call,
        /// The kernel's error.
        error: io::Error,
    },
    /// An argument is invalid, or the method does not apply here.
    #[error("{0}")]
    Unsuited(&'static str),
    /// The descriptor is not a socket.
    #[error("the descriptor is not a socket: pass a connected one")]
    NotASocket,
    /// The socket is of the wrong kind.
    #[error("this needs {needed}, and the socket is {found}")]
    WrongSocket {
        /// The kind of socket that is needed.
        needed: &'static str,
        /// The kind of socket that was given.
        found: &'static str,
    },
    /// The source ended before the range did: the range is too long, or the file was truncated.
    #[error(
        "the file ends at byte {at}, before the range does: read less, or check for truncation"
    )]
    Ended {
        /// The offset from which nothing more could be read.
        at: u64,
    },
    /// The socket is not ready, or its timeout has expired; nothing was moved. Wait until it is
    /// ready and call again.
    #[error("the socket would block, or its timeout has expired: wait until it is ready")]
    WouldBlock,
    /// The loan limits ([`crate::LoanLimits`]) are reached, on a non-blocking socket. Waiting for
    /// `POLLOUT` does not help: wait for `POLLERR`, reclaim, and call again.
    #[error("the loan limits are reached: reclaim, then wait for POLLERR if no buffer is returned")]
    LoanLimit,
    /// The buffer to lend is empty.
    #[error("an empty buffer cannot be lent")]
    LoanEmpty,
    /// The loan is larger than the limit on all loans together.
    #[error(
        "a loan of {bytes} bytes is over LoanLimits::bytes_max ({bytes_max}): lend less or raise it"
    )]
    LoanTooLarge {
        /// The size of the loan.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// The stream is torn: part of a loan was sent and the rest failed, so later bytes would follow
    /// a gap.
    #[error("the stream lacks the rest of a loan, whose error was returned before: close it")]
    StreamTorn,
    /// The process has forked: the kernel's completions belong to the parent.
    #[error("this sender was created before a fork: only the parent may lend and reclaim")]
    Forked,
    /// All buffers of a pool are in use.
    #[error("all {buffers_max} buffers of the pool are in use: reclaim some, or use a larger pool")]
    PoolEmpty {
        /// The number of buffers that the pool may have.
        buffers_max: usize,
    },
    /// The call failed for another reason, such as a reset connection or a disk error.
    #[error("{call}: {error}")]
    Failed {
        /// The call that failed.
        call: Call,
        /// The kernel's error.
        error: io::Error,
    },
}

impl Error {
    /// The kernel's error number, if the kernel reported one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Refused { error, .. } | Self::Failed { error, .. } => error.raw_os_error(),
            _ => None,
        }
    }

    /// Whether another method, or a plain copy, may succeed where this one failed.
    pub(crate) fn is_refusal(&self) -> bool {
        self.refusal().is_some()
    }

    /// What a refusal means for later calls; `None` if this is none.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        use rustix::io::Errno;
        match self {
            Self::Unsuited(_) => Some(Refusal::Lasting),
            Self::Refused { error, .. } => Some(match Errno::from_io_error(error) {
                Some(Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN) => {
                    Refusal::Temporary
                }
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

impl From<Error> for io::Error {
    /// Keeps the kind that programs check for: `WouldBlock`, or that of the kernel's error if there
    /// is one.
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::WouldBlock | Error::LoanLimit => io::ErrorKind::WouldBlock,
            Error::PoolEmpty { .. } => io::ErrorKind::ResourceBusy,
            Error::Ended { .. } => io::ErrorKind::UnexpectedEof,
            Error::Refused { error, .. } | Error::Failed { error, .. } => error.kind(),
            _ => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

/// `ENOTSUPP`, which Linux before 6.0 returns for `SO_ZEROCOPY` on protocols that lack it.
const NOTSUPP: rustix::io::Errno = rustix::io::Errno::from_raw_os_error(524);

/// Converts an error of `call`, and separates errors that another method could avoid from the
/// others.
pub(crate) fn failed(call: Call) -> impl Fn(io::Error) -> Error {
    move |error| {
        use rustix::io::Errno;
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
                // The kernel lacks memory or workers: the socket may be ready nevertheless.
                | Errno::AGAIN
                // An io_uring ring that an earlier error has left unusable.
                | Errno::BADFD
                | NOTSUPP,
            ) => Error::Refused { call, error },
            _ => Error::Failed { call, error },
        }
    }
}

/// Advice on an error, appended to its message; empty if none is known.
fn advice(call: Call, error: &io::Error) -> &'static str {
    use rustix::io::Errno;
    match (call, Errno::from_io_error(error)) {
        (Call::UringSetup, Some(Errno::PERM)) => {
            " (sysctl kernel.io_uring_disabled=0, or allow it in seccomp)"
        }
        (Call::UringSetup, Some(Errno::NOSYS)) => {
            " (the kernel is older than 5.6, or seccomp hides io_uring)"
        }
        (Call::UringRegister | Call::UringSendZerocopy, Some(Errno::NOMEM)) => " (raise ulimit -l)",
        (_, Some(Errno::MFILE)) => " (raise ulimit -n)",
        (_, Some(Errno::PERM | Errno::NOSYS | Errno::ACCESS)) => {
            " (a seccomp filter or a container forbids it)"
        }
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
        for call in [Call::Mmap, Call::Pipe, Call::UringEnter, Call::Fcntl] {
            assert!(failed(call)(again()).is_refusal(), "{call}");
        }
    }

    #[test]
    fn only_a_refusal_of_the_kernel_or_the_socket_lasts() {
        use rustix::io::Errno;
        let refusal = |errno: Errno| failed(Call::Sendfile)(errno.into()).refusal();
        for errno in [Errno::PERM, Errno::NOSYS, Errno::OPNOTSUPP, Errno::BADFD, NOTSUPP] {
            assert_eq!(refusal(errno), Some(Refusal::Lasting), "{errno}");
        }
        assert_eq!(refusal(Errno::INVAL), Some(Refusal::OfFile));
        assert_eq!(refusal(Errno::MFILE), Some(Refusal::Temporary));
        assert_eq!(refusal(Errno::CONNRESET), None);
    }
}
