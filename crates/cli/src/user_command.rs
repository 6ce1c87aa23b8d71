//! The command that a user names after `--`: signals for it, its exit code, and the failure to
//! start it, as a shell reports both.

use crate::output::Failure;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::iterator::{Handle, SignalsInfo};
use signal_hook::low_level::siginfo::{Cause, Origin};
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The time that a command has to end after SIGTERM or SIGHUP was passed on. Then it is killed.
const END_MAX: Duration = Duration::from_secs(10);

/// Passes signals on to a running command.
///
/// From now on SIGINT, SIGTERM, SIGHUP and SIGQUIT do not end this process. A signal of the
/// terminal (Ctrl-C) is not passed on, because the terminal sends it to the command, which is in
/// the same process group.
pub struct PassedSignals {
    /// The running command. `None` before it is started and after it ended.
    command: Arc<Mutex<Option<Pid>>>,
    handle: Handle,
}

impl PassedSignals {
    /// Catches the signals. Call it before the command is started.
    pub fn catch() -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("cannot handle signals: {error}"));
        let mut signals =
            SignalsInfo::<WithOrigin>::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT]).map_err(failed)?;
        let (command, handle) = (Arc::new(Mutex::new(None)), signals.handle());
        let target = Arc::clone(&command);
        thread::Builder::new()
            .name("haul-signals".into())
            .spawn(move || signals.forever().for_each(|origin| pass_on(&origin, &target)))
            .map_err(failed)?;
        Ok(Self { command, handle })
    }

    /// Waits until a command ends.
    pub fn wait(&self, mut command: Child) -> io::Result<ExitStatus> {
        let process = Pid::from_child(&command);
        *self.command.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
        // The process keeps its ID until it is waited for below, so no signal reaches another one.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(process), options) {}
        *self.command.lock().unwrap_or_else(PoisonError::into_inner) = None;
        command.wait()
    }
}

impl Drop for PassedSignals {
    fn drop(&mut self) {
        self.handle.close();
    }
}

fn pass_on(origin: &Origin, target: &Arc<Mutex<Option<Pid>>>) {
    let Some(signal) = Signal::from_named_raw(origin.signal) else { return };
    if matches!(origin.cause, Cause::Kernel) {
        return;
    }
    let command = target.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(process) = *command else { return };
    // Fails if the command changed its user.
    let _ = kill_process(process, signal);
    if matches!(signal, Signal::TERM | Signal::HUP) {
        let target = Arc::clone(target);
        thread::spawn(move || {
            thread::sleep(END_MAX);
            let command = target.lock().unwrap_or_else(PoisonError::into_inner);
            if *command == Some(process) {
                eprintln!("haul: the command did not end within {END_MAX:?}, and is killed");
                let _ = kill_process(process, Signal::KILL);
            }
        });
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
