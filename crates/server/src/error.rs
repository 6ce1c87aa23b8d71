//! Errors that keep a service from starting, or that stop it.
//!
//! Each message holds its cause, so [`std::error::Error::source`] is always `None`.

use crate::address::Address;
use std::io;
use std::path::PathBuf;

/// Why a service could not be started, or why it ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address cannot be listened on.
    #[error("listening at {address}: {error}{}", listen_advice(address, error))]
    Listen {
        /// The address.
        address: Address,
        /// The kernel's error.
        error: io::Error,
    },
    /// Two listeners of this service need the same address.
    #[error(
        "listening at {address}: another listener of this service has {other}{}: name another",
        included(address, other)
    )]
    ListenTwice {
        /// The address.
        address: Address,
        /// The address of the earlier listener.
        other: Address,
    },
    /// No listen address was given.
    #[error("there is no address to listen at: name one")]
    NoAddress,
    /// The number of event loops is out of range.
    #[error("{loops} workers: one to {loops_max} make sense")]
    Loops {
        /// The number asked for.
        loops: usize,
        /// The largest number possible.
        loops_max: usize,
    },
    /// The congestion control is not available.
    #[error("congestion control {name}: {error}: see net.ipv4.tcp_allowed_congestion_control")]
    Congestion {
        /// Its name.
        name: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// A certificate or its key cannot be used.
    #[error("TLS, {path}: {problem}", path = path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// Switching to the configured user failed.
    #[error("user {name}: {problem}")]
    User {
        /// The user's name.
        name: String,
        /// The reason.
        problem: String,
    },
    /// The sandbox could not be set up.
    #[error("giving up what is not needed: {0}")]
    Sandbox(String),
    /// A log file cannot be written.
    #[error("access log {path}: {error}{}", directory_advice(error), path = path.display())]
    Log {
        /// The file; `-` is standard output.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// A system call failed that every service needs.
    #[error("{step}: {error}")]
    System {
        /// The step that failed.
        step: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
}

impl Error {
    /// Whether the configuration is wrong, rather than the host.
    pub fn is_bad_input(&self) -> bool {
        // An address that another process has may be free later.
        !matches!(self, Self::System { .. }) && !self.is_address_in_use()
    }

    /// Whether another process listens at an address.
    pub fn is_address_in_use(&self) -> bool {
        matches!(self, Self::Listen { error, .. } if error.kind() == io::ErrorKind::AddrInUse)
    }

    /// Maps the I/O error of a step to [`Error::System`].
    pub fn at(step: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self::System { step, error }
    }
}

/// Why two addresses that differ are one.
fn included(address: &Address, other: &Address) -> &'static str {
    match (address, other) {
        (Address::Tcp(one), Address::Tcp(other)) if one.is_ipv4() != other.is_ipv4() => {
            ", and [::] includes IPv4"
        }
        _ => "",
    }
}

fn directory_advice(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::NotFound { ": its directory does not exist" } else { "" }
}

fn listen_advice(address: &Address, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => ": another process listens there already",
        io::ErrorKind::PermissionDenied if matches!(address, Address::Tcp(_)) => {
            ": ports below 1024 need CAP_NET_BIND_SERVICE"
        }
        io::ErrorKind::AddrNotAvailable => ": this machine has no such address",
        _ if matches!(address, Address::Unix(_)) => directory_advice(error),
        _ => "",
    }
}
