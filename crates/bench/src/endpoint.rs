//! Where a process runs.

use crate::pair::Pair;
use haul_lab::Host;
use std::net::IpAddr;

/// A host that processes run on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Endpoint<'a> {
    /// A host of a lab.
    Lab(&'a Host),
    /// This machine, known to its peer by this address.
    Here(IpAddr),
    /// The other machine.
    There(&'a Pair),
}

impl Endpoint<'_> {
    /// The address that a peer reaches it at.
    pub(crate) fn address(self) -> IpAddr {
        match self {
            Self::Lab(host) => host.address(),
            Self::Here(address) => address,
            Self::There(pair) => pair.there(),
        }
    }
}
