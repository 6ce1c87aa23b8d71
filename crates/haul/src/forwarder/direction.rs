//! One direction of a forwarder.

use super::pool::{ForwardMethod, ForwardPool, HeldPipePermit};
use super::{DirectionReport, Readiness};
use crate::call::Call;
use crate::error::{Error, Refusal, failed};
use crate::fallback::{self, Fallback};
use crate::pipe::Pipe;
use crate::socket;
use haul_sys::sockopt::{self, SendBuffer};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::pipe::SpliceFlags;
use std::fmt;
use std::os::fd::BorrowedFd;

/// Consecutive full buffers after which splicing begins: a bulk transfer, and not one large
/// message.
const FULL_BUFFERS_BEFORE_SPLICING: u32 = 2;
/// A pipe that is filled with fewer bytes than this was not worth two calls.
const SMALL_FILL_BYTES: usize = 4 << 10;
/// Consecutive small fills after which copying begins again.
const SMALL_FILLS_BEFORE_COPYING: u32 = 4;
/// Small fills of full packets that count as one. A sender with more to send fills its packets:
/// they are not messages, but a bulk transfer that begins again after a loss, by one, two, four
/// packets in a round trip (docs/measurements/proxies.md).
const FULL_PACKET_FILLS_AS_ONE: u32 = 4;
/// Bytes that a direction has spliced before it fills its pipe beyond the room of the sink. A peer
/// that does not read from the beginning takes no pipe from those that do, but where the kernel has
/// said that there is more room than there is.
const BYTES_BEFORE_HOLDING: u64 = 1 << 20;
/// The most bytes that are spliced at a time for a sink without a held pipe, once the room of send
/// buffers was wrong. What a sink refuses is kept in memory, so a client that does not read costs
/// about as much memory as a buffer of HAProxy (16 KiB).
const REFUSED_FILL_BYTES: usize = 16 << 10;
/// What a packet takes of a send buffer in addition to its payload, in bytes: `sk_buff`,
/// `skb_shared_info` and room for headers. Measured on Linux 6.18, where 107 of 171 KiB of room
/// accepted payload in packets of 1,152 bytes.
const PACKET_OVERHEAD_BYTES: usize = 704;
/// A message of up to this many bytes may wait for others, to be sent together.
const SMALL_MESSAGE_BYTES: usize = 4 << 10;
/// Bytes that one direction moves before the other, and other connections, get their turn.
const TURN_BYTES: usize = 1 << 20;

/// Never blocks, and moves pages instead of copying them.
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);

/// One direction: its current method, and the bytes that it holds in transit.
#[derive(Debug)]
pub(super) struct Direction {
    method: ActiveMethod,
    /// Whether the method is fixed: it was requested, or the other is refused.
    is_method_fixed: bool,
    /// Holds bytes, or is filled next.
    pipe: Option<Pipe>,
    /// The sink's buffer when its room decided how many bytes the pipe was filled with.
    fitted_to: Option<SendBuffer>,
    /// Whether the sink refused bytes for which its buffer had room. The reason is
    /// `TCP_NOTSENT_LOWAT`, or that small packets take more of the buffer than their payload.
    sink_has_refused: bool,
    /// The permit of a pipe to hold bytes between turns.
    held_pipe: Option<HeldPipePermit>,
    /// Copied bytes that the sink has not accepted yet.
    unsent: HiddenBytes,
    source: SourceState,
    /// What [`Direction::prepare`] has found, as long as nothing else can have arrived. Bytes that
    /// it has received and not sent are in `unsent`.
    prepared: Option<Result<Received, Error>>,
    /// Consecutive sizes that favor the other method, by weight.
    streak: u32,
    stage: Stage,
    /// What the latest turn ended with.
    waits_for: Interest,
    report: DirectionReport,
}

/// Bytes of a connection, which logs must not show.
#[derive(Default)]
struct HiddenBytes(Vec<u8>);

impl fmt::Debug for HiddenBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.0.len())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ActiveMethod {
    Copy,
    Splice,
}

