//! A socket that limits the time of the handshake.

use rustix::net::sockopt;
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

/// A socket whose reads have a time limit during the handshake.
#[derive(Debug)]
pub struct TimedSocket {
    socket: TcpStream,
    deadline: Option<Instant>,
}

impl TimedSocket {
    /// Another descriptor of a socket, whose handshake begins now.
    pub fn new(socket: &TcpStream) -> io::Result<Self> {
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
