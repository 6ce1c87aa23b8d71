//! One direction of a forwarder.

use super::{DirectionReport, ForwardMethod, ForwardPool};
use crate::call::Call;
use crate::error::{Error, Refusal, failed};
use crate::fallback::{self, Fallback};
use crate::pipe::Pipe;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::pipe::SpliceFlags;
use std::os::fd::BorrowedFd;

/// The most bytes that are copied at a time.
pub(super) const BUFFER_BYTES: usize = 16 << 10;
/// Consecutive full buffers after which splicing begins: a bulk transfer, and not one large
/// message.
const FULL_BUFFERS_BEFORE_SPLICING: u32 = 2;
/// A pipe that is filled with fewer bytes than this was not worth two calls.
const SMALL_FILL_BYTES: usize = 4 << 10;
/// Consecutive small fills after which copying begins again.
const SMALL_FILLS_BEFORE_COPYING: u32 = 4;
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
    /// Copied bytes that the sink has not accepted yet.
    unsent: Vec<u8>,
    /// Consecutive sizes that favor the other method.
    streak: u32,
    source_has_ended: bool,
    sink_is_shut: bool,
    report: DirectionReport,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ActiveMethod {
    Copy,
    Splice,
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

impl Interest {
    pub fn is_done(self) -> bool {
        self == Self::default()
    }
}

impl Direction {
    pub fn new(method: ForwardMethod) -> Self {
        Self {
            method: if method == ForwardMethod::Splice {
                ActiveMethod::Splice
            } else {
                ActiveMethod::Copy
            },
            is_method_fixed: method != ForwardMethod::Adaptive,
            pipe: None,
            unsent: Vec::new(),
            streak: 0,
            source_has_ended: false,
            sink_is_shut: false,
            report: DirectionReport::default(),
        }
    }

    pub fn direction_report(&self) -> &DirectionReport {
        &self.report
    }

    /// Moves the data that can be moved now.
    pub fn advance(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
    ) -> Result<Interest, Error> {
        if self.pipe.as_ref().is_some_and(Pipe::is_inherited) {
            return Err(Error::Forked);
        }
        let mut moved = 0;
        let interest = loop {
            if !self.deliver(to)? {
                break Interest { write: true, ..Interest::default() };
            }
            if self.source_has_ended {
                self.shut_down_sink(to)?;
                break Interest::default();
            }
            if moved >= TURN_BYTES {
                break Interest { has_more: true, ..Interest::default() };
            }
            match self.receive(from, to, pool) {
                Ok(0) => self.source_has_ended = true,
                Ok(count) => moved += count,
                Err(Error::WouldBlock) => break Interest { read: true, ..Interest::default() },
                Err(error) => return Err(error),
            }
        };
        // Between turns a pipe is kept only if it holds bytes.
        if let Some(pipe) = self.pipe.take_if(|pipe| pipe.held_bytes() == 0) {
            pool.release_pipe(pipe);
        }
        Ok(interest)
    }

    /// Sends the bytes that are held; false if the sink accepts no more.
    fn deliver(&mut self, to: BorrowedFd<'_>) -> Result<bool, Error> {
        while !self.unsent.is_empty() {
            self.report.copied.calls += 1;
            match send(to, &self.unsent) {
                Ok(count) => {
                    self.unsent.drain(..count);
                    self.report.copied.bytes += count as u64;
                }
                Err(Error::WouldBlock) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // Frees the memory: an idle direction holds none.
        self.unsent = Vec::new();
        while let Some(pipe) = self.pipe.as_mut().filter(|pipe| pipe.held_bytes() > 0) {
            self.report.spliced.calls += 1;
            match pipe.drain(to, None, usize::MAX, FLAGS) {
                Ok(count) => self.report.spliced.bytes += count as u64,
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(failed(Call::SpliceIntoSocket)(errno.into())),
            }
        }
        Ok(true)
    }

    /// Receives the data that has arrived, by the current method; 0 at the end of the stream.
    fn receive(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        pool: &ForwardPool,
    ) -> Result<usize, Error> {
        match self.method {
            ActiveMethod::Copy => self.copy(from, to, pool),
            ActiveMethod::Splice => match self.splice(from, pool) {
                // The end of the stream, no data, or an urgent byte, before which splicing stops.
                // `recv` distinguishes them, and skips the urgent byte.
                Ok(0) | Err(Error::WouldBlock) => self.copy(from, to, pool),
                Err(reason) if reason.is_refusal() => {
                    self.switch_to(ActiveMethod::Copy);
                    // The refusal of a socket lasts, one for lack of descriptors does not.
                    self.is_method_fixed |= reason.refusal() != Some(Refusal::Temporary);
                    let reason = reason.to_string();
                    let fallback = Fallback { from: "splice", to: "copy", reason };
                    fallback::record(&mut self.report.fallbacks, fallback);
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
            .map_err(|errno| failed(Call::Recv)(errno.into()))?
            .1;
        if count > 0 {
            self.report.copied.calls += 1;
            let (sent, error) = match send(to, &buffer[..count]) {
                Ok(sent) => (sent, None),
                Err(Error::WouldBlock) => (0, None),
                // The kernel reports the reason, such as a reset, only once.
                Err(error) => (0, Some(error)),
            };
            self.report.copied.bytes += sent as u64;
            self.unsent.extend_from_slice(&buffer[sent..count]);
            if let Some(error) = error {
                return Err(error);
            }
        }
        let is_full = count == buffer.len();
        self.consider_switch(is_full, FULL_BUFFERS_BEFORE_SPLICING, ActiveMethod::Splice);
        Ok(count)
    }

    fn splice(&mut self, from: BorrowedFd<'_>, pool: &ForwardPool) -> Result<usize, Error> {
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            none => none.insert(pool.acquire_pipe()?),
        };
        self.report.spliced.calls += 1;
        let count = pipe
            .fill(from, pool.0.settings.pipe_bytes, FLAGS)
            .map_err(|errno| failed(Call::SpliceFromSource)(errno.into()))?;
        let is_small = count > 0 && count < SMALL_FILL_BYTES;
        self.consider_switch(is_small, SMALL_FILLS_BEFORE_COPYING, ActiveMethod::Copy);
        Ok(count)
    }

    /// Counts consecutive sizes that favor the other method, and switches to it after
    /// `switch_after` of them.
    fn consider_switch(&mut self, favors_other: bool, switch_after: u32, other: ActiveMethod) {
        if other == self.method || self.is_method_fixed {
            return;
        }
        self.streak = if favors_other { self.streak + 1 } else { 0 };
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
        if !self.sink_is_shut {
            self.sink_is_shut = true;
            match rustix::net::shutdown(to, Shutdown::Write) {
                // A peer that is gone already needs no end of stream.
                Ok(()) | Err(Errno::NOTCONN) => {}
                Err(errno) => return Err(failed(Call::Shutdown)(errno.into())),
            }
        }
        Ok(())
    }
}

fn send(to: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Error> {
    retry_on_intr(|| rustix::net::send(to, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL))
        .map_err(|errno| failed(Call::Send)(errno.into()))
}
