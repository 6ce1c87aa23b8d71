//! Worker processes of a flow: sender, receiver and forwarder.
//!
//! A program that runs experiments calls [`run_if_asked`] first thing in `main`. A flow starts the
//! same program again with [`ARGUMENT`], on the host on which the worker runs.
//!
//! Standard input carries three JSON lines: the job, later the window, and last the end of the
//! work, which is sent once every worker has measured the window. Standard output carries one JSON
//! line per message. All workers share the monotonic clock, by which the window is defined. So only
//! the workload crosses the link during the window. A worker exits when its standard input is
//! closed, and when the process that started the worker is stopped.

use crate::lines::write_line;
use haul::pacing::is_pacing;
use haul::{Error, SendMethod};
use haul_lab_sys::lifeline;
use haul_lab_sys::rusage::{self, Usage, Who};
use haul_sys::tcp_info::{TcpInfo, tcp_info};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use socket::SocketOptions;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

pub mod datagram_sink;
pub mod forwarder;
pub mod memory_sender;
pub mod ping_pong;
pub mod receiver;
pub mod sender;
pub mod socket;
mod tls_forwarder;
pub mod tls_sender;

/// Command-line argument that makes a program a worker.
pub const ARGUMENT: &str = "bench-worker";

/// A worker's job: the task, and the addresses and socket options to use.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// Address of the host on which the worker runs.
    pub host: IpAddr,
    /// Port on which a listening task listens; 0 for any free port.
    pub port: u16,
    /// Address from which a listening task accepts its connection; `None` for any.
    pub only_from: Option<IpAddr>,
    /// Address to which a connecting task connects.
    pub peer: Option<SocketAddr>,
    /// Options that are set on its sockets before they connect or listen.
    pub socket: SocketOptions,
    /// The work to do.
    pub task: Task,
}

/// The tasks that a worker can run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Task {
    /// Connects and sends a workload.
    Send(sender::SendTask),
    /// Connects and sends a TLS stream.
    SendTls(tls_sender::TlsSendTask),
    /// Accepts a connection and receives.
    Receive(receiver::ReceiveTask),
    /// Accepts a connection, opens another, and forwards bytes between them.
    Forward(forwarder::ForwardTask),
    /// Sends the worker's own memory, as a stream or as datagrams.
    Give(memory_sender::MemorySendTask),
    /// Receives datagrams.
    Take(datagram_sink::DatagramSinkTask),
    /// Connects, sends messages and waits for the echo of each.
    Ask(ping_pong::PingTask),
    /// Accepts a connection and echoes all it receives.
    Answer(ping_pong::EchoTask),
}

/// A message from a worker to the process that started it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// The worker listens at this address.
    Listening {
        /// The address and port.
        address: SocketAddr,
    },
    /// The first bytes were sent, at this time of the monotonic clock.
    Started {
        /// The time, by the monotonic clock.
        at_ns: u64,
    },
    /// The requested method is not available on this machine, for this reason. Others may be.
    Refused(String),
    /// The worker failed for another reason.
    Failed(String),
    /// The window has ended and was measured. The work continues until all workers have reported
    /// this.
    WindowMeasured,
    /// The work has ended.
    Done(Box<Outcome>),
}

/// A worker's work during the window, by its own clock and its own counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Measured length of the window. Both ends are read late if the CPU is busy.
    pub seconds: f64,
    /// Payload bytes written to the socket or read from it.
    pub bytes: u64,
    /// Payload bytes received by mapping pages; part of `bytes`.
    pub mapped_bytes: u64,
    /// Payload bytes moved through a pipe; part of `bytes`.
    pub spliced_bytes: u64,
    /// Datagrams received.
    pub messages: u64,
    /// System calls made.
    pub calls: u64,
    /// CPU time in user mode, as `getrusage` charges it to the process.
    pub user_seconds: f64,
    /// CPU time in kernel mode, as `getrusage` charges it to the process.
    pub system_seconds: f64,
    /// Voluntary and involuntary context switches of the process.
    pub context_switches: u64,
    /// Bytes that the kernel reported as zero-copied, over the whole flow and not only the window.
    pub zero_copied_bytes: u64,
    /// Bytes of zero-copy sends that the kernel reported as copied, over the whole flow.
    pub copied_bytes: u64,
    /// The method that sent most of the bytes.
    pub taken: Option<SendMethod>,
    /// Round-trip times of messages.
    pub latency: Option<ping_pong::Latency>,
    /// Segments that the connection received. The segments of a sender's connection are
    /// acknowledgements.
    pub segments_in: u64,
    /// Time during which only the peer's receive window limited the sender.
    pub window_limited_seconds: f64,
    /// The reason why the connection's packets were paced; `None` if they were not, or if unknown.
    pub paced: Option<Paced>,
}

