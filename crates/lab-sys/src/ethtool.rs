//! `SIOCETHTOOL`: reads and switches a network device's offloads.
//!
//! Uses only the one-value commands of `<linux/ethtool.h>` (Linux 2.4 and later). They reach every
//! offload that decides whether a send is copied. Settings that need other commands (header split,
//! ring sizes, coalescing) are not supported. Devices are looked up in the network namespace of the
//! *calling thread*.

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// An offload of a network device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Offload {
    /// Transmit checksum offload: the device computes the transport checksum of the packets it
    /// sends.
    TransmitChecksum,
    /// Scatter-gather: the device gathers a packet from several pieces of memory. Without it the
    /// stack copies each packet into one buffer.
    ScatterGather,
    /// TCP segmentation offload: the device splits large TCP segments.
    TcpSegmentation,
    /// Generic receive offload: received packets are merged into larger ones before the stack
    /// processes them. On a veth it also makes the receiving side poll (NAPI, Linux 5.13).
    GenericReceive,
}

impl Offload {
    /// The name of the offload in `ethtool -K`.
    pub fn name(self) -> &'static str {
        match self {
            Self::TransmitChecksum => "tx",
            Self::ScatterGather => "sg",
            Self::TcpSegmentation => "tso",
            Self::GenericReceive => "gro",
        }
    }

    /// The get and the set command, from `<linux/ethtool.h>`.
    fn commands(self) -> (u32, u32) {
        match self {
            Self::TransmitChecksum => (0x16, 0x17),
            Self::ScatterGather => (0x18, 0x19),
            Self::TcpSegmentation => (0x1e, 0x1f),
            Self::GenericReceive => (0x2b, 0x2c),
        }
    }
}

/// `ETHTOOL_GDRVINFO`.
const GET_DRIVER: u32 = 0x03;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}
const _: () = assert!(size_of::<Value>() == 8);

/// `struct ethtool_drvinfo`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    version: [u8; 32],
    firmware: [u8; 32],
    bus: [u8; 32],
    expansion_rom: [u8; 32],
    reserved: [u8; 12],
    counts: [u32; 5],
}
const _: () = assert!(size_of::<DriverInfo>() == 196);

/// Reads whether `offload` is on. `EOPNOTSUPP` if the device does not support the query, `ENODEV`
/// without a such device.
pub fn offload(device: &str, offload: Offload) -> io::Result<bool> {
    let mut value = Value { command: offload.commands().0, data: 0 };
    request(device, &mut value)?;
    Ok(value.data != 0)
}

/// Switches `offload` on or off. Needs `CAP_NET_ADMIN` over the namespace.
///
/// The device may ignore the request without an error, so read the state back.
pub fn set_offload(device: &str, offload: Offload, on: bool) -> io::Result<()> {
    request(device, &mut Value { command: offload.commands().1, data: u32::from(on) })
}

/// Reads the name of the device's driver: `veth`, `virtio_net`, `mlx5_core`, `tun`…
pub fn driver(device: &str) -> io::Result<String> {
    let mut info = DriverInfo {
        command: GET_DRIVER,
        driver: [0; 32],
        version: [0; 32],
        firmware: [0; 32],
        bus: [0; 32],
        expansion_rom: [0; 32],
        reserved: [0; 12],
        counts: [0; 5],
    };
    request(device, &mut info)?;
    let end = info.driver.iter().position(|&byte| byte == 0).unwrap_or(info.driver.len());
    Ok(String::from_utf8_lossy(&info.driver[..end]).into_owned())
}

/// Makes one ethtool request; `T` must be the `repr(C)` struct that its own `command` field names.
fn request<T>(device: &str, payload: &mut T) -> io::Result<()> {
    let mut request = ifreq_for(device)?;
    request.ifr_ifru.ifru_data = std::ptr::from_mut(payload).cast();
    let socket = control_socket()?;
    // SAFETY: SIOCETHTOOL reads and writes the ifreq and the struct that its data pointer names,
    // whose layout matches the command (asserted above); both outlive the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Opens a socket to make device requests on.
pub(crate) fn control_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Builds an empty request for `device`; `ENODEV` for a name that no device can have.
pub(crate) fn ifreq_for(device: &str) -> io::Result<libc::ifreq> {
    let name = device.as_bytes();
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    // SAFETY: an all-zero ifreq is a valid value of this plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (target, &byte) in request.ifr_name.iter_mut().zip(name) {
        *target = byte as libc::c_char;
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_enodev() {
        for name in ["", "no-such-device", "a name far too long for an interface"] {
            assert_eq!(driver(name).unwrap_err().raw_os_error(), Some(libc::ENODEV), "{name:?}");
        }
    }

    #[test]
    fn loopback_has_scatter_gather() {
        assert!(offload("lo", Offload::ScatterGather).unwrap());
    }
}
