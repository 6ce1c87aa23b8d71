//! The messages of a handover to another process ([`crate::handover`]).

pub mod queue;
mod receipt;

pub use receipt::{Receipt, Receipts};

use crate::host_instant::HostInstant;
use crate::record::connection::{DirectionBytes, Record};
use crate::socket;
use crate::upstreams::closing::{ClosingReason, Closings};
use crate::upstreams::group::Slot;
use crate::upstreams::upstream::{AdminState, Upstream};
use haul_server::admission::placement::Place;
use haul_server::fd_channel::{FdChannel, MESSAGE_BYTES_MAX};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The version of the messages. Processes of different versions refuse each other.
pub const VERSION: u32 = 12;
/// The most bytes of one direction of a connection: the largest pipe that an ordinary user may have
/// (`fs.pipe-max-size`, by default), several times.
const UNSENT_BYTES_MAX: usize = 16 << 20;
/// The most bytes of the additional fields, whose length has 16 bits.
const FIELDS_BYTES_MAX: usize = 1 << 16;

/// A message, as JSON. The descriptors come with the message, and the bytes in the messages after
/// it.
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
    /// To the new process: the state of an upstream that differs from the configured state.
    Upstream(HandedUpstream),
    /// To the new process: the number of clients that are connected to the old one now.
    Clients(usize),
    /// To the new process, which has everything to start.
    Ready,
    /// To the old process: the new process is about to accept connections.
    Started {
        /// The configured addresses at which the new process accepts.
        listeners: Vec<String>,
    },
    /// To the new process, in answer: the connections of an upstream. They count for the limit of
    /// the upstream until they are handed over or end.
    Open(HandedOpen),
    /// To the new process: so many connections of an upstream ended in the old process.
    Ended(HandedOpen),
    /// To the new process, after the connections of the upstreams: the clients of the old process,
    /// which does not accept others now. They count for the limit of clients until they are handed
    /// over or end.
    OpenClients(usize),
    /// To the new process: so many clients of the old process ended.
    EndedClients(usize),
    /// To the new process, after the number of clients: the new process accepts from now on.
    Agreed {
        /// The next connection's number.
        next_id: u64,
    },
    /// To the old process: so many more connections are on the event loops of the new process. The
    /// first message has 0, and shows that the new process runs.
    Adopted(usize),
    /// To the new process: a connection, with the client's socket and, if the connection is
    /// established, the upstream's socket.
    Connection(Box<ConnectionMessage>),
}

/// A number of an upstream's connections.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HandedOpen {
    pub group: String,
    pub upstream: String,
    pub connections: usize,
}

/// The state of an upstream that the configuration does not have.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HandedUpstream {
    pub group: String,
    pub upstream: String,
    pub administration: AdminState,
    /// The weight that the operator set.
    pub weight: Option<u32>,
    pub is_down: bool,
    /// When the established connections of the upstream are to be closed.
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
        let is_usual = administration == AdminState::Enabled
            && weight.is_none()
            && !is_down
            && closings.is_empty();
        let (group, upstream) = (upstream.group().into(), upstream.name().into());
        (!is_usual).then_some(Self { group, upstream, administration, weight, is_down, closings })
    }

    /// Sets the state of an upstream. `is_checked`: a check can find the upstream up again.
    pub fn apply_to(&self, upstream: &Arc<Upstream>, is_checked: bool, closings: &Closings) {
        upstream.set_administration(self.administration);
        upstream.set_weight(self.weight);
        upstream.set_down(self.is_down && is_checked);
        self.apply_closings(upstream, closings, |reason| {
            is_checked || reason == ClosingReason::Operator
        });
    }

    /// Closes the connections of an upstream that the configuration lacks, when an operator wants
    /// that.
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

    /// Whether an operator wants the connections of the upstream to be closed.
    pub fn is_closed_by_operator(&self) -> bool {
        self.closings.iter().any(|closing| closing.reason == ClosingReason::Operator)
    }
}

/// A connection without its sockets and bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ConnectionMessage {
    pub record: Record,
    pub group: String,
    pub upstream: String,
    /// When the connection was accepted, by the monotonic clock.
    pub accepted_at: HostInstant,
    /// The length of the header that the upstream was sent first.
    pub header_bytes: u64,
    pub to_upstream: HandedDirection,
    pub to_client: HandedDirection,
    /// `None` if the connection is established.
    pub waiting: Option<WaitingMessage>,
}

impl ConnectionMessage {
    /// The length of the additional fields.
    fn fields_len(&self) -> usize {
        self.waiting.as_ref().map_or(0, |waiting| waiting.fields_len)
    }

    /// Whether the connection to the upstream is established, and so has a slot of the upstream.
    pub fn is_established(&self) -> bool {
        self.waiting.is_none()
    }

    /// Whether bytes of the connection follow the message.
    pub fn has_bytes(&self) -> bool {
        let unsent = [self.to_upstream.unsent_len, self.to_client.unsent_len, self.fields_len()];
        unsent != [0; 3]
    }
}

/// A client that waits for an upstream, whose route is known.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WaitingMessage {
    /// The address that the client connected to, from the PROXY header of a proxy in front.
    pub destination: Option<SocketAddr>,
    /// The length of the additional fields of that header.
    pub fields_len: usize,
    /// Since when the client waits in the queue of the group. `None` if all upstreams failed, and
    /// are tried again in a moment.
    pub queued_since: Option<HostInstant>,
}

/// One direction of a connection.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HandedDirection {
    /// The bytes that other processes forwarded.
    pub bytes: DirectionBytes,
    /// Bytes that were received and not sent.
    pub unsent_len: usize,
}

/// A connection on its way to another process.
pub struct HandedConnection {
    pub message: ConnectionMessage,
    pub client: OwnedFd,
    /// `None` for a client that waits for an upstream.
    pub upstream: Option<OwnedFd>,
    /// The bytes that were received from the client and not sent to the upstream.
    pub to_upstream: Vec<u8>,
    /// The bytes that were received from the upstream and not sent to the client.
    pub to_client: Vec<u8>,
    /// The additional fields of a client that waits for an upstream.
    pub fields: Vec<u8>,
    /// The connection's slot in this process.
    pub slot: Option<Slot>,
    /// The connection's place in this process.
    pub place: Option<Place>,
    /// Acknowledges the arrival of the connection to the old process.
    pub receipt: Option<Receipt>,
}

impl fmt::Debug for HandedConnection {
    /// Prints the message, never the bytes.
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
    /// Sends the message of the connection with the sockets. After an error the other process has
    /// nothing of the connection.
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

    /// The client's socket, and then the upstream's.
    pub fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.client].into_iter().chain(&self.upstream)
    }

    /// Closes the sockets by a reset, because a stream that is cut off must not look like a stream
    /// that ended.
    pub fn reset(self) {
        self.reset_on_close();
    }

    /// Lets the sockets be reset if they are lost on the way to an event loop. The event loop
    /// undoes this.
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
        let (client, upstream, rest) = (sockets.next(), sockets.next(), sockets.next());
        let client = client
            .filter(|_| upstream.is_some() == message.is_established() && rest.is_none())
            .ok_or_else(|| io::Error::other("a connection came without its sockets"))?;
        let mut connection = Self {
            message,
            client,
            upstream,
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