impl Outcome {
    /// CPU time that `getrusage` charged, in user and kernel mode, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        self.user_seconds + self.system_seconds
    }

    /// Payload bytes per second of the window.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Payload in MiB.
    pub fn mib(&self) -> f64 {
        self.bytes as f64 / haul_units::MIB
    }
}

/// The reason why timers release a connection's packets.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Paced {
    /// A pacing rate is set (`SO_MAX_PACING_RATE`).
    Rate,
    /// The congestion control paces, as BBR does.
    CongestionControl,
    /// Frequent timer interrupts show that an earlier congestion control left pacing on.
    Leftover,
}

/// A measurement window, in nanoseconds of the monotonic clock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Window {
    /// The start, by the monotonic clock.
    pub start_ns: u64,
    /// The end.
    pub end_ns: u64,
}

impl Window {
    /// The window of a flow that started at `at_ns`.
    pub fn of(at_ns: u64, warm_up: Duration, length: Duration) -> Self {
        let start_ns = at_ns + warm_up.as_nanos() as u64;
        Self { start_ns, end_ns: start_ns + length.as_nanos() as u64 }
    }
}

/// Counters of a worker's work so far. The working thread writes them; the thread that waits for
/// the window reads them.
#[derive(Debug, Default)]
pub struct WorkCounters {
    /// Bytes sent or received.
    pub bytes: AtomicU64,
    /// Received bytes that were mapped.
    pub mapped_bytes: AtomicU64,
    /// Forwarded bytes that were spliced.
    pub spliced_bytes: AtomicU64,
    /// Messages sent or received.
    pub messages: AtomicU64,
    /// System calls.
    pub calls: AtomicU64,
    /// The connection that carries the payload, if its `TCP_INFO` is to be read.
    socket: OnceLock<OwnedFd>,
    is_over: AtomicBool,
    planned_window: OnceLock<Window>,
    snapshots: OnceLock<Range<CounterSnapshot>>,
}

/// The counters at one time, with the CPU time and the connection's state.
#[derive(Debug, Clone, Copy)]
struct CounterSnapshot {
    at: Instant,
    bytes: u64,
    mapped_bytes: u64,
    spliced_bytes: u64,
    messages: u64,
    calls: u64,
    usage: Usage,
    connection: TcpInfo,
}

impl WorkCounters {
    /// Registers `socket`, whose `TCP_INFO` is then read at both ends of the window.
    pub fn watch_socket(&self, socket: impl AsFd) {
        // If the descriptor cannot be duplicated, the connection's figures stay 0.
        if let Ok(duplicate) = socket.as_fd().try_clone_to_owned() {
            let _ = self.socket.set(duplicate);
        }
    }

    /// The reason for pacing, as far as the socket's options show it.
    fn paced(&self) -> Option<Paced> {
        let socket = self.socket.get()?;
        if tcp_info(socket).ok()?.pacing_rate_bytes_per_second_max != u64::MAX {
            return Some(Paced::Rate);
        }
        let congestion = rustix::net::sockopt::tcp_congestion(socket).ok()?;
        is_pacing(&congestion).then_some(Paced::CongestionControl)
    }

    /// Whether every worker has measured the window, so that the work may end.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    /// The window, once it is known.
    pub fn planned_window(&self) -> Option<Window> {
        self.planned_window.get().copied()
    }

