//! Which local addresses have an interface that takes one TCP segment at a time (`getifaddrs(3)`,
//! `SIOCETHTOOL`).

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

/// `ETHTOOL_GTSO` of `<linux/ethtool.h>`.
const GET_SEGMENTATION: u32 = 0x1e;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// The name of an interface, which ends in 0.
type Name = [libc::c_char; libc::IFNAMSIZ];

/// Lists the local addresses whose interface lacks TCP segmentation offload, so that the kernel
/// passes the interface one segment at a time. Leaves out an interface that does not report its
/// offloads. Needs no privilege.
pub fn addresses_without_segmentation_offload() -> io::Result<Vec<IpAddr>> {
    let (socket, mut list) = (control_socket()?, addresses()?);
    list.retain(|(_, name)| splits_packets(&socket, *name).is_ok_and(|splits| !splits));
    Ok(list.into_iter().map(|(address, _)| address).collect())
}

/// A socket for requests about interfaces.
fn control_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?)
}

/// Whether an interface takes packets of many segments.
fn splits_packets(socket: &OwnedFd, name: Name) -> io::Result<bool> {
    let mut value = Value { command: GET_SEGMENTATION, data: 0 };
    // SAFETY: a structure of numbers and arrays of numbers may be all zero.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name = name;
    request.ifr_ifru.ifru_data = ptr::from_mut(&mut value).cast();
    // SAFETY: the kernel reads the name, which ends in 0, and reads and writes `value`, which lives
    // until the call returns.
    let result =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) };
    if result == 0 { Ok(value.data != 0) } else { Err(io::Error::last_os_error()) }
}

/// The addresses of this network namespace, each with the name of its interface.
fn addresses() -> io::Result<Vec<(IpAddr, Name)>> {
    let mut list = ptr::null_mut();
    // SAFETY: the list is written on success, and freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut next, mut addresses) = (list, Vec::new());
    // SAFETY: the entries and what they refer to live until the list is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: the address is null, or one of its family.
        if let Some(address) = unsafe { ip_address(entry.ifa_addr) } {
            // SAFETY: the name ends in 0.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_bytes();
            let mut bytes: Name = [0; libc::IFNAMSIZ];
            // The last byte stays 0.
            let room = bytes[..libc::IFNAMSIZ - 1].iter_mut();
            room.zip(name).for_each(|(room, &byte)| *room = byte as libc::c_char);
            addresses.push((address, bytes));
        }
        next = entry.ifa_next;
    }
    // SAFETY: nothing refers to the list any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(addresses)
}

/// The IP address of a socket address; `None` for another family.
///
/// # Safety
///
/// The pointer is null, or points to a socket address of the size of its family.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by the caller.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: the family says so.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says so.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_takes_large_packets() {
        let localhost = IpAddr::from([127, 0, 0, 1]);
        let addresses = addresses().unwrap();
        let (_, name) = addresses.iter().find(|(address, _)| *address == localhost).unwrap();
        assert_eq!(name[..3], b"lo\0".map(|byte| byte as libc::c_char));
        assert!(!addresses_without_segmentation_offload().unwrap().contains(&localhost));
    }
}
