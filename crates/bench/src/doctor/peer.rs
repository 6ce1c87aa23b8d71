//! The network device that leads to a peer, and its features.

use super::DeviceFacts;
use haul_lab_sys::ethtool::{self, Offload};
use haul_lab_sys::interface;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::Duration;

/// Port of the discard service, which exists for such tests. A refusal is also an answer.
const DISCARD_PORT: u16 = 9;
/// Connection timeout. It exceeds the three seconds after which the kernel gives up on a host of
/// the local network that does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);

/// The device that leads to a peer could not be determined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The peer's name could not be resolved.
    #[error("cannot resolve peer {peer:?}: {error}")]
    Unknown {
        /// The peer, as it was given.
        peer: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// There is no route to the peer.
    #[error("cannot reach peer {peer} ({address}): {error}")]
    Unreachable {
        /// The peer, as it was given.
        peer: String,
        /// Its address.
        address: IpAddr,
        /// The kernel's error.
        error: io::Error,
    },
    /// The kernel did not list the devices.
    #[error("cannot list the network devices: {0}")]
    Devices(io::Error),
}

/// The device that leads to `peer`. Without a peer, the device is the one of the default route of
/// IPv4, else of IPv6, else loopback.
pub(crate) fn device_towards(peer: Option<&str>) -> Result<DeviceFacts, PeerError> {
    let Some(peer) = peer else {
        // Connecting a datagram socket sends nothing; it only reads the routing table. Both
        // addresses are reserved for documentation (RFC 5737, RFC 3849).
        let documentation = [
            IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
            IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
        ];
        let local = documentation.into_iter().find_map(|to| local_address_towards(to).ok());
        let name = match local {
            Some(local) => interface::device_of(local).map_err(PeerError::Devices)?,
            None => "lo".into(),
        };
        return Ok(DeviceFacts { has_route: local.is_some(), ..read_device_facts(name) });
    };
    let unknown = |error| PeerError::Unknown { peer: peer.into(), error };
    let address = (peer, DISCARD_PORT)
        .to_socket_addrs()
        .map_err(unknown)?
        .next()
        .ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))?
        .ip();
    let unreachable = |error| PeerError::Unreachable { peer: peer.into(), address, error };
    let local = local_address_towards(address).map_err(unreachable)?;
    let connected =
        TcpStream::connect_timeout(&SocketAddr::new(address, DISCARD_PORT), ANSWER_TIMEOUT);
    // A firewall may drop the packets, or reject them with an ICMP error. The findings on the route
    // are valid nevertheless.
    let (answered, refusal) = match connected {
        Ok(_) => (true, None),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => (true, None),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => (false, None),
        Err(error) => (false, Some(error.to_string())),
    };
    // Packets to one of this host's own addresses never leave it.
    let name = if local == address {
        "lo".into()
    } else {
        interface::device_of(local).map_err(PeerError::Devices)?
    };
    Ok(DeviceFacts {
        peer: Some(peer.into()),
        address: Some(address.to_string()),
        answered: Some(answered),
        refusal,
        ..read_device_facts(name)
    })
}

fn local_address_towards(address: IpAddr) -> io::Result<IpAddr> {
    let unspecified: SocketAddr = match address {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(unspecified)?;
    socket.connect((address, DISCARD_PORT))?;
    Ok(socket.local_addr()?.ip())
}

fn read_device_facts(name: String) -> DeviceFacts {
    let offload = |offload| ethtool::offload(&name, offload).ok();
    DeviceFacts {
        peer: None,
        address: None,
        answered: None,
        refusal: None,
        has_route: true,
        driver: ethtool::driver(&name).ok(),
        mtu: interface::mtu(&name).ok(),
        scatter_gather: offload(Offload::ScatterGather),
        transmit_checksum: offload(Offload::TransmitChecksum),
        segmentation: offload(Offload::TcpSegmentation),
        name,
    }
}
