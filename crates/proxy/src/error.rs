//! Errors that keep a proxy from starting, or that stop it.

use haul_server::connect::Source;
use std::io;
use std::path::PathBuf;

/// A proxy could not be started, or stopped. Each message holds its cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network part of the service failed: listening, logs, privileges, threads.
    #[error("{0}")]
    Server(#[from] haul_server::Error),
    /// The configuration lacks an upstream.
    #[error("there is no upstream to connect clients to: name one")]
    NoUpstream,
    /// A group lacks an upstream.
    #[error("the group {0} has no upstream: name one")]
    EmptyGroup(String),
    /// Two groups have the same name.
    #[error("there are two groups {0}: give each group a name of its own")]
    DuplicateGroup(String),
    /// A group has the same upstream twice.
    #[error("the group {group} has the upstream {upstream} twice: give it a weight instead")]
    DuplicateUpstream {
        /// The name of the group.
        group: String,
        /// The upstream's address.
        upstream: String,
    },
    /// A route or a listener names a group that does not exist.
    #[error("there is no group {0}: add it, or correct the name where it is used")]
    UnknownGroup(String),
    /// A listener has neither a group nor a route.
    #[error("the clients at {0} have no upstream: add a group or a route to the listener")]
    NoRoute(haul_server::Address),
    /// A reload would change the addresses to listen on, such as this one, or their order.
    #[error("the addresses to listen on cannot be changed by a reload ({0}): use --upgrade")]
    ListenersChanged(haul_server::Address),
    /// The configuration could not be read again.
    #[error("{0}")]
    ConfigFile(String),
    /// The proxy was started without a configuration file.
    #[error("there is no configuration file to read again: the proxy was started without --config")]
    NoConfigFile,
    /// A proxy was run that was only to be checked.
    #[error("the proxy is only checked, and does not run")]
    ChecksOnly,
    /// A reload while another process takes over.
    #[error("another process is taking over: reload that one, once it has")]
    HandedOver,
    /// A reload names an upstream at a port that the process gave up.
    #[error(
        "{upstream}: no upstream had this port at the start, and a confined process connects only \
         to those: use --upgrade, or start with --confine=false"
    )]
    PortGivenUp {
        /// The upstream's address.
        upstream: String,
    },
    /// An upgrade was asked for without the control socket of the running proxy.
    #[error("an upgrade needs the control socket of the running proxy: name it (--control)")]
    UpgradeWithoutControl,
    /// The running proxy could not be taken over.
    #[error(
        "{}: the running proxy cannot be taken over: {error}{}",
        path.display(), take_over_advice(error)
    )]
    TakeOver {
        /// The path of the control socket.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// Upstreams cannot be connected from an address.
    #[error("source {}: {error}{}", source_name(address), source_advice(address, error))]
    Source {
        /// The address, or any of a client.
        address: Source,
        /// The kernel's error.
        error: io::Error,
    },
    /// The pool of pipes and buffers could not be created.
    #[error("{0}")]
    Pool(haul::Error),
}

impl Error {
    /// Whether the configuration is wrong, rather than the host.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Server(error) => error.is_bad_input(),
            Self::NoUpstream
            | Self::EmptyGroup(_)
            | Self::DuplicateGroup(_)
            | Self::UnknownGroup(_)
            | Self::DuplicateUpstream { .. }
            | Self::ListenersChanged(_)
            | Self::ConfigFile(_)
            | Self::NoConfigFile
            | Self::ChecksOnly
            | Self::PortGivenUp { .. }
            | Self::UpgradeWithoutControl
            | Self::Source { .. }
            | Self::NoRoute(_) => true,
            Self::TakeOver { .. } | Self::HandedOver | Self::Pool(_) => false,
        }
    }
}

fn take_over_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ": name the --control of the running proxy, or, if none runs, start without --upgrade"
        }
        _ => "",
    }
}

fn source_name(source: &Source) -> String {
    if source.is_foreign { "client".into() } else { source.address.to_string() }
}

fn source_advice(source: &Source, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => ": this machine has no such address",
        io::ErrorKind::PermissionDenied if source.is_foreign => {
            ": it needs CAP_NET_ADMIN: start the proxy as root"
        }
        _ => "",
    }
}
