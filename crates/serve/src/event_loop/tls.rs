//! TLS in the program: rustls between the socket and HTTP.
//!
//! The bytes of a file pass through the program's memory here, because somebody has to encrypt them. What the socket does not
//! take is kept as ciphertext, a bounded amount of it, and goes before anything else.

use crate::config::Tls;
use crate::error::Error;
use crate::event_loop::sent::Sent;
use rustix::net::RecvFlags;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection};
use std::fs::File;
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Plaintext whose ciphertext may wait for the socket, for each connection.
const PENDING_BYTES_MAX: usize = 256 << 10;

/// Reads of the socket for one piece of data. A handshake takes a few; records without data could go on for ever.
const READS_MAX: usize = 32;

/// Reads a certificate chain and its key, both PEM.
pub fn load(tls: &Tls) -> Result<Arc<ServerConfig>, Error> {
    let wrong = |path: &std::path::Path, problem: String| Error::Tls { path: path.to_owned(), problem };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&tls.certificate)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(&tls.certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(wrong(&tls.certificate, "there is no certificate in it (PEM is needed)".into()));
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| wrong(&tls.key, error.to_string()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&tls.certificate, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| wrong(&tls.key, format!("it does not fit the certificate: {error}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Tickets hold the session at the client's: nothing to keep here, nothing to lock.
    config.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new()
        .map_err(|error| wrong(&tls.certificate, error.to_string()))?;
    Ok(Arc::new(config))
}

/// A connection that is encrypted in the program.
#[derive(Debug)]
pub struct TlsStream {
    socket: OwnedFd,
    session: ServerConnection,
}

impl TlsStream {
    /// A session that the client is to begin.
    pub fn new(socket: OwnedFd, config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let mut session = ServerConnection::new(config)?;
        session.set_buffer_limit(Some(PENDING_BYTES_MAX));
        Ok(Self { socket, session })
    }

    /// Reads what has come into the free room of `buffer`; 0 is the end.
    ///
    /// [`io::ErrorKind::Interrupted`] where much has come that was nobody's data: others are to have their turn.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        for _ in 0..READS_MAX {
            match self.session.reader().fill_buf() {
                Ok(plain) => {
                    let count = plain.len().min(buffer.capacity() - buffer.len());
                    buffer.extend_from_slice(&plain[..count]);
                    self.session.reader().consume(count);
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if self.session.read_tls(&mut Socket(&self.socket))? == 0 {
                return Ok(0);
            }
            let processed = self.session.process_new_packets();
            // An answer of the handshake, or the alert that says what was wrong with it.
            if self.session.wants_write() && self.flush() == Sent::Broken {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            processed.map_err(io::Error::other)?;
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    /// Whether both sides still agree on keys.
    pub fn is_beginning(&self) -> bool {
        self.session.is_handshaking()
    }

    /// Takes a beginning of these parts; with `more` to follow at once, they are sent with that.
    pub fn send(&mut self, parts: &[IoSlice<'_>], more: bool) -> Sent {
        match self.flush() {
            Sent::Bytes(_) => {}
            other => return other,
        }
        let Ok(count) = self.session.writer().write_vectored(parts) else { return Sent::Broken };
        if !more && self.flush() == Sent::Broken {
            return Sent::Broken;
        }
        if count == 0 { Sent::Blocked } else { Sent::Bytes(count as u64) }
    }

    /// Sends a beginning of a range of a file, through `copy`.
    pub fn send_file(&mut self, file: &File, range: Range<u64>, copy: &mut [u8]) -> Sent {
        match self.flush() {
            Sent::Bytes(_) => {}
            other => return other,
        }
        let len = copy.len().min(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
        match rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut copy[..len], range.start)) {
            Ok(0) => Sent::Ended,
            Ok(count) => self.send(&[IoSlice::new(&copy[..count])], false),
            Err(_) => Sent::Broken,
        }
    }

    /// Sends what is encrypted and has not been taken. [`Sent::Bytes`] where nothing is left.
    pub fn flush(&mut self) -> Sent {
        while self.session.wants_write() {
            match self.session.write_tls(&mut Socket(&self.socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Sent::Blocked,
                Err(_) => return Sent::Broken,
            }
        }
        Sent::Bytes(0)
    }

    /// Says that nothing more comes, so that the client can tell this end from one that somebody else has made.
    pub fn end(&mut self) {
        self.session.send_close_notify();
        // Without room for it now, the client sees an end without a word, as it must be able to.
        self.flush();
    }
}

impl AsFd for TlsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A non-blocking socket as rustls takes it.
struct Socket<'s>(&'s OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::net::recv(self.0, &mut *buffer, RecvFlags::DONTWAIT))?.0)
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
