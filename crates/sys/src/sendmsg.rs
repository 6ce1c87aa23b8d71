//! `sendmsg` and `sendmmsg` with UDP segmentation offload (Linux 4.18) and `MSG_ZEROCOPY`.

use crate::retry::{WaitsFor, retry_call};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd};

/// `SOL_UDP` and `UDP_SEGMENT` of `<linux/udp.h>`.
const SOL_UDP: libc::c_int = 17;
const UDP_SEGMENT: libc::c_int = 103;

/// A control message with a 16-bit value, in the kernel's layout.
#[repr(C)]
struct SegmentControl {
    header: libc::cmsghdr,
    segment_bytes: u16,
    padding: [u8; 6],
}
const _: () = assert!(size_of::<SegmentControl>() == size_of::<libc::cmsghdr>() + 8);

/// Options of [`send`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// Splits the bytes into datagrams of this size, the last one shorter (`UDP_SEGMENT`); `None`
    /// sends them unsplit.
    pub segment_bytes: Option<u16>,
    /// `MSG_ZEROCOPY`: the kernel sends from the pages until it queues a completion
    /// ([`crate::error_queue`]). The caller must keep the memory unchanged until then, and must not
    /// free it: an allocator would give it to another owner.
    pub zerocopy: bool,
    /// `MSG_DONTWAIT`: the call does not wait for room, also on a blocking socket.
    pub nonblocking: bool,
}

/// Sends the bytes of all parts, in their order, on a connected socket with `sendmsg`; returns the
/// bytes accepted. The kernel takes at most 1024 parts (`UIO_MAXIOV`).
///
/// A datagram socket sends all of them or none. A stream socket may accept fewer.
///
/// On a datagram socket, `EINVAL` or `EMSGSIZE` is returned in three cases:
///
/// * more than 64 KiB,
/// * more segments than the kernel accepts (64; 128 since Linux 6.9),
/// * a segment larger than the MTU carries.
///
/// `EIO` if the device cannot compute checksums.
pub fn send(socket: impl AsFd, parts: &[IoSlice<'_>], options: SendOptions) -> io::Result<usize> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: all-zero is a valid value of this plain C struct. (musl's header has padding that
    // cannot be named.)
    let mut control: SegmentControl = unsafe { std::mem::zeroed() };
    control.header.cmsg_len = (size_of::<libc::cmsghdr>() + size_of::<u16>()) as _;
    control.header.cmsg_level = SOL_UDP;
    control.header.cmsg_type = UDP_SEGMENT;
    control.segment_bytes = options.segment_bytes.unwrap_or(0);
    // SAFETY: an all-zero msghdr is a valid value of this plain C struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // `IoSlice` has the layout of `iovec`, as its documentation guarantees.
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len() as _;
    if options.segment_bytes.is_some() {
        message.msg_control = (&raw mut control).cast();
        // The struct is longer on 32-bit targets, where the kernel would read a second message.
        // SAFETY: the function only computes a length.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as _;
    }
    let flags = libc::MSG_NOSIGNAL
        | if options.zerocopy { libc::MSG_ZEROCOPY } else { 0 }
        | if options.nonblocking { libc::MSG_DONTWAIT } else { 0 };
    // SAFETY: `message` names `parts`, which the kernel only reads, and a control message of the
    // stated length; all outlive the call. With MSG_ZEROCOPY the kernel reads on after the call,
    // from pages that it holds references to. If the memory is used again before the completion,
    // the peer receives other bytes; the caller keeps it until then.
    retry_call(&socket, WaitsFor::Send, || unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

/// Most messages that one `sendmmsg` call accepts (`UIO_MAXIOV`).
const MESSAGES_MAX: usize = 1024;

/// Sends `bytes` on a connected datagram socket as datagrams of `datagram_bytes` each, the last one
/// shorter.
///
/// Makes one system call (`sendmmsg`, Linux 3.0). Returns how many datagrams were accepted, at most
/// 1024.
///
/// `InvalidInput` if `datagram_bytes` is 0.
/// `nonblocking` as in [`SendOptions`].
pub fn send_group(
    socket: impl AsFd,
    bytes: &[u8],
    datagram_bytes: usize,
    nonblocking: bool,
) -> io::Result<usize> {
    if datagram_bytes == 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a datagram needs at least one byte",
        ));
    }
    let mut parts: Vec<libc::iovec> = bytes
        .chunks(datagram_bytes)
        .take(MESSAGES_MAX)
        .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() })
        .collect();
    let mut messages: Vec<libc::mmsghdr> = parts
        .iter_mut()
        .map(|part| {
            // SAFETY: an all-zero mmsghdr is a valid value of this plain C struct.
            let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
            message.msg_hdr.msg_iov = part;
            message.msg_hdr.msg_iovlen = 1;
            message
        })
        .collect();
    let fd = socket.as_fd().as_raw_fd();
    let flags = libc::MSG_NOSIGNAL | if nonblocking { libc::MSG_DONTWAIT } else { 0 };
    // SAFETY: each message names a part of `bytes`, which the kernel only reads; parts and messages
    // outlive the call.
    retry_call(&socket, WaitsFor::Send, || unsafe {
        libc::sendmmsg(fd, messages.as_mut_ptr(), messages.len() as libc::c_uint, flags as _)
            as libc::ssize_t
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn one_call_sends_many_datagrams() {
        let to = UdpSocket::bind("127.0.0.1:0").unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        from.connect(to.local_addr().unwrap()).unwrap();
        let bytes: Vec<u8> = (0..2500u32).map(|i| i as u8).collect();
        let segmented = SendOptions { segment_bytes: Some(1000), ..Default::default() };
        let (first, second) = bytes.split_at(700);
        let parts = [IoSlice::new(first), IoSlice::new(&[]), IoSlice::new(second)];
        assert_eq!(send(&from, &parts, segmented).unwrap(), 2500);
        let mut received = [0; 2000];
        for part in bytes.chunks(1000) {
            let len = to.recv(&mut received).unwrap();
            assert_eq!(&received[..len], part);
        }
        assert_eq!(send_group(&from, &bytes, 1000, false).unwrap(), 3);
        for part in bytes.chunks(1000) {
            let len = to.recv(&mut received).unwrap();
            assert_eq!(&received[..len], part);
        }
        assert!(send_group(&from, &bytes, 0, false).is_err());
        let single = SendOptions::default();
        assert_eq!(send(&from, &[IoSlice::new(b"alone")], single).unwrap(), 5);
        assert_eq!(to.recv(&mut received).unwrap(), 5);
    }
}
