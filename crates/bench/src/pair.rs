//! This machine and another, as the two hosts of an experiment.
//!
//! There [`listen`] waits for this; here [`Pair::connect`] begins a conversation of JSON lines over one connection
//! (`pair/protocol.rs`), which starts the other end of every row, says when its window begins, and brings back what that machine's own
//! meter saw. Each machine cuts its window by its own clock, half a round trip apart: costs are made of rates, so that this
//! changes nothing.
//!
//! Bytes go to the port after the conversation's. Rows in which the other machine forwards also need it to reach this one.

mod listen;
mod protocol;

pub use listen::listen;
pub use protocol::{PORT, words_in};

pub(crate) use protocol::{Reply, Request};

use crate::lines::{Line, read_line, write_line};

use crate::host::HostFacts;
use crate::worker::socket::SocketOptions;
use crate::worker::{Message, Task};
use haul_soak::Baseline;
use protocol::{LINE_BYTES_MAX, MeterFacts, SCHEMA};
use serde::{Deserialize, Serialize};
use std::io::{self, BufReader};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long connecting and the first word may take.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// How long any later word may take: longer than a calibration, a start, or a window.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long one whose worker is not wanted any more may go on about it.
const FAREWELL_MAX: Duration = Duration::from_secs(5);
/// How much of what a peer says is shown.
const SHOWN_CHARS: usize = 200;

