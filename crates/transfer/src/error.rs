//! Errors that end a transfer. Errors of single files are in the [`crate::Summary`].

use std::io;

/// A transfer ended before everything was copied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection to the other end failed, or its process ended.
    #[error("the connection to the other end failed: {0}")]
    Connection(#[source] io::Error),
    /// The other end sent something that the protocol does not have.
    #[error("the other end sent what the protocol does not allow: {0}")]
    Protocol(&'static str),
    /// Something else than haul answered, such as a message of the login shell.
    #[error("the other side answered {0:?} instead of haul: its login shell must print nothing")]
    NotHaul(String),
    /// The other end speaks another version of the protocol.
    #[error(
        "the other side's haul speaks version {theirs} of the protocol, and this one {ours}: \
             install the same version on both sides"
    )]
    Version {
        /// The version of this end.
        ours: u32,
        /// The version of the other end.
        theirs: u32,
    },
    /// The destination cannot be used.
    #[error("{path}: {problem}")]
    Destination {
        /// The path as the user gave it.
        path: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The other host lacks this version of haul and cannot run this program.
    #[error(
        "the other host lacks this version of haul, and this program runs on Linux {here} and not \
             on {there}: install haul there, or give its path by --remote-haul"
    )]
    Unlike {
        /// The system and the kind of CPU of the other host, as uname(1) names them.
        there: String,
        /// The kind of CPU of this host.
        here: &'static str,
    },
    /// The other end refuses the request.
    #[error("the other side refuses: {0}")]
    Refused(String),
    /// The other end ended the transfer, for this reason.
    #[error("the other side: {0}")]
    Remote(String),
    /// This kernel refuses getrandom(2), such as by a seccomp filter.
    #[error("this kernel refuses random bytes for a key (getrandom): {0}")]
    Random(#[source] io::Error),
}
