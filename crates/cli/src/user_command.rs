//! The command that a user names after `--`: signals for it, its exit code, and the failure to
//! start it, as a shell reports both.

use crate::output::Failure;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpgid, getpgrp, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::emulate_default_handler;
use signal_hook::low_level::siginfo::{Cause, Origin};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The time that a command has to end after SIGTERM was passed on. Then it is killed.
const END_MAX: Duration = Duration::from_secs(10);

/// Passes signals on to a running command.
///
/// While this exists, SIGINT, SIGTERM, SIGHUP and SIGQUIT do not end this process, and later they
/// do again. A signal that this process ignores (`nohup`) stays ignored, and so does the command. A
/// signal of the terminal (Ctrl-C) is not passed on to a command in the same process group, because
/// the terminal sends it there.
pub struct PassedSignals(Arc<Mutex<Target>>);

/// The command to which signals are passed on.
#[derive(Default)]
struct Target {
    /// The running command. `None` before it is started and after it ended.
    command: Option<Pid>,
    /// A signal that arrived while no command ran.
    pending: Option<Signal>,
    /// Whether no further command is started, so that a signal ends this process.
    is_over: bool,
}

impl PassedSignals {
    /// Catches the signals. Call it before the command is started.
    pub fn catch() -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("cannot handle signals: {error}"));
        let ignored = ignored_signals();
        let caught = [SIGINT, SIGTERM, SIGHUP, SIGQUIT].into_iter();
        let caught = caught.filter(|signal| ignored & (1 << (signal - 1)) == 0);
        let mut signals = SignalsInfo::<WithOrigin>::new(caught).map_err(failed)?;
        let target = Arc::<Mutex<Target>>::default();
        let of_thread = Arc::clone(&target);
        thread::Builder::new()
            .name("haul-signals".into())
            .spawn(move || signals.forever().for_each(|origin| receive(&origin, &of_thread)))
            .map_err(failed)?;
        Ok(Self(target))
    }

    /// Waits until a command ends. The command gets a signal that arrived before it started.
    pub fn wait(&self, command: Child) -> io::Result<ExitStatus> {
        self.wait_until_ended(command, |process| {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(process), options) {}
        })
    }

    /// Like [`PassedSignals::wait`]. `until_ended` returns when the process ended, and leaves the
    /// process to be waited for.
    pub fn wait_until_ended(
        &self,
        mut command: Child,
        until_ended: impl FnOnce(Pid),
    ) -> io::Result<ExitStatus> {
        let process = Pid::from_child(&command);
        let pending = {
            let mut target = lock(&self.0);
            target.command = Some(process);
            target.pending.take()
        };
        if let Some(signal) = pending {
            pass_on(signal, process, &self.0);
        }
        // The process keeps its ID until it is waited for below, so no signal reaches another one.
        until_ended(process);
        lock(&self.0).command = None;
        command.wait()
    }

    /// A signal that arrived while no command ran.
    pub fn take_pending(&self) -> Option<Signal> {
        lock(&self.0).pending.take()
    }
}

impl Drop for PassedSignals {
    fn drop(&mut self) {
        lock(&self.0).is_over = true;
    }
}

/// The signals that this process ignores, as the kernel's mask: bit 0 is signal 1. 0 if `/proc`
/// does not show them.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn lock(target: &Mutex<Target>) -> MutexGuard<'_, Target> {
    target.lock().unwrap_or_else(PoisonError::into_inner)
}

fn receive(origin: &Origin, target: &Arc<Mutex<Target>>) {
    let Some(signal) = Signal::from_named_raw(origin.signal) else { return };
    let process = {
        let mut locked = lock(target);
        if locked.is_over {
            // Ends this process, unless the signal has another default.
            let _ = emulate_default_handler(origin.signal);
        }
        if locked.command.is_none() {
            locked.pending = Some(signal);
        }
        locked.command
    };
    let Some(process) = process else { return };
    let is_of_terminal = matches!(origin.cause, Cause::Kernel);
    let is_in_own_group = getpgid(Some(process)).is_ok_and(|group| group != getpgrp());
    if !is_of_terminal || is_in_own_group {
        pass_on(signal, process, target);
    }
}

/// Sends a signal to the command, if it still runs. After SIGTERM the command is killed if it does
/// not end in time. (Services reload at SIGHUP.)
fn pass_on(signal: Signal, process: Pid, target: &Arc<Mutex<Target>>) {
    // Returns whether the command runs and got the signal.
    let send = move |signal, target: &Mutex<Target>| {
        let locked = lock(target);
        let sent = (locked.command == Some(process)).then(|| kill_process(process, signal));
        if let Some(Err(errno)) = sent {
            // A program that changes its user, such as sudo, gets no signals of other users.
            eprintln!("haul: the command got no signal {}: {errno}", signal.as_raw());
        }
        matches!(sent, Some(Ok(())))
    };
    if send(signal, target) && signal == Signal::TERM {
        let target = Arc::clone(target);
        let kill = move || {
            thread::sleep(END_MAX);
            if send(Signal::KILL, &target) {
                eprintln!("haul: the command did not end within {END_MAX:?}, and was killed");
            }
        };
        if let Err(error) = thread::Builder::new().spawn(kill) {
            eprintln!("haul: the command is not killed if it does not end: {error}");
        }
    }
}

/// The failure to start a command, with the exit code of a shell: 127 if it was not found, else
/// 126.
pub fn start_failure(program: &OsStr, error: &io::Error) -> Failure {
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    Failure::with_code(format!("cannot run {}: {error}", program.display()), code)
}

/// The exit code of a command as a shell reports it: its own, or 128 plus the signal's number.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        // SIGTERM has number 15.
        assert_eq!(exit_code(ExitStatus::from_raw(15)), 143);
    }
}
