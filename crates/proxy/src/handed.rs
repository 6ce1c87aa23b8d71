//! The messages of a handover to another process ([`crate::handover`]).

mod receipt;

pub use receipt::{Receipt, Receipts};

use crate::closing::{ClosingReason, Closings};
use crate::header::HeaderVersion;
use crate::host_instant::HostInstant;
use crate::log::DirectionBytes;
use crate::socket;
use crate::upstream::{Administration, Upstream};
use crate::upstream_group::Slot;
use haul_server::fd_channel::{FdChannel, MESSAGE_BYTES_MAX};
use haul_server::placement::Place;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The version of the messages. Processes of different versions refuse each other.
pub const VERSION: u32 = 10;
/// The most bytes of one direction of a connection: the largest pipe that an ordinary user may have
/// (`fs.pipe-max-size`, by default), several times.
const UNSENT_BYTES_MAX: usize = 16 << 20;
/// The most bytes of the additional fields, whose length has 16 bits.
const FIELDS_BYTES_MAX: usize = 1 << 16;

/// A message, as JSON. Its descriptors come with it, its bytes in messages after it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// To the new process, first: the version of the messages.
    Version(u32),
    /// To the new process: a listening socket, by its configured address.
    Listener { address: String },
    /// To the new process: the listening socket of the metrics.
    Metrics,
    /// To the new process: the listening control socket.
    Control,
    /// To the new process: an upstream of which more is to say than its configuration.
    Upstream(HandedUpstream),
    /// To the new process: the number of clients that are connected to the old one now.
    Clients(usize),
    /// To the new process: that is all that it needs to start.
    Ready,
    /// To the old process: the new one is about to accept connections.
    Started {
        /// The configured addresses at which it does.
        listeners: Vec<String>,
    },
    /// To the new process, in answer: the connections that an upstream has. They count for its
    /// limit until they are handed over or have ended.
    Open(HandedOpen),
    /// To the new process: so many of them have ended in the old one.
    Ended(HandedOpen),
    /// To the new process, with those: the clients that are connected to the old one, which accepts
    /// no others meanwhile. They count for the limit of clients until they are handed over or have
    /// ended.
    OpenClients(usize),
    /// To the new process: so many of them have ended in the old one.
    EndedClients(usize),
    /// To the new process, after that: it accepts from now on.
    Agreed {
        /// The next connection's number.
        next_id: u64,
    },
    /// To the old process: so many connections are on the new one's event loops. The first one, of
    /// none, says that the new process runs.
    Adopted(usize),
    /// To the new process: a connection, its client's socket, and that of its upstream or of each
    /// attempt to connect to one.
    Connection(Box<ConnectionMessage>),
}

/// A number of an upstream's connections.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HandedOpen {
    pub group: String,
    pub upstream: String,
    pub connections: usize,
}

/// The state of an upstream beside its configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HandedUpstream {
    pub group: String,
    pub upstream: String,
    pub administration: Administration,
    /// The weight that the operator has set.
    pub weight: Option<u32>,
    pub is_down: bool,
    /// When its established connections are to be closed.
    pub closings: Vec<HandedClosing>,
}

/// When the established connections of an upstream are to be closed, and why.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct HandedClosing {
    pub reason: ClosingReason,
    pub in_ms: u64,
}

impl HandedUpstream {
    /// The state of an upstream; `None` if there is nothing to hand over.
    pub fn new(upstream: &Arc<Upstream>, closings: &Closings) -> Option<Self> {
        let (administration, weight) = (upstream.administration(), upstream.weight());
        let is_down = upstream.is_down();
        let closings: Vec<_> = closings
            .of(upstream)
            .map(|(reason, left)| HandedClosing { reason, in_ms: left.as_millis() as u64 })
            .collect();
        let is_usual = administration == Administration::Enabled
            && weight.is_none()
            && !is_down
            && closings.is_empty();
        let (group, upstream) = (upstream.group().into(), upstream.name().into());
        (!is_usual).then_some(Self { group, upstream, administration, weight, is_down, closings })
    }

    /// Sets the state of an upstream. `is_checked`: there is a check that finds it up again.
    pub fn apply_to(&self, upstream: &Arc<Upstream>, is_checked: bool, closings: &Closings) {
        upstream.set_administration(self.administration);
        upstream.set_weight(self.weight);
        upstream.set_down(self.is_down && is_checked);
        self.apply_closings(upstream, closings, |reason| {
            is_checked || reason == ClosingReason::Operator
        });
    }

