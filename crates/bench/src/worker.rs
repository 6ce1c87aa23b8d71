//! The sending process of a flow.
//!
//! A program that runs experiments calls [`run_if_asked`] first thing in `main`: a flow starts the same
//! program again, on the sending host, with [`ARGUMENT`]. The job comes as JSON on standard input; what
//! happens goes as one JSON line a message to standard output. The two processes agree on the window by the
//! monotonic clock, which they share, so that nothing but the workload is sent while it is measured.

use crate::way::Way;
use crate::workload::{HandedOver, Piece};
use haul::{Counts, Error, Options, SendPath};
use haul_sys::rusage::{self, Usage, Who};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

/// The argument that makes a program a worker.
pub const ARGUMENT: &str = "bench-worker";
/// How long the kernel may keep pages after the last byte was sent.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// How long a worker sends on after the window, so that its end does not fall into it: the other side looks
/// at its counters a moment late.
const AFTER_WINDOW_NS: u64 = 10_000_000;
/// How long connecting the two hosts may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// What to send, how, to whom, how long.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub address: SocketAddr,
    pub path: String,
    pub chunk_bytes: usize,
    pub cork: bool,
    pub congestion: String,
    pub rate_bits_per_second: Option<u64>,
    pub warm_up: Duration,
    pub window: Duration,
    pub pieces: Vec<HandedOver>,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The path works here and the flow runs since this moment of the monotonic clock.
    Started { at_ns: u64 },
    /// The path does not work here.
    Refused(String),
    /// Something else failed.
    Failed(String),
    /// It is over.
    Done(Outcome),
}

/// What a worker did in the window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Bytes that the socket took.
    pub bytes: u64,
    /// System calls made.
    pub calls: u64,
    /// CPU time that `getrusage` charged.
    pub cpu_seconds: f64,
    /// Bytes of the whole flow that the kernel said it did not copy.
    pub zero_copied_bytes: u64,
    /// Bytes of the whole flow that it copied although it was to go without.
    pub copied_bytes: u64,
}

/// Turns this process into a worker if it was started as one; returns its exit code then.
pub fn run_if_asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    let message = match serde_json::from_reader(io::stdin()) {
        Ok(job) => work(&job).unwrap_or_else(|message| message),
        Err(error) => Message::Failed(format!("no job on standard input: {error}")),
    };
    Some(if say(&message).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn say(message: &Message) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    io::stdout().write_all(&line)
}

/// The window of a flow that started at `at_ns`, in nanoseconds of the monotonic clock.
pub(crate) fn window(at_ns: u64, warm_up: Duration, window: Duration) -> Range<u64> {
    let start = at_ns + warm_up.as_nanos() as u64;
    start..start + window.as_nanos() as u64
}

/// Sleeps until that moment of the monotonic clock.
pub(crate) fn sleep_until(ns: u64) {
    thread::sleep(Duration::from_nanos(ns.saturating_sub(now_ns())));
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn failed(step: &str, error: impl std::fmt::Display) -> Message {
    Message::Failed(format!("{step}: {error}"))
}

fn stopped(error: &Error) -> Message {
    match error {
        Error::Refused { .. } | Error::Unsuited(_) | Error::Ended { .. } => {
            Message::Refused(error.to_string())
        }
        error => Message::Failed(error.to_string()),
    }
}

fn work(job: &Job) -> Result<Message, Message> {
    let way: Way = job.path.parse().map_err(|error| failed("reading the job", error))?;
    let pieces = job
        .pieces
        .iter()
        .map(HandedOver::take)
        .collect::<Result<Vec<Piece>, _>>()
        .map_err(|error| failed("taking over the workload", error))?;
    let stream = TcpStream::connect_timeout(&job.address, CONNECT_MAX)
        .map_err(|error| failed(&format!("connecting to {}", job.address), error))?;
    rustix::net::sockopt::set_tcp_congestion(&stream, &job.congestion)
        .map_err(|errno| failed(&format!("setting congestion control {}", job.congestion), errno))?;
    if let Some(rate) = job.rate_bits_per_second {
        haul_sys::sockopt::set_max_pacing_rate(&stream, rate / 8)
            .map_err(|error| failed("setting SO_MAX_PACING_RATE", error))?;
    }
    let options = Options { chunk_bytes: job.chunk_bytes, pipe_bytes: None };
    let path = way.open(&stream, &options).map_err(|error| stopped(&error))?;
    let mut sending = Sending { job, stream, path, cork_calls: 0, window: None, opened: None, closed: None };
    for piece in pieces.iter().cycle() {
        match sending.send(piece) {
            Ok(true) => {}
            Ok(false) => break,
            // After the window the receiver may hang up on a sender that is slow to notice.
            Err(_) if sending.is_over() => break,
            Err(message) => return Err(message),
        }
    }
    sending.finish()
}

/// A worker at work.
struct Sending<'a> {
    job: &'a Job,
    stream: TcpStream,
    path: Box<dyn SendPath>,
    cork_calls: u64,
    /// Known once the first bytes went through.
    window: Option<Range<u64>>,
    /// The account when the window opened.
    opened: Option<(Counts, Usage)>,
    /// The account when it closed.
    closed: Option<(Counts, Usage)>,
}

