//! TLS 1.3 records (RFC 8446 section 5) of a measurement: sealed by the source of a stream, opened
//! by a forwarder in the program or by its kernel (kTLS).
//!
//! There is no handshake: it comes before the window, and both ends know the key. The key is in
//! this file, so these records hide nothing.

use haul_sys::ktls::{self, Direction, Keys, Version};
use haul_sys::sockopt::set_upper_layer_protocol;
use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks,
    OutboundPlainMessage, Tls13AeadAlgorithm,
};
use rustls::crypto::ring::cipher_suite::TLS13_AES_256_GCM_SHA384;
use rustls::{ContentType, ProtocolVersion};
use std::io;
use std::os::fd::AsFd;

/// The largest plaintext of a record, in bytes (RFC 8446 section 5.1).
pub const PLAINTEXT_BYTES_MAX: usize = 1 << 14;
/// A record's header: content type, version and length (RFC 8446 section 5.2).
const HEADER_BYTES: usize = 5;
/// The largest encrypted part of a record, in bytes (RFC 8446 section 5.2).
const CIPHERTEXT_BYTES_MAX: usize = PLAINTEXT_BYTES_MAX + 256;
/// The largest record, in bytes.
pub const RECORD_BYTES_MAX: usize = HEADER_BYTES + CIPHERTEXT_BYTES_MAX;

/// The key of AES-256-GCM, the first cipher that OpenSSL and rustls offer.
const KEY: [u8; 32] = [0x68; 32];
/// The initialization vector.
const IV: [u8; 12] = [0x61; 12];

/// Errors of opening a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The bytes are no record of application data.
    #[error("no TLS record: content type {content_type}, {bytes} bytes")]
    NoRecord {
        /// The content type in the header.
        content_type: u8,
        /// The length in the header.
        bytes: usize,
    },
    /// The record fails authentication.
    #[error("decrypting a TLS record: {0}")]
    Decrypt(#[from] rustls::Error),
}

fn algorithm() -> &'static dyn Tls13AeadAlgorithm {
    TLS13_AES_256_GCM_SHA384.tls13().expect("a suite of TLS 1.3").aead_alg
}

/// Encrypts a stream's records in turn.
pub struct RecordSealer {
    encrypter: Box<dyn MessageEncrypter>,
    sequence: u64,
}

impl Default for RecordSealer {
    fn default() -> Self {
        let encrypter = algorithm().encrypter(AeadKey::from(KEY), Iv::from(IV));
        Self { encrypter, sequence: 0 }
    }
}

impl RecordSealer {
    /// Encrypts at most [`PLAINTEXT_BYTES_MAX`] bytes as one record.
    pub fn seal(&mut self, plaintext: &[u8]) -> Result<Vec<u8>, RecordError> {
        let message = OutboundPlainMessage {
            typ: ContentType::ApplicationData,
            version: ProtocolVersion::TLSv1_2,
            payload: OutboundChunks::Single(plaintext),
        };
        let record = self.encrypter.encrypt(message, self.sequence)?;
        self.sequence += 1;
        Ok(record.encode())
    }
}

/// A record's plaintext, and the bytes behind the record.
type Opened<'b> = (&'b [u8], &'b mut [u8]);

/// Decrypts a stream's records in turn, in place.
pub struct RecordOpener {
    decrypter: Box<dyn MessageDecrypter>,
    sequence: u64,
}

impl Default for RecordOpener {
    fn default() -> Self {
        let decrypter = algorithm().decrypter(AeadKey::from(KEY), Iv::from(IV));
        Self { decrypter, sequence: 0 }
    }
}

impl RecordOpener {
    /// Splits the first record off the front of `bytes` and decrypts it; returns its plaintext and
    /// the bytes behind it. `None` if the record has not arrived whole.
    pub fn open<'b>(&mut self, bytes: &'b mut [u8]) -> Result<Option<Opened<'b>>, RecordError> {
        let Some(&[content_type, _, _, high, low]) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if ContentType::from(content_type) != ContentType::ApplicationData
            || length > CIPHERTEXT_BYTES_MAX
        {
            return Err(RecordError::NoRecord { content_type, bytes: length });
        }
        if bytes.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        let (record, rest) = bytes.split_at_mut(HEADER_BYTES + length);
        let sealed = InboundOpaqueMessage::new(
            ContentType::ApplicationData,
            ProtocolVersion::TLSv1_2,
            &mut record[HEADER_BYTES..],
        );
        let opened = self.decrypter.decrypt(sealed, self.sequence)?;
        self.sequence += 1;
        Ok(Some((opened.payload, rest)))
    }
}

