//! The processes of a flow: one that sends, one that receives, one between them.
//!
//! A program that runs experiments calls [`run_if_asked`] first thing in `main`: a flow starts the same
//! program again, on the host that it is to work on, with [`ARGUMENT`]. The job comes as a JSON line on standard
//! input, and later the window as another; what happens goes as one JSON line a message to standard output.
//! All agree on the window by the monotonic clock, which they share, so that nothing but the workload is sent
//! while it is measured. A third line says that all have looked and that the work may end. A worker ends when its
//! standard input does.

use crate::lines::write_line;
use haul::pacing::is_pacing;
use haul::{Error, SendMethod};
use haul_sys::rusage::{self, Usage, Who};
use haul_sys::tcp_info::{TcpInfo, tcp_info};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
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

pub(crate) mod forwarder;
pub mod giver;
pub(crate) mod messages;
pub(crate) mod receiver;
pub(crate) mod sender;
pub(crate) mod socket;
pub(crate) mod taker;

/// The argument that makes a program a worker.
pub const ARGUMENT: &str = "bench-worker";

/// What to do, where.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The address of the host that the worker is on.
    pub host: IpAddr,
    /// The port to listen on, for those that do; 0 for any.
    pub port: u16,
    /// Whose connection to accept; `None` for anybody's.
    pub only_from: Option<IpAddr>,
    /// Whom to connect to, for those that do.
    pub peer: Option<SocketAddr>,
    /// How its connections are set before they are made.
    pub socket: SocketOptions,
    /// What to do.
    pub task: Task,
}

/// What a worker can do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Task {
    /// Connect and send.
    Send(sender::Sending),
    /// Accept a connection and receive.
    Receive(receiver::Receiving),
    /// Accept a connection, make one, and pass on what comes.
    Forward(forwarder::Forwarding),
    /// Send memory of one's own, as a stream or as datagrams.
    Give(giver::Giving),
    /// Take datagrams.
    Take(taker::Taking),
    /// Connect, send messages and wait for them to come back.
    Ask(messages::Asking),
    /// Accept a connection and send back what comes.
    Answer(messages::Answering),
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// It can be connected to.
    Listening { address: SocketAddr },
    /// Bytes move, since this moment of the monotonic clock.
    Started { at_ns: u64 },
    /// What was asked for does not work here, in words. Other ways may.
    Refused(String),
    /// Something else failed.
    Failed(String),
    /// The window is over and was looked at; the work goes on for those that have not yet.
    Looked,
    /// The work has ended.
    Done(Box<Outcome>),
}

/// What a worker did in the window, by its own clock and its own count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// How long the window was: it opens and closes a moment late where the CPU is busy.
    pub seconds: f64,
    /// Payload that went into the socket, or came out of it.
    pub bytes: u64,
    /// Of it, what came by mapping pages.
    pub mapped_bytes: u64,
    /// Of it, what went through a pipe.
    pub spliced_bytes: u64,
    /// Datagrams that came.
    pub messages: u64,
    /// System calls made.
    pub calls: u64,
    /// CPU time that `getrusage` charged to the process in user mode.
    pub user_seconds: f64,
    /// The same in the kernel.
    pub system_seconds: f64,
    /// How often the process gave up its CPU or lost it.
    pub context_switches: u64,
    /// Bytes of the whole flow that the kernel said it did not copy.
    pub zero_copied_bytes: u64,
    /// Bytes of the whole flow that it copied although it was to go without.
    pub copied_bytes: u64,
    /// The path that most of what was sent took.
    pub taken: Option<SendMethod>,
    /// How long messages took.
    pub latency: Option<messages::Latency>,
    /// Packets that came to the connection: of a sender the acknowledgements.
    pub segments_in: u64,
    /// Time in which only the peer's window held the sender back.
    pub window_limited_seconds: f64,
    /// Why the connection's packets left by timers; `None` where they did not, or where that is not known.
    pub paced: Option<Paced>,
}

impl Outcome {
    /// CPU time that `getrusage` charged.
    pub fn cpu_seconds(&self) -> f64 {
        self.user_seconds + self.system_seconds
    }

