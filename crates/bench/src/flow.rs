//! One connection under load, and a window of time cut out of it.
//!
//! The sending host sends a workload over and over through one path; the receiving host reads it into a
//! buffer as an ordinary program does; and while both run at their steady pace the counters are read at two
//! moments. The sender is a process of its own ([`crate::worker`]): were it a thread beside the receiver,
//! every unmapping of a window would interrupt the receiver's CPU to flush an address space that two machines
//! do not share.

use crate::way::Way;
use crate::worker::{Job, Message, Outcome};
use crate::workload::Opened;
use haul_lab::{Host, Lab, LabError};
use haul_soak::{Interval, Meter, SoakError};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// The receiver's buffer: what iperf3 and many servers use at most, and small enough for a second-level
/// cache.
const RECEIVE_BYTES: usize = 128 * 1024;
/// How often a receiver that gets nothing looks whether the flow is over.
const RECEIVE_INTERVAL: Duration = Duration::from_millis(100);
/// How long a receiver goes on after the flow is over, for a sender that is slow to notice.
const RECEIVE_AFTER: Duration = Duration::from_secs(1);

/// What to run.
#[derive(Debug, Clone)]
pub struct Flow<'a> {
    /// Between whom.
    pub lab: &'a Lab,
    /// What.
    pub workload: &'a Opened,
    /// Through which path.
    pub path: Way,
    /// At most how much a call.
    pub chunk_bytes: usize,
    /// Whether `TCP_CORK` holds back partial packets inside each file.
    pub cork: bool,
    /// The socket's congestion control.
    pub congestion: &'a str,
    /// The rate to hold, or full speed.
    pub rate_bits_per_second: Option<u64>,
    /// How long to run before measuring.
    pub warm_up: Duration,
    /// How long to measure.
    pub window: Duration,
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Each CPU's counters over the window; `None` without a meter.
    pub interval: Option<Interval>,
    /// The window's length in seconds.
    pub seconds: f64,
    /// Bytes that reached the receiving program in the window.
    pub received_bytes: u64,
    /// What the sending process says it did in the window.
    pub sent: Outcome,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum FlowError {
    /// The path does not work here, in words. Other paths may.
    #[error("{0}")]
    Refused(String),
    /// The sending process failed, in words.
    #[error("the sending process failed: {0}")]
    Worker(String),
    /// The measuring process was not woken in time.
    #[error("the window slipped: it took {seconds:.3} s (the machine is too busy to measure)")]
    Slipped {
        /// How long it took.
        seconds: f64,
    },
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] SoakError),
    /// The connection failed.
    #[error("{step}: {source}")]
    Connection {
        /// What was being done.
        step: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl FlowError {
    fn at(step: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Connection { step: step.into(), source }
    }
}

/// What the receiver and the thread that reads the counters share.
#[derive(Debug, Default)]
struct Shared {
    received_bytes: AtomicU64,
    is_over: AtomicBool,
}

/// Says on drop that the flow is over.
struct Over<'a>(&'a Shared);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Relaxed);
    }
}

/// A child that is ended and waited for on drop; one that has ended already is left in peace.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Both fail only for a child that has been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A window may miss its length by this share. More, and this process was not woken in time: the counters
/// then cover time in which the sender had stopped.
const WINDOW_TOLERANCE: f64 = 0.1;

