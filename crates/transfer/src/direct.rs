//! Direct streams: TCP connections between the hosts, which carry the content of files in the place
//! of ssh.
//!
//! One end listens, and the other end connects. Both know a secret from the stream of ssh, by which
//! they recognize each other. TLS 1.3 encrypts the streams: the key of the listening end goes
//! through ssh, so another host cannot answer. ssh carries the content until a direct stream is
//! open, and goes on if the network allows no direct stream.

mod authenticate;
mod connector;
mod control;
mod endpoint;
mod listener;
mod stream;
mod streams;
mod timed_socket;
mod tls;
mod writer;

pub use control::{ControlListener, ControlReader, ControlStreams, RankKey, connect_to_rank_0};
pub use endpoint::{DirectAnswer, DirectRequest, Listening, SshConnection, Successor};
pub use stream::DataStream;
pub use streams::{DirectReport, DirectStreams};
pub use writer::DirectWriter;

use crate::error::Error;
use connector::Connector;
use listener::DataListener;
use rustix::rand::{GetRandomFlags, getrandom};
use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// The most bytes of content in one stream. With keys of AES-GCM, a kernel may encrypt 2^24.5
/// records of at most 16 KiB (RFC 8446 section 5.5); records may be much smaller.
pub const STREAM_BYTES_MAX: u64 = 64 << 30;
/// The most streams that a user may ask for.
pub const STREAMS_MAX: u16 = 64;
/// The most streams if haul chooses the number.
pub const AUTO_STREAMS_MAX: u16 = 8;

/// The most connections that a host of a chain accepts: the host before, and other hosts while the
/// chain changes.
const CHAIN_STREAMS_MAX: u16 = 4;

/// The secret by which both ends recognize each other.
type Secret = [u8; 32];

/// How many direct streams there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamCount {
    /// More streams, as long as more streams make the transfer faster.
    Auto,
    /// So many, at most [`STREAMS_MAX`].
    Exactly(u16),
}

/// The end that connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataFrom {
    /// The user's host.
    Here,
    /// The other host.
    There,
}

/// What the user wants of direct streams.
#[derive(Debug, Clone)]
pub struct DirectSettings {
    /// The number of streams.
    pub streams: StreamCount,
    /// Whether content is not encrypted. The ends recognize each other nevertheless.
    pub is_plain: bool,
    /// The ports of the end that listens; 0 alone is a port that the kernel chooses.
    pub ports: RangeInclusive<u16>,
    /// The end that connects.
    pub from: DataFrom,
}

/// Tells the user why a direct stream is missing.
pub type Notice = Arc<dyn Fn(&str) + Send + Sync>;

/// What the user's end offers to the other end.
#[derive(Debug)]
pub struct DirectOffer {
    request: DirectRequest,
    listener: Option<DataListener>,
}

impl DirectOffer {
    /// Prepares direct streams. Listens, if the other end shall connect.
    pub fn new(settings: &DirectSettings) -> io::Result<Self> {
        let mut secret = Secret::default();
        // Up to 256 bytes are always filled (getrandom(2)).
        getrandom(&mut secret, GetRandomFlags::empty())?;
        let (is_auto, streams_max) = match settings.streams {
            StreamCount::Auto => (true, AUTO_STREAMS_MAX),
            StreamCount::Exactly(count) => (false, count.min(STREAMS_MAX)),
        };
        let (is_plain, ports) = (settings.is_plain, settings.ports.clone());
        let listener = match settings.from {
            DataFrom::Here => None,
            DataFrom::There => Some(DataListener::bind(None, ports.clone(), is_plain)?),
        };
        let listening = listener.as_ref().map(|listener| Listening {
            // The other end knows the address from which the user's end came through ssh.
            address: None,
            port: listener.port(),
            key: listener.key(),
        });
        let ports = (*ports.start(), *ports.end());
        let request = DirectRequest { secret, is_auto, streams_max, is_plain, ports, listening };
        Ok(Self { request, listener })
    }

    /// What the other end is asked for.
    pub fn request(&self) -> &DirectRequest {
        &self.request
    }

    /// Opens streams in the background, as the other end answered. `host` is the other host as the
    /// user named it.
    pub fn start(self, answer: DirectAnswer, host: &OsStr, notice: Notice) -> DirectStreams {
        let streams = DirectStreams::new(&self.request);
        match (answer, self.listener) {
            (DirectAnswer::Listens(listening), None) => {
                // Another address than the one of ssh is tried too: the host may be behind a
                // router that translates addresses.
                let host = String::from_utf8_lossy(host.as_bytes()).into_owned();
                let host = host.rsplit('@').next().map(str::to_owned);
                Connector::new(&self.request, listening, host).start(streams.clone(), Some(notice));
            }
            (DirectAnswer::Connects, Some(listener)) => {
                listener.start(&self.request, streams.clone(), Some(notice));
            }
            (DirectAnswer::Refuses(reason), _) => {
                notice(&format!(
                    "direct connections are not possible ({reason}): ssh carries all bytes"
                ));
            }
            (DirectAnswer::Listens(_), Some(_)) | (DirectAnswer::Connects, None) => {}
        }
        streams
    }
}

