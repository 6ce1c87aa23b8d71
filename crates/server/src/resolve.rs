//! Name resolution on an offload thread, by the system's resolver (`getaddrinfo`).
//!
//! The resolver reports no time to live; the caller decides how long an answer stays valid.

use crate::offload::Job;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

/// A name and port to resolve. As an offload [`Job`] of its own, or part of a service's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolve {
    /// The host name, or an address in text form.
    pub host: String,
    /// The port of the resulting addresses.
    pub port: u16,
}

impl Resolve {
    /// Resolves the name. Blocks. The addresses are in the order of RFC 6724, at least one.
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let addresses: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        if addresses.is_empty() {
            let message = format!("{} has no address", self.host);
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        Ok(addresses)
    }
}

impl Job for Resolve {
    type Reply = io::Result<Vec<SocketAddr>>;

    fn run(self) -> Self::Reply {
        self.addresses()
    }

    fn refused() -> Self::Reply {
        Err(io::Error::other("too many names wait to be resolved"))
    }

    fn failed() -> Self::Reply {
        Err(io::Error::other("the resolver panicked"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_resolve() {
        let resolve = |host: &str| Resolve { host: host.into(), port: 80 }.addresses();
        assert!(resolve("localhost").unwrap().iter().all(|address| address.ip().is_loopback()));
        assert_eq!(resolve("192.0.2.1").unwrap(), ["192.0.2.1:80".parse().unwrap()]);
        assert!(resolve("no such host").is_err());
    }
}
