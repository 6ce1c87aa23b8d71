//! Two machines as the hosts of an experiment: this one and another.
//!
//! The other machine runs [`crate::listen`]. [`Pair::connect`] opens a control connection to it,
//! which carries JSON lines (`pair/protocol.rs`). It starts the remote part of every row, announces
//! its window, and returns the readings of the other machine's own meter.
//!
//! Each machine measures the window by its own clock, and the windows are half a round trip apart.
//! Costs are computed from rates, so this does not have an effect.
//!
//! Data goes to the port after the port of the control connection. Rows in which the other machine
//! forwards also need a route from that machine to this machine.

pub(crate) mod protocol;

pub use protocol::{PORT, words_in};

pub(crate) use protocol::{Reply, Request};

use crate::host::HostFacts;
use haul_lab_sys::interface;
use haul_soak::Baseline;
use haul_workers::lines::{Line, read_line, write_line};
use haul_workers::worker::socket::SocketOptions;
use haul_workers::worker::{Message, Task};
use protocol::{LINE_BYTES_MAX, MeterFacts, SCHEMA};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::{self, BufReader};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Timeout of connecting and of the first reply.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a later reply: longer than a calibration, the start of a worker, or a window.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which messages of a cancelled worker are accepted.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a peer's text in a message.
const PRINTED_CHARS_MAX: usize = 200;

/// The pair could not be connected, or was lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// The peer's name could not be resolved.
    #[error("cannot resolve {peer:?}: {error}")]
    Unknown {
        /// The peer, as it was given.
        peer: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// Connecting failed.
    #[error("cannot connect to {peer}: {error} (run `haul bench --listen` there)")]
    Unreachable {
        /// The peer's address.
        peer: SocketAddr,
        /// The kernel's error.
        error: io::Error,
    },
    /// Another program answers at that address.
    #[error(
        "{peer} does not speak {SCHEMA}: {problem} (run `haul bench --listen` of haul {} there)",
        env!("CARGO_PKG_VERSION")
    )]
    Protocol {
        /// The peer's address.
        peer: SocketAddr,
        /// The answer that was not expected.
        problem: String,
    },
    /// The peer is busy, or refuses the request.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The peer's address.
        peer: SocketAddr,
        /// The reason that the peer gave.
        reason: String,
    },
    /// The peer is this machine, and its meter would measure this one's.
    #[error(
        "{peer} is this machine: two meters on the same CPUs measure each other (without --to, \
         both hosts are in the lab)"
    )]
    SameMachine {
        /// The peer's address.
        peer: SocketAddr,
    },
    /// The connection to the peer was lost.
    #[error("{peer} was lost: {error}")]
    Lost {
        /// The peer's address.
        peer: SocketAddr,
        /// The cause.
        error: io::Error,
    },
}

/// Facts about the other machine.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct PeerFacts {
    /// The address and port on which it listens.
    pub address: String,
    /// The machine.
    pub host: HostFacts,
    /// Congestion controls that may be set on it.
    pub congestion: Vec<String>,
}

/// A control connection to another machine that measures together with this one. Dropping it ends
/// the session.
#[derive(Debug)]
pub struct Pair {
    address: SocketAddr,
    local_address: IpAddr,
    mtu: u32,
    facts: PeerFacts,
    writer: Mutex<TcpStream>,
    reader: Mutex<BufReader<TcpStream>>,
    /// Set by the first error. Replies that follow it could belong to another request.
    is_lost: AtomicBool,
    /// Windows requested whose measurement has not yet arrived. A worker may end before its
    /// machine's meter has measured the window.
    pending_windows: AtomicUsize,
    /// The time at which the current worker was cancelled; `None` if it was not.
    cancelled_at: Mutex<Option<Instant>>,
}

