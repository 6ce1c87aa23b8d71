//! Connections between the ranks of a job, which take the place of ssh.
//!
//! Every rank makes a key for the job, and the launcher's channel vouches for the public keys. Rank
//! 0 listens, and every other rank opens two connections: one for each direction. Both ends of a
//! connection prove their keys (TLS 1.3 with raw public keys), so neither a rank of another job nor
//! another user can join.

use super::timed_socket::{Duplex, TimedSocket};
use super::tls::{self, ClientTls, Key, ServerTls};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The time for one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Connections of strangers that are examined at a time.
const STRANGERS_MAX: usize = 16;
/// The time before another try after an error.
const ERROR_INTERVAL: Duration = Duration::from_millis(100);
/// The interval at which the end of the time is noticed.
const END_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The direction of a connection, as its first byte.
const FROM_RANK_0: u8 = 0;
const TO_RANK_0: u8 = 1;

/// The first byte of rank 0.
const READY: u8 = 2;

/// The key of a rank.
#[derive(Debug, Clone)]
pub struct RankKey(Key);

impl RankKey {
    /// A new key.
    pub fn new() -> io::Result<Self> {
        Key::new().map(Self)
    }

    /// The public key (a `SubjectPublicKeyInfo`, 91 bytes).
    pub fn public(&self) -> &[u8] {
        &self.0.public
    }
}

/// Both connections between rank 0 and another rank.
pub struct ControlStreams {
    /// What the other rank sends.
    pub from: ControlReader,
    /// What the other rank receives. The drop ends the stream.
    pub to: Box<dyn Write + Send>,
    /// The address of this host in the connection.
    pub local: IpAddr,
    /// The address of the other host.
    pub remote: IpAddr,
    sockets: [TcpStream; 2],
}

impl fmt::Debug for ControlStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlStreams").field("remote", &self.remote).finish_non_exhaustive()
    }
}

impl ControlStreams {
    fn new(from: Connection, to: Connection) -> io::Result<Self> {
        let (local, remote) = (from.socket.local_addr()?.ip(), from.socket.peer_addr()?.ip());
        let (local, remote) = (local.to_canonical(), remote.to_canonical());
        let sockets = [from.socket.try_clone()?, to.socket.try_clone()?];
        let to = Box::new(ClosingWriter { stream: to.stream, socket: to.socket });
        let from = ControlReader { stream: from.stream, socket: from.socket, later: None };
        Ok(Self { from, to, local, remote, sockets })
    }

    /// What ends both connections.
    pub fn abort(&self) -> io::Result<impl FnOnce() + Send + use<>> {
        let sockets = [self.sockets[0].try_clone()?, self.sockets[1].try_clone()?];
        Ok(move || {
            for socket in sockets {
                // An error means that the other end closed the connection.
                let _ = socket.shutdown(Shutdown::Both);
            }
        })
    }
}

/// What the other end of a connection sends.
pub struct ControlReader {
    stream: Box<dyn Duplex>,
    socket: TcpStream,
    /// The time limit after the next read.
    later: Option<Duration>,
}

impl fmt::Debug for ControlReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlReader").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl ControlReader {
    /// Makes a read fail (`TimedOut`) if nothing arrives: the next read after one time, and later
    /// reads after another time.
    pub fn set_silence_max(&mut self, first: Duration, later: Duration) -> io::Result<()> {
        self.later = Some(later);
        self.socket.set_read_timeout(Some(first))
    }
}

impl Read for ControlReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })?;
        if let Some(later) = self.later.take() {
            self.socket.set_read_timeout(Some(later))?;
        }
        Ok(count)
    }
}

/// Ends the stream when it is dropped, although there are other descriptors of the socket.
struct ClosingWriter {
    stream: Box<dyn Duplex>,
    socket: TcpStream,
}

