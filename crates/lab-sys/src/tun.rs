//! TUN devices: network interfaces whose packets a program reads and writes (`/dev/net/tun`).

use crate::ethtool::ifreq_for;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// `TUNSETIFF` and `TUNSETOFFLOAD`, from `<linux/if_tun.h>`.
const SET_INTERFACE: libc::Ioctl = 0x4004_54ca;
const SET_OFFLOAD: libc::Ioctl = 0x4004_54d0;
/// `IFF_TUN | IFF_NO_PI | IFF_VNET_HDR`: IP packets, each behind a `struct virtio_net_hdr`, which
/// describes its offloads.
const FLAGS: libc::c_short = 0x0001 | 0x1000 | 0x4000;
/// `TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6`: the program takes packets without a checksum, and
/// packets of several segments.
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04;

/// Size of the header before each packet, in bytes (`struct virtio_net_hdr`).
pub const HEADER_BYTES: usize = 10;

/// Creates a TUN device in the calling thread's network namespace; it exists as long as the
/// descriptor. Needs `CAP_NET_ADMIN` over the namespace, and access to `/dev/net/tun`.
///
/// Each read returns one packet and each write sends one, behind a header of [`HEADER_BYTES`].
/// Reads do not block.
pub fn create(name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let device = rustix::fs::open("/dev/net/tun", flags, Mode::empty())?;
    let mut request = ifreq_for(name)?;
    request.ifr_ifru.ifru_flags = FLAGS;
    // SAFETY: TUNSETIFF reads and writes a struct ifreq, which libc's is; its name ends with a
    // zero, and it outlives the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), SET_INTERFACE, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: TUNSETOFFLOAD takes its argument by value, and no pointer.
    if unsafe { libc::ioctl(device.as_raw_fd(), SET_OFFLOAD, OFFLOADS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(device)
}
