//! `SIOCETHTOOL`: reading and switching a network device's offloads.
//!
//! Only the one-value commands of `<linux/ethtool.h>` are used (2.4 and later); they reach every offload that
//! decides whether a send is copied. What cannot be asked this way (header split, ring sizes, coalescing) is
//! not here. Devices are looked up in the network namespace of the *calling thread*.

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// One offload of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Offload {
    /// The device computes the transport checksum of what it sends.
    TransmitChecksum,
    /// The device gathers a packet from several pieces of memory. Without it the stack copies each packet
    /// together.
    ScatterGather,
    /// The device cuts large TCP segments.
    TcpSegmentation,
    /// What is received is put together into larger packets before the stack sees it. On a veth it also makes the
    /// receiving side poll (NAPI, Linux 5.13).
    GenericReceive,
}

impl Offload {
    /// The name that `ethtool -K` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::TransmitChecksum => "tx",
            Self::ScatterGather => "sg",
            Self::TcpSegmentation => "tso",
            Self::GenericReceive => "gro",
        }
    }

    /// The get and set commands, from `<linux/ethtool.h>`.
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

/// Whether `offload` is on. `EOPNOTSUPP` where the device cannot say, `ENODEV` where there is no such device.
pub fn offload(device: &str, offload: Offload) -> io::Result<bool> {
    let mut value = Value { command: offload.commands().0, data: 0 };
    request(device, &mut value)?;
    Ok(value.data != 0)
}

/// Switches `offload`. Needs `CAP_NET_ADMIN` over the namespace; the device may silently keep what it cannot
/// change, so read it back.
pub fn set_offload(device: &str, offload: Offload, on: bool) -> io::Result<()> {
    request(device, &mut Value { command: offload.commands().1, data: u32::from(on) })
}

/// The name of the device's driver: `veth`, `virtio_net`, `mlx5_core`, `tun`…
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
    let mut request = request_for(device)?;
    request.ifr_ifru.ifru_data = std::ptr::from_mut(payload).cast();
    let socket = any_socket()?;
    // SAFETY: SIOCETHTOOL reads and writes the ifreq and the struct that its data pointer names, whose
    // layout matches the command (asserted above); both outlive the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A socket to make device requests on.
pub(crate) fn any_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// An empty request that names `device`; `ENODEV` for a name that no device can have.
pub(crate) fn request_for(device: &str) -> io::Result<libc::ifreq> {
    let name = device.as_bytes();
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    // SAFETY: an all-zero ifreq is a valid value of this plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(name) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_enodev() {
        for name in ["", "no-such-device", "a name far too long for an interface"] {
            assert_eq!(driver(name).unwrap_err().raw_os_error(), Some(libc::ENODEV), "{name:?}");
        }
    }

    #[test]
    fn loopback_gathers() {
        assert!(offload("lo", Offload::ScatterGather).unwrap());
    }
}
