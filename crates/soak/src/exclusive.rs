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
use haul_lab_sys::peer::peer_process;
use haul_lab_sys::process_stat::ProcessStat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const NAME: &[u8] = b"haul-measurement";
/// Environment variable of a measured command: the ID of the process that measures the command.
/// That process waits for the command, so a measurement within the command must not wait.
pub const MEASURED_BY: &str = "HAUL_MEASURED_BY";
/// How often a process tries to take the lock or to reach its holder, and the time between.
const TRIES_MAX: usize = 100;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Connections of processes that wait for the holder, or asked for it. The kernel lowers the number
/// to `net.core.somaxconn`, which is 4096 since Linux 5.4.
const BACKLOG: i32 = 4096;
/// Connections that the holder keeps.
const WAITING_MAX: usize = 64;
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
    /// Whether another process measures is not known.
    Unknown(&'a io::Error),
}

/// The state of this process.
enum State {
    Unmanaged,
    Managed(Policy),
    Measuring {
        /// Absent if this process measures together with another one, or does not know.
        lock: Option<MeasurementLock>,
        /// Whether another process measured at the same time.
        is_disturbed: bool,
        /// How long this process waited.
        waited: Duration,
    },
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

/// Takes the lock before the first measurement. Waits while another process has the lock, unless
/// the policy is forced or the other process is an ancestor. Later calls do nothing.
pub fn begin() -> Result<(), SoakError> {
    let mut state = state();
    let State::Managed(policy) = &*state else { return Ok(()) };
    let start = Instant::now();
    let mut is_reported = false;
    let (lock, is_disturbed) = loop {
        let holder = match MeasurementLock::try_acquire() {
            Ok(Ok(lock)) => break (Some(lock), false),
            Ok(Err(holder)) => holder,
            // Without the lock, other measurements are not detected. This measurement runs anyway.
            Err(error) => {
                (policy.report)(Notice::Unknown(&error));
                break (None, false);
            }
        };
        if policy.is_forced || holder.awaits_this_process() {
            holder.disturb();
            (policy.report)(Notice::Together(&holder));
            break (None, true);
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
    *state = State::Measuring { lock, is_disturbed, waited: start.elapsed() };
    Ok(())
}

/// How long [`begin`] waited for another measurement.
pub fn waited() -> Duration {
    match &*state() {
        State::Measuring { waited, .. } => *waited,
        _ => Duration::ZERO,
    }
}

/// Whether another process measured at the same time, so that the figures are wrong.
pub fn is_disturbed() -> bool {
    match &mut *state() {
        State::Measuring { lock, is_disturbed, .. } => {
            *is_disturbed |= lock.as_mut().is_some_and(MeasurementLock::was_disturbed);
            *is_disturbed
        }
        _ => false,
    }
}

/// Releases the lock.
pub fn end() {
    *state() = State::Unmanaged;
}

/// The right to measure, which one process at a time has.
#[derive(Debug)]
pub struct MeasurementLock {
    listener: OwnedFd,
    /// Connections of processes that wait, and of processes that may yet state that they measure.
    waiting: Vec<OwnedFd>,
}

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
                    return Ok(Ok(Self { listener: socket, waiting: Vec::new() }));
                }
                Err(Errno::ADDRINUSE) => {}
                Err(errno) => return Err(errno.into()),
            }
            match connect(&socket, &address) {
                Ok(()) => return Ok(Err(Holder::of(socket))),
                // The holder ended, or does not listen yet; or too many processes wait for it.
                Err(Errno::CONNREFUSED | Errno::AGAIN) => thread::sleep(RETRY_INTERVAL),
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// The process that has the lock, if any has. Does not take the lock.
    pub fn holder() -> io::Result<Option<Holder>> {
        let socket = new_socket()?;
        match connect(&socket, &SocketAddrUnix::new_abstract_name(NAME)?) {
            Ok(()) => Ok(Some(Holder::of(socket))),
            Err(Errno::CONNREFUSED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Whether another process measured in the meantime, because it was forced to.
    pub fn was_disturbed(&mut self) -> bool {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        while let Ok(connection) = accept_with(&self.listener, flags) {
            self.waiting.push(connection);
        }
        let mut is_disturbed = false;
        self.waiting.retain(|connection| {
            let mut byte = [0];
            let read = rustix::io::read(connection, &mut byte);
            is_disturbed |= read == Ok(1) && byte == [FORCED];
            read == Err(Errno::AGAIN)
        });
        // A process whose connection is closed connects again.
        let surplus = self.waiting.len().saturating_sub(WAITING_MAX);
        self.waiting.drain(..surplus);
        is_disturbed
    }
}

impl Holder {
    fn of(socket: OwnedFd) -> Self {
        let process = peer_process(&socket).ok().flatten();
        let command = process.and_then(|process| fs::read(format!("/proc/{process}/cmdline")).ok());
        Self { socket, process, command: printable(&command.unwrap_or_default()) }
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

    /// Whether the holder waits for this process, so that waiting for the holder would never end:
    /// the holder is an ancestor, or measures the command that this process belongs to.
    pub fn awaits_this_process(&self) -> bool {
        if let Some(measured_by) = std::env::var_os(MEASURED_BY) {
            // In another process namespace the holder has another ID, or none.
            let is_holder = |process: u32| measured_by == *process.to_string();
            return self.process.is_none_or(is_holder) || self.is_ancestor();
        }
        self.is_ancestor()
    }

    fn is_ancestor(&self) -> bool {
        let mut process = std::process::id();
        while let Some(stat) = ProcessStat::read(process).filter(|stat| stat.parent != process) {
            if Some(stat.parent) == self.process {
                return true;
            }
            process = stat.parent;
        }
        false
    }
}

/// A command line of another user's process as one line that a terminal only prints.
fn printable(command: &[u8]) -> String {
    const CHARACTERS_MAX: usize = 120;
    let words = command.split(|&byte| byte == 0).filter(|word| !word.is_empty());
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    let line = words.join(" ");
    line.chars().filter(|character| !character.is_control()).take(CHARACTERS_MAX).collect()
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the name is the machine's.
    #[test]
    fn one_process_has_the_lock_and_learns_of_a_forced_measurement() {
        let Ok(mut lock) = MeasurementLock::try_acquire().unwrap() else {
            eprintln!("SKIPPED: another measurement runs");
            return;
        };
        assert!(!lock.was_disturbed());
        assert!(MeasurementLock::holder().unwrap().is_some());
        let holder = MeasurementLock::try_acquire().unwrap().unwrap_err();
        assert_eq!(holder.process, Some(std::process::id()));
        assert!(holder.command.contains("haul_soak"), "{}", holder.command);
        assert!(!lock.was_disturbed(), "a process that only asks disturbs nothing");
        holder.disturb();
        assert!(lock.was_disturbed());
        drop(lock);
        assert!(MeasurementLock::holder().unwrap().is_none());
        assert!(MeasurementLock::try_acquire().unwrap().is_ok());
    }

    #[test]
    fn the_command_line_of_another_user_cannot_control_a_terminal() {
        assert_eq!(printable(b"haul\0soak\x1b[2J\0\xff\0"), "haul soak[2J \u{fffd}");
        assert_eq!(printable(&[b'x'; 500]).len(), 120);
    }
}
