//! One measurement at a time: a meter takes all the time that a CPU is idle, so two meters read
//! each other as load.
//!
//! A measuring process listens on an abstract Unix socket, whose name one process at a time can
//! have. The kernel frees the name when the process ends in any way. A second process connects to
//! the socket to learn which process measures.
//!
//! Abstract names belong to a network namespace, so measurements in two containers do not notice
//! each other.

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, sockopt::socket_peercred,
};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;

const NAME: &[u8] = b"haul-measurement";
/// Connections that wait to be accepted. A process that is refused one only learns less.
const BACKLOG: i32 = 128;
/// The byte by which a process states that it measures nevertheless.
const FORCED: u8 = b'f';

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
        for _ in 0..10 {
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
