//! Errors that keep a proxy from starting, or that stop it.

/// A proxy could not be started, or has stopped. Each message holds its cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network part of the service failed: listening, logs, privileges, threads.
    #[error("{0}")]
    Server(#[from] haul_server::Error),
    /// There is no upstream.
    #[error("there is no upstream to connect clients to: name one")]
    NoUpstream,
    /// The pool of pipes and buffers could not be created.
    #[error("{0}")]
    Pool(haul::Error),
}

impl Error {
    /// Whether the configuration is wrong, rather than the host.
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Server(error) => error.is_bad_input(),
            Self::NoUpstream => true,
            Self::Pool(_) => false,
        }
    }
}
