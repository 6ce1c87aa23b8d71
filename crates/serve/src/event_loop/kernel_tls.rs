//! TLS in the kernel (kTLS): rustls agrees on keys with the client, and from then on the kernel encrypts, so that files go by the same
//! paths as without.
//!
//! It is there where the module `tls` is. A client that renews its keys later (nobody's browser does) is cut off: kernels before
//! 6.14 cannot follow.

use crate::event_loop::sent::Sent;
use haul_sys::ktls::{self, ContentType, Direction, Keys, Version};
use haul_sys::sockopt::set_upper_layer_protocol;
use rustls::{ConnectionTrafficSecrets, ProtocolVersion, ServerConnection};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;

/// Records under one key: RFC 8446 section 5.5 allows AES-GCM 2^24.5. A connection ends before.
pub const RECORDS_MAX: u64 = 1 << 24;
/// The most that one record holds, in bytes (RFC 8446 section 5.1).
pub const RECORD_BYTES_MAX: u64 = 1 << 14;

/// `close_notify`, a warning (RFC 8446 section 6.1).
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// What both sides may agree on and the kernel takes over: the bits of [`OFFERS`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Supported(u8);

/// What rustls may agree on, by the kernel's version and cipher and by the end of its name.
const OFFERS: [(Version, Keys<'static>, &str); 6] = [
    (Version::V1_2, AES_128, "AES_128_GCM_SHA256"),
    (Version::V1_2, AES_256, "AES_256_GCM_SHA384"),
    (Version::V1_2, CHACHA20, "CHACHA20_POLY1305_SHA256"),
    (Version::V1_3, AES_128, "AES_128_GCM_SHA256"),
    (Version::V1_3, AES_256, "AES_256_GCM_SHA384"),
    (Version::V1_3, CHACHA20, "CHACHA20_POLY1305_SHA256"),
];
const AES_128: Keys<'static> = Keys::Aes128Gcm(&[0; 16], &[0; 12]);
const AES_256: Keys<'static> = Keys::Aes256Gcm(&[0; 32], &[0; 12]);
const CHACHA20: Keys<'static> = Keys::ChaCha20Poly1305(&[0; 32], &[0; 12]);

impl Supported {
    /// Tries everything on a connection of its own. An error where the kernel takes nothing.
    pub fn probe() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let mut supported = 0;
        let mut refused = None;
        for (at, (version, keys, _)) in OFFERS.into_iter().enumerate() {
            let socket = TcpStream::connect(address)?;
            let _other = listener.accept()?;
            let installed = prepare(&socket)
                .and_then(|()| ktls::install(&socket, Direction::Transmit, version, keys, 0))
                .and_then(|()| ktls::install(&socket, Direction::Receive, version, keys, 0));
            match installed {
                Ok(()) => supported |= 1 << at,
                Err(error) => refused = Some(error),
            }
        }
        refused.filter(|_| supported == 0).map_or(Ok(Self(supported)), Err)
    }

    /// Whether there is anything.
    pub fn is_any(self) -> bool {
        self.0 != 0
    }

    /// Whether this session's version and cipher are among them.
    pub fn takes(self, session: &ServerConnection) -> bool {
        let (Some(version), Some(suite)) = (version(session), session.negotiated_cipher_suite())
        else {
            return false;
        };
        let name = suite.suite().as_str().unwrap_or_default();
        let offer =
            |(of, _, end): &(Version, Keys<'_>, &str)| *of == version && name.ends_with(end);
        OFFERS.iter().position(offer).is_some_and(|at| self.0 & 1 << at != 0)
    }
}

fn version(session: &ServerConnection) -> Option<Version> {
    match session.protocol_version()? {
        ProtocolVersion::TLSv1_2 => Some(Version::V1_2),
        ProtocolVersion::TLSv1_3 => Some(Version::V1_3),
        _ => None,
    }
}

/// Readies a socket, for a session that [`Supported::takes`] allows; until [`take_over`] nothing changes. Refused where the
/// client has said all that it will already.
pub fn prepare(socket: impl AsFd) -> io::Result<()> {
    set_upper_layer_protocol(socket, "tls")
}

/// Gives the kernel the keys of a session that has neither sent nor received anything but its handshake.
pub fn take_over(socket: impl AsFd, session: ServerConnection) -> io::Result<()> {
    let version = version(&session).ok_or(io::ErrorKind::Unsupported)?;
    let secrets = session.dangerous_extract_secrets().map_err(io::Error::other)?;
    let (sent, received) = (&secrets.tx, &secrets.rx);
    let mut explicit = [0; 12];
    let keys_to_send = match (version, keys(&sent.1)?) {
        (Version::V1_2, Keys::Aes128Gcm(key, iv)) => {
            Keys::Aes128Gcm(key, after(iv, sent.0, &mut explicit))
        }
        (Version::V1_2, Keys::Aes256Gcm(key, iv)) => {
            Keys::Aes256Gcm(key, after(iv, sent.0, &mut explicit))
        }
        (_, keys) => keys,
    };
    ktls::install(&socket, Direction::Transmit, version, keys_to_send, sent.0)?;
    ktls::install(&socket, Direction::Receive, version, keys(&received.1)?, received.0)
}

/// The initialization vector for TLS 1.2 with AES-GCM once `sequence` records have gone.
///
/// rustls has numbered those by its vector's explicit part XOR the record's number; the kernel begins with that part as it is
/// given, and counts up from there. **The same number twice under one key would give the key's secrets away.** What differs from the
/// part in its lowest bits only, as the first `sequence` of rustls' do, is less than the part plus `sequence`.
fn after<'i>(iv: &[u8; 12], sequence: u64, out: &'i mut [u8; 12]) -> &'i [u8; 12] {
    let (salt, explicit) = iv.split_at(4);
    let explicit = explicit.iter().fold(0, |number: u64, &byte| number << 8 | u64::from(byte));
    out[..4].copy_from_slice(salt);
    out[4..].copy_from_slice(&explicit.wrapping_add(sequence).to_be_bytes());
    out
}

