//! Ends a process together with the process that started it.
//!
//! The parent-death signal ([`crate::child::dies_with_parent`]) is not enough. The kernel clears
//! the signal when a program with file capabilities or the set-user-ID bit is executed, and when a
//! process gains capabilities. A pipe always works, because its other end closes whenever
//! the parent ends. So the parent makes a pipe the standard input of the child, and the child exits
//! when the pipe is closed.
//!
//! A stopped parent (Ctrl-Z, `SIGSTOP`) keeps its pipe open, so the state of the parent is read
//! from `/proc`. If `/proc` does not show the parent (`hidepid`), a stopped parent is not noticed.

use crate::process_stat::ProcessStat;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, getppid};
use std::io;
use std::thread;
use std::time::Duration;

/// How often the parent's state is read. Reading takes about 10 µs, which is 0.004 % of a CPU.
const STATE_INTERVAL: Duration = Duration::from_millis(250);

/// Starts a thread that exits this process when the other end of standard input is closed, which
/// happens at the latest when the parent ends.
///
/// Standard input must be a pipe. The thread reads no byte from it.
pub fn exit_with_parent() -> io::Result<()> {
    let wait = || {
        let input = io::stdin();
        // Without requested events, poll returns at POLLHUP and POLLERR only.
        while let Err(Errno::INTR) = poll(&mut [PollFd::new(&input, PollFlags::empty())], None) {}
        std::process::exit(1);
    };
    thread::Builder::new().name("haul-lifeline".into()).spawn(wait).map(drop)
}

/// Starts a thread that calls `report` and then exits this process when the parent is stopped.
pub fn exit_with_stopped_parent(report: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let Some(parent) = getppid() else { return Ok(()) };
    let wait = move || {
        while !is_stopped(parent) {
            thread::sleep(STATE_INTERVAL);
        }
        report();
        std::process::exit(1);
    };
    thread::Builder::new().name("haul-lifeline".into()).spawn(wait).map(drop)
}

/// Whether a process is stopped by a signal. A process that a debugger or strace holds is not.
fn is_stopped(process: Pid) -> bool {
    let process = process.as_raw_nonzero().get().unsigned_abs();
    ProcessStat::read(process).is_some_and(|stat| stat.state == 'T')
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, kill_process};
    use std::process::{Child, Command, Stdio};
    use std::time::Instant;

    fn start(line: &str) -> Child {
        Command::new("sh").args(["-c", line]).stdin(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn a_process_is_stopped_between_two_signals() {
        let mut process = start("read line");
        let id = Pid::from_child(&process);
        let wait_until = |stopped| {
            let limit = Instant::now() + Duration::from_secs(60);
            while is_stopped(id) != stopped {
                assert!(Instant::now() < limit, "the state does not become {stopped}");
                thread::sleep(Duration::from_millis(1));
            }
        };
        assert!(!is_stopped(id));
        kill_process(id, Signal::STOP).unwrap();
        wait_until(true);
        kill_process(id, Signal::CONT).unwrap();
        wait_until(false);
        drop(process.stdin.take());
        process.wait().unwrap();
        assert!(!is_stopped(id), "a process that ended is not stopped");
    }
}
