//! Runs the `haul` program under test.

use std::process::{Command, Output};

/// Returns a command that runs the program under test with these arguments.
pub fn haul(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.args(arguments);
    command
}

/// Runs the command. Returns its output, and a transcript of it for the messages of assertions.
///
/// The message that haul waits for another measurement is only in the transcript, because the tests
/// do not depend on what else runs on the machine.
pub fn run(command: &mut Command) -> (Output, String) {
    let mut output = command.output().unwrap();
    let transcript = format!(
        "{command:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let is_kept = |line: &&[u8]| !line.starts_with(b"haul: waiting until ");
    let lines = output.stderr.split_inclusive(|&byte| byte == b'\n').filter(is_kept);
    output.stderr = lines.collect::<Vec<_>>().concat();
    (output, transcript)
}
