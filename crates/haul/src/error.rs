//! Why bytes did not move, and what to do about it.

use std::io;

/// Why bytes did not move.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel does not do it, here or for this socket. Another path may work:
    /// [`crate::SendMethod::fallback`].
    #[error("the kernel refuses {call}: {source}{}", advice(.call, .source))]
    Refused {
        /// The call that was refused.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// What was asked for makes no sense here.
    #[error("{0}")]
    Unsuited(&'static str),
    /// The descriptor is something else than a socket.
    #[error("the descriptor is not a socket: pass a connected one")]
    NotASocket,
    /// A socket of the wrong kind.
    #[error("this needs {needed}, and the socket is {found}")]
    WrongSocket {
        /// What kind of socket it takes.
        needed: &'static str,
        /// What it got.
        found: &'static str,
    },
    /// The source ended before the range did: the range is too long, or the file was truncated.
    #[error(
        "the file ends at byte {at}, before the range does: ask for less, or see who truncated it"
    )]
    Ended {
        /// Where it ends, or rather where nothing more could be read.
        at: u64,
    },
    /// The socket takes or gives nothing now, or its timeout is over; nothing was moved. Wait until it is ready
    /// and call again.
    #[error("the socket would block, or its timeout is over: wait until it is ready")]
    WouldBlock,
    /// As much is lent as may be ([`crate::Limits`]), on a non-blocking socket. Being writable does not help: wait
    /// for `POLLERR`, reclaim, and call again.
    #[error("as much is lent as may be: reclaim, then wait for POLLERR if nothing came back")]
    LoansOut,
    /// A loan of nothing.
    #[error("an empty buffer cannot be lent")]
    LoanEmpty,
    /// A loan that is larger than all loans together may be.
    #[error(
        "a loan of {bytes} bytes is over the bound of {bytes_max}: lend less, or raise Limits::bytes_max"
    )]
    LoanTooLarge {
        /// The loan's size.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// A loan went in part and the rest of it failed: what came next would follow a hole.
    #[error("the stream lacks the rest of a loan, whose error was told before: close it")]
    StreamTorn,
    /// The process has forked: the kernel's notices belong to the parent.
    #[error("this sender was made before a fork: only the parent may lend and reclaim")]
    Forked,
    /// All of a pool's buffers are out.
    #[error("all {buffers_max} buffers of the pool are out: reclaim some, or make the pool larger")]
    PoolEmpty {
        /// How many the pool has.
        buffers_max: usize,
    },
    /// The call failed for a reason of its own: a reset connection, a disk error.
    #[error("{call}: {source}")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    /// The kernel's error number, where the kernel said something.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } | Self::Failed { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Whether another path, or a plain copy, may do what this one could not.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Unsuited(_))
    }
}

impl From<Error> for io::Error {
    /// With the kind that programs ask for: `WouldBlock`, or the kernel's own where it said something.
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::WouldBlock | Error::LoansOut => io::ErrorKind::WouldBlock,
            Error::PoolEmpty { .. } => io::ErrorKind::ResourceBusy,
            Error::Ended { .. } => io::ErrorKind::UnexpectedEof,
            Error::Refused { source, .. } | Error::Failed { source, .. } => source.kind(),
            _ => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error)
    }
}

/// Sorts an error of `call` into those that another path could avoid and those that it could not.
pub(crate) fn failed(call: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| {
        use rustix::io::Errno;
        match Errno::from_io_error(&source) {
            Some(Errno::AGAIN) => Error::WouldBlock,
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
                | Errno::NOPROTOOPT,
            ) => Error::Refused { call, source },
            _ => Error::Failed { call, source },
        }
    }
}

/// What to change, where that is known.
fn advice(call: &str, source: &io::Error) -> &'static str {
    use rustix::io::Errno;
    match (call, Errno::from_io_error(source)) {
        ("io_uring_setup", Some(Errno::PERM)) => {
            " (sysctl kernel.io_uring_disabled=0, or allow it in seccomp)"
        }
        ("io_uring_setup", Some(Errno::NOSYS)) => {
            " (the kernel is older than 5.6, or seccomp hides io_uring)"
        }
        ("io_uring_register" | "SEND_ZC", Some(Errno::NOMEM)) => " (raise ulimit -l)",
        (_, Some(Errno::MFILE)) => " (raise ulimit -n)",
        (_, Some(Errno::PERM | Errno::NOSYS | Errno::ACCESS)) => {
            " (a seccomp filter or a container forbids it)"
        }
        _ => "",
    }
}
