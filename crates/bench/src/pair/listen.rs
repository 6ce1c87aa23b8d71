//! The machine that listens: takes one peer at a time, starts the workers that it asks for and measures beside them.
//!
//! A peer is not trusted. It can have bytes received and thrown away here (one way of receiving writes them over and over into 64 MiB
//! of an unnamed temporary file), and have them sent back to the address it comes from. Nothing else is sent anywhere, and no file is
//! read. What takes memory or time has a limit; whoever has nothing done for a minute is left.
//!
//! A peer is known by its address. Where that is a gateway's, so are all behind it, and what is sent back goes to the gateway.

use super::GREETING_MAX;
use super::protocol::{MeterFacts, Reply, Request, SCHEMA};
use crate::flow::FlowError;
use crate::flow::start::Started;
use crate::host::HostFacts;
use crate::lines::{Line, read_line, write_line};
use crate::worker::socket::SocketOptions;
use crate::worker::{Job, Message, Task, Window, now_ns, sleep_until};
use crate::{BenchError, congestion};
use haul_soak::Meter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io::{self, BufReader};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::ChildStdin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often somebody who waits for a peer looks whether to go on.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How long the next one waits for the last one's end.
const HANGING_UP_MAX: Duration = Duration::from_secs(1);
/// The longest request.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The longest calibration.
const CALIBRATION_MAX: Duration = Duration::from_secs(5);
/// The longest window, and the longest wait for one.
const WINDOW_MAX: Duration = Duration::from_secs(5);
/// How long a peer is served that has no worker started.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// The least port that a program gets which asks for any.
const PORT_MIN: u16 = 1024;
/// The largest socket buffer that a peer may set here.
const SOCKET_BYTES_MAX: usize = 64 << 20;
/// The largest buffer that a peer may have filled here.
const BUFFER_BYTES_MAX: usize = 1 << 30;

/// Listens at the first of `addresses` that can be had until `is_stopped`, and serves whoever comes, one at a time. `tell`
/// hears what happens.
///
/// Bytes come to the port after it.
pub fn listen(
    addresses: &[SocketAddr],
    is_stopped: &AtomicBool,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<(), BenchError> {
    let taken = |address: &dyn fmt::Display, error: io::Error| {
        BenchError::BadInput(format!(
            "cannot listen on {address}: {error} (choose another with --listen ADDRESS:PORT)"
        ))
    };
    let first = addresses.first().map_or(String::new(), SocketAddr::to_string);
    let listener = TcpListener::bind(addresses).map_err(|error| taken(&first, error))?;
    let address = listener.local_addr().map_err(|error| taken(&first, error))?;
    let Some(port) = address.port().checked_add(1) else {
        return Err(BenchError::BadInput(
            "port 65535 has none after it, which bytes would come to".into(),
        ));
    };
    let for_bytes = SocketAddr::new(address.ip(), port);
    // Whether it can be had is better known now than in the first row.
    drop(TcpListener::bind(for_bytes).map_err(|error| taken(&for_bytes, error))?);
    tell(&format!("listening on {address}, for bytes on port {port}; Ctrl-C ends"));
    let served: Mutex<Option<TcpStream>> = Mutex::new(None);
    let served = &served;
    let lock = move || served.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        while !is_stopped.load(Relaxed) {
            let wait = poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&LOOK_INTERVAL));
            if wait.unwrap_or(0) == 0 {
                continue;
            }
            // Whoever has hung up meanwhile is not there to be told.
            let Ok((stream, peer)) = listener.accept() else { continue };
            // Whoever was served last may just be hanging up.
            let patience = Instant::now() + HANGING_UP_MAX;
            while lock().is_some() && Instant::now() < patience {
                thread::sleep(Duration::from_millis(10));
            }
            if lock().is_some() {
                let _ =
                    refuse(&stream, "it is taken by another machine now; wait for the end of that");
                tell(&format!("{} was refused: another is served", peer.ip().to_canonical()));
                continue;
            }
            let Ok(mine) = stream.try_clone() else { continue };
            *lock() = Some(mine);
            scope.spawn(move || {
                let _slot = Slot(served);
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                tell(&format!("{peer} has come"));
                let end = Session::serve(&stream, peer.ip(), port);
                let why = end.err().map_or(String::new(), |error| format!(": {}", words(&error)));
                tell(&format!("{peer} has gone{why}"));
            });
        }
        if let Some(stream) = lock().as_ref() {
            tell("ending in the middle of a measurement");
            // Whoever is served finds that the conversation is over.
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(())
    })
}

