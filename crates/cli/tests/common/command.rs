//! The command under test.

use std::process::{Command, Output};

/// The command under test.
pub fn haul(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.args(arguments);
    command
}

/// Its output, with its words beside an assertion that fails.
pub fn run(command: &mut Command) -> (Output, String) {
    let output = command.output().unwrap();
    let words = format!(
        "{command:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output, words)
}