/// Why there is no pair, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// A name that means nothing.
    #[error("cannot resolve {peer:?}: {source}")]
    Unknown {
        /// As it was given.
        peer: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error("cannot connect to {peer}: {source} (run `haul bench --listen` there)")]
    Unreachable {
        /// The address.
        peer: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// Somebody else answers there.
    #[error("{peer} does not speak {SCHEMA}: {said} (run `haul bench --listen` of haul {} there)", env!("CARGO_PKG_VERSION"))]
    Stranger {
        /// The address.
        peer: SocketAddr,
        /// What it did instead.
        said: String,
    },
    /// It is busy, or does not do what it was asked to.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The address.
        peer: SocketAddr,
        /// Why.
        reason: String,
    },
    /// It is this machine, and its meter would read this one's.
    #[error(
        "{peer} is this machine: two meters on the same CPUs read nothing true (without --to both hosts are in the lab)"
    )]
    Same {
        /// The address.
        peer: SocketAddr,
    },
    /// It was there and is not any more.
    #[error("{peer} was lost: {source}")]
    Lost {
        /// The address.
        peer: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The other machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerFacts {
    /// The address and port at which it listened.
    pub address: String,
    /// The machine.
    pub host: HostFacts,
    /// Congestion controls that may be set there.
    pub congestion: Vec<String>,
}

/// A conversation with another machine that measures with this one. It ends when this is dropped.
#[derive(Debug)]
pub struct Pair {
    address: SocketAddr,
    here: IpAddr,
    mtu: u32,
    facts: PeerFacts,
    writer: Mutex<TcpStream>,
    reader: Mutex<BufReader<TcpStream>>,
    /// Whether a word was lost: what would come next belongs to something else.
    is_lost: AtomicBool,
    /// Windows that were asked for and not yet brought back. A worker may end before its machine's meter has looked.
    windows_open: AtomicUsize,
    /// Since when nobody wants to hear of the worker that is on its way.
    let_go: Mutex<Option<Instant>>,
}

impl Pair {
    /// Greets whoever listens at `peer`: a name or an address, with a port if it is not [`PORT`].
    pub fn connect(peer: &str) -> Result<Self, PairError> {
        let (stream, address) = reach(peer)?;
        let unreachable = |source| PairError::Unreachable { peer: address, source };
        stream.set_nodelay(true).map_err(unreachable)?;
        stream.set_write_timeout(Some(GREETING_MAX)).map_err(unreachable)?;
        stream.set_read_timeout(Some(GREETING_MAX)).map_err(unreachable)?;
        let here = stream.local_addr().map_err(unreachable)?.ip();
        let mut reader = BufReader::new(stream.try_clone().map_err(unreachable)?);
        let stranger = |said: String| PairError::Stranger { peer: address, said };
        write_line(
            &stream,
            &Request::Hello { schema: SCHEMA.into(), haul: env!("CARGO_PKG_VERSION").into() },
        )
        .map_err(unreachable)?;
        let deadline = Some(Instant::now() + GREETING_MAX);
        let answer = read_line(&mut reader, LINE_BYTES_MAX, deadline).map(|line| match line {
            Line::Said(reply) => Line::Said(shown_reply(reply)),
            line => line,
        });
        let facts = match answer {
            Ok(Line::Said(Reply::Hello { schema, meter, .. }))
                if schema == SCHEMA && meter.overlaps(&MeterFacts::here()) =>
            {
                return Err(PairError::Same { peer: address });
            }
            Ok(Line::Said(Reply::Hello { schema, host, congestion, .. })) if schema == SCHEMA => {
                PeerFacts { address: address.to_string(), host, congestion }
            }
            Ok(Line::Said(Reply::Hello { schema, .. })) => {
                return Err(stranger(format!("it speaks {schema}")));
            }
            Ok(Line::Said(Reply::Refused(reason))) => {
                return Err(PairError::Refused { peer: address, reason });
            }
            Ok(Line::Said(_)) => return Err(stranger("it spoke out of turn".into())),
            Ok(Line::Strange(text)) => {
                return Err(stranger(format!("it said {:?}", cut(&text))));
            }
            Ok(Line::End) => return Err(stranger("it hung up".into())),
            Err(error) if is_silence(&error) => {
                return Err(stranger(format!("it said nothing for {} s", GREETING_MAX.as_secs())));
            }
            Err(error) => return Err(stranger(error.to_string())),
        };
        stream.set_read_timeout(Some(SILENCE_MAX)).map_err(unreachable)?;
        let mtu = crate::doctor::mtu_of(here).unwrap_or_default();
        Ok(Self {
            address,
            here,
            mtu,
            facts,
            writer: Mutex::new(stream),
            reader: Mutex::new(reader),
            is_lost: AtomicBool::new(false),
            windows_open: AtomicUsize::new(0),
            let_go: Mutex::new(None),
        })
    }

    /// The other machine.
    pub fn facts(&self) -> &PeerFacts {
        &self.facts
    }

    /// The MTU of the device that leads there, in bytes.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// This machine's address, as the other one reaches it.
    pub(crate) fn here(&self) -> IpAddr {
        self.here
    }

    /// The other machine's address.
    pub(crate) fn there(&self) -> IpAddr {
        self.address.ip()
    }

    /// Has the other machine learn what it looks like when it is quiet, for so long; see [`Self::calibration`].
    pub(crate) fn begin_calibration(&self, length: Duration) -> Result<(), PairError> {
        self.say(&Request::Calibrate { length_ms: length.as_millis() as u64 })
    }

    /// What it looked like.
    pub(crate) fn calibration(&self) -> Result<Baseline, PairError> {
        match self.listen()?.next()? {
            Reply::Baseline(baseline) => Ok(baseline),
            other => Err(self.out_of_turn(&other)),
        }
    }

    /// Starts a worker there; what it says comes to [`Self::listen`], at last [`Reply::Ended`].
    pub(crate) fn start(
        &self,
        task: &Task,
        socket: &SocketOptions,
        peer: Option<SocketAddr>,
    ) -> Result<(), PairError> {
        self.say(&Request::Start { task: Box::new(task.clone()), socket: socket.clone(), peer })
    }

    /// Has the worker end at once, if it has not.
    pub(crate) fn stop(&self) {
        *self.let_go() = Some(Instant::now());
        // Where it is lost its worker ends by itself.
        let _ = self.say(&Request::Stop);
    }

    fn let_go(&self) -> MutexGuard<'_, Option<Instant>> {
        self.let_go.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn say(&self, request: &Request) -> Result<(), PairError> {
        if self.is_lost.load(Relaxed) {
            return Err(self.lost(io::ErrorKind::NotConnected.into()));
        }
        if let Request::Window { .. } = request {
            self.windows_open.fetch_add(1, Relaxed);
        }
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        write_line(&*writer, request).map_err(|source| self.lost(source))
    }

    /// Listens to it alone until this is dropped, from the next word on that belongs to nothing earlier.
    pub(crate) fn listen(&self) -> Result<Listening<'_>, PairError> {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        *self.let_go() = None;
        let mut listening = Listening { pair: self, reader };
        while listening.is_to_come() {
            listening.next()?;
        }
        Ok(listening)
    }

    pub(crate) fn out_of_turn(&self, reply: &Reply) -> PairError {
        self.lost(io::Error::other(format!("it spoke out of turn: {}", cut(&format!("{reply:?}")))))
    }

    fn lost(&self, source: io::Error) -> PairError {
        self.is_lost.store(true, Relaxed);
        PairError::Lost { peer: self.address, source }
    }
}

/// The ear of a conversation.
pub(crate) struct Listening<'a> {
    pair: &'a Pair,
    reader: MutexGuard<'a, BufReader<TcpStream>>,
}

