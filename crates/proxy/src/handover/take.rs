//! The new process's part of a handover.

use super::COMMAND;
use crate::handed::{self, HandedConnection, HandedUpstream, Message, State, VERSION};
use crate::mailbox::Mailboxes;
use haul_server::Address;
use haul_server::fd_channel::FdChannel;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info};

/// The time that the old process has for each message before the start.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Takes a proxy over from another process.
#[derive(Debug)]
pub struct Taker {
    channel: FdChannel,
}

/// What the other process has sent before the start.
#[derive(Debug)]
pub struct Taken {
    /// The listening sockets, by the addresses that the other process was given.
    pub listeners: Vec<(Address, Arc<OwnedFd>)>,
    /// The listening socket of the metrics.
    pub metrics: Option<Arc<TcpListener>>,
    /// The next connection's number.
    pub next_id: u64,
    pub upstreams: Vec<HandedUpstream>,
}

impl Taker {
    /// Asks the proxy with this control socket for a handover.
    pub fn connect(path: &Path) -> io::Result<(Self, Taken)> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(STATE_TIMEOUT))?;
        writeln!(stream, "{COMMAND}")?;
        let channel = FdChannel::receive_through(&stream)?;
        channel.set_timeouts(Some(STATE_TIMEOUT), Some(STATE_TIMEOUT))?;
        let (mut listeners, mut metrics) = (Vec::new(), None);
        loop {
            let (message, descriptors) =
                handed::receive(&channel)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let mut descriptors = descriptors.into_iter();
            match message {
                Message::Listener { address } => {
                    let address = address.parse().map_err(io::Error::other)?;
                    listeners.extend(descriptors.next().map(|one| (address, Arc::new(one))));
                }
                Message::Metrics => metrics = descriptors.next().map(TcpListener::from),
                Message::State(State { version: VERSION, next_id, upstreams }) => {
                    let metrics = metrics.map(Arc::new);
                    return Ok((
                        Self { channel },
                        Taken { listeners, metrics, next_id, upstreams },
                    ));
                }
                Message::State(State { version, .. }) => {
                    let problem = format!(
                        "the running proxy hands over by version {version}, this one by {VERSION}"
                    );
                    return Err(io::Error::other(problem));
                }
                Message::Started | Message::Connection(_) => {
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
        }
    }

    /// Takes the connections for the event loops, on a thread of its own, until the other process
    /// has ended.
    pub fn start(self, mailboxes: Arc<Mailboxes>) -> io::Result<()> {
        // The other process sends a connection when it has an upstream: that may take long.
        self.channel.set_timeouts(Some(STATE_TIMEOUT), None)?;
        std::thread::Builder::new().name("haul-handover".into()).spawn(move || {
            match self.take(&mailboxes) {
                Ok(count) => info!(connections = count, "took over {count} connections"),
                Err(error) => error!(%error, "taking over connections has failed: {error}"),
            }
        })?;
        Ok(())
    }

    fn take(&self, mailboxes: &Mailboxes) -> io::Result<usize> {
        handed::send(&self.channel, &Message::Started, &[])?;
        let mut count = 0;
        while let Some((message, sockets)) = handed::receive(&self.channel)? {
            if let Message::Connection(connection) = message {
                mailboxes.adopt(HandedConnection::receive(&self.channel, connection, sockets)?);
                count += 1;
            }
        }
        Ok(count)
    }
}
