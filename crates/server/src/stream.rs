//! A connection's byte stream: plain, encrypted by this program (TLS) or by the kernel (kTLS), over
//! TCP or a Unix socket.
//!
//! No call blocks. What the socket does not accept now is [`Sent::Blocked`]; the event loop reports
//! when it accepts more.

use crate::ktls::{self, KtlsSupport, RECORD_BYTES_MAX, RECORDS_MAX, TicketSkipper};
use crate::sent::Sent;
use crate::tls::{Received, Session};
use crate::transport::Transport;
use haul::{SendSettings, Sender};
use haul_sys::sockopt::max_segment;
use rustix::buffer::spare_capacity;
use rustix::net::RecvFlags;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// A connected, non-blocking socket with its encryption.
#[derive(Debug)]
pub struct Stream {
    sender: Sender<Arc<OwnedFd>>,
    encryption: Encryption,
    /// Whether `TCP_CORK` is set.
    is_corked: bool,
    /// Whether the socket may hold back a segment until [`Stream::flush_held`].
    is_held: bool,
    /// The segment size in bytes, 0 for a Unix socket; `None` until it is first needed. It is read
    /// once: if it shrinks later, less is held back.
    segment_bytes: Option<u16>,
}

/// Where encryption takes place.
#[derive(Debug)]
enum Encryption {
    /// Nowhere: plain bytes.
    None,
    /// In this program. Every TLS connection begins so.
    Program(Box<Session>),
    /// In the kernel, after the handshake. `records` is about the number of records sent. A client
    /// skips tickets.
    Kernel { records: u64, tickets: Option<TicketSkipper> },
}

impl Stream {
    /// The server's end of an accepted connection. With a TLS configuration the client speaks TLS,
    /// and the kernel encrypts if `ktls` covers the negotiated cipher.
    pub fn accept(
        socket: OwnedFd,
        tls: Option<&Arc<ServerConfig>>,
        ktls: KtlsSupport,
        settings: &Arc<SendSettings>,
    ) -> io::Result<Self> {
        let session = tls.map(|config| Session::accept(Arc::clone(config), ktls));
        Self::new(socket, session, settings)
    }

