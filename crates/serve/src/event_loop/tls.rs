//! TLS in the program: rustls between the socket and HTTP, for the whole connection or until the kernel takes over.
//!
//! The bytes of a file pass through the program's memory here, because somebody has to encrypt them. What the socket does not
//! take is kept as ciphertext, a bounded amount of it, and goes before anything else.

use crate::config::Tls;
use crate::error::Error;
use crate::event_loop::kernel_tls::Supported;
use crate::event_loop::sent::Sent;
use rustix::net::RecvFlags;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection};
use std::fs::File;
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The first byte of whoever speaks TLS: a record of the handshake (RFC 8446 section 5.1).
const HANDSHAKE: u8 = 22;

/// Plaintext whose ciphertext may wait for the socket, for each connection.
const PENDING_BYTES_MAX: usize = 256 << 10;

/// Reads of the socket for one piece of data. A handshake takes a few; records without data could go on for ever.
const READS_MAX: usize = 32;

/// What is said of this server, by its certificate's chain and its key, both PEM and from the files that `tls` names.
pub fn configure(tls: &Tls, chain: &[u8], key: &[u8]) -> Result<Arc<ServerConfig>, Error> {
    let wrong =
        |path: &std::path::Path, problem: String| Error::Tls { path: path.to_owned(), problem };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(&tls.certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(wrong(
            &tls.certificate,
            "there is no certificate in it (PEM is needed)".into(),
        ));
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| match error {
        pem::Error::NoItemsFound => wrong(
            &tls.key,
            "there is no key in it (PEM is needed, and one that needs no password)".into(),
        ),
        error => wrong(&tls.key, error.to_string()),
    })?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&tls.certificate, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            rustls::Error::InvalidCertificate(error) => wrong(
                &tls.certificate,
                format!("{error}; X.509 version 3 is needed (openssl req -x509 makes it)"),
            ),
            rustls::Error::InconsistentKeys(_) => {
                wrong(&tls.key, "it does not fit the certificate".into())
            }
            error => {
                wrong(&tls.key, format!("this key cannot be used (RSA needs 2048 bits): {error}"))
            }
        })?;
    config.enable_secret_extraction = tls.in_kernel;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Tickets hold the session at the client's: nothing to keep here, nothing to lock.
    config.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new()
        .map_err(|error| wrong(&tls.certificate, error.to_string()))?;
    Ok(Arc::new(config))
}

/// An encrypted connection's state, in the program. Its socket is lent to each call.
#[derive(Debug)]
pub struct Session {
    tls: ServerConnection,
    /// What the kernel can take over.
    kernel: Supported,
    /// Where the kernel may take over; then nothing is read beyond the record at whose end that can be.
    until_agreed: Option<RecordsOneByOne>,
    /// Whether the client has said anything yet.
    has_begun: bool,
    /// Whether it has said that nothing more comes.
    has_ended: bool,
}

/// What came of receiving.
#[derive(Debug)]
pub enum Received {
    /// So many bytes; 0 is the end.
    Bytes(usize),
    /// Both sides have agreed on keys, and nothing has been said since.
    Agreed,
    /// What has come first, and was left in the socket, is no TLS.
    NotTls,
}

/// How far the record that is being read has come.
#[derive(Debug, Default)]
struct RecordsOneByOne {
    /// RFC 8446 section 5.1: a type, two bytes of a version, and how long the rest is.
    header: [u8; 5],
    /// Of the header, bytes that were read.
    read: usize,
    /// Of those, bytes that rustls has.
    given: usize,
    /// Bytes of the rest that are to come.
    left: usize,
}

impl Session {
    /// A session that the client is to begin.
    pub fn new(config: Arc<ServerConfig>, kernel: Supported) -> Result<Self, rustls::Error> {
        let mut tls = ServerConnection::new(config)?;
        tls.set_buffer_limit(Some(PENDING_BYTES_MAX));
        let until_agreed = kernel.is_any().then(RecordsOneByOne::default);
        Ok(Self { tls, kernel, until_agreed, has_begun: false, has_ended: false })
    }

    /// The session itself.
    pub fn into_inner(self) -> ServerConnection {
        self.tls
    }

    /// Reads what has come into the free room of `buffer`; 0 is the end.
    ///
    /// [`io::ErrorKind::Interrupted`] where much has come that was nobody's data: others are to have their turn.
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Received> {
        if !self.has_begun {
            let mut first = [0];
            let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
            match rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut first, flags))? {
                (0, _) => return Ok(Received::Bytes(0)),
                _ if first != [HANDSHAKE] => return Ok(Received::NotTls),
                _ => self.has_begun = true,
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
            let count = match &mut self.until_agreed {
                None => self.tls.read_tls(&mut Socket(socket)),
                Some(records) => {
                    self.tls.read_tls(&mut Limited { socket: Socket(socket), records })
                }
            };
            let count = match count {
                Ok(count) => count,
                // More than rustls takes of a handshake: its own name for that is the caller's for something else.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(io::Error::other(error));
                }
                Err(error) => return Err(error),
            };
            if count == 0 {
                return Ok(Received::Bytes(0));
            }
            let processed = self.tls.process_new_packets();
            // An answer of the handshake, or the alert that says what was wrong with it.
            if self.tls.wants_write() && self.flush(socket) == Sent::Broken {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            processed.map_err(io::Error::other)?;
            let has_agreed = !self.tls.is_handshaking()
                && self.until_agreed.take_if(|records| records.read == 0).is_some();
            // Where the socket has not taken the last words of the handshake, this program goes on.
            if has_agreed && !self.tls.wants_write() && self.kernel.takes(&self.tls) {
                return Ok(Received::Agreed);
            }
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    /// Whether both sides still agree on keys.
    pub fn is_beginning(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// Takes a beginning of these parts; with `more` to follow at once, they are sent with that.
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
        match rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut copy[..len], range.start)) {
            Ok(0) => Sent::Ended,
            Ok(count) => self.send(socket, &[IoSlice::new(&copy[..count])], false),
            Err(_) => Sent::Broken,
        }
    }

    /// Sends what is encrypted and has not been taken. [`Sent::Bytes`] where nothing is left.
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

    /// Says that nothing more comes, so that the client can tell this end from one that somebody else has made.
    pub fn end(&mut self, socket: BorrowedFd<'_>) -> Sent {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.tls.send_close_notify();
        }
        self.flush(socket)
    }
}

/// A socket of which no more is read than to the end of a record.
struct Limited<'s> {
    socket: Socket<'s>,
    records: &'s mut RecordsOneByOne,
}

impl Read for Limited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let RecordsOneByOne { header, read, given, left } = self.records;
        if *read < header.len() {
            let count = self.socket.read(&mut header[*read..])?;
            *read += count;
            if count == 0 {
                return Ok(0);
            }
            if *read < header.len() {
                // The rest of it, or the end, will be an event.
                return Err(io::ErrorKind::WouldBlock.into());
            }
            *left = usize::from(u16::from_be_bytes([header[3], header[4]]));
        }
        let count = if *given < header.len() {
            let count = (&header[*given..]).read(buffer)?;
            *given += count;
            count
        } else {
            let room = buffer.len().min(*left);
            let count = self.socket.read(&mut buffer[..room])?;
            *left -= count;
            count
        };
        if *given == header.len() && *left == 0 {
            *self.records = RecordsOneByOne::default();
        }
        Ok(count)
    }
}

/// A non-blocking socket as rustls takes it.
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
