//! The listening machine: serves one peer at a time, starts the workers that the peer requests, and
//! measures while they run.
//!
//! A peer is not trusted. It can send bytes that are received and discarded here. One receive
//! method writes them repeatedly into 64 MiB of an unnamed temporary file. It can also have bytes
//! forwarded to the address from which it comes. Nothing else is sent, and no file is read. Memory
//! and time are limited, and a peer that starts no worker for a minute is disconnected.
//!
//! A peer is identified by its address. If that is a gateway's, all hosts behind the gateway are
//! the same peer, and bytes are forwarded to the gateway.

use crate::congestion;
use crate::error::BenchError;
use crate::flow::FlowError;
use crate::flow::start::WorkerProcess;
use crate::host::HostFacts;
use crate::pair::HANDSHAKE_TIMEOUT;
use crate::pair::protocol::{MeterFacts, Reply, Request, SCHEMA};
use haul_soak::Meter;
use haul_soak::exclusive::MeasurementLock;
use haul_workers::lines::{Line, read_line, write_line};
use haul_workers::worker::socket::{SocketOptions, listen_at};
use haul_workers::worker::{Job, Message, Task, Window, now_ns, sleep_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io::{self, BufReader};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::ChildStdin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval at which a listener without connections checks whether to stop.
const ACCEPT_POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Time for which a new peer waits for the previous session to end.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum length of a request.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Maximum length of a calibration.
const CALIBRATION_MAX: Duration = Duration::from_secs(5);
/// Maximum length of a window, and of the wait before it.
const WINDOW_MAX: Duration = Duration::from_secs(5);
/// Time for which a peer is served without starting a worker.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Lowest port to which bytes are forwarded. A socket that binds to any free port gets no lower
/// one; lower ports belong to services.
const PORT_MIN: u16 = 1024;
/// Maximum socket buffer that a peer may request.
const SOCKET_BYTES_MAX: usize = 64 << 20;
/// Maximum receive buffer that a peer may request.
const BUFFER_BYTES_MAX: usize = 1 << 30;

/// Listens on the first of `addresses` that can be bound, until `is_stopped` is true, and serves
/// one peer at a time. `report` receives one line for each event.
///
/// Control connections arrive on the port of the address, data connections on the next port.
pub fn listen(
    addresses: &[SocketAddr],
    is_stopped: &AtomicBool,
    report: &(dyn Fn(&str) + Sync),
) -> Result<(), BenchError> {
    let bind_error = |address: &dyn fmt::Display, error: io::Error| {
        BenchError::BadInput(format!(
            "cannot listen on {address}: {error} (choose another with --listen ADDRESS:PORT)"
        ))
    };
    let first = addresses.first().map_or(String::new(), SocketAddr::to_string);
    let listener = first_listener(addresses).map_err(|error| bind_error(&first, error))?;
    let address = listener.local_addr().map_err(|error| bind_error(&first, error))?;
    let Some(port) = address.port().checked_add(1) else {
        return Err(BenchError::BadInput(
            "no port for the data follows port 65535: choose a lower one".into(),
        ));
    };
    let data_address = SocketAddr::new(address.ip(), port);
    // An error is reported now instead of in the first row.
    drop(listen_at(data_address).map_err(|error| bind_error(&data_address, error))?);
    report(&format!("listening on {address}, for data on port {port}; Ctrl-C ends"));
    let active: Mutex<Option<TcpStream>> = Mutex::new(None);
    let active = &active;
    let lock = move || active.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        while !is_stopped.load(Relaxed) {
            let mut poll_fds = [PollFd::new(&listener, PollFlags::IN)];
            if poll(&mut poll_fds, Some(&ACCEPT_POLL_INTERVAL)).unwrap_or(0) == 0 {
                continue;
            }
            // Fails if the peer has already closed the connection, which needs no answer.
            let Ok((stream, peer)) = listener.accept() else { continue };
            // The previous peer may be closing its connection at this time.
            let deadline = Instant::now() + CLOSE_WAIT_MAX;
            while lock().is_some() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
            if lock().is_some() {
                let _ =
                    refuse(&stream, "it is measuring with another machine; wait until that ends");
                report(&format!("{} was refused: another is served", peer.ip().to_canonical()));
                continue;
            }
            let Ok(active_stream) = stream.try_clone() else { continue };
            *lock() = Some(active_stream);
            scope.spawn(move || {
                let _slot = PeerPermit(active);
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                report(&format!("{peer} has come"));
                let result = Session::serve(&stream, peer.ip(), port);
                let reason = result.err().map(|error| format!(": {}", describe(&error)));
                report(&format!("{peer} has gone{}", reason.unwrap_or_default()));
            });
        }
        if let Some(stream) = lock().as_ref() {
            report("stopping during a measurement");
            // The session's reader sees the end of the stream.
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(())
    })
}

