//! Kernel TLS: TLS records that the kernel encrypts and decrypts (kTLS, `<linux/tls.h>`).
//!
//! Two programs agree on keys themselves; then each passes them to its kernel. The kernel encrypts
//! the bytes that are sent, including the pages of `sendfile`, and decrypts the bytes that are
//! received. Sending needs Linux 4.13 and receiving 4.17; TLS 1.3 and AES-256 need 5.1, ChaCha20
//! needs 5.11. The socket must have the upper-layer protocol `tls`
//! ([`crate::sockopt::set_upper_layer_protocol`]). It cannot be removed again.
//!
//! This module cannot renew keys (Linux 6.14 can).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Direction of the records that a key protects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Records that this side sends.
    Transmit,
    /// Records that this side receives.
    Receive,
}

/// TLS version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// TLS 1.2.
    V1_2,
    /// TLS 1.3.
    V1_3,
}

/// A cipher with its key and initialization vector (RFC 8446 section 5.3).
///
/// For TLS 1.2 with AES-GCM the vector is the nonce (RFC 5288 section 3): the four bytes of its
/// implicit part, then the eight bytes of the first explicit part.
#[derive(Clone, Copy)]
pub enum Keys<'k> {
    /// AES-128-GCM.
    Aes128Gcm(&'k [u8; 16], &'k [u8; 12]),
    /// AES-256-GCM.
    Aes256Gcm(&'k [u8; 32], &'k [u8; 12]),
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305(&'k [u8; 32], &'k [u8; 12]),
}

/// Content type of a record (RFC 8446 section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentType {
    /// 21: closes the connection or reports an error; two bytes.
    Alert,
    /// 22: handshake messages, such as a key update.
    Handshake,
    /// 23: the application's bytes.
    ApplicationData,
    /// Any other content type.
    Other(u8),
}

/// `SOL_TLS`, `TLS_SET_RECORD_TYPE`, `TLS_GET_RECORD_TYPE` (Linux 4.13, 4.17).
const SOL_TLS: libc::c_int = 282;
const SET_RECORD_TYPE: libc::c_int = 1;
const GET_RECORD_TYPE: libc::c_int = 2;

/// Size of an alert, and the description of the one that closes a stream (RFC 8446 section 6).
const ALERT_BYTES: usize = 2;
const CLOSE_NOTIFY: u8 = 0;

/// Size of the buffer for a control message of one byte.
const CONTROL_BYTES: usize = 32;

/// Buffer for a control message; it must be aligned as a `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Passes one direction's keys to the kernel. `sequence` is the number of the next record.
///
/// With TLS 1.2 and AES-GCM, the kernel's first record uses the explicit nonce given here. The next
/// records count up from it, whatever `sequence` is. **A nonce that was used before must not be
/// used again.**
///
/// `EINVAL` or `EOPNOTSUPP` if this kernel lacks the version or the cipher, `ENOENT` if it cannot
/// load the cipher. `EBUSY` if that direction has keys already, `ENOPROTOOPT` without the
/// upper-layer protocol.
pub fn install(
    socket: impl AsFd,
    direction: Direction,
    version: Version,
    keys: Keys<'_>,
    sequence: u64,
) -> io::Result<()> {
    let version = match version {
        Version::V1_2 => libc::TLS_1_2_VERSION,
        Version::V1_3 => libc::TLS_1_3_VERSION,
    };
    let info = |cipher_type| libc::tls_crypto_info { version, cipher_type };
    // Numbers are big-endian, both on the wire and here.
    let rec_seq = sequence.to_be_bytes();
    let split_iv = |iv: &[u8; 12]| -> ([u8; 4], [u8; 8]) {
        let (mut salt, mut explicit) = ([0; 4], [0; 8]);
        salt.copy_from_slice(&iv[..4]);
        explicit.copy_from_slice(&iv[4..]);
        (salt, explicit)
    };
    match keys {
        Keys::Aes128Gcm(key, iv) => {
            let (salt, iv) = split_iv(iv);
            let info = info(libc::TLS_CIPHER_AES_GCM_128);
            set(
                socket,
                direction,
                &libc::tls12_crypto_info_aes_gcm_128 { info, iv, key: *key, salt, rec_seq },
            )
        }
        Keys::Aes256Gcm(key, iv) => {
            let (salt, iv) = split_iv(iv);
            let info = info(libc::TLS_CIPHER_AES_GCM_256);
            set(
                socket,
                direction,
                &libc::tls12_crypto_info_aes_gcm_256 { info, iv, key: *key, salt, rec_seq },
            )
        }
        Keys::ChaCha20Poly1305(key, iv) => {
            let info = info(libc::TLS_CIPHER_CHACHA20_POLY1305);
            let value = libc::tls12_crypto_info_chacha20_poly1305 {
                info,
                iv: *iv,
                key: *key,
                salt: [],
                rec_seq,
            };
            set(socket, direction, &value)
        }
    }
}

