//! One direction of a forwarder.

use super::{DirectionReport, ForwardMethod, ForwardPool};
use crate::error::{Error, failed};
use crate::fallback::Fallback;
use crate::pipe::Pipe;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::pipe::SpliceFlags;
use std::os::fd::BorrowedFd;

/// What is copied at a time.
pub(super) const BUFFER_BYTES: usize = 16 << 10;
/// Full buffers in a row after which splicing begins: a bulk transfer, and not one large message.
const FULL_BEFORE_SPLICING: u32 = 2;
/// A pipe that is filled with less than this was not worth two calls.
const SMALL_BYTES: usize = 4 << 10;
/// Small fillings in a row after which copying begins again.
const SMALL_BEFORE_COPYING: u32 = 4;
/// What one direction moves before the other, and other connections, get their turn.
const TURN_BYTES: usize = 1 << 20;

/// Never waits, and passes pages on rather than copies.
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);

/// One direction: what it holds on its way, and by which way it moves.
#[derive(Debug)]
pub(super) struct Direction {
    way: Way,
    /// Whether it is kept: it was asked for, or the other is refused.
    is_settled: bool,
    /// Holds bytes, or is filled next.
    pipe: Option<Pipe>,
    /// Copied bytes that the sink has not taken yet.
    leftover: Vec<u8>,
    /// Sizes in a row that speak for the other way.
    streak: u32,
    source_has_ended: bool,
    sink_is_shut: bool,
    report: DirectionReport,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Copy,
    Splice,
}

/// What a direction waits for; nothing when it is done.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The source must become readable.
    pub read: bool,
    /// The sink must become writable.
    pub write: bool,
    /// Nothing: its turn is over.
    pub has_more: bool,
}

impl Waiting {
    pub fn is_done(self) -> bool {
        self == Self::default()
    }
}

impl Direction {
    pub fn new(way: ForwardMethod) -> Self {
        Self {
            way: if way == ForwardMethod::Splice { Way::Splice } else { Way::Copy },
            is_settled: way != ForwardMethod::Adaptive,
            pipe: None,
            leftover: Vec::new(),
            streak: 0,
            source_has_ended: false,
            sink_is_shut: false,
            report: DirectionReport::default(),
        }
    }

    pub fn report(&self) -> &DirectionReport {
        &self.report
    }

    /// Moves what can be moved now.
    pub fn advance(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
    ) -> Result<Waiting, Error> {
        let mut moved = 0;
        let waiting = loop {
            if !self.deliver(to)? {
                break Waiting { write: true, ..Waiting::default() };
            }
            if self.source_has_ended {
                self.end(to)?;
                break Waiting::default();
            }
            if moved >= TURN_BYTES {
                break Waiting { has_more: true, ..Waiting::default() };
            }
            match self.take(from, to, pool) {
                Ok(0) => self.source_has_ended = true,
                Ok(count) => moved += count,
                Err(Error::WouldBlock) => break Waiting { read: true, ..Waiting::default() },
                Err(error) => return Err(error),
            }
        };
        // Between turns a pipe is kept only for what it holds.
        if let Some(pipe) = self.pipe.take_if(|pipe| pipe.held_bytes() == 0) {
            pool.put_pipe(pipe);
        }
        Ok(waiting)
    }

    /// Passes on what is held; false when the sink takes no more.
    fn deliver(&mut self, to: BorrowedFd<'_>) -> Result<bool, Error> {
        while !self.leftover.is_empty() {
            self.report.copied.calls += 1;
            match send(to, &self.leftover) {
                Ok(count) => {
                    self.leftover.drain(..count);
                    self.report.copied.bytes += count as u64;
                }
                Err(Error::WouldBlock) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // Gives its memory back: a direction at rest holds none.
        self.leftover = Vec::new();
        while let Some(pipe) = self.pipe.as_mut().filter(|pipe| pipe.held_bytes() > 0) {
            self.report.spliced.calls += 1;
            match pipe.drain(to, None, usize::MAX, FLAGS) {
                Ok(count) => self.report.spliced.bytes += count as u64,
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(failed("splice into a socket")(errno.into())),
            }
        }
        Ok(true)
    }

    /// Takes what has arrived, by the way of the moment; 0 at the end of the stream.
    fn take(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
    ) -> Result<usize, Error> {
        match self.way {
            Way::Copy => self.copy(from, to, pool),
            Way::Splice => match self.splice(from, pool) {
                // The end, nothing, or an urgent byte, before which splicing stops: reading tells, and passes it by.
                Ok(0) | Err(Error::WouldBlock) => self.copy(from, to, pool),
                Err(reason) if reason.is_refusal() => {
                    self.change(Way::Copy);
                    self.is_settled = true;
                    let reason = reason.to_string();
                    self.report.fallbacks.push(Fallback { from: "splice", to: "copy", reason });
                    self.copy(from, to, pool)
                }
                spliced => spliced,
            },
        }
    }

    fn copy(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
    ) -> Result<usize, Error> {
        let mut buffer = pool.0.buffers.take()?;
        self.report.copied.calls += 1;
        let count = retry_on_intr(|| rustix::net::recv(from, &mut buffer[..], RecvFlags::DONTWAIT))
            .map_err(|errno| failed("recv")(errno.into()))?
            .1;
        if count > 0 {
            self.report.copied.calls += 1;
            // What the sink does not take, and why, is the next delivery's affair.
            let sent = send(to, &buffer[..count]).unwrap_or(0);
            self.report.copied.bytes += sent as u64;
            self.leftover.extend_from_slice(&buffer[sent..count]);
        }
        self.consider(count == buffer.len(), FULL_BEFORE_SPLICING, Way::Splice);
        Ok(count)
    }

    fn splice(&mut self, from: BorrowedFd<'_>, pool: &ForwardPool) -> Result<usize, Error> {
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            none => none.insert(pool.take_pipe()?),
        };
        self.report.spliced.calls += 1;
        let count = pipe
            .fill(from, pool.0.settings.pipe_bytes, FLAGS)
            .map_err(|errno| failed("splice from a socket")(errno.into()))?;
        self.consider(count > 0 && count < SMALL_BYTES, SMALL_BEFORE_COPYING, Way::Copy);
        Ok(count)
    }

    /// Counts what speaks for the other way, and takes it after so many in a row.
    fn consider(&mut self, speaks_for_it: bool, in_a_row: u32, other: Way) {
        if other == self.way || self.is_settled {
            return;
        }
        self.streak = if speaks_for_it { self.streak + 1 } else { 0 };
        if self.streak >= in_a_row {
            self.change(other);
        }
    }

    fn change(&mut self, way: Way) {
        self.way = way;
        self.streak = 0;
        self.report.changes += 1;
    }

    /// Passes the end on, after everything else.
    fn end(&mut self, to: BorrowedFd<'_>) -> Result<(), Error> {
        if !self.sink_is_shut {
            self.sink_is_shut = true;
            match rustix::net::shutdown(to, Shutdown::Write) {
                // A peer that has gone meanwhile needs no end.
                Ok(()) | Err(Errno::NOTCONN) => {}
                Err(errno) => return Err(failed("shutdown")(errno.into())),
            }
        }
        Ok(())
    }
}

fn send(to: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Error> {
    retry_on_intr(|| rustix::net::send(to, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL))
        .map_err(|errno| failed("send")(errno.into()))
}