fn keys(secrets: &ConnectionTrafficSecrets) -> io::Result<Keys<'_>> {
    fn sized<const N: usize>(bytes: &[u8]) -> io::Result<&[u8; N]> {
        bytes.try_into().map_err(io::Error::other)
    }
    Ok(match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => {
            Keys::Aes128Gcm(sized(key.as_ref())?, sized(iv.as_ref())?)
        }
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => {
            Keys::Aes256Gcm(sized(key.as_ref())?, sized(iv.as_ref())?)
        }
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            Keys::ChaCha20Poly1305(sized(key.as_ref())?, sized(iv.as_ref())?)
        }
        _ => return Err(io::ErrorKind::Unsupported.into()),
    })
}

/// Reads what has come into the free room of `buffer`; 0 is the end, with a word or without.
pub fn receive(socket: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<usize> {
    let before = buffer.len();
    let (content_type, count) = ktls::receive(socket, buffer)?;
    if content_type != ContentType::ApplicationData {
        buffer.truncate(before);
    }
    match content_type {
        ContentType::ApplicationData => Ok(count),
        ContentType::Alert => Ok(0),
        ContentType::Handshake | ContentType::Other(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Says that nothing more comes. Once that is taken, the kernel holds back nothing of what was said before: until then, closing or
/// shutting down would lose it.
pub fn end(socket: impl AsFd) -> Sent {
    match ktls::send_record(socket, ContentType::Alert, &CLOSE_NOTIFY) {
        Ok(_) => Sent::Bytes(0),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Blocked,
        Err(_) => Sent::Broken,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_number_is_used_by_both(iv in any::<[u8; 12]>(), sequence in 1u64..100, later in 0u64..1000) {
            let mut out = [0; 12];
            let explicit = |iv: &[u8; 12]| u64::from_be_bytes(iv[4..].try_into().unwrap());
            let first = explicit(after(&iv, sequence, &mut out));
            prop_assert_eq!(&out[..4], &iv[..4]);
            for number in 0..sequence {
                prop_assert_ne!(explicit(&iv) ^ number, first.wrapping_add(later));
            }
        }
    }
}