impl Sending<'_> {
    /// Sends one piece, or its beginning if the window closes meanwhile. Returns whether to go on.
    fn send(&mut self, piece: &Piece) -> Result<bool, Message> {
        self.cork(true)?;
        let mut range = 0..piece.len();
        while !range.is_empty() {
            let now = now_ns();
            match &self.window {
                Some(window) if now >= window.end => {
                    self.closed = self.closed.or(Some(self.account()?));
                    if now >= window.end + AFTER_WINDOW_NS {
                        return Ok(false);
                    }
                }
                Some(window) if now >= window.start && self.opened.is_none() => {
                    self.opened = Some(self.account()?);
                }
                _ => {}
            }
            let sent = self.path.send(self.stream.as_fd(), piece.source(), range.clone());
            range.start += sent.map_err(|error| stopped(&error))?;
            if self.window.is_none() {
                let at_ns = now_ns();
                self.window = Some(window(at_ns, self.job.warm_up, self.job.window));
                say(&Message::Started { at_ns }).map_err(|error| failed("reporting", error))?;
            }
        }
        self.cork(false)?;
        Ok(true)
    }

    fn cork(&mut self, on: bool) -> Result<(), Message> {
        if self.job.cork {
            self.cork_calls += 1;
            rustix::net::sockopt::set_tcp_cork(&self.stream, on)
                .map_err(|errno| failed("setting TCP_CORK", errno))?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.window.as_ref().is_some_and(|window| now_ns() >= window.end)
    }

    fn account(&self) -> Result<(Counts, Usage), Message> {
        let counts = self.path.counts();
        let counts = Counts { calls: counts.calls + self.cork_calls, ..counts };
        let usage = rusage::usage(Who::Thread).map_err(|error| failed("getrusage", error))?;
        Ok((counts, usage))
    }

    /// Says what was done in the window, and what the kernel said of the copies.
    fn finish(mut self) -> Result<Message, Message> {
        let (closed, charged) = match self.closed {
            Some(account) => account,
            None => self.account()?,
        };
        let (opened, charged_before) = self.opened.unwrap_or_default();
        // Not connected any more if the receiver hung up; the kernel's notices come all the same.
        let _ = self.stream.shutdown(Shutdown::Write);
        let deadline = Instant::now() + SETTLE_MAX;
        while self.path.settle(self.stream.as_fd()).map_err(|error| stopped(&error))? > 0
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(1));
        }
        let settled = self.path.counts();
        Ok(Message::Done(Outcome {
            bytes: closed.bytes - opened.bytes,
            calls: closed.calls - opened.calls,
            cpu_seconds: charged.cpu().saturating_sub(charged_before.cpu()).as_secs_f64(),
            zero_copied_bytes: settled.zero_copied_bytes,
            copied_bytes: settled.copied_bytes,
        }))
    }
}
