//! The command that a user names after `--`: its exit code, and the failure to start it, as a shell
//! reports both.

use crate::output::Failure;
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

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