    /// When an operator wants the connections of an upstream to be closed that the configuration
    /// lacks.
    pub fn apply_to_removed(&self, upstream: &Arc<Upstream>, closings: &Closings) {
        self.apply_closings(upstream, closings, |reason| reason == ClosingReason::Operator);
    }

    fn apply_closings(
        &self,
        upstream: &Arc<Upstream>,
        closings: &Closings,
        is_wanted: impl Fn(ClosingReason) -> bool,
    ) {
        for closing in self.closings.iter().filter(|closing| is_wanted(closing.reason)) {
            let time = Duration::from_millis(closing.in_ms);
            closings.close_after(time, upstream, closing.reason);
        }
    }

    /// Whether an operator wants its connections to be closed.
    pub fn is_closed_by_operator(&self) -> bool {
        self.closings.iter().any(|closing| closing.reason == ClosingReason::Operator)
    }
}

/// A connection without its sockets and bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ConnectionMessage {
    pub id: u64,
    pub client: Option<SocketAddr>,
    /// The configured address of the listener.
    pub listener: String,
    pub server_name: Option<String>,
    pub unique_id: Option<String>,
    pub group: String,
    pub upstream: String,
    pub upstream_address: Option<SocketAddr>,
    pub source: Option<SocketAddr>,
    /// When it was accepted, in microseconds since 1970.
    pub accepted_us: u64,
    /// The same, by a clock that is not set.
    pub accepted_at: HostInstant,
    pub queue_us: Option<u64>,
    pub connect_attempts: u32,
    pub connect_error: Option<i32>,
    pub connect_us: Option<u64>,
    pub first_byte_us: Option<u64>,
    pub loop_us: u64,
    pub splice_us: u64,
    pub copy_us: u64,
    pub header_bytes: u64,
    pub to_upstream: HandedDirection,
    pub to_client: HandedDirection,
    /// `None` if it is established.
    pub search: Option<SearchMessage>,
}

impl ConnectionMessage {
    /// The length of the additional fields.
    fn fields_len(&self) -> usize {
        self.search.as_ref().map_or(0, |search| search.fields_len)
    }

    /// The number of sockets to upstreams.
    fn upstreams_len(&self) -> usize {
        match self.search.as_ref().map(|search| &search.phase) {
            None => 1,
            Some(SearchPhase::Connecting { attempts, .. }) => attempts.len(),
            Some(_) => 0,
        }
    }

    /// Whether it has a slot of its upstream.
    pub fn has_slot(&self) -> bool {
        self.upstreams_len() > 0
    }

    /// Whether bytes of the connection follow the message.
    pub fn has_bytes(&self) -> bool {
        let unsent = [self.to_upstream.unsent_len, self.to_client.unsent_len, self.fields_len()];
        unsent != [0; 3]
    }
}

/// What belongs to a client that has no connection to an upstream yet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SearchMessage {
    /// What a proxy in front has said: the address that the client has connected to.
    pub destination: Option<SocketAddr>,
    /// The length of the additional fields that it has sent.
    pub fields_len: usize,
    /// The header that its group's upstreams receive: the other process may lack the group.
    pub header: Option<HeaderVersion>,
    /// The upstreams of the group that were tried in vain in this round.
    pub tried: Vec<String>,
    /// Whether an attempt has failed for lack of a local port.
    pub lacks_port: bool,
    pub phase: SearchPhase,
}

/// How far the way of a client to an upstream is.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SearchPhase {
    /// The greeting, on which the route depends, has not arrived completely.
    Greeting {
        /// The time that is left for the greeting.
        seconds_left: u32,
    },
    /// The client waits in the queue of its group.
    Queued { since: HostInstant },
    /// A connection to an upstream is being established.
    Connecting {
        attempts: Vec<AttemptMessage>,
        /// The addresses of the upstream that were tried, or are.
        addresses_tried: usize,
    },
    /// All upstreams have failed, and are tried again in a moment.
    Paused,
}

/// A connection that is being established.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AttemptMessage {
    /// The upstream's address; `None` for a Unix socket.
    pub address: Option<SocketAddr>,
    /// The time that is left until it has failed.
    pub seconds_left: u32,
}

/// One direction of a connection.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HandedDirection {
    /// What was forwarded before.
    pub bytes: DirectionBytes,
    /// Bytes that were received and not sent.
    pub unsent_len: usize,
}

