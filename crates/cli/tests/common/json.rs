//! Parses the JSON output of the program under test.

use super::command::run;
use serde_json::Value;
use std::process::Command;

/// Runs the command and parses the JSON on its standard output.
pub fn json(command: &mut Command) -> Value {
    let (output, transcript) = run(command);
    assert!(output.status.success(), "{transcript}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {transcript}"))
}
