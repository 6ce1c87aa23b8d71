//! One direct stream.

use super::Secret;
use super::authenticate;
use super::timed_socket::{Duplex, TimedSocket};
use super::tls::{self, ClientTls, ServerTls};
use super::writer::DirectWriter;
use std::fmt;
use std::io::{self, Read};
use std::net::TcpStream;

/// A direct stream whose ends recognized each other.
pub struct DataStream {
    id: u64,
    /// For [`DataStream::socket`].
    socket: TcpStream,
    stream: Box<dyn Duplex>,
    is_in_kernel: bool,
    /// Whether this program writes plaintext to the socket.
    is_plain_here: bool,
}

impl fmt::Debug for DataStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataStream").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl DataStream {
    /// Recognizes the end that connected.
    pub fn accept(socket: TcpStream, secret: &Secret, tls: Option<&ServerTls>) -> io::Result<Self> {
        let timed = TimedSocket::new(&socket)?;
        let (mut stream, is_in_kernel): (Box<dyn Duplex>, _) = match tls {
            None => (Box::new(timed), false),
            Some(tls) => tls::into_duplex(tls.accept(timed)?, tls.ktls)?,
        };
        authenticate::as_listener(&mut *stream, secret)?;
        stream.end_handshake()?;
        let is_plain_here = tls.is_none() || is_in_kernel;
        Ok(Self { id: 0, socket, stream, is_in_kernel, is_plain_here })
    }

    /// Recognizes the end that listens.
    pub fn connect(
        socket: TcpStream,
        secret: &Secret,
        tls: Option<&ClientTls>,
    ) -> io::Result<Self> {
        let timed = TimedSocket::new(&socket)?;
        let (mut stream, is_in_kernel): (Box<dyn Duplex>, _) = match tls {
            None => (Box::new(timed), false),
            Some(tls) => tls::into_duplex(tls.connect(timed)?, tls.ktls)?,
        };
        authenticate::as_connector(&mut *stream, secret)?;
        stream.end_handshake()?;
        let is_plain_here = tls.is_none() || is_in_kernel;
        Ok(Self { id: 0, socket, stream, is_in_kernel, is_plain_here })
    }

    /// The number of the stream in its session.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn set_id(&mut self, id: u64) {
        self.id = id;
    }

    /// The socket, to shut it down while the stream is in use.
    pub(super) fn socket(&self) -> io::Result<TcpStream> {
        self.socket.try_clone()
    }

    /// Whether the kernel encrypts.
    pub(super) fn is_in_kernel(&self) -> bool {
        self.is_in_kernel
    }

    /// The stream for the end that sends.
    pub fn into_writer(self) -> DirectWriter {
        if self.is_plain_here {
            // Both are descriptors of one socket.
            if let Ok(sender) = haul::Sender::new(self.socket) {
                return DirectWriter::SendsFiles(Box::new(sender));
            }
        }
        DirectWriter::Encrypts(self.stream)
    }

    /// The stream for the end that receives.
    pub fn into_reader(self) -> Box<dyn Read + Send> {
        self.stream
    }
}