    /// Payload a second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Payload in MiB.
    pub fn mib(&self) -> f64 {
        self.bytes as f64 / crate::MIB
    }
}

/// Why a connection's packets leave by timers ([`haul::pacing`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Paced {
    /// A rate is held (`SO_MAX_PACING_RATE`).
    Rate,
    /// The congestion control paces, as BBR does.
    CongestionControl,
    /// Many timer interrupts show that an earlier congestion control left pacing on.
    Leftover,
}

/// When to look, in nanoseconds of the monotonic clock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Window {
    pub start_ns: u64,
    pub end_ns: u64,
}

impl Window {
    /// The window of a flow that started at `at_ns`.
    pub(crate) fn of(at_ns: u64, warm_up: Duration, length: Duration) -> Self {
        let start_ns = at_ns + warm_up.as_nanos() as u64;
        Self { start_ns, end_ns: start_ns + length.as_nanos() as u64 }
    }
}

/// What a worker has done so far. The thread that works writes it, the thread that watches the clock reads it.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub bytes: AtomicU64,
    pub mapped_bytes: AtomicU64,
    pub spliced_bytes: AtomicU64,
    pub messages: AtomicU64,
    pub calls: AtomicU64,
    /// The connection that carries the payload, where its state is worth a look.
    socket: OnceLock<OwnedFd>,
    is_over: AtomicBool,
    planned: OnceLock<Window>,
    window: OnceLock<Range<Account>>,
}

/// A look at the tally.
#[derive(Debug, Clone, Copy)]
struct Account {
    at: Instant,
    bytes: u64,
    mapped_bytes: u64,
    spliced_bytes: u64,
    messages: u64,
    calls: u64,
    usage: Usage,
    connection: TcpInfo,
}

impl Tally {
    /// Has the state of `socket` read at both ends of the window.
    pub(crate) fn watch_socket(&self, socket: impl AsFd) {
        // Without a descriptor for it there are no figures of it.
        if let Ok(duplicate) = socket.as_fd().try_clone_to_owned() {
            let _ = self.socket.set(duplicate);
        }
    }

    /// Why packets leave by timers, as far as the socket's options tell.
    fn paced(&self) -> Option<Paced> {
        let socket = self.socket.get()?;
        if tcp_info(socket).ok()?.pacing_rate_bytes_per_second_max != u64::MAX {
            return Some(Paced::Rate);
        }
        let congestion = rustix::net::sockopt::tcp_congestion(socket).ok()?;
        is_pacing(&congestion).then_some(Paced::CongestionControl)
    }

    /// Whether everybody's window is over and the work may end.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    /// When everybody looks, as soon as that is known.
    pub(crate) fn planned(&self) -> Option<Window> {
        self.planned.get().copied()
    }

