//! The end that listens for direct streams.

use super::endpoint::DirectRequest;
use super::stream::DataStream;
use super::streams::DirectStreams;
use super::tls::ServerTls;
use super::{Notice, Secret};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The most connections whose peers are not recognized yet.
const UNKNOWN_MAX: usize = 16;
/// The interval at which the end of the session is noticed.
const END_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// The time before another try after an error.
const ERROR_INTERVAL: Duration = Duration::from_millis(100);
/// A line on standard error reports a missing connection after this time.
const NO_CONNECTION_NOTICE_DELAY: Duration = Duration::from_secs(1);

/// A listening socket for direct streams.
#[derive(Debug)]
pub struct DataListener {
    listener: TcpListener,
    port: u16,
    tls: Option<ServerTls>,
}

impl DataListener {
    /// Listens at the first free port. Without an address, at all addresses.
    pub fn bind(
        address: Option<IpAddr>,
        ports: RangeInclusive<u16>,
        is_plain: bool,
    ) -> io::Result<Self> {
        let listener = bind_first(address, ports)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let tls = (!is_plain).then(ServerTls::new).transpose()?;
        Ok(Self { listener, port, tls })
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The public key for TLS.
    pub fn key(&self) -> Option<Vec<u8>> {
        self.tls.as_ref().map(ServerTls::public_key)
    }

    /// Accepts streams in the background, until the session ends.
    pub fn start(self, request: &DirectRequest, streams: DirectStreams, notice: Option<Notice>) {
        let (secret, streams_max) = (request.secret, usize::from(request.streams_max));
        let run = move || self.run(secret, streams_max, &streams, notice.as_ref());
        // Without a thread, ssh carries the content.
        let _ = thread::Builder::new().name("haul-listener".into()).spawn(run);
    }

    fn run(
        self,
        secret: Secret,
        streams_max: usize,
        streams: &DirectStreams,
        notice: Option<&Notice>,
    ) {
        let (tls, unknown) = (Arc::new(self.tls), Arc::new(AtomicUsize::new(0)));
        let (begun, mut notice) = (Instant::now(), notice);
        while !streams.is_over() {
            if begun.elapsed() >= NO_CONNECTION_NOTICE_DELAY
                && let Some(notice) = notice.take()
                && streams.open() == 0
            {
                notice(&format!(
                    "no direct connection arrived at port {} in {} s, so ssh carries the bytes \
                     until there is one (--data-port names ports that a firewall lets through)",
                    self.port,
                    NO_CONNECTION_NOTICE_DELAY.as_secs(),
                ));
            }
            let mut waited = [PollFd::new(&self.listener, PollFlags::IN)];
            let _ = poll(&mut waited, Some(&END_INTERVAL));
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                // Without a free descriptor, the socket stays ready.
                Err(_) => {
                    streams.wait(ERROR_INTERVAL);
                    continue;
                }
            };
            let is_full = unknown.load(Relaxed) >= UNKNOWN_MAX || streams.open() >= streams_max;
            if is_full || socket.set_nonblocking(false).is_err() {
                continue;
            }
            unknown.fetch_add(1, Relaxed);
            let (streams, tls, unknown) = (streams.clone(), Arc::clone(&tls), Arc::clone(&unknown));
            let accept = move || {
                accept(socket, &secret, (*tls).as_ref(), &streams);
                unknown.fetch_sub(1, Relaxed);
            };
            let _ = thread::Builder::new().name("haul-accept".into()).spawn(accept);
        }
    }
}

fn accept(socket: TcpStream, secret: &Secret, tls: Option<&ServerTls>, streams: &DirectStreams) {
    // Every process that reaches the port may connect, so other peers are ignored.
    if let Ok(stream) = DataStream::accept(socket, secret, tls) {
        streams.add(stream);
    }
}

/// Listens at the first free port. Without an address, at all addresses.
pub fn bind_first(
    address: Option<IpAddr>,
    mut ports: RangeInclusive<u16>,
) -> io::Result<TcpListener> {
    let last = *ports.end();
    loop {
        let port = ports.next().unwrap_or(last);
        match bind(address, port) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && port != last => {}
            Err(error) => {
                return Err(io::Error::new(error.kind(), format!("port {port}: {error}")));
            }
            bound => return bound,
        }
    }
}

fn bind(address: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    match address {
        Some(address) => TcpListener::bind(SocketAddr::new(address, port)),
        // IPv6 includes IPv4, except on a host without IPv6.
        None => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
    }
}