impl Write for ClosingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Drop for ClosingWriter {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

/// A connection whose ends proved their keys.
struct Connection {
    stream: Box<dyn Duplex>,
    socket: TcpStream,
}

/// Where rank 0 waits for the other ranks.
#[derive(Debug)]
pub struct ControlListener {
    listener: TcpListener,
    port: u16,
    key: RankKey,
}

impl ControlListener {
    /// Listens at the first free port, at all addresses.
    pub fn bind(key: RankKey, ports: RangeInclusive<u16>) -> io::Result<Self> {
        let listener = super::listener::bind_first(None, ports)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        Ok(Self { listener, port, key })
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Waits for the ranks with these public keys, for at most a time. `None` for a rank that did
    /// not connect.
    pub fn accept_all(
        self,
        keys: &[Vec<u8>],
        time: Duration,
    ) -> io::Result<Vec<Option<ControlStreams>>> {
        let deadline = Instant::now() + time;
        let tls = ServerTls::with_clients(&self.key.0, keys)?;
        let places: HashMap<&[u8], usize> =
            keys.iter().enumerate().map(|(place, key)| (&key[..], place)).collect();
        let mut halves: Vec<[Option<Connection>; 2]> = keys.iter().map(|_| [None, None]).collect();
        let (accepted_tx, accepted) = mpsc::channel();
        let unknown = Arc::new(AtomicUsize::new(0));
        let is_complete =
            |halves: &[[Option<Connection>; 2]]| halves.iter().flatten().all(Option::is_some);
        while !is_complete(&halves) && Instant::now() < deadline {
            let mut waited = [PollFd::new(&self.listener, PollFlags::IN)];
            let _ = poll(&mut waited, Some(&END_INTERVAL));
            match self.listener.accept() {
                Ok((socket, _)) if unknown.load(Relaxed) < 2 * keys.len() + STRANGERS_MAX => {
                    let (tls, accepted_tx) = (tls.clone(), accepted_tx.clone());
                    let unknown = Unknown::count(&unknown);
                    let accept = move || {
                        // Every process that reaches the port may connect, so others are ignored.
                        if let Ok(accepted) = accept(&socket, &tls) {
                            let _ = accepted_tx.send(accepted);
                        }
                        drop(unknown);
                    };
                    // Without a thread, the rank connects again.
                    let _ = thread::Builder::new().name("haul-accept".into()).spawn(accept);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Without a free descriptor, the socket stays ready.
                Err(_) => thread::sleep(ERROR_INTERVAL),
            }
            while let Ok((key, direction, connection)) = accepted.try_recv() {
                // A rank that tries again closed its first connection.
                if let Some(&place) = places.get(&key[..]) {
                    halves[place][usize::from(direction)] = Some(connection);
                }
            }
        }
        let streams = halves.into_iter().map(|[to, from]| match (from, to) {
            (Some(from), Some(to)) => ControlStreams::new(from, to).map(Some),
            _ => Ok(None),
        });
        streams.collect()
    }
}

/// Counts a connection that is not recognized yet.
struct Unknown(Arc<AtomicUsize>);

impl Unknown {
    fn count(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Unknown {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Recognizes a rank: its public key and the direction of the connection.
fn accept(socket: &TcpStream, tls: &ServerTls) -> io::Result<(Vec<u8>, u8, Connection)> {
    socket.set_nonblocking(false)?;
    let accepted = tls.accept(TimedSocket::new(socket)?)?;
    let key = accepted.peer_key().ok_or(io::ErrorKind::PermissionDenied)?;
    let (mut stream, _): (Box<dyn Duplex>, _) = tls::into_duplex(accepted, tls.ktls)?;
    // Rank 0 sends first, because the other rank must not send before rank 0 ended its handshake.
    stream.write_all(&[READY])?;
    stream.flush()?;
    let mut direction = [0];
    stream.read_exact(&mut direction)?;
    if !matches!(direction[0], FROM_RANK_0 | TO_RANK_0) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    stream.end_handshake()?;
    Ok((key, direction[0], Connection { stream, socket: socket.try_clone()? }))
}

/// Connects to rank 0, which has this public key, at the first address that answers. Tries again
/// until the time is over.
pub fn connect_to_rank_0(
    addresses: &[IpAddr],
    port: u16,
    key: &RankKey,
    public_key: &[u8],
    time: Duration,
) -> io::Result<ControlStreams> {
    let deadline = Instant::now() + time;
    let tls = ClientTls::with_key(public_key, &key.0)?;
    let mut failure = io::Error::other("rank 0 has no address");
    loop {
        for &address in addresses {
            let address = SocketAddr::new(address, port);
            let connected = connect(address, &tls, FROM_RANK_0).and_then(|from| {
                let to = connect(address, &tls, TO_RANK_0)?;
                ControlStreams::new(from, to)
            });
            match connected {
                Ok(streams) => return Ok(streams),
                Err(error) => failure = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        if Instant::now() >= deadline {
            return Err(failure);
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn connect(address: SocketAddr, tls: &ClientTls, direction: u8) -> io::Result<Connection> {
    let socket = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    let connected = tls.connect(TimedSocket::new(&socket)?)?;
    let (mut stream, _): (Box<dyn Duplex>, _) = tls::into_duplex(connected, tls.ktls)?;
    // Without the byte, rank 0 does not accept the key of this rank.
    stream.read_exact(&mut [0])?;
    stream.write_all(&[direction])?;
    stream.flush()?;
    stream.end_handshake()?;
    Ok(Connection { stream, socket })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const LOCALHOST: [IpAddr; 1] = [IpAddr::V4(Ipv4Addr::LOCALHOST)];

    fn key() -> RankKey {
        RankKey::new().unwrap()
    }

    #[test]
    fn the_ranks_of_the_job_connect_and_no_other() {
        let (zero, one, two, stranger) = (key(), key(), key(), key());
        let listener = ControlListener::bind(zero.clone(), 0..=0).unwrap();
        let (port, keys) = (listener.port(), [one.public().to_vec(), two.public().to_vec()]);
        thread::scope(|scope| {
            let accepted =
                scope.spawn(|| listener.accept_all(&keys, Duration::from_secs(30)).unwrap());
            let time = Duration::ZERO;
            // A rank of another job, and a rank that another process would deceive.
            let public = zero.public();
            connect_to_rank_0(&LOCALHOST, port, &stranger, public, time).unwrap_err();
            connect_to_rank_0(&LOCALHOST, port, &one, two.public(), time).unwrap_err();
            // Strangers that say nothing.
            let silent: Vec<_> =
                (0..10).map(|_| TcpStream::connect((LOCALHOST[0], port)).unwrap()).collect();
            let time = Duration::from_secs(30);
            let [mut one, mut two] = [&one, &two]
                .map(|key| connect_to_rank_0(&LOCALHOST, port, key, public, time).unwrap());
            let mut accepted = accepted.join().unwrap();
            let mut byte = [0];
            for (number, (theirs, ours)) in
                [&mut one, &mut two].into_iter().zip(&mut accepted).enumerate()
            {
                let ours = ours.as_mut().unwrap();
                theirs.to.write_all(&[number as u8]).unwrap();
                ours.from.read_exact(&mut byte).unwrap();
                assert_eq!(byte, [number as u8]);
                ours.to.write_all(&[7]).unwrap();
                theirs.from.read_exact(&mut byte).unwrap();
                assert_eq!(byte, [7]);
            }
            drop(silent);
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_not_waited_for() {
        let (zero, one) = (key(), key());
        let listener = ControlListener::bind(zero, 0..=0).unwrap();
        let streams = listener.accept_all(&[one.public().to_vec()], Duration::from_millis(50));
        assert!(streams.unwrap()[0].is_none());
    }
}