// The sizes of `<linux/tls.h>`, without padding.
const _: () = assert!(size_of::<libc::tls12_crypto_info_aes_gcm_128>() == 40);
const _: () = assert!(size_of::<libc::tls12_crypto_info_aes_gcm_256>() == 56);
const _: () = assert!(size_of::<libc::tls12_crypto_info_chacha20_poly1305>() == 56);

/// Sets `TLS_TX` or `TLS_RX`. `T` must be one of the three structs above.
fn set<T: Copy>(socket: impl AsFd, direction: Direction, value: &T) -> io::Result<()> {
    let option = match direction {
        Direction::Transmit => libc::TLS_TX,
        Direction::Receive => libc::TLS_RX,
    };
    set_option(socket, option, value)
}

/// Sets an option of the level `SOL_TLS`. `T` must have no padding.
fn set_option<T: Copy>(socket: impl AsFd, option: libc::c_int, value: &T) -> io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes from `value`, which outlives the call.
    let result =
        unsafe { libc::setsockopt(fd, SOL_TLS, option, std::ptr::from_ref(value).cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Declares that the peer does not pad its records of TLS 1.3 (`TLS_RX_EXPECT_NO_PAD`, Linux 6.0),
/// so that the kernel decrypts into a receiving program's memory, without a copy. A padded record
/// is decrypted twice. The keys must be installed.
pub fn expect_no_padding(socket: impl AsFd) -> io::Result<()> {
    set_option(socket, libc::TLS_RX_EXPECT_NO_PAD, &1u32)
}

/// Sends a record that is not application data, without blocking. The record is sent whole or not
/// at all.
pub fn send_record(
    socket: impl AsFd,
    content_type: ContentType,
    bytes: &[u8],
) -> io::Result<usize> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: an all-zero msghdr is a valid value of this plain C struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: pure arithmetic on a length.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(1) } as _;
    // SAFETY: the control buffer is aligned, and has room for a header and one byte of data.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = SOL_TLS;
        (*header).cmsg_type = SET_RECORD_TYPE;
        (*header).cmsg_len = libc::CMSG_LEN(1) as _;
        *libc::CMSG_DATA(header) = content_type.number();
    }
    let fd = socket.as_fd().as_raw_fd();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` names one part and a control buffer of the stated lengths, which the kernel
    // only reads and which outlive the call.
    crate::syscall(|| unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

/// Receives one record, or several of application data, into the spare capacity of `buffer`.
///
/// Never blocks. Returns the content type and the number of bytes; 0 bytes mean the end of the
/// stream.
///
/// `EBADMSG` for a record that fails authentication, `EMSGSIZE` for one that is too large.
pub fn receive(socket: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<(ContentType, usize)> {
    receive_with_flags(socket, buffer, libc::MSG_DONTWAIT)
}

/// Whether the next record is not application data: `splice` refuses it with `EINVAL`, and `recv`
/// with `EIO`. Never blocks, and leaves the record in the socket. Without TLS there is none.
pub fn is_control_record_next(socket: impl AsFd) -> bool {
    let peeked = peek(socket);
    peeked.is_ok_and(|(content_type, _)| content_type != ContentType::ApplicationData)
}

/// Whether the next record is the alert with which the peer closes its stream (`close_notify`, RFC
/// 8446 section 6.1). Likewise never blocks, and leaves the record in the socket.
pub fn is_close_notify_next(socket: impl AsFd) -> bool {
    let Ok((content_type, bytes)) = peek(socket) else { return false };
    // The level has no meaning any more.
    content_type == ContentType::Alert && matches!(bytes[..], [_, CLOSE_NOTIFY])
}

/// The content type and the first bytes of the next record, which stays in the socket.
fn peek(socket: impl AsFd) -> io::Result<(ContentType, Vec<u8>)> {
    let mut bytes = Vec::with_capacity(ALERT_BYTES);
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    let (content_type, _) = receive_with_flags(socket, &mut bytes, flags)?;
    Ok((content_type, bytes))
}

fn receive_with_flags(
    socket: impl AsFd,
    buffer: &mut Vec<u8>,
    flags: libc::c_int,
) -> io::Result<(ContentType, usize)> {
    let mut control = Control([0; CONTROL_BYTES]);
    let spare = buffer.spare_capacity_mut();
    let mut part = libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: spare.len() };
    // SAFETY: an all-zero msghdr is a valid value of this plain C struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `message` names one part and a control buffer of the stated lengths; the kernel
    // writes there, and both outlive the call.
    let count = crate::syscall(|| unsafe { libc::recvmsg(fd, &raw mut message, flags) })?;
    // SAFETY: the kernel has written `msg_controllen` bytes of control messages into the aligned
    // buffer that `message` names.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message).as_ref() };
    let content_type = match header {
        Some(header) if (header.cmsg_level, header.cmsg_type) == (SOL_TLS, GET_RECORD_TYPE) => {
            // SAFETY: a message of this type has one byte of data, and the buffer has room for it
            // after the header.
            ContentType::from_number(unsafe { *libc::CMSG_DATA(header) })
        }
        _ => ContentType::ApplicationData,
    };
    // SAFETY: the kernel has written `count` bytes into the spare capacity after the buffer's
    // length.
    unsafe { buffer.set_len(buffer.len() + count) };
    Ok((content_type, count))
}

impl ContentType {
    fn from_number(number: u8) -> Self {
        match number {
            21 => Self::Alert,
            22 => Self::Handshake,
            23 => Self::ApplicationData,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::Alert => 21,
            Self::Handshake => 22,
            Self::ApplicationData => 23,
            Self::Other(number) => number,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_testing::tcp_pair;
    use rustix::event::{PollFd, PollFlags};
    use std::io::{Read, Write};

    #[test]
    fn each_cipher_of_each_version_carries_data_and_alerts() {
        let keys = [
            Keys::Aes128Gcm(&[1; 16], &[2; 12]),
            Keys::Aes256Gcm(&[3; 32], &[4; 12]),
            Keys::ChaCha20Poly1305(&[5; 32], &[6; 12]),
        ];
        for (version, keys) in
            [Version::V1_2, Version::V1_3].into_iter().flat_map(|v| keys.map(|k| (v, k)))
        {
            let (mut one, other) = tcp_pair();
            for socket in [&one, &other] {
                if let Err(error) = crate::sockopt::set_upper_layer_protocol(socket, "tls") {
                    return eprintln!("SKIPPED: this kernel has no TLS: {error}");
                }
            }
            install(&one, Direction::Transmit, version, keys, 7).unwrap();
            install(&other, Direction::Receive, version, keys, 7).unwrap();
            one.write_all(b"hello").unwrap();
            send_record(&one, ContentType::Alert, &[1, 0]).unwrap();
            let mut buffer = Vec::with_capacity(100);
            assert_eq!((&other).read(&mut [0]).unwrap(), 1, "waits for the first record");
            assert_eq!(receive(&other, &mut buffer).unwrap(), (ContentType::ApplicationData, 4));
            rustix::event::poll(&mut [PollFd::new(&other, PollFlags::IN)], None).unwrap();
            assert!(is_control_record_next(&other) && is_close_notify_next(&other));
            assert_eq!(receive(&other, &mut buffer).unwrap(), (ContentType::Alert, 2));
            assert!(!is_control_record_next(&other));
            assert_eq!(buffer, b"ello\x01\x00");
            let error = receive(&other, &mut buffer).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            drop(one);
            assert_eq!((&other).read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn installing_keys_requires_the_tls_protocol_on_the_socket() {
        let (one, _other) = tcp_pair();
        let keys = Keys::Aes128Gcm(&[0; 16], &[0; 12]);
        assert!(install(&one, Direction::Transmit, Version::V1_3, keys, 0).is_err());
    }
}
