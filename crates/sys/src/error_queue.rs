//! The socket error queue, as far as `MSG_ZEROCOPY` completions go.
//!
//! Each `send` with `MSG_ZEROCOPY` that took at least one byte gets the next number of a 32-bit counter of
//! its socket, from 0. (A datagram that fails after it was built has used up a number too.) When the kernel is done with the pages it queues a notice that names an inclusive
//! range of numbers (`struct sock_extended_err` in `<linux/errqueue.h>`). IPv6 sockets deliver it as
//! `IPV6_RECVERR`, whatever the peer's address. Other errors in the queue (ICMP, timestamps) are skipped.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The kernel is done with the sends numbered `first..=last` (the counter wraps, so `last` may be below
/// `first`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The first send that is done.
    pub first: u32,
    /// The last one.
    pub last: u32,
    /// The kernel copied the data after all, for at least one of them (`SO_EE_CODE_ZEROCOPY_COPIED`).
    pub copied: bool,
}

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED`, from `<linux/errqueue.h>` (4.14).
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_ZEROCOPY_COPIED: u8 = 1;

/// Room for one extended error and the address that follows it, with their headers.
const CONTROL_BYTES: usize = 128;

/// Where the kernel writes the control messages; it must be aligned as a `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Takes the next zero-copy notice off the queue, never blocking; `None` when there is none left.
pub fn next_completion(socket: impl AsFd) -> io::Result<Option<Completion>> {
    let fd = socket.as_fd().as_raw_fd();
    loop {
        let mut control = Control([0; CONTROL_BYTES]);
        // SAFETY: an all-zero msghdr is a valid value of this plain C struct.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES as _;
        let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
        // SAFETY: `message` names no data buffer and a control buffer of the stated length; both outlive the
        // call.
        match crate::checked(|| unsafe { libc::recvmsg(fd, &raw mut message, flags) }) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        let used = (message.msg_controllen as usize).min(CONTROL_BYTES);
        if let Some(notice) = parse(&control.0[..used]) {
            return Ok(Some(notice));
        }
    }
}

/// Finds the zero-copy notice among control messages, as the kernel lays them out in memory.
///
/// Plain byte arithmetic on a slice, so that any bytes at all are safe to pass.
pub fn parse(mut control: &[u8]) -> Option<Completion> {
    /// `struct cmsghdr` on a 64-bit kernel ABI: length (including the header), level, type.
    const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
    const LENGTH_BYTES: usize = size_of::<usize>();
    loop {
        let header = control.get(..HEADER_BYTES)?;
        let length = usize::from_ne_bytes(header[..LENGTH_BYTES].try_into().ok()?);
        let level = i32_at(header, LENGTH_BYTES)?;
        let kind = i32_at(header, LENGTH_BYTES + 4)?;
        let body = control.get(HEADER_BYTES..length)?;
        let is_error = (level, kind) == (libc::SOL_IP, libc::IP_RECVERR)
            || (level, kind) == (libc::SOL_IPV6, libc::IPV6_RECVERR);
        if is_error && let Some(notice) = parse_extended_error(body) {
            return Some(notice);
        }
        control = control.get(length.checked_next_multiple_of(LENGTH_BYTES)?..)?;
    }
}

/// `struct sock_extended_err`: errno u32, origin u8, type u8, code u8, pad u8, info u32, data u32.
fn parse_extended_error(body: &[u8]) -> Option<Completion> {
    let errno = i32_at(body, 0)?;
    let (origin, code) = (*body.get(4)?, *body.get(6)?);
    if errno != 0 || origin != ORIGIN_ZEROCOPY {
        return None;
    }
    Some(Completion {
        first: i32_at(body, 8)? as u32,
        last: i32_at(body, 12)? as u32,
        copied: code & CODE_ZEROCOPY_COPIED != 0,
    })
}

fn i32_at(bytes: &[u8], offset: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(bytes.get(offset..offset.checked_add(4)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One control message as the kernel writes it.
    fn control(level: i32, kind: i32, body: &[u8]) -> Vec<u8> {
        let mut bytes = (16 + body.len()).to_ne_bytes().to_vec();
        bytes.extend(level.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    fn extended_error(errno: u32, origin: u8, code: u8, first: u32, last: u32) -> Vec<u8> {
        let mut body = errno.to_ne_bytes().to_vec();
        body.extend([origin, 0, code, 0]);
        body.extend(first.to_ne_bytes());
        body.extend(last.to_ne_bytes());
        body
    }

    #[test]
    fn both_families_deliver_notices_and_other_messages_are_skipped() {
        for (level, kind) in
            [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR)]
        {
            let mut bytes = control(libc::SOL_SOCKET, libc::SO_TIMESTAMP, &[0; 16]);
            bytes.extend(control(level, kind, &extended_error(0, 5, 1, 7, 9)));
            assert_eq!(parse(&bytes), Some(Completion { first: 7, last: 9, copied: true }));
        }
        let icmp = control(libc::SOL_IP, libc::IP_RECVERR, &extended_error(111, 2, 1, 7, 9));
        assert_eq!(parse(&icmp), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_safe(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn every_notice_survives(first: u32, last: u32, copied: bool) {
            let body = extended_error(0, 5, u8::from(copied), first, last);
            let bytes = control(libc::SOL_IPV6, libc::IPV6_RECVERR, &body);
            prop_assert_eq!(parse(&bytes), Some(Completion { first, last, copied }));
        }
    }
}
