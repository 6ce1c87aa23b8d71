//! Which device leads to a peer, and what it can do.

use super::DeviceFacts;
use haul_sys::ethtool::{self, Offload};
use haul_sys::interface;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::Duration;

/// The discard service: the one port that is meant for finding out whether somebody is there. A refusal is an
/// answer.
const DISCARD_PORT: u16 = 9;
/// Longer than the three seconds after which the kernel gives up on a host of its own network that does not
/// answer.
const ANSWER_MAX: Duration = Duration::from_secs(4);

/// Why nothing can be said of a peer.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Its name means nothing.
    #[error("cannot resolve peer {peer:?}: {source}")]
    Unknown {
        /// As it was given.
        peer: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// There is no way to it.
    #[error("cannot reach peer {peer} ({address}): {source}")]
    Unreachable {
        /// As it was given.
        peer: String,
        /// Its address.
        address: IpAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel would not list the devices.
    #[error("cannot list the network devices: {0}")]
    Devices(io::Error),
}

/// The device that leads to `peer`, to the default route where there is none, or loopback where there is
/// neither.
pub(crate) fn device_towards(peer: Option<&str>) -> Result<DeviceFacts, PeerError> {
    let Some(peer) = peer else {
        // Connecting a datagram socket sends nothing; it asks the routing table. The address is one that is
        // nobody's (RFC 5737).
        let local = local_address_towards(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
        let name = match local {
            Ok(local) => device_with(local)?,
            Err(_) => "lo".into(),
        };
        return Ok(facts(name));
    };
    let unknown = |source| PeerError::Unknown { peer: peer.into(), source };
    let address = (peer, DISCARD_PORT)
        .to_socket_addrs()
        .map_err(unknown)?
        .next()
        .ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))?
        .ip();
    let unreachable = |source| PeerError::Unreachable { peer: peer.into(), address, source };
    let local = local_address_towards(address).map_err(unreachable)?;
    let answered =
        match TcpStream::connect_timeout(&SocketAddr::new(address, DISCARD_PORT), ANSWER_MAX) {
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => true,
            // Silence may be a firewall's: what can be said of the way there is said.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => false,
            Err(error) => return Err(unreachable(error)),
        };
    // What goes to one of this host's own addresses never leaves it.
    let name = if local == address { "lo".into() } else { device_with(local)? };
    Ok(DeviceFacts {
        peer: Some(peer.into()),
        address: Some(address.to_string()),
        answered: Some(answered),
        ..facts(name)
    })
}

/// The MTU of the device that has this address, in bytes.
pub(crate) fn mtu_of(address: IpAddr) -> Option<u32> {
    interface::mtu(&device_with(address).ok()?).ok()
}

fn local_address_towards(address: IpAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = match address {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect((address, DISCARD_PORT))?;
    Ok(socket.local_addr()?.ip())
}

fn device_with(address: IpAddr) -> Result<String, PeerError> {
    let addresses = interface::addresses().map_err(PeerError::Devices)?;
    let found = addresses.into_iter().find(|found| found.address == address);
    Ok(found.map_or_else(|| "lo".into(), |found| found.device))
}

fn facts(name: String) -> DeviceFacts {
    let offload = |offload| ethtool::offload(&name, offload).ok();
    DeviceFacts {
        peer: None,
        address: None,
        answered: None,
        driver: ethtool::driver(&name).ok(),
        mtu: interface::mtu(&name).ok(),
        scatter_gather: offload(Offload::ScatterGather),
        transmit_checksum: offload(Offload::TransmitChecksum),
        segmentation: offload(Offload::TcpSegmentation),
        name,
    }
}
