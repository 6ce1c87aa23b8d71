//! This host's network devices: their addresses and MTU.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

/// An address and the device that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// Name of the device.
    pub device: String,
    /// The address.
    pub address: IpAddr,
}

/// Lists every IPv4 and IPv6 address in the calling thread's network namespace (`getifaddrs`).
pub fn addresses() -> io::Result<Vec<InterfaceAddress>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is a valid place for the list's head.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: the list is valid until it is freed below. Each entry's name is a C string; its
    // address, if present, is at least a sockaddr and has the size that its family implies.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: as above.
        let address =
            match unsafe { entry.ifa_addr.as_ref() }.map(|address| i32::from(address.sa_family)) {
                Some(libc::AF_INET) => {
                    // SAFETY: an AF_INET address is a sockaddr_in.
                    let address =
                        unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                    IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)))
                }
                Some(libc::AF_INET6) => {
                    // SAFETY: an AF_INET6 address is a sockaddr_in6.
                    let address =
                        unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                    IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr))
                }
                _ => continue,
            };
        // SAFETY: as above.
        let device = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.push(InterfaceAddress { device, address });
    }
    // SAFETY: `first` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// Returns the name of the device that has this address; `lo` if none has.
pub fn device_of(address: IpAddr) -> io::Result<String> {
    let found = addresses()?.into_iter().find(|found| found.address == address);
    Ok(found.map_or_else(|| "lo".into(), |found| found.device))
}

/// Reads the MTU of a device in the calling thread's network namespace, in bytes (`SIOCGIFMTU`).
///
/// `ENODEV` without a such device.
pub fn mtu(device: &str) -> io::Result<u32> {
    let socket = crate::ethtool::control_socket()?;
    let mut request = crate::ethtool::ifreq_for(device)?;
    // SAFETY: SIOCGIFMTU reads the name in the ifreq and writes its MTU field; the ifreq outlives
    // the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the MTU is the field of the union that was written.
    Ok(unsafe { request.ifr_ifru.ifru_mtu } as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_its_address() {
        let addresses = addresses().unwrap();
        let loopback = |found: &&InterfaceAddress| found.address == IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(addresses.iter().find(loopback).unwrap().device, "lo");
        assert_eq!(device_of(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap(), "lo");
        assert!(mtu("lo").unwrap() >= 1280);
        assert_eq!(mtu("no-such-device").unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
