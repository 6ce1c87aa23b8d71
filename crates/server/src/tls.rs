//! TLS in this program: rustls over a non-blocking socket, for the whole connection or until the
//! kernel takes over (kTLS, [`crate::ktls`]).
//!
//! A file's bytes pass through this program's memory here. Ciphertext that the socket does not
//! accept is kept, up to a limit, and is sent before anything else.

use crate::error::Error;
use crate::ktls::KtlsSupport;
use crate::secrets::read_secret;
use crate::sent::Sent;
use rustix::net::RecvFlags;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use std::fs::File;
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The content type of a handshake record, the first byte that a TLS client sends (RFC 8446 section
/// 5.1).
const HANDSHAKE: u8 = 22;
/// The limit of plaintext whose ciphertext waits for the socket, in bytes, for each connection.
const PENDING_BYTES_MAX: usize = 256 << 10;
/// Reads of the socket in one call. A handshake takes a few; records without data could go on
/// without end.
const READS_MAX: usize = 32;

/// A server's TLS settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsSettings {
    /// The PEM file of the certificate chain, the server's own certificate first.
    pub certificate: PathBuf,
    /// The PEM file of the certificate's key.
    pub key: PathBuf,
    /// Whether the kernel may encrypt (kTLS).
    pub in_kernel: bool,
    /// Application protocols in order of preference (ALPN), such as `http/1.1`.
    pub alpn: Vec<Vec<u8>>,
}

impl TlsSettings {
    /// A certificate and its key, without kTLS and ALPN.
    pub fn new(certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        let (certificate, key) = (certificate.into(), key.into());
        Self { certificate, key, in_kernel: false, alpn: Vec::new() }
    }

    /// Reads the certificate and the key, and builds rustls's configuration.
    ///
    /// [`Error::Tls`] names the file and what is wrong with it.
    pub fn load(&self) -> Result<Arc<ServerConfig>, Error> {
        let read = |path: &Path| read_secret(path).map_err(|problem| tls_error(path, problem));
        configure(self, &read(&self.certificate)?, &read(&self.key)?)
    }
}

fn tls_error(path: &Path, problem: String) -> Error {
    Error::Tls { path: path.to_owned(), problem }
}

fn configure(tls: &TlsSettings, chain: &[u8], key: &[u8]) -> Result<Arc<ServerConfig>, Error> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
        .collect::<Result<_, _>>()
        .map_err(|error| tls_error(&tls.certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(tls_error(
            &tls.certificate,
            "there is no certificate in it (PEM is needed)".into(),
        ));
    }
    // rustls parses the server's own certificate alone, and clients would refuse a broken chain.
    for certificate in &chain {
        ParsedCertificate::try_from(certificate)
            .map_err(|error| tls_error(&tls.certificate, error.to_string()))?;
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| match error {
        pem::Error::NoItemsFound => tls_error(
            &tls.key,
            "there is no key in it (PEM is needed, and one that needs no password)".into(),
        ),
        error => tls_error(&tls.key, error.to_string()),
    })?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| tls_error(&tls.certificate, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            rustls::Error::InvalidCertificate(error) => tls_error(
                &tls.certificate,
                format!("{error}; X.509 version 3 is needed (openssl req -x509 makes it)"),
            ),
            rustls::Error::InconsistentKeys(_) => {
                tls_error(&tls.key, "it does not fit the certificate".into())
            }
            error => {
                let kinds = "RSA of 2048 to 4096 bits, ECDSA P-256 or P-384, or Ed25519";
                tls_error(&tls.key, format!("this key cannot be used (it may be {kinds}): {error}"))
            }
        })?;
    config.enable_secret_extraction = tls.in_kernel;
    config.alpn_protocols.clone_from(&tls.alpn);
    // The client keeps its session in a ticket: no memory and no lock here.
    config.ticketer = rustls::crypto::ring::Ticketer::new()
        .map_err(|error| tls_error(&tls.certificate, error.to_string()))?;
    Ok(Arc::new(config))
}