impl Pair {
    /// Connects to a machine that listens at `peer`: a name or an address, with a port unless it is
    /// [`PORT`].
    pub fn connect(peer: &str) -> Result<Self, PairError> {
        let (stream, address) = connect_any(peer)?;
        let unreachable = |error| PairError::Unreachable { peer: address, error };
        stream.set_nodelay(true).map_err(unreachable)?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(unreachable)?;
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(unreachable)?;
        let local_address = stream.local_addr().map_err(unreachable)?.ip();
        let mut reader = BufReader::new(stream.try_clone().map_err(unreachable)?);
        let protocol_error = |problem: String| PairError::Protocol { peer: address, problem };
        write_line(
            &stream,
            &Request::Hello { schema: SCHEMA.into(), haul: env!("CARGO_PKG_VERSION").into() },
        )
        .map_err(unreachable)?;
        let deadline = Some(Instant::now() + HANDSHAKE_TIMEOUT);
        let answer = read_line(&mut reader, LINE_BYTES_MAX, deadline).map(|line| match line {
            Line::Value(reply) => Line::Value(printable_reply(reply)),
            line => line,
        });
        let facts = match answer {
            Ok(Line::Value(Reply::Hello { schema, meter, .. }))
                if schema == SCHEMA && meter.shares_cpu_with(&MeterFacts::local()) =>
            {
                return Err(PairError::SameMachine { peer: address });
            }
            Ok(Line::Value(Reply::Hello { schema, host, congestion, .. })) if schema == SCHEMA => {
                PeerFacts { address: address.to_string(), host, congestion }
            }
            Ok(Line::Value(Reply::Hello { schema, .. })) => {
                return Err(protocol_error(format!("it speaks {schema}")));
            }
            Ok(Line::Value(Reply::Refused(reason))) => {
                return Err(PairError::Refused { peer: address, reason });
            }
            Ok(Line::Value(_)) => return Err(protocol_error("it sent an unexpected reply".into())),
            Ok(Line::Invalid(text)) => {
                return Err(protocol_error(format!("it said {:?}", truncate(&text))));
            }
            Ok(Line::End) => return Err(protocol_error("it closed the connection".into())),
            Err(error) if is_timeout(&error) => {
                return Err(protocol_error(format!(
                    "it said nothing for {} s",
                    HANDSHAKE_TIMEOUT.as_secs()
                )));
            }
            Err(error) => return Err(protocol_error(error.to_string())),
        };
        stream.set_read_timeout(Some(REPLY_TIMEOUT)).map_err(unreachable)?;
        let device = interface::device_of(local_address);
        let mtu = device.and_then(|device| interface::mtu(&device)).unwrap_or_default();
        Ok(Self {
            address,
            local_address,
            mtu,
            facts,
            writer: Mutex::new(stream),
            reader: Mutex::new(reader),
            is_lost: AtomicBool::new(false),
            pending_windows: AtomicUsize::new(0),
            cancelled_at: Mutex::new(None),
        })
    }

    /// Facts about the other machine.
    pub fn facts(&self) -> &PeerFacts {
        &self.facts
    }

    /// The MTU of the device that leads to the other machine, in bytes.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// This machine's address, at which the other one reaches it.
    pub(crate) fn local_address(&self) -> IpAddr {
        self.local_address
    }

    /// The other machine's address.
    pub(crate) fn remote_address(&self) -> IpAddr {
        self.address.ip()
    }

    /// Starts a calibration of the other machine, of this length; [`Self::calibration`] returns its
    /// result.
    pub(crate) fn begin_calibration(&self, length: Duration) -> Result<(), PairError> {
        self.send(&Request::Calibrate { length_ms: length.as_millis() as u64 })
    }

    /// Waits for the result of the calibration.
    pub(crate) fn calibration(&self) -> Result<Baseline, PairError> {
        match self.replies()?.next()? {
            Reply::Baseline(baseline) => Ok(baseline),
            other => Err(self.unexpected_reply(&other)),
        }
    }

