//! Runs the `haul` program under test.

use std::process::{Command, Output};

/// Returns a command that runs the program under test with these arguments.
pub fn haul(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.args(arguments);
    command
}

/// Runs the command. Returns its output, and a transcript of it for the messages of assertions.
pub fn run(command: &mut Command) -> (Output, String) {
    let output = command.output().unwrap();
    let transcript = format!(
        "{command:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output, transcript)
}