/// Listens on the first address that can be bound.
fn first_listener(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut last = io::ErrorKind::InvalidInput.into();
    for &address in addresses {
        match listen_at(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The permit of the active peer, which another can get when this is dropped.
struct PeerPermit<'a>(&'a Mutex<Option<TcpStream>>);

impl Drop for PeerPermit<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The reason for the end of a session.
fn describe(error: &FlowError) -> String {
    match error {
        FlowError::Worker(reason) => reason.clone(),
        FlowError::Process { error, .. } => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                "it sent nothing for too long".into()
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                "it closed the connection".into()
            }
            _ => error.to_string(),
        },
        error => error.to_string(),
    }
}

fn refuse(stream: &TcpStream, reason: &str) -> io::Result<()> {
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    write_line(stream, &Reply::Refused(reason.into()))
}

/// Starts the meter, unless another haul measures on this machine. The peer gets the reason why the
/// meter cannot start.
///
/// A peer on this machine (`is_peer_here`) measures here and finds out itself that it cannot.
fn start_meter(
    stream: &TcpStream,
    is_peer_here: bool,
) -> Result<(Option<MeasurementLock>, Meter), FlowError> {
    let refuse = |reason: &str| refuse(stream, reason).map_err(FlowError::at("the handshake"));
    let lock = match MeasurementLock::try_acquire() {
        Ok(Err(holder)) if !is_peer_here && !holder.awaits_this_process() => {
            let process = holder.process.map_or("another container".into(), |process| {
                format!("process {process} ({})", holder.command)
            });
            let reason = format!("{process} measures there; wait until that ends");
            refuse(&reason)?;
            return Err(FlowError::Worker(reason));
        }
        // If others cannot be noticed, the measurement goes on.
        acquired => acquired.ok().and_then(Result::ok),
    };
    let cpus = haul_lab::allowed_cpus().map_err(FlowError::at("asking for this process's CPUs"))?;
    match Meter::start(&cpus) {
        Ok(meter) => Ok((lock, meter)),
        Err(error) => {
            refuse(&error.to_string())?;
            Err(error.into())
        }
    }
}

/// The session of one peer.
struct Session {
    peer: IpAddr,
    host: IpAddr,
    port: u16,
    writer: Arc<Mutex<TcpStream>>,
    meter: Meter,
    worker: Option<Worker>,
    /// The time of the last request to start a worker.
    last_start: Instant,
}

/// A running worker. It exits when its input is closed.
struct Worker {
    input: Option<ChildStdin>,
    relay: JoinHandle<()>,
}

impl Session {
    /// Handles the requests of `peer` until it closes the connection.
    fn serve(stream: &TcpStream, peer: IpAddr, port: u16) -> Result<(), FlowError> {
        let at = FlowError::at;
        stream.set_nodelay(true).map_err(at("the handshake"))?;
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(at("the handshake"))?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(at("the handshake"))?;
        let mut reader = BufReader::new(stream.try_clone().map_err(at("the handshake"))?);
        let deadline = Some(Instant::now() + HANDSHAKE_TIMEOUT);
        match read_line(&mut reader, REQUEST_BYTES_MAX, deadline).map_err(at("the handshake"))? {
            Line::Value(Request::Hello { schema, .. }) if schema == SCHEMA => {}
            _ => {
                let reason =
                    format!("this is haul {}, which speaks {SCHEMA}", env!("CARGO_PKG_VERSION"));
                refuse(stream, &reason).map_err(at("the handshake"))?;
                return Err(FlowError::Worker("it does not speak this version's protocol".into()));
            }
        }
        let host = stream.local_addr().map_err(at("the handshake"))?.ip().to_canonical();
        let (_lock, meter) = start_meter(stream, host == peer)?;
        let mut session = Self {
            peer,
            host,
            port,
            meter,
            writer: Arc::new(Mutex::new(stream.try_clone().map_err(at("the handshake"))?)),
            worker: None,
            last_start: Instant::now(),
        };
        session.send_reply(&Reply::Hello {
            schema: SCHEMA.into(),
            host: HostFacts::here(),
            congestion: congestion::settable(),
            meter: MeterFacts::local(),
        })?;
        stream.set_read_timeout(Some(IDLE_MAX)).map_err(at("reading a request"))?;
        loop {
            let deadline = Some(session.last_start + IDLE_MAX);
            let line = match read_line(&mut reader, REQUEST_BYTES_MAX, deadline) {
                // The peer closed the connection without reading the last reply.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Line::End,
                line => line.map_err(at("reading a request"))?,
            };
            if session.last_start.elapsed() > IDLE_MAX {
                return Err(FlowError::Worker("it started no worker for too long".into()));
            }
            match line {
                Line::Value(request) => session.handle(request)?,
                Line::Invalid(_) => {
                    return Err(FlowError::Worker("it sent an invalid request".into()));
                }
                Line::End => return Ok(()),
            }
        }
    }

