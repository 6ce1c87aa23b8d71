//! The end that connects.

use super::endpoint::{DirectRequest, Listening};
use super::stream::DataStream;
use super::streams::DirectStreams;
use super::tls::ClientTls;
use super::{Notice, Secret, addresses};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The time for a connection. ssh carries the content until then.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A line on standard error reports a missing connection after this time.
const NO_CONNECTION_NOTICE_DELAY: Duration = Duration::from_secs(1);
/// The interval at which another stream is opened, or a stream that ended is replaced. The first
/// streams of a short transfer are enough.
const OPEN_INTERVAL: Duration = Duration::from_millis(100);

/// What it takes to connect.
#[derive(Debug)]
pub struct Connector {
    listening: Listening,
    host: Option<String>,
    secret: Secret,
    is_plain: bool,
    streams_max: usize,
}

impl Connector {
    /// A connector to an end that listens, whose host has this name.
    pub fn new(request: &DirectRequest, listening: Listening, host: Option<String>) -> Self {
        let streams_max = request.streams_max.into();
        let DirectRequest { secret, is_plain, .. } = *request;
        Self { listening, host, secret, is_plain, streams_max }
    }

    /// Connects in the background, until the session ends.
    pub fn start(self, streams: DirectStreams, notice: Option<Notice>) {
        let run = move || self.run(&streams, notice.as_ref());
        // Without a thread, ssh carries the content.
        let _ = thread::Builder::new().name("haul-connector".into()).spawn(run);
    }

    fn run(&self, streams: &DirectStreams, notice: Option<&Notice>) {
        let tell = |message: &str| {
            if let Some(notice) = notice.filter(|_| !streams.is_over()) {
                notice(message);
            }
        };
        if self.listening.key.is_none() && !self.is_plain {
            return tell(
                "direct connections are not possible: the other host offers no encryption",
            );
        }
        let tls = match self.listening.key.as_deref().map(ClientTls::new).transpose() {
            Ok(tls) => tls,
            Err(error) => return tell(&format!("direct connections are not possible: {error}")),
        };
        let Some(address) = self.connect_first(streams, tls.as_ref(), &tell) else { return };
        self.keep(address, streams, tls.as_ref());
    }

    /// Opens the first stream, and returns the address that answered.
    fn connect_first(
        &self,
        streams: &DirectStreams,
        tls: Option<&ClientTls>,
        tell: &dyn Fn(&str),
    ) -> Option<SocketAddr> {
        let addresses = addresses(&self.listening, self.host.as_deref());
        let port = self.listening.port;
        let place = match (&addresses[..], &self.host) {
            ([first, ..], _) => format!("{} port {port}", first.ip()),
            ([], Some(host)) => format!("{host} port {port}"),
            ([], None) => format!("port {port}"),
        };
        let (results_tx, results) = mpsc::channel();
        for address in addresses {
            let (secret, tls, results_tx) = (self.secret, tls.cloned(), results_tx.clone());
            let streams = streams.clone();
            let connect = move || {
                // Each stream that the other end accepted must be used, so a second address that
                // answers adds a second stream.
                let connected = connect(address, &secret, tls.as_ref());
                let _ = results_tx.send((address, connected.map(|stream| streams.add(stream))));
            };
            let _ = thread::Builder::new().name("haul-connect".into()).spawn(connect);
        }
        drop(results_tx);
        let notice_at = Instant::now() + NO_CONNECTION_NOTICE_DELAY;
        let (mut is_told, mut reason) = (false, "the address of the host is unknown".to_owned());
        loop {
            let left = notice_at.saturating_duration_since(Instant::now());
            let result = if is_told {
                results.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                results.recv_timeout(left)
            };
            match result {
                Ok((address, Ok(()))) => return Some(address),
                Ok((_, Err(error))) => reason = error.to_string(),
                Err(RecvTimeoutError::Timeout) => {
                    is_told = true;
                    tell(&format!(
                        "no direct connection to {place} in {} s, so ssh carries the bytes until \
                         there is one (--data-port names ports that a firewall lets through)",
                        NO_CONNECTION_NOTICE_DELAY.as_secs(),
                    ));
                }
                Err(RecvTimeoutError::Disconnected) if is_told => return None,
                Err(RecvTimeoutError::Disconnected) => {
                    // If the other end refused the whole transfer, the session ends during this
                    // wait, and `tell` prints nothing after that.
                    streams.wait(left);
                    tell(&format!(
                        "no direct connection to {place} ({reason}): ssh carries all bytes \
                         (--data-port names ports that a firewall lets through)"
                    ));
                    return None;
                }
            }
        }
    }

    /// Opens more streams, and new ones for streams that ended, until the session ends. The source
    /// decides how many carry content at a time.
    fn keep(&self, address: SocketAddr, streams: &DirectStreams, tls: Option<&ClientTls>) {
        while streams.wait(OPEN_INTERVAL) {
            if streams.open() < self.streams_max
                && let Ok(stream) = connect(address, &self.secret, tls)
            {
                streams.add(stream);
            }
        }
    }
}

fn connect(
    address: SocketAddr,
    secret: &Secret,
    tls: Option<&ClientTls>,
) -> io::Result<DataStream> {
    let socket = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    DataStream::connect(socket, secret, tls)
}
