//! The socket error queue, limited to `MSG_ZEROCOPY` completions.
//!
//! Each `send` with `MSG_ZEROCOPY` that accepted at least one byte gets the next number of a 32-bit
//! counter of its socket, starting at 0. A datagram that fails after it was built uses up a number
//! too. When the kernel no longer uses the pages, it queues a completion that names an inclusive
//! range of numbers (`struct sock_extended_err` in `<linux/errqueue.h>`). IPv6 sockets deliver it
//! as `IPV6_RECVERR`, whatever the peer's address family, and vsock streams as `VSOCK_RECVERR`
//! (Linux 6.7). Other errors in the queue (ICMP, timestamps) are skipped.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A zero-copy completion: the kernel no longer uses the memory of the sends numbered
/// `first..=last`.
///
/// The counter wraps, so `last` may be below `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Number of the first completed send.
    pub first: u32,
    /// Number of the last completed send.
    pub last: u32,
    /// Whether the kernel copied the data of at least one of them (`SO_EE_CODE_ZEROCOPY_COPIED`).
    pub copied: bool,
}

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED`, from `<linux/errqueue.h>` (4.14).
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_ZEROCOPY_COPIED: u8 = 1;

/// Level and type of the control messages that hold an extended error. `SOL_VSOCK` and
/// `VSOCK_RECVERR` come from `<linux/socket.h>` and `<linux/vm_sockets.h>`.
const ERROR_MESSAGES: [(i32, i32); 3] =
    [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR), (287, 1)];

/// Size of the control buffer: one extended error and the address that follows it, with their
/// headers.
const CONTROL_BYTES: usize = 128;

/// Buffer for the control messages; it must be aligned as a `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Takes the next zero-copy completion off the error queue without blocking; `None` if there is
/// none.
pub fn next_completion(socket: impl AsFd) -> io::Result<Option<Completion>> {
    let fd = socket.as_fd().as_raw_fd();
    loop {
        let mut control = Control([0; CONTROL_BYTES]);
        // SAFETY: an all-zero msghdr is a valid value of this plain C struct.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES as _;
        let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
        // SAFETY: `message` names no data buffer and a control buffer of the stated length; both
        // outlive the call.
        match crate::syscall(|| unsafe { libc::recvmsg(fd, &raw mut message, flags) }) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        let used = (message.msg_controllen as usize).min(CONTROL_BYTES);
        if let Some(completion) = parse(&control.0[..used]) {
            return Ok(Some(completion));
        }
    }
}

/// Finds the zero-copy completion in a buffer of control messages in the kernel's layout.
///
/// Uses plain byte arithmetic on a slice, so any input is safe.
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
        let is_error = ERROR_MESSAGES.contains(&(level, kind));
        if let Some(completion) = is_error.then(|| parse_extended_error(body)).flatten() {
            return Some(completion);
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

    /// Builds a control message as the kernel lays it out.
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
    fn each_address_family_delivers_completions_and_other_messages_are_skipped() {
        // The last one is a vsock stream's.
        for (level, kind) in
            [(libc::SOL_IP, libc::IP_RECVERR), (libc::SOL_IPV6, libc::IPV6_RECVERR), (287, 1)]
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
        fn any_bytes_are_safe_to_parse(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn every_completion_is_parsed(first: u32, last: u32, copied: bool) {
            let body = extended_error(0, 5, u8::from(copied), first, last);
            let bytes = control(libc::SOL_IPV6, libc::IPV6_RECVERR, &body);
            prop_assert_eq!(parse(&bytes), Some(Completion { first, last, copied }));
        }
    }
}