/// The cryptography provider of all sessions.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The TLS session of one connection. Each call borrows the socket.
#[derive(Debug)]
pub struct Session {
    tls: Connection,
    /// The ciphers that the kernel can take over.
    ktls: KtlsSupport,
    /// The record being read, while the kernel may still take over: then no byte beyond the end of
    /// the handshake may leave the socket.
    record: Option<RecordReader>,
    /// Whether the peer's first byte is known to be TLS.
    is_tls_peer: bool,
    /// Whether `close_notify` was sent.
    is_close_notified: bool,
}

/// The result of receiving.
#[derive(Debug)]
pub enum Received {
    /// So many bytes; 0 is the end of the stream.
    Bytes(usize),
    /// The handshake is complete and the kernel can take over: no record was read after it.
    HandshakeDone,
    /// The client does not speak TLS. Its bytes are still in the socket.
    NotTls,
}

/// Progress within one TLS record.
#[derive(Debug, Default)]
struct RecordReader {
    /// The record header: type, two version bytes, length (RFC 8446 section 5.1).
    header: [u8; 5],
    /// Header bytes read from the socket.
    read: usize,
    /// Header bytes given to rustls.
    given: usize,
    /// Bytes of the record's payload that are still to be read.
    remaining: usize,
}

impl Session {
    /// A server session, which waits for the client's first record.
    pub fn accept(config: Arc<ServerConfig>, ktls: KtlsSupport) -> Result<Self, rustls::Error> {
        let mut tls = ServerConnection::new(config)?;
        tls.set_buffer_limit(Some(PENDING_BYTES_MAX));
        let record = ktls.is_any().then(RecordReader::default);
        Ok(Self { tls: tls.into(), ktls, record, is_tls_peer: false, is_close_notified: false })
    }

    /// A client session, whose first record is ready to be flushed. The kernel takes over only if
    /// `config` allows extracting the secrets.
    pub fn connect(
        config: Arc<ClientConfig>,
        server: ServerName<'static>,
        ktls: KtlsSupport,
    ) -> Result<Self, rustls::Error> {
        let in_kernel = ktls.is_any() && config.enable_secret_extraction;
        let mut tls = ClientConnection::new(config, server)?;
        tls.set_buffer_limit(Some(PENDING_BYTES_MAX));
        let record = in_kernel.then(RecordReader::default);
        Ok(Self { tls: tls.into(), ktls, record, is_tls_peer: true, is_close_notified: false })
    }

    /// Whether this is the client's end.
    pub fn is_client(&self) -> bool {
        matches!(self.tls, Connection::Client(_))
    }

    /// The rustls session, for the hand-over to the kernel.
    pub fn into_inner(self) -> Connection {
        self.tls
    }