    fn snapshot(&self) -> io::Result<CounterSnapshot> {
        Ok(CounterSnapshot {
            at: Instant::now(),
            bytes: self.bytes.load(Relaxed),
            mapped_bytes: self.mapped_bytes.load(Relaxed),
            spliced_bytes: self.spliced_bytes.load(Relaxed),
            messages: self.messages.load(Relaxed),
            calls: self.calls.load(Relaxed),
            usage: rusage::usage(Who::Process)?,
            connection: self
                .socket
                .get()
                .and_then(|socket| tcp_info(socket).ok())
                .unwrap_or_default(),
        })
    }

    /// The work done during the window. An error if the work ended before the window did.
    pub fn outcome(&self) -> Result<Outcome, Message> {
        let Some(Range { start, end }) = self.snapshots.get() else {
            return Err(Message::Failed("the work ended before the window did".into()));
        };
        Ok(Outcome {
            seconds: (end.at - start.at).as_secs_f64(),
            bytes: end.bytes - start.bytes,
            mapped_bytes: end.mapped_bytes - start.mapped_bytes,
            spliced_bytes: end.spliced_bytes - start.spliced_bytes,
            messages: end.messages - start.messages,
            calls: end.calls - start.calls,
            user_seconds: end.usage.user.saturating_sub(start.usage.user).as_secs_f64(),
            system_seconds: end.usage.system.saturating_sub(start.usage.system).as_secs_f64(),
            context_switches: end.usage.context_switches - start.usage.context_switches,
            segments_in: end
                .connection
                .segments_in
                .wrapping_sub(start.connection.segments_in)
                .into(),
            window_limited_seconds: end
                .connection
                .window_limited_us
                .saturating_sub(start.connection.window_limited_us)
                as f64
                / 1e6,
            paced: self.paced(),
            ..Outcome::default()
        })
    }

    /// Measures the window when it comes, and returns when standard input is closed.
    fn measure_window(&self, mut input: impl BufRead) -> io::Result<()> {
        let mut line = String::new();
        input.read_line(&mut line)?;
        if let Ok(window) = serde_json::from_str::<Window>(&line) {
            // Both are set once, by this thread.
            let _ = self.planned_window.set(window);
            wait_until(window.start_ns)?;
            let start = self.snapshot()?;
            wait_until(window.end_ns)?;
            let _ = self.snapshots.set(start..self.snapshot()?);
            send_message(&Message::WindowMeasured)?;
            input.read_line(&mut line)?;
            self.is_over.store(true, Relaxed);
        }
        io::copy(&mut input, &mut io::sink()).map(drop)
    }
}

