//! The sending worker: sends a workload repeatedly with one method.

use super::{Message, Outcome, WorkCounters, failed, failure_message, report_started};
use crate::tested_method::{AttachedTestedMethod, TestedMethod, TestedMethodError};
use crate::workload::{Piece, PieceHandle};
use haul::{MethodOptions, Plan};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum wait, after the last byte was sent, for the kernel to release the pages of zero-copy
/// sends.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);

/// Parameters of a sending task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SendTask {
    /// The name of the tested method.
    pub path: String,
    /// Maximum bytes per call.
    pub chunk_bytes: usize,
    /// Whether `TCP_CORK` holds partial segments back within each file.
    pub cork: bool,
    /// Pacing rate; `None` for full speed.
    pub rate_bits_per_second: Option<u64>,
    /// The pieces of the workload, sent in turn.
    pub pieces: Vec<PieceHandle>,
    /// Cost model for the method `planned`, which chooses by it.
    pub plan: Option<Box<Plan>>,
}

impl SendTask {
    /// Sends until the window is over.
    pub fn run(&self, stream: TcpStream, counters: &WorkCounters) -> Result<Outcome, Message> {
        let method: TestedMethod =
            self.path.parse().map_err(|error| failed("reading the job", error))?;
        let pieces = self
            .pieces
            .iter()
            .map(PieceHandle::open)
            .collect::<Result<Vec<Piece>, _>>()
            .map_err(|error| failed("opening the workload", error))?;
        if let Some(rate) = self.rate_bits_per_second {
            haul_sys::sockopt::set_max_pacing_rate(&stream, rate / 8)
                .map_err(|error| failed("setting SO_MAX_PACING_RATE", error))?;
        }
        counters.watch_socket(&stream);
        let options = MethodOptions::default().with_chunk_bytes(self.chunk_bytes);
        let stream = Arc::new(stream);
        let method = method
            .attach(&stream, &options, self.plan.as_deref())
            .map_err(|error| tested_failure(&error))?;
        let mut sender = ActiveSender {
            task: self,
            stream,
            method,
            counters,
            cork_calls: 0,
            has_started: false,
        };
        for piece in pieces.iter().cycle() {
            sender.send(piece)?;
            if counters.is_over() {
                break;
            }
        }
        sender.finish()
    }
}

/// A method that is not supported is refused, and other methods may work.
fn tested_failure(error: &TestedMethodError) -> Message {
    match error {
        TestedMethodError::Library(error) => failure_message(error),
        TestedMethodError::Comparison(error) if error.kind() == io::ErrorKind::Unsupported => {
            Message::Refused(error.to_string())
        }
        TestedMethodError::Comparison(error) => Message::Failed(error.to_string()),
    }
}

struct ActiveSender<'a> {
    task: &'a SendTask,
    stream: Arc<TcpStream>,
    method: AttachedTestedMethod,
    counters: &'a WorkCounters,
    cork_calls: u64,
    has_started: bool,
}

impl ActiveSender<'_> {
    /// Sends one piece, or the first part of it if the window ends first.
    fn send(&mut self, piece: &Piece) -> Result<(), Message> {
        self.cork(true)?;
        let mut range = 0..piece.len();
        while !range.is_empty() && !self.counters.is_over() {
            let sent = self.method.send(self.stream.as_fd(), piece, range.clone());
            range.start += sent.map_err(|error| tested_failure(&error))?;
            let counts = self.method.counts();
            self.counters.bytes.store(counts.bytes, Relaxed);
            self.counters.calls.store(counts.calls + self.cork_calls, Relaxed);
            if !self.has_started {
                self.has_started = true;
                report_started()?;
            }
        }
        self.cork(false)
    }

    fn cork(&mut self, on: bool) -> Result<(), Message> {
        if self.task.cork {
            self.cork_calls += 1;
            rustix::net::sockopt::set_tcp_cork(&self.stream, on)
                .map_err(|errno| failed("setting TCP_CORK", errno))?;
        }
        Ok(())
    }

    /// Returns the counters of the window and the completions' counts of copied and zero-copied
    /// bytes.
    fn finish(mut self) -> Result<Outcome, Message> {
        let outcome = self.counters.outcome()?;
        // Fails if the receiver has closed the connection. Completions arrive all the same.
        let _ = self.stream.shutdown(Shutdown::Write);
        let deadline = Instant::now() + COMPLETION_TIMEOUT;
        while self
            .method
            .process_completions(self.stream.as_fd())
            .map_err(|error| failure_message(&error))?
            > 0
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(1));
        }
        let settled = self.method.counts();
        Ok(Outcome {
            zero_copied_bytes: settled.zero_copied_bytes,
            copied_bytes: settled.copied_bytes,
            taken: self.method.taken(),
            ..outcome
        })
    }
}
