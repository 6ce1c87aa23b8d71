//! Ranges of addresses that a configuration names.

use ipnet::IpNet;
use std::net::IpAddr;
use std::str::FromStr;

/// A range of addresses: one address, or a network in the notation `10.0.0.0/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpRange(IpNet);

impl IpRange {
    /// Whether the range has this address. An IPv4 address that is mapped to IPv6 counts as the
    /// IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for IpRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = || text.parse::<IpAddr>().map(|address| IpNet::from(address.to_canonical()));
        let net: IpNet = text.parse().or_else(|_| address()).map_err(|_| {
            format!("{text:?} is neither an address nor a network, such as 10.0.0.0/8")
        })?;
        // Either the address or the prefix is not what is meant.
        if net.trunc() == net {
            Ok(Self(net))
        } else {
            let (network, address) = (net.trunc(), net.addr());
            Err(format!("{text:?} is within the network {network}: write that, or {address}"))
        }
    }
}
