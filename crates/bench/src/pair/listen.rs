//! The machine that listens: takes one peer at a time, starts the workers that it asks for and measures beside them.
//!
//! A peer is not trusted. It can have bytes received and thrown away here, and have them sent back to itself: to nobody else, from
//! no file, and from nobody else. What takes memory or time has a limit; whoever says nothing for a minute is left.

use super::protocol::{Line, Reply, Request, SCHEMA, read_line, write_line};
use super::{GREETING_MAX, SILENCE_MAX};
use crate::flow::FlowError;
use crate::host::HostFacts;
use crate::worker::{ARGUMENT, Job, Message, Task, Window, now_ns, sleep_until};
use crate::{BenchError, congestion};
use haul_soak::Meter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often somebody who waits for a peer looks whether to go on.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How long the next one waits for the last one's end.
const HANGING_UP_MAX: Duration = Duration::from_secs(1);
/// The longest request.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// The longest calibration.
const CALIBRATION_MAX: Duration = Duration::from_secs(5);
/// The longest window, and the longest wait for one.
const WINDOW_MAX: Duration = Duration::from_secs(20);
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
        return Err(BenchError::BadInput("port 65535 has none after it, which bytes would come to".into()));
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
                let _ = refuse(&stream, "it measures with another machine now; wait for the end of that");
                continue;
            }
            let Ok(mine) = stream.try_clone() else { continue };
            *lock() = Some(mine);
            scope.spawn(move || {
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                tell(&format!("{peer} has come"));
                let end = Session::serve(&stream, peer.ip(), port);
                let why = end.err().map_or(String::new(), |error| format!(": {error}"));
                *lock() = None;
                tell(&format!("{peer} has gone{why}"));
            });
        }
        if let Some(stream) = lock().as_ref() {
            // Whoever is served finds that the conversation is over.
            let _ = stream.shutdown(Shutdown::Both);
        }
        Ok(())
    })
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
}

/// A worker on its way: it ends when its input does.
struct Worker {
    input: ChildStdin,
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
        match read_line(&mut reader, REQUEST_BYTES_MAX).map_err(at("greeting"))? {
            Line::Said(Request::Hello { schema, .. }) if schema == SCHEMA => {}
            _ => {
                let reason = format!("this is haul {}, which speaks {SCHEMA}", env!("CARGO_PKG_VERSION"));
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
        };
        let congestion = congestion::settable();
        session.say(&Reply::Hello { schema: SCHEMA.into(), host: HostFacts::here(), congestion })?;
        stream.set_read_timeout(Some(SILENCE_MAX)).map_err(at("listening"))?;
        loop {
            let line = match read_line(&mut reader, REQUEST_BYTES_MAX) {
                // It hung up without hearing the last word.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Line::End,
                line => line.map_err(at("listening"))?,
            };
            match line {
                Line::Said(request) => session.answer(request)?,
                Line::Strange(_) => return Err(FlowError::Worker("it said something strange".into())),
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
            Request::Start { task, peer } => {
                self.stop();
                match self.checked(*task, peer).and_then(|job| self.start(&job)) {
                    Ok(worker) => {
                        self.worker = Some(worker);
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
    fn checked(&self, task: Task, peer: Option<SocketAddr>) -> Result<Job, String> {
        let bytes = match &task {
            Task::Receive(receiving) => receiving.buffer_bytes,
            Task::Forward(forwarding) => forwarding.buffer_bytes.unwrap_or(0),
            _ => return Err("this end only receives and forwards".into()),
        };
        if bytes > BUFFER_BYTES_MAX {
            return Err(format!("a buffer of {bytes} bytes is more than {BUFFER_BYTES_MAX}"));
        }
        if peer.is_some_and(|peer| peer.ip().to_canonical() != self.peer) {
            return Err(format!("bytes are forwarded to {} alone, who asks for it", self.peer));
        }
        Ok(Job { host: self.host, port: self.port, only_from: Some(self.peer), peer, task })
    }

    fn start(&self, job: &Job) -> Result<Worker, String> {
        let failed = |error: io::Error| format!("starting a process: {error}");
        let mut command = Command::new("/proc/self/exe");
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            haul_sys::child::dies_with_parent(command.process_group(0)).spawn().map_err(failed)?;
        let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a process has no pipes".into());
        };
        write_line(&mut input, job).map_err(failed)?;
        let writer = Arc::clone(&self.writer);
        let relay = thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let message = serde_json::from_str(&line)
                    .unwrap_or_else(|error| Message::Failed(format!("it said {line:?}: {error}")));
                // A peer that is gone is noticed where it is listened to.
                let _ = say(&writer, &Reply::Said(message));
            }
            let _ = child.wait();
            let _ = say(&writer, &Reply::Ended);
        });
        Ok(Worker { input, relay })
    }

    fn tell_worker(&mut self, word: &impl serde::Serialize) {
        if let Some(worker) = &mut self.worker {
            // One that has ended has said why.
            let _ = write_line(&mut worker.input, word).and_then(|()| worker.input.flush());
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