    /// Starts a worker on the other machine. Its messages arrive at [`Self::replies`], the last of
    /// them as [`Reply::Ended`].
    pub(crate) fn start(
        &self,
        task: &Task,
        socket: &SocketOptions,
        peer: Option<SocketAddr>,
    ) -> Result<(), PairError> {
        self.send(&Request::Start { task: Box::new(task.clone()), socket: socket.clone(), peer })
    }

    /// Stops the worker at once, if one is running.
    pub(crate) fn stop(&self) {
        *self.lock_cancelled_at() = Some(Instant::now());
        // If the connection is lost, the worker ends by itself.
        let _ = self.send(&Request::Stop);
    }

    fn lock_cancelled_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.cancelled_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn send(&self, request: &Request) -> Result<(), PairError> {
        if self.is_lost.load(Relaxed) {
            return Err(self.lost(io::ErrorKind::NotConnected.into()));
        }
        if let Request::Window { .. } = request {
            self.pending_windows.fetch_add(1, Relaxed);
        }
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        write_line(&*writer, request).map_err(|error| self.lost(error))
    }

    /// Locks the replies for the caller until the reader is dropped. Measurements of earlier
    /// windows that are still pending are read and dropped first.
    pub(crate) fn replies(&self) -> Result<ReplyReader<'_>, PairError> {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        *self.lock_cancelled_at() = None;
        let mut replies = ReplyReader { pair: self, reader };
        while replies.awaits_window_result() {
            replies.next()?;
        }
        Ok(replies)
    }

    pub(crate) fn unexpected_reply(&self, reply: &Reply) -> PairError {
        let text = format!("{reply:?}");
        self.lost(io::Error::other(format!("it sent an unexpected reply: {}", truncate(&text))))
    }

    fn lost(&self, error: io::Error) -> PairError {
        self.is_lost.store(true, Relaxed);
        PairError::Lost { peer: self.address, error }
    }
}

/// Exclusive access to the other machine's replies on the control connection: other callers wait.
pub(crate) struct ReplyReader<'a> {
    pair: &'a Pair,
    reader: MutexGuard<'a, BufReader<TcpStream>>,
}

