//! One connection under load, and a window of time cut out of it.
//!
//! The sending host sends a workload over and over through one path, the receiving host reads it into a buffer as an ordinary program
//! does, and while both run at their steady pace the counters are read at two moments.

use crate::workload::Opened;
use haul::{Counts, Options, Path, PathError, SendPath};
use haul_lab::{Host, Lab, LabError};
use haul_soak::{Interval, Meter, SoakError};
use haul_sys::rusage::{self, Usage, Who};
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// The receiver's buffer: what iperf3 and many servers use at most, and small enough for a second-level cache.
const RECEIVE_BYTES: usize = 128 * 1024;
/// How long the kernel may keep pages after the last byte was sent.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// How long connecting the two hosts may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// What to run.
#[derive(Debug, Clone)]
pub struct Flow<'a> {
    /// Between whom.
    pub lab: &'a Lab,
    /// What.
    pub workload: &'a Opened,
    /// Through which path.
    pub path: Path,
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
    /// What the sending thread did in the window, and what `getrusage` charged it for that.
    pub sent: Counts,
    /// See `sent`.
    pub usage: Usage,
    /// What the path did in all, settled: the kernel's word on copies.
    pub settled: Counts,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum FlowError {
    /// The path did not send.
    #[error(transparent)]
    Path(#[from] PathError),
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

/// What the three threads of a flow tell each other.
#[derive(Debug, Default)]
struct Shared {
    received_bytes: AtomicU64,
    is_measuring: AtomicBool,
    is_over: AtomicBool,
}

impl Flow<'_> {
    /// Runs it and measures one window, with `meter` if there is one.
    pub fn run(&self, meter: Option<&Meter>) -> Result<Sample, FlowError> {
        let shared = &Shared::default();
        thread::scope(|scope| {
            let (address_out, address) = mpsc::channel();
            let (ready_out, ready) = mpsc::channel();
            let receiver = on(&self.lab.receiver, scope, move || self.receive(shared, address_out))?;
            let sender = on(&self.lab.sender, scope, move || self.send(shared, &address, ready_out))?;
            // A side that fails drops its end of the channel, so this never waits for nothing.
            let window = ready.recv().ok().map(|stream| self.measure(shared, meter, &stream));
            shared.is_over.store(true, Relaxed);
            let sent = join(sender);
            join(receiver)?;
            let (sent, usage, settled) = sent?;
            let (interval, seconds, received_bytes) = window
                .ok_or_else(|| FlowError::at("starting the flow")(io::ErrorKind::BrokenPipe.into()))??;
            Ok(Sample { interval, seconds, received_bytes, sent, usage, settled })
        })
    }

    /// Waits for the steady pace, then reads the counters twice.
    fn measure(
        &self,
        shared: &Shared,
        meter: Option<&Meter>,
        stream: &TcpStream,
    ) -> Result<(Option<Interval>, f64, u64), FlowError> {
        thread::sleep(self.warm_up);
        let before = meter.map(Meter::snapshot).transpose()?;
        let (start, received_before) = (Instant::now(), shared.received_bytes.load(Relaxed));
        shared.is_measuring.store(true, Relaxed);
        thread::sleep(self.window);
        let after = meter.map(Meter::snapshot).transpose()?;
        let (end, received_after) = (Instant::now(), shared.received_bytes.load(Relaxed));
        shared.is_measuring.store(false, Relaxed);
        shared.is_over.store(true, Relaxed);
        // A sender that waits for a slow link wakes up by this; one that does not has seen the flag.
        let _ = stream.shutdown(Shutdown::Write);
        let interval = after.zip(before).map(|(after, before)| after.since(&before));
        Ok((interval, (end - start).as_secs_f64(), received_after - received_before))
    }

    fn receive(&self, shared: &Shared, address_out: Sender<SocketAddr>) -> Result<(), FlowError> {
        let host = self.lab.receiver.address();
        let listener = TcpListener::bind((host, 0)).map_err(FlowError::at(format!("listening on {host}")))?;
        let address = listener.local_addr().map_err(FlowError::at("listening"))?;
        if address_out.send(address).is_err() {
            return Ok(());
        }
        drop(address_out);
        let Some(mut stream) = accept(&listener, shared)? else { return Ok(()) };
        let mut buffer = vec![0; RECEIVE_BYTES];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    shared.received_bytes.fetch_add(count as u64, Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A sender that failed says more about why than its reset does.
                Err(_) => return Ok(()),
            }
        }
    }

    fn send(
        &self,
        shared: &Shared,
        address: &Receiver<SocketAddr>,
        ready: Sender<TcpStream>,
    ) -> Result<(Counts, Usage, Counts), FlowError> {
        let Ok(address) = address.recv() else {
            return Err(FlowError::at("waiting for the receiver")(io::ErrorKind::BrokenPipe.into()));
        };
        let stream = TcpStream::connect_timeout(&address, CONNECT_MAX)
            .map_err(FlowError::at(format!("connecting to {address}")))?;
        rustix::net::sockopt::set_tcp_congestion(&stream, self.congestion).map_err(|errno| {
            FlowError::at(format!("setting congestion control {}", self.congestion))(errno.into())
        })?;
        if let Some(rate) = self.rate_bits_per_second {
            haul_sys::sockopt::set_max_pacing_rate(&stream, rate / 8)
                .map_err(FlowError::at("setting SO_MAX_PACING_RATE"))?;
        }
        let options = Options { chunk_bytes: self.chunk_bytes, pipe_bytes: None };
        let mut path = self.path.open(stream.as_fd(), &options)?;
        let handle = stream.try_clone().map_err(FlowError::at("duplicating the socket"))?;
        let mut marks = Marks { announce: Some((ready, handle)), ..Marks::default() };
        loop {
            for source in &self.workload.sources {
                match self.send_one(shared, &stream, path.as_mut(), source, &mut marks) {
                    Ok(()) => {}
                    Err(_) if shared.is_over.load(Relaxed) => {}
                    Err(error) => return Err(error),
                }
                if shared.is_over.load(Relaxed) {
                    marks.close(&path.counts());
                    settle(path.as_mut(), &stream)?;
                    return Ok((marks.sent(), marks.usage(), path.counts()));
                }
            }
        }
    }

    fn send_one(
        &self,
        shared: &Shared,
        stream: &TcpStream,
        path: &mut dyn SendPath,
        source: &haul::Source,
        marks: &mut Marks,
    ) -> Result<(), FlowError> {
        let cork = |on| {
            rustix::net::sockopt::set_tcp_cork(stream, on)
                .map_err(|errno| FlowError::at("setting TCP_CORK")(errno.into()))
        };
        if self.cork {
            cork(true)?;
            marks.extra_calls += 1;
        }
        let mut range = 0..source.len();
        while !range.is_empty() && !shared.is_over.load(Relaxed) {
            marks.open(shared.is_measuring.load(Relaxed), path);
            range.start += path.send(stream.as_fd(), source, range.clone())?;
            marks.announce();
        }
        if self.cork {
            cork(false)?;
            marks.extra_calls += 1;
        }
        Ok(())
    }
}

