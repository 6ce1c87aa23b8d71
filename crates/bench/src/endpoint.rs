//! Hosts on which processes run.

use crate::pair::Pair;
use haul_lab::Host;
use std::net::IpAddr;

/// The place of a measurement's worker process: a host of the lab, this machine, or the other
/// machine of a pair.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Endpoint<'a> {
    /// A host of a lab.
    Lab(&'a Host),
    /// This machine, with the address at which its peer reaches it.
    Local(IpAddr),
    /// The other machine.
    Remote(&'a Pair),
}

impl Endpoint<'_> {
    /// The address at which a peer reaches the host.
    pub(crate) fn address(self) -> IpAddr {
        match self {
            Self::Lab(host) => host.address(),
            Self::Local(address) => address,
            Self::Remote(pair) => pair.remote_address(),
        }
    }
}
