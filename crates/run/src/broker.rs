//! The broker: the process that keeps the leases of files whose pages are in flight.
//!
//! A program that sends a page by reference must keep the file from changing until the peer
//! acknowledged the page. So the broker holds a read lease of the file, for which every writer of
//! the file waits. When a writer waits, the broker forbids new pages, waits until the pages in
//! flight were acknowledged, and returns the lease. A peer that does not acknowledge within half of
//! the time that the kernel allows is reset, if the broker may do that.
//!
//! The broker is a separate process in a separate session, so that it outlives `haul run` and the
//! command: if one of them is killed, the broker keeps the leases until nothing is in flight.
//!
//! A program that uses this module calls [`run_if_asked`] at the beginning of `main`.

mod connections;
mod leases;

use haul_lab_sys::child::start_in_new_session;
use haul_lab_sys::shared_counters::SharedCounters;
use haul_server::fd_channel::FdChannel;
use haul_tally::message::{HEARTBEAT_MS, LeaseAnswer, REQUEST_LEASE, REQUEST_TALLY, TOKEN_BYTES};
use haul_tally::{NotElided, header};
use leases::Leases;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

/// Beginning of the name of a session's directory.
pub const DIRECTORY_PREFIX: &str = "haul-run-";
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Command-line argument that turns a program into the broker. The directory of the session
/// follows.
const ARGUMENT: &str = "run-broker";

/// Starts the broker. It ends when `lifeline`, the other end of which this process keeps, is closed
/// and nothing is in flight.
pub fn start(
    listener: OwnedFd,
    tally: OwnedFd,
    lifeline: OwnedFd,
    directory: &std::path::Path,
) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(ARGUMENT).arg(directory);
    command.stdin(lifeline).stdout(tally).stderr(Stdio::from(listener));
    start_in_new_session(&mut command).spawn()
}

/// Turns this process into the broker if it was started as one; returns its exit code in that case.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let directory = PathBuf::from(arguments.next()?);
    let Ok(broker) = Broker::new() else {
        eprintln!("haul: the argument {ARGUMENT} is internal to haul run");
        return Some(ExitCode::FAILURE);
    };
    // A broker that fails leaves no lease behind, and the processes copy.
    let code = if broker.run().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if name.starts_with(DIRECTORY_PREFIX) {
        let _ = std::fs::remove_dir_all(directory);
    }
    Some(code)
}

/// What the broker waits for, and its leases.
struct Broker {
    lifeline: OwnedFd,
    listener: OwnedFd,
    /// SIGURG: a program waits for a lease.
    signal: UnixStream,
    clients: Vec<FdChannel>,
    leases: Leases,
}

impl Broker {
    /// Takes what the process of `haul run` left in the standard descriptors.
    fn new() -> io::Result<Self> {
        let lifeline = rustix::io::dup(io::stdin())?;
        let listener = rustix::io::dup(io::stderr())?;
        let tally = SharedCounters::open(rustix::io::dup(io::stdout())?)?;
        let (signal, sender) = UnixStream::pair()?;
        signal.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGURG, sender)?;
        raise_descriptor_limit();
        Ok(Self { lifeline, listener, signal, clients: Vec::new(), leases: Leases::new(tally) })
    }

    fn run(mut self) -> io::Result<()> {
        while self.turn()? {}
        Ok(())
    }

    /// Waits for something to do, and does it. Returns whether there is more to come.
    fn turn(&mut self) -> io::Result<bool> {
        self.leases.give_sign_of_life();
        let heartbeat = Duration::from_millis(HEARTBEAT_MS);
        let interval = self.leases.drain_interval().map_or(heartbeat, |wait| wait.min(heartbeat));
        let is_ending = self.leases.is_ending();
        let mut waited = vec![
            PollFd::new(&self.signal, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        if !is_ending {
            waited.push(PollFd::new(&self.lifeline, PollFlags::IN));
        }
        let first_client = waited.len();
        waited.extend(self.clients.iter().map(|client| PollFd::new(client, PollFlags::IN)));
        let interval = Timespec::try_from(interval).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut waited, Some(&interval)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let is_ready: Vec<bool> = waited.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(waited);
        if is_ready[0] {
            while io::Read::read(&mut self.signal, &mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
        }
        if is_ready[1] {
            self.accept();
        }
        if !is_ending && is_ready[2] {
            self.leases.end();
        }
        let mut ready = is_ready[first_client..].iter().copied();
        let leases = &mut self.leases;
        self.clients.retain(|client| match ready.next() {
            Some(true) => serve(client, leases).is_ok(),
            // Also a client that was accepted just now.
            _ => true,
        });
        self.leases.step();
        Ok(!(self.leases.is_ending() && self.leases.is_empty()))
    }

    fn accept(&mut self) {
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(client) => self.clients.push(FdChannel::from_socket(client)),
            // The process closed the connection, or this process has too many descriptors. The
            // listener stays readable in the second case.
            Err(_) => thread::sleep(ACCEPT_PAUSE),
        }
    }
}

/// Answers one request. An error ends the connection.
fn serve(client: &FdChannel, leases: &mut Leases) -> io::Result<()> {
    let request = client.try_receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut descriptors = request.descriptors.into_iter();
    let (token, kind) = request.bytes.split_at_checked(TOKEN_BYTES).unwrap_or_default();
    if !is_token(leases.tally(), token) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    match kind {
        [REQUEST_TALLY] => client.send(&[REQUEST_TALLY], &[leases.tally().as_fd()]),
        [REQUEST_LEASE] => {
            let file = descriptors.next().ok_or(io::ErrorKind::InvalidInput)?;
            let answer = leases.grant(file).map_err(|reason| {
                let position = NotElided::ALL.iter().position(|&known| known == reason);
                position.unwrap_or(0) as u16
            });
            client.try_send(&LeaseAnswer(answer).to_bytes())
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether a request has the token of the run, which only processes of the command know.
fn is_token(tally: &SharedCounters, token: &[u8]) -> bool {
    let words = (0..TOKEN_BYTES / 8).map(|index| tally.get(header::TOKEN + index).load(SeqCst));
    let expected: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    token == expected
}

/// Allows as many descriptors as the hard limit does: one for each lease and each process.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Fails only if another program lowered the hard limit in between.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Stops the elision in all processes of a run.
pub fn stop_eliding(tally: &SharedCounters) {
    tally.get(header::IS_ELIDING).store(0, SeqCst);
}
