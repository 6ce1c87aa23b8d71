//! Errors of running a command with the interposer.

use std::io;
use std::path::PathBuf;

/// The interposer could not be prepared, or its counters could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No directory for the library and the counters.
    #[error(
        "no temporary directory allows programs to be loaded from it: {directories} (set TMPDIR \
         to a directory on a file system that is not mounted noexec)"
    )]
    NoDirectory {
        /// The directories that were tried, each with the reason.
        directories: String,
    },
    /// A file could not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The kernel does not allow a congestion control.
    #[error(
        "the kernel does not set congestion control {name} ({reason}; available: {available}; \
         modprobe tcp_{name} may load it, and net.ipv4.tcp_allowed_congestion_control lists what \
         an ordinary user may choose)"
    )]
    Congestion {
        /// The name.
        name: String,
        /// The available ones, separated by spaces.
        available: String,
        /// The reason.
        reason: io::Error,
    },
    /// The shared memory of the counters could not be created.
    #[error("cannot create the memory for the counters")]
    Tally(#[source] io::Error),
    /// The kernel gave no random bytes.
    #[error("cannot make the token of the run")]
    Token(#[source] io::Error),
    /// The broker could not be started.
    #[error("cannot start the broker, which answers the processes of the command")]
    Broker(#[source] io::Error),
}
