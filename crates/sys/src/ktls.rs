//! TLS records that the kernel makes and reads (kTLS, `<linux/tls.h>`).
//!
//! Two programs agree on keys by themselves; then each gives them to its kernel, which encrypts what is sent, `sendfile`'s pages
//! too, and decrypts what is received. Linux 4.13 sends and 4.17 receives; TLS 1.3 came with 5.1, AES-256 too,
//! ChaCha20 with 5.11. The socket must have the upper-layer protocol `tls`
//! ([`crate::sockopt::set_upper_layer_protocol`]). There is no way back.
//!
//! It cannot renew keys (Linux 6.14 can).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Which way records go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Those that this side sends.
    Transmit,
    /// Those that it receives.
    Receive,
}

/// The protocol's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// TLS 1.2.
    V1_2,
    /// TLS 1.3.
    V1_3,
}

/// A cipher with its key and initialization vector, as RFC 8446 section 5.3 has it; for TLS 1.2 with AES-GCM, the four bytes of the
/// implicit part of the nonce, then the eight of the first explicit one (RFC 5288 section 3).
#[derive(Clone, Copy)]
pub enum Keys<'k> {
    /// AES-128-GCM.
    Aes128Gcm(&'k [u8; 16], &'k [u8; 12]),
    /// AES-256-GCM.
    Aes256Gcm(&'k [u8; 32], &'k [u8; 12]),
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305(&'k [u8; 32], &'k [u8; 12]),
}

/// What a record is for: its content type (RFC 8446 section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentType {
    /// 21: an end or an error, two bytes.
    Alert,
    /// 22: the parties agree on something, such as other keys.
    Handshake,
    /// 23: what the parties have to say.
    ApplicationData,
    /// Any other.
    Other(u8),
}

/// `SOL_TLS`, `TLS_SET_RECORD_TYPE`, `TLS_GET_RECORD_TYPE` (Linux 4.13, 4.17).
const SOL_TLS: libc::c_int = 282;
const SET_RECORD_TYPE: libc::c_int = 1;
const GET_RECORD_TYPE: libc::c_int = 2;

/// Room for a control message of one byte.
const CONTROL_BYTES: usize = 32;

/// A control message; it must be aligned as a `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Gives the kernel one direction's keys. `sequence` is the number of the next record.
///
/// With TLS 1.2 and AES-GCM the kernel's first record has the explicit nonce that is given, and the next ones count up from there,
/// whatever `sequence` is: **one that was used before must not come again.**
///
/// `EINVAL` or `EOPNOTSUPP` where this kernel does not have the version or the cipher, `ENOENT` where it cannot load one, `EBUSY` where
/// that direction has keys, `ENOPROTOOPT` without the upper-layer protocol.
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
    // On the wire, and here, numbers are big-endian.
    let rec_seq = sequence.to_be_bytes();
    let aes = |iv: &[u8; 12]| -> ([u8; 4], [u8; 8]) {
        let (mut salt, mut explicit) = ([0; 4], [0; 8]);
        salt.copy_from_slice(&iv[..4]);
        explicit.copy_from_slice(&iv[4..]);
        (salt, explicit)
    };
    match keys {
        Keys::Aes128Gcm(key, iv) => {
            let (salt, iv) = aes(iv);
            let info = info(libc::TLS_CIPHER_AES_GCM_128);
            set(
                socket,
                direction,
                &libc::tls12_crypto_info_aes_gcm_128 { info, iv, key: *key, salt, rec_seq },
            )
        }
        Keys::Aes256Gcm(key, iv) => {
            let (salt, iv) = aes(iv);
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

// As in `<linux/tls.h>`, and without padding.
const _: () = assert!(size_of::<libc::tls12_crypto_info_aes_gcm_128>() == 40);
const _: () = assert!(size_of::<libc::tls12_crypto_info_aes_gcm_256>() == 56);
const _: () = assert!(size_of::<libc::tls12_crypto_info_chacha20_poly1305>() == 56);

/// Only for these.
fn set<T: Copy>(socket: impl AsFd, direction: Direction, value: &T) -> io::Result<()> {
    let option = match direction {
        Direction::Transmit => libc::TLS_TX,
        Direction::Receive => libc::TLS_RX,
    };
    let fd = socket.as_fd().as_raw_fd();
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes from `value`, which outlives the call.
    let result =
        unsafe { libc::setsockopt(fd, SOL_TLS, option, std::ptr::from_ref(value).cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends a record that is no data, never blocking. Its bytes are few: they go all or not at all.
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
    // SAFETY: `message` names one part and a control buffer of the stated lengths, which the kernel only reads and which outlive
    // the call.
    crate::checked(|| unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

/// Receives of one record, or of several that are data, into the free room of `buffer`, never blocking; 0 bytes are the end of the
/// stream.
///
/// `EBADMSG` for a record that was tampered with, `EMSGSIZE` for one that is too large.
pub fn receive(socket: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<(ContentType, usize)> {
    let mut control = Control([0; CONTROL_BYTES]);
    let room = buffer.spare_capacity_mut();
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: an all-zero msghdr is a valid value of this plain C struct.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `message` names one part and a control buffer of the stated lengths; the kernel writes there, and both outlive the call.
    let count =
        crate::checked(|| unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) })?;
    // SAFETY: the kernel has written `msg_controllen` bytes of control messages into the aligned buffer that `message` names.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message).as_ref() };
    let content_type = match header {
        Some(header) if (header.cmsg_level, header.cmsg_type) == (SOL_TLS, GET_RECORD_TYPE) => {
            // SAFETY: a message of this type has one byte of data, and the buffer has room for it behind the header.
            ContentType::of(unsafe { *libc::CMSG_DATA(header) })
        }
        _ => ContentType::ApplicationData,
    };
    // SAFETY: the kernel has written `count` bytes into the room behind the buffer's length.
    unsafe { buffer.set_len(buffer.len() + count) };
    Ok((content_type, count))
}

impl ContentType {
    fn of(number: u8) -> Self {
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
    use rustix::event::{PollFd, PollFlags};
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

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
            let (mut one, other) = pair();
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
            assert_eq!((&other).read(&mut [0]).unwrap(), 1, "it waits for the first record");
            assert_eq!(receive(&other, &mut buffer).unwrap(), (ContentType::ApplicationData, 4));
            rustix::event::poll(&mut [PollFd::new(&other, PollFlags::IN)], None).unwrap();
            assert_eq!(receive(&other, &mut buffer).unwrap(), (ContentType::Alert, 2));
            assert_eq!(buffer, b"ello\x01\x00");
            let nothing = receive(&other, &mut buffer).unwrap_err();
            assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
            drop(one);
            assert_eq!((&other).read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn keys_need_the_protocol_first() {
        let (one, _other) = pair();
        let keys = Keys::Aes128Gcm(&[0; 16], &[0; 12]);
        assert!(install(&one, Direction::Transmit, Version::V1_3, keys, 0).is_err());
    }
}