impl Listening<'_> {
    /// Whether a measurement is still to come.
    pub(crate) fn is_to_come(&self) -> bool {
        self.pair.windows_open.load(Relaxed) > 0
    }

    /// What it says next.
    pub(crate) fn next(&mut self) -> Result<Reply, PairError> {
        let lost = |source: io::Error| {
            let silence = format!("it said nothing for {} s", SILENCE_MAX.as_secs());
            self.pair.lost(if is_silence(&source) { io::Error::other(silence) } else { source })
        };
        if self.pair.let_go().is_some_and(|since| since.elapsed() > FAREWELL_MAX) {
            return Err(lost(io::Error::other("it goes on about a worker that was to end")));
        }
        let deadline = Some(Instant::now() + SILENCE_MAX);
        match read_line(&mut *self.reader, LINE_BYTES_MAX, deadline).map_err(lost)? {
            Line::Said(reply @ Reply::Measured(_)) => {
                let asked_for = self
                    .pair
                    .windows_open
                    .fetch_update(Relaxed, Relaxed, |open| open.checked_sub(1));
                if asked_for.is_ok() { Ok(reply) } else { Err(self.pair.out_of_turn(&reply)) }
            }
            Line::Said(reply) => Ok(shown_reply(reply)),
            Line::Strange(text) => Err(lost(io::Error::other(format!("it said {:?}", cut(&text))))),
            Line::End => Err(lost(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl PairError {
    /// Whether the fault lies in what was asked for.
    pub(crate) fn is_bad_input(&self) -> bool {
        !matches!(self, Self::Lost { .. })
    }
}

fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The beginning of what a peer said.
fn cut(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}

/// What a peer said, as it may be shown on a terminal.
fn shown(text: &str) -> String {
    cut(text)
        .chars()
        .map(|character| if character.is_control() { '?' } else { character })
        .collect()
}

fn shown_reply(reply: Reply) -> Reply {
    match reply {
        Reply::Refused(reason) => Reply::Refused(shown(&reason)),
        Reply::Said(Message::Refused(reason)) => Reply::Said(Message::Refused(shown(&reason))),
        Reply::Said(Message::Failed(reason)) => Reply::Said(Message::Failed(shown(&reason))),
        Reply::Hello { schema, host, congestion, meter } => Reply::Hello {
            schema: shown(&schema),
            host: HostFacts { kernel: shown(&host.kernel), cpu: shown(&host.cpu), ..host },
            congestion: congestion.iter().map(|name| shown(name)).collect(),
            meter,
        },
        reply => reply,
    }
}

/// Connects to the first address of a peer that answers.
fn reach(peer: &str) -> Result<(TcpStream, SocketAddr), PairError> {
    let mut failure = None;
    for address in resolve(peer)? {
        match TcpStream::connect_timeout(&address, GREETING_MAX) {
            Ok(stream) => return Ok((stream, address)),
            Err(source) => failure = Some(PairError::Unreachable { peer: address, source }),
        }
    }
    let nothing =
        || PairError::Unknown { peer: peer.into(), source: io::ErrorKind::NotFound.into() };
    Err(failure.unwrap_or_else(nothing))
}

/// A name, an address, or either with a port. An IPv6 address with a port stands in brackets.
fn resolve(peer: &str) -> Result<Vec<SocketAddr>, PairError> {
    let unknown = |source| PairError::Unknown { peer: peer.into(), source };
    let host = peer.trim_start_matches('[').trim_end_matches(']');
    let is_whole = host.parse::<IpAddr>().is_ok() || !peer.contains(':');
    let found = if is_whole { (host, PORT).to_socket_addrs() } else { peer.to_socket_addrs() };
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
    fn what_a_peer_says_can_be_shown() {
        let Reply::Refused(reason) = shown_reply(Reply::Refused("\x1b]0;title\x07 no\r\n".into()))
        else {
            panic!("a refusal stays one");
        };
        assert_eq!(reason, "?]0;title? no??");
        assert_eq!(shown(&"x".repeat(1000)).len(), SHOWN_CHARS);
    }

    #[test]
    fn meters_on_one_cpu_read_each_other() {
        let meter = |boot_id: &str, cpus: &[usize]| MeterFacts {
            boot_id: boot_id.into(),
            cpus: cpus.into(),
        };
        assert!(meter("a", &[0, 1]).overlaps(&meter("a", &[1])));
        assert!(!meter("a", &[0]).overlaps(&meter("a", &[1])), "two hosts of a lab");
        assert!(!meter("a", &[0]).overlaps(&meter("b", &[0])), "two machines");
    }
}