    /// Receives plaintext into the spare capacity of `buffer`; 0 is the end of the stream.
    ///
    /// [`io::ErrorKind::Interrupted`] after many records without data, so that other connections
    /// get their turn.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Received> {
        if !self.is_tls_peer {
            let mut first = [0];
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut first, flags))? {
                (0, _) => return Ok(Received::Bytes(0)),
                _ if first != [HANDSHAKE] => return Ok(Received::NotTls),
                _ => self.is_tls_peer = true,
            }
        }
        for _ in 0..READS_MAX {
            match self.tls.reader().fill_buf() {
                Ok(plain) => {
                    let count = plain.len().min(buffer.capacity() - buffer.len());
                    buffer.extend_from_slice(&plain[..count]);
                    self.tls.reader().consume(count);
                    return Ok(Received::Bytes(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let count = match &mut self.record {
                None => self.tls.read_tls(&mut Socket(socket)),
                Some(record) => {
                    self.tls.read_tls(&mut RecordLimited { socket: Socket(socket), record })
                }
            };
            let count = match count {
                Ok(count) => count,
                // rustls's kind for an oversized handshake means something else to our caller.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(io::Error::other(error));
                }
                Err(error) => return Err(error),
            };
            if count == 0 {
                // Clients of a server often close without `close_notify`; a server must not.
                return if self.is_client() {
                    Err(io::ErrorKind::UnexpectedEof.into())
                } else {
                    Ok(Received::Bytes(0))
                };
            }
            let processed = self.tls.process_new_packets();
            // The next handshake message, or the alert that explains a failure.
            if self.tls.wants_write() && self.flush(socket) == Sent::Broken {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            processed.map_err(io::Error::other)?;
            let is_done = !self.tls.is_handshaking()
                && self.record.take_if(|record| record.read == 0).is_some();
            // If the socket has not accepted the end of the handshake, this program goes on.
            if is_done && !self.tls.wants_write() && self.ktls.covers(&self.tls) {
                return Ok(Received::HandshakeDone);
            }
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    /// Whether the handshake is under way.
    pub fn is_handshaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// Encrypts a beginning of these parts. With `more`, they are sent together with what follows.
    pub fn send(&mut self, socket: BorrowedFd<'_>, parts: &[IoSlice<'_>], more: bool) -> Sent {
        match self.flush(socket) {
            Sent::Bytes(_) => {}
            other => return other,
        }
        let Ok(count) = self.tls.writer().write_vectored(parts) else { return Sent::Broken };
        if !more && self.flush(socket) == Sent::Broken {
            return Sent::Broken;
        }
        if count == 0 { Sent::Blocked } else { Sent::Bytes(count as u64) }
    }

    /// Sends a beginning of a range of a file, through `copy`.
    pub fn send_file(
        &mut self,
        socket: BorrowedFd<'_>,
        file: &File,
        range: Range<u64>,
        copy: &mut [u8],
    ) -> Sent {
        match self.flush(socket) {
            Sent::Bytes(_) => {}
            other => return other,
        }
        let len = copy.len().min(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
        let read = || rustix::io::pread(file, &mut copy[..len], range.start);
        match rustix::io::retry_on_intr(read) {
            Ok(0) => Sent::Ended,
            Ok(count) => self.send(socket, &[IoSlice::new(&copy[..count])], false),
            Err(_) => Sent::Broken,
        }
    }

    /// Sends pending ciphertext. [`Sent::Bytes`] if none is left.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Sent {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Sent::Blocked,
                Err(_) => return Sent::Broken,
            }
        }
        Sent::Bytes(0)
    }

    /// Sends `close_notify`, so that the peer can tell this end from a truncation.
    pub fn send_close_notify(&mut self, socket: BorrowedFd<'_>) -> Sent {
        if !std::mem::replace(&mut self.is_close_notified, true) {
            self.tls.send_close_notify();
        }
        self.flush(socket)
    }
}

/// A socket that is read up to the end of a record and no further.
struct RecordLimited<'s> {
    socket: Socket<'s>,
    record: &'s mut RecordReader,
}

impl Read for RecordLimited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let RecordReader { header, read, given, remaining } = self.record;
        if *read < header.len() {
            let count = self.socket.read(&mut header[*read..])?;
            *read += count;
            if count == 0 {
                return Ok(0);
            }
            if *read < header.len() {
                // The rest of the record's header, or the end of the stream, comes with another
                // event.
                return Err(io::ErrorKind::WouldBlock.into());
            }
            *remaining = usize::from(u16::from_be_bytes([header[3], header[4]]));
        }
        let count = if *given < header.len() {
            let count = (&header[*given..]).read(buffer)?;
            *given += count;
            count
        } else {
            let room = buffer.len().min(*remaining);
            let count = self.socket.read(&mut buffer[..room])?;
            *remaining -= count;
            count
        };
        if *given == header.len() && *remaining == 0 {
            *self.record = RecordReader::default();
        }
        Ok(count)
    }
}

/// A non-blocking socket as rustls reads and writes it.
struct Socket<'s>(BorrowedFd<'s>);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| {
            rustix::net::recv(self.0, &mut *buffer, RecvFlags::DONTWAIT)
        })?
        .0)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut nothing = rustix::net::SendAncillaryBuffer::default();
        let flags = rustix::net::SendFlags::NOSIGNAL;
        Ok(rustix::io::retry_on_intr(|| rustix::net::sendmsg(self.0, parts, &mut nothing, flags))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
