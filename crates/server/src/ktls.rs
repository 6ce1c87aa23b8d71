//! TLS in the kernel (kTLS): rustls makes the handshake, then the kernel encrypts, so that files
//! take the same send methods as without TLS.
//!
//! It needs the kernel module `tls`. A peer that renews its keys later (no browser does) is
//! disconnected: kernels before 6.14 cannot follow. A client of TLS 1.3 in the kernel cannot resume
//! its session in a later connection, since the tickets for that come after the handshake.

use crate::sent::Sent;
use haul_sys::ktls::{self, ContentType, Direction, Keys, Version};
use haul_sys::sockopt::set_upper_layer_protocol;
use rustls::{
    CommonState, Connection, ConnectionTrafficSecrets, ExtractedSecrets, ProtocolVersion,
};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

/// The number of records sent under one key before the connection fails. RFC 8446 section 5.5
/// allows AES-GCM 2^24.5.
pub const RECORDS_MAX: u64 = 1 << 24;
/// The largest record's plaintext, in bytes (RFC 8446 section 5.1).
pub const RECORD_BYTES_MAX: u64 = 1 << 14;

/// The longest wait for a connection of the probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The type of a handshake message with a session ticket (RFC 8446 section 4).
const NEW_SESSION_TICKET: u8 = 4;
/// Reads of session tickets in one call.
const TICKET_READS_MAX: usize = 32;
/// The alert `close_notify`, a warning (RFC 8446 section 6.1).
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// The combinations of version and cipher that this kernel encrypts: a bit for each of
/// `COMBINATIONS`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KtlsSupport(u8);