/// The sending thread's own account at the two ends of the window.
#[derive(Debug, Default)]
struct Marks {
    /// Where to say that the path works here, and a handle to stop it by.
    announce: Option<(Sender<TcpStream>, TcpStream)>,
    extra_calls: u64,
    opened: Option<(Counts, Usage)>,
    closed: Option<(Counts, Usage)>,
}

impl Marks {
    fn announce(&mut self) {
        if let Some((ready, handle)) = self.announce.take() {
            // The other end is gone only if the flow is being given up.
            let _ = ready.send(handle);
        }
    }

    fn open(&mut self, is_measuring: bool, path: &dyn SendPath) {
        if is_measuring && self.opened.is_none() {
            self.opened = Some(self.now(&path.counts()));
        }
    }

    fn close(&mut self, counts: &Counts) {
        if self.closed.is_none() {
            self.closed = Some(self.now(counts));
        }
    }

    fn now(&self, counts: &Counts) -> (Counts, Usage) {
        let counts = Counts { calls: counts.calls + self.extra_calls, ..*counts };
        // The call cannot fail for the calling thread.
        (counts, rusage::usage(Who::Thread).unwrap_or_default())
    }

    fn sent(&self) -> Counts {
        match (&self.opened, &self.closed) {
            (Some((opened, _)), Some((closed, _))) => Counts {
                bytes: closed.bytes - opened.bytes,
                calls: closed.calls - opened.calls,
                zero_copied_bytes: closed.zero_copied_bytes - opened.zero_copied_bytes,
                copied_bytes: closed.copied_bytes - opened.copied_bytes,
            },
            _ => Counts::default(),
        }
    }

    fn usage(&self) -> Usage {
        match (&self.opened, &self.closed) {
            (Some((_, opened)), Some((_, closed))) => Usage {
                user: closed.user.saturating_sub(opened.user),
                system: closed.system.saturating_sub(opened.system),
                context_switches: closed.context_switches - opened.context_switches,
            },
            _ => Usage::default(),
        }
    }
}

/// Waits for the kernel's word on what it was lent.
fn settle(path: &mut dyn SendPath, stream: &TcpStream) -> Result<(), FlowError> {
    let deadline = Instant::now() + SETTLE_MAX;
    while path.settle(stream.as_fd())? > 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits for the sender's connection, or `None` when the flow ends before it comes.
fn accept(listener: &TcpListener, shared: &Shared) -> Result<Option<TcpStream>, FlowError> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let short = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    while !shared.is_over.load(Relaxed) {
        let mut wanted = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut wanted, Some(&short)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => {
                return listener.accept().map(|(stream, _)| Some(stream)).map_err(FlowError::at("accepting"));
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