    fn handle(&mut self, request: Request) -> Result<(), FlowError> {
        match request {
            Request::Hello { .. } => Err(FlowError::Worker("it sent a second Hello".into())),
            Request::Calibrate { length_ms } => {
                let length = Duration::from_millis(length_ms).min(CALIBRATION_MAX);
                self.send_reply(&Reply::Baseline(self.meter.calibrate(length)))
            }
            Request::Start { task, socket, peer } => {
                self.stop();
                self.last_start = Instant::now();
                match self.check_job(*task, socket, peer) {
                    Ok(job) => {
                        self.worker = Some(self.start(job));
                        Ok(())
                    }
                    Err(reason) => {
                        self.send_reply(&Reply::Refused(reason))?;
                        self.send_reply(&Reply::Ended)
                    }
                }
            }
            Request::Window { start_in_ns, length_ns } => {
                let limited = |ns: u64| Duration::from_nanos(ns).min(WINDOW_MAX);
                let window = Window::of(now_ns(), limited(start_in_ns), limited(length_ns));
                self.write_to_worker(&window);
                sleep_until(window.start_ns);
                let before = self.meter.snapshot()?;
                sleep_until(window.end_ns);
                let after = self.meter.snapshot()?;
                self.send_reply(&Reply::Measured(after.since(&before)))
            }
            Request::End => {
                self.write_to_worker(&"end");
                Ok(())
            }
            Request::Stop => {
                self.stop();
                Ok(())
            }
        }
    }

    /// Builds the requested job, or returns the reason why it is refused.
    fn check_job(
        &self,
        task: Task,
        socket: SocketOptions,
        peer: Option<SocketAddr>,
    ) -> Result<Job, String> {
        let buffer_bytes = match &task {
            Task::Receive(receiving) => receiving.buffer_bytes,
            Task::Forward(forwarding) => forwarding.buffer_bytes.unwrap_or(0),
            _ => return Err("this end only receives and forwards".into()),
        };
        if buffer_bytes > BUFFER_BYTES_MAX {
            return Err(format!(
                "a buffer of {buffer_bytes} bytes is more than {BUFFER_BYTES_MAX}"
            ));
        }
        if socket.buffer_bytes.is_some_and(|bytes| bytes > SOCKET_BYTES_MAX) {
            return Err(format!(
                "socket buffers of more than {SOCKET_BYTES_MAX} bytes are not set here"
            ));
        }
        // An unknown name would make the kernel look for a module.
        if socket.congestion.as_ref().is_some_and(|name| !congestion::settable().contains(name)) {
            return Err("that congestion control cannot be set here".into());
        }
        if let Some(peer) = peer {
            self.check_destination(peer)?;
        }
        Ok(Job { host: self.host, port: self.port, only_from: Some(self.peer), peer, socket, task })
    }

    /// Allows forwarding to the requesting peer alone, and not to a service. That excludes services
    /// of this machine and, if the peer's address belongs to a gateway, services of the gateway.
    fn check_destination(&self, to: SocketAddr) -> Result<(), String> {
        let address = to.ip().to_canonical();
        if address != self.peer {
            return Err(format!("bytes are forwarded to {} alone, the requesting peer", self.peer));
        }
        let is_own = haul_lab_sys::interface::addresses()
            .map_or(true, |own| own.iter().any(|own| own.address == address));
        if address.is_loopback() || is_own {
            return Err(format!(
                "{address} is an address of this machine, to which nothing is forwarded"
            ));
        }
        if to.port() < PORT_MIN {
            return Err(format!("port {} is a service's", to.port()));
        }
        Ok(())
    }

    /// Starts a worker on a separate thread. The worker dies with that thread, so the same thread
    /// reads its messages.
    fn start(&self, job: Job) -> Worker {
        let writer = Arc::clone(&self.writer);
        let (input_tx, input_rx) = mpsc::channel();
        let relay = thread::spawn(move || {
            // If the peer has disconnected, the session's reader detects that.
            let relay_message = |message| drop(send_reply(&writer, &Reply::WorkerMessage(message)));
            let result = WorkerProcess::start(&job, None).and_then(|mut worker| {
                let _ = input_tx.send(worker.input.take());
                worker.read_messages(relay_message)
            });
            if let Err(error) = result {
                relay_message(Message::Failed(error.to_string()));
            }
            let _ = send_reply(&writer, &Reply::Ended);
        });
        Worker { input: input_rx.recv().ok().flatten(), relay }
    }

    fn write_to_worker(&mut self, line: &impl serde::Serialize) {
        if let Some(input) = self.worker.as_mut().and_then(|worker| worker.input.as_mut()) {
            // A worker that has exited has already reported why.
            let _ = write_line(input, line);
        }
    }

    fn stop(&mut self) {
        if let Some(Worker { input, relay }) = self.worker.take() {
            drop(input);
            let _ = relay.join();
        }
    }

    fn send_reply(&self, reply: &Reply) -> Result<(), FlowError> {
        send_reply(&self.writer, reply).map_err(FlowError::at("sending a reply"))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop();
    }
}

fn send_reply(writer: &Mutex<TcpStream>, reply: &Reply) -> io::Result<()> {
    write_line(&*writer.lock().unwrap_or_else(PoisonError::into_inner), reply)
}