/// Makes the kernel decrypt the stream that arrives at a connected socket (kTLS).
///
/// `ENOENT` if the kernel lacks the module `tls`.
pub fn open_in_kernel(socket: impl AsFd) -> io::Result<()> {
    set_upper_layer_protocol(&socket, "tls")?;
    let keys = Keys::Aes256Gcm(&KEY, &IV);
    ktls::install(&socket, Direction::Receive, Version::V1_3, keys, 0)?;
    // Before Linux 6.0 the kernel copies each record that a program receives once more.
    let _ = ktls::expect_no_padding(&socket);
    Ok(())
}

/// Makes the kernel encrypt the stream that is sent on a connected socket (kTLS).
///
/// `ENOENT` if the kernel lacks the module `tls`.
pub fn seal_in_kernel(socket: impl AsFd) -> io::Result<()> {
    set_upper_layer_protocol(&socket, "tls")?;
    ktls::install(&socket, Direction::Transmit, Version::V1_3, Keys::Aes256Gcm(&KEY, &IV), 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::thread;

    /// The plaintext of records in a buffer, and the number of bytes behind the last whole one.
    fn open_all(opener: &mut RecordOpener, mut bytes: &mut [u8]) -> (Vec<u8>, usize) {
        let mut plaintext = Vec::new();
        loop {
            let rest_bytes = bytes.len();
            let Some((opened, rest)) = opener.open(bytes).unwrap() else {
                return (plaintext, rest_bytes);
            };
            plaintext.extend_from_slice(opened);
            bytes = rest;
        }
    }

    proptest! {
        #[test]
        fn records_open_however_they_are_divided(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..3000), 1..5),
            read_bytes in 1usize..5000,
        ) {
            let mut sealer = RecordSealer::default();
            let sealed: Vec<u8> =
                parts.iter().flat_map(|part| sealer.seal(part).unwrap()).collect();
            let (mut opener, mut held, mut opened) =
                (RecordOpener::default(), Vec::new(), Vec::new());
            for read in sealed.chunks(read_bytes) {
                held.extend_from_slice(read);
                let (plaintext, rest) = open_all(&mut opener, &mut held);
                opened.extend(plaintext);
                held.drain(..held.len() - rest);
            }
            prop_assert_eq!(opened, parts.concat());
            prop_assert!(held.is_empty());
        }

        #[test]
        fn any_bytes_are_refused_or_incomplete(
            mut bytes in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            prop_assert!(!matches!(RecordOpener::default().open(&mut bytes), Ok(Some(_))));
        }
    }

    #[test]
    fn a_changed_record_is_refused() {
        let mut record = RecordSealer::default().seal(&[7; PLAINTEXT_BYTES_MAX]).unwrap();
        assert!(record.len() <= RECORD_BYTES_MAX);
        record[100] ^= 1;
        let error = RecordOpener::default().open(&mut record).unwrap_err();
        assert!(matches!(error, RecordError::Decrypt(_)), "{error}");
    }

    #[test]
    fn the_kernel_opens_what_the_program_seals() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut sink, _) = listener.accept().unwrap();
        if let Err(error) = open_in_kernel(&sink) {
            return eprintln!("SKIPPED: this kernel has no TLS: {error}");
        }
        let plaintext: Vec<u8> = (0..300_000u32).map(|at| at as u8).collect();
        let sent = plaintext.clone();
        let sending = thread::spawn(move || {
            let mut sealer = RecordSealer::default();
            for part in sent.chunks(PLAINTEXT_BYTES_MAX) {
                source.write_all(&sealer.seal(part).unwrap()).unwrap();
            }
        });
        let mut received = Vec::new();
        sink.read_to_end(&mut received).unwrap();
        sending.join().unwrap();
        assert!(received == plaintext);
    }
}
