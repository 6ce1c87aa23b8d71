//! Errors that keep a file service from starting, or that stop it.
//!
//! Each message holds its cause, so [`std::error::Error::source`] is always `None`.

use crate::pattern::PatternError;
use std::io;
use std::path::PathBuf;

/// A file service could not be started, or has stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network part of the service failed: listening, TLS, logs, privileges, threads.
    #[error("{0}")]
    Server(haul_server::Error),
    /// The served directory cannot be read.
    #[error("{path}: {error}: name a directory that may be read", path = path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// A send method that a server cannot use.
    #[error(
        "path {0}: a server takes read+write, read+send, mmap+send, sendfile, splice or vmsplice, \
         or chooses itself"
    )]
    Method(haul::SendMethod),
    /// A pattern of `Cache-Control` is invalid.
    #[error("Cache-Control pattern {pattern:?}: {error}")]
    Pattern {
        /// The pattern as configured.
        pattern: String,
        /// The reason.
        error: PatternError,
    },
    /// A response header field is invalid.
    #[error("header {0}")]
    Field(String),
    /// The fallback file cannot be sent.
    #[error("fallback {path}: {problem}")]
    Fallback {
        /// Its path below the root.
        path: String,
        /// The problem with it.
        problem: String,
    },
    /// A fallback and uploads exclude each other.
    #[error(
        "a fallback stands for files that are not there, so none can be put there: choose one of \
         the two"
    )]
    PutWithFallback,
    /// An error page cannot be used.
    #[error("error page {path} for {status}: {problem}")]
    ErrorPage {
        /// Its status code.
        status: u16,
        /// Its path below the root.
        path: String,
        /// The problem with it.
        problem: String,
    },
    /// The password file cannot be used.
    #[error("passwords, {path}: {problem}", path = path.display())]
    Passwords {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: String,
    },
}

impl From<haul_server::Error> for Error {
    fn from(error: haul_server::Error) -> Self {
        Self::Server(error)
    }
}

impl Error {
    /// Whether the configuration is wrong, rather than the host.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Server(error) => error.is_bad_input(),
            _ => true,
        }
    }
}