    fn account(&self) -> io::Result<Account> {
        Ok(Account {
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

    /// What was done in the window; an error where the work ended before it did.
    pub(crate) fn outcome(&self) -> Result<Outcome, Message> {
        let Some(Range { start, end }) = self.window.get() else {
            return Err(Message::Failed("it ended before the window did".into()));
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

    /// Waits for the window, looks at its both ends, and ends the process when nobody listens any more.
    fn watch(&self, mut input: impl BufRead) -> io::Result<()> {
        let mut line = String::new();
        input.read_line(&mut line)?;
        if let Ok(window) = serde_json::from_str::<Window>(&line) {
            // Both are set once, by this thread.
            let _ = self.planned.set(window);
            wait_until(window.start_ns)?;
            let start = self.account()?;
            wait_until(window.end_ns)?;
            let _ = self.window.set(start..self.account()?);
            say(&Message::Looked)?;
            input.read_line(&mut line)?;
            self.is_over.store(true, Relaxed);
        }
        io::copy(&mut input, &mut io::sink()).map(drop)
    }
}

/// Turns this process into a worker if it was started as one; returns its exit code then.
pub fn run_if_asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    let mut input = BufReader::new(io::stdin());
    let mut line = String::new();
    let job = input.read_line(&mut line).map_err(serde_json::Error::io);
    let message = match job.and_then(|_| serde_json::from_str::<Job>(&line)) {
        Ok(job) => work(&job, input).unwrap_or_else(|message| message),
        Err(error) => Message::Failed(format!("no job on standard input: {error}")),
    };
    Some(if say(&message).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn work(job: &Job, input: impl BufRead + Send + 'static) -> Result<Message, Message> {
    let tally = Arc::new(Tally::default());
    let watched = Arc::clone(&tally);
    thread::Builder::new()
        .spawn(move || {
            let _ = watched.watch(input);
            std::process::exit(1);
        })
        .map_err(|error| failed("starting a thread", error))?;
    match &job.task {
        Task::Send(sending) => sending.run(connect(job)?, &tally),
        Task::Receive(receiving) => receiving.run(&accept(job)?, &tally),
        Task::Forward(forwarding) => {
            let to = connect(job)?;
            forwarding.run(&accept(job)?, &to, &tally)
        }
        Task::Give(giving) => giving.run(job, &tally),
        Task::Take(taking) => taking.run(job.host, &tally),
        Task::Ask(asking) => asking.run(&connect(job)?, &tally),
        Task::Answer(messages::Answering {}) => messages::Answering::run(&accept(job)?, &tally),
    }
    .map(|outcome| Message::Done(Box::new(outcome)))
}

fn connect(job: &Job) -> Result<TcpStream, Message> {
    let peer = job.peer.ok_or_else(|| Message::Failed("there is nobody to connect to".into()))?;
    job.socket.connect(peer)
}

/// Listens, says where, and waits for the one connection that will come. Whoever asked ends this process if
/// none does.
fn accept(job: &Job) -> Result<TcpStream, Message> {
    let at = |error| failed(&format!("listening on {}", job.host), error);
    let listener = job.socket.listen(SocketAddr::new(job.host, job.port))?;
    say(&Message::Listening { address: listener.local_addr().map_err(at)? })
        .map_err(|error| failed("reporting", error))?;
    loop {
        let (stream, from) = listener.accept().map_err(|error| failed("accepting", error))?;
        if job.only_from.is_none_or(|only| only == from.ip()) {
            return Ok(stream);
        }
    }
}

/// Sends small packets at once (`TCP_NODELAY`).
fn set_nodelay(socket: &TcpStream) -> Result<(), Message> {
    socket.set_nodelay(true).map_err(|error| failed("setting TCP_NODELAY", error))
}

/// Has receiving from `socket` poll the device for so long before it waits; 0 leaves the socket as it is.
fn poll_busily(socket: impl AsFd, busy_poll_us: u32) -> Result<(), Message> {
    if busy_poll_us == 0 {
        return Ok(());
    }
    haul_sys::sockopt::set_busy_poll(socket, busy_poll_us).map_err(|error| {
        Message::Refused(format!("busy polling is refused: {error} (run as root)"))
    })
}

fn say(message: &Message) -> io::Result<()> {
    write_line(io::stdout(), message)
}

/// Says that bytes move.
fn say_started() -> Result<(), Message> {
    say(&Message::Started { at_ns: now_ns() }).map_err(|error| failed("reporting", error))
}

/// Sleeps until that moment of the monotonic clock; an error where nobody listens any more before.
fn wait_until(ns: u64) -> io::Result<()> {
    loop {
        let left = ns.saturating_sub(now_ns());
        if left == 0 {
            return Ok(());
        }
        let timeout = Timespec {
            tv_sec: (left / 1_000_000_000) as i64,
            tv_nsec: (left % 1_000_000_000) as i64,
        };
        let input = io::stdin();
        let mut wanted = [PollFd::new(&input, PollFlags::IN)];
        match poll(&mut wanted, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            // Nothing is said before everybody has looked, so this is the end.
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Sleeps until that moment of the monotonic clock.
pub(crate) fn sleep_until(ns: u64) {
    thread::sleep(Duration::from_nanos(ns.saturating_sub(now_ns())));
}

pub(crate) fn now_ns() -> u64 {
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