impl ReplyReader<'_> {
    /// Whether the result of a measurement window has not arrived yet.
    pub(crate) fn awaits_window_result(&self) -> bool {
        self.pair.pending_windows.load(Relaxed) > 0
    }

    /// Waits for the next reply.
    pub(crate) fn next(&mut self) -> Result<Reply, PairError> {
        let lost = |error: io::Error| {
            let timeout = format!("it sent nothing for {} s", REPLY_TIMEOUT.as_secs());
            self.pair.lost(if is_timeout(&error) { io::Error::other(timeout) } else { error })
        };
        if self.pair.lock_cancelled_at().is_some_and(|since| since.elapsed() > CANCEL_TIMEOUT) {
            return Err(lost(io::Error::other("it still sends messages of a cancelled worker")));
        }
        let deadline = Some(Instant::now() + REPLY_TIMEOUT);
        match read_line(&mut *self.reader, LINE_BYTES_MAX, deadline).map_err(lost)? {
            Line::Value(reply @ Reply::Measured(_)) => {
                let was_pending =
                    self.pair
                        .pending_windows
                        .fetch_update(Relaxed, Relaxed, |pending| pending.checked_sub(1));
                if was_pending.is_ok() {
                    Ok(reply)
                } else {
                    Err(self.pair.unexpected_reply(&reply))
                }
            }
            Line::Value(reply) => Ok(printable_reply(reply)),
            Line::Invalid(text) => {
                Err(lost(io::Error::other(format!("it sent {:?}", truncate(&text)))))
            }
            Line::End => Err(lost(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl PairError {
    /// Whether the request, and not its execution, is at fault.
    pub(crate) fn is_bad_input(&self) -> bool {
        !matches!(self, Self::Lost { .. })
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The first characters of a peer's text.
fn truncate(text: &str) -> String {
    text.chars().take(PRINTED_CHARS_MAX).collect()
}

/// A peer's text, truncated and without control characters, so that a terminal may show it.
fn printable(text: &str) -> String {
    truncate(text)
        .chars()
        .map(|character| if character.is_control() { '?' } else { character })
        .collect()
}

fn printable_reply(reply: Reply) -> Reply {
    match reply {
        Reply::Refused(reason) => Reply::Refused(printable(&reason)),
        Reply::WorkerMessage(Message::Refused(reason)) => {
            Reply::WorkerMessage(Message::Refused(printable(&reason)))
        }
        Reply::WorkerMessage(Message::Failed(reason)) => {
            Reply::WorkerMessage(Message::Failed(printable(&reason)))
        }
        Reply::Hello { schema, host, congestion, meter } => Reply::Hello {
            schema: printable(&schema),
            host: HostFacts {
                name: printable(&host.name),
                kernel: printable(&host.kernel),
                cpu: printable(&host.cpu),
                mitigations: host
                    .mitigations
                    .map(|names| names.iter().map(|name| printable(name)).collect()),
                ..host
            },
            congestion: congestion.iter().map(|name| printable(name)).collect(),
            meter,
        },
        reply => reply,
    }
}

/// Connects to the first of a peer's addresses that accepts.
fn connect_any(peer: &str) -> Result<(TcpStream, SocketAddr), PairError> {
    let mut failure = None;
    for address in resolve(peer)? {
        match TcpStream::connect_timeout(&address, HANDSHAKE_TIMEOUT) {
            Ok(stream) => return Ok((stream, address)),
            Err(error) => failure = Some(PairError::Unreachable { peer: address, error }),
        }
    }
    let no_address =
        || PairError::Unknown { peer: peer.into(), error: io::ErrorKind::NotFound.into() };
    Err(failure.unwrap_or_else(no_address))
}

/// Resolves a name or an address, either of which may have a port. An IPv6 address with a port
/// stands in brackets.
fn resolve(peer: &str) -> Result<Vec<SocketAddr>, PairError> {
    let unknown = |error| PairError::Unknown { peer: peer.into(), error };
    let host = peer.trim_start_matches('[').trim_end_matches(']');
    let is_bare_host = host.parse::<IpAddr>().is_ok() || !peer.contains(':');
    let found = if is_bare_host { (host, PORT).to_socket_addrs() } else { peer.to_socket_addrs() };
    Ok(found.map_err(unknown)?.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_an_address_with_or_without_a_port() {
        for (text, address) in [
            ("127.0.0.1", "127.0.0.1:4285"),
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("::1", "[::1]:4285"),
            ("[::1]", "[::1]:4285"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(resolve(text).unwrap(), [address.parse::<SocketAddr>().unwrap()], "{text}");
        }
        assert!(resolve("127.0.0.1:none").is_err());
    }

    #[test]
    fn text_of_a_peer_is_printable_and_short() {
        let refused = Reply::Refused("\x1b]0;title\x07 no\r\n".into());
        let Reply::Refused(reason) = printable_reply(refused) else {
            panic!("a refusal stays one");
        };
        assert_eq!(reason, "?]0;title? no??");
        assert_eq!(printable(&"x".repeat(1000)).len(), PRINTED_CHARS_MAX);
    }

    #[test]
    fn meters_that_share_a_cpu_overlap() {
        let meter = |boot_id: &str, cpus: &[usize]| MeterFacts {
            boot_id: boot_id.into(),
            cpus: cpus.into(),
        };
        assert!(meter("a", &[0, 1]).shares_cpu_with(&meter("a", &[1])));
        assert!(!meter("a", &[0]).shares_cpu_with(&meter("a", &[1])), "two hosts of a lab");
        assert!(!meter("a", &[0]).shares_cpu_with(&meter("b", &[0])), "two machines");
    }
}
