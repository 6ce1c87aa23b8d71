//! Parses the JSON output of the program under test.

use super::command::run;
use super::report::parse_report;
use serde_json::Value;
use std::process::Command;

/// Runs the command and parses the report on its standard output, which must be valid.
pub fn json(command: &mut Command) -> Value {
    let (output, transcript) = run(command);
    assert!(output.status.success(), "{transcript}");
    parse_report(&output.stdout).unwrap_or_else(|error| panic!("{error}: {transcript}"))
}