/// Runs this process as a worker if it was started as one; returns its exit code in that case.
pub fn run_if_asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    // A worker would keep its CPU busy until the parent continues.
    let watched = lifeline::exit_with_stopped_parent(|| {
        let stopped = "haul was stopped (Ctrl-Z or SIGSTOP) while it measured".into();
        let _ = send_message(&Message::Failed(stopped));
    });
    if let Err(error) = watched {
        let _ = send_message(&failed("starting a thread", error));
        return Some(ExitCode::FAILURE);
    }
    let mut input = BufReader::new(io::stdin());
    let mut line = String::new();
    let job = input.read_line(&mut line).map_err(serde_json::Error::io);
    let message = match job.and_then(|_| serde_json::from_str::<Job>(&line)) {
        Ok(job) => run_job(&job, input).unwrap_or_else(|message| message),
        Err(error) => Message::Failed(format!("no job on standard input: {error}")),
    };
    Some(if send_message(&message).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_job(job: &Job, input: impl BufRead + Send + 'static) -> Result<Message, Message> {
    let counters = Arc::new(WorkCounters::default());
    let shared = Arc::clone(&counters);
    thread::Builder::new()
        .spawn(move || {
            let _ = shared.measure_window(input);
            std::process::exit(1);
        })
        .map_err(|error| failed("starting a thread", error))?;
    match &job.task {
        Task::Send(sending) => sending.run(connect(job)?, &counters),
        Task::SendTls(sending) => sending.run(&connect(job)?, &counters),
        Task::Receive(receiving) => receiving.run(&accept(job)?, &counters),
        Task::Forward(forwarding) => {
            let to = connect(job)?;
            forwarding.run(&accept(job)?, &to, &counters)
        }
        Task::Give(giving) => giving.run(job, &counters),
        Task::Take(taking) => taking.run(job.host, &counters),
        Task::Ask(asking) => asking.run(&connect(job)?, &counters),
        Task::Answer(ping_pong::EchoTask {}) => ping_pong::EchoTask::run(&accept(job)?, &counters),
    }
    .map(|outcome| Message::Done(Box::new(outcome)))
}

fn connect(job: &Job) -> Result<TcpStream, Message> {
    let peer =
        job.peer.ok_or_else(|| Message::Failed("the job names no peer to connect to".into()))?;
    job.socket.connect(peer)
}

/// Listens, reports the address, and accepts one connection. There is no timeout: if no connection
/// arrives, the process that started this one ends it.
fn accept(job: &Job) -> Result<TcpStream, Message> {
    let listen_error = |error| failed(&format!("listening on {}", job.host), error);
    let listener = job.socket.listen(SocketAddr::new(job.host, job.port))?;
    send_message(&Message::Listening { address: listener.local_addr().map_err(listen_error)? })
        .map_err(|error| failed("reporting", error))?;
    loop {
        let (stream, from) = listener.accept().map_err(|error| failed("accepting", error))?;
        if job.only_from.is_none_or(|only| only == from.ip()) {
            return Ok(stream);
        }
    }
}

/// Sets `TCP_NODELAY`, so that small messages are sent at once.
fn set_nodelay(socket: &TcpStream) -> Result<(), Message> {
    socket.set_nodelay(true).map_err(|error| failed("setting TCP_NODELAY", error))
}

/// Enables busy polling on `socket` for so many microseconds; 0 leaves the socket unchanged.
fn set_busy_poll(socket: impl AsFd, busy_poll_us: u32) -> Result<(), Message> {
    if busy_poll_us == 0 {
        return Ok(());
    }
    haul_sys::sockopt::set_busy_poll(socket, busy_poll_us).map_err(|error| {
        Message::Refused(format!("busy polling is refused: {error} (run as root)"))
    })
}

fn send_message(message: &Message) -> io::Result<()> {
    write_line(io::stdout(), message)
}

/// Reports that the first bytes were sent.
fn report_started() -> Result<(), Message> {
    send_message(&Message::Started { at_ns: now_ns() }).map_err(|error| failed("reporting", error))
}

/// Sleeps until this time of the monotonic clock. An error if standard input is closed before.
fn wait_until(ns: u64) -> io::Result<()> {
    loop {
        let left_ns = ns.saturating_sub(now_ns());
        if left_ns == 0 {
            return Ok(());
        }
        let timeout = Timespec {
            tv_sec: (left_ns / 1_000_000_000) as i64,
            tv_nsec: (left_ns % 1_000_000_000) as i64,
        };
        let input = io::stdin();
        let mut poll_fds = [PollFd::new(&input, PollFlags::IN)];
        match poll(&mut poll_fds, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            // No message is sent to a worker during its window, so readable input means that the
            // pipe was closed.
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Sleeps until this time of the monotonic clock.
pub fn sleep_until(ns: u64) {
    thread::sleep(Duration::from_nanos(ns.saturating_sub(now_ns())));
}

/// The monotonic clock in nanoseconds.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn failed(step: &str, error: impl std::fmt::Display) -> Message {
    Message::Failed(format!("{step}: {error}"))
}

fn failure_message(error: &Error) -> Message {
    match error {
        Error::Refused { .. }
        | Error::Unsupported(_)
        | Error::InvalidInput(_)
        | Error::Ended { .. } => Message::Refused(error.to_string()),
        error => Message::Failed(error.to_string()),
    }
}