/// Version, kernel cipher and the end of rustls's cipher suite name.
const COMBINATIONS: [(Version, Keys<'static>, &str); 6] = [
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

impl KtlsSupport {
    /// Probes each combination on a loopback connection. An error if the kernel supports none.
    pub fn probe() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let mut supported = 0;
        let mut refused = None;
        for (at, (version, keys, _)) in COMBINATIONS.into_iter().enumerate() {
            // A firewall that drops packets must not stop the start.
            let socket = TcpStream::connect_timeout(&address, PROBE_TIMEOUT)?;
            let _peer = listener.accept()?;
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

    /// Whether the kernel supports any combination.
    pub fn is_any(self) -> bool {
        self.0 != 0
    }

    /// Whether the kernel supports this session's version and cipher.
    pub fn covers(self, session: &CommonState) -> bool {
        let (Some(version), Some(suite)) = (version(session), session.negotiated_cipher_suite())
        else {
            return false;
        };
        let name = suite.suite().as_str().unwrap_or_default();
        let is_same =
            |(other, _, end): &(Version, Keys<'_>, &str)| *other == version && name.ends_with(end);
        COMBINATIONS.iter().position(is_same).is_some_and(|at| self.0 & 1 << at != 0)
    }
}

fn version(session: &CommonState) -> Option<Version> {
    match session.protocol_version()? {
        ProtocolVersion::TLSv1_2 => Some(Version::V1_2),
        ProtocolVersion::TLSv1_3 => Some(Version::V1_3),
        _ => None,
    }
}

/// Attaches the kernel's TLS to a socket, for a session that [`KtlsSupport::covers`]. Until
/// [`take_over`] the socket is still plain. Refused once the peer has closed its direction.
pub fn prepare(socket: impl AsFd) -> io::Result<()> {
    set_upper_layer_protocol(socket, "tls")
}

/// Hands the keys of a session to the kernel. The program must not receive records between the
/// handshake and this call. The program may send records, because the kernel continues with the
/// numbers of the records.
pub fn take_over(socket: impl AsFd, session: Connection) -> io::Result<()> {
    let version = version(&session).ok_or(io::ErrorKind::Unsupported)?;
    let secrets = session.dangerous_extract_secrets().map_err(io::Error::other)?;
    install(socket, version, &secrets)
}

/// Hands the keys of a session of TLS 1.3 to the kernel. The socket must hold nothing after
/// the handshake.
pub fn install_secrets(socket: impl AsFd, secrets: &ExtractedSecrets) -> io::Result<()> {
    install(socket, Version::V1_3, secrets)
}

fn install(socket: impl AsFd, version: Version, secrets: &ExtractedSecrets) -> io::Result<()> {
    let (sent, received) = (&secrets.tx, &secrets.rx);
    let mut explicit = [0; 12];
    let keys_to_send = match (version, keys(&sent.1)?) {
        (Version::V1_2, Keys::Aes128Gcm(key, iv)) => {
            Keys::Aes128Gcm(key, iv_after(iv, sent.0, &mut explicit))
        }
        (Version::V1_2, Keys::Aes256Gcm(key, iv)) => {
            Keys::Aes256Gcm(key, iv_after(iv, sent.0, &mut explicit))
        }
        (_, keys) => keys,
    };
    ktls::install(&socket, Direction::Transmit, version, keys_to_send, sent.0)?;
    ktls::install(&socket, Direction::Receive, version, keys(&received.1)?, received.0)
}

/// The initialization vector for TLS 1.2 with AES-GCM after `sequence` records.
///
/// rustls derives each record's nonce as the vector's explicit part XOR the record number. The
/// kernel starts with the explicit part that it is given and counts up. **A nonce used twice under
/// one key reveals the key.** The first `sequence` nonces of rustls differ from the explicit part
/// in its lowest bits only, so all of them are less than the part plus `sequence`.
fn iv_after<'i>(iv: &[u8; 12], sequence: u64, out: &'i mut [u8; 12]) -> &'i [u8; 12] {
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

/// Receives into the spare capacity of `buffer`; 0 is the end of the stream.
///
/// [`io::ErrorKind::ConnectionAborted`]: the peer reports an error by an alert.
/// [`io::ErrorKind::UnexpectedEof`]: a client's server ended the stream without `close_notify`.
/// [`io::ErrorKind::Interrupted`]: a client discarded many session tickets; other connections come
/// first.
pub fn receive(
    socket: impl AsFd,
    buffer: &mut Vec<u8>,
    mut tickets: Option<&mut TicketSkipper>,
) -> io::Result<usize> {
    let before = buffer.len();
    let mut alert = Vec::new();
    for _ in 0..TICKET_READS_MAX {
        let (content_type, count) = ktls::receive(&socket, buffer)?;
        match content_type {
            // A client can tell the end from a truncation.
            ContentType::ApplicationData if count == 0 && tickets.is_some() => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            ContentType::ApplicationData => return Ok(count),
            ContentType::Handshake => {
                let tickets = tickets.as_deref_mut();
                let is_skipped = tickets.is_some_and(|tickets| tickets.skip(&buffer[before..]));
                buffer.truncate(before);
                if !is_skipped {
                    return Err(io::ErrorKind::Unsupported.into());
                }
            }
            ContentType::Alert => {
                // With little room the two bytes come in two reads.
                alert.extend_from_slice(&buffer[before..]);
                buffer.truncate(before);
                match alert.get(1) {
                    None if count > 0 => {}
                    Some(&description) if description == CLOSE_NOTIFY[1] => return Ok(0),
                    _ => return Err(io::ErrorKind::ConnectionAborted.into()),
                }
            }
            ContentType::Other(_) => {
                buffer.truncate(before);
                return Err(io::ErrorKind::Unsupported.into());
            }
        }
    }
    Err(io::ErrorKind::Interrupted.into())
}

/// Discards the session tickets that a server sends after the handshake (RFC 8446 section 4.6.1).
/// They may be divided among records, and records among reads.
#[derive(Debug, Default)]
pub struct TicketSkipper {
    /// The message header: type and length (RFC 8446 section 4).
    header: [u8; 4],
    /// Header bytes seen.
    seen: usize,
    /// Bytes of the message that are still to come.
    remaining: usize,
}

impl TicketSkipper {
    /// Skips bytes of handshake records. False if one of the messages is not a ticket.
    fn skip(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            if self.remaining == 0 {
                if self.seen == 0 && bytes[0] != NEW_SESSION_TICKET {
                    return false;
                }
                self.header[self.seen] = bytes[0];
                self.seen += 1;
                bytes = &bytes[1..];
                if self.seen == self.header.len() {
                    let [_, high, middle, low] = self.header;
                    self.remaining = u32::from_be_bytes([0, high, middle, low]) as usize;
                    self.seen = 0;
                }
            } else {
                let skipped = self.remaining.min(bytes.len());
                self.remaining -= skipped;
                bytes = &bytes[skipped..];
            }
        }
        true
    }
}

/// Sends `close_notify`. Once the kernel accepted `close_notify`, all data before it is in the
/// socket. Closing or shutting down before that would lose data.
pub fn send_close_notify(socket: impl AsFd) -> Sent {
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
        /// However tickets are divided, they are skipped; another message after them is not.
        #[test]
        fn tickets_are_skipped_and_nothing_else(
            lengths in prop::collection::vec(0usize..600, 0..5),
            other in any::<u8>().prop_filter("a ticket", |other| *other != NEW_SESSION_TICKET),
            read_bytes in 1usize..700,
        ) {
            let mut bytes = Vec::new();
            for length in lengths {
                bytes.extend([NEW_SESSION_TICKET, 0, (length >> 8) as u8, length as u8]);
                bytes.resize(bytes.len() + length, other);
            }
            let mut tickets = TicketSkipper::default();
            prop_assert!(bytes.chunks(read_bytes).all(|read| tickets.skip(read)));
            // A caller that goes on after the refusal is refused again.
            for _ in 0..10 {
                prop_assert!(!tickets.skip(&[other]));
            }
        }

        #[test]
        fn no_nonce_is_used_twice(
            iv in any::<[u8; 12]>(),
            sequence in 1u64..100,
            later in 0u64..1000,
        ) {
            let mut out = [0; 12];
            let explicit = |iv: &[u8; 12]| u64::from_be_bytes(iv[4..].try_into().unwrap());
            let first = explicit(iv_after(&iv, sequence, &mut out));
            prop_assert_eq!(&out[..4], &iv[..4]);
            for number in 0..sequence {
                prop_assert_ne!(explicit(&iv) ^ number, first.wrapping_add(later));
            }
        }
    }
}