/// How far a direction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    /// All bytes were received.
    SourceEnded,
    /// The end of the stream was forwarded, after all bytes.
    SinkShut,
    /// Nothing is forwarded in this direction, and its sink stays open.
    Unused,
}

/// The events that a direction waits for; none when it is done.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interest {
    /// The source must become readable.
    pub read: bool,
    /// The sink must become writable.
    pub write: bool,
    /// No event: the turn is over, and there may be more to do.
    pub has_more: bool,
}

/// What is known of the source.
#[derive(Debug, Clone, Copy)]
struct SourceState {
    /// Whether a short read means that it is empty.
    trusts_short_reads: bool,
    /// Whether the end of the stream has arrived, behind what is to be received.
    end_has_arrived: bool,
}

/// What one receive call has found.
#[derive(Debug, Clone, Copy)]
struct Received {
    /// 0 at the end of the stream.
    bytes: usize,
    /// Whether the call has emptied the socket.
    is_all: bool,
}

impl Interest {
    pub fn is_done(self) -> bool {
        self == Self::default()
    }
}

impl Direction {
    /// Creates a direction. `trusts_short_reads`: a short read means that the source is empty.
    pub fn new(method: ForwardMethod, trusts_short_reads: bool) -> Self {
        Self {
            source: SourceState { trusts_short_reads, end_has_arrived: false },
            prepared: None,
            method: if method == ForwardMethod::Splice {
                ActiveMethod::Splice
            } else {
                ActiveMethod::Copy
            },
            is_method_fixed: method != ForwardMethod::Adaptive,
            pipe: None,
            fitted_to: None,
            sink_has_refused: false,
            held_pipe: None,
            unsent: HiddenBytes::default(),
            streak: 0,
            stage: Stage::Open,
            waits_for: Interest { read: true, ..Interest::default() },
            report: DirectionReport::default(),
        }
    }

    /// A direction in which nothing is forwarded, and whose sink stays open.
    pub fn unused() -> Self {
        let waits_for = Interest::default();
        Self { stage: Stage::Unused, waits_for, ..Self::new(ForwardMethod::Copy, false) }
    }

    /// Puts bytes before the first received bytes, and after the bytes of earlier calls.
    pub fn push_first(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.stage == Stage::Unused && !bytes.is_empty() {
            return Err(Error::InvalidInput("a one-way forwarder sends nothing to its source"));
        }
        if self.report.copied.bytes + self.report.spliced.bytes > 0 || self.stage != Stage::Open {
            return Err(Error::InvalidInput(
                "first bytes are for a new forwarder: this one has moved bytes already",
            ));
        }
        self.unsent.0.extend_from_slice(bytes);
        // They are sent before the source is readable.
        self.waits_for.has_more |= !bytes.is_empty();
        Ok(())
    }

    /// Takes the bytes in transit out of the pipe, if they are in it.
    pub fn collect(&mut self) -> Result<(), Error> {
        let Some(pipe) = &mut self.pipe else { return Ok(()) };
        if pipe.is_inherited() {
            return Err(Error::Forked);
        }
        while pipe.held_bytes() > 0 {
            let filled = self.unsent.0.len();
            self.unsent.0.resize(filled + pipe.held_bytes(), 0);
            let read = pipe.read(&mut self.unsent.0[filled..]);
            self.unsent.0.truncate(filled + read.unwrap_or(0));
            read.map_err(|errno| failed(Call::ReadPipe)(errno.into()))?;
        }
        Ok(())
    }

    /// The bytes that [`Direction::collect`] has collected.
    pub fn into_collected(self) -> Vec<u8> {
        self.unsent.0
    }

    /// Forgets that the source was empty: its bytes are kept, and so are its end and its failure.
    fn forget_prepared(&mut self) {
        self.prepared.take_if(|prepared| {
            matches!(prepared, Ok(Received { bytes: 1.., .. }) | Err(Error::WouldBlock))
        });
    }

    /// Whether the next turn returns a failure that [`Direction::prepare`] was told.
    pub fn has_prepared_failure(&self) -> bool {
        self.prepared.as_ref().is_some_and(is_failure)
    }