impl Flow<'_> {
    /// Runs it and measures one window, with `meter` if there is one.
    pub fn run(&self, meter: Option<&Meter>) -> Result<Sample, FlowError> {
        let shared = &Shared::default();
        thread::scope(|scope| {
            // However this ends, the receiver must not wait for a sender that never comes.
            let over = Over(shared);
            let (address_out, address) = mpsc::channel();
            let (messages_out, messages) = mpsc::channel();
            let receiver = on(&self.lab.receiver, scope, move || self.receive(shared, address_out))?;
            let sender = on(&self.lab.sender, scope, move || self.send(&address, &messages_out))?;
            let sample = self.measure(shared, meter, &messages);
            drop(over);
            // What went wrong at an end says more than the silence that it left in the middle.
            join(sender)?;
            join(receiver)?;
            sample
        })
    }

    /// Waits for the steady pace, reads the counters twice, and hears what the sender did.
    fn measure(
        &self,
        shared: &Shared,
        meter: Option<&Meter>,
        messages: &Receiver<Message>,
    ) -> Result<Sample, FlowError> {
        let next = || match messages.recv() {
            Ok(Message::Refused(reason)) => Err(FlowError::Refused(reason)),
            Ok(Message::Failed(reason)) => Err(FlowError::Worker(reason)),
            Ok(message) => Ok(message),
            Err(_) => Err(FlowError::Worker("it ended without a word".into())),
        };
        let Message::Started { at_ns } = next()? else {
            return Err(FlowError::Worker("it spoke out of turn".into()));
        };
        let window = crate::worker::window(at_ns, self.warm_up, self.window);
        crate::worker::sleep_until(window.start);
        let before = meter.map(Meter::snapshot).transpose()?;
        let (start, received_before) = (Instant::now(), shared.received_bytes.load(Relaxed));
        crate::worker::sleep_until(window.end);
        let after = meter.map(Meter::snapshot).transpose()?;
        let (end, received_after) = (Instant::now(), shared.received_bytes.load(Relaxed));
        let Message::Done(sent) = next()? else {
            return Err(FlowError::Worker("it spoke out of turn".into()));
        };
        let seconds = (end - start).as_secs_f64();
        if (seconds / self.window.as_secs_f64() - 1.0).abs() > WINDOW_TOLERANCE {
            return Err(FlowError::Slipped { seconds });
        }
        Ok(Sample {
            interval: after.zip(before).map(|(after, before)| after.since(&before)),
            seconds,
            received_bytes: received_after - received_before,
            sent,
        })
    }

    fn receive(&self, shared: &Shared, address_out: Sender<SocketAddr>) -> Result<(), FlowError> {
        let host = self.lab.receiver.address();
        let listener = TcpListener::bind((host, 0)).map_err(FlowError::at(format!("listening on {host}")))?;
        let address = listener.local_addr().map_err(FlowError::at("listening"))?;
        // The sending thread is gone only if it failed, and says why itself.
        if address_out.send(address).is_err() {
            return Ok(());
        }
        drop(address_out);
        let Some(mut stream) = accept(&listener, shared)? else { return Ok(()) };
        stream.set_read_timeout(Some(RECEIVE_INTERVAL)).map_err(FlowError::at("setting a timeout"))?;
        let mut buffer = vec![0; RECEIVE_BYTES];
        let mut over_since = None;
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    shared.received_bytes.fetch_add(count as u64, Relaxed);
                }
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                // A sender that failed says more about why than its reset does.
                Err(_) => return Ok(()),
            }
            if shared.is_over.load(Relaxed)
                && over_since.get_or_insert_with(Instant::now).elapsed() > RECEIVE_AFTER
            {
                return Ok(());
            }
        }
    }

    /// Starts the sending process, gives it its job and passes on what it says until it ends.
    fn send(&self, address: &Receiver<SocketAddr>, messages: &Sender<Message>) -> Result<(), FlowError> {
        let Ok(address) = address.recv() else { return Ok(()) };
        let job = Job {
            address,
            path: self.path.name().into(),
            chunk_bytes: self.chunk_bytes,
            cork: self.cork,
            congestion: self.congestion.into(),
            rate_bits_per_second: self.rate_bits_per_second,
            warm_up: self.warm_up,
            window: self.window,
            pieces: self.workload.handed_over(),
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg(crate::worker::ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A group of its own, so that a terminal's Ctrl-C ends the run in order and not the process in the
        // middle of it.
        let mut child = haul_sys::child::dies_with_parent(command.process_group(0))
            .spawn()
            .map(Ended)
            .map_err(FlowError::at("starting the sending process"))?;
        if let Some(mut input) = child.0.stdin.take() {
            let text = serde_json::to_vec(&job).map_err(|error| FlowError::Worker(error.to_string()))?;
            input.write_all(&text).map_err(FlowError::at("handing the job to the sending process"))?;
        }
        if let Some(output) = child.0.stdout.take() {
            for line in BufReader::new(output).lines() {
                let line = line.map_err(FlowError::at("hearing the sending process"))?;
                let message = serde_json::from_str(&line)
                    .unwrap_or_else(|error| Message::Failed(format!("it said {line:?}: {error}")));
                // Nobody listens any more only when the measuring failed, and that is reported.
                let _ = messages.send(message);
            }
        }
        child.0.wait().map(drop).map_err(FlowError::at("waiting for the sending process"))
    }
}

/// Waits for the sender's connection, or `None` when the flow ends before it comes.
fn accept(listener: &TcpListener, shared: &Shared) -> Result<Option<TcpStream>, FlowError> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let short = Timespec { tv_sec: 0, tv_nsec: i64::from(RECEIVE_INTERVAL.subsec_nanos()) };
    while !shared.is_over.load(Relaxed) {
        let mut wanted = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut wanted, Some(&short)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => {
                let accepted = listener.accept().map_err(FlowError::at("accepting"))?;
                return Ok(Some(accepted.0));
            }
            Err(errno) => return Err(FlowError::at("waiting for a connection")(errno.into())),
        }
    }
    Ok(None)
}

/// Starts `work` on a thread of `host`.
fn on<'scope, T: Send + 'scope>(
    host: &'scope Host,
    scope: &'scope thread::Scope<'scope, '_>,
    work: impl FnOnce() -> Result<T, FlowError> + Send + 'scope,
) -> Result<thread::ScopedJoinHandle<'scope, Result<T, FlowError>>, FlowError> {
    thread::Builder::new()
        .spawn_scoped(scope, move || {
            host.enter()?;
            work()
        })
        .map_err(FlowError::at("starting a thread"))
}

fn join<T>(thread: thread::ScopedJoinHandle<'_, Result<T, FlowError>>) -> Result<T, FlowError> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