/// A connection on its way to another process.
pub struct HandedConnection {
    pub message: ConnectionMessage,
    pub client: OwnedFd,
    /// The upstream's, or those of the attempts to connect to one.
    pub upstreams: Vec<OwnedFd>,
    /// Received from the client, and not sent to the upstream.
    pub to_upstream: Vec<u8>,
    /// Received from the upstream, and not sent to the client.
    pub to_client: Vec<u8>,
    /// The additional fields of a client without an upstream.
    pub fields: Vec<u8>,
    /// The slot that it has in this process.
    pub slot: Option<Slot>,
    /// The place that it has in this process.
    pub place: Option<Place>,
    /// Acknowledges its arrival to the old process.
    pub receipt: Option<Receipt>,
}

impl fmt::Debug for HandedConnection {
    /// Prints no content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HandedConnection")
            .field("message", &self.message)
            .finish_non_exhaustive()
    }
}

/// Sends a message with its descriptors.
pub fn send(
    channel: &FdChannel,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    channel.send(&serde_json::to_vec(message)?, descriptors)
}

/// Receives a message with its descriptors; `None` at the end.
pub fn receive(channel: &FdChannel) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let Some(received) = channel.receive()? else { return Ok(None) };
    Ok(Some((serde_json::from_slice(&received.bytes)?, received.descriptors)))
}

impl HandedConnection {
    /// Sends the message of the connection, with its sockets. After an error it is not sent.
    pub fn send_message(&self, channel: &FdChannel) -> io::Result<()> {
        self.reset_on_close();
        let sockets: Vec<_> = self.sockets().map(AsFd::as_fd).collect();
        send(channel, &Message::Connection(Box::new(self.message.clone())), &sockets)
    }

    /// Sends the bytes that belong to the connection.
    pub fn send_bytes(&self, channel: &FdChannel) -> io::Result<()> {
        for bytes in [&self.to_upstream, &self.to_client, &self.fields] {
            for part in bytes.chunks(MESSAGE_BYTES_MAX) {
                channel.send(part, &[])?;
            }
        }
        Ok(())
    }

    /// The client's socket, and those to upstreams.
    pub fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.client].into_iter().chain(&self.upstreams)
    }

    /// Closes the sockets by a reset: a stream that is cut off must not look like one that has
    /// ended.
    pub fn reset(self) {
        self.reset_on_close();
    }

    /// Lets the sockets be reset if they are lost on the way to their event loop, which undoes it.
    pub fn reset_on_close(&self) {
        self.sockets().for_each(socket::reset_on_close);
    }

    /// Receives what follows the message of a connection.
    pub fn receive(
        channel: &FdChannel,
        message: ConnectionMessage,
        sockets: Vec<OwnedFd>,
    ) -> io::Result<Self> {
        let mut sockets = sockets.into_iter();
        let (client, upstreams) = (sockets.next(), sockets.collect::<Vec<_>>());
        let client = client
            .filter(|_| upstreams.len() == message.upstreams_len())
            .ok_or_else(|| io::Error::other("a connection came without its sockets"))?;
        let mut connection = Self {
            message,
            client,
            upstreams,
            to_upstream: Vec::new(),
            to_client: Vec::new(),
            fields: Vec::new(),
            slot: None,
            place: None,
            receipt: None,
        };
        match connection.receive_unsent(channel) {
            Ok(()) => Ok(connection),
            Err(error) => {
                connection.reset();
                Err(error)
            }
        }
    }

    fn receive_unsent(&mut self, channel: &FdChannel) -> io::Result<()> {
        let ConnectionMessage { to_upstream, to_client, .. } = &self.message;
        let fields_len = self.message.fields_len();
        self.to_upstream = receive_bytes(channel, to_upstream.unsent_len, UNSENT_BYTES_MAX)?;
        self.to_client = receive_bytes(channel, to_client.unsent_len, UNSENT_BYTES_MAX)?;
        self.fields = receive_bytes(channel, fields_len, FIELDS_BYTES_MAX)?;
        Ok(())
    }
}

fn receive_bytes(channel: &FdChannel, count: usize, count_max: usize) -> io::Result<Vec<u8>> {
    if count > count_max {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    while bytes.len() < count {
        let part = channel.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.extend(part.bytes);
    }
    if bytes.len() == count { Ok(bytes) } else { Err(io::ErrorKind::InvalidData.into()) }
}