    /// Sets whether the end of the stream has arrived, behind what is to be received.
    pub fn set_end_has_arrived(&mut self, end_has_arrived: bool) {
        self.source.end_has_arrived = end_has_arrived;
    }

    /// Whether the stream that is received has ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::SourceEnded | Stage::SinkShut)
    }

    /// Whether a turn can move anything, with this readiness of the source and the sink.
    pub fn is_ready(&self, source: Readiness, sink: Readiness) -> bool {
        let Interest { read, write, has_more } = self.waits_for;
        has_more || read && source.read || write && sink.write || self.prepared.is_some()
    }

    /// Receives a small message that has arrived, which the next turn sends; true if it has one.
    /// Larger ones are sent at once.
    pub fn prepare(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
        source: Readiness,
    ) -> bool {
        if source.read {
            // More may have arrived since then.
            self.forget_prepared();
        }
        let waits = (self.waits_for.read || self.waits_for.has_more) && source.read;
        let is_free = self.unsent.0.is_empty() && self.pipe.is_none() && self.prepared.is_none();
        if waits && is_free && self.method == ActiveMethod::Copy && self.stage == Stage::Open {
            let copied = self.copy(from, to, pool, SMALL_MESSAGE_BYTES);
            let is_small = |one: &Received| (1..=SMALL_MESSAGE_BYTES).contains(&one.bytes);
            let is_held = copied.as_ref().is_ok_and(is_small);
            self.prepared = Some(copied);
            return is_held;
        }
        false
    }

    /// What the latest turn ended with.
    pub fn waits_for(&self) -> Interest {
        self.waits_for
    }

    pub fn direction_report(&self) -> &DirectionReport {
        &self.report
    }

    /// Moves the data that can be moved now.
    ///
    /// `has_failed`: the opposite direction has just failed. The kernel reports the reason of a
    /// lost connection only once, and then the end of the stream, which is none.
    pub fn advance(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
        has_failed: bool,
    ) -> Result<Interest, Error> {
        if self.pipe.as_ref().is_some_and(Pipe::is_inherited) {
            return Err(Error::Forked);
        }
        if let Some(Err(error)) = self.prepared.take_if(|prepared| is_failure(prepared)) {
            return Err(error);
        }
        if has_failed {
            // More may have arrived since then, which is received now or never.
            self.forget_prepared();
        }
        let mut moved = 0;
        let interest = loop {
            if !self.deliver(to, pool)? {
                self.forget_prepared();
                break Interest { write: true, ..Interest::default() };
            }
            if self.stage != Stage::Open {
                self.shut_down_sink(to)?;
                break Interest::default();
            }
            if moved >= TURN_BYTES {
                break Interest { has_more: true, ..Interest::default() };
            }
            // What the failed side has sent is received, whatever the room: it is lost otherwise.
            let room = if has_failed { Some(usize::MAX) } else { self.room(to, pool) };
            let received = match (self.prepared.take(), room) {
                (Some(received), _) => received,
                (None, Some(room)) => self.receive(from, to, room, pool),
                (None, None) => match peek(from) {
                    Ok(0) => Ok(Received { bytes: 0, is_all: false }),
                    Ok(_) => break Interest { write: true, ..Interest::default() },
                    Err(error) => Err(error),
                },
            };
            match received {
                Ok(Received { bytes: 0, .. }) if has_failed => break Interest::default(),
                Ok(Received { bytes: 0, .. }) => self.stage = Stage::SourceEnded,
                // Nothing more has arrived: a call to find that out is one too many.
                Ok(Received { is_all: true, .. })
                    if self.source.trusts_short_reads
                        && self.unsent.0.is_empty()
                        && !self.source.end_has_arrived =>
                {
                    break Interest { read: true, ..Interest::default() };
                }
                Ok(Received { bytes, .. }) => moved += bytes,
                Err(Error::WouldBlock) => break Interest { read: true, ..Interest::default() },
                Err(error) => return Err(error),
            }
        };
        self.give_back_pipe(pool)?;
        self.waits_for = interest;
        Ok(interest)
    }

    /// Gives the pipe back, unless it holds bytes and may do so between turns.
    fn give_back_pipe(&mut self, pool: &ForwardPool) -> Result<(), Error> {
        if self.pipe.as_ref().is_some_and(|pipe| pipe.held_bytes() > 0) {
            self.held_pipe = self.held_pipe.take().or_else(|| pool.acquire_held_pipe());
            if self.held_pipe.is_some() {
                return Ok(());
            }
            self.collect()?;
        }
        self.held_pipe = None;
        if let Some(pipe) = self.pipe.take() {
            pool.release_pipe(pipe);
        }
        Ok(())
    }

    /// The bytes to splice at most: a pipe, as long as it may hold them between turns. When as many
    /// pipes hold bytes as may, what the sink has room for: a peer that stops reading would leave
    /// the rest. `None` if the sink does not have room; the kernel then reports when it is
    /// writable.
    ///
    /// A sink with less room than a pipe is polled: a large buffer counts as writable only when a
    /// third of it is free, so that the last of its room is not filled by small pieces.
    fn room(&mut self, to: BorrowedFd<'_>, pool: &ForwardPool) -> Option<usize> {
        let pipe_bytes = pool.settings().pipe_bytes;
        self.fitted_to = None;
        if self.method == ActiveMethod::Copy {
            return Some(pipe_bytes);
        }
        if self.report.spliced.bytes >= BYTES_BEFORE_HOLDING {
            self.held_pipe = self.held_pipe.take().or_else(|| pool.acquire_held_pipe());
            if self.held_pipe.is_some() {
                return Some(pipe_bytes);
            }
        }
        // Linux before 4.12 does not report the room in the send buffer (`SO_MEMINFO`). The pipe is
        // then filled as if the send buffer had room for the whole pipe.
        self.fitted_to = sockopt::send_buffer(to).ok();
        let room = self.fitted_to.map_or(usize::MAX, |buffer| payload_room(buffer, to));
        let is_refused = self.sink_has_refused || pool.is_short_of_memory();
        if room >= pipe_bytes && !is_refused {
            return Some(pipe_bytes);
        }
        let most = if is_refused { REFUSED_FILL_BYTES } else { pipe_bytes };
        // A writable sink accepts at least one packet.
        may_be_writable(to).then_some(room.max(SMALL_FILL_BYTES).min(most).min(pipe_bytes))
    }

    /// Sends the bytes that are held; false if the sink accepts no more.
    fn deliver(&mut self, to: BorrowedFd<'_>, pool: &ForwardPool) -> Result<bool, Error> {
        let is_all = matches!(self.prepared, Some(Ok(Received { is_all: true, .. })));
        let more = self.more(is_all);
        while !self.unsent.0.is_empty() {
            self.report.copied.calls += 1;
            match send(to, &self.unsent.0, more) {
                Ok(count) => {
                    self.unsent.0.drain(..count);
                    self.report.copied.bytes += count as u64;
                }
                Err(Error::WouldBlock) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // Frees the memory: an idle direction holds none.
        self.unsent = HiddenBytes::default();
        while let Some(pipe) = self.pipe.as_mut().filter(|pipe| pipe.held_bytes() > 0) {
            self.report.spliced.calls += 1;
            match pipe.drain(to, None, usize::MAX, FLAGS) {
                Ok(count) => self.report.spliced.bytes += count as u64,
                Err(Errno::AGAIN) => {
                    let left = pipe.held_bytes();
                    self.note_refusal(left, to, pool);
                    return Ok(false);
                }
                Err(errno) => return Err(failed(Call::SpliceIntoSocket)(errno.into())),
            }
        }
        Ok(true)
    }

    /// Notes that the sink refused the last `left` bytes of a fill, which its buffer had room for.
    ///
    /// The kernel makes a buffer smaller when TCP has used up the memory that the host allows
    /// (`tcp_mem`). Then other sinks refuse bytes too.
    fn note_refusal(&mut self, left: usize, to: BorrowedFd<'_>, pool: &ForwardPool) {
        let Some(before) = self.fitted_to.take() else { return };
        self.sink_has_refused |= left >= REFUSED_FILL_BYTES;
        if sockopt::send_buffer(to).is_ok_and(|now| now.bytes < before.bytes) {
            pool.note_memory_shortage();
        }
    }

    /// Receives the data that has arrived, by the current method. No bytes at the end of the
    /// stream.
    fn receive(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        room: usize,
        pool: &ForwardPool,
    ) -> Result<Received, Error> {
        match self.method {
            ActiveMethod::Copy => self.copy(from, to, pool, 0),
            ActiveMethod::Splice => match self.splice_what_is_there(from, room, pool) {
                // The end of the stream, or what splicing stops before. `recv` distinguishes them,
                // and skips an urgent byte.
                Ok(Received { bytes: 0, .. }) => self.copy(from, to, pool, 0),
                Err(reason) if reason.is_refusal() => {
                    // The refusal of a socket lasts, one for lack of descriptors does not.
                    let is_lasting = reason.refusal() != Some(Refusal::Temporary);
                    if is_lasting || !self.is_method_fixed {
                        self.switch_to(ActiveMethod::Copy);
                    }
                    self.is_method_fixed |= is_lasting;
                    let reason = reason.to_string();
                    let fallback = Fallback { from: "splice", to: "copy", reason };
                    fallback::record(&mut self.report.fallbacks, fallback);
                    self.copy(from, to, pool, 0)
                }
                spliced => spliced,
            },
        }
    }

    /// Receives once, and sends what it has received, unless that is at most `held_bytes`.
    fn copy(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
        held_bytes: usize,
    ) -> Result<Received, Error> {
        let mut pooled = pool.take_buffer()?;
        let buffer = pooled.scratch();
        self.report.copied.calls += 1;
        let count = receive(from, buffer, RecvFlags::empty())?;
        if count <= held_bytes {
            self.unsent.0.extend_from_slice(&buffer[..count]);
        } else if count > 0 {
            self.report.copied.calls += 1;
            let more = self.more(count < buffer.len());
            let (sent, error) = match send(to, &buffer[..count], more) {
                Ok(sent) => (sent, None),
                Err(Error::WouldBlock) => (0, None),
                // The kernel reports the reason, such as a reset, only once.
                Err(error) => (0, Some(error)),
            };
            self.report.copied.bytes += sent as u64;
            self.unsent.0.extend_from_slice(&buffer[sent..count]);
            if let Some(error) = error {
                return Err(error);
            }
        }
        let is_full = count == buffer.len();
        self.consider_switch(
            u32::from(is_full),
            FULL_BUFFERS_BEFORE_SPLICING,
            ActiveMethod::Splice,
        );
        Ok(Received { bytes: count, is_all: !is_full })
    }

    /// The flag of a send. The last bytes leave with the end of the stream, which follows in the
    /// same turn: they are the last if the source had no more and its end has arrived.
    fn more(&self, is_all: bool) -> SendFlags {
        if is_all && self.source.end_has_arrived { SendFlags::MORE } else { SendFlags::empty() }
    }

    /// Like [`Direction::splice`]. No bytes are the end of the stream, or an urgent byte with
    /// others behind it.
    ///
    /// Bytes may arrive after a splice that has found none. `recv` would copy them. An urgent byte
    /// that is the last one stays in the socket until more arrives.
    fn splice_what_is_there(
        &mut self,
        from: BorrowedFd<'_>,
        room: usize,
        pool: &ForwardPool,
    ) -> Result<Received, Error> {
        match self.splice(from, room, pool) {
            Err(Error::WouldBlock) => {}
            spliced => return spliced,
        }
        let nothing = Received { bytes: 0, is_all: false };
        self.report.spliced.calls += 1;
        if peek(from)? == 0 {
            return Ok(nothing);
        }
        match self.splice(from, room, pool) {
            Err(Error::WouldBlock) => Ok(nothing),
            spliced => spliced,
        }
    }

    fn splice(
        &mut self,
        from: BorrowedFd<'_>,
        room: usize,
        pool: &ForwardPool,
    ) -> Result<Received, Error> {
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            none => none.insert(pool.acquire_pipe()?),
        };
        self.report.spliced.calls += 1;
        let count = pipe
            .fill(from, room.min(pool.settings().pipe_bytes), FLAGS)
            .map_err(|errno| failed(Call::SpliceFromSource)(errno.into()))?;
        let is_small = count > 0 && count < SMALL_FILL_BYTES.min(room);
        let weight = match is_small {
            true if are_full_packets(from, count) => 1,
            true => FULL_PACKET_FILLS_AS_ONE,
            false => 0,
        };
        let switch_after = SMALL_FILLS_BEFORE_COPYING * FULL_PACKET_FILLS_AS_ONE;
        self.consider_switch(weight, switch_after, ActiveMethod::Copy);
        // A pipe may be full of small pieces, so its count tells nothing about the socket.
        Ok(Received { bytes: count, is_all: false })
    }

    /// Adds up the weights of consecutive sizes that favor the other method, and switches to it at
    /// a sum of `switch_after`. A size that favors the current method has the weight 0.
    fn consider_switch(&mut self, weight: u32, switch_after: u32, other: ActiveMethod) {
        if other == self.method || self.is_method_fixed {
            return;
        }
        self.streak = if weight > 0 { self.streak + weight } else { 0 };
        if self.streak >= switch_after {
            self.switch_to(other);
        }
    }

    fn switch_to(&mut self, method: ActiveMethod) {
        self.method = method;
        self.streak = 0;
        self.report.changes += 1;
    }

    /// Ends the stream to the sink, after all data was delivered.
    fn shut_down_sink(&mut self, to: BorrowedFd<'_>) -> Result<(), Error> {
        if self.stage == Stage::SourceEnded {
            self.stage = Stage::SinkShut;
            match rustix::net::shutdown(to, Shutdown::Write) {
                // A peer that is gone already needs no end of stream.
                Ok(()) | Err(Errno::NOTCONN) => {}
                Err(errno) => return Err(failed(Call::Shutdown)(errno.into())),
            }
        }
        Ok(())
    }
}