/// The place of the one who is served, free again when this is dropped.
struct Slot<'a>(&'a Mutex<Option<TcpStream>>);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Why somebody has gone.
fn words(error: &FlowError) -> String {
    match error {
        FlowError::Worker(words) => words.clone(),
        FlowError::Process { source, .. } => match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                "it said nothing for too long".into()
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => "it hung up".into(),
            _ => error.to_string(),
        },
        error => error.to_string(),
    }
}

fn refuse(stream: &TcpStream, reason: &str) -> io::Result<()> {
    stream.set_write_timeout(Some(GREETING_MAX))?;
    write_line(stream, &Reply::Refused(reason.into()))
}

/// One peer's conversation.
struct Session {
    peer: IpAddr,
    host: IpAddr,
    port: u16,
    writer: Arc<Mutex<TcpStream>>,
    meter: Meter,
    worker: Option<Worker>,
    /// When a worker was last asked for.
    worked_at: Instant,
}

/// A worker on its way: it ends when its input does.
struct Worker {
    input: Option<ChildStdin>,
    relay: JoinHandle<()>,
}

impl Session {
    /// Does what `peer` asks for until it hangs up.
    fn serve(stream: &TcpStream, peer: IpAddr, port: u16) -> Result<(), FlowError> {
        let at = FlowError::at;
        stream.set_nodelay(true).map_err(at("greeting"))?;
        stream.set_read_timeout(Some(GREETING_MAX)).map_err(at("greeting"))?;
        stream.set_write_timeout(Some(GREETING_MAX)).map_err(at("greeting"))?;
        let mut reader = BufReader::new(stream.try_clone().map_err(at("greeting"))?);
        let deadline = Some(Instant::now() + GREETING_MAX);
        match read_line(&mut reader, REQUEST_BYTES_MAX, deadline).map_err(at("greeting"))? {
            Line::Said(Request::Hello { schema, .. }) if schema == SCHEMA => {}
            _ => {
                let reason =
                    format!("this is haul {}, which speaks {SCHEMA}", env!("CARGO_PKG_VERSION"));
                refuse(stream, &reason).map_err(at("greeting"))?;
                return Err(FlowError::Worker("it does not speak this version's protocol".into()));
            }
        }
        let cpus = haul_lab::allowed_cpus().map_err(at("asking for this process's CPUs"))?;
        let mut session = Self {
            peer,
            host: stream.local_addr().map_err(at("greeting"))?.ip().to_canonical(),
            port,
            meter: Meter::start(&cpus)?,
            writer: Arc::new(Mutex::new(stream.try_clone().map_err(at("greeting"))?)),
            worker: None,
            worked_at: Instant::now(),
        };
        session.say(&Reply::Hello {
            schema: SCHEMA.into(),
            host: HostFacts::here(),
            congestion: congestion::settable(),
            meter: MeterFacts::here(),
        })?;
        stream.set_read_timeout(Some(IDLE_MAX)).map_err(at("listening"))?;
        loop {
            let deadline = Some(session.worked_at + IDLE_MAX);
            let line = match read_line(&mut reader, REQUEST_BYTES_MAX, deadline) {
                // It hung up without hearing the last word.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Line::End,
                line => line.map_err(at("listening"))?,
            };
            if session.worked_at.elapsed() > IDLE_MAX {
                return Err(FlowError::Worker("it has had nothing done for too long".into()));
            }
            match line {
                Line::Said(request) => session.answer(request)?,
                Line::Strange(_) => {
                    return Err(FlowError::Worker("it said something strange".into()));
                }
                Line::End => return Ok(()),
            }
        }
    }

