//! One measurement at a time: a meter takes all the time that a CPU is idle, so two meters read
//! each other as load.
//!
//! A measuring process listens on an abstract Unix socket, whose name one process at a time can
//! have. The kernel frees the name when the process ends in any way. A second process connects to
//! the socket to learn which process measures.
//!
//! Abstract names belong to a network namespace, so measurements in two containers do not notice
//! each other.
//!
//! A program that calls [`manage`] takes part: its first meter waits for the other process, and the
//! lock is held until [`end`]. Otherwise meters start at once.

use crate::error::SoakError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, sockopt::socket_peercred,
};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

const NAME: &[u8] = b"haul-measurement";
/// How often a process tries to take the lock or to reach its holder.
const TRIES_MAX: usize = 100;
/// Connections of processes that wait for the holder.
const BACKLOG: i32 = 128;
/// The byte by which a process states that it measures nevertheless.
const FORCED: u8 = b'f';

/// How a program measures while another process does.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Whether to measure nevertheless, instead of waiting for the other process.
    pub is_forced: bool,
    /// Ends the waiting when it becomes true.
    pub is_stopped: Arc<AtomicBool>,
    /// Reports the other process once.
    pub report: fn(Notice<'_>),
}

/// What a program learns of another process that measures.
#[derive(Debug, Clone, Copy)]
pub enum Notice<'a> {
    /// This process waits for the other one to end.
    Waiting(&'a Holder),
    /// Both processes measure at the same time, so both read the other as load.
    Together(&'a Holder),
}

/// The state of this process.
enum State {
    Unmanaged,
    Managed(Policy),
    /// The lock is absent if this process measures together with another one.
    Measuring(Option<MeasurementLock>),
}

static STATE: Mutex<State> = Mutex::new(State::Unmanaged);

/// Interval at which a waiting process checks whether it was stopped.
const WAIT_INTERVAL: Duration = Duration::from_millis(200);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the meters of this process take part.
pub fn manage(policy: Policy) {
    *state() = State::Managed(policy);
}

/// Takes the lock before the first measurement, and waits for it if the policy says so. Later calls
/// do nothing.
pub fn begin() -> Result<(), SoakError> {
    let mut state = state();
    let State::Managed(policy) = &*state else { return Ok(()) };
    let failed = |error| SoakError::Process { step: "looking for other measurements", error };
    let mut is_reported = false;
    let lock = loop {
        let holder = match MeasurementLock::try_acquire().map_err(failed)? {
            Ok(lock) => break Some(lock),
            Err(holder) => holder,
        };
        // An ancestor waits for this process.
        if policy.is_forced || holder.is_ancestor() {
            holder.disturb();
            (policy.report)(Notice::Together(&holder));
            break None;
        }
        if !is_reported {
            (policy.report)(Notice::Waiting(&holder));
            is_reported = true;
        }
        while !holder.has_ended() {
            if policy.is_stopped.load(Relaxed) {
                return Err(SoakError::Interrupted);
            }
        }
    };
    *state = State::Measuring(lock);
    Ok(())
}

/// Releases the lock. Returns whether another process measured at the same time, because it was
/// forced to.
pub fn end() -> bool {
    match std::mem::replace(&mut *state(), State::Unmanaged) {
        State::Measuring(Some(lock)) => lock.was_disturbed(),
        _ => false,
    }
}

/// The right to measure, which one process at a time has.
#[derive(Debug)]
pub struct MeasurementLock(OwnedFd);

/// Another process that measures.
#[derive(Debug)]
pub struct Holder {
    socket: OwnedFd,
    /// The process ID; `None` if the process is of another process namespace.
    pub process: Option<u32>,
    /// The command line, as far as `/proc` shows it.
    pub command: String,
}

impl MeasurementLock {
    /// Takes the lock; the process that has it, if another one does.
    pub fn try_acquire() -> io::Result<Result<Self, Holder>> {
        let address = SocketAddrUnix::new_abstract_name(NAME)?;
        // The holder may end between the two calls.
        for _ in 0..TRIES_MAX {
            let socket = new_socket()?;
            match bind(&socket, &address) {
                Ok(()) => {
                    listen(&socket, BACKLOG)?;
                    return Ok(Ok(Self(socket)));
                }
                Err(Errno::ADDRINUSE) => {}
                Err(errno) => return Err(errno.into()),
            }
            match connect(&socket, &address) {
                Ok(()) => return Ok(Err(Holder::of(socket))),
                Err(Errno::CONNREFUSED) => {}
                // Too many processes wait for the holder.
                Err(Errno::AGAIN) => thread::sleep(WAIT_INTERVAL),
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Whether another process measured in the meantime, because it was forced to.
    pub fn was_disturbed(&self) -> bool {
        let mut is_disturbed = false;
        while let Ok(connection) =
            accept_with(&self.0, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
        {
            let mut byte = [0];
            is_disturbed |= rustix::io::read(&connection, &mut byte) == Ok(1) && byte == [FORCED];
        }
        is_disturbed
    }
}

impl Holder {
    fn of(socket: OwnedFd) -> Self {
        let process = socket_peercred(&socket).ok().map(|holder| holder.pid.as_raw_nonzero().get());
        let process = process.and_then(|process| u32::try_from(process).ok());
        let command = process.and_then(|process| fs::read(format!("/proc/{process}/cmdline")).ok());
        let command = command.unwrap_or_default();
        let words: Vec<_> = command
            .split(|&byte| byte == 0)
            .filter(|word| !word.is_empty())
            .map(String::from_utf8_lossy)
            .collect();
        Self { socket, process, command: words.join(" ") }
    }

    /// Waits a moment for the end of the holder. Returns whether the holder ended.
    fn has_ended(&self) -> bool {
        let interval = Timespec { tv_sec: 0, tv_nsec: WAIT_INTERVAL.subsec_nanos().into() };
        // Without requested events, poll returns when the listening socket was closed.
        let mut events = [PollFd::new(&self.socket, PollFlags::empty())];
        poll(&mut events, Some(&interval)).is_ok_and(|count| count > 0)
    }

    /// Tells the holder that this process measures nevertheless.
    pub fn disturb(&self) {
        // Fails if the holder ended.
        let _ = rustix::io::write(&self.socket, &[FORCED]);
    }

    /// Whether the holder started this process, directly or not: the holder waits for this process,
    /// so that waiting for the holder would never end.
    pub fn is_ancestor(&self) -> bool {
        let mut process = std::process::id();
        while let Some(parent) = parent_of(process) {
            if Some(parent) == self.process {
                return true;
            }
            process = parent;
        }
        false
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// The parent of a process; `None` at the first process, or if `/proc` does not show it.
fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name is in parentheses and may contain any byte. The state and the parent follow.
    let parent = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()?;
    (parent > 0 && parent != process).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the name is the machine's.
    #[test]
    fn one_process_has_the_lock_and_learns_of_a_forced_measurement() {
        let Ok(lock) = MeasurementLock::try_acquire().unwrap() else {
            eprintln!("SKIPPED: another measurement runs");
            return;
        };
        assert!(!lock.was_disturbed());
        let holder = MeasurementLock::try_acquire().unwrap().unwrap_err();
        assert_eq!(holder.process, Some(std::process::id()));
        assert!(holder.command.contains("haul_soak"), "{}", holder.command);
        assert!(!lock.was_disturbed(), "a process that only asks disturbs nothing");
        holder.disturb();
        assert!(lock.was_disturbed());
        drop(lock);
        assert!(MeasurementLock::try_acquire().unwrap().is_ok());
    }

    #[test]
    fn the_ancestors_of_this_process_are_known() {
        let parent = parent_of(std::process::id());
        assert_eq!(parent, std::os::unix::process::parent_id().into());
    }
}