/// Whether the kernel has reported a failure, which it does only once.
fn is_failure(prepared: &Result<Received, Error>) -> bool {
    matches!(prepared, Err(error) if !matches!(error, Error::WouldBlock))
}

/// Whether so many received bytes are whole packets, by the packets that this side sends. False on
/// a Unix socket, and mostly where the two sides' packets differ.
fn are_full_packets(from: BorrowedFd<'_>, bytes: usize) -> bool {
    let packet_bytes = sockopt::max_segment(from).map_or(0, |bytes| bytes as usize);
    packet_bytes > 0 && bytes % packet_bytes == 0
}

/// How many bytes of payload a sink's buffer has room for. A peer with a small window receives
/// small packets, whose overhead is as large as their payload.
fn payload_room(buffer: SendBuffer, to: BorrowedFd<'_>) -> usize {
    let room = buffer.room();
    sockopt::max_segment(to).map_or(room, |segment| {
        let segment = segment as usize;
        (room as u64 * segment as u64 / (segment + PACKET_OVERHEAD_BYTES) as u64) as usize
    })
}

/// Whether a socket may be writable, or has failed. If not, the kernel reports the event later.
fn may_be_writable(socket: BorrowedFd<'_>) -> bool {
    let mut sockets = [PollFd::new(&socket, PollFlags::OUT)];
    rustix::event::poll(&mut sockets, Some(&Timespec::default())) != Ok(0)
}

/// Whether bytes have arrived: 0 at the end of the stream, else 1. They stay where they are.
fn peek(from: BorrowedFd<'_>) -> Result<usize, Error> {
    receive(from, &mut [0], RecvFlags::PEEK)
}

/// Receives without blocking; 0 at the end of the stream.
fn receive(from: BorrowedFd<'_>, buffer: &mut [u8], flags: RecvFlags) -> Result<usize, Error> {
    retry_on_intr(|| socket::receive(from, buffer, flags | RecvFlags::DONTWAIT))
        .map_err(|errno| failed(Call::Recv)(errno.into()))
}

fn send(to: BorrowedFd<'_>, bytes: &[u8], more: SendFlags) -> Result<usize, Error> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL | more;
    retry_on_intr(|| rustix::net::send(to, bytes, flags))
        .map_err(|errno| failed(Call::Send)(errno.into()))
}