    fn answer(&mut self, request: Request) -> Result<(), FlowError> {
        match request {
            Request::Hello { .. } => Err(FlowError::Worker("it greeted twice".into())),
            Request::Calibrate { length_ms } => {
                let length = Duration::from_millis(length_ms).min(CALIBRATION_MAX);
                self.say(&Reply::Baseline(self.meter.calibrate(length)))
            }
            Request::Start { task, socket, peer } => {
                self.stop();
                self.worked_at = Instant::now();
                match self.checked(*task, socket, peer) {
                    Ok(job) => {
                        self.worker = Some(self.start(job));
                        Ok(())
                    }
                    Err(reason) => {
                        self.say(&Reply::Refused(reason))?;
                        self.say(&Reply::Ended)
                    }
                }
            }
            Request::Window { start_in_ns, length_ns } => {
                let limited = |ns: u64| Duration::from_nanos(ns).min(WINDOW_MAX);
                let window = Window::of(now_ns(), limited(start_in_ns), limited(length_ns));
                self.tell_worker(&window);
                sleep_until(window.start_ns);
                let before = self.meter.snapshot()?;
                sleep_until(window.end_ns);
                let after = self.meter.snapshot()?;
                self.say(&Reply::Measured(after.since(&before)))
            }
            Request::End => {
                self.tell_worker(&"end");
                Ok(())
            }
            Request::Stop => {
                self.stop();
                Ok(())
            }
        }
    }

    /// The job that is asked for, or why it is not done.
    fn checked(
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
        // The kernel would look for a module of any name.
        if socket.congestion.as_ref().is_some_and(|name| !congestion::settable().contains(name)) {
            return Err("that congestion control cannot be set here".into());
        }
        if let Some(peer) = peer {
            self.check_destination(peer)?;
        }
        Ok(Job { host: self.host, port: self.port, only_from: Some(self.peer), peer, socket, task })
    }

    /// Bytes are forwarded to whoever asks for it and to no service: neither of this machine nor, where the peer's address is a
    /// gateway's, of the gateway.
    fn check_destination(&self, to: SocketAddr) -> Result<(), String> {
        let address = to.ip().to_canonical();
        if address != self.peer {
            return Err(format!("bytes are forwarded to {} alone, who asks for it", self.peer));
        }
        let is_own = haul_sys::interface::addresses()
            .map_or(true, |own| own.iter().any(|own| own.address == address));
        if address.is_loopback() || is_own {
            return Err(format!(
                "{address} is this machine's own, and nothing is forwarded to itself"
            ));
        }
        if to.port() < PORT_MIN {
            return Err(format!("port {} is a service's", to.port()));
        }
        Ok(())
    }

    /// The thread that starts a worker is the one that it is tied to, so it starts there and is heard there.
    fn start(&self, job: Job) -> Worker {
        let writer = Arc::clone(&self.writer);
        let (input_out, input) = mpsc::channel();
        let relay = thread::spawn(move || {
            // A peer that is gone is noticed where it is listened to.
            let tell = |message| drop(say(&writer, &Reply::Said(message)));
            let heard = Started::start(&job).and_then(|mut worker| {
                let _ = input_out.send(worker.input.take());
                worker.hear(tell)
            });
            if let Err(error) = heard {
                tell(Message::Failed(error.to_string()));
            }
            let _ = say(&writer, &Reply::Ended);
        });
        Worker { input: input.recv().ok().flatten(), relay }
    }

    fn tell_worker(&mut self, word: &impl serde::Serialize) {
        if let Some(input) = self.worker.as_mut().and_then(|worker| worker.input.as_mut()) {
            // One that has ended has said why.
            let _ = write_line(input, word);
        }
    }

    fn stop(&mut self) {
        if let Some(Worker { input, relay }) = self.worker.take() {
            drop(input);
            let _ = relay.join();
        }
    }

    fn say(&self, reply: &Reply) -> Result<(), FlowError> {
        say(&self.writer, reply).map_err(FlowError::at("answering"))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop();
    }
}

fn say(writer: &Mutex<TcpStream>, reply: &Reply) -> io::Result<()> {
    write_line(&*writer.lock().unwrap_or_else(PoisonError::into_inner), reply)
}
