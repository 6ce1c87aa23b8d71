//! One direct stream.

use super::authenticate;
use super::endpoint::{DirectRequest, Successor};
use super::timed_socket::{Duplex, TimedSocket};
use super::tls::{self, ClientTls, ServerTls};
use super::writer::DirectWriter;
use super::{Secret, addresses};
use std::fmt;
use std::io::{self, Read};
use std::net::TcpStream;
use std::time::Duration;

/// The time for a connection to the next host of a chain.
const CHAIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for the next host to name the first frame that it lacks.
const CHAIN_NUMBER_TIMEOUT: Duration = Duration::from_secs(30);

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

    /// Connects to the next host of a chain, at the first address that answers.
    pub fn connect_to(request: &DirectRequest, successor: &Successor) -> io::Result<Self> {
        let Successor { host, listening } = successor;
        let tls = match (&listening.key, request.is_plain) {
            (Some(key), _) => Some(ClientTls::new(key)?),
            (None, true) => None,
            (None, false) => return Err(io::Error::other("the host offers no encryption")),
        };
        let mut failure = io::Error::other("the address of the host is unknown");
        for address in addresses(listening, Some(host)) {
            let connected = TcpStream::connect_timeout(&address, CHAIN_CONNECT_TIMEOUT)
                .and_then(|socket| Self::connect(socket, &request.secret, tls.as_ref()));
            match connected {
                Ok(stream) => return Ok(stream),
                Err(error) => failure = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        Err(failure)
    }

    /// Sends a number to the other end.
    pub fn send_number(&mut self, number: u64) -> io::Result<()> {
        self.stream.write_all(&number.to_le_bytes())?;
        self.stream.flush()
    }

    /// Waits for a number of the other end, which may sync a disk before.
    pub fn receive_number(&mut self) -> io::Result<u64> {
        let mut number = [0; size_of::<u64>()];
        self.socket.set_read_timeout(Some(CHAIN_NUMBER_TIMEOUT))?;
        self.stream.read_exact(&mut number)?;
        self.socket.set_read_timeout(None)?;
        Ok(u64::from_le_bytes(number))
    }

    /// The number of the stream in its session.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn set_id(&mut self, id: u64) {
        self.id = id;
    }

    /// The socket, to shut it down while the stream is in use.
    pub fn socket(&self) -> io::Result<TcpStream> {
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
