//! One direct stream.

use super::Secret;
use super::authenticate;
use super::tls::{self, ClientTls, ServerTls};
use super::writer::DirectWriter;
use rustix::net::sockopt;
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The time for both ends to recognize each other.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which the kernel asks whether a silent peer still exists.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(30);
/// The interval of these questions.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The time in which a peer must acknowledge what was sent, or open its window: a peer does not
/// read while a slow disk syncs.
const ACKNOWLEDGE_TIMEOUT_MS: u32 = 15 * 60_000;

/// A stream in both directions.
pub trait Duplex: Read + Write + Send {
    /// Ends the time limit of the handshake.
    fn end_handshake(&mut self) -> io::Result<()>;
}

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

/// A socket whose reads have a time limit during the handshake.
#[derive(Debug)]
pub struct TimedSocket {
    socket: TcpStream,
    deadline: Option<Instant>,
}

impl TimedSocket {
    fn new(socket: &TcpStream) -> io::Result<Self> {
        let socket = socket.try_clone()?;
        socket.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, KEEP_ALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&socket, KEEP_ALIVE_INTERVAL)?;
        sockopt::set_tcp_user_timeout(&socket, ACKNOWLEDGE_TIMEOUT_MS)?;
        socket.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        Ok(Self { socket, deadline: Some(Instant::now() + HANDSHAKE_TIMEOUT) })
    }

    /// The socket itself.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Ends the time limit.
    pub fn end_handshake(&mut self) -> io::Result<()> {
        self.deadline = None;
        self.socket.set_read_timeout(None)?;
        self.socket.set_write_timeout(None)
    }
}

impl Read for TimedSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(deadline) = self.deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))?;
        }
        self.socket.read(buffer)
    }
}

impl Write for TimedSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.socket.write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Duplex for TimedSocket {
    fn end_handshake(&mut self) -> io::Result<()> {
        TimedSocket::end_handshake(self)
    }
}