    /// The client's end of a connection. With a TLS configuration and the server's name the
    /// handshake starts with [`Stream::flush`], and the kernel encrypts if `ktls` covers the
    /// negotiated cipher and the configuration allows extracting the secrets.
    pub fn connect(
        socket: OwnedFd,
        tls: Option<(&Arc<ClientConfig>, ServerName<'static>)>,
        ktls: KtlsSupport,
        settings: &Arc<SendSettings>,
    ) -> io::Result<Self> {
        let session = tls.map(|(config, name)| Session::connect(Arc::clone(config), name, ktls));
        Self::new(socket, session, settings)
    }

    fn new(
        socket: OwnedFd,
        session: Option<Result<Session, rustls::Error>>,
        settings: &Arc<SendSettings>,
    ) -> io::Result<Self> {
        let encryption = match session.transpose().map_err(io::Error::other)? {
            None => Encryption::None,
            Some(session) => Encryption::Program(Box::new(session)),
        };
        let sender = Sender::with_settings(Arc::new(socket), Arc::clone(settings))?;
        Ok(Self { sender, encryption, is_corked: false, is_held: false, segment_bytes: None })
    }

    /// The socket, to share with a receiver. If the stream is encrypted, the bytes of the socket
    /// are encrypted.
    pub fn socket(&self) -> &Arc<OwnedFd> {
        self.sender.socket()
    }

    /// Receives into the spare capacity of `buffer`, of which there must be some; 0 is the end of
    /// the stream.
    ///
    /// [`io::ErrorKind::InvalidData`]: the client does not speak TLS although it should. The stream
    /// is plain from then on, so that the service can refuse the client in a way it understands.
    /// [`io::ErrorKind::Interrupted`]: many records without data; other connections come first.
    /// [`io::ErrorKind::UnexpectedEof`], of a client's end with TLS: the stream was cut off.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        if let Encryption::Program(session) = &mut self.encryption {
            match session.receive(self.sender.as_fd(), buffer)? {
                Received::Bytes(count) => return Ok(count),
                Received::HandshakeDone => self.enable_ktls()?,
                Received::NotTls => {
                    self.encryption = Encryption::None;
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
        }
        match &mut self.encryption {
            Encryption::Program(_) => self.receive(buffer),
            Encryption::Kernel { tickets, .. } => {
                ktls::receive(&self.sender, buffer, tickets.as_mut())
            }
            Encryption::None => {
                let received = rustix::io::retry_on_intr(|| {
                    let room = spare_capacity(buffer);
                    rustix::net::recv(&self.sender, room, RecvFlags::DONTWAIT)
                });
                Ok(received?.0)
            }
        }
    }

    /// Hands the session's keys to the kernel, directly after the handshake. A socket that the
    /// kernel refuses stays with this program.
    fn enable_ktls(&mut self) -> io::Result<()> {
        if ktls::prepare(&self.sender).is_err() {
            return Ok(());
        }
        let Encryption::Program(session) = &self.encryption else { return Ok(()) };
        let tickets = session.is_client().then(TicketSkipper::default);
        let kernel = Encryption::Kernel { records: 0, tickets };
        match std::mem::replace(&mut self.encryption, kernel) {
            Encryption::Program(session) => {
                let taken_over = ktls::take_over(&self.sender, session.into_inner());
                if taken_over.is_err() {
                    // The socket may still be plain: nothing may be sent through it any more.
                    let _ = rustix::net::shutdown(&self.sender, rustix::net::Shutdown::Both);
                }
                taken_over
            }
            _ => Ok(()),
        }
    }

    /// Whether there may be more to receive, after `received` bytes came into `room` bytes.
    pub fn may_have_more(&self, received: usize, room: usize) -> bool {
        // A read that leaves room emptied a plain socket. A TLS read may stop after a record
        // although more bytes arrived.
        received == room || self.is_tls()
    }

    /// Sends a beginning of these parts. `more` announces that further bytes follow at once.
    ///
    /// With TLS in this program, [`Sent::Bytes`] counts what the session took; its ciphertext may
    /// be pending until [`Stream::flush`].
    pub fn send(&mut self, parts: &[IoSlice<'_>], more: bool) -> Sent {
        if let Encryption::Program(session) = &mut self.encryption {
            return session.send(self.sender.as_fd(), parts, more);
        }
        let sent =
            if more { self.sender.send_more(parts) } else { self.sender.send_vectored(parts) };
        self.count_records(Sent::from(sent.map(|count| count as u64)))
    }

    /// Sends a buffer's bytes and removes what was accepted. [`Sent::Bytes`] once the buffer is
    /// empty and no ciphertext is pending.
    pub fn send_buffer(&mut self, buffer: &mut Vec<u8>) -> Sent {
        let mut total = 0;
        while !buffer.is_empty() {
            match self.send(&[IoSlice::new(buffer)], false) {
                Sent::Bytes(count) => {
                    buffer.drain(..count as usize);
                    total += count;
                }
                other => return other,
            }
        }
        match self.flush() {
            Sent::Bytes(_) => Sent::Bytes(total),
            other => other,
        }
    }

    /// Sends a beginning of these parts, the last of a message. Less than a segment is held back in
    /// the socket (`MSG_MORE`) until [`Stream::flush_held`], which must follow at once.
    pub fn send_held(&mut self, parts: &[IoSlice<'_>]) -> Sent {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let holds = matches!(self.encryption, Encryption::None) && bytes < self.segment_bytes();
        self.is_held |= holds;
        self.send(parts, holds)
    }

    fn segment_bytes(&mut self) -> usize {
        let read =
            || max_segment(&self.sender).ok().and_then(|bytes| bytes.try_into().ok()).unwrap_or(0);
        usize::from(*self.segment_bytes.get_or_insert_with(read))
    }

    /// Whether the socket may hold a segment back.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Sends what [`Stream::send_held`] held back.
    pub fn flush_held(&mut self) {
        if std::mem::take(&mut self.is_held) {
            // Setting TCP_NODELAY, though it is set, pushes pending segments (tcp(7)). An error
            // means that the connection is gone.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&self.sender, true);
        }
    }

    /// Sends a beginning of a range of a file by the cheapest method that the socket allows. TLS in
    /// this program goes through `copy`.
    pub fn send_file(&mut self, file: &File, range: Range<u64>, copy: &mut [u8]) -> Sent {
        if let Encryption::Program(session) = &mut self.encryption {
            return session.send_file(self.sender.as_fd(), file, range, copy);
        }
        let sent = self.sender.send_file(file, range);
        self.count_records(Sent::from(sent))
    }

    /// Counts the records that the kernel made, and fails at the limit of the key's use.
    fn count_records(&mut self, sent: Sent) -> Sent {
        if let (Encryption::Kernel { records, .. }, Sent::Bytes(count)) =
            (&mut self.encryption, sent)
        {
            *records += 1 + count / RECORD_BYTES_MAX;
            if *records > RECORDS_MAX {
                return Sent::Broken;
            }
        }
        sent
    }

    /// Whether the connection should close after the current message, because its key is near the
    /// limit of its use.
    pub fn is_key_worn(&self) -> bool {
        matches!(self.encryption, Encryption::Kernel { records, .. } if records > RECORDS_MAX / 2)
    }

    /// Sets `TCP_CORK`, or clears it, which sends a partial segment. Without it, each call that
    /// fills the socket ends with a partial segment, at the cost of a whole one.
    pub fn cork(&mut self, on: bool) {
        let is_program = matches!(self.encryption, Encryption::Program(_));
        if self.is_corked != on && !is_program {
            // A Unix socket does not have segments.
            let _ = rustix::net::sockopt::set_tcp_cork(&self.sender, on);
            self.is_corked = on;
        }
    }

    /// Sends pending ciphertext. [`Sent::Bytes`] if none is left.
    pub fn flush(&mut self) -> Sent {
        match &mut self.encryption {
            Encryption::Program(session) => session.flush(self.sender.as_fd()),
            Encryption::None | Encryption::Kernel { .. } => Sent::Bytes(0),
        }
    }

    /// The transport of bytes that would take `plain` without encryption.
    pub fn transport(&self, plain: Transport) -> Transport {
        match (&self.encryption, plain) {
            (Encryption::None, plain) => plain,
            (Encryption::Program(_), _) => Transport::Tls,
            (Encryption::Kernel { .. }, Transport::Method(method)) => {
                Transport::KernelTlsMethod(method)
            }
            (Encryption::Kernel { .. }, _) => Transport::KernelTls,
        }
    }

    /// The transport of the latest file.
    pub fn latest_file_transport(&self) -> Transport {
        self.transport(self.sender.latest_method().map_or(Transport::Memory, Transport::Method))
    }

    /// Whether the TLS handshake is under way.
    pub fn is_handshaking(&self) -> bool {
        matches!(&self.encryption, Encryption::Program(session) if session.is_handshaking())
    }

    /// Whether the stream is encrypted.
    pub fn is_tls(&self) -> bool {
        !matches!(self.encryption, Encryption::None)
    }

    /// The number of send methods that the kernel refused on this socket.
    pub fn fallbacks(&self) -> u64 {
        if self.sender.latest_method().is_none() {
            return 0;
        }
        self.sender.report().fallbacks.len() as u64
    }

    /// Sends TLS's `close_notify`, so that the peer can tell this end from a truncation.
    /// [`Sent::Bytes`] once it and all before it are in the socket.
    pub fn send_close_notify(&mut self) -> Sent {
        match &mut self.encryption {
            Encryption::None => Sent::Bytes(0),
            Encryption::Program(session) => session.send_close_notify(self.sender.as_fd()),
            Encryption::Kernel { .. } => ktls::send_close_notify(&self.sender),
        }
    }

    /// Closes the sending direction; the peer may go on sending.
    pub fn shutdown(&self) {
        // An error means that the peer is gone.
        let _ = rustix::net::shutdown(self, rustix::net::Shutdown::Write);
    }

    /// Makes closing reset the connection, which discards what is queued: a peer must not take an
    /// incomplete message for a complete one.
    pub fn reset_on_close(&mut self) {
        // The message before that is complete.
        self.flush_held();
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn less_than_a_segment_is_held_until_it_is_flushed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nodelay(true).unwrap();
        let settings = Arc::default();
        let mut stream =
            Stream::accept(accepted.into(), None, KtlsSupport::default(), &settings).unwrap();
        let mut buffer = [0; 8];
        loop {
            let begun = Instant::now();
            assert_eq!(
                stream.send_held(&[IoSlice::new(b"four"), IoSlice::new(b"more")]),
                Sent::Bytes(8)
            );
            client.set_nonblocking(true).unwrap();
            let early = client.read(&mut buffer).map_err(|error| error.kind());
            // The kernel sends it by itself after 200 ms: a late look proves nothing.
            let is_late = begun.elapsed() > Duration::from_millis(100);
            stream.flush_held();
            client.set_nonblocking(false).unwrap();
            client.read_exact(&mut buffer[..8 - early.unwrap_or(0)]).unwrap();
            if !is_late {
                assert_eq!(early, Err(ErrorKind::WouldBlock));
                assert_eq!(&buffer, b"fourmore");
                break;
            }
        }
        let large = vec![0; max_segment(&client).unwrap() as usize];
        assert_eq!(stream.send_held(&[IoSlice::new(&large)]), Sent::Bytes(large.len() as u64));
        assert!(!stream.is_held());
    }
}