/// Answers what the user's end offers, and opens streams in the background.
pub fn answer(
    request: &DirectRequest,
    connection: Option<SshConnection>,
) -> (DirectAnswer, Option<DirectStreams>) {
    let streams = DirectStreams::new(request);
    if let Some(listening) = &request.listening {
        let Some(SshConnection { client, .. }) = connection else {
            let problem = "the other host does not know the address of this host (SSH_CONNECTION)";
            return (DirectAnswer::Refuses(problem.into()), None);
        };
        let listening = Listening { address: Some(client), ..listening.clone() };
        Connector::new(request, listening, None).start(streams.clone(), None);
        return (DirectAnswer::Connects, Some(streams));
    }
    let address = connection.map(|connection| connection.server);
    let ports = request.ports.0..=request.ports.1;
    let listener = match DataListener::bind(address, ports, request.is_plain) {
        Ok(listener) => listener,
        Err(error) => {
            let problem = format!("the other host cannot listen: {error}");
            return (DirectAnswer::Refuses(problem), None);
        }
    };
    let listening = Listening { address, port: listener.port(), key: listener.key() };
    listener.start(request, streams.clone(), None);
    (DirectAnswer::Listens(listening), Some(streams))
}

/// The addresses for a connection to the end that listens.
fn addresses(listening: &Listening, host: Option<&str>) -> Vec<SocketAddr> {
    use std::net::ToSocketAddrs;
    let port = listening.port;
    let mut addresses: Vec<_> =
        listening.address.map(|address| SocketAddr::new(address, port)).into_iter().collect();
    let named = host.and_then(|host| (host, port).to_socket_addrs().ok()).into_iter().flatten();
    for address in named {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

/// The error of a program that has a fault.
fn tls_error(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

impl DirectRequest {
    /// The request for the connections of a chain, at which every host listens.
    pub fn for_chain(is_plain: bool, ports: RangeInclusive<u16>) -> io::Result<Self> {
        let mut secret = Secret::default();
        // Up to 256 bytes are always filled (getrandom(2)).
        getrandom(&mut secret, GetRandomFlags::empty())?;
        let ports = (*ports.start(), *ports.end());
        let streams_max = CHAIN_STREAMS_MAX;
        Ok(Self { secret, is_auto: false, streams_max, is_plain, ports, listening: None })
    }

    /// Refuses limits that no user's end sends.
    pub fn check(&self) -> Result<(), Error> {
        let is_allowed = self.streams_max <= STREAMS_MAX && self.ports.0 <= self.ports.1;
        if is_allowed { Ok(()) } else { Err(Error::Protocol("limits of direct streams")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr, TcpStream};
    use std::thread;
    use std::time::{Duration, Instant};

    const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// The request of a user's end and a listening end.
    fn listening(is_plain: bool) -> (DirectOffer, Listening, DirectStreams) {
        let settings = DirectSettings {
            streams: StreamCount::Exactly(1),
            is_plain,
            ports: 0..=0,
            from: DataFrom::Here,
        };
        let offer = DirectOffer::new(&settings).unwrap();
        let connection = SshConnection { client: LOCALHOST, server: LOCALHOST };
        let (answer, streams) = answer(offer.request(), Some(connection));
        let DirectAnswer::Listens(listening) = answer else { panic!("{answer:?}") };
        (offer, listening, streams.unwrap())
    }

    /// The message about a first connection that fails.
    fn failure(offer: DirectOffer, listening: Listening) -> String {
        let (told_tx, told) = std::sync::mpsc::channel();
        let notice = Arc::new(move |message: &str| told_tx.send(message.to_owned()).unwrap());
        let streams =
            offer.start(DirectAnswer::Listens(listening), OsStr::new("127.0.0.1"), notice);
        let message = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(streams.report().opened, 0);
        message
    }

    #[test]
    fn another_secret_is_refused() {
        for is_plain in [false, true] {
            let (mut offer, listening, streams) = listening(is_plain);
            offer.request.secret[31] ^= 1;
            let message = failure(offer, listening);
            assert!(message.starts_with("no direct connection to 127.0.0.1"), "{message}");
            assert_eq!(streams.report().opened, 0);
            streams.end();
        }
    }

    /// Another host, which answers in the place of the listening end, has another key.
    #[test]
    fn another_key_is_refused() {
        let (offer, mut listening, streams) = listening(false);
        listening.key = Some(tls::ServerTls::new().unwrap().public_key());
        let message = failure(offer, listening);
        assert!(message.contains("invalid peer certificate"), "{message}");
        streams.end();
    }

    #[test]
    fn strangers_neither_become_streams_nor_occupy_the_listener() {
        let (offer, listening, streams) = listening(false);
        let address = SocketAddr::new(LOCALHOST, listening.port);
        let strangers: Vec<_> = (0..15).map(|_| TcpStream::connect(address).unwrap()).collect();
        let notice = Arc::new(|_: &str| {});
        let ours = offer.start(DirectAnswer::Listens(listening), OsStr::new("127.0.0.1"), notice);
        let deadline = Instant::now() + Duration::from_secs(30);
        while ours.open() == 0 || streams.open() == 0 {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((ours.open(), streams.open()), (1, 1));
        drop(strangers);
        for streams in [ours, streams] {
            streams.end();
        }
    }

    #[test]
    fn the_first_free_port_of_the_range_is_taken() {
        let first = DataListener::bind(Some(LOCALHOST), 0..=0, true).unwrap();
        let port = first.port().min(u16::MAX - 20);
        let ports = port..=port + 20;
        let second = DataListener::bind(Some(LOCALHOST), ports.clone(), true).unwrap();
        assert!(ports.contains(&second.port()) && second.port() != first.port());
        let error = DataListener::bind(Some(LOCALHOST), first.port()..=first.port(), true);
        let message = error.unwrap_err().to_string();
        assert!(message.starts_with(&format!("port {}: Address already", first.port())));
    }
}
