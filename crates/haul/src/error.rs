//! Why a path did not send, and whether another one would.

use std::io;

/// Why a path did not send.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// The kernel does not do it, here or for this socket. Another path may work:
    /// [`crate::Path::steps_down_to`].
    #[error("the kernel refuses {call}: {source}{}", advice(.call, .source))]
    Refused {
        /// The call that was refused.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The path makes no sense for this source.
    #[error("{0}")]
    Unsuited(&'static str),
    /// The source ended before the range did: the file was truncated.
    #[error("the file ends at byte {at}, before the range does: it was truncated while being sent")]
    Ended {
        /// Where it ends, or rather where nothing more could be read.
        at: u64,
    },
    /// The socket takes nothing now; nothing was sent.
    #[error("the socket would block")]
    WouldBlock,
    /// The call failed for a reason of its own: a reset connection, a disk error.
    #[error("{call}: {source}")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Sorts an error of `call` into those that another path could avoid and those that it could not.
pub(crate) fn failed(call: &'static str) -> impl Fn(io::Error) -> PathError {
    move |source| {
        use rustix::io::Errno;
        match Errno::from_io_error(&source) {
            Some(Errno::AGAIN) => PathError::WouldBlock,
            Some(
                Errno::INVAL
                | Errno::OPNOTSUPP
                | Errno::PERM
                | Errno::ACCESS
                | Errno::NOSYS
                | Errno::NOMEM
                | Errno::MFILE
                | Errno::NFILE
                | Errno::NOPROTOOPT,
            ) => PathError::Refused { call, source },
            _ => PathError::Failed { call, source },
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
        (_, Some(Errno::PERM | Errno::NOSYS | Errno::ACCESS)) => {
            " (a seccomp filter or a container forbids it)"
        }
        _ => "",
    }
}
