//! Why a file service does not start.

use crate::config::Address;
use std::io;
use std::path::PathBuf;

/// Why a file service does not start, or has stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder cannot be served.
    #[error("{path}: {source}: name a folder that may be read", path = path.display())]
    Root {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Nobody can be listened to there.
    #[error("listening at {address}: {source}{}", listen_advice(address, source))]
    Listen {
        /// Where.
        address: Address,
        /// What the kernel said.
        source: io::Error,
    },
    /// A number of loops that makes no sense.
    #[error("{workers} workers: one to {workers_max} make sense")]
    Workers {
        /// How many were asked for.
        workers: usize,
        /// How many are possible.
        workers_max: usize,
    },
    /// A path that servers do not take.
    #[error(
        "path {0}: a server takes read+write, read+send, mmap+send, sendfile, splice or vmsplice, or chooses itself"
    )]
    Method(haul::SendMethod),
    /// Nowhere to listen.
    #[error("there is no address to listen at: name one")]
    NoAddress,
    /// The congestion control is not to be had.
    #[error("congestion control {name}: {source}: see net.ipv4.tcp_allowed_congestion_control")]
    Congestion {
        /// Which.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A pattern that is none.
    #[error("pattern {0}")]
    Pattern(String),
    /// A field that responses cannot have.
    #[error("header {0}")]
    Field(String),
    /// The fallback cannot be sent.
    #[error("fallback {path}: {problem}")]
    Fallback {
        /// Its path below the root.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Two things that do not go together.
    #[error(
        "a fallback stands for files that are not there, so none can be put there: choose one of the two"
    )]
    PutWithFallback,
    /// An error page cannot be shown.
    #[error("error page {path} for {status}: {problem}")]
    ErrorPage {
        /// For which status.
        status: u16,
        /// Its path below the root.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The certificate or its key cannot be used.
    #[error("TLS, {path}: {problem}", path = path.display())]
    Tls {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The passwords cannot be used.
    #[error("passwords, {path}: {problem}", path = path.display())]
    Passwords {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Nobody else can be become.
    #[error("user {name}: {problem}")]
    User {
        /// Who.
        name: String,
        /// Why not.
        problem: String,
    },
    /// Files that are not needed could not be given up.
    #[error("giving up what is not needed: {0}")]
    Confine(String),
    /// The log cannot be written.
    #[error("access log {path}: {source}", path = path.display())]
    Log {
        /// Which file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refused something that every server needs.
    #[error("{step}: {source}")]
    Failed {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    /// Whether what was asked for is to blame, and not the machine.
    pub fn is_bad_input(&self) -> bool {
        !matches!(self, Self::Failed { .. })
    }
}

fn listen_advice(address: &Address, source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::AddrInUse => ": somebody listens there already",
        io::ErrorKind::PermissionDenied if matches!(address, Address::Tcp(_)) => {
            ": ports below 1024 need CAP_NET_BIND_SERVICE"
        }
        io::ErrorKind::AddrNotAvailable => ": this machine has no such address",
        _ => "",
    }
}
