//! The sending process: a workload over and over, through one path.

use super::{Message, Outcome, Tally, failed, say_started, stopped};
use crate::tested_method::{Opened, TestedMethod};
use crate::workload::{HandedOver, Piece};
use haul::{MethodOptions, Plan};
use serde::{Deserialize, Serialize};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

/// How long the kernel may keep pages after the last byte was sent.
const SETTLE_MAX: Duration = Duration::from_secs(1);

/// What to send and how.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sending {
    pub path: String,
    /// At most how much a call.
    pub chunk_bytes: usize,
    /// Whether `TCP_CORK` holds back partial packets inside each file.
    pub cork: bool,
    /// The rate to hold, or full speed.
    pub rate_bits_per_second: Option<u64>,
    pub pieces: Vec<HandedOver>,
    /// What to choose the path by, for the way that is chosen by a plan.
    pub plan: Option<Box<Plan>>,
}

impl Sending {
    /// Sends until the window is over.
    pub(super) fn run(&self, stream: TcpStream, tally: &Tally) -> Result<Outcome, Message> {
        let way: TestedMethod =
            self.path.parse().map_err(|error| failed("reading the job", error))?;
        let pieces = self
            .pieces
            .iter()
            .map(HandedOver::take)
            .collect::<Result<Vec<Piece>, _>>()
            .map_err(|error| failed("taking over the workload", error))?;
        if let Some(rate) = self.rate_bits_per_second {
            haul_sys::sockopt::set_max_pacing_rate(&stream, rate / 8)
                .map_err(|error| failed("setting SO_MAX_PACING_RATE", error))?;
        }
        tally.watch_socket(&stream);
        let options = MethodOptions { chunk_bytes: self.chunk_bytes, pipe_bytes: None };
        let path =
            way.open(&stream, &options, self.plan.as_deref()).map_err(|error| stopped(&error))?;
        let mut at_work =
            AtWork { sending: self, stream, path, tally, cork_calls: 0, has_started: false };
        for piece in pieces.iter().cycle() {
            at_work.send(piece)?;
            if tally.is_over() {
                break;
            }
        }
        at_work.finish()
    }
}

struct AtWork<'a> {
    sending: &'a Sending,
    stream: TcpStream,
    path: Opened,
    tally: &'a Tally,
    cork_calls: u64,
    has_started: bool,
}

impl AtWork<'_> {
    /// Sends one piece, or its beginning if the window closes meanwhile.
    fn send(&mut self, piece: &Piece) -> Result<(), Message> {
        self.cork(true)?;
        let mut range = 0..piece.len();
        while !range.is_empty() && !self.tally.is_over() {
            let sent = self.path.send(self.stream.as_fd(), piece.source(), range.clone());
            range.start += sent.map_err(|error| stopped(&error))?;
            let counts = self.path.counts();
            self.tally.bytes.store(counts.bytes, Relaxed);
            self.tally.calls.store(counts.calls + self.cork_calls, Relaxed);
            if !self.has_started {
                self.has_started = true;
                say_started()?;
            }
        }
        self.cork(false)
    }

    fn cork(&mut self, on: bool) -> Result<(), Message> {
        if self.sending.cork {
            self.cork_calls += 1;
            rustix::net::sockopt::set_tcp_cork(&self.stream, on)
                .map_err(|errno| failed("setting TCP_CORK", errno))?;
        }
        Ok(())
    }

    /// Says what was done in the window, and what the kernel said of the copies.
    fn finish(mut self) -> Result<Outcome, Message> {
        let outcome = self.tally.outcome()?;
        // Not connected any more if the receiver hung up; the kernel's notices come all the same.
        let _ = self.stream.shutdown(Shutdown::Write);
        let deadline = Instant::now() + SETTLE_MAX;
        while self.path.settle(self.stream.as_fd()).map_err(|error| stopped(&error))? > 0
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(1));
        }
        let settled = self.path.counts();
        Ok(Outcome {
            zero_copied_bytes: settled.zero_copied_bytes,
            copied_bytes: settled.copied_bytes,
            taken: self.path.taken(),
            ..outcome
        })
    }
}
